"""Sequences of a step that follow each other in a pipeline: no stage waits between them, no memory is written
over while it is needed, and not a bit changes."""

import random
from dataclasses import replace

import pytest
import torch

from memo.config.layout import Layout
from memo.decide.where import placed
from memo.schedule.access import AccessTable
from memo.schedule.order import forward_order
from memo.schedule.passes import schedule_of_sequences
from memo.schedule.simulate import end_of, times_of_stages
from memo.schedule.step import Op, Region, Unit
from tests.helpers import LLAMA, validate_queues, validate_stages
from tests.layouts import layout_keys, on_ranks

KEYS = dict(n_head=4, n_embd=64, vocab_size=150, unit_order="subsequence")


def stages_of(p, N, leads, activation="keep", n_buffers=10**9, layers=1, **more):
    """The placements of p stages that lead so many subsequences."""
    cfg = Layout(**KEYS | more, n_layer=p * layers, block_size=64 * N, pp=p, subsequences=N,
                 subsequence_cut="equal", activation=activation, leads=leads)
    return [placed(one, n_buffers) for one in cfg.every_stage]


def leads_of(rng, p, N):
    """Any that there may be: no stage leads more than the one before it, the last one nothing."""
    return (*sorted((rng.randint(0, N) for _ in range(p - 1)), reverse=True), 0)


@pytest.mark.parametrize("p,N,M,back", [(2, 2, 3, 1), (2, 4, 8, 2), (3, 6, 3, 2), (4, 6, 5, 1), (4, 9, 3, 2),
                                        (4, 12, 16, 3)])
@pytest.mark.parametrize("n_buffers", [2, 10**9])
def test_the_bubble_is_p_minus_1_over_n_m_of_the_computing(p, N, M, back, n_buffers):
    work = {Op.FORWARD: 1.0, Op.BACKWARD: float(back)}

    def bubble(leads):
        made = [schedule_of_sequences(one.program, M)[0]
                for one in stages_of(p, N, leads, "swap", n_buffers, layers=3)]
        times = times_of_stages(made, lambda stage, step: work.get(step.op, 0.0))
        return end_of(times) / (3 * (1 + back) * N * M) - 1
    assert bubble(tuple((p - 1 - k) * (1 + back) for k in range(p))) == pytest.approx((p - 1) / (N * M))
    assert bubble(()) == pytest.approx((p - 1) / N)  # where each sequence drains


def test_messages_meet_and_each_step_finds_its_own_sequence():
    """Who is in a place is known by sequence and subsequence, whatever the place. Keys are in no place that a
    step touches, and so are followed here."""
    rng, seen = random.Random(0), set()
    for _ in range(150):
        p, N, M = rng.randint(2, 4), rng.randint(2, 7), rng.randint(1, 5)
        made, mode = [], rng.choice(["keep", "swap", "recompute"])
        stages = stages_of(p, N, leads_of(rng, p, N), mode, 10**9 if mode == "keep" else rng.randint(1, 5),
                           rng.randint(1, 3))
        for one in stages:
            steps, named = schedule_of_sequences(one.program, M)
            made.append(steps)
            seen |= check_contents(one.program, steps, named)
        validate_stages(made)
        validate_queues(made)
    assert seen == {Region.KEPT, Region.INPUT, Region.STREAM, Region.SLAB, Region.KEYS}


def check_contents(program, steps, named):
    """Checks that each step that reads a place, uses it up or adds to it finds what its own sequence has left
    there -> the regions that were read."""
    table, places, there, seen = AccessTable(program), program.key_places, {}, set()
    for step in steps:
        access, unit = table.access(named[step]), named[step].unit
        uses = [] if step.op in (Op.FORWARD, Op.EMBED, Op.RECEIVE, Op.PREFETCH, Op.OFFLOAD) else access.writes
        for place in (*access.reads, *uses):
            if place.region is not Region.DROPPED:
                assert there[place] == step.unit.subsequence, (step, place)
                seen.add(place.region)
        there |= dict.fromkeys(access.writes, step.unit.subsequence)
        if step.op in (Op.FORWARD, Op.BACKWARD):
            behind, begin = unit.subsequence % program.subsequences, step.unit.subsequence
            if step.op is Op.FORWARD:
                there[places.at(unit)] = begin
            for n in range(behind + 1):
                key = places.at(Unit(unit.layer, unit.subsequence - n))
                assert there[key] == begin - n, (step, key)
                seen.add(Region.KEYS)
    return seen


def test_what_is_not_led_has_the_memory_of_the_other_sequence():
    order = forward_order(2, 4, "subsequence", (), 1, 2)
    assert len(order.units) == 10 and order.home(Unit(1, 4)) == Unit(1, 4)
    assert [order.home(Unit(0, 4 + i)) for i in (1, 2, 3)] == [Unit(0, i) for i in (1, 2, 3)]


@pytest.mark.ranks
@pytest.mark.parametrize("layout,leads,more", [
    ("pp2", (3, 0), dict(activation="swap")),
    pytest.param("pp2", (4, 0), dict(alpha=0.5), marks=pytest.mark.slow),
    pytest.param("pp3", (4, 2, 0), LLAMA | dict(activation="recompute"), marks=pytest.mark.slow),
    pytest.param("pp3", (4, 4, 0), dict(activation="keep", sliding_window=300), marks=pytest.mark.slow),
    pytest.param("pp2 tp2", (2, 0), LLAMA | dict(alpha=0.5), marks=pytest.mark.slow),
    pytest.param("pp2 cp2", (1, 0), dict(activation="swap"), marks=pytest.mark.slow)])
def test_no_bit_changes(layout, leads, more):
    """Of losses, norms and gradients of three and of four sequences; the memory is as planned."""
    keys = KEYS | layout_keys(layout, "ring") | dict(n_layer=4, block_size=2048, subsequences=4) | more
    cfgs = [Layout(**keys, gradient_accumulation_steps=M) for M in (3, 4)]
    alone = on_ranks(layout, cfgs, False)
    for mine, other in zip(on_ranks(layout, [replace(cfg, leads=leads) for cfg in cfgs], True), alone,
                           strict=True):
        assert mine[:2] == other[:2] and mine[3] == 0
        assert all(torch.equal(mine[2][name], g) for name, g in other[2].items())
