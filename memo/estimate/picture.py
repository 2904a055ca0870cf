"""The picture of an Estimate: memory by region, MFU against the context. No torch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from memo.estimate.budget import Estimate
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, RED, Drawn, name_lengths, note, picture

REGION_COLORS = {"params": "#1f3a5f", "grads": BLUE, "optimizer": PALE, "rounding_buffers": ORANGE,
                 "keys": "#b5540a", "key_gradients": "#e8a46a", "stream": "#f3cfa8", "sweep": "#f7e3cd",
                 "resident": "#c98a5b", "transient": GREEN, "head": "#8fcfa8", "positions": "#e8c547",
                 "batch": "#c9b458", "communication": GREY, "context": "#d0d3d8", "margin": "#eceef1"}


def memory_bars(ax: Drawn, bars: list[Estimate], capacity: float | None) -> None:
    """Draws a bar for each Estimate: its device memory by region, stacked, below the capacity in bytes."""
    gib = 2**30
    base = np.zeros(len(bars))
    for region in dict.fromkeys(line.region for bar in bars for line in bar.lines if line.device_bytes):
        nbytes = [sum(line.device_bytes for line in bar.lines if line.region == region) for bar in bars]
        heights = np.array(nbytes) / gib
        ax.bar(range(len(bars)), heights, 0.6, bottom=base, color=REGION_COLORS[region],
               label=region.replace("_", " "))
        base += heights
    most = (capacity or 0) / gib
    if capacity is not None:
        ax.axhline(most, color=RED, lw=1.5)
        note(ax, f"capacity {most:.1f} GiB", (0, most), ("axes fraction", "data"), RED, (4, 4), "left")
    ax.set(ylabel="device memory of a rank, GiB", xticks=range(len(bars)), xlim=(-0.6, len(bars) - 0.4),
           xticklabels=[f"S = {bar.cfg.block_size:,}" for bar in bars], ylim=(0, 1.1 * max(*base, most)))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def speed_curve(ax: Drawn, estimate: Estimate, lengths: list[int], end: int,
                at: Callable[[int], Estimate | None]) -> None:
    """Draws MFU, or tokens per second without a peak, against the contexts that fit, marking `estimate`."""
    points = [fitting for S in lengths if (fitting := at(S)) is not None and fitting.fits]
    if not points:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "no context fits", ha="center", color=GREY, transform=ax.transAxes)
        return
    mfus = [100 * fitting.mfu for fitting in points if fitting.mfu is not None]
    values = mfus if len(mfus) == len(points) else [fitting.tgs for fitting in points]
    if all(values):
        ax.plot([fitting.cfg.block_size for fitting in points], values, "o-", color=BLUE, ms=4, lw=1.5)
        ax.set(ylabel="MFU, %" if values is mfus else "tokens per second and rank", ylim=(0, None))
    if values is mfus and estimate.mfu is not None and estimate.fits:
        mark = estimate.cfg.block_size, 100 * estimate.mfu
        ax.plot(*mark, "o", color=ORANGE, ms=9, zorder=3)
        note(ax, f"{mark[1]:.1f}% at {mark[0]:,}", mark, "data", ORANGE, (0, -16), "center")
    ax.set(xscale="log", xlabel="context, tokens")
    powers = [2**k for k in range(40) if lengths[0] <= 2**k <= end]
    name_lengths(ax, powers[(len(powers) - 1) % 2::2])  # every other one, the last one among them


def dry_run(estimate: Estimate, at: Callable[[int], Estimate | None], most: Estimate | None,
            png_path: str | Path) -> None:
    """Draws an Estimate: its device memory by region, beside that of the longest context (`most`); and MFU
    against the context, from 4K to the longest. at(S): an Estimate, or None."""
    cfg, longest = estimate.cfg, most or estimate
    end, unit = longest.cfg.block_size, cfg.block_multiple
    lengths = sorted({max(unit, int(S) // unit * unit) for S in np.geomspace(min(4096, end), end, 24)})
    pp = f"pp={cfg.pp} " * (cfg.pp > 1)
    with picture(png_path, 1, 2, figsize=(11, 5), width_ratios=(2, 3)) as (fig, (left, right)):
        memory_bars(left, [estimate, longest] if end != cfg.block_size else [estimate], estimate.capacity)
        speed_curve(right, estimate, lengths, end, at)
        for ax in (left, right):
            ax.grid(alpha=0.2, axis="y")
        fig.suptitle(f"{estimate.world} x {estimate.machine.name}, {pp}tp={cfg.tp} cp={cfg.cp} "
                     f"dp={estimate.dp}, {cfg.activation}")
