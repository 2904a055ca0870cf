"""Dry runs of the configurations of SPPO's Table 4 (arXiv 2503.10377), in two forms: SPPO's own, which
recomputes nothing (activation=swap: rows whose copies do not hide stay on the device), and MEMO's, which
recomputes them (activation=memo). Beside them, on the same GPUs: Megatron-LM and DeepSpeed-Ulysses with
ZeRO-3, each in the fastest layout of its own (testing/baselines.py), Megatron-LM with as many stages as SPPO,
and memo in the fastest layout of one stage and whole sequences. Nothing is run.

    python -m bench.sppo_table4

Models, GPUs, SP, PP, N and lengths are the paper's; its SP is tp inside a node, with cp where that is not
enough. Subsequences have equal FLOPs. The GPUs are A100 with 80 GB, eight a node with 2 TB and four links of
200 Gb/s; a copy runs at the PCIe rate of memo's dgx-a100, which is that of the paper's figure 5. The arena of
temporary tensors is a bound. All take 16 sequences a step. In all of memo's layouts parameters and gradients
stay on the device (states=device), as SPPO's and Megatron-LM's do. Writes bench/results/sppo_table4.json and
.png.
"""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt

from bench.baselines import NAMES, fastest, told
from bench.machine import machine
from memo.config import Config
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.hardware import GIB
from memo.estimate.report import layout_of
from memo.files import save_json
from memo.formulas import percent
from memo.plots import BLUE, GREEN, GREY, ORANGE, PALE, plain
from testing.baselines import MEGATRON, best

RESULTS = Path(__file__).parent / "results"
MODELS = {"7B": dict(n_layer=32, n_embd=4096, n_head=32), "13B": dict(n_layer=40, n_embd=5120, n_head=40),
          "65B": dict(n_layer=80, n_embd=8192, n_head=64)}
# model, SP, PP, {length in units of 1,024 tokens: N}
TABLE4 = [("7B", 8, 4, {512: 32, 640: 64, 768: 80, 896: 128, 1024: 160}),
          ("13B", 8, 8, {512: 32, 640: 48, 768: 64, 1024: 80, 1280: 160}),
          ("65B", 16, 8, {512: 32, 600: 64, 640: 80, 768: 96, 1024: 128})]
SPEEDUPS = 1.13, 3.38  # over Megatron-LM and DeepSpeed, as the paper has them
FORMS = "swap", "memo"
STAGED = "megatron with stages"
RIVALS = {**NAMES, STAGED: "Megatron-LM, same stages"}
OURS = {"swap": "memo in SPPO's form", "fastest": "memo's fastest layout"}
SEQUENCES = 16  # of a step; MEMO's, for the facts of SPPO name none
NODE = dict(network_bytes_per_s=4 * 25e9 / 8, host_memory_bytes=2_000_000_000_000)


def config(model: str, tokens: int, **keys) -> Config:
    """The config of one of the paper's models."""
    return Config(**MODELS[model], vocab_size=50257, block_size=tokens, dtype="bfloat16", states="device",
                  gradient_accumulation_steps=SEQUENCES, **keys)


def sppo_config(model: str, sp: int, pp: int, tokens: int, N: int | str, **keys) -> Config:
    """The same in SPPO's layout."""
    tp = min(sp, 8)
    return config(model, tokens, tp=tp, cp=sp // tp, pp=pp, subsequences=N, subsequence_cut="flops",
                  unit_order="subsequence", **keys)


def gpus(world: int) -> hardware.Machine:
    return hardware.machine("a100-80gb", ranks=world, **NODE)


def rivals(model: str, tokens: int, pp: int, world: int) -> dict:
    """{rival: told()} of all RIVALS."""
    made = {system: best(system, config(model, tokens), gpus(world), world, SEQUENCES) for system in NAMES}
    made[STAGED] = best(MEGATRON, config(model, tokens), gpus(world), world, SEQUENCES, pp=pp)
    return {name: told(found) for name, found in made.items()}


def estimated(got) -> dict:
    """An Estimate as a line of a table."""
    return dict(fits=got.fits, reason=got.reason, why=got.why, layout=layout_of(got),
                optimizer_device=got.cfg.optimizer_device, mfu=got.mfu, tgs=got.tgs,
                step_s=got.seconds["step"], parts=got.seconds, device_bytes=got.device_bytes,
                host_bytes=got.host_bytes, alphas=[one.alpha for one in got.stages])


def row(model: str, sp: int, pp: int, tokens: int, N: int) -> dict:
    """What both forms take and give, and what the others do on as many GPUs."""
    world, there = sp * pp, gpus(sp * pp)
    found = {}
    for form in FORMS:
        for where in ("auto", "cpu"):  # the optimizer is on the host where nothing else fits
            got = estimate(sppo_config(model, sp, pp, tokens, N, activation=form, optimizer_device=where),
                           there, world, fast_arena)
            found[form] = estimated(got)
            if got.fits:
                break
    whole = config(model, tokens, subsequences=1)
    found["fastest"], others = estimated(fastest(whole, there, world)), rivals(model, tokens, pp, world)
    speedups = {form: {name: found[form]["tgs"] / one["tgs"] for name, one in others.items()
                       if found[form]["fits"] and one["fits"]} for form in OURS}
    return dict(model=model, gpus=world, sp=sp, pp=pp, tokens=tokens, N=N, **found, **others,
                speedups=speedups)


def forms(rows: list[dict]) -> list[str]:
    head = f"{'':30}" + "".join(f"{form:>11}{'MFU':>8}{'TGS':>8}{'bubble':>8}{'GiB':>7}{'host':>7}"
                                for form in FORMS)
    table = [f"{head}   faster"]
    for one in rows:
        text = name_of(one)
        for form in FORMS:
            got = one[form]
            text += f"{'fits' if got['fits'] else got['reason']:>11}"
            text += f"{percent(got['mfu']):>8}{got['tgs']:>8.1f}"
            text += f"{got['parts']['bubble'] / got['step_s']:>8.1%}"
            text += f"{got['device_bytes'] / GIB:>7.1f}{got['host_bytes'] / GIB:>7.0f}"
        rates = {form: one[form]["tgs"] for form in FORMS if one[form]["fits"]}
        alike = len(rates) == 2 and max(rates.values()) < 1.001 * min(rates.values())
        fastest = "equal" if alike else max(rates, key=rates.__getitem__, default="none fits")
        table.append(f"{text}   {fastest}")
    return table


def name_of(one: dict) -> str:
    return f"{one['model']:>4}{one['gpus']:>5} GPUs{one['tokens']:>10,}{one['N']:>5}  "


def beside(rows: list[dict]) -> list[str]:
    """Each row beside the others."""
    table = []
    for one in rows:
        text = name_of(one)
        for name in ("swap", *RIVALS, "fastest"):
            got = one[name]
            fits = "" if got["fits"] else " does not fit"
            text += f"  {name} {percent(got['mfu'])} {got['tgs']:.1f} {got['layout']}{fits}"
            text += f" again {got['recomputed_layers']}" if name in RIVALS else ""
        table.append(text)
    return table


def draw(rows: list[dict]) -> None:
    styles = zip(((ORANGE, "^:"), (GREY, "v:"), (PALE, "x:")), RIVALS, strict=True)
    lines = {"swap": (OURS["swap"], BLUE, "o-"), "fastest": (OURS["fastest"], GREEN, "s--"),
             **{name: (RIVALS[name], *style) for style, name in styles}}
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.2), dpi=110, sharey=True, layout="constrained")
    for ax, (model, sp, pp, _) in zip(axes, TABLE4, strict=True):
        for name, (label, colour, style) in lines.items():
            there = [one for one in rows if one["model"] == model and one[name]["fits"]]
            ax.plot([one["tokens"] / 1024 for one in there], [100 * one[name]["mfu"] for one in there], style,
                    color=colour, label=label)
        ax.set(xlabel="context, K tokens", ylim=(0, 60), title=f"{model}, {sp * pp} A100")
        plain(ax)
    axes[0].set_ylabel("MFU, %")
    axes[0].legend(frameon=False, loc="lower left")
    fig.suptitle("The configurations of SPPO's Table 4: dry runs; what does not fit has no point")
    fig.savefig(RESULTS / "sppo_table4.png")
    plt.close(fig)


def main() -> None:
    rows = [row(model, sp, pp, 1024 * k, N) for model, sp, pp, lengths in TABLE4 for k, N in lengths.items()]
    print("\n".join(forms(rows) + beside(rows)))
    for form, name in product(OURS, RIVALS):
        ratios = [one["speedups"][form][name] for one in rows if name in one["speedups"][form]]
        print(f"{OURS[form]} over {RIVALS[name]}: {min(ratios):.2f}x to {max(ratios):.2f}x, {len(ratios)} "
              "rows")
    print(f"the paper, over Megatron-LM and DeepSpeed: {SPEEDUPS[0]}x to {SPEEDUPS[1]}x")
    save_json(dict(machine=machine(), node=NODE, sequences=SEQUENCES, rows=rows),
              RESULTS / "sppo_table4.json")
    draw(rows)


if __name__ == "__main__":
    main()
