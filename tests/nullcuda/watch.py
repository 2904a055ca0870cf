"""What null CUDA cannot know by itself, and what it has to say. Its library sees launches, copies and
products; which bytes a kernel of torch reads and writes, and so how long it takes, a dispatch mode tells it.

    NULL        the library: counts(), races(), now()
    Watch       a TorchDispatchMode that tells of every operation; memory requests stay what they are
    watching()  memo with Watch on, its streams and launches by their names, time.perf_counter in virtual time
"""

import ctypes
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COUNTS = ("launches", "bad launches", "products", "copies", "pageable copies", "syncs", "events", "waits",
          "mallocs", "frees", "registrations", "messages", "plans")  # null.h's Count


class Null:
    """The library that LD_PRELOAD names."""

    def __init__(self):
        self.lib = lib = ctypes.CDLL(os.environ["LD_PRELOAD"])
        lib.null_now.restype, lib.null_races.restype = ctypes.c_double, ctypes.c_size_t
        lib.null_name_stream.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        lib.null_did.argtypes = [ctypes.c_char_p, ctypes.c_double, ctypes.c_int, *[ctypes.c_void_p] * 3]
        lib.null_leave.argtypes = lib.null_meet.argtypes = [ctypes.c_long]
        lib.null_host_did.argtypes = [ctypes.c_char_p, ctypes.c_int, *[ctypes.c_void_p] * 3]

    def counts(self):
        numbers = (ctypes.c_longlong * len(COUNTS))()
        self.lib.null_counts(numbers)
        return dict(zip(COUNTS, numbers, strict=True))

    def memory(self):
        """(bytes in use on the device, the most there were)."""
        numbers = (ctypes.c_longlong * 2)()
        self.lib.null_memory(numbers)
        return tuple(numbers)

    def now(self):
        """Virtual seconds of this thread."""
        return self.lib.null_now()

    def races(self, clear=False):
        """A line for each race so far: who did what before, who did what now."""
        text = ctypes.create_string_buffer(self.lib.null_races(None, 0) + 1)
        self.lib.null_races(text, len(text))
        if clear:
            self.lib.null_clear_races()
        return text.value.decode().splitlines()

    def label(self, text):
        self.lib.null_label(text.encode())

    def leave(self, key):
        """What this thread did so far is done for whoever meets the key from now on."""
        self.lib.null_leave(key)

    def meet(self, key):
        self.lib.null_meet(key)

    def name_stream(self, stream, name):
        self.lib.null_name_stream(stream.cuda_stream, name.encode())

    @staticmethod
    def columns(accesses):
        n = len(accesses)
        return (n, (ctypes.c_void_p * n)(*(a for a, _, _ in accesses)),
                (ctypes.c_size_t * n)(*(b for _, b, _ in accesses)),
                (ctypes.c_char * n)(*(bytes([w]) for _, _, w in accesses)))

    def did(self, what, seconds, accesses):
        """accesses: [(address, bytes, whether written)] of the kernels that were just launched."""
        self.lib.null_did(what.encode(), seconds, *self.columns(accesses))

    def host_did(self, what, accesses):
        self.lib.null_host_did(what.encode(), *self.columns(accesses))


NULL = Null()


# --- what an operation reads and writes ---

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # timed by the library; a kernel in them copies what is added to
# in place; they do not read what was there
REPLACING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "masked_fill_")
# {name: (operand, times)}: of the table that they look up or add to they touch as much as of this operand
INDEXING = {"gather": ("result", 2), "index_select": ("result", 2), "index": ("result", 2),
            "embedding": ("result", 2), "scatter_": (3, 2), "index_add_": (3, 3)}
TWICE = {"native_layer_norm_backward": (0, 1)}  # dy and x: once for dx, once more for dw and db


@cache
def is_view(func):
    """Whether an operation's result is its operand, seen in another way."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def span(t):
    """(address, bytes) from a tensor's first element to behind its last."""
    last = (sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
            if t.numel() else 0)
    return t.data_ptr(), last * t.itemsize


def nbytes(t):
    """Of the elements that are there: an expanded one counts once."""
    return t.itemsize * torch.Size([n for n, stride in zip(t.shape, t.stride(), strict=True)
                                    if stride or n == 1]).numel()


@cache
def mutated(func):
    """[(name, whether it is an out=)] of the arguments that an operation writes, by position or name."""
    return {(i if not a.kwarg_only else a.name): a.kwarg_only or a.name in ("out", "grad_input")
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write}


def tensors(value):
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def touched(func, name, args, kwargs, result):
    """(tensors read, tensors written) of an operation."""
    reads, writes = [], []
    for key, value in [*enumerate(args), *kwargs.items()]:
        out = mutated(func).get(key)
        if out is not None:
            writes += tensors(value)
        if out is None or not (out or name in REPLACING):
            reads += tensors(value)
    mine = {id(t) for t in (*reads, *writes)}
    writes += [t for t in tensors(result) if id(t) not in mine]
    if name in PRODUCTS or name.endswith("_like"):  # which takes a shape only
        reads = reads[:1] if name in ("addmm", "baddbmm") else []
    return reads, writes


class Watch(TorchDispatchMode):
    """Tells NULL of every operation what its kernels touched and how long they took, at the rates of
    `speeds`, a hardware.Speeds. Attention: the FLOPs of the half that the mask leaves, two products forward,
    five backward, at the kernel's own rate where there is one. Any other operation: the bytes that it reads
    and writes. Where an operation launched nothing (a view, a copy) the library leaves it."""

    def __init__(self, speeds):
        super().__init__()
        self.speeds = speeds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        name = func._schema.name.removeprefix("aten::")
        reads, writes = touched(func, name, args, kwargs, result)
        # not while shapes are only traced
        if all(type(t) is torch.Tensor and not t.is_meta for t in (*reads, *writes)):
            accesses = [(*span(t), writing) for ts, writing in ((reads, 0), (writes, 1)) for t in ts]
            if any(t.is_cuda for t in (*reads, *writes)):
                NULL.did(name, self.seconds(func, args, reads, writes, result), accesses)
            else:
                NULL.host_did(name, accesses)
        return result

    def seconds(self, func, args, reads, writes, result):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("_scaled_dot_product", "_flash_attention")):
            return self.attention_s(func, args)
        amount = sum(map(nbytes, reads)) + sum(map(nbytes, writes))
        amount += sum(nbytes(args[i]) for i in TWICE.get(name, ()))
        if name in INDEXING:
            where, times = INDEXING[name]
            amount = times * nbytes(result if where == "result" else args[where])
        return amount / self.speeds.rate("memory", amount)

    def attention_s(self, func, args):
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        q, k, causal = given["query"], given["key"], given.get("is_causal", False)  # (B, H, T, D)
        keys = k.shape[2] if q.dim() == 4 else given["max_k"]  # of documents (B*T, H, D): none has more
        way = "backward" if func._schema.name.endswith("_backward") else "forward"
        kernel = "cudnn" if "cudnn" in func._schema.name else "attention"
        names = (f"{kernel} full {way}",) * (not causal) + (f"{kernel} {way}", f"attention {way}")
        rate = self.speeds.rate(next(name for name in names if name in self.speeds.table), keys)
        flops = 4 * q.numel() * keys / (2 if causal else 1)
        return flops * (2.5 if way == "backward" else 1.0) / rate


# what the kernels of memo/kernels/fused.py write; they read the other tensors too, and each tensor once
KERNELS = dict(launch_norm_forward=("out", "mean", "rstd"), launch_norm_backward=("sums", "out"),
               launch_rotary=("x",), launch_merge=("out", "lse"), launch_swiglu_forward=("out",),
               launch_swiglu_backward=("gate", "up"))
UNREAD = ("launch_norm_forward out", "launch_norm_forward mean", "launch_norm_forward rstd",
          "launch_norm_backward sums", "launch_norm_backward out", "launch_swiglu_forward out")


@contextmanager
def kernels_that_tell(speeds):
    """memo's own kernels, which no dispatch mode sees."""
    from memo.kernels import fused
    with ExitStack() as stack:
        for name, real in [(name, getattr(fused, name)) for name in KERNELS]:
            def call(*args, real=real, name=name, **more):
                given = {k: t for k, t in zip(real.__code__.co_varnames, args, strict=False)
                         if isinstance(t, torch.Tensor)}
                reads = [t for k, t in given.items() if f"{name} {k}" not in UNREAD]
                writes = [given[k] for k in KERNELS[name] if k in given]  # RMSNorm has no mean
                real(*args, **more)
                amount = sum(map(nbytes, (*reads, *writes)))
                NULL.did(name, amount / speeds.rate("memory", amount), [*((*span(t), 0) for t in reads),
                                                                        *((*span(t), 1) for t in writes)])
            stack.enter_context(patch.object(fused, name, call))
        yield


@contextmanager
def te_that_tells(speeds):
    """transformer-engine's norms. Its products the library sees by itself."""
    from memo.kernels import te

    def telling(name, real):
        def call(*args):
            results = real(*args)
            reads, writes = (tensors([t for t in ts if t is not results[0]]) for ts in (args, results))
            writes += tensors(results[:1])
            amount = sum(map(nbytes, (*reads, *writes)))
            NULL.did(name, amount / speeds.rate("memory", amount), [*((*span(t), 0) for t in reads),
                                                                    *((*span(t), 1) for t in writes)])
            return results
        return call

    @cache
    def installed(real=te.installed):
        found = real()._asdict()
        norms = {name: telling(name, call) for name, call in found.items() if "norm" in name}
        return SimpleNamespace(**found | norms)
    with patch.object(te, "installed", installed):
        yield


@contextmanager
def watching(speeds):
    """memo as null CUDA shall see it."""
    from memo.schedule.streams import CudaStream

    def init(self, name, timeline, stream, real=CudaStream.__init__):
        real(self, name, timeline, stream)
        NULL.name_stream(stream, name)

    def launch(self, label, work, *args, real=CudaStream.launch):
        NULL.label(label)
        try:
            real(self, label, work, *args)
        finally:
            NULL.label("")
    with (patch.object(CudaStream, "__init__", init), patch.object(CudaStream, "launch", launch),
          patch.object(time, "perf_counter", NULL.now), threads_that_meet(), kernels_that_tell(speeds),
          te_that_tells(speeds), Watch(speeds)):
        yield


@contextmanager
def threads_that_meet():
    """Who starts a thread or joins it, sets a threading.Event or waits for it, is ordered with the other."""
    def run(self, real=threading.Thread.run):
        NULL.meet(id(self))
        try:
            real(self)
        finally:
            NULL.leave(id(self))

    def start(self, real=threading.Thread.start):
        NULL.leave(id(self))
        real(self)

    def join(self, timeout=None, real=threading.Thread.join):
        real(self, timeout)
        NULL.meet(id(self))

    def set(self, real=threading.Event.set):
        NULL.leave(id(self))
        real(self)

    def wait(self, timeout=None, real=threading.Event.wait):
        done = real(self, timeout)
        NULL.meet(id(self))
        return done
    with ExitStack() as stack:
        for where, calls in ((threading.Thread, (run, start, join)), (threading.Event, (set, wait))):
            for call in calls:
                stack.enter_context(patch.object(where, call.__name__, call))
        yield
