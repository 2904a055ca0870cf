"""MEMO (arXiv 2407.12117) beside memo: its Tables 3 to 5, and what its section 5.2 adds; figures and the fit
are in other files. The hardware is the paper's: A800 nodes, of whose host memory half is lost to rounded
blocks (testing/paper.py)."""

import re
from statistics import mean

import matplotlib.pyplot as plt

from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.search import search
from memo.plots.figures import BLUE, GREY, ORANGE, plain
from memo.system.hardware import GIB
from research.baseline_layer import FP32, logit_bytes
from research.baselines import MEGATRON
from research.papers import convergence, fragments, memo_fit, memo_lengths, rivals
from research.papers.memo_fit import FROM_64K, SHORT
from research.papers.memo_lengths import in_its_width
from research.papers.page import DRY, OFF_HEAD, Part, cell, off, off_row, thousands
from research.papers.rivals import A800, MODELS
from testing.paper import GPUS, LONG, PAPER, SEQUENCES, of_that_width, paper_config, rows_of_table3

NAME = "MEMO"
ABOUT = """arXiv 2407.12117. "Its width": the preset's tp (4 for 7B, as the paper says; 8 for the others),
the best cp, the rest dp, 16 sequences a step, which the wall-clock gives (below). "Any layout": the fastest
of all that memo has. """


def exact(got):
    """As cell(), not rounded: of this is said how far it is off."""
    return 100 * got.mfu if got.fits else got.reason


# --- Table 3 ---

# bytes of a logit, if all of them are there at once
WHOLE = FP32, logit_bytes(MEGATRON, paper_config("7B", LONG))[0]


def with_whole_logits(got, each):
    """An Estimate's bytes of the device if its head had all logits at once, of so many bytes each; memo's has
    a chunk."""
    cfg = got.cfg
    logits = each * cfg.block_size // cfg.cp * cfg.padded_vocab_size // cfg.tp
    return got.device_bytes + max(0, logits - got.bytes_of("transient")[0])


def ends_with_whole_logits(found, papers):
    """Where the device would end with whole logits, of {tokens: the Estimates of the layouts that fit};
    `papers`: {tokens: the paper's cell}."""
    told, last = [], []
    for each in WHOLE:
        needs = [(S, min(with_whole_logits(got, each) for got in every))
                 for S, every in found.items() if every]
        fits = sum(nbytes <= A800.memory_bytes for _, nbytes in needs)
        ends = [f"{nbytes / GIB:.1f} GiB at {thousands(S)}" for S, nbytes in needs[fits - 1:fits + 1]]
        told.append(f"with {each} bytes each {' and '.join(ends)}")
        last.append(needs[fits - 1][0])
    ran = [S for S, cell in papers.items() if not isinstance(cell, str)]
    assert last[0] == ran[-1] > last[1], "with 4 bytes 7B does not end where the paper's did"
    return f"{'; '.join(told)}; there are {A800.memory_bytes / GIB:.1f}"


def why_7b_fits():
    papers = rows_of_table3("7B")
    ends = ends_with_whole_logits({S: [got for got in of_that_width("7B", S) if got.fits] for S in papers},
                                  papers)
    return (f"7B: memo's head makes logits in chunks; at once they would need {ends}. With fp32 alone 7B "
            "would end where the paper's did; its text has no \"logit\".")


def why_30b_fits():
    """What is always swapped, where the paper's ran out of host memory, beside a length that ran."""
    least, most = (nbytes / 1e12 for nbytes in memo_fit.hosts_with_papers_cells())
    cfgs = [paper_config("30B", S, cp=4, alpha=0.0) for S in (1408 * 1024, 1280 * 1024)]
    needs = [estimate(cfg, A800, GPUS["30B"], fast_arena).host_bytes / 1e12 for cfg in cfgs]
    assert needs[0] <= most or needs[1] > most, "a reason: the one fails there, the other does not"
    return ("30B: no reason was found. What is always swapped takes {:.2f} TB of a node there, and {:.2f} "
            "at 1280K, which ran; by 7B's cells {:.2f} to {:.2f} can be used.".format(*needs, least, most))


def why_65b_is_off(short, best):
    """Of 65B's shortest row: the Estimates in its width and in any layout."""
    papers = rows_of_table3("65B")
    long = [exact(in_its_width("65B", S)) - paper for S, paper in papers.items() if S >= LONG]
    part = short.seconds["gradients and parameters"] / short.seconds["step"]
    assert min(long) > 0
    return (f"65B at {thousands(short.cfg.block_size)}: {part:.0%} of the step are gradients over nodes, "
            f"which the dry run does not hide; no layout is faster than {cell(best)}. From 64K on 65B is too "
            f"high in all {len(long)} cells, by {mean(long):.1f} in the mean.")


def table3():
    rows, pairs, fails, above, shortest = [], {}, [], dict.fromkeys(MODELS, 0.0), ()
    columns = {model: rows_of_table3(model) for model in MODELS}
    for S in columns["7B"]:
        row, length = [thousands(S)], FROM_64K if S >= LONG else SHORT
        for model in MODELS:
            paper, same = columns[model][S], in_its_width(model, S)
            best = search(same.cfg, A800, GPUS[model], fast_arena, best=1)[0]
            shortest = shortest or (same, best) if model == "65B" else shortest
            for name in (f"{model}, {length}", f"all, {length}"):
                pairs.setdefault(name, []).append((paper, exact(same)))
            row += [paper, cell(same), cell(best)]
            if S >= 4 * LONG and not isinstance(paper, str):
                above[model] = max(above[model], round(exact(best) - paper, 2))
            if isinstance(paper, str) == same.fits:
                fails.append(f"{model} at {thousands(S)} ({paper}; {'fits' if same.fits else same.reason})")
        rows.append(row)
    head = ["", *(column for model in MODELS for column in (f"{model}, paper", "/width", "/any"))]
    offs = {name: off(those) for name, those in pairs.items()}
    keys = {"cells": "cells", "mean": "/mean", "worst": "/worst", "only_papers_fails": "/fail there alone"}
    by_length = [[name, *(offs[f"{name}, {length}"][key] for length in (SHORT, FROM_64K) for key in keys)]
                 for name in (*MODELS, "all")]
    lengths = ["points off", *(f"{length}: cells" if key == "cells" else name for length in (SHORT, FROM_64K)
                               for key, name in keys.items())]
    return dict(tables=[(head, rows), (lengths, by_length)],
                notes=["Not as in the paper: " + ", ".join(fails) + ".", why_7b_fits(), why_30b_fits(),
                       why_65b_is_off(*shortest),
                       "Any layout is above the paper by "
                       + ", ".join(f"{gap:.1f} ({model})" for model, gap in above.items())
                       + " at the most from 256K on. Short sequences take less tp there than the paper's, "
                       "and are predicted too high: products have one efficiency, whatever their size."],
                off=offs, above=above)


def draw_table3(facts, path):
    fig, axes = plt.subplots(1, 4, figsize=(17, 4.4), dpi=110, sharey=True, layout="constrained")
    _, rows = facts["tables"][0]
    tokens = [int(row[0][:-1]) for row in rows]
    for at, (ax, model) in enumerate(zip(axes, MODELS, strict=True)):
        for column, style, colour, label in ((1, "o", ORANGE, "MEMO, measured by the paper"),
                                             (2, "s-", BLUE, "memo, dry run in its width"),
                                             (3, ":", GREY, "memo, dry run in any layout")):
            there = [(S, row[3 * at + column]) for S, row in zip(tokens, rows, strict=True)
                     if not isinstance(row[3 * at + column], str)]
            ax.plot(*zip(*there, strict=True), style, color=colour, label=label, ms=5)
        failed = [S for S, row in zip(tokens, rows, strict=True) if isinstance(row[3 * at + 1], str)]
        ax.plot(failed, [2] * len(failed), "x", color=ORANGE, label="out of memory in the paper")
        ax.axvline(LONG / 1024, color=GREY, lw=0.6)
        ax.set(xscale="log", xlabel="context, K tokens", ylim=(0, 75),
               title=f"{model}, {GPUS[model]} A800" + ", fitted from 64K on" * (model == "7B"),
               xticks=[4, 16, 64, 256, 1024], xticklabels=["4", "16", "64", "256", "1024"])
        ax.minorticks_off()
        plain(ax)
    axes[0].set_ylabel("MFU, %")
    axes[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.06), fontsize=9)
    fig.savefig(path)
    plt.close(fig)


# --- section 5.2 ---

def seconds_of(wall):
    """Of a wall-clock time as Table 3 prints it."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)([hms])", wall))


def wall_clocks():
    """Lines of each model: how many sequences a step has by its printed wall-clock, how far memo's TGS and
    seconds are off; and the cells whose figures do not belong together."""
    rows, odd = [], []
    for model in MODELS:
        mine, offs = [], []
        for r in (r for r in PAPER["table3"] if r["model"] == model and "mfu" in r):
            found = r["tgs"] * r["gpus"] * seconds_of(r["wall"]) / r["seq_tokens"]
            if r.get("inconsistent") or abs(found - SEQUENCES) > 0.2:
                odd.append(f"{model} {r['system']} {thousands(r['seq_tokens'])} ({found:.1f})")
            else:
                mine.append(found)
            if r["system"] == "memo":
                tgs, wall = (got := in_its_width(model, r["seq_tokens"])).tgs, got.seconds["step"]
                offs.append([100 * abs(tgs / r["tgs"] - 1), 100 * abs(wall / seconds_of(r["wall"]) - 1)])
        rows.append([model, len(mine), f"{min(mine):.1f} to {max(mine):.1f}", round(mean(mine), 2),
                     *(round(of(those), 1) for those in zip(*offs, strict=True) for of in (mean, max))])
    return rows, odd


def averages():
    """Of the printed cells of all models, beside the paper's own figures, and of memo's cells."""
    mfu = {(r["model"], r["seq_tokens"], r["system"]): r["mfu"] for r in PAPER["table3"] if "mfu" in r}
    rows, told = [], PAPER["section52"]["tp_messages_s"]
    for system, printed in PAPER["averages"].items():
        mine = {cell[:2]: v for cell, v in mfu.items() if cell[2] == system}
        over = round(mean(mfu[*cell, "memo"] / v for cell, v in mine.items()), 2)
        rows.append([system, len(mine), printed, round(mean(mine.values()), 2), PAPER["ratios"].get(system),
                     over if system != "memo" else None])
        assert rows[-1][2] == rows[-1][3] and rows[-1][4] in (None, over)
    mine = mean(exact(in_its_width(*cell[:2])) for cell in mfu if cell[2] == "memo")
    messages = []
    for system in ("memo", "megatron"):
        tp = told[f"{system}_tp"]
        cfgs = [paper_config("65B", told["seq_tokens"], tp=tp, cp=cp) for cp in degrees_of(64 // tp)]
        every = [estimate(cfg, A800, 64, fast_arena).seconds["messages"] for cfg in cfgs]
        messages.append([f"{system}, tp{tp}", told[system], f"{min(every):.1f} to {max(every):.1f}"])
    clocks, odd = wall_clocks()
    head = ["system", "cells", "mean MFU, paper", "/of its cells", "MEMO over it, paper", "/of its cells"]
    return dict(tables=[
        (head, rows),
        (["model", "consistent cells", "/sequences a step", "/mean", "TGS off, %", "/worst", "seconds off, %",
          "/worst"], clocks),
        (["65B at 256K, seconds of messages", "paper", "/here"], messages)], notes=[
        "The paper averages every cell of Table 3 that ran, and the ratio in every cell where the rival ran. "
        f"memo's dry run of MEMO's cells has {mine:.2f}. TGS, wall-clock and length give 16 sequences a "
        "step, which the text nowhere says; MFU follows from TGS by memo's formula. These cells contradict "
        f"themselves in MFU, TGS or seconds (in brackets their sequences): {', '.join(odd)}. Messages are of "
        "memo, by cp, which recomputes no layer there; Megatron-LM did, and sent those of the forward "
        "again."])


# --- Tables 4 and 5 ---

def why_768k_fits():
    every = [estimate(paper_config("7B", S, activation="recompute"), A800, 8, fast_arena)
             for S in PAPER["table4"]["seq_tokens"]]
    papers = PAPER["table4"]["mfu_percent"]["full_recompute+plan"]
    ends = ends_with_whole_logits({got.cfg.block_size: [got] for got in every},
                                  {got.cfg.block_size: cell for got, cell in zip(every, papers, strict=True)})
    return ("\"Planned\" is memo with `--activation=recompute`, whose head makes logits in chunks. With all "
            f"at once it would need {ends}: with 4 bytes 768K would not fit, as in the paper.")


def table4():
    t4, rows, pairs = PAPER["table4"], [], {}
    modes = {"full_recompute+plan": dict(activation="recompute"), "full_swap+plan": dict(activation="swap"),
             "memo": {}}
    unplanned = {one["tokens"]: one for one in rivals.recomputing()}
    for i, S in enumerate(t4["seq_tokens"]):
        row = [thousands(S)]
        for name in t4["mfu_percent"]:
            paper, rival = t4["mfu_percent"][name][i], unplanned[S]
            if name in modes:
                ours = exact(estimate(paper_config("7B", S, **modes[name]), A800, 8, fast_arena))
            else:
                ours = 100 * rival["mfu"] if rival["fits"] else "oom"
            pairs.setdefault(name, []).append((paper, ours))
            row += [paper, ours if isinstance(ours, str) else round(ours, 1)]
        rows.append(row)
    names = ["recompute", "planned", "swap", "MEMO"]
    head = ["", *(column for name in names for column in (f"{name}, paper", "/here"))]
    return dict(tables=[(head, rows), (OFF_HEAD, [off_row(name, those) for name, those in
                                                  zip(names, pairs.values(), strict=True)])],
                off={name: off(those) for name, those in pairs.items()},
                notes=["7B on 8 GPUs, tp4 cp2. \"Recompute\" is the model of [Megatron-LM](baselines.md), "
                       "which loses nothing to fragments. MEMO at 64K: the paper contradicts itself, Table 3 "
                       "has 52.34.",
                       why_768k_fits()])


def table5():
    t5, rows, pairs, best = PAPER["table5"], [], {}, []
    found = {S: [estimate(paper_config("7B", int(S), alpha=alpha), A800, 8, fast_arena)
                 for alpha in t5["alpha"]] for S in t5["mfu_percent"]}
    for i, alpha in enumerate(t5["alpha"]):
        rows.append([alpha, *(value for S in found
                              for value in (t5["mfu_percent"][S][i], cell(found[S][i])))])
    for S, papers in t5["mfu_percent"].items():
        got = estimate(paper_config("7B", int(S)), A800, 8, fast_arena)
        pairs[thousands(int(S))] = [*zip(papers, map(exact, found[S]), strict=True)]
        best.append([thousands(int(S)), memo_fit.papers_best(S), memo_fit.eighths(got), round(got.alpha, 3),
                     *(round(limit, 3) for limit in got.plan.limits.values())])
    head = ["alpha", *(column for S in found for column in (f"{thousands(int(S))}, paper", "/here"))]
    return dict(tables=[(head, rows), (OFF_HEAD, [off_row(name, those) for name, those in pairs.items()]),
                        (["best alpha", "paper", "/here, eighths", "here", "PCIe allows", "/host", "/device"],
                         best)],
                off={name: off(those) for name, those in pairs.items()},
                notes=["7B on 8 GPUs, tp4 cp2, MFU by the part of the other activations that is swapped. "
                       "PCIe's rate and the host memory are [set](#the-fit) to the first three lengths; 384K "
                       "is unseen."])


PARTS = {
    "table3": Part("Table 3: MFU", DRY, table3, draw_table3),
    "averages": Part("Section 5.2: averages, seconds, messages", "the printed cells; dry run", averages),
    **memo_fit.PARTS,
    "rivals": rivals.PART,
    "table4": Part("Table 4: recompute, swap, plan", DRY, table4),
    "table5": Part("Table 5: alpha", DRY, table5),
    "figure1": fragments.PART,
    **memo_lengths.PARTS,
    "figure11d": convergence.PART}
