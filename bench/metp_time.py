"""METP in seconds, on processes that talk over gloo: how far messages hide, and what one process pays.

    python -m bench.metp_time overlap    ranks whose messages take a while per byte
    python -m bench.metp_time replay     what their order allows, simulated: FLOPs count, nothing is timed
    python -m bench.metp_time cpu        one process, 8 groups of heads, beside a layer that keeps everything

Several at once; without an argument all; --rounds=5 measures so often. Writes bench/results/metp_time.json
and metp_overlap.png. No network is measured: a message ends no earlier than its bytes times the seconds a
byte behind the message before it on its communicator. Ranks that share cores would slow each other: their
products are paced. Each lasts as its FLOPs say, of which a rank computes a small part, with one thread, and
sleeps the rest.
"""

import statistics
import time
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.machine import store_parts
from memo.config.layout import Layout
from memo.parallel.mesh import Mesh
from memo.plots.figures import plain
from memo.run.measure import layer_rates
from memo.schedule.streams import open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT, initial_weights
from research.papers.metp_layer import CPU, MODELS
from testing.ranks import pool

RESULTS = Path(__file__).parent / "results"

# --- products that last as long as they should ---

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def flops_of(name, args):
    """FLOPs of a product of two matrices, or of attention; 0 of all else."""
    if name in ("mm", "addmm", "addmm_"):
        a, b = args[-2:]
        return 2 * a.numel() * b.shape[1]
    if not name.startswith(ATTENTION):
        return 0
    (q, k), causal, products = (args[:2], args[4:5], 4) if name == ATTENTION else (args[1:3], args[7:8], 10)
    return products * q.numel() * k.shape[2] / (2 if any(causal) else 1)


class Paced(TorchDispatchMode):
    """Meanwhile products last s_per_flop at least, and their FLOPs are counted."""

    def __init__(self, s_per_flop):
        super().__init__()
        self.s_per_flop, self.flops = s_per_flop, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start, flops = time.perf_counter(), flops_of(func.overloadpacket.__name__, args)
        made = func(*args, **kwargs or {})
        self.flops += flops
        sleep_until(start + flops * self.s_per_flop if flops else 0.0)
        return made


def sleep_until(when):
    time.sleep(max(0.0, when - time.perf_counter()))


# --- messages that take a while ---

class Tape(list):
    """What a rank does, in order: (seconds of computing, what follows them, arguments of that). `clock`: what
    seconds are counted by."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def note(self, *what):
        self.append((self.clock() - self.since, *what))
        self.go_on()

    def go_on(self):
        self.since = self.clock()


class Slow(Axis):
    """Every message takes s_per_byte, in which nobody computes for it, one after the other. `at_once`: it
    sets off when it is waited for, and nothing hides."""

    def prepare(self, tape, s_per_byte, at_once):
        self.tape, self.s_per_byte, self.at_once, self.end = tape, s_per_byte, at_once, 0.0

    def late(self, kind, works, nbytes):
        arrive, takes, number = works.wait, nbytes * self.s_per_byte, len(self.tape)
        self.end = max(time.perf_counter(), self.end) + takes
        end = self.end
        self.tape.note("post", number, self.name, kind, nbytes)

        def wait():
            self.tape.note("wait", number)
            received = arrive()
            sleep_until(time.perf_counter() + takes if self.at_once else end)
            self.tape.go_on()
            return received
        works.wait = wait
        return works

    def shift(self, *tensors):
        return self.late("shift", super().shift(*tensors), sum(t.nbytes for t in tensors))

    def start_gather(self, x, out=None):
        return self.late("gather", super().start_gather(x, out), x.nbytes * (self.size - 1))

    def start_broadcast(self, x, owner):
        return self.late("broadcast", super().start_broadcast(x, owner), x.nbytes)

    def start_reduce(self, x, owner):
        return self.late("reduce", super().start_reduce(x, owner), x.nbytes)


def replayed(tape, rates):
    """What the order of a tape allows: ([seconds of each lap], {(lap, message): its exposed seconds}), where
    messages take rates[lap's phase][axis] a byte, and nothing else holds them up."""
    now, ends, there, laps, exposed = 0.0, {}, {}, [], Counter()
    for computed_s, what, *of in tape:
        now += computed_s
        if what == "post":
            number, axis, kind, nbytes = of
            ends[axis] = max(now, ends.get(axis, 0.0)) + nbytes * rates[len(laps) // 2][axis]
            there[number] = ends[axis], f"{axis} {kind}"
        elif what == "wait":
            end, message = there[of[0]]
            exposed[len(laps), message] += max(0.0, end - now)
            now = max(now, end)
        else:
            laps.append(now)
    return [b - a for a, b in zip([0.0, *laps], laps, strict=False)], exposed


# --- a layer, half by half ---

HALVES = dict(attention=("tp", "cp"), MLP=("hops",))  # the communicators of each
LAPS = (("attention", "forward"), ("MLP", "forward"), ("MLP", "backward"), ("attention", "backward"))
# what is shown: (half, way, its laps). Some messages of a half hide in the other one
PARTS = (*((*lap, [i]) for i, lap in enumerate(LAPS)), ("layer", "forward", [0, 1]),
         ("layer", "backward", [2, 3]))


class Bench:
    """A layer of METP on slow communicators. The first messages of a half are posted where a step posts them,
    before the half that precedes it, and the MLP's last gradients come home beside attention."""

    def __init__(self, host, keys, clock=time.perf_counter):
        cfg, p = Layout(**keys, tp=host.size, tensor_parallel="metp", attention="cpu"), host.size
        self.host, self.clock = host, clock
        self.axes = {name: Slow(name, p, host.rank, host.another().group)
                     for name in ("tp", "hops", "cp")}
        mesh = Mesh(weights=self.axes["tp"], hops=self.axes["hops"], tokens=self.axes["cp"], host=host,
                    peers=host)
        self.nothing = [dict.fromkeys(self.axes, 0.0)] * 2  # seconds a byte
        self.prepare(self.nothing, False)
        self.model = Model(GPT, cfg, CPU, torch.float32, mesh=mesh)
        self.model.load(initial_weights(cfg, 0, CPU))
        self.model.reserve(1, cfg.block_size, streams=open_streams(CPU))
        self.x = torch.randn(self.model.swap.layers[0].x.shape)

    def prepare(self, rates, at_once, phase=0):
        self.tape = self.tape if phase else Tape(self.clock)
        for name, axis in self.axes.items():
            axis.prepare(self.tape, rates[phase][name], at_once)

    def run(self, rates, at_once=False):
        """Seconds of the slowest rank, of each lap."""
        model = self.model
        block, s, y = model.gpt.blocks[0], model.swap.layers[0], model.swap.x[1]
        s.x.copy_(self.x)
        self.laps = []
        self.prepare(rates, at_once)
        self.start()
        own = block.own_parts(*block.projections, "proj_w", *block.mlp_names)
        visits = block.visits(own)
        block.attention_half(s, own, y, slice(None))
        self.lap()
        block.mlp_half(s, own, y, visits)
        self.lap()
        self.prepare(rates, at_once, phase=1)
        visits = block.visits(own)
        coming = block.broadcasts(own, [*block.projections, "proj_w"], lambda group: group.last)
        dx = torch.empty_like(y)
        home = block.mlp_half_backward(visits, own, y, s, dx)
        self.lap()
        block.attention_half_backward(coming, home, y, s, dx)
        self.lap()
        return self.laps

    def start(self):
        self.host.max(0)  # together
        self.tape.go_on()
        self.started = time.perf_counter()

    def lap(self):
        end = time.perf_counter()
        self.tape.note("lap")
        self.laps += self.host.max(end - self.started)
        self.start()

    def rates(self, compute, ratio):
        """Seconds a byte, by phase and axis: the messages of each lap take so many times its computing."""
        sent, lap = [Counter(), Counter()], 0
        for _, what, *of in self.tape:
            lap += what == "lap"
            if what == "post":
                sent[lap // 2][of[1]] += of[3]
        rates = [{}, {}]
        for (half, way), seconds in zip(LAPS, compute, strict=True):
            phase = way == "backward"
            most = max(sent[phase][name] for name in HALVES[half])
            rates[phase] |= dict.fromkeys(HALVES[half], ratio * seconds / most)
        return rates


def slow_layer(host, keys, rounds):
    """(seconds of a layer whose products are not paced, rows of RATIOS and PARTS of one whose are)."""
    bench = Bench(host, keys)
    with Paced(0.0) as paced:
        bench.run(bench.nothing)
        paced.flops = 0
        unpaced_s = sum(bench.run(bench.nothing))
        paced.s_per_flop = PACED_S[host.size] / paced.flops
        # other processes only add to the seconds: the fastest round counts
        alone = [(bench.run(bench.nothing), bench.tape) for _ in range(3 * rounds)]
        compute = [min(lap) for lap in zip(*(laps for laps, _ in alone), strict=True)]
        _, tape = min(alone, key=lambda run: sum(run[0]))
        rows = []
        for ratio in RATIOS:
            rates = bench.rates(compute, ratio)
            found = [bench.run(rates, at_once) for at_once in (*[False] * rounds, True)]
            order, exposed = replayed(tape, rates)
            for half, way, laps in PARTS:
                computed, allowed, *took, at_once = (sum(of[i] for i in laps)
                                                     for of in (compute, order, *found))
                [order_s], longer = host.max(allowed), max(1, ratio) * computed
                waited = sum((Counter({m: s}) for (lap, m), s in exposed.items() if lap in laps), Counter())
                rows.append(dict(half=half, way=way, ratio=ratio, compute_s=computed,
                                 messages_s=ratio * computed, seconds=min(took), at_once_s=at_once,
                                 order_s=order_s, over_longer=min(took) / longer,
                                 over_order=min(took) / order_s, exposed_s=dict(waited)))
    bench.model.close()
    bench.model.mesh.close()
    return unpaced_s, rows


RATIOS, RANKS = (0.25, 0.5, 1, 2), (2, 4)
TOKENS = 256  # of a rank
# seconds that a layer's products last, forward and backward. What is no product takes as long as it takes:
# longer where four ranks have two cores
PACED_S = {2: 3.0, 4: 8.0}
GROUPS = 16  # of heads: as many as `auto` takes for LLaMA-7B with 64K tokens a rank


def shapes():
    """(ranks, a model's name, keys of its layer, a sixteenth as wide)."""
    for p in RANKS:
        for name, (h, heads) in MODELS.items():
            yield p, name, dict(n_layer=1, n_embd=h // 16, n_head=heads, block_size=p * TOKENS,
                                vocab_size=128, head_groups=GROUPS)


def overlap(rounds):
    """Rows of four models' layers: forward and backward of their halves and of both, where messages on a
    half's busiest communicator take so many times as long as its computing."""
    rows = []
    for p, name, keys in shapes():
        unpaced_s, found = pool(p).run(slow_layer, keys, rounds)[0]
        h, heads = keys["n_embd"], keys["n_head"]
        print(f"{name}, {p} ranks: {h} wide, {heads} heads, {unpaced_s:.2f} s if nothing sleeps")
        for row in found:
            show(row)
            rows.append(dict(model=name, h=h, heads=heads, p=p, unpaced_s=unpaced_s,
                             paced_s=PACED_S[p]) | row)
    return rows


def replay():
    """Rows of the same layers, simulated: what their order of messages allows where computing takes as long
    as its FLOPs say, and nothing else takes time. The ranks do the same at the same time: one is played, to
    which nothing is sent. Its products are done, for FLOPs to be counted: on the meta device those of
    gradients would be left out."""
    rows = []
    for p, name, keys in shapes():
        with Paced(0.0) as paced:
            bench = Bench(Axis("host", p), keys, lambda paced=paced: paced.flops)
            bench.run(bench.nothing)
            bench.model.close()
        compute, _ = replayed(bench.tape, bench.nothing)
        for ratio in RATIOS:
            order, exposed = replayed(bench.tape, bench.rates(compute, ratio))
            for half, way, laps in PARTS:
                computed, allowed = (sum(of[i] for i in laps) for of in (compute, order))
                waited = sum((Counter({m: n / computed}) for (lap, m), n in exposed.items() if lap in laps),
                             Counter())
                rows.append(dict(model=name, p=p, half=half, way=way, ratio=ratio,
                                 over_longer=allowed / max(1, ratio) / computed, exposed=dict(waited)))
    print("simulated: time over the longer of computing and messages, which take 0.25, 0.5, 1, 2 of it")
    for i in range(0, len(rows), len(RATIOS) * len(PARTS)):
        for j, (half, way, _) in enumerate(PARTS):
            found = rows[i + j:i + len(RATIOS) * len(PARTS):len(PARTS)]
            print(f"{found[0]['p']} ranks  {found[0]['model']:11} {half:9} {way:8} ",
                  *(f"{row['over_longer']:.3f}" for row in found))
    return rows


def show(row):
    exposed = ", ".join(f"{message} {s:.2f}" for message, s in row["exposed_s"].items())
    print("  {half:9} {way:8} messages {messages_s:5.2f} s, computing {compute_s:5.2f} s, both "
          "{seconds:5.2f} s, waited for at once {at_once_s:5.2f} s: {over_longer:.2f} of the longer, "
          "{over_order:.2f} with what is exposed".format(**row), f"({exposed})", flush=True)


def plot_overlap(rows, path):
    fig, axes = plt.subplots(len(RANKS), len(PARTS), figsize=(16, 6.5), dpi=130, layout="constrained",
                             sharey=True)
    for line, p in zip(axes, RANKS, strict=True):
        for ax, (half, way, _) in zip(line, PARTS, strict=True):
            ax.plot(RATIOS, [max(1, r) for r in RATIOS], color="0.3", label="the longer of the two")
            for i, name in enumerate(MODELS):
                mine = [r for r in rows if (r["model"], r["p"], r["half"], r["way"]) == (name, p, half, way)]
                for key, style, what in (("at_once_s", "x", ", waited for at once"), ("seconds", "o", "")):
                    ax.plot(RATIOS, [r[key] / r["compute_s"] for r in mine], style, color=f"C{i}",
                            label=name + what)
            ax.set(title=f"{half}, {way}, {p} ranks")
            plain(ax)
    axes[0, 0].set_ylim(0)  # of all: they share it
    fig.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=5)
    fig.supxlabel("seconds of messages, over those of computing")
    fig.supylabel("seconds, over those of computing")
    fig.savefig(path)


# --- what one process pays ---

def cpu(rounds):
    """Seconds of a layer's forward and backward that keeps everything, beside METP's with 8 groups of heads
    and without ranks; and of what METP makes again."""
    h, heads, S, models = 1024, 16, 4096, {}  # two heads a group: the kernel gives each thread a head
    for name, keys in (("today", {}), ("metp", dict(tensor_parallel="metp", head_groups=8))):
        cfg = Layout(n_layer=1, n_embd=h, n_head=heads, block_size=S, vocab_size=128, **keys)
        models[name] = model = Model(GPT, cfg, CPU, torch.float32)
        Optimizer(model, cfg).load(initial_weights(cfg, 0, CPU))
        model.reserve(1, S)
    took, again = {"today": [], "metp": []}, []
    for _ in range(rounds):
        for name, model in models.items():
            [unit], _ = layer_rates(model)
            took[name].append(unit.forward_s + unit.backward_s)
            if name == "today":
                again.append(sum(s for group, s in unit.groups_s.items() if group != "mid"))
    today, metp_s, again_s = (statistics.median(x) for x in (took["today"], took["metp"], again))
    print(f"one process, h={h}, S={S}: a layer's forward and backward {today:.3f} s; METP with 8 groups of "
          f"heads {metp_s:.3f} s, of which {again_s:.3f} s make q, k, v and the inside of the MLP again: the "
          f"rest is {(metp_s - again_s) / today:.3f} of today's")
    return dict(h=h, S=S, today_s=today, metp_s=metp_s, again_s=again_s,
                rest_over_today=(metp_s - again_s) / today)


def main():
    found = store_parts(__doc__, RESULTS / "metp_time.json", dict(
        overlap=overlap, replay=lambda rounds: replay(), cpu=cpu))
    if "overlap" in found:
        plot_overlap(found["overlap"], RESULTS / "metp_overlap.png")


if __name__ == "__main__":
    main()
