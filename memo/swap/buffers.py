"""Rounding buffers, the host slab, and the copies between them: the memory that a schedule of steps is
executed in. Source: MEMO 4.1 and 4.3.2.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch

from memo.activations import Activations
from memo.layer import INPUT, Layer
from memo.schedule.execute import Executor, Work
from memo.schedule.program import EMBEDDING, SWEEP_PLACES, swept_inputs
from memo.schedule.states import States
from memo.schedule.step import Moved, Op, Step, Unit
from memo.schedule.streams import Streams, close_streams, open_streams
from memo.schedule.waits import Passes
from memo.swap.lending import Lending, of_rows, of_sequences
from memo.swap.placement import Placement
from memo.swap.shared_bytes import shared_regions
from memo.swap.slab import HostSlab

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # bytes on the device and on the host, for one copy each


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes."""
    return t.view(-1).view(torch.uint8)


def copy_bytes(pairs: Pairs) -> None:
    """[(destination, source)]; without waiting for it on CUDA."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


class Swap:
    """The activations of all units of a (B, T) batch that tp ranks share, placed as `placement` says.

    `tensors`: {name: Tensor} of one layer. `units[layer, i]`: the skeletal tensors of a unit, views of its
    buffer; with several subsequences also `pieces`, [(k, v)] of the subsequences up to it, `sums`, of their
    gradients, fp32, and `slices`, the tokens of each slice of its own one. `layers`: the units of the first
    subsequence. `between[layer, i]`: (x, y), twice (n_i, C), or (B, n_i/B, C) where other stages compute the
    rows between: what lies below a unit and what lies above it; in the backward their gradients. With one
    subsequence x is the unit's own input, with several both are one place, of the stream; `whole` the same
    with the rows that other stages compute; `x[layer]` are all rows, where the device has them. `missing[k]`:
    {tensor: the rows to recompute} of unit k. `passes`: the schedules, which `executor` runs.

    `key_shape`: (tokens of a piece for each own row, heads of keys of each). Without `gradients` only forward
    passes can be made. `numel`: elements of a layer's parameters, with padding. `lending`: what is sent to
    stages that compute for this one, and for which it computes. Errors: OutOfHostMemory.
    """

    def __init__(self, placement: Placement, layer: Layer, B: int, T: int, dtype: torch.dtype,
                 device: torch.device, tp: int = 1, streams: Streams | None = None, pin: bool = True,
                 key_shape: tuple[int, int] = (1, 1), gradients: bool = True, numel: int = 0,
                 states: States | None = None) -> None:
        p, self.layer = placement, layer
        self.placement, self.B, self.dtype, self.key_shape = p, B, dtype, key_shape
        tensors = self.tensors = layer.tensors(B, T, dtype.itemsize, tp)
        nbytes = p.buffer_bytes(tensors) | p.region_bytes(tensors) | shared_regions(p, tensors, numel)
        if not gradients:
            nbytes |= dict.fromkeys(set(nbytes) & {"key_gradients", "sweep"}, 0)
        self.device_bytes, self.host_bytes = sum(nbytes.values()), p.host_bytes(tensors)
        lanes = [f"{lane} {partner}" for partner in p.partners for lane in ("from", "to")]
        self.streams = streams or open_streams(device, p.receives or p.sends, lanes)
        self.buffers = {name: torch.empty(n, dtype=torch.uint8, device=device)
                        for name, n in nbytes.items()}
        shapes = [layer.tensors(B, n * tp // B, dtype.itemsize, tp) for n in p.lengths]

        def view(k: int, i: int, name: str) -> torch.Tensor:
            t, at = shapes[i][name], p.place(k, name) * p.row_bytes(tensors[name])
            return self.cut(name, at, t.shape, getattr(torch, t.dtype) if t.dtype else dtype)
        names = [name for name in tensors if name in self.buffers]
        self.units = {unit: Activations(**{name: view(k, like, name) for name in names})
                      for k, (unit, like) in enumerate(zip(p.units, p.likes, strict=True))}
        self.sweep_inputs: list[torch.Tensor] = []
        self.lending: Lending | None = None
        self.between: dict[Unit, tuple[torch.Tensor, torch.Tensor]] = {}
        self.whole: dict[Unit, tuple[torch.Tensor, torch.Tensor]] = {}
        if p.several:
            self.add_pieces(gradients, numel)
            shape, row = tensors[INPUT].shape, p.row_bytes(tensors[INPUT])
            whole = self.buffers["stream"] if p.stream == "whole" else None
            if whole is not None:
                self.x = [self.cut("stream", 0, shape, dtype)] * (p.n_layer + 1)
            for unit, s in self.units.items():
                n = len(s.x) if unit[1] in p.guest_of else p.cuts[unit[1]]
                place = self.cut("stream", p.stream_place(unit) * row, (n, *shape[1:]), dtype)
                mine = place if len(place) == len(s.x) else of_sequences(place, B, 0, len(s.x))
                self.whole[unit], self.between[unit] = (place, place), (mine, mine)
            swept = self.buffers["sweep"].view(dtype).view(-1, *shape[1:])
            self.sweep_inputs = list(swept.split(max(p.cuts)))
        else:  # a layer's output has the place of the next one's input
            self.x = [*(self.units[Unit(i, 0)].x for i in range(p.n_layer)), view(p.n_layer, 0, INPUT)]
            self.between = self.whole = {Unit(i, 0): ends for i, ends in enumerate(pairwise(self.x))}
        self.layers = [self.units[Unit(i, 0)] for i in range(p.n_layer)]
        missing = {k: p.missing(k) for k in set(p.like)}
        self.missing = [missing[like] for like in p.like]
        self.swept = {unit: number for number, unit in enumerate(swept_inputs(p.fates, p.units))}
        self.slab = HostSlab(self.host_bytes, device, pin) if self.host_bytes else None
        self.pairs = self.swapped_pairs()
        self.executor = Executor(self.streams, self.label)
        self.set_passes(p.passes(states or States(p.n_layer), gradients))

    def cut(self, region: str, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of this shape at byte `at` of a region."""
        return self.buffers[region][at:at + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def add_pieces(self, gradients: bool, numel: int) -> None:
        """The units' `pieces` and `sums`, of all subsequences up to theirs; of that one their own rows."""
        p, (tokens, heads) = self.placement, self.key_shape
        row = 2 * tokens * heads * self.layer.head_dim  # elements of k and v of a row

        def piece(region: str, at: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            shape = self.B, rows * tokens // self.B, heads, self.layer.head_dim
            k, v = self.cut(region, at, (2, *shape), dtype)
            return k, v
        for layer in range(p.n_layer):
            units = [Unit(layer, i) for i in range(p.subsequences)]
            keys = [piece("keys", p.key_place(unit) * row * self.dtype.itemsize, p.cuts[unit[1]], self.dtype)
                    for unit in units]
            sums = [piece("key_gradients", p.key_gradient_place(unit) * row * 4, p.cuts[unit[1]],
                          torch.float32) for unit in units if gradients]
            for unit in units:
                s = self.units[unit]
                s.pieces, s.sums = (pairs[:unit[1] + 1] for pairs in (keys, sums))
                if p.lengths[unit[1]] < p.cuts[unit[1]]:
                    mine = slice(0, p.lengths[unit[1]])
                    s.pieces, s.sums = ([*pairs[:-1], of_rows(pairs[-1], mine, tokens)]
                                        for pairs in (s.pieces, s.sums))
        if not (p.guests or p.lent):
            return
        lending = self.lending = Lending(p, self.cut, piece, self.B, numel, row, tokens, self.dtype)
        for unit in (unit for unit in p.units if unit[1] in p.guest_of):
            s = self.units[unit]
            s.pieces, s.sums = (lending.pieces_of(unit, of) for of in (lending.keys, lending.sums))

    def set_passes(self, passes: Passes) -> None:
        """Makes these the schedules."""
        self.passes = passes
        self.executor.expect(passes)

    def label(self, step: Step) -> str:
        if step.of_states and step.moved is not Moved.SCALE:  # of a layer, or what counts as one
            ends = {EMBEDDING: "of the embedding", self.placement.n_layer: "of the head"}
            return f"{step.kind} {ends.get(step.unit.layer, step.unit.layer)}"
        return f"{step.kind} {self.name(step.unit)}"

    def name(self, unit: Unit) -> str:
        """The number of a unit's layer; with several subsequences also that of its own."""
        return ".".join(map(str, unit if self.placement.several else unit[:1]))

    def swapped_pairs(self) -> dict[Step, Pairs]:
        """{step that copies: [(bytes of a buffer, their bytes in the slab, or where they stay)]}."""
        p, pairs, stayed = self.placement, dict[Step, Pairs](), 0
        keys, slab, end = p.keys_swapped(self.tensors), self.slab, p.stream_bytes(self.tensors)

        def on_host(at: int, mine: torch.Tensor) -> Pairs:
            assert slab is not None  # it is as large as all that is asked for here
            return slab.pairs(at, mine)

        def prefetch(unit: Unit, moved: Moved) -> Step:
            return Step(Op.PREFETCH, unit, moved, back=moved is not Moved.STREAM)

        def offload(unit: Unit, moved: Moved) -> Step:
            return Step(Op.OFFLOAD, unit, moved, back=moved is Moved.GRADIENT)

        def travels(unit: Unit, moved: Moved, places: Pairs) -> int:
            for step in (offload(unit, moved), prefetch(unit, moved)):
                pairs.setdefault(step, []).extend(places)
            return sum(place.nbytes for place, _ in places)

        def of_stream(boundary: Unit, mine: torch.Tensor) -> Pairs:
            row, (first, _) = p.row_bytes(self.tensors[INPUT]), p.stream_rows[boundary]
            return on_host(first * row, bytes_of(mine))
        leaves = {k: p.swapped(k, self.tensors) for k in set(p.like)}
        remains = {k: p.swapped(k, self.tensors, resident=True) for k in leaves if p.stays}
        for k, unit in enumerate(p.units):
            if unit in p.stream_rows:
                x, s = self.whole[unit][0], self.units[unit]
                below = of_stream(unit, x)
                pairs[prefetch(unit, Moved.STREAM)] = pairs[offload(unit, Moved.GRADIENT)] = below
                if k < p.n_swapped and not p.x_stays:
                    pairs[prefetch(unit, Moved.ACTIVATIONS)] = of_stream(unit, s.x)
                if unit in self.swept:
                    pairs[prefetch(unit, Moved.INPUT)] = of_stream(unit, self.input_of_sweep(unit))
            if (above := Unit(unit.layer + 1, unit.subsequence)) in p.stream_rows:
                leaving = of_stream(above, self.whole[unit][1])
                pairs[offload(unit, Moved.STREAM)] = pairs[prefetch(unit, Moved.GRADIENT)] = leaving
            for name, (first, n) in leaves[p.like[k]].items():
                if name == INPUT and unit in self.swept:  # comes back for the sweep, too
                    pairs[prefetch(unit, Moved.INPUT)] = on_host(end, bytes_of(self.input_of_sweep(unit)))
                mine = bytes_of(getattr(self.units[unit], name))[first:first + n]
                end += travels(unit, Moved.ACTIVATIONS, on_host(end, mine))
            for name, (first, n) in remains.get(p.like[k], {}).items():
                mine = bytes_of(getattr(self.units[unit], name))[first:first + n]
                stays = self.buffers["resident"][stayed:stayed + n]
                stayed += travels(unit, Moved.ACTIVATIONS, [(mine, stays)])
            for t in self.units[unit].pieces[-1] if k in keys else ():
                end += travels(unit, Moved.KEYS, on_host(end, bytes_of(t)))
        assert end == self.host_bytes  # the slab is as large as what goes there
        return pairs

    def input_of_sweep(self, unit: Unit) -> torch.Tensor:
        """Where the input (n, C) of a unit lies for the sweep: it has come back there, or never left the
        unit."""
        x = self.units[unit].x
        if unit not in self.swept:
            return x
        return self.sweep_inputs[self.swept[unit] % SWEEP_PLACES][:len(x)]

    def copy_of(self, step: Step) -> Work:
        """Finds what a step copies."""
        pairs = self.pairs.get(step, [])
        there = [(host, device) for device, host in pairs] if step.op is Op.OFFLOAD else pairs
        return Work(self.label(step), copy_bytes, (there,))

    def close(self) -> None:
        """Waits for the copies under way and gives the memory back."""
        close_streams(self.streams)
        self.pairs, self.units, self.layers, self.x, self.between = {}, {}, [], [], {}
        self.whole, self.lending = {}, None
        self.sweep_inputs, self.buffers = [], {}
        if self.slab is not None:
            self.slab.close()
            self.slab = None
