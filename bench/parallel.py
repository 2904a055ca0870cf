"""What the layouts send, hold and hide: bytes at the collectives against the formulas, activations of a rank,
the balance of the zigzag, and a ring whose messages take a while.

    python -m bench.parallel [--block_size=4096] [--ring_tokens=16384] [--ring_ranks=8]

Ranks are processes that talk over gloo. Writes bench/results/parallel.json and parallel_overlap.png.
"""

import argparse
import json
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bench.machine import machine
from memo.config.layer import layer_of, n_rows, tensors_of
from memo.config.layout import Layout
from memo.kernels.attention import BACKENDS
from memo.kernels.ops import TORCH
from memo.layer.cp import attention_over_ranks
from memo.layer.tiles import RowOrder
from memo.memory.placement import Placement
from memo.parallel.mesh import open_mesh
from memo.plots.figures import plain
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT, initial_weights
from testing.ranks import pool

CPU = torch.device("cpu")
MODEL = dict(n_layer=4, n_head=8, n_embd=64, vocab_size=512, batch_size=2)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2),
           (1, 2, 2), (2, 2, 2)]


# --- bytes ---

class Meter:
    """In the place of a model's arena: bytes sent by each kind of segment, by axis."""

    def __init__(self, mesh):
        self.mesh, self.sent = mesh, {}

    def run(self, label, work, *args):
        before = [a.sent_bytes for a in (self.mesh.weights, self.mesh.tokens)]
        work(*args)
        kind = label.split("/")[1].rstrip("0123456789 ")
        kind = kind if kind in ("forward", "recompute", "backward") else "embedding and head"
        totals = self.sent.setdefault(kind, dict(tp=0, cp=0))
        for axis, b in zip((self.mesh.weights, self.mesh.tokens), before, strict=True):
            totals[axis.name] += axis.sent_bytes - b


def count(host, cfg):
    """Bytes that this rank sends in a step, and bytes of its activations."""
    mesh = open_mesh(host, cfg.cp, cfg.tp, CPU)
    model = Model(GPT, cfg, CPU, torch.float32, mesh=mesh)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, CPU))
    B, T, N = cfg.batch_size, cfg.block_size // cfg.cp, n_rows(cfg)
    half = {t.name: N // 2 for t in layer_of(cfg).skeletal if t.group}  # alpha = 1/2
    model.reserve(B, T, Placement(cfg.n_layer, 2, N, half))
    model.arena = meter = Meter(mesh)
    tokens = torch.zeros(B, T, dtype=torch.int64)
    model.forward(tokens, tokens, scale=1.0)
    model.backward(last=True)
    before = mesh.weights.sent_bytes
    optimizer.clip(1.0)
    shared = mesh.weights.sent_bytes - before
    optimizer.step(1e-3)
    activations = sum(t.nbytes for t in tensors_of(cfg, 4).values())
    model.close()
    return dict(sent=meter.sent, data=mesh.replicas.sent_bytes, parameters=model.params.numel(),
                activations=activations, tp_gradients=shared)


def formulas(cfg, kind):
    """{segment: {axis: bytes}} a rank sends in all layers, fp32. recompute: of half the rows of all but the
    last layer."""
    L, tp, cp = cfg.n_layer, cfg.tp, cfg.cp
    whole = 4 * cfg.batch_size * cfg.block_size // cp * cfg.n_embd  # B T C
    unit, block = whole * (tp - 1) // tp, whole // tp
    ring = dict(forward=2 * block * (cp - 1),  # k, v; dk, dv
                backward=4 * block * (cp - 1))
    ulysses = dict(forward=4 * block * (cp - 1) // cp, backward=8 * block * (cp - 1) // cp)
    messages = ring if kind == "ring" else ulysses
    return dict(forward=dict(tp=L * 4 * unit, cp=L * messages["forward"]),
                backward=dict(tp=L * 6 * unit, cp=L * messages["backward"]),
                recompute=dict(tp=(L - 1) * 3 * unit // 2, cp=0))


def bytes_table(S):
    rows = []
    print(f"{'layout':22}{'':6}{'forward':>18}{'recompute':>12}{'backward':>18}{'gradients, weights':>20}"
          f"{'activations':>14}   of a rank and step")
    print(f"{'':28}{'tp':>9}{'cp':>9}{'tp':>12}{'tp':>9}{'cp':>9}{'data':>20}{'a layer':>14}   MiB")
    for tp, cp, dp in LAYOUTS:
        for kind in ("ring", "ulysses")[:1 + (cp > 1)]:
            cfg = Layout(**MODEL, block_size=S, tp=tp, cp=cp, context_parallel=kind,
                         gradient_accumulation_steps=dp)
            ranks = pool(tp * cp * dp).run(count, cfg)
            wanted = formulas(cfg, kind)
            for r in ranks:
                for segment, by_axis in wanted.items():
                    assert r["sent"][segment] == by_axis, (tp, cp, kind, segment, r["sent"][segment], by_axis)
                assert r["data"] == 2 * 4 * r["parameters"] * (cp * dp - 1) // (cp * dp)
            r, f = ranks[0], wanted
            name = f"tp={tp} cp={cp} dp={dp}"
            mib = [n / 2**20 for n in (f["forward"]["tp"], f["forward"]["cp"], f["recompute"]["tp"],
                                       f["backward"]["tp"], f["backward"]["cp"], r["data"], r["activations"])]
            print(f"{name:22}{kind if cp > 1 else '':8}"
                  + "".join(f"{n:{w}.2f}" for n, w in zip(mib, (7, 9, 12, 9, 9, 20, 14), strict=True)))
            rows.append(dict(tp=tp, cp=cp, dp=dp, context_parallel=kind if cp > 1 else None,
                             counted=r["sent"], formulas=f, data_bytes=r["data"],
                             activation_bytes_a_layer=r["activations"],
                             tp_bytes_of_shared_gradients=r["tp_gradients"]))
    one = rows[0]["activation_bytes_a_layer"]
    assert all(r["activation_bytes_a_layer"] == one // (r["tp"] * r["cp"]) for r in rows)
    print("counted = formulas, to the byte, on every rank; activations fall as 1/(tp*cp)\n")
    return rows


# --- balance ---

def scores(queries, keys, causal, T):
    """Scores that are computed: all of a rectangle of queries and keys, or those under the diagonal."""
    a, b = len(range(T)[queries]), len(range(T)[keys])
    return a * (a + 1) / 2 if causal else a * b


def balance():
    """Scores that attention computes, of the busiest rank over the mean, with the zigzag and with contiguous
    chunks."""
    rows, T = [], 1024
    for cp in (2, 4, 8, 16, 32, 64):
        [met] = RowOrder([(cp * T,)], "ring", cp).meetings(0, 0, T)
        zigzag = [sum(scores(*tile[:3], T) for source in range(cp) for tiles in met.tiles(rank, source)
                      for tile in tiles) for rank in range(cp)]
        plain = [rank * T * T + T * (T + 1) / 2 for rank in range(cp)]
        busiest = [max(work) / (sum(work) / cp) for work in (zigzag, plain)]
        assert sum(zigzag) == sum(plain) and busiest[0] <= 1.01
        rows.append(dict(cp=cp, zigzag=busiest[0], contiguous=busiest[1]))
        print(f"cp={cp:<3} busiest rank over mean: zigzag {busiest[0]:.3f}, contiguous {busiest[1]:.3f}")
    return rows


# --- overlap ---

def delayed(works, there):
    """Works of messages that arrive at the time `there` at the earliest."""
    arrive = works.wait

    def wait():
        received = arrive()
        time.sleep(max(0.0, there - time.perf_counter()))
        return received
    works.wait = wait
    return works


class Slow(Axis):
    """Every message takes `delay_s`, in which nobody computes for it."""

    delay_s = 0.0

    def shift(self, *tensors):
        return delayed(super().shift(*tensors), time.perf_counter() + self.delay_s)


def ring(host, S, delays, rounds):
    """{delay: (seconds of a forward, of a backward)} of the slowest rank, the median of `rounds`."""
    axis = Slow("cp", host.size, host.rank, host.group)
    T = S // axis.size
    [met] = RowOrder([(S,)], "ring", axis.size).meetings(0, 0, T)
    attention = attention_over_ranks(BACKENDS["cpu"], axis, "ring", TORCH.merge)[0].among(met)
    q, k, v, dout = torch.randn(4, 1, T, 4, 64)
    seconds = {d: [] for d in delays}
    for _ in range(rounds):
        for d in delays:
            axis.delay_s, times = d, []
            out = lse = None
            for backward in (False, True):
                host.max(0)  # together
                start = time.perf_counter()
                if backward:
                    attention.backward(dout, q, [(k, v)], [], out, lse)
                else:
                    out, lse = attention.forward(q, [(k, v)])
                times.append(host.max(time.perf_counter() - start)[0])
            seconds[d].append(times)
    return {d: torch.tensor(t).median(0).values.tolist() for d, t in seconds.items()}


def overlap(S, cp, rounds):
    base = pool(cp).run(ring, S, [0.0], rounds)[0][0.0]
    delays = [round(base[0] / cp * f, 4) for f in (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)]
    measured = pool(cp).run(ring, S, delays, rounds)[0]
    compute, rows = measured[0][0], []
    for d, (forward, backward) in measured.items():
        messages = (cp - 1) * d
        rows.append(dict(delay_s=d, forward_s=forward, backward_s=backward, communication_s=messages,
                         compute_s=compute, over_longer=forward / max(compute, messages),
                         over_sum=forward / (compute + messages)))
        print(f"a message takes {d * 1e3:6.1f} ms: {forward:.3f} s; compute {compute:.3f} s, "
              f"messages {messages:.3f} s: {rows[-1]['over_longer']:.2f} of the longer, "
              f"{rows[-1]['over_sum']:.2f} of their sum")
    return rows


def plot(rows, cp, path):
    fig, ax = plt.subplots(figsize=(7, 4.5), dpi=130, layout="constrained")
    x = [r["communication_s"] for r in rows]
    compute = rows[0]["compute_s"]
    ax.plot(x, [compute + c for c in x], "--", color="0.6", label="one after the other")
    ax.plot(x, [max(compute, c) for c in x], color="0.3", label="the longer of the two")
    ax.plot(x, [r["forward_s"] for r in rows], "o", color="C0", label="measured")
    ax.set(xlabel="seconds of messages", ylabel="seconds of ring attention",
           title=f"ring attention, {cp} ranks, forward", xlim=(0, None), ylim=(0, None))
    plain(ax)
    ax.legend(frameon=False)
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block_size", type=int, default=4096)
    parser.add_argument("--ring_tokens", type=int, default=16384)
    parser.add_argument("--ring_ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = dict(machine=machine(), model=MODEL | dict(block_size=args.block_size),
                  bytes=bytes_table(args.block_size), balance=balance(),
                  ring=dict(tokens=args.ring_tokens, ranks=args.ring_ranks),
                  overlap=overlap(args.ring_tokens, args.ring_ranks, args.rounds))
    results = Path(__file__).parent / "results"
    (results / "parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result["overlap"], args.ring_ranks, results / "parallel_overlap.png")


if __name__ == "__main__":
    main()
