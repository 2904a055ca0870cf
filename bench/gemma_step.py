"""CPU seconds of a training step in Gemma 3 1B's shape at 8,192 tokens, six layers and a small vocabulary,
fp32: memo beside transformers, in turns, each in a process of its own, for both at once do not fit 24 GiB.

    python -m bench.gemma_step [--rounds=3]

Writes bench/results/gemma_step.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import process_time

import torch

from bench.cpu_step import autograd_step, memo_step
from bench.machine import machine
from memo.config.layout import Layout
from testing.rivals import gemma3_of_transformers

SHAPE = dict(n_layer=6, n_embd=1152, n_head=4, n_kv_head=1, head_dim=256, n_inner=6912, vocab_size=4096,
             block_size=8192, batch_size=1, norm="rmsnorm", norms="both", mlp="geglu", qk_norm=True,
             scale_embeddings=True, query_scalar=256, rope_theta=1e6, rope_local_theta=1e4,
             sliding_window=512, layer_types="sliding*5,full", norm_eps=1e-6, subsequences=1)


def one(name):
    cfg = Layout(**SHAPE)
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, 1, cfg.block_size))
    if name == "memo":
        step = memo_step(cfg, tokens, targets)
    else:
        net = gemma3_of_transformers(cfg)
        step = autograd_step(net, lambda: net(input_ids=tokens, labels=tokens).loss)
    seconds = []
    for _ in range(3):  # the first warms up
        begin = process_time()
        step()
        seconds.append(process_time() - begin)
    print(json.dumps(seconds[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["memo", "transformers"])
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    found = dict(memo=[], transformers=[])
    for _ in range(args.rounds):
        for name, seconds in found.items():
            done = subprocess.run([sys.executable, "-m", "bench.gemma_step", f"--one={name}"], check=True,
                                  capture_output=True, text=True)
            seconds += json.loads(done.stdout.splitlines()[-1])
            print(name, seconds, flush=True)
    ratio = median(found["transformers"]) / median(found["memo"])
    print(f"transformers over memo: {ratio:.3f}")
    out = Path(__file__).parent / "results" / "gemma_step.json"
    out.write_text(json.dumps(dict(machine=machine(), shape=SHAPE, cpu_seconds=found, ratio=ratio), indent=1)
                   + "\n")


if __name__ == "__main__":
    main()
