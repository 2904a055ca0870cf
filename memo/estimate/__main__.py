"""The dry run: whether a config fits a machine, which alpha it gets, how long a step takes, at what MFU, and
how long the context could be. Without a GPU; with --fast without torch too.

    python -m memo.estimate config/7b_1m.py --gpus=8 --gpu=a800-80gb [--search] [--max_context]
                            [--json] [--plot] [--program] [--fast] [--node=NAME]
                            [--<figure of the hardware>=NUMBER] [--key=value ...]
"""

import sys
from contextlib import suppress
from dataclasses import Field, replace
from math import isfinite, prod
from pathlib import Path

from memo.config.config import Config
from memo.config.keys import Keys, Value, check_value, columns, kind_of, number_of, option, shown
from memo.errors import ConfigError
from memo.run.load_config import known_key, load_keys, read_keys
from memo.system import hardware
from memo.system.command import answer_early, check_alone, progress, run
from memo.system.files import load_json


def figure(name: str) -> Field[Value]:
    """Makes the option of a figure of the hardware, with generous bounds."""
    if name.endswith("memory_bytes"):
        return option(f"--{name}", float, least=1.0, most=1e18, why="no cluster has as much")
    if name == "multiprocessors" or "gpus" in name:
        return option(f"--{name}", int, least=1, most=2**20, why="no cluster has as many")
    return option(f"--{name}", float, least=1.0, most=1e21, why="no hardware is as fast")


FIGURES = {name: figure(name) for name in ("device_memory_bytes", *sorted(
    (hardware.known_figures(hardware.GPU) | hardware.known_figures(hardware.Node)) - {"memory_bytes"}))}
NUMBERS = FIGURES | {"gpus": figure("gpus")}
FLAGS = {"search": "the five fastest layouts", "max_context": "the greatest block_size that fits",
         "program": "what the streams of a step do, in which order, and wait for: of a few layers",
         "fast": "a bound of the temporary tensors' memory instead of a trace of the step",
         "json": "one object"}
OPTIONS = {"gpu": f"one of {', '.join(hardware.GPUS)}; here (default): what --calibrate measured",
           "node": f"one of {', '.join(hardware.NODES)}; by default what the GPU usually comes in",
           "gpus": "ranks in all; by default pp * tp * cp of the config",
           "lengths": "of documents, of a dataset's folder or a list as in 300000,500x4000 (4,000 have 500 "
                      "tokens each), with documents=true: the mean and the slowest step",
           "plot": "a picture; by default estimate.png"}


def estimate_help() -> str:
    told = {"host_memory_bytes": "what a node grants", "device_memory_bytes": "of one GPU"}
    rows: list[tuple[str, str | None]] = [(f"--{name}=", text) for name, text in OPTIONS.items()]
    rows += [(f"--{name}", text) for name, text in FLAGS.items()]
    rows += [("figures of the hardware", None), *((f"--{name}=", told.get(name, "")) for name in FIGURES)]
    return f"{__doc__.strip()}\n\n{columns(rows)}"


def read_number(f: Field[Value], text: str) -> float:
    """Reads a number as in 2e12, of option `f`. Errors: ConfigError."""
    try:
        value = number_of(text, float)
    except ValueError:
        raise ConfigError(f"{f.name}={shown(text)[1:-1]} must be a number, as in 2e12") from None
    if f.type is int and isfinite(value) and value % 1:
        raise ConfigError(f"{f.name}={text} must be a whole number")
    check_value(f, kind_of(f)(value) if isfinite(value) else value)
    return int(value) if value.is_integer() else value


def read_argv(argv: list[str]) -> tuple[Keys, Keys]:
    """Splits a command line -> (our own options and flags, the config's keys). Errors: ConfigError."""
    if {"--help", "-h"} & set(argv):
        print(estimate_help())
        sys.exit()
    check_alone("python -m memo.estimate")
    options: Keys = {}
    rest, own = [], (*FLAGS, *OPTIONS, *FIGURES)
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in own:
            if arg.startswith("--") and equals:
                known_key(name, arg, own)
            rest.append(arg)
        elif name in FLAGS or (name == "plot" and not equals):
            if equals:
                raise ConfigError(f"{arg}: --{name} takes no value; leave it out")
            options[name] = True if name in FLAGS else "estimate.png"
        elif name in NUMBERS:
            options[name] = read_number(NUMBERS[name], value)
        else:
            check_value(option(f"--{name}", str, least=1), value)
            if name == "plot" and not Path(value).parent.is_dir():
                raise ConfigError(f"{arg} cannot be written (no folder {Path(value).parent}); try "
                                  "--plot=estimate.png")
            options[name] = value
    if "lengths" in options and read_keys(rest)[1].get("documents") is False:
        raise ConfigError(f"--lengths={options['lengths']:.60} is of documents, of which --documents=false "
                          "has none; leave one of them out")
    return options, load_keys(rest)


if __name__ == "__main__":  # before what else is imported, which takes a moment
    answer_early(read_argv)

import json

from memo.config.formulas import parameters, percent
from memo.estimate.arena import ROOT, ArenaOf, fast_arena, itemsize_of, traced_arena
from memo.estimate.budget import Estimate, estimate
from memo.estimate.lengths import Documents, by_lengths, lines_of
from memo.estimate.regions import STATES_BYTES, granting
from memo.estimate.report import HEADING, advice, as_dict, billions, draw_estimate, limit_of, summary, table
from memo.estimate.search import longest, longest_of_layouts, search
from memo.kernels.backends import check_matmul
from memo.schedule.listing import listing
from memo.system.hardware import GIB, Machine


def local_vocab_size(dataset: str) -> int:
    """Looks up the vocabulary of the dataset on this disk; 0 where there is none."""
    folder = ROOT / "data" / dataset
    with suppress(ConfigError):
        n = load_json((folder if folder.is_dir() else Path(dataset)) / "meta.json", "").get("vocab_size")
        return n if type(n) is int and 1 <= n <= 2**32 else 0
    return 0


def prepare(argv: list[str]) -> tuple[Config, Machine, int, Keys]:
    """Reads a command line -> (cfg, machine, world, options). Errors: ConfigError."""
    options, keys = read_argv(argv)
    if keys.get("pp") == "auto" and "gpus" not in options:
        raise ConfigError("pp=auto needs the number of ranks that stages are to be found for; give --gpus=")
    world = int(options.get("gpus") or prod(keys.get(name, 1) for name in ("pp", "tp", "cp")))
    if "search" in options:  # among all layouts: the config's own need not be one
        keys |= dict(pp=1, tp=1, cp=1, msp=False)
    if "lengths" in options:
        keys["documents"] = True
    cfg = Config(**keys)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or local_vocab_size(cfg.dataset))
    figures = {name: options[name] for name in FIGURES if name in options}
    granted = figures.pop("host_memory_bytes", None)
    machine = hardware.machine(options.get("gpu", "here"), options.get("node"), world, **figures)
    if granted is not None:
        cfg, machine = granting(cfg, machine, world, granted)
    return cfg, machine, world, options


# --- for people ---

def check_size(cfg: Config, machine: Machine, world: int) -> None:
    """Checks that sharing out could make the model's states fit. Errors: ConfigError."""
    if cfg.states in ("auto", "host") or machine.memory_bytes is None:
        return
    whole = itemsize_of(cfg, machine) * (cfg.states == "device")  # of what comes the masters are enough
    each = whole + (4 + STATES_BYTES) * (cfg.optimizer_device != "cpu")
    needs, there = each * parameters(cfg), world * machine.memory_bytes
    if needs > there:
        least = -(-needs // machine.memory_bytes)
        raise ConfigError(f"--gpus={world}: {billions(parameters(cfg))} parameters, their gradients and "
                          f"optimizer take {needs / GIB:.4g} GiB, all {world} devices together have "
                          f"{there / GIB:.4g}: {(needs - there) / GIB:.4g} GiB too much; try at least "
                          f"--gpus={least}, a larger --gpu, --optimizer_device=cpu or --states=host")


def find_longest(cfg: Config, got: Estimate, arena: ArenaOf,
                 options: Keys) -> tuple[Estimate | None, dict[str, object], list[str]]:
    """Finds the longest context, of the layout of `got`, or with --search of all layouts of `cfg` -> (its
    Estimate, what --json says of it, the same for people)."""
    machine, world, documents = got.machine, got.world, got.documents
    if not options.get("search"):
        every, most = [], longest(got.asked, machine, world, arena, documents=documents)
    else:
        every = longest_of_layouts(cfg, machine, world, arena, documents=documents)
        most = next(iter(every), None)
    limit, text = limit_of(most) if most else (None, "")
    out: dict[str, object] = dict(max_block_size=most.cfg.block_size if most else 0,
                                  max_block_size_limit=limit)
    lines = ["max_context " + (f"{most.cfg.block_size:,} tokens, MFU {percent(most.mfu)}, {text}" if most else
                               "none: what does not depend on the sequence is too much already")]
    if options.get("search"):
        out["longest"] = [as_dict(other) for other in every]
        lines += ["", f"{'longest':>13}  {HEADING}",
                  *(f"{other.cfg.block_size:>13,}  {summary(other)}" for other in every)]
    return most, out, lines


def main(argv: list[str]) -> int:
    """Runs the command line -> the exit code: 0 where the run fits, else 1. Errors: ConfigError."""
    cfg, machine, world, options = prepare(argv)
    check_size(cfg, machine, world)
    check_matmul(cfg, machine.capability, itemsize_of(cfg, machine))
    arena = fast_arena if options.get("fast") else traced_arena
    lines, found, most = [], [], None
    documents = Documents(options["lengths"]) if "lengths" in options else None
    if documents:
        documents(cfg)  # an error now, not in the search
    if options.get("search"):
        found = search(cfg, machine, world, arena, documents=documents)
        none = [] if found[0].fits else ["none fits; the nearest:"]
        lines += [*none, HEADING, *map(summary, found), ""]
    works = "bounding" if options.get("fast") else "tracing"
    with progress(lambda: f"{works} a step of {cfg.batch_size * cfg.block_size:,} tokens"):
        got = found[0] if found else estimate(cfg, machine, world, arena, documents)
    lines += table(got)
    if got.fits:
        lines.append(f"fits        bound by {got.binds}")
    else:
        with progress(lambda: "it does not fit: looking for what would"):
            lines += advice(got)
    out = as_dict(got)
    if documents:
        out["documents"] = of_documents = by_lengths(got, documents.packed(got.decided))
        lines += lines_of(of_documents, cfg.block_size)
    if options.get("search"):
        out["candidates"] = [as_dict(other) for other in found[1:]]
    if options.get("max_context"):
        most, more, told = find_longest(cfg, got, arena, options)
        out, lines = out | more, lines + told
    if options.get("program"):
        out["program"] = program = [*listing(got.placement.program)]
        lines += ["", *program]
    print(json.dumps(out) if options.get("json") else "\n".join(lines), flush=True)
    if "plot" in options:
        most = most or find_longest(cfg, got, arena, {})[0]
        for path in draw_estimate(got, most, options["plot"]):
            print(f"plot        {path}", file=sys.stderr if options.get("json") else sys.stdout)
    return 0 if got.fits else 1


if __name__ == "__main__":
    sys.exit(run(main))
