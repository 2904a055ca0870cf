"""Megatron-LM and DeepSpeed-Ulysses with ZeRO-3 as testing/baselines.py models them, beside what MEMO (arXiv
2407.12117) measured of them: its Table 3, and of Table 4 the rows that recompute everything.

Each cell is the fastest of the system's layouts that fits, 16 sequences a step: once with every way to
recompute that the system offers, once as MEMO describes its rivals, nothing or everything. Each with all of
the device, and with less of it, for the paper's systems lost memory to fragments.
"""

from dataclasses import replace
from functools import partial
from math import copysign
from statistics import mean

import matplotlib.pyplot as plt

from bench.papers.page import DRY, Part, points, thousands
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.search import MODES, estimate_or_none, layouts, speed
from memo.plots import BLUE, GREY, ORANGE, plain
from testing.baselines import DEEPSPEED, MEGATRON, Layout, Recompute, best, device_bytes, run
from testing.paper import GPUS, LONG, PAPER, SEQUENCES, config_of, rows_of_table3

A800 = hardware.machine("a800-80gb")
NAMES = {MEGATRON: "Megatron-LM", DEEPSPEED: "DeepSpeed-Ulysses"}
EVERY_WAY, ALL_OR_NONE = "every way to recompute", "nothing or everything"
WAYS = {EVERY_WAY: False, ALL_OR_NONE: True}
SHARES = 1.0, 0.9, 0.8, 0.7  # of the device
EQUAL = 0.01  # of MFU
MODELS = "7B", "13B", "30B"

# what rivals are modelled with, and memo beside them
of_rival = partial(config_of, subsequences=1, states="device")


def told(found):
    """A Run as a line of a table."""
    if found is None:
        return dict(fits=False, layout="none")
    cfg, (layers, together) = found.layout.cfg, found.recompute
    degrees = dict(tp=cfg.tp, cp=cfg.cp, pp=cfg.pp, dp=found.layout.dp, micro=cfg.batch_size)
    return dict(fits=found.fits, mfu=found.mfu, tgs=found.tgs, step_s=found.step_s,
                device_bytes=found.device_bytes, recomputed_layers=layers, together=together,
                layout=" ".join(f"{name}{n}" for name, n in degrees.items() if n > 1))


def modelled():
    """{(model, tokens, system): (the paper's cell, {way: {share of the device: told()}})} of Table 3."""
    made = {}
    machines = {share: replace(A800, memory_bytes=int(share * A800.memory_bytes)) for share in SHARES}
    for model in MODELS:
        for system in NAMES:
            for S, paper in rows_of_table3(model, system).items():
                cfg, world = of_rival(model, S), GPUS[model]
                made[model, S, system] = paper, {
                    way: {share: told(best(system, cfg, there, world, SEQUENCES, all_or_none))
                          for share, there in machines.items()} for way, all_or_none in WAYS.items()}
    return made


def agreement(cells):
    """Lines of how often modelled cells run out of memory where the paper's do, and of how far the MFU is off
    where both run."""
    lines = []
    for way in WAYS:
        for share in SHARES:
            for system in NAMES:
                mine = [(S, paper, by[way][share]) for (_, S, name), (paper, by) in cells.items()
                        if name == system]
                points_off = {long: [100 * got["mfu"] - paper for S, paper, got in mine
                                     if not isinstance(paper, str) and got["fits"] and (S >= LONG) == long]
                              for long in (True, False)}
                agree = sum(isinstance(paper, str) != got["fits"] for _, paper, got in mine)
                lines.append([way, share, NAMES[system], len(mine), agree,
                              *(round(mean(map(abs, those)), 1) for those in points_off.values())])
    return lines


def fastest(cfg, machine, world):
    """The Estimate of memo's fastest layout of one stage that fits; all layers in one mode, memo's."""
    every = (estimate_or_none(one, machine, world, fast_arena)
             for one in layouts(cfg, machine, world, MODES[-1:]) if one.pp == 1)
    return max((got for got in every if got and got.fits), key=speed, default=None)


def order(cells):
    """[way, pair of systems, cells, those in which the one that the paper measured as the faster is not
    modelled as slower by more than EQUAL, those in which it is not modelled as slower], of cells that both
    ran and run, where the paper's differ. memo's are estimates of its fastest layout."""
    measured = {cell: paper / 100 for cell, (paper, _) in cells.items() if not isinstance(paper, str)}
    runs = sorted({cell[:2] for cell in measured})
    measured |= {(model, S, "memo"): rows_of_table3(model)[S] / 100 for model, S in runs}
    ours = {cell: fastest(of_rival(*cell), A800, GPUS[cell[0]]) for cell in runs}
    lines = []
    for way in WAYS:
        found = {cell: by[way][1.0]["mfu"] for cell, (_, by) in cells.items() if by[way][1.0]["fits"]}
        found |= {(*cell, "memo"): got.mfu for cell, got in ours.items() if got}
        for one, other in (("memo", MEGATRON), ("memo", DEEPSPEED), (MEGATRON, DEEPSPEED)):
            pairs = [[of[*cell, one] - of[*cell, other] for of in (measured, found)] for cell in runs
                     if all((*cell, name) in of for of in (measured, found) for name in (one, other))]
            ahead = [mine * copysign(1, paper) for paper, mine in pairs if paper]
            right = [sum(by >= least for by in ahead) for least in (-EQUAL, 0)]
            lines.append([way, f"{NAMES.get(one, one)}, {NAMES[other]}", len(ahead), *right])
    return lines


def recomputing():
    """Table 4's rows that recompute everything, tp4 cp2, beside Megatron-LM in that layout."""
    lines = []
    for tokens in PAPER["table4"]["seq_tokens"]:
        one = Layout(MEGATRON, of_rival("7B", tokens, tp=4, cp=2), 1, SEQUENCES)
        everything = Recompute(one.stage_layers)
        got = run(one, replace(A800, memory_bytes=0), all_or_none=True)  # nothing fits: what takes least
        assert got.recompute == everything
        nbytes = device_bytes(one, everything)
        lines.append(dict(tokens=tokens, mfu=got.mfu, fits=nbytes <= A800.memory_bytes))
    return lines


def make():
    cells = modelled()
    rows = []
    for S in rows_of_table3("7B"):
        row = [thousands(S)]
        for model in MODELS:
            for system in NAMES:
                paper, by = cells[model, S, system]
                got = by[ALL_OR_NONE][1.0]
                row += [paper, points(got["mfu"]) if got["fits"] else "oom"]
        rows.append(row)
    short = {MEGATRON: "M", DEEPSPEED: "D"}
    head = ["", *(column for model in MODELS for system in NAMES for column in (f"{model} "
                                                                                f"{short[system]}", "here"))]
    agree, ordered = agreement(cells), order(cells)
    same = [line for line in agree if line[:2] == [ALL_OR_NONE, 1.0]]
    right = [line for line in ordered if line[0] == ALL_OR_NONE]
    told_cells = [dict(model=model, tokens=S, system=system, paper=paper,
                       **{way: by[way][1.0] for way in WAYS})
                  for (model, S, system), (paper, by) in cells.items()]
    totals = dict(cells=sum(line[3] for line in same), agree=sum(line[4] for line in same),
                  pairs=sum(line[2] for line in right), right=sum(line[3] for line in right),
                  strictly=sum(line[4] for line in right))
    return dict(
        tables=[(head, rows),
                (["recomputed", "device", "system", "cells", "fail or not, as there", "points off from 64K",
                  "below"], agree),
                (["recomputed", "systems", "pairs of cells", "right order, to a point", "strictly"],
                 ordered)],
        notes=["MFU, percent, the paper's first: M is Megatron-LM, D DeepSpeed-Ulysses with ZeRO-3, each "
               "in its fastest layout that fits, which recomputes nothing or everything, as the paper's "
               "did.",
               f"Out of memory or not, as in the paper: {totals['agree']} of {totals['cells']} cells. The "
               f"order of two systems is the paper's in {totals['right']} of {totals['pairs']} pairs, "
               f"to a point of MFU ({totals['strictly']} strictly). "
               "[What differs, and why](baselines.md#beside-memos-measurements): the model's rivals lose "
               "nothing to fragments."],
        totals=totals, cells=told_cells)


def draw(facts, path):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.8), dpi=110, sharey=True, layout="constrained")
    ways = [(EVERY_WAY, "-"), (ALL_OR_NONE, ":")]
    for ax, model in zip(axes, MODELS, strict=True):
        for system, marker, colour in ((MEGATRON, "o", BLUE), (DEEPSPEED, "^", GREY)):
            mine = [one for one in facts["cells"] if (one["model"], one["system"]) == (model, system)]
            measured = [one for one in mine if not isinstance(one["paper"], str)]
            ax.plot([one["tokens"] / 1024 for one in measured], [one["paper"] for one in measured],
                    marker, color=ORANGE, label=f"{NAMES[system]}, measured by the paper")
            for way, style in ways:
                there = [one for one in mine if one[way]["fits"]]
                ax.plot([one["tokens"] / 1024 for one in there], [100 * one[way]["mfu"] for one in there],
                        style, color=colour, label=f"{NAMES[system]}, modelled, {way}")
        ax.set(xscale="log", xlabel="context, K tokens", ylim=(0, 75), title=f"{model}, {GPUS[model]} A800",
               xticks=[4, 16, 64, 256, 1024], xticklabels=["4", "16", "64", "256", "1024"])
        ax.minorticks_off()
        ax.axvline(LONG / 1024, color=GREY, lw=0.6)
        plain(ax)
    axes[0].set_ylabel("MFU, %")
    fig.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center",
               ncols=3)
    fig.suptitle("MEMO's rivals: its Table 3 (orange), and by dry run with no byte lost (lines)")
    fig.savefig(path)
    plt.close(fig)


PART = Part("Table 3: its rivals", "MEMO's Table 3", DRY, make, draw,
            "Orange: measured by MEMO's authors. Lines: dry runs, which end where memory does. The vertical "
            "line: 64K.")
