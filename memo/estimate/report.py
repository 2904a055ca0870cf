"""An Estimate for people, for programs, as a picture."""

from itertools import groupby
from pathlib import Path

import numpy as np

from memo.config.formulas import parameters, percent
from memo.config.keys import counted
from memo.config.layer import head_groups
from memo.config.layout import Layout, subsequences_line
from memo.config.msp import shares_lines
from memo.decide.alpha import SwapPlan
from memo.errors import ConfigError
from memo.estimate.arena import fast_arena
from memo.estimate.budget import Estimate
from memo.estimate.pipeline_seconds import pipeline_spans
from memo.estimate.regions import Line
from memo.estimate.search import LONGEST, MULTIPLE, config_with, estimate_or_none, remedies, with_more_host
from memo.kernels.backends import kernel_of, windows_words
from memo.memory.placement import Placement
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, RED, Drawn, name_lengths, note, picture
from memo.plots.pipeline import pipeline
from memo.system.command import progress
from memo.system.hardware import GIB


def gib(n: int) -> str:
    return f"{n / GIB:.2f}" if n else ""


def billions(n: float) -> str:
    return f"{n / 1e9:.3g}B" if n >= 1e9 else f"{n / 1e6:.3g}M"


def layout_of(got: Estimate) -> str:
    cfg = got.cfg
    kind = f" {cfg.context_parallel}" if cfg.cp > 1 and not cfg.metp else ""  # METP's is a ring
    pp = f"pp={cfg.pp} " * (cfg.pp > 1) + "msp " * cfg.msp
    return f"{pp}tp={cfg.tp}{' metp' * cfg.metp} cp={cfg.cp}{kind} dp={got.dp}"


def mode_of(got: Estimate) -> str:
    cfg = got.cfg
    how = f" ({cfg.alpha_mode})" if cfg.finds_alpha else ""
    where = {"device": ", optimizer on the host" * cfg.optimizer_on_host, "sharded": ", states sharded",
             "host": ", states on the host"}
    return f"{cfg.activation}{how}{where[cfg.states]}"


def table(got: Estimate) -> list[str]:
    """Lists the lines of an estimate: bytes of a rank, which add up, alpha, seconds, the verdict."""
    cfg, kernel = got.cfg, kernel_of(got.cfg, got.machine)
    nodes = -(-got.world // got.machine.node.gpus_per_node)
    shared = f" Hkv={cfg.kv_heads}" if cfg.kv_heads < cfg.n_head else ""
    groups = f", {head_groups(cfg)} groups of heads one after the other" if cfg.metp else ""
    lines = [f"model       {billions(parameters(cfg))} parameters, L={cfg.n_layer} C={cfg.n_embd} "
             f"H={cfg.n_head}{shared} V={cfg.vocab_size} S={cfg.block_size:,}",
             f"machine     {got.world} x {got.machine.name} on {counted(nodes, 'node')}, {layout_of(got)}",
             f"activation  {mode_of(got)}",
             f"attention   {kernel}{windows_words(kernel, cfg.window > 0)}{groups}",
             *filter(None, [subsequences_line(cfg, got.chosen)]), *stage_lines(got),
             f"{'memory of a rank' + f' of stage {cfg.stage}' * (cfg.pp > 1) + ', GiB':44}"
             f"{'device':>10}{'host':>10}"]
    rows = [*got.lines, Line("", "in all", got.device_bytes, got.shown.host_bytes),
            Line("", "there is", got.capacity or 0, max(0, got.host_capacity // got.local_ranks))]
    lines += [f"            {row.what:32}{gib(row.device_bytes):>10}{gib(row.host_bytes):>10}".rstrip()
              for row in rows]
    if got.plan:
        lines.append(f"alpha       {what_set_it(cfg, got.plan, got.placement)}")
    if got.seconds:
        parts = {name: s / got.seconds["step"] for name, s in got.seconds.items() if name != "step"}
        shares = [f"{name} {part:.1%}" for name, part in parts.items() if part >= 0.0005]
        of = " (a typical batch)" * (got.documents is not None)
        lines += [f"step        {got.seconds['step']:.4g} s{of}: {', '.join(shares)}",
                  f"            MFU {percent(got.mfu)}, TGS {got.tgs:,.1f}"]
    else:
        lines.append("step        n/a: this machine's speed in this dtype is not known; "
                     "python -m memo.profiler --calibrate")
    return lines


def what_set_it(cfg: Layout, plan: SwapPlan, placement: Placement) -> str:
    """Lists alpha, what set it, and what each limit allows: for the startup's table and the estimate's."""
    if placement.n_swapped <= 0:
        return f"none: all {placement.what} stay on the device"
    why = "given" if not cfg.finds_alpha else f"set by {plan.binds}" if plan.binds else "all of it"
    limits = ", ".join(f"{name} allows {limit:.2f}" for name, limit in plan.limits.items())
    least, most = (f"{of(plan.alphas):.2f}" for of in (min, max))
    spread = f" ({least} to {most})" if least != most else ""
    return f"{plan.alpha:.3f}{spread}, {why}: {limits}"


def stage_lines(got: Estimate) -> list[str]:
    """Lists the lines on the stages of a pipeline; those that follow each other and are alike have one."""
    if len(got.stages) == 1:
        return []
    lines = [f"{'stages':44}{'device':>10}{'host':>10}{'alpha':>10}"]
    for _, run in groupby(got.stages, key=lambda one: (one.cfg.stage_kind, one.alpha, one.placement.guests,
                                                       one.placement.lent)):
        first, *others = run
        n, k = len(first.cfg.layers), first.cfg.stage
        numbers = f"{k} to {k + len(others)}, each" if others else f"{k}"
        ends = " and embedding" * first.cfg.has_embedding + " and head" * first.cfg.has_head
        alpha = "" if first.alpha is None else f"{first.alpha:.3f}"
        lines.append(f"            {f'{numbers}: {n} layer' + 's' * (n > 1) + ends:32}"
                     f"{gib(first.device_bytes):>10}{gib(first.host_bytes):>10}{alpha:>10}".rstrip())
    if got.cfg.msp:
        lent = [piece for one in got.stages for piece in one.placement.lent]
        lines += shares_lines(lent, got.cfg.pp, got.cfg.subsequences)
    return lines


def summary(got: Estimate) -> str:
    alpha = "" if got.alpha is None else f"{got.alpha:.2f}"
    return f"{layout_of(got):33}{mode_of(got):42}{alpha:>6}{percent(got.mfu):>8}" \
           f"{got.tgs or 0:>12,.1f}{got.device_bytes / GIB:>9.1f}  {got.binds}"


HEADING = f"{'layout':33}{'activation':42}{'alpha':>6}{'MFU':>8}{'TGS':>12}{'GiB':>9}  bound by"


def advice(got: Estimate) -> list[str]:
    """Lists the lines on what would make it fit."""
    lines = [f"does not fit: {got.why}"]
    others = with_more_host(got) + remedies(got)
    if not others:
        lines.append("            no other layout or mode would help, nor up to eight times the GPUs")
    for text, other in others:
        cost = "" if got.mfu is None or other.mfu is None else f" ({100 * (other.mfu - got.mfu):+.1f})"
        lines.append(f"            it would with {text}: MFU {percent(other.mfu)}{cost}")
    return lines


# --- for programs ---


def as_dict(got: Estimate) -> dict[str, object]:
    """Makes the object of --json. device_bytes are a rank's, host_bytes a node's; None: not known."""
    layer, plan = got.layer, got.plan if got.alpha is not None else None  # of a stage that swaps layers
    regions = dict.fromkeys(("params", "grads", "optimizer", "rounding_buffers", "transient", "head"), 0)
    for line in got.lines:
        if line.device_bytes:
            regions[line.region] = regions.get(line.region, 0) + line.device_bytes
    limits = {name: None for name in ("overlap", "host")} | dict(got.plan.limits if got.plan else {})
    cfg, parts = got.cfg, {k: v for k, v in got.seconds.items() if k != "step"}
    layout = dict(tp=cfg.tp, cp=cfg.cp, pp=cfg.pp, dp=got.dp, tensor_parallel=cfg.tensor_parallel,
                  subsequences=cfg.subsequences)
    if cfg.msp:
        layout["msp"] = True
    if cfg.metp:
        layout["head_groups"] = head_groups(cfg)
    stages = dict(stage=cfg.stage, stages=[
        dict(layers=list(one.cfg.layers), device_bytes=one.device_bytes, host_bytes=one.host_bytes,
             alpha=one.alpha)
        | (dict(lent=[piece._asdict() for piece in one.placement.lent]) if cfg.msp else {})
        for one in got.stages]) if cfg.pp > 1 else {}
    return dict(layout=layout, alpha=got.alpha, alpha_limits=limits, binds=got.binds,
                device_bytes=regions | dict(total=got.device_bytes, capacity=got.capacity),
                host_bytes=dict(total=got.host_bytes, capacity=got.host_capacity),
                seconds=dict(layer_forward=layer and layer.forward_s,
                             layer_offload=plan and plan.layer_bytes / got.machine.node.pcie_bytes_per_s,
                             step=got.seconds.get("step"), parts=parts),
                mfu=got.mfu, tgs=got.tgs, fits=got.fits, reason=got.reason, why=got.why,
                keys=dict(block_size=cfg.block_size, activation=cfg.activation, alpha_mode=cfg.alpha_mode,
                          context_parallel=cfg.context_parallel, optimizer_device=cfg.optimizer_device,
                          states=cfg.states),
                **stages)


def draw_estimate(got: Estimate, most: Estimate | None, path: str) -> list[str]:
    """Draws dry_run()'s picture, and a pipeline's where seconds are known -> files. Errors: ConfigError."""
    drawn = [path]
    try:
        with progress(lambda: f"drawing {path}"):
            dry_run(got, most, path)
            if len(got.stages) > 1 and got.layer:
                spans = pipeline_spans(got.stages, got.machine, got.world, got.itemsize, got.layer)
                drawn.append(str(Path(path).with_stem(f"{Path(path).stem}_pipeline")))
                name = (f"{got.world} x {got.machine.name}, {layout_of(got)}, {got.cfg.activation}, "
                        f"S = {got.cfg.block_size:,}: a micro batch")
                pipeline(spans, got.cfg.subsequences, drawn[-1], name)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--plot={path} cannot be written ({e}); try --plot=estimate.png") from None
    return drawn


def limit_of(most: Estimate) -> tuple[str, str]:
    """Finds (what limits the longest context, the same for people): the fuller memory, or the search."""
    if most.capacity is None:
        name, full = "memory", ""
    else:
        device, host = most.device_bytes / most.capacity, most.host_bytes / max(1, most.host_capacity)
        name, full = f"{'device' if device > host else 'host'} memory", f" ({max(device, host):.0%} full)"
    unit = MULTIPLE * most.cfg.cp * most.cfg.tp
    if most.cfg.block_size + unit > max(LONGEST, unit):  # the search ended here, not the memory
        return "search", f"where this search ends; more would fit: {name}{full}"
    return name, name + full


# --- as a picture ---

REGION_COLORS = {"params": "#1f3a5f", "grads": BLUE, "optimizer": PALE, "rounding_buffers": ORANGE,
                 "keys": "#b5540a", "key_gradients": "#e8a46a", "stream": "#f3cfa8", "sweep": "#f7e3cd",
                 "resident": "#c98a5b", "transient": GREEN, "head": "#8fcfa8", "positions": "#e8c547",
                 "batch": "#c9b458", "communication": GREY, "context": "#d0d3d8", "margin": "#eceef1"}


def memory_bars(ax: Drawn, bars: list[Estimate], capacity: float | None) -> None:
    """Draws a bar for each Estimate: its device memory by region, stacked, below the capacity in bytes."""
    base = np.zeros(len(bars))
    for region in dict.fromkeys(line.region for bar in bars for line in bar.lines if line.device_bytes):
        nbytes = [sum(line.device_bytes for line in bar.lines if line.region == region) for bar in bars]
        heights = np.array(nbytes) / GIB
        ax.bar(range(len(bars)), heights, 0.6, bottom=base, color=REGION_COLORS[region],
               label=region.replace("_", " "))
        base += heights
    most = (capacity or 0) / GIB
    if capacity is not None:
        ax.axhline(most, color=RED, lw=1.5)
        note(ax, f"capacity {most:.1f} GiB", (0, most), ("axes fraction", "data"), RED, (4, 4), "left")
    ax.set(ylabel="device memory of a rank, GiB", xticks=range(len(bars)), xlim=(-0.6, len(bars) - 0.4),
           xticklabels=[f"S = {bar.cfg.block_size:,}" for bar in bars], ylim=(0, 1.1 * max(*base, most)))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def speed_curve(ax: Drawn, estimate: Estimate, lengths: list[int], found: list[Estimate | None]) -> None:
    """Draws MFU, or tokens per second without a peak, against the contexts that fit, marking `estimate`."""
    points = [one for one in found if one is not None and one.fits]
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
    powers = [2**k for k in range(40) if lengths[0] <= 2**k <= lengths[-1]]
    name_lengths(ax, powers[(len(powers) - 1) % 2::2])  # every other one, the last one among them


def dry_run(estimate: Estimate, most: Estimate | None, png_path: str | Path) -> None:
    """Draws an Estimate: its device memory by region, beside that of the longest context (`most`); and MFU
    against the context, from 4K to the longest."""
    cfg, longest = estimate.cfg, most or estimate
    end, unit = longest.cfg.block_size, cfg.block_multiple
    lengths = sorted({max(unit, int(S) // unit * unit) for S in np.geomspace(min(4096, end), end, 24)})
    found = [estimate_or_none(config_with(estimate.asked, block_size=S), estimate.machine, estimate.world,
                              fast_arena, estimate.documents) for S in lengths]
    pp = f"pp={cfg.pp} " * (cfg.pp > 1)
    with picture(png_path, 1, 2, figsize=(11, 5), width_ratios=(2, 3)) as (fig, (left, right)):
        memory_bars(left, [estimate, longest] if end != cfg.block_size else [estimate], estimate.capacity)
        speed_curve(right, estimate, lengths, found)
        for ax in (left, right):
            ax.grid(alpha=0.2, axis="y")
        fig.suptitle(f"{estimate.world} x {estimate.machine.name}, {pp}tp={cfg.tp} cp={cfg.cp} "
                     f"dp={estimate.dp}, {cfg.activation}")
