"""How a run ends: whatever ends it, it saves first, and what is only told does not end it."""

import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import train
from memo.checkpoint import checkpoint, dcp
from memo.checkpoint.checkpoint import Saver
from memo.errors import ConfigError, TrainingError
from memo.plots import figures
from memo.run import ending, report
from memo.run import prepare as run_module
from memo.run.loggers import JsonlLogger, StepStats, read_metrics
from memo.run.state import Run, lock, rescues
from memo.system import command
from memo.system.command import StepGivenUp, StopSignal
from model import Block
from tests.helpers import ROOT, argv, losses


def resumed(out, **keys):
    return train.main(["--init_from=resume", f"--out_dir={out}", *(f"--{k}={v}" for k, v in keys.items())])


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    """Losses of the twelve steps of argv()."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert train.main(argv(dataset, out)) == 0
    return losses(out)


def test_a_run_does_not_start_where_its_checkpoints_would_go_elsewhere(dataset, tmp_path):
    for name in ("elsewhere", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "ckpt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"^out_dir=.*out cannot be written \(ckpt must be a folder, and "):
        train.main(argv(dataset, tmp_path / "out", memory_plan="off"))


# --- signals ---

@pytest.mark.slow
@pytest.mark.usefixtures("hangup_is_heard")
def test_a_second_signal_saves_without_this_step(dataset, tmp_path, monkeypatch, capsys, undisturbed):
    monkeypatch.setattr(command, "SAME_S", 0.0)
    real, calls = Block.backward, []

    def twice(block, *args):
        calls.append(1)
        if len(calls) == 2 * 6:  # in the sixth step
            for number in (signal.SIGHUP, signal.SIGINT):
                os.kill(os.getpid(), number)
        return real(block, *args)
    monkeypatch.setattr(Block, "backward", twice)
    assert train.main(argv(dataset, tmp_path, activation="keep")) == 128 + signal.SIGHUP
    assert checkpoint.load(tmp_path).iter == 5
    out, err = capsys.readouterr()
    assert ("stopped by SIGHUP after 5 of 12 steps, saved in" in out
            and "again to save without this step" in err)
    assert resumed(tmp_path) == 0
    assert losses(tmp_path) == undisturbed


@pytest.mark.usefixtures("hangup_is_heard")
def test_signals_that_come_together_are_one_request(monkeypatch):
    stop = StopSignal(quiet=True, alone=True)
    with command.handling(stop), stop.interruptible():
        for number in command.SIGNALS:
            os.kill(os.getpid(), number)
        assert stop.number in command.SIGNALS and stop.requests == 1
        monkeypatch.setattr(command, "SAME_S", 0.0)
        with pytest.raises(StepGivenUp):
            os.kill(os.getpid(), signal.SIGTERM)
    several = StopSignal(quiet=True, alone=False)
    with several.interruptible():  # other ranks wait for the step to be finished
        several(signal.SIGTERM, None)
        several(signal.SIGTERM, None)
    assert several.number == signal.SIGTERM


@pytest.mark.parametrize("number", command.SIGNALS[3:])
def test_any_signal_that_would_end_a_run_saves_it(dataset, tmp_path, monkeypatch, number):
    monkeypatch.setattr(command, "SAME_S", 0.0)
    real = train.forward_backward

    def signalled(run, it):
        for _ in range(1 + 2 * (number in command.TIMED)):  # these are sent again and again
            if it == 1:
                os.kill(os.getpid(), number)
        return real(run, it)
    monkeypatch.setattr(train, "forward_backward", signalled)
    assert train.main(argv(dataset, tmp_path, eval_interval=0)) == 128 + number
    assert checkpoint.load(tmp_path).iter == 2


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.handling(StopSignal(True, True)):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- errors ---

@pytest.mark.slow
def test_an_error_in_a_step_saves_the_steps_before(dataset, tmp_path, monkeypatch, capsys, undisturbed):
    real = train.forward_backward
    monkeypatch.setattr(train, "forward_backward", lambda run, it: 1 / 0 if it == 7 else real(run, it))
    with pytest.raises(ZeroDivisionError):
        train.main(argv(dataset, tmp_path))
    assert f"7 steps are saved in {tmp_path}; go on with: " in capsys.readouterr().err
    monkeypatch.setattr(train, "forward_backward", real)
    assert resumed(tmp_path) == 0 and losses(tmp_path) == undisturbed


def broken_disk(monkeypatch, works=lambda path: False):
    real = dcp.write

    def write(folder, *args):
        if not works(folder):
            raise OSError(5, "Input/output error")
        return real(folder, *args)
    monkeypatch.setattr(dcp, "write", write)


@pytest.mark.slow
def test_a_run_that_cannot_save_saves_elsewhere(dataset, tmp_path, monkeypatch, capsys, undisturbed):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken_disk(monkeypatch, lambda folder: "memo-saved-" in str(folder))
    with pytest.raises(TrainingError, match=r"^\d+ saves in a row failed: .*Input/output error"):
        train.main(argv(dataset, tmp_path / "out", save_interval=1))
    err = capsys.readouterr().err
    assert err.count("cannot be written (Input/output error)") == ending.MOST_FAILED_SAVES
    [elsewhere] = tmp_path.glob("memo-saved-*")
    done = checkpoint.load(elsewhere).iter
    assert f"after {done} steps: " in err and f"{done} steps are saved in {elsewhere} instead" in err
    assert resumed(elsewhere) == 0
    assert losses(elsewhere) == undisturbed[done:]


def test_few_rescued_folders_stay_and_a_run_names_them(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "memo-saved-00000000-of-others").mkdir()
    with pytest.MonkeyPatch.context() as broken:
        broken_disk(broken, lambda folder: "memo-saved-" in str(folder))
        for steps in (2, 3, 4, 5):
            with pytest.raises(TrainingError, match=f"{steps} steps are saved in"):
                train.main(argv(dataset, tmp_path / "out", max_iters=steps, save_interval=0, eval_interval=0))
            if steps == 2:
                [used] = rescues(tmp_path / "out")[1]
                (used / ".lock").touch()  # a run has gone on there
    kept = rescues(tmp_path / "out")[1]
    assert [checkpoint.load(folder).iter for folder in kept] == [5, 4]
    assert len([*tmp_path.glob("memo-saved-*")]) == 4 and used.exists()
    capsys.readouterr()
    assert train.main(argv(dataset, tmp_path / "out", max_iters=2, eval_interval=0)) == 0
    said = capsys.readouterr().out
    assert all(f"rescued     {folder} has what could not be saved in" in said for folder in kept)


@pytest.mark.slow
def test_the_last_save_of_all_says_where_it_went(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken_disk(monkeypatch)
    message = (r"out/ckpt/3 cannot be written \(Input/output error\).*; "
               r"nor could it be saved elsewhere: \S*/memo-saved-")
    with pytest.raises(TrainingError, match=message):
        train.main(argv(dataset, tmp_path / "out", max_iters=3))


# --- checkpoints that are damaged ---

@pytest.mark.slow
@pytest.mark.parametrize("file", ["checkpoint.json", "__0_0.distcp"])
def test_resume_falls_back_to_the_checkpoint_before(dataset, tmp_path, capsys, undisturbed, file):
    train.main(argv(dataset, tmp_path))
    newest = tmp_path / "ckpt" / "12" / file
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    assert resumed(tmp_path) == 0
    assert f"warning: checkpoint passed over: {newest} " in capsys.readouterr().err
    assert losses(tmp_path) == undisturbed and checkpoint.load(tmp_path).iter == 12
    assert {f.name for f in (tmp_path / "ckpt").iterdir()} == {"4", "8", "12", "12.damaged"}


# --- what is only told ---

def no_thread(monkeypatch):
    """As where a limit of memory leaves no room for the stack of a thread."""
    def refuse(*args):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr("memo.system.command.mmap.mmap", refuse)


def test_a_run_without_room_for_a_thread_is_saved(dataset, tmp_path, monkeypatch, undisturbed):
    real = train.report_step

    def report(run, stats, *args):
        if stats.iter == 9:
            no_thread(monkeypatch)
        real(run, stats, *args)
    monkeypatch.setattr(train, "report_step", report)
    assert train.main(argv(dataset, tmp_path, activation="keep")) == 0
    assert checkpoint.load(tmp_path).iter == 12 and losses(tmp_path) == undisturbed

def test_a_console_that_fails_loses_text_only(capfd):
    for descriptor in (os.open("/dev/full", os.O_WRONLY), broken_pipe()):
        console = command.Console(os.fdopen(descriptor, "w"))
        print("x" * 10**6, file=console, flush=True)
        console.close()
        console.stream.close()  # as Python does in the end
    command.Console(None).write("no stdout at all")
    assert capfd.readouterr() == ("", "")


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.slow
def test_a_run_whose_console_is_a_full_disk_ends_well(dataset, tmp_path, no_matplotlib):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "train.py", *argv(dataset, tmp_path)], cwd=ROOT, stdout=full,
                              stderr=full, env=os.environ | no_matplotlib)
    assert done.returncode == 0 and checkpoint.load(tmp_path).iter == 12


@pytest.mark.usefixtures("pictures")
def test_pictures_and_loggers_that_fail_are_warnings(dataset, tmp_path, monkeypatch, capsys, undisturbed):
    def fails(*args):
        raise OSError(28, "No space left on device")
    for name in ("loss_curve", "timeline", "memory_plan"):
        monkeypatch.setattr(report, name, fails)
    monkeypatch.setattr(JsonlLogger, "log", fails)
    assert train.main(argv(dataset, tmp_path)) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    lost = sorted(line.split()[1] for line in warnings)
    assert lost == ["JsonlLogger", "loss.png", "memory_plan.png", "timeline.png"]
    assert checkpoint.load(tmp_path).iter == 12


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_run_goes_on_beside_an_out_dir_that_is_removed(dataset, tmp_path, monkeypatch, capsys, undisturbed):
    out, real = tmp_path / "out", train.forward_backward

    def removing(run, it):
        if it == 6:
            run.saver.wait()
            shutil.rmtree(out)
        return real(run, it)
    monkeypatch.setattr(train, "forward_backward", removing)
    assert train.main(argv(dataset, out)) == 0
    [name] = re.findall(f"out_dir={out} was removed, or .* goes on in out_dir=(.*), without",
                        capsys.readouterr().err)
    assert not out.exists()
    out = Path(name)
    assert losses(out) == undisturbed[6:] and checkpoint.load(out).iter == 12
    assert {"config.json", "plan.json", "loss.png"} <= {f.name for f in out.iterdir()}


def test_lines_that_a_full_disk_does_not_take_come_later(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path, 0)
    logger.log(StepStats(0, 1.0, 1.0, 1.0, 1.0, 1, 1.0))
    before = path.read_bytes()
    logger.path = "/dev/full"
    monkeypatch.setattr("memo.run.loggers.regular", lambda found: found)
    for it in (1, 2):
        with pytest.raises(OSError, match="No space left on device"):
            logger.log(StepStats(it, 1.0, 1.0, 1.0, 1.0, 1, 1.0))
    assert path.read_bytes() == before
    logger.path = path
    logger.close()
    assert [r["iter"] for r in read_metrics(path)] == [0, 1, 2]


def test_a_warning_comes_once_for_each_reason(capsys):
    run = SimpleNamespace(told=set())
    for e in (OSError(28, "full"), OSError(28, "full"), ValueError("odd")):
        def work(error=e):
            raise error
        assert not Run.attempt(run, "plan.json", work)
    assert capsys.readouterr().err == ("warning: plan.json failed (OSError: full); training goes on\n"
                                       "warning: plan.json failed (ValueError: odd); training goes on\n")


# --- pictures and hints ---

@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_loss_is_drawn_at_every_evaluation_and_named_once(dataset, tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(report, "loss_curve", lambda rows, png, *args: drawn.append(len(rows)))
    assert train.main(argv(dataset, tmp_path)) == 0
    assert drawn == [7, 12]  # evaluations before steps 0, of which there is nothing to see, 6 and 11
    lines = capsys.readouterr().out.splitlines()
    for name in ("loss.png", "timeline.png", "memory_plan.png"):
        assert lines.count(f"picture     {tmp_path / name}") == 1


def test_smoothing_does_not_lag():
    i = np.arange(300)
    for values in (9 - 0.03 * i, np.full(300, 2.5)):
        np.testing.assert_allclose(figures.smooth(values), values, atol=1e-9)
    falling = 3.3 + 3 * np.exp(-i / 20) + np.random.default_rng(0).normal(0, 0.05, 300)
    for steps in (8, 50, 300):
        assert abs(figures.smooth(falling[:steps])[-1] - (3.3 + 3 * np.exp(-(steps - 1) / 20))) < 0.15
    assert figures.smooth(falling)[200:250].std() < 0.3 * falling[200:250].std()
    assert figures.smooth([4.0]).tolist() == [4.0]


@pytest.mark.slow
def test_hints_can_be_typed(dataset, tmp_path, monkeypatch, capsys, no_matplotlib):
    out = tmp_path / "a b"
    real = train.forward_backward
    monkeypatch.setattr(train, "forward_backward", lambda run, it: 1 / 0 if it == 7 else real(run, it))
    with pytest.raises(ZeroDivisionError):
        train.main(argv(dataset, out))
    go_on = shlex.split(capsys.readouterr().err.partition("go on with: ")[2])
    done = subprocess.run(go_on, cwd=ROOT, capture_output=True, env=os.environ | no_matplotlib)
    assert done.returncode == 0
    assert checkpoint.load(out).iter == 12
    monkeypatch.setenv("PATH", "")
    assert Path(command.python()).absolute() == Path(sys.executable)


def test_the_prompt_is_the_datas_and_leaves_room(dataset, tmp_path):
    for words, room in (("one two three four", 61), ("@ one two", 62), ("one", 63)):
        ids = SimpleNamespace(train=words.split())
        tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(tokens),
                                    encode=lambda t, **kwargs: SimpleNamespace(ids=t.split()))
        run = SimpleNamespace(out=tmp_path, cfg=SimpleNamespace(block_size=64),
                              data=SimpleNamespace(tokens=dict(train=np.array(ids.train))))
        (tmp_path / "tokenizer.json").touch()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(report, "load_tokenizer", lambda path, tokenizer=tokenizer: tokenizer)
            hint = shlex.split(report.sample_with(run))
        assert hint[-1] == f"--max_new_tokens={room}" and not hint[-2].startswith("--prompt=@")


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as sh does for `train.py &`
    try:
        command.run(lambda argv: None, [])
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- a folder that another run has taken ---

@pytest.mark.slow
def test_a_run_whose_folder_another_has_taken_leaves_it_alone(dataset, tmp_path, monkeypatch, capsys):
    out, real = tmp_path / "out", train.forward_backward

    def taken(run, it):
        if it == 6:
            run.saver.wait()
            shutil.rmtree(out)
            taken.lock = lock(out, "another")
            (out / "ckpt" / "50").mkdir(parents=True)
        return real(run, it)
    monkeypatch.setattr(train, "forward_backward", taken)
    assert train.main(argv(dataset, out)) == 0
    assert sorted(os.listdir(out)) == [".lock", "ckpt"] and os.listdir(out / "ckpt") == ["50"]
    [moved] = (f for f in tmp_path.iterdir() if re.fullmatch("out-[0-9a-f]{8}", f.name))
    assert checkpoint.load(moved).iter == 12
    assert f"done: 12 steps; {moved}/ holds ckpt" in capsys.readouterr().out


@pytest.mark.slow
def test_a_save_under_way_does_not_reach_anothers_folder(dataset, tmp_path, monkeypatch, capsys):
    out, real, taken = tmp_path / "out", Saver.commit, []
    saved, batch, begun = Saver.save, train.batch, []

    def save(*args):
        begun.append(args)
        saved(*args)

    def held(*args):
        while begun and not taken:  # however slow the disk is, a step follows
            time.sleep(0.01)
        return batch(*args)
    monkeypatch.setattr(Saver, "save", save)
    monkeypatch.setattr(train, "batch", held)

    def slow(self, path, temporary, *args):
        if not taken:
            out.rename(tmp_path / "before")
            taken.append(lock(out, "another"))
            shutil.copytree(tmp_path / "before" / "ckpt" / temporary.name, temporary)  # nothing else lacks
            while self.folder == out / "ckpt":  # the next step moves the run
                time.sleep(0.01)
        return real(self, path, temporary, *args)
    monkeypatch.setattr(Saver, "commit", slow)
    assert train.main(argv(dataset, out)) == 0
    assert os.listdir(out / "ckpt") == []
    assert "is not this run's any more" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [dict(), dict(init_from="resume")])
def test_a_run_that_came_first_meanwhile_is_seen_under_the_lock(dataset, tmp_path, monkeypatch, keys):
    if keys:
        assert train.main(argv(dataset, tmp_path, max_iters=2)) == 0
    real = run_module.lock

    def slow(*args):
        (tmp_path / "ckpt" / "8").mkdir(parents=True)
        return real(*args)
    monkeypatch.setattr(run_module, "lock", slow)
    with pytest.raises(ConfigError, match="now it holds .*ckpt/8: another run was there meanwhile"):
        train.main(argv(dataset, tmp_path, **keys))
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["2"] * bool(keys) + ["8"]
    lock(tmp_path, "free again").close()
