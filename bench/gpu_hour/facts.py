"""A1: what is here, and what memo makes of it: memo.doctor's findings of one process, and what they lack."""

import resource
import subprocess
import time
from pathlib import Path

import torch

from bench.gpu_hour.notes import Skip, device, free_memory
from memo import doctor
from memo.kernels.attention import resolve_attention
from memo.memory.slab import HostSlab, available
from memo.parallel.mesh import ALONE
from memo.system.device import settle
from memo.system.hardware import CONTEXT_BYTES

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
    notes.save(nvidia_smi=output_of("nvidia-smi", "-q")[:60000],
               smi=output_of("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv"),
               topology=output_of("nvidia-smi", "topo", "-m"))
    gpu = device()
    here = doctor.Here(ALONE.host, torch.cuda.device_count(), gpu, torch.bfloat16)
    for check in (*doctor.FOR_ITSELF, doctor.host_memory):
        for found in doctor.findings_of(check, here):
            notes.line(found.what, found.found, found.expected or None, ok=False if found.remedy else None,
                       **({"remedy": found.remedy} if found.remedy else {}))
    notes.line("transparent huge pages", text_of("/sys/kernel/mm/transparent_hugepage/enabled"))
    notes.line("page locks allowed (ulimit -l)", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if torch.distributed.is_nccl_available():
        notes.line("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    unseen(notes, asked)
    with notes.trying("page lock"):
        page_lock(notes, asked)


def unseen(notes, asked):
    """What of the GPU's memory is nobody's tensor."""
    gpu = device()
    settle(gpu)
    with notes.trying("attention"):  # its library is loaded at the first call
        kernel, q = resolve_attention(asked.attention, gpu, torch.bfloat16, 128), torch.zeros(
            1, 256, 2, 128, dtype=torch.bfloat16, device=gpu)
        kernel.backward(q, q, q, q, *kernel.forward(q, q, q, True, 1.0), True, 1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(gpu)
    notes.line("memory that torch does not see (all processes)",
               total - free - torch.cuda.memory_reserved(gpu), CONTEXT_BYTES, "bytes", entry="CONTEXT_BYTES")


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
