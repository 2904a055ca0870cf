"""METP (FITEE 2400602) beside memo: MFU, how long a sequence may be, errors; its layer is in metp_layer.py,
what is timed in bench/metp_time.py."""

import json

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
from research.papers.page import DRY, MEASURED, RESULTS, Part, points
from testing.paper import METP
from testing.ranks import pool

NAME = "METP"
ABOUT = """FITEE 2400602. Eight A100-SXM4-80GB of one node. Its attention has no causal mask ("causal",
"mask": not in the text), memo's has: "BERT-Large" is a causal GPT of its size, and MFU counts half the
scores. Tables 1, 2 and Figure 4 have the paper's LLaMA-70B; Figures 5 and 6 memo's presets: Llama's own
shapes, LLaMA-7B's optimizer on the host, 5 layers of 70B, 1 of 175B. """

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


def largest(cfg, S, keys):
    """(MFU in percent, or why not, sequences) of the largest batch, a power of two, that fits; (None, None)
    where a layout is refused."""
    found, n = (None, None), 1
    while True:
        one = config_with(cfg, block_size=S, batch_size=n, activation="keep",
                          gradient_accumulation_steps=1, **keys)
        got = estimate_or_none(one, A100, 8, fast_arena)
        if got is None or not got.fits:
            return ("oom", None) if got and n == 1 else found
        found, n = (points(got.mfu), n), 2 * n


def figure5():
    """MFU on eight, nothing recomputed, by length, with the largest batch."""
    rows = []
    for name, argv in PRESETS.items():
        for S in (2**i for i in range(12, 21)):
            found = [largest(preset(argv), S, keys) for keys in LAYOUTS.values()]
            rows.append([name.partition(",")[0], f"{S // 1024}K", *(value for one in found for value in one)])
    most = max(row[2] for row in rows if not isinstance(row[2], str | None))
    long = [row for row in rows if int(row[1][:-1]) * 1024 >= CLAIMS["mfu_from_tokens"]]
    wins = {name: sum(mfu > tp for model, _, mfu, _, tp, *_ in long if model == name.partition(",")[0]
                      and isinstance(mfu, float) and isinstance(tp, float)) for name in PRESETS}
    both = sum(isinstance(row[2], float) and isinstance(row[4], float) for row in long)
    ratios = [[name, *map(speed_over_tp, short_of_tp(preset(argv)))] for name, argv in PRESETS.items()]
    head = ["model", "tokens", *(column for kind in LAYOUTS for column in (kind, "/sequences"))]
    shown = [row for row in long if isinstance(row[2], float) and row[1] in ("32K", "128K", "512K")]
    return dict(tables=[(head, shown)],
                most=most, wins=[sum(wins.values()), both], notes=[
        "MFU on eight with the largest batch that fits, as in the paper, here a power of two. METP reaches "
        f"{most}% (paper: at most {100 * CLAIMS['mfu_at_most']:.0f}%; points and batches are only drawn). "
        f"Where both run from 32K on METP is above TP in {sum(wins.values())} of {both} ("
        + ", ".join(f"{name.partition(',')[0]} "
                    f"{n}" for name, n in wins.items()) + "), in the paper in most: here no "
        "message of tp hides on an A100, whose efficiencies were fitted to such a system, so METP's matrices "
        "are exposed.",
        "In short sequences METP is slightly slower in the paper, which names no length. Here at 4K it has "
        f"{spread(ratios, 1)} of TP's speed with one sequence, 512 tokens a rank, and {spread(ratios, -1)} "
        f"with {TOGETHER[-1]}, which share the matrices."])


def spread(ratios, column):
    found = [row[column] for row in ratios if row[column]]
    return f"{min(found):.2f} to {max(found):.2f}"


SHORT, TOGETHER = 4096, (1, 16)  # tokens, sequences of a micro batch


def short_of_tp(cfg):
    """[(METP's Estimate, TP's)] at 4K tokens, by the sequences that are computed together."""
    every = [config_with(cfg, block_size=SHORT, batch_size=n, activation="keep",
                         gradient_accumulation_steps=1) for n in TOGETHER]
    return [[estimate(config_with(one, **LAYOUTS[kind]), A100, 8, fast_arena) for kind in ("METP", "TP")]
            for one in every]


def speed_over_tp(pair):
    """Of (METP's Estimate, TP's): TP's seconds of a step over METP's."""
    metp, tp = (got.seconds["step"] for got in pair)
    return round(tp / metp, 2) if all(got.fits for got in pair) else None


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
        rows.append([name.partition(",")[0], *ours, *(round(n / first, 1) if n else None for n in ours)])
        _, exact = tokens(8, traced_arena, **LAYOUTS["METP"])
        others = [ours[-1] / tokens(8, **LAYOUTS[kind])[1] for kind in ("TP", "Ulysses")]
        others += [exact / tokens_of_ten_units(found[8][0], A100, ulysses) for ulysses in (False, True)]
        metp, tp = (tokens(8, activation="memo", **LAYOUTS[kind])[1] for kind in ("METP", "TP"))
        others.append(metp / tp)
        beside.append([name.partition(",")[0], *(round(ratio, 2) for ratio in others)])
    low, high = CLAIMS["max_sequence_over_others_8gpus"]
    more = [f"/{p}" for p in RANKS]
    return dict(tables=[(["model", "tokens, 1 GPU", *more, "times, 1 GPU", *more], rows),
                        (["on 8 GPUs, over", "memo's TP", "/memo's Ulysses", "/a TP of 10 units",
                          "/a Ulysses of 10 units", "/TP, swapping"], beside)],
                notes=["The longest sequence, nothing recomputed, and times that on the fewest GPUs that "
                       "fit: it grows faster than the GPUs, as in the paper. The paper divides by one GPU, "
                       "where LLaMA-7B does not fit (here it does, its optimizer on the host), and has "
                       "LLaMA-70B far above the others. Here GPT-175B is: 70B, with 18 bytes a parameter "
                       "where the paper counts four weights, starts at 2 GPUs.",
                       f"Over others on 8 the paper measured {low} to {high}. \"10 units\": its Tables 1 and "
                       "2, beside a trace of METP's temporary tensors; GPT-175B's layer has a backward, "
                       "which these do not count. Swapping: both with `--activation=memo`."])


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


def errors():
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
        f"Printed: a mean below {CLAIMS['average_error_below']:.0e}."])


# --- how far messages hide ---

def figure7():
    """Of a layer, forward and backward, as bench/metp_time.py measured it."""
    every = json.loads((RESULTS.parent / "metp_time.json").read_text())["overlap"]["found"]
    whole, rows = [one for one in every if one["half"] == "layer"], []
    for p, ratio in dict.fromkeys((one["p"], one["ratio"]) for one in whole if one["p"] == 4):
        mine = [one for one in whole if (one["p"], one["ratio"]) == (p, ratio)]
        found = []
        for model in METP["models"]:
            alone, sync, beside = (sum(one[key] for one in mine if one["model"] == model)
                                   for key in ("compute_s", "at_once_s", "seconds"))
            found.append((alone / sync, 1 - alone / sync, beside / sync))
        rows.append([p, ratio, int(8 * CLAIMS["flops_per_byte"] / ratio),
                     *(f"{min(of):.2f} to {max(of):.2f}" for of in zip(*found, strict=True))])
    head = ["p", "messages over computing", "tokens by Eq. 5, p = 8", "Comp", "Comm", "Async"]
    return dict(tables=[(head, rows)],
                notes=["Parts of the time of a layer, forward and backward, whose messages are waited for at "
                       "once, least to most of the four models; Async: messages beside computing. As in the "
                       "paper Async is below 1, and comes to Comp as sequences get longer. Processes over "
                       "gloo, paced ([how](../docs/metp.md)); the paper's bars are only drawn. It wants s > "
                       f"{CLAIMS['overlap_tokens']:,} for inner loop and FFN, s > "
                       f"{CLAIMS['overlap_tokens_outer_loop']:,} for the outer loop, and sees little change "
                       "from 8k on but for BERT-Large."])


PARTS = {
    **metp_layer.PARTS,
    "figure5": Part("Figure 5: MFU", DRY, figure5),
    "figure6": Part("Figure 6: longest sequences", DRY, figure6, draw_figure6),
    "errors": Part("Section 5.2: errors of elements", MEASURED, errors),
    "figure7": Part("Figure 7: overlap", MEASURED, figure7)}
