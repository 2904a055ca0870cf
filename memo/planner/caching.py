"""A simulation of torch's caching allocator on a step's requests, without torch and without a GPU.

It follows the rules of c10/cuda/CUDACachingAllocator.cpp (the sizes, in torch 2.13:
c10/core/AllocatorConfig.h) as they are by default: no expandable segments, no limit to splitting, no rounding
up to powers of two. All is on one stream.

    rounding     a request is rounded up to 512 bytes
    pools        rounded requests up to 1 MiB share segments of 2 MiB (the small pool). Larger ones are the
                 large pool: requests below 10 MiB share segments of 20 MiB, others get a segment of their
                 own, rounded up to 2 MiB
    best fit     the smallest free block of the pool that is large enough; tie_rule() decides among equals
    splitting    the rest of a block stays free if it is at least 512 bytes (small pool) or more than 1 MiB
                 (large pool)
    merging      a freed block merges with its free neighbours of the same segment; the segment stays reserved
    full device  where cudaMalloc fails, every segment that is wholly free is returned and cudaMalloc is tried
                 again. That is a reorganisation (torch: num_alloc_retries; MEMO 4.2): the device waits.
                 If the second try fails too: OOM
"""

import math
from bisect import bisect_left, insort
from collections import namedtuple
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count

from memo.planner.plan import Plan
from memo.planner.trace import Trace

MiB = 2**20
MIN_BLOCK, SMALL, SMALL_SEGMENT = 512, MiB, 2 * MiB  # bytes
MIN_LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * MiB, 20 * MiB, 2 * MiB

Lifespan = namedtuple("Lifespan", "start stop bytes segment k planned")
Rectangle = namedtuple("Rectangle", "start stop offset bytes kind")  # drawn: request numbers, bytes


class SimulatedOutOfMemory(RuntimeError):
    """The device is full, with every free segment returned."""


class CachedBlock:
    """A piece of a segment, in use or free; `before` and `after` are its neighbours in the segment."""

    __slots__ = ("address", "bytes", "small", "age", "before", "after", "free")

    def __init__(self, address: int, nbytes: int, small: bool, age: int, before: "CachedBlock | None" = None,
                 after: "CachedBlock | None" = None) -> None:
        self.address, self.bytes, self.small, self.age, self.free = address, nbytes, small, age, True
        self.before, self.after = before, after

    @property
    def key(self) -> tuple[int, int, int]:
        """The block's place among the free blocks of its pool."""
        return self.bytes, self.age, self.address


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def segment_bytes(nbytes: int) -> int:
    """Bytes of the segment that cudaMalloc makes for a request of nbytes (rounded to 512)."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < MIN_LARGE else round_up(nbytes, ROUND_LARGE)


def installed_torch() -> tuple[float, ...]:
    """(major, minor) of the torch that is installed, which need not be imported; infinite where none is."""
    try:
        return tuple(int(number) for number in version("torch").split(".")[:2])
    except PackageNotFoundError:
        return math.inf, 0


def tie_rule(torch_version: tuple[float, ...]) -> str:
    """Which of several free blocks of the same size that torch, (major, minor), takes: "address", the lowest;
    "segment", one of the segment that was reserved first, there the lowest; "block", the one that became a
    block of its own first. Of a block that is cut the rest remains the old one, of blocks that merge the one
    just freed."""
    return "address" if torch_version < (2, 12) else "block" if torch_version < (2, 13) else "segment"


class CachingAllocator:
    """One device of `capacity` bytes. `malloc` returns addresses, `free` takes them. Counters:
    `allocated_bytes` (rounded) and `reserved_bytes` now, `peak_allocated_bytes`, `peak_reserved_bytes`;
    `cuda_mallocs`, `reorganisations`. `ties`: a tie_rule(), that of the installed torch without.

    `time` is the caller's clock; `history` lists the segments, [address, bytes, reserved at, returned at
    (None: never)].
    """

    def __init__(self, capacity: int | None = None, ties: str | None = None) -> None:
        self.capacity_bytes = math.inf if capacity is None else capacity
        self.ties, self.ages = ties or tie_rule(installed_torch()), count(1)
        # small or not: its free blocks, sorted: (bytes, age, address)
        self.pools: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self.blocks: dict[int, CachedBlock] = {}  # by address
        self.segments: list[list] = []  # the rows of history that are reserved now, sorted by address
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.cuda_mallocs = self.reorganisations = self.time = 0
        self.history: list[list] = []

    def malloc(self, nbytes: int) -> int:
        """The address of nbytes. Errors: SimulatedOutOfMemory."""
        nbytes = max(round_up(nbytes, MIN_BLOCK), MIN_BLOCK)
        small = nbytes <= SMALL
        pool = self.pools[small]
        if (i := bisect_left(pool, (nbytes,))) < len(pool):
            block = self.blocks[pool.pop(i)[2]]
        else:
            block = self.reserve(segment_bytes(nbytes), small)
        rest = block.bytes - nbytes
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self.split(block, nbytes)
        block.free = False
        self.allocated_bytes += block.bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Errors: KeyError where nothing lies at the address."""
        block = self.blocks[address]
        assert not block.free, address
        self.allocated_bytes -= block.bytes
        before, after, age = block.before, block.after, block.age
        if after and after.free:
            self.take(after)
            self.merge(block, after)
        if before and before.free:
            self.take(before)
            block = self.merge(before, block)
            block.age = age  # of what was freed
        self.put(block)

    def put(self, block: CachedBlock) -> None:
        block.free = True
        insort(self.pools[block.small], block.key)

    def take(self, block: CachedBlock) -> None:
        pool = self.pools[block.small]
        pool.pop(bisect_left(pool, block.key))

    def split(self, block: CachedBlock, nbytes: int) -> None:
        """Cuts a block that is in no pool down to nbytes; the rest is free."""
        rest = CachedBlock(block.address + nbytes, block.bytes - nbytes, block.small, block.age, block,
                           block.after)
        if self.ties == "block":
            block.age = next(self.ages)
        if block.after:
            block.after.before = rest
        block.after, block.bytes = rest, nbytes
        self.blocks[rest.address] = rest
        self.put(rest)

    def merge(self, first: CachedBlock, second: CachedBlock) -> CachedBlock:
        first.bytes, first.after = first.bytes + second.bytes, second.after
        if second.after:
            second.after.before = first
        del self.blocks[second.address]
        return first

    def reserve(self, nbytes: int, small: bool) -> CachedBlock:
        """A new segment, as one block. Errors: SimulatedOutOfMemory."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            self.reorganisations += 1
            self.release()
            if self.reserved_bytes + nbytes > self.capacity_bytes:
                raise SimulatedOutOfMemory(
                    f"{nbytes} bytes must be <= capacity={self.capacity_bytes} - "
                    f"reserved={self.reserved_bytes} (in use: {self.allocated_bytes}); give more or "
                    "request less")
        address = self.place(nbytes)
        row = [address, nbytes, self.time, None]
        self.history.append(row)
        insort(self.segments, row)
        self.cuda_mallocs += 1
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        age = 0 if self.ties == "address" else next(self.ages)
        block = self.blocks[address] = CachedBlock(address, nbytes, small, age)
        return block

    def place(self, nbytes: int) -> int:
        """The address of a new segment: the lowest that is free. The device maps pages, so that holes cost it
        nothing."""
        address = 0
        for start, taken, *_ in self.segments:
            if address + nbytes <= start:
                break
            address = start + taken
        return address

    def release(self) -> None:
        """Returns all segments that are wholly free (torch.cuda.empty_cache)."""
        for pool in self.pools.values():
            for nbytes, _, address in tuple(pool):
                block = self.blocks[address]
                if not block.before and not block.after:
                    self.take(block)
                    del self.blocks[address]
                    self.segments.pop(bisect_left(self.segments, [address]))[3] = self.time
                    self.reserved_bytes -= nbytes


# --- steps ---

def lifespans(trace: Trace) -> list[Lifespan]:
    """The tensors of a Trace in the order of their mallocs: Lifespan(start, stop, bytes, segment, k,
    planned).

    start and stop are request numbers; mallocs and frees count, marks do not. k is the number of the malloc
    in its segment. What is never freed, and what outlives the step (`keep`), is freed at the end. A plan may
    have what a segment requests and does not keep.
    """
    out: list[Lifespan] = []
    live: dict[str | int, int] = {}
    segment, k, time = "", 0, 0
    for verb, name, nbytes in trace.events:
        if verb in ("begin", "end"):
            segment, k = (name, 0) if verb == "begin" else ("", 0)
            continue
        if verb == "free":
            i = live.pop(name)
            out[i] = out[i]._replace(stop=time)
        else:
            # nothing asks for a kept tensor by its name: the time is its key
            live[name if verb == "malloc" else time] = len(out)
            out.append(Lifespan(time, None, nbytes, segment, k, segment != "" and verb == "malloc"))
            k += 1
        time += 1
    for late, i in enumerate(live.values()):
        out[i] = out[i]._replace(stop=time + late)
    return out


def segment_starts(trace: Trace) -> list[tuple[str, int]]:
    """[(segment, request number at which it begins)] of a Trace, and a last one, "", at its end; "" also
    stands for what lies between segments."""
    out, time = [("", 0)], 0
    for verb, name, _ in trace.events:
        if verb in ("begin", "end"):
            out.append((name if verb == "begin" else "", time))
        else:
            time += 1
    out.append(("", time))
    return [a for a, b in zip(out, out[1:], strict=False) if b[1] > a[1]] + out[-1:]  # without empty ones


def segment_kind(segment: str) -> str:
    """The kind of a segment, without shape and layer: `forward` of `1x4096/forward 3`."""
    words = segment.rpartition("/")[2].split()
    return " ".join(word for word in words if not any(c.isdigit() for c in word)) or "other"


@dataclass(frozen=True)
class Simulation:
    """The caching allocator over some steps: the most bytes allocated (rounded to 512) and reserved, the
    reorganisations and cudaMallocs. `steps` has the Rectangles of each step's tensors and `segments` those
    reserved, all on one clock; `starts` the request number at which each step starts, and the end of the
    last."""

    allocated_bytes: int
    reserved_bytes: int
    reorganisations: int
    cuda_mallocs: int
    steps: tuple
    segments: tuple
    starts: tuple


def simulate_caching(traces: list[Trace], capacity: int | None = None,
                     planned_only: bool = False) -> Simulation:
    """The Simulation of one Trace after the other, the cache kept between them: several steps, several
    lengths.

    capacity: bytes of the device that these may take; None for no limit. planned_only: without the tensors
    that a plan leaves to torch. Errors: SimulatedOutOfMemory.
    """
    allocator = CachingAllocator(capacity)
    steps, starts = [], [0]
    for trace in traces:
        everything = lifespans(trace)
        lives = [t for t in everything if t.planned or not planned_only]
        addresses: dict[int, int] = {}
        start = starts[-1]
        for time, i in sorted((time, i) for i, t in enumerate(lives) for time in (t.start, t.stop)):
            allocator.time = start + time
            if i in addresses:
                allocator.free(addresses[i])
            else:
                addresses[i] = allocator.malloc(lives[i].bytes)
        steps.append(tuple(
            Rectangle(start + t.start, start + t.stop, addresses[i], t.bytes, segment_kind(t.segment))
            for i, t in enumerate(lives)))
        starts.append(start + 2 * len(everything))
    segments = tuple(Rectangle(since, starts[-1] if until is None else until, address, nbytes, "reserved")
                     for address, nbytes, since, until in allocator.history)
    return Simulation(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes,
                      allocator.reorganisations, allocator.cuda_mallocs, tuple(steps), segments,
                      tuple(starts))


def planned_rectangles(trace: Trace, plan: Plan) -> list[Rectangle]:
    """The Rectangles of a Plan: where the tensors of the Trace lie in the arena, without what it leaves to
    torch."""
    out = []
    for t in lifespans(trace):
        requests = plan.segments.get(t.segment, ())
        nbytes, offset = requests[t.k] if t.planned and t.k < len(requests) else (0, None)
        if offset is not None and nbytes == t.bytes:
            out.append(Rectangle(t.start, t.stop, offset, t.bytes, segment_kind(t.segment)))
    return out
