"""Peak memory of one training step against the context length: it must grow linearly, without the full
logits. Then a Llama's beside that of transformers, at 8,192 tokens.

    python -m bench.memory [--lengths=4096,8192,16384,32768] [--vocab_size=50257]

Every step runs in a process of its own. Writes bench/results/memory.json. The full logits of S tokens would
be S * V * 4 bytes.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from bench.cpu_step import MODELS, autograd_step
from bench.machine import machine
from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights
from testing.rivals import llama_of_transformers

ROOT = Path(__file__).parents[1]
LAYERS, HEADS, HIDDEN = 2, 4, 256
LLAMA_LENGTH = 8192


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def config_of(who, S, V):
    shape = dict(n_layer=LAYERS) if who == "gpt" else dict(n_layer=4) | MODELS["llama"]
    return Layout(n_head=HEADS, n_embd=HIDDEN, block_size=S, vocab_size=V, **shape)


def one_step(who, S, V):
    """(peak RSS before, after) one whole step at context S, in bytes, of memo's gpt or llama, or of the llama
    of transformers."""
    cfg = config_of(who, S, V)
    tokens, targets = torch.randint(0, V, (2, 1, S))
    if who == "transformers":
        import transformers  # noqa: F401, which takes memory of its own
        before = peak_bytes()
        model = llama_of_transformers(cfg)
        autograd_step(model, lambda: model(input_ids=tokens, labels=tokens).loss)()
        return before, peak_bytes()
    before = peak_bytes()
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, 0, "cpu"))
    model.forward(tokens, targets, scale=1.0)
    model.backward()
    optimizer.clip(1.0)
    optimizer.step(1e-4)
    return before, peak_bytes()


def step_bytes(who, S, V):
    """Bytes by which a step raises the peak of a process of its own."""
    command = [sys.executable, "-m", "bench.memory", f"--one={who}", f"--lengths={S}", f"--vocab_size={V}"]
    before, after = json.loads(subprocess.run(command, stdout=-1, text=True, check=True, cwd=ROOT).stdout)
    return after - before


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    V, lengths = args.vocab_size, [int(n) for n in args.lengths.split(",")]
    if args.one:
        print(json.dumps(one_step(args.one, lengths[0], V)))
        return
    rows = []
    print(f"{'S':>7}{'peak RSS of the step':>22}{'bytes a token more':>20}{'the table says':>16}"
          f"{'full logits':>13}   (MiB)")
    for S in lengths:
        skeletal = LAYERS * sum(t.nbytes for t in tensors_of(config_of("gpt", S, V), 4).values())
        row = dict(S=S, V=V, step_bytes=step_bytes("gpt", S, V), skeletal_bytes=skeletal,
                   full_logits_bytes=4 * S * V)
        if rows:
            row["bytes_per_token_more"] = (row["step_bytes"] - rows[-1]["step_bytes"]) / (S - rows[-1]["S"])
        rows.append(row)
        more = row.get("bytes_per_token_more", float("nan"))
        print(f"{S:7}{row['step_bytes'] / 2**20:22.0f}{more:20.0f}{skeletal / S:16.0f}"
              f"{4 * S * V / 2**20:13.0f}", flush=True)
    ours, theirs = (step_bytes(who, LLAMA_LENGTH, V) for who in ("llama", "transformers"))
    print(f"Llama (L4, C256, H4, Hkv2, F704) at {LLAMA_LENGTH}: memo {ours / 2**20:.0f} MiB, transformers "
          f"{theirs / 2**20:.0f} MiB, {ours / theirs:.2f}")
    llama = dict(S=LLAMA_LENGTH, V=V, memo_bytes=ours, transformers_bytes=theirs)
    out = ROOT / "bench" / "results" / "memory.json"
    found = dict(machine=machine(), L=LAYERS, C=HIDDEN, rows=rows, llama=llama)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
