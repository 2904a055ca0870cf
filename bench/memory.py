"""Peak memory of one training step against the context length: it must grow linearly, without the full
logits.

    python -m bench.memory [--lengths=4096,8192,16384,32768] [--vocab_size=50257]

Every length runs in a process of its own. Writes bench/results/memory.json. The full logits of S tokens would
be S * V * 4 bytes.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from bench.machine import machine
from memo.config import Config
from memo.layer import gpt_layer
from memo.optim import Optimizer
from model import GPT, initial_weights

ROOT = Path(__file__).parents[1]
LAYERS, HEADS, HIDDEN = 2, 4, 256


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_step(S, V):
    """(peak RSS before, after) one whole step at context S, in bytes."""
    cfg = Config(n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN, block_size=S, vocab_size=V)
    tokens, targets = torch.randint(0, V, (2, 1, S))
    before = peak_bytes()
    model = GPT(cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, "cpu"))
    model.forward(tokens, targets, scale=1.0)
    model.backward()
    optimizer.clip(1.0)
    optimizer.step(1e-4)
    return before, peak_bytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    V = args.vocab_size
    if args.one:
        print(json.dumps(one_step(args.one, V)))
        return
    rows = []
    print(f"{'S':>7}{'peak RSS of the step':>22}{'bytes a token more':>20}{'the table says':>16}"
          f"{'full logits':>13}   (MiB)")
    for S in map(int, args.lengths.split(",")):
        command = [sys.executable, "-m", "bench.memory", f"--one={S}", f"--vocab_size={V}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        before, after = json.loads(done.stdout)
        skeletal = LAYERS * sum(t.nbytes for t in gpt_layer(HIDDEN, HEADS).tensors(1, S, 4).values())
        row = dict(S=S, V=V, step_bytes=after - before, skeletal_bytes=skeletal, full_logits_bytes=4 * S * V)
        if rows:
            row["bytes_per_token_more"] = (row["step_bytes"] - rows[-1]["step_bytes"]) / (S - rows[-1]["S"])
        rows.append(row)
        more = row.get("bytes_per_token_more", float("nan"))
        print(f"{S:7}{row['step_bytes'] / 2**20:22.0f}{more:20.0f}{skeletal / S:16.0f}"
              f"{4 * S * V / 2**20:13.0f}", flush=True)
    out = ROOT / "bench" / "results" / "memory.json"
    out.write_text(json.dumps(dict(machine=machine(), L=LAYERS, C=HIDDEN, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
