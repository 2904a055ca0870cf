"""Whole is not good: states that are not finite are never saved, nor is an older checkpoint removed before a
finite step has followed the newer one."""

import gc
import os
import subprocess
import sys

import pytest
import torch

import train
from memo import convert, evaluate, sample
from memo.checkpoint import checkpoint
from memo.checkpoint.checkpoint import CheckpointError, Saver
from memo.errors import BadState, TrainingError
from memo.memory.parameters import is_finite, whole
from memo.states.optim import Optimizer
from tests.helpers import ROOT, argv, losses

NAN = float("nan")
KEYS = dict(max_iters=8, save_interval=2, lr_decay_iters=8, eval_interval=0, memory_plan="off", block_size=16)


def poison(monkeypatch, steps, change):
    """From now on change(optimizer) comes behind the update that completes so many steps."""
    real = Optimizer.step

    def step(self, lr):
        real(self, lr)
        self.model.settle()  # a host's step may be under way
        if int(self.steps) == steps:
            change(self)
    monkeypatch.setattr(Optimizer, "step", step)


def kept(out):
    return sorted(int(f.name) for f in checkpoint.checkpoints(out))


def finite(out):
    ckpt = checkpoint.load(out)
    prefixes = ("params", "exp_avg", "exp_avg_sq")
    return all(bool(t.isfinite().all()) for prefix in prefixes for _, t in ckpt.tensors(prefix))


def error_of(*command):
    """The line of the TrainingError or CheckpointError that a run ends with. The run itself is gone."""
    with pytest.raises((TrainingError, CheckpointError)) as error:
        train.main([*command])
    text = str(error.value)
    del error
    gc.collect()
    assert "\n" not in text
    return text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_among_many_is_found(value):
    t = torch.zeros(3, 5)
    assert is_finite(t) and is_finite(torch.empty(0)) and is_finite(torch.full((2,), 3e38))
    t[2, 4] = value
    assert not is_finite(t) and not is_finite(t.T)


# --- what is not saved ---

@pytest.mark.slow
@pytest.mark.parametrize("state", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("steps,keys", [
    (4, {}), (8, {}), (4, dict(keep_checkpoints=1, optimizer_device="cpu"))])
def test_states_that_are_not_finite_are_never_saved(dataset, tmp_path, monkeypatch, state, steps, keys):
    def change(optimizer):
        getattr(optimizer, state)[optimizer.model.layout["lnf_w"].offset] = float("inf")
    with monkeypatch.context() as m:
        poison(m, steps, change)
        error = error_of(*argv(dataset, tmp_path, **KEYS | keys))
    good = tmp_path / "ckpt" / str(steps - 2)
    assert f"the last good checkpoint is {good}, before step {steps - 2};" in error
    assert kept(tmp_path)[-1] == steps - 2 and finite(tmp_path)
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path}"]) == 0
    assert len(losses(tmp_path)) == 8 and kept(tmp_path)[-1] == 8


def test_a_value_that_no_loss_shows_stops_the_run_at_the_save(dataset, tmp_path, monkeypatch):
    """The second moment of a token that the data lack: its update is zero, however often it is taken."""
    poison(monkeypatch, 3, lambda optimizer: optimizer.exp_avg_sq[100 * 32:101 * 32].fill_(float("inf")))
    error = error_of(*argv(dataset, tmp_path, **KEYS))
    assert error.startswith("exp_avg_sq.wte after 4 steps must be finite, it is not saved; the last good "
                            f"checkpoint is {tmp_path}/ckpt/2, before step 2; try a lower")
    assert kept(tmp_path) == [2] and finite(tmp_path)


def test_the_state_of_another_rank_counts(tmp_path):
    saver = Saver(tmp_path)
    saver.together = lambda work, *args: [work(*args), "exp_avg.a" if work == saver.take else None]
    saver.save([whole("params.a", torch.zeros(3))], {}, 4)
    with pytest.raises(BadState, match="exp_avg.a after 4 steps"):
        saver.wait()
    saver.wait()
    assert kept(tmp_path) == []


# --- what a disk makes of it ---

FLIPS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
int flip_at = -1, writes;
ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    char name[64], path[4096] = "", copy[n + 1];
    if (!real) real = dlsym(RTLD_NEXT, "write");
    snprintf(name, 64, "/proc/self/fd/%d", fd);
    readlink(name, path, 4095);
    if (!strstr(path, "/ckpt/") || writes++ != flip_at) return real(fd, data, n);
    memcpy(copy, data, n);
    copy[n / 2] ^= 4;
    return real(fd, copy, n);
}
"""
SAVES = """
import ctypes, sys, torch
from memo.checkpoint.checkpoint import Saver
from memo.memory.parameters import whole
flips = ctypes.CDLL(None)
at, writes = (ctypes.c_int.in_dll(flips, name) for name in ("flip_at", "writes"))
for n in range(int(sys.argv[1])):
    at.value, writes.value = n, 0
    saver = Saver(f"{sys.argv[2]}/{n}")
    saver.save([whole(f"params.{c}", torch.arange(9.0)) for c in "ab"], {}, 1)
    saver.wait()
    print(writes.value)
"""


@pytest.mark.slow
def test_a_bit_that_is_turned_in_any_write_is_found(tmp_path):
    (tmp_path / "flips.c").write_text("#include <stdio.h>\n" + FLIPS)
    library = str(tmp_path / "flips.so")
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", "-w", str(tmp_path / "flips.c"), "-o", library, "-ldl"],
                   check=True)
    done = subprocess.run([sys.executable, "-c", SAVES, "12", str(tmp_path)], cwd=ROOT, check=True, text=True,
                          env=os.environ | dict(LD_PRELOAD=library), stdout=subprocess.PIPE)
    writes = int(done.stdout.split()[0])  # of a save
    assert 3 < writes < 12
    for n in range(12):
        if n < writes:
            with pytest.raises(CheckpointError):
                checkpoint.load(tmp_path / str(n))
        else:
            assert dict(checkpoint.load(tmp_path / str(n)).tensors("params"))["a"].tolist() == [*range(9)]


def test_all_of_a_file_is_written_when_it_is_synced(tmp_path, monkeypatch):
    synced, real = {}, os.fsync

    def sync(descriptor):
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        real(descriptor)
    monkeypatch.setattr(os, "fsync", sync)
    saver = Saver(tmp_path)
    saver.save([whole("params.a", torch.zeros(3))], {}, 4)
    saver.wait()
    for file in (tmp_path / "ckpt" / "4").iterdir():
        assert synced[file.stat().st_ino] == file.stat().st_size > 0


# --- what is not removed ---

def test_the_older_one_stays_until_a_step_has_followed_the_newer(dataset, tmp_path, monkeypatch):
    there, real = [], train.forward_backward

    def look(run, it):
        run.saver.join()
        there.append(kept(tmp_path))
        return real(run, it)
    monkeypatch.setattr(train, "forward_backward", look)
    train.main(argv(dataset, tmp_path, **KEYS | dict(keep_checkpoints=1)))
    assert there == [[], [], [2], [2], [2, 4], [2, 4], [4, 6], [4, 6]]
    assert kept(tmp_path) == [6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, True])
def test_finite_weights_whose_first_step_is_not_offer_the_checkpoint_before(dataset, tmp_path, monkeypatch,
                                                                            resumes):
    with monkeypatch.context() as m:
        poison(m, 4, lambda optimizer: optimizer.master[:50 * 32].fill_(3e38))
        command = argv(dataset, tmp_path, **KEYS | dict(keep_checkpoints=1, max_iters=4 if resumes else 8))
        if resumes:
            assert train.main(command) == 0
            command = ["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=8"]
        error = error_of(*command)
    before, newest = (tmp_path / "ckpt" / name for name in "24")
    assert (f"nothing was saved over: the last good checkpoint is {before}, before step 2 (rename {newest} "
            "to 4.aside to resume from it)") in error
    assert kept(tmp_path) == [2, 4]
    newest.rename(newest.with_name("4.aside"))
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=8"]) == 0
    assert len(losses(tmp_path)) == 8


# --- what lay there before ---

@pytest.fixture
def poisoned(dataset, tmp_path, monkeypatch):
    """The out_dir of a run whose newest checkpoint is not finite, as an older memo could save it."""
    with monkeypatch.context() as m:
        poison(m, 4, lambda optimizer: optimizer.master[optimizer.model.layout["lnf_w"].offset:].fill_(NAN))
        m.setattr(checkpoint, "is_finite", lambda t: True)
        keys = KEYS | dict(max_iters=4, position="learned", block_size=64)
        train.main(argv(dataset, tmp_path / "out", **keys))
    return tmp_path / "out"


@pytest.mark.slow
@pytest.mark.parametrize("read", [
    lambda out: train.main(["--init_from=resume", f"--out_dir={out}", "--max_iters=8"]),
    lambda out: sample.load_model(out, "cpu"),
    lambda out: evaluate.main([str(out), "--device=cpu", "--lengths=64", "--needle_depths=0.5"]),
    lambda out: convert.main(["to-hf", str(out), str(out.parent / "hf")])])
def test_a_checkpoint_that_is_not_finite_is_said_to_be_by_all_who_read_it(poisoned, read):
    with pytest.raises(CheckpointError) as error:
        read(poisoned)
    newest, before = (poisoned / "ckpt" / name for name in "42")
    assert str(error.value) == (
        f"{newest}: params.lnf_w must be finite, and is not; the last good checkpoint is {before}, before "
        f"step 2 (rename {newest} to 4.aside to resume from it)")
    del error
    gc.collect()
    newest.rename(newest.with_name("4.aside"))
    assert train.main(["--init_from=resume", f"--out_dir={poisoned}", "--max_iters=8"]) == 0
