"""Megatron-LM and DeepSpeed-Ulysses with ZeRO-3 as testing/baselines.py models them, beside what MEMO (arXiv
2407.12117) measured of them: its Table 3, and of Table 4 the rows that recompute everything. Nothing is run.

    python -m bench.baselines

Each cell is the fastest of the system's layouts that fits, 16 sequences a step: once with every way to
recompute that the system offers, once as MEMO describes its rivals, nothing or everything. Each with all of
the device, and with less of it, for the paper's systems lost memory to fragments. Writes
bench/results/baselines.json and .png.
"""

from dataclasses import replace
from math import copysign
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt

from bench.machine import machine
from memo.config import Config
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.search import MODES, estimate_or_none, layouts, speed
from memo.files import save_json
from memo.plots import BLUE, GREY, ORANGE, PALE, plain
from testing.baselines import DEEPSPEED, MEGATRON, Layout, Recompute, best, device_bytes, run
from testing.paper import GPUS, PAPER

RESULTS = Path(__file__).parent / "results"
A800, SEQUENCES = hardware.machine("a800-80gb"), 16
NAMES = {MEGATRON: "Megatron-LM", DEEPSPEED: "DeepSpeed-Ulysses"}
ALL_OR_NONE = {"every way to recompute": False, "nothing or everything": True}
SHARES = 1.0, 0.9, 0.8, 0.7  # of the device
EQUAL = 0.01  # of MFU
LONG = 65536  # tokens from which the dry run's rates of kernels hold (docs/estimate.md)
MODELS = "7B", "13B", "30B"


def config(model, tokens, **keys):
    """The config of one of the paper's models, whose memo has its states on the device."""
    shape = {name: PAPER["models"][model][name] for name in ("n_layer", "n_embd", "n_head", "vocab_size")}
    return Config(**shape, block_size=tokens, dtype="bfloat16", subsequences=1, states="device", **keys)


def told(found):
    """A Run as a line of a table."""
    if found is None:
        return dict(fits=False, layout="none")
    cfg, (layers, together) = found.layout.cfg, found.recompute
    degrees = dict(tp=cfg.tp, cp=cfg.cp, pp=cfg.pp, dp=found.layout.dp, micro=cfg.batch_size)
    return dict(fits=found.fits, mfu=found.mfu, tgs=found.tgs, step_s=found.step_s,
                device_bytes=found.device_bytes, recomputed_layers=layers, together=together,
                layout=" ".join(f"{name}{n}" for name, n in degrees.items() if n > 1))


def cell(row):
    """A cell of Table 3 beside what is modelled of it, {way: {share of the device: told()}}."""
    cfg, made = config(row["model"], row["seq_tokens"]), {}
    machines = {share: replace(A800, memory_bytes=int(share * A800.memory_bytes)) for share in SHARES}
    for way, all_or_none in ALL_OR_NONE.items():
        made[way] = {share: told(best(row["system"], cfg, there, row["gpus"], SEQUENCES, all_or_none))
                     for share, there in machines.items()}
    paper = row.get("mfu")
    return dict(model=row["model"], system=row["system"], tokens=row["seq_tokens"], gpus=row["gpus"],
                paper=paper and paper / 100, **made)


def agreement(cells):
    """[line of how often modelled cells run out of memory where the paper's do, and of how far the MFU is off
    where both run]."""
    lines = []
    for way in ALL_OR_NONE:
        for share in SHARES:
            for system in NAMES:
                mine = [(one["tokens"], one["paper"], one[way][share]) for one in cells
                        if one["system"] == system]
                off = {kind: [100 * (got["mfu"] - paper) for tokens, paper, got in mine
                              if paper and got["fits"] and (tokens >= LONG) == (kind == "long")]
                       for kind in ("long", "short")}
                lines.append(dict(way=way, share=share, system=system, cells=len(mine),
                                  agree=sum(bool(paper) == got["fits"] for _, paper, got in mine),
                                  **{f"mfu_points_off_{kind}": dict(mean_absolute=mean(map(abs, points)),
                                                                    mean=mean(points))
                                     for kind, points in off.items()}))
    return lines


def fastest(cfg, machine, world):
    """The Estimate of memo's fastest layout of one stage that fits; all layers in one mode, memo's."""
    every = (estimate_or_none(one, machine, world, fast_arena)
             for one in layouts(cfg, machine, world, MODES[-1:]) if one.pp == 1)
    return max((got for got in every if got and got.fits), key=speed, default=None)


def order(cells):
    """{way: {pair of systems: [cells, those in which the one that the paper measured as the faster is
    modelled as slower by more than EQUAL]}}, of cells that both ran and run, where the paper's differ. memo's
    are estimates of its fastest layout."""
    measured = {(r["model"], r["seq_tokens"], r["system"]): r["mfu"] / 100 for r in PAPER["table3"]
                if "mfu" in r}
    runs = {(model, tokens) for model, tokens, system in measured if system != "memo"}
    ours = {cell: fastest(config(*cell, gradient_accumulation_steps=SEQUENCES), A800, GPUS[cell[0]])
            for cell in sorted(runs)}
    made = {}
    for way in ALL_OR_NONE:
        modelled = {(one["model"], one["tokens"], one["system"]): one[way][1.0]["mfu"] for one in cells
                    if one[way][1.0]["fits"]}
        modelled |= {(*cell, "memo"): got.mfu for cell, got in ours.items() if got}
        made[way] = {}
        for one, other in (("memo", MEGATRON), ("memo", DEEPSPEED), (MEGATRON, DEEPSPEED)):
            points = [[of[*cell, one] - of[*cell, other] for of in (measured, modelled)] for cell in ours
                      if all((*cell, name) in of for of in (measured, modelled) for name in (one, other))]
            signs = [mine * copysign(1, paper) < -EQUAL for paper, mine in points if paper]
            made[way][f"{one}, {other}"] = len(signs), sum(signs)
    return made


def recomputing():
    """Table 4's rows that recompute everything, tp4 cp2, without and with the memory plan, beside Megatron-LM
    in that layout."""
    t4, lines = PAPER["table4"], []
    for i, tokens in enumerate(t4["seq_tokens"]):
        one = Layout(MEGATRON, config("7B", tokens, tp=4, cp=2), 1, SEQUENCES)
        everything = Recompute(one.stage_layers)
        got = run(one, replace(A800, memory_bytes=0), all_or_none=True)  # nothing fits: what takes least
        assert got.recompute == everything
        paper = {name: t4["mfu_percent"][name][i] for name in ("full_recompute", "full_recompute+plan")}
        lines.append(dict(tokens=tokens, mfu=got.mfu, device_bytes=device_bytes(one, everything),
                          fits=got.device_bytes <= A800.memory_bytes, paper=paper))
    return lines


def draw(cells):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.8), dpi=110, sharey=True, layout="constrained")
    ways = [("every way to recompute", "-"), ("nothing or everything", ":")]
    for ax, model in zip(axes, MODELS, strict=True):
        for system, dark, light in ((MEGATRON, BLUE, PALE), (DEEPSPEED, ORANGE, "#f2c391")):
            mine = [one for one in cells if (one["model"], one["system"]) == (model, system)]
            measured = [one for one in mine if one["paper"]]
            ax.plot([one["tokens"] / 1024 for one in measured], [100 * one["paper"] for one in measured], "o",
                    color=dark, label=f"{NAMES[system]}, measured by the paper")
            for way, style in ways:
                there = [one for one in mine if one[way][1.0]["fits"]]
                ax.plot([one["tokens"] / 1024 for one in there],
                        [100 * one[way][1.0]["mfu"] for one in there], style, color=light,
                        label=f"{NAMES[system]}, modelled, {way}")
        ax.set(xscale="log", xlabel="context, K tokens", ylim=(0, 75), title=f"{model}, {GPUS[model]} A800",
               xticks=[4, 16, 64, 256, 1024], xticklabels=["4", "16", "64", "256", "1024"])
        ax.minorticks_off()
        ax.axvline(LONG / 1024, color=GREY, lw=0.6)
        plain(ax)
    axes[0].set_ylabel("MFU, %")
    fig.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center",
               ncols=3)
    fig.suptitle("MEMO's rivals: its Table 3 (dots), and by dry run with no byte lost (lines)")
    fig.savefig(RESULTS / "baselines.png")
    plt.close(fig)


def main():
    cells = [cell(row) for row in PAPER["table3"] if row["system"] in NAMES]
    found = dict(agreement=agreement(cells), order=order(cells), table4=recomputing())
    for one in found["agreement"]:
        long, short = (one[f"mfu_points_off_{kind}"]["mean_absolute"] for kind in ("long", "short"))
        print(f"{NAMES[one['system']]:18} {one['way']:23} {one['share']:4.0%} of the device: OOM or not as "
              f"the paper {one['agree']} of {one['cells']}; MFU off by {long:4.1f} points from 64K on, "
              f"{short:4.1f} below")
    for way, pairs in found["order"].items():
        print(f"{way}: the other way round in " + "; ".join(
            f"{wrong} of {n} ({pair})" for pair, (n, wrong) in pairs.items()))
    for one in found["table4"]:
        print(f"tp4 cp2, everything recomputed, {one['tokens']:9,}: {100 * one['mfu']:.1f}%, "
              f"{one['device_bytes'] / 1e9:.1f} GB; paper {one['paper']}")
    draw(cells)
    for one in cells:  # with all of the device; what the others say is in the agreement
        one.update({way: one[way][1.0] for way in ALL_OR_NONE})
    save_json(dict(machine=machine(), sequences=SEQUENCES, **found, cells=cells), RESULTS / "baselines.json")


if __name__ == "__main__":
    main()
