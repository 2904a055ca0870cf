"""Facts of SPPO (arXiv 2503.10377) from the simulator: sizes and transfer times of its figure 5, and what a
fixed offload ratio costs beside the adaptive one.

    python -m bench.sppo

A simulation: seconds are those of the dry run's model of an A100, copies run at its node's PCIe rate. Writes
bench/results/sppo.json and sppo.png.

The paper leaves open, and here is assumed: ranks and layers (8 ranks of one node share the sequence in a
ring, and hold 10 of the 80 layers); what a subsequence's activations are (memo's skeletal tensors without
keys and values, which stay on the device); the PCIe rate (the DGX A100's, all GPUs at once). Equal FLOPs
count the masked half of the scores, as the paper's lengths do; the seconds are of kernels that skip it.
"""

import json
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt

from bench.machine import machine
from memo.config import Config
from memo.estimate import hardware
from memo.estimate.unit_seconds import UnitSeconds
from memo.formulas import layer_forward_terms
from memo.layer import KEYS_VALUES, layer_of
from memo.plots import BLUE, GREY, ORANGE, plain
from memo.subsequences import ALIGNED, equal_flops
from memo.swap.schedule import Fates, schedule, times_of

RESULTS = Path(__file__).parent / "results"
S, LAYERS, RANKS, BF16 = 131072, 10, 8, 2
SHAPE = dict(n_layer=LAYERS, n_embd=8192, n_head=64)  # a stage of the 65B model
# figure 5: GB and milliseconds of the largest and the smallest subsequence
FIGURE5 = {8: dict(gb=(10.59, 2.87), ms=(821, 254)), 16: dict(gb=(6.04, 1.30), ms=(435, 90))}
A100 = hardware.machine("a100-80gb", ranks=RANKS)
LINK = A100.node.pcie_bytes_per_s


def every_score(cfg):
    """As layer_forward_terms(), the masked half of the scores among them."""
    linear, square = layer_forward_terms(cfg)
    return linear, 2 * square


def cut(cfg, multiple):
    """The lengths of equal FLOPs as the paper counts them, multiples of `multiple`."""
    with patch("memo.subsequences.layer_forward_terms", every_score):
        counts = equal_flops(*layer_forward_terms(cfg), S // multiple, multiple, cfg.subsequences)
    return tuple(n * multiple for n in counts)


def activation_bytes(cfg, tokens):
    """Of all layers of a rank, of so many tokens of the sequence."""
    tensors = layer_of(cfg).tensors(1, tokens, BF16)
    return LAYERS * sum(t.nbytes for name, t in tensors.items() if name not in KEYS_VALUES) / cfg.cp


class Stage:
    """A stage's pass over one sequence: of each subsequence `sizes`, bytes of its activations, and seconds
    `forward_s` and `backward_s` of all layers."""

    def __init__(self, N):
        self.cfg = cfg = Config(**SHAPE, block_size=S, vocab_size=32000, cp=RANKS, subsequences=N,
                                subsequence_cut="flops", unit_order="subsequence")
        self.N, self.lengths = N, cut(cfg, ALIGNED * cfg.block_multiple)
        self.sizes = [activation_bytes(cfg, n) for n in self.lengths]
        units = [UnitSeconds(cfg, A100, BF16, self.lengths[:i + 1]) for i in range(N)]
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
            return {"forward": self.forward_s[i], "backward": self.backward_s[i], "offload": copied,
                    "prefetch": copied}.get(step.kind, 0.0) / layers
        return times_of(schedule(fates, layers, self.N, "subsequence"), seconds).stall_s

    def most(self, ratios):
        """Bytes: the greatest M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)."""
        stays = [(1 - r) * a for r, a in zip(ratios, self.sizes, strict=True)]
        return max(before + a for before, a in zip(accumulate(stays, initial=0), self.sizes, strict=False))

    def row(self, name, ratios):
        stall_s, by_layer_s = self.stall_s(ratios), self.stall_s(ratios, LAYERS)
        return dict(name=name, ratios=ratios, stall_s=stall_s, stall_by_layer_s=by_layer_s,
                    stall=stall_s / sum(self.forward_s + self.backward_s), device_bytes=self.most(ratios),
                    host_bytes=sum(r * a for r, a in zip(ratios, self.sizes, strict=True)))


def beside(found, paper):
    return [f / p - 1 for f, p in zip(found, paper, strict=True)]


def figure5(stage):
    """Largest and smallest activations and their transfer beside the paper; also of lengths cut to the
    token."""
    paper, rows = FIGURE5[stage.N], {}
    for name, lengths in (("lengths", stage.lengths), ("to_the_token", cut(stage.cfg, 1))):
        most, least = (activation_bytes(stage.cfg, n) for n in (max(lengths), min(lengths)))
        gb, ms = [most / 1e9, least / 1e9], [most / LINK * 1e3, least / LINK * 1e3]
        rows[name] = dict(tokens=lengths, gb=gb, ms=ms, gb_off=beside(gb, paper["gb"]),
                          ms_off=beside(ms, paper["ms"]))
        off = (" ".join(f"{100 * e:+.1f}%" for e in rows[name][what]) for what in ("gb_off", "ms_off"))
        print(f"N={stage.N:2} {name:12} {gb[0]:5.2f} {gb[1]:4.2f} GB, {ms[0]:3.0f} {ms[1]:3.0f} ms; beside "
              f"the paper {', '.join(off)}")
    return dict(N=stage.N, paper=paper, **rows)


def ratios_of(stage):
    """Stalls and memory of the adaptive ratios and of fixed ones: of the same bytes, of the largest that does
    not stall, and a grid of 1/16."""
    adaptive = stage.adaptive

    def fixed(alpha):
        return [alpha] * (stage.N - 1) + [0.0]
    same = sum(r * a for r, a in zip(adaptive, stage.sizes, strict=True)) / sum(stage.sizes[:-1])
    rows = [stage.row("adaptive", adaptive), stage.row("fixed, the same bytes", fixed(same)),
            stage.row("fixed, no stall", fixed(min(adaptive[:-1]))),
            *(stage.row(f"fixed, {k}/16", fixed(k / 16)) for k in range(17))]
    for r in (*rows[:3], rows[-1]):
        print(f"N={stage.N:2} {r['name']:22} {r['ratios'][0]:.2f} to {max(r['ratios']):.2f}: stall "
              f"{r['stall_s']:.3f} s ({100 * r['stall']:.1f}%), by layers {r['stall_by_layer_s']:.3f} s, "
              f"device {r['device_bytes'] / 1e9:.1f} GB, host {r['host_bytes'] / 1e9:.1f} GB")
    return dict(N=stage.N, forward_s=stage.forward_s, backward_s=stage.backward_s,
                sizes_gb=[a / 1e9 for a in stage.sizes], rows=rows)


def plot(figure, ratios, path):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.3), dpi=130, layout="constrained")
    labels = [f"N = {f['N']}\n{which}" for f in figure for which in ("largest", "smallest")]
    bars = (-0.2, GREY, "paper, figure 5", "paper"), (0.2, BLUE, "simulated", "lengths")
    for ax, what, name in ((axes[0], "gb", "activations of a subsequence, GB"),
                           (axes[1], "ms", "their transfer, ms")):
        for at, colour, label, of in bars:
            ax.bar([k + at for k in range(len(labels))], [v for f in figure for v in f[of][what]], 0.38,
                   color=colour, label=label)
        ax.set_xticks(range(len(labels)), labels)
        ax.set(ylabel=name)
        ax.legend(frameon=False)
    for found, colour in zip(ratios, (BLUE, ORANGE), strict=True):
        fixed = [r for r in found["rows"] if r["name"].endswith("/16")]
        adaptive = found["rows"][0]
        axes[2].plot([r["device_bytes"] / 1e9 for r in fixed], [100 * r["stall"] for r in fixed], ".-",
                     color=colour, label=f"N = {found['N']}, one ratio for all, 0 to 1")
        axes[2].plot(adaptive["device_bytes"] / 1e9, 100 * adaptive["stall"], "*", color=colour, ms=14,
                     markeredgecolor="black", label=f"N = {found['N']}, adaptive")
    axes[2].set(xlabel="most activations on the device, GB", ylabel="stall, % of forward and backward",
                xlim=(0, None))
    axes[2].legend(frameon=False)
    for ax in axes:
        plain(ax)
    fig.suptitle("SPPO's 65B model at 131,072 tokens, 10 layers on 8 A100: a simulation")
    fig.savefig(path)


def main():
    stages = [Stage(N) for N in FIGURE5]
    figure, ratios = [figure5(s) for s in stages], [ratios_of(s) for s in stages]
    found = dict(machine=machine(), link_bytes_per_s=LINK, figure5=figure, ratios=ratios)
    (RESULTS / "sppo.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(figure, ratios, RESULTS / "sppo.png")


if __name__ == "__main__":
    main()
