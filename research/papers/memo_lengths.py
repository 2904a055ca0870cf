"""MEMO by the length of a sequence, dry runs: computing and copying (its Figures 1, right, and 6), the
longest contexts (11a, b), 7B on 64 GPUs (11c)."""

import matplotlib.pyplot as plt

from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.report import layout_of
from memo.estimate.roofline import Before, kernels_s, one_document
from memo.estimate.search import config_with, longest
from memo.estimate.unit_seconds import modelled_rates
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.system.hardware import GIB
from research.baselines import DEEPSPEED, MEGATRON
from research.baselines import longest as longest_rival
from research.papers import memo_fit
from research.papers.page import DRY, MILLION, Part, cell, points, thousands
from research.papers.rivals import A800, of_rival
from testing.paper import PAPER, SEQUENCES, of_that_width, paper_config

BF16 = 2


def in_its_width(model, S, world=0):
    """The Estimate with the fastest cp that fits, else with that which lacks least."""
    return max(of_that_width(model, S, world),
               key=lambda got: (got.fits, got.mfu if got.fits else -got.device_bytes))


def of_a_layer(S, **keys):
    """Seconds of a layer of 7B on a rank: (forward, attention's kernel in it, offload of all that it keeps);
    and the part of attention's output in those bytes."""
    cfg = Layout.of(paper_config("7B", S, **keys))
    layer, node = modelled_rates(cfg, A800, BF16), A800.node
    sizes = {name: t.nbytes for name, t in tensors_of(cfg, BF16).items()}
    nbytes, unit = sum(sizes.values()), layer.units[0].unit
    attention_s = kernels_s(unit, one_document(unit, Before()))
    return layer.forward_s, attention_s, nbytes / node.pcie_bytes_per_s, sizes["attn_out"] / nbytes


def figure6():
    rows, lengths = [], [2**k * 1024 for k in range(4, 11)] + [n * 65536 for n in (3, 9)]
    for S in sorted(lengths):
        forward, attention, offload, _ = of_a_layer(S)
        rows.append([thousands(S), *(round(1e3 * s, 1) for s in (
            forward, attention, forward - attention, offload))])

    def crossing(which, **keys):
        """The least multiple of 1,024 tokens with which the offload is no longer than the forward, or than
        attention."""
        return next(n for n in range(16, 1024)
                    if (of := of_a_layer(1024 * n, **keys))[which] >= of[2])
    facts, eight = PAPER["figure1"], dict(tp=PAPER["figure1"]["hides_tp"], cp=1)
    layer, attention, at_tp8 = crossing(0), crossing(1), crossing(0, **eight)
    forward, _, offload, _ = of_a_layer(facts["hides_from_tokens"], **eight)
    shares = PAPER["figure6"]
    whole, kernels, _, output = of_a_layer(S := shares["attention_from_tokens"])
    rates = memo_fit.rates_with_papers_best()
    part = kernels / whole
    head = ["", "a layer's forward, ms", "/attention's kernel", "/all else", "offload of all of it"]
    told = [["copies hide from, tp8", thousands(facts["hides_from_tokens"]), f"{at_tp8}K"],
            [f"attention's part, {thousands(S)}", f"{shares['attention_part']:.0%}", f"{part:.1%}"],
            ["its output's part of what is kept", f"{shares['attention_output_part']:.2%}", f"{output:.2%}"]]
    return dict(tables=[(head, rows), (["printed", "paper", "/here"], told)],
                crossing=[layer, attention, at_tp8], notes=[
        f"7B, tp4 cp2: a layer's offload hides behind its forward from {layer}K on, behind attention alone "
        f"from {attention}K on; the paper's Table 5 has it between 192K and 256K, which PCIe's rate is "
        "[set](#the-fit) to. The two do not agree: with tp8 192K would need "
        f"{offload / forward * A800.node.pcie_bytes_per_s / 1e9:.1f} GB/s, and Table 5's best alphas allow "
        f"{rates[0] / 1e9:g} to {rates[-1] / 1e9:g}."])


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
    shown = [[*row[:4], row[4], row[5], row[6], row[8], row[10], row[9]] for row in rows
             if row[0] == "7B" or row[1] == WORLDS[-1]]
    short = ["model", "GPUs", "paper", "/method", "MFU", "repeats", "/MFU", "Megatron-LM", "DeepSpeed, paper",
             "/here"]
    return dict(tables=[(head, rows), (short, shown)], hidden=[0], notes=[
        "Units of 2^20 tokens. \"Method\": the paper's, all attention outputs are kept; \"repeats\": memo "
        "may keep a layer's input alone where the host is full. Printed besides: MFU above 50%; "
        f"Megatron-LM's points are only drawn. 65B: {states} of {A800.memory_bytes / GIB:.1f} GiB are states "
        f"with tp8; with `--states=sharded`: {sharded}."])


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
    every = [in_its_width("7B", millions * MILLION, 64) for millions in range(1, 9)]
    full = next(n for n, got in enumerate(every, 1) if got.binds == "host memory")
    return dict(tables=[(["M tokens (2^20)", *map(str, range(1, 9))], [["MFU", *map(cell, every)]])],
                layouts=[layout_of(got) for got in every], notes=[
        f"Printed: above 50% from 1M to 8M; the points are only drawn. From {full}M on host memory binds."])


PARTS = {
    "figure6": Part("Figures 1 (right) and 6: computing and copying", DRY, figure6),
    "figure11ab": Part("Figure 11a, b: longest contexts", DRY, figure11ab, draw_figure11ab),
    "figure11c": Part("Figure 11c: 7B on 64 GPUs", DRY, figure11c)}
