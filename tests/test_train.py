"""Whole runs of train.main: learning, resuming bitwise, stopping, and every way a run can go wrong."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, models

import train
from memo import sample
from memo.checkpoint import checkpoint, dcp
from memo.errors import ConfigError, TrainingError
from memo.memory.slab import HostSlab
from memo.run.load_config import load_config
from memo.run.loggers import read_metrics
from memo.run.state import lock
from memo.system.command import run
from model import Block
from tests.helpers import GEMMA, LLAMA, OLMO, ROOT, VOCAB, argv, losses
from train import learning_rate


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_run_learns_and_leaves_everything_it_promises(dataset, tmp_path, capsys):
    assert train.main(argv(dataset, tmp_path, max_iters=120, eval_interval=60)) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 120
    assert abs(rows[0]["loss"] - math.log(VOCAB)) < 0.1
    assert rows[-1]["loss"] < 0.4 * math.log(VOCAB)
    assert [r["iter"] for r in rows if "val_loss" in r] == [0, 60, 119]
    assert rows[-1]["tokens"] == 256 and rows[-1]["mfu"] is None and rows[-1]["device_peak_bytes"] > 0
    assert json.loads((tmp_path / "config.json").read_text())["n_embd"] == 32
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert checkpoint.load(tmp_path).iter == 120
    assert "done: 120 steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_bitwise(dataset, tmp_path, dtype):
    train.main(argv(dataset, tmp_path / "whole", dtype=dtype))
    train.main(argv(dataset, tmp_path / "parts", dtype=dtype, max_iters=5, lr_decay_iters=12))
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path / 'parts'}", "--max_iters=12"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (dict(checkpoint.load(tmp_path / d).tensors("params")) for d in ("whole", "parts"))
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


@pytest.mark.slow
def test_a_run_that_swaps_says_so_everywhere_and_is_bitwise_a_run_that_keeps(dataset, tmp_path, capsys,
                                                                             draw_picture, monkeypatch):
    keys = dict(n_layer=5, block_size=512, batch_size=1, gradient_accumulation_steps=2, max_iters=6)
    train.main(argv(dataset, tmp_path / "keep", activation="keep", **keys))
    said = capsys.readouterr().out
    assert "5 buffers for 5 layers" in said and "alpha" not in said
    train.main(argv(dataset, tmp_path / "auto", **keys))
    said = capsys.readouterr().out
    assert "5 buffers for 5 layers" in said and "alpha       none: all layers stay on the device" in said
    assert losses(tmp_path / "auto") == losses(tmp_path / "keep")
    monkeypatch.setattr("memo.run.report.draw_picture", draw_picture)
    train.main(argv(dataset, tmp_path / "memo", alpha=0.5, **keys))
    said = capsys.readouterr().out
    assert "2 buffers for 5 layers" in said and "alpha       0.500, given: overlap allows" in said
    assert losses(tmp_path / "memo") == losses(tmp_path / "keep")
    rows = read_metrics(tmp_path / "memo" / "metrics.jsonl")
    plan = json.loads((tmp_path / "memo" / "plan.json").read_text())
    for r in rows:
        assert r["alpha"] == plan["alpha"] == 0.5 and r["host_bytes"] == plan["host_bytes"] > 0
        assert r["offload_bytes"] == 2 * r["host_bytes"] and 0 < r["stall_s"] < r["step_s"]
    kept = read_metrics(tmp_path / "keep" / "metrics.jsonl")[0]
    assert (kept["alpha"], kept["offload_bytes"], kept["stall_s"], kept["host_bytes"]) == (None, 0, 0, 0)
    assert json.loads((tmp_path / "keep" / "plan.json").read_text())["rates"] is None
    assert (tmp_path / "memo" / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "memo" / "timeline.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["compute", "offload", "prefetch"]
    names = {(e["tid"], e["name"]) for e in events if e["ph"] == "X"}
    assert {(0, "forward 4"), (0, "recompute 3"), (0, "backward 0"), (0, "head"), (1, "offload 2"),
            (2, "prefetch 0"),
            (0, "stall: recompute 1 waits for prefetch 1: kept rows of buffer 1")} <= names
    assert not any(name in ("offload 3", "prefetch 3", "recompute 4") for _, name in names)


def test_too_little_host_memory_leaves_no_trace(dataset, tmp_path):
    with pytest.raises(ConfigError, match="^alpha=1 needs .* GiB of host memory for 3 swapped layers"):
        train.main(argv(dataset, tmp_path / "out", n_layer=5, activation="swap", host_memory_gb=1e-5))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["layer", "subsequence"])
def test_a_run_of_subsequences_that_swaps_is_bitwise_one_that_keeps(dataset, tmp_path, order):
    keys = LLAMA | dict(block_size=512, batch_size=2, max_iters=2, subsequences=3, subsequence_cut="equal",
                        unit_order=order)
    train.main(argv(dataset, tmp_path / "keep", activation="keep", **keys))
    train.main(argv(dataset, tmp_path / "memo", alpha=0.5, **keys))
    assert losses(tmp_path / "memo") == losses(tmp_path / "keep")
    plan = json.loads((tmp_path / "memo/plan.json").read_text())
    assert plan["rates"]["forward_s"] > 0 and plan["placement"]["cuts"] == [512, 256, 256]


@pytest.mark.parametrize("how", ["an exception in a layer", "SIGTERM"])
def test_stopping_in_mid_step_gives_the_slab_and_the_streams_back(dataset, tmp_path, monkeypatch, how):
    opened, closed, calls, before = [], [], [], threading.enumerate()
    real = {name: getattr(HostSlab, name) for name in ("__init__", "close")}
    monkeypatch.setattr(HostSlab, "__init__",
                        lambda slab, *a, **k: opened.append(slab) or real["__init__"](slab, *a, **k))
    monkeypatch.setattr(HostSlab, "close", lambda slab: closed.append(slab) or real["close"](slab))
    backward = Block.backward

    def stopped(block, *args):
        calls.append(block)
        # the profiler's four, two steps of four layers, and the second layer from the end of the third
        if len(calls) == 14:
            if how != "SIGTERM":
                raise FloatingPointError("in a layer")
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(block, *args)

    monkeypatch.setattr(Block, "backward", stopped)
    monkeypatch.setattr("memo.run.measure.LONG_S", float("inf"))  # four, however busy the machine is
    keys = argv(dataset, tmp_path, n_layer=4, alpha=0.5, max_iters=1000, save_interval=0)
    if how == "SIGTERM":
        assert train.main(keys) == 128 + signal.SIGTERM
        assert checkpoint.load(tmp_path).iter == 3
    else:
        with pytest.raises(FloatingPointError, match="in a layer"):
            train.main(keys)
        assert checkpoint.load(tmp_path).iter == len(losses(tmp_path)) > 0
    assert len(opened) == 2 and closed == opened  # the profiler's and the run's
    assert not [t for t in threading.enumerate() if t.name.startswith("memo ") and t not in before]


def test_accumulation_and_batches_see_the_same_number_of_tokens(dataset, tmp_path):
    train.main(argv(dataset, tmp_path, batch_size=2, gradient_accumulation_steps=3, max_iters=2))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["tokens"] == 2 * 3 * 64


@pytest.mark.slow
@pytest.mark.usefixtures("hangup_is_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_leaves(dataset, tmp_path, capsys, number):
    before = signal.getsignal(number)
    metrics = tmp_path / "metrics.jsonl"

    def kill():
        while not (metrics.exists() and len(read_metrics(metrics)) > 3):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=kill)
    killer.start()
    code = train.main(argv(dataset, tmp_path, max_iters=100000, eval_interval=0, save_interval=0))
    killer.join()
    assert code == 128 + number
    done = checkpoint.load(tmp_path).iter
    assert done == len(losses(tmp_path)) >= 3
    out = capsys.readouterr().out
    assert (f"stopped by {number.name} after {done} of 100000 steps, saved" in out
            and "--init_from=resume" in out)
    assert signal.getsignal(number) == before


def test_a_loss_that_is_not_finite_stops_and_saves_nothing(dataset, tmp_path, monkeypatch):
    train.main(argv(dataset, tmp_path, max_iters=8, lr_decay_iters=20))
    before = {f.name: f.read_bytes() for f in (tmp_path / "ckpt" / "8").iterdir()}
    real = train.forward_backward

    def poisoned(run, it):
        return real(run, it) * (float("nan") if it == 10 else 1)

    monkeypatch.setattr(train, "forward_backward", poisoned)
    with pytest.raises(TrainingError) as e:
        train.main(["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=20", "--save_interval=0"])
    message = str(e.value)
    assert (message.startswith("loss=nan grad_norm=") and "at iter=10" in message
            and "of the train split" in message)
    assert f"the last good checkpoint is {tmp_path / 'ckpt' / '8'}, before step 8" in message
    assert {f.name: f.read_bytes() for f in (tmp_path / "ckpt" / "8").iterdir()} == before
    assert checkpoint.latest(tmp_path).name == "8"
    assert losses(tmp_path)[-1][0] == 9


def test_a_failed_save_in_mid_run_is_a_warning(dataset, tmp_path, monkeypatch, capsys):
    real, calls = dcp.Writer.write_data, []

    def full_disk(*args):
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(dcp.Writer, "write_data", full_disk)
    train.main(argv(dataset, tmp_path))
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warning.startswith(f"warning: {tmp_path}/ckpt/4 cannot be written (Input/output error); ")
    assert warning.endswith("; training goes on") and len(calls) == 3
    assert checkpoint.load(tmp_path).iter == 12


def test_scratch_never_overwrites_a_checkpoint(dataset, tmp_path):
    train.main(argv(dataset, tmp_path, max_iters=3))
    with pytest.raises(ConfigError,
                       match="already holds a checkpoint, which init_from=scratch would overwrite"):
        train.main(argv(dataset, tmp_path, max_iters=3))
    assert train.main(["--init_from=resume", f"--out_dir={tmp_path}"]) == 0  # nothing left to do


def test_what_is_read_is_never_written(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "data")
    with pytest.raises(ConfigError, match=f"out_dir={copy} is what dataset reads"):
        train.main(argv(copy, copy))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json is not of a run, and would be replaced"):
        train.main(argv(dataset, tmp_path))
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'


def test_two_runs_never_share_an_out_dir(dataset, tmp_path):
    held = lock(tmp_path, "somebody")
    with pytest.raises(ConfigError,
                       match="is in use by another run; wait for it or choose another --out_dir"):
        train.main(argv(dataset, tmp_path))
    held.close()
    assert train.main(argv(dataset, tmp_path, max_iters=3)) == 0


def test_an_out_dir_that_is_a_file(dataset, tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError,
                       match=r"out_dir=.*/f must be a folder, or nothing yet, and .*/f is no folder; choose"):
        train.main(argv(dataset, tmp_path / "f"))


def test_data_of_another_tokenizer_is_refused(dataset, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(dataset, data)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(data / "tokenizer.json"))
    train.main(argv(data, tmp_path / "run", max_iters=3))
    Tokenizer(models.WordLevel({"b": 0}, unk_token="b")).save(str(data / "tokenizer.json"))
    with pytest.raises(ConfigError,
                       match="was made with another tokenizer than the weights of init_from=resume"):
        train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=5"])


def test_the_datas_vocabulary_must_fit_the_checkpoints(dataset, tmp_path):
    train.main(argv(dataset, tmp_path / "run", max_iters=3))
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "val"):
        (other / f"{split}.bin").write_bytes((dataset / f"{split}.bin").read_bytes())
    meta = json.loads((dataset / "meta.json").read_text()) | dict(vocab_size=VOCAB + 1)
    (other / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError,
                       match=r"vocab_size=50 must be >= 51, the vocabulary of dataset=.*; leave it out"):
        train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}", f"--dataset={other}",
                    "--max_iters=5"])


@pytest.mark.parametrize("keys,message", [
    (dict(block_size=5000), "try --block_size=1999"),
    (dict(dataset="no_such"), "dataset=no_such must be a folder's name under data/ or a path"),
    (dict(attention="flash"), "attention=flash is not available: it needs a CUDA device"),
    *([] if torch.cuda.is_available() else [(dict(device="cuda"), "device=cuda needs a CUDA GPU")])])
def test_mistakes_come_before_the_run_and_leave_no_trace(dataset, tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        train.main(argv(dataset, tmp_path / "out", **keys))
    assert not (tmp_path / "out").exists()


def test_the_command_prints_one_line_for_a_mistake():
    run = subprocess.run([sys.executable, "train.py", "--n_layr=3"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "error: --n_layr=3: unknown key 'n_layr'; did you mean 'n_layer'?\n"


def test_learning_rate_schedule(dataset, tmp_path):
    cfg = load_config(argv(dataset, tmp_path, max_iters=100, warmup_iters=10, min_lr=1e-3))
    assert learning_rate(cfg, 0) == pytest.approx(1e-3) and learning_rate(cfg, 9) == pytest.approx(1e-2)
    assert learning_rate(cfg, 55) == pytest.approx((1e-2 + 1e-3) / 2)
    assert learning_rate(cfg, 100) == pytest.approx(1e-3) == learning_rate(cfg, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, LLAMA | dict(n_head=4, qk_norm=True), OLMO | dict(n_head=4),
                                  GEMMA | dict(n_head=4)], ids=["gpt", "llama", "olmo", "gemma"])
def test_the_cached_sampler_agrees_with_the_whole_forward(keys, dataset, tmp_path, capsys):
    train.main(argv(dataset, tmp_path, max_iters=40, **keys))
    model = sample.load_model(tmp_path, device="cpu")
    prompt = [3, 1, 4]
    got = list(sample.generate(model, prompt, 20, temperature=0))
    tokens = list(prompt)
    for _ in range(20):
        batch = torch.tensor([tokens])
        model.forward(batch, batch)
        tokens.append(model.gpt.edges.logits(model.swap.x[-1])[3][-1, :VOCAB].argmax().item())
    assert got == tokens[3:]
    again = [list(sample.generate(model, prompt, 20, temperature=1.0, top_k=5, seed=s)) for s in (1, 1, 2)]
    assert again[0] == again[1] != again[2]
    with pytest.raises(ConfigError, match="at most block_size=64 together"):
        list(sample.generate(model, prompt, 62))
    for temperature in (1e-300, 5e-324):  # all but as 0
        assert list(sample.generate(model, prompt, 20, temperature=temperature)) == got
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB + 1)}, unk_token="0"))
    words.save(str(tmp_path / "tokenizer.json"))
    capsys.readouterr()
    assert run(sample.main, [str(tmp_path), "--prompt=3", "--device=cpu"]) == 2
    told = capsys.readouterr()
    says = (f"tokenizer.json: the tokenizer has {VOCAB + 1} tokens, "
            f"must have at most the model's vocab_size={VOCAB}; put")
    assert not told.out and says in told.err and told.err.count("\n") == 1
    (tmp_path / "zeros.txt").touch()
    os.truncate(tmp_path / "zeros.txt", 2**26 + 1)
    assert run(sample.main, [str(tmp_path), f"--prompt=@{tmp_path}/zeros.txt"]) == 2
    assert "zeros.txt cannot be read (it must be at most 67,108,864 characters" in capsys.readouterr().err
    assert run(sample.main, [str(tmp_path), "--prompt=@nowhere.txt"]) == 2
    assert capsys.readouterr().err == ("error: prompt=@nowhere.txt cannot be read "
                                       "(No such file or directory); give a text file in UTF-8\n")
