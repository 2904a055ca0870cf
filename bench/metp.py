"""METP beside its paper: what travels, what a layer keeps and takes, how long a sequence may be.

    python -m bench.metp counts      elements at the collectives beside Tables 1 and 2, for p = 2, 4, 8
    python -m bench.metp memory      a layer's memory at full size, beside the formulas
    python -m bench.metp contexts    the longest sequences by the dry run, with simple bounds of the arena

Several of these at once; without an argument all. Writes bench/results/metp.json and metp_memory.png. Nothing
is run: counts and memory are of tensors without memory. What is timed is in metp_time.py.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bench.machine import store_parts
from memo.config import Config
from memo.decide import GAPS
from memo.estimate import hardware
from memo.estimate.arena import fast_arena, traced_arena
from memo.estimate.search import config_with, longest
from memo.layer import head_groups, n_rows, tensors_of
from memo.load_config import load_config
from memo.parallel.mesh import Axis, Mesh
from memo.planner.rehearsal import FakeArena
from memo.plots import plain
from memo.swap.streams import open_streams
from model import GPT

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
MODELS = {"BERT-Large": (1024, 16), "LLaMA-7B": (4096, 32), "LLaMA-70B": (8192, 64), "GPT-175B": (12288, 96)}
RANKS = (2, 4, 8)


def one_layer(h, heads, S, p, kind="metp", dtype=torch.bfloat16):
    """A GPT of one layer, of which rank 0 of p has shapes alone, ready for a pass over S tokens."""
    cfg = Config(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128, tp=p, tensor_parallel=kind)
    tokens = Axis("cp", p if kind == "metp" else 1)
    model = GPT(cfg, "meta", dtype, mesh=Mesh(weights=Axis("tp", p), hops=Axis("hops", p), tokens=tokens))
    model.reserve(1, S, streams=open_streams(CPU))
    return cfg, model


# --- what travels ---

def counts():
    """Elements that a rank sends in a layer's forward and backward, in units of h^2 and of bsh."""
    h, heads, S, rows = 1024, 16, 8192, []
    bsh, log2 = S * h, {2: 1, 4: 2, 8: 3}
    print(f"{'elements a rank sends':24}{'FFN, h^2':>20}{'attention, h^2':>22}{'K, V and theirs, bsh':>24}")
    for p in RANKS:
        _, model = one_layer(h, heads, S, p, dtype=torch.float32)
        s, y = model.swap.layers[0], model.swap.x[1]
        model.blocks[0].forward(s, model.turn[0], y)
        model.blocks[0].backward(y, s, model.turn[0])
        sent = {name: n // 4 for name, n in model.mesh.take_sent_bytes().items()}
        ours = sent["hops"] / h**2, sent["tp"] / h**2, sent["cp"] / bsh
        paper = 24 * (p - 1) / p, 12 * log2[p], 6 * (p - 1) / p
        rows.append(dict(p=p, ffn_h2=ours[0], attention_h2=ours[1], kv_bsh=ours[2], paper=paper))
        assert (ours[0], ours[2]) == (paper[0], paper[2]), (ours, paper)
        for name, values in (("memo", ours), ("paper", paper)):
            print(f"p = {p}  {name:17}{values[0]:20.3f}{values[1]:22.3f}{values[2]:24.3f}")
    return rows


# --- what a layer keeps and takes ---

MESSAGES = {"shift", "start", "places", "start_gather", "start_scatter_sum", "row_linear_forward"}


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
        """(peak bytes without messages, peak bytes of messages) of what is recorded since the last call."""
        live, peak, sizes = dict(messages=0, keys=0, others=0), [0, 0], {}
        for verb, name, n in self.log:
            kind = "messages" if name in self.messages else "keys" if name in self.keys else "others"
            if verb == "malloc":
                sizes[name] = n
                live[kind] += n
            elif verb == "free" and name in sizes:
                live[kind] -= sizes[name]
            here = min(live["keys"], self.in_use)
            peak = [max(peak[0], live["others"] + here), max(peak[1], live["messages"] + live["keys"] - here)]
        self.log.clear()
        return tuple(peak)


def layer_memory(h, heads, S, p, kind="metp"):
    """Elements on a rank: {half: (kept after its forward, peak in it)} without states, and of messages."""
    cfg, model = one_layer(h, heads, S, p, kind)
    block, s, y, arena = model.blocks[0], model.swap.layers[0], model.swap.x[1], Metered(cfg)
    kept = {name: t.nbytes // 2 for name, t in tensors_of(cfg, 2).items()}
    arena.run("forward", block.forward, s, model.turn[0], y)
    whole, messages = arena.peaks()
    return dict(kept=sum(kept.values()), forward_peak=sum(kept.values()) + whole // 2, messages=messages // 2)


def halves_memory(h, heads, S, p):
    """{half: (kept, peak)} of METP's two halves, elements without states, and of messages."""
    cfg, model = one_layer(h, heads, S, p)
    block, s, y, arena = model.blocks[0], model.swap.layers[0], model.swap.x[1], Metered(cfg)
    kept = {name: t.nbytes // 2 for name, t in tensors_of(cfg, 2).items()}
    arena.run("attention", block.attention_half, s, model.turn[0], y, slice(None))
    attention = arena.peaks()
    arena.run("mlp", lambda: block.mlp_half(s, y, block.visits()))
    mlp = arena.peaks()
    of_attention = kept["x"] + kept["attn_out"] + kept["lse"]
    return dict(attention=(of_attention, of_attention + attention[0] // 2),
                mlp=(kept["mid"], kept["mid"] + mlp[0] // 2), messages=max(attention[1], mlp[1]) // 2)


def paper_metp(h, S, p):
    """{half: (after the forward, peak)} of the paper's Tables 1 and 2, elements without states."""
    bsh = S * h
    return dict(attention=(2 * bsh / p, 3 * bsh / p**2 + 2 * bsh / p),
                mlp=(bsh / p, bsh / p + 4 * bsh / p**2))


def paper_tp_layer(h, S, p):
    """Peak elements of a layer with the paper's TP and SP: attention's activations, then the FFN's peak."""
    bsh = S * h
    return 5 * bsh / p + 4 * bsh / p + bsh


def memory():
    rows, curves = [], []
    print(f"{'':26}{'attention: kept':>18}{'peak':>8}{'paper':>14}{'MLP: kept':>14}{'peak':>8}"
          f"{'paper':>14}{'messages':>10}   bsh/p; over the paper, with states")
    for name, (h, heads) in MODELS.items():
        for p in RANKS:
            S = 2**19
            ours, paper, unit = halves_memory(h, heads, S, p), paper_metp(h, S, p), S * h / p
            states = dict(attention=16 * h * h / p, mlp=32 * h * h / p)
            over = {half: [(a + n) / (b + n) for a, b in zip(ours[half], paper[half], strict=True)]
                    for half, n in states.items()}
            rows.append(dict(model=name, p=p, S=S, ours=ours, paper=paper, over_paper=over))
            figures = [f"{ours[half][i] / unit:8.3f}" for half in states for i in (0, 1)]
            theirs = [f"{paper[half][0] / unit:6.2f} {paper[half][1] / unit:6.2f}" for half in states]
            print(f"{name:14} p={p} S={S} {figures[0]:>15}{figures[1]}{theirs[0]:>14}{figures[2]:>14}"
                  f"{figures[3]}{theirs[1]:>14}{ours['messages'] / unit:10.3f}   "
                  + " ".join(f"{v:.3f}" for half in over.values() for v in half))
    for name, (h, heads) in MODELS.items():
        for S in (2**i for i in range(12, 21)):
            p, states = 8, 48 * h * h / 8
            metp_, tp = (layer_memory(h, heads, S, p, kind) for kind in ("metp", "megatron"))
            peaks = dict(metp=metp_["forward_peak"], tp=tp["forward_peak"], paper_tp=paper_tp_layer(h, S, p))
            curves.append(dict(model=name, S=S, p=p, messages=metp_["messages"], states=states, **peaks))
    at = next(c for c in curves if c["model"] == "GPT-175B" and c["S"] == 2**19)
    saved = {kind: 1 - (at["metp"] + at["states"]) / (at[kind] + at["states"]) for kind in ("paper_tp", "tp")}
    print(f"GPT-175B, one layer, 524,288 tokens on 8: {saved['paper_tp']:.1%} less than the paper's TP, "
          f"{saved['tp']:.1%} less than memo's own")
    return dict(halves=rows, curves=curves, saved=saved)


def plot_memory(curves, path):
    fig, ax = plt.subplots(figsize=(8, 4.5), dpi=130, layout="constrained")
    for i, name in enumerate(MODELS):
        mine = [c for c in curves if c["model"] == name]
        for kind, style, what in (("paper_tp", "-", "the paper's TP"), ("tp", "--", "memo's TP")):
            ratio = [(c["metp"] + c["states"]) / (c[kind] + c["states"]) for c in mine]
            ax.plot([c["S"] for c in mine], ratio, style, color=f"C{i}", label=f"{name}, over {what}")
    ax.set_xscale("log", base=2)
    ax.set_xticks([2**i for i in range(12, 21)], [f"{2**i // 1024}K" for i in range(12, 21)])
    ax.set(xlabel="tokens of a sequence, 8 ranks", ylim=(0, None),
           ylabel="METP's peak of a layer's forward, with states, over")
    ax.legend(frameon=False, ncols=2, fontsize=8)
    plain(ax)
    fig.savefig(path)


# --- the longest sequences, by the dry run ---

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


def contexts(gpu="a100-80gb"):
    """Longest sequences on 1, 2, 4 and 8, with a group of heads for each rank, over those of others on 8. The
    arena of temporary tensors is a bound; beside others' formulas, which have none, METP's is a trace's."""
    machine_, rows = hardware.machine(gpu), []

    def estimate_of(cfg, world, arena=fast_arena, **keys):
        return longest(config_with(cfg, block_size=2**14, **keys), machine_, world, arena)

    def tokens(got):
        return got and got.cfg.block_size
    for name, argv in PRESETS.items():
        cfg = load_config([*argv.split(), "--tp=1", "--cp=1", "--subsequences=1",
                           "--states=device"])
        for mode in ("keep", "memo"):
            how = dict(activation=mode, alpha="auto")
            found = {p: estimate_of(cfg, p, tp=p, tensor_parallel="metp", head_groups=p, **how)
                     for p in (1, *RANKS)}
            ours = {p: tokens(got) for p, got in found.items()}
            on_8 = {}  # METP's on 8 by a trace
            others = {"memo's TP": tokens(estimate_of(cfg, 8, tp=8, **how)),
                      "memo's Ulysses": tokens(estimate_of(cfg, 8, cp=8, context_parallel="ulysses", **how))}
            if mode == "keep":
                others["a TP of 10 units"] = tokens_of_ten_units(found[8], machine_, ulysses=False)
                others["a Ulysses of 10 units"] = tokens_of_ten_units(found[8], machine_, ulysses=True)
                exact = estimate_of(cfg, 8, traced_arena, tp=8, tensor_parallel="metp", head_groups=8, **how)
                on_8 = dict.fromkeys(["a TP of 10 units", "a Ulysses of 10 units"], tokens(exact))
            first = next(n for n in ours.values() if n)
            over = {what: on_8.get(what, ours[8]) / n for what, n in others.items() if n}
            rows.append(dict(model=name, gpu=gpu, activation=mode, tokens=ours, others=others, over=over))
            grown = "".join(f"{n / first:7.2f}" if n else f"{'none':>7}" for n in ours.values())
            beside = ", ".join(f"{what} {n:.2f}" for what, n in over.items())
            print(f"{name:32} {mode:5}{grown}   over {beside}", flush=True)
    return rows


def main():
    found = store_parts(__doc__, RESULTS / "metp.json", dict(
        counts=lambda rounds: counts(), memory=lambda rounds: memory(), contexts=lambda rounds: contexts()))
    if "memory" in found:
        plot_memory(found["memory"]["curves"], RESULTS / "metp_memory.png")


if __name__ == "__main__":
    main()
