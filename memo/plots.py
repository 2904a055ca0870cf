"""Pictures of a run."""

import json
import math

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from memo.metrics import read_metrics

BLUE, ORANGE, GREY, RED, GREEN, PALE = "#2563a8", "#d9730d", "#8a8f98", "#c8102e", "#2e8b57", "#7fb2e5"
KINDS = {"forward": PALE, "recompute": ORANGE, "backward": BLUE, "offload": GREEN, "prefetch": GREEN, "stall": RED}
ROWS = ("compute", "offload", "prefetch")


def smooth(values, weight):
    """Exponential moving average without the bias of its start."""
    average, norm, out = 0.0, 0.0, []
    for v in values:
        average, norm = weight * average + (1 - weight) * v, weight * norm + (1 - weight)
        out.append(average / norm)
    return out


def loss_curve(metrics_path, png_path, title, vocab_size):
    """Loss, validation loss and tokens/s of a metrics.jsonl against the steps, as a PNG."""
    rows = read_metrics(metrics_path)
    steps = [r["iter"] for r in rows]
    losses = [r["loss"] for r in rows]
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.5), dpi=130, sharex=True, height_ratios=(4, 1),
                                      layout="constrained")
    guess = math.log(vocab_size)
    top.axhline(guess, color=GREY, ls=":", lw=1.2)
    top.annotate(f"ln V = {guess:.2f}, knowing nothing", (1, guess), xycoords=("axes fraction", "data"),
                 xytext=(-4, -4), textcoords="offset points", ha="right", va="top", color=GREY, fontsize=9)
    top.plot(steps, losses, color=BLUE, alpha=0.25, lw=1)
    top.plot(steps, smooth(losses, 0.9), color=BLUE, lw=2, label=f"train (smoothed), last {smooth(losses, 0.9)[-1]:.3f}")
    val = [(r["iter"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    if val:
        top.plot(*zip(*val, strict=True), "o-", color=ORANGE, lw=1.5, ms=5, label=f"validation, last {val[-1][1]:.3f}")
    top.set(ylabel="loss (nats per token)", title=title.replace("$", r"\$"))
    top.legend(frameon=False, loc="center right")
    bottom.plot(steps, [r["tgs"] for r in rows], color=BLUE, lw=1)
    bottom.set(xlabel=f"step ({rows[-1]['tokens']:,} tokens each)", ylabel="tokens/s/device", ylim=(0, None))
    for ax in (top, bottom):
        ax.grid(alpha=0.2)
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(png_path)
    plt.close(fig)


def timeline(spans, json_path, png_path, title):
    """One step's spans (memo/streams.py): as a Chrome trace, which Perfetto opens, and as a PNG of three rows, compute,
    offload and prefetch, layer by layer; what the compute stream waited for is red."""
    shown = [s for s in spans if s.kind == "launch" or s.stream == "compute"]
    events = [dict(name="thread_name", ph="M", pid=0, tid=i, args=dict(name=row)) for i, row in enumerate(ROWS)]
    events += [dict(name=s.label if s.kind == "launch" else f"stall: {s.label}", cat=s.kind, ph="X", pid=0,
                    tid=ROWS.index(s.stream), ts=s.start_s * 1e6, dur=(s.end_s - s.start_s) * 1e6) for s in shown]
    json_path.write_text(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")) + "\n")
    fig, ax = plt.subplots(figsize=(12, 3.2), dpi=130, layout="constrained")
    length = max(s.end_s for s in shown)
    for s in shown:
        kind, _, layer = s.label.partition(" ")
        kind = "stall" if s.kind == "wait" else kind
        y, width = -ROWS.index(s.stream), s.end_s - s.start_s
        ax.broken_barh([(s.start_s, width)], (y - 0.4, 0.8), facecolors=KINDS.get(kind, GREY), edgecolor="white", lw=0.4)
        if layer.isdigit() and s.kind == "launch" and width > 0.012 * length:
            ax.text(s.start_s + width / 2, y, layer, ha="center", va="center", fontsize=8,
                    color="black" if kind == "forward" else "white")
    stall = sum(s.end_s - s.start_s for s in shown if s.kind == "wait")
    colours = (PALE, ORANGE, BLUE, GREEN, RED, GREY)
    names = ("forward", "recompute", "backward", "copy", f"stall, {stall * 1e3:.1f} ms in all", "embedding, head")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours]
    ax.legend(handles, names, ncols=6, frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    ax.set(yticks=[-i for i in range(len(ROWS))], yticklabels=ROWS, xlim=(0, length), xlabel="seconds",
           title=title.replace("$", r"\$"))
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(png_path)
    plt.close(fig)
