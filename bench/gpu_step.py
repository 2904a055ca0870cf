"""Tokens/s, MFU and time over the floor of a whole training step on a CUDA GPU, bf16.

    python -m bench.gpu_step [--models=124m,7b_4_layers] [--lengths=4096,8192,16384,32768,65536] [--steps=5]

`124m` is GPT-2 small, `7b_4_layers` four layers of the 7B model. The floor is the time of the step's own
matrix products and attention kernels, launched alone. A length that does not fit is recorded as "oom". Before
anything is timed, the backward is compared with autograd's at S = 512. Writes bench/results/gpu_step.json.
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path

import torch

from bench.floor import Kernels
from bench.machine import machine
from memo import memory
from memo.config import Config
from memo.device import device_name
from memo.estimate.hardware import peak_flops_per_s
from memo.flat import views
from memo.formulas import flops_per_sample, mfu, percent
from memo.optim import Optimizer
from model import GPT, initial_weights
from testing.twin import Twin

MODELS = {"124m": dict(n_layer=12, n_head=12, n_embd=768),
          "7b_4_layers": dict(n_layer=4, n_head=32, n_embd=4096)}


def build(cfg):
    model = GPT(cfg, "cuda", torch.bfloat16)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, "cuda"))
    model.reserve(1, cfg.block_size)
    memory.plan_memory(cfg, model)
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, 1, cfg.block_size), device="cuda")
    return model, optimizer, tokens, targets


def check_gradients(keys):
    """Errors: a gradient that is more than 2e-2 away from autograd's in fp32."""
    cfg = Config(**keys, block_size=512, vocab_size=1000)
    model, _, tokens, targets = build(cfg)
    model.forward(tokens, targets, scale=1.0)
    model.backward()
    twin = Twin(cfg).cuda().load((n, w.float()) for n, w in views(model.layout, model.params).items())
    twin(tokens, targets).backward()
    worst = twin.worst_gradient(model)
    if not worst[0] <= 2e-2:
        sys.exit(f"gradient of {worst[1]} is {worst[0]:.1e} away from autograd's; nothing is timed")
    return worst[0]


def milliseconds(call, repeats):
    """Median over `repeats` calls, from events on the stream."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def measure(keys, S, steps):
    """One row: seconds of the step and of its floor, tokens/s, MFU, peak bytes."""
    cfg = Config(**keys, block_size=S, vocab_size=50257)
    torch.cuda.reset_peak_memory_stats()
    model, optimizer, tokens, targets = build(cfg)

    def step():
        model.forward(tokens, targets, scale=1.0)
        model.backward()
        model.arena.run("clip", optimizer.clip, 1.0)
        model.arena.run("optimizer", optimizer.step, 1e-5)
        model.arena.settle()

    step()
    step_s = milliseconds(step, steps) / 1e3
    peak_bytes = torch.cuda.max_memory_allocated()
    try:
        with Kernels() as kernels:
            step()
        floor_s = milliseconds(kernels.run, steps) / 1e3
    except torch.OutOfMemoryError:  # the recorded kernels keep their operands
        floor_s = None
    tokens_per_s = S / step_s
    return dict(S=S, attention=model.attention.name, step_s=step_s, floor_s=floor_s,
                over_floor=floor_s and step_s / floor_s, tokens_per_s=tokens_per_s,
                mfu=mfu(cfg, tokens_per_s, peak_flops_per_s(device_name(torch.device("cuda")))),
                model_flops=flops_per_sample(cfg), device_peak_bytes=peak_bytes)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/gpu_step.py needs a CUDA GPU")
    rows = []
    print(f"{'model':12}{'S':>8}{'step s':>10}{'tokens/s':>12}{'MFU':>8}{'over floor':>12}{'peak GiB':>10}")
    for name in args.models.split(","):
        worst = check_gradients(MODELS[name])
        for S in map(int, args.lengths.split(",")):
            gc.collect()
            torch.cuda.empty_cache()
            try:
                row = measure(MODELS[name], S, args.steps)
                print(f"{name:12}{S:8}{row['step_s']:10.3f}{row['tokens_per_s']:12.0f}"
                      f"{percent(row['mfu']):>8}{row['over_floor'] or float('nan'):12.3f}"
                      f"{row['device_peak_bytes'] / 2**30:10.1f}", flush=True)
            except torch.OutOfMemoryError:
                row = dict(S=S, oom=True)
                print(f"{name:12}{S:8}{'oom':>10}", flush=True)
            rows.append(dict(model=name, gradient_error=worst, **row))
    out = Path(__file__).parent / "results" / "gpu_step.json"
    out.write_text(json.dumps(dict(machine=machine(), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
