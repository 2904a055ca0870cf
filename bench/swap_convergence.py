"""Do the loss curves of swapping and recomputing coincide with those of keeping everything?

    python -m bench.swap_convergence [--max_iters=1000]

Trains the same small model on the stdlib data (python data/stdlib/prepare.py makes it) with activation=keep,
recompute and memo at several alphas. Writes bench/results/swap_convergence.json and .png.
"""

import argparse
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import train
from bench.machine import machine
from memo.plots.figures import plain, smooth
from memo.run.loggers import read_metrics

MODEL = dict(n_layer=4, n_head=1, n_embd=64, block_size=2048, batch_size=1, dataset="stdlib", device="cpu",
             learning_rate=2e-3, warmup_iters=20, eval_interval=100, eval_iters=4, save_interval=0)
RUNS = {"keep": dict(activation="keep"), "recompute": dict(activation="recompute"),
        **{f"alpha {a}": dict(activation="memo", alpha=a) for a in (0, 0.25, 0.5, 1)}}


def curve(out, *last):
    """Losses of the run in `out`, and what its last line says of these keys."""
    rows = read_metrics(out / "metrics.jsonl")
    losses = dict(loss=[r["loss"] for r in rows], val_loss=[r["val_loss"] for r in rows if "val_loss" in r])
    return losses | {key: rows[-1][key] for key in last}


def plot(curves, labels, first, limit, title, path):
    """Smoothed losses of runs that should be one curve, above their differences to the run `first`."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), dpi=130, sharex=True, height_ratios=(3, 1),
                                      layout="constrained")
    for i, (name, c) in enumerate(curves.items()):
        top.plot(smooth(c["loss"]), label=f"{name}: {labels[name]}", lw=9 - 8 * i / len(curves), alpha=0.7)
        bottom.plot([a - b for a, b in zip(c["loss"], curves[first]["loss"], strict=True)], lw=1, alpha=0.7)
    top.set(ylabel="training loss, smoothed", title=title)
    top.legend(frameon=False)
    bottom.set(ylabel=f"loss minus\n{first}'s", xlabel="step", ylim=(-limit, limit))
    for ax in (top, bottom):
        plain(ax)
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_iters", type=int, default=1000)
    iters = parser.parse_args().max_iters
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in RUNS.items():
            out = Path(folder) / name.replace(" ", "_")
            train.main([f"--{k}={v}" for k, v in (MODEL | keys | dict(max_iters=iters, out_dir=out)).items()])
            curves[name] = curve(out, "host_bytes", "alpha")
    keep = curves["keep"]["loss"]
    rows = [dict(run=name, largest_difference=max(abs(a - b) for a, b in zip(c["loss"], keep, strict=True)),
                 losses_compared=len(c["loss"]), alpha=c["alpha"],
                 host_bytes=c["host_bytes"], last_loss=c["loss"][-1], val_loss=c["val_loss"])
            for name, c in curves.items()]
    results = Path(__file__).parent / "results"
    result = dict(machine=machine(), model=MODEL, iterations=iters, rows=rows)
    (results / "swap_convergence.json").write_text(json.dumps(result, indent=1) + "\n")
    labels = {n: f"validation {c['val_loss'][-1]:.4f}, host {c['host_bytes'] / 2**20:.0f} MiB"
              for n, c in curves.items()}
    plot(curves, labels, "keep", 1e-6,
         "memo on the stdlib data, 4 layers, context 2,048: six runs, one curve",
         results / "swap_convergence.png")
    for r in rows:
        print(f"{r['run']:12} largest difference to keep {r['largest_difference']:.1e}, "
              f"validation loss {r['val_loss'][-1]:.6f}")


if __name__ == "__main__":
    main()
