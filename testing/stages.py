"""Stages whose units sleep in the place of computing, in real ranks, and their bubble in the simulator."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from memo.config.layout import Layout
from memo.config.msp import Shares, even_parts, shares_of
from memo.decide.where import placed
from memo.layer.edges import Edges
from memo.parallel.mesh import open_lanes, open_mesh
from memo.schedule.simulate import times_of_stages
from memo.schedule.spans import Span
from memo.schedule.step import Op, Step
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT

WORK = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}  # of a unit of a whole subsequence
LAYERS = 80  # those of the 65B model


def equal_shares(layers: Sequence[int], cuts: Sequence[int], multiple: int = 1) -> Shares:
    """The Shares where every stage computes as much in each slot, if rows cost the same."""
    return shares_of(layers, cuts, multiple, lambda x, n: float(n), even_parts(len(layers), len(cuts)))


def helped_config(p: int, N: int, n_layer: int = LAYERS) -> Layout:
    """p stages that share so evenly, N subsequences of 2 p rows."""
    rows = 2 * p
    return Layout(n_layer=n_layer, n_head=1, n_embd=16, vocab_size=150, block_size=rows * N, pp=p,
                  subsequences=N, unit_order="subsequence", subsequence_cut="equal", activation="keep",
                  msp=True, shares=equal_shares([n_layer // p] * p, [rows] * N))


def simulated_bubble(cfg: Layout) -> float:
    """Over the computing, where units take WORK by their rows and messages nothing."""
    N, placements = cfg.subsequences, [placed(one, 10**9) for one in cfg.every_stage]

    def seconds(k: int, step: Step) -> float:
        if step.op not in WORK:
            return 0.0
        return WORK[step.op] * placements[k].rows(placements[k].number[step.unit]) * N / cfg.block_size
    times = times_of_stages([p.schedule() for p in placements], seconds)
    end = max(end for one in times for _, end in one.spans.values())
    return end / (sum(WORK.values()) * cfg.n_layer / cfg.pp * N) - 1


def slept(host: Axis, cfg: Layout, forward_s: float, passes: int = 1) -> list[Span]:
    """The spans of a stage in the last of so many passes, where a unit sleeps as long as WORK says, by its
    rows."""
    cfg, rows = cfg.of_rank(host.rank, host.size), cfg.block_size // cfg.subsequences
    torch.set_num_threads(1)
    mesh = open_mesh(host, 1, 1, torch.device("cpu"), pp=cfg.pp, tied=cfg.ties_stages)
    open_lanes(mesh, cfg.shares, torch.device("cpu"))
    model = Model(GPT, cfg, torch.device("cpu"), torch.float32, mesh=mesh)
    tokens = torch.zeros(1, cfg.block_size, dtype=torch.int64)
    model.reserve(*tokens.shape)

    def sleep(work: float, block: object, x: torch.Tensor, *others: object) -> None:
        time.sleep(work * forward_s * x.numel() / x.shape[-1] / rows)
    units: dict[str, Any] = {f"unit_{op.value}": staticmethod(partial(sleep, work))
                             for op, work in WORK.items()}
    nothing: dict[str, Any] = dict.fromkeys(("embed", "head", "embed_backward"), lambda *args: None)
    with patch.multiple(Model, **units), patch.multiple(Edges, **nothing):
        for _ in range(passes):
            model.swap.streams.timeline.take()
            host.max(0)  # all begin together
            model.forward(tokens, tokens, scale=1.0)
            model.backward()
    spans = model.swap.streams.timeline.take()
    model.close()
    mesh.close()
    return spans
