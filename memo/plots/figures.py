"""Pictures of a run."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memo.planner.plan import Plan
from memo.planner.trace import Trace, requests_of
from memo.schedule.spans import Span
from memo.system.files import replacing, save_bytes

BLUE, ORANGE, GREY, RED, GREEN, PALE = "#2563a8", "#d9730d", "#8a8f98", "#c8102e", "#2e8b57", "#7fb2e5"
KINDS = {"forward": PALE, "recompute": ORANGE, "sweep": ORANGE, "backward": BLUE, "offload": GREEN,
         "prefetch": GREEN, "gradients": GREEN, "stall": RED}
STREAMS = ("compute", "offload", "prefetch", "send", "receive")  # the last two of stages
STYLE = {"figure.dpi": 130, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "text.parse_math": False}  # titles may hold a $

Drawn = Any  # whatever matplotlib has made


def pyplot() -> Drawn:
    """Imports matplotlib.pyplot, which takes a second: only when there is a picture to draw."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


@contextmanager
def picture(path: str | Path, *grid: int, **how: object) -> Iterator[tuple[Drawn, Drawn]]:
    """Yields pyplot.subplots()'s (figure, axes), then writes the figure to `path`, as replacing() does."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(*grid, **how)
        try:
            yield fig, axes
            with replacing(path) as file:
                fig.savefig(file, format=Path(path).suffix.removeprefix(".") or "png")
        finally:
            plt.close(fig)


def plain(ax: Drawn) -> None:
    """Draws a pale grid, and no frame above and on the right."""
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)


def note(ax: Drawn, text: str, at: tuple[float, float], coordinates: str | tuple[str, str], colour: str,
         shift: tuple[int, int] = (-4, -4), ha: str = "right") -> None:
    """Writes a text `shift` points beside a place of the picture."""
    ax.annotate(text, at, xycoords=coordinates, xytext=shift, textcoords="offset points", color=colour, ha=ha,
                va="top" if shift[1] < 0 else "bottom", fontsize=9)


def patch(colour: object, **how: object) -> Drawn:
    return pyplot().Rectangle((0, 0), 1, 1, **dict(fc=colour, ec=colour) | how)


def draw_boxes(ax: Drawn, boxes: Sequence[tuple[float, float, float, float]], **how: Drawn) -> None:
    """Draws boxes (left, right, low, high) as one collection: there may be thousands."""
    from matplotlib.collections import PolyCollection
    corners = [[(left, low), (right, low), (right, high), (left, high)] for left, right, low, high in boxes]
    ax.add_collection(PolyCollection(corners, **how))


def smooth(values: Sequence[float]) -> np.ndarray:
    """Replaces each value by that of a line fitted to its neighbours, a quarter as many as are before it."""
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
    """Draws loss, validation loss and tokens/s of a metrics.jsonl's `rows` against the steps, as a PNG."""
    steps = [r["iter"] for r in rows]
    losses = [r["loss"] for r in rows]
    smoothed, guess = smooth(losses), math.log(vocab_size)
    val = [(r["iter"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    with picture(png_path, 2, figsize=(9, 6.5), sharex=True, height_ratios=(4, 1)) as (_, (top, bottom)):
        top.axhline(guess, color=GREY, ls=":", lw=1.2)
        note(top, f"ln V = {guess:.2f}, knowing nothing", (1, guess), ("axes fraction", "data"), GREY)
        top.plot(steps, losses, color=BLUE, alpha=0.25, lw=1)
        top.plot(steps, smoothed, color=BLUE, lw=2, label=f"train (smoothed), last {smoothed[-1]:.3f}")
        if val:
            top.plot(*zip(*val, strict=True), "o-", color=ORANGE, lw=1.5, ms=5,
                     label=f"validation, last {val[-1][1]:.3f}")
        top.set(ylabel="loss (nats per token)", title=title)
        top.legend(loc="center right")
        bottom.plot(steps, [r["tgs"] for r in rows], color=BLUE, lw=1)
        bottom.set(xlabel=f"step ({rows[-1]['tokens']:,} tokens each)", ylabel="tokens/s/device",
                   ylim=(0, None))
        for ax in (top, bottom):
            plain(ax)


def timeline(spans: Sequence[Span], json_path: Path, png_path: str | Path, title: str) -> None:
    """Draws one step's spans as a Chrome trace, for Perfetto, and as a PNG, with stalls in red."""
    shown = [s for s in spans if s.kind == "launch" or (s.stream == "compute" and s.kind == "wait")]
    streams = {s.stream for s in shown}
    rows = [*(s for s in STREAMS if s in streams), *sorted(streams - {*STREAMS})]
    events = [dict(name="thread_name", ph="M", pid=0, tid=i, args=dict(name=row))
              for i, row in enumerate(rows)]
    events += [dict(name=s.label if s.kind == "launch" else f"stall: {s.label}", cat=s.kind, ph="X", pid=0,
                    tid=rows.index(s.stream), ts=s.start_s * 1e6, dur=(s.end_s - s.start_s) * 1e6)
               for s in shown]
    save_bytes(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")).encode() + b"\n", json_path)
    length = max(s.end_s for s in shown)
    with picture(png_path, figsize=(12, 1.7 + len(rows) / 2)) as (fig, ax):
        for s in shown:
            work, _, unit = s.label.rpartition(" ")
            colour = KINDS.get("stall" if s.kind == "wait" else work.partition(" ")[0], GREY)
            y, width = -rows.index(s.stream), s.end_s - s.start_s
            ax.broken_barh([(s.start_s, width)], (y - 0.4, 0.8), facecolors=colour, edgecolor="white", lw=0.4)
            if work in KINDS and s.kind == "launch" and width > 0.004 * max(3, len(unit)) * length:
                ax.text(s.start_s + width / 2, y, unit, ha="center", va="center", fontsize=8,
                        color="black" if work == "forward" else "white")
        stall = sum(s.end_s - s.start_s for s in shown if s.kind == "wait")
        others = streams - {*STREAMS[:3]}  # the optimizer's is a thread of the host
        messages, optimizer = bool(others - {"optimizer"}), "optimizer" in others
        rest = ", ".join(["embedding", "head", *["message"] * messages, *["optimizer"] * optimizer])
        names = {"forward": PALE, "recompute": ORANGE, "backward": BLUE, "copy": GREEN,
                 f"stall, {stall * 1e3:.1f} ms in all": RED, rest: GREY}
        fig.legend([*map(patch, names.values())], names, ncols=6, fontsize=8, loc="outside lower center")
        ax.set(yticks=[-i for i in range(len(rows))], yticklabels=rows, xlim=(0, length), xlabel="seconds",
               title=title)


# --- the memory plan ---

MEMORY = {"embedding": "#8e6bb0", "forward": PALE, "head": GREEN, "recompute": ORANGE, "backward": BLUE,
          "embedding backward": "#5d3a82", "optimizer": "#b8860b", "evaluation head": "#8cc7a5"}
TICKS = ("forward", "head", "backward")  # of the first of each
HOLE = "#d9dbdf"  # reserved, unused
SPARE = ("#c26a8d", "#4f9d9d", "#a0793d", "#6b7a3a")  # for kinds with a name of their own


class Rectangle(NamedTuple):
    """Describes what is drawn of memory: from request number `start` to `stop`, at these bytes."""

    start: float
    stop: float
    offset: int
    bytes: int
    kind: str


Panel = tuple[list[Rectangle], list[Rectangle], str]  # of tensors, of what is reserved for them; a title


def segment_kind(segment: str) -> str:
    """Finds the kind of a segment, without shape and layer: `forward` of `1x4096/forward 3`."""
    words = segment.rpartition("/")[2].split()
    return " ".join(word for word in words if not any(c.isdigit() for c in word)) or "other"


def planned_rectangles(trace: Trace, plan: Plan) -> list[Rectangle]:
    """Lists the Rectangles of a Plan of the Trace, without tensors that it leaves to torch."""
    return [Rectangle(r.lower, r.upper, plan.segments[r.segment][r.k][1], r.bytes, segment_kind(r.segment))
            for r in requests_of(trace)[0] if r.planned]


def scale(nbytes: int) -> tuple[int, str]:
    """Picks the unit to print so many bytes in: (its bytes, its name)."""
    return next(((2**p, name) for p, name in ((30, "GiB"), (20, "MiB")) if nbytes >= 2**p), (2**10, "KiB"))


def size_text(nbytes: int) -> str:
    unit, name = scale(nbytes)
    return f"{nbytes / unit:.4g} {name}"


def fill(ax: Drawn, rectangles: Sequence[Rectangle], begins: Sequence[int], colour: str, unit: int,
         linewidth: float, edge: str) -> None:
    """Draws rectangles, from segment to segment. `begins`: each segment's first request, and the end."""
    starts, stops = (np.interp([getattr(r, end) for r in rectangles], begins, range(len(begins)))
                     for end in ("start", "stop"))
    boxes = [(left, right, r.offset / unit, (r.offset + r.bytes) / unit)
             for r, left, right in zip(rectangles, starts, stops, strict=True) if right > left]
    thin, low = ax.get_xlim()[1] / 400, ax.get_ylim()[1] / 100  # an edge would hide it
    edges = [edge if right - left > thin and top - bottom > low else colour
             for left, right, bottom, top in boxes]
    draw_boxes(ax, boxes, facecolors=colour, edgecolors=edges, linewidths=linewidth)


def memory_plan(trace: Trace, plan: Plan, png_path: str | Path, title: str, *others: Panel) -> None:
    """Draws a step's tensors, of which there are some, address against time, where the Plan puts them, and
    below where `others` do, on the same scale, up to 4 times as high."""
    tensors = planned_rectangles(trace, plan)
    spans = [(label, *span) for label, span in requests_of(trace)[1].items() if span[0] < span[1]]
    labels, begins = [label for label, *_ in spans], [*(lower for _, lower, _ in spans), spans[-1][2]]
    arena = [Rectangle(begins[0], begins[-1], 0, plan.arena_bytes, "reserved")]
    spare, planned = itertools.cycle(SPARE), size_text(plan.arena_bytes)
    panels = [(tensors, arena, f"planned: {planned} for the whole step"), *others]
    unit, name = scale(plan.arena_bytes)
    tops = [1.02 * max(r.offset + r.bytes for r in reserved) / unit for _, reserved, _ in panels]
    heights = max(tops[0], max(tops) / 4), *tops[1:]  # one scale, unless nothing were seen of the plan
    kinds = dict.fromkeys(r.kind for r in tensors)
    colours = {k: MEMORY.get(k.removeprefix("layer ")) or next(spare) for k in kinds}
    lines = [(plan.arena_bytes, dict(color=RED, lw=1.5, ls="-",
                                     label=f"planned, {planned}" + ", the lower bound" * plan.proven)),
             (plan.lower_bound, dict(color="black", lw=1.2, ls=(0, (4, 3)),
                                     label=f"lower bound, {size_text(plan.lower_bound)}"))]
    lines = lines[:1] if plan.proven else lines
    plt = pyplot()
    with picture(png_path, len(panels), figsize=(12, 1.9 + 2.9 * len(panels)), sharex=True, squeeze=False,
                 height_ratios=heights) as (fig, axes):
        for (ax,), (rectangles, reserved, head), top in zip(axes, panels, tops, strict=True):
            ax.set(ylabel=f"address ({name})", xlim=(0, len(begins) - 1), ylim=(0, top))
            ax.set_title(head, loc="left", fontsize=11)
            fill(ax, reserved, begins, HOLE, unit, 0.4, GREY)
            for k, colour in colours.items():
                these = [r for r in rectangles if r.kind == k]
                fill(ax, these, begins, colour, unit, min(0.4, 20 / len(begins)), "white")
            for nbytes, line in lines:
                ax.axhline(nbytes / unit, **line)
            if heights[0] == tops[0]:
                ax.yaxis.set_major_locator(plt.FixedLocator(plt.MaxNLocator(8).tick_values(0, max(tops))))
        segments = [segment_kind(label) for label in labels]  # the first of some kinds have a tick
        firsts = [segments.index(kind) for kind in dict.fromkeys(segments) if kind in TICKS]
        axes[-1][0].set_xticks(firsts, [labels[i].rpartition("/")[2] for i in firsts], ha="left")
        axes[-1][0].set(xlabel="segments of the step, each as wide as the others")
        handles = [patch(c, label=k) for k, c in {**colours, "reserved, unused": HOLE}.items()]
        handles += [plt.Line2D([], [], **line) for _, line in lines]
        fig.legend(handles=handles, ncols=5, fontsize=9, loc="outside lower center")
        fig.suptitle(title)


def name_lengths(ax: Drawn, lengths: Sequence[int]) -> None:
    """Draws ticks at lengths in tokens, as 4K or 1M, and no others."""
    ax.set_xticks(lengths, [tokens_label(n) for n in lengths])
    ax.set_xticks([], minor=True)


def tokens_label(S: int) -> str:
    return f"{S // 2**20}M" if S >= 2**20 else f"{S // 1024}K" if S >= 1024 else str(S)


# --- does the long context work? ---

def loss_by_position(losses: dict, trained_length: int, png_path: str | Path, title: str) -> None:
    """Draws losses by position, and those in a shorter context; below the gain, with its standard error."""
    cut, end = losses.get("cut_length"), losses["end"]
    rows, height, ratios = (2, 6.5, (2, 1)) if cut else (1, 4.5, (1,))
    edges = [end[0] / 2, *end]  # no logarithm has a place for 0
    with picture(png_path, rows, figsize=(9, height), sharex=True, squeeze=False,
                 height_ratios=ratios) as (_, axes):
        top, bottom = axes[0, 0], axes[-1, 0]
        top.stairs(losses["loss"], edges, baseline=None, color=BLUE, lw=2, zorder=3,
                   label=f"context of {losses['length']:,}")
        if cut:
            top.stairs(losses["cut_loss"], edges, baseline=None, color=ORANGE, lw=4,  # seen below the other
                       label=f"the same tokens, at most {cut:,} seen")
            bottom.stairs(losses["gain"], edges, fill=True, color=PALE)
            if losses["gain_error"][0] is not None:
                middles = np.sqrt(np.multiply(edges[1:], edges[:-1]))
                bottom.errorbar(middles, losses["gain"], losses["gain_error"], fmt="none", ecolor=BLUE,
                                capsize=3)
            bottom.set(ylabel="gain (nats per token)")
        for ax in axes[:, 0]:
            plain(ax)
            if end[0] < trained_length < end[-1]:
                ax.axvline(trained_length, color=GREY, ls=":", lw=1.2)
        if end[0] < trained_length < end[-1]:
            note(top, "trained length", (trained_length, 1), ("data", "axes fraction"), GREY)
        top.set(ylabel="loss (nats per token)", title=title)
        top.legend()
        bottom.set_xscale("log", base=2)
        name_lengths(bottom, end)
        bottom.set(xlabel="position in the sequence, tokens", xlim=(edges[0], edges[-1]))


def needle_map(needles: dict, png_path: str | Path, title: str) -> None:
    """Draws by depth and length which fraction of a needle's tokens is found, and what it gains them."""
    lengths, depths = needles["lengths"], needles["depths"]
    most = max(1.0, np.max(needles["gain"]))
    with picture(png_path, 1, 2, figsize=(4 + 1.6 * len(lengths), 2 + 0.5 * len(depths))) as (fig, axes):
        for ax, name, what, top, form in (
                (axes[0], "score", f"found: {needles['mean_score']:.1%}", 1.0, "{:.0%}"),
                (axes[1], "gain", f"gain: {needles['mean_gain']:.2f} nats a token", most, "{:+.2f}")):
            ax.imshow(needles[name], vmin=0, vmax=top, cmap="Blues", aspect="auto")
            for (row, column), value in np.ndenumerate(needles[name]):
                ax.text(column, row, form.format(value), ha="center", va="center", fontsize=9,
                        color="white" if value > top / 2 else "black")
            ax.set_xticks(range(len(lengths)), [tokens_label(n) for n in lengths])
            ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            ax.set(xlabel="length, tokens", title=what)
        axes[0].set(ylabel="depth of the needle")
        fig.suptitle(title)
