"""The units of a stage in the order of the forward, and what follows from this order alone. No torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from memo.config.msp import Shares, guest_number, guest_units
from memo.schedule.step import Unit

STREAM_PLACES = 3  # of a subsequence each, where the stream is copied, or sent to the next stage


@dataclass(frozen=True)
class ForwardOrder:
    """Holds the order of a stage's units: layer by layer, or subsequence by subsequence. The backward's is
    the reverse. A unit's kind is the place of its subsequence, or guest, in Placement.lengths."""

    layers: int
    subsequences: int
    by: str
    guests: Shares

    @cached_property
    def units(self) -> list[Unit]:
        """Lists the units; those of guests come before the stage's own, and behind them."""
        subsequences = range(self.subsequences)
        if self.by == "layer":
            return [Unit(layer, i) for layer in range(self.layers) for i in subsequences]
        before, behind = ([Unit(*unit) for unit in guest_units(self.guests, self.subsequences, way)]
                          for way in (True, False))
        return [*before, *(Unit(layer, i) for i in subsequences for layer in range(self.layers)), *behind]

    @cached_property
    def number(self) -> dict[Unit, int]:
        return {unit: k for k, unit in enumerate(self.units)}

    @cached_property
    def kinds(self) -> list[int]:
        guests = (guest_number(piece, self.subsequences) for piece in self.guests)
        kind = {number: k for k, number in enumerate([*range(self.subsequences), *guests])}
        return [kind[i] for _, i in self.units]

    @cached_property
    def neighbours(self) -> set[tuple[int, int]]:
        """Collects the kinds of units that are one after the other."""
        return {*pairwise(self.kinds)}

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
