"""A1: what is here, and what memo makes of it."""

import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import torch

from bench.gpu_hour.notes import Skip, device, free_memory, machine_here
from memo import fp8
from memo.attention import facts_of, resolve_attention
from memo.backends import cudnn_version, order, passed_over
from memo.device import device_name, settle
from memo.doctor import version_of
from memo.estimate.hardware import CONTEXT_BYTES, GPUS, gpu_named
from memo.ops import lacking, resolve_ops
from memo.planner.allocator import Arena
from memo.swap.slab import HostSlab, available, numa_node

PACKAGES = ("torch", "triton", "numpy", "scipy", "tokenizers", "tqdm", "safetensors", "matplotlib",
            "transformers", "highspy", "ortools", "flash-attn", "flash_attn_3", "flash-attn-4",
            "transformer-engine")
QUERY = ("name", "driver_version", "power.limit", "clocks.max.sm", "pcie.link.gen.max",
         "pcie.link.gen.current", "pcie.link.width.current", "memory.used", "memory.total")


def output_of(*command):
    """What a command prints; why not, where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as e:
        return f"{type(e).__name__}: {e}"


def text_of(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def facts(notes, asked):
    """All that decides, without a judgement, but for what memo needs and does not find."""
    versions = {name: found for name in PACKAGES if (found := version_of(name))}
    notes.save(versions=versions, nvidia_smi=output_of("nvidia-smi", "-q")[:60000],
               smi=output_of("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv"),
               topology=output_of("nvidia-smi", "topo", "-m"))
    for name in ("triton", "numpy", "transformers", "ortools"):
        notes.line(name, versions.get(name, "not installed"))
    notes.line("host memory free", available() / 2**30, unit="GiB")
    notes.line("processors", len(os.sched_getaffinity(0)))
    notes.line("transparent huge pages", text_of("/sys/kernel/mm/transparent_hugepage/enabled"))
    notes.line("page locks allowed (ulimit -l)", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    notes.line("g++", shutil.which("g++") or "none: no memory plan", ok=bool(shutil.which("g++")))
    card(notes, asked)
    choices(notes, asked)
    with notes.trying("library of the memory plan"):
        began = time.perf_counter()
        Arena(device()).close()
        notes.line("library of the memory plan, built or loaded", time.perf_counter() - began, unit="s")
    with notes.trying("page lock"):
        page_lock(notes, asked)


def card(notes, asked):
    """The GPU, and what of its memory is nobody's tensor."""
    gpu = device()
    name, properties = device_name(gpu), torch.cuda.get_device_properties(gpu)
    notes.line("GPUs", torch.cuda.device_count())
    notes.line("GPU", name)
    notes.line("known to the tables", gpu_named(name) or "no: speeds and MFU are not expected")
    notes.line("compute capability", f"{properties.major}.{properties.minor}")
    known = GPUS[gpu_named(name)] if gpu_named(name) else None
    notes.line("memory", properties.total_memory, known and known.memory_bytes, "bytes")
    notes.line("multiprocessors", properties.multi_processor_count, known and known.multiprocessors)
    notes.line("NUMA node", numa_node(gpu))
    notes.line("CUDA, cuDNN", f"{torch.version.cuda}, {cudnn_version(torch.backends.cudnn.version() or 0)}")
    if torch.distributed.is_nccl_available():
        notes.line("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    settle(gpu)
    with notes.trying("attention"):  # its library is loaded at the first call
        kernel, q = resolve_attention(asked.attention, gpu, torch.bfloat16, 128), torch.zeros(
            1, 256, 2, 128, dtype=torch.bfloat16, device=gpu)
        kernel.backward(q, q, q, q, *kernel.forward(q, q, q, True, 1.0), True, 1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(gpu)
    notes.line("memory that torch does not see (all processes)",
               total - free - torch.cuda.memory_reserved(gpu), CONTEXT_BYTES, "bytes", entry="CONTEXT_BYTES")


def choices(notes, asked):
    """Which kernels memo takes here, and why not others."""
    gpu = device()
    attention = resolve_attention(asked.attention, gpu, torch.bfloat16, 128)
    notes.line("attention", attention.label)
    known, _ = facts_of(gpu, torch.bfloat16, 128, True)
    for kernel in order(known):
        notes.line(f"attention={kernel}", passed_over(kernel, known) or "can serve")
    ops, why = resolve_ops("auto", gpu)
    notes.line("ops", ops.name + f" ({why})" * bool(why),
               ok=ops.name == "triton" or bool(lacking("triton", gpu)))
    with notes.trying("FP8 products"):
        notes.line("FP8 products", fp8.failing(gpu) or "can serve")
    notes.line("model of this machine", str(machine_here().name))


def page_lock(notes, asked):
    """How fast host memory is taken and locked."""
    given = available() if asked.host_memory_gb == "auto" else asked.host_memory_gb * 1e9
    if (nbytes := int(min(2**34, given / 4, available() / 4)) // 2**21 * 2**21) <= 0:
        raise Skip("there is no host memory for it")
    began = time.perf_counter()
    slab = HostSlab(nbytes, device())
    seconds = time.perf_counter() - began
    slab.close()
    free_memory()
    notes.line("host memory zeroed and page-locked", nbytes / seconds / 1e9, unit="GB/s", gib=nbytes / 2**30)
