"""Figures 11 and 12 of SPPO (arXiv 2503.10377) by dry run: what each part of it is worth, and how long a
sequence may be. Nothing is run. GPUs, node and baselines are those of bench/sppo_table4.py.

    python -m bench.sppo_figures

Figure 11: tokens per second over Megatron-LM's fastest layout that fits, for the pipeline of subsequences
with no offload, with all activations offloaded, with SPPO's adaptive ratios, and with stages that help each
other. Figure 12: the greatest context of the 7B model, in SPPO's layouts (stages of one node), of the
baselines, and of memo in any layout of one stage and whole sequences. Writes bench/results/sppo_figures.json
and .png.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from bench.baselines import NAMES, told
from bench.machine import machine
from bench.sppo_table4 import RIVALS, SEQUENCES, TABLE4, config, estimated, gpus, rivals, sppo_config
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.report import limit_of
from memo.estimate.search import MODES, longest_of_layouts
from memo.estimate.search import longest as longest_estimate
from memo.files import save_json
from memo.msp import shares_lines
from memo.plots import BLUE, GREEN, GREY, ORANGE, PALE, plain
from testing.baselines import DEEPSPEED, MEGATRON, longest

RESULTS = Path(__file__).parent / "results"
FIGURE11 = ("13B", 512), ("65B", 640)  # units of 1,024 tokens
# speedups over Megatron-LM; the paper's full offload of 13B is 0.91 of its no offload
PARTS = {"no offload": dict(activation="keep"), "full offload": dict(activation="memo", alpha=1.0),
         "adaptive": dict(activation="swap"), "+ MSP": dict(activation="swap", msp=True)}
PAPER11 = {"13B": {"full offload": "0.91 of no offload", "adaptive": 1.23, "+ MSP": 1.44},
           "65B": {"full offload": 2.1, "adaptive": 3.38, "+ MSP": 3.48}}
STAGES = {32: 4, 64: 8, 128: 16}  # GPUs: stages of eight
PAPER12 = {32: 1.3, 64: 2.0, 128: 4.0}  # units of 2^20 tokens
MILLION = 2**20


def figure11(model: str, k: int) -> dict:
    """The seconds of each part, beside the baselines."""
    sp, pp, lengths = next((sp, pp, lengths) for name, sp, pp, lengths in TABLE4 if name == model)
    world, there, tokens = sp * pp, gpus(sp * pp), 1024 * k
    others, parts = rivals(model, tokens, pp, world), {}
    for name, keys in PARTS.items():
        cfg = sppo_config(model, sp, pp, tokens, lengths[k], **keys)
        made = estimate(cfg, there, world, fast_arena)
        got, lent = estimated(made), [piece for stage in made.stages for piece in stage.placement.lent]
        parts[name] = got | dict(over={name: got["tgs"] / one["tgs"] for name, one in others.items()})
        print(f"{model} {tokens:,} {name:12} {'fits' if got['fits'] else got['why']} TGS {got['tgs']:.1f} "
              f"over {parts[name]['over']}, paper {PAPER11[model].get(name)}", flush=True)
        if cfg.msp:
            parts[name]["helped"] = [piece._asdict() for piece in lent]
            print("\n".join(shares_lines(lent, cfg.pp, cfg.n_subsequences)), flush=True)
    return dict(model=model, gpus=world, tokens=tokens, N=lengths[k], **others, parts=parts,
                paper=PAPER11[model])


def figure12(world: int) -> dict:
    """The longest contexts of the 7B model on so many GPUs."""
    there, found = gpus(world), dict()
    cfg = sppo_config("7B", 8, STAGES[world], MILLION, "auto", activation="swap")
    found["swap"] = longest_estimate(cfg, there, world, fast_arena)
    cfg = config("7B", MILLION, subsequences=1)
    found["longest"] = longest_of_layouts(cfg, there, world, fast_arena, 1, MODES[-1:])[0]
    found = {name: estimated(got) | dict(tokens=got.cfg.block_size, N=got.cfg.n_subsequences,
                                         limit=limit_of(got)[0]) for name, got in found.items()}
    for system in NAMES:
        most = longest(system, config("7B", MILLION), there, world, SEQUENCES)
        found[system] = told(most) | dict(tokens=most.layout.cfg.block_size)
    for name, one in found.items():
        print(f"7B on {world} GPUs, {name}: {one['tokens']:,} tokens, MFU {100 * one['mfu']:.1f}%, "
              f"{one['layout']}")
    return dict(gpus=world, paper=PAPER12[world] * MILLION, **found)


def draw(bars: list[dict], lengths: list[dict]) -> None:
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.3), dpi=110, layout="constrained")
    for ax, one in zip(axes, bars, strict=False):
        names = [*RIVALS, *PARTS]
        for at, name in enumerate(names):
            got = one["parts"][name] if name in PARTS else one[name]
            ratio, paper = got["tgs"] / one[MEGATRON]["tgs"], one["paper"].get(name)
            if got["fits"]:
                ax.bar(at - 0.2, ratio, 0.38, color=BLUE if name in PARTS else GREY)
            else:
                ax.text(at - 0.2, 0.02, "does not fit", rotation=90, ha="center", fontsize=8)
            if isinstance(paper, float):
                ax.bar(at + 0.2, paper, 0.38, color=ORANGE)
        labels = [RIVALS.get(name, name) for name in names]
        ax.set_xticks(range(len(names)), labels, fontsize=8, rotation=25, ha="right")
        ax.set(ylabel="tokens per second over Megatron-LM",
               title=f"{one['model']}, {one['tokens'] // 1024}K tokens, {one['gpus']} A100")
        plain(ax)
    kinds = (("paper", "SPPO's paper", ORANGE), ("swap", "memo in SPPO's form", BLUE),
             ("longest", "memo, one stage", GREEN), (MEGATRON, NAMES[MEGATRON], GREY),
             (DEEPSPEED, NAMES[DEEPSPEED], PALE))
    for at, (name, label, colour) in enumerate(kinds):
        values = [one[name] if name == "paper" else one[name]["tokens"] for one in lengths]
        axes[2].bar([k + 0.16 * at - 0.32 for k in range(len(lengths))], [n / MILLION for n in values], 0.15,
                    color=colour, label=label)
    axes[2].set_xticks(range(len(lengths)), [f"{one['gpus']} GPUs" for one in lengths])
    axes[2].set(ylabel="longest context, M tokens (2^20)", title="7B", yscale="log")
    axes[2].set_ylim(1, 1000)
    axes[2].legend(frameon=False, fontsize=8, loc="upper left")
    plain(axes[2])
    fig.suptitle("SPPO's figures 11 and 12: dry runs (blue: memo, grey: baselines) and the paper (orange)")
    fig.savefig(RESULTS / "sppo_figures.png")
    plt.close(fig)


def main() -> None:
    bars, lengths = [figure11(*one) for one in FIGURE11], [figure12(world) for world in STAGES]
    save_json(dict(machine=machine(), sequences=SEQUENCES, figure11=bars, figure12=lengths),
              RESULTS / "sppo_figures.json")
    draw(bars, lengths)


if __name__ == "__main__":
    main()
