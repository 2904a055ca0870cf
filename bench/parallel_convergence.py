"""Do the loss curves of all layouts coincide?

    python -m bench.parallel_convergence ["tp2 cp2" ...] [--max_iters=200]

Trains the same small model on the stdlib data (python data/stdlib/prepare.py makes it) as one process and,
under torchrun, in several layouts over gloo; with several subsequences, too. Writes
bench/results/parallel_convergence.json and .png; a layout that is not named keeps what the file has.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import machine
from bench.swap_convergence import curve, plot

ROOT = Path(__file__).parents[1]
MODEL = dict(n_layer=4, n_head=4, n_embd=64, block_size=2048, batch_size=1, gradient_accumulation_steps=2,
             dataset="stdlib", device="cpu", alpha=0.5, learning_rate=1e-3, warmup_iters=20, eval_interval=50,
             eval_iters=4, save_interval=0, subsequence_cut="equal", unit_order="layer")
RUNS = {"one process": (1, {}), "tp2": (2, dict(tp=2)), "cp2": (2, dict(cp=2)),
        "cp2 ulysses": (2, dict(cp=2, context_parallel="ulysses")), "tp2 cp2": (4, dict(tp=2, cp=2)),
        "dp2": (2, {}), "metp tp2": (2, dict(tp=2, tensor_parallel="metp")),
        "metp tp2 cp2": (4, dict(tp=2, cp=2, tensor_parallel="metp")),
        "4 subsequences": (1, dict(subsequences=4)),
        "4 in order, flops": (1, dict(subsequences=4, unit_order="subsequence", subsequence_cut="flops")),
        "cp2, 4 subsequences": (2, dict(cp=2, subsequences=4))}


def train(ranks, keys):
    launcher = (["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                if ranks > 1 else [])
    subprocess.run([sys.executable, *launcher, "train.py", *(f"--{k}={v}" for k, v in keys.items())],
                   cwd=ROOT, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", choices=[[], *RUNS], default=[])
    parser.add_argument("--max_iters", type=int, default=200)
    args = parser.parse_args()
    path, curves = Path(__file__).parent / "results/parallel_convergence.json", {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.layouts or RUNS:
            ranks, keys = RUNS[name]
            out = Path(folder) / name.replace(" ", "_")
            train(ranks, MODEL | keys | dict(max_iters=args.max_iters, out_dir=out))
            curves[name] = curve(out, "sent_bytes")
    rows = {row["layout"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    alone = curves["one process"]["loss"] if "one process" in curves else rows["one process"]["loss"]
    for name, c in curves.items():
        difference = max(abs(a - b) for a, b in zip(c["loss"], alone, strict=True))
        rows[name] = dict(layout=name, ranks=RUNS[name][0], largest_difference=difference,
                          losses_compared=len(alone), **c)
        print(f"{name:12} largest difference to one process {difference:.1e}, "
              f"validation loss {c['val_loss'][-1]:.6f}")
    result = dict(machine=machine(), model=MODEL, iterations=args.max_iters, rows=list(rows.values()))
    path.write_text(json.dumps(result, indent=1) + "\n")
    drawn = {name: row for name, row in rows.items() if "loss" in row}
    labels = {name: f"validation {row['val_loss'][-1]:.5f}" for name, row in drawn.items()}
    title = f"memo on the stdlib data, 4 layers, context 2,048: {len(drawn)} layouts, one curve"
    plot(drawn, labels, "one process", 1e-3, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
