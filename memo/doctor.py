"""Is this machine what memo needs, and what is it good for? python -m memo.doctor [--json]
on several GPUs, with what is between them: torchrun --nproc_per_node=8 -m memo.doctor

Each check yields findings: facts, kernels, short measurements, each beside what is expected, where the tables
of memo/system/hardware.py know the GPU. A fault is a finding with a remedy."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.system.command import Arguments, answer_early, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(ranks=True, prog="python -m memo.doctor",
                       description="Is this machine what memo needs, and what is it good for? Two minutes at "
                       "most;\nunder torchrun messages between ranks too. Exit code 1: there is a fault.")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.keys("device", "dtype")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import ctypes
import os
import platform
import shutil
import time
from importlib.metadata import distributions
from pathlib import Path

import torch
import torch.distributed as dist

from memo.config.config import Config
from memo.errors import ConfigError, OutOfHostMemory, Unusable, reason
from memo.kernels import fp8
from memo.kernels.attention import facts_of, resolve_attention
from memo.kernels.backends import cudnn_version, order, passed_over
from memo.kernels.ops import OPS, lacking, resolve_ops
from memo.memory.slab import HostSlab, available, numa_node
from memo.parallel.mesh import ALONE, open_axis
from memo.planner.allocator import Arena
from memo.run.measure import attentions, copy_rate, fastest_seconds, matmuls, slowest_seconds
from memo.system import launch
from memo.system.axis import Axis, Works
from memo.system.device import device_name, gpu_facts, own_bytes, pick_device
from memo.system.files import cache_place, readable_json
from memo.system.hardware import GIB, LEAST_FP8, Machine, gpu_named, machine
from memo.system.origin import code

WITHOUT = {"numpy": "", "tqdm": "", "tokenizers": "", "safetensors": "", "matplotlib": "no pictures",
           "wandb": "no --wandb_log", "datasets": "no data from Hugging Face",
           "highspy": "memory plans without the paper's program", "ortools": "memory plans without CP-SAT",
           "triton": "on a GPU slower norms and rotary positions"}  # {package: what lacks; "" for all}
# of a page lock, of a message; a pair of ranks that takes longer does not reach each other
LOCK_BYTES, PAIR_BYTES, PAIR_S = {"cuda": 2**32, "cpu": 2**29}, {"cuda": 2**26, "cpu": 2**20}, 60
SLOW = 0.5  # of what is expected: less is a fault


class Finding(NamedTuple):
    """Holds what was found of what, what was expected, and, where it is a fault, a remedy in one line."""

    what: str
    found: str
    expected: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Here:
    """Describes this rank."""

    host: Axis
    local_ranks: int
    device: torch.device
    dtype: torch.dtype

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def machine(self) -> Machine | None:
        """Looks up what is expected of its GPU and node; None where the tables do not know it."""
        name = gpu_named(device_name(self.device))
        return machine(name) if name else None


def rate_finding(what: str, unit: str, rate: float, expected: float | None, remedy: str) -> Finding:
    """Makes the Finding of a rate per second, a fault where it is SLOW."""
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    return Finding(what, f"{rate / scale:.3g} {unit}", f"{expected / scale:.3g} {unit}" if expected else "",
                   remedy if expected and rate < SLOW * expected else "")


def version_of(package: str) -> str:
    """Finds the version of an installed package; "" without it."""
    return next((found.version for found in distributions(name=package)), "")


def driver() -> str:
    """Names NVIDIA's driver, and the CUDA that it serves; "none"."""
    number, loaded = ctypes.c_int(), Path("/sys/module/nvidia/version")
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
        return (f"{loaded.read_text().strip() if loaded.exists() else 'unknown'} for CUDA up to "
                f"{number.value // 1000}.{number.value % 1000 // 10}")
    except OSError:
        return "none"


# --- each rank for itself ---

def packages(here: Here) -> Iterator[Finding]:
    """Finds what is installed, and what is lacking without the others."""
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}", "2.11 or newer",
                  "install torch 2.11 or newer, see docs/install.md" * (torch.__version__ < (2, 11)))
    for name, lack in WITHOUT.items():
        version = version_of(name)
        yield Finding(name, version or f"not installed: {lack or 'no run'}", "",
                      "pip install -r requirements.txt" * (not version and not lack))


def devices(here: Here) -> Iterator[Finding]:
    """Finds processors; the GPU, and how much of its memory is this process's."""
    known, threads = here.machine, torch.get_num_threads()
    yield Finding("processors", f"{len(os.sched_getaffinity(0))}, of which torch uses {threads}")
    if not here.cuda:
        unseen = any(Path("/dev").glob("nvidia[0-9]*")) and not torch.cuda.is_available()
        yield Finding("GPU", "none", "", f"torch sees none, but there is one (driver {driver()}); install "
                      "torch for this driver, see docs/install.md, or unset CUDA_VISIBLE_DEVICES" * unseen)
        return
    p, own = torch.cuda.get_device_properties(here.device), own_bytes(here.device) or 0
    yield Finding("GPU", f"{device_name(here.device)}, {torch.cuda.device_count()} here, capability "
                  f"{p.major}.{p.minor}", known.name if known else "one that the tables know")
    yield Finding("GPU memory", f"{p.total_memory / GIB:.4g} GiB, {own / GIB:.4g} GiB for this process",
                  f"{(known.memory_bytes or 0) / GIB:.4g} GiB" if known else "",
                  "end the other processes there: `nvidia-smi` names them" * (own < 0.9 * p.total_memory))
    yield Finding("driver", driver(), f"one for CUDA {torch.version.cuda}")
    yield Finding("cuDNN", cudnn_version(torch.backends.cudnn.version() or 0))
    node = numa_node(here.device)
    yield Finding("NUMA node of the GPU", "the system does not say" if node is None else str(node))


def kernels(here: Here) -> Iterator[Finding]:
    """Finds which kernels are chosen, and why not others."""
    facts, _ = facts_of(here.device, here.dtype, 128, True)
    chosen = resolve_attention("auto", here.device, here.dtype, 128).name
    for name in order(facts):
        status = "chosen" if name == chosen else passed_over(name, facts) or "can serve"
        yield Finding(f"attention={name}", status, "", "no fast kernel serves, long contexts do not fit; see "
                      "docs/kernels.md for what each needs" * (here.cuda and name == chosen == "math"))
    ops, why = resolve_ops("auto", here.device)
    for name in OPS:
        lost = name == "triton" != ops.name
        cannot = lacking(name, here.device) or why * lost or "can serve"
        yield Finding(f"ops={name}", "chosen" if name == ops.name else cannot, "", "norms are slower "
                      "without; install triton and a C compiler, see docs/install.md" * (here.cuda and lost))
    if here.cuda:
        able = gpu_facts(here.device)["capability"] >= LEAST_FP8
        why = fp8.failing(here.device) if able else "it needs compute capability 8.9 or above"
        yield Finding("matmul=fp8", why or "can serve", "", "stay with --matmul=bf16" * (able and bool(why)))


def memory_plan(here: Here) -> Iterator[Finding]:
    """Finds what the memory plan needs: a compiler, a folder to keep its library in, the library."""
    compiler, (folder, why), began = shutil.which("g++"), cache_place(), time.perf_counter()
    yield Finding("g++", compiler or "none", "", "install g++ (apt-get install g++, or a cluster's module) "
                  "where PATH has it: the memory plan's library is built with it" * (not compiler))
    yield Finding("cache folder", str(folder or "none"), "", why or "")
    try:
        Arena(here.device).close()
        yield Finding("memory plan's library", f"built or loaded in {time.perf_counter() - began:.1f} s")
    except Unusable as e:
        yield Finding("memory plan's library", "none", "", f"{e}; or give --memory_plan=off")


# --- all ranks at once: an error of one of them ends them all ---

def alike(here: Here) -> Iterator[Finding]:
    """Finds whether all ranks have what rank 0 has."""
    if here.host.size == 1:
        return
    versions = dict(driver=driver(), torch=torch.__version__, CUDA=str(torch.version.cuda),
                    NCCL=str(torch.cuda.nccl.version()) if here.cuda else "none", triton=version_of("triton"),
                    python=platform.python_version(), device=device_name(here.device)) | code()
    try:
        launch.same_everywhere(here.host, versions, "give all hosts one driver, all ranks one environment")
        yield Finding("ranks", f"{here.host.size}, with the same {', '.join(versions)}")
    except ConfigError as e:
        yield Finding("ranks", f"{here.host.size} that differ", "", str(e))


def host_memory(here: Here) -> Iterator[Finding]:
    """Finds how much host memory is granted, whether it can be had and locked, how fast copies are."""
    node, free, why = here.machine.node if here.machine else None, available(), ""
    yield Finding("host memory granted and free", f"{free / GIB:.4g} GiB",
                  f"{node.host_memory_bytes / GIB:.4g} GiB" if node else "")
    nbytes = max(2**21, min(LOCK_BYTES[here.device.type], free // 4 // here.local_ranks) // 2**21 * 2**21)
    here.host.max(0)
    what, began = "host memory taken" + ", page-locked" * here.cuda, time.perf_counter()
    try:
        HostSlab(nbytes, here.device).close()
        rate = nbytes / (time.perf_counter() - began)
        yield Finding(what, f"{nbytes / GIB:.4g} GiB at {rate / 1e9:.3g} GB/s")
    except OutOfHostMemory as e:
        yield Finding(what, "refused", "", why := str(e))
    if not here.host.max(bool(why))[0]:
        rate = copy_rate(2**28 if here.cuda else 2**26, here.device, here.host)
        what = "copies to and from the GPU, at once" if here.cuda else "copies in host memory"
        yield rate_finding(what, "GB/s", rate, node.pcie_bytes_per_s if node else None, "see `nvidia-smi -q` "
                           "for the PCIe link's generation and width, and who else copies there")


def speeds(here: Here) -> Iterator[Finding]:
    """Measures products and attention, on the slowest rank."""
    width, rows, T, D = (4096, 2**14, 2**14, 128) if here.cuda else (512, 1024, 1024, 64)
    table = here.machine.speeds if here.machine else None
    kernel = resolve_attention("auto", here.device, here.dtype, D).name
    jobs = matmuls(width, rows, here.dtype, here.device) | attentions(T, D, here.dtype, here.device)
    for op, (call, flops) in jobs.items():
        own = op.replace("attention", kernel)
        size = width if op == "matmul" else T
        expected = table.rate(own if own in table.table else op, size) if table else None
        rate = flops / fastest_seconds(call, here.device, here.host)
        yield rate_finding(op, "TFLOP/s", rate, expected,
                           "see `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE` for what holds the GPU back")


def pairs(here: Here) -> Iterator[Finding]:
    """Measures messages between all pairs of ranks: each rank sends to the d-th behind it, for every d."""
    host, device, known = here.host, here.device, here.machine
    if host.size == 1:
        return
    nbytes, backend = PAIR_BYTES[device.type], "nccl" if here.cuda else "gloo"
    axis = open_axis("world", host, [[*range(host.size)]], ["sum"], device)
    x, rates = torch.full((nbytes,), host.rank % 251, dtype=torch.uint8, device=device), {}
    for d in range(1, host.size):
        to, source, y = (host.rank + d) % host.size, (host.rank - d) % host.size, torch.zeros_like(x)

        def send(y: torch.Tensor = y, to: int = to, source: int = source) -> None:
            Works(axis.post("send", [x], [y], to=to, source=source), x, y).wait()
        with launch.connection_errors(f"ranks {source} to {host.rank} to {to}", host.rank, backend, PAIR_S):
            send()
            rate = nbytes / min(slowest_seconds(send, 4, device, ALONE.host) for _ in range(3))
        rates[source, host.rank] = rate if (y == source % 251).all() else 0.0
    dist.destroy_process_group(axis.group)
    every = {pair: rate for theirs in host.objects(rates) for pair, rate in theirs.items()}
    for where, within, span in (("in a host", True, 2), ("between hosts", False, 2**20)):
        some = {pair: rate for pair, rate in every.items()
                if (pair[0] // here.local_ranks == pair[1] // here.local_ranks) == within}
        if some:
            (a, b), rate = min(some.items(), key=lambda item: item[1])
            expected = nbytes / known.message_s("shift", nbytes, span) if known else None
            slow = rate_finding(f"{backend} {where}, slowest pair {a} to {b}", "GB/s", rate, expected,
                                "see `nvidia-smi topo -m`; NCCL_DEBUG=INFO says which way messages take")
            yield slow if rate else slow._replace(remedy="other bytes came than were sent: leave them out")


FOR_ITSELF, TOGETHER = (packages, devices, kernels, memory_plan), (alike, host_memory, speeds, pairs)


# --- the command ---

def findings_of(check: Callable[[Here], Iterator[Finding]], here: Here) -> Iterator[Finding]:
    """Yields the findings of a check; that it failed is one."""
    try:
        yield from check(here)
    except Exception as e:  # of whatever library
        if here.host.size > 1 and check in TOGETHER:
            raise
        yield Finding(check.__name__.replace("_", " "), "failed", "", f"{reason(e)}; see docs/install.md")


def show(f: Finding) -> None:
    print(f"{f.what:34} {f.found:46} {f.expected and f'expected {f.expected}'}".rstrip(), flush=True)
    if f.remedy:
        print(f"    FAULT: {f.remedy}", flush=True)


def main(argv: list[str]) -> int:
    me = launch.read_launch()
    with launch.connected(me) as host, launch.rank_errors(host):
        args = launch.together(host, read_argv, argv)
        asked = Config(device=args.device, dtype=args.dtype)
        device, dtype = launch.together(host, pick_device, asked, me.local_rank)
        me.take(device)
        here = Here(host, me.local_world, device, dtype)
        tells, own = me.rank == 0 and not args.json, list[Finding]()
        for finding in (f for check in (*FOR_ITSELF, *TOGETHER) for f in findings_of(check, here)):
            own.append(finding)
            if tells:
                show(finding)
        (_, first), *others = host.objects((launch.rank_name(me.rank), own))
        more = [f._replace(what=f"{where}: {f.what}") for where, findings in others
                for f in findings if f.remedy and f not in first]  # faults that rank 0 has not
        for finding in more if tells else ():
            show(finding)
        told = first + more
        faults = sum(bool(f.remedy) for f in told)
        if me.rank == 0:
            print(readable_json(dict(ranks=host.size, faults=faults, findings=[f._asdict() for f in told]))
                  if args.json else f"{faults or 'no'} fault{'s' * (faults != 1)}", flush=True)
        host.max(0)  # torchrun ends all ranks when the first one fails
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(run(main))
