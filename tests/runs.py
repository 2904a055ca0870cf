"""Runs of train.py in the ranks of a pool, which the tests of several ranks share."""

import contextlib
import os
from pathlib import Path

import pytest

import train
from memo.run.ending import complete
from memo.run.loggers import read_metrics
from memo.system.launch import Launch
from tests.helpers import LLAMA, bound_arena, no_picture

MODEL = dict(n_layer=4, n_head=4, n_embd=32, block_size=64, position="learned", bias=True, batch_size=2,
             gradient_accumulation_steps=2, max_iters=6, warmup_iters=2, learning_rate=1e-2, alpha=0.5,
             eval_interval=3, eval_iters=2, save_interval=0, device="cpu")
UNTIED = LLAMA | dict(position="rope", bias=False)
IN_ORDER = dict(subsequences=2, subsequence_cut="equal", unit_order="subsequence")  # as stages want it


def argv(folder, out, **keys):
    return [f"--{k}={v}" for k, v in (MODEL | dict(dataset=folder, out_dir=out) | keys).items()]


def rows(out):
    return read_metrics(Path(out) / "metrics.jsonl")


def losses(out):
    return [r["loss"] for r in rows(out)]


def here(host, argv, console=os.devnull):
    """train.main in a rank of a pool -> its exit code, or what went wrong. `argv`: of all, or one of each."""
    mine = argv[host.rank] if isinstance(argv[0], list) else argv
    path = f"{console}{host.rank}" if console != os.devnull else console
    with open(path, "w") as file, contextlib.redirect_stdout(file), pytest.MonkeyPatch.context() as m:
        m.setattr("memo.run.report.draw_picture", no_picture)
        bound_arena(m)
        try:
            run = train.set_up(mine, Launch(host.rank, host.size, host.rank, host.size), host)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        try:
            with contextlib.closing(run):
                return complete(run, train.train)
        finally:
            if run.lock:
                run.lock.close()
