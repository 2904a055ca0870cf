"""An Estimate for people, for programs, as a picture."""

from itertools import groupby
from pathlib import Path

from memo.config.formulas import parameters, percent
from memo.config.layer import head_groups
from memo.config.msp import shares_lines
from memo.config.subsequences import subsequences_line
from memo.decide.alpha import what_set_it
from memo.errors import ConfigError
from memo.estimate.arena import fast_arena, itemsize_of
from memo.estimate.budget import Estimate
from memo.estimate.picture import dry_run
from memo.estimate.pipeline_seconds import pipeline_spans
from memo.estimate.regions import Line
from memo.estimate.search import LONGEST, MULTIPLE, config_with, estimate_or_none, remedies
from memo.kernels.backends import kernel_of
from memo.plots.pipeline import pipeline
from memo.system.command import progress
from memo.system.hardware import GIB, Machine


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
    cfg = got.cfg
    nodes = -(-got.world // got.machine.node.gpus_per_node)
    shared = f" Hkv={cfg.kv_heads}" if cfg.kv_heads < cfg.n_head else ""
    groups = f", {head_groups(cfg)} groups of heads one after the other" if cfg.metp else ""
    lines = [f"model       {billions(parameters(cfg))} parameters, L={cfg.n_layer} C={cfg.n_embd} "
             f"H={cfg.n_head}{shared} V={cfg.vocab_size} S={cfg.block_size:,}",
             f"machine     {got.world} x {got.machine.name} on {nodes} node{'s' * (nodes > 1)}, "
             f"{layout_of(got)}",
             f"activation  {mode_of(got)}",
             f"attention   {kernel_of(cfg, got.machine)}{groups}",
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
        lines += [f"step        {got.seconds['step']:.4g} s: {', '.join(shares)}",
                  f"            MFU {percent(got.mfu)}, TGS {got.tgs:,.1f}"]
    else:
        lines.append("step        n/a: this machine's speed in this dtype is not known; "
                     "python -m memo.profiler --calibrate")
    return lines


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
    others = remedies(got)
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


def draw_estimate(got: Estimate, machine: Machine, world: int, most: Estimate | None, path: str) -> list[str]:
    """Draws dry_run()'s picture, and beside it that of a pipeline, where there are stages and seconds ->
    their files. Errors: ConfigError where they cannot be written."""
    drawn = [path]
    def estimate_at(S: int) -> Estimate | None:
        return estimate_or_none(config_with(got.asked, block_size=S), machine, world, fast_arena)
    try:
        with progress(lambda: f"drawing {path}"):
            dry_run(got, estimate_at, most, path)
            if len(got.stages) > 1 and got.layer:
                itemsize = itemsize_of(got.cfg, machine)
                spans = pipeline_spans(got.stages, machine, world, itemsize, got.layer)
                drawn.append(str(Path(path).with_stem(f"{Path(path).stem}_pipeline")))
                name = (f"{got.world} x {machine.name}, {layout_of(got)}, {got.cfg.activation}, "
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
