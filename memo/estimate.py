"""The dry run: whether a config fits a machine, which alpha it gets, how long a step takes, at what MFU, and how long the
context could be. Without a GPU; with --fast without torch too.

    python -m memo.estimate config/7b_1m.py --gpus=8 --gpu=a800-80gb [--search] [--max_context] [--json] [--plot] [--fast]
                            [--node=NAME] [--<figure of the hardware>=NUMBER] [--key=value ...]
"""

import sys
from contextlib import suppress
from dataclasses import replace
from math import isfinite

from memo import hardware
from memo.command import answer_early, end_with_reader, progress, run
from memo.config import Config, load_keys
from memo.errors import ConfigError
from memo.files import load_json
from memo.keys import check_value, columns, option, shown


def figure(name):
    """The option of a figure of the hardware, with generous bounds."""
    if name.endswith("memory_bytes"):
        return option(f"--{name}", float, least=1.0, most=1e18, why="no cluster has as much")
    if name == "multiprocessors" or "gpus" in name:
        return option(f"--{name}", int, least=1, most=2**20, why="no cluster has as many")
    return option(f"--{name}", float, least=1.0, most=1e21, why="no hardware is as fast")


FIGURES = {name: figure(name) for name in ("device_memory_bytes", *sorted(
    (hardware.known_figures(hardware.GPU) | hardware.known_figures(hardware.Node)) - {"memory_bytes"}))}
NUMBERS = FIGURES | {"gpus": figure("gpus")}
FLAGS = {"search": "the five fastest layouts", "max_context": "the greatest block_size that fits",
         "fast": "a bound of the temporary tensors' memory instead of a trace of the step", "json": "one object"}
OPTIONS = {"gpu": f"one of {', '.join(hardware.GPUS)}; here (default): what --calibrate measured",
           "node": f"one of {', '.join(hardware.NODES)}; by default what the GPU usually comes in",
           "gpus": "ranks in all; by default tp * cp of the config",
           "plot": "a picture; by default estimate.png"}


def help_text():
    told = {"host_memory_bytes": "what a node grants", "device_memory_bytes": "of one GPU"}
    rows = [(f"--{name}=", text) for name, text in OPTIONS.items()] + [(f"--{name}", text) for name, text in FLAGS.items()]
    rows += [("figures of the hardware", None), *((f"--{name}=", told.get(name, "")) for name in FIGURES)]
    return f"{__doc__.strip()}\n\n{columns(rows)}"


def read_number(f, text):
    """A number as in 2e12, of option `f`. Errors: ConfigError."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{f.name}={shown(text)[1:-1]} must be a number, as in 2e12") from None
    if f.type is int and isfinite(value) and value % 1:
        raise ConfigError(f"{f.name}={text} must be a whole number")
    check_value(f, f.type(value) if isfinite(value) else value)
    return int(value) if value.is_integer() else value


def read_argv(argv):
    """(our own options and flags, the config's keys). After --help the process ends. Errors: ConfigError."""
    if {"--help", "-h"} & set(argv):
        print(help_text())
        sys.exit()
    options, rest = {}, []
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in (*FLAGS, *OPTIONS, *FIGURES):
            rest.append(arg)
        elif name in FLAGS or (name == "plot" and not equals):
            if equals:
                raise ConfigError(f"{arg}: --{name} takes no value; leave it out")
            options[name] = True if name in FLAGS else "estimate.png"
        elif name in NUMBERS:
            options[name] = read_number(NUMBERS[name], value)
        else:
            check_value(option(f"--{name}", str, least=1), value)
            options[name] = value
    return options, load_keys(rest)


if __name__ == "__main__":  # before what else is imported, which takes a moment
    end_with_reader()
    answer_early(read_argv)

import json
from pathlib import Path

from memo.alpha import what_set_it
from memo.backends import kernel_of
from memo.budget import ROOT, STATES_BYTES, Line, estimate, fast_arena, granting, itemsize_of, traced_arena
from memo.metrics import parameters, percent
from memo.plots import dry_run
from memo.search import at_its_end, changed, longest, remedies, search, tried

GIB = 2**30


def vocab_size_of(dataset):
    """The dataset's, where it is here already; otherwise 0."""
    folder = ROOT / "data" / dataset
    with suppress(ConfigError):
        n = load_json((folder if folder.is_dir() else Path(dataset)) / "meta.json", "").get("vocab_size")
        return n if type(n) is int and 1 <= n <= 2**32 else 0
    return 0


def prepare(argv):
    """(cfg, machine, world, options). Errors: ConfigError."""
    options, keys = read_argv(argv)
    world = options.get("gpus", keys.get("tp", 1) * keys.get("cp", 1))
    if "search" in options:  # among all layouts: the config's own need not be one
        keys |= dict(tp=1, cp=1)
    cfg = Config(**keys)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or vocab_size_of(cfg.dataset))
    figures = {name: options[name] for name in FIGURES if name in options}
    granted = figures.pop("host_memory_bytes", None)
    machine = hardware.machine(options.get("gpu", "here"), options.get("node"), world, **figures)
    if granted is not None:
        cfg, machine = granting(cfg, machine, world, granted)
    return cfg, machine, world, options


# --- for people ---

def gib(n):
    return f"{n / GIB:.2f}" if n else ""


def billions(n):
    return f"{n / 1e9:.3g}B" if n >= 1e9 else f"{n / 1e6:.3g}M"


def layout_of(got):
    cfg = got.cfg
    kind = f" {cfg.context_parallel}" if cfg.cp > 1 else ""
    return f"tp={cfg.tp} cp={cfg.cp}{kind} dp={got.dp}"


def mode_of(got):
    cfg = got.cfg
    how = f" ({cfg.alpha_mode})" if cfg.finds_alpha else ""
    return f"{cfg.activation}{how}{', optimizer on the host' * (cfg.optimizer_device == 'cpu')}"


def table(got):
    """The lines of one estimate for people: bytes of a rank, which add up, alpha, seconds, the verdict."""
    cfg = got.cfg
    nodes = -(-got.world // got.machine.node.gpus_per_node)
    lines = [f"model       {billions(parameters(cfg))} parameters, L={cfg.n_layer} C={cfg.n_embd} H={cfg.n_head} "
             f"V={cfg.vocab_size} S={cfg.block_size:,}",
             f"machine     {got.world} x {got.machine.name} on {nodes} node{'s' * (nodes > 1)}, {layout_of(got)}",
             f"activation  {mode_of(got)}",
             f"attention   {kernel_of(cfg, got.machine)}",
             f"{'memory of a rank, GiB':44}{'device':>10}{'host':>10}"]
    rows = [*got.lines, Line("", "in all", got.device_bytes, sum(line.host_bytes for line in got.lines)),
            Line("", "there is", got.capacity or 0, max(0, got.host_capacity // got.local_ranks))]
    lines += [f"            {row.what:32}{gib(row.device_bytes):>10}{gib(row.host_bytes):>10}".rstrip() for row in rows]
    if got.plan:
        lines.append(f"alpha       {what_set_it(cfg, got.plan, got.placement.n_swapped)}")
    if got.seconds:
        parts = {name: s / got.seconds["step"] for name, s in got.seconds.items() if name != "step"}
        parts = [f"{name} {part:.1%}" for name, part in parts.items() if part >= 0.0005]
        lines += [f"step        {got.seconds['step']:.4g} s: {', '.join(parts)}",
                  f"            MFU {percent(got.mfu)}, TGS {got.tgs:,.1f}"]
    else:
        lines.append("step        n/a: this machine's speed in this dtype is not known; python -m memo.profiler --calibrate")
    return lines


def summary(got):
    alpha = "" if got.alpha is None else f"{got.alpha:.2f}"
    return f"{layout_of(got):26}{mode_of(got):42}{alpha:>6}{percent(got.mfu):>8}" \
           f"{got.tgs or 0:>12,.1f}{got.device_bytes / GIB:>9.1f}  {got.binds}"


HEADING = f"{'layout':26}{'activation':42}{'alpha':>6}{'MFU':>8}{'TGS':>12}{'GiB':>9}  bound by"


def advice(got):
    """The lines on what would make it fit."""
    lines = [f"does not fit: {got.why}"]
    others = remedies(got)
    if not others:
        lines.append("            no other layout or mode would help, nor up to eight times the GPUs")
    for text, other in others:
        cost = "" if None in (got.mfu, other.mfu) else f" ({100 * (other.mfu - got.mfu):+.1f})"
        lines.append(f"            it would with {text}: MFU {percent(other.mfu)}{cost}")
    return lines


# --- for programs ---

def as_dict(got):
    """--json, see DESIGN section 5. device_bytes are a rank's, host_bytes a node's; None is not known."""
    layer = got.layer
    regions = dict.fromkeys(("params", "grads", "optimizer", "rounding_buffers", "transient", "head"), 0)
    for line in got.lines:
        if line.device_bytes:
            regions[line.region] = regions.get(line.region, 0) + line.device_bytes
    limits = {name: None for name in ("overlap", "host")} | dict(got.plan.limits if got.plan else {})
    return dict(layout=dict(tp=got.cfg.tp, cp=got.cfg.cp, pp=1, dp=got.dp), alpha=got.alpha, alpha_limits=limits,
                binds=got.binds, device_bytes=regions | dict(total=got.device_bytes, capacity=got.capacity),
                host_bytes=dict(total=got.host_bytes, capacity=got.host_capacity),
                seconds=dict(layer_forward=layer and layer.forward_s, layer_offload=got.layer_offload_s,
                             step=got.seconds.get("step"), parts={k: v for k, v in got.seconds.items() if k != "step"}),
                mfu=got.mfu, tgs=got.tgs, fits=got.fits, reason=got.reason, why=got.why,
                keys=dict(block_size=got.cfg.block_size, activation=got.cfg.activation, alpha_mode=got.cfg.alpha_mode,
                          context_parallel=got.cfg.context_parallel, optimizer_device=got.cfg.optimizer_device))


def check_size(cfg, machine, world):
    """Errors: ConfigError where no sharing out could make the model's states fit."""
    each = itemsize_of(cfg, machine) + (4 + STATES_BYTES) * (cfg.optimizer_device == "auto")
    needs, there = each * parameters(cfg), world * (machine.memory_bytes or 0)
    if machine.memory_bytes is not None and needs > there:
        least = -(-needs // machine.memory_bytes)
        raise ConfigError(f"--gpus={world}: {billions(parameters(cfg))} parameters, their gradients and optimizer take "
                          f"{needs / GIB:.4g} GiB, all {world} devices together have {there / GIB:.4g}: "
                          f"{(needs - there) / GIB:.4g} GiB too much; try at least --gpus={least}, a larger --gpu or "
                          "--optimizer_device=cpu")


def main(argv):
    """The command line. Errors: ConfigError, bad input."""
    cfg, machine, world, options = prepare(argv)
    check_size(cfg, machine, world)
    arena = fast_arena if options.get("fast") else traced_arena
    lines, found = [], []
    if options.get("search"):
        found = search(cfg, machine, world, arena)
        none = [] if found[0].fits else ["none fits; the nearest:"]
        lines += [*none, HEADING, *map(summary, found), ""]
    with progress(lambda: f"tracing a step of {cfg.batch_size * cfg.block_size:,} tokens"):
        got = found[0] if found else estimate(cfg, machine, world, arena)
    lines += table(got)
    if got.fits:
        lines.append(f"fits        bound by {got.binds}")
    else:
        with progress(lambda: "it does not fit: looking for what would"):
            lines += advice(got)
    out = as_dict(got)
    if options.get("search"):
        out["candidates"] = [as_dict(other) for other in found[1:]]
    most = longest(got.cfg, machine, world, arena) if {"max_context", "plot"} & set(options) else None
    if options.get("max_context"):
        out["max_block_size"], out["max_block_size_limit"] = (most.cfg.block_size, limit_of(most)[0]) if most else (0, None)
        lines.append(f"max_context {most.cfg.block_size:,} tokens, MFU {percent(most.mfu)}, {limit_of(most)[1]}" if most else
                     "max_context none: what does not depend on the sequence is too much already")
    print(json.dumps(out) if options.get("json") else "\n".join(lines), flush=True)
    if "plot" in options:
        draw(got, machine, world, most, options["plot"])
        print(f"plot        {options['plot']}", file=sys.stderr if options.get("json") else sys.stdout)


def draw(got, machine, world, most, path):
    """dry_run()'s picture. Errors: ConfigError where it cannot be written."""
    try:
        with progress(lambda: f"drawing {path}"):
            dry_run(got, lambda S: tried(changed(got.cfg, block_size=S), machine, world, fast_arena), most, path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--plot={path} cannot be written ({e}); try --plot=estimate.png") from None


def limit_of(most):
    """(what ends the context: the memory that is nearer to full, or where the search ended; the same for people)."""
    if most.capacity is None:
        name, full = "memory", ""
    else:
        device, host = most.device_bytes / most.capacity, most.host_bytes / max(1, most.host_capacity)
        name, full = f"{'device' if device > host else 'host'} memory", f" ({max(device, host):.0%} full)"
    if at_its_end(most):
        return "search", f"where this search ends; more would fit: {name}{full}"
    return name, name + full


if __name__ == "__main__":
    sys.exit(run(main))
