"""Table 4 and Figures 10 to 12 of SPPO (arXiv 2503.10377) by dry run: its configurations in two forms, its
own, which recomputes nothing (activation=swap: rows whose copies do not hide stay on the device), and MEMO's,
which recomputes them (activation=memo). Beside them, on the same GPUs: Megatron-LM and DeepSpeed-Ulysses with
ZeRO-3, each in the fastest layout of its own (research/baselines.py), Megatron-LM with as many stages as
SPPO, and memo in the fastest layout of one stage and whole sequences.

Models, GPUs, SP, PP, N and lengths are the paper's; its SP is tp inside a node, with cp where that is not
enough. Subsequences have equal FLOPs. The GPUs are A100 with 80 GB, eight a node with 2 TB and four links of
200 Gb/s; a copy runs at the PCIe rate of memo's dgx-a100, which is that of the paper's figure 5. All take 16
sequences a step. In all of memo's layouts parameters and gradients stay on the device, as SPPO's and
Megatron-LM's do. """

from functools import cache, partial
from itertools import product

import matplotlib.pyplot as plt

from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.report import layout_of
from memo.estimate.search import MODES, longest_of_layouts
from memo.estimate.search import longest as longest_estimate
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.system import hardware
from memo.system.hardware import GIB
from research.baselines import DEEPSPEED, MEGATRON, best, longest
from research.papers.page import DRY, MILLION, Part, points, thousands
from research.papers.rivals import MODELS, NAMES, fastest, told
from research.papers.sppo_sizes import FIGURE5, LAYERS, LINK, Stage
from testing.paper import PAPER, SEQUENCES, SPPO, config_of, rows_of_table3

FORMS = "swap", "memo"
STAGED = "megatron with stages"
RIVALS = {**NAMES, STAGED: "Megatron-LM, same stages"}
OURS = {"swap": "memo in SPPO's form", "fastest": "memo's fastest layout"}
NODE = dict(network_bytes_per_s=4 * 25e9 / 8, host_memory_bytes=2_000_000_000_000)
FIGURE11 = ("13B", 524288), ("65B", 655360)
# speedups over Megatron-LM; the paper's full offload of 13B is 0.91 of its no offload
PARTS11 = {"no offload": dict(activation="keep"), "full offload": dict(activation="memo", alpha=1.0),
           "adaptive": dict(activation="swap"), "+ MSP": dict(activation="swap", msp=True)}
FASTER = 10  # times the network's speed, to see what messages cost
NAMES11 = {model: f"{model}, {tokens // 1024}K" for model, tokens in FIGURE11}
FACTS11 = SPPO["speedups"]
PAPER11 = {"13B": {"full offload": f"{FACTS11['full_offload_13b_512k']} of no offload",
                   "adaptive": FACTS11["adaptive_13b"], "+ MSP": FACTS11["msp_13b"]},
           "65B": {"full offload": FACTS11["full_offload_65b_640k"], "adaptive": FACTS11["adaptive_65b"],
                   "+ MSP": FACTS11["msp_65b"]}}
STAGES = {32: 4, 64: 8, 128: 16}  # GPUs: stages of eight
config = partial(config_of, facts=SPPO, states="device")


def sppo_config(model, sp, pp, tokens, N, **keys):
    """The config of one of the paper's models in SPPO's layout."""
    tp = min(sp, 8)
    return config(model, tokens, tp=tp, cp=sp // tp, pp=pp, subsequences=N, subsequence_cut="flops",
                  unit_order="subsequence", **keys)


def gpus(world, **figures):
    return hardware.machine("a100-80gb", ranks=world, **NODE | figures)


@cache
def rivals(model, tokens, pp, world):
    """{rival: told()} of all RIVALS."""
    made = {system: best(system, config(model, tokens), gpus(world), world, SEQUENCES) for system in NAMES}
    made[STAGED] = best(MEGATRON, config(model, tokens), gpus(world), world, SEQUENCES, pp=pp)
    return {name: told(found) for name, found in made.items()}


def with_its_optimizer(model, sp, pp, tokens, N, form):
    """The Estimate of a form; the optimizer is on the host where nothing else fits."""
    for where in ("auto", "cpu"):
        got = estimate(sppo_config(model, sp, pp, tokens, N, activation=form, optimizer_device=where),
                       gpus(sp * pp), sp * pp, fast_arena)
        if got.fits:
            break
    return got


# --- Table 4 and Figure 10 ---

def of_run(one):
    return [points(one["mfu"]), round(one["tgs"], 1)] if one["fits"] else ["no", None]


def table4():
    """Memory of both forms, and speeds beside the others'."""
    memory, speeds, ratios, rates, again = [], [], {}, [], []
    for one in SPPO["table4"]:
        model, sp, pp = one["model"], one["sp"], one["pp"]
        world = sp * pp
        for tokens, N in ((int(tokens), N) for tokens, N in one["tokens_n"].items()):
            forms = {form: with_its_optimizer(model, sp, pp, tokens, N, form) for form in FORMS}
            whole = fastest(config(model, tokens, subsequences=1), gpus(world), world)
            others, swap = rivals(model, tokens, pp, world), forms["swap"]
            name = [f"{model}, {world}", tokens, N]
            memory.append([*name, f"{100 * swap.seconds['bubble'] / swap.seconds['step']:.1f}%",
                           *(round(n / GIB, 1) for got in forms.values()
                             for n in (got.device_bytes, got.host_bytes)),
                           "host" if swap.cfg.optimizer_on_host else "device"])
            assert all(got.fits for got in forms.values()), name
            rates.append([got.tgs for got in forms.values()])
            again.append(forms["memo"].seconds["recompute"] / forms["memo"].seconds["step"])
            mine = {"swap": swap.tgs, "fastest": whole.tgs}
            speeds.append([*name, points(swap.mfu), round(swap.tgs, 1), points(whole.mfu),
                           round(whole.tgs, 1),
                           *(value for rival in RIVALS for value in of_run(others[rival]))])
            for form, rival in product(OURS, RIVALS):
                if others[rival]["fits"]:
                    ratios.setdefault((form, rival), []).append(mine[form] / others[rival]["tgs"])
    over = [[OURS[form], *(f"{min(ratios[form, rival]):.2f} to "
                           f"{max(ratios[form, rival]):.2f}" for rival in RIVALS)]
            for form in OURS]
    low, high = FACTS11["over_megatron_deepspeed"]
    over.append(["SPPO, measured by the paper", *[f"{low} to {high}, over both"] * 2, None])
    differ = max(abs(swap / memo - 1) for swap, memo in rates)
    names = "SPPO's", "fastest", "Megatron", "DeepSpeed", "same pp"
    return dict(
        tables=[(["model, GPUs", "tokens", "N", "bubble", "SPPO's form: device, GiB", "host",
                  "MEMO's: device", "host", "optimizer"], memory),
                (["model, GPUs", "tokens", "N", *(column for name in names for column in (name, "TGS"))],
                 speeds),
                (["times as fast as", *RIVALS.values()], over)],
        notes=[
            "The first table: memo in SPPO's stages and subsequences, once in SPPO's form (`swap`, which "
            "recomputes nothing), once in MEMO's (`memo`, which recomputes what it does not copy). Both are "
            f"as fast, to {100 * differ:.1g}%: at these lengths copies hide, and recomputing takes at most "
            f"{100 * max(again):.1g}% of a step. They differ in where activations lie: MEMO's form fills the "
            "device before it copies.",
            "The second table, MFU in percent and TGS: SPPO's form; memo's fastest layout of one stage and "
            "whole sequences; [the baselines](baselines.md), each in its fastest layout that fits; "
            "Megatron-LM with as many stages as SPPO. \"no\": nothing fits. The facts at hand have the "
            "paper's configurations and the range of its speedups, no MFU and no TGS.",
            "What differs from the paper. Context parallelism: Megatron-LM's fastest layout here has one "
            "stage, tp inside a node and a ring across nodes, whose hops hide at these lengths, so it has "
            "no bubble; held to SPPO's stages it waits, for 16 micro batches over 8 stages are a bubble "
            "of 7/16 of the computing. The facts at hand do not say how the paper ran its baselines. "
            "Fragments: the baselines lose nothing to them here. The bubble: SPPO's form has most of it "
            "at N = 32, and gains with N. Heads: 13B has 40, so Ulysses ends at 8 ranks."])


def draw_table4(facts, path):
    _, rows = facts["tables"][1]
    columns = ((OURS["swap"], 3, BLUE, "o-"), (OURS["fastest"], 5, GREEN, "s--"),
               (RIVALS[MEGATRON], 7, GREY, "^:"), (RIVALS[DEEPSPEED], 9, PALE, "v:"),
               (RIVALS[STAGED], 11, "black", "x:"))
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.2), dpi=110, sharey=True, layout="constrained")
    for ax, one in zip(axes, SPPO["table4"], strict=True):
        mine = [row for row in rows if row[0].startswith(f"{one['model']},")]
        for label, column, colour, style in columns:
            there = [(row[1] / 1024, row[column]) for row in mine if row[column] != "no"]
            ax.plot(*zip(*there, strict=True), style, color=colour, label=label)
        ax.set(xlabel="context, K tokens", ylim=(0, 60), title=f"{one['model']}, {one['gpus']} A100")
        plain(ax)
    axes[0].set_ylabel("MFU, %")
    axes[0].legend(frameon=False, loc="lower left")
    fig.savefig(path)
    plt.close(fig)


# --- Figure 11 ---

@cache
def of_part(layout, name, times=1):
    """The Estimate of the config of sppo_config(*layout) with one of PARTS11, on a network of so many times
    the speed."""
    cfg = sppo_config(*layout, **PARTS11[name])
    machine = gpus(cfg.tp * cfg.cp * cfg.pp, network_bytes_per_s=times * NODE["network_bytes_per_s"])
    return estimate(cfg, machine, cfg.tp * cfg.cp * cfg.pp, fast_arena)


def help_with(layout, times):
    """(units that are helped, percent that MSP makes a layout faster) on a network of so many times the
    speed."""
    alone, helped = (of_part(layout, name, times) for name in ("adaptive", "+ MSP"))
    units = {(piece.stage, piece.subsequence) for one in helped.stages for piece in one.placement.lent}
    return len(units), round(100 * (helped.tgs / alone.tgs - 1), 1)


def figure11():
    rows, helped, found = [], {}, {}
    for model, tokens in FIGURE11:
        one = next(one for one in SPPO["table4"] if one["model"] == model)
        layout = model, one["sp"], one["pp"], tokens, one["tokens_n"][str(tokens)]
        others = rivals(model, tokens, one["pp"], one["gpus"])
        for name in PARTS11:
            got = of_part(layout, name)
            line = [f"{NAMES11[model]}: {name}", got.fits]
            line += [round(got.tgs, 1), *(round(got.tgs / others[rival]["tgs"], 2) for rival in RIVALS),
                     f"{100 * got.seconds['bubble'] / got.seconds['step']:.1f}%"] if got.fits else [None] * 5
            rows.append([*line, PAPER11[model].get(name)])
        found[model] = of_part(layout, "adaptive"), of_part(layout, "full offload"), others
        helped[model] = [help_with(layout, times) for times in (1, FASTER)]
    head = ["", "fits", "TGS", "over Megatron-LM", "DeepSpeed", "same stages", "bubble",
            "paper, over Megatron-LM"]
    return dict(tables=[(head, rows)], helped=helped, notes=[
        offload_note(found), msp_note(helped), megatron_note(*found["65B"])])


def offload_note(found):
    lost = [100 * (1 - full.tgs / adaptive.tgs) for adaptive, full, _ in found.values()]
    papers = (1 - FACTS11["full_offload_13b_512k"],
              1 - FACTS11["full_offload_65b_640k"] / FACTS11["adaptive_65b"])
    stage, ((gb, *_), (ms, *_)) = Stage(8), FIGURE5[8].values()
    by_stage, by_layer = (stage.stall_s([1.0] * 7 + [0.0], layers) for layers in (1, LAYERS))
    return (f"Full offload makes 13B {lost[0]:.1f}% slower (the paper: {papers[0]:.0%}, than without "
            f"offload) and 65B {lost[1]:.1f}% slower than adaptive (the paper: {papers[1]:.0%}). One "
            "difference is known: memo copies layer by layer while the stage computes the next one, the "
            "paper copies a stage's subsequence when all its layers are done. It is small: in [Figure 5's "
            "simulation](#figure-5-sizes-of-subsequences-and-their-ratios) with N = 8 full offload waits "
            f"{by_layer:.2f} s of a pass by layers, {by_stage:.2f} s by stages. The paper's copies are not "
            f"slower, {gb / ms * 1e3:.1f} GB/s in its figure 5, here {LINK / 1e9:g}. No other reason is "
            "found.")


def msp_note(helped):
    won = [f"{100 * (FACTS11[f'msp_{model}'] / FACTS11[f'adaptive_{model}'] - 1):.0f}%"
           for model in ("13b", "65b")]
    (here, fast), (here_65b, fast_65b) = helped.values()
    return (f"[MSP](../docs/pipeline.md#stages-that-help-others-msp) gives 13B {here[1]:.1f}% "
            f"(the paper: {won[0]}) and 65B {here_65b[1]:.1f}% (the paper: {won[1]}). Of the 56 units "
            f"next to the bubbles {here[0]} and {here_65b[0]} are helped. Messages keep it from more: a "
            "layer's weights, keys and values of all subsequences before, and gradients of both in fp32 on "
            "the way back. On a "
            f"network of {FASTER} times the speed {fast[0]} and {fast_65b[0]} units would be helped, and MSP "
            f"would give {fast[1]:.1f}% and {fast_65b[1]:.1f}%.")


def megatron_note(adaptive, _, others):
    """Of 65B."""
    ours, fastest_layout, staged = (100 * mfu for mfu in (
        adaptive.mfu, others[MEGATRON]["mfu"], others[STAGED]["mfu"]))
    theirs, cells = ours / FACTS11["adaptive_65b"], PAPER["table4"]["mfu_percent"]
    left = [alone / planned for alone, planned in zip(
        cells["full_recompute"], cells["full_recompute+plan"], strict=True) if not isinstance(alone, str)]
    low, model, S = min((mfu, model, S) for model in MODELS for S, mfu in rows_of_table3(
        model, MEGATRON).items() if not isinstance(mfu, str))
    return (f"65B is {FACTS11['adaptive_65b']} times as fast as Megatron-LM in the paper. The facts at hand "
            f"have no MFU of SPPO's machine. If SPPO had {ours:.1f}% there, as here, Megatron-LM would have "
            f"{theirs:.1f}%: {theirs / fastest_layout:.0%} of the {fastest_layout:.1f}% that its fastest "
            f"layout is modelled with, {theirs / staged:.0%} of the {staged:.1f}% with SPPO's stages. "
            f"Fragments as MEMO measured them are not enough: in its Table 4 they leave {min(left):.0%} to "
            f"{max(left):.0%}. MEMO's Table 3 has Megatron-LM as low as {low}% ({model}, {thousands(S)}), "
            "without saying why. No reason for the paper's ratio is found.")


def draw_figure11(facts, path):
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.3), dpi=110, layout="constrained")
    for ax, (model, tokens) in zip(axes, FIGURE11, strict=True):
        mine = [row for row in facts["tables"][0][1] if row[0].startswith(model)]
        for at, row in enumerate(mine):
            if row[1]:
                ax.bar(at - 0.2, row[3], 0.38, color=BLUE, label="memo, dry run" if at == 2 else None)
            else:
                ax.text(at - 0.2, 0.02, "does not fit", rotation=90, ha="center", fontsize=8)
            if isinstance(row[-1], float):
                ax.bar(at + 0.2, row[-1], 0.38, color=ORANGE,
                       label="measured by the paper" if at == 2 else None)
        ax.set_xticks(range(len(mine)), list(PARTS11))
        ax.axhline(1, color=GREY, lw=0.8)
        ax.set(title=f"{model}, {tokens // 1024}K tokens", xlim=(-0.6, len(mine) - 0.4))
        plain(ax)
    axes[0].set(ylabel="tokens per second over Megatron-LM")
    axes[0].legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)


# --- Figure 12 ---

def figure12():
    rows = []
    for world, pp in STAGES.items():
        there = gpus(world)
        cfg = sppo_config("7B", 8, pp, MILLION, "auto", activation="swap")
        swap = longest_estimate(cfg, there, world, fast_arena)
        cfg = config("7B", MILLION, subsequences=1)
        ours = longest_of_layouts(cfg, there, world, fast_arena, 1, MODES[-1:])[0]
        most = {system: longest(system, config("7B", MILLION), there, world, SEQUENCES) for system in NAMES}
        rows.append([world, SPPO["max_tokens"]["normalised"][str(world)],
                     round(swap.cfg.block_size / MILLION, 2), swap.cfg.n_subsequences, points(swap.mfu),
                     *(value for got in most.values() for value in
                       (round(got.layout.cfg.block_size / MILLION, 2), points(got.mfu))),
                     round(ours.cfg.block_size / MILLION, 2), points(ours.mfu),
                     layout_of(ours).replace("=", "")])
    head = ["GPUs", "paper, normalised", "SPPO's form", "N", "MFU", "Megatron-LM", "MFU", "DeepSpeed", "MFU",
            "memo", "MFU", "in"]
    [(world, most)] = SPPO["max_tokens"]["gpus"].items()
    return dict(tables=[(head, rows)], notes=[
        "In units of 2^20 tokens, MFU in percent. The paper's are normalised; the facts at hand have tokens "
        f"for {world} GPUs alone, {most:,}, which is {most / MILLION:.1f} in units of 2^20, so the unit of "
        "the others should be the same. By its Table 4 it ran 7B at 1,048,576 on 32 GPUs. SPPO's form ends "
        "where the keys and values of a stage's layers, with their gradients in fp32, fill the device; more "
        "stages have fewer layers each. Megatron-LM goes further with a ring over all nodes and one input "
        "kept of several layers. Ulysses ends at 32 heads. memo's longest keeps of most layers their input "
        "alone, in host memory, and repeats attention."])


def draw_figure12(facts, path):
    _, rows = facts["tables"][0]
    fig, ax = plt.subplots(figsize=(8, 4.4), dpi=110, layout="constrained")
    kinds = ((1, "SPPO, the paper (normalised)", ORANGE), (2, OURS["swap"], BLUE),
             (9, "memo, one stage", GREEN), (5, NAMES[MEGATRON], GREY), (7, NAMES[DEEPSPEED], PALE))
    for at, (column, label, colour) in enumerate(kinds):
        ax.bar([k + 0.16 * at - 0.32 for k in range(len(rows))], [row[column] for row in rows], 0.15,
               color=colour, label=label)
    ax.set_xticks(range(len(rows)), [f"{row[0]} A100" for row in rows])
    ax.set(ylabel="longest context of 7B, M tokens (2^20)", yscale="log", ylim=(1, 1000))
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    plain(ax)
    fig.savefig(path)
    plt.close(fig)


PARTS = {
    "table4": Part("Table 4 and Figure 10: its "
                   "configurations", "SPPO's Table 4 and figure 10", DRY, table4, draw_table4,
                   "Dry runs. Blue: the paper's configurations by memo; green: memo's fastest layout; "
                   "dotted: the baselines. What does not fit has no point."),
    "figure11": Part("Figure 11: what each part gives", "SPPO's figure 11", DRY, figure11, draw_figure11,
                     "Tokens per second over Megatron-LM's fastest layout: dry runs (blue), the paper "
                     "(orange)."),
    "figure12": Part("Figure 12: longest contexts", "SPPO's figure 12", DRY, figure12, draw_figure12,
                     "Longest contexts of 7B: dry runs; the paper's in orange, as it normalised them. The "
                     "axis is logarithmic.")}
