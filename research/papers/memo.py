"""MEMO (arXiv 2407.12117) beside memo: its Tables 3 to 5, what it averages; figures and the fit are in other
files. The hardware is the paper's: A800 nodes, of whose host memory half is lost to rounded blocks
(testing/paper.py)."""

from statistics import mean

import matplotlib.pyplot as plt

from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.search import search
from memo.plots.figures import BLUE, GREY, ORANGE, plain
from memo.system.hardware import GIB
from research.baseline_layer import FP32, logit_bytes
from research.baselines import DEEPSPEED, MEGATRON
from research.papers import convergence, fragments, memo_fit, memo_lengths, rivals
from research.papers.memo_fit import FROM_64K, SHORT
from research.papers.memo_lengths import in_its_width
from research.papers.page import DRY, OFF_HEAD, Part, cell, off, off_row, thousands
from research.papers.rivals import A800, MODELS
from testing.paper import GPUS, LONG, PAPER, of_that_width, paper_config, rows_of_table3

NAME = "MEMO"
ABOUT = """arXiv 2407.12117. "Its width": the preset's tp (4 for 7B, as the paper says; 8 for the others, of
which it says nothing), the best cp, the rest dp, 16 sequences a step. "Any layout": the fastest of all that
memo has. """


def exact(got):
    """As cell(), not rounded: of this is said how far it is off."""
    return 100 * got.mfu if got.fits else got.reason


# --- Table 3 ---

ANOTHER = """\
    python -m memo.estimate config/7b_1m.py --n_layer=48 --n_embd=6144 --n_head=48 --block_size=524288 \\
        --gpus=32 --gpu=a800-80gb --tp=8 --cp=4 --subsequences=1 --states=device --host_memory_gb=1035 \\
        --gradient_accumulation_steps=16 --fast
"""


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
    return (f"7B: memo's head makes logits in chunks. If all were there at once, it would need {ends}. So "
            "with 4 bytes, fp32 alone, 7B would end where the paper's did; with 6, bf16 beside fp32, as "
            "Megatron-LM is [modelled](baselines.md), it would end earlier. How the paper's system makes "
            "logits, the facts at hand do not say.")


def why_30b_fits():
    """What is always swapped, where the paper's ran out of host memory, beside a length that ran."""
    told, (least, most) = [], (nbytes / 1e12 for nbytes in memo_fit.hosts_with_papers_cells())
    for cp in (2, 4):
        cfgs = [paper_config("30B", S, cp=cp, alpha=0.0) for S in (1408 * 1024, 1280 * 1024)]
        slabs = [estimate(cfg, A800, GPUS["30B"], fast_arena).host_bytes / 1e12 for cfg in cfgs]
        blocks = [memo_fit.in_blocks(cfg) / 1e12 for cfg in cfgs]
        for needs, room in ((slabs, least), (slabs, most), (blocks, memo_fit.NODE_BYTES / 1e12)):
            assert needs[0] <= room or needs[1] > room, "a reason: the one fails there, the other does not"
        slab, block = (" and ".join(f"{n:.2f}" for n in needs) for needs in (slabs, blocks))
        told.append(f"with cp{cp} {slab} TB of a node, and {block} in blocks of powers of two")
    return ("30B at 1408K: no reason was found. Inputs and attention's outputs, which MEMO always swaps, "
            f"take there and at 1280K, which ran, {'; '.join(told)}. There are 2 TB for such blocks, and by "
            f"7B's cells {least:.2f} to {most:.2f} otherwise.")


def table3():
    rows, pairs, fails, above = [], {}, [], dict.fromkeys(MODELS, 0.0)
    columns = {model: rows_of_table3(model) for model in MODELS}
    for S in columns["7B"]:
        row, length = [thousands(S)], FROM_64K if S >= LONG else SHORT
        for model in MODELS:
            paper, same = columns[model][S], in_its_width(model, S)
            best = search(same.cfg, A800, GPUS[model], fast_arena, best=1)[0]
            for name in (f"{model}, {length}", f"all, {length}"):
                pairs.setdefault(name, []).append((paper, exact(same)))
            row += [paper, cell(same), same.cfg.cp, cell(best)]
            if S >= 4 * LONG and not isinstance(paper, str):
                above[model] = max(above[model], round(exact(best) - paper, 2))
            if isinstance(paper, str) == same.fits:
                fails.append(f"{model} at {thousands(S)} (paper: {paper}; here: "
                             f"{'fits' if same.fits else same.reason})")
        rows.append(row)
    head = ["", *(column for model in MODELS for column in (f"{model}, paper", "width", "cp", "any"))]
    order = [f"{name}, {length}" for name in (*MODELS, "all") for length in (SHORT, FROM_64K)]
    return dict(tables=[(head, rows), (OFF_HEAD, [off_row(name, pairs[name]) for name in order])],
                notes=["MFU, percent: the paper's; in its width, with cp; in any layout. Not as in the "
                       "paper: " + "; ".join(fails) + ".",
                       why_7b_fits(), why_30b_fits(),
                       "The fastest of any layout is above the paper's by "
                       + ", ".join(f"{gap:.1f} ({model})" for model, gap in above.items())
                       + " points at the most from 256K on. Where sequences are short it takes less tp than "
                       "the paper's system, or none, and is predicted too high: products have one efficiency "
                       f"here, whatever their size. 7B at 4K gets {rows[0][4]}, the paper {rows[0][1]}.",
                       "A cell of another model, here of 48 layers on 32 GPUs; of several `--cp` the fastest "
                       "counts, and `--search` takes any layout:", ANOTHER],
                off={name: off(those) for name, those in pairs.items()}, above=above)


def draw_table3(facts, path):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.4), dpi=110, sharey=True, layout="constrained")
    _, rows = facts["tables"][0]
    tokens = [int(row[0][:-1]) for row in rows]
    for at, (ax, model) in enumerate(zip(axes, MODELS, strict=True)):
        for column, style, colour, label in ((1, "o", ORANGE, "MEMO, measured by the paper"),
                                             (2, "s-", BLUE, "memo, dry run in its width"),
                                             (4, ":", GREY, "memo, dry run in any layout")):
            there = [(S, row[4 * at + column]) for S, row in zip(tokens, rows, strict=True)
                     if not isinstance(row[4 * at + column], str)]
            ax.plot(*zip(*there, strict=True), style, color=colour, label=label, ms=5)
        failed = [S for S, row in zip(tokens, rows, strict=True) if isinstance(row[4 * at + 1], str)]
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


def averages():
    """Of the printed cells alone."""
    mfu = {(r["model"], r["seq_tokens"], r["system"]): r["mfu"] for r in PAPER["table3"] if "mfu" in r}
    rows = []
    for models, name in [((model,), model) for model in MODELS] + [(MODELS, "all three")]:
        row = [name]
        for least in (0, LONG):
            ours = {(m, S): v for (m, S, s), v in mfu.items() if s == "memo" and m in models and least <= S}
            row.append(round(mean(ours.values()), 2))
            row += [round(mean(v / mfu[*cell, s] for cell, v in ours.items() if (*cell, s) in mfu), 2)
                    for s in (MEGATRON, DEEPSPEED)]
        rows.append(row)
    head = ["cells of", "MFU", "over Megatron-LM", "DeepSpeed", "from 64K: MFU",
            "over Megatron-LM", "DeepSpeed"]
    return dict(tables=[(head, rows)], notes=[
        "MEMO's mean MFU, percent, and the mean of its MFU over a rival's where both ran. The paper says "
        "51.04%, 1.97x and 1.80x. None of these means is that; the facts at hand lack 65B's rows, and "
        "do not say which cells the paper averages."])


# --- Tables 4 and 5 ---

def why_768k_fits():
    every = [estimate(paper_config("7B", S, activation="recompute"), A800, 8, fast_arena)
             for S in PAPER["table4"]["seq_tokens"]]
    papers = PAPER["table4"]["mfu_percent"]["full_recompute+plan"]
    ends = ends_with_whole_logits({got.cfg.block_size: [got] for got in every},
                                  {got.cfg.block_size: cell for got, cell in zip(every, papers, strict=True)})
    return ("The second is memo with `--activation=recompute`, a system of its own: its head makes logits in "
            f"chunks. With all of them at once it would need {ends}. So with 4 bytes 768K would not fit, as "
            "in the paper; with 6 nor would 640K, which ran there. Figure 1's plan, of Megatron-LM's "
            "requests with an fp32 copy of all logits, ends where the paper's does, too.")


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
    head = ["", *(column for name in names for column in (f"{name}, paper", "here"))]
    return dict(tables=[(head, rows), (OFF_HEAD, [off_row(name, those) for name, those in
                                                  zip(names, pairs.values(), strict=True)])],
                off={name: off(those) for name, those in pairs.items()},
                notes=["7B on 8 GPUs, tp4 cp2, MFU in percent: all recomputed, without and with the "
                       "memory plan; all swapped, with the plan; MEMO. The first is the model of "
                       "[Megatron-LM](baselines.md), which loses nothing to fragments: the paper's first "
                       "column beside its third is what these cost there. For MEMO at 64K the paper's "
                       "Table 3 has 52.34.",
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
    head = ["alpha", *(column for S in found for column in (f"{thousands(int(S))}, paper", "here"))]
    return dict(tables=[(head, rows), (OFF_HEAD, [off_row(name, those) for name, those in pairs.items()]),
                        (["", "paper's best alpha", "here, of eighths", "here", "PCIe allows", "host allows",
                          "device allows"], best)],
                off={name: off(those) for name, those in pairs.items()},
                notes=["7B on 8 GPUs, tp4 cp2, MFU in percent by the part of the other activations that is "
                       "swapped. This table is in part what was [fitted](#the-fit): PCIe's rate to its best "
                       "alphas, the host memory to its cells without. The speeds have not seen it."])


PARTS = {
    "table3": Part("Table 3: MFU", "MEMO's Table 3", DRY, table3, draw_table3,
                   "MFU against context. Orange: measured by the paper; blue and grey: dry runs. Left of "
                   "the line the dry run is fitted to nothing."),
    **memo_fit.PARTS,
    "averages": Part("What the paper "
                     "averages", "MEMO's abstract; from its Table 3", "the printed cells", averages),
    "rivals": rivals.PART,
    "table4": Part("Table 4: recompute, swap, plan", "MEMO's Table 4", DRY, table4),
    "table5": Part("Table 5: alpha", "MEMO's Table 5", DRY, table5),
    "figure1": fragments.PART,
    **memo_lengths.PARTS,
    "figure11d": convergence.PART}

