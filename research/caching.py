"""A simulation of torch's caching allocator on a step's requests, without torch and without a GPU. It follows
the rules of torch 2.13's c10/cuda/CUDACachingAllocator.cpp as they are by default, on one stream.

    rounding     a request is rounded up to 512 bytes
    pools        rounded requests up to 1 MiB share segments of 2 MiB (the small pool). Larger ones are the
                 large pool: requests below 10 MiB share segments of 20 MiB, others get a segment of their
                 own, rounded up to 2 MiB
    best fit     the smallest free block of the pool that is large enough; of equals one of the segment that
                 was reserved first, there the lowest (before torch 2.13: others of the same size)
    splitting    the rest of a block stays free if it is at least 512 bytes (small pool) or more than 1 MiB
                 (large pool)
    merging      a freed block merges with its free neighbours of the same segment; the segment stays reserved
    full device  where cudaMalloc fails, every segment that is wholly free is returned and cudaMalloc is tried
                 again. That is a reorganisation (torch: num_alloc_retries; MEMO 4.2): the device waits.
                 If the second try fails too: OOM
"""

from dataclasses import dataclass, field
from math import inf

from memo.planner.plan import Plan
from memo.planner.trace import Trace, requests_of
from memo.plots.figures import Panel, Rectangle, segment_kind, size_text

MiB = 2**20
MIN_BLOCK, SMALL, SMALL_SEGMENT = 512, MiB, 2 * MiB  # bytes
MIN_LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * MiB, 20 * MiB, 2 * MiB


class SimulatedOutOfMemory(RuntimeError):
    """The device is full, with every free segment returned."""


@dataclass(eq=False)
class Block:
    """A piece of a segment, in use or free."""

    address: int
    bytes: int
    segment: "Segment"
    free: bool = True


@dataclass(eq=False)
class Segment:
    """What one cudaMalloc reserved, from `since` to `until`. Blocks fill it, in order of their addresses."""

    address: int
    bytes: int
    small: bool
    since: int
    until: float = inf
    blocks: list[Block] = field(default_factory=list)


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class CachingAllocator:
    """One device of `capacity` bytes. `malloc` returns addresses, `free` takes them. `segments` are reserved
    now, the oldest first; `history` has those that were returned, too. `time` is the caller's clock."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = inf if capacity is None else capacity
        self.segments: list[Segment] = []
        self.history: list[Segment] = []
        self.used: dict[int, Block] = {}  # by address
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.reorganisations = self.time = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(s.bytes for s in self.segments)

    def malloc(self, nbytes: int) -> int:
        """Finds the address of nbytes. Errors: SimulatedOutOfMemory."""
        nbytes = round_up(max(nbytes, 1), MIN_BLOCK)
        small = nbytes <= SMALL
        pool = (s.blocks for s in self.segments if s.small == small)
        fits = (b for blocks in pool for b in blocks if b.free and b.bytes >= nbytes)
        block = min(fits, key=lambda b: b.bytes, default=None) or self.reserve(nbytes)
        rest, blocks = block.bytes - nbytes, block.segment.blocks
        if rest >= MIN_BLOCK if small else rest > SMALL:
            blocks.insert(blocks.index(block) + 1, Block(block.address + nbytes, rest, block.segment))
            block.bytes = nbytes
        block.free = False
        self.used[block.address] = block
        self.allocated_bytes += block.bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Errors: KeyError where nothing is in use at the address."""
        block = self.used.pop(address)
        self.allocated_bytes -= block.bytes
        block.free, blocks = True, block.segment.blocks
        i = blocks.index(block)
        for k in (i, i - 1):  # with the one above, then with the one below
            if 0 <= k < len(blocks) - 1 and blocks[k].free and blocks[k + 1].free:
                blocks[k].bytes += blocks.pop(k + 1).bytes

    def reserve(self, nbytes: int) -> Block:
        """Reserves a new segment for a request of nbytes, as one block. Errors: SimulatedOutOfMemory."""
        small, large = nbytes <= SMALL, nbytes >= MIN_LARGE
        nbytes = SMALL_SEGMENT if small else round_up(nbytes, ROUND_LARGE) if large else LARGE_SEGMENT
        if self.reserved_bytes + nbytes > self.capacity:
            self.reorganisations += 1
            self.release()
            if self.reserved_bytes + nbytes > self.capacity:
                raise SimulatedOutOfMemory(
                    f"{nbytes} bytes must be <= capacity={self.capacity} - reserved={self.reserved_bytes} "
                    f"(in use: {self.allocated_bytes}); give more or request less")
        segment = Segment(self.place(nbytes), nbytes, small, self.time)
        segment.blocks.append(Block(segment.address, nbytes, segment))
        self.segments.append(segment)
        self.history.append(segment)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return segment.blocks[0]

    def place(self, nbytes: int) -> int:
        """Finds the address of a new segment, the lowest that is free: holes cost a device nothing."""
        address = 0
        for s in sorted(self.segments, key=lambda s: s.address):
            if address + nbytes <= s.address:
                break
            address = s.address + s.bytes
        return address

    def release(self) -> None:
        """Returns all segments that are wholly free (torch.cuda.empty_cache)."""
        for s in self.segments:
            if s.blocks[0].free and s.blocks[0].bytes == s.bytes:
                s.until = self.time
        self.segments = [s for s in self.segments if s.until == inf]


# --- steps ---

def simulate_caching(traces: list[Trace], capacity: int | None = None,
                     planned_only: bool = False) -> tuple[CachingAllocator, list[Rectangle]]:
    """Requests one Trace after the other from one allocator of `capacity` bytes, None for no limit, and give
    back the allocator as it is then and the Rectangles of all tensors, on one clock. planned_only: without
    the tensors that a plan leaves to torch. Errors: SimulatedOutOfMemory."""
    allocator, tensors, start = CachingAllocator(capacity), [], 0
    for trace in traces:
        requests = [r for r in requests_of(trace)[0] if r.planned or not planned_only]
        addresses: dict[int, int] = {}
        for time, i in sorted((time, i) for i, r in enumerate(requests) for time in (r.lower, r.upper)):
            allocator.time = start + time
            if i in addresses:
                allocator.free(addresses[i])
            else:
                addresses[i] = allocator.malloc(requests[i].bytes)
        tensors += [Rectangle(start + r.lower, start + r.upper, addresses[i], r.bytes,
                              segment_kind(r.segment)) for i, r in enumerate(requests)]
        start += len(trace.events) + 1
    return allocator, tensors


def panel(trace: Trace, plan: Plan) -> Panel:
    """Makes the panel of memo.plots.figures.memory_plan() of one step, from an empty cache."""
    cache, tensors = simulate_caching([trace], planned_only=True)
    segments = [Rectangle(s.since, s.until, s.address, s.bytes, "reserved") for s in cache.history]
    reserved = cache.peak_reserved_bytes
    return tensors, segments, (f"torch's caching allocator (simulated): reserves {size_text(reserved)}, "
                               f"{reserved / plan.arena_bytes:.2f}x planned")
