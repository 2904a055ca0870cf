"""Is what memo decides the fastest? Steps on the CPU's streams with artificial copy rates, over a grid of the
number of subsequences, their cut, buffers, and alpha.

    python -m bench.decision [--rounds=3]

Two lengths, each at three rates: a layer's whole skeletal activations take 0.75, 1.5 and 3 times as long to
copy as its forward takes to compute with one subsequence. The device has room for the model, temporary
tensors and the activations of ROOM layers. The decision is that of a run on such a device: number, cut and
order from the estimate with measured speeds of kernels, buffers and rows from seconds of a layer's units,
measured at their lengths. Of the grid the schedule's simulator times, with the same seconds, all points that
fit; those that picked() names are run, as is the decision, in turns. The fastest of these are then run anew,
in turns with the decision, and these turns alone say how far it is from the best: of many that take equally
long, one has been lucky. Seconds are of forward and backward, the least of the turns.

Every step is computed. Its seconds are those of the streams' clocks: of compute what the one thread that
computes had of its core, which leaves out what else runs on the machine; of copies their bytes over the rate.
Kernels and units are measured by the same clock. Writes bench/results/decision.json.
"""

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from bench.machine import machine as machine_at_hand
from bench.swap_overlap import GRID
from memo.config.config import Config
from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.decide.choose import choose_subsequences
from memo.decide.step_seconds import step_seconds
from memo.decide.where import GAPS, Room, decide, place_rows, placed, problem_of, ways_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.memory.sizes import Sizes
from memo.run import reserve
from memo.run.measure import attentions, least_seconds, matmuls, row_passes
from memo.schedule.periods import totals_of
from memo.schedule.streams import CpuStream, Streams, Timeline
from memo.states.passes import Model
from memo.system import hardware
from memo.system.files import save_json
from model import GPT, initial_weights

CPU = torch.device("cpu")
RESULT = Path(__file__).parent / "results" / "decision.json"
SHAPE = dict(n_layer=4, n_head=4, n_embd=256, vocab_size=512, activation="memo", dtype="float32",
             states="device")
AUTO = dict(subsequences="auto", subsequence_cut="auto", unit_order="auto")
LENGTHS, COPY_OVER_FORWARD, LEAST = (2048, 4096), (0.75, 1.5, 3.0), 512
NUMBERS, BUFFERS, ROOM, HOST_BYTES = (1, 2, 4, 8), (2, 3), 1.25, 2**36
FASTEST, SPREAD, LAST, MORE = 5, 3, 3, 10  # points that are run; those that are run anew, and how often


def config_of(S, subsequences, cut="equal"):
    return Layout(**SHAPE, block_size=S, subsequences=subsequences, subsequence_cut=cut, unit_order="layer")


def activations(cfg, placement):
    """Bytes on the device."""
    return Sizes(placement, tensors_of(cfg, 4)).device_bytes


# --- a device with artificial figures ---

def measured_speeds(S):
    """Of attention at the lengths to choose from, causal and where all see all, of products and passes."""
    table, width = defaultdict(list), SHAPE["n_embd"] // SHAPE["n_head"]

    def note(jobs, size):
        for op, (call, amount) in jobs.items():
            call()  # untimed: libraries load
            table[op].append((size or amount, amount / least_seconds(CPU, call)))
    for n, causal in product(NUMBERS, (True, False)):
        note(attentions(S // n, width, torch.float32, CPU, "auto", causal), S // n)
    for size in (SHAPE["n_embd"], 2 * SHAPE["n_embd"]):  # of a matrix as large as the MLP's
        note(matmuls(size, 2**11, torch.float32, CPU), size)
    for nbytes in (2**19, 2**25):
        note(row_passes(nbytes, torch.float32, CPU), None)
    return hardware.Speeds(table | dict(memory=table["copy"], link=[(1, 1.0)], network=[(1, 1.0)]), 0.0, 4)


def measured_device(S):
    """A GPU as fast as this CPU, as if that were known of its type, with room for ROOM layers beside what one
    subsequence takes. Its copy rate is none yet."""
    node = replace(hardware.NODES["workstation"], host_memory_bytes=2 * HOST_BYTES)
    device = hardware.Machine("this CPU", node, 2**40, None, measured_speeds(S))
    one = config_of(S, 1)
    got = estimate(one, device, 1, arena_of)
    wanted = got.device_bytes - activations(one, got.placement) - device.memory_bytes // GAPS
    wanted += int(ROOM * sum(t.nbytes for t in tensors_of(one, 4).values()))
    return replace(device, memory_bytes=wanted * GAPS // (GAPS - 1))


def arena_of(cfg, device):
    """The bound of temporary tensors, with the kernels of a CPU."""
    return fast_arena(cfg, replace(device, memory_bytes=None))


def room_of(cfg, device):
    """The Room of a config with numbers."""
    got = estimate(cfg, device, 1, arena_of)
    return Room(HOST_BYTES, device.memory_bytes - got.device_bytes + activations(cfg, got.placement))


def measured_rates(cfg):
    """The Rates of a config with numbers, as a run measures them."""
    model = Model(GPT, cfg, CPU, torch.float32)
    layer = sum(t.nbytes for t in tensors_of(cfg, 4).values())
    rates = reserve.reserve_activations(cfg, model, (cfg.n_layer - 1) * layer).rates  # not all of them fit
    model.close()
    return rates


def at(rates, bytes_per_s):
    return replace(rates, offload_bytes_per_s=bytes_per_s, prefetch_bytes_per_s=bytes_per_s)


def simulated_s(cfg, placement, rates):
    """Seconds of all layers' forward and backward."""
    return sum(totals_of(placement.program, step_seconds(placement, tensors_of(cfg, 4), rates.units,
                                                rates.offload_bytes_per_s))[:2])


# --- what is run ---

class Clocked(CpuStream):
    """A stream whose work is done when it is launched, with a clock of its own, `now`. `bytes_per_s`: of
    copies; None: it computes."""

    def __init__(self, name, timeline, bytes_per_s=None):
        super().__init__(name, timeline, threaded=False)
        self.bytes_per_s, self.now = bytes_per_s, 0.0

    def launch(self, label, work, *args):
        start = time.thread_time()
        work(*args)
        seconds = time.thread_time() - start
        if self.bytes_per_s:
            seconds = sum(there.nbytes for there, _ in args[0]) / self.bytes_per_s
        self.now += seconds

    def record(self, event):
        event.mark = self.now

    def wait(self, event):
        self.now = max(self.now, event.mark or 0.0)


def clocked_streams(bytes_per_s):
    timeline = Timeline()
    return Streams(Clocked("compute", timeline), Clocked("offload", timeline, bytes_per_s),
                   Clocked("prefetch", timeline, bytes_per_s), timeline)


class Point:
    """Of the grid, or the decision."""

    def __init__(self, cfg, placement, rates, **named):
        self.cfg, self.placement, self.named, self.steps_s = cfg, placement, named, []
        self.simulated_s = simulated_s(cfg, placement, rates)

    def open(self, rate):
        self.streams, self.model = clocked_streams(rate), Model(GPT, self.cfg, CPU, torch.float32)
        self.model.load(initial_weights(self.cfg, 0, CPU))
        self.model.reserve(1, self.cfg.block_size, self.placement, streams=self.streams)

    def step(self, batch):
        """Adds the seconds of a forward and backward."""
        streams = self.streams[:3]
        begin = max(stream.now for stream in streams)
        for stream in streams:
            stream.now = begin
        self.model.forward(*batch, scale=1.0)
        self.model.backward()
        self.steps_s.append(max(stream.now for stream in streams) - begin)
        self.model.grads.zero_()

    def as_dict(self):
        p, cfg = self.placement, self.cfg
        return dict(subsequences=cfg.subsequences, cut=cfg.subsequence_cut, order=cfg.unit_order,
                    buffers=p.n_buffers, keys=p.keys, stream=p.stream, **self.named,
                    simulated_s=self.simulated_s, step_s=min(self.steps_s[1:]), steps_s=self.steps_s[1:])


def grid(S, device, measured, rate):
    """The points that fit, the fastest first as simulated; of the fates of keys and of the stream between
    layers the fastest, and of points whose rows are the same the first."""
    points = []
    for (N, cut), rates in measured.items():
        cfg, rates = config_of(S, N, cut), at(rates, rate)
        room, seen = room_of(cfg, device), []
        for n, alpha in product(BUFFERS, GRID):
            fixed, ways = replace(cfg, alpha=alpha), []
            for way in ways_of(cfg):
                problem = problem_of(fixed, 4, rates, room, **way)
                problem = replace(problem, placement=placed(cfg, n, **way))
                ways.append(place_rows(fixed, problem)[0])
            ways = [p for p in ways if activations(cfg, p) <= room.spare_bytes and (n, p.kept) not in seen]
            if ways:
                seen.append((n, ways[0].kept))
                points.append(min((Point(cfg, p, rates, alpha=alpha) for p in ways), key=simulated))
    return sorted(points, key=simulated)


def simulated(point):
    return point.simulated_s


def picked(points):
    """Those that are run: the fastest, the fastest of each number of subsequences and of each number of
    buffers, and some spread over the others."""
    of_kinds = [next((p for p in points if kind(p)), None) for kind in (
        *(lambda p, n=n: p.cfg.subsequences == n for n in NUMBERS),
        *(lambda p, n=n: p.placement.n_buffers == n for n in BUFFERS))]
    chosen = [*points[:FASTEST], *filter(None, of_kinds)]
    others = [p for p in points if p not in chosen]
    chosen += others[len(others) // (2 * SPREAD)::max(1, len(others) // SPREAD)][:SPREAD]
    return list(dict.fromkeys(chosen))


def decision(S, device, measured, rate):
    """The Point that memo takes, and why."""
    device = replace(device, node=replace(device.node, pcie_bytes_per_s=rate))
    one, why = choose_subsequences(Config(**SHAPE, **AUTO, block_size=S),
                                   lambda one: estimate(one, device, 1, arena_of).judged)
    key = (one.subsequences, one.subsequence_cut)
    rates = at(measured[key] if key in measured and one.unit_order == "layer" else measured_rates(one), rate)
    placement, plan, _ = decide(one, 4, rates, room_of(one, device))
    return Point(one, placement, rates, alpha=plan.alpha, binds=plan.binds, why=why)


def judge(S, device, measured, over, rounds):
    """The decision beside the grid at one rate."""
    whole = sum(t.nbytes for t in tensors_of(config_of(S, 1), 4).values())
    rate = whole / (over * measured[1, "equal"].forward_s)
    points, mine = grid(S, device, measured, rate), decision(S, device, measured, rate)
    run, batch = [mine, *picked(points)], torch.randint(0, SHAPE["vocab_size"], (2, 1, S))
    for point in run:
        point.open(rate)
    for _ in range(rounds + 1):  # the first warms up
        for point in run:
            point.step(batch)
    last = [mine, *sorted(run[1:], key=lambda point: min(point.steps_s[1:]))[:LAST]]
    for point in last:
        point.steps_s = [0.0]  # in the place of the one that warmed up
    for _ in range(MORE):
        for point in last:
            point.step(batch)
    for point in run:
        point.model.close()
    rows = [point.as_dict() for point in run]
    best = min((point.as_dict() for point in last[1:]), key=lambda row: row["step_s"])
    found = dict(S=S, copy_over_forward=over, bytes_per_s=rate, points=len(points), decision=rows[0],
                 best=best, over_best=rows[0]["step_s"] / best["step_s"],
                 simulated_over_best=mine.simulated_s / points[0].simulated_s, rows=rows[1:])
    print(f"S={S}, a layer's copy takes {over:g} forwards, {len(points)} points fit, {len(run) - 1} are run: "
          f"the decision takes {found['over_best']:.3f} of the best ({found['simulated_over_best']:.3f} "
          "simulated)")
    for name, row in (("decision", rows[0]), *(("", row) for row in rows[1:])):
        print(f"{name:9} N={row['subsequences']} {row['cut']:5} {row['order']:5} {row['buffers']} buffers "
              f"alpha {row['alpha']:.3f} {row['keys']:6} {row['stream']:6}: {row['step_s']:.3f} s, "
              f"simulated {row['simulated_s']:.3f}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for S in LENGTHS:
        with (patch("memo.decide.choose.LEAST_TOKENS", LEAST),  # a CPU's kernels are fast at fewer, too
              patch("memo.run.measure.time", SimpleNamespace(perf_counter=time.thread_time))):
            device = measured_device(S)
            measured = {(N, cut): measured_rates(config_of(S, N, cut))
                        for N in NUMBERS for cut in (("equal", "flops") if N > 1 else ("equal",))}
            results += [judge(S, device, measured, over, args.rounds) for over in COPY_OVER_FORWARD]
        save_json(dict(machine=machine_at_hand(), shape=SHAPE, room_layers=ROOM, results=results,
                       worst=max(r["over_best"] for r in results)), RESULT)


if __name__ == "__main__":
    sys.exit(main())
