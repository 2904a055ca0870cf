"""The picture of a pipeline: what all its stages do over time. No torch."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from memo.plots.figures import GREY, RED, Drawn, draw_boxes, patch, picture, pyplot
from memo.schedule.spans import Span, busy_s, length_s, sent_and_received, stall_s

# of a stage's place in the picture: the rows' lower ends and heights, from its upper end
ROWS = {"compute": (-0.6, 0.6), "offload": (-0.75, 0.12), "prefetch": (-0.91, 0.12)}
LINE = "#5a5f68"
LOOKS = {"forward": "forward", "backward": "backward", "recompute": "recompute", "sweep": "recompute"}

Colour = tuple[float, ...]  # RGB


class Bar(NamedTuple):
    """Describes a rectangle of the picture."""

    low: float
    high: float
    look: str  # forward, backward, recompute, copy, others or stall
    subsequence: int
    start_s: float
    end_s: float


def bars_of(stage: int, spans: Sequence[Span], N: int) -> list[Bar]:
    """Lists what a stage computes, copies and waits for, of N subsequences; guests' numbers count on by N."""
    bars = []
    for s in spans:
        if s.stream not in ROWS or s.kind == "bubble" or (s.kind == "wait" and s.stream != "compute"):
            continue
        work, _, unit = s.label.rpartition(" ")
        number = unit.rpartition(".")[2]
        subsequence = int(number) % N if "." in unit and number.isdecimal() else 0
        look = "stall" if s.kind == "wait" else "copy" if s.stream != "compute" else LOOKS.get(work, "others")
        low, height = ROWS[s.stream]
        bars.append(Bar(low - stage, low - stage + height, look, subsequence, s.start_s, s.end_s))
    return bars


def draw_messages(ax: Drawn, stages: Sequence[Sequence[Span]]) -> None:
    """Draws a thin line for each message, from when it is sent to when it is there."""
    lines = []
    for k, (stage, other) in enumerate(pairwise(stages)):
        below, above = ROWS["compute"][0] - k, -k - 1
        on, back = sent_and_received(stage, other), sent_and_received(other, stage, " gradient")
        lines += [[(sent.start_s, below), (received.end_s, above)] for sent, received in on]
        lines += [[(sent.start_s, above), (received.end_s, below)] for sent, received in back]
    from matplotlib.collections import LineCollection
    ax.add_collection(LineCollection(lines, colors=LINE, linewidths=0.5, zorder=3))


def draw_bars(ax: Drawn, bars: Sequence[Bar], shades: Sequence[Colour]) -> None:
    """Draws all rectangles, those of a look and colour as one collection. `shades`: of each subsequence."""
    alike = defaultdict[tuple, list](list)
    for bar in bars:
        shade, hatch = shades[bar.subsequence], "////" if bar.look == "recompute" else None
        colours = dict(stall=RED, others=GREY, forward=tuple(1 - 0.45 * (1 - c) for c in shade))
        alike[colours.get(bar.look, shade), hatch].append((bar.start_s, bar.end_s, bar.low, bar.high))
    for (colour, hatch), boxes in alike.items():
        edge = "white" if hatch else colour  # a hatch has the colour of the edge
        draw_boxes(ax, boxes, facecolors=[colour], edgecolors=[edge], hatch=hatch, linewidths=0.2)


def draw_numbers(ax: Drawn, bars: Sequence[Bar], length: float, N: int) -> None:
    """Draws the subsequences' numbers, where there is room: one for layers that follow without a pause."""
    computing = (bar for bar in bars if bar.look not in ("copy", "others"))
    for (low, high, look, subsequence), run in groupby(computing, key=lambda bar: bar[:4]):
        first, *_, last = [*run] * 2
        number, width = str(subsequence), last.end_s - first.start_s
        if look in ("forward", "backward") and width > 0.008 * len(number) * length:
            dark = look == "backward" and subsequence < 0.6 * N
            ax.text(first.start_s + width / 2, (low + high) / 2, number, ha="center", va="center",
                    fontsize=8, color="white" if dark else "black")


def legend_of(stages: Sequence[Sequence[Span]], looks: set[str], shade: Colour) -> dict[str, Drawn]:
    """Makes the legend, {name: handle}, of the `looks` that there are."""
    stall = sum(map(stall_s, stages)) / len(stages)
    bubble = max(map(length_s, stages)) - sum(map(busy_s, stages)) / len(stages)
    share = bubble / (max(map(length_s, stages)) - bubble - stall)
    handles = {f"bubble, {bubble:.3g} s a stage: {share:.1%} of the computing": patch("white", ec=GREY),
               "forward is pale, backward dark; number: subsequence": patch(shade)}
    if "recompute" in looks:
        handles["recomputed"] = patch(shade, ec="white", hatch="////")
    handles["embedding, head"] = patch(GREY)
    if "stall" in looks:
        handles[f"stall, {stall:.3g} s a stage"] = patch(RED)
    return handles | {"message": pyplot().Line2D([], [], color=LINE, lw=0.8)}


def pipeline(stages: Sequence[Sequence[Span]], N: int, png_path: str | Path, title: str) -> None:
    """Draws all stages' spans on one clock, coloured by the subsequence of N, copies below. White: bubble."""
    bars = [bar for stage, spans in enumerate(stages) for bar in bars_of(stage, spans, N)]
    looks = {bar.look for bar in bars}
    start, end = min(bar.start_s for bar in bars), max(bar.end_s for bar in bars)
    viridis = pyplot().get_cmap("viridis")
    shades = [viridis(i / max(1, N - 1) * 0.9)[:3] for i in range(N)]
    rows = ROWS if "copy" in looks else ["compute"]
    low, height = ROWS["compute"]
    with picture(png_path, figsize=(12, 1.6 + 0.9 * len(stages))) as (_, ax):
        draw_bars(ax, bars, shades)
        frames = [(start, end, low - k, low - k + height) for k in range(len(stages))]
        draw_boxes(ax, frames, facecolors="none", edgecolors=GREY, linewidths=0.6)
        draw_numbers(ax, bars, end - start, N)
        draw_messages(ax, stages)
        handles = legend_of(stages, looks, shades[N // 2])
        ax.legend(handles.values(), handles, ncols=len(handles), fontsize=8, loc="upper center",
                  bbox_to_anchor=(0.5, -0.4 / (0.9 * len(stages))))
        ticks = {sum(ROWS[row]) - ROWS[row][1] / 2 - k: f"stage {k}" if row == "compute" else row
                 for k in range(len(stages)) for row in rows}
        ax.set_yticks(list(ticks), ticks.values())
        for label in ax.get_yticklabels():
            label.set_fontsize(10 if label.get_text().startswith("stage") else 7)
        ax.set(xlim=(start, end), ylim=(-len(stages), 0.05), xlabel="seconds", title=title)
