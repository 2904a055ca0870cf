"""Measures speeds on the machine at hand: of a step's operations, for memo.estimate (memo.profiler
--calibrate); of a run's own layer, states and copies, before its first step, for the alpha program.

Operations are those that a run calls, at several sizes, each timed on all ranks together; the slowest rank's
figure counts. Measuring a block overwrites its buffers, and its gradients.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial

import torch

from memo.config.config import Config
from memo.config.keys import Keys
from memo.config.layer import ATTENTION, groups_of
from memo.decide.step_seconds import MeanRates, StateSeconds, UnitRates
from memo.decide.where import Rates
from memo.errors import ConfigError, Unusable
from memo.estimate.pipeline_seconds import ADAMW_BYTES
from memo.estimate.roofline import ATTENTION_BACKWARD, PASSES
from memo.kernels import fp8
from memo.kernels.attention import resolve_attention
from memo.kernels.backends import check_matmul
from memo.kernels.matmul import accumulate_product, product
from memo.kernels.ops import gelu_backward, gelu_forward, resolve_ops
from memo.layer.tiles import Packed
from memo.memory.buffers import Swap, copy_bytes
from memo.memory.slab import HostSlab, available
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena, NoArena
from memo.schedule.step import Unit
from memo.schedule.streams import Streams, close_streams, open_streams
from memo.states.optim import Optimizer, adamw_step
from memo.states.passes import Model
from memo.states.transformer import LayerBlock
from memo.system import hardware
from memo.system.axis import Axis
from memo.system.command import progress
from memo.system.device import device_name, gpu_facts, synchronize
from memo.system.files import keep, readable_json

# measurements of each operation, the least seconds of one, and rounds of all of them: what else runs on a
# machine may last as long as all repeats of one operation
REPEATS, LEAST_S, ROUNDS = 3, 0.02, 2
LONG_S = 0.5  # a call of a run's own layer that takes longer is measured once
BEHIND = 10  # messages of a measurement, each behind computing
STAGING_BYTES = 2**28  # of each direction's copies of a run; large enough for the full speed of a bus
# columns of the tensors of elementwise passes, and those of one head. A GPU's programs have a row each
ROW_WIDTH, HEAD_DIM = {"cpu": 512, "cuda": 4096}, {"cpu": 64, "cuda": 128}
Call = Callable[[], object]
Job = tuple[Call, float]  # what is timed, and its FLOPs or bytes
Timings = tuple[float, float, float]  # seconds: by itself, behind computing, that computing alone


def slowest_seconds(call: Call, n: int, device: torch.device, host: Axis) -> float:
    """Times one of n calls, on the slowest rank. All ranks begin together."""
    synchronize(device)
    host.max(0.0)
    start = time.perf_counter()
    for _ in range(n):
        call()
    synchronize(device)
    return host.max((time.perf_counter() - start) / n)[0]


def fastest_seconds(call: Call, device: torch.device, host: Axis) -> float:
    """Times call() on the slowest rank, the least of REPEATS: what else runs on a machine only adds."""
    call()
    n = max(1, int(LEAST_S / slowest_seconds(call, 1, device, host)))
    return min(slowest_seconds(call, n, device, host) for _ in range(REPEATS))


def least_seconds(device: torch.device, call: Call, before: Call = lambda: None,
                  host: Axis = ALONE.host) -> float:
    """Times call(), which has run before, on the slowest rank: the least of three, `before` ahead of each."""
    best = float("inf")
    for _ in range(3):
        before()
        best = min(best, slowest_seconds(call, 1, device, host))
        if best > LONG_S:
            break
    return best


# --- the operations of a step ---

def timings_behind(computing: Call, message: Call, device: torch.device, host: Axis) -> Timings:
    """Times a message behind computing, each on the slowest rank and the least of REPEATS, as Timings."""
    def both() -> None:
        computing()
        message()

    both()
    seconds = [[slowest_seconds(call, BEHIND, device, host) for call in (both, computing)]
               for _ in range(REPEATS)]
    together, alone = map(min, zip(*seconds, strict=True))
    return fastest_seconds(message, device, host), together, alone


def seconds_of(rounds: Iterable[Timings]) -> float:
    """Counts an operation's seconds: a message's are those that it adds to computing, no less than alone.
    Waiting for ranks that are late in turns is in these; for one that always is, in the computing's."""
    itself, together, alone = map(min, zip(*rounds, strict=True))
    return max(itself, together - alone)


def open_arena(device: torch.device) -> Arena | NoArena:
    """Opens the arena of temporary tensors, as a run has it."""
    with suppress(Unusable):
        return Arena(device)
    return NoArena()


def matmuls(size: int, rows: int, dtype: torch.dtype, device: torch.device,
            with_fp8: bool = False) -> dict[str, Job]:
    """Makes {operation: (call, FLOPs)} of a linear: forward, the gradient of x, the gradient of w."""
    x, y, dx = (torch.randn(1, rows, size, dtype=dtype, device=device) for _ in range(3))  # (tp, n, width)
    w, dw = torch.randn(size, size, dtype=dtype, device=device), torch.zeros(size, size, device=device)

    def products() -> None:
        product(x, w.t(), out=y)
        product(y, w, out=dx)
        accumulate_product(dw, y[0].t(), x[0])
    flops = 6 * rows * size * size
    jobs: dict[str, Job] = {"matmul": (products, flops)}
    if with_fp8:
        xq, g, matrix = fp8.rows(x), fp8.gradients(y), fp8.weights(w)
        dyq, operands = fp8.rounded(g.q, g.scale[..., None], fp8.E5M2), fp8.gradient_operands(g, xq)

        def fp8_products() -> None:
            fp8.products(xq.q, xq.scale, matrix, y, fast=True)
            fp8.products(dyq, g.scale, matrix.t(), dx)
            fp8.add_product(dw, *operands)
        jobs["matmul fp8"] = fp8_products, flops
    return jobs


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Says whether FP8 products run on a device beside others in a dtype."""
    with suppress(ConfigError):
        check_matmul(Config(matmul="fp8"), gpu_facts(device)["capability"], dtype.itemsize)
        return True
    return False


def row_passes(nbytes: int, dtype: torch.dtype, device: torch.device) -> dict[str, Job]:
    """Makes {operation: (call, bytes read and written)} over tensors of about so many bytes."""
    C, D = ROW_WIDTH[device.type], HEAD_DIM[device.type]
    rows = max(1, nbytes // dtype.itemsize // C)
    x, y, out, gate, up = (torch.randn(rows, C, dtype=dtype, device=device) for _ in range(5))
    w, u = torch.ones(C, dtype=dtype, device=device), x.nbytes
    angles = torch.randn(rows, D // 2, device=device)
    turn = torch.polar(torch.ones_like(angles), angles)
    mean, rstd = x.float().mean(1), torch.ones(rows, device=device)
    flat, dw = torch.randn(4, x.numel(), device=device), torch.zeros(C, device=device)
    steps, parts = torch.ones((), device=device), x.view(1, rows, -1, D)  # (B, T, H, D)
    lse = torch.zeros(1, parts.shape[2], rows, device=device)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    ops, _ = resolve_ops("auto", device)
    calls = {"rotary": partial(ops.rotary, x[:, None], turn[:, None], back=False),
             "merge": partial(ops.merge, parts.float(), lse, parts, lse),
             "swiglu forward": partial(ops.swiglu_forward, x, y, out),
             "cross entropy": partial(ops.cross_entropy, ALONE.weights, out, targets, gradient=True),
             "swiglu backward": partial(ops.swiglu_backward, out, gate, up)}
    for op, kept in (("norm", mean), ("rms norm", None)):
        calls[f"{op} forward"] = partial(ops.norm_forward, x, w, None, out, kept, rstd, 1e-5)
        calls[f"{op} backward"] = partial(ops.norm_backward, x, y, x, kept, rstd, w, None, dw, None, out)

    def optimizer() -> None:
        gradient, exp_avg, exp_avg_sq, master = flat
        adamw_step(master, gradient, exp_avg, exp_avg_sq, steps, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    flat[2].abs_()  # a second moment is not negative
    return {**{op: (call, PASSES[op] * u) for op, call in calls.items()},
            "gelu forward": (partial(gelu_forward, x, "none", out=out), 2 * u),
            "gelu backward": (partial(gelu_backward, y, x, "none", out=out), 3 * u),
            "copy": (partial(torch.add, x, y, out=out), 3 * u),
            "adamw": (optimizer, ADAMW_BYTES * x.numel())}


def attentions(T: int, D: int, dtype: torch.dtype, device: torch.device, name: str = "auto",
               causal: bool = True) -> dict[str, Job]:
    """Makes {operation: (call, FLOPs)} over T tokens of a few heads; without `causal` all see all."""
    attention, what = resolve_attention(name, device, dtype, D), "attention" + " full" * (not causal)
    H = max(2, torch.get_num_threads()) if device.type == "cpu" else 16
    q, k, v, dout = (torch.randn(1, T, H, D, dtype=dtype, device=device) for _ in range(4))
    flops = (2 if causal else 4) * H * T * T * D
    out, lse = attention.forward(q, k, v, causal)
    backward = partial(attention.backward, dout, q, k, v, out, lse, causal)
    return {f"{what} forward": (partial(attention.forward, q, k, v, causal), flops),
            f"{what} backward": (backward, ATTENTION_BACKWARD * flops)}


def messages(nbytes: int, axis: Axis, device: torch.device) -> dict[str, Job]:
    """Makes {operation: (call, bytes a rank sends)}."""
    x = torch.zeros(axis.size, -(-nbytes // 4 // axis.size), device=device)
    rest = x.nbytes * (axis.size - 1) // axis.size
    return {"gather": (partial(axis.gather, x[0]), rest), "scatter": (partial(axis.scatter_sum, x), rest),
            "exchange": (partial(axis.exchange, x), rest), "shift": (lambda: axis.shift(x).wait(), x.nbytes),
            "broadcast": (lambda: axis.start_broadcast(x, 0).wait(), x.nbytes),
            "reduce": (lambda: axis.start_reduce(x, 0).wait(), x.nbytes)}


def copy_rates(buffer: torch.Tensor, streams: Streams, pin: bool, host: Axis) -> tuple[float, float]:
    """Measures bytes/s (device to host, host to device), both at once, on all ranks of `host`."""
    nbytes: int = min(STAGING_BYTES, len(buffer) // 2)
    slab = HostSlab(2 * nbytes, buffer.device, pin)
    to_host = [(slab.bytes[:nbytes], buffer[:nbytes])]
    to_device = [(buffer[-nbytes:], slab.bytes[-nbytes:])]
    host.max(0)  # ranks that share a link, or a host's memory, begin when all of them are ready
    try:
        for _ in range(4):  # the first one warms up
            streams.offload.launch("measure", copy_bytes, to_host)
            streams.prefetch.launch("measure", copy_bytes, to_device)
    finally:
        streams.offload.synchronize()
        streams.prefetch.synchronize()
        slab.close()
    spans = streams.timeline.take()

    def rate(stream: str) -> float:
        copies = [s for s in spans if (s.label, s.stream) == ("measure", stream)][1:]
        return len(copies) * nbytes / (copies[-1].end_s - copies[0].start_s)
    return rate("offload"), rate("prefetch")


def copy_rate(nbytes: int, device: torch.device, host: Axis) -> float:
    """Measures copy_rates() of so many bytes each way, of the slower direction on the slowest rank."""
    streams = open_streams(device)
    rates = copy_rates(torch.zeros(2 * nbytes, dtype=torch.uint8, device=device), streams, True, host)
    close_streams(streams)
    return -host.max(-min(rates))[0]


def counted(op: str) -> str:
    """Says what the speed of an operation counts."""
    return "FLOPs" if op.startswith(("matmul", "attention")) else "bytes"


def calibrate(axis: Axis, host: Axis, device: torch.device, dtype: torch.dtype, local_ranks: int) -> Keys:
    """Measures the figures of the Machine "here", stores and returns them. `host`: `axis` over gloo."""
    times = defaultdict[tuple[str, float, float], list[Timings]](list)  # of (operation, size, FLOPs or bytes)
    cuda, doing = device.type == "cuda", ""
    rows = 2**16 if cuda else 4096  # of products

    with progress(lambda: f"measuring {doing}", axis.rank == 0), closing(open_arena(device)) as arena:
        def measure(calls: dict[str, Job], size: int | None, label: int,
                    computing: Call | None = None) -> None:
            nonlocal doing
            for op, (call, amount) in calls.items():
                doing = f"{op}, {amount:.2g} {counted(op)}"
                segment = partial(arena.run, f"{op} {label}", call)
                segment()  # the first run is recorded, and may build the library of the memory plan
                arena.settle()
                times[op, size or amount, amount].append(
                    timings_behind(computing, segment, device, host) if computing else
                    (fastest_seconds(segment, device, host), 0.0, 0.0))
        for _ in range(ROUNDS):
            for size in (64, 128, 256, 512, 1024, 2048, *((4096, 8192) if cuda else ())):
                measure(matmuls(size, rows, dtype, device, has_fp8(device, dtype)), size, size)
            for T in (2048, 8192, 32768, 65536) if cuda else (128, 512, 1024, 2048, 4096, 8192):
                for causal in (True, False):
                    measure(attentions(T, 128 if cuda else 64, dtype, device, "auto", causal), T, T)
            for nbytes in (2**24, 2**26, 2**28) if cuda else (2**16, 2**19, 2**21, 2**23, 2**25):
                measure(row_passes(nbytes, dtype, device), None, nbytes)
            computing, _ = matmuls(1024 if cuda else 128, rows, dtype, device)["matmul"]
            for nbytes in (2**8, 2**12, 2**16, 2**18, 2**20, 2**23, 2**26) if axis.size > 1 else ():
                measure(messages(nbytes, axis, device), None, nbytes, computing)
    table = defaultdict[str, list[hardware.Point]](list)
    for (op, size, amount), rounds in sorted(times.items()):
        table[op].append((size, amount / seconds_of(rounds)))
    table["memory"] = table["copy"]
    table["link"] = table["network"] = [(1, 1.0)]  # the figures of `node` are measured ones: all of them
    shift = table["shift"][-1][1] if axis.size > 1 else 1.0
    tiny, name = torch.zeros(1, device=device), device_name(device)
    node = dict(gpus_per_node=local_ranks, host_memory_bytes=int(*host.max(available())),
                pcie_bytes_per_s=copy_rate(2**28 if cuda else 2**25, device, host), nvlink_bytes_per_s=shift,
                network_bytes_per_s=shift, host_bytes_per_s=table["adamw"][-1][1])
    measured = dict(format=hardware.CALIBRATION_FORMAT, device=name, threads=torch.get_num_threads(),
                    ranks=axis.size, node=node, itemsize=dtype.itemsize, speeds=table,
                    overhead_s=fastest_seconds(partial(tiny.add_, 1), device, host),
                    memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
                    peak_flops_per_s=hardware.peak_flops_per_s(name), **gpu_facts(device))
    if axis.rank == 0:
        keep(readable_json(measured).encode(), hardware.calibration_path(axis.size))
    return measured


# --- a run's own layer ---

def unit_rates(block: LayerBlock, swap: Swap, unit: Unit, device: torch.device, host: Axis) -> UnitRates:
    """Times `block` at a subsequence, behind those before, in the buffer of a layer's unit."""
    s, (_, y) = swap.units[unit], swap.between[unit]
    generator = torch.Generator(device).manual_seed(unit.subsequence)
    forward, backward = partial(block.forward, s, y), partial(block.backward, y, s)

    def refill() -> None:
        s.x.normal_(generator=generator)
        forward()

    def recompute_s(tensors: Iterable[str]) -> float:  # of all rows of these, and none of the others
        rows = dict.fromkeys(tensors, slice(None))
        return max(0.0, least_seconds(device, partial(block.recompute, s, rows), host=host) - launches_s)

    refill()  # untimed: libraries load, attention's kernels are chosen
    forward_s = least_seconds(device, forward, host=host)
    launches_s = 0.0
    launches_s = recompute_s(())
    groups_s = {name: recompute_s(tensors) for name, tensors in groups_of(swap.tensors).items()}
    p = swap.placement
    attention_s = recompute_s((ATTENTION,)) if p.several or p.layers_come else 0.0
    sweep_s = least_seconds(device, partial(block.sweep, s, s.x), host=host) if p.several else 0.0
    backward()
    backward_s = least_seconds(device, backward, before=refill, host=host)
    return UnitRates(len(s.x), forward_s, backward_s, sweep_s, attention_s, groups_s)


def layer_rates(model: Model) -> tuple[list[MeanRates], int | None]:
    """Times the units of a layer, one a subsequence, in the mean of all kinds -> (these, transient_bytes)."""
    block, swap, device, host = model.gpt.blocks[0], model.swap, model.device, model.mesh.peers
    cuda, before = device.type == "cuda", 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    units = [MeanRates({model.cfg.stage_kinds[k]: (unit_rates(block, swap, Unit(k, i), device, host), part)
                        for k, part in model.first_of_kinds.items()})
             for i in range(swap.placement.subsequences)]
    return units, int(*host.max(torch.cuda.max_memory_allocated(device) - before)) if cuda else None


def measured_states(model: Model) -> StateSeconds:
    """Times the steps that move a layer's states, on the slowest of all ranks."""
    optimizer, k = model.optimizer, 1
    assert isinstance(optimizer, Optimizer)
    embedding, layer, *_, head = (end - start for start, end in model.buckets)

    def seconds(move: Callable[..., object], *args: object) -> float:
        return least_seconds(model.device, partial(move, k, *args), host=model.mesh.host)
    def leave(k: int) -> None:
        model.mesh.replicas.start_scatter_sum(model.bucket_grads[k], optimizer.grads[k]).wait()
        optimizer.leave(k)
    found = StateSeconds(seconds(optimizer.bring_weights), seconds(leave),
                         seconds(optimizer.bring_sums, True) * (model.micro_batches > 1),
                         embedding / layer, head / layer)
    model.grads.zero_()
    optimizer.put(k)  # the gradients may have had the place of the weights
    return found


def measure(model: Model, pin: bool, typical: Packed | None = None) -> Rates:
    """Measures the Rates of a layer, of the slowest of the peers; all ranks copy at once. `typical`: with
    documents, of a batch: seconds are its; memory, which only a GPU is asked for, is that of the worst, one
    document a sequence."""
    swap, peers, cuda = model.swap, model.mesh.peers, model.device.type == "cuda"
    synchronize(model.device)
    swap.streams.timeline.take()
    if typical:
        model.meet(model.one_document() if cuda else typical)
    units, transient = layer_rates(model)
    if typical and cuda:
        model.meet(typical)
        units, _ = layer_rates(model)
    buffer = max(swap.buffers.values(), key=len)
    rates = copy_rates(buffer, swap.streams, pin, model.mesh.host)
    offload, prefetch = peers.max(*(-rate for rate in rates))
    return Rates(tuple(units), -offload, -prefetch, transient)
