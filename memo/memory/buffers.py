"""Rounding buffers, the host slab, and the copies between them. Source: MEMO 4.1 and 4.3.4."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import torch

from memo.config.layer import INPUT, Layer
from memo.layer.activations import Activations, Pieces
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.memory.slab import HostSlab
from memo.schedule.execute import Executor, Work
from memo.schedule.help import HELPER_PLACES
from memo.schedule.passes import Passes, passes_of
from memo.schedule.program import EMBEDDING, SWEEP_PLACES
from memo.schedule.states import States
from memo.schedule.step import COPIES, Content, Moved, Op, Part, Place, Region, Step, Unit, place_at
from memo.schedule.streams import Streams, close_streams, open_streams

Pair = tuple[torch.Tensor, torch.Tensor]
Pairs = list[Pair]  # bytes on the device and on the host, for one copy each


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor as its bytes."""
    return t.view(-1).view(torch.uint8)


def copy_bytes(pairs: Pairs) -> None:
    """Copies [(destination, source)]; without waiting for it on CUDA."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


def of_rows(pair: Pair, rows: tuple[int, int], tokens: int) -> Pair:
    """Picks rows of keys and values (B, T, Hkv, D) with so many tokens for each."""
    k, v = (t[:, rows[0] * tokens // len(t):rows[1] * tokens // len(t)] for t in pair)
    return k, v


def of_sequences(stream: torch.Tensor, B: int, first: int, end: int) -> torch.Tensor:
    """Picks rows of B sequences, equally many of each: (n, ...) -> (B, rows, ...)."""
    return stream.unflatten(0, (B, -1))[:, first // B:end // B]


def flat(pieces: Pieces) -> list[torch.Tensor]:
    """Finds keys and values that are neighbours in memory as one tensor; nothing where there are none."""
    numel = sum(t.numel() for pair in pieces for t in pair)
    return [pieces[0][0].as_strided((numel,), (1,))] if numel else []


class Swap:
    """Holds the activations of all units of a (B, T) batch that tp ranks share, placed as `placement` says.

    `tensors`: {name: Tensor} of one layer. `units`: each unit's skeletal tensors, views of its buffer;
    `layers`: those of the first subsequence. `between`: (x, y) of each unit, twice (n_i, C), or (B, n_i/B, C)
    where other stages compute the rows between: what lies below it and above it; in the backward their
    gradients. With one subsequence x is the unit's own input, with several both are one place, of the stream.
    `whole`: `between` with the rows that other stages compute; `x[layer]`: all rows, where the device has
    them. `keys`, `sums`: pieces of each unit, with all rows. `missing[k]`: {tensor: rows to recompute} of
    unit k. `passes`: the schedules, which `executor` runs.

    Where stages compute rows for each other (memo/schedule/help.py): `guest_weights`, `guest_gradients`: of a
    helper's two places, flat; `repaid`: {helper: a home's place for gradients of weights, and for sums}.

    `key_shape`: (tokens of a piece for each own row, heads of keys of each). Without `gradients` only forward
    passes can be made. `params`: those of each layer, flat, with padding. Errors: OutOfHostMemory.
    """

    def __init__(self, placement: Placement, layer: Layer, B: int, T: int, dtype: torch.dtype,
                 device: torch.device, tp: int = 1, streams: Streams | None = None, pin: bool = True,
                 key_shape: tuple[int, int] = (1, 1), gradients: bool = True,
                 params: Sequence[torch.Tensor] = (), states: States | None = None) -> None:
        p, self.layer = placement, layer
        self.placement, self.B, self.dtype, self.key_shape = p, B, dtype, key_shape
        tensors = self.tensors = layer.tensors(B, T, dtype.itemsize, tp)
        numel = len(params[0]) if params else 0
        sizes = self.sizes = Sizes(p, tensors, numel)
        self.params, nbytes = params, sizes.buffer_bytes | sizes.region_bytes | sizes.lent_bytes
        if not gradients:
            nbytes |= dict.fromkeys(set(nbytes) & {"key_gradients", "sweep"}, 0)
        self.device_bytes, self.host_bytes = sum(nbytes.values()), sizes.host_bytes
        lanes = [f"{lane} {partner}" for partner in p.partners for lane in ("from", "to")]
        self.streams = streams or open_streams(device, p.receives or p.sends, lanes)
        self.buffers = {name: torch.empty(n, dtype=torch.uint8, device=device) for name, n in nbytes.items()}
        shapes = [layer.tensors(B, n * tp // B, dtype.itemsize, tp) for n in p.lengths]

        @cache  # units take turns in few places
        def view(name: str, i: int, at: int) -> torch.Tensor:
            t = shapes[i][name]
            kind = getattr(torch, t.dtype) if t.dtype else dtype
            return self.buffers[name][at:at + t.nbytes].view(kind).view(t.shape)
        names = [name for name in tensors if name in self.buffers]
        self.units = {unit: Activations({name: view(name, p.kinds[k], self.first(name, k)) for name in names})
                      for unit, k in p.number.items()}
        self.sweep_inputs: list[torch.Tensor] = []
        self.guest_weights: Sequence[torch.Tensor] = ()
        self.guest_gradients: Sequence[torch.Tensor] = ()
        self.repaid: dict[int, torch.Tensor] = {}
        self.keys, self.sums = dict[Unit, Pieces](), dict[Unit, Pieces]()
        self.between: dict[Unit, Pair] = {}
        self.whole: dict[Unit, Pair] = {}
        if p.several:
            self.add_pieces(gradients)
            self.add_stream()
        else:  # a layer's output has the place of the next one's input
            self.x = [*(self.units[Unit(i, 0)].x for i in range(p.n_layer)),
                      view(INPUT, 0, self.first(INPUT, p.n_layer))]
            self.between = self.whole = {Unit(i, 0): ends for i, ends in enumerate(pairwise(self.x))}
        self.layers = [self.units[Unit(i, 0)] for i in range(p.n_layer)]
        missing = {k: p.missing(k) for k in set(p.like)}
        self.missing = [missing[like] for like in p.like]
        self.slab = HostSlab(self.host_bytes, device, pin) if self.host_bytes else None
        self.executor = Executor(self.streams, self.label)
        self.set_passes(passes_of(replace(p.program, trains=gradients), states or States(p.n_layer)))
        self.pairs = self.swapped_pairs()

    def first(self, name: str, k: int) -> int:
        """Finds the first byte of a tensor of unit k in its buffer."""
        return self.placement.place(k, name) * self.sizes.row_bytes[name]

    def add_stream(self) -> None:
        """Finds what lies between layers in the stream's places, and the places for inputs of sweeps."""
        p, width = self.placement, self.tensors[INPUT].shape[1:]
        rows, swept = (self.buffers[name].view(self.dtype).view(-1, *width) for name in ("stream", "sweep"))
        if p.stream == "whole":
            self.x = [rows[:p.n_rows]] * (p.n_layer + 1)
        for unit, s in self.units.items():
            n = len(s.x) if unit.subsequence in p.guest_of else p.cuts[p.forward_order.piece(unit)]
            first = p.first_row(self.sizes.table.below(unit))
            stream = rows[first:first + n]
            own = stream if n == len(s.x) else of_sequences(stream, self.B, 0, len(s.x))
            self.whole[unit], self.between[unit] = (stream, stream), (own, own)
        self.sweep_inputs = list(swept.split(max(p.cuts)))

    def add_pieces(self, gradients: bool) -> None:
        """Gives the units their `pieces` and `sums`, of all subsequences up to theirs, of that their rows.
        Where pieces have a place in turns, those that a unit does not read hold others': no tile has them."""
        p, (tokens, heads) = self.placement, self.key_shape
        places, (keys_at, sums_at), D = p.key_places, p.keys_laid_out, self.layer.head_dim

        def piece(memory: torch.Tensor, first: int, rows: int) -> Pair:
            row = 2 * tokens * heads * D  # elements of k and v of a row
            k, v = memory[first * row:(first + rows) * row].view(2, self.B, rows * tokens // self.B, heads, D)
            return k, v
        keys, sums = (self.buffers[name].view(kind) for name, kind in (
            ("keys", self.dtype), ("key_gradients", torch.float32)))
        for layer in range(p.n_layer):
            units = [Unit(layer, i) for i in range(p.subsequences)]
            of_layer = [piece(keys, keys_at.first[places.at(unit)], p.cuts[unit[1]]) for unit in units]
            sums_of_layer = [piece(sums, sums_at.first[places.sums_at(unit)], p.cuts[unit[1]])
                             for unit in units if gradients]
            for n, unit in enumerate(units, 1):
                self.keys[unit], self.sums[unit] = of_layer[:n], sums_of_layer[:n]
            for n in range(p.subsequences if p.follows else 0):  # of a sequence that takes turns with it
                unit = Unit(layer, p.subsequences + n)
                of_layer[n] = piece(keys, keys_at.first[places.at(unit)], p.cuts[n])
                self.keys[unit], self.sums[unit] = of_layer[:n + 1], sums_of_layer[:n + 1]
        if p.guests or p.lent:
            self.add_lent(piece)
        for unit, s in self.units.items():
            guest, mine = p.guest_of.get(unit.subsequence), p.rows(p.number[unit])
            # the rows before a guest's own are a piece
            last = [(0, guest.first), (guest.first, guest.end)] if guest else [(0, mine)]
            s.pieces, s.sums = (
                [*pairs[:-1], *(of_rows(pair, rows, tokens) for pair in pairs[-1:] for rows in last)]
                for pairs in (self.keys[unit], self.sums[unit]))

    def add_lent(self, piece: Callable[[torch.Tensor, int, int], Pair]) -> None:
        """Finds the places of what stages lend each other. piece(memory, first row, rows): (k, v) there."""
        p, numel = self.placement, len(self.params[0])

        def places(region: str, kind: torch.dtype) -> Sequence[torch.Tensor]:
            return self.buffers[region].view(kind).chunk(HELPER_PLACES) if p.guests else ()
        self.guest_weights, keys = (places(region, self.dtype) for region in ("guest_weights", "guest_keys"))
        gradients = places("guest_gradients", torch.float32)  # of weights, then of keys and values
        self.guest_gradients = [g[:numel] for g in gradients]
        for unit, turn in self.sizes.table.turn.items():
            guest = p.guest_of[unit.subsequence]
            ends = [*accumulate([*p.cuts[:guest.subsequence], guest.end], initial=0)]
            self.keys[unit], self.sums[unit] = (
                [piece(memory, first, end - first) for first, end in pairwise(ends)]
                for memory in (keys[turn], gradients[turn][numel:]))
        lengths = {helper: numel + before * self.sizes.sums_row_bytes // 4
                   for helper, before in self.sizes.repaid_rows.items()}
        repaid = self.buffers["repaid"].view(torch.float32).split([*lengths.values()]) if p.lent else ()
        self.repaid = dict(zip(lengths, repaid, strict=True))

    @property
    def offload_bytes(self) -> int:
        """Counts the bytes of the slab that a batch takes: what is led is another one's."""
        led = (step for turn in self.passes.turns[:1] for step in turn.lead if step.op is Op.OFFLOAD)
        return self.host_bytes - sum(map(self.sizes.moved, led))

    def set_passes(self, passes: Passes) -> None:
        """Makes these the schedules."""
        self.passes = passes
        self.executor.expect(passes.parts)

    def label(self, step: Step) -> str:
        if step.op is Op.CLIP or step.moved is Moved.SCALE:  # of no unit
            return step.kind
        if step.of_states:  # of a layer, or what counts as one
            ends = {EMBEDDING: "of the embedding", self.placement.n_layer: "of the head"}
            return f"{step.kind} {ends.get(step.unit.layer, step.unit.layer)}"
        return f"{step.kind} {self.name(step.unit)}"

    def name(self, unit: Unit) -> str:
        """Names a unit by its layer; with several subsequences also by its own."""
        names = unit.layer, self.placement.forward_order.piece(unit)
        return ".".join(map(str, names if self.placement.several else names[:1]))

    # --- what moves ---

    def views(self, part: Part) -> list[torch.Tensor]:
        """Finds the contiguous tensors that are a part, on the device; of a home's what it lends or sums."""
        p, (content, unit, rows) = self.placement, part
        guest = p.guest_of.get(unit.subsequence)
        match content:
            case Content.INPUT if unit in self.sizes.table.streamed:
                return [self.units[unit].x]
            case Content.KEPT | Content.INPUT:
                return self.survivors(part)
            case Content.SWEPT:
                return [self.input_of_sweep(unit)]
            case Content.BELOW | Content.ABOVE:
                stream = self.whole[unit][content is Content.ABOVE]
                first, end = (0, guest.rows) if guest else rows or (0, 0)
                return [stream] if rows is None else [*of_sequences(stream, self.B, first, end)]
        *before, last = (self.keys if content in (Content.KEYS, Content.LOAN) else self.sums)[unit]
        if content in (Content.LOAN, Content.REPAID):
            if guest:  # which has places of its own for them
                of_layer = self.guest_weights if content is Content.LOAN else self.guest_gradients
                return [of_layer[self.sizes.table.turn[unit]], *flat(before)]
            return [*[self.params[unit.layer]] * (content is Content.LOAN), *flat(before)]
        if rows is None:
            return [*last]
        return [sequence for t in of_rows(last, rows, self.key_shape[0]) for sequence in t]

    def survivors(self, part: Part, resident: bool = False) -> list[torch.Tensor]:
        """Finds the bytes of what a unit keeps, or of its input, that go to the host; `resident`: stay."""
        k = self.placement.number[part.unit]
        ranges = self.sizes.kept[self.placement.like[k], part.content, resident]
        return [self.buffers[name][at:at + n] for name, (first, n) in ranges.items()
                for at in [self.first(name, k) + first]]

    def swapped_pairs(self) -> dict[Step, Pairs]:
        """Finds for each step that copies [(bytes of a buffer, those in the slab, or where they stay)]."""
        p, sizes, table = self.placement, self.sizes, self.sizes.table
        copies = {step: None for part in self.passes.parts for step in part
                  if step.op in COPIES and not step.of_states}
        end, row, stayed, rested = sizes.stream_bytes, sizes.row_bytes[INPUT], 0, dict[Place, int]()
        # {(a place in the slab, whether of what survives beside an input there): its first byte}
        places = {(place_at(Region.SLAB_STREAM, *unit), False): first * row
                  for unit, (first, _) in p.stream_rows.items()}
        pairs = dict[Part, Pairs]()
        for step in copies:  # to the host first
            rests = p.stays and step.op is Op.OFFLOAD and step.moved is Moved.ACTIVATIONS
            for part in reversed(table.moves(step)):  # inputs first, as a layer has them
                if part in pairs:
                    continue
                there, pairs[part] = (table.slab(part), part.content is Content.KEPT), []
                if there not in places:
                    places[there], end = end, end + sizes.of(part)
                at = places[there]
                for t in self.views(part) if sizes.of(part) else ():
                    assert self.slab is not None  # it is as large as all that goes there
                    pairs[part] += self.slab.pairs(at, bytes_of(t))
                    at += t.nbytes
                at = rested.setdefault(there[0], stayed) if rests and there[1] else stayed
                for t in self.survivors(part, resident=True) if rests else ():
                    pairs[part].append((t, self.buffers["resident"][at:at + t.nbytes]))
                    at += t.nbytes
                stayed = max(stayed, at)
        assert end == self.host_bytes  # the slab is as large as what goes there
        return {step: [pair for part in reversed(table.moves(step)) for pair in pairs[part]]
                for step in copies}

    def input_of_sweep(self, unit: Unit) -> torch.Tensor:
        """Finds where the input (n, C) of a unit lies for the sweep: it came back there, or never left."""
        x, swept = self.units[unit].x, self.sizes.table.swept
        return self.sweep_inputs[swept[unit] % SWEEP_PLACES][:len(x)] if unit in swept else x

    def message(self, step: Step) -> list[torch.Tensor]:
        """Finds what a step sends or receives, as long at both ends; or what a home adds."""
        parts = self.sizes.table.moves(step)
        if step.op is Op.ADD or (step.op is Op.RECEIVE and step.moved is Moved.REPAYMENT):
            assert step.peer is not None
            numel, repaid = len(self.params[0]), self.repaid[step.peer]
            tensors = [repaid[:numel], repaid[numel:self.sizes.moved(step) // 4]]
        else:
            tensors = [t for part in parts for t in self.views(part)]
        return [t for t in tensors if t.numel()]

    def add(self, step: Step, gradients: torch.Tensor) -> None:
        """Adds what a helper has repaid to the `gradients` of a layer, flat, and to the sums."""
        totals = [gradients, *self.views(*self.sizes.table.moves(step))]
        for total, more in zip(totals, self.message(step), strict=True):
            total.add_(more)

    def copy_of(self, step: Step) -> Work:
        """Finds what a step copies."""
        pairs = self.pairs.get(step, [])
        there = [(host, device) for device, host in pairs] if step.op is Op.OFFLOAD else pairs
        return self.label(step), copy_bytes, there

    def close(self) -> None:
        """Waits for the copies under way and gives the memory back."""
        close_streams(self.streams)
        self.pairs, self.units, self.layers, self.x, self.between = {}, {}, [], [], {}
        self.whole, self.keys, self.sums, self.repaid, self.buffers = {}, {}, {}, {}, {}
        self.sweep_inputs, self.guest_weights, self.guest_gradients = [], (), ()
        if self.slab is not None:
            self.slab.close()
            self.slab = None
