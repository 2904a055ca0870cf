"""The device of a run, and how much of its memory is taken."""

import os
import resource
import sys

import torch

from memo.config.config import Config
from memo.config.keys import Value
from memo.errors import ConfigError
from memo.system.hardware import CONTEXT_BYTES


def pick_device(cfg: Config, local_rank: int = 0) -> tuple[torch.device, torch.dtype]:
    """Picks (device, dtype): this host's GPU of that number, if any. Errors: ConfigError: it is missing."""
    if cfg.device != "cpu":
        # read when CUDA and NCCL start. Messages that wait in a shared hardware queue hold up what is behind
        # them; several communicators' start in the order of the host, in which tests prove them to meet
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    cuda = torch.cuda.is_available()
    if cfg.device == "cuda" and not cuda:
        raise ConfigError("device=cuda needs a CUDA GPU that torch can use, there is none; try device=auto")
    device = torch.device(f"cuda:{local_rank}" if cuda and cfg.device != "cpu" else "cpu")
    if device.type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(f"local rank {local_rank} has no GPU of its own, this host has "
                          f"{torch.cuda.device_count()}; start no more ranks on a host than it has GPUs "
                          "(torchrun --nproc_per_node)")
    dtype = cfg.dtype
    if dtype == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if bf16 else "float32"
    return device, getattr(torch, dtype)


def set_deterministic(on: bool) -> None:
    """Asks for the same bits from run to run on CUDA, at some cost in speed, before CUDA starts."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if on != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler: over a second
        torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def gpu_facts(device: torch.device) -> dict[str, Value]:
    """Finds {capability, multiprocessors} of a CUDA device, as in hardware.Machine."""
    if device.type != "cuda":
        return dict(capability=(0, 0), multiprocessors=0)
    return dict(capability=torch.cuda.get_device_capability(device),
                multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)


def device_peak_bytes(device: torch.device) -> int:
    """Finds the most device memory that tensors took; on the CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(device: torch.device) -> None:
    """Readies a device for measuring its room: cuBLAS takes its workspace, and torch's cache is emptied."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        x = torch.zeros(8, 8, dtype=torch.bfloat16, device=device)
        torch.mm(x, x)


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Finds (bytes still free on a CUDA device, bytes it has)."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def own_bytes(device: torch.device) -> int | None:
    """Finds the memory of a CUDA device that other processes leave; None on the host."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def to_device(t: torch.Tensor, device: torch.device, pin: bool) -> torch.Tensor:
    """Copies `t` to the device. With `pin` the host does not wait: torch has pinned memory of its own."""
    return t.pin_memory().to(device, non_blocking=True) if pin and device.type == "cuda" else t.to(device)
