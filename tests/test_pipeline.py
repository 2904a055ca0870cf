"""Stages of a pipeline, fed with subsequences: their schedules meet, and what is changed in a way that
matters does not; they give the loss and gradients of one process, and in a layout all modes give the same
bits."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from memo.config.layout import Layout, layers_of_stages
from memo.schedule.program import Fates, Program
from memo.schedule.simulate import AS_SENT, MET, STAGES_CIRCLE, times_of_stages
from memo.schedule.step import Op, Step, Unit
from memo.schedule.waits import schedule
from tests.helpers import (
    LLAMA,
    changed_places,
    degrees_of,
    half_rotary,
    lacking,
    refusal,
    unaware,
    validate_queues,
    validate_stages,
)
from tests.layouts import agree, layout_keys, on_ranks, step_alone
from tests.replay import validate_schedule

# --- schedules ---

def pipeline(rng, p, N):
    """[(fates, layers, N, order)] of p stages, in any modes."""
    made = []
    for stage in range(p):
        layers = rng.randint(1, 3)
        units, buffers = layers * N, rng.randint(1, min(4, layers * N))
        ends = dict(receives=stage > 0, sends=stage < p - 1)
        if N > 1:
            ends["stream"] = "passed" if ends["sends"] else rng.choice(["whole", "copied"])
        copied = frozenset(range(units - buffers))
        rebuilt = copied | ({units - 2} if buffers == 2 and copied else set()) if rng.random() < 0.5 else ()
        mode = rng.choice([Fates(units, frozenset(), frozenset(), **ends),
                           Fates(buffers, copied, frozenset(rebuilt), **ends)])
        made.append((mode, layers, N, "subsequence"))
    return made


def pipelines(n, seed):
    rng = random.Random(seed)
    for _ in range(n):
        yield pipeline(rng, rng.randint(2, 4), rng.randint(1, 7))


def test_the_schedules_of_all_stages_meet():
    for stages in pipelines(120, seed=1):
        for trains in (True, False):
            made = [schedule(Program(*stage, trains=trains)) for stage in stages]
            validate_stages(made)
            validate_queues(made)
            for steps, stage in zip(made, stages, strict=True):
                validate_schedule(steps, *stage, trains=trains)


@pytest.mark.slow
def test_each_wait_for_a_message_or_of_one_is_needed():
    sent, overwritten = ("a message is sent after it is made, and before its place is overwritten",
                         "a place is overwritten after it was sent")
    seen = set()
    for stages in pipelines(80, seed=2):
        for stage in stages:
            steps = schedule(Program(*stage))
            for step, waits in steps.items():
                for wait in waits:
                    if step.is_message or wait.is_message:
                        why = refusal(validate_schedule, unaware(steps, step, wait), *stage)
                        seen.add((step.kind, wait.kind, why))
    came = "a unit is computed after its input", "a backward comes after that of the layer above"
    refilled = "a buffer is refilled after it was read"
    fetched = "a copy is fetched after it has left"  # of the stream, on the last stage
    assert {why for *_, why in seen} == {sent, overwritten, *came, refilled, fetched}


def test_a_message_that_is_missing_or_out_of_order_is_found():
    seen = set()
    for stages in pipelines(30, seed=3):
        schedules = [schedule(Program(*stage)) for stage in stages]
        for k, steps in enumerate(schedules):
            for lane in ("send", "receive"):
                at = [step for step in steps if step.stream == lane]
                for a, b in zip(at, at[1:], strict=False):
                    mutant = changed_places(steps, a, b)
                    why = refusal(validate_stages, [*schedules[:k], mutant, *schedules[k + 1:]])
                    assert why in (AS_SENT, STAGES_CIRCLE), (a, b, stages)
                    seen.add(why)
            gone = next(step for step in steps if step.is_message)
            why = refusal(validate_stages, [*schedules[:k], lacking(steps, gone), *schedules[k + 1:]])
            assert why in (AS_SENT, MET, STAGES_CIRCLE), (gone, stages)
            seen.add(why)
    assert seen == {AS_SENT, MET, STAGES_CIRCLE}


def test_a_deadlock_names_both_ends():
    """Stage 0 wants the gradient of what it has not sent yet."""
    first, second = (schedule(Program(Fates(1, frozenset(), frozenset(), **{end: True}), 1))
                     for end in ("sends", "receives"))
    sent, comes = (next(step for step in first if step.kind == kind) for kind in ("send", "receive gradient"))
    first = first | {sent: {comes: None}, comes: {}}
    with pytest.raises(ValueError, match=f"^{STAGES_CIRCLE}: ") as e:
        validate_stages([first, second])
    assert "stage 0 in send of subsequence 0 waits for its receive gradient" in str(e.value)
    assert "stage 1 in receive of subsequence 0 waits for stage 0" in str(e.value)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("N", [1, 2, 4, 8, 16])
def test_the_bubble_is_p_minus_1_over_n_of_the_computing(p, N):
    layers, work = 2, {"forward": 1.0, "backward": 2.0}
    stages = [schedule(Program(Fates(layers * N, frozenset(), frozenset(), receives=k > 0, sends=k < p - 1,
                             stream="passed" if k < p - 1 else "whole"), layers, N, "subsequence"))
              for k in range(p)]
    times = times_of_stages(stages, lambda stage, step: work.get(step.kind, 0.0))
    ends = [end for t in times for _, end in t.spans.values()]
    assert max(ends) == pytest.approx(3 * layers * N * (1 + (p - 1) / N))
    assert all(t.stall_s == 0 for t in times)
    # subsequence i is at stage k at time i + k
    assert [times[k].spans[Step(Op.FORWARD, Unit(0, i))][0] for k in range(p) for i in range(N)] == [
        layers * (k + i) for k in range(p) for i in range(N)]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0.0, 0.1, 2.0, 5.0])
def test_stages_have_equal_flops(p, head):
    """Against all ways to deal out the layers."""
    for layers in range(p, 9):
        ways = (cuts for cuts in product(range(1, layers + 1), repeat=p) if sum(cuts) == layers)
        counts = layers_of_stages(layers, p, head)
        assert sum(counts) == layers and min(counts) >= 1
        assert max(*counts[:-1], counts[-1] + head, 0) == min(max(*w[:-1], w[-1] + head, 0) for w in ways)


def test_a_stage_has_the_layers_behind_those_of_the_stage_before():
    cfg = Layout(n_layer=7, pp=3, vocab_size=100)
    found = [one.layers for one in cfg.every_stage]
    assert [layer for layers in found for layer in layers] == list(range(7))


# --- gradients ---

KEYS = dict(n_layer=5, n_head=4, n_embd=64, vocab_size=150, block_size=512, unit_order="subsequence")
FAMILIES = {"gpt": dict(position="learned", bias=True, gradient_accumulation_steps=3),
            "rope": dict(batch_size=2, gradient_accumulation_steps=2),
            "llama": LLAMA | half_rotary(24) | dict(qkv_bias=True, batch_size=2)}
MODES = {"keep": {}, "recompute": {}, "swap": {}, "memo": dict(alpha=0.5)}


def config(layout, family, N, cut="equal", mode="keep", **more):
    kind = "metp" if "metp" in layout else "ring"
    keys = KEYS | FAMILIES[family] | layout_keys(layout.replace("me", ""), kind) | MODES[mode] | more
    return Layout(**keys, activation=mode, subsequences=N, subsequence_cut=cut)


@cache
def alone(family):
    """(loss, gradient norm, {name: gradient}) of one process, which does not cut the sequence."""
    return step_alone(config("", family, 1))


CASES = [("pp2", "gpt", 2, "keep"), ("pp2", "rope", 1, "memo"), ("pp2", "llama", 8, "swap"),
         ("pp3", "gpt", 8, "recompute"), ("pp3", "rope", 3, "swap"), ("pp4", "llama", 4, "memo"),
         ("pp2 tp2", "gpt", 4, "swap"), ("pp2 cp2", "llama", 4, "recompute"), ("pp2 dp2", "rope", 2, "keep"),
         ("pp2 metp2", "llama", 2, "recompute"), ("pp2 tp2 dp2", "rope", 4, "memo"),
         ("pp2 tp2 cp2", "gpt", 8, "keep"), ("pp4 tp2", "rope", 8, "swap"),
         ("pp2 tp4", "llama", 4, "memo")]


@pytest.mark.ranks
@pytest.mark.parametrize("layout,family,N,mode", [
    pytest.param(*case, marks=[] if k in (0, 2, 6) else pytest.mark.slow) for k, case in enumerate(CASES)])
def test_stages_give_the_gradients_of_one_process(layout, family, N, mode):
    [found] = on_ranks(layout.replace("me", ""), [config(layout, family, N, "flops" if N == 8 else "equal",
                                                         mode)], False)
    agree(found, alone(family), mode)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("layout,family,N", [("pp2 tp2", "llama", 2), ("pp3", "gpt", 3), ("pp2", "rope", 1)])
def test_all_modes_give_the_same_bits(layout, family, N):
    """Units of 512 own rows and more, half of which can be recomputed alone; the memory is as planned."""
    tokens = 2048 * degrees_of(layout)["tp"]
    cfgs = [config(layout, family, N, mode=mode, block_size=tokens // FAMILIES[family].get("batch_size", 1),
                   gradient_accumulation_steps=1, n_layer=3) for mode in MODES]
    first, *others = on_ranks(layout, cfgs, True)
    assert first[3] == 0, "requests that missed the memory plan"
    for mode, other in zip(list(MODES)[1:], others, strict=True):
        assert other[:2] == first[:2] and other[3] == 0, mode
        assert all(torch.equal(other[2][name], g) for name, g in first[2].items()), mode
