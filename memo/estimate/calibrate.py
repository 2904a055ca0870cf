"""Measures the speed of the operations of a step on this machine, for memo.estimate:

    python -m memo.profiler --calibrate                             one rank
    torchrun --nproc_per_node=8 -m memo.profiler --calibrate        eight at once, and their messages

The operations are those that a run calls (memo/ops.py, memo/parallel/tp.py, memo/optim.py), at several sizes,
each timed on all ranks together; the slowest rank's figure counts. Messages follow products there: what they
add to these counts (seconds_of).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial

import torch

from memo import fp8
from memo.attention import resolve_attention
from memo.backends import check_matmul
from memo.command import progress
from memo.config import Config
from memo.device import device_name, gpu_facts, synchronize
from memo.errors import ConfigError
from memo.estimate import hardware
from memo.estimate.pipeline_seconds import ADAMW_BYTES
from memo.estimate.roofline import ATTENTION_BACKWARD, PASSES
from memo.files import keep, readable_json
from memo.keys import Keys
from memo.matmul import accumulate_product, product
from memo.ops import gelu_backward, gelu_forward, resolve_ops
from memo.optim import adamw_step
from memo.parallel.axis import Axis
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena, NoArena, Unavailable
from memo.swap.buffers import copy_bytes
from memo.swap.slab import HostSlab, available

# measurements of each operation, the least seconds of one, and rounds of all of them: what else runs on a
# machine may last as long as all repeats of one operation
REPEATS, LEAST_S, ROUNDS = 3, 0.02, 2
BEHIND = 10  # messages of a measurement, each behind computing
# columns of the tensors of elementwise passes, and those of one head. A GPU's programs have a row each
ROW_WIDTH, HEAD_DIM = {"cpu": 512, "cuda": 4096}, {"cpu": 64, "cuda": 128}
Call = Callable[[], object]
Job = tuple[Call, float]  # what is timed, and its FLOPs or bytes
Timings = tuple[float, float, float]  # seconds: by itself, behind computing, that computing alone


def slowest_seconds(call: Call, n: int, device: torch.device, host: Axis) -> float:
    """Seconds of one of n calls, on the slowest rank. All ranks begin together."""
    synchronize(device)
    host.max(0.0)
    start = time.perf_counter()
    for _ in range(n):
        call()
    synchronize(device)
    return host.max((time.perf_counter() - start) / n)[0]


def fastest_seconds(call: Call, device: torch.device, host: Axis) -> float:
    """Seconds of call() on the slowest rank, the least of REPEATS: what else runs on a machine only adds. All
    ranks measure at once."""
    call()
    n = max(1, int(LEAST_S / slowest_seconds(call, 1, device, host)))
    return min(slowest_seconds(call, n, device, host) for _ in range(REPEATS))


def timings(call: Call, device: torch.device, host: Axis) -> Timings:
    """Of what is no message: nothing is before it."""
    return fastest_seconds(call, device, host), 0.0, 0.0


def timings_behind(computing: Call, message: Call, device: torch.device, host: Axis) -> Timings:
    """Of a message behind computing that all ranks do before it: each on the slowest rank and the least of
    REPEATS, the last two by turns. The host waits for the device at the end alone."""
    def both() -> None:
        computing()
        message()

    both()
    seconds = [[slowest_seconds(call, BEHIND, device, host) for call in (both, computing)]
               for _ in range(REPEATS)]
    together, alone = map(min, zip(*seconds, strict=True))
    return fastest_seconds(message, device, host), together, alone


def seconds_of(times: Timings) -> float:
    """Seconds of an operation; of a message those that it adds to computing, and no less than it takes by
    itself. Ranks that take turns at being late wait for each other, which is in these; a rank that is always
    late is in those of the computing."""
    itself, together, alone = times
    return max(itself, together - alone)


def open_arena(device: torch.device) -> Arena | NoArena:
    """Opens the arena of temporary tensors, as a run has it."""
    try:
        return Arena(device)
    except Unavailable:
        return NoArena()


def matmuls(size: int, rows: int, dtype: torch.dtype, device: torch.device,
            with_fp8: bool = False) -> dict[str, Job]:
    """{operation: (call, FLOPs)} of a linear: forward, the gradient of x, the gradient of w."""
    x, y, dx = (torch.randn(1, rows, size, dtype=dtype, device=device) for _ in range(3))  # (tp, n, width)
    w, dw = torch.randn(size, size, dtype=dtype, device=device), torch.zeros(size, size, device=device)

    def products() -> None:
        product(x, w.t(), out=y)
        product(y, w, out=dx)
        accumulate_product(dw, y[0].t(), x[0])
    calls: dict[str, Call] = {"matmul": products}
    if with_fp8:
        calls["matmul fp8"] = fp8_products(x, y, dx, w, dw)
    return {op: (call, 6 * rows * size * size) for op, call in calls.items()}


def fp8_products(x: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, w: torch.Tensor,
                 dw: torch.Tensor) -> Call:
    """The same three products in FP8; what they multiply is rounded before."""
    xq, g, matrix = fp8.rows(x), fp8.gradients(y), fp8.weights(w)
    dyq = fp8.rounded(g.dy, g.scale[..., None], fp8.E5M2)
    operands = fp8.gradient_operands(g, xq)

    def products() -> None:
        fp8.products(xq.q, xq.scale, matrix, y, fast=True)
        fp8.products(dyq, g.scale, matrix.t(), dx)
        fp8.add_product(dw, *operands)
    return products


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FP8 products run there beside others in a dtype."""
    try:
        check_matmul(Config(matmul="fp8"), gpu_facts(device)["capability"], dtype.itemsize)
    except ConfigError:
        return False
    return True


def row_passes(nbytes: int, dtype: torch.dtype, device: torch.device) -> dict[str, Job]:
    """{operation: (call, bytes read and written)} over tensors of about so many bytes."""
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
    """{operation: (call, FLOPs)} over T tokens of a few heads, with the kernel called `name`; without
    `causal` all see all."""
    attention, what = resolve_attention(name, device, dtype, D), "attention" + " full" * (not causal)
    H = max(2, torch.get_num_threads()) if device.type == "cpu" else 16
    q, k, v, dout = (torch.randn(1, T, H, D, dtype=dtype, device=device) for _ in range(4))
    flops, scale = (2 if causal else 4) * H * T * T * D, D**-0.5
    out, lse = attention.forward(q, k, v, causal, scale)
    backward = partial(attention.backward, dout, q, k, v, out, lse, causal, scale)
    return {f"{what} forward": (partial(attention.forward, q, k, v, causal, scale), flops),
            f"{what} backward": (backward, ATTENTION_BACKWARD * flops)}


def messages(nbytes: int, axis: Axis, device: torch.device) -> dict[str, Job]:
    """{operation: (call, bytes a rank sends)}."""
    x = torch.zeros(axis.size, -(-nbytes // 4 // axis.size), device=device)
    rest = x.nbytes * (axis.size - 1) // axis.size
    return {"gather": (partial(axis.gather, x[0]), rest), "scatter": (partial(axis.scatter_sum, x), rest),
            "exchange": (partial(axis.exchange, x), rest), "shift": (lambda: axis.shift(x).wait(), x.nbytes),
            "broadcast": (lambda: axis.start_broadcast(x, 0).wait(), x.nbytes),
            "reduce": (lambda: axis.start_reduce(x, 0).wait(), x.nbytes)}


def copy_rate(nbytes: int, device: torch.device, host: Axis) -> float:
    """Bytes per second in each direction between a GPU and the host, while all ranks copy in both, as a run
    with several subsequences does; on a CPU in one."""
    buffers, slab = torch.zeros(2, nbytes, dtype=torch.uint8, device=device), HostSlab(2 * nbytes, device)
    kept = slab.bytes.view(2, nbytes)
    lanes: list[AbstractContextManager[None]] = [nullcontext()]
    if device.type == "cuda":
        lanes = [torch.cuda.stream(torch.cuda.Stream(device)) for _ in range(2)]

    def copy() -> None:
        for lane, pair in zip(lanes, [(kept[0], buffers[0]), (buffers[1], kept[1])], strict=False):
            with lane:
                copy_bytes([pair])
    try:
        return nbytes / fastest_seconds(copy, device, host)
    finally:
        slab.close()


def calibrate(axis: Axis, host: Axis, device: torch.device, dtype: torch.dtype, local_ranks: int) -> Keys:
    """Measures the figures of the Machine "here" of hardware.py, stores and returns them. `axis`: of all
    ranks, over the devices' network; `host` the same over gloo."""
    amounts: dict[tuple[str, float], float] = {}  # FLOPs or bytes of (operation, size)
    least: dict[tuple[str, float], Timings] = {}  # of all rounds, each of the three by itself
    cuda, doing = device.type == "cuda", ""
    rows = 2**16 if cuda else 4096  # of products

    def say(op: str, amount: float) -> None:
        nonlocal doing
        doing = f"{op}, {amount:.2g} {'FLOPs' if op.startswith(('matmul', 'attention')) else 'bytes'}"

    with progress(lambda: f"measuring {doing}", axis.rank == 0), closing(open_arena(device)) as arena:
        def measure(calls: dict[str, Job], size: int | None, label: int,
                    timings_of: Callable[..., Timings] = timings) -> None:
            # a segment's first run is recorded, the others have planned memory
            for op, (call, amount) in calls.items():
                say(op, amount)  # the first run may build the library of the memory plan
                segment = partial(arena.run, f"{op} {label}", call)
                segment()
                arena.settle()
                point, (a, b, c) = (op, size or amount), timings_of(segment, device, host)
                amounts[point], known = amount, least.get(point, (a, b, c))
                least[point] = min(a, known[0]), min(b, known[1]), min(c, known[2])
        for _ in range(ROUNDS):
            for size in (64, 128, 256, 512, 1024, 2048, *((4096, 8192) if cuda else ())):
                measure(matmuls(size, rows, dtype, device, has_fp8(device, dtype)), size, size)
            for T in (2048, 8192, 32768, 65536) if cuda else (128, 512, 1024, 2048, 4096, 8192):
                for causal in (True, False):
                    measure(attentions(T, 128 if cuda else 64, dtype, device, "auto", causal), T, T)
            for nbytes in (2**24, 2**26, 2**28) if cuda else (2**16, 2**19, 2**21, 2**23, 2**25):
                measure(row_passes(nbytes, dtype, device), None, nbytes)
            computing, _ = matmuls(1024 if cuda else 128, rows, dtype, device)["matmul"]
            behind = partial(timings_behind, computing)
            for nbytes in (2**8, 2**12, 2**16, 2**18, 2**20, 2**23, 2**26) if axis.size > 1 else ():
                measure(messages(nbytes, axis, device), None, nbytes, behind)
    table: dict[str, list[hardware.Point]] = {}
    for op, size in sorted(least):
        table.setdefault(op, []).append((size, amounts[op, size] / seconds_of(least[op, size])))
    table["memory"] = table["copy"]
    table["link"] = table["network"] = [(1, 1.0)]  # the figures of `node` are measured ones: all of them
    shift = table["shift"][-1][1] if axis.size > 1 else 1.0
    tiny = torch.zeros(1, device=device)
    name, free = device_name(device), int(min(host.max(available())))
    rate = copy_rate(2**28 if cuda else 2**25, device, host)
    node = dict(gpus_per_node=local_ranks, host_memory_bytes=free, nvlink_bytes_per_s=shift,
                pcie_bytes_per_s=rate, network_bytes_per_s=shift, host_bytes_per_s=table["adamw"][-1][1])
    measured = dict(format=hardware.CALIBRATION_FORMAT, device=name, threads=torch.get_num_threads(),
                    ranks=axis.size, node=node, itemsize=dtype.itemsize, speeds=table,
                    overhead_s=fastest_seconds(partial(tiny.add_, 1), device, host),
                    memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
                    peak_flops_per_s=hardware.peak_flops_per_s(name), **gpu_facts(device))
    if axis.rank == 0:
        path = hardware.calibration_path(axis.size)
        keep(readable_json(measured).encode(), path)
    return measured
