"""Null CUDA itself: that it sees what it shall see. What these tests do on purpose, no other run may do."""

import itertools
import random

import pytest

from memo.run.rehearsal import rehearsed_requests
from tests.nullcuda.runs import in_process


def counted(work):
    from tests.nullcuda.watch import NULL
    before = NULL.counts()
    work()
    return {name: n - before[name] for name, n in NULL.counts().items() if n != before[name]}


def wrongs():
    """What deliberate wrongs count as."""
    import torch
    x, host = torch.zeros(2**20, device="cuda"), torch.zeros(2**20)
    pinned = host.pin_memory()
    torch.cuda.synchronize()
    seen = dict(right=counted(lambda: pinned.copy_(x, non_blocking=True)), sync=counted(lambda: x[0].item()),
                stream=counted(torch.cuda.current_stream().synchronize),
                device=counted(torch.cuda.synchronize),
                pageable=counted(lambda: host.copy_(x, non_blocking=True)))
    from tests.nullcuda.watch import NULL
    seen["bad launch"] = counted(lambda: bad_launch(NULL))
    return seen


def bad_launch(null):
    import ctypes

    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]
    launch = null.lib.cudaLaunchKernel
    launch.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert launch(None, Dim3(1, 70000, 1), Dim3(1, 1, 1), None, 0, None) == 9  # cudaErrorInvalidConfiguration
    assert null.lib.cudaGetLastError() == 9


def test_it_counts_a_sync_a_pageable_copy_and_a_bad_launch(tmp_path):
    seen = in_process(tmp_path, wrongs)
    assert seen["right"] == {"copies": 1}
    assert seen["sync"]["syncs"] == 1 and seen["stream"] == seen["device"] == {"syncs": 1}
    assert seen["pageable"]["pageable copies"] == 1
    assert seen["bad launch"] == {"launches": 1, "bad launches": 1}


# --- virtual time ---

def times():
    import torch

    from tests.nullcuda.watch import NULL
    a = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    x, y = torch.empty(2, 2**28, dtype=torch.uint8, device="cuda")
    side, back = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    host_before = NULL.now()
    marks[0].record()
    _ = a @ a
    marks[1].record()
    with torch.cuda.stream(side):
        marks[2].record()
        host.copy_(x, non_blocking=True)
        marks[3].record()
    with torch.cuda.stream(back):
        y.copy_(host, non_blocking=True)
        marks[4].record()
    torch.cuda.current_stream().wait_event(marks[3])
    marks[5].record()
    ahead = NULL.now() - host_before
    try:
        marks[0].elapsed_time(marks[5])
        early = False
    except RuntimeError:  # not reached yet
        early = True
    torch.cuda.synchronize()
    return dict(product=marks[0].elapsed_time(marks[1]), offload=marks[2].elapsed_time(marks[3]),
                ahead=ahead * 1e3, back=marks[2].elapsed_time(marks[4]),
                waited=marks[0].elapsed_time(marks[5]), early=early, behind=(NULL.now() - host_before) * 1e3)


def test_streams_have_clocks_that_events_join_and_the_host_runs_ahead(tmp_path):
    ms = in_process(tmp_path, times)
    assert ms["product"] == pytest.approx(2e3 * 4096**3 / 692e12, abs=0.02)
    assert ms["offload"] == pytest.approx(2e3**1 * 2**28 / 25e9 / 2, rel=0.01)
    assert ms["back"] == pytest.approx(ms["offload"], rel=0.01)  # both directions at the same time
    assert ms["waited"] == pytest.approx(ms["offload"], rel=0.01)
    assert ms["ahead"] < 0.1 < 10 < ms["behind"] and ms["early"]


# --- happens-before, against brute force ---

STREAMS, PROGRAMS, LENGTH = 3, 150, 25


def program(seed):
    """Random (what, stream, ...): records, waits, synchronizations, and copies within a block of 64 cells."""
    r, ops = random.Random(seed), []
    for _ in range(LENGTH):
        what, s = r.choices(("copy", "record", "wait", "sync"), (6, 3, 3, 0.5))[0], r.randrange(STREAMS)
        if what == "copy":
            n = r.randrange(1, 12)
            start, to = r.sample(range(64 - n), 2)
            ops.append((what, s, start, to, n) if abs(start - to) >= n else ("sync", s))
        else:
            ops.append((what, s, r.randrange(3)) if what != "sync" else (what, s))
    return ops


def races_of(ops):
    """{(first, second)}: numbers of copies that touch the same cells, one of them to write, with no path from
    one to the other in the graph of what comes after what."""
    after = [set() for _ in ops]  # of each op, those that lie behind it
    last, recorded, synced = {}, {}, None
    for i, (what, s, *rest) in enumerate(ops):
        behind = [j for j in (last.get(s), synced) if j is not None]
        if what == "wait" and rest[0] in recorded:
            behind.append(recorded[rest[0]])
        after[i] = set(behind).union(*(after[j] for j in behind))
        last[s] = i
        if what == "record":
            recorded[rest[0]] = i
        if what == "sync":
            after[i] |= {synced} | after[synced] if synced is not None else set()
            synced = i  # the host goes on, and all that it launches from now on
    cells = {i: [(set(range(a, a + n)), False), (set(range(b, b + n)), True)]
             for i, (what, _, *rest) in enumerate(ops) if what == "copy" for a, b, n in [rest]}
    return {(i, j) for i, j in itertools.combinations(cells, 2) if i not in after[j]
            for (x, xw), (y, yw) in itertools.product(cells[i], cells[j]) if (xw or yw) and x & y}


def run_programs():
    """[pairs of labels of the races] of each program."""
    import torch

    from tests.nullcuda.watch import NULL
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    for i, s in enumerate(streams):
        NULL.name_stream(s, f"s{i}")
    found = []
    for seed in range(PROGRAMS):
        torch.cuda.synchronize()
        NULL.races(clear=True)
        block, events = torch.empty(64 * 512, dtype=torch.uint8, device="cuda"), {}
        cells = block.view(64, 512)
        for i, (what, s, *rest) in enumerate(program(seed)):
            NULL.label(str(i))
            with torch.cuda.stream(streams[s]):
                if what == "copy":
                    a, b, n = rest
                    cells[b:b + n].copy_(cells[a:a + n])
                elif what == "record":
                    events[rest[0]] = torch.cuda.Event()
                    events[rest[0]].record()
                elif what == "wait" and rest[0] in events:
                    streams[s].wait_event(events[rest[0]])
                elif what == "sync":
                    streams[s].synchronize()
        NULL.label("")
        lines = NULL.races(clear=True)
        found.append(sorted({tuple(int(part.split(": ")[1].split()[0]) for part in line.split(", "))
                             for line in lines}))
    return found


def test_races_are_those_of_brute_force(tmp_path):
    found = in_process(tmp_path, run_programs)
    some = 0
    for seed, lines in enumerate(found):
        mine, theirs = {tuple(pair) for pair in lines}, races_of(program(seed))
        assert mine <= theirs, seed  # no false one
        # a byte's history is its last write and the reads since: behind a race with that write
        # older ones are not told apart
        assert bool(mine) == bool(theirs), seed
        assert {j for _, j in theirs} >= {j for _, j in mine}
        some += bool(theirs)
    assert PROGRAMS / 5 < some < PROGRAMS  # programs of both kinds


# --- memory ---

def locks():
    import mmap

    import torch

    from tests.nullcuda.watch import NULL
    cudart = torch.cuda.cudart()
    where = torch.frombuffer(mmap.mmap(-1, 2**40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000),
                             dtype=torch.uint8)
    address, x = where.data_ptr(), torch.zeros(2**21, dtype=torch.uint8, device="cuda")

    def register(first, nbytes):
        error = int(cudart.cudaHostRegister(address + first, nbytes, 0))
        NULL.lib.cudaGetLastError()
        return error
    seen = dict(too_large=register(0, 2**39), first=register(0, 2**39 - 4096),
                second=register(2**39 - 4096, 4096), again=register(4096, 4096))
    where[2**39 - 8192:2**39 - 4096].copy_(x[:4096], non_blocking=True)
    try:
        where[2**39 - 8192:2**39].copy_(x[:8192], non_blocking=True)
        seen["across"] = None
    except RuntimeError as e:
        seen["across"] = str(e).splitlines()[0]
    return seen


def test_page_locks_have_the_drivers_limits(tmp_path):
    seen = in_process(tmp_path, locks)
    across = seen.pop("across")
    assert seen == dict(too_large=2, first=0, second=0, again=712)
    assert "invalid argument" in across


# --- the dispatch mode ---

def requests():
    """A step's memory requests, recorded without Watch and with it."""
    import torch

    from memo.config.layout import Layout
    from memo.planner.allocator import Arena
    from memo.states.passes import Model
    from memo.system import hardware
    from model import GPT
    from tests.nullcuda.watch import watching
    cfg = Layout(n_layer=2, n_embd=256, n_head=4, block_size=1024, vocab_size=1000, attention="flash",
                 activation="keep")
    traces = []
    for watch in (None, False, True):  # the first one takes the libraries' workspaces along
        device = torch.device("cuda:0")
        model = Model(GPT, cfg, device, torch.bfloat16)
        model.reserve(1, 1024)
        arena = Arena(device)
        if watch:
            with watching(hardware.machine("h100-80gb").speeds):
                traces.append(rehearsed_requests(model, arena).text)
        else:
            traces.append(rehearsed_requests(model, arena).text)
        arena.close()
        model.close()
    return traces[1:]


def test_watching_changes_no_memory_request(tmp_path):
    without, watched = in_process(tmp_path, requests)
    assert without == watched and without.count("malloc") > 20
