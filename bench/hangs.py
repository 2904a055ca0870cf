"""Is a rank that hangs named, by the run itself, within its stall_timeout?

    python -m bench.hangs [--stall_timeout=6]

Trains a small model in four layouts. In each, one of the ranks is stopped, falls asleep, loops for ever,
comes to another message than the others, or has a disk whose fsync never returns. Writes
bench/results/hangs.json: what was said, and after how many seconds.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import train
from bench.machine import machine
from testing.ranks import start_ranks

ROOT = Path(__file__).parents[1]
MODEL = dict(n_layer=4, n_head=4, n_embd=64, block_size=512, dataset="stdlib", device="cpu", alpha=0.5,
             learning_rate=1e-3, max_iters=10**6, eval_interval=0, save_interval=4)
STEP = 10  # in which a rank hangs
IN_ORDER = dict(subsequences=2, subsequence_cut="equal", unit_order="subsequence")
# ranks, the one that hangs, keys
LAYOUTS = {"dp2": (2, 1, {}), "tp2": (2, 0, dict(tp=2, subsequences=1)),
           "pp2": (2, 1, dict(pp=2, **IN_ORDER)), "tp2 cp2": (4, 2, dict(tp=2, cp=2, subsequences=1))}


def loop(run):
    while True:
        pass


def endless_fsync(run):
    os.fsync = lambda fd: time.sleep(10**6)


HOW = {"stopped": lambda run: os.kill(os.getpid(), signal.SIGSTOP), "asleep": lambda run: time.sleep(10**6),
       "in an endless loop": loop, "in another message": lambda run: run.mesh.host.sum(torch.zeros(1)),
       "its fsync never returns": endless_fsync}


def hang(argv, how, rank, begun):
    """train.main, in which `rank` hangs. `begun`: a file that it makes before."""
    real = train.forward_backward

    def hanging(run, it):
        if (it, run.mesh.host.rank) == (STEP, rank):
            begun.touch()
            HOW[how](run)
        return real(run, it)
    train.forward_backward = hanging
    return train.main(argv)


def errors(folder, ranks):
    files = [folder / f"{rank}.err" for rank in range(ranks)]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [line for line in lines if line.startswith("error: ")]


def hung(layout, how, timeout):
    """What hangs.json has of a case."""
    ranks, rank, keys = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = MODEL | keys | dict(out_dir=folder / "out", stall_timeout=timeout)
        main = partial(hang, how=how, rank=rank, begun=folder / "begun")
        processes = start_ranks(main, [f"--{k}={v}" for k, v in keys.items()], ranks, folder)
        while not (first := errors(folder, ranks)) and any(process.is_alive() for process in processes):
            time.sleep(0.05)
        seconds = time.time() - (folder / "begun").stat().st_mtime
        for process in processes:
            process.join(1 if how == "stopped" and process is processes[rank] else 60)
            process.kill()
        lines = errors(folder, ranks)
    named = [re.match(rf"error: nothing has happened for \d+ s: .*\brank {rank}\b", line) for line in first]
    return dict(layout=layout, rank=rank, how=how, seconds=round(seconds, 1), named=any(named), said=lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stall_timeout", type=float, default=6.0)
    args, rows = parser.parse_args(), []
    for layout in LAYOUTS:
        for how in HOW:
            rows.append(hung(layout, how, args.stall_timeout))
            print(json.dumps(rows[-1]), flush=True)
    named = sum(row["named"] for row in rows)
    print(f"{named} of {len(rows)} named")
    result = dict(machine=machine(), model=MODEL, stall_timeout=args.stall_timeout, named=named,
                  of=len(rows), cases=rows)
    (ROOT / "bench/results/hangs.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(named < len(rows))


if __name__ == "__main__":
    main()
