"""Does a busy machine train as an idle one does, to the last bit?

    python -m bench.under_load

The first 20 steps of config/stdlib.py, which `make train` trains; and six steps of four layers in bf16 at the
same 4,096 tokens, with alpha 0, 0.375 and auto. Each once alone, and once beside four processes that compute
on the same cores, with no plan kept in between. Compared are config.json, plan.json, but for what was
measured, losses and gradient norms. Writes bench/results/under_load.json; exit code 1 if anything differs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import machine
from bench.same_losses import ROOT, Tree, first_difference, reproducible
from memo.system.files import save_json
from testing.busy import busy

BUSY = 4
FOUR = "--n_layer=4 --dtype=bfloat16 --max_iters=6 --warmup_iters=1"
RUNS = {"make train": "--max_iters=20", "bf16, alpha 0": f"{FOUR} --alpha=0",
        "bf16, alpha 0.375": f"{FOUR} --alpha=0.375", "bf16, alpha auto": FOUR,
        "bf16, alpha auto, little host": f"{FOUR} --host_memory_gb=0.15"}
OF_THIS_RUN = "out_dir", "wandb_id"  # keys of config.json


def trained(keys, n):
    """(what must be the same of a run, what was measured) beside `n` busy processes."""
    with tempfile.TemporaryDirectory(prefix="memo-load-") as folder, busy(n):
        tree, out, start = Tree(ROOT, Path(folder) / "cache"), Path(folder) / "out", time.monotonic()
        del tree.env["OMP_NUM_THREADS"]  # as make train
        tree.output(f"train.py config/stdlib.py {keys} --lr_decay_iters=450 --out_dir={out}")
        seconds = time.monotonic() - start
        config, plan = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "plan"))
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = dict(alpha=plan["alpha"], rates=plan["rates"])
    arenas = [one["arena_bytes"] for one in plan["memory_plans"]]
    if plan["alpha_limits"] and "--alpha" not in keys:  # rates set alpha, and so how much is recomputed
        plan = plan["estimate"]
    same = dict(config={key: value for key, value in config.items() if key not in OF_THIS_RUN},
                plan=reproducible(plan), steps=[(row["loss"], row["grad_norm"]) for row in rows])
    return same, dict(measured, arena_bytes=arenas, s=seconds)


def compared(name):
    """One run, idle and busy."""
    (same, idle), (other, busy) = (trained(RUNS[name], n) for n in (0, BUSY))
    difference, steps = first_difference(same, other), len(same["steps"])
    print(f"{name}: {difference or 'same'}, {steps} steps; {idle['s']:.0f} s idle, {busy['s']:.0f} s busy",
          flush=True)
    return dict(keys=RUNS[name], differs=difference, steps=steps, last_loss=same["steps"][-1][0], idle=idle,
                busy=busy)


def main():
    found = {name: compared(name) for name in sys.argv[1:] or RUNS}
    if not sys.argv[1:]:
        save_json(dict(machine=machine(), busy_processes=BUSY, runs=found),
                  ROOT / "bench/results/under_load.json")
    sys.exit(any(row["differs"] for row in found.values()))


if __name__ == "__main__":
    main()
