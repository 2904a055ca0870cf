"""Where the skeletal activations of all units are between their forward and their backward. No torch.
Source: MEMO 4.1 and 4.3.2; SPPO 4 for subsequences."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from memo.layer import INPUT, KEYS_VALUES, SPLIT_ROWS, Tensor
from memo.msp import Help, Shares, guest_number
from memo.swap.schedule import (
    STREAM_PLACES,
    SWEEP_PLACES,
    Fates,
    keys_leave,
    stream_leaves,
    swept_inputs,
    units_in_order,
)

Rows = Mapping[str, int | tuple[int, ...]]  # of all subsequences, an equal part of each; or one by one


@dataclass(frozen=True)
class Placement:
    """Where the skeletal activations of the units are between their forward and their backward. Unit k, by
    its place in the order of the forward, is a layer at one subsequence; with one subsequence it is layer k.

    Unit k computes in buffer k % n_buffers. Of a swapped unit, `kept[name]` of the n rows of each tensor
    survive: `x` on the device if x_stays, all else in the host slab. They are the first rows in an even
    buffer and the last in an odd one, and two buffers lie in memory so that their other rows, which are
    recomputed anyway, are the same:

        buffer 0   kept rows | shared rows                          n + kept rows in all, not 2 n
        buffer 1               shared rows | kept rows

    Of the rows that survive, the last `stays[name]` have their copy on the device in the place of the host
    (SPPO's rest). The last n_buffers units are not swapped, only the last one is whole. A swapped unit that
    keeps x alone recomputes its attention too: `input_only` of them, the earliest subsequences of all layers
    first, whose attention costs least. The modes are points of this: keep (a buffer for each unit), recompute
    (one buffer, x_stays, only inputs), swap and memo.

    With several subsequences, `cuts`, keys and values are in none of these buffers: later subsequences read
    them. Memory holds those of one layer, piece by piece, with a second place for the first piece, or those
    of all layers where keys == "stay". Otherwise layers take turns in the pieces' places: keys == "copied":
    through the slab; "made": from x, once more, before the backward. What lies between two layers is whole on
    the device, or has a few places there and leaves for the slab: stream == "copied". Layer by layer that is
    a unit's x, and its gradient later takes the same place; the unit itself then sends no x. Or it leaves for
    the next stage of a pipeline: stream == "passed". `receives`, `sends`: see Fates.

    Rows that other stages compute, `lent`, are in none of the stage's buffers for units; those of `guests`
    are units like its own, of a subsequence each (memo/swap/helping.py).
    """

    n_layer: int
    n_buffers: int
    n_rows: int  # of a rank's own, of all subsequences
    kept: Rows = field(default_factory=dict)  # {tensor: of n_rows}; all rows of those it does not name
    input_only: int = 0  # with any, `kept` names all tensors but keys and values
    x_stays: bool = False
    cuts: tuple[int, ...] = ()  # rows of each subsequence, which add up to n_rows; empty: there is one
    order: str = "layer"
    keys: str = "stay"
    stays: Rows = field(default_factory=dict)  # {tensor: of n_rows}: survivors whose copy is on the device
    stream: str = "whole"
    receives: bool = False
    sends: bool = False
    guests: Shares = ()
    lent: Shares = ()

    def as_dict(self) -> dict[str, Any]:
        """For plan.json. What says nothing with one subsequence, with no copies on the device, and in one
        stage, is left out."""
        said = {name: value for name, value in asdict(self).items()
                if value or name not in ("receives", "sends", "guests", "lent")}
        for name in said.keys() & {"guests", "lent"}:
            said[name] = [piece._asdict() for piece in getattr(self, name)]
        for name in () if self.several else ("cuts", "order", "keys", "stream"):
            del said[name]
        return said if self.stays else {name: value for name, value in said.items() if name != "stays"}

    @cached_property
    def several(self) -> bool:
        """Whether there are several subsequences."""
        return len(self.cuts) > 1

    @property
    def subsequences(self) -> int:
        return max(1, len(self.cuts))

    @property
    def what(self) -> str:
        """What a unit is called where there are many."""
        return "units" if self.several else "layers"

    @cached_property
    def n_units(self) -> int:
        return self.n_layer * self.subsequences + sum(piece.layers for piece in self.guests)

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """(layer, subsequence) of each unit, in the order of the forward; a guest's have its number in the
        place of a subsequence."""
        return units_in_order(self.n_layer, self.subsequences, self.order, self.guests)

    @cached_property
    def guest_of(self) -> dict[int, Help]:
        """{its number: a guest}."""
        return {guest_number(piece, self.subsequences): piece for piece in self.guests}

    @cached_property
    def lent_to(self) -> dict[tuple[int, int], Help]:
        """{(subsequence, helper): what others compute}."""
        return {(piece.subsequence, piece.helper): piece for piece in self.lent}

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of a unit at each subsequence but for those that others compute; behind them, of each guest's.
        The tuples of Rows are in this order."""
        own = [*(self.cuts or (self.n_rows,))]
        for piece in self.lent:
            own[piece.subsequence] -= piece.rows
        return *own, *(piece.rows for piece in self.guests)

    @cached_property
    def likes(self) -> list[int]:
        """Of each unit the place of its subsequence, or guest, in `lengths`."""
        places = {number: k for k, number in enumerate((*range(self.subsequences), *self.guest_of))}
        return [places[i] for _, i in self.units]

    @cached_property
    def number(self) -> dict[tuple[int, int], int]:
        """{(layer, subsequence): the place of the unit in that order}."""
        return {unit: k for k, unit in enumerate(self.units)}

    @cached_property
    def rows_of_units(self) -> list[int]:
        return [self.lengths[i] for i in self.likes]

    def rows(self, k: int) -> int:
        """Rows of unit k."""
        return self.rows_of_units[k] if self.several else self.n_rows

    def apart(self, name: str) -> bool:
        """Whether a tensor is in no buffer: keys and values, where there are several subsequences."""
        return self.several and name in KEYS_VALUES

    def part(self, k: int, whole: int | tuple[int, ...]) -> int:
        """Rows of unit k: its own number, or as large a part of its rows as `whole` of all, in multiples of
        SPLIT_ROWS."""
        if isinstance(whole, tuple):
            return whole[self.likes[k]]
        return rows(whole / self.n_rows, self.rows(k), SPLIT_ROWS) if self.several else whole

    def kept_rows(self, k: int, name: str) -> int:
        """Rows of tensor `name` that survive of unit k where it is swapped."""
        return self.part(k, self.kept.get(name, self.n_rows))

    @property
    def n_inputs(self) -> int:
        """Buffers for the units' inputs. With one subsequence also for the last one's output, which is one
        more than there are units in flight: a unit writes the next one's input while an earlier one's is
        still copied. With several a unit copies its input from the stream between the layers."""
        return (self.n_units if self.x_stays else self.n_buffers) + (not self.several)

    @cached_property
    def n_swapped(self) -> int:
        return self.n_units - self.n_buffers

    @cached_property
    def gives_up(self) -> frozenset[int]:
        """The swapped units of which nothing but the input survives."""
        swapped = sorted(range(max(0, self.n_swapped)), key=lambda k: (self.likes[k], k))
        return frozenset(swapped[:self.input_only])

    @cached_property
    def neighbours(self) -> list[int]:
        """Units, each with the one before it, which stand for all pairs of subsequences that are one after
        the other."""
        return [*{(self.likes[k - 1], self.likes[k]): k for k in range(1, self.n_units)}.values()]

    @cached_property
    def buffers_known(self) -> dict[tuple, list[tuple[int, int]]]:
        """What buffers_of has found, by the number of the tensor's buffers and its rows that survive."""
        return {}

    @cached_property
    def sizes_known(self) -> dict[int | str, int]:
        """What AlphaProblem.device_bytes_at has found, by rows that survive; "beside": its beside_bytes."""
        return {}

    def buffers_of(self, name: str) -> list[tuple[int, int]]:
        """[(first row, rows)] of each buffer of a tensor, from the begin of the tensor's memory."""
        like = self.n_inputs if name == INPUT else self.n_buffers, self.kept.get(name, self.n_rows)
        if like not in self.buffers_known:
            self.buffers_known[like] = self.find_buffers(name)
        return self.buffers_known[like]

    def find_buffers(self, name: str) -> list[tuple[int, int]]:
        n = self.n_inputs if name == INPUT else self.n_buffers
        if not self.several and (name == INPUT or n != 2):  # one after the other
            return [(b * self.n_rows, self.n_rows) for b in range(n)]
        lengths = [max(self.rows_of_units[b::n]) for b in range(n)]
        if n != 2:
            return list(zip(accumulate(lengths, initial=0), lengths, strict=False))
        # neighbours take turns: neither may reach into what the other keeps
        spans = [self.rows(a) + self.kept_rows(b, name) for k in self.neighbours
                 for a, b in ((k - 1, k), (k, k - 1))]
        span = max(*lengths, *spans)
        return [(0, lengths[0]), (span - lengths[1], lengths[1])]

    def place(self, k: int, name: str) -> int:
        """The first row of unit k's `name`, from the begin of the tensor's memory. A unit has the first rows
        of a buffer, but the last rows of an odd one of two."""
        places = self.buffers_of(name)
        first, length = places[k % len(places)]
        return first + (length - self.rows(k)) * (len(places) == 2 and k % 2)

    def first_kept(self, k: int, name: str) -> tuple[int, int]:
        """(rows of tensor `name` of unit k that survive, the first of them)."""
        n = self.rows(k)
        if k in self.gives_up and name != INPUT:
            rows = 0
        elif k < self.n_swapped or (k < self.n_units - 1 and self.n_buffers == 2):
            rows = self.kept_rows(k, name)
        else:
            rows = n
        return rows, (n - rows) * (k % self.n_buffers % 2)

    def missing(self, k: int) -> dict[str, slice]:
        """{tensor: slice of its rows that unit k recomputes}, of the tensors that lack any."""
        n, found = self.rows(k), {}
        for name in self.kept:
            rows, first = self.first_kept(k, name)
            if rows < n and not self.apart(name):
                found[name] = slice(0, first) if first else slice(rows, n)
        return found

    def swapped(self, k: int, tensors: dict[str, Tensor],
                resident: bool = False) -> dict[str, tuple[int, int]]:
        """{tensor: (first byte, bytes) of what unit k sends to the host; or, `resident`, to where it stays on
        the device}. `tensors`: of all rows."""
        ranges = {}
        for name, t in tensors.items() if k < self.n_swapped else ():
            kept, first = self.first_kept(k, name)
            inside = not (self.x_stays or self.units[k] in self.stream_rows) if name == INPUT else (
                not self.apart(name))
            if kept and inside:
                row, stay = self.row_bytes(t), min(kept, self.part(k, self.stays.get(name, 0)))
                first, n = (first + kept - stay, stay) if resident else (first, kept - stay)
                ranges[name] = row * first, row * n
        return {name: (first, n) for name, (first, n) in ranges.items() if n}

    def keys_swapped(self, tensors: dict[str, Tensor]) -> dict[int, int]:
        """{unit: bytes of its keys and values, which go to the host}."""
        if not self.several or self.keys != "copied":
            return {}
        row = sum(self.row_bytes(tensors[name]) for name in KEYS_VALUES)
        return {k: row * self.rows(k) for k, unit in enumerate(self.units) if keys_leave(unit, self.n_layer)}

    @cached_property
    def stream_rows(self) -> dict[tuple[int, int], tuple[int, int]]:
        """{(layer, subsequence): (first row in the slab, which begins with these, rows)} of what leaves the
        device of what lies between layers: below that layer, or above the last one. Where no input survives
        its layer, in a pass without a backward, all layers' have the same places."""
        places: dict[tuple[int, int], tuple[int, int]] = {}
        if not self.several or self.stream != "copied":
            return places
        end, forward_only = 0, self.kept.get(INPUT) == 0
        for layer, i in stream_leaves(self.n_layer, self.subsequences, self.order):
            if forward_only:
                places[layer, i] = sum(self.cuts[:i]), self.cuts[i]
            else:
                places[layer, i] = end, self.cuts[i]
                end += self.cuts[i]
        return places

    def stream_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Bytes of the host slab for what lies between layers."""
        return self.row_bytes(tensors[INPUT]) * max((sum(place) for place in self.stream_rows.values()),
                                                    default=0)

    @property
    def own_stream_rows(self) -> int:
        """Rows of the stream's memory, beside those of guests."""
        return self.n_rows if self.stream == "whole" else STREAM_PLACES * max(self.cuts)

    def stream_place(self, unit: tuple[int, int]) -> int:
        """The first row, from the begin of the stream's memory, of a unit's input and output."""
        if unit[1] in self.guest_of:
            numbers = [*self.guest_of]
            before = self.guests[:numbers.index(unit[1])]
            return self.own_stream_rows + sum(piece.rows for piece in before)
        if self.stream != "whole":
            turn = self.number[unit] if self.order == "layer" else unit[1]
            return max(self.cuts) * (turn % STREAM_PLACES)
        return sum(self.cuts[:unit[1]])

    @cached_property
    def like(self) -> list[int]:
        """Of each unit the first one of which the same rows survive, in the same place of a buffer."""
        firsts: dict[tuple, int] = {}
        swapped, last, gives_up = self.n_swapped, self.n_units - 1, self.gives_up
        return [firsts.setdefault((i, k < swapped, k in gives_up, k % self.n_buffers % 2, k < last,
                                   unit in self.stream_rows), k)
                for k, (i, unit) in enumerate(zip(self.likes, self.units, strict=True))]

    @cached_property
    def fates(self) -> Fates:
        """What the schedule needs to know of the units."""
        swapped = frozenset(range(self.n_swapped))
        copied = swapped - (self.gives_up if self.x_stays else frozenset())
        lacking = {k for k in set(self.like) if self.missing(k)}
        rebuilt = frozenset(k for k, like in enumerate(self.like) if like in lacking)
        return Fates(self.n_buffers, copied, rebuilt, self.gives_up, self.x_stays, self.keys,
                     self.stream, self.receives, self.sends, self.guests, self.lent)

    def key_place(self, unit: tuple[int, int]) -> int:
        """The first row of a unit's keys and values, from the begin of their memory."""
        layer, i = unit
        if self.keys == "stay":
            return layer * self.n_rows + sum(self.cuts[:i])
        return self.n_rows if i == 0 and layer % 2 else sum(self.cuts[:i])

    def key_gradient_place(self, unit: tuple[int, int]) -> int:
        """The same of the sums of their gradients: of one layer, or of all where these come one subsequence
        after the other."""
        layer, i = unit
        return layer * self.n_rows * (self.order == "subsequence") + sum(self.cuts[:i])

    def region_bytes(self, tensors: dict[str, Tensor], dealt: int = 1) -> dict[str, int]:
        """{region: bytes on the device} of what is needed besides buffers: what stays; with several
        subsequences keys and values, the fp32 sums of their gradients, the stream between two layers, inputs
        for sweeps. `dealt`: times that each head of keys lies in the pieces of all ranks."""
        resident = {"resident": self.survivor_bytes(tensors, resident=True)} if self.stays else {}
        if not self.several:
            return resident
        elements = dealt * sum(self.row_bytes(tensors[name]) for name in KEYS_VALUES)
        layers = self.n_layer if self.keys == "stay" else 1
        sweeps = swept_inputs(self.fates, self.units) if self.keys == "made" else []
        x = self.row_bytes(tensors[INPUT])
        itemsize = tensors[INPUT].nbytes // prod(tensors[INPUT].shape)
        summed = self.n_layer if self.order == "subsequence" else 1
        return resident | {
            "keys": elements * (layers * self.n_rows + (self.cuts[0] if self.keys != "stay" else 0)),
            "key_gradients": elements * 4 // itemsize * summed * self.n_rows,
            "stream": x * (self.own_stream_rows + sum(piece.rows for piece in self.guests)),
            "sweep": x * max(self.cuts) * min(SWEEP_PLACES, len(sweeps))}

    def row_bytes(self, t: Tensor) -> int:
        """Bytes of one own row of a tensor that holds all of them."""
        return t.nbytes // self.n_rows

    def host_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Bytes of the host slab: of all that is offloaded in one forward pass. `tensors`: of all rows."""
        return (self.stream_bytes(tensors) + self.survivor_bytes(tensors)
                + sum(self.keys_swapped(tensors).values()))

    def survivor_bytes(self, tensors: dict[str, Tensor], resident: bool = False) -> int:
        """Bytes of swapped() of all units."""
        return sum(units * n for k, units in Counter(self.like).items()
                   for _, n in self.swapped(k, tensors, resident).values())

    def buffer_bytes(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        """{tensor: bytes of all its buffers on the device}. Without x_stays they do not depend on n_layer,
        but for keep. `tensors`: of all rows."""
        found = {}
        for name, t in tensors.items():
            if not self.apart(name):
                first, length = self.buffers_of(name)[-1]
                found[name] = self.row_bytes(t) * (first + length)
        return found

    def device_bytes(self, tensors: dict[str, Tensor], dealt: int = 1) -> int:
        """Bytes of all buffers and regions on the device. Arguments as for region_bytes."""
        return sum(self.buffer_bytes(tensors).values()) + sum(self.region_bytes(tensors, dealt).values())


def with_stream(placement: Placement, tensors: dict[str, Tensor], spare_bytes: float,
                dealt: int = 1) -> Placement:
    """The placement with the stream whole where its buffers and regions fit so many bytes of the device that
    way; else copied, if that takes fewer. Modes that copy nothing have it whole; a stage that is not the last
    passes it on. Other arguments as for region_bytes."""
    if placement.sends:
        return replace(placement, stream="passed")
    whole, copied = replace(placement, stream="whole"), replace(placement, stream="copied")
    nbytes, fewer = (p.device_bytes(tensors, dealt) for p in (whole, copied))
    return copied if whole.fates.copied and fewer < nbytes and nbytes > spare_bytes else whole


def rows(fraction: float, n_rows: int, granularity: int) -> int:
    """Rows that are a fraction in [0, 1] of `n_rows`: a multiple of `granularity`, rounded down, such that at
    least `granularity` rows remain; at 1 all rows."""
    if fraction >= 1:
        return n_rows
    most = max(0, n_rows - granularity)
    wanted = min(fraction * n_rows * (1 + 1e-12), most)  # 0.29 of 100 is 29, not 28
    return int(wanted / granularity) * granularity
