"""Pictures of a run."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memo.axes import Axes, Figure
from memo.estimate.budget import Estimate
from memo.files import replacing, save_bytes
from memo.planner.caching import Rectangle, planned_rectangles, segment_kind, simulate_caching
from memo.planner.plan import Plan
from memo.planner.trace import Trace, requests_of

BLUE, ORANGE, GREY, RED, GREEN, PALE = "#2563a8", "#d9730d", "#8a8f98", "#c8102e", "#2e8b57", "#7fb2e5"
KINDS = {"forward": PALE, "recompute": ORANGE, "sweep": ORANGE, "backward": BLUE, "offload": GREEN,
         "prefetch": GREEN, "gradients": GREEN, "stall": RED}
STREAMS = ("compute", "offload", "prefetch", "send", "receive")  # the last two of stages


def pyplot() -> Any:
    """matplotlib.pyplot, which takes a second to import: only when there is a picture to draw."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def plain(ax: Any) -> None:
    """A pale grid, and no frame above and on the right."""
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)


def store(fig: Figure, path: str | Path) -> None:
    """Write a figure, as replacing() does."""
    try:
        with replacing(path) as file:
            fig.savefig(file, format=Path(path).suffix.removeprefix(".") or "png")
    finally:
        pyplot().close(fig)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Each value replaced by that of a straight line fitted to its neighbours: on either side a quarter as
    many as there are values before it, 2 to 50. So the curve does not lag where values fall, and is smoother
    where they hardly change."""
    v = np.asarray(values, dtype=float)
    i = np.arange(len(v))
    half = np.clip(i // 4, 2, 50)
    first, end = np.maximum(0, i - half), np.minimum(len(v), i + half + 1)

    def window(x: np.ndarray) -> np.ndarray:  # sums of x from `first` to `end`
        total = np.concatenate(([0.0], np.cumsum(x)))
        return total[end] - total[first]
    n, sum_j, sum_jj, sum_v, sum_jv = end - first, window(i), window(i * i), window(v), window(i * v)
    spread = n * sum_jj - sum_j**2
    slope = np.where(spread > 0, n * sum_jv - sum_j * sum_v, 0) / np.maximum(spread, 1)
    return (sum_v + slope * (n * i - sum_j)) / n


def loss_curve(rows: list[dict], png_path: str | Path, title: str, vocab_size: int) -> None:
    """Loss, validation loss and tokens/s of the `rows` of a metrics.jsonl against the steps, as a PNG."""
    steps = [r["iter"] for r in rows]
    losses = [r["loss"] for r in rows]
    plt = pyplot()
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.5), dpi=130, sharex=True, height_ratios=(4, 1),
                                      layout="constrained")
    guess = math.log(vocab_size)
    top.axhline(guess, color=GREY, ls=":", lw=1.2)
    top.annotate(f"ln V = {guess:.2f}, knowing nothing", (1, guess), xycoords=("axes fraction", "data"),
                 xytext=(-4, -4), textcoords="offset points", ha="right", va="top", color=GREY, fontsize=9)
    top.plot(steps, losses, color=BLUE, alpha=0.25, lw=1)
    smoothed = smooth(losses)
    top.plot(steps, smoothed, color=BLUE, lw=2, label=f"train (smoothed), last {smoothed[-1]:.3f}")
    val = [(r["iter"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    if val:
        top.plot(*zip(*val, strict=True), "o-", color=ORANGE, lw=1.5, ms=5,
                 label=f"validation, last {val[-1][1]:.3f}")
    top.set(ylabel="loss (nats per token)", title=title.replace("$", r"\$"))
    top.legend(frameon=False, loc="center right")
    bottom.plot(steps, [r["tgs"] for r in rows], color=BLUE, lw=1)
    bottom.set(xlabel=f"step ({rows[-1]['tokens']:,} tokens each)", ylabel="tokens/s/device", ylim=(0, None))
    for ax in (top, bottom):
        plain(ax)
    store(fig, png_path)


def timeline(spans: list, json_path: Path, png_path: str | Path, title: str) -> None:
    """Draw one step's spans (memo/schedule/streams.py), layer by layer: as a Chrome trace, which Perfetto
    opens, and as a PNG with a row for each stream that has some. Red is the time that the compute stream
    waited for copies."""
    shown = [s for s in spans if s.kind == "launch" or (s.stream == "compute" and s.kind == "wait")]
    streams = {s.stream for s in shown}
    rows = [*(s for s in STREAMS if s in streams), *sorted(streams - {*STREAMS})]
    others = streams - {*STREAMS[:3]}
    steps = "optimizer" in others  # which a thread of the host takes
    events = [dict(name="thread_name", ph="M", pid=0, tid=i, args=dict(name=row))
              for i, row in enumerate(rows)]
    events += [dict(name=s.label if s.kind == "launch" else f"stall: {s.label}", cat=s.kind, ph="X", pid=0,
                    tid=rows.index(s.stream), ts=s.start_s * 1e6, dur=(s.end_s - s.start_s) * 1e6)
               for s in shown]
    save_bytes(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")).encode() + b"\n", json_path)
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(12, 1.7 + len(rows) / 2), dpi=130, layout="constrained")
    length = max(s.end_s for s in shown)
    for s in shown:
        work, _, unit = s.label.rpartition(" ")
        colour = KINDS.get("stall" if s.kind == "wait" else work.partition(" ")[0], GREY)
        y, width = -rows.index(s.stream), s.end_s - s.start_s
        ax.broken_barh([(s.start_s, width)], (y - 0.4, 0.8), facecolors=colour, edgecolor="white", lw=0.4)
        named = work in KINDS and s.kind == "launch"
        if named and width > 0.004 * max(3, len(unit)) * length:
            ax.text(s.start_s + width / 2, y, unit, ha="center", va="center", fontsize=8,
                    color="black" if work == "forward" else "white")
    stall = sum(s.end_s - s.start_s for s in shown if s.kind == "wait")
    colours = (PALE, ORANGE, BLUE, GREEN, RED, GREY)
    names = ("forward", "recompute", "backward", "copy", f"stall, {stall * 1e3:.1f} ms in all",
             ", ".join(["embedding", "head", *["message"] * (len(others) > steps), *["optimizer"] * steps]))
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours]
    fig.legend(handles, names, ncols=6, frameon=False, fontsize=8, loc="outside lower center")
    ax.set(yticks=[-i for i in range(len(rows))], yticklabels=rows, xlim=(0, length), xlabel="seconds",
           title=title.replace("$", r"\$"))
    ax.spines[["top", "right"]].set_visible(False)
    store(fig, png_path)


# --- the memory plan ---

MEMORY = {"embedding": "#8e6bb0", "forward": PALE, "head": GREEN, "recompute": ORANGE, "backward": BLUE,
          "embedding backward": "#5d3a82", "optimizer": "#b8860b", "evaluation head": "#8cc7a5"}
TICKS = ("forward", "head", "backward")  # of the first of each
HOLE = "#d9dbdf"  # reserved, unused
SPARE = ("#c26a8d", "#4f9d9d", "#a0793d", "#6b7a3a")  # for kinds with a name of their own


def scale(nbytes: int) -> tuple[int, str]:
    """The unit to print so many bytes in: (its bytes, its name)."""
    return next(((2**p, name) for p, name in ((30, "GiB"), (20, "MiB")) if nbytes >= 2**p), (2**10, "KiB"))


def size_text(nbytes: int) -> str:
    unit, name = scale(nbytes)
    return f"{nbytes / unit:.4g} {name}"


def fill(ax: Axes, rectangles: Sequence[Rectangle], colour: str, unit: int, linewidth: float,
         edge: str) -> None:
    """Draws rectangles (memo/planner/caching.py) as one collection: a step has thousands."""
    from matplotlib.collections import PolyCollection
    corners = [[(r.start, low), (r.stop, low), (r.stop, high), (r.start, high)] for r, low, high in
               ((r, r.offset / unit, (r.offset + r.bytes) / unit) for r in rectangles)]
    thin, low = ax.get_xlim()[1] / 400, ax.get_ylim()[1] / 100  # an edge would hide it
    edges = [edge if c[1][0] - c[0][0] > thin and c[2][1] - c[0][1] > low else colour for c in corners]
    ax.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=edges, linewidths=linewidth))


def on_segments(rectangles: Sequence[Rectangle], begins: Sequence[int]) -> list[Rectangle]:
    """Rectangles of a step, with the numbers of segments in the place of request numbers. `begins`: at which
    request of the step each segment begins, and the last one ends."""
    at, to = (np.interp([getattr(r, end) for r in rectangles], begins, range(len(begins)))
              for end in ("start", "stop"))
    return [r._replace(start=a, stop=b) for r, a, b in zip(rectangles, at, to, strict=True) if b > a]


def name_segments(ax: Axes, labels: Sequence[str]) -> None:
    """A tick at the first segment of each kind in TICKS. `labels`: those of the segments."""
    numbered = [(segment_kind(label), i) for i, label in enumerate(labels)]
    # backwards, so that the first of each kind stays
    firsts = {kind: i for kind, i in reversed(numbered) if kind in TICKS}
    ax.set(xlabel="segments of the step, each as wide as the others", xticks=list(firsts.values()),
           xticklabels=[labels[i].rpartition("/")[2] for i in firsts.values()])
    for tick in ax.get_xticklabels():
        tick.set_horizontalalignment("left")


def memory_plan(trace: Trace, plan: Plan, png_path: str | Path, title: str) -> None:
    """A PNG of the tensors of a step, address against time: above where the Plan puts them, below where
    torch's caching allocator would. Both have the same scale, while the lower one is up to 4 times as high.
    The caching allocator is simulated from an empty cache. All segments of the step are equally wide. Grey is
    reserved and holds nothing. Tensors that the plan leaves to torch are in neither.

    Errors: ValueError: the trace requests no tensor that a plan may have.
    """
    tensors = planned_rectangles(trace, plan)
    if not tensors:
        raise ValueError("trace must request at least one tensor that a plan may have")
    cache, cached = simulate_caching([trace], planned_only=True)
    segments = [Rectangle(s.since, s.until, s.address, s.bytes, "reserved") for s in cache.history]
    spans = [(label, *span) for label, span in requests_of(trace)[1].items() if span[0] < span[1]]
    labels, begins = [label for label, *_ in spans], [*(lower for _, lower, _ in spans), spans[-1][2]]
    tensors, cached, segments = (on_segments(r, begins) for r in (tensors, cached, segments))
    arena = [Rectangle(0, len(begins) - 1, 0, plan.arena_bytes, "reserved")]
    unit, name = scale(plan.arena_bytes)
    tops = [1.02 * max(r.offset + r.bytes for r in reserved) / unit for reserved in (arena, segments)]
    heights = max(tops[0], tops[1] / 4), tops[1]  # one scale for both, unless nothing were seen of the plan
    spare = itertools.cycle(SPARE)
    kinds = dict.fromkeys(r.kind for r in tensors)
    colours = {k: MEMORY.get(k.removeprefix("layer ")) or next(spare) for k in kinds}
    lines: list[dict] = [dict(color=RED, lw=1.5, label=f"planned, {size_text(plan.arena_bytes)}")]
    if plan.proven:
        lines[0]["label"] += ", the lower bound"
    else:
        lines.append(dict(color="black", lw=1.2, ls=(0, (4, 3)),
                          label=f"lower bound, {size_text(plan.lower_bound)}"))

    plt = pyplot()
    fig, axes = plt.subplots(2, 1, figsize=(12, 7.7), dpi=130, sharex=True, height_ratios=heights,
                             layout="constrained")
    for ax, rectangles, reserved, top in zip(axes, (tensors, cached), (arena, segments), tops, strict=True):
        ax.set(ylabel=f"address ({name})", xlim=(0, len(begins) - 1), ylim=(0, top))
        fill(ax, reserved, HOLE, unit, 0.4, GREY)
        for k, colour in colours.items():
            these = [r for r in rectangles if r.kind == k]
            fill(ax, these, colour, unit, min(0.4, 20 / len(begins)), "white")
        for at, line in zip((plan.arena_bytes, plan.lower_bound), lines, strict=False):
            ax.axhline(at / unit, **line)
        if heights[0] == tops[0]:
            ax.yaxis.set_major_locator(plt.FixedLocator(plt.MaxNLocator(8).tick_values(0, max(tops))))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(f"planned: {size_text(plan.arena_bytes)} for the whole step", loc="left", fontsize=11)
    reserved_bytes = cache.peak_reserved_bytes
    axes[1].set_title(f"torch's caching allocator (simulated): reserves {size_text(reserved_bytes)}, "
                      f"{reserved_bytes / plan.arena_bytes:.2f}x planned", loc="left", fontsize=11)
    name_segments(axes[1], labels)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c, label=k)
               for k, c in {**colours, "reserved, unused": HOLE}.items()]
    handles += [plt.Line2D([], [], **line) for line in lines]
    fig.legend(handles=handles, ncols=5, frameon=False, fontsize=9, loc="outside lower center")
    fig.suptitle(title.replace("$", r"\$"))
    store(fig, png_path)


# --- the dry run ---

REGION_COLORS = {"params": "#1f3a5f", "grads": BLUE, "optimizer": PALE, "rounding_buffers": ORANGE,
                 "keys": "#b5540a", "key_gradients": "#e8a46a", "stream": "#f3cfa8", "sweep": "#f7e3cd",
                 "resident": "#c98a5b",
                 "transient": GREEN, "head": "#8fcfa8", "positions": "#e8c547", "batch": "#c9b458",
                 "communication": GREY, "context": "#d0d3d8", "margin": "#eceef1"}


def memory_bars(ax: Axes, bars: list, capacity: float | None) -> None:
    """A bar for each Estimate: its device memory by region, stacked, below the capacity in bytes."""
    gib = 2**30
    base = np.zeros(len(bars))
    for region in dict.fromkeys(line.region for bar in bars for line in bar.lines if line.device_bytes):
        nbytes = [sum(line.device_bytes for line in bar.lines if line.region == region) for bar in bars]
        heights = np.array(nbytes) / gib
        ax.bar(range(len(bars)), heights, 0.6, bottom=base, color=REGION_COLORS[region],
               label=region.replace("_", " "))
        base += heights
    if capacity is not None:
        ax.axhline(capacity / gib, color=RED, lw=1.5)
        ax.annotate(f"capacity {capacity / gib:.1f} GiB", (0, capacity / gib),
                    xycoords=("axes fraction", "data"), xytext=(4, 4), textcoords="offset points", color=RED,
                    fontsize=9)
    highest = max([*base, (capacity or 0) / gib])
    ax.set(ylabel="device memory of a rank, GiB", xticks=range(len(bars)), xlim=(-0.6, len(bars) - 0.4),
           xticklabels=[f"S = {bar.cfg.block_size:,}" for bar in bars], ylim=(0, 1.1 * highest))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def tokens_label(S: int) -> str:
    if S >= 2**20:
        return f"{S // 2**20}M"
    return f"{S // 1024}K" if S >= 1024 else str(S)


def speed_curve(ax: Axes, got: Estimate, lengths: list[int], end: int, at: Callable) -> None:
    """MFU, or tokens per second where no peak is known, against the contexts that fit; `got` is marked."""
    points = [(one.cfg.block_size, one) for S in lengths if (one := at(S)) is not None and one.fits]
    if not points:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "no context fits", ha="center", color=GREY, transform=ax.transAxes)
        return
    contexts = [S for S, _ in points]
    if all(one.mfu is not None for _, one in points):
        ax.plot(contexts, [100 * one.mfu for _, one in points], "o-", color=BLUE, ms=4, lw=1.5)
        ax.set(ylabel="MFU, %", ylim=(0, None))
        if got.mfu is not None and got.fits:
            here = got.cfg.block_size, 100 * got.mfu
            ax.plot(*here, "o", color=ORANGE, ms=9, zorder=3)
            ax.annotate(f"{here[1]:.1f}% at {here[0]:,}", here, xytext=(0, -16), textcoords="offset points",
                        ha="center", va="top", color=ORANGE, fontsize=9)
    elif all(one.tgs for _, one in points):
        ax.plot(contexts, [one.tgs for _, one in points], "o-", color=BLUE, ms=4, lw=1.5)
        ax.set(ylabel="tokens per second and rank", ylim=(0, None))
    ax.set(xscale="log", xlabel="context, tokens")
    powers = [2**k for k in range(40) if lengths[0] <= 2**k <= end]
    ticks = powers[(len(powers) - 1) % 2::2]  # every other one, the last one among them
    ax.set_xticks(ticks, [tokens_label(S) for S in ticks])
    ax.set_xticks([], minor=True)


def dry_run(got: Estimate, at: Callable, most: Estimate | None, png_path: str | Path) -> None:
    """A PNG of an Estimate `got`: its device memory by region, with that of the longest context beside it
    (`most`, None where there is none); and MFU against the context, from 4K to the longest. at(S) ->
    Estimate, or None where S cannot be, or does not fit."""
    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 5), dpi=130, width_ratios=(2, 3),
                                      layout="constrained")
    longer = most is not None and most.cfg.block_size != got.cfg.block_size
    memory_bars(left, [got, most] if longer else [got], got.capacity)
    end, unit = (most or got).cfg.block_size, got.cfg.block_multiple
    lengths = sorted({max(unit, int(S) // unit * unit) for S in np.geomspace(min(4096, end), end, 24)})
    speed_curve(right, got, lengths, end, at)
    for ax in (left, right):
        ax.grid(alpha=0.2, axis="y")
        ax.spines[["top", "right"]].set_visible(False)
    cfg = got.cfg
    pp = f"pp={cfg.pp} " * (cfg.pp > 1)
    fig.suptitle(f"{got.world} x {got.machine.name}, {pp}tp={cfg.tp} cp={cfg.cp} dp={got.dp}, "
                 f"{cfg.activation}")
    store(fig, png_path)


# --- does the long context work? ---

def loss_by_position(losses: dict, trained_length: int, png_path: str | Path, title: str) -> None:
    """A PNG of the losses of memo/long_context.py: above by position, with those of the same tokens in a
    shorter context; below the gain, with its standard error."""
    plt = pyplot()
    cut = losses.get("cut_length")
    heights = (2, 1) if cut else (1,)
    fig, axes = plt.subplots(len(heights), figsize=(9, 6.5 if cut else 4.5), dpi=130, sharex=True,
                             squeeze=False, height_ratios=heights, layout="constrained")
    top, bottom = axes[0, 0], axes[-1, 0]
    end = losses["end"]
    edges = [end[0] / 2, *end]  # no logarithm has a place for 0
    top.stairs(losses["loss"], edges, baseline=None, color=BLUE, lw=2, zorder=3,
               label=f"context of {losses['length']:,}")
    if cut:
        top.stairs(losses["cut_loss"], edges, baseline=None, color=ORANGE, lw=4,  # seen below the other
                   label=f"the same tokens, at most {cut:,} seen")
        bottom.stairs(losses["gain"], edges, fill=True, color=PALE)
        if losses["gain_error"][0] is not None:
            middles = np.sqrt(np.multiply(edges[1:], edges[:-1]))
            bottom.errorbar(middles, losses["gain"], losses["gain_error"], fmt="none", ecolor=BLUE, capsize=3)
        bottom.set(ylabel="gain (nats per token)")
    for ax in axes[:, 0]:
        if end[0] < trained_length < end[-1]:
            ax.axvline(trained_length, color=GREY, ls=":", lw=1.2)
        plain(ax)
    if end[0] < trained_length < end[-1]:
        top.annotate("trained length", (trained_length, 1), xycoords=("data", "axes fraction"),
                     xytext=(-4, -4), textcoords="offset points", ha="right", va="top", color=GREY,
                     fontsize=9)
    top.set(ylabel="loss (nats per token)", title=title.replace("$", r"\$"))
    top.legend(frameon=False)
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(end, [tokens_label(n) for n in end])
    bottom.set_xticks([], minor=True)
    bottom.set(xlabel="position in the sequence, tokens", xlim=(edges[0], edges[-1]))
    store(fig, png_path)


def needle_map(needles: dict, png_path: str | Path, title: str) -> None:
    """A PNG of the needles of memo/long_context.py, depth against length: the fraction of the values' tokens
    that is found, and what a needle adds to their log-probability."""
    plt = pyplot()
    lengths, depths = needles["lengths"], needles["depths"]
    fig, axes = plt.subplots(1, 2, figsize=(4 + 1.6 * len(lengths), 2 + 0.5 * len(depths)), dpi=130,
                             layout="constrained")
    most = max(1.0, np.max(needles["gain"]))
    for ax, name, what, top, form in (
            (axes[0], "score", f"found: {needles['mean_score']:.1%}", 1.0, "{:.0%}"),
            (axes[1], "gain", f"gain: {needles['mean_gain']:.2f} nats a token", most, "{:+.2f}")):
        ax.imshow(needles[name], vmin=0, vmax=top, cmap="Blues", aspect="auto")
        for row, values in enumerate(needles[name]):
            for column, value in enumerate(values):
                ax.text(column, row, form.format(value), ha="center", va="center", fontsize=9,
                        color="white" if value > top / 2 else "black")
        ax.set_xticks(range(len(lengths)), [tokens_label(n) for n in lengths])
        ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        ax.set(xlabel="length, tokens", title=what)
    axes[0].set(ylabel="depth of the needle")
    fig.suptitle(title.replace("$", r"\$"))
    store(fig, png_path)
