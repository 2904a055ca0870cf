"""What is found out before the first step, at the run's own shape. The rates that the alpha program needs: seconds of a
layer's forward, backward and recompute, bytes per second of the copies between device and host. And the memory requests
of a step, recorded from a rehearsal, or traced with torch's fake tensors, without memory or GPU.

The model or the block and its buffers are handed in; what they hold is overwritten, the gradients too.
"""

import sys
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from memo.command import Arguments, answer_early, end_with_reader, run


def read_argv(argv):
    parser = Arguments(prog="python -m memo.profiler", description="Measures this machine for memo.estimate --gpu=here; "
                       "under torchrun with all its ranks at once.")
    parser.add_argument("--calibrate", action="store_true", required=True, help="takes a minute or less, and stores it")
    parser.device_options()
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    end_with_reader()
    answer_early(read_argv)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo import planner
from memo.activations import TABLE
from memo.alpha import GROUPS
from memo.backends import workspaces
from memo.calibrate import calibrate
from memo.config import Config
from memo.device import pick_device, synchronize
from memo.hardware import calibration_path
from memo.mesh import ALONE, connected, launched, open_mesh
from memo.slab import HostSlab
from memo.streams import open_streams
from memo.swap import copy_bytes

STAGING_BYTES = 2**28  # of each direction's copies; large enough for the full speed of a bus
LONG_S = 0.5  # what takes longer is measured once


@dataclass(frozen=True)
class Rates:
    """What was measured. Seconds are of one layer at the run's shape, all rows."""

    forward_s: float
    backward_s: float
    recompute_s: dict  # {group of alpha.GROUPS: seconds}
    offload_bytes_per_s: float  # device to host and host to device, while both are busy
    prefetch_bytes_per_s: float
    transient_bytes: int | None  # the most a layer takes beside its buffers and parameters; None where that is not known


def seconds(device, call, before=lambda: None, host=ALONE.host):
    """Seconds of call(), which has run before: the least of three, or the first where that is long; on the slowest of the
    ranks of `host`, which all measure at once. `before` runs ahead of each, untimed."""
    best = float("inf")
    for _ in range(3):
        before()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, *host.max(time.perf_counter() - start))
        if best > LONG_S:
            break
    return best


def layer_rates(block, swap, turn, device, host):
    """(forward_s, backward_s, recompute_s, transient_bytes) of `block`, in the first layer's buffer."""
    s, x, y = swap.layers[0], swap.x[0], swap.x[1]
    generator = torch.Generator(device).manual_seed(0)

    forward, backward = partial(block.forward, s, turn, y), partial(block.backward, y, s, turn)

    def refill():
        x.normal_(generator=generator)
        forward()

    def recompute_s(tensors):  # of all rows of these, and none of the others
        rows = {t.name: slice(0 if t.name in tensors else len(x), None) for t in TABLE}
        return seconds(device, partial(block.recompute, s, turn, rows), host=host)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    refill()  # untimed: libraries load, attention's kernels are chosen
    forward_s = seconds(device, forward, host=host)
    launches_s = recompute_s(())
    groups_s = {name: max(0.0, recompute_s(tensors) - launches_s) for name, tensors in GROUPS.items()}
    backward()
    backward_s = seconds(device, backward, before=refill, host=host)
    transient = None
    if device.type == "cuda":
        transient = int(*host.max(torch.cuda.max_memory_allocated(device) - held))
    return forward_s, backward_s, groups_s, transient


def copy_rates(swap, device, pin):
    """(device to host, host to device) bytes per second, both directions busy at once, between a buffer and a host block
    of its own."""
    buffer = swap.buffers["fc1_out"]
    nbytes = min(STAGING_BYTES, buffer.nbytes // 2)
    slab = HostSlab(2 * nbytes, device, pin)
    to_host, to_device = ([(slab.bytes[:nbytes], buffer[:nbytes])], [(buffer[-nbytes:], slab.bytes[-nbytes:])])
    streams, rounds = swap.streams, 4
    try:
        for _ in range(rounds):
            streams.offload.launch("measure", copy_bytes, to_host)
            streams.prefetch.launch("measure", copy_bytes, to_device)
    finally:
        streams.offload.synchronize()
        streams.prefetch.synchronize()
        slab.close()
    spans = [s for s in streams.timeline.take() if s.label == "measure"]

    def rate(name):
        mine = [s for s in spans if s.stream == name][1:]  # the first one warms up
        return len(mine) * nbytes / (mine[-1].end_s - mine[0].start_s)
    return rate("offload"), rate("prefetch")


def measure(block, swap, turn, device, pin=True, host=ALONE.host):
    """The Rates of `block` in the buffers of `swap`: of the slowest rank of `host`, so that all of them decide alike."""
    synchronize(device)
    swap.streams.timeline.take()
    forward_s, backward_s, recompute_s, transient = layer_rates(block, swap, turn, device, host)
    slowest = host.max(*(-rate for rate in copy_rates(swap, device, pin)))
    return Rates(forward_s, backward_s, recompute_s, *(-rate for rate in slowest), transient)


# --- the memory requests of a step ---

class Rehearsal:
    """In the place of a model's arena while it goes through a step and an evaluation: of the segments that make the same
    requests (the layers are identical) only the first does anything. `order`: {label: that of its first like}."""

    def __init__(self, arena):
        self.arena, self.first, self.order = arena, {}, {}

    def run(self, label, work, *args):
        name, _, number = label.rpartition(" ")
        kind = name if number.isdigit() else label
        if name.endswith("recompute"):  # args: the layer's tensors, rotations, {tensor: slice of rows}
            kind += str(list(args[-1].values()))
        if kind not in self.first:
            self.first[kind] = label
            self.arena.run(label, work, *args)
        self.order[label] = self.first[kind]


def rehearse(model, arena):
    """The Trace of a training step and an evaluation's head at the reserved shape, as `arena` records it of one layer of
    each kind. Copies nothing; the model's gradients are zero afterwards."""
    swap, B, T = model.swap, *model.shape
    tokens = torch.arange(B * T, device=model.device).view(B, T) % model.cfg.vocab_size
    pairs, before, model.arena = swap.pairs, model.arena, Rehearsal(arena)
    swap.pairs = [[] for _ in pairs]
    try:
        model.forward(tokens, tokens, scale=1.0)
        model.backward()
        model.forward(tokens, tokens)
        return arena.recorded().repeated(model.arena.order.items())
    finally:
        swap.pairs, model.arena = pairs, before
        swap.streams.timeline.clear()
        model.grads.zero_()


def traced(make, B, T, missing, device="meta", requests=None):
    """The Trace of a step at (B, T) of the model that make(torch.device) builds, without memory or GPU: "meta" as it
    is on a GPU, "cpu" as on the CPU. `missing`: what each layer recomputes, see Placement.missing. requests(name of
    an operation, its arguments) -> bytes of each request of an attention kernel for itself, see kernel_requests; None
    leaves them out."""
    with FakeTensorMode() if device == "cpu" else nullcontext():
        model = make(torch.device(device))
        model.reserve(B, T, streams=open_streams(torch.device("cpu")))
        model.swap.missing = missing
        return rehearse(model, FakeArena(requests))


def kernel_requests(name, args, threads=1, deterministic=False, multiprocessors=0):
    """Bytes of each request that operation `name` of torch, or of memo.attention's for a package, makes for itself.
    On the CPU a block of scores (forward; backward also of their gradients) for each thread, as in torch's
    FlashAttentionKernel.cpp; on a GPU those of backends.workspaces, and torch's flash makes dout and out contiguous."""
    copies = []
    if name == "memo::attention_backward":
        kernel, (B, T, H, D) = args[0], args[1].shape
    elif "scaled_dot_product" not in name:
        return []
    elif "for_cpu" in name:
        return [cpu_workspace_bytes(*args[1:3], threads, True) if name.endswith("_backward") else
                cpu_workspace_bytes(*args[:2], threads, False)]
    elif name.endswith("_backward"):
        kernel, (B, H, T, D) = "cudnn" if "cudnn" in name else "flash", args[1].shape
        if kernel == "flash":
            copies = [t.nbytes for t in (args[0], args[4]) if not t.transpose(1, 2).is_contiguous()]
    else:
        return []
    return copies + workspaces(kernel, B, T, H, D, deterministic, multiprocessors)


def cpu_workspace_bytes(q, k, threads, backward):
    T, D, keys = q.shape[2], q.shape[3], min(512, k.shape[2])  # (B, H, T, D)
    queries = 256 if T >= 768 else 64 if T >= 192 else 32
    scores = queries * keys * (4 + 2 * (q.element_size() == 2))
    return threads * 2 * scores + 4 * queries if backward else threads * (scores + (2 + D) * queries * 4)


class FakeArena(TorchDispatchMode):
    """Records the requests of segments that run on fake tensors: those of each operation's results, and `requests`, see
    traced()."""

    def __init__(self, requests=None):
        super().__init__()
        self.log, self.known, self.ids, self.requests = [], weakref.WeakKeyDictionary(), 0, requests

    def run(self, label, work, *args):
        self.log.append(("begin", label, 0))
        with self:
            result = work(*args)
        self.log.append(("end", label, 0))
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old:
                self.note(t.untyped_storage())
        own = []
        for nbytes in self.requests(func.name(), args) if self.requests else ():
            self.ids += 1
            own.append((str(self.ids), nbytes))
        self.log += [("malloc", *event) for event in own] + [("free", *event) for event in reversed(own)]
        return result

    def note(self, storage):
        if storage.nbytes() and storage not in self.known:
            self.ids += 1
            event = (str(self.ids), storage.nbytes())
            self.known[storage] = event
            self.log.append(("malloc", *event))
            weakref.finalize(storage, self.log.append, ("free", *event)).atexit = False

    def recorded(self):
        """The Trace so far."""
        return planner.check(self.log).settled()


# --- the command ---

def main(argv):
    """python -m memo.profiler --calibrate. Errors: ConfigError."""
    args, launch = read_argv(argv), launched()
    device, dtype = pick_device(Config(device=args.device, dtype=args.dtype), launch.local_rank)
    if launch.rank == 0:
        calibration_path(launch.world)  # which it may not have
    if launch.threads:
        torch.set_num_threads(launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with connected(launch) as host:
        mesh = open_mesh(host, 1, host.size, device)
        measured = calibrate(mesh.tp, host, device, dtype, launch.local_world)
        mesh.close()
    if launch.rank == 0:
        print(f"{measured['device']}, {measured['ranks']} rank{'s' * (measured['ranks'] > 1)}: slowest and fastest")
        for op, points in sorted(measured["speeds"].items()):
            if op in ("link", "network", "memory"):
                continue
            rates, unit = [rate for _, rate in points], "GFLOPs" if op.startswith(("matmul", "attention")) else "GB"
            print(f"  {op:20}{min(rates) / 1e9:>12.2f}{max(rates) / 1e9:>12.2f}  {unit}/s")
        print(f"stored in {calibration_path(measured['ranks'])}")


if __name__ == "__main__":
    sys.exit(run(main))
