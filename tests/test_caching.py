"""torch's caching allocator, simulated: its rules one by one; against a plain model and torch on a GPU."""

import multiprocessing
import random
from types import SimpleNamespace

import pytest
import torch

from memo.planner.caching import (
    CachingAllocator,
    Rectangle,
    SimulatedOutOfMemory,
    installed_torch,
    lifespans,
    planned_rectangles,
    segment_kind,
    simulate_caching,
    tie_rule,
)
from memo.plots import memory_plan

KiB, MiB = 2**10, 2**20
SIZES = (1, 511, 513, 100 * KiB, MiB - 1, MiB, MiB + 1, 3 * MiB, 9 * MiB, 10 * MiB, 11 * MiB,
         24 * MiB + 5, 40 * MiB)
TIES = ("address", "block", "segment")


def trace(*lines):
    """A Trace of `verb name bytes` lines, as memo/planner/plan.py has it."""
    words = [[*line.split(), "0"] for line in lines]
    return SimpleNamespace(events=tuple((w[0], w[1].replace("_", " "), int(w[2])) for w in words))


# --- the rules ---

@pytest.mark.parametrize("nbytes,block,reserved", [
    (1, 512, 2 * MiB), (512, 512, 2 * MiB), (513, 1024, 2 * MiB),
    (MiB, MiB, 2 * MiB),                            # the greatest of the small pool
    (MiB + 1, MiB + 512, 20 * MiB),                 # the least of the large one
    (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
    (10 * MiB - 511, 10 * MiB, 10 * MiB),           # the rounded size counts: a segment of its own
    (11 * MiB, 12 * MiB, 12 * MiB),                 # rounded up to 2 MiB; the rest, 1 MiB, is not split off
    (11 * MiB - 1024, 11 * MiB - 1024, 12 * MiB),   # more than 1 MiB is
])
def test_rounding_pools_segments_and_splitting(nbytes, block, reserved):
    a = CachingAllocator()
    assert a.malloc(nbytes) == 0
    assert (a.allocated_bytes, a.reserved_bytes, a.cuda_mallocs) == (block, reserved, 1)


def test_a_rest_of_512_bytes_is_a_block_in_the_small_pool():
    a = CachingAllocator()
    assert a.malloc(MiB) == 0 and a.malloc(MiB - 512) == MiB
    assert a.malloc(512) == 2 * MiB - 512
    assert a.cuda_mallocs == 1 and a.pools[True] == []


def test_the_pools_do_not_share():
    a = CachingAllocator()
    a.free(a.malloc(20 * MiB))
    assert a.malloc(MiB) == 20 * MiB and a.reserved_bytes == 22 * MiB


@pytest.mark.parametrize("ties", TIES)
def test_best_fit_takes_the_smallest_block(ties):
    a = CachingAllocator(ties=ties)
    large, first, small, second = (a.malloc(n * MiB) for n in (30, 14, 12, 14))
    for address in (large, second, small, first):
        a.free(address)
    assert a.malloc(13 * MiB) == first  # 14 MiB twice; the rest of 1 MiB stays with it
    assert a.malloc(14 * MiB) == second
    assert a.malloc(14 * MiB) == large  # cut: 16 MiB remain
    assert a.malloc(16 * MiB) == large + 14 * MiB
    assert a.cuda_mallocs == 4 and a.allocated_bytes == (14 + 14 + 14 + 16) * MiB


def test_each_torch_breaks_ties_in_its_own_way():
    """What torch 2.11, 2.12 and 2.13 to 2.14 do was seen by running their allocators on such requests."""
    assert [tie_rule(v) for v in ((2, 9), (2, 11), (2, 12), (2, 13), (2, 14), (3, 0))] == [
        "address", "address", "block", "segment", "segment", "segment"]
    assert tie_rule(installed_torch()) == tie_rule(tuple(int(n) for n in torch.__version__.split(".")[:2]))
    taken = {}
    for ties in TIES:
        a = CachingAllocator(ties=ties)
        places = iter((100 * MiB, 0))  # the younger segment lies lower
        a.place = lambda _, places=places: next(places)
        # the last block of each segment is the oldest: what was left of it
        p = [a.malloc(5 * MiB) for _ in range(8)]
        for i in (1, 3, 5):
            a.free(p[i])
        taken[ties] = [p.index(a.malloc(5 * MiB)) for _ in range(3)]
    assert taken == dict(address=[5, 1, 3], block=[3, 1, 5], segment=[1, 3, 5])
    a = CachingAllocator(ties="block")
    p = [a.malloc(2 * MiB) for _ in range(10)]
    for i in (0, 3, 2, 1, 5, 6, 7, 8):
        a.free(p[i])
    # freed last: p[1], p[8]; the segment was 1
    assert a.pools[False] == [(8 * MiB, 3, p[0]), (8 * MiB, 10, p[5])]


def test_free_neighbours_merge_within_their_segment_only():
    a = CachingAllocator(ties="segment")
    p = [a.malloc(5 * MiB) for _ in range(8)]  # two segments, side by side
    for i in (0, 2, 1):
        a.free(p[i])
    assert a.pools[False] == [(15 * MiB, 1, 0)]
    a.free(p[4])
    a.free(p[3])
    assert a.pools[False] == [(5 * MiB, 2, 20 * MiB), (20 * MiB, 1, 0)]  # they touch, and stay two
    with pytest.raises(KeyError):
        a.free(p[1])


def test_a_full_device_returns_its_free_segments_of_both_pools_and_tries_again():
    a = CachingAllocator(capacity=44 * MiB)
    p, q, r = a.malloc(20 * MiB), a.malloc(512), a.malloc(5 * MiB)
    a.free(p)
    a.free(q)
    a.time = 9
    assert a.malloc(22 * MiB) == 0  # the 20 and the 2 MiB went back; the 20 MiB that r lies in did not
    assert (a.reorganisations, a.cuda_mallocs) == (1, 4)
    assert a.reserved_bytes == a.peak_reserved_bytes == 42 * MiB
    assert a.history == [[0, 20 * MiB, 0, 9], [20 * MiB, 2 * MiB, 0, 9], [22 * MiB, 20 * MiB, 0, None],
                         [0, 22 * MiB, 9, None]]
    assert a.malloc(15 * MiB) == r + 5 * MiB
    why = r"20971520 bytes must be <= capacity=46137344 - reserved=44040192 \(in use: 44"
    with pytest.raises(SimulatedOutOfMemory, match=why):
        a.malloc(4 * MiB)
    assert a.reorganisations == 2
    a.free(r)
    assert a.malloc(4 * MiB) == r  # all goes on


# --- against a plain model ---

class Plain:
    """The same rules, slowly: a segment is a list of cells [bytes, used, number, number of the segment]."""

    def __init__(self, capacity, ties):
        self.capacity, self.segments, self.number = capacity, {}, 0  # base: (small, cells)
        self.tie = dict(address=lambda cell, cells: 0, block=lambda cell, cells: cell[2],
                        segment=lambda cell, cells: min(c[3] for c in cells))[ties]

    def cell(self, nbytes, used, born=None):
        self.number += 1
        return [nbytes, used, self.number, self.number if born is None else born]

    def cells(self):
        for base, (small, cells) in sorted(self.segments.items()):
            address = base
            for i, (nbytes, used, *_) in enumerate(cells):
                yield address, nbytes, used, small, cells, i
                address += nbytes

    def reserved(self):
        return sum(nbytes for _, nbytes, *_ in self.cells())

    def malloc(self, n):
        n = max(-(-n // 512), 1) * 512
        small = n <= MiB
        fits = [(nbytes, self.tie(cells[i], cells), address, cells, i)
                for address, nbytes, used, s, cells, i in self.cells()
                if s == small and not used and nbytes >= n]
        if not fits:
            size = 2 * MiB if small else 20 * MiB if n < 10 * MiB else -(-n // (2 * MiB)) * 2 * MiB
            if self.reserved() + size > self.capacity:
                self.segments = {b: s for b, s in self.segments.items() if len(s[1]) > 1 or s[1][0][1]}
            if self.reserved() + size > self.capacity:
                raise SimulatedOutOfMemory
            ends = {b: b + sum(nbytes for nbytes, *_ in s[1]) for b, s in self.segments.items()}
            base = min(e for e in (0, *ends.values())
                       if all(e + size <= b or end <= e for b, end in ends.items()))
            cells = [self.cell(size, False)]
            self.segments[base] = small, cells
            fits = [(size, 0, base, cells, 0)]
        nbytes, _, address, cells, i = min(fits, key=lambda fit: fit[:3])
        rest = nbytes - n
        if (rest >= 512) if small else (rest > MiB):
            cells[i:i + 1] = [self.cell(n, True, cells[i][3]), [rest, False, *cells[i][2:]]]
        else:
            cells[i][1] = True
        return address

    def free(self, address):
        cells, i = next((cells, i) for at, _, _, _, cells, i in self.cells() if at == address)
        cells[i][1], numbers = False, cells[i][2:]
        for j in (i, i - 1):
            if 0 <= j < len(cells) - 1 and not cells[j][1] and not cells[j + 1][1]:
                cells[j:j + 2] = [[cells[j][0] + cells[j + 1][0], False, *numbers]]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("seed", range(15))
def test_random_requests_against_a_plain_model_of_memory(seed, ties):
    rng = random.Random(seed)
    capacity = rng.choice((10**12, 150 * MiB, 80 * MiB))
    a, plain, live, failures, peak = CachingAllocator(capacity, ties), Plain(capacity, ties), {}, 0, 0
    for _ in range(300):
        if live and rng.random() < 0.48:
            address = rng.choice(list(live))
            del live[address]
            a.free(address)
            plain.free(address)
        else:
            n = rng.choice(SIZES) if rng.random() < 0.5 else int(10 ** rng.uniform(0, 7.6))
            try:
                address = plain.malloc(n)
            except SimulatedOutOfMemory:
                failures += 1
                with pytest.raises(SimulatedOutOfMemory):
                    a.malloc(n)
                continue
            assert a.malloc(n) == address
            live[address] = n
        cells = list(plain.cells())
        # nothing overlaps
        assert all(one[0] + one[1] <= two[0] for one, two in zip(cells, cells[1:], strict=False))
        blocks = {b.address: (b.bytes, b.free) for b in a.blocks.values()}
        assert {at: (n, not used) for at, n, used, *_ in cells} == blocks
        assert a.allocated_bytes == sum(n for _, n, used, *_ in cells if used) >= sum(live.values())
        assert a.reserved_bytes == plain.reserved() == sum(n for _, n, *_ in a.segments) <= capacity
        peak = max(peak, a.reserved_bytes)
        assert all(any(s <= at and at + n <= s + size for s, size, *_ in a.segments)
                   for at, n in live.items())
        free = sorted(at for pool in a.pools.values() for _, _, at in pool)
        assert free == [at for at, _, used, *_ in cells if not used]
    assert a.peak_reserved_bytes == peak and a.reorganisations >= failures
    assert a.cuda_mallocs == len(a.history)
    for address in live:
        a.free(address)
    a.release()
    assert (a.allocated_bytes, a.reserved_bytes, a.blocks, a.segments) == (0, 0, {}, [])


def follow_torch():
    """The same requests to torch and to the simulation, in a process of its own: its cache must be empty."""
    a, live, failures, rng = CachingAllocator(300 * MiB), [], 0, random.Random(0)
    torch.cuda.set_per_process_memory_fraction(301 * MiB / torch.cuda.get_device_properties(0).total_memory)
    for _ in range(5000):
        if live and rng.random() < 0.48:
            address = live.pop(rng.randrange(len(live)))
            torch.cuda.caching_allocator_delete(address)
            a.free(address)
        else:
            n = rng.choice(SIZES) if rng.random() < 0.5 else int(10 ** rng.uniform(0, 7.6))
            try:
                address = torch.cuda.caching_allocator_alloc(n)
            except torch.OutOfMemoryError:
                failures += 1
                with pytest.raises(SimulatedOutOfMemory):
                    a.malloc(n)
                continue
            a.place = lambda _, address=address: address  # a new segment is where torch got it
            assert a.malloc(n) == address
            live.append(address)
        assert a.allocated_bytes == torch.cuda.memory_allocated()
        assert a.reserved_bytes == torch.cuda.memory_reserved()
    assert a.reorganisations == torch.cuda.memory_stats()["num_alloc_retries"] > failures > 0


@pytest.mark.cuda
def test_every_address_and_counter_is_that_of_torch(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    process = multiprocessing.get_context("spawn").Process(target=follow_torch)
    process.start()
    process.join()
    assert process.exitcode == 0


# --- steps ---

STEP = trace("malloc outer 100", "begin forward_0_1x4096", f"malloc x {30 * MiB}", f"malloc a {12 * MiB}",
             "keep loss 4", f"free a {12 * MiB}", "end forward_0_1x4096", "begin backward_0_1x4096",
             f"malloc a {14 * MiB}", f"free x {30 * MiB}", "end backward_0_1x4096", "free outer 100")


def test_the_lives_of_a_step():
    assert [tuple(t) for t in lifespans(STEP)] == [
        (0, 7, 100, "", 0, False), (1, 6, 30 * MiB, "forward 0 1x4096", 0, True),
        (2, 4, 12 * MiB, "forward 0 1x4096", 1, True), (3, 8, 4, "forward 0 1x4096", 2, False),
        (5, 9, 14 * MiB, "backward 0 1x4096", 0, True)]
    labels = ("forward 0 1x4096", "embedding backward 2x64", "layer 3 forward", "")
    assert [segment_kind(label) for label in labels] == [
        "forward", "embedding backward", "layer forward", "other"]


def test_one_step_and_the_next():
    one = simulate_caching([STEP])
    assert (one.allocated_bytes, one.reserved_bytes, one.cuda_mallocs) == (44 * MiB + 1024, 58 * MiB, 4)
    assert one.starts == (0, 10) and one.segments[-1] == Rectangle(5, 10, 44 * MiB, 14 * MiB, "reserved")
    only = simulate_caching([STEP], planned_only=True)
    assert (only.allocated_bytes, only.reserved_bytes, only.cuda_mallocs) == (44 * MiB, 56 * MiB, 3)
    assert only.steps == ((Rectangle(1, 6, 0, 30 * MiB, "forward"),
                           Rectangle(2, 4, 30 * MiB, 12 * MiB, "forward"),
                           Rectangle(5, 9, 42 * MiB, 14 * MiB, "backward")),)
    two = simulate_caching([STEP, STEP], planned_only=True)
    # the cache has what the second step needs
    assert two.reserved_bytes == only.reserved_bytes and two.cuda_mallocs == 3
    assert two.starts == (0, 10, 20) and two.steps[1][0] == Rectangle(11, 16, 0, 30 * MiB, "forward")


def test_where_room_is_scarce_the_cache_is_given_back():
    longer = trace("begin f", f"malloc a {20 * MiB}", f"free a {20 * MiB}", f"malloc b {24 * MiB}", "end f")
    assert simulate_caching([longer], capacity=44 * MiB).reorganisations == 0
    tight = simulate_caching([longer], capacity=43 * MiB)
    assert (tight.reorganisations, tight.reserved_bytes) == (1, 24 * MiB)
    assert [(s.start, s.stop) for s in tight.segments] == [(0, 2), (2, 4)]
    with pytest.raises(SimulatedOutOfMemory):
        simulate_caching([longer], capacity=23 * MiB)


@pytest.mark.slow
def test_a_hundred_thousand_requests_are_simulated():
    rng, events, live = random.Random(0), [], []
    for i in range(50_000):
        live.append((str(i), rng.choice(SIZES)))
        events.append(("malloc", *live[-1]))
        if len(live) > 50:
            events.append(("free", *live.pop(rng.randrange(len(live)))))
    found = simulate_caching([SimpleNamespace(events=tuple(events))])
    assert found.reserved_bytes >= found.allocated_bytes and not found.reorganisations


# --- the picture ---

PLAN = SimpleNamespace(arena_bytes=44 * MiB, lower_bound=44 * MiB, proven=True, segments={
    "forward 0 1x4096": ((30 * MiB, 14 * MiB), (12 * MiB, 0), (4, None)),
    "backward 0 1x4096": ((14 * MiB, 0),)})


def test_the_planned_rectangles():
    assert planned_rectangles(STEP, PLAN) == [
        Rectangle(1, 6, 14 * MiB, 30 * MiB, "forward"), Rectangle(2, 4, 0, 12 * MiB, "forward"),
        Rectangle(5, 9, 0, 14 * MiB, "backward")]
    missed = SimpleNamespace(segments={"forward 0 1x4096": ((30 * MiB, 14 * MiB), (12 * MiB + 1, 0))})
    # a miss is torch's
    assert planned_rectangles(STEP, missed) == [Rectangle(1, 6, 14 * MiB, 30 * MiB, "forward")]


@pytest.mark.slow
def test_memory_plan_is_a_picture(tmp_path):
    memory_plan(STEP, PLAN, tmp_path / "a.png", "One step for $1")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="give the plan of this trace"):
        memory_plan(STEP, SimpleNamespace(segments={}), tmp_path / "b.png", "")
