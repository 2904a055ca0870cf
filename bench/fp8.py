"""FP8 products: what they do to a loss, and what they gain.

    python -m bench.fp8 curves   real runs on the stdlib data: fp8 beside bf16 and fp32, 300 steps each
    python -m bench.fp8 modes    real runs in FP8: every mode, and memo at several alphas
    python -m bench.fp8 layouts  real runs in FP8, of several seeds: two ranks beside one process, and one
                                 process whose sums come in another order: what rounding alone does
    python -m bench.fp8 gain     dry runs on H100: MFU and alpha of both, and the bytes of a layer

Several of these at once; without an argument all. Data: python data/stdlib/prepare.py. A CPU has no FP8
products: torch computes them in fp32 from the rounded operands. Writes bench/results/fp8.json and, of the
curves, fp8.png.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from bench.machine import store_parts
from bench.parallel_convergence import ROOT, train
from bench.swap_convergence import curve, plot
from memo.config.layer import tensors_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.report import layout_of
from memo.estimate.search import search
from memo.run.load_config import load_config
from memo.system import hardware

RESULTS = Path(__file__).parent / "results"
MODEL = dict(n_layer=4, n_head=4, n_embd=128, block_size=1024, batch_size=2, dataset="stdlib", device="cpu",
             max_iters=300, learning_rate=2e-3, warmup_iters=20, eval_interval=50, eval_iters=8,
             save_interval=0)
# on a GPU what is not multiplied in FP8 is bf16; so it is here, but for what is compared bit by bit
CURVES = {"fp32": dict(dtype="float32"), "bf16": dict(dtype="bfloat16"),
          "fp8": dict(dtype="bfloat16", matmul="fp8")}
FP8 = MODEL | dict(dtype="float32", matmul="fp8")
MODES = {"keep": dict(activation="keep"), "recompute": dict(activation="recompute"),
         "swap": dict(activation="swap"),
         **{f"alpha {a}": dict(activation="memo", alpha=a) for a in (0, 0.25, 0.5, 0.75, 1)},
         "per tensor": dict(activation="memo", alpha_mode="per_tensor")}
LAYOUTS = {"one process": (1, {}), "2 subsequences": (1, dict(subsequences=2)), "tp2": (2, dict(tp=2)),
           "cp2": (2, dict(cp=2)), "metp tp2": (2, dict(tp=2, tensor_parallel="metp"))}
SEEDS = 1337, 1
MODELS = {"7B": "7b_1m", "Llama-3-8B": "llama3_8b_1m"}
LENGTHS, SEQUENCES = (2**14, 2**17, 2**20), 8  # tokens; so many sequences a step


def losses(ranks=1, **keys):
    """The losses of a run, and its validation losses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(ranks, keys | dict(out_dir=out))
        return curve(out)


def beside(runs, first):
    """Of each run its last losses over those of the run `first`, and how many steps passed before a loss
    differed by a thousandth: rounding to FP8 makes runs part that differ in their last bits."""
    last = {name: dict(validation=run["val_loss"][-1], training=sum(run["loss"][-50:]) / 50)
            for name, run in runs.items()}
    over = {name: {of: got / last[first][of] - 1 for of, got in mine.items()} for name, mine in last.items()}
    for name, run in runs.items():
        pairs = enumerate(zip(run["loss"], runs[first]["loss"], strict=True))
        over[name]["steps"] = next((i for i, (a, b) in pairs if abs(a - b) > 1e-3 * b), len(run["loss"]))
    return dict(last=last, over=over)


def curves(_):
    runs = {name: losses(**MODEL | keys) for name, keys in CURVES.items()}
    return dict(model=MODEL, runs=runs, **beside(runs, "bf16"))


def modes(_, steps=60):
    runs = {name: losses(**FP8 | keys | dict(max_iters=steps, eval_interval=0))
            for name, keys in MODES.items()}
    return dict(model=FP8, losses_compared=steps, loss=runs["keep"]["loss"],
                same={name: run["loss"] == runs["keep"]["loss"] for name, run in runs.items()})


def layouts(_):
    """Of each seed; `mean`: the last validation loss over that of one process, over the seeds."""
    seeds = {seed: beside({name: losses(ranks, **FP8 | keys | dict(seed=seed))
                           for name, (ranks, keys) in LAYOUTS.items()}, "one process") for seed in SEEDS}
    mean = {name: sum(one["over"][name]["validation"] for one in seeds.values()) / len(SEEDS)
            for name in LAYOUTS}
    return dict(model=FP8, seeds=seeds, mean=mean)


# --- by the dry run ---

def figures(got):
    """Of an Estimate; MFU is relative to the peak in bf16."""
    parts = {name: s / got.seconds["step"] for name, s in got.seconds.items() if name != "step"}
    return dict(layout=layout_of(got), activation=got.cfg.activation, subsequences=got.cfg.subsequences,
                mfu=got.mfu, alpha=got.alpha, binds=got.binds, step_s=got.seconds["step"], parts=parts)


def layer_bytes(cfg):
    """Bytes of a layer's skeletal tensors, a token: of all, and of those that alpha shares out."""
    tensors = tensors_of(replace(cfg, tp=1, cp=1, batch_size=1), 2).values()
    return dict(all=sum(t.nbytes for t in tensors) / cfg.block_size,
                others=sum(t.nbytes for t in tensors if t.group) / cfg.block_size)


def of_both(cfg, figures):
    return {matmul: figures(replace(cfg, matmul=matmul)) for matmul in ("bf16", "fp8")}


def gain(_):
    machine = hardware.machine("h100-80gb")
    found = dict(machine="8 x H100-80GB", sequences=SEQUENCES, fastest={}, presets={}, layer_bytes={})
    for name, preset in MODELS.items():
        cfg = load_config([f"config/{preset}.py"])
        found["layer_bytes"][name] = of_both(cfg, layer_bytes)
        alone = replace(cfg, tp=1, cp=1, gradient_accumulation_steps=SEQUENCES)  # among all layouts
        found["fastest"][name] = {n: of_both(replace(alone, block_size=n), lambda one: figures(
            search(one, machine, 8, fast_arena, best=1)[0])) for n in LENGTHS}
    for path in sorted((ROOT / "config").glob("*_1m.py")):
        cfg = load_config([str(path)])
        world = cfg.pp * cfg.tp * cfg.cp
        found["presets"][path.stem] = dict(gpus=world, **of_both(cfg, lambda one, world=world: figures(
            estimate(one, hardware.machine("h100-80gb", None, world), world, fast_arena))))
    return found


# --- what is shown ---

def draw(found):
    labels = {name: f"validation {run['val_loss'][-1]:.4f}" for name, run in found["runs"].items()}
    plot(found["runs"], labels, "bf16", 0.1,
         "memo on the stdlib data, 4 layers, context 1,024: products in FP8, in bf16, in fp32",
         RESULTS / "fp8.png")


def tell(found):
    seeds = {f"seed {seed}": part for seed, part in found.get("layouts", {}).get("seeds", {}).items()}
    for what, part in dict(curves=found.get("curves", {}), **seeds).items():
        for name, over in part.get("over", {}).items():
            print(f"{what}, {name:14}: validation {over['validation']:+.3%}, the last 50 losses "
                  f"{over['training']:+.3%}; {over['steps']} steps within 0.1%")
    for name, over in found.get("layouts", {}).get("mean", {}).items():
        print(f"mean of the seeds, {name:14}: validation {over:+.3%}")
    for name, same in found.get("modes", {}).get("same", {}).items():
        print(f"{name:12} {'the same losses' if same else 'other losses'} as keep")
    gained = found.get("gain", {})
    lines = [(f"{model} {int(n):,}", both) for model, by_length in gained.get("fastest", {}).items()
             for n, both in by_length.items()] + list(gained.get("presets", {}).items())
    for what, both in lines:
        print(what, *(f"{m}: MFU {both[m]['mfu']:.1%}, alpha {both[m]['alpha']}, {both[m]['binds']}, "
                      f"{both[m]['layout']}" for m in ("bf16", "fp8")), sep="\n    ")


def main():
    found = store_parts(__doc__, RESULTS / "fp8.json", dict(curves=curves, modes=modes, layouts=layouts,
                                                           gain=gain))
    if "curves" in found:
        draw(found["curves"])
    tell(found)


if __name__ == "__main__":
    main()
