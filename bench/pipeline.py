"""Does a pipeline fed with subsequences train as one process does, and how fast is it on the CPU?

    python -m bench.pipeline [--max_iters=200]

Trains the same small model on the stdlib data (python data/stdlib/prepare.py makes it) as one process and,
under torchrun, in two and in four stages. Then it times a larger one on two ranks, as two stages, dp2 and
tp2, in turns; gloo's messages take the cores' time. At last it measures the bubble where units sleep equally
long in the place of computing. Writes bench/results/pipeline.json and .png.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, median

from bench.machine import machine
from bench.parallel_convergence import MODEL, train
from bench.swap_convergence import curve, plot
from memo.config.layout import Layout
from memo.run.loggers import read_metrics
from memo.schedule.spans import busy_s, length_s
from testing.ranks import pool
from testing.stages import slept

ORDER = dict(subsequence_cut="flops", unit_order="subsequence")
WHOLE = dict(subsequences=1)
CURVES = {"one process": (1, WHOLE), "pp2, 4 subsequences": (2, dict(pp=2, subsequences=4, **ORDER)),
          "pp4, 8 subsequences": (4, dict(pp=4, subsequences=8, **ORDER))}
TIMED = dict(n_layer=4, n_head=4, n_embd=256, block_size=4096, gradient_accumulation_steps=2,
             dataset="stdlib", activation="keep", device="cpu", warmup_iters=2, eval_interval=0,
             save_interval=0, max_iters=6)
LAYOUTS = {"pp2, 4 subsequences": dict(pp=2, subsequences=4, **ORDER),
           "pp2, 8 subsequences": dict(pp=2, subsequences=8, **ORDER), "dp2": WHOLE,
           "tp2": WHOLE | dict(tp=2)}
TIMES = 2
PIPELINES = (2, 4), (3, 4), (4, 8), (4, 16)  # stages, subsequences
FORWARD_S = 0.1  # that a unit sleeps; twice as long in the backward


def curves(folder, iters):
    """{name: losses} of CURVES."""
    made = {}
    for name, (ranks, keys) in CURVES.items():
        train(ranks, MODEL | keys | dict(max_iters=iters, out_dir=folder / name))
        made[name] = curve(folder / name, "sent_bytes")
    return made


def seconds(folder):
    """{layout: [median seconds of a step, of each run]}; a run's first two steps do not count."""
    made = {name: [] for name in LAYOUTS}
    for i in range(TIMES):
        for name, keys in LAYOUTS.items():
            out = folder / f"{name} {i}"
            train(2, TIMED | keys | dict(out_dir=out))
            made[name].append(median(r["step_s"] for r in read_metrics(out / "metrics.jsonl")[2:]))
    return made


def bubbles():
    """Of PIPELINES the bubble over the seconds of computing, and what SPPO's formula says."""
    rows = []
    for p, N in PIPELINES:
        cfg = Layout(n_layer=p, n_head=4, n_embd=64, vocab_size=150, block_size=128 * N, pp=p, subsequences=N,
                     unit_order="subsequence", subsequence_cut="equal", activation="keep")
        found = pool(p).run(slept, cfg, FORWARD_S, 2)  # connections are made in the first pass
        computing = mean(map(busy_s, found))
        bubble = max(map(length_s, found)) - computing
        rows.append(dict(pp=p, subsequences=N, bubble=bubble / computing, formula=(p - 1) / N))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_iters", type=int, default=200)
    iters, path = parser.parse_args().max_iters, Path(__file__).parent / "results/pipeline.json"
    with tempfile.TemporaryDirectory() as folder:
        trained, timed, slow = curves(Path(folder), iters), seconds(Path(folder)), bubbles()
    alone, tokens = trained["one process"]["loss"], TIMED["block_size"] * TIMED["gradient_accumulation_steps"]
    rows = [dict(layout=name, ranks=CURVES[name][0], losses_compared=len(alone), largest_difference=max(
        abs(a - b) for a, b in zip(c["loss"], alone, strict=True)), **c) for name, c in trained.items()]
    times = [dict(layout=name, ranks=2, step_s=s, tokens_per_s=tokens / min(s)) for name, s in timed.items()]
    result = dict(machine=machine(), model=MODEL, iterations=iters, rows=rows, timed_model=TIMED, times=times,
                  forward_s=FORWARD_S, bubbles=slow)
    path.write_text(json.dumps(result, indent=1) + "\n")
    labels = {name: f"validation {c['val_loss'][-1]:.5f}" for name, c in trained.items()}
    title = f"memo on the stdlib data, 4 layers, context 2,048: {len(trained)} runs, one curve"
    plot(trained, labels, "one process", 1e-4, title, path.with_suffix(".png"))
    for row in rows:
        print(f"{row['layout']:20} largest difference to one process {row['largest_difference']:.1e}, "
              f"validation loss {row['val_loss'][-1]:.6f}")
    for row in times:
        print(f"{row['layout']:20} {row['tokens_per_s']:,.0f} tokens/s on two cores, steps of "
              f"{', '.join(f'{s:.2f}' for s in row['step_s'])} s")
    for row in slow:
        print("pp{pp}, {subsequences} subsequences: bubble {bubble:.1%} of the computing, (pp-1)/N is "
              "{formula:.1%}".format(**row))


if __name__ == "__main__":
    main()
