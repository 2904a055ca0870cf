"""What subsequences cost and save.

    python -m bench.subsequences [run] [seconds] [memory] [messages] [--rounds=3]

run      65,536 tokens of the stdlib data (python data/stdlib/prepare.py makes it) in one sequence, two
         layers, everything swapped: losses, seconds and bytes with 1 and 16 subsequences, in turns.
seconds  a step's seconds over those with one subsequence, for shorter sequences and 2 to 16 subsequences.
memory   bytes of the device in each region at full size, of tensors without memory, beside the formula.
messages bytes that a layer sends in a ring, of tensors without memory, beside those of keys and values.

Writes bench/results/subsequences.json and subsequences_memory.png. A part that is not named keeps what the
file has.
"""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

import train
from bench.machine import store_parts
from memo.config.layer import layer_of
from memo.config.layout import Layout
from memo.data.batch import open_dataset
from memo.decide.where import placed
from memo.memory.buffers import Swap
from memo.plots.figures import plain
from memo.run.load_config import load_config
from memo.run.loggers import read_metrics
from memo.schedule.streams import open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights
from testing.notes import noted_mesh
from testing.rendezvous import validate_programs

RESULTS = Path(__file__).parent / "results"
SMALL = dict(n_layer=2, n_head=4, n_embd=256, batch_size=1, gradient_accumulation_steps=1, dataset="stdlib",
             device="cpu", learning_rate=1e-3, activation="swap", subsequence_cut="equal", unit_order="layer")
GIB = 2**30


# --- real runs ---

def run(rounds):
    """A run of train.py with 1 and with 16 subsequences, `rounds` times in turns."""
    S, rows = 2**16, {}
    for _ in range(rounds):
        for N in (1, 16):
            with tempfile.TemporaryDirectory() as out:
                keys = SMALL | dict(block_size=S, max_iters=3, warmup_iters=0, eval_interval=0,
                                    save_interval=0, subsequences=N, out_dir=out)
                train.main([f"--{k}={v}" for k, v in keys.items()])
                steps = read_metrics(Path(out) / "metrics.jsonl")
                regions = json.loads((Path(out) / "plan.json").read_text())["regions"]
            held = {"parameters": ("params", "grads", "optimizer"), "arena": ("transient",)}
            of = {what: sum(r["device_bytes"] for r in regions if r["region"] in names)
                  for what, names in held.items()}
            of["activations"] = sum(r["device_bytes"] for r in regions) - sum(of.values())
            row = rows.setdefault(N, dict(N=N, S=S, losses=[r["loss"] for r in steps], step_s=[], **of))
            row["step_s"] += [r["step_s"] for r in steps[1:]]
    one, many = rows[1], rows[16]
    differences = [abs(a - b) for a, b in zip(one["losses"], many["losses"], strict=True)]
    found = dict(rows=list(rows.values()), largest_difference=max(differences),
                 activations=many["activations"] / one["activations"],
                 seconds=median(a / b for a, b in zip(many["step_s"], one["step_s"], strict=True)))
    print(f"65,536 tokens, 16 subsequences: losses differ by {found['largest_difference']:.1e}, activations "
          f"{found['activations']:.3f} of those of one, a step's seconds {found['seconds']:.3f}")
    return found


def seconds(rounds):
    """A step's seconds over those of one subsequence, in turns."""
    rows = []
    for S in (2**14, 2**15):
        cases = {N: small_model(S, N) for N in (1, 2, 4, 8, 16)}
        taken = {N: [] for N in cases}
        for turn in range(rounds + 1):
            for N, (model, batch) in cases.items():
                start = time.perf_counter()
                model.forward(*batch, scale=1.0)
                model.backward()
                for stream in model.swap.streams[:3]:
                    stream.synchronize()
                model.grads.zero_()
                if turn:  # the first warms up
                    taken[N].append(time.perf_counter() - start)
        for N, times in taken.items():
            ratio = median(a / b for a, b in zip(times, taken[1], strict=True))
            rows.append(dict(S=S, N=N, tokens=S // N, step_s=times, over_one=ratio))
            print(f"S={S:6} N={N:2}: {S // N:6} tokens each, {median(times):7.2f} s, {ratio:.3f} of one")
        for model, *_ in cases.values():
            model.close()
    return rows


def small_model(S, N):
    cfg = Layout(**SMALL | dict(block_size=S, vocab_size=4096, subsequences=N))
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, torch.device("cpu")))
    n = S * cfg.batch_size
    tensors = layer_of(cfg).tensors(1, S, 4)
    model.reserve(1, S, replace(placed(cfg, 2), kept=dict.fromkeys(tensors, n)))
    return model, open_dataset("stdlib", S).batch("train", 0, 0, 1, S, 0)


# --- bytes, of tensors without memory ---

SIZES = {"7B": "config/7b_1m.py", "Llama-3-8B": "config/llama3_8b_1m.py"}
REGIONS = {"keys": "keys and values", "key_gradients": "their gradients, fp32",
           "stream": "between two layers", "buffers": "two rounding buffers"}


def regions_of(cfg):
    """{region: bytes} of a rank's activations, of the tensors that a run would make, on the meta device."""
    n = cfg.batch_size * cfg.block_size // (cfg.cp * cfg.tp)
    half = {t.name: n // 2 if t.group else n for t in layer_of(cfg).skeletal}
    placement = replace(placed(cfg, 2), kept=half)
    heads = layer_of(cfg).kv_heads // cfg.tp
    with patch("memo.memory.buffers.HostSlab", NoSlab):
        swap = Swap(placement, layer_of(cfg), cfg.batch_size, cfg.block_size // cfg.cp, torch.bfloat16,
                    torch.device("meta"), cfg.tp, open_streams(torch.device("cpu")),
                    key_shape=(cfg.tp, heads))
    found = dict.fromkeys(REGIONS, 0)
    for name, buffer in swap.buffers.items():
        found[name if name in REGIONS else "buffers"] += buffer.nbytes
    swap.close()
    return found


class NoSlab:
    """A host slab without memory."""

    def __init__(self, nbytes, device, pin):
        self.nbytes = nbytes

    def pairs(self, at, mine):
        return [(mine, mine)]

    def close(self):
        pass


def memory(rounds):
    """Regions for sequences of 128K to 8M tokens, in subsequences of 64K."""
    rows = []
    for name, config in SIZES.items():
        for S in (2**k for k in range(17, 24)):
            for N in (1, max(2, S // 2**16)):
                cfg = Layout.of(load_config([config, "--tp=8", "--cp=1", f"--block_size={S}",
                                             f"--subsequences={N}", "--dtype=bfloat16"]))
                unit = cfg.n_embd * S // cfg.tp * 2  # bytes of B*T*C/tp elements
                found = regions_of(cfg)
                share = cfg.kv_heads / cfg.n_head
                formula = unit * (6 * share + 1) if N > 1 else 0
                whole = sum(found[region] for region in ("keys", "key_gradients", "stream"))
                rows.append(dict(model=name, S=S, N=N, regions=found, unit_bytes=unit,
                                 units=sum(found.values()) / unit, formula_units=formula / unit,
                                 whole_over_formula=whole / formula if N > 1 else None))
                print(f"{name:12} S={S:8} N={N:3}: {sum(found.values()) / GIB:7.2f} GiB, "
                      f"{sum(found.values()) / unit:5.2f} units, of which {whole / unit:5.2f} grow with S "
                      f"(formula {formula / unit:.2f})")
    return rows


def plot_memory(rows, path):
    fig, axes = plt.subplots(1, len(SIZES), figsize=(11, 4.5), dpi=130, layout="constrained", sharey=True)
    for ax, name in zip(axes, SIZES, strict=True):
        many = [r for r in rows if r["model"] == name and r["N"] > 1]
        one = [r for r in rows if r["model"] == name and r["N"] == 1]
        S = [r["S"] for r in many]
        ax.stackplot(S, *([r["regions"][region] / GIB for r in many] for region in REGIONS),
                     labels=REGIONS.values(), alpha=0.7)
        ax.plot(S, [r["formula_units"] * r["unit_bytes"] / GIB for r in many], "k--", lw=1.2,
                label="formula of what grows")
        ax.plot([r["S"] for r in one], [sum(r["regions"].values()) / GIB for r in one], "o-", color="#b03a3a",
                ms=4, label="one subsequence")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(S, [f"{n // 2**10}K" if n < 2**20 else f"{n // 2**20}M" for n in S])
        ax.set(title=f"{name}, tp=8, subsequences of 64K tokens", xlabel="tokens of a sequence",
               ylim=(0.25, None))
        plain(ax)
    axes[0].set_ylabel("activations on a device, GiB")
    axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(path)


# --- messages, of tensors without memory ---

RINGS = {"cp2": dict(cp=2), "cp4": dict(cp=4), "metp4": dict(tp=4, cp=1, tensor_parallel="metp")}


def sent_by(cfg, rank):
    """({axis: bytes that a rank sends in a layer's forward and backward}, its Program)."""
    mesh, program = noted_mesh(rank, cfg.tp, cfg.cp, metp=cfg.metp)
    model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh)
    model.reserve(cfg.batch_size, cfg.block_size // cfg.cp, streams=open_streams(torch.device("cpu")))
    swap, [block] = model.swap, model.gpt.blocks
    for unit in (units := swap.placement.units):
        block.forward(swap.units[unit], swap.between[0, unit[1]][1])
    for unit in reversed(units):
        block.backward(swap.between[0, unit[1]][1], swap.units[unit])
    model.close()
    return mesh.take_sent_bytes(), program


def messages(rounds):
    """A sequence of 128K tokens in 1, 4 and 16 subsequences. One passes keys and values with their gradients,
    several pass queries."""
    rows = []
    for name, config in SIZES.items():
        for layout, keys in RINGS.items():
            one = 0
            for N in (1, 4, 16):
                keys = dict(tp=1) | keys | dict(block_size=2**17, subsequences=N, n_layer=1)
                cfg = Layout.of(load_config([config, *(f"--{k}={v}" for k, v in keys.items())]))
                sent, programs = zip(*(sent_by(cfg, rank) for rank in range(cfg.cp * cfg.tp)), strict=True)
                validate_programs(dict(enumerate(programs)))
                [ring] = {by_axis["cp"] for by_axis in sent}  # all ranks send equally much
                matrices = max(by_axis.get("tp", 0) + by_axis.get("hops", 0) for by_axis in sent)
                if N == 1:
                    one = ring
                rows.append(dict(model=name, layout=layout, N=N, ring_bytes=ring, matrix_bytes=matrices,
                                 keys_and_values_bytes=one * (N + 1) // 2))
                print(f"{name:12} {layout:6} N={N:3}: {ring / GIB:6.3f} GiB; passing keys and values "
                      f"{one * (N + 1) / 2 / GIB:6.3f}; matrices {matrices / GIB:6.3f}")
    return rows


def main():
    found = store_parts(__doc__, RESULTS / "subsequences.json",
                        dict(run=run, seconds=seconds, memory=memory, messages=messages))
    if "memory" in found:
        plot_memory(found["memory"], RESULTS / "subsequences_memory.png")


if __name__ == "__main__":
    main()
