"""Runs of several ranks from end to end: the losses of one process, checkpoints that change their layout,
ranks that die, two nodes, and what ranks do not agree on."""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from memo import checkpoint, convert, out_dir, report
from memo.ending import complete
from memo.errors import TrainingError
from memo.launch import Launch, rank_errors
from memo.loggers import read_metrics
from memo.planner.allocator import Arena
from memo.planner.rehearsal import Rehearsal
from testing.ranks import Ranks, children, free_port, pool, start_ranks
from tests.helpers import ROOT, no_picture

MODEL = dict(n_layer=3, n_head=4, n_embd=32, block_size=64, position="learned", bias=True, batch_size=2,
             gradient_accumulation_steps=2, max_iters=10, warmup_iters=2, learning_rate=1e-2, alpha=0.5,
             eval_interval=5, eval_iters=2, save_interval=0, device="cpu")
FOUR = dict(tp=2, cp=2)
SAME = 1e-5
pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def argv(folder, out, **keys):
    return [f"--{k}={v}" for k, v in (MODEL | dict(dataset=folder, out_dir=out) | keys).items()]


def rows(out):
    return read_metrics(Path(out) / "metrics.jsonl")


def losses(out):
    return [r["loss"] for r in rows(out)]


def worst(mine, reference):
    assert len(mine) == len(reference)
    return max(abs(a - b) / b for a, b in zip(mine, reference, strict=True))


def here(host, argv, console=os.devnull):
    """train.main in a rank of a pool -> its exit code, or what went wrong. `argv`: of all, or one of each."""
    mine = argv[host.rank] if isinstance(argv[0], list) else argv
    path = f"{console}{host.rank}" if console != os.devnull else console
    with open(path, "w") as file, contextlib.redirect_stdout(file), pytest.MonkeyPatch.context() as m:
        m.setattr("memo.report.draw_picture", no_picture)
        try:
            run = train.set_up(mine, Launch(host.rank, host.size, host.rank, host.size, 0, ""), host)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        try:
            with contextlib.closing(run):
                return complete(run, train.train)
        finally:
            if run.lock:
                run.lock.close()


def converted(out, folder):
    convert.to_hf(out, folder / f"hf of {out.name}")
    return folder / f"hf of {out.name}" / "model.safetensors"


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """out_dir of one process's run."""
    out = tmp_path_factory.mktemp("alone")
    assert train.main(argv(dataset, out)) == 0
    return out


# --- the losses of one process ---

@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys", [(2, dict(tp=2)), (2, dict(cp=2)), (2, {}),
                                        (4, dict(tp=2, cp=2, context_parallel="ulysses",
                                                 optimizer_device="cpu"))])
def test_a_run_in_any_layout_is_the_run_of_one_process(dataset, tmp_path, alone, ranks, keys):
    assert pool(ranks).run(here, argv(dataset, tmp_path, **keys), str(tmp_path / "console")) == [0] * ranks
    assert worst(losses(tmp_path), losses(alone)) < SAME
    val, reference = ([r["val_loss"] for r in rows(out) if "val_loss" in r] for out in (tmp_path, alone))
    assert worst(val, reference) < SAME
    spoke = [(tmp_path / f"console{r}").stat().st_size > 0 for r in range(ranks)]
    assert spoke == [True] + [False] * (ranks - 1)
    last, first = rows(tmp_path)[-1], rows(alone)[-1]
    axes = {"tp": keys.get("tp", 1), "cp": keys.get("cp", 1), "data": ranks // keys.get("tp", 1)}
    assert set(last["sent_bytes"]) == {name for name, size in axes.items() if size > 1}
    assert first["sent_bytes"] == {}
    assert all(n > 0 for n in last["sent_bytes"].values()) and last["tokens"] == first["tokens"]
    assert last["tgs"] == pytest.approx(last["tokens"] / ranks / last["step_s"])
    assert last["host_bytes"] * ranks == first["host_bytes"] * max(1, ranks // (axes["tp"] * axes["cp"]))


def here_stopped(host, argv):
    """here(), where a signal comes to rank 0 alone, after all ranks agreed to go on with the next step."""
    with pytest.MonkeyPatch.context() as m:
        real = train.report_step

        def told(run, stats, *args):
            real(run, stats, *args)
            if host.rank == 0 and stats.iter == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        m.setattr(train, "report_step", told)
        return here(host, argv)


@pytest.mark.ranks
def test_a_signal_at_any_moment_stops_all_ranks_at_the_same_step(dataset, tmp_path):
    assert pool(2).run(here_stopped, argv(dataset, tmp_path)) == [128 + signal.SIGTERM] * 2
    assert checkpoint.load(tmp_path).iter == 4 and len(losses(tmp_path)) == 4


def test_an_optimizer_on_the_host_changes_no_bit(dataset, tmp_path):
    for name in ("auto", "cpu"):
        assert train.main(argv(dataset, tmp_path / name, optimizer_device=name, dtype="bfloat16")) == 0
    assert losses(tmp_path / "auto") == losses(tmp_path / "cpu")


# --- checkpoints ---

@pytest.fixture(scope="module")
def on_four(dataset, tmp_path_factory):
    """out_dir of a run on four ranks."""
    out = tmp_path_factory.mktemp("on_four")
    assert pool(4).run(here, argv(dataset, out, **FOUR | dict(save_interval=5))) == [0] * 4
    return out


@pytest.fixture(scope="module")
def halfway(on_four, tmp_path_factory):
    """Its out_dir, as if it had been lost after the save before step 5 of its ten steps."""
    out = tmp_path_factory.mktemp("halfway") / "out"
    shutil.copytree(on_four, out)
    shutil.rmtree(out / "ckpt" / "10")
    return out


def resumed(halfway, out, ranks, **keys):
    """The rest of the run in a copy of its out_dir, with other keys."""
    shutil.copytree(halfway, out)
    keys = [f"--{k}={v}" for k, v in (FOUR | keys | dict(out_dir=out, max_iters=10)).items()]
    if ranks == 1:
        assert train.main(["--init_from=resume", *keys]) == 0
    else:
        assert pool(ranks).run(here, ["--init_from=resume", *keys]) == [0] * ranks


@pytest.mark.ranks
def test_a_checkpoint_is_resumed_in_any_other_layout(tmp_path, alone, halfway):
    assert len(list((halfway / "ckpt" / "5").glob("*.distcp"))) == 4
    for name, ranks, keys in (("tp4", 4, dict(tp=4, cp=1)), ("cp2", 2, dict(tp=1)),
                              ("one", 1, dict(tp=1, cp=1))):
        resumed(halfway, tmp_path / name, ranks, **keys)
        assert worst(losses(tmp_path / name), losses(alone)) < SAME
    ends = {out: load_file(converted(out, tmp_path)) for out in (tmp_path / "tp4", alone)}
    for name, tensor in ends[alone].items():
        assert (ends[tmp_path / "tp4"][name] - tensor).norm() <= 1e-3 * tensor.norm(), name


@pytest.mark.ranks
def test_the_same_layout_goes_on_bitwise(tmp_path, on_four, halfway):
    resumed(halfway, tmp_path / "parts", 4)
    assert losses(tmp_path / "parts") == losses(on_four)


# --- what ranks do not agree on ---

@pytest.mark.ranks
def test_mistakes_are_one_line_on_every_rank(dataset, tmp_path):
    good = argv(dataset, tmp_path / "out", cp=2)
    other = tmp_path / "data"
    shutil.copytree(dataset, other)
    ids = np.fromfile(other / "train.bin", dtype=np.uint16)
    ids[12345] ^= 1
    ids.tofile(other / "train.bin")
    rank1 = f"rank 1 ({socket.gethostname()})"
    for case, message in (
            (argv(dataset, tmp_path / "out", tp=2, cp=2), "dp(1)*cp(2)*tp(2) != WORLD_SIZE(2)"),
            (argv(dataset, tmp_path / "out", tp=3), "n_head=4 % tp=3 != 0"),
            (argv(dataset, tmp_path / "out", cp=2, block_size=62), "block_size=62 % (2*cp*tp)=4 != 0"),
            (argv(dataset, tmp_path / "out", cp=2, n_head=1, context_parallel="ulysses"),
             "n_head/tp=1 % cp=2 != 0"),
            (argv(dataset, tmp_path / "out", gradient_accumulation_steps=1),
             "gradient_accumulation_steps=1 % dp=2 != 0"),
            ([good, [*good, "--seed=2"]],
             f"{rank1} has seed=2, rank 0 seed=1337; start all ranks with the same command"),
            ([good, [*good, "--dtype=bfloat16"]],
             f"{rank1} has dtype=bfloat16, rank 0 dtype=auto; start all ranks"),
            ([good, [*good, "--n_layr=2"]],
             f"{rank1}: --n_layr=2: unknown key 'n_layr'; did you mean 'n_layer'?"),
            ([good, [*good, f"--dataset={other}"]],
             f"{rank1} has dataset={other}, rank 0 dataset={dataset}")):
        first, second = pool(2).run(here, case)
        assert first == second and first.startswith(f"Agreed: {message}") and "\n" not in first
        assert not (tmp_path / "out").exists()


@pytest.mark.ranks
def test_other_tokens_under_the_same_name_are_found_out(dataset, tmp_path):
    """As on hosts with disks of their own."""
    for rank in range(2):
        shutil.copytree(dataset, tmp_path / str(rank) / "data")
    ids = np.fromfile(tmp_path / "1" / "data" / "val.bin", dtype=np.uint16)
    ids[7] ^= 1
    ids.tofile(tmp_path / "1" / "data" / "val.bin")
    first, second = pool(2).run(in_its_own_folder, str(tmp_path), argv("data", tmp_path / "out", cp=2))
    assert first == second
    assert first.startswith(f"Agreed: rank 1 ({socket.gethostname()}) has hash of dataset data=")
    assert first.endswith("; give all hosts the same data")


def in_its_own_folder(host, folder, argv):
    before = os.getcwd()
    os.chdir(f"{folder}/{host.rank}")
    try:
        return here(host, argv)
    finally:
        os.chdir(before)


@pytest.mark.ranks
def test_a_folder_that_the_hosts_do_not_share_is_found_out(dataset, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pool(2).run(impatient)
    first, second = pool(2).run(in_its_own_folder, str(tmp_path), argv(dataset, "out", cp=2))
    assert first == second
    assert first == (f"Agreed: rank 1 ({socket.gethostname()}): out_dir=out is not the folder "
                     "that rank 0 writes to; choose one that all hosts share")


def impatient(host):
    out_dir.time = SimpleNamespace(sleep=lambda s: None)


@pytest.mark.ranks
def test_a_missing_or_damaged_shard_is_named(dataset, tmp_path):
    assert pool(2).run(here, argv(dataset, tmp_path, cp=2, max_iters=3)) == [0, 0]
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=6"]
    shard = next((tmp_path / "ckpt" / "3").glob("__1_*"))
    data = shard.read_bytes()
    for damage, message in ((lambda: shard.write_bytes(data[:-1] + b"?"), "is corrupt"),
                            (lambda: shard.write_bytes(data[:-1]), "bytes long, must be"),
                            (shard.unlink, "is missing")):
        damage()
        for said in pool(2).run(here, resume):
            assert (said.startswith("Agreed: ") and f"{shard} " in said and message in said
                    and "\n" not in said)
    shard.write_bytes(data)
    assert pool(2).run(here, resume) == [0, 0]


def small_files(host, argv, limit):
    """here(), on a host whose disk is full from `limit` bytes a file on, for the last rank only."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if host.rank == host.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return here(host, argv)
    except TrainingError as e:
        return str(e)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.ranks
def test_a_full_disk_on_one_host_stops_no_run_and_loses_nothing(dataset, tmp_path):
    keys = argv(dataset, tmp_path, cp=2)
    assert pool(2).run(here, [*keys, "--max_iters=3", "--lr_decay_iters=10"]) == [0, 0]
    resume = ["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=10", "--save_interval=2"]
    for said in pool(2).run(small_files, resume, 20_000):  # tried at 4, 6 and 8 too: training went on
        assert said.startswith(f"{tmp_path}/ckpt/10 cannot be written (File too large); "
                               "the previous one is whole; free some space there or choose another folder; "
                               "nor could it be saved elsewhere: ")
    assert len(losses(tmp_path)) == 10 and os.listdir(tmp_path / "ckpt") == ["3"]
    assert pool(2).run(here, resume) == [0, 0]
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["10", "8"]


def without_room(host, argv):
    """here(), but rank 1's rehearsal has no memory for its first backward -> (exit code, stderr's lines)."""
    run, said = Rehearsal.run, io.StringIO()

    def out_of_memory(self, label, *args):
        if host.rank == 1 and isinstance(self.arena, Arena) and "backward" in label:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, label, *args)
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stderr(said):
        m.setattr(Rehearsal, "run", out_of_memory)
        return here(host, argv), said.getvalue().splitlines()


@pytest.mark.ranks
def test_where_one_rank_has_no_room_for_a_rehearsal_all_trace(dataset, tmp_path):
    assert pool(2).run(here, argv(dataset, tmp_path / "recorded", max_iters=3, cp=2)) == [0, 0]
    traced = argv(dataset, tmp_path / "traced", max_iters=3, cp=2)
    (code, said), (other_code, _) = pool(2).run(without_room, traced)
    assert code == other_code == 0 and "its requests are traced, not recorded" in said[0]
    assert losses(tmp_path / "traced") == losses(tmp_path / "recorded")
    recorded, traced = (json.loads((tmp_path / name / "plan.json").read_text())["memory_plans"][0]["segments"]
                        for name in ("recorded", "traced"))
    assert list(recorded) == list(traced) and recorded != traced  # without attention's workspaces


def measured_without_room(host, argv, said):
    """What rank 1 says where its layer does not fit while rates are measured; rank 0 waits in its message."""
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    with pytest.MonkeyPatch.context() as m:
        if host.rank == 1:
            m.setattr("memo.block.Block.backward", out_of_memory)
        sys.stderr = io.TextIOWrapper(io.FileIO(f"{said}{host.rank}", "w"))
        with rank_errors(host):
            train.set_up(argv, Launch(host.rank, 2, host.rank, 2, 0, ""), host)


@pytest.mark.ranks
def test_a_rank_without_room_for_a_layer_ends_the_run(dataset, tmp_path):
    ranks, said = Ranks(2), tmp_path / "said "
    for pipe in ranks.pipes:
        pipe.send((measured_without_room, (argv(dataset, tmp_path / "out", tp=2, activation="memo"), said)))
    for process in ranks.processes:
        process.join(60)
    assert [process.exitcode for process in ranks.processes] == [1, 1]
    first, second = (Path(f"{said}{rank}").read_text() for rank in range(2))
    [line] = [line for line in second.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: rank 1 ({socket.gethostname()}): ") and "CUDA out of memory" in line, line
    assert "error: rank 0" in first and "lost" in first


# --- torchrun ---

LONG = dict(max_iters=24, save_interval=3, eval_interval=0)


LOST = re.compile(rf"error: rank [01] \({re.escape(socket.gethostname())}\), step \d+: lost another rank .*")


def train_main(argv):
    report.draw_picture = no_picture
    return train.main(argv)


def errors_of(folder, rank):
    """The lines of a rank of start_ranks() that tell an error."""
    return [line for line in (folder / f"{rank}.err").read_text().splitlines() if line.startswith("error: ")]


@pytest.fixture
def torchrun(no_matplotlib):
    """torchrun(argv, *options, ranks=) starts train.py, with a thread for each rank, as in the pools: sums
    over several come in another order."""
    def start(argv, *options, ranks):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *options,
                   "train.py", *argv]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=os.environ | dict(OMP_NUM_THREADS="1") | no_matplotlib)
    return start


def wait_for_rows(out, n, seconds=240):
    end = time.monotonic() + seconds
    while not ((out / "metrics.jsonl").exists() and len(losses(out)) >= n):
        assert time.monotonic() < end, f"no {n} steps within {seconds} s"
        time.sleep(0.02)


@pytest.mark.ranks
def test_a_killed_rank_ends_the_run_within_a_minute(dataset, tmp_path):
    keys = argv(dataset, tmp_path / "out", tp=2, **LONG | dict(max_iters=10**6))
    first, second = start_ranks(train_main, keys, 2, tmp_path)
    wait_for_rows(tmp_path / "out", 8)  # the save before step 6 waited for the one before step 3
    second.kill()
    first.join(60)
    assert first.exitcode == 1
    [line] = errors_of(tmp_path, 0)
    assert LOST.fullmatch(line), line
    assert checkpoint.load(tmp_path / "out").iter >= 3
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--tp=1", "--max_iters=8",
                       "--warmup_iters=0"]) == 0  # on one process


@pytest.mark.ranks
def test_two_agents_stand_for_two_nodes_and_carry_on_when_one_loses_its_rank(dataset, tmp_path, torchrun):
    keys, port = dict(cp=2, **LONG), free_port()
    nodes = [torchrun(argv(dataset, tmp_path / "two", **keys), "--nnodes=2", "--rdzv-backend=c10d",
                      "--max-restarts=3", f"--rdzv-endpoint=127.0.0.1:{port}", ranks=1) for _ in range(2)]
    wait_for_rows(tmp_path / "two", 8)
    os.kill(children(nodes[1].pid)[0], signal.SIGKILL)
    said = lines = ""
    for node in nodes:
        out, err = node.communicate(timeout=400)
        assert node.returncode == 0, err
        said, lines = said + out, lines + err
    assert LOST.search(lines), lines
    assert pool(2).run(here, argv(dataset, tmp_path / "one", **keys)) == [0, 0]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert said.count("run         steps 0 to 24") == 1 and said.count("to 24 in") >= 2


@pytest.mark.ranks
def test_a_signal_to_torchrun_saves_and_leaves(dataset, tmp_path, torchrun):
    run = torchrun(argv(dataset, tmp_path, cp=2, max_iters=10**6, eval_interval=0), "--standalone", ranks=2)
    wait_for_rows(tmp_path, 5)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    done = checkpoint.load(tmp_path).iter
    assert done == len(losses(tmp_path)) and f"stopped by SIGTERM after {done} of" in out
    assert err.count("SIGTERM: finishing this step, then saving") == 1


@pytest.mark.ranks
def test_what_only_one_rank_sees_names_it(dataset, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(dataset, data)
    val = np.r_[np.zeros(17), np.full(31, 9999), np.zeros(17)]  # one window of 64
    val.astype(np.uint16).tofile(data / "val.bin")
    meta = json.loads((data / "meta.json").read_text())
    meta["counts"]["val"] = dict(tokens=65)
    (data / "meta.json").write_text(json.dumps(meta))
    # of four chunks of sixteen tokens, and a target behind each, rank 0 has the first and the last
    first, second = start_ranks(train_main, argv(data, tmp_path / "out", cp=2), 2, tmp_path)
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 1
    [line], [named] = (errors_of(tmp_path, rank) for rank in (0, 1))
    assert named.startswith(f"error: rank 1 ({socket.gethostname()}), step 0: ")
    assert "token 9999 at position" in named and LOST.fullmatch(line), (line, named)
