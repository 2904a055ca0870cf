"""Where activations are between forward and backward. No torch. Source: MEMO 4.1 and 4.3.4; SPPO 4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from memo.config.layer import INPUT, KEYS_VALUES, SPLIT_ROWS
from memo.config.msp import Help, guest_number
from memo.schedule.keys import KeyPlaces, LaidOut, key_places, keys_laid_out
from memo.schedule.order import STREAM_PLACES, ForwardOrder, InOrder, forward_order
from memo.schedule.program import Fates, Program, Surroundings
from memo.schedule.step import Place, Region, Unit
from memo.schedule.waits import Schedule, schedule

Rows = Mapping[str, int | tuple[int, ...]]  # of all subsequences, an equal part of each; or one by one


@dataclass(frozen=True)
class Placement(Surroundings, InOrder):
    """Says where the skeletal activations of the units are between their forward and their backward.

    Unit k, by its place in the order of the forward, computes in buffer k % n_buffers. Of a swapped unit,
    `kept[name]` of the n rows of each tensor survive: `x` on the device if x_stays, all else in the host
    slab. They are the first rows in an even buffer and the last in an odd one. Where there are two buffers,
    and only then, their other rows, which are recomputed anyway, share memory:

        buffer 0   kept rows | shared rows                          n + kept rows in all, not 2 n
        buffer 1               shared rows | kept rows

    Of the rows that survive, the last `stays[name]` are copied to the region "resident" on the device instead
    (SPPO). The last n_buffers units are not swapped, and are whole; but with two buffers the last unit takes
    the shared rows of the last but one, which has to recompute them. `input_only` swapped units keep x alone
    and recompute their attention too: the earliest subsequences of all layers first, where it costs least.
    Modes: keep (a buffer for each unit), recompute (one, x_stays, only inputs), swap, memo.

    With several subsequences, `cuts`, keys and values are in none of these buffers, nor is the stream between
    layers (memo/schedule/program.py). Layer by layer a unit whose input is in a stream that is copied sends
    no x. Rows that other stages compute, `lent`, are in none of the stage's buffers for units; those of
    `guests` are units like its own, of a subsequence each (memo/schedule/help.py).
    """

    n_layer: int
    n_buffers: int
    n_rows: int  # of a rank's own, of all subsequences
    kept: Rows = field(default_factory=dict)  # {tensor: of n_rows}; all rows of those it does not name
    input_only: int = 0  # with any, `kept` names all tensors but keys and values
    x_stays: bool = False
    cuts: tuple[int, ...] = ()  # rows of each subsequence, which add up to n_rows; empty: there is one
    order: str = "layer"
    stays: Rows = field(default_factory=dict)  # {tensor: of n_rows}: survivors whose copy is on the device
    dealt: int = 1  # how often each head of keys lies in the pieces of all ranks (layer.keys_dealt)

    @cached_property
    def subsequences(self) -> int:
        return max(1, len(self.cuts))

    @property
    def what(self) -> str:
        return "units" if self.several else "layers"

    @cached_property
    def n_units(self) -> int:
        return self.n_layer * (self.subsequences + self.lead) + sum(piece.layers for piece in self.guests)

    @cached_property
    def forward_order(self) -> ForwardOrder:
        return forward_order(self.n_layer, self.subsequences, self.order, self.guests, self.lead, self.early)

    @cached_property
    def guest_of(self) -> dict[int, Help]:
        """Finds a guest by its number."""
        return {guest_number(piece, self.subsequences): piece for piece in self.guests}

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lists the rows of a unit at each subsequence, without those that others compute, and of guests."""
        own = [*(self.cuts or (self.n_rows,))]
        for piece in self.lent:
            own[piece.subsequence] -= piece.rows
        return *own, *(piece.rows for piece in self.guests)

    @cached_property
    def partners(self) -> list[int]:
        """Lists the stages that compute for this one, and those for which it computes."""
        return sorted({piece.stage for piece in self.guests} | {piece.helper for piece in self.lent})

    def rows(self, k: int) -> int:
        return self.lengths[self.kinds[k]] if self.several else self.n_rows

    def apart(self, name: str) -> bool:
        """Says whether a tensor is in no buffer: keys and values, where there are several subsequences."""
        return self.several and name in KEYS_VALUES

    def part(self, i: int, whole: int | tuple[int, ...]) -> int:
        """Counts rows of a unit of kind i: whole[i], or lengths[i] * whole / n_rows, rounded."""
        if isinstance(whole, tuple):
            return whole[i]
        return rows(whole / self.n_rows, self.lengths[i], SPLIT_ROWS) if self.several else whole

    @property
    def n_inputs(self) -> int:
        """Counts the buffers for the units' inputs: one more where a unit writes the next one's input."""
        return (self.n_units if self.x_stays else self.n_buffers) + (not self.several)

    @cached_property
    def n_swapped(self) -> int:
        """Counts the swapped units: where others have the buffers before the backward all, or none."""
        return self.n_units - self.n_buffers * (not self.lead or self.n_buffers == self.n_units)

    @cached_property
    def followed(self) -> set[tuple[int, ...]]:
        """Collects for each swapped unit its kind, an index in `lengths`, and the kinds of the units behind
        it during whose forward its copy may run: n_buffers - 1, at least one, at most those of a layer."""
        ahead, kinds = min(max(1, self.n_buffers - 1), self.subsequences), self.kinds
        return {*zip(*(kinds[j:max(0, self.n_swapped) + j] for j in range(1 + ahead)), strict=False)}

    @cached_property
    def gives_up(self) -> frozenset[int]:
        """Numbers the swapped units of which nothing but the input survives."""
        if not self.input_only:
            return frozenset()
        return frozenset(sorted(range(max(0, self.n_swapped)), key=self.kinds.__getitem__)[:self.input_only])

    def buffers_of(self, name: str) -> list[tuple[int, int]]:
        """Lists (first row, rows) of each buffer of a tensor, from the begin of the tensor's memory."""
        if name == INPUT and not self.several:  # a unit writes the next one's
            return [(b * self.n_rows, self.n_rows) for b in range(self.n_inputs)]
        like = self.n_inputs if name == INPUT else self.n_buffers, self.kept.get(name, self.n_rows)
        if like not in self.buffers_known:
            self.buffers_known[like] = self.find_buffers(*like)
        return self.buffers_known[like]

    @cached_property
    def buffers_known(self) -> dict[tuple[int, int | tuple[int, ...]], list[tuple[int, int]]]:
        return {}

    def find_buffers(self, n: int, kept: int | tuple[int, ...]) -> list[tuple[int, int]]:
        """Lists (first row, rows) of n buffers of which so many rows survive."""
        found, lengths = buffers_in_turns(self.forward_order, self.lengths, n), self.lengths
        if n != 2:
            return found
        if not isinstance(kept, tuple):
            kind = {length: i for i, length in enumerate(lengths)}  # to count for each length once
            kept = tuple(map({n: self.part(i, kept) for n, i in kind.items()}.__getitem__, lengths))
        # neighbours take turns: neither may reach into what the other keeps
        (_, even), (_, odd), pairs = *found, self.forward_order.neighbours
        span = max(even, odd, *(max(lengths[i] + kept[j], lengths[j] + kept[i]) for i, j in pairs))
        return [(0, even), (span - odd, odd)]

    def place(self, k: int, name: str) -> int:
        """Finds the first row of unit k's `name` in its memory: a buffer's first rows, an odd one's last."""
        places = self.buffers_of(name)
        first, length = places[turn := self.forward_order.buffer(k, len(places))]
        return first + (length - self.rows(k)) * (len(places) == 2 and turn)

    def first_kept(self, k: int, name: str) -> tuple[int, int]:
        """Finds (how many rows of tensor `name` of unit k survive, the first of them)."""
        n = self.rows(k)
        if k in self.gives_up and name != INPUT:
            rows = 0
        elif k < self.n_swapped or (k < self.n_units - 1 and self.n_buffers == 2):
            rows = self.part(self.kinds[k], self.kept.get(name, self.n_rows))
        else:
            rows = n
        return rows, (n - rows) * (self.forward_order.buffer(k, self.n_buffers) % 2)

    def missing(self, k: int) -> dict[str, slice]:
        """Finds {tensor: slice of its rows that unit k recomputes}, of the tensors that lack any."""
        n, found = self.rows(k), {}
        for name in self.kept:
            rows, first = self.first_kept(k, name)
            if rows < n and not self.apart(name):
                found[name] = slice(0, first) if first else slice(rows, n)
        return found

    @cached_property
    def stream_rows(self) -> "StreamRows":
        """Finds the StreamRows; without a backward all layers' have the same places."""
        if not self.several or self.stream != "copied":
            return StreamRows()
        return stream_rows(self.forward_order, self.cuts, self.kept.get(INPUT) == 0)

    @property
    def keys_may_leave(self) -> bool:
        """Says whether keys and values may give way to later ones: layer by layer, or where layers slide, not
        where those of two sequences are there."""
        return self.several and not self.follows and (self.order == "layer" or bool(self.near))

    @property
    def key_places(self) -> KeyPlaces:
        return key_places(self.forward_order, self.keys, self.near)

    @property
    def keys_laid_out(self) -> tuple[LaidOut, LaidOut]:
        """Lays out the rows of keys and values, and of the sums of their gradients."""
        return keys_laid_out(self.key_places, self.cuts + self.cuts[:self.lead])

    @property
    def own_stream_rows(self) -> int:
        """Counts the rows of the stream's memory, beside those of guests."""
        early = 2 * self.early * max(self.cuts)
        return early + (self.n_rows if self.stream == "whole" else STREAM_PLACES * max(self.cuts))

    def first_row(self, place: Place) -> int:
        """Finds the first row of a place in the memory of the stream."""
        match place.region, place.at:
            case Region.GUEST_STREAM, (number,):
                before = self.guests[:[*self.guest_of].index(number)]
                return self.own_stream_rows + sum(piece.rows for piece in before)
            case Region.STREAM, (turn,) if self.stream != "whole":
                return turn * max(self.cuts)
        early = max(0, place.at[0] - self.subsequences)
        return sum(self.cuts[:place.at[0]]) + early * max(self.cuts)  # of a stream that is whole

    @cached_property
    def like(self) -> list[int]:
        """Finds for each unit the first one of its subsequence of which the same rows survive, in the same
        place of a buffer."""
        return self.first_alike(range(len(self.lengths)))

    def first_alike(self, shapes: Sequence[object]) -> list[int]:
        """Finds for each unit the first one alike, where `shapes` are equal of subsequences that are."""
        firsts: dict[tuple[object, ...], int] = {}
        swapped, last, gives_up = self.n_swapped, self.n_units - 1, self.gives_up
        buffer, n = self.forward_order.buffer, self.n_buffers
        return [firsts.setdefault((shapes[i], k < swapped, k in gives_up, buffer(k, n) % 2, k < last,
                                   unit in self.stream_rows), k)
                for k, (i, unit) in enumerate(zip(self.kinds, self.units, strict=True))]

    @cached_property
    def program(self) -> Program:
        """Makes the program of a training step."""
        swapped = frozenset(range(self.n_swapped))
        copied = swapped - (self.gives_up if self.x_stays else frozenset())
        lacking = {k for k in {*self.like} if self.missing(k)}
        rebuilt = frozenset(k for k, like in enumerate(self.like) if like in lacking)
        around = {f.name: getattr(self, f.name) for f in fields(Surroundings)}
        fates = Fates(self.n_buffers, copied, rebuilt, self.gives_up, self.x_stays, **around)
        return Program(fates, self.n_layer, self.subsequences, self.order)

    def schedule(self, trains: bool = True) -> Schedule:
        """Makes the schedule of a training step; without `trains`, of a forward that keeps nothing."""
        return schedule(self.program if trains else replace(self.program, trains=False))


class StreamRows(dict[Unit, tuple[int, int]]):
    """Holds {unit: (first row in the slab, rows)} of the stream below its layer, or above the last."""

    @cached_property
    def end(self) -> int:
        return max(map(sum, self.values()), default=0)


@lru_cache(16)  # many placements of a search have the same
def stream_rows(order: ForwardOrder, cuts: tuple[int, ...], forward_only: bool) -> StreamRows:
    """Finds the StreamRows of a stream that is copied."""
    units, starts = order.stream_leaves, [0, *accumulate(cuts)]
    lengths = [cuts[i] for _, i in units]
    firsts = [starts[i] for _, i in units] if forward_only else accumulate(lengths, initial=0)
    return StreamRows(zip(units, zip(firsts, lengths, strict=False), strict=True))


@lru_cache(128)  # many placements of a search have the same
def buffers_in_turns(order: ForwardOrder, lengths: tuple[int, ...], n: int) -> list[tuple[int, int]]:
    """Lists (first row, rows) of n buffers, one after the other, that units of `lengths` take in turns."""
    longest = [0] * n
    for k, i in enumerate(order.kinds):
        longest[order.buffer(k, n)] = max(lengths[i], longest[order.buffer(k, n)])
    return list(zip(accumulate(longest, initial=0), longest, strict=False))


def rows(fraction: float, n_rows: int, granularity: int) -> int:
    """Counts the rows, a fraction of `n_rows`: a multiple that leaves at least `granularity`, or all."""
    if fraction >= 1:
        return n_rows
    most = max(0, n_rows - granularity)
    wanted = min(fraction * n_rows * (1 + 1e-12), most)  # 0.29 of 100 is 29, not 28
    return int(wanted / granularity) * granularity
