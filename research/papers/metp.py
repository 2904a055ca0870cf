"""METP (FITEE 2400602) beside memo: MFU, how long a sequence may be, errors; its layer is in metp_layer.py,
what is timed in bench/metp_time.py."""

import matplotlib.pyplot as plt
import torch

from memo.config.layout import Layout
from memo.decide.where import GAPS
from memo.estimate.arena import fast_arena, traced_arena
from memo.estimate.budget import estimate
from memo.estimate.search import config_with, estimate_or_none, longest
from memo.layer.tiles import row_order
from memo.parallel.mesh import open_mesh
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.run.load_config import load_config
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system import hardware
from memo.system.axis import Axis
from model import GPT, initial_weights
from research.papers import metp_layer
from research.papers.metp_layer import CLAIMS, CPU, RANKS
from research.papers.page import DRY, MEASURED, Part, points
from testing.ranks import pool

NAME = "METP"
ABOUT = """FITEE 2400602. Eight A100-SXM4-80GB of one node. The facts at hand hold the paper's formulas and
what it claims of its figures, not their points. """

A100 = hardware.machine("a100-80gb")
PRESETS = {
    "BERT-Large": "config/gpt2_124m.py --n_layer=24 --n_head=16 --n_embd=1024 --vocab_size=30522 "
                  "--position=rope --batch_size=1 --gradient_accumulation_steps=1 --bias=false",
    "LLaMA-7B, optimizer on the host": "config/llama2_7b_1m.py --optimizer_device=cpu",
    "LLaMA-70B, 5 layers": "config/llama2_70b_1m.py --n_layer=5",
    "GPT-175B, 1 layer": "config/gpt_175b.py --n_layer=1 --optimizer_device=auto"}


def tokens_of_ten_units(got, gpu, ulysses):
    """The longest sequence of a TP, or of Ulysses with sharded parameters, that keeps 10 units of b s h / 8 a
    layer, as the paper's do (Tables 1 and 2), where all else but activations and temporary tensors is as in
    `got`, memo's METP on 8."""
    own = ("rounding_buffers", "transient", "head", "positions", "batch", "margin")
    fixed = sum(line.device_bytes for line in got.lines if line.region not in own) + gpu.memory_bytes // GAPS
    L, C = got.cfg.n_layer, got.cfg.n_embd
    whole = 4 * C * C * 2 if ulysses else 0  # one layer's matrices at their full width
    units = 10 * L / 8 + (0 if ulysses else 1 - 1 / 8)  # TP gathers the tokens of all ranks
    return (gpu.memory_bytes - fixed - whole) / (2 * C * units + 24)  # 24: a token's ids and rotations


def preset(argv):
    return load_config([*argv.split(), "--tp=1", "--cp=1", "--subsequences=1", "--states=device"])


LAYOUTS = {"METP": dict(tp=8, tensor_parallel="metp", head_groups=8), "TP": dict(tp=8),
           "Ulysses": dict(cp=8, context_parallel="ulysses")}


def figure5():
    """MFU on eight, nothing recomputed, by length."""
    rows = []
    for name, argv in PRESETS.items():
        for S in (2**i for i in range(12, 21)):
            cfg, row = preset(argv), [name, f"{S // 1024}K"]
            for keys in LAYOUTS.values():
                one = config_with(cfg, block_size=S, activation="keep", gradient_accumulation_steps=1, **keys)
                got = estimate_or_none(one, A100, 8, fast_arena)
                row.append(None if got is None else points(got.mfu) if got.fits else "oom")
            rows.append(row)
    most = max(row[2] for row in rows if not isinstance(row[2], str | None))
    at_4k = {name: short_of_tp(preset(argv)) for name, argv in PRESETS.items()}
    ratios, hosted = [], []
    for name, pairs in at_4k.items():
        ratios.append([name, *map(speed_over_tp, pairs)])
        if pairs[0][0].cfg.optimizer_on_host:
            model = name.partition(",")[0]
            ratios.append([f"{model}, but for the optimizer", *(speed_over_tp(pair, OF_STATES)
                                                                for pair in pairs)])
            hosted.append(host_note(model, pairs))
    return dict(tables=[(["model", "tokens", *LAYOUTS], rows),
                        (["METP over TP at 4K, sequences together:", *map(str, TOGETHER)], ratios)],
                most=most, notes=[
        f"MFU, percent. METP reaches {most}% here; the paper says at most "
        f"{100 * CLAIMS['mfu_at_most']:.0f}%. The efficiencies of A100 are those of a system whose "
        "messages do not hide, so METP's matrices are all counted as exposed: at short lengths METP is "
        "faster than this where they do hide.",
        "The paper has METP slightly slower than TP at 4K. Here it is far slower where one sequence is "
        "computed at a time: a rank has 512 tokens then, and by the paper's own formula messages are as "
        "short as products from 1,040 on. With several sequences together the matrices travel once for all "
        "of them, and METP comes nearer: the second table. The facts at hand do not say how many the paper "
        "took.", *hosted])


SHORT, TOGETHER = 4096, (1, 2, 4, 8, 16)  # tokens, sequences of a micro batch
OF_STATES = "optimizer", "gradients and parameters"


def short_of_tp(cfg):
    """[(METP's Estimate, TP's)] at 4K tokens, by the sequences that are computed together."""
    every = [config_with(cfg, block_size=SHORT, batch_size=n, activation="keep",
                         gradient_accumulation_steps=1) for n in TOGETHER]
    return [[estimate(config_with(one, **LAYOUTS[kind]), A100, 8, fast_arena) for kind in ("METP", "TP")]
            for one in every]


def speed_over_tp(pair, without=()):
    """Of (METP's Estimate, TP's): TP's seconds of a step over METP's, without those of some parts."""
    metp, tp = (got.seconds["step"] - sum(got.seconds[part] for part in without) for got in pair)
    return round(tp / metp, 2) if all(got.fits for got in pair) else None


def host_note(name, pairs):
    """What the optimizer on the host takes of the steps with one sequence, and with the most."""
    (metp, tp), (metp_most, tp_most) = ([sum(got.seconds[part] for part in OF_STATES) / got.seconds["step"]
                                         for got in pair] for pair in (pairs[0], pairs[-1]))
    return (f"{name}'s optimizer steps on the host. With one sequence it and the copies of gradients and "
            f"parameters are {metp:.0%} of METP's step and {tp:.0%} of TP's, with {TOGETHER[-1]} "
            f"{metp_most:.0%} and {tp_most:.0%}: with one sequence they hide most of what METP loses, with "
            "more of them less. Of the copies more is hidden beside METP, whose pass is longer. But for the "
            "optimizer and these copies METP comes nearer here as elsewhere.")


def draw_figure5(facts, path):
    fig, axes = plt.subplots(1, 4, figsize=(15, 4), dpi=110, sharey=True, layout="constrained")
    for ax, name in zip(axes, PRESETS, strict=True):
        mine = [row for row in facts["tables"][0][1] if row[0] == name]
        for column, (kind, colour, style) in enumerate(zip(LAYOUTS, (BLUE, GREY, GREEN), ("o-", "s--", "^:"),
                                                           strict=True), 2):
            there = [(i, row[column]) for i, row in enumerate(mine) if isinstance(row[column], float)]
            if there:
                ax.plot(*zip(*there, strict=True), style, color=colour, label=f"memo's {kind}", ms=4)
        ax.axhline(100 * CLAIMS["mfu_at_most"], color=ORANGE, lw=1, label="METP's most in the paper")
        ax.set_xticks(range(0, len(mine), 2), [row[1] for row in mine[::2]])
        ax.set(xlabel="tokens", title=name, ylim=(0, 70))
        plain(ax)
    axes[0].set_ylabel("MFU on eight A100, %")
    axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(path)
    plt.close(fig)


def figure6():
    """Longest sequences on 1, 2, 4 and 8, with a group of heads for each rank, over those of others on 8. The
    arena of temporary tensors is a bound; beside others' formulas, which have none, METP's is a trace's."""
    rows, beside = [], []
    for name, argv in PRESETS.items():
        cfg = preset(argv)

        def tokens(world, arena=fast_arena, cfg=cfg, activation="keep", **keys):
            one = config_with(cfg, block_size=2**14, activation=activation, alpha="auto", **keys)
            got = longest(one, A100, world, arena)
            return got, got.cfg.block_size if got else None
        found = {p: tokens(p, tp=p, tensor_parallel="metp", head_groups=p) for p in (1, *RANKS)}
        ours = [n for _, n in found.values()]
        first = next(n for n in ours if n)
        rows.append([name, *ours, *(round(n / first, 1) if n else None for n in ours)])
        _, exact = tokens(8, traced_arena, **LAYOUTS["METP"])
        others = [ours[-1] / tokens(8, **LAYOUTS[kind])[1] for kind in ("TP", "Ulysses")]
        others += [exact / tokens_of_ten_units(found[8][0], A100, ulysses) for ulysses in (False, True)]
        metp, tp = (tokens(8, activation="memo", **LAYOUTS[kind])[1] for kind in ("METP", "TP"))
        others.append(metp / tp)
        beside.append([name, *(round(ratio, 2) for ratio in others)])
    low, high = CLAIMS["max_sequence_over_others_8gpus"]
    more = [f"{p} GPUs" for p in RANKS]
    return dict(tables=[(["model", "tokens, 1 GPU", *more, "times, 1 GPU", *more], rows),
                        (["on 8 GPUs, over", "memo's TP", "memo's Ulysses", "a TP of 10 units",
                          "a Ulysses of 10 units", "TP, swapping"], beside)],
                notes=["The longest sequence, nothing recomputed, and how many times that of the fewest "
                       "GPUs it is. It grows faster than the number of GPUs, as the paper says. The second "
                       f"table: METP's over others'. The paper measured {low} to {high}. Its TP and Ulysses "
                       "keep 10 units a layer (Tables 1 and 2): of these two columns METP's temporary "
                       "tensors are a trace's. The single layer of GPT-175B has a backward, which the "
                       "formula of 10 units does not count. \"Swapping\": METP and memo's TP, both with "
                       "`--activation=memo`."])


def draw_figure6(facts, path):
    fig, ax = plt.subplots(figsize=(7.5, 4.4), dpi=110, layout="constrained")
    for (name, *values), colour in zip(facts["tables"][0][1], (PALE, GREEN, GREY, BLUE), strict=True):
        grown = [(p, n) for p, n in zip((1, *RANKS), values[4:], strict=True) if n]
        ax.plot([p / grown[0][0] for p, _ in grown], [n for _, n in grown], "o-", color=colour,
                label=f"{name}, dry run")
    ax.plot((1, 8), (1, 8), ":", color=ORANGE, label="linear, as the paper has TP and Ulysses")
    ax.set(xlabel="GPUs, over the fewest that fit", ylabel="longest sequence, over theirs")
    ax.legend(frameon=False)
    plain(ax)
    fig.savefig(path)
    plt.close(fig)


# --- what a layer's numbers are ---

def own_output(host, cfg):
    """(positions of this rank's rows, the last layer's output there) of a forward."""
    mesh = open_mesh(host, cfg.cp, cfg.tp, CPU, metp=cfg.metp)
    held = torch.cat(row_order(cfg, cfg.block_size, mesh).positions())
    model = Model(GPT, cfg, CPU, torch.float32, mesh=mesh)
    Optimizer(model, cfg).load(initial_weights(cfg, 0, CPU))
    model.reserve(1, len(held))
    every = torch.randint(cfg.vocab_size, (1, cfg.block_size), generator=torch.Generator().manual_seed(0))
    tokens = every[:, held]
    model.forward(tokens, tokens)
    found = held.unflatten(0, (-1, cfg.tp))[:, mesh.weights.rank], model.swap.x[-1].flatten(0, -2).clone()
    mesh.close()
    return found


def figure7():
    """How far METP's outputs on some ranks are off those of one process, element by element, in fp32."""
    rows, shape = [], dict(n_layer=4, n_head=8, n_embd=256, block_size=4096, vocab_size=512, subsequences=1)
    _, alone = own_output(Axis("host"), Layout(**shape))
    for p in RANKS:
        cfg = Layout(**shape, tp=p, tensor_parallel="metp")
        off = torch.cat([(found - alone[held]).abs().flatten()
                         for held, found in pool(p).run(own_output, cfg)])
        rows.append([p, f"{off.mean():.1e}", f"{off.max():.1e}"])
    return dict(tables=[(["ranks", "mean error of an element", "largest"], rows)], notes=[
        f"4 layers, C = 256, 4,096 tokens, fp32, over gloo; outputs are about {alone.abs().mean():.2f}. "
        f"The paper's mean error is {CLAIMS['average_error_per_element']:.0e}; the facts at hand do not say "
        "in which precision, nor how large its outputs are."])


PARTS = {
    **metp_layer.PARTS,
    "figure5": Part("Figure 5: MFU", "METP's figure 5", DRY, figure5, draw_figure5,
                    "MFU against tokens on eight A100, nothing recomputed: dry runs, which end where "
                    "memory does. Orange: the most that the paper says METP reaches."),
    "figure6": Part("Figure 6: longest sequences", "METP's figure 6", DRY, figure6, draw_figure6,
                    "Longest sequence against GPUs, both over the fewest GPUs that fit: dry runs. Orange, "
                    "dotted: linear growth, which the paper says TP and Ulysses have."),
    "figure7": Part("Figure 7: errors of elements", "METP's figure 7", MEASURED, figure7)}
