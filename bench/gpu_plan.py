"""The memory plan beside torch's default allocator and beside expandable segments, on one CUDA GPU, 7B-shaped
layers, bf16.

    python -m bench.gpu_plan [--lengths=16384,65536] [--layers=4] [--steps=3] [--room_gb=48] [--seconds=0]
                             [--out=bench/results/gpu_plan.json]

Every measurement is a process of its own. First a check, with deterministic kernels and the plan in guard
mode: three steps' losses and gradient norms are those without it, to the bit, no request misses, no live
tensors overlap. Then for each length, the three taking turns: tokens/s (but for the first round), peak bytes
reserved and allocated, and misses; `mixed` has the lengths in turns in one process. Then the longest context
that each can train, in steps of 8,192 tokens, on a device of --room_gb (1e9 bytes; a small one, so that the
search is short), keep, no swapping: model states, activations and temporary tensors all grow into the same
room. Nothing new starts once --seconds are over. --device=cpu --n_embd=64 tries the script.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SYSTEMS = {"plan": ("bilevel", ""), "default": ("off", ""), "expandable": ("off", "expandable_segments:True")}
ROOT = Path(__file__).parents[1]


# --- one measurement: a process of its own ---

def train(job):
    """`steps` training steps at each of the job's lengths in turns -> figures."""
    import torch

    from memo import memory
    from memo.config import Config
    from memo.device import pick_device, set_deterministic, synchronize
    from memo.optim import Optimizer
    from model import GPT, initial_weights

    C, longest = job["n_embd"], max(job["lengths"])
    cfg = Config(n_layer=job["layers"], n_embd=C, n_head=max(1, C // 128), vocab_size=50257,
                 block_size=longest, activation="keep", device=job["device"], memory_plan=job["plan"],
                 memory_plan_check=job["check"])
    set_deterministic(job["deterministic"])
    device, dtype = pick_device(cfg)
    cuda = device.type == "cuda"
    if cuda and job["room_gb"]:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["room_gb"] * 1e9 / whole))
    model = GPT(cfg, device, dtype)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, device))
    model.reserve(1, longest)
    memory.plan_memory(cfg, model)
    losses, norms, seconds, tokens_done, warm = [], [], 0.0, 0, len(job["lengths"]) if job["steps"] > 1 else 0
    for step in range(job["steps"] * len(job["lengths"])):
        S = job["lengths"][step % len(job["lengths"])]
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(cfg.vocab_size, (2, 1, S), generator=generator).to(device)
        synchronize(device)
        start = time.perf_counter()
        loss = model.forward(tokens, targets, 1.0)
        model.backward()
        norm = model.arena.run("clip", optimizer.clip, 1.0)
        model.arena.run("optimizer", optimizer.step, 1e-4)
        synchronize(device)
        if step >= warm:
            seconds, tokens_done = seconds + time.perf_counter() - start, tokens_done + S
        losses.append(loss.item())
        norms.append(norm.item())
        model.arena.settle()
    stats = model.arena.stats()
    figures = dict(tokens_per_s=tokens_done / seconds, losses=losses, grad_norms=norms, misses=stats.misses,
                   arena_bytes=stats.arena_bytes)
    if cuda:
        figures |= dict(reserved_bytes=torch.cuda.max_memory_reserved(),
                        allocated_bytes=torch.cuda.max_memory_allocated(),
                        reorganisations=torch.cuda.memory_stats()["num_alloc_retries"])
    return figures


def measure(system, args, lengths, steps, room_gb=0, check=False):
    """The figures of one process, or {"outcome": "oom"}, or {"outcome": its last line}."""
    plan, conf = SYSTEMS[system]
    job = dict(plan=plan, lengths=lengths, steps=steps, room_gb=room_gb, layers=args.layers,
               n_embd=args.n_embd, device=args.device, deterministic=check, check=check and plan != "off")
    command = [sys.executable, "-m", "bench.gpu_plan", f"--job={json.dumps(job)}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf})
    if done.returncode == 0:
        return dict(outcome="ok", **json.loads(done.stdout.splitlines()[-1]))
    oom = "out of memory" in done.stderr or "OutOfMemory" in done.stderr
    return dict(outcome="oom" if oom else (done.stderr.splitlines() or ["?"])[-1])


# --- what is measured ---

def checked(args):
    """Whether plan and default train alike, at two lengths in turns, in guard mode."""
    rows = {system: measure(system, args, [4096, 2048], 3, check=True) for system in ("plan", "default")}
    same = all(r["outcome"] == "ok" for r in rows.values()) and rows["plan"]["misses"] == 0
    errors = [abs(a - b) / (abs(b) or 1) for key in ("losses", "grad_norms")
              for a, b in zip(*(r[key] for r in rows.values()), strict=True)] if same else [float("inf")]
    print(f"check: {'ok' if same else rows}, losses and gradient norms differ by at most {max(errors):.1e}",
          flush=True)
    return max(errors) == 0


def longest(system, args, over):
    """The most tokens, in steps of 8,192, that one step of `system` trains within room_gb."""
    step, low, high = 8192, 0, 1

    def fits(chunks):
        outcome = measure(system, args, [chunks * step], 1, args.room_gb)["outcome"]
        if outcome not in ("ok", "oom"):
            sys.exit(f"{system} at {chunks * step} tokens: {outcome}")
        return outcome == "ok"
    while not over() and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and not over():
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step if high - low == 1 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--n_embd", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--room_gb", type=float, default=48)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "gpu_plan.json"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(train(json.loads(args.job))))
        return
    from bench.machine import machine
    start, rows = time.perf_counter(), []

    def over():
        return args.seconds and time.perf_counter() - start > args.seconds
    if not checked(args):
        sys.exit("the plan does not train like torch's allocator: nothing is measured")
    lengths = [int(S) for S in args.lengths.split(",")]
    for name, turns in [(f"{S:,}", [S]) for S in lengths] + [("mixed", lengths + lengths[::-1])]:
        for system in SYSTEMS:
            if not over():
                rows.append(dict(what=name, system=system, **measure(system, args, turns, args.steps)))
                show(rows[-1])
    for system in SYSTEMS if args.device == "cuda" else ():
        tokens = longest(system, args, over)
        rows.append(dict(what=f"longest in {args.room_gb:g} GB", system=system, outcome="ok", tokens=tokens))
        show(rows[-1])
    result = dict(machine=machine(), layers=args.layers, n_embd=args.n_embd, rows=rows)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def show(row):
    keys = ("tokens", "tokens_per_s", "reserved_bytes", "allocated_bytes", "arena_bytes",
            "reorganisations", "misses")
    print(f"{row['what']:>18} {row['system']:10} {row['outcome']:4}",
          " ".join(f"{k}={row[k]:,.0f}" for k in keys if row.get(k) is not None), flush=True)


if __name__ == "__main__":
    main()
