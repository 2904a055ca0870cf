"""Where keys and values of several subsequences lie on the device, and the sums of their gradients. No torch.

Units that have the same place have it in turns: each writes over the one before. Layer by layer one layer's
lie there, a subsequence (a piece) at a time. The backward goes from the last piece to the first; its first
unit of a layer reads all pieces while the layer above still needs its first, which so has two places. Of a
layer with a sliding window a unit reads the last few pieces alone, so few places serve:

    all stay                       a place for each unit
    layer by layer                 a place for each piece, two for the first
    ... where all layers slide     as many as a unit reads pieces, for all units in turns; one more if keys
                                   are copied: while some are read, another piece arrives
    subsequence by subsequence     in each layer as many as its units read pieces
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from memo.schedule.order import ForwardOrder
from memo.schedule.step import Unit

At = tuple[int, ...]


@dataclass(frozen=True)
class KeyPlaces:
    """States which place each unit has. `keys`, `near`: see Surroundings in memo/schedule/program.py."""

    order: ForwardOrder
    keys: str
    near: tuple[int, ...] = ()

    @cached_property
    def units(self) -> list[Unit]:
        """Lists the stage's own units in the order of the forward."""
        return [unit for unit in self.order.units if unit.subsequence < self.order.subsequences]

    def pieces_read(self, layer: int) -> int:
        """Counts the pieces that a unit of a layer reads at most, its own among them."""
        return self.near[layer] if self.near else self.order.subsequences

    def oldest(self, unit: Unit) -> int:
        """Finds the first piece that a unit reads."""
        return max(0, self.order.piece(unit) + 1 - self.pieces_read(unit.layer))

    @cached_property
    def most_read(self) -> int:
        return max(map(self.pieces_read, range(self.order.layers)))

    @cached_property
    def turns(self) -> int:
        """Counts the places that units of all layers take in turns, layer by layer; 0: not all slide."""
        return (self.most_read + (self.keys == "copied")) * (self.most_read < self.order.subsequences)

    def at(self, unit: Unit) -> At:
        """Finds the place of a unit's keys and values."""
        layer, i = unit
        if self.keys == "stay":
            return self.order.home(unit)
        if self.order.by == "subsequence":
            return layer, i % self.pieces_read(layer)
        if self.turns:
            return ((layer * self.order.subsequences + i) % self.turns,)
        return (i,) if i else (0, layer % 2)

    def sums_at(self, unit: Unit) -> At:
        """Finds the place of the sums of their gradients, which no other layer adds to meanwhile."""
        layer, i = unit.layer, self.order.piece(unit)
        if self.order.by == "subsequence":
            return layer, i % self.pieces_read(layer)
        return (i % self.most_read,)

    @cached_property
    def before(self) -> dict[Unit, Unit]:
        """Finds whose keys and values had the place of a unit's right before, where any had."""
        last, found = dict[At, Unit](), dict[Unit, Unit]()
        for unit in self.units:
            if (at := self.at(unit)) in last:
                found[unit] = last[at]
            last[at] = unit
        return found

    @cached_property
    def leaving(self) -> set[Unit]:
        """Collects the units whose keys and values give way to those of a later unit."""
        return {*self.before.values()}

    @cached_property
    def leaving_pieces(self) -> Counter[int]:
        """Counts these units by their subsequence."""
        return Counter(unit.subsequence for unit in self.leaving)

    def made_behind(self, unit: Unit) -> Unit | None:
        """Finds whose keys a sweep makes again behind the backward of a unit, where these do not stay."""
        if self.order.by == "subsequence" or self.turns:
            return self.before.get(unit)
        # of the first piece `before` is two layers below: its input, and weights, would have to come sooner
        below = Unit(unit.layer - 1, unit.subsequence)
        return below if below in self.leaving else None

    def laid_out(self, at: Callable[[Unit], At], cuts: tuple[int, ...]) -> "LaidOut":
        """Lays places of pieces with so many rows out, one after the other."""
        longest = dict[At, int]()
        for layer in range(self.order.layers):
            for i, n in enumerate(cuts):
                place = at(Unit(layer, i))
                longest[place] = max(n, longest.get(place, 0))
        return LaidOut(dict(zip(longest, accumulate(longest.values(), initial=0), strict=False)),
                       sum(longest.values()))


class LaidOut(NamedTuple):
    """Holds the first row of each place, and the rows of all."""

    first: dict[At, int]
    rows: int


key_places = lru_cache(64)(KeyPlaces)  # many placements of a search have the same


@lru_cache(64)
def keys_laid_out(places: KeyPlaces, cuts: tuple[int, ...]) -> tuple[LaidOut, LaidOut]:
    """Lays out keys and values, and the sums of their gradients."""
    return places.laid_out(places.at, cuts), places.laid_out(places.sums_at, cuts)
