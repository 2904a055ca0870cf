"""Does a run that loses a rank again and again end as if nothing had happened?

    python -m bench.kills ["tp2 cp2" ...] [--kills=10]

Trains a small model over four ranks under torchrun --max-restarts, kills one of them with SIGKILL at a random
moment, ten times, and compares every loss with those of a run that was left alone. Writes
bench/results/kills.json; a layout that is not named keeps what the file has.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import machine
from memo.run.loggers import read_metrics
from testing.ranks import children

ROOT = Path(__file__).parents[1]
RANKS = 4
MODEL = dict(n_layer=4, n_head=4, n_embd=64, block_size=1024, dataset="stdlib", device="cpu",
             alpha=0.5, learning_rate=1e-3, warmup_iters=20, eval_interval=0, save_interval=5)
LAYOUTS = {"tp2 cp2": dict(tp=2, cp=2, subsequences=1),
           "pp2 dp2": dict(pp=2, subsequences=4, subsequence_cut="equal", unit_order="subsequence",
                           gradient_accumulation_steps=2)}


def start(keys, out, iters, kills):
    keys = [f"--{k}={v}" for k, v in (MODEL | keys | dict(out_dir=out, max_iters=iters)).items()]
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                             f"--nproc_per_node={RANKS}", f"--max-restarts={kills}", "train.py", *keys],
                            cwd=ROOT)


def steps_done(out):
    path = out / "metrics.jsonl"
    return max((r["iter"] for r in read_metrics(path)), default=-1) if path.exists() else -1


def wait_for_step(run, out, step):
    while steps_done(out) < step:
        if run.poll() is not None:
            raise SystemExit(f"the run ended before step {step}")
        time.sleep(0.05)


def killed_and_left_alone(layout, n):
    """What the file has of a layout, with n kills."""
    rng, iters, kills, keys = random.Random(0), 12 * (n + 1), [], LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        left_alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        if start(keys, left_alone, iters, 0).wait():
            raise SystemExit("the run that was left alone failed")
        run = start(keys, killed, iters, n)
        for i in range(n):
            wait_for_step(run, killed, 12 * i + rng.randrange(7, 12))
            time.sleep(rng.random() * 0.5)
            rank, before, at = rng.randrange(RANKS), steps_done(killed), time.monotonic()
            os.kill(children(run.pid)[rank], signal.SIGKILL)
            wait_for_step(run, killed, before + 1)  # through the steps since the last checkpoint once more
            kills.append(dict(rank=rank, after_step=before, next_step_after_s=time.monotonic() - at))
            print(kills[-1], flush=True)
        code = run.wait()
        a, b = ([(r["iter"], r["loss"], r["grad_norm"]) for r in read_metrics(out / "metrics.jsonl")]
                for out in (left_alone, killed))
    print(f"{layout}: {n} kills, exit code {code}; {len(a)} losses and gradient norms "
          f"{'bitwise equal' if a == b else 'DIFFER'}")
    return dict(layout=layout, machine=machine(), model=MODEL | keys, iterations=iters, kills=kills,
                exit_code=code, losses_compared=len(a), bitwise_equal=a == b)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", choices=[[], *LAYOUTS], default=[])
    parser.add_argument("--kills", type=int, default=10)
    args, path = parser.parse_args(), ROOT / "bench/results/kills.json"
    rows = {row["layout"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    for layout in args.layouts or LAYOUTS:
        rows[layout] = killed_and_left_alone(layout, args.kills)
        path.write_text(json.dumps([*rows.values()], indent=1) + "\n")
    sys.exit(any(row["exit_code"] or not row["bitwise_equal"] for row in rows.values()))


if __name__ == "__main__":
    main()
