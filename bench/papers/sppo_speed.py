"""Table 4 and Figures 10 to 12 of SPPO (arXiv 2503.10377) by dry run: its configurations in two forms, its
own, which recomputes nothing (activation=swap: rows whose copies do not hide stay on the device), and MEMO's,
which recomputes them (activation=memo). Beside them, on the same GPUs: Megatron-LM and DeepSpeed-Ulysses with
ZeRO-3, each in the fastest layout of its own (testing/baselines.py), Megatron-LM with as many stages as SPPO,
and memo in the fastest layout of one stage and whole sequences.

Models, GPUs, SP, PP, N and lengths are the paper's; its SP is tp inside a node, with cp where that is not
enough. Subsequences have equal FLOPs. The GPUs are A100 with 80 GB, eight a node with 2 TB and four links of
200 Gb/s; a copy runs at the PCIe rate of memo's dgx-a100, which is that of the paper's figure 5. All take 16
sequences a step. In all of memo's layouts parameters and gradients stay on the device, as SPPO's and
Megatron-LM's do. """

from functools import cache, partial
from itertools import product

import matplotlib.pyplot as plt

from bench.papers.page import DRY, MILLION, Part, points
from bench.papers.rivals import NAMES, fastest, told
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.hardware import GIB
from memo.estimate.report import layout_of
from memo.estimate.search import MODES, longest_of_layouts
from memo.estimate.search import longest as longest_estimate
from memo.plots import BLUE, GREEN, GREY, ORANGE, PALE, plain
from testing.baselines import DEEPSPEED, MEGATRON, best, longest
from testing.paper import SEQUENCES, SPPO, config_of

FORMS = "swap", "memo"
STAGED = "megatron with stages"
RIVALS = {**NAMES, STAGED: "Megatron-LM, same stages"}
OURS = {"swap": "memo in SPPO's form", "fastest": "memo's fastest layout"}
NODE = dict(network_bytes_per_s=4 * 25e9 / 8, host_memory_bytes=2_000_000_000_000)
FIGURE11 = ("13B", 524288), ("65B", 655360)
# speedups over Megatron-LM; the paper's full offload of 13B is 0.91 of its no offload
PARTS11 = {"no offload": dict(activation="keep"), "full offload": dict(activation="memo", alpha=1.0),
           "adaptive": dict(activation="swap"), "+ MSP": dict(activation="swap", msp=True)}
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


def gpus(world):
    return hardware.machine("a100-80gb", ranks=world, **NODE)


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
    memory, speeds, ratios, rates = [], [], {}, []
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
    differ = max(abs(memory_tgs[0] / memory_tgs[1] - 1) for memory_tgs in rates)
    names = "`swap`", "memo", "Megatron", "DeepSpeed", "same pp"
    return dict(
        tables=[(["model, GPUs", "tokens", "N", "bubble", "`swap`: device, GiB", "host", "`memo`: device",
                  "host", "optimizer"], memory),
                (["model, GPUs", "tokens", "N", *(column for name in names for column in (name, "TGS"))],
                 speeds),
                (["times as fast as", *RIVALS.values()], over)],
        notes=[
            f"Both forms are as fast, to {100 * differ:.1f}%: at these lengths copies hide, and memo "
            "recomputes for milliseconds of a step. They differ in where activations lie: `memo` fills "
            "the device before it copies.",
            "MFU in percent, TGS, of SPPO's form (`swap`) and of memo's fastest layout of one stage and "
            "whole sequences; of [the baselines](baselines.md), each in its fastest layout that fits, and "
            "of Megatron-LM with as many stages as SPPO. \"no\": nothing fits.",
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

def figure11():
    rows, helped, rates = [], {}, {}
    for model, tokens in FIGURE11:
        one = next(one for one in SPPO["table4"] if one["model"] == model)
        sp, pp, N = one["sp"], one["pp"], one["tokens_n"][str(tokens)]
        others = rivals(model, tokens, pp, sp * pp)
        for name, keys in PARTS11.items():
            got = estimate(sppo_config(model, sp, pp, tokens, N, **keys), gpus(sp * pp), sp * pp, fast_arena)
            line = [f"{NAMES11[model]}: {name}", got.fits]
            line += [round(got.tgs, 1), *(round(got.tgs / others[rival]["tgs"], 2) for rival in RIVALS),
                     f"{100 * got.seconds['bubble'] / got.seconds['step']:.1f}%"] if got.fits else [None] * 5
            rows.append([*line, PAPER11[model].get(name)])
            if name == "adaptive":
                rates[model] = [100 * mfu for mfu in (got.mfu, *(others[rival]["mfu"] for rival in RIVALS))]
            if got.cfg.msp:
                helped[model] = len({(piece.stage, piece.subsequence) for one in got.stages
                                     for piece in one.placement.lent})
    head = ["", "fits", "TGS", "over Megatron-LM", "DeepSpeed", "same stages", "bubble",
            "paper, over Megatron-LM"]
    return dict(tables=[(head, rows)], helped=helped, notes=figure11_notes(rows, helped, rates["65B"]))


def figure11_notes(rows, helped, mfus):
    """`mfus`: of 65B, adaptive, and of its RIVALS."""
    rate = {row[0]: row[2] for row in rows}
    lost = {model: 100 * (1 - rate[f"{name}: full offload"] / rate[f"{name}: adaptive"])
            for model, name in NAMES11.items()}
    won = {model: 100 * (rate[f"{name}: + MSP"] / rate[f"{name}: adaptive"] - 1)
           for model, name in NAMES11.items()}
    return [
        f"Full offload costs 13B {lost['13B']:.1f}% (the paper: 9%) and 65B {lost['65B']:.1f}% (the paper: "
        "adaptive is 1.6 times as fast). memo copies layer by layer while the stage computes the next "
        "one, the paper copies a stage's subsequence when all its layers are done; and here a GPU gets "
        "12.5 GB/s with all of a node copying, beside a subsequence that computes longer than its copy "
        "takes.",
        f"[MSP](pipeline.md#stages-that-help-others-msp) gives 13B {won['13B']:.1f}% (the paper: 17%) and "
        f"65B {won['65B']:.1f}% (the paper: 3%). Of the 56 units next to the bubbles {helped['13B']} and "
        f"{helped['65B']} are helped. Elsewhere the messages take longer than help saves: a layer's "
        "weights, keys and values of all subsequences before, and gradients of both in fp32 on the way "
        "back. A GPU sends 12.5 GB/s to another node.",
        f"65B is {FACTS11['adaptive_65b']} times as fast as Megatron-LM in the paper. With SPPO at "
        f"{mfus[0]:.1f}% of the peak, as here, Megatron-LM would have had "
        f"{mfus[0] / FACTS11['adaptive_65b']:.1f}%: less than any layout is modelled with, "
        f"{mfus[1]:.1f}% with one stage, {mfus[3]:.1f}% with SPPO's stages. Fragments may cost as much: in "
        "MEMO's Table 4 they leave 23.0 of 43.2% at 128K. The facts at hand have no cell of Megatron-LM on "
        "SPPO's machine."]


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
    head = ["GPUs", "paper", "SPPO's form", "N", "MFU", "Megatron-LM", "MFU", "DeepSpeed", "MFU", "memo",
            "MFU", "in"]
    return dict(tables=[(head, rows)], notes=[
        "In units of 2^20 tokens, MFU in percent. SPPO's form ends where the keys and values of a stage's "
        "layers, with their gradients in fp32, fill the device; more stages have fewer layers each. "
        "Megatron-LM goes further with a ring over all nodes and one input kept of several layers. Ulysses "
        "ends at 32 heads. memo's longest keeps of most layers their input alone, in host memory, and "
        "repeats attention."])


def draw_figure12(facts, path):
    _, rows = facts["tables"][0]
    fig, ax = plt.subplots(figsize=(8, 4.4), dpi=110, layout="constrained")
    kinds = ((1, "SPPO, the paper", ORANGE), (2, OURS["swap"], BLUE), (9, "memo, one stage", GREEN),
             (5, NAMES[MEGATRON], GREY), (7, NAMES[DEEPSPEED], PALE))
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
                     "Longest contexts of 7B: dry runs, the paper's in orange. The axis is logarithmic.")}
