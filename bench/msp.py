"""What is left of a pipeline's bubbles where stages that have nothing of their own to compute help others?

    python -m bench.msp

With free messages, in the simulator of all stages' schedules; and in gloo runs whose units sleep in the place
of computing, by their rows. Writes bench/results/msp.json.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch

from bench.machine import machine
from memo.bubbles import schedules_of
from memo.config import Config
from memo.layout import stage_of
from memo.msp import Shares, shares_of
from memo.parallel.mesh import open_mesh
from memo.parallel.pp import times_of_stages
from memo.swap.placing import placed
from memo.swap.spans import busy_s, length_s
from model import GPT
from testing.ranks import pool

# stages, subsequences, seconds that a unit sleeps, twice as long in the backward: more where more processes
# send each other messages on the same cores
PIPELINES = (4, 8, 0.1), (4, 16, 0.1), (8, 32, 0.4), (8, 64, 0.3)
LAYERS = 80  # of the 65B model
WORK = {"forward": 1.0, "backward": 2.0}


def config(p, N, layers, **keys):
    return Config(**dict(n_layer=layers, n_head=1, n_embd=16, vocab_size=150, block_size=2 * p * N, pp=p,
                         subsequences=N, unit_order="subsequence", subsequence_cut="equal", activation="keep",
                         msp=True) | keys)


def equal_shares(cfg) -> Shares:
    """Those where every stage computes as many rows in each slot."""
    rows = cfg.block_size // cfg.subsequences
    return shares_of([cfg.n_layer // cfg.pp] * cfg.pp, [rows] * cfg.subsequences, 1, lambda x, n: float(n),
                     lambda stage, x: 1 / cfg.pp)


def simulated(p, N):
    """The bubble over the computing where units take WORK, by rows."""
    cfg = config(p, N, LAYERS)
    cfg = replace(cfg, shares=equal_shares(cfg))
    placements = [placed(replace(cfg, stage=k), 10**9, cfg.block_size) for k in range(p)]
    rows = cfg.block_size // N

    def seconds(k, step):
        if step.kind not in WORK:
            return 0.0
        return WORK[step.kind] * placements[k].rows(placements[k].number[step.unit]) / rows
    times = times_of_stages(schedules_of(placements), seconds)
    end = max(end for one in times for _, end in one.spans.values())
    return end / (3 * LAYERS // p * N) - 1


def slept(host, cfg, forward_s):
    """(seconds of a stage's step, those in which it computes) where units sleep, by their rows."""
    cfg, rows = stage_of(cfg, host.rank, host.size), cfg.block_size // cfg.subsequences
    torch.set_num_threads(1)
    mesh = open_mesh(host, 1, 1, torch.device("cpu"), pp=cfg.pp, tied=cfg.ties_stages, msp=cfg.msp)
    model = GPT(cfg, torch.device("cpu"), torch.float32, mesh=mesh)
    tokens = torch.zeros(1, cfg.block_size, dtype=torch.int64)
    model.reserve(*tokens.shape)

    def sleep(s, block, x, *others):
        time.sleep(s * len(x) / rows)
    sleeps = dict(unit_forward=lambda *args: sleep(forward_s, *args),
                  unit_backward=lambda *args: sleep(2 * forward_s, *args))
    nothing = dict.fromkeys(("embed", "head", "embed_backward"), lambda *args: None)
    with patch.multiple(GPT, **{name: staticmethod(f) for name, f in (sleeps | nothing).items()}):
        host.max(0)  # all begin together
        model.forward(tokens, tokens, scale=1.0)
        model.backward()
    spans = model.swap.streams.timeline.take()
    model.close()
    mesh.close()
    return length_s(spans), busy_s(spans)


def measured(p, N, forward_s):
    """(the bubble, what the ranks oversleep) over the computing, in ranks that sleep."""
    cfg = config(p, N, LAYERS)
    with patch("testing.ranks.TIMEOUT_S", 3600):
        found = pool(p).run(slept, replace(cfg, shares=equal_shares(cfg)), forward_s)
    computing, busy = 3 * LAYERS // p * N * forward_s, mean(busy for _, busy in found)
    return max(length for length, _ in found) / busy - 1, busy / computing - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = []
    for p, N, forward_s in PIPELINES:
        bubble, late = measured(p, N, forward_s)
        rows.append(dict(pp=p, subsequences=N, forward_s=forward_s, formula=(p - 1) / N,
                         simulated=simulated(p, N), bubble=bubble, oversleeping=late))
        print(rows[-1], flush=True)
    path = Path(__file__).parent / "results/msp.json"
    result = dict(machine=machine(), layers=LAYERS, bubbles=rows)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
