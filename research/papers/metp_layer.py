"""METP (FITEE 2400602), a layer at its full size without memory: what travels, what it keeps and takes."""

import re
import sys
from math import log2

import matplotlib.pyplot as plt
import torch

from memo.config.layer import head_groups, n_rows, tensors_of
from memo.config.layout import Layout
from memo.parallel.mesh import Mesh
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.run.rehearsal import FakeArena
from memo.schedule.streams import open_streams
from memo.states.passes import Model
from memo.system.axis import Axis
from memo.system.hardware import GIB
from model import GPT
from research.papers.page import COUNTED, Part, thousands
from testing.paper import METP

CPU = torch.device("cpu")
MODELS = {name: (model["n_embd"], model["n_head"]) for name, model in METP["models"].items()}
RANKS = (2, 4, 8)
CLAIMS = METP["claims"]


def one_layer(h, heads, S, p, kind="metp", dtype=torch.bfloat16, **keys):
    """A GPT of one layer, of which rank 0 of p has shapes alone, ready for a pass over S tokens."""
    cfg = Layout(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128, tp=p,
                 tensor_parallel=kind, **keys)
    tokens = Axis("cp", p if kind == "metp" else 1)
    mesh = Mesh(weights=Axis("tp", p), hops=Axis("hops", p), tokens=tokens)
    model = Model(GPT, cfg, "meta", dtype, mesh=mesh)
    model.reserve(1, S, streams=open_streams(CPU))
    return cfg, model


# --- what travels ---

def sent_elements(p):
    """What a rank sends in a layer's forward and backward: (FFN, attention's matrices) in units of h^2, keys
    and values and their gradients in units of bsh."""
    h, heads, S = 1024, 16, 8192
    _, model = one_layer(h, heads, S, p, dtype=torch.float32)
    s, y = model.swap.layers[0], model.swap.x[1]
    model.gpt.blocks[0].forward(s, y)
    model.gpt.blocks[0].backward(y, s)
    sent = {name: n // 4 for name, n in model.mesh.take_sent_bytes().items()}
    return sent["hops"] / h**2, sent["tp"] / h**2, sent["cp"] / (S * h)


# --- what a layer keeps and takes ---

PLACES = "memo/parallel/", "memo/system/axis", "memo/layer/metp", "memo/layer/cp"
MESSAGES = {"shift", "start", "places", "start_gather", "start_scatter_sum", "row_forward"}


class Metered(FakeArena):
    """A FakeArena that knows which requests hold messages: by the function that makes them. Of METP's keys
    and values those of one group of heads are in use; the next group's, under way, are messages."""

    def __init__(self, cfg):
        super().__init__()
        self.messages, self.keys = set(), set()
        self.in_use = 2 * 2 * n_rows(cfg) * cfg.kv_heads * cfg.head_width // head_groups(cfg)  # bytes, bf16

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        at = len(self.log)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = {name for verb, name, _ in self.log[at:] if verb == "malloc"}
        frame, depth = sys._getframe(1), 0
        while made and frame and depth < 12:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if function in MESSAGES and any(place in file for place in PLACES):
                self.messages |= made
                break
            if function == "send_keys":
                self.keys |= made
                break
            frame, depth = frame.f_back, depth + 1
        return result

    def peaks(self):
        """Peak bytes of what is recorded since the last call: (without messages, of messages, of both
        together)."""
        live, peak, sizes = dict(messages=0, keys=0, others=0), [0, 0, 0], {}
        for verb, name, n in self.log:
            kind = "messages" if name in self.messages else "keys" if name in self.keys else "others"
            if verb == "malloc":
                sizes[name] = n
                live[kind] += n
            elif verb == "free" and name in sizes:
                live[kind] -= sizes[name]
            here = min(live["keys"], self.in_use)
            now = live["others"] + here, live["messages"] + live["keys"] - here, sum(live.values())
            peak = [*map(max, peak, now)]
        self.log.clear()
        return tuple(peak)


def layer_memory(h, heads, S, p, kind="metp"):
    """Peak elements on a rank in a layer's forward, with what it keeps and without states: (without messages,
    with them)."""
    cfg, model = one_layer(h, heads, S, p, kind)
    block, s, y, arena = model.gpt.blocks[0], model.swap.layers[0], model.swap.x[1], Metered(cfg)
    kept = {name: t.nbytes // 2 for name, t in tensors_of(cfg, 2).items()}
    arena.run("forward", block.forward, s, y)
    alone, _, together = arena.peaks()
    return [sum(kept.values()) + nbytes // 2 for nbytes in (alone, together)]


def halves_memory(h, heads, S, p, **keys):
    """{half: (kept after its forward, its peak, that of its messages)} of METP's two halves' forward,
    elements without states."""
    cfg, model = one_layer(h, heads, S, p, **keys)
    block, s, y, arena = model.gpt.blocks[0], model.swap.layers[0], model.swap.x[1], Metered(cfg)
    kept = {name: t.nbytes // 2 for name, t in tensors_of(cfg, 2).items()}
    own = block.own_parts(*block.projections, "proj_w", *block.mlp_names)
    arena.run("attention", block.attention_half, s, own, y, slice(None))
    attention = arena.peaks()
    arena.run("mlp", lambda: block.mlp_half(s, own, y, block.visits(own)))
    mlp = arena.peaks()
    of_attention = kept["x"] + kept["attn_out"] + kept["lse"]
    return dict(attention=(of_attention, of_attention + attention[0] // 2, attention[1] // 2),
                mlp=(kept["mid"], kept["mid"] + mlp[0] // 2, mlp[1] // 2))


def worth(formula, h, s, p, n=0, k=0):
    """A formula of Tables 1 and 2 as a number."""
    text = formula.replace("log_2 p", str(log2(p))).replace("^", "**")
    text = re.sub(r"(?<=[\w)])\s*(?=[a-z(])", "*", text)
    return eval(text, {}, dict(h=h, s=s, p=p, n=n, k=k, b=1))


HALVES = {"attention": "table2_mha", "mlp": "table1_ffn"}
METHODS = {"tp_sp": "TP", "rsa": "RSA", "zero_ulysses": "Ulysses", "metp": "METP"}


def paper_metp(h, S, p):
    """{half: (after the forward, peak)} of the paper's Tables 1 and 2, elements without states."""
    states = {"attention": 16 * h * h / p, "mlp": 32 * h * h / p}
    return {half: tuple(worth(formula, h, S, p) - states[half] for formula in METP[name]["metp"][:2])
            for half, name in HALVES.items()}


SHORTER = 2**15  # tokens at which attention without flash is shown


def methods(half):
    """A table of what the formulas give for each method: GiB of bf16 of LLaMA-7B's half on eight ranks."""
    (h, n), p, rows = MODELS["LLaMA-7B"], 8, []
    for name, method in METHODS.items():
        after, peak, sent = METP[HALVES[half]][name]
        every = [worth(after, h, SHORTER, p, n), *(worth(peak, h, SHORTER, p, n, k) for k in (0, 1)),
                 worth(sent, h, SHORTER, p, n)]
        rows.append([method, *(round(2 * elements / GIB, 2) for elements in every)])
    return ["of the paper's formulas, GiB", "after forward", "/peak, k = 0", "/k = 1", "/sent"], rows


def without_flash():
    """A table of attention's peak with all scores, BERT-Large's."""
    (h, n), rows = MODELS["BERT-Large"], []
    for p in RANKS:
        paper = worth(METP["table2_mha"]["metp"][1], h, SHORTER, p, n, 1) - 16 * h * h / p
        ours = halves_memory(h, n, SHORTER, p, attention="math")["attention"][1]
        rows.append([p, *(round(2 * elements / GIB, 2) for elements in (paper, ours))])
    return ["k = 1: p", "peak, GiB, paper", "/here"], rows


def paper_tp_layer(h, S, p):
    """Peak elements of a layer with the paper's TP and SP: attention's activations, then the FFN's peak."""
    bsh = S * h
    return 5 * bsh / p + 4 * bsh / p + bsh


S_TABLES = 2**19


def half_table(half):
    """Tables 1 and 2: lines of the smallest and the largest model for 2, 4 and 8 ranks."""
    rows = []
    for name in ("BERT-Large", "GPT-175B"):
        h, heads = MODELS[name]
        for p in RANKS:
            unit = S_TABLES * h / p
            *ours, messages = halves_memory(h, heads, S_TABLES, p)[half]
            paper = paper_metp(h, S_TABLES, p)[half]
            rows.append([name, p, *(round(n / unit, 2) for pair in zip(paper, ours, strict=True)
                                    for n in pair), round(messages / unit, 2)])
    head = ["model", "p", "after forward, paper", "/here", "peak, paper", "/here", "/messages"]
    return head, rows


NOTE = (f"First: the forward of this half, {S_TABLES:,} tokens, units of b s h / p without states; the "
        "formulas have no buffers of messages. Below them is a layer that takes more than p groups of heads, "
        f"or the MLP's rows in pieces. Last: LLaMA-7B at {thousands(SHORTER)}, p = 8, with states.")


def table1():
    rows = [[p, 24 * (p - 1) / p, round(sent_elements(p)[0], 3)] for p in RANKS]
    sent = ["p", "sent, h^2: paper", "/here"], rows
    return dict(tables=[half_table("mlp"), sent, methods("mlp")], notes=[NOTE])


def table2():
    sent, scores = [], without_flash()
    for p, tree in zip(RANKS, (1, 2, 3), strict=True):
        _, matrices, keys = sent_elements(p)
        sent.append([p, 12 * tree, round(matrices, 3), round(6 * (p - 1) / p, 3), round(keys, 3)])
    head = ["p", "matrices, h^2: paper", "/here", "keys and values, bsh: paper", "/here"]
    return dict(tables=[half_table("attention"), (head, sent), methods("attention"), scores], notes=[
        "Without flash attention (k = 1) the formula's scores fall as 1/p^3, and so do memo's "
        f"(`--attention=math`), {scores[1][0][2] / scores[1][0][1]:.1f} to "
        f"{scores[1][-1][2] / scores[1][-1][1]:.1f} times as large: scores and their exponentials are there "
        "at once.",
        f"Eq. 10: at p = 2 METP's peak is {1 - 7 / 12:.1%} below TP's by the formulas (printed: at least "
        f"{CLAIMS['less_than_tp']:.1%}); counted {saved_at_two()}. Matrices: the paper broadcasts along a "
        "tree, memo round a ring, each link once."])


def saved_at_two():
    """How far attention's counted peak is below the formula of TP, p = 2, of all models."""
    found = [1 - halves_memory(h, n, S_TABLES, 2)["attention"][1] / (S_TABLES * h * (1 + 4 / 2))
             for h, n in MODELS.values()]
    return f"{min(found):.1%} to {max(found):.1%}"


def figure4():
    """Peaks of a layer's forward on 8 ranks with its states: METP's over those of tensor parallelism, without
    and with the buffers of messages."""
    rows = []
    for name, (h, heads) in MODELS.items():
        for S in (2**i for i in range(12, 21)):
            p, states = 8, 48 * h * h / 8
            every = ([n + states for n in layer_memory(h, heads, S, p, kind)]
                     for kind in ("metp", "megatron"))
            formula, row = paper_tp_layer(h, S, p) + states, [name, thousands(S)]
            for metp, tp in zip(*every, strict=True):
                row += [round(metp * 2 / GIB, 3), round(tp * 2 / GIB, 3), round(metp / tp, 3),
                        round(metp / formula, 3)]
            rows.append(row)
    def of(model, S):
        return next(row for row in rows if row[:2] == [model, S])
    at, short = of("GPT-175B", "512K"), of("LLaMA-7B", "4K")
    saved, own, with_messages, own_with = (round(100 * (1 - at[column]), 1) for column in (5, 4, 9, 8))
    long = [1 - row[column] for row in rows if int(row[1][:-1]) >= 32 for column in (5, 9)]
    head = ["model", "tokens", "METP, GiB", "TP", "over it", "paper's TP"]
    shown = [[*row[:2], *row[4:6], *row[8:]] for row in rows if row[1] in ("4K", "512K")]
    return dict(tables=[([*head, "+ messages: METP", *head[3:]], rows),
                        (["model", "tokens", "over memo's TP", "/paper's", "messages too", "/paper's"],
                         shown)], hidden=[0], saved=[saved, with_messages], notes=[
        "Peak of a layer with its states on 8 ranks, over memo's TP and over the formula of the paper's, "
        "without and with buffers of messages. The paper's is of whole models, its bars only drawn, Ulysses' "
        f"too. Printed: GPT-175B at 512K {100 * CLAIMS['memory_saved_175b_512k_8gpus']:.0f}% less than TP; "
        f"here {saved}%, {with_messages}% with messages (than memo's TP {own}% and {own_with}%). From 32K on "
        "{:.0%} to {:.0%} less; here {:.0%} to "
        "{:.0%}.".format(*CLAIMS["memory_saved_beyond_32k"], min(long), max(long)),
        "LLaMA-7B at 4K takes slightly more than TP in the paper, for its double buffer; here "
        f"{short[9]:.3f} times as much with messages, {short[5]:.3f} without."])


def draw_figure4(facts, path):
    fig, ax = plt.subplots(figsize=(8, 4.5), dpi=110, layout="constrained")
    kinds = (5, "-", "over the paper's TP"), (9, ":", "the same, with messages"), (4, "--", "over memo's TP")
    for name, colour in zip(MODELS, (PALE, GREEN, GREY, BLUE), strict=True):
        mine = [row for row in facts["tables"][0][1] if row[0] == name]
        for column, style, _ in kinds:
            ax.plot(range(len(mine)), [row[column] for row in mine], style, color=colour)
        ax.plot([], [], color=colour, label=f"{name}, counted")
    for _, style, what in kinds:
        ax.plot([], [], style, color="black", label=what)
    ax.plot(7, 1 - CLAIMS["memory_saved_175b_512k_8gpus"], "o", color=ORANGE, ms=9,
            label="GPT-175B, measured by the paper")
    ax.set_xticks(range(len(mine)), [row[1] for row in mine])
    ax.set(xlabel="tokens of a sequence, 8 ranks", ylim=(0, None),
           ylabel="peak of METP's layer, as a part of TP's")
    ax.legend(frameon=False, ncols=2, fontsize=9)
    plain(ax)
    fig.savefig(path)
    plt.close(fig)


PARTS = {
    "table1": Part("Table 1: the FFN", COUNTED, table1),
    "table2": Part("Table 2: attention", COUNTED, table2),
    "figure4": Part("Figure 4: memory of a layer", COUNTED, figure4, draw_figure4)}
