"""SPPO (arXiv 2503.10377) beside memo: who helps whom, its activations, the speed of subsequences; sizes and
ratios are in sppo_sizes.py, its configurations in sppo_speed.py."""

import matplotlib.pyplot as plt

from memo.config.formulas import layer_forward_flops
from memo.config.layer import KEYS_VALUES, layer_of
from memo.config.msp import helped_units
from memo.estimate.unit_seconds import modelled_rates
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, plain
from research.papers import sppo_sizes, sppo_speed
from research.papers.page import COUNTED, DRY, SIMULATED, Part
from research.papers.sppo_speed import gpus, sppo_config
from testing.paper import SPPO

NAME = "SPPO"
ABOUT = """arXiv 2503.10377. A100 of 80 GB, eight a node with 2 TB and four links of 200 Gb/s, 12.5 GB/s for
each GPU's copies, subsequences of equal FLOPs, 16 sequences a step, states on the device (65B at a million
tokens: the optimizer on the host). """
BF16 = 2


def kept():
    """The tensors of a layer in units of B S H elements, and what becomes of each."""
    cfg = sppo_config("65B", 8, 1, 131072, 8)
    unit = cfg.block_size * cfg.n_embd * BF16
    tensors = layer_of(cfg).tensors(1, cfg.block_size, BF16)
    rows = [[name, round(t.nbytes / unit, 2), "stays: read by all later subsequences" if name in KEYS_VALUES
             else "goes to the host as far as its copy hides, else stays"] for name, t in tensors.items()]
    stays = sum(row[1] for row in rows if row[0] in KEYS_VALUES)
    return dict(tables=[(["tensor", "units of B S H", "in SPPO's form"], rows)], stays=stays, notes=[
        f"A GPT's layer. On the device stay {stays:g} units of it, as many as the paper counts for keys and "
        f"values. The backward adds their gradients, here in fp32: {2 * stays:g} units. The paper's Table 2 "
        "is not among the facts at hand; this is what its section 5.2 says, for each of memo's tensors."])


def table3():
    facts, rows, right = SPPO["table3_msp"], [], 0
    p, n = facts["pp"], facts["n"]
    for side, before in (("left", True), ("right", False)):
        for stage in range(p):
            helped = {x: those for (home, x), those in helped_units(p, n).items()
                      if home == stage and (home + x < p - 1) == before}
            stages = {stage, *(k for those in helped.values() for k in those)} if helped else set()
            found = sorted(helped), sorted(stages)
            papers = facts[f"{side}_ids"][stage], facts[f"{side}_stages"][stage]
            pairs = zip(papers, found, strict=True)
            rows.append([side, stage, *(str(ids) for pair in pairs for ids in pair)])
            right += papers == found
    head = ["bubble", "stage", "subsequences helped, paper", "here", "stages that compute them, paper",
            "here"]
    return dict(tables=[(head, rows)], right=right,
                notes=[f"4 stages, 8 subsequences: {right} of {len(rows)} lines are the paper's."])


NUMBERS = 1, 2, 4, 8, 16, 32, 64, 128, 256


def figure7():
    """Speed of a layer's forward by the number of subsequences, and the step that the solver's formula makes
    of it."""
    rows, best = [], {}
    for one, tokens in zip(SPPO["table4"], (524288, 524288, 524288), strict=True):
        model, sp, pp = one["model"], one["sp"], one["pp"]
        steps, alone = {}, None
        for N in NUMBERS:
            cfg = sppo_config(model, sp, pp, tokens, N)
            layer = modelled_rates(cfg, gpus(sp * pp), BF16)
            seconds = layer.forward_s + layer.backward_s
            alone = alone or seconds
            steps[N] = (pp - 1 + N) / N * seconds
            speed = layer_forward_flops(cfg, tokens) / sp / layer.forward_s
            rows.append([f"{model}, pp={pp}", N, tokens // N, round(speed / 1e12, 1),
                         round(alone / seconds, 3), round(steps[N] / alone, 3)])
        best[model] = [min(steps, key=steps.__getitem__), one["tokens_n"][str(tokens)]]
    head = ["", "N", "tokens of a subsequence", "TFLOP/s of a layer's forward", "speed over N = 1",
            "(p-1+N)/N F(N)"]
    return dict(tables=[(head, rows)], best=best,
                notes=["512K tokens, SP as in Table 4. F(N): a layer's forward and backward by the rates, "
                       "over that of N = 1. The rates have one speed of attention for all lengths on the "
                       "A100: what is lost here are merges of partial results and messages, not slower "
                       "kernels. The formula is least at N "
                       "= " + ", ".join(f"{ours} ({model}; the paper took {paper})" for model, (ours, paper)
                                                    in best.items()) + "."])


def draw_figure7(facts, path):
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.4), dpi=110, layout="constrained")
    _, rows = facts["tables"][0]
    for one, colour in zip(SPPO["table4"], (BLUE, GREEN, GREY), strict=True):
        mine = [row for row in rows if row[0].startswith(f"{one['model']},")]
        for ax, column in zip(axes, (3, 5), strict=True):
            ax.plot([row[1] for row in mine], [row[column] for row in mine], "o-", color=colour,
                    label=mine[0][0])
        N = one["tokens_n"]["524288"]
        axes[1].plot(N, next(row[5] for row in mine if row[1] == N), "o", ms=12, color=ORANGE,
                     fillstyle="none", label="the paper's N" if one is SPPO["table4"][0] else None)
    axes[0].set(ylabel="TFLOP/s of a layer's forward on a GPU", ylim=(0, None))
    axes[1].set(ylabel="(p - 1 + N)/N F(N), over F(1)", ylim=(0.8, 3))
    for ax in axes:
        ax.set(xscale="log", xlabel="subsequences", xticks=NUMBERS, xticklabels=[str(N) for N in NUMBERS])
        ax.minorticks_off()
        ax.legend(frameon=False)
        plain(ax)
    fig.savefig(path)
    plt.close(fig)


PARTS = {
    "kept": Part("Section 5.2: what stays on the device", "SPPO's section 5.2", COUNTED, kept),
    "table3": Part("Table 3: who helps whom", "SPPO's Table 3", SIMULATED, table3),
    "figure5": sppo_sizes.PART,
    "figure7": Part("Figure 7: speed against the number of subsequences", "SPPO's figure 7", DRY, figure7,
                    draw_figure7, "Left: speed of a layer's forward at 512K tokens; right: the solver's "
                                  "formula. Dry runs; orange: the N that the paper took."),
    **sppo_speed.PARTS}
