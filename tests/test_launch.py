"""Runs of several ranks from end to end: the losses of one process, checkpoints that change their layout,
ranks that fail or die, two nodes, and what ranks do not agree on."""

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
from dataclasses import replace
from functools import cache
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from memo import convert, evaluate, sample
from memo.checkpoint import checkpoint
from memo.config.layout import Layout
from memo.errors import ConfigError, TrainingError
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.planner.allocator import Arena
from memo.run import state
from memo.run.ending import complete
from memo.run.rehearsal import Rehearsal
from memo.system import command
from memo.system.launch import Launch, open_store, rank_errors
from testing.ranks import (
    PROCESSES,
    TIMEOUT_S,
    Ranks,
    children,
    enter,
    free_port,
    pool,
    start_agent,
    start_ranks,
)
from tests.helpers import ROOT, bound_arena, choosing, error, mesh_of, no_picture, step
from tests.layouts import build
from tests.runs import IN_ORDER, UNTIED, argv, here, losses, rows

FOUR = dict(tp=2, cp=2)
SAME = 1e-5
pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def worst(mine, reference):
    assert len(mine) == len(reference)
    return max(abs(a - b) / b for a, b in zip(mine, reference, strict=True))





def converted(out, folder):
    convert.to_hf(out, folder / f"hf of {out.name}")
    return folder / f"hf of {out.name}" / "model.safetensors"


def run(ranks, argv, *console):
    """train.main on so many ranks."""
    codes = pool(ranks).run(here, argv, *console) if ranks > 1 else [train.main(argv)]
    assert codes == [0] * ranks


@pytest.fixture(scope="module")
def ended(dataset, tmp_path_factory):
    """ended(ranks, **keys): out_dir of such a run, which is made once."""
    @cache
    def made(ranks=1, **keys):
        out = tmp_path_factory.mktemp("ended")
        run(ranks, argv(dataset, out, **keys))
        return out
    return made


# --- the losses of one process ---

@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys,model", [
    (2, dict(tp=2), {}), (2, dict(cp=2), {}), (2, {}, {}), (2, dict(pp=2), UNTIED),
    (3, dict(pp=3, **IN_ORDER, optimizer_device="cpu"), {}),
    (4, dict(tp=2, cp=2, context_parallel="ulysses", optimizer_device="cpu"), {})])
def test_a_run_in_any_layout_is_the_run_of_one_process(dataset, tmp_path, ended, ranks, keys, model):
    alone = ended(**model)
    run(ranks, argv(dataset, tmp_path, **keys, **model), str(tmp_path / "console"))
    assert worst(losses(tmp_path), losses(alone)) < SAME
    val, reference = ([r["val_loss"] for r in rows(out) if "val_loss" in r] for out in (tmp_path, alone))
    assert worst(val, reference) < SAME
    # AdamW takes the same steps with gradients of any scale: no loss tells of a wrong one
    norms, want = ([r["grad_norm"] for r in rows(out)] for out in (tmp_path, alone))
    assert worst(norms, want) < SAME
    spoke = [(tmp_path / f"console{r}").stat().st_size > 0 for r in range(ranks)]
    assert spoke == [True] + [False] * (ranks - 1)
    last, first = rows(tmp_path)[-1], rows(alone)[-1]
    tp, cp, pp = (keys.get(name, 1) for name in ("tp", "cp", "pp"))
    axes = {"tp": tp, "cp": cp, "pp": pp, "tied": 1 if model else pp, "data": ranks // (tp * pp)}
    assert set(last["sent_bytes"]) == {name for name, size in axes.items() if size > 1}
    assert first["sent_bytes"] == {}
    assert all(n > 0 for n in last["sent_bytes"].values()) and last["tokens"] == first["tokens"]
    assert last["tgs"] == pytest.approx(last["tokens"] / ranks / last["step_s"])
    assert pp > 1 or last["host_bytes"] * ranks == first["host_bytes"] * max(1, ranks // (tp * cp))


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


@pytest.mark.parametrize("ranks,keys", [
    (1, dict(dtype="bfloat16")),
    # more layers in a stage than have gradients at once; a stage with neither embedding nor head
    (2, dict(pp=2, n_layer=7, gradient_accumulation_steps=1)),
    (3, dict(pp=3, **IN_ORDER, dtype="bfloat16"))], ids=str)
def test_an_optimizer_on_the_host_changes_no_bit(dataset, tmp_path, ranks, keys):
    for name in ("auto", "cpu"):
        run(ranks, argv(dataset, tmp_path / name, optimizer_device=name, **keys))
    assert losses(tmp_path / "auto") == losses(tmp_path / "cpu")


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_change_no_bit(dataset, tmp_path, dtype):
    """Without a norm, which sums over all stages, nor a matrix with gradients from two of them."""
    keys = UNTIED | IN_ORDER | dict(dtype=dtype, grad_clip=0)
    for pp in (1, 2):
        assert pool(pp).run(here, argv(dataset, tmp_path / str(pp), pp=pp, **keys)) == [0] * pp
    assert losses(tmp_path / "1") == losses(tmp_path / "2")


def embedding_after_steps(host, keys):
    """(the embedding's matrix of a rank that has it, bytes sent to the other stage that has it)."""
    cfg = Layout(**keys).of_rank(host.rank, host.size)
    mesh = mesh_of(host, cfg)
    mesh.take_sent_bytes()
    model, optimizer = build(cfg, mesh)
    for _ in range(3):
        step(model, optimizer, cfg)
        optimizer.clip(1.0)
        optimizer.step(1e-2)
    model.close()  # when the last weights have arrived
    return model.gpt.edges.w.wte, mesh.take_sent_bytes()["tied"]


@pytest.mark.ranks
def test_both_copies_of_a_tied_matrix_stay_the_same():
    """Three ranks or more may sum up in another order elsewhere in a buffer; each has and sends a part."""
    keys = dict(n_layer=2, n_head=2, n_embd=64, block_size=256, vocab_size=150, position="learned")
    keys |= dict(pp=2, gradient_accumulation_steps=3, **IN_ORDER)
    (first, *others), sent_bytes = zip(*pool(6).run(embedding_after_steps, keys), strict=True)
    assert len(others) == 5 and all(torch.equal(other, first) for other in others)
    assert sum(sent_bytes) == 2 * 3 * first.nbytes  # from both stages, in three steps


@pytest.mark.ranks
@pytest.mark.parametrize("model", [{}, UNTIED], ids=["tied", "untied"])
def test_weights_of_transformers_start_in_any_layout(dataset, tmp_path, ended, model):
    folder = converted(ended(**model), tmp_path).parent
    for name, ranks, keys in (("one", 1, {}), ("stages", 4, STAGES), ("host", 2, dict(tp=2, states="host"))):
        keys = model | dict(init_from=f"hf:{folder}", max_iters=3) | keys
        run(ranks, argv(dataset, tmp_path / name, **keys))
        assert worst(losses(tmp_path / name), losses(tmp_path / "one")) < SAME, name


def here_choosing(host, argv):
    """here(), where each rank would choose another number of subsequences, if it were asked."""
    with pytest.MonkeyPatch.context() as m:
        choosing(m)
        m.setattr("memo.decide.choose.LEAST_TOKENS", 16)
        m.setattr("memo.decide.choose.ALIGNED", 1)
        numbers = dict(subsequences=4 >> host.rank, subsequence_cut="equal", unit_order="layer")
        m.setattr("memo.run.prepare.choose_fastest", lambda cfg, machine, world, documents: estimate(
            replace(cfg, **numbers), machine, world, fast_arena).but(chosen="tossed"))
        return here(host, argv)


@pytest.mark.parametrize("layout", [dict(tp=2), {}])
def test_all_ranks_take_what_rank_0_chooses(dataset, tmp_path, layout):
    four = dict(subsequences=4, subsequence_cut="equal", unit_order="layer")
    layout = layout | dict(n_layer=2, max_iters=3, eval_interval=0, solver="greedy")
    assert pool(2).run(here_choosing, argv(dataset, tmp_path / "auto", **layout)) == [0, 0]
    assert pool(2).run(here, argv(dataset, tmp_path / "four", **layout, **four)) == [0, 0]
    assert losses(tmp_path / "auto") == losses(tmp_path / "four")


# --- checkpoints ---

HALF = dict(max_iters=3, lr_decay_iters=6)  # after three of the six steps the run ends
STAGES = dict(pp=2, tp=2, **IN_ORDER)
HELP = dict(pp=2, msp=True, batch_size=1, deterministic=True, **IN_ORDER)  # else shares are measured
COME = FOUR | dict(states="sharded")
OTHERS = {"tp4": (4, dict(tp=4, states="host", unit_order="layer")), "cp2 dp2": (4, dict(cp=2)),
          "pp4": (4, dict(pp=4, **IN_ORDER)), "pp2 tp2": (4, STAGES), "one": (1, {})}


def resumed(halfway, out, ranks, **keys):
    """The rest of the run in a copy of its out_dir, with other keys."""
    shutil.copytree(halfway, out)
    keys |= dict(init_from="resume", out_dir=out, max_iters=6)
    run(ranks, [f"--{k}={v}" for k, v in keys.items()])


@pytest.mark.ranks
@pytest.mark.parametrize("keys,model,others", [
    (COME, {}, ("tp4", "one", "pp2 tp2")), (STAGES, {}, ("cp2 dp2", "tp4")), (STAGES, UNTIED, ("tp4", "pp4")),
    # of two heads of keys copies are saved once
    (dict(tp=4), UNTIED, ("pp2 tp2", "one"))], ids=["tp2 cp2 sharded", "pp2 tp2", "pp2 tp2 untied", "tp4"])
def test_a_checkpoint_is_resumed_in_any_other_layout(tmp_path, ended, keys, model, others):
    halfway, alone = ended(4, **keys, **HALF, **model), ended(**model)
    assert len(list((halfway / "ckpt" / "3").glob("*.distcp"))) == 4
    for name in others:
        ranks, other = OTHERS[name]
        resumed(halfway, tmp_path / name, ranks, **dict(tp=1, cp=1, pp=1, states="device") | other)
        assert worst(losses(tmp_path / name), losses(alone)) < SAME, name
    mine, theirs = (load_file(converted(out, tmp_path)) for out in (tmp_path / others[-1], alone))
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys,then", [
    (4, STAGES, {}), (2, HELP, {}), (4, COME, dict(states="host"))],
    ids=["stages", "stages that help", "states elsewhere"])
def test_the_same_layout_goes_on_bitwise(tmp_path, ended, ranks, keys, then):
    resumed(ended(ranks, **keys, **HALF), tmp_path / "parts", ranks, **then)
    assert losses(tmp_path / "parts") == losses(ended(ranks, **keys))


def test_what_stages_trained_generates_and_is_evaluated_in_one_process(tmp_path, ended):
    mine, theirs = ended(4, **STAGES), ended()
    models = [sample.load_model(out, "cpu") for out in (mine, theirs)]
    assert len(models[0].gpt.blocks) == 4 and error(models[0].params, models[1].params) <= 1e-3
    assert len([*sample.generate(models[0], [1, 2, 3], 5, temperature=0)]) == 5
    found = []
    for out in (mine, theirs):
        assert command.run(evaluate.main, [str(out), "--device=cpu", "--lengths=64", "--batches=2"]) == 0
        found.append(json.loads((out / "evaluate.json").read_text()))
    assert worst(*(answers["loss_by_position"]["loss"] for answers in found)) <= 1e-3


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
            (argv(dataset, tmp_path / "out", pp=2, tp=2), "pp(2)*dp(1)*cp(1)*tp(2) != WORLD_SIZE(2)"),
            (argv(dataset, tmp_path / "out", pp=2, n_layer=1), "pp=2 must be at most n_layer=1"),
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
    assert first.startswith(f"Agreed: rank 1 ({socket.gethostname()}) has val data=")
    assert first.endswith("; start all ranks with the same command, memo and data, on hosts that are alike")


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
    state.time = SimpleNamespace(sleep=lambda s: None)


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
                               "the previous one is whole; choose another folder; "
                               "nor could it be saved elsewhere: ")
    assert len(losses(tmp_path)) == 10 and os.listdir(tmp_path / "ckpt") == ["3"]
    assert pool(2).run(here, resume) == [0, 0]
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["10", "6", "8"]


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


def without_memory(host, argv, said, rank, steps):
    """What `rank` says where a layer does not fit: while rates are measured, or after so many `steps`; the
    others wait in their messages."""
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def forward_backward(run, it):
        if host.rank == rank and it == steps:
            m.setattr("model.Block.backward", out_of_memory)
        return real(run, it)
    real = train.forward_backward
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(f"{said}{host.rank}", "w"))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "forward_backward", forward_backward)
        bound_arena(m)
        if host.rank == rank and not steps:
            m.setattr("model.Block.backward", out_of_memory)
        with rank_errors(host):
            run = train.set_up(argv, Launch(host.rank, host.size, host.rank, host.size), host)
        with rank_errors(host, run.where):
            complete(run, train.train)


@pytest.mark.ranks
@pytest.mark.parametrize("size,keys,rank,steps", [
    (2, dict(tp=2), 1, 0), (2, dict(pp=2, n_layer=8), 1, 0), (3, dict(pp=3, **IN_ORDER), 0, 2),
    (3, dict(pp=3, **IN_ORDER), 2, 2)])
def test_a_rank_without_room_for_a_layer_ends_the_run(dataset, tmp_path, size, keys, rank, steps):
    ranks, said = Ranks(size), tmp_path / "said "
    ranks.start(without_memory, argv(dataset, tmp_path / "out", **keys), said, rank, steps)
    for process in ranks.processes:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks.processes] == [1] * size
    others = [Path(f"{said}{rank}").read_text() for rank in range(size)]
    [line] = [line for line in others.pop(rank).splitlines() if line.startswith("error: ")]
    where = f"{socket.gethostname()})" + f", stage {rank}, step {steps}" * (steps > 0)
    assert line.startswith(f"error: rank {rank} ({where}: ") and "CUDA out of memory" in line, line
    assert all("error: rank" in other and "lost" in other for other in others)


# --- torchrun ---

LONG = dict(max_iters=15, save_interval=3, eval_interval=0)


LOST = re.compile(rf"error: rank [0-3] \({re.escape(socket.gethostname())}\)(, stage \d)?, step \d+: lost "
                  "another rank .*")


def train_main(argv):
    with pytest.MonkeyPatch.context() as m:
        m.setattr("memo.run.report.draw_picture", no_picture)
        bound_arena(m)
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


def wait_for_rows(out, n):
    end = time.monotonic() + TIMEOUT_S
    while not ((out / "metrics.jsonl").exists() and len(losses(out)) >= n):
        assert time.monotonic() < end, f"no {n} steps within {TIMEOUT_S} s"
        time.sleep(0.02)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2, **IN_ORDER)], ids=["tp2", "pp2"])
def test_a_killed_rank_ends_the_run(dataset, tmp_path, layout):
    keys = argv(dataset, tmp_path / "out", **LONG | layout | dict(max_iters=10**6))
    first, second = start_ranks(train_main, keys, 2, tmp_path)
    wait_for_rows(tmp_path / "out", 8)  # the save before step 6 waited for the one before step 3
    second.kill()
    first.join(TIMEOUT_S)
    assert first.exitcode == 1
    [line] = errors_of(tmp_path, 0)
    assert LOST.fullmatch(line), line
    assert checkpoint.load(tmp_path / "out").iter >= 3
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--tp=1", "--pp=1",
                       "--max_iters=8", "--warmup_iters=0"]) == 0  # on one process


@pytest.mark.ranks
def test_two_agents_stand_for_two_nodes_and_carry_on_when_one_loses_a_rank(dataset, tmp_path):
    """Each has two ranks, of one stage."""
    keys = LONG | dict(pp=2, **IN_ORDER)
    options = ["--nproc_per_node=2", "--nnodes=2", "--rdzv-backend=c10d", "--max-restarts=3",
               f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    nodes = [start_agent(train_main, argv(dataset, tmp_path / "two", **keys), *options, said=tmp_path / name)
             for name in "ab"]
    wait_for_rows(tmp_path / "two", 8)
    os.kill(children(nodes[1].pid)[0], signal.SIGKILL)
    for node in nodes:
        node.join(TIMEOUT_S)
        assert node.exitcode == 0
    said, lines = ("".join((tmp_path / f"{name}.{kind}").read_text() for name in "ab")
                   for kind in ("out", "err"))
    assert LOST.search(lines), lines
    assert pool(4).run(here, argv(dataset, tmp_path / "one", **keys)) == [0] * 4
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert said.count("run         steps 0 to 15") == 1 and said.count("to 15 in") >= 2


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_saves_and_leaves(dataset, tmp_path, torchrun, number):
    keys = dict(cp=2, max_iters=10**6, eval_interval=0)
    run = torchrun(argv(dataset, tmp_path, **keys), "--standalone", ranks=2)
    wait_for_rows(tmp_path, 5)
    run.send_signal(number)
    out, err = run.communicate(timeout=TIMEOUT_S)  # until no rank can say more
    done = checkpoint.load(tmp_path).iter
    assert done == len(losses(tmp_path)) and f"stopped by SIGTERM after {done} of" in out
    assert err.count("SIGTERM: finishing this step, then saving") == 1


@pytest.mark.ranks
def test_a_run_of_the_same_name_is_not_taken_for_the_one_that_is_started_again(dataset, tmp_path, torchrun):
    """A job that is queued again has the number that it had."""
    options = "--rdzv-id=7", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=1"
    for code, seed in ((0, 1), (1, 2)):
        run = torchrun(argv(dataset, tmp_path, cp=2, max_iters=4, seed=seed), *options, ranks=2)
        _, err = run.communicate(timeout=TIMEOUT_S)
        assert run.returncode == code, err
    assert err.count("already holds a checkpoint") == 2  # at the start, and when it is started again
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1


def start_rank(argv, rank, size, port, said):
    process = PROCESSES.Process(target=enter, args=(train_main, argv, rank, size, port, said), daemon=True)
    process.start()
    return process


def wait_for_words(path, words):
    end = time.monotonic() + TIMEOUT_S
    while not (path.exists() and words in path.read_text()):
        assert time.monotonic() < end, f"no {words!r} within {TIMEOUT_S} s"
        time.sleep(0.05)


@pytest.mark.parametrize("rank,number", [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_rank_that_waits_for_others_says_so_and_ends_at_a_signal(dataset, tmp_path, rank, number):
    process = start_rank(argv(dataset, tmp_path / "out"), rank, 2, free_port(), tmp_path / "said")
    waits = "waiting for 1 of 2 ranks: [1]", "rank 1: waiting for rank 0 at"
    wait_for_words(tmp_path / "said.err", waits[rank])
    os.kill(process.pid, number)
    process.join(TIMEOUT_S)
    assert process.exitcode == 128 + number
    said = (tmp_path / "said.err").read_text().splitlines()
    assert rank or [line for line in said if "waiting" not in line] == ["interrupted; what is saved is whole"]


def test_a_rank_of_another_run_is_told_so(dataset, tmp_path):
    port, out = free_port(), tmp_path / "out"
    zero = start_rank(argv(dataset, out), 0, 3, port, tmp_path / "0")
    one, other, twice = (start_rank(argv(dataset, out), 1, size, port, tmp_path / f"{i}")
                         for i, size in enumerate((3, 2, 3), 1))
    other.join(TIMEOUT_S)
    wait_for_words(tmp_path / "0.err", "waiting for 1 of 3 ranks: [2],")
    connection.wait([one.sentinel, twice.sentinel], TIMEOUT_S)  # one of them is told
    for process in (one, twice):
        process.join(0)
    [first] = errors_of(tmp_path, 2)
    [line] = errors_of(tmp_path, 1) + errors_of(tmp_path, 3)
    assert first.startswith("error: RANK=1 WORLD_SIZE=2 does not go with the rank 0 found, of WORLD_SIZE=3")
    assert line.startswith("error: RANK=1 WORLD_SIZE=3 does not go with")
    assert sorted([other.exitcode, one.exitcode or 0, twice.exitcode or 0]) == [0, 2, 2]
    for process in (zero, one, twice):
        process.kill()


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in dict(MASTER_ADDR="localhost", MASTER_PORT=str(port)).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"^MASTER_PORT={port} is in use on this host.*all ranks$"):
            open_store(Launch(0, 2, 0, 2))


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
    for process in (first, second):  # small data are read whole when they are opened: a user's mistake
        process.join(TIMEOUT_S)
        assert process.exitcode == 2
    said = [line for rank in (0, 1) for line in errors_of(tmp_path, rank)]
    assert len(said) == 1 and "9999" in said[0] and "val.bin" in said[0], said
