"""A4 to A6: gradients beside autograd's, bits beside bits, train.py from start to resume."""

import json
import shutil
import subprocess
import sys
import traceback
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from bench.gpu_hour.notes import device, free_memory, named, shape, why_of
from bench.gpu_hour.orchestra import ROOT, read
from bench.gpu_hour.runs import Ours, check
from memo.system.device import set_deterministic

VOCABULARY = 50257


def gradients(notes, asked):
    """A4. The twin's states in fp32 and memo's lie beside each other: fewer layers on a small card."""
    free, _ = torch.cuda.mem_get_info(device())
    layers, S = (5, 4096) if free > 70e9 else (3, 2048)
    H = max(1, asked.n_embd // 128)
    grouped = dict(norm="rmsnorm", mlp="swiglu", qk_norm=True, n_kv_head=max(1, H // 4))
    for family in ({}, grouped):
        cfg = shape(asked, n_layer=layers, block_size=S, **family)
        with notes.trying(f"{cfg.mlp} {named(cfg)}"):
            torch.manual_seed(0)
            check(notes, replace(cfg, vocab_size=1000))
        free_memory()


def steps_of(cfg, steps=3):
    """(losses, norms of gradients) of a few steps, and the misses of the memory plan."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(cfg.vocab_size, (2, 1, cfg.block_size), generator=generator).to(device())
    run = Ours(cfg, *batch)
    try:
        taken = [[float(t) for t in run.step()] for _ in range(steps)]
        return taken, run.model.arena.stats().misses
    finally:
        run.close()
        free_memory()


def bits(notes, asked):
    """A5: every mode beside activation=keep without a plan."""
    set_deterministic(True)
    kernel = "flash" if asked.attention == "auto" else asked.attention
    base = replace(shape(asked, n_layer=4, block_size=4096), attention=kernel, deterministic=True,
                   activation="keep")
    want, _ = steps_of(replace(base, memory_plan="off"))
    notes.line(f"{named(base)}, {kernel}: losses", str([loss for loss, _ in want]),
               ok=all(loss > 0 for loss, _ in want) and len({loss for loss, _ in want}) > 1)
    modes = {"keep, the plan in guard mode": dict(memory_plan_check=True),
             "recompute": dict(activation="recompute"), "swap": dict(activation="swap")}
    modes |= {f"memo, alpha {alpha}": dict(activation="memo", alpha=alpha) for alpha in (0.0, 0.5, 1.0)}
    for name, keys in modes.items():
        with notes.trying(name):
            got, misses = steps_of(replace(base, **keys))
            away = max(abs(a - b) for row in zip(got, want, strict=True) for a, b in zip(*row, strict=True))
            notes.line(f"{name}: losses and norms", away, 0.0, "away", got == want)
            notes.line(f"{name}: misses of the memory plan", misses, 0, ok=misses == 0)
    with notes.trying("4 subsequences"):
        got, _ = steps_of(replace(base, activation="memo", alpha=0.5, subsequences=4, subsequence_cut="equal",
                                  unit_order="layer"))
        away = max(abs(a / b - 1) if b else abs(a) for (a, _), (b, _) in zip(got, want, strict=True))
        notes.line("4 subsequences: losses", away, 1e-3, "away", away <= 1e-3)


# --- train.py ---

def dataset(folder, ids):
    """A dataset folder with these token ids, for training and for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        ids.astype(np.uint16).tofile(folder / f"{split}.bin")
    counts = {split: dict(tokens=len(ids)) for split in ("train", "val")}
    meta = dict(dtype="uint16", vocab_size=int(ids.max()) + 1, counts=counts)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def random_ids(asked):
    ids = np.random.default_rng(0).integers(VOCABULARY, size=2**21 + 1)
    ids[0] = VOCABULARY - 1
    return dataset(asked.out / "data" / "random", ids)


def arguments(cfg, asked, **keys):
    """The command line of a Config's keys that are not their defaults."""
    from memo.config.config import KEYS
    given = {name: getattr(cfg, name) for name, f in KEYS.items() if getattr(cfg, name) != f.default} | keys
    return [f"--{name}={value}" for name, value in given.items() if name != "vocab_size"]


def train_here(notes, asked, cfg, **keys):
    """(rows of metrics.jsonl, plan.json) of train.py in this process, which saves nothing: a large model's
    checkpoint has 12 bytes a parameter. Where it fails behind its first step that is a line."""
    import train
    from memo.checkpoint.checkpoint import Saver
    out = asked.out / "runs" / notes.found["item"]
    shutil.rmtree(out, ignore_errors=True)
    keys = dict(dataset=random_ids(asked), out_dir=out, eval_interval=0, save_interval=0, warmup_iters=1,
                device="cuda", learning_rate=1e-5, min_lr=1e-6) | keys
    try:
        with patch.object(Saver, "save", lambda *args: None):
            code = train.main(arguments(cfg, asked, **keys))
        notes.line("train.py", f"ended with {code}", ok=code == 0)
    except Exception as e:
        if not (out / "metrics.jsonl").exists():
            raise
        traceback.print_exc()
        notes.line("train.py", why_of(e), ok=False)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    notes.line("loss of the last step", rows[-1]["loss"], ok=rows[-1]["loss"] > 0)
    return rows, read(out / "plan.json")


def trains(notes, asked):
    """A6: a small model learns a pattern, saves, and goes on where it was."""
    device()
    out = asked.out / "runs" / "A6"
    folder = dataset(asked.out / "data" / "pattern", np.arange(2**18) * 7 % 50)
    shutil.rmtree(out, ignore_errors=True)
    common = ["--n_layer=4", "--n_head=4", "--n_embd=512", "--block_size=4096", f"--dataset={folder}",
              f"--out_dir={out}", "--eval_interval=10", "--eval_iters=1", "--save_interval=10",
              "--warmup_iters=2", "--device=cuda", f"--attention={asked.attention}"]
    losses = []
    for steps, more in ((20, []), (30, ["--init_from=resume"])):
        command = [sys.executable, "train.py", *common, f"--max_iters={steps}", *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout[-6000:], done.stderr[-6000:], sep="\n")
        last = (done.stderr.strip().splitlines() or [""])[-1]
        notes.line(f"train.py {' '.join(more)} to step {steps}", f"ended with {done.returncode} {last[:200]}",
                   ok=done.returncode == 0)
        if done.returncode:
            return
        losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    notes.line("steps in metrics.jsonl", len(losses), 30, ok=len(losses) == 30)
    notes.line("loss of step 1", losses[0])
    notes.line("loss of step 20", losses[19], ok=losses[19] < losses[0])
    notes.line("loss of step 21, resumed", losses[20], ok=losses[20] < min(losses[0], 2 * losses[19]))
