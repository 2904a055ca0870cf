"""The memory planner on the 7B model's step, traced without memory or GPU: every solver on a layer's forward
and backward and on the whole step, and the plan beside what torch's caching allocator would reserve for the
same requests.

    python -m bench.planner [--lengths=65536,...,1048576] [--solve=131072,1048576] [--time_limit=60]

Writes bench/results/planner.json, planner.png (reserved bytes against the length) and memory_plan.png (one
step, address against time). The allocator is simulated (research/caching.py), from the rules that torch
publishes.
"""

import argparse
import json
import random
import time
from pathlib import Path

import matplotlib
import torch

from bench.machine import machine
from memo.config.layer import layer_of
from memo.config.layout import Layout
from memo.dsa.problem import solve
from memo.memory.placement import Placement
from memo.planner.allocator import ALIGNMENT
from memo.planner.plan import plan_trace, problem_of
from memo.planner.trace import requests_of
from memo.plots.figures import BLUE, GREY, ORANGE, memory_plan
from memo.run.load_config import load_config
from memo.run.rehearsal import traced_requests
from memo.states.passes import Model
from model import GPT
from research.caching import SimulatedOutOfMemory, panel, simulate_caching

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SOLVERS = ("greedy", "mip", "cpsat", "auto")
ROOM = 1.05  # the device's room for temporary tensors over the planned bytes, to count reorganisations
STEPS = 12


def trace_of(S, L, alpha=0.5):
    """The Trace of the 7B model's step at S tokens with L layers, bf16."""
    keys = ["config/7b_1m.py", "--tp=1", "--cp=1", f"--block_size={S}", f"--n_layer={L}"]
    cfg = Layout.of(load_config(keys))
    placement = Placement(L, 2, S, {t.name: int(alpha * S) if t.group else S for t in layer_of(cfg).skeletal})
    return traced_requests(lambda device: Model(GPT, cfg, device, torch.bfloat16), 1, S,
                           [placement.missing(i) for i in range(L)])


def pairs(buffers):
    """Number of pairs whose lifespans overlap."""
    times = sorted([(b.upper, 0) for b in buffers] + [(b.lower, 1) for b in buffers])
    live = n = 0
    for _, starts in times:
        n += live if starts else 0
        live += 1 if starts else -1
    return n


def solve_pieces(S, time_limit):
    """Rows of every solver on a layer's forward and backward at S."""
    requests = [r for r in requests_of(trace_of(S, 1))[0] if r.planned]
    rows = []
    for kind in ("forward", "backward"):
        mine = [(r.lower, r.upper, r.bytes) for r in requests if r.segment.endswith(f"/{kind} 0")]
        problem = problem_of(mine, ALIGNMENT["cuda"])
        for solver in SOLVERS:
            s = solve(problem, solver, time_limit)
            rows.append(dict(S=S, piece=f"a layer's {kind}", n=len(mine), pairs=pairs(problem.buffers),
                             solver=solver, lower_bound=s.lower_bound, peak=s.peak, proven=s.proven,
                             seconds=s.seconds))
            show(rows[-1])
    return rows


def solve_steps(S, L, time_limit):
    """Rows of the whole step of L layers in two levels, by every solver, and in one."""
    start = time.perf_counter()
    trace = trace_of(S, L)
    tracing_s = time.perf_counter() - start
    requests = [r for r in requests_of(trace)[0] if r.planned]
    size = dict(n=len(requests), pairs=pairs(requests))
    rows = []
    for one_level, name, solvers in ((False, "two levels", SOLVERS), (True, "one level", ("greedy", "auto"))):
        for solver in solvers:
            plan = plan_trace(trace, solver, ALIGNMENT["cuda"], time_limit, one_level)
            rows.append(dict(S=S, piece=f"{L} layers, {name}", **size, solver=solver,
                             lower_bound=plan.lower_bound, peak=plan.arena_bytes, proven=plan.proven,
                             seconds=plan.seconds, tracing_s=tracing_s))
            show(rows[-1])
    return rows


def show(row):
    print(f"{row['S']:>8} {row['piece']:24}{row['n']:>7}{row['pairs']:>8} {row['solver']:8}"
          f"{row['lower_bound'] / 2**20:>13.1f}{row['peak'] / 2**20:>11.1f}  "
          f"{'yes' if row['proven'] else 'no ':6}{row['seconds']:8.2f}", flush=True)


def against_caching(lengths):
    """Rows of one length each, and of several: planned bytes, reserved bytes, reorganisations where room is
    scarce."""
    traces = {S: trace_of(S, 4) for S in lengths}  # a step's layers repeat: four show what 32 do
    plans = {S: plan_trace(trace, alignment=ALIGNMENT["cuda"]) for S, trace in traces.items()}
    mixed = random.Random(0).choices(sorted(lengths), k=STEPS)
    rows = []
    orders = [(f"{S:,}", [S] * 2) for S in lengths] + [("growing", sorted(lengths)), ("mixed", mixed)]
    for name, order in orders:
        planned = max(plans[S].arena_bytes for S in order)
        free, _ = simulate_caching([traces[S] for S in order], planned_only=True)
        try:
            tight, _ = simulate_caching([traces[S] for S in order], int(ROOM * planned), planned_only=True)
            reorganisations = tight.reorganisations
        except SimulatedOutOfMemory:
            reorganisations = "OOM"
        rows.append(dict(lengths=name, order=order, planned_bytes=planned,
                         reserved_bytes=free.peak_reserved_bytes, allocated_bytes=free.peak_allocated_bytes,
                         cuda_mallocs=len(free.history), reorganisations=reorganisations))
        print(f"{name:>10}{planned / 2**20:12.0f}{free.peak_reserved_bytes / 2**20:12.0f}"
              f"{free.peak_reserved_bytes / planned:8.2f}x{reorganisations!s:>8}", flush=True)
    S = min(lengths, key=lambda S: abs(S - 131072))
    memory_plan(traces[S], plans[S], RESULTS / "memory_plan.png", f"4 layers of the 7B model, {S:,} tokens",
                panel(traces[S], plans[S]))
    return rows


def picture(rows):
    fig, ax = plt.subplots(figsize=(9, 4.6), dpi=130, layout="constrained")
    names = [r["lengths"] for r in rows]
    for shift, key, colour, label in ((-0.2, "planned_bytes", BLUE, "planned"),
                                      (0.2, "reserved_bytes", ORANGE,
                                       "reserved by torch's caching allocator (simulated)")):
        bars = ax.bar([i + shift for i in range(len(rows))], [r[key] / 2**30 for r in rows], 0.38,
                      color=colour, label=label)
    for bar, row in zip(bars, rows, strict=True):
        ax.annotate(f"{row['reserved_bytes'] / row['planned_bytes']:.2f}x",
                    (bar.get_x() + 0.19, bar.get_height()), ha="center", va="bottom", fontsize=9, color=GREY)
    ax.set(xticks=range(len(rows)), xticklabels=names, ylabel="GiB",
           xlabel="tokens in a sequence, or several lengths in turns",
           title="temporary tensors of a step of the 7B model")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(RESULTS / "planner.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="65536,98304,131072,196608,262144,524288,1048576")
    parser.add_argument("--solve", default="131072,1048576")
    parser.add_argument("--time_limit", type=float, default=60.0)
    args = parser.parse_args()
    solved = []
    print(f"{'S':>8} {'what':24}{'n':>7}{'pairs':>8} {'solver':8}{'lower bound':>13}{'peak':>11}"
          f"  proven{'s':>8}   (MiB)")
    for S in map(int, filter(None, args.solve.split(","))):
        solved += solve_pieces(S, args.time_limit)
        for L in (32, 80):
            solved += solve_steps(S, L, args.time_limit)
    print(f"{'lengths':>10}{'planned':>12}{'reserved':>12}{'':9}{'reorg.':>8}"
          f"   (MiB; reorganisations with {ROOM}x planned)")
    compared = against_caching([int(S) for S in args.lengths.split(",")])
    picture(compared)
    rows = dict(machine=machine(), room=ROOM, solvers=solved, against_caching=compared)
    (RESULTS / "planner.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
