"""Does memo.verify say "right" of configs that are right? 60 of them from a seed: families, precisions,
layouts, numbers of subsequences, modes, states, documents; ten with eight ranks.

    python -m bench.verify_fuzz [--seed=0] [--cases=60] [--only=17,18] [--out=bench/results/verify_fuzz.json]
"""

import argparse
import contextlib
import io
import json
import random
import resource
from pathlib import Path

import torch._dynamo.config  # noqa: F401 - with transformers seconds, here once for all cases
import transformers.models.auto  # noqa: F401

from bench.machine import machine
from memo.system.command import run
from memo.verify.__main__ import main as verify

FAMILIES = {
    "gpt2": dict(position="learned", bias=True, gelu="tanh"), "gpt": dict(),
    "llama": dict(norm="rmsnorm", mlp="swiglu", tie_embeddings=False, n_kv_head=4),
    "llama3": dict(norm="rmsnorm", mlp="swiglu", tie_embeddings=False, n_kv_head=4, rope_theta=5e5,
                   rope_scaling='{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, '
                                '"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}'),
    "qwen2": dict(norm="rmsnorm", mlp="swiglu", qkv_bias=True, n_kv_head=4),
    "qwen3": dict(norm="rmsnorm", mlp="swiglu", qk_norm=True, n_kv_head=4, head_dim=32, norm_eps=1e-6),
    "yarn": dict(norm="rmsnorm", mlp="swiglu", tie_embeddings=False, rope_scaling=(
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}')),
    "mistral": dict(norm="rmsnorm", mlp="swiglu", tie_embeddings=False, n_kv_head=4, sliding_window=300),
    "olmo3": dict(norm="rmsnorm", mlp="swiglu", tie_embeddings=False, norms="behind", qk_norm=True,
                  qk_norm_over="all", sliding_window=700, layer_types="sliding,full"),
    "gemma3": dict(norm="rmsnorm", mlp="geglu", norms="both", qk_norm=True, scale_embeddings=True,
                   n_kv_head=4, rope_theta=1e6, rope_local_theta=1e4, sliding_window=150,
                   layer_types="full,sliding"),
    "smollm3": dict(norm="rmsnorm", mlp="swiglu", n_kv_head=4, layer_types="full,full-nope"),
    "phi4": dict(norm="rmsnorm", mlp="swiglu", n_kv_head=4, partial_rotary_factor=0.75)}
LAYOUTS = [dict(), dict(), dict(tp=2), dict(cp=2), dict(cp=2, context_parallel="ulysses"), dict(gpus=2),
           dict(tp=2, tensor_parallel="metp"), dict(pp=2), dict(tp=2, cp=2), dict(cp=4), dict(tp=4),
           dict(tp=2, cp=2, tensor_parallel="metp"), dict(pp=2, msp=True), dict(pp=2, tp=2),
           dict(cp=2, gpus=4), dict(tp=2, gpus=4), dict(cp=3), dict(pp=4), dict(pp=2, cp=2)]
EIGHT = [dict(tp=8), dict(cp=8), dict(tp=4, cp=2), dict(tp=2, cp=2, gpus=8), dict(tp=2, cp=2, pp=2),
         dict(tp=8, tensor_parallel="metp"), dict(tp=4, cp=2, tensor_parallel="metp"),
         dict(cp=8, context_parallel="ulysses"), dict(pp=4, tp=2, msp=True), dict(gpus=8)]
MODES = [dict(), dict(activation="keep"), dict(activation="recompute"), dict(activation="swap"),
         dict(alpha=0.25), dict(alpha=0.0), dict(alpha_mode="paper")]
PRECISIONS = [dict(), dict(), dict(), dict(dtype="bfloat16"), dict(dtype="bfloat16", matmul="fp8")]


def config_of(seed: int, number: int, cases: int) -> dict:
    """Draws the keys of a case; the last ten have eight ranks."""
    rng = random.Random(f"{seed}/{number}")
    eighth = cases - number
    layout = EIGHT[eighth - 1] if eighth <= len(EIGHT) else rng.choice(LAYOUTS)
    keys = dict(n_layer=rng.choice((2, 4, 12)), n_head=8, n_embd=512, block_size=rng.choice((4096, 65536)),
                vocab_size=rng.choice((32000, 50257)), batch_size=rng.choice((1, 1, 2)))
    if layout.get("cp") == 3:
        keys["block_size"] = keys["block_size"] // 4 * 3
    keys |= FAMILIES[rng.choice([*FAMILIES])] | layout | rng.choice(MODES) | rng.choice(PRECISIONS)
    stages = keys.get("pp", 1)
    keys["n_layer"] = max(keys["n_layer"], stages)
    keys["subsequences"] = rng.choice(("auto", 1, 2, 16)) if stages == 1 else rng.choice((4, 16))
    if keys["subsequences"] not in ("auto", 1):
        keys["subsequence_cut"] = rng.choice(("auto", "equal", "flops"))
        keys["unit_order"] = rng.choice(("auto", "layer", "subsequence")) if stages == 1 else "subsequence"
    if stages == 1 and keys.get("unit_order", "auto") != "subsequence" and rng.random() < 0.3:
        keys["states"] = rng.choice(("sharded", "host"))
    elif rng.random() < 0.15:
        keys["optimizer_device"] = "cpu"
    world = keys.get("gpus", 1)
    ranks = keys.get("tp", 1) * keys.get("cp", 1) * stages
    if rng.random() < 0.3:
        keys["gradient_accumulation_steps"] = 2 * max(1, world // ranks)
    if keys.get("qk_norm_over") == "all" and keys.get("tensor_parallel") == "metp":
        keys.pop("qk_norm_over")  # which METP refuses
    if keys.get("tp", 1) > keys.get("n_kv_head", 8) and keys.get("tensor_parallel") != "metp":
        keys.pop("n_kv_head")
    if rng.random() < 0.3:
        keys |= dict(documents=True, pack=rng.choice(("best_fit", "in_order")))
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    path = Path(args.out or "/dev/null")
    stored = json.loads(path.read_text()) if args.out and path.exists() else {}
    done = {case["number"]: case for case in stored.get("done", ())}
    for number in [int(n) for n in args.only.split(",") if n] or range(args.cases):
        if number in done and not args.only:
            continue  # an earlier run of the bench has got so far
        keys = config_of(args.seed, number, args.cases)
        argv = [f"--{name}={value}" for name, value in keys.items()]
        said, told, before = io.StringIO(), io.StringIO(), resource.getrusage(resource.RUSAGE_CHILDREN)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            code = run(verify, [*argv, "--json"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        out = json.loads(said.getvalue()) if said.getvalue() else {}
        wrong = [f"{f['check']}: {f['text']}" for f in out.get("checks", []) if not f["right"]]
        wrong += [line for line in told.getvalue().splitlines() if line.startswith("error")]
        worst = {}
        for f in out.get("checks", []):
            name = f"{f['check']}, at most {f['bound']:g}"
            worst[name] = max(worst.get(name, 0.0), f["worst"])
        done[number] = dict(number=number, keys=keys, code=code, wrong=wrong, cpu_s=cpu_s,
                            ranks=out.get("ranks"), worst=worst)
        print(f"{number:3} {code} {cpu_s:6.1f} s  {' '.join(argv)}", *wrong[:3], sep="\n      ", flush=True)
        cases = [*done.values()]
        if args.out:
            path.write_text(json.dumps(dict(
                machine=machine(), seed=args.seed, cases=len(cases), right=sum(not d["code"] for d in cases),
                eight_ranks=sum(d["ranks"] == 8 for d in cases), cpu_s=sum(d["cpu_s"] for d in cases),
                done=cases), indent=1) + "\n")


if __name__ == "__main__":
    main()
