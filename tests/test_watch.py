"""A run in which nothing happens any more: it ends, and names the rank that the others wait for."""

import os
import re
import signal
import socket
import threading
import time
from functools import partial

import pytest
import torch

import train
from memo.checkpoint import checkpoint
from memo.run import watch
from memo.run.watch import SAVE, verdict
from testing.ranks import start_ranks
from tests.helpers import argv, bound_arena, no_picture

LATE = r"has not come to sum \d+ of axis data \(ranks 0 to 1, group \d+\)"
HUNG = 10  # the step in which a rank hangs: the save before step 8 has waited for the one before step 4


def sleep(run):
    time.sleep(10**6)


def loop(run):
    while True:
        pass


def stop(run):
    os.kill(os.getpid(), signal.SIGSTOP)


def another_order(run):
    run.mesh.host.sum(torch.zeros(1))


def endless_fsync(run):
    os.fsync = lambda fd: time.sleep(10**6)


def hang(argv, how):
    """train.main, in which the last of the ranks hangs, or the only one."""
    real = train.forward_backward

    def hanging(run, it):
        if it == HUNG and run.mesh.host.rank == run.mesh.host.size - 1:
            how(run)
        return real(run, it)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "forward_backward", hanging)
        m.setattr("memo.run.report.draw_picture", no_picture)
        bound_arena(m)
        return train.main(argv)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks,how,told", [
    (1, sleep, r"0 is in step 10 at train.py:\d+, train: time.sleep\(10\*\*6\)"),
    (2, sleep, rf"1 {LATE}, is in step 10 at train.py:\d+, train: time.sleep.*"),
    (2, loop, rf"1 {LATE}, is in step 10 at train.py:\d+, train: (pass|while True)"),
    (2, stop, r"1 has not come to \w+ \d+ of .*, says nothing: it is stopped, or its host is"),
    (2, another_order, rf"0 has not come to sum \d+ of all ranks, .*; rank 1 {LATE}, .*"),
    (1, endless_fsync, r"0 is in step \d+ at .*, its save at \w+.py:\d+, \w+: os.fsync = lambda .*"),
    (2, endless_fsync, r"1 has not come to part \d+ of the save, .*, its save at .* os.fsync = lambda .*")])
def test_a_rank_that_hangs_is_named(dataset, tmp_path, ranks, how, told):
    keys = argv(dataset, tmp_path / "out", max_iters=10**6, eval_interval=0, stall_timeout=3)
    processes = start_ranks(partial(hang, how=how), keys, ranks, tmp_path)
    for process in processes[:1 if how is stop else 2]:
        process.join(120)
        assert process.exitcode == 1
    processes[-1].kill()
    said = "".join((tmp_path / f"{rank}.err").read_text() for rank in range(ranks))
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    told = (f"error: nothing has happened for \\d+ s: rank {told}; what is saved is whole; --stall_timeout "
            "gives other seconds, 0 none")
    assert re.fullmatch(told, line.replace(f" ({socket.gethostname()})", "")), line
    assert checkpoint.load(tmp_path / "out").iter >= 4


def record(name, **came):
    return dict(name=name, at="is there", trains=False,
                came={SAVE: [7, "part"]} | {line: [n, "sum"] for line, n in came.items()})


def test_who_waits_for_another_rank_is_not_to_blame():
    found = {0: record("a", tp=9, host=5), 1: record("b", tp=8, pp=4, host=5), 2: record("c", pp=5, host=5)}
    assert verdict(found) == "b has not come to sum 5 of pp, is there"
    found[1]["trains"] = True
    assert verdict(found) == "a is there; b is there; c is there"
    assert verdict(found, [2]) == "c says nothing: it is stopped, or its host is"


@pytest.mark.parametrize("rate,ends", [(10**3, False), (10**12, True)])
def test_a_save_may_take_as_long_as_a_slow_disk(dataset, tmp_path, monkeypatch, rate, ends):
    """Thirty looks of a second each, with ten seconds allowed, while the run waits for its save."""
    watches, still, real = [], [], os.fsync

    def fsync(fd):
        if threading.current_thread().name == "memo checkpoint":
            still.extend(watches[0].record(tick_s=1, limit_s=10)["still"] for _ in range(30))
        real(fd)
    monkeypatch.setattr(watch, "SAVED_PER_S", rate)
    monkeypatch.setattr(watch.Watch, "limit_s", lambda self: watches.append(self) or 0)  # 0: it does not look
    monkeypatch.setattr(os, "fsync", fsync)
    assert train.main(argv(dataset, tmp_path, eval_interval=0, max_iters=3)) == 0
    assert still and (max(still) >= 1) == ends and checkpoint.load(tmp_path).iter == 3
