"""Do the copies hide behind compute, and is the alpha that is chosen the best one? On the CPU, with
artificial copy rates.

    python -m bench.swap_overlap [--rounds=2] [--steps=1]

The copies run on the CPU's streams, each slowed down to a given rate; everything else is real. Three rates:
at them a layer's whole skeletal activations take 1.5, 2.5 and 5 times as long to copy as the layer's forward
takes to compute. For every alpha on a grid of 1/8, and for what `alpha=auto` chooses from rates measured
through the same streams: seconds of forward and backward, beside the sum over the layers of max(compute,
copy), and of compute + copy. Compute is measured, layer by layer, in the same run with copies at full speed.
All figures are the least of the rounds. Writes bench/results/swap_overlap.json and .png.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bench.machine import machine
from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.decide.where import Room, place_rows, problem_of
from memo.memory.sizes import Sizes
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, plain
from memo.run import reserve
from memo.schedule.step import Moved, Op, Step, Unit
from memo.schedule.streams import CpuStream, Streams, Timeline
from memo.states.passes import Model
from model import GPT, initial_weights

CFG = Layout(n_layer=6, n_head=8, n_embd=1024, block_size=512, vocab_size=512, activation="memo")
COPY_OVER_FORWARD = (1.5, 2.5, 5.0)
GRID = [i / 8 for i in range(9)]


class Slow(CpuStream):
    """A copy stream of `bytes_per_s`; None does not slow it down."""

    bytes_per_s = None

    def launch(self, label, work, *args):
        super().launch(label, self.paced, work, *args)

    def paced(self, work, pairs):
        end = time.perf_counter() + (sum(d.nbytes for d, _ in pairs) / self.bytes_per_s
                                     if self.bytes_per_s else 0)
        work(pairs)
        time.sleep(max(0.0, end - time.perf_counter()))


def slow_streams():
    timeline = Timeline()
    return Streams(CpuStream("compute", timeline, threaded=False), Slow("offload", timeline),
                   Slow("prefetch", timeline), timeline)


class Bench:
    def __init__(self, steps):
        self.steps, self.streams = steps, slow_streams()
        self.model = Model(GPT, CFG, "cpu", torch.float32)
        self.model.load(initial_weights(CFG, 0, "cpu"))
        self.batch = torch.randint(0, CFG.vocab_size, (2, 1, CFG.block_size))

    def rate(self, bytes_per_s):
        self.streams.offload.bytes_per_s = self.streams.prefetch.bytes_per_s = bytes_per_s

    def chosen(self, mode):
        """What alpha=auto comes to at the present rate."""
        layer = sum(problem_of(CFG, 4, None, Room(0, cpu=True)).nbytes.values())
        enough = (CFG.n_layer - 1) * layer  # for what is swapped; all layers would stay on a CPU
        return reserve.reserve_activations(replace(CFG, alpha_mode=mode), self.model, enough,
                                          streams=self.streams)

    def run(self, p):
        """[(seconds, spans)] of the steps with placement `p`, after one that warms up."""
        self.model.reserve(1, CFG.block_size, p, streams=self.streams)
        out = []
        for _ in range(self.steps + 1):
            self.streams.timeline.clear()
            start = time.perf_counter()
            self.model.forward(*self.batch, scale=1.0)
            self.model.backward()
            out.append((time.perf_counter() - start, self.streams.timeline.take()))
        return out[1:]


def expected(spans, copy_s, layers):
    """(sum of max(compute, copy), sum of compute + copy) over the layers, both passes, where `spans` are of a
    step whose copies were fast; a layer's recompute belongs to its backward."""
    compute, other = {}, 0.0
    for s in spans:
        kind, _, layer = s.label.partition(" ")
        if s.stream == "compute" and s.kind == "launch":
            if layer.isdigit():
                key = (kind == "forward", int(layer))
                compute[key] = compute.get(key, 0.0) + s.end_s - s.start_s
            else:
                other += s.end_s - s.start_s
    # the copy of layer i runs beside the forward of layer i + 1, and beside the backward of layer i + 1 again
    beside = {(way, i + 1) for way in (True, False) for i in range(layers)}
    hidden = sum(max(t, copy_s * (key in beside)) for key, t in compute.items())
    return other + hidden, other + sum(compute.values()) + 2 * layers * copy_s


def measure(bench, bytes_per_s, rounds):
    """Rows of one rate: every alpha on the grid and both choices, taking turns."""
    bench.rate(bytes_per_s)
    nothing = problem_of(CFG, 4, None, Room(2**50, cpu=True))
    cases = {f"{a:.3f}": (a, place_rows(replace(CFG, alpha=a), nothing)[0]) for a in GRID}
    limits = {}
    for mode in ("paper", "per_tensor"):
        d = bench.chosen(mode)
        cases[mode], limits[mode] = (d.alpha, d.placement), d.swap_plan.limits
    tensors = tensors_of(CFG, 4)
    seen = {name: dict(step_s=[], hidden_s=[], sum_s=[]) for name in cases}
    for _ in range(rounds):
        for name, (_, p) in cases.items():
            copy_s = Sizes(p, tensors).moved(Step(Op.OFFLOAD, Unit(0, 0), Moved.ACTIVATIONS)) / bytes_per_s
            bench.rate(None)
            fast = min(bench.run(p), key=lambda r: r[0])[1]
            bench.rate(bytes_per_s)
            hidden, both = expected(fast, copy_s, CFG.n_layer - 2)
            seen[name]["step_s"].append(min(t for t, _ in bench.run(p)))
            seen[name]["hidden_s"].append(hidden)
            seen[name]["sum_s"].append(both)
    rows = []
    for name, (alpha, _) in cases.items():
        row = {k: min(v) for k, v in seen[name].items()}  # what else runs on these cores only adds
        rows.append(dict(case=name, alpha=alpha, **row, over_max=row["step_s"] / row["hidden_s"],
                         over_sum=row["step_s"] / row["sum_s"]))
    return rows, limits


def plot(results, path):
    fig, axes = plt.subplots(1, len(results), figsize=(13, 4), dpi=130, layout="constrained", sharey=True)
    for ax, r in zip(axes, results, strict=True):
        grid = r["rows"][:len(GRID)]
        for key, label, colour, style in (("step_s", "measured", BLUE, "o-"),
                                          ("sum_s", "sum of compute + copy", GREY, "--"),
                                          ("hidden_s", "sum of max(compute, copy)", GREEN, "--")):
            ax.plot(GRID, [row[key] for row in grid], style, color=colour, label=label)
        for row, marker in zip(r["rows"][len(GRID):], "sD", strict=True):
            ax.plot(row["alpha"], row["step_s"], marker, color=ORANGE, ms=9, label=f"auto, {row['case']}")
        ax.set(xlabel="alpha", title=f"a layer's copy takes {r['copy_over_forward']:g} forwards")
        plain(ax)
    axes[0].set(ylabel="seconds of forward and backward", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    bench = Bench(args.steps)
    forward_s = bench.chosen("paper").rates.forward_s
    whole = sum(t.nbytes for t in tensors_of(CFG, 4).values())
    results = []
    for ratio in COPY_OVER_FORWARD:
        bytes_per_s = whole / (ratio * forward_s)
        rows, limits = measure(bench, bytes_per_s, args.rounds)
        best = min(rows[:len(GRID)], key=lambda row: row["step_s"])
        results.append(dict(copy_over_forward=ratio, bytes_per_s=bytes_per_s, best_alpha=best["alpha"],
                            limits=limits, rows=rows))
        print(f"copy/forward {ratio}: best alpha on the grid {best['alpha']:.3f} ({best['step_s']:.3f} s); "
              f"limits {limits}")
        for row in rows:
            print(f"  {row['case']:>10} alpha {row['alpha']:.3f}: {row['step_s']:.3f} s, "
                  f"over max {row['over_max']:.2f}, over sum {row['over_sum']:.2f}", flush=True)
    out = Path(__file__).parent / "results" / "swap_overlap"
    result = dict(machine=machine(), L=CFG.n_layer, C=CFG.n_embd, S=CFG.block_size, forward_s=forward_s,
                  results=results)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plot(results, out.with_suffix(".png"))
    bench.model.close()


if __name__ == "__main__":
    main()
