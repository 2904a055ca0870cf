"""METP in seconds, on processes that talk over gloo: how far messages hide, and what one process pays.

    python -m bench.metp_time overlap    ranks whose messages take a while per byte, waited for at once or not
    python -m bench.metp_time cpu        one process, 8 groups of heads, beside a layer that keeps everything

Both at once; without an argument both, too. Writes bench/results/metp_time.json and metp_overlap.png. No
network is measured: messages sleep.
"""

import statistics
import time

import matplotlib.pyplot as plt
import torch

from bench.metp import CPU, RESULTS, store_parts
from bench.parallel import delayed
from memo.config import Config
from memo.optim import Optimizer
from memo.parallel.mesh import Axis, Mesh
from memo.plots import plain
from memo.profiler import layer_rates
from model import GPT, initial_weights
from testing.ranks import pool

# --- how far messages hide ---

class Slow(Axis):
    """Every message takes s_per_byte, in which nobody computes for it, one after the other. `at_once`:
    whoever posts one waits for it, and nothing hides."""

    s_per_byte, at_once, free_at, busy_s = 0.0, False, 0.0, 0.0

    def late(self, works, nbytes):
        takes = nbytes * self.s_per_byte
        self.free_at = there = max(time.perf_counter(), self.free_at) + takes
        self.busy_s += takes
        works = delayed(works, there)
        if self.at_once:
            received = works.wait()
            works.wait = lambda: received
        return works

    def shift(self, *tensors):
        return self.late(super().shift(*tensors), sum(t.nbytes for t in tensors))

    def start_gather(self, x, out=None):
        return self.late(super().start_gather(x, out), x.nbytes * (self.size - 1))

    def start_broadcast(self, x, owner):
        return self.late(super().start_broadcast(x, owner), x.nbytes)

    def start_reduce(self, x, owner):
        return self.late(super().start_reduce(x, owner), x.nbytes)


def slow_layer(host, keys, what, rates, rounds):
    """{(seconds a byte, at once): (median seconds of the slowest rank, seconds of messages on the busiest
    axis)} of a layer's attention or MLP, forward, or of its backward."""
    cfg = Config(**keys, tp=host.size, tensor_parallel="metp")
    axes = {name: Slow(name, host.size, host.rank, host.group) for name in ("tp", "hops", "cp")}
    model = GPT(cfg, CPU, torch.float32,
                mesh=Mesh(weights=axes["tp"], hops=axes["hops"], tokens=axes["cp"], host=host))
    model.load(initial_weights(cfg, 0, CPU))
    model.reserve(1, cfg.block_size)
    block, s, y = model.blocks[0], model.swap.layers[0], model.swap.x[1]
    x, seconds = torch.randn(s.x.shape), {}
    work = {"attention": lambda: block.attention_half(s, model.turn[0], y, slice(None)),
            "MLP": lambda: block.mlp_half(s, y, block.visits()),
            "backward": lambda: block.backward(y, s, model.turn[0])}[what]

    def slowed(rate, at_once):
        for axis in axes.values():
            axis.s_per_byte, axis.at_once, axis.busy_s, axis.free_at = rate, at_once, 0.0, 0.0
    for _ in range(rounds):
        for rate in rates:
            for at_once in (False, True):
                slowed(0.0, False)
                s.x.copy_(x)
                block.forward(s, model.turn[0], y)  # what a backward uses up
                slowed(rate, at_once)
                host.max(0)  # together
                start = time.perf_counter()
                work()
                took = host.max(time.perf_counter() - start)[0]
                messages = max(axis.busy_s for axis in axes.values())
                seconds.setdefault((rate, at_once), []).append((took, messages))
    model.close()
    return {key: [statistics.median(x) for x in zip(*found, strict=True)] for key, found in seconds.items()}


WHAT = "attention", "MLP", "backward"
SMALL = {"BERT-Large": (256, 4), "LLaMA-7B": (512, 8), "LLaMA-70B": (768, 8), "GPT-175B": (1024, 8)}


def overlap(rounds, p=2, S=4096):
    """Rows of the halves and the backward of four models' shapes, scaled down, over the seconds that messages
    take."""
    rows = []
    for name, (h, heads) in SMALL.items():
        keys = dict(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128)
        for what in WHAT:  # at rates at which its messages take up to twice as long as its products
            compute, messages = pool(p).run(slow_layer, keys, what, [1e-9], 2)[0][1e-9, False]
            rates = [f * 1e-9 * compute / messages for f in (0, 0.5, 1, 2)]
            found = pool(p).run(slow_layer, keys, what, rates, rounds)[0]
            alone = found[0.0, False][0]
            for rate in rates:
                (took, messages), (at_once, _) = (found[rate, mode] for mode in (False, True))
                over = took / max(alone, messages)
                rows.append(dict(model=name, h=h, what=what, p=p, S=S, compute_s=alone, messages_s=messages,
                                 seconds=took, at_once_s=at_once, over_longer=over))
                print(f"{name:12} {what:10} messages {messages:6.3f} s: {took:6.3f} s, {over:.2f} of the "
                      f"longer; waited for at once {at_once:6.3f} s", flush=True)
    return rows


def plot_overlap(rows, path):
    fig, axes = plt.subplots(len(WHAT), len(SMALL), figsize=(12, 8), dpi=130, layout="constrained",
                             sharey="row")
    for i, what in enumerate(WHAT):
        for ax, name in zip(axes[i], SMALL, strict=True):
            mine = [r for r in rows if r["model"] == name and r["what"] == what]
            one = mine[0]["compute_s"]
            x = [r["messages_s"] / one for r in mine]
            ax.plot(x, [r["at_once_s"] / one for r in mine], "o--", color="0.6", label="waited for at once")
            ax.plot(x, [max(1, v) for v in x], color="0.3", label="the longer of the two")
            ax.plot(x, [r["seconds"] / one for r in mine], "o", color="C0", label="beside the computing")
            ax.set(title=f"{name}, {what}", ylim=(0, None))
            plain(ax)
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.supxlabel("seconds of messages, over those of computing")
    fig.supylabel("seconds, over those of computing")
    fig.savefig(path)


# --- what one process pays ---

def cpu(rounds):
    """Seconds of a layer's forward and backward that keeps everything, beside METP's with 8 groups of heads
    and without ranks; and of what METP makes again."""
    h, heads, S, models = 1024, 16, 4096, {}  # two heads a group: the kernel gives each thread a head
    for name, keys in (("today", {}), ("metp", dict(tensor_parallel="metp", head_groups=8))):
        cfg = Config(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128, **keys)
        models[name] = model = GPT(cfg, CPU, torch.float32)
        Optimizer(model, cfg).load(initial_weights(cfg, 0, CPU))
        model.reserve(1, S)
    host, took, again = Axis("host"), {"today": [], "metp": []}, []
    for _ in range(rounds):
        for name, model in models.items():
            rates = layer_rates(model.blocks[0], model.swap, model.turn, CPU, host)
            took[name].append(rates[0] + rates[1])
            if name == "today":
                again.append(sum(s for group, s in rates[2].items() if group != "mid"))
    today, metp_s, again_s = (statistics.median(x) for x in (took["today"], took["metp"], again))
    print(f"one process, h={h}, S={S}: a layer's forward and backward {today:.3f} s; METP with 8 groups of "
          f"heads {metp_s:.3f} s, of which {again_s:.3f} s make q, k, v and the inside of the MLP again: the "
          f"rest is {(metp_s - again_s) / today:.3f} of today's")
    return dict(h=h, S=S, today_s=today, metp_s=metp_s, again_s=again_s,
                rest_over_today=(metp_s - again_s) / today)


def main():
    found = store_parts(__doc__, RESULTS / "metp_time.json", dict(overlap=overlap, cpu=cpu))
    if "overlap" in found:
        plot_overlap(found["overlap"], RESULTS / "metp_overlap.png")


if __name__ == "__main__":
    main()
