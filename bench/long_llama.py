"""A small Llama, trained at 4,096 tokens, extended to 16,384 with YaRN, and loaded by transformers.

    python -m bench.long_llama [--out_dir=out/long_llama] [--iters=300] [--more_iters=100]

The way of docs/extend.md with 10M parameters on the stdlib data (python data/stdlib/prepare.py makes it):
train.py, memo.evaluate, memo.convert to-hf, train.py from that folder with a rope_scaling, memo.evaluate,
to-hf again. Then transformers loads the last folder, and its losses of 16,384 tokens stand beside memo's. A
second start goes on behind the commands that are done. An hour on two CPU cores. Writes
bench/results/long_llama.json and .png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bench.machine import machine
from memo.evaluate import set_up_evaluation, token_losses
from memo.plots.figures import plain
from memo.run.loggers import read_metrics
from memo.system.launch import connected, read_launch

ROOT = Path(__file__).parents[1]
SHORT, LONG = 4096, 16384
MODEL = dict(n_layer=2, n_embd=512, n_head=4, n_kv_head=2, head_dim=64, n_inner=2816, norm="rmsnorm",
             mlp="swiglu", norm_eps=1e-5, tie_embeddings=False)
RUN = dict(dataset="stdlib", device="cpu", batch_size=1, eval_interval=50, eval_iters=4, save_interval=50,
           warmup_iters=20)
YARN = dict(rope_type="yarn", factor=LONG / SHORT, original_max_position_embeddings=SHORT)


def keys(values):
    return [f"--{k}={json.dumps(v) if isinstance(v, dict) else v}" for k, v in values.items()]


def commands(out, iters, more_iters):
    """[(the file that says that the command is done, its arguments)]."""
    short, long = out / "short", out / "long"
    lengths = [f"--lengths={SHORT},{LONG}", "--batches=4", "--needle_depths=0,0.5,1"]
    start = MODEL | RUN | dict(out_dir=short, block_size=SHORT, max_iters=iters, learning_rate=6e-4,
                               min_lr=6e-5)
    more = RUN | dict(out_dir=long, init_from=f"hf:{short / 'hf'}", rope_scaling=YARN, block_size=LONG,
                      max_iters=more_iters, learning_rate=3e-4, min_lr=3e-5)
    return [
        (short / "ckpt" / str(iters), ["train.py", *keys(start)]),
        (short / "evaluate.json", ["-m", "memo.evaluate", short, *lengths]),
        (short / "hf" / "config.json", ["-m", "memo.convert", "to-hf", short, short / "hf"]),
        (long / "ckpt" / str(more_iters), ["train.py", *keys(more)]),
        (long / "evaluate.json", ["-m", "memo.evaluate", long, *lengths]),
        (long / "hf" / "config.json", ["-m", "memo.convert", "to-hf", long, long / "hf"]),
    ]


def losses_here(out):
    """Of LONG tokens of the validation split, by token: memo's from the checkpoint, transformers' from what
    to-hf wrote."""
    from transformers import AutoModelForCausalLM
    with connected(read_launch()) as host:
        asked, model = set_up_evaluation([str(out), f"--lengths={LONG}", "--device=cpu"], read_launch(), host)
        ids = torch.from_numpy(asked.questions.data.tokens["val"][:LONG + 1].astype("int64"))
        ours = torch.from_numpy(token_losses(model, ids, LONG))
        model.close()
    hf = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        logits = hf(input_ids=ids[None, :-1]).logits[0]
    theirs = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    return ours, theirs.double()


def plot(before, after, path):
    fig, ax = plt.subplots(figsize=(9, 4.5), dpi=130, layout="constrained")
    for found, color, label in ((before, "#d95f02", f"trained at {SHORT:,}"),
                                (after, "#1f6fb4", f"extended to {LONG:,} with YaRN")):
        by = found["loss_by_position"]
        ax.stairs(by["loss"], [by["end"][0] / 2, *by["end"]], baseline=None, color=color, lw=2, label=label)
    ax.axvline(SHORT, color="grey", ls=":", lw=1.2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(by["end"], [f"{n:,}" for n in by["end"]])
    ax.set(xlabel="position in the sequence, tokens", ylabel="loss (nats per token)",
           title="A Llama of 10M parameters, text of the validation split")
    ax.legend(frameon=False)
    plain(ax)
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", default="out/long_llama")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--more_iters", type=int, default=100)
    args = parser.parse_args()
    out = ROOT / args.out_dir
    for done, command in commands(out, args.iters, args.more_iters):
        if not done.exists():
            print(*command, flush=True)
            subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT)
    before, after = (json.loads((out / name / "evaluate.json").read_text()) for name in ("short", "long"))
    ours, theirs = losses_here(out / "long")
    curves = {name: [row["loss"] for row in read_metrics(out / name / "metrics.jsonl")]
              for name in ("short", "long")}
    found = dict(machine=machine(), model=MODEL, rope_scaling=YARN, before=before, after=after,
                 training_loss=curves, memo_loss=ours.mean().item(), transformers_loss=theirs.mean().item(),
                 greatest_difference_of_a_token=(ours - theirs).abs().max().item())
    results = ROOT / "bench" / "results"
    (results / "long_llama.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(before, after, results / "long_llama.png")
    print(f"the same {LONG:,} tokens: memo {ours.mean():.6f}, transformers {theirs.mean():.6f}")


if __name__ == "__main__":
    main()
