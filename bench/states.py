"""Where a model's states live: what fits that did not, what it costs, and how little the device holds.

    python -m bench.states targets    dry runs: the longest contexts of large models with states=device,
                                      sharded and host, and the fastest layout at a context asked for
    python -m bench.states overlap    states=host on the CPU at artificial copy rates: seconds of a step and
                                      max(compute, copies); the picture of one step and the next forward
    python -m bench.states limit      50 steps of a model whose states are 4 times an artificial device limit
    python -m bench.states races      the streams' work in 200 random orders; and without any of the waits

Several of these at once; without an argument all. Writes bench/results/states.json, states.png and
states_timeline.png.

overlap: one thread computes, in fp32; every copy between device and host takes as long as its bytes over the
rate, on each of the two streams. At the rates a layer's parameters take RATIOS times as long to come as its
forward takes to compute. Compute is that of steps with states=device, without the optimizer's; those of
states=host are whole steps, with the norm, the host's AdamW and all copies. The places take turns; figures
are the least of all rounds.

limit: torch's allocator events count what a run with states=host has on the device: all of this process's
tensors but the host's, which are the optimizer's states and page-locked blocks. No thread copies meanwhile,
so that no event is missed; losses are compared with those of states=device on the usual streams.

races: as in tests/test_swap.py, on the CPU: a small model's copies, computing and steps of states in an order
that is random but for their waits; losses and gradients must have the bits of states=device.
"""

import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile

from bench.machine import store_parts
from bench.state_targets import targets
from memo.config.layout import Layout
from memo.decide.where import Room, place_rows, problem_of
from memo.memory.buffers import copy_bytes
from memo.memory.slab import HostSlab
from memo.plots.figures import BLUE, GREEN, GREY, plain, timeline
from memo.schedule.streams import CpuStream, Streams, Timeline, open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights
from testing.turns import RACES, WAITS, Racing

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"

# --- real steps on the CPU ---

class Steps:
    """A model with its states in a place, and steps of it."""

    def __init__(self, cfg, dtype, streams=None):
        self.cfg, self.streams = cfg, streams or open_streams(CPU)
        self.model = Model(GPT, cfg, CPU, dtype)
        self.optimizer = Optimizer(self.model, cfg)

    def load(self):
        self.optimizer.load(initial_weights(self.cfg, 0, CPU))
        nothing = problem_of(self.cfg, self.model.dtype.itemsize, None, Room(2**50, cpu=True))
        self.model.reserve(1, self.cfg.block_size, place_rows(self.cfg, nothing)[0], streams=self.streams)

    def step(self, batch, lr):
        """(seconds up to the norm, seconds in all, loss and norm), the loss before the step."""
        start = time.perf_counter()
        loss = self.model.forward(*batch, scale=1.0)
        self.model.backward(last=True)
        norm = self.optimizer.clip(self.cfg.grad_clip)
        middle = time.perf_counter()
        self.optimizer.step(lr)
        return middle - start, time.perf_counter() - start, (loss.item(), norm.item())


# --- overlap ---

SHAPE = dict(n_layer=12, n_head=6, n_embd=384, vocab_size=256, block_size=768, dtype="float32")
RATIOS = 0.3, 0.6, 0.9, 2.0
WIDE = SHAPE | dict(n_layer=8, n_embd=768, n_head=12, block_size=192)  # of the picture: AdamW takes longer


@contextmanager
def link(bytes_per_s):
    """Copies between device and host take as long as their bytes over the rate."""
    def paced(copy, nbytes_of):
        def call(*args):
            end = time.perf_counter() + nbytes_of(*args) / bytes_per_s
            copy(*args)
            time.sleep(max(0.0, end - time.perf_counter()))
        return call
    pairs = paced(copy_bytes, lambda pairs: sum(there.nbytes for there, _ in pairs))
    one = paced(HostSlab.copy, lambda slab, to, source: to.nbytes)
    with patch("memo.memory.buffers.copy_bytes", pairs), patch.object(HostSlab, "copy", one):
        yield


def layer_seconds_of(spans):
    """{pass: [seconds of each layer]}."""
    found = {"forward": [], "backward": []}
    for span in spans:
        kind, _, layer = span.label.partition(" ")
        if span.stream == "compute" and span.kind == "launch" and kind in found and layer.isdigit():
            found[kind].append(span.end_s - span.start_s)
    return found


def overlap(rounds):
    torch.set_num_threads(1)
    batch = torch.randint(0, SHAPE["vocab_size"], (2, 1, SHAPE["block_size"]))
    rows = []
    for mode in ("keep", "swap"):
        device, host = (Steps(Layout(**SHAPE, activation=activation, states=where), torch.float32)
                        for activation, where in (("keep", "device"), (mode, "host")))
        for one in (device, host):
            one.load()
            one.step(batch, 0.0)  # warms up
        start, end = host.model.buckets[1]
        weights = 4 * (end - start)  # as many as its gradients: both fp32
        swapped = host.model.swap.host_bytes // (SHAPE["n_layer"] - 2)
        device.streams.timeline.clear()
        device.step(batch, 0.0)
        forward_s = median(layer_seconds_of(device.streams.timeline.take())["forward"])
        for ratio in RATIOS:
            rate = max(weights, swapped) / (ratio * forward_s)
            w, x, seen = weights / rate, swapped / rate, dict(compute=[], step=[], expected=[], optimizer=[])
            for _ in range(rounds):
                device.streams.timeline.clear()
                compute, whole, _ = device.step(batch, 0.0)
                layer = layer_seconds_of(device.streams.timeline.take())
                copies = dict(forward=max(w, x), backward=max(w + x, w))
                beyond = sum(max(0.0, copies[kind] - t) for kind, times in layer.items() for t in times)
                with link(rate):
                    host.step(batch, 0.0)  # what is under way behind it is that of a step like the next
                    step = min(host.step(batch, 0.0)[1] for _ in range(2))
                for name, value in dict(compute=compute, step=step, expected=compute + beyond,
                                        optimizer=whole - compute).items():
                    seen[name].append(value)
            row = {f"{name}_s": min(values) for name, values in seen.items()}
            row |= dict(activation=mode, copy_over_forward=ratio, bytes_per_s=rate, weights_bytes=weights,
                        swapped_bytes=swapped, copies_s=SHAPE["n_layer"] * (3 * w + 2 * x),
                        over_max=row["step_s"] / row["expected_s"],
                        over_sum=row["step_s"] / (row["compute_s"] + row["optimizer_s"]
                                                  + SHAPE["n_layer"] * (3 * w + 2 * x)))
            rows.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        for one in (device, host):
            one.model.close()
    picture()
    return dict(shape=SHAPE, rows=rows)


def picture():
    """A backward, the optimizer's steps, and the next forward."""
    host, batch = Steps(Layout(**WIDE, activation="keep", states="host"), torch.float32), torch.randint(
        0, WIDE["vocab_size"], (2, 1, WIDE["block_size"]))
    host.load()
    for _ in range(2):
        host.streams.timeline.clear()
        host.step(batch, 0.0)
    forward_s = median(layer_seconds_of(host.streams.timeline.take())["forward"])
    start, end = host.model.buckets[1]
    model, optimizer = host.model, host.optimizer
    with link(4 * (end - start) / (0.6 * forward_s)), tempfile.TemporaryDirectory() as folder:
        model.forward(*batch, scale=1.0)
        host.streams.timeline.clear()
        model.backward(last=True)
        optimizer.clip(host.cfg.grad_clip)
        optimizer.step(0.0)
        model.forward(*batch, scale=1.0)
        timeline(host.streams.timeline.take(), Path(folder) / "timeline.json",
                 RESULTS / "states_timeline.png", "states=host: backward, the host's AdamW, the next forward")
        model.close()


def draw_overlap(rows, path):
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), dpi=130, layout="constrained", sharey=True)
    for ax, mode in zip(axes, ("keep", "swap"), strict=True):
        mine = [row for row in rows if row["activation"] == mode]
        x = [row["copy_over_forward"] for row in mine]
        for key, label, colour, style in (("step_s", "states=host, whole step", BLUE, "o-"),
                                          ("expected_s", "max(compute, copies)", GREEN, "--"),
                                          ("compute_s", "compute alone", GREY, ":")):
            ax.plot(x, [row[key] for row in mine], style, color=colour, label=label)
        ax.set(xlabel="a layer's copies over its forward", title=f"activation={mode}")
        plain(ax)
    axes[0].set(ylabel="seconds of a step", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(path)
    plt.close(fig)


# --- an artificial limit ---

SMALL = dict(n_layer=24, n_head=4, n_embd=128, vocab_size=256, block_size=256, activation="swap",
             grad_clip=1.0)
STEPS, OVER_LIMIT = 50, 4


def batches():
    """Windows of this repository's own train.py, byte by byte."""
    text = torch.tensor(list((RESULTS.parents[1] / "train.py").read_bytes()))
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        at = int(torch.randint(len(text) - SMALL["block_size"], (), generator=random))
        window = text[at:at + SMALL["block_size"] + 1][None]
        yield window[:, :-1], window[:, 1:]


class Counted:
    """Bytes that torch has allocated in this thread: `held`, and the most of all times."""

    def __init__(self):
        self.held = self.peak = 0

    def during(self, call, *args):
        """call(*args), its allocations and frees counted."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            result = call(*args)
        for event in prof.profiler.kineto_results.events():
            if event.name() == "[memory]":
                self.held += event.nbytes()
                self.peak = max(self.peak, self.held)
        return result


def limit(_):
    torch.set_num_threads(1)
    cfg, dtype = Layout(**SMALL, states="device"), torch.bfloat16
    free = Steps(cfg, dtype)
    free.load()
    without = [free.step(batch, 1e-3)[2] for batch in batches()]
    states = sum(t.nbytes for t in (free.model.params, free.model.grads, *free.optimizer.states().values()))
    free.model.close()

    counted, times = Counted(), Timeline()
    by_itself = Streams(*(CpuStream(name, times, threaded=False)
                          for name in ("compute", "offload", "prefetch")), times,
                        {"optimizer": CpuStream("optimizer", times, threaded=False)})
    bound = counted.during(Steps, replace(cfg, states="host"), dtype, by_itself)
    counted.held -= sum(t.nbytes for t in bound.optimizer.states().values())  # the host's
    counted.peak = counted.held
    counted.during(bound.load)
    batch_by_batch = batches()
    within = [counted.during(lambda: bound.step(next(batch_by_batch), 1e-3)[2]) for _ in range(STEPS)]
    bound.model.close()
    most = states // OVER_LIMIT
    found = dict(shape=SMALL, dtype="bfloat16", parameters=free.model.buckets[-1][1], states_bytes=states,
                 limit_bytes=most, peak_bytes=counted.peak, fits=counted.peak <= most, steps=STEPS,
                 same_losses_and_norms=within == without, losses=[loss for loss, _ in within])
    print({k: v for k, v in found.items() if k != "losses"}, found["losses"][0], found["losses"][-1])
    return found


# --- races ---

SEEDS = 200


def races(_):
    """Of each race of states: seeds that gave other bits with all waits, and of each wait the first seed that
    did without it."""
    torch.set_num_threads(1)
    out = {}
    for race in (name for name in RACES if name.startswith("states")):
        racing = Racing(race)
        wrong = [seed for seed in range(SEEDS) if not racing.is_right(seed)]
        without = {wait: next((seed for seed in range(SEEDS) if not racing.is_right(seed, wait)), None)
                   for wait in WAITS[race]}
        out[race] = dict(seeds=SEEDS, wrong=wrong, first_wrong_without=without)
        print(race, out[race], flush=True)
        racing.model.close()
    return out


def main():
    found = store_parts(__doc__, RESULTS / "states.json", dict(targets=targets, overlap=overlap, limit=limit,
                                                                   races=races))
    if "overlap" in found:
        draw_overlap(found["overlap"]["rows"], RESULTS / "states.png")


if __name__ == "__main__":
    sys.exit(main())
