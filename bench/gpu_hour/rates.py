"""B: bytes and rates, each beside what memo/system/hardware.py has."""

import os
import subprocess
import time

import torch

from bench.gpu_hour.kernels import attentions
from bench.gpu_hour.notes import (
    Skip,
    device,
    fitting,
    free_memory,
    machine_here,
    named,
    rate_of,
    shape,
    tensor_bytes,
)
from bench.gpu_hour.orchestra import ROOT, command_of, read
from bench.gpu_hour.right import train_here
from bench.gpu_hour.runs import measured
from bench.gpu_hour.several import calibrated, own_cache
from memo.memory.slab import HostSlab, available
from memo.run import measure
from memo.system import hardware

ROUND_S = 0.02


class Sampled:
    """SM clock and power of the first GPU while the block runs: `figures`, medians; {} without nvidia-smi."""

    def __enter__(self):
        self.figures = {}
        try:
            self.process = subprocess.Popen(
                ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms",
                 "100", "-i", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_):
        if self.process is None:
            return
        self.process.terminate()
        rows = []
        for line in self.process.communicate()[0].splitlines():
            try:
                rows.append([float(cell) for cell in line.split(",")])
            except ValueError:  # [N/A]
                continue
        if rows:
            clocks, watts = (sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True))
            self.figures = dict(sm_mhz=clocks, watts=watts)


def seconds_of(call, least_s=0.5, most=50):
    """Median seconds of a call, of rounds that fill `least_s`, behind two that warm up. A round has as many
    calls as hide what the host takes to wait for them."""
    def seconds(n):
        start = time.perf_counter()
        for _ in range(n):
            call()
        torch.cuda.synchronize()
        return max(1e-9, time.perf_counter() - start) / n
    seconds(1)
    n = max(1, min(1000, int(ROUND_S / seconds(1))))
    times, began = [], time.perf_counter()
    while len(times) < most and (len(times) < 2 or time.perf_counter() - began < least_s):
        times.append(seconds(n))
    return sorted(times)[len(times) // 2]


def rate(notes, what, call, amount, expected, unit, least_s=0.5, **more):
    """A line: amount per second of call(), in 1e12 FLOP/s or 1e9 bytes/s."""
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    with notes.trying(what):
        with Sampled() as sampled:
            seconds = seconds_of(call, least_s)
        peak = machine_here().peak_flops_per_s
        of_peak = dict(of_peak=amount / seconds / peak) if peak and unit == "TFLOP/s" else {}
        notes.line(what, amount / seconds / scale, expected and expected / scale, unit, seconds=seconds,
                   **of_peak, **sampled.figures, **more)


def regions(notes, asked):
    """B1: train.py's own table beside the estimate, and what torch and the driver say."""
    got = fitting(shape(asked, n_layer=4, block_size=2**16))
    rows, plan = train_here(notes, asked, got.decided, max_iters=3)
    lines, traced = {}, (plan.get("estimate") or {}).get("device_bytes", {})  # train.py has traced a step
    for line in plan["regions"]:
        at = lines.setdefault(line["region"], [0, 0])
        at[0], at[1] = at[0] + line["device_bytes"], at[1] + line["host_bytes"]
    for region, (on_device, on_host) in lines.items():
        expected = got.bytes_of(region)
        if region == "transient" and traced:
            expected = traced["transient"] + traced["head"], 0
        notes.line(f"{named(got.cfg)} {region}", on_device, expected[0], "bytes")
        if on_host or expected[1]:
            notes.line(f"{named(got.cfg)} {region} on the host", on_host, expected[1], "bytes")
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    notes.line("peak of all tensors", peak, tensor_bytes(got), "bytes",
               ok=peak <= (got.capacity or peak))
    notes.line("peak that torch reserved", reserved, unit="bytes")
    free, total = torch.cuda.mem_get_info(device())
    notes.line("memory that torch does not see, in a run", total - free - torch.cuda.memory_reserved(),
               hardware.CONTEXT_BYTES, "bytes", entry="CONTEXT_BYTES")
    notes.line("step", rows[-1]["step_s"], got.seconds.get("step"), "s")
    notes.line("MFU", rows[-1].get("mfu"), got.mfu)
    rates, layer = plan.get("rates") or {}, got.layer
    for name in ("forward_s", "backward_s"):
        if rates.get(name):
            notes.line(f"a layer's {name[:-2]}", rates[name], layer and getattr(layer, name), "s")


def calibration(notes, asked):
    """B2: --calibrate's figures at the largest size of each beside the tables'."""
    device()
    with own_cache():
        calibrated(asked.attention)
        found = hardware.calibration(1)
    notes.save(calibration=found)
    told = machine_here()
    for op, points in sorted(found["speeds"].items()):
        if op not in ("link", "network", "memory"):
            key = key_of(next(iter(attentions(asked))), op) if op.startswith("attention") else op
            expected = key and rate_of(key, points[-1][0])
            notes.line(op, points[-1][1] / 1e9, expected and expected / 1e9, "1e9/s")
    notes.line("copies between device and host, each way", found["node"]["pcie_bytes_per_s"] / 1e9,
               told.node.pcie_bytes_per_s / 1e9, "GB/s")
    notes.line("seconds of a launch", found["overhead_s"], hardware.LAUNCH_S, "s", entry="LAUNCH_S")


def key_of(name, op):
    """The entry of the tables that an operation of measure.attentions() has with a kernel; None without
    tables. What is not known of full calls is taken from causal ones."""
    known = machine_here().speeds.table if machine_here().speeds else {}
    ways = [op.replace("attention", name), op] + [op.replace(" full", "").replace("attention", name),
                                                  op.replace(" full", "")]
    return next((key for key in ways if key in known), None)


def attention(notes, asked):
    """B3. The row of a kernel at the last length but one is what EFFICIENCY's entry would be; where that
    has several, by length, all rows are."""
    lengths = [T for T in (2**13, 2**14, 2**15, 2**17, 2**18) if asked.longest >= T] or [asked.longest]
    for rank, name in enumerate(attentions(asked)):
        for T in lengths[:-1] if rank and len(lengths) > 1 else lengths:
            for causal in (True, False):
                with notes.trying(f"attention {name} {T}"):
                    jobs = measure.attentions(T, 128, torch.bfloat16, device(), name, causal)
                    for op, (call, flops) in jobs.items():
                        key, way = key_of(name, op), op.split()[-1]
                        its_own = key and ("full" in op) == ("full" in key) and (
                            lengths[-2:][0] == T or len(machine_here().speeds.table[key]) > 1)
                        entry = dict(entry=key) if its_own else {}
                        rate(notes, f"{name} {'causal' if causal else 'full'} {way} T={T:,}", call, flops,
                             key and rate_of(key, T), "TFLOP/s", **entry)
                    del jobs, call
                free_memory()


def others(notes, asked):
    """B4: products, for a moment and for long; in FP8; elementwise kernels; copies."""
    rows, gpu = min(2**16, asked.longest), device()
    with_fp8 = measure.has_fp8(gpu, torch.bfloat16)
    for C in [asked.n_embd, asked.n_embd * 5 // 4, 2 * asked.n_embd]:
        with notes.trying(f"products C={C}"):
            for op, (call, flops) in measure.matmuls(C, rows, torch.bfloat16, gpu, with_fp8).items():
                rate(notes, f"{op} C={C}", call, flops, rate_of(op, C), "TFLOP/s")
                if asked.n_embd == C:
                    rate(notes, f"{op} C={C}, 15 s", lambda call=call: [call() for _ in range(20)],
                         20 * flops, rate_of(op, C), "TFLOP/s", 15, entry=op)
            del call
        free_memory()
    with notes.trying("elementwise"):
        nbytes = 2 * rows * asked.n_embd
        for op, (call, moved) in measure.row_passes(nbytes, torch.bfloat16, gpu).items():
            rate(notes, op, call, moved, rate_of("memory"), "GB/s", 0.2, **(
                dict(entry="memory") if op == "copy" else {}))
        del call
    free_memory()
    if with_fp8:
        with notes.trying("turned operands of FP8 gradients"):
            turned(notes, rows, asked.n_embd)
    else:
        notes.skip("FP8", "this GPU has no FP8 products")
    copies(notes, asked)


def turned(notes, rows, C):
    """What FP8 gradients of weights take beside their product."""
    from memo.kernels import fp8
    dy, x = (torch.randn(1, rows, width, dtype=torch.bfloat16, device=device()) for width in (4 * C, C))
    g, taken = fp8.gradients(dy), fp8.rows(x)
    rate(notes, "FP8: scale, round and turn dy and x", lambda: fp8.gradient_operands(g, taken),
         3 * dy.numel() + 2 * x.numel(), rate_of("memory"), "GB/s")


def copies(notes, asked):
    """Device to host, back, both; and both beside products."""
    given = available() if asked.host_memory_gb == "auto" else asked.host_memory_gb * 1e9
    nbytes = int(min(2**30, given / 4)) // 2**21 * 2**21
    if not nbytes:
        raise Skip("there is no host memory for it")
    slab, lanes = HostSlab(2 * nbytes, device()), [torch.cuda.Stream() for _ in range(2)]
    kept, buffers = slab.bytes.view(2, nbytes), torch.zeros(2, nbytes, dtype=torch.uint8, device=device())
    pairs = [(kept[0], buffers[0]), (buffers[1], kept[1])]
    rows = min(2**16, asked.longest)
    product, _ = measure.matmuls(asked.n_embd, rows, torch.bfloat16, device())["matmul"]

    def copy(which, computing=False):
        if computing:
            product()
        for k in which:
            with torch.cuda.stream(lanes[k]):
                pairs[k][0].copy_(pairs[k][1], non_blocking=True)
    expected = machine_here().node.pcie_bytes_per_s
    for name, which in (("to the host", (0,)), ("to the device", (1,)), ("both ways, each", (0, 1))):
        rate(notes, f"copies {name}", lambda which=which: copy(which), nbytes, expected, "GB/s", **(
            dict(entry="pcie_bytes_per_s") if len(which) == 2 else {}))
    alone, together = seconds_of(product), seconds_of(lambda: copy((0, 1), True))
    notes.line("products beside copies: seconds over those alone, or of the copies", together / max(
        alone, seconds_of(lambda: copy((0, 1)))), 1.0)
    slab.close()


# --- B5: a process each ---

SYSTEMS = {"plan": ({}, ""), "torch": (dict(memory_plan="off"), ""),
           "expandable": (dict(memory_plan="off"), "expandable_segments:True"),
           "plan-expandable": ({}, "expandable_segments:True")}


def planned(notes, asked):
    """One system's steps, in this process."""
    system = notes.found["item"].partition("-")[2]
    cfg = fitting(shape(asked, n_layer=4, block_size=2**16, activation="keep", **SYSTEMS[system][0])).decided
    notes.save(row=measured("memo keep", cfg) | dict(shape=named(cfg)))


def plans(notes, asked):
    """B5. Tokens per second and reserved bytes, with the plan and with torch's allocator in both ways."""
    from bench.gpu_hour.items import Item
    device()
    for system, (_, conf) in SYSTEMS.items():
        item = Item(f"B5-{system}", "", 0, "bench.gpu_hour.rates:planned")
        environment = dict(PYTORCH_CUDA_ALLOC_CONF=conf) | os.environ
        subprocess.run(command_of(item, asked), cwd=ROOT, env=environment)
        row = read(asked.out / "items" / f"B5-{system}.json").get("row", {})
        if "step_s" not in row:
            notes.line(system, f"{row.get('failed', 'error')}: {row.get('why', 'see the log')}", ok=False)
            continue
        notes.line(f"{system}: {row.pop('shape')}", row["step_s"], unit="s", **row)
        notes.line(f"{system}: reserved", row["device_reserved_bytes"], unit="bytes",
                   allocated=row["device_peak_bytes"])
