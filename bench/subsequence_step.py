"""Device memory over one step with subsequences.

    python -m bench.subsequence_step [curve] [regions]

curve    subsequence by subsequence with nothing recomputed: bytes of activations on the device at the end of
         each subsequence, read from the copies of a run on the CPU, beside SPPO's recursion.
regions  what is in use of each region over a step of a run on the CPU, with 1 and with 16 subsequences.

Writes bench/results/subsequence_step.json and subsequence_step.png. A part that is not named keeps what the
file has.
"""

from pathlib import Path

import numpy as np
import torch

from bench.machine import store_parts
from memo.config.layout import Layout, subsequence_lengths
from memo.decide.where import placed
from memo.estimate.report import REGION_COLORS
from memo.planner.trace import requests_of
from memo.plots.figures import plain, planned_rectangles, pyplot
from memo.run.reserve import plan_memory
from memo.schedule.streams import open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights
from testing.sppo import on_device, recursion, reserved, sizes_of, spans_of, streams_at_last

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
MIB = 2**20


# --- the recursion ---

STAYS = dict(x=0.5, attn_out=0.25, q=0.75, fc1_out=0.5)


def curve(rounds):
    """The recursion beside runs: with buffers for the units of a subsequence and copies as late as the
    schedule allows; with copies as they come; with two buffers."""
    rows = []
    for cut in ("equal", "flops"):
        cfg = Layout(n_layer=4, n_head=4, n_embd=128, vocab_size=512, block_size=8192, subsequences=8,
                     subsequence_cut=cut, unit_order="subsequence", activation="swap")
        sizes, alphas = sizes_of(cfg, STAYS)
        row = dict(cut=cut, lengths=subsequence_lengths(cfg), alphas=alphas, sizes=sizes,
                   recursion=recursion(sizes, alphas))
        for name, n_buffers, streams in (("late copies", cfg.n_layer, streams_at_last()),
                                         ("copies as they come", cfg.n_layer, open_streams(CPU)),
                                         ("two buffers, late copies", 2, streams_at_last())):
            model = reserved(cfg, n_buffers, STAYS, streams)
            row[name] = on_device(model.swap, spans_of(model))
            buffers = model.swap.buffers
            row[f"{name}, allocated"] = sum(b.nbytes for name, b in buffers.items()
                                            if name not in ("keys", "key_gradients", "stream"))
            model.close()
        print(f"{cut}: M_max {max(row['recursion']) / MIB:.1f} MiB; of the recursion, "
              + "; ".join(f"{name} {max(row[name]) / max(row['recursion']):.3f}, allocated "
                          f"{row[f'{name}, allocated'] / max(row['recursion']):.3f}"
                          for name in ("late copies", "copies as they come", "two buffers, late copies")))
        print([a - b for a, b in zip(row["late copies"], row["recursion"], strict=True)])
        rows.append(row)
    return rows


# --- regions ---

REGIONS = {"states": "parameters, gradients, optimizer", "buffers": "rounding buffers",
           "keys": "keys and values", "key_gradients": "their gradients, fp32",
           "stream": "between two layers", "transient": "arena of temporary tensors"}
BINS = 1500


def of_buffers(swap, begin, end):
    """[(seconds, bytes more)] of the units' activations: from their forward until their copy has left, and
    from the begin of its return until their backward is done. `begin`, `end`: {label of a span: seconds}."""
    p, events = swap.placement, []
    for k, unit in enumerate(p.units):
        name = swap.name(unit)
        made = sum(getattr(swap.units[unit], name).nbytes for name in swap.tensors if name in swap.buffers)
        events += [(begin[f"forward {name}"], made), (end[f"backward {name}"], -made)]
        if k in p.program.copied:
            events += [(end[f"offload {name}"], -made), (begin[f"prefetch {name}"], made)]
    if not p.several:  # the last layer's output
        last, made = p.n_layer - 1, swap.x[-1].nbytes
        events += [(begin[f"forward {last}"], made), (end[f"backward {last}"], -made)]
    return events


def of_keys(swap, begin, end):
    """The same of ({region: events}) keys and values, their gradients, the stream."""
    p, found = swap.placement, dict[str, list](keys=[], key_gradients=[], stream=[])
    last = p.subsequences - 1
    for unit in p.units if p.several else ():
        (layer, i), name, tensors = unit, swap.name(unit), swap.units[unit]
        made, summed = (sum(t.nbytes for t in pieces[-1]) for pieces in (tensors.pieces, tensors.sums))
        done = end[f"backward {name}"]
        found["keys"] += [(begin[f"forward {name}"], made), (done, -made)]
        if f"offload keys {name}" in end:  # gone, and the layer's last unit has read them
            left = max(end[f"offload keys {name}"], end[f"forward {layer}.{last}"])
            found["keys"] += [(left, -made), (begin[f"prefetch keys {name}"], made)]
        found["key_gradients"] += [(begin[f"backward {layer}.{last}"], summed), (done, -summed)]
        if layer == 0:
            rows, done = swap.between[0][i].nbytes, end[f"embedding backward {name}"]
            found["stream"] += [(begin[f"embedding {name}"], rows), (done, -rows)]
    return found


def of_arena(trace, plan, begin, end):
    """The same of the arena's tensors, whose requests are spread evenly over the span of their segment."""
    at, seconds = [], []
    for segment, (first, stop) in requests_of(trace)[1].items():
        label = segment.rpartition("/")[2]
        if label in begin:
            at += [first, stop]
            seconds += [begin[label], end[label]]
    inside = [r for r in planned_rectangles(trace, plan) if r.stop <= at[-1]]  # behind it: an evaluation
    return [(np.interp(when, at, seconds), nbytes) for r in inside
            for when, nbytes in ((r.start, r.bytes), (r.stop, -r.bytes))]


def most_in_bins(events, length):
    """(BINS,): the most bytes in use in each part of `length` seconds."""
    events = sorted(events, key=lambda event: (event[0], event[1]))
    most, held, part = np.zeros(BINS), 0, 0
    for at, nbytes in events:
        now = min(BINS - 1, int(at / length * BINS))
        most[part + 1:now + 1] = held
        held, part = held + nbytes, now
        most[now] = max(most[now], held)
    most[part + 1:] = held
    return most


def step_regions(N, S=2**13):
    """(what a result says, {region: the most bytes in use in each part of the step})."""
    cfg = Layout(n_layer=4, n_head=4, n_embd=256, vocab_size=4096, block_size=S, subsequences=N,
                 activation="swap", device="cpu")
    model = Model(GPT, cfg, CPU, torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, CPU))
    model.reserve(1, S, placed(cfg, 2))
    plan_memory(cfg, model)
    spans_of(model, backward=True)  # warms up
    spans = [s for s in spans_of(model, backward=True) if s.kind == "launch"]
    begin, end = ({s.label: getattr(s, edge) for s in spans} for edge in ("start_s", "end_s"))
    length, swap = max(end.values()), model.swap
    events = dict(buffers=of_buffers(swap, begin, end), **of_keys(swap, begin, end),
                  transient=of_arena(*model.arena.plans[0], begin, end))
    states = model.params.nbytes + model.grads.nbytes + sum(
        t.nbytes for t in optimizer.states().values() if t is not model.params)
    allocated = dict.fromkeys(REGIONS, 0) | dict(states=states, transient=model.arena.stats().arena_bytes)
    for name, buffer in swap.buffers.items():
        allocated[name if name in REGIONS else "buffers"] += buffer.nbytes
    used = {name: most_in_bins(its, length) for name, its in events.items()}
    used["states"] = np.full(BINS, states)
    model.close()
    most = {name: int(used[name].max()) for name in REGIONS}
    return dict(N=N, S=S, seconds=length, allocated=allocated, most=most), used


def regions(rounds):
    """Regions over a step, with 1 and 16 subsequences, and their picture."""
    rows, used = zip(*(step_regions(N) for N in (1, 16)), strict=True)
    for row in rows:
        print(f"N={row['N']}: allocated {sum(row['allocated'].values()) / MIB:.0f} MiB, "
              + ", ".join(f"{name} {row['most'][name] / MIB:.1f} of {n / MIB:.1f}"
                          for name, n in row["allocated"].items()))
        assert all(row["most"][name] <= n for name, n in row["allocated"].items())
    plot(rows, used, RESULTS / "subsequence_step.png")
    return rows


def plot(rows, used, path):
    plt = pyplot()
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), dpi=130, layout="constrained", sharey=True)
    colours = [REGION_COLORS[{"states": "params", "buffers": "rounding_buffers"}.get(name, name)]
               for name in REGIONS]
    for ax, row, its in zip(axes, rows, used, strict=True):
        seconds = (np.arange(BINS) + 0.5) / BINS * row["seconds"]
        ax.stackplot(seconds, *(its[name] / MIB for name in REGIONS), labels=REGIONS.values(), colors=colours,
                     step="mid")
        whole = sum(row["allocated"].values()) / MIB
        ax.axhline(whole, color="black", ls="--", lw=1.2, label="allocated, once")
        ax.set(title=f"{row['N']} subsequence{'s' * (row['N'] > 1)} of {row['S'] // row['N']:,} tokens",
               xlabel="seconds", xlim=(0, row["seconds"]))
        plain(ax)
    axes[0].set_ylabel("device memory, MiB")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, ncols=4, frameon=False, loc="outside lower center")
    fig.suptitle(f"Forward and backward of one step, {rows[0]['S']:,} tokens, layer by layer: in use of each "
                 "region (a run on a CPU)")
    fig.savefig(path)


def main():
    store_parts(__doc__, RESULTS / "subsequence_step.json", dict(curve=curve, regions=regions))


if __name__ == "__main__":
    main()
