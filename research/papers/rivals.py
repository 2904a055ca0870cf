"""Megatron-LM and DeepSpeed-Ulysses with ZeRO-3 as research/baselines.py models them, beside what MEMO (arXiv
2407.12117) measured of them: its Table 3, and of Table 4 the rows that recompute everything.

Each cell is the fastest of the system's layouts that fits, 16 sequences a step: once with every way to
recompute that the system offers, once as MEMO describes its rivals, nothing or everything. Each with all of
the device, and with less of it, for the paper's systems lost memory to fragments.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from math import copysign
from statistics import mean

import matplotlib.pyplot as plt

from memo.config.layout import Layout
from memo.estimate.arena import fast_arena
from memo.estimate.search import MODES, estimate_or_none, layouts, speed
from memo.plots.figures import BLUE, GREY, ORANGE, plain
from memo.system import hardware
from memo.system.hardware import Speeds
from research.baselines import DEEPSPEED, MEGATRON, Recompute, RivalLayout, best, device_bytes, run
from research.papers.page import DRY, Part, points, thousands
from testing.paper import GPUS, LONG, PAPER, SEQUENCES, config_of, of_that_width, rows_of_table3

A800 = hardware.machine("a800-80gb")
NAMES = {MEGATRON: "Megatron-LM", DEEPSPEED: "DeepSpeed-Ulysses"}
ORDER, SHORT = {"memo": "memo", **NAMES}, {"memo": "memo", MEGATRON: "M", DEEPSPEED: "D"}
EVERY_WAY, ALL_OR_NONE = "every way to recompute", "nothing or everything"
WAYS = {EVERY_WAY: False, ALL_OR_NONE: True}
SHARES = 1.0, 0.8  # of the device
EQUAL = 0.01  # of MFU
MODELS = "7B", "13B", "30B", "65B"
ALL_HIDE, FIRST_FLASH = "all messages of tp and ZeRO-3 hide", "DeepSpeed with FlashAttention 1"

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


@cache
def fastest(cfg, machine, world):
    """The Estimate of memo's fastest layout of one stage that fits; all layers in one mode, memo's."""
    every = (estimate_or_none(one, machine, world, fast_arena)
             for one in layouts(cfg, machine, world, MODES[-1:]) if one.pp == 1)
    return max((got for got in every if got and got.fits), key=speed, default=None)


def speeds_of(cells, way, machine=A800):
    """{(model, tokens): {system: (the paper's MFU, the modelled one)}} of the systems that ran there and run
    here in the device's whole memory. memo's are estimates of its fastest layout on the machine."""
    found = {}
    for (model, S, system), (paper, by) in cells.items():
        got = by[way][1.0]
        if not isinstance(paper, str) and got["fits"]:
            found.setdefault((model, S), {})[system] = paper / 100, got["mfu"]
    for model, S in found:
        ours = fastest(of_rival(model, S), machine, GPUS[model])
        found[model, S] = {"memo": (rows_of_table3(model)[S] / 100, ours.mfu), **found[model, S]}
    return found


def leads(speeds):
    """[(the faster one in the paper, the other, by how much it is modelled as faster)] of pairs of systems
    that the paper tells apart."""
    return [(one, other, copysign(1, speeds[one][0] - speeds[other][0]) * (speeds[one][1] - speeds[other][1]))
            for one, other in combinations(speeds, 2) if speeds[one][0] != speeds[other][0]]


def order(found, way):
    """Lines [way, which pairs of systems, pairs, those in which the one that the paper measured as the faster
    is not modelled as slower by more than EQUAL, those in which it is not modelled as slower]; then of whole
    cells, all of whose pairs are so."""
    every = {cell: leads(speeds) for cell, speeds in found.items()}
    lines = []
    for pair in combinations(ORDER, 2):
        ahead = [by for those in every.values() for *two, by in those if {*two} == {*pair}]
        lines.append([way, ", ".join(ORDER[name] for name in pair), len(ahead),
                      *(sum(by >= least for by in ahead) for least in (-EQUAL, 0))])
    whole = [[by for *_, by in those] for those in every.values() if those]
    lines.append([way, "all that ran", len(whole), *(sum(min(those) >= least for those in whole)
                                                     for least in (-EQUAL, 0))])
    return lines


def in_order(speeds, here):
    """The systems, the fastest first, with their MFU: the paper's or, `here`, the modelled one."""
    ranked = sorted(speeds, key=lambda name: -speeds[name][here])
    return ", ".join(f"{SHORT[name]} {100 * speeds[name][here]:.1f}" for name in ranked)


def ordered_cells(found):
    """Lines of each cell's order in the paper and here, and of the pairs that differ."""
    lines = []
    for (model, S), speeds in found.items():
        wrong = [(SHORT[one], SHORT[other], by) for one, other, by in leads(speeds) if by < 0]
        told = "; ".join(f"{one}, {other}" + " (to a point the same)" * (by >= -EQUAL)
                         for one, other, by in wrong)
        lines.append([model, thousands(S), in_order(speeds, 0), in_order(speeds, 1), told or "none"])
    return lines


def changed(change):
    """A800 with the rate change(operation, rate) of each operation."""
    table = {op: [(size, change(op, rate)) for size, rate in rates]
             for op, rates in A800.speeds.table.items()}
    return replace(A800, speeds=Speeds(table, A800.speeds.overhead_s))


def supposed(cells):
    """(lines of how the order changes where one thing is supposed to be different, DeepSpeed's cells that ran
    in the paper, with attention at half its rate), all with nothing or everything recomputed."""
    hidden = changed(lambda op, rate: 1.0 if op == "hidden" else rate)
    first = changed(lambda op, rate: rate / 2 if op.startswith("attention") else rate)
    lines, halved = [], []
    for name, machines in (("as modelled", {}), (ALL_HIDE, dict.fromkeys(ORDER, hidden)),
                           (FIRST_FLASH, {DEEPSPEED: first})):
        other = {}
        for (model, S, system), (paper, by) in cells.items():
            was = got = by[ALL_OR_NONE][1.0]
            if system in machines:
                cfg = of_rival(model, S)
                got = told(best(system, cfg, machines[system], GPUS[model], SEQUENCES, all_or_none=True))
            other[model, S, system] = paper, {ALL_OR_NONE: {1.0: got}}
            if name == FIRST_FLASH and system == DEEPSPEED and not isinstance(paper, str) and got["fits"]:
                halved.append([model, thousands(S), paper, points(was["mfu"]), points(got["mfu"])])
        *pairs, whole = order(speeds_of(other, ALL_OR_NONE, machines.get("memo", A800)), ALL_OR_NONE)
        lines.append([name, *(sum(line[n] for line in pairs) for n in (2, 3, 4)), *whole[2:]])
    return lines, halved


def recomputing():
    """Table 4's rows that recompute everything, tp4 cp2, beside Megatron-LM in that layout."""
    lines = []
    for tokens in PAPER["table4"]["seq_tokens"]:
        one = RivalLayout(MEGATRON, Layout.of(of_rival("7B", tokens, tp=4, cp=2)), 1, SEQUENCES)
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
    head = ["", *(name for model in MODELS for name in (f"{model}: M", "/here", "/D", "/here"))]
    found = {way: speeds_of(cells, way) for way in WAYS}
    agree, ordered = agreement(cells), [line for way in WAYS for line in order(found[way], way)]
    same = [line for line in agree if line[:2] == [ALL_OR_NONE, 1.0]]
    *pairs, whole = [line for line in ordered if line[0] == ALL_OR_NONE]
    lines, halved = supposed(cells)
    long = [row for row in halved if int(row[1].rstrip("K")) * 1024 >= LONG]
    told_cells = [dict(model=model, tokens=S, system=system, paper=paper,
                       **{way: by[way][1.0] for way in WAYS})
                  for (model, S, system), (paper, by) in cells.items()]
    totals = dict(cells=sum(line[3] for line in same), agree=sum(line[4] for line in same),
                  pairs=sum(line[2] for line in pairs), right=sum(line[3] for line in pairs),
                  strictly=sum(line[4] for line in pairs), ordered=whole[2], ordered_right=whole[3],
                  ordered_strictly=whole[4])
    both = [[NAMES[system], len(mine), *(round(mean(pair[at] for pair in mine), 1) for at in (0, 1))]
            for system in NAMES if (mine := [(paper, 100 * by[ALL_OR_NONE][1.0]["mfu"])
                                             for (_, _, name), (paper, by) in cells.items() if name == system
                                             and type(paper) is not str and by[ALL_OR_NONE][1.0]["fits"]])]
    longest = {(model, system): (PAPER["longest_tokens"][system][model], longest_here(cells, model, system))
               for system in ORDER for model in MODELS}
    most = [[name, *(thousands(n) for model in MODELS for n in longest[model, system])]
            for system, name in ORDER.items()]
    return dict(
        tables=[(head, rows),
                (["recomputed", "device", "system", "cells", "fail or not, as there", "points off from 64K",
                  "below"], agree),
                (["recomputed", "systems", "pairs, or whole cells", "right order, to a point", "strictly"],
                 ordered),
                (["model", "context", "order in the paper", "here", "pairs that differ"],
                 ordered_cells(found[ALL_OR_NONE])),
                (["supposed", "pairs", "right order, to a point", "strictly", "whole cells", "to a point",
                  "strictly"], lines),
                (["DeepSpeed", "context", "paper", "here", "with FlashAttention 1"], halved),
                (["mean MFU where both ran", "cells", "/paper", "/here"], both),
                (["longest", *(name for model in MODELS for name in (f"{model}, paper", "/here"))], most)],
        hidden=[1, 2, 3, 4, 5],
        notes=[
            "M: Megatron-LM, D: DeepSpeed-Ulysses with ZeRO-3, each in its fastest layout that fits, all or "
            f"nothing recomputed, nothing lost to fragments. Over all four models {totals['agree']} of "
            f"{totals['cells']} cells run out of memory, or not, as in the paper; the order of two systems "
            f"is strictly the paper's in {totals['strictly']} of {totals['pairs']} pairs, to a point in "
            f"{totals['right']}; of all that ran in {totals['ordered_strictly']} and "
            f"{totals['ordered_right']} of {totals['ordered']} cells. [What differs, and "
            "why](baselines.md#beside-memos-measurements)."],
        totals=totals, cells=told_cells, supposed={name: line for name, *line in lines},
        halved=dict(off=round(mean(abs(row[4] - row[2]) for row in long), 1),
                    was=round(mean(abs(row[3] - row[2]) for row in long), 1)))


def longest_here(cells, model, system):
    """The longest of the lengths of Table 3 that fits: of rivals all in memory, of memo in its width."""
    if system == "memo":
        return max(S for S in rows_of_table3(model) if any(got.fits for got in of_that_width(model, S)))
    return max(S for (name, S, of), (_, by) in cells.items()
               if (name, of) == (model, system) and by[ALL_OR_NONE][1.0]["fits"])


def draw(facts, path):
    fig, axes = plt.subplots(1, 4, figsize=(17, 4.8), dpi=110, sharey=True, layout="constrained")
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


PART = Part("Table 3: its rivals", DRY, make, draw)
