"""A7 and B6, with several GPUs: layouts over NCCL, and how fast messages are."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from bench.gpu_hour.notes import Skip, device, machine_here, rate_of
from bench.gpu_hour.orchestra import ROOT
from bench.gpu_hour.right import dataset
from memo.system import hardware

STEPS = 5
# {layout: keys}, each on two ranks, or on four where the degrees multiply to that
LAYOUTS = {"dp2": {}, "tp2": dict(tp=2), "metp2": dict(tp=2, tensor_parallel="metp"),
           "ring2": dict(cp=2), "ulysses2": dict(cp=2, context_parallel="ulysses"),
           "pp2": dict(pp=2, subsequences=4), "pp2 msp": dict(pp=2, subsequences=4, msp=True),
           "dp2 sharded": dict(states="sharded"), "dp2 host": dict(states="host"),
           "tp2 ring2": dict(tp=2, cp=2), "pp2 tp2": dict(pp=2, tp=2, subsequences=4)}


@contextmanager
def own_cache():
    """A cache folder for what is measured here: the user's own calibration stays."""
    with tempfile.TemporaryDirectory(prefix="memo-") as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        yield


def calibrated(attention):
    """python -m memo.profiler --calibrate, with the kernel that was asked for."""
    from memo import profiler
    from memo.run import measure
    real = measure.resolve_attention
    with patch.object(measure, "resolve_attention", lambda name, *args: real(attention, *args)):
        profiler.main(["--calibrate", "--device=cuda"])


def gpus():
    device()
    if (n := torch.cuda.device_count()) < 2:
        raise Skip("there is one GPU")
    return n


def launched(ranks, *command):
    """(exit code, the last line of stderr) of a command under torchrun."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run([*program, *command], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "4")))
    print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", flush=True)
    errors = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines() or [""]
    return done.returncode, errors[0][:200]


def trained(asked, name, ranks, **keys):
    """(rows of metrics.jsonl of five steps on two sequences, why it failed behind them or empty)."""
    out = asked.out / "runs" / f"A7 {name}".replace(" ", "_")
    shutil.rmtree(out, ignore_errors=True)
    folder = dataset(asked.out / "data" / "mixed", np.random.default_rng(0).integers(1000, size=2**18))
    keys = dict(n_layer=4, n_head=8, n_embd=1024, block_size=8192, gradient_accumulation_steps=2,
                max_iters=STEPS, eval_interval=0, save_interval=0, warmup_iters=1, device="cuda",
                attention=asked.attention, dataset=folder, out_dir=out) | keys
    code, why = launched(ranks, "train.py", *(f"--{key}={value}" for key, value in keys.items()))
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(rows) < STEPS:
        raise RuntimeError(f"it ended with {code} after {len(rows)} steps: {why}")
    return rows, why * bool(code)


def losses(notes, asked):
    """A7: five steps of each layout beside one GPU's."""
    most, (want, why) = gpus(), trained(asked, "one", 1)
    notes.line("one GPU: step", want[-1]["step_s"], unit="s", ok=not why and want[-1]["loss"] > 0, why=why)
    for name, keys in LAYOUTS.items():
        degrees = [keys.get(axis, 1) for axis in ("tp", "cp", "pp")]
        ranks = max(2, degrees[0] * degrees[1] * degrees[2])
        if ranks > most:
            notes.skip(name, f"it wants {ranks} GPUs")
            continue
        with notes.trying(name):
            got, why = trained(asked, name, ranks, **keys)
            away = max(abs(a["loss"] - b["loss"]) for a, b in zip(got, want, strict=True))
            right = away <= 1e-2 and got[-1]["loss"] > 0 and not why
            notes.line(f"{name}: losses", away, 1e-2, "away", right, step_s=got[-1]["step_s"], why=why,
                       sent_bytes=got[-1].get("sent_bytes"))


def messages(notes, asked):
    """B6: --calibrate with all GPUs at once: each kind of message by its size, behind products."""
    n = gpus()
    with own_cache():
        code, why = launched(n, "-m", "bench.gpu_hour.several", asked.attention)
        if code:
            raise RuntimeError(f"it ended with {code}: {why}")
        found = hardware.calibration(n)
    notes.save(calibration=found)
    told = machine_here()
    inside = told.node.nvlink_bytes_per_s * (rate_of("link") or 1)
    for op in sorted(hardware.MESSAGES):
        for size, bytes_per_s in found["speeds"].get(op, []):
            largest = size == found["speeds"][op][-1][0]
            notes.line(f"{op} of {size:,.0f} bytes, behind products", bytes_per_s / 1e9, inside / 1e9, "GB/s",
                       **(dict(entry="link") if largest and op == "shift" else {}))
    notes.line("copies to and from the host, all GPUs at once", found["node"]["pcie_bytes_per_s"] / 1e9,
               told.node.pcie_bytes_per_s / 1e9, "GB/s", entry="pcie_bytes_per_s")


if __name__ == "__main__":  # a rank of B6
    calibrated(sys.argv[1])
