"""The host slab: the one block of host memory that swapped activations go to, exactly as large as those of a
micro batch; each writes it anew.

It is page-locked by registering it with the driver: torch's pinned-memory cache would round it up to a power
of two. Source: MEMO 4.1; the best alphas of its Table 5 follow from half of the host's memory."""

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from memo.errors import OutOfHostMemory
from memo.memory.sizes import granted_bytes

MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
MPOL_PREFERRED = 1  # pages of that node while it has some, then of others: a small node must not end the run
PIECE_BYTES = 2**36  # of one page lock; a multiple of any page


# --- what there is ---

def read_int(path: str | Path) -> int | None:
    """Reads the number a file holds; None where it is not there or holds a word ("max")."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def meminfo_available(root: str | Path = "/") -> int:
    try:
        rows = dict(line.split(":") for line in (Path(root) / "proc/meminfo").read_text().splitlines())
    except FileNotFoundError:  # not Linux: all there is, at least
        return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return int(rows["MemAvailable"].split()[0]) * 1024


def cgroup_available(root: str | Path = "/") -> float:
    """Counts the bytes that the process's control groups leave; infinite where nothing limits them."""
    left = float("inf")
    try:
        lines = (Path(root) / "proc/self/cgroup").read_text().split()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            top, cache = "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        mount = Path(root) / "sys/fs/cgroup" / top
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            allowed, used = read_int(folder / limit), read_int(folder / usage)
            if allowed is not None and used is not None:
                left = min(left, allowed - used + reclaimable(folder / "memory.stat", cache))
            if folder == mount:
                break
    return left


def reclaimable(path: Path, name: str) -> int:
    """Counts the bytes of file cache in a memory.stat, which the kernel drops for who needs memory."""
    try:
        rows = (row.split() for row in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except OSError:
        return 0


def available() -> int:
    """Counts the bytes that this host has free, and that the cgroup leaves of them."""
    return int(max(0, min(meminfo_available(), cgroup_available())))


def host_bytes(host_memory_gb: float | Literal["auto"], local_ranks: int = 1, reserved: int = 0) -> int:
    """Counts this rank's share of what `host_memory_gb` (1e9 bytes) grants the host, or of what is free there
    beside `reserved` bytes. Errors: OutOfHostMemory: more than that granted."""
    return granted_bytes(host_memory_gb, available(), reserved, "what is free on this host") // local_ranks


# --- the block ---

def numa_node(device: torch.device) -> int | None:
    """Finds the NUMA node a GPU hangs on; None where the system does not say."""
    if device.type != "cuda":
        return None
    p = torch.cuda.get_device_properties(device)
    try:
        address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return None
    node = read_int(f"/sys/bus/pci/devices/{address}/numa_node")
    return node if node is not None and node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Asks the kernel to take pages that nobody has touched yet from `node`. True where it agreed."""
    number = MBIND.get(platform.machine())
    if number is None or sys.platform != "linux":
        return False
    mask = (ctypes.c_ulong * 16)()  # 1,024 nodes
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.syscall(number, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), MPOL_PREFERRED, mask,
                            ctypes.c_ulong(1024), 0)


def split(first: int, end: int, piece_bytes: int) -> list[slice]:
    """Cuts the bytes first..end of a slab into slices, each inside one of its pieces."""
    return [slice(max(at, first), min(at + piece_bytes, end))
            for at in range(first - first % piece_bytes, end, piece_bytes) if first < end]


class HostSlab:
    """Holds `nbytes` of host memory: `bytes`, uint8, zeroed; page-locked for a CUDA device if `pin`.

    It is locked in pieces, since the driver refuses one registration of 512 GiB (NVIDIA's open kernel
    modules, R580), and CUDA refuses a copy that goes over the edge of a piece: pairs() cuts what is copied.
    Errors: OutOfHostMemory where the system refuses the memory, or the page lock."""

    def __init__(self, nbytes: int, device: torch.device, pin: bool = True) -> None:
        self.unlock: list[Callable[[], object]] = []  # of each locked piece
        try:
            self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise OutOfHostMemory(f"host memory of {nbytes / 2**30:.4g} GiB cannot be had ({e.strerror}); "
                                  "try a smaller alpha or block_size") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self.map.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to take and to lock
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        if (node := numa_node(device)) is not None:
            prefer_node(self.bytes.data_ptr(), nbytes, node)
        self.bytes.zero_()  # takes every page now, on all cores
        if pin and device.type == "cuda":
            self.lock(device)

    def pairs(self, at: int, device_bytes: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs bytes on the device with those of the slab from byte `at` on, for one copy each."""
        return [(device_bytes[part.start - at:part.stop - at], self.bytes[part])
                for part in split(at, at + device_bytes.nbytes, PIECE_BYTES)]

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between two contiguous tensors, of which one lies in the slab; without waiting on CUDA."""
        to, source = (t.view(-1).view(torch.uint8) for t in (to, source))
        begin = self.bytes.data_ptr()
        at = (to if begin <= to.data_ptr() < begin + self.bytes.nbytes else source).data_ptr() - begin
        for part in split(at, at + to.nbytes, PIECE_BYTES):
            r = slice(part.start - at, part.stop - at)
            to[r].copy_(source[r], non_blocking=True)

    def lock(self, device: torch.device) -> None:
        cudart, pieces = torch.cuda.cudart(), split(0, self.bytes.nbytes, PIECE_BYTES)
        for k, piece in enumerate(pieces):
            address, nbytes = self.bytes.data_ptr() + piece.start, piece.stop - piece.start
            error = cudart.cudaHostRegister(address, nbytes, 0)
            if int(error):
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device)  # the next launch reports the error once more: this one
                self.close()
                why = f"CUDA error {int(error)}: {cudart.cudaGetErrorString(error)}"
                raise OutOfHostMemory(page_lock_error(k, pieces, why))
            # at the latest when the slab is forgotten
            self.unlock.append(weakref.finalize(self, cudart.cudaHostUnregister, address))

    def close(self) -> None:
        """Gives the memory back, whoever still holds a view of it. No copy may be under way."""
        for unlock in self.unlock:
            unlock()
        self.map.madvise(mmap.MADV_DONTNEED)


def page_lock_error(k: int, pieces: list[slice], error: str) -> str:
    """Explains that piece k could not be page-locked."""
    piece, whole = pieces[k], pieces[-1].stop
    gib, gibs = ((n / 2**30) for n in (piece.stop - piece.start, whole))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown, remedy = "unlimited", "a smaller --host_memory_gb"
    if limit != resource.RLIM_INFINITY:
        shown = f"{limit // 1024} KiB"
        if limit < whole:
            remedy += ", `ulimit -l unlimited`"
    return (f"page-locking {gib:.4g} GiB (piece {k + 1} of {len(pieces)}) of the host slab's {gibs:.4g} GiB "
            f"failed ({error}; ulimit -l is {shown}); try {remedy}, or --pin_memory=false, which copies "
            "more slowly")
