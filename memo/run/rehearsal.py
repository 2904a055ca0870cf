"""The memory requests of a step: recorded from a rehearsal, or traced without memory or GPU."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo.config.settings import Kind
from memo.kernels.backends import workspaces
from memo.layer.tiles import Batch, Learned
from memo.planner.allocator import Arena, NoArena, Result
from memo.planner.trace import Entry, Trace, checked_trace
from memo.schedule.passes import passes_of
from memo.schedule.step import Unit
from memo.schedule.streams import open_streams
from memo.states.passes import Model
from memo.system.axis import T

PIECES_BEFORE = 3  # of keys and values, with which a traced unit requests as much as with more of them
MORE_LENGTHS = 4  # of subsequences that are traced
# (name of an operation, its arguments) -> bytes of each request of an attention kernel for itself
RequestsOf = Callable[[str, Sequence], list[int]]


class Rehearsal(NoArena):
    """Stands for a model's arena: of segments with the same requests, as layers of a Kind have, only the
    first runs."""

    def __init__(self, arena: "Arena | FakeArena", kind_of: Callable[[Unit], Kind],
                 subsequences: list[int] | None = None) -> None:
        self.arena, self.kind_of, self.subsequences = arena, kind_of, subsequences  # which run; None: all
        self.first: dict[str, str] = {}
        self.order: dict[str, str] = {}  # {label: its first like}

    def fence(self, varies: bool) -> Callable[[], object]:
        return self.arena.fence(varies)

    def run(self, label: str, work: Callable, *args: object) -> Any:
        name, _, unit = label.rpartition(" ")
        layer, _, subsequence = unit.partition(".")  # a subsequence's requests are like no other's
        if subsequence and self.subsequences and int(subsequence) not in self.subsequences:
            return
        kind = label
        if layer.isdigit():
            kind = f"{name} {subsequence} {self.kind_of(Unit(int(layer), int(subsequence or 0)))}"
        if name.endswith("recompute"):  # args: the layer's tensors, rotations, {tensor: slice of rows}
            kind += str(args[-1])
        if kind not in self.first:
            self.first[kind] = label
            self.arena.run(label, work, *args)
        self.order[label] = self.first[kind]


def rehearsed_requests(model: Model, arena: "Arena | FakeArena",
                       subsequences: list[int] | None = None) -> Trace:
    """Records a Trace of a step and an evaluation's head at the reserved shape, of one layer of each kind,
    and of these `subsequences` alone. Copies nothing; the model's gradients are zero afterwards."""
    swap, (B, T) = model.swap, model.shape
    tokens = torch.arange(B * T, device=model.device).view(B, T) % model.cfg.vocab_size
    # with documents the head's requests are others; a sequence is rehearsed as one
    batch, learned = Batch(tokens, tokens), B * T if model.cfg.documents else 0
    if learned and isinstance(arena, FakeArena):  # where no number is known
        every = [all_learned(part, model.mesh.weights.size) for part in model.by_subsequence(tokens)]
        batch = batch._replace(packed=model.one_document()._replace(learned=every))
    elif learned:
        tokens = tokens.cpu()  # as batches come
        batch = model.on_device(Batch(tokens, tokens, model.one_document()))
    if learned:
        model.meet(batch.packed)
        for meeting in {id(m): m for s in swap.units.values() for m in s.meetings}.values():
            meeting.rehearse(model.mesh.tokens.rank)
    passes, before, rehearsal = swap.passes, model.arena, Rehearsal(arena, model.kind_of, subsequences)
    model.arena = rehearsal
    swap.set_passes(passes.compute_only())
    try:
        model.forward(*batch, scale=1.0, learned=learned)
        model.backward()
        model.forward(*batch, learned=learned)
        return arena.recorded().repeated(rehearsal.order.items())
    finally:
        swap.set_passes(passes)
        model.arena = before
        swap.streams.timeline.clear()
        model.grads.zero_()


def all_learned(targets: torch.Tensor, tp: int) -> Learned:
    """Makes the Learned of targets (N,) of all tp ranks, where each is learned."""
    rows = torch.arange(len(targets) // tp, device=targets.device)
    return Learned(rows, targets.view(-1, tp), len(rows), rows[:0])


def traced_requests(make: Callable[[torch.device], Model], B: int, T: int,
                    missing: Sequence[dict[str, slice]], device: str = "meta",
                    requests: RequestsOf | None = None, keys: str = "stay") -> Trace:
    """Traces a step at (B, T) of the model that make(device) builds, without memory or GPU: on "meta" as on a
    GPU, on "cpu" as there; of many subsequences those that request most. `missing`, `keys`: see Placement."""
    with FakeTensorMode() if device == "cpu" else nullcontext():
        model = make(torch.device(device))
        model.reserve(B, T, streams=open_streams(torch.device("cpu")))
        swap = model.swap
        swap.missing, p = list(missing), swap.placement
        rebuilt = frozenset(k for k, rows in enumerate(missing) if rows)
        fates = replace(p.program.fates, rebuilt=rebuilt, keys=keys)
        swap.set_passes(passes_of(replace(p.program, fates=fates), model.states))
        for s in swap.units.values() if p.several else ():
            left_out = slice(PIECES_BEFORE, max(PIECES_BEFORE, len(s.pieces) - 1))  # the own one stays
            s.pieces, s.sums = (without(left_out, them) for them in (s.pieces, s.sums))
            s.meetings = [replace(met, pieces=without(left_out, met.pieces)) for met in s.meetings]
        return rehearsed_requests(model, FakeArena(requests), [*largest_subsequences(p.cuts), *p.guest_of])


def without(left_out: slice, items: Sequence[T]) -> list[T]:
    return [*items[:left_out.start], *items[left_out.stop:]]


def largest_subsequences(cuts: Sequence[int]) -> list[int]:
    """Picks the subsequences that request most: the first, and shorter ones, whose rows may be cut less."""
    first = {n: i for i, n in reversed(list(enumerate(cuts)))}
    shorter = sorted(i for i in first.values() if i > PIECES_BEFORE)
    return [*range(PIECES_BEFORE + 1), *shorter[::-(-len(shorter) // MORE_LENGTHS) or 1]]


def kernel_requests(name: str, args: Sequence, threads: int = 1, deterministic: bool = False,
                    multiprocessors: int = 0, documents: bool = False) -> list[int]:
    """Lists the bytes of each request that an operation `name` makes for itself: on the CPU as in torch's
    FlashAttentionKernel.cpp; on a GPU backends.workspaces(), and what torch's flash makes contiguous."""
    copies = []
    backward = name.endswith("_backward")
    if name == "memo::attention_backward":
        kernel, q, k = args[0], args[1].shape, args[2].shape
    elif "scaled_dot_product" in name and "for_cpu" in name:
        query, key = args[1:3] if backward else args[:2]  # (B, H, T, D)
        T, D, keys = query.shape[2], query.shape[3], min(512, key.shape[2])
        queries = 256 if T >= 768 else 64 if T >= 192 else 32
        scores = queries * keys * (4 + 2 * (query.element_size() == 2))
        return [threads * 2 * scores + 4 * queries if backward else
                threads * (scores + (2 + D) * queries * 4)]
    elif "scaled_dot_product" in name and backward:
        kernel, (q, k) = "cudnn" if "cudnn" in name else "flash", (t.transpose(1, 2).shape for t in args[1:3])
        if kernel == "flash":
            copies = [t.nbytes for t in (args[0], args[4]) if not t.transpose(1, 2).is_contiguous()]
    elif name.endswith("_flash_attention_backward") and args[1].dim() == 4:  # within a band
        kernel, q, k = "flash", args[1].shape, args[2].shape
        copies = [t.nbytes for t in (args[0], args[4]) if not t.is_contiguous()]
    else:
        return []
    return copies + workspaces(kernel, q, k, deterministic, multiprocessors, documents)


class FakeArena(TorchDispatchMode):
    """Records the requests of segments on fake tensors: of operations' results, and traced_requests()'s."""

    def __init__(self, requests: RequestsOf | None = None) -> None:
        super().__init__()
        self.requests, self.ids = requests, count(1)
        self.log: list[Entry] = []
        self.known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # storages

    def fence(self, varies: bool) -> Callable[[], object]:
        return lambda: None  # documents are rehearsed, not traced

    def run(self, label: str, work: Callable[..., Result], *args: object) -> Result:
        self.log.append(("begin", label, 0))
        with self:
            result = work(*args)
        self.log.append(("end", label, 0))
        return result

    def __torch_dispatch__(self, func: OpOverload, types: Sequence[type], args: tuple = (),
                           kwargs: dict | None = None) -> object:
        leaves = tree_leaves((args, kwargs))
        old = {t.untyped_storage()._cdata for t in leaves if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs or {})
        for storage in [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]:
            if storage.nbytes() and storage._cdata not in old and storage not in self.known:
                event = self.known[storage] = str(next(self.ids)), storage.nbytes()
                self.log.append(("malloc", *event))
                weakref.finalize(storage, self.log.append, ("free", *event)).atexit = False
        sizes = self.requests(func.name(), args) if self.requests else ()
        own = [(str(next(self.ids)), nbytes) for nbytes in sizes]
        self.log += [("malloc", *event) for event in own] + [("free", *event) for event in reversed(own)]
        return result

    def recorded(self) -> Trace:
        return checked_trace(self.log).settled()
