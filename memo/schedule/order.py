"""The units of a stage in the order of the forward, and what follows from this order alone. No torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

from memo.config.msp import Shares, guest_number, guest_units
from memo.schedule.step import Unit

STREAM_PLACES = 3  # of a subsequence each, where the stream is copied, or sent to the next stage


@dataclass(frozen=True)
class ForwardOrder:
    """Holds the order of a stage's units: layer by layer, or subsequence by subsequence. The backward's is
    the reverse. A unit's kind is the place of its subsequence, or guest, in Placement.lengths.

    `lead`, `early`: of the next sequence, as in memo/schedule/program.py. With any, sequences follow each
    other, and two take turns: the second one's subsequences count on, from `subsequences`.
    """

    layers: int
    subsequences: int
    by: str
    guests: Shares
    lead: int = 0
    early: int = 0

    @property
    def follows(self) -> bool:
        """Says whether a sequence begins before the one ahead of it ends."""
        return self.lead + self.early > 0

    @cached_property
    def sequences(self) -> list[list[Unit]]:
        """Lists the units of each sequence that takes turns; guests' before the stage's own, and behind."""
        subsequences = range(self.subsequences)
        if self.by == "layer":
            return [[Unit(layer, i) for layer in range(self.layers) for i in subsequences]]
        before, behind = ([Unit(*unit) for unit in guest_units(self.guests, self.subsequences, way)]
                          for way in (True, False))
        own = [Unit(layer, i) for i in subsequences for layer in range(self.layers)]
        second = [Unit(layer, self.subsequences + i) for layer, i in own]
        return [[*before, *own, *behind]] + [second] * self.follows

    @cached_property
    def units(self) -> list[Unit]:
        """Lists the units that have memory of their own: of a second sequence those that are led."""
        first, *second = self.sequences
        return [*first, *(unit for units in second for unit in units[:self.lead * self.layers])]

    @cached_property
    def number(self) -> dict[Unit, int]:
        """Numbers the units; the others of a second sequence have the memory of the first one's."""
        first, *second = self.sequences
        later = range(self.lead * self.layers, len(first))
        return {unit: k for k, unit in enumerate(self.units)} | {
            units[k]: k for units in second for k in later}

    def buffer(self, k: int, n: int) -> int:
        """Finds the buffer of unit k: a sequence's units take n of them in turns, or each has its own."""
        return (k % len(self.sequences[0]) if self.lead and n < len(self.units) else k) % n

    def home(self, unit: Unit) -> Unit:
        """Finds the unit whose memory one has."""
        return self.units[self.number[unit]] if self.follows else unit

    def piece(self, unit: Unit) -> int:
        """Finds the place of a unit's subsequence in its sequence."""
        return unit.subsequence % self.subsequences if self.follows else unit.subsequence

    @cached_property
    def kinds(self) -> list[int]:
        guests = (guest_number(piece, self.subsequences) for piece in self.guests)
        kind = {number: k for k, number in enumerate([*range(self.subsequences), *guests])}
        return [kind[self.piece(unit)] for unit in self.units]

    @cached_property
    def neighbours(self) -> set[tuple[int, int]]:
        """Collects the kinds of units that are one after the other; sequences that take turns have many."""
        return {*(product({*self.kinds}, repeat=2) if self.lead else pairwise(self.kinds))}

    @cached_property
    def stream_leaves(self) -> list[Unit]:
        """Lists the units of which what lies below them leaves the device, and its gradient, where the stream
        is copied; of layer `layers`, no unit, the head's gradients, but for the last STREAM_PLACES."""
        heads = [Unit(self.layers, i) for i in range(self.subsequences - STREAM_PLACES)]
        return [unit for unit in self.units if unit.layer > 0 and self.by == "layer"] + heads


forward_order = lru_cache(32)(ForwardOrder)  # many placements of a search have the same


class InOrder(ABC):
    """Something whose units, their numbers and kinds are those of a `forward_order`."""

    @property
    @abstractmethod
    def forward_order(self) -> ForwardOrder: ...

    @property
    def follows(self) -> bool:
        return self.forward_order.follows

    @cached_property
    def several(self) -> bool:
        """Says whether there are several subsequences, and so keys and values apart from their units."""
        return self.forward_order.subsequences > 1

    @cached_property
    def units(self) -> list[Unit]:
        """Lists the units in the order of the forward; a guest's number stands for its subsequence."""
        return self.forward_order.units

    @cached_property
    def number(self) -> dict[Unit, int]:
        return self.forward_order.number

    @cached_property
    def kinds(self) -> list[int]:
        return self.forward_order.kinds
