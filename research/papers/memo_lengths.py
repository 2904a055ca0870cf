"""MEMO by the length of a sequence, dry runs: computing and copying (its Figures 1, right, and 6), the
longest contexts (11a, b), 7B on 64 GPUs (11c)."""

import matplotlib.pyplot as plt

from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.report import layout_of
from memo.estimate.roofline import own_kernels, total
from memo.estimate.search import config_with, longest
from memo.estimate.unit_seconds import modelled_rates
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.system.hardware import GIB
from research.baselines import DEEPSPEED, MEGATRON
from research.baselines import longest as longest_rival
from research.papers.page import DRY, MILLION, Part, cell, points, thousands
from research.papers.rivals import A800, of_rival
from testing.paper import PAPER, SEQUENCES, of_that_width, paper_config

BF16 = 2


def in_its_width(model, S, world=0):
    """The Estimate with the fastest cp that fits, else with that which lacks least."""
    return max(of_that_width(model, S, world),
               key=lambda got: (got.fits, got.mfu if got.fits else -got.device_bytes))


def of_a_layer(S):
    """Seconds of a layer of 7B on a rank: (forward, attention's kernel in it, offload of all that it
    keeps)."""
    cfg = Layout.of(paper_config("7B", S))
    layer, node = modelled_rates(cfg, A800, BF16), A800.node
    nbytes = sum(t.nbytes for t in tensors_of(cfg, BF16).values())
    kernels_s = total(own_kernels(layer.units[0].unit, "forward"))
    return layer.forward_s, kernels_s, nbytes / node.pcie_bytes_per_s


def figure6():
    rows, lengths = [], [2**k * 1024 for k in range(4, 11)] + [n * 65536 for n in (3, 5, 6)]
    for S in sorted(lengths):
        forward, attention, offload = of_a_layer(S)
        rows.append([thousands(S), *(round(1e3 * s, 1) for s in (
            forward, attention, forward - attention, offload))])

    def crossing(which):
        """The least multiple of 1,024 tokens with which the offload is no longer than the forward, or than
        attention."""
        return next(n for n in range(16, 1024) if of_a_layer(1024 * n)[which] >= of_a_layer(1024 * n)[2])
    layer, attention = crossing(0), crossing(1)
    head = ["", "a layer's forward, ms", "attention's kernel", "all else", "offload of all of it"]
    return dict(tables=[(head, rows)], crossing=[layer, attention], notes=[
        f"7B, tp4 cp2: the offload of a whole layer hides behind a layer's forward from {layer}K on, "
        f"behind attention alone from {attention}K on. The paper's Table 5 has it between 192K, where "
        "alpha = 0.75 is best, and 256K, where 1 is. PCIe's rate is [set](#the-fit) to these alphas, so that "
        "the crossing is in part what was fitted."])


def draw_figure6(facts, path):
    fig, ax = plt.subplots(figsize=(8, 4.6), dpi=110, layout="constrained")
    head, rows = facts["tables"][0]
    tokens = [int(row[0][:-1]) for row in rows]
    for column, style, colour in ((1, "o-", BLUE), (2, "s--", PALE), (3, ":", GREY), (4, "^-", GREEN)):
        ax.plot(tokens, [row[column] for row in rows], style, color=colour,
                label=head[column].removesuffix(", ms"))
    ax.axvspan(192, 256, color=ORANGE, alpha=0.25, lw=0, label="the paper's crossing, by its Table 5")
    ax.set(xscale="log", yscale="log", xlabel="context, K tokens", ylabel="ms of a layer on a rank",
           xticks=[16, 64, 256, 1024], xticklabels=["16", "64", "256", "1024"])
    ax.minorticks_off()
    ax.legend(frameon=False)
    plain(ax)
    fig.savefig(path)
    plt.close(fig)


WORLDS = 8, 16, 32, 64


def states_bytes(cfg, world):
    """Of parameters, gradients and optimizer on a device in its width, the rest cp."""
    got = estimate(config_with(cfg, cp=world // cfg.tp), A800, world, fast_arena)
    return sum(got.bytes_of(region)[0] for region in ("params", "grads", "optimizer"))


def whole(got):
    """Whether it fits and repeats no attention, as MEMO, which always swaps what attention gives."""
    return got.fits and not got.placement.input_only


def figure11ab():
    rows, papers = [], PAPER["scalability"]
    for model in PAPER["models"]:
        for world in WORLDS:
            cfg = paper_config(model, MILLION)
            every = [config_with(cfg, cp=cp) for cp in degrees_of(world // cfg.tp)[-1:]]
            found = {kind: longest(every[0], A800, world, fast_arena, suits)
                     for kind, suits in (("whole", whole), ("any", lambda got: got.fits))}
            paper = papers["memo_max_tokens"].get(str(world)) if model == "7B" else None
            row = [model, world, paper and round(paper / MILLION, 2)]
            for got in found.values():
                row += [round(got.cfg.block_size / MILLION, 2), points(got.mfu)] if got else ["none", None]
            row.append(f"tp{cfg.tp} cp{world // cfg.tp}" if found["whole"] else None)
            for system in (MEGATRON, DEEPSPEED):
                most = longest_rival(system, of_rival(model, MILLION), A800, world, SEQUENCES)
                row.append(round(most.layout.cfg.block_size / MILLION, 2) if most else "none")
            theirs = papers["deepspeed"].get(str(world)) if model == "7B" else None
            rows.append([*row, theirs and theirs / MILLION])
    sharded = ((world, longest(config_with(paper_config("65B", MILLION), cp=world // 8, states="sharded"),
                               A800, world, fast_arena, whole)) for world in WORLDS)
    sharded = ", ".join(f"{got.cfg.block_size / MILLION:.2f} on {world}" if got else f"none on {world}"
                        for world, got in sharded)
    states = " and ".join(f"{states_bytes(paper_config('65B', MILLION), world) / GIB:.1f} on {world} GPUs"
                          for world in (16, 32))
    head = ["model", "GPUs", "paper", "method", "MFU", "repeats", "MFU", "layout", "Megatron-LM",
            "DeepSpeed", "DeepSpeed, paper"]
    return dict(tables=[(head, rows)], notes=[
        "Longest contexts in units of 2^20 tokens, MFU in percent. \"Method\": the paper's, all "
        "attention outputs are kept; \"repeats\": memo may keep a layer's input alone where the host is "
        "full. Its width of tp, the rest cp. The rivals are [models](baselines.md) that lose nothing to "
        "fragments.",
        f"65B: of a device's {A800.memory_bytes / GIB:.1f} GiB parameters, gradients and optimizer take "
        f"{states} with tp8. The rivals share them among more ranks: ZeRO-3 among all, Megatron-LM with tp16 "
        "and stages. So does memo with `--states=sharded`; beside the same tp8, keeping all attention "
        f"outputs: {sharded}."])


def draw_figure11ab(facts, path):
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), dpi=110, layout="constrained")
    _, rows = facts["tables"][0]
    for model, colour in zip(PAPER["models"], (BLUE, GREEN, PALE, GREY), strict=True):
        mine = [row for row in rows if row[0] == model and row[3] != "none"]
        axes[0].plot([row[1] for row in mine], [row[3] for row in mine], "s-", color=colour,
                     label=f"{model}, dry run of its method")
        axes[1].plot([row[1] for row in mine], [row[4] for row in mine], "s-", color=colour, label=model)
    paper = [(row[1], row[2]) for row in rows if row[2]]
    axes[0].plot(*zip(*paper, strict=True), "o", color=ORANGE, ms=8, label="7B, measured by the paper")
    axes[0].set(ylabel="longest context, M tokens (2^20)", yscale="log")
    axes[1].set(ylabel="MFU at the longest context, %", ylim=(0, 60))
    for ax in axes:
        ax.set(xscale="log", xlabel="A800 GPUs", xticks=WORLDS, xticklabels=[str(n) for n in WORLDS])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=9)
        plain(ax)
    fig.savefig(path)
    plt.close(fig)


def figure11c():
    rows = []
    for millions in range(1, 9):
        same = in_its_width("7B", millions * MILLION, 64)
        rows.append([millions, cell(same), layout_of(same), same.binds])
    return dict(tables=[(["M tokens (2^20)", "MFU, %", "layout", "bound by"], rows)], notes=[
        "7B on 64 GPUs. The paper's points are not among the facts at hand; it ran up to 8M."])


PARTS = {
    "figure6": Part("Figures 1 (right) and 6: computing and copying", "MEMO's figures 1 and 6", DRY, figure6,
                    draw_figure6, "Milliseconds of a layer of 7B on a rank against context: dry runs. "
                                  "Orange: where the paper's copies begin to hide."),
    "figure11ab": Part("Figure 11a, b: longest contexts", "MEMO's figure 11a, b", DRY, figure11ab,
                       draw_figure11ab, "Longest context and its MFU against GPUs. Orange: the paper's, "
                                        "others: dry runs."),
    "figure11c": Part("Figure 11c: 7B on 64 GPUs", "MEMO's figure 11c", DRY, figure11c)}
