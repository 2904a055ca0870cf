"""Figure 5 of SPPO (arXiv 2503.10377) by simulation: sizes and transfer times of subsequences, and what a
fixed offload ratio costs beside the adaptive one. Seconds are those of the dry run's model of an A100, copies
run at its node's PCIe rate.

The paper leaves open, and here is assumed: ranks and layers (8 ranks of one node share the sequence in a
ring, and hold 10 of the 80 layers); what a subsequence's activations are (memo's skeletal tensors without
keys and values, which stay on the device); the PCIe rate (the DGX A100's, all GPUs at once). Equal FLOPs
count the masked half of the scores, as the paper's lengths do; the seconds are of kernels that skip it. """

from collections import Counter
from itertools import accumulate

import matplotlib.pyplot as plt

from memo.config.formulas import layer_forward_terms
from memo.config.layer import KEYS_VALUES, layer_of
from memo.config.layout import ALIGNED, Layout, equal_flops
from memo.estimate.roofline import one_document
from memo.estimate.unit_seconds import Block, UnitSeconds
from memo.plots.figures import BLUE, GREY, ORANGE, plain
from memo.schedule.program import Fates, Program
from memo.schedule.simulate import times_of
from memo.schedule.step import Op
from memo.schedule.waits import schedule
from memo.system import hardware
from research.papers.page import SIMULATED, Part
from testing.paper import SPPO

S, LAYERS, RANKS, BF16 = SPPO["figure5"]["tokens"], 10, 8, 2
SHAPE = SPPO["models"]["65B"] | dict(n_layer=LAYERS)  # a stage
# figure 5: GB and milliseconds of the largest and the smallest subsequence
FIGURE5 = {N: SPPO["figure5"][f"n{N}"] for N in (8, 16)}
A100 = hardware.machine("a100-80gb", ranks=RANKS)
LINK = A100.node.pcie_bytes_per_s


def every_score(cfg):
    """As layer_forward_terms(), the masked half of the scores among them."""
    linear, square = layer_forward_terms(cfg)
    return linear, 2 * square


def cut(cfg, multiple):
    """The lengths of equal FLOPs as the paper counts them, multiples of `multiple`."""
    counts = equal_flops(*every_score(cfg), S // multiple, multiple, cfg.subsequences)
    return tuple(n * multiple for n in counts)


def activation_bytes(cfg, tokens):
    """Of all layers of a rank, of so many tokens of the sequence."""
    tensors = layer_of(cfg).tensors(1, tokens, BF16)
    return LAYERS * sum(t.nbytes for name, t in tensors.items() if name not in KEYS_VALUES) / cfg.cp


class Stage:
    """A stage's pass over one sequence: of each subsequence `sizes`, bytes of its activations, and seconds
    `forward_s` and `backward_s` of all layers."""

    def __init__(self, N):
        self.cfg = cfg = Layout(**SHAPE, block_size=S, vocab_size=32000, cp=RANKS, subsequences=N,
                                subsequence_cut="flops", unit_order="subsequence")
        self.N, self.lengths = N, cut(cfg, ALIGNED * cfg.block_multiple)
        self.sizes = [activation_bytes(cfg, n) for n in self.lengths]
        blocks = [Block(cfg, A100, BF16, n) for n in self.lengths]
        units = [UnitSeconds(block, one_document(block, Counter(self.lengths[:i])))
                 for i, block in enumerate(blocks)]
        self.forward_s, self.backward_s = ([LAYERS * getattr(u, way) for u in units]
                                           for way in ("forward_s", "backward_s"))

    @property
    def adaptive(self):
        """SPPO's ratios: alpha_i A_i = min(A_i, what the link carries during the next subsequence). Nothing
        computes behind the last one, which stays: the backward wants it first."""
        carried = [LINK * s for s in self.forward_s[1:]]
        return [min(1.0, c / a) for c, a in zip(carried, self.sizes[:-1], strict=True)] + [0.0]

    def stall_s(self, ratios, layers=1):
        """Seconds that forward and backward wait for copies, as the schedule runs with two buffers. With one
        layer a unit is a subsequence of the whole stage, as in the paper: its copy starts when all layers are
        done with it. With LAYERS units are memo's. What stays on the device takes no time."""
        n = layers * self.N
        fates = Fates(2, frozenset(range(n - 2)), frozenset())

        def seconds(step):
            _, i = step.unit
            copied = ratios[i] * self.sizes[i] / LINK
            return {Op.FORWARD: self.forward_s[i], Op.BACKWARD: self.backward_s[i], Op.OFFLOAD: copied,
                    Op.PREFETCH: copied}.get(step.op, 0.0) / layers
        return times_of(schedule(Program(fates, layers, self.N, "subsequence")), seconds).stall_s

    def most(self, ratios):
        """Bytes: the greatest M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)."""
        stays = [(1 - r) * a for r, a in zip(ratios, self.sizes, strict=True)]
        return max(before + a for before, a in zip(accumulate(stays, initial=0), self.sizes, strict=False))

    def row(self, name, ratios):
        stall_s, by_layer_s = self.stall_s(ratios), self.stall_s(ratios, LAYERS)
        return [self.N, name, round(ratios[0], 2), round(max(ratios), 2), round(stall_s, 3),
                f"{100 * stall_s / sum(self.forward_s + self.backward_s):.1f}%", round(by_layer_s, 3),
                round(self.most(ratios) / 1e9, 1)]


def figure5(stage):
    """Lines of the largest and the smallest activations and their transfer beside the paper."""
    paper, rows = FIGURE5[stage.N], []
    ends = max(stage.lengths), min(stage.lengths)
    for which, n, gb, ms in zip(("largest", "smallest"), ends, paper["gb"], paper["ms"], strict=True):
        nbytes = activation_bytes(stage.cfg, n)
        mine = nbytes / 1e9, nbytes / LINK * 1e3
        rows.append([stage.N, which, gb, round(mine[0], 2), percent_off(mine[0], gb), ms, round(mine[1]),
                     percent_off(mine[1], ms)])
    return rows


def percent_off(found, paper):
    return f"{100 * (found / paper - 1):+z.1f}%"


def ratios_of(stage):
    """Lines of stalls and memory of the adaptive ratios and of fixed ones: of the same bytes, of the largest
    that does not stall, and a grid of 1/16."""
    adaptive = stage.adaptive

    def fixed(alpha):
        return [alpha] * (stage.N - 1) + [0.0]
    same = sum(r * a for r, a in zip(adaptive, stage.sizes, strict=True)) / sum(stage.sizes[:-1])
    return [stage.row("adaptive", adaptive), stage.row("fixed, the same bytes", fixed(same)),
            stage.row("fixed, no stall", fixed(min(adaptive[:-1]))),
            *(stage.row(f"fixed, {k}/16", fixed(k / 16)) for k in range(17))]


def figure8():
    """Most activations of a stage on the device with N = 4, in those of the smallest subsequence: all
    offloaded, one copy after the other, each subsequence freed when its copy ends; and with the adaptive
    ratios."""
    facts = SPPO["figure8"]
    stage = Stage(facts["subsequences"])
    now = end = 0.0
    ends, full = [], []
    for i, (size, computed_s) in enumerate(zip(stage.sizes, stage.forward_s, strict=True)):
        full.append(sum(stage.sizes[j] for j in range(i) if ends[j] > now) + size)
        now += computed_s
        end = max(end, now) + size / LINK
        ends.append(end)
    here = [max(full), stage.most(stage.adaptive)]
    printed, least = facts["units"], min(stage.sizes)
    rows = [[name, units, round(nbytes / least, 2)] for name, units, nbytes in zip(
        ("all offloaded", "adaptive ratios"), printed, here, strict=True)]
    rows.append(["over one another", round(printed[0] / printed[1], 2), round(here[0] / here[1], 2)])
    return dict(tables=[(["most on the device", "paper, units", "/here, smallest ones"], rows)], notes=[
        f"{facts['subsequences']} subsequences of Figure 5's stage; a second stage does the same later. What "
        "a unit is the paper only draws."])


def make():
    stages = [Stage(N) for N in FIGURE5]
    sizes = [row for stage in stages for row in figure5(stage)]
    ratios = [row for stage in stages for row in ratios_of(stage)]
    grid = [row for row in ratios if row[1] in ("adaptive", "fixed, the same bytes", "fixed, 16/16")]
    return dict(
        tables=[(["N", "subsequence", "GB, paper", "/here", "/off", "ms, paper", "/here", "/off"], sizes),
                (["N", "ratio", "from", "/to", "stall, s", "/of the pass", "/by layers, s",
                  "device, GB"], grid)],
        ratios=ratios, notes=[
            "A stage of 65B at 128K: 10 of 80 layers on 8 A100 in a ring, which gives the paper's sizes; it "
            "says neither. Equal FLOPs with the masked half counted, as the paper's lengths are. The printed "
            f"GB over ms is {FIGURE5[8]['gb'][0] / FIGURE5[8]['ms'][0] * 1e3:.1f} to "
            f"{FIGURE5[16]['gb'][1] / FIGURE5[16]['ms'][1] * 1e3:.1f} GB/s; its section 7 says 32. \"By "
            "layers\": copies start with each layer, as memo's do."])


def draw(facts, path):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.3), dpi=110, layout="constrained")
    rows = facts["tables"][0][1]
    labels = [f"N = {row[0]}\n{row[1].split(',')[0]}" for row in rows]
    for ax, at, name in ((axes[0], 2, "activations of a subsequence, "
                                      "GB"), (axes[1], 5, "their transfer, ms")):
        for shift, column, colour, label in ((-0.2, at, ORANGE, "paper, figure "
                                                                "5"), (0.2, at + 1, BLUE, "simulated")):
            ax.bar([k + shift for k in range(len(rows))], [row[column] for row in rows], 0.38, color=colour,
                   label=label)
        ax.set_xticks(range(len(labels)), labels)
        ax.set(ylabel=name)
        ax.legend(frameon=False)
    for N, colour in zip(FIGURE5, (BLUE, GREY), strict=True):
        mine = [row for row in facts["ratios"] if row[0] == N]
        fixed = [row for row in mine if row[1].endswith("/16")]
        axes[2].plot([row[7] for row in fixed], [float(row[5][:-1]) for row in fixed], ".-", color=colour,
                     label=f"N = {N}, one ratio for all, 0 to 1")
        axes[2].plot(mine[0][7], float(mine[0][5][:-1]), "*", color=colour, ms=14, markeredgecolor="black",
                     label=f"N = {N}, adaptive")
    axes[2].set(xlabel="most activations on the device, GB", ylabel="stall, % of forward and backward",
                xlim=(0, None))
    axes[2].legend(frameon=False)
    for ax in axes:
        plain(ax)
    fig.savefig(path)
    plt.close(fig)


PART = Part("Figure 5: sizes of subsequences, and their ratios", SIMULATED, make, draw)
