"""Does a run that is killed and stopped again and again, with its log on a full disk, end as if nothing had
happened?

    python -m bench.interruptions [--times=30] [--seed=0]

Trains a small model in one process. Its log goes to a disk that is full; its out_dir lies on a disk with room
for two checkpoints and a half. SIGKILL, SIGTERM, SIGINT, SIGINT twice, SIGHUP or SIGUSR1 ends it at a random
moment, from its first import on; then it is resumed, until it has done all its steps. Every loss is compared
with those of a run that was left alone. Mounts two tmpfs, which takes root; without root /dev/full is the
full disk. Writes bench/results/interruptions.json.
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
from contextlib import contextmanager
from pathlib import Path

from bench.machine import machine
from memo.checkpoint.manifest import checkpoints
from memo.run.loggers import read_metrics

ROOT = Path(__file__).parents[1]
MODEL = dict(n_layer=2, n_head=2, n_embd=64, block_size=256, dataset="stdlib", device="cpu",
             activation="swap", learning_rate=1e-3, warmup_iters=20, eval_interval=25, eval_iters=2,
             save_interval=5)
# and a little more
CHECKPOINT_BYTES = 12 * (12 * MODEL["n_layer"] * MODEL["n_embd"] ** 2 + 512 * MODEL["n_embd"])
ENDS = [("SIGKILL",), ("SIGTERM",), ("SIGINT",), ("SIGINT", "SIGINT"), ("SIGHUP",), ("SIGUSR1",)]
TWICE_S = 1.2  # between two signals that are two requests


@contextmanager
def disk(folder, nbytes):
    """A small disk at `folder`; a plain folder without root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder]
    mounted = os.getuid() == 0 and subprocess.run(mount).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def start(out, iters, log):
    resume = ["--init_from=resume"] if checkpoints(out) else []
    keys = [f"--{k}={v}" for k, v in (MODEL | dict(out_dir=out, max_iters=iters)).items()]
    return subprocess.Popen([sys.executable, "train.py", *keys, *resume], cwd=ROOT, stdout=log, stderr=log)


def figures(out):
    """[(iter, loss, gradient norm)]: the last that was logged of each step."""
    return sorted({r["iter"]: (r["iter"], r["loss"], r["grad_norm"])
                   for r in read_metrics(out / "metrics.jsonl")}.values())


def interrupted(out, iters, log, rng, times):
    """Starts the run and ends it, again and again -> [what ended it, and after which step]."""
    ends = []
    while len(ends) < times:
        run, names = start(out, iters, log), rng.choice(ENDS)
        time.sleep(rng.uniform(0.1, 5))
        for i, name in enumerate(names):
            time.sleep(TWICE_S * (i > 0))
            if run.poll() is None:
                run.send_signal(getattr(signal, name))
        code, newest = run.wait(60), checkpoints(out)
        ends.append(dict(signals=names, exit_code=code,
                         newest_checkpoint=int(newest[0].name) if newest else None))
        print(ends[-1], flush=True)
        if code == 0:
            raise SystemExit("the run was over before all interruptions; give it more steps")
    return ends


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for number in (signal.SIGHUP, signal.SIGINT):  # a shell makes what runs behind it ignore them
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder:
        folder, alone = Path(folder), Path(folder) / "alone"
        if start(alone, args.steps, subprocess.DEVNULL).wait():
            raise SystemExit("the run that was left alone failed")
        room = CHECKPOINT_BYTES * 5 // 2 + 2**22
        with disk(folder / "logs", 2**16) as mounted, disk(folder / "run", room) as small:
            path = folder / "logs" / "log" if mounted else Path("/dev/full")
            with open(path, "wb", buffering=0) as log:
                try:
                    while mounted and log.write(b"x" * 4096):
                        pass
                except OSError as e:
                    print(f"the disk of the log: {e.strerror}")
                out = folder / "run" / "out"
                ends = interrupted(out, args.steps, log, random.Random(args.seed), args.times)
                code = start(out, args.steps, log).wait()
            a, b = figures(alone), figures(out)
    result = dict(machine=machine(), model=MODEL, steps=args.steps, seed=args.seed,
                  log_disk="full tmpfs" if mounted else "/dev/full",
                  out_dir_disk="tmpfs of two and a half checkpoints" if small else "any", interruptions=ends,
                  exit_code=code, losses_compared=len(a), bitwise_equal=a == b)
    (ROOT / "bench/results/interruptions.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(ends)} interruptions, exit code {code}; {len(a)} losses and gradient norms "
          f"{'bitwise equal' if a == b else 'DIFFER'}")
    sys.exit(code or a != b)


if __name__ == "__main__":
    main()
