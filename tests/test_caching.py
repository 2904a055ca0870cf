"""torch's caching allocator, simulated: its rules one by one; what always holds; beside torch on a GPU."""

import multiprocessing
import random
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest
import torch

from memo.planner.trace import Request, Trace, requests_of
from memo.plots.figures import Rectangle, memory_plan, planned_rectangles, segment_kind
from research.caching import CachingAllocator, SimulatedOutOfMemory, panel, simulate_caching

KiB, MiB = 2**10, 2**20
SIZES = (1, 511, 513, 100 * KiB, MiB - 1, MiB, MiB + 1, 3 * MiB, 9 * MiB, 10 * MiB, 11 * MiB,
         24 * MiB + 5, 40 * MiB)


def trace(*lines):
    """A Trace of `verb name bytes` lines."""
    words = [[*line.split(), "0"] for line in lines]
    return Trace(tuple((w[0], w[1].replace("_", " "), int(w[2])) for w in words))


def blocks(a, small):
    """(address, bytes) of the pool's free blocks."""
    return [(b.address, b.bytes) for s in a.segments if s.small == small for b in s.blocks if b.free]


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
    assert (a.allocated_bytes, a.reserved_bytes, len(a.history)) == (block, reserved, 1)


def test_a_rest_of_512_bytes_is_a_block_in_the_small_pool():
    a = CachingAllocator()
    assert a.malloc(MiB) == 0 and a.malloc(MiB - 512) == MiB
    assert a.malloc(512) == 2 * MiB - 512
    assert len(a.history) == 1 and blocks(a, True) == []


def test_the_pools_do_not_share():
    a = CachingAllocator()
    a.free(a.malloc(20 * MiB))
    assert a.malloc(MiB) == 20 * MiB and a.reserved_bytes == 22 * MiB


def test_best_fit_takes_the_smallest_block():
    a = CachingAllocator()
    large, first, small, second = (a.malloc(n * MiB) for n in (30, 14, 12, 14))
    for address in (large, second, small, first):
        a.free(address)
    assert a.malloc(13 * MiB) == first  # 14 MiB twice; the rest of 1 MiB stays with it
    assert a.malloc(14 * MiB) == second
    assert a.malloc(14 * MiB) == large  # cut: 16 MiB remain
    assert a.malloc(16 * MiB) == large + 14 * MiB
    assert len(a.history) == 4 and a.allocated_bytes == (14 + 14 + 14 + 16) * MiB


def test_of_equal_blocks_one_of_the_oldest_segment_is_taken_and_there_the_lowest():
    a, places = CachingAllocator(), iter((100 * MiB, 0))  # the younger segment lies lower
    a.place = lambda _: next(places)
    p = [a.malloc(5 * MiB) for _ in range(8)]
    for i in (5, 3, 1):
        a.free(p[i])
    assert [p.index(a.malloc(5 * MiB)) for _ in range(3)] == [1, 3, 5]


def test_free_neighbours_merge_within_their_segment_only():
    a = CachingAllocator()
    p = [a.malloc(5 * MiB) for _ in range(8)]  # two segments, side by side
    for i in (0, 2, 1):
        a.free(p[i])
    assert blocks(a, False) == [(0, 15 * MiB)]
    a.free(p[4])
    a.free(p[3])
    assert blocks(a, False) == [(0, 20 * MiB), (20 * MiB, 5 * MiB)]  # they touch, and stay two
    with pytest.raises(KeyError):
        a.free(p[1])


def test_a_full_device_returns_its_free_segments_of_both_pools_and_tries_again():
    a = CachingAllocator(capacity=44 * MiB)
    p, q, r = a.malloc(20 * MiB), a.malloc(512), a.malloc(5 * MiB)
    a.free(p)
    a.free(q)
    a.time = 9
    assert a.malloc(22 * MiB) == 0  # the 20 and the 2 MiB went back; the 20 MiB that r lies in did not
    assert a.reorganisations == 1
    assert a.reserved_bytes == a.peak_reserved_bytes == 42 * MiB
    assert [(s.address, s.bytes, s.since, s.until) for s in a.history] == [
        (0, 20 * MiB, 0, 9), (20 * MiB, 2 * MiB, 0, 9), (22 * MiB, 20 * MiB, 0, inf), (0, 22 * MiB, 9, inf)]
    assert a.malloc(15 * MiB) == r + 5 * MiB
    why = r"20971520 bytes must be <= capacity=46137344 - reserved=44040192 \(in use: 44"
    with pytest.raises(SimulatedOutOfMemory, match=why):
        a.malloc(4 * MiB)
    assert a.reorganisations == 2
    a.free(r)
    assert a.malloc(4 * MiB) == r  # all goes on


# --- what always holds ---

@pytest.mark.parametrize("seed", range(15))
def test_blocks_fill_their_segments_and_free_neighbours_are_one(seed):
    rng = random.Random(seed)
    capacity = rng.choice((10**12, 150 * MiB, 80 * MiB))
    a, live, failures, peak = CachingAllocator(capacity), {}, 0, 0
    for _ in range(300):
        if live and rng.random() < 0.48:
            address = rng.choice(list(live))
            del live[address]
            a.free(address)
        else:
            n = rng.choice(SIZES) if rng.random() < 0.5 else int(10 ** rng.uniform(0, 7.6))
            try:
                live[a.malloc(n)] = n
            except SimulatedOutOfMemory:
                failures += 1
                assert all(any(not b.free for b in s.blocks) for s in a.segments)
        taken = {b.address: b.bytes for s in a.segments for b in s.blocks if not b.free}
        assert taken.keys() == live.keys() and all(taken[at] >= n for at, n in live.items())
        for s in a.segments:
            ends = [b.address + b.bytes for b in s.blocks]
            assert [b.address for b in s.blocks] == [s.address, *ends[:-1]]
            assert ends[-1] == s.address + s.bytes
            assert not any(b.free and c.free for b, c in pairwise(s.blocks))
        by_address = sorted((s.address, s.bytes) for s in a.segments)
        assert all(at + n <= above for (at, n), (above, _) in pairwise(by_address))
        assert a.allocated_bytes == sum(taken.values()) <= a.reserved_bytes <= capacity
        peak = max(peak, a.reserved_bytes)
    assert a.peak_reserved_bytes == peak and a.reorganisations >= failures
    for address in live:
        a.free(address)
    a.release()
    assert (a.allocated_bytes, a.reserved_bytes, a.segments) == (0, 0, [])


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
@pytest.mark.skipif(torch.__version__ < "2.13", reason="of equal blocks an older torch takes others")
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
    forward, backward = "forward 0 1x4096", "backward 0 1x4096"
    assert requests_of(STEP) == ([
        Request("", 0, 100, False, 0, 7), Request(forward, 0, 30 * MiB, True, 1, 6, backward),
        Request(forward, 1, 12 * MiB, True, 2, 4, forward), Request(forward, 2, 4, False, 3, 12),
        Request(backward, 0, 14 * MiB, True, 5, 12)], {forward: (1, 5), backward: (5, 7)})
    labels = ("forward 0 1x4096", "embedding backward 2x64", "layer 3 forward", "")
    assert [segment_kind(label) for label in labels] == [
        "forward", "embedding backward", "layer forward", "other"]


def test_one_step_and_the_next():
    every, _ = simulate_caching([STEP])
    assert (every.peak_allocated_bytes, every.peak_reserved_bytes) == (44 * MiB + 1024, 58 * MiB)
    assert [(s.address, s.bytes, s.since) for s in every.history[2:]] == [
        (32 * MiB, 12 * MiB, 2), (44 * MiB, 14 * MiB, 5)]
    only, tensors = simulate_caching([STEP], planned_only=True)
    assert (only.peak_allocated_bytes, only.peak_reserved_bytes) == (44 * MiB, 56 * MiB)
    assert len(every.history) == 4 and len(only.history) == 3
    assert tensors == [Rectangle(1, 6, 0, 30 * MiB, "forward"),
                            Rectangle(2, 4, 30 * MiB, 12 * MiB, "forward"),
                            Rectangle(5, 12, 42 * MiB, 14 * MiB, "backward")]
    two, tensors = simulate_caching([STEP, STEP], planned_only=True)
    # the cache has what the second step needs
    assert two.peak_reserved_bytes == only.peak_reserved_bytes and len(two.history) == 3
    assert tensors[3] == Rectangle(14, 19, 0, 30 * MiB, "forward")


def test_where_room_is_scarce_the_cache_is_given_back():
    longer = trace("begin f", f"malloc a {20 * MiB}", f"free a {20 * MiB}", f"malloc b {24 * MiB}", "end f")
    assert simulate_caching([longer], capacity=44 * MiB)[0].reorganisations == 0
    tight, _ = simulate_caching([longer], capacity=43 * MiB)
    assert (tight.reorganisations, tight.peak_reserved_bytes) == (1, 24 * MiB)
    assert [(s.since, s.until) for s in tight.history] == [(0, 2), (2, inf)]
    with pytest.raises(SimulatedOutOfMemory):
        simulate_caching([longer], capacity=23 * MiB)


# --- the picture ---

PLAN = SimpleNamespace(arena_bytes=44 * MiB, lower_bound=44 * MiB, proven=True, segments={
    "forward 0 1x4096": ((30 * MiB, 14 * MiB), (12 * MiB, 0), (4, None)),
    "backward 0 1x4096": ((14 * MiB, 0),)})


def test_the_planned_rectangles():
    assert planned_rectangles(STEP, PLAN) == [
        Rectangle(1, 6, 14 * MiB, 30 * MiB, "forward"), Rectangle(2, 4, 0, 12 * MiB, "forward"),
        Rectangle(5, 12, 0, 14 * MiB, "backward")]


@pytest.mark.slow
def test_memory_plan_is_a_picture(tmp_path):
    for name, others in (("a.png", []), ("both.png", [panel(STEP, PLAN)])):
        memory_plan(STEP, PLAN, tmp_path / name, "One step for $1", *others)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
