"""The dry run: longest contexts and fastest layouts, and estimates beside runs here. Beside the papers:
research/papers.

    python -m bench.estimate contexts     the longest contexts of the 7B model on eight GPUs
    python -m bench.estimate models       the fastest layout and the longest context of the models of config/
    python -m bench.estimate speed        seconds of the command itself, and of searches
    python -m bench.estimate here [--device=cuda]     runs here, after --calibrate: bytes and seconds
    python -m bench.estimate subsequences             the same with 1, 4 and 8 subsequences
    python -m bench.estimate all
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.machine import machine as machine_at_hand
from memo.estimate.arena import ROOT, fast_arena, traced_arena
from memo.estimate.regions import granting
from memo.estimate.report import limit_of
from memo.estimate.search import config_with, degrees_of, longest, search
from memo.run.load_config import load_config
from memo.system import hardware
from memo.system.files import save_json
from testing.paper import HOST_BYTES

RESULTS = Path(__file__).parent / "results"
MODELS = {"llama3_8b_1m": 8, "qwen3_8b_1m": 8, "llama2_7b_1m": 8, "llama2_70b_1m": 64, "gpt_175b": 64}  # GPUs


def figures_of(got):
    """The figures of an Estimate that a table shows."""
    return dict(layout=f"tp{got.cfg.tp} cp{got.cfg.cp} {got.cfg.context_parallel}",
                optimizer_device=got.cfg.optimizer_device, tokens=got.cfg.block_size, mfu=got.mfu,
                step_s=got.seconds["step"], device_share=got.device_bytes / got.capacity,
                host_share=got.host_bytes / got.host_capacity)


def longest_of_all(cfg, machine, world, arena=traced_arena):
    """The Estimate of the longest context in the best layout of all, found by the fast bound."""
    found = []
    for tp in degrees_of(min(world, machine.node.gpus_per_node)):
        for kind in ("ring", "ulysses"):
            for where in ("auto", "cpu"):
                one = config_with(cfg, tp=tp, cp=world // tp, context_parallel=kind, optimizer_device=where)
                found.append(one and longest(one, machine, world, fast_arena))
    best = max(filter(None, found), key=lambda most: (most.cfg.block_size, most.mfu))
    return longest(best.cfg, machine, world, arena)


def contexts():
    """The longest context of the 7B preset: on the paper's node, and on others in the best layout of all."""
    cfg, out = load_config(["config/7b_1m.py", "--subsequences=1", "--states=device"]), []

    def row(name, most, **more):
        out.append(dict(machine=name, **figures_of(most), **more))
        print(out[-1], flush=True)
    for gb in (HOST_BYTES / 1e9, 2000.0):
        most = longest(*granting(cfg, hardware.machine("a800-80gb"), 8, gb * 1e9), 8)
        row(f"8 x a800-80gb, {gb:g} GB of host memory", most)
    published = {"ALST (8B)": 3.7e6, "FPDT (8B)": 4e6, "Untied Ulysses (8B)": 5e6}
    for gpu, gb in (("a800-80gb", 2000.0), ("h100-80gb", 1900.0), ("h200-141gb", 1900.0)):
        most = longest_of_all(*granting(cfg, hardware.machine(gpu), 8, gb * 1e9), 8)
        row(f"8 x {gpu}, {gb:g} GB of host memory, best layout", most, published=published)
    return out


def models():
    """On H100: of each preset of other models the fastest layout at its own context, and the longest one in
    the best layout of all; arenas from the bound, the longest contexts' from a trace."""
    out, machine = [], hardware.machine("h100-80gb")
    for preset, world in MODELS.items():
        cfg = load_config([f"config/{preset}.py", "--subsequences=1", "--states=device"])
        fastest = search(cfg, machine, world, fast_arena, best=1)[0]
        most = longest_of_all(cfg, machine, world)
        out.append(dict(preset=preset, machine=f"{world} x {machine.name}",
                        fastest=figures_of(fastest) | dict(binds=fastest.binds),
                        longest=figures_of(most) | dict(limit=limit_of(most)[0])))
        print(out[-1], flush=True)
    return out


# --- runs on this machine ---

FIXED = "--subsequence_cut=equal --unit_order=layer"
LLAMA = "--norm=rmsnorm --mlp=swiglu --tie_embeddings=False --n_kv_head=2"
CPU_RUNS = [(1, "--n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 --activation=keep"),
            (1, "--n_layer=4 --n_embd=512 --n_head=8 --block_size=2048 --alpha=0.5"),
            (1, "--n_layer=6 --n_embd=256 --n_head=4 --block_size=8192 --alpha=0.25"),
            (1, "--n_layer=4 --n_embd=384 --n_head=6 --block_size=4096 --activation=recompute"),
            (2, "--tp=2 --n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 --alpha=0.5"),
            (2, "--tp=2 --n_layer=3 --n_embd=512 --n_head=8 --block_size=2048 --activation=swap"),
            (2, "--cp=2 --n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 --alpha=0.5"),
            (2, "--cp=2 --context_parallel=ulysses --n_layer=4 --n_embd=256 --n_head=4 --block_size=8192 "
                "--activation=recompute"),
            (2, "--n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 "
                "--gradient_accumulation_steps=2 --activation=keep"),
            (2, "--n_layer=4 --n_embd=512 --n_head=8 --block_size=2048 "
                "--gradient_accumulation_steps=2 --alpha=0.25"),
            (1, f"{LLAMA} --n_layer=4 --n_embd=256 --n_head=4 --n_inner=704 --block_size=4096 "
                "--activation=keep"),
            (1, f"{LLAMA} --n_layer=4 --n_embd=512 --n_head=8 --block_size=2048 --alpha=0.5"),
            (2, f"{LLAMA} --tp=2 --n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 --alpha=0.5"),
            (2, f"{LLAMA} --cp=2 --n_layer=4 --n_embd=384 --n_head=6 --block_size=4096 "
                "--activation=recompute"),
            (1, "--tensor_parallel=metp --n_layer=4 --n_embd=256 --n_head=4 --block_size=4096 "
                "--activation=keep"),
            (2, "--tensor_parallel=metp --tp=2 --n_layer=4 --n_embd=512 --n_head=8 --block_size=4096 "
                "--alpha=0.5"),
            (2, f"--tensor_parallel=metp {LLAMA} --tp=2 --n_layer=4 --n_embd=256 --n_head=4 "
                "--block_size=8192 --activation=recompute")]
FRESH = 4  # runs that a calibration serves: two cores that others share are 25% slower a quarter hour later
SUBSEQUENCE_RUNS = [(ranks, f"--subsequences={n} {FIXED} --n_layer=3 --n_embd=256 --n_head=4 "
                            f"--block_size=8192 --alpha=0.5{layout}")
                    for ranks, layout in ((1, ""), (2, " --tp=2"), (2, " --cp=2"),
                                          (2, " --cp=2 --context_parallel=ulysses"),
                                          (2, " --tp=2 --tensor_parallel=metp"))
                    for n in (1, 4, 8)]
GPU_RUNS = [(1, f"--n_layer={L} --n_embd=4096 --n_head=32 --vocab_size=50257 --block_size={S}{more}")
            for L, S, more in ((8, 16384, ""), (8, 32768, ""), (8, 65536, ""), (8, 131072, ""),
                               (8, 262144, ""), (8, 262144, " --activation=recompute"), (8, 393216, ""))]


def random_tokens(folder, tokens, vocab_size):
    """A dataset that is long enough for any context of the bench."""
    folder.mkdir()
    draws = np.random.default_rng(0).integers(0, vocab_size, tokens, dtype=np.uint16)
    for split in ("train", "val"):
        draws.tofile(folder / f"{split}.bin")
    counts = {split: dict(documents=1, tokens=tokens) for split in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps(dict(dtype="uint16", vocab_size=vocab_size, counts=counts)))
    return folder


def started(ranks, *command):
    """A command on so many ranks."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, *command], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(ROOT)))
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def here(device, steps, runs):
    """Runs beside what is estimated of them: bytes of every region, seconds of a step."""
    with tempfile.TemporaryDirectory() as scratch:
        data = random_tokens(Path(scratch) / "data", 2**20, 50257) if device == "cuda" else "stdlib"
        rows, measured = [], {}  # by the number of ranks, before which run
        for i, (ranks, keys) in enumerate(runs):
            if i - measured.get(ranks, -FRESH) >= FRESH:
                started(ranks, "-m", "memo.profiler", "--calibrate", f"--device={device}")
                measured[ranks] = i
            rows.append(a_run(Path(scratch) / str(i), data, ranks, keys, device, steps))
    worst = {k: max(abs(row[k] - 1) for row in rows) for k in ("bytes_ratio_worst", "step_ratio")}
    return dict(machine=machine_at_hand(), steps=steps, runs=rows, worst=worst)


def a_run(out_dir, data, ranks, keys, device, steps):
    """One run of `steps` steps beside its estimate."""
    started(ranks, "train.py", f"--dataset={data}", f"--device={device}", f"--max_iters={steps}",
            "--warmup_iters=0", "--eval_interval=0", "--save_interval=0", f"--out_dir={out_dir}",
            *keys.split())
    plan = json.loads((out_dir / "plan.json").read_text())
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    expected, measured = plan["estimate"], {}
    for line in plan["regions"]:
        measured[line["region"]] = measured.get(line["region"], 0) + line["device_bytes"]
    guessed = dict(expected["device_bytes"])
    guessed["transient"] += guessed["head"]  # one arena
    ratios = {name: guessed[name] / n for name, n in measured.items() if n}
    ratios["host slab"] = (expected["host_bytes"]["total"] / ranks / plan["host_bytes"]
                           if plan["host_bytes"] else 1.0)
    step_s = min(line["step_s"] for line in lines[2:])  # what else runs on these cores only adds
    # torch does not count these, or counts them twice
    outside = ("margin", "context", "communication", "capacity", "total", "head")
    torchs = sum(n for name, n in guessed.items() if name not in outside)
    several = plan["placement"].get("cuts", [1])
    row = dict(ranks=ranks, keys=keys, subsequences=len(several), bytes_ratio=ratios,
               bytes_ratio_worst=max(ratios.values(), key=lambda r: abs(r - 1)), measured_bytes=measured,
               step_s=step_s, estimated_step_s=expected["seconds"]["step"],
               step_ratio=expected["seconds"]["step"] / step_s, alpha=plan["alpha"],
               estimated_alpha=expected["alpha"], device_peak_bytes=lines[-1]["device_peak_bytes"],
               estimated_device_bytes=expected["device_bytes"]["total"])
    if device == "cuda":
        row["device_peak_ratio"] = torchs / lines[-1]["device_peak_bytes"]
    print(f"{keys}: step {step_s:.3f} s, estimated {row['step_ratio']:.3f} of it; "
          f"bytes {row['bytes_ratio_worst']:.4f}", flush=True)
    return row


ON_128 = "--gpu=a800-80gb --gpus=128 --gradient_accumulation_steps=16 --search"
ON_8 = "--gpu=h100-80gb --gpus=8 --gradient_accumulation_steps=1 --search --max_context"
HELPING = ("--gpu=a800-80gb --gpus=64 --pp=8 --tp=8 --cp=1 --block_size=1310720 --subsequences=160 "
           "--subsequence_cut=flops --unit_order=subsequence --msp=true --fast")
SPEED = {"7B at 1M, no cache": "7b_1m --gpu=a800-80gb", "7B at 1M, cached": "7b_1m --gpu=a800-80gb",
         "7B, search over 128 GPUs": f"7b_1m {ON_128}", "65B, search over 128 GPUs": f"65b_1m {ON_128}",
         "7B, longest context on 8 H100": f"7b_1m {ON_8}",
         "Llama-3-8B, longest context on 8 H100": f"llama3_8b_1m {ON_8}",
         "13B in 8 stages that help each other, 160 subsequences": f"13b_1m {HELPING}"}


def speed():
    """Seconds of the command itself: without and with its cache; of searches, and of the largest schedules,
    without."""
    out = {}
    for name, argv in SPEED.items():
        preset, *options = argv.split()
        command = [sys.executable, "-m", "memo.estimate", f"config/{preset}.py", *options, "--json"]
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(1 + name.endswith(", cached")):
                start = time.perf_counter()
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                               env=os.environ | dict(XDG_CACHE_HOME=cache))
                out[name] = time.perf_counter() - start
        print(f"{name}: {out[name]:.2f} s", flush=True)
    return out


def main():
    parts = {"contexts": contexts, "models": models, "speed": speed,
             "here": lambda: here(args.device, args.steps, GPU_RUNS if args.device == "cuda" else CPU_RUNS),
             "subsequences": lambda: here(args.device, args.steps, SUBSEQUENCE_RUNS)}
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*parts, "all"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for name in parts if args.part == "all" else (args.part,):
        result = parts[name]()
        suffix = f"_{args.device}" if name in ("here", "subsequences") else ""
        save_json(result, args.out / f"estimate_{name}{suffix}.json")
        if name not in ("contexts", "models"):
            print(json.dumps({k: v for k, v in result.items() if k not in ("runs", "machine")},
                             indent=1)[:6000])


if __name__ == "__main__":
    main()
