"""Do the loss curves of all layouts coincide?

    python -m bench.parallel_convergence [--max_iters=200]

Trains the same small model on the stdlib data (python data/stdlib/prepare.py makes it) as one process and,
under torchrun, in several layouts over gloo. Writes bench/results/parallel_convergence.json and .png.
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
             eval_iters=4, save_interval=0)
RUNS = {"one process": (1, {}), "tp2": (2, dict(tp=2)), "cp2": (2, dict(cp=2)),
        "cp2 ulysses": (2, dict(cp=2, context_parallel="ulysses")), "tp2 cp2": (4, dict(tp=2, cp=2)),
        "dp2": (2, {}), "metp tp2": (2, dict(tp=2, tensor_parallel="metp")),
        "metp tp2 cp2": (4, dict(tp=2, cp=2, tensor_parallel="metp"))}


def train(ranks, keys):
    launcher = (["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                if ranks > 1 else [])
    subprocess.run([sys.executable, *launcher, "train.py", *(f"--{k}={v}" for k, v in keys.items())],
                   cwd=ROOT, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_iters", type=int, default=200)
    iters = parser.parse_args().max_iters
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, keys) in RUNS.items():
            out = Path(folder) / name.replace(" ", "_")
            train(ranks, MODEL | keys | dict(max_iters=iters, out_dir=out))
            curves[name] = curve(out, "sent_bytes")
    alone = curves["one process"]["loss"]
    rows = [dict(layout=name, ranks=RUNS[name][0],
                 largest_difference=max(abs(a - b) for a, b in zip(c["loss"], alone, strict=True)),
                 losses_compared=len(alone), loss=c["loss"], val_loss=c["val_loss"],
                 sent_bytes=c["sent_bytes"])
            for name, c in curves.items()]
    results = Path(__file__).parent / "results"
    result = dict(machine=machine(), model=MODEL, iterations=iters, rows=rows)
    (results / "parallel_convergence.json").write_text(json.dumps(result, indent=1) + "\n")
    labels = {n: f"validation {c['val_loss'][-1]:.5f}" for n, c in curves.items()}
    title = f"memo on the stdlib data, 4 layers, context 2,048: {len(curves)} layouts, one curve"
    plot(curves, labels, "one process", 1e-3, title, results / "parallel_convergence.png")
    for r in rows:
        print(f"{r['layout']:12} largest difference to one process {r['largest_difference']:.1e}, "
              f"validation loss {r['val_loss'][-1]:.6f}")


if __name__ == "__main__":
    main()
