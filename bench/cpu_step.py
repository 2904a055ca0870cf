"""Tokens/s of a whole training step on the CPU, fp32: memo with its memory plan and without, an autograd
twin, transformers' GPT-2 and Llama, and the floor.

    python -m bench.cpu_step [--threads=2] [--rounds=7] [--models gpt2 default llama]

Whole step: forward, backward, clipping, AdamW. The rivals take turns in one process, there and back; figures
are medians over the rounds. Writes what it finds of these models into bench/results/cpu_step.json.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.floor import Kernels
from bench.machine import machine
from memo.config.layout import Layout
from memo.run import reserve
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.verify.reference import Reference
from model import GPT, initial_weights
from testing.rivals import gpt2_of_transformers, llama_of_transformers

MODELS = {"gpt2": dict(position="learned", bias=True, gelu="tanh"),
          "default": dict(position="rope", bias=False, gelu="exact"),
          "llama": dict(norm="rmsnorm", mlp="swiglu", n_kv_head=2, n_inner=704, tie_embeddings=False)}
SHAPES = ((1024, 4), (8192, 1))
VOCAB = 4096


def autograd_step(module, loss):
    """A plain training step of a torch module: decay on matrices only, foreach clipping, fused AdamW."""
    parts = ([p for p in module.parameters() if (p.dim() >= 2) == matrices] for matrices in (True, False))
    groups = [dict(params=p, weight_decay=d) for p, d in zip(parts, (0.1, 0.0), strict=True)]
    adamw = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step():
        adamw.zero_grad(set_to_none=True)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adamw.step()
    return step


def memo_step(cfg, tokens, targets):
    """A training step of memo on tokens (B, T)."""
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, "cpu"))
    model.reserve(len(tokens), cfg.block_size)
    reserve.plan_memory(cfg, model)

    def step():
        model.forward(tokens, targets, scale=1.0)
        model.backward()
        model.arena.run("clip", optimizer.clip, 1.0)
        model.arena.run("optimizer", optimizer.step, 1e-4)
        model.arena.settle()
    return step


TRANSFORMERS = {"gpt2": gpt2_of_transformers, "llama": llama_of_transformers}


def rivals(cfg, B, name):
    """{name: step} for one case; the floor is recorded from a step of memo."""
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, B, cfg.block_size))
    unplanned = memo_step(replace(cfg, memory_plan="off"), tokens, targets)
    with Kernels() as kernels:
        unplanned()
    twin = Reference(cfg, torch.float32).load(initial_weights(cfg, 0, "cpu"))
    steps = {"memo": memo_step(cfg, tokens, targets), "unplanned": unplanned, "floor": kernels.run,
             "twin": autograd_step(twin, lambda: twin(tokens, targets))}
    if name in TRANSFORMERS:
        hf = TRANSFORMERS[name](cfg)
        steps["transformers"] = autograd_step(hf, lambda: hf(input_ids=tokens, labels=tokens).loss)
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = Path(__file__).parent / "results" / "cpu_step.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    shown = ("memo", "unplanned", "twin", "transformers")
    print(f"{'model':8} {'S':>6} {'B':>2}  " + "".join(f"{n + ' tok/s':>20}" for n in shown)
          + f"{'memo/twin':>11}{'memo/tf':>9}{'memo over floor':>17}{'twin over floor':>17}")
    for name, keys in ((name, MODELS[name]) for name in args.models):
        found[name] = dict(machine=machine(), threads=args.threads, rounds=args.rounds, rows=(rows := []))
        for S, B in SHAPES:
            cfg = Layout(n_layer=4, n_embd=256, n_head=4, block_size=S, batch_size=B,
                         vocab_size=VOCAB, **keys)
            steps = rivals(cfg, B, name)
            times = {n: [] for n in steps}
            for r in range(args.rounds + 1):
                for n, step in list(steps.items())[::-1 if r % 2 else 1]:  # the first finds other caches
                    start = time.perf_counter()
                    step()
                    times[n].append(time.perf_counter() - start)
            s = {n: statistics.median(t[1:]) for n, t in times.items()}  # the first round warms up
            tf = s.get("transformers", float("nan"))
            row = dict(model=name, S=S, B=B, L=4, C=256, H=4, V=VOCAB, seconds=s,
                       tokens_per_s={n: B * S / t for n, t in s.items()},
                       memo_over_twin=s["twin"] / s["memo"], memo_over_floor=s["memo"] / s["floor"],
                       memo_over_unplanned=s["unplanned"] / s["memo"],
                       memo_over_transformers=tf / s["memo"] if tf == tf else None)
            rows.append(row)
            print(f"{name:8} {S:6} {B:2}  " + "".join(f"{B * S / s.get(n, tf):20.0f}" for n in shown)
                  + f"{s['twin'] / s['memo']:11.2f}{tf / s['memo']:9.2f}{s['memo'] / s['floor']:17.2f}"
                    f"{s['twin'] / s['floor']:17.2f}", flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
