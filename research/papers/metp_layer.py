"""METP (FITEE 2400602), a layer at its full size without memory: what travels, what it keeps and takes."""

import sys

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


def one_layer(h, heads, S, p, kind="metp", dtype=torch.bfloat16):
    """A GPT of one layer, of which rank 0 of p has shapes alone, ready for a pass over S tokens."""
    cfg = Layout(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128, tp=p, tensor_parallel=kind)
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

MESSAGES = {"shift", "start", "places", "start_gather", "start_scatter_sum", "row_forward"}


class Metered(FakeArena):
    """A FakeArena that knows which requests hold messages: by the function that makes them. Of METP's keys
    and values those of one group of heads are in use; the next group's, under way, are messages."""

    def __init__(self, cfg):
        super().__init__()
        self.messages, self.keys = set(), set()
        self.in_use = 2 * 2 * n_rows(cfg) * cfg.kv_heads * cfg.head_width // head_groups(cfg)  # bytes, bf16

    def note(self, storage):
        before = self.ids
        super().note(storage)
        frame, depth = sys._getframe(1), 0
        while self.ids > before and frame and depth < 12:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if "memo/parallel" in file and function in MESSAGES:
                self.messages.add(str(self.ids))
                break
            if function == "send_keys":
                self.keys.add(str(self.ids))
                break
            frame, depth = frame.f_back, depth + 1

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


def halves_memory(h, heads, S, p):
    """{half: (kept after its forward, its peak, that of its messages)} of METP's two halves' forward,
    elements without states."""
    cfg, model = one_layer(h, heads, S, p)
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


def paper_metp(h, S, p):
    """{half: (after the forward, peak)} of the paper's Tables 1 and 2, elements without states."""
    bsh = S * h
    return dict(attention=(2 * bsh / p, 3 * bsh / p**2 + 2 * bsh / p),
                mlp=(bsh / p, bsh / p + 4 * bsh / p**2))


def paper_tp_layer(h, S, p):
    """Peak elements of a layer with the paper's TP and SP: attention's activations, then the FFN's peak."""
    bsh = S * h
    return 5 * bsh / p + 4 * bsh / p + bsh


S_TABLES = 2**19


def half_table(half, states_h2):
    """Tables 1 and 2: lines of every model for 2, 4 and 8 ranks."""
    rows = []
    for name, (h, heads) in MODELS.items():
        for p in RANKS:
            unit, states = S_TABLES * h / p, states_h2 * h * h / p
            *ours, messages = halves_memory(h, heads, S_TABLES, p)[half]
            paper = paper_metp(h, S_TABLES, p)[half]
            over = (ours[1] + states) / (paper[1] + states)
            rows.append([name, p, *(round(n / unit, 2) for pair in zip(paper, ours, strict=True)
                                    for n in pair), round(messages / unit, 2), round(over, 2)])
    head = ["model", "p", "after forward, paper", "here", "peak, paper", "here", "its messages",
            "peak over the paper's"]
    return head, rows


NOTE = (f"The forward of this half of a layer, {S_TABLES:,} tokens, units of b s h / p without weights, "
        "gradients and moments, which are the same; the last column counts them. The formulas have no "
        "buffers of messages, so these stand in a column of their own, at their own peak. Peaks are below "
        "the formulas where a layer takes more than p groups of heads, or the MLP its rows in pieces.")


def table1():
    sent = [[p, 24 * (p - 1) / p, round(sent_elements(p)[0], 3)] for p in RANKS]
    return dict(tables=[half_table("mlp", 32), (["p", "sent, h^2: paper", "here"], sent)], notes=[NOTE])


def table2():
    sent = []
    for p, log2 in zip(RANKS, (1, 2, 3), strict=True):
        _, matrices, keys = sent_elements(p)
        sent.append([p, 12 * log2, round(matrices, 3), round(6 * (p - 1) / p, 3), round(keys, 3)])
    head = ["p", "matrices, h^2: paper", "here", "keys and values, bsh: paper", "here"]
    return dict(tables=[half_table("attention", 16), (head, sent)],
                notes=[NOTE, "The paper broadcasts matrices along a tree; here they go round a ring, each "
                             "link once."])


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
    short, at = (next(row for row in rows if row[:2] == ["GPT-175B", S]) for S in ("4K", "512K"))
    saved, own, with_messages, own_with = (round(100 * (1 - at[column]), 1) for column in (5, 4, 9, 8))
    head = ["model", "tokens", "METP, GiB", "TP", "over it", "paper's TP"]
    return dict(tables=[([*head, "+ messages: METP", *head[3:]], rows)], saved=[saved, with_messages], notes=[
        "GiB of a rank; METP's over those of memo's TP, and over the paper's formula for TP; then the same "
        "with the buffers of messages.",
        f"A layer of GPT-175B at 512K tokens on 8 takes {saved}% less than the paper's formula for TP "
        f"without METP's buffers of messages, which its formulas do not have, {with_messages}% less with "
        f"them; than memo's own TP {own}% and {own_with}% less. The paper measured "
        f"{100 * CLAIMS['memory_saved_175b_512k_8gpus']:.0f}% less; the facts at hand do not say what it "
        "counted. The tokens that TP gathers are in its formula, as b s h.",
        f"With the buffers METP's layer of GPT-175B is {short[9]:.2f} times the formula's at {short[1]}: the "
        "matrices under way are as large at any length."])


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
    "table1": Part("Table 1: the FFN", "METP's Table 1", COUNTED, table1),
    "table2": Part("Table 2: attention", "METP's Table 2", COUNTED, table2),
    "figure4": Part("Figure 4: memory of a layer", "METP's figure 4", COUNTED, figure4, draw_figure4,
                    "Peak of a layer's forward with its states, METP over tensor parallelism, eight "
                    "ranks: over the paper's formula (lines; dotted: with the buffers of messages) and "
                    "memo's own (dashed). Counted in a trace, not run; orange: measured by the paper.")}
