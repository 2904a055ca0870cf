"""Pictures of a run."""

import math

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from memo.metrics import read_metrics

BLUE, ORANGE, GREY = "#2563a8", "#d9730d", "#8a8f98"


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
