"""Each message of a step has its price: the dry run counts what the code sends, and --calibrate measures
it."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from math import inf
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from memo.config.layout import Layout
from memo.decide.step_seconds import step_seconds
from memo.decide.where import Room, place_rows, problem_of
from memo.estimate.pipeline_seconds import embedding_s, head_s
from memo.estimate.unit_seconds import modelled_rates
from memo.run import measure
from memo.schedule.streams import open_streams
from memo.states.passes import Model
from memo.system.hardware import MESSAGES, Machine, Node, Speeds
from model import GPT
from testing.notes import Post, noted_mesh
from testing.ranks import pool
from tests.helpers import CPU, GEMMA, LLAMA, OLMO

KEYS = dict(n_layer=2, n_head=8, n_embd=64, vocab_size=150, block_size=4096, batch_size=2)
FOUR = dict(subsequences=4, unit_order="layer", activation="recompute")  # keys are made again
METP = dict(tensor_parallel="metp")
ULYSSES = dict(context_parallel="ulysses")


@dataclass(frozen=True)
class Counting(Machine):
    """Nothing takes time but messages of one kind, (operation, span, stride): a second each, or a byte."""

    kind: tuple = ()
    by_bytes: bool = False

    def message_s(self, op, nbytes, span, stride=1):
        return (nbytes if self.by_bytes else 1.0) * ((op, span, stride) == self.kind and nbytes > 0)


def prices(model, cfg):
    """{(operation, span, stride): (messages, bytes)} that the dry run counts for a micro batch of the
    model."""
    swap, itemsize = model.swap, model.dtype.itemsize
    free = Speeds({"memory": [(1, inf)]}, itemsize=itemsize)
    memory, node = None if model.device.type == "cpu" else 1, Node(8, 1, inf, inf, inf, inf)

    def price(kind, by_bytes):
        machine = Counting("free", node, memory, None, free, capability=(9, 0), kind=kind, by_bytes=by_bytes)
        units = modelled_rates(cfg, machine, itemsize).units
        of_step = step_seconds(swap.placement, swap.tensors, units, inf)
        ends = embedding_s(cfg, machine, itemsize), head_s(cfg, machine, itemsize, 1.0)
        return sum(map(of_step, swap.placement.schedule())) + sum(ends)
    kinds = product(MESSAGES, (2, 4), (1, 2))
    found = {kind: (price(kind, False), price(kind, True)) for kind in kinds}
    return {kind: pytest.approx(both) for kind, both in found.items() if any(both)}


def sent(program):
    """{(operation, span, stride): (messages, bytes that a rank sends)} of a program's posts: see
    Machine.message_s. What is summed for all ranks is a scattered sum and a gather."""
    found = defaultdict(list)
    for post in (step for step in program if isinstance(step, Post)):
        n, (first, second, *_) = len(post.communicator.ranks), post.communicator.ranks
        stride = second - first
        part = post.nbytes * (n - 1) / n
        parts = dict(gather=dict(gather=n * part), scatter_sum=dict(scatter=part),
                     exchange=dict(exchange=part), sum=dict(scatter=part, gather=part))
        for op, nbytes in parts.get(post.kind, {post.kind: post.nbytes}).items():
            found[op, n * stride, stride].append(nbytes)
    return {kind: (len(each), sum(each)) for kind, each in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    dict(tp=2, device="cpu", block_size=1024), dict(tp=2, matmul="fp8"), dict(tp=4, activation="recompute"),
    dict(cp=4), ULYSSES | dict(tp=2, cp=2), LLAMA | ULYSSES | dict(cp=4), FOUR | dict(tp=2, cp=2),
    FOUR | LLAMA | ULYSSES | dict(cp=4), FOUR | dict(tp=2, matmul="fp8", qk_norm=True),
    FOUR | OLMO | dict(tp=2, cp=2), OLMO | dict(tp=2, matmul="fp8", head_dim=16, n_inner=128),
    METP | dict(tp=2, bias=True), METP | LLAMA | dict(tp=4, qkv_bias=True),
    METP | dict(tp=2, cp=2, activation="recompute"),
    METP | dict(tp=2, matmul="fp8", bias=True, activation="recompute"), METP | FOUR | dict(tp=2, cp=2),
    METP | FOUR | GEMMA | dict(tp=4), METP | GEMMA | dict(tp=4, activation="recompute"),
    METP | FOUR | dict(tp=2, matmul="fp8")], ids=str)
def test_each_message_of_a_step_has_its_price(keys, monkeypatch):
    """Of the last rank; attention takes one group of heads after the other."""
    monkeypatch.setattr("memo.config.layer.GROUP_ELEMENTS", 2**16)
    cfg = Layout(**KEYS | keys)
    mesh, program = noted_mesh(cfg.tp * cfg.cp - 1, cfg.tp, cfg.cp, metp=cfg.metp)
    where = ("cpu", torch.float32) if cfg.device == "cpu" else ("meta", torch.bfloat16)
    model, (B, T) = Model(GPT, cfg, *where, mesh=mesh), (cfg.batch_size, cfg.block_size // cfg.cp)
    placement, _ = place_rows(cfg, problem_of(cfg, model.dtype.itemsize, None, Room(0)))
    model.reserve(B, T, placement if cfg.activation == "recompute" else None, streams=open_streams(CPU))
    tokens = torch.zeros(B, T, dtype=torch.int64, device=model.device)
    model.forward(tokens, tokens, scale=1.0)
    model.backward()
    assert sent(program) == prices(model, cfg)


def test_what_is_measured_of_a_message_is_that_message():
    mesh, program = noted_mesh(1, 4, 1)
    for op, (call, nbytes) in measure.messages(2**12, mesh.weights, CPU).items():
        program.clear()
        call()
        assert sent(program) == {(op, 4, 1): (1, nbytes)}


def seconds_behind_computing(host, late):
    """As measured, by a clock of its own, of a gather behind computing: rank r's n-th takes late(r, n)
    seconds, and a gather hardly any, from when the last rank comes."""
    numbers, now = count(), 0.0

    def compute():
        nonlocal now
        now += late(host.rank, next(numbers))

    def meet(*values, message_s=0.0):
        nonlocal now
        [now] = host.max(now)
        now += message_s
        return host.max(*values)
    gather, mesh_host = partial(meet, 0.0, message_s=1e-3), SimpleNamespace(max=meet)
    with patch.multiple(measure, REPEATS=2, BEHIND=2, LEAST_S=0.0), patch.object(
            measure.time, "perf_counter", lambda: now):
        return measure.seconds_of([measure.timings_behind(compute, gather, CPU, mesh_host)])


def always_late(rank, n):
    return 0.2 * rank


def in_turns_late(rank, n):
    return 0.2 * (n % 2 == rank)


@pytest.mark.ranks
def test_a_rank_that_is_always_late_is_not_in_the_messages_seconds():
    always, in_turns = (pool(2).run(seconds_behind_computing, late)[0]
                        for late in (always_late, in_turns_late))
    assert (always, in_turns) == (pytest.approx(1e-3), pytest.approx(0.1 + 1e-3))
