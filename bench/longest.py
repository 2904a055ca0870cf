"""How long a context may be: dry runs of common models on common machines. Nothing is run.

    python -m bench.longest table      the longest context of every model on every machine, over layouts
    python -m bench.longest elsewhere  the same of what does not fit there, with states=auto
    python -m bench.longest whole      the same where no attention's forward is repeated, of the judged lines
    python -m bench.longest targets    the fastest layouts at the contexts that were asked for
    python -m bench.longest cost       MFU by number of subsequences at 1,048,576 tokens
    python -m bench.longest curves     the longest context against the host's memory, and against GPUs
    python -m bench.longest draw       the picture of what is there

Several of these at once; without an argument all. The arena of temporary tensors is bounded by a formula;
--trace plans the answers' by a trace, too. Writes bench/results/longest.json and longest.png.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from memo.config.config import Config
from memo.estimate.arena import fast_arena, traced_arena
from memo.estimate.budget import estimate
from memo.estimate.regions import granting
from memo.estimate.report import layout_of, limit_of
from memo.estimate.search import (
    LONGEST,
    config_with,
    estimate_or_none,
    layouts,
    longest,
    longest_of_layouts,
)
from memo.plots.figures import plain
from memo.run.load_config import load_config
from memo.system import hardware
from memo.system.files import save_json
from testing.paper import HOST_BYTES

RESULTS = Path(__file__).parent / "results"
# name: (GPU, GPUs, bytes of host memory that a node grants; None: what memo takes of the node's)
MACHINES = {"1 x RTX 4090, 128 GB": ("rtx4090", 1, None), "1 x H100-80GB, 2 TB": ("h100-80gb", 1, None),
            "8 x A800-80GB, the paper's": ("a800-80gb", 8, HOST_BYTES),
            "8 x H100-80GB": ("h100-80gb", 8, 1.9e12), "8 x H200": ("h200-141gb", 8, 1.9e12),
            "64 x H100-80GB": ("h100-80gb", 64, 1.9e12)}
LARGER_HOSTS = {"1 x RTX 4090, 256 GB": ("rtx4090", 1, 0.9 * 256e9),
                "8 x A800-80GB, 2 TB": ("a800-80gb", 8, 1.8e12)}
# what has no context in the table, there and on the same with more host memory
ELSEWHERE = {"1 x RTX 4090, 128 GB": ("7B", "Llama-3-8B", "Qwen3-8B", "Llama-2-70B"),
             "1 x RTX 4090, 256 GB": ("7B", "Llama-3-8B", "Qwen3-8B", "Llama-2-70B"),
             "1 x H100-80GB, 2 TB": ("Llama-2-70B",), "8 x A800-80GB, the paper's": ("Llama-2-70B",),
             "8 x A800-80GB, 2 TB": ("Llama-2-70B",)}
# Llama-3.2-1B's config.json
LLAMA_1B = dict(n_layer=16, n_embd=2048, n_head=32, n_kv_head=8, n_inner=8192, vocab_size=128256,
                norm="rmsnorm", mlp="swiglu", rope_theta=500000.0, dataset="text")
PRESETS = {"7B": "7b_1m", "Llama-3-8B": "llama3_8b_1m", "Qwen3-8B": "qwen3_8b_1m",
           "Llama-2-70B": "llama2_70b_1m", "Mistral 7B v0.1": "mistral_7b_1m", "Olmo 3 7B": "olmo3_7b_1m",
           "Gemma 3 12B": "gemma3_12b_1m"}
MODELS = ("GPT-2 124M", "Llama 1B", *PRESETS)
PARTS = ["table", "elsewhere", "whole", "targets", "cost", "curves", "draw"]
LAYOUTS = [dict(tp=8, cp=1), dict(tp=4, cp=2), dict(tp=2, cp=4), dict(tp=1, cp=8),
           dict(tp=1, cp=8, context_parallel="ulysses"), dict(tp=8, cp=1, tensor_parallel="metp")]
MEMO = dict(activation="memo", alpha_mode="per_tensor")
# (machine, model, tokens, MFU in percent, whether attention may be repeated)
TARGETS = [("8 x H100-80GB", "7B", 5242880, 37, True), ("8 x H100-80GB", "Llama-3-8B", 5242880, 37, True),
           ("8 x H100-80GB", "7B", 3 * 10**6, 45, False), ("8 x H100-80GB", "Llama-3-8B", 3 * 10**6, 45,
                                                                         False),
           ("1 x H100-80GB, 2 TB", "Llama-3-8B", 2**20, 45, True),
           ("1 x RTX 4090, 128 GB", "Llama 1B", 2**19, 0, True)]


def config_of(model, **keys):
    """A model's config, one sequence a step."""
    equal = dict(subsequence_cut="equal", unit_order="layer", states="device")
    keys = dict(batch_size=1, gradient_accumulation_steps=1) | equal | MEMO | keys
    if model == "Llama 1B":
        return Config(**LLAMA_1B | keys)
    preset = "gpt2_124m" if model == "GPT-2 124M" else PRESETS[model]
    more = dict(position="rope", block_size=2**20) if model == "GPT-2 124M" else {}
    return replace(load_config([f"config/{preset}.py"]), **dict(tp=1, cp=1) | more | keys)


def machine_of(cfg, name):
    """(cfg, machine, GPUs) of a machine of the table."""
    gpu, world, granted = (MACHINES | LARGER_HOSTS)[name]
    machine = hardware.machine(gpu, None, world)
    return *(granting(cfg, machine, world, granted) if granted else (cfg, machine)), world


def without_repetition(got):
    return got.fits and got.placement.input_only == 0


def figures(got):
    """A line of the table."""
    p = got.placement
    return dict(tokens=got.cfg.block_size, subsequences=got.cfg.subsequences, layout=layout_of(got),
                optimizer_device=got.cfg.optimizer_device, states=got.cfg.states, alpha=got.alpha,
                binds=got.binds, limit=limit_of(got)[0], repeated=p.input_only / p.n_units, keys=p.keys,
                stream=p.stream, mfu=got.mfu, step_s=got.seconds["step"],
                device_share=got.device_bytes / got.capacity,
                host_share=got.host_bytes / got.host_capacity)


def length(got):
    return got.cfg.block_size, got.mfu


def traced(got):
    """Of an Estimate by the bound: the arenas of bound and trace, and whether it fits by the trace."""
    exact = estimate(got.cfg, got.machine, got.world, traced_arena)
    arenas = (one.bytes_of("transient")[0] for one in (got, exact))
    return dict(zip(("bound_arena_bytes", "traced_arena_bytes"), arenas, strict=True),
                traced_fits=exact.fits, traced_mfu=exact.mfu)


def rounded(line):
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items() if k != "others"}


def longest_by_subsequences(model, name, suits=lambda got: got.fits, **keys):
    """The Estimates of the longest contexts, one for each number of subsequences that has any: of 1 and 16
    over all layouts, of 64 in the best of 16's. `keys`: for config_of()."""
    cfg, machine, world = machine_of(config_of(model, **keys), name)
    found = []
    for n in (1, 16):
        # of equally long ones the fastest
        of_n = longest_of_layouts(replace(cfg, subsequences=n), machine, world, fast_arena, modes=(MEMO,),
                                  suits=suits)[:1]
        found += of_n
    more = [longest(replace(got.cfg, subsequences=64), machine, world, fast_arena, suits)
            for got in of_n]
    return [*found, *filter(None, more)]


def table(out, cells, trace, keep, suits=lambda got: got.fits, **keys):
    """Adds {machine: {model: the longest context's line, with the others'}} to `out`; keep() after each.
    `keys`: for config_of()."""
    for name, model in cells:
        start = time.process_time()
        found = longest_by_subsequences(model, name, suits, **keys)
        line = dict(tokens=0)
        if found:
            best = max(found, key=length)
            line = figures(best) | dict(others=[figures(got) for got in found if got is not best])
            if trace:
                line |= traced(best)
        out.setdefault(name, {})[model] = line
        print(f"{time.process_time() - start:5.1f} s", name, model,
              rounded(line),
              [(one["subsequences"], one["tokens"]) for one in line.get("others", [])], flush=True)
        keep()


# --- what was asked for ---

def fastest_at(model, name, tokens, suits=lambda got: got.fits, numbers=(1, 16, 64)):
    """Of each number of subsequences the Estimate of the fastest layout at so many tokens that `suits`."""
    cfg, machine, world = machine_of(config_of(model, block_size=tokens), name)
    found = []
    for n in numbers:
        every = [one for one in layouts(replace(cfg, subsequences=n), machine, world, (MEMO,))
                 if (got := estimate_or_none(one, machine, world, fast_arena)) and suits(got.untimed)]
        timed = [estimate(one, machine, world, fast_arena) for one in every]
        found += sorted((got for got in timed if suits(got)), key=lambda got: got.mfu)[-1:]
    return found


def targets(trace):
    """What was asked for beside the fastest layout at that many tokens."""
    out = []
    for name, model, tokens, mfu, may_repeat in TARGETS:
        unit = 1024 * MACHINES[name][1]
        suits = (lambda got: got.fits) if may_repeat else without_repetition
        found = fastest_at(model, name, (tokens // unit + 1) * unit, suits, (1, 16, 64))
        best = max(found, key=lambda got: got.mfu) if found else None
        line = figures(best) | (traced(best) if trace else {}) if best else None
        out.append(dict(machine=name, model=model, wanted_tokens=tokens, wanted_mfu=mfu / 100,
                        may_repeat=may_repeat, fits=bool(best), got=line))
        print(name, model, tokens, "MFU", mfu, "repeated" * may_repeat, line and rounded(line), flush=True)
    return out


def cost():
    """MFU at 1,048,576 tokens on 8 H100 with 1, 4, 16 and 64 subsequences: in the fastest layout of each, and
    layout by layout."""
    name, out = "8 x H100-80GB", []
    for model in ("7B", "Llama-3-8B"):
        cfg, machine, world = machine_of(config_of(model, block_size=2**20), name)
        rows = {}
        for keys in LAYOUTS:
            for n in (1, 4, 16, 64):
                one = config_with(cfg, subsequences=n, head_groups="auto", optimizer_device="auto", **keys)
                got = estimate_or_none(one, machine, world, fast_arena)
                if got and got.fits:
                    rows.setdefault(layout_of(got), {})[n] = dict(
                        mfu=got.mfu, alpha=got.alpha, binds=got.binds, repeated=got.placement.input_only)
        for layout, line in rows.items():
            print(model, layout, {n: f"{got['mfu']:.1%}" for n, got in line.items()}, flush=True)
        out.append(dict(model=model, layouts=rows))
    return out


# --- curves ---

HOSTS = (0.5e12, 1e12, 2e12, 4e12)  # bytes that a node of eight H100 grants
WORLDS = (1, 2, 4, 8, 16, 32, 64)


def tokens_with_metp(cfg, machine, world):
    """The longest context with METP, tp as wide as a node has GPUs; 0 where there is none."""
    width = max(tp for tp in (1, 2, 4, 8) if tp <= world and cfg.n_head % tp == 0)
    both = [config_with(cfg, tp=width, cp=world // width, tensor_parallel="metp", head_groups="auto",
                        optimizer_device=where) for where in ("cpu", "auto")]
    found = [longest(one, replace(machine, speeds=None), world, fast_arena) for one in both if one]
    return max((most.cfg.block_size for most in found if most), default=0)


def curves():
    """The longest contexts of every model on H100 by a host's memory and by GPUs; METP, 16 subsequences."""
    machine, hosts, gpus = hardware.machine("h100-80gb"), {}, {}
    for model in MODELS:
        cfg = config_of(model, subsequences=16)
        hosts[model] = [tokens_with_metp(*granting(cfg, machine, 8, nbytes), 8) for nbytes in HOSTS]
        gpus[model] = [tokens_with_metp(*granting(cfg, machine, n, 1.9e12 / 8 * min(n, 8)), n)
                       for n in WORLDS]
        print(model, hosts[model], gpus[model], flush=True)
    return dict(host_bytes=HOSTS, by_host=hosts, gpus=WORLDS, by_gpus=gpus)


def draw(found):
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), dpi=110, sharey=True, layout="constrained")
    sides = (("host_bytes", "by_host", 1e12, "host memory that a node of 8 H100 grants, TB"),
             ("gpus", "by_gpus", 1, "H100s, each with 237.5 GB of a host's memory"))
    for ax, (key, by, scale, label) in zip(axes, sides, strict=True):
        x = [value / scale for value in found[key]]
        for model, tokens in found[by].items():
            shown = [(a, n / 2**20) for a, n in zip(x, tokens, strict=True) if n]
            if shown:
                ax.plot(*zip(*shown, strict=True), "o-", ms=4, label=model)
        ax.set(xscale="log", yscale="log", xlabel=label, xticks=x, xticklabels=[f"{a:g}" for a in x])
        ax.minorticks_off()
        ax.axhline(LONGEST / 2**20, color="#8a8f98", ls=":", lw=1)
        plain(ax)
    axes[0].set(ylabel="longest context, M tokens (2^20)")
    axes[1].legend(frameon=False, fontsize=9)
    fig.suptitle("By the dry run; nothing was run", fontsize=10)
    fig.savefig(RESULTS / "longest.png")
    plt.close(fig)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--machines", default="", help="of the table: parts of names")
    parser.add_argument("--models", default=",".join(MODELS), help="the same")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    path = RESULTS / "longest.json"
    out = json.loads(path.read_text()) if path.exists() else {}

    def cells(models):
        return [(name, model) for name, some in models.items() for model in some
                if any(part in name for part in args.machines.split(";")) and model in args.models.split(",")]
    for part in args.parts or PARTS:
        if part == "table":
            table(out.setdefault(part, {}), cells(dict.fromkeys(MACHINES, MODELS)), args.trace,
                  lambda: save_json(out, path))
        elif part == "elsewhere":
            table(out.setdefault(part, {}), cells(ELSEWHERE), args.trace, lambda: save_json(out, path),
                  states="auto")
        elif part == "whole":
            judged = [target[:2] for target in TARGETS if not target[-1]]
            table(out.setdefault(part, {}), judged, args.trace, lambda: save_json(out, path),
                  without_repetition)
        elif part == "draw":
            draw(out["curves"])
        else:
            out[part] = targets(args.trace) if part == "targets" else dict(cost=cost, curves=curves)[part]()
        save_json(out, path)


if __name__ == "__main__":
    sys.exit(main())
