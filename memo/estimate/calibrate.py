"""Measures how fast this machine does what a step consists of, for memo.estimate:

    python -m memo.profiler --calibrate                                  one rank
    torchrun --nproc_per_node=8 -m memo.profiler --calibrate             eight at once, and what they send each other

The operations are those of model.py, at several sizes, each timed on all ranks together; the slowest rank's
figure counts.
"""

import time
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.optim.adamw import adamw

from memo.attention import resolve_attention
from memo.command import progress
from memo.device import device_name, gpu_facts, synchronize
from memo.estimate import hardware
from memo.estimate.roofline import PASSES
from memo.files import save_json
from memo.ops import resolve_ops
from memo.planner.allocator import Arena, NoArena, Unavailable
from memo.swap.buffers import copy_bytes
from memo.swap.slab import HostSlab, available

REPEATS, LEAST_S = 5, 0.02  # of each measurement, and how long one lasts at least
ROW_WIDTH = 512  # columns of what is passed over row by row


def median_seconds(call, device, host):
    """Median seconds of call() on the slowest rank; all ranks measure at once."""
    def timed(n):
        synchronize(device)
        host.max(0.0)  # together
        start = time.perf_counter()
        for _ in range(n):
            call()
        synchronize(device)
        return host.max((time.perf_counter() - start) / n)[0]
    call()
    n = max(1, int(LEAST_S / timed(1)))
    return sorted(timed(n) for _ in range(REPEATS))[REPEATS // 2]


@contextmanager
def opened_arena(device):
    """Where temporary tensors get their memory in a run too."""
    try:
        arena = Arena(device)
    except Unavailable:
        arena = NoArena()
    try:
        yield arena
    finally:
        arena.close()


def matmuls(size, rows, dtype, device):
    """(calls, FLOPs): forward, the gradient of x, that of w."""
    x, y, dx, w = (torch.randn(n, size, dtype=dtype, device=device) for n in (rows, rows, rows, size))
    dw = torch.zeros(size, size, device=device)

    def products():
        torch.mm(x, w.t(), out=y)
        torch.mm(y, w, out=dx)
        if dtype == torch.float32:
            dw.addmm_(y.t(), x)
        elif device.type == "cuda":
            torch.ops.aten.addmm.dtype_out(dw, y.t(), x, torch.float32, out=dw)
        else:
            dw.add_(y.t() @ x)
    return products, 6 * rows * size * size


def row_passes(nbytes, dtype, device):
    """{operation: (call, bytes read and written)} over tensors of about so many bytes."""
    rows = max(1, nbytes // dtype.itemsize // ROW_WIDTH)
    x, y, out = (torch.randn(rows, ROW_WIDTH, dtype=dtype, device=device) for _ in range(3))
    w, u = torch.ones(ROW_WIDTH, dtype=dtype, device=device), x.nbytes
    turn = torch.polar(torch.ones(rows, 32, device=device), torch.randn(rows, 32, device=device))
    mean, rstd = x.float().mean(1), torch.ones(rows, device=device)
    flat, dw = torch.randn(4, x.numel(), device=device), torch.zeros(ROW_WIDTH, device=device)
    steps = torch.ones((), device=device)
    ops, _ = resolve_ops("auto", device)
    calls = {"norm forward": partial(ops.layernorm_forward, x, w, None, out, mean, rstd),
             "norm backward": partial(ops.layernorm_backward, x, y, x, mean, rstd, w, None, dw, None, out),
             "rotary": partial(ops.rotary, x[:, None], turn[:, None], back=False)}

    def softmax():
        p = torch.softmax(x, 1, dtype=torch.float32)
        p.to(dtype)

    def optimizer():
        g, m, v, master = ([t] for t in flat)
        adamw(master, g, m, v, [], [steps], fused=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-4, eps=1e-8,
              maximize=False, weight_decay=0.1)
    flat[2].abs_()
    return {**{op: (call, PASSES[op] * u) for op, call in calls.items()},
            "gelu forward": (partial(torch.ops.aten.gelu.out, x, approximate="none", out=out), 2 * u),
            "gelu backward": (partial(torch.ops.aten.gelu_backward.grad_input, y, x, approximate="none", grad_input=out), 3 * u),
            "softmax": (softmax, x.numel() * (2 * dtype.itemsize + 8)), "copy": (partial(torch.add, x, y, out=out), 3 * u),
            "adamw": (optimizer, 28 * x.numel())}


def attentions(T, D, dtype, device):
    """{operation: (call, FLOPs)} over T causal tokens of a few heads."""
    attention = resolve_attention("auto", device, dtype, D)
    H = max(2, torch.get_num_threads()) if device.type == "cpu" else 16
    q, k, v, dout = (torch.randn(1, T, H, D, dtype=dtype, device=device) for _ in range(4))
    out, lse = attention.forward(q, k, v, True, D**-0.5)
    flops = 2 * H * T * T * D
    return {"attention forward": (partial(attention.forward, q, k, v, True, D**-0.5), flops),
            "attention backward": (partial(attention.backward, dout, q, k, v, out, lse, True, D**-0.5), 2.5 * flops)}


def messages(nbytes, axis, device):
    """{operation: (call, bytes a rank sends)}."""
    x = torch.zeros(axis.size, nbytes // 4 // axis.size, device=device)
    rest = x.nbytes * (axis.size - 1) // axis.size
    return {"gather": (partial(axis.gather, x[0]), rest), "scatter": (partial(axis.scatter_sum, x), rest),
            "exchange": (partial(axis.exchange, x), rest), "shift": (lambda: axis.shift(x).wait(), x.nbytes)}


def copy_rate(nbytes, device, host):
    """Bytes per second from the device to the host while all ranks copy."""
    buffer, slab = torch.zeros(nbytes, dtype=torch.uint8, device=device), HostSlab(nbytes, device)
    try:
        return nbytes / median_seconds(partial(copy_bytes, [(slab.bytes, buffer)]), device, host)
    finally:
        slab.close()


def calibrate(axis, host, device, dtype, local_ranks):
    """Measures, stores and returns what the Machine "here" of hardware.py is made of. `axis`: of all ranks,
    over the devices' network; `host` the same over gloo."""
    cuda, table, doing = device.type == "cuda", {}, ""

    def note(op, size, amount, call):
        nonlocal doing
        doing = f"{op}, {amount:.2g} {'FLOPs' if op.startswith(('matmul', 'attention')) else 'bytes'}"
        table.setdefault(op, []).append((size, amount / median_seconds(call, device, host)))
    telling = progress(lambda: f"measuring {doing}") if axis.rank == 0 else nullcontext()
    with telling, opened_arena(device) as arena:
        def measure(calls, size, label):
            for op, (call, amount) in calls.items():
                segment = partial(arena.run, f"{op} {label}", call)
                segment()
                arena.settle()
                note(op, size or amount, amount, segment)
        for size in (64, 128, 256, 512, 1024, 2048, *((4096, 8192) if cuda else ())):
            call, flops = matmuls(size, 2**16 if cuda else 4096, dtype, device)
            measure({"matmul": (call, flops)}, size, size)
        for T in (2048, 8192, 32768, 65536) if cuda else (512, 1024, 2048, 4096, 8192):
            measure(attentions(T, 128 if cuda else 64, dtype, device), T, T)
        for nbytes in (2**24, 2**26, 2**28) if cuda else (2**19, 2**21, 2**23, 2**25):
            measure(row_passes(nbytes, dtype, device), None, nbytes)
    for nbytes in (2**16, 2**20, 2**23, 2**26) if axis.size > 1 else ():
        for op, (call, amount) in messages(nbytes, axis, device).items():
            note(op, amount, amount, call)
    table["memory"] = table["copy"]
    table["link"] = table["network"] = [(1, 1.0)]  # parts of what stands in `node`
    shift = table["shift"][-1][1] if axis.size > 1 else 1.0
    tiny = torch.zeros(1, device=device)
    name, free = device_name(device), int(min(host.max(available())))
    rate = copy_rate(2**28 if cuda else 2**25, device, host)
    node = dict(gpus_per_node=local_ranks, host_memory_bytes=free, nvlink_bytes_per_s=shift,
                pcie_bytes_per_s=rate, network_bytes_per_s=shift, host_bytes_per_s=table["adamw"][-1][1])
    measured = dict(format=hardware.CALIBRATION_FORMAT, device=name, threads=torch.get_num_threads(), ranks=axis.size,
                    node=node, itemsize=dtype.itemsize, speeds=table,
                    overhead_s=median_seconds(partial(tiny.add_, 1), device, host),
                    memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
                    peak_flops_per_s=hardware.peak_flops_per_s(name), **gpu_facts(device))
    if axis.rank == 0:
        save_json(measured, hardware.calibration_path(axis.size))
    return measured
