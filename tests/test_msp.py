"""Stages that compute rows for each other: who helps whom is the paper's table; their schedules meet, each
wait is needed; they give the loss and gradients of one process, and in a layout all modes, an optimizer on
the host, and evaluations between steps, give the same bits."""

import random
import time
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

import train
from memo.config.config import Config
from memo.config.layer import tensors_of
from memo.config.layout import Layout, check_streams, slice_lengths, subsequence_lengths
from memo.config.msp import Help, helped_units, with_turns
from memo.decide.choose import with_stages
from memo.decide.pipeline import decided_shares, even_shares, micro_batch_s, shared, with_shares
from memo.decide.step_seconds import Ends, Lanes, UnitRates
from memo.decide.where import Rates, Room, StageFacts
from memo.errors import ConfigError
from memo.estimate import budget, report, search
from memo.estimate.arena import fast_arena
from memo.estimate.regions import activation_lines
from memo.memory.flat import layer_numel
from memo.memory.sizes import Sizes
from memo.parallel.mesh import Mesh
from memo.run.load_config import load_config
from memo.schedule.order import forward_order
from memo.schedule.program import Fates, Program
from memo.schedule.simulate import AS_SENT, MET, STAGES_CIRCLE, in_one_order, other_end
from memo.schedule.waits import schedule
from memo.states.passes import Model
from memo.system import hardware
from memo.system.axis import Axis
from memo.system.launch import Launch
from model import GPT
from testing.paper import SPPO
from testing.ranks import pool
from testing.stages import equal_shares, helped_config, simulated_bubble
from tests.helpers import (
    CPU,
    argv,
    bound_arena,
    changed_places,
    lacking,
    mesh_of,
    random_batch,
    refusal,
    unaware,
    validate_queues,
    validate_stages,
)
from tests.helpers import step as loss_of_step
from tests.layouts import agree, build, gradients, layout_keys, on_ranks, step_alone
from tests.replay import validate_schedule


def test_who_helps_whom_is_the_table_of_the_paper():
    table = SPPO["table3_msp"]
    found = helped_units(table["pp"], table["n"])
    for stage in range(table["pp"]):
        mine = {x: helpers for (home, x), helpers in found.items() if home == stage}
        for side, before in (("left", True), ("right", False)):
            those = {x: helpers for x, helpers in mine.items() if (x < 4) == before}
            assert sorted(those) == table[f"{side}_ids"][stage]
            together = {stage, *(k for helpers in those.values() for k in helpers)} if those else ()
            assert sorted(together) == table[f"{side}_stages"][stage]
        assert [x for x in range(8) if x not in mine] == table["steady_ids"][stage]


@pytest.mark.parametrize("p,N", [(2, 2), (3, 4), (4, 8), (5, 5), (8, 9)])
def test_in_each_slot_every_stage_computes_as_much(p, N):
    rows = 16 * p
    shares = equal_shares([2] * p, [rows] * N)
    for slot in range(p + N - 1):
        computed = dict.fromkeys(range(p), 0)
        busy = [(k, slot - k) for k in range(p) if 0 <= slot - k < N]
        for stage, x in busy:
            pieces = [piece for piece in shares if (piece.stage, piece.subsequence) == (stage, x)]
            ends = [first for piece in pieces for first in (piece.first, piece.end)]
            assert ends == sorted(ends) and (not ends or ends[-1] == rows)  # in causal order, without a gap
            computed[stage] += rows - sum(piece.rows for piece in pieces)
            for piece in pieces:
                computed[piece.helper] += piece.rows
                assert piece.turns == len(busy)
        assert set(computed.values()) == {rows * len(busy) // p}


# --- schedules ---

def lent_by(shares, stage):
    return tuple(piece for piece in shares if piece.stage == stage)


def random_shares(rng, layers, cuts):
    """The Shares where some of those who can help do, with pieces of any length."""
    made = []
    for (stage, x), those in helped_units(len(layers), len(cuts)).items():
        those = [helper for helper in those if rng.random() < 0.8]
        ends = [*sorted(rng.sample(range(1, cuts[x]), len(those))), cuts[x]]
        made += [Help(stage, x, helper, *piece, layers[stage], 1 / len(layers))
                 for helper, *piece in zip(those, ends, ends[1:], strict=False)]
    return with_turns(made)


def with_random_shares(cfg, seed):
    cuts = [n // cfg.tp for n in subsequence_lengths(cfg)]
    return replace(cfg, shares=random_shares(random.Random(seed), cfg.depths, cuts))


def random_stages(rng):
    """[(fates, layers, N, order)] of stages that help each other, in any modes."""
    p = rng.choice([2, 3, 4, 6])
    N, layers = rng.randint(p, p + 3), [rng.randint(1, 3) for _ in range(p)]
    shares = random_shares(rng, layers, [64] * N)
    made = []
    for stage in range(p):
        guests, lent = tuple(piece for piece in shares if piece.helper == stage), lent_by(shares, stage)
        units = len(forward_order(layers[stage], N, "subsequence", guests).units)
        n, last = rng.randint(1, min(4, units)), stage == p - 1
        ends = dict(receives=stage > 0, sends=not last, guests=guests, lent=lent,
                    stream=rng.choice(["whole", "copied"]) if last else "passed")
        copied = frozenset(range(units - n))
        shared = {units - 2} if n == 2 and copied else set()
        rebuilt = copied | shared if rng.random() < 0.5 else frozenset()
        only = frozenset(k for k in copied if rng.random() < 0.3 and rebuilt)
        every = frozenset(range(units))
        made.append((rng.choice([Fates(units, frozenset(), frozenset(), **ends),
                                 Fates(n, copied, frozenset(rebuilt), only, **ends),
                                 Fates(1, frozenset(), every, every, True, **ends)]),
                     layers[stage], N, "subsequence"))
    return made


def pipelines(n, seed):
    rng = random.Random(seed)
    return [random_stages(rng) for _ in range(n)]


@pytest.mark.slow
def test_the_schedules_of_all_stages_meet_with_one_queue_a_stage():
    crossed = 0
    for stages in pipelines(15, seed=1):
        for trains in (True, False):
            made = [schedule(Program(*stage, trains=trains)) for stage in stages]
            validate_stages(made)
            for steps, stage in zip(made, stages, strict=True):
                validate_schedule(steps, *stage, trains=trains)
            crossed += refusal(validate_queues, made) == STAGES_CIRCLE
            ordered = in_one_order(made)
            validate_queues(ordered)
            for a, b, stage in zip(made, ordered, stages, strict=True):
                assert a == b  # as tables: their orders may differ
                validate_schedule(b, *stage, trains=trains)
    assert crossed > 20  # not so as each stage has its messages by itself


@pytest.mark.slow
def test_each_wait_for_a_message_or_of_one_is_needed():
    seen, pairs = set(), set()
    for stages in pipelines(3, seed=2):
        for stage in stages:
            steps = schedule(Program(*stage))
            for step, waits in steps.items():
                for wait in waits:
                    if step.is_message or wait.is_message:
                        why = refusal(validate_schedule, unaware(steps, step, wait), *stage)
                        assert why is not None, (step, wait)
                        seen.add(why)
                        pairs.add((step.kind.split(" ")[0], wait.kind.split(" ")[0]))
    assert len(seen) > 5, seen
    # what comes to a helper for the next unit but one, behind what leaves it of this one
    assert {("borrow", "return"), ("take", "repay")} <= pairs


def test_a_message_that_is_missing_or_out_of_order_is_found():
    seen = set()
    for stages in pipelines(5, seed=3):
        schedules = [schedule(Program(*stage)) for stage in stages]
        for k, steps in enumerate(schedules):
            lanes = {}
            for step in steps:
                if step.is_message:
                    lanes.setdefault(step.stream, []).append(step)
            for at in lanes.values():
                a, b = random.Random(k).sample(at, 2) if len(at) > 1 else (at[0], at[0])
                mutant, gone = changed_places(steps, a, b), lacking(steps, a)
                for changed in (mutant, gone) if a != b else (gone,):
                    why = refusal(validate_stages, [*schedules[:k], changed, *schedules[k + 1:]])
                    assert why in (AS_SENT, MET, STAGES_CIRCLE), a
                    seen.add(why)
    assert seen == {AS_SENT, MET, STAGES_CIRCLE}


@pytest.mark.slow
@pytest.mark.parametrize("p,N", [(4, 8), (8, 32)])
def test_with_free_messages_the_bubble_is_less_than_a_third(p, N):
    """80 layers, those of the 65B model."""
    assert simulated_bubble(helped_config(p, N)) <= (p - 1) / N / 3


# --- how much ---

def facts_of(cfg, unit_s, message_s):
    """StageFacts of stages whose units take so long, forward, and whose lanes take so long for a layer's
    weights."""
    ends, rows = Ends(0.0, 0.0, *[(0.0,) * cfg.subsequences] * 2), cfg.block_size // cfg.subsequences
    units = tuple(UnitRates(rows, s, 2 * s, 0.0, 0.0, {}) for s in unit_s)
    rates = Rates(units, 1e12, 1e12, 0)
    numel = layer_numel(cfg, 1)
    lanes = Lanes((4 * numel / message_s,) * cfg.pp, numel) if message_s else None
    return [StageFacts(replace(cfg, stage=k), 4, rates, Room(2**50), ends._replace(lanes=lanes))
            for k in range(cfg.pp)]


@pytest.mark.slow
def test_no_step_is_slower_with_help_and_slow_messages_get_none():
    cfg = Layout(n_layer=16, n_embd=64, n_head=2, block_size=4096, vocab_size=64, pp=4, subsequences=8,
                 subsequence_cut="equal", unit_order="subsequence", activation="keep", msp=True)
    helped = []
    for message_s in (0.0, 0.02, 0.1, 1.0):
        stages = facts_of(cfg, [0.1 + 0.02 * i for i in range(8)], message_s)
        alone = [one.alone() for one in stages]
        found, shares = shared(stages, alone, stages), decided_shares(stages)
        before, after = (micro_batch_s(facts, those) for facts, those in (
            (stages, alone), ([with_shares(one, shares) for one in stages], found)))
        assert after <= before and [p.lent for p, *_ in found] == [lent_by(shares, k) for k in range(4)]
        helped.append((len(shares), before / after))
    assert helped[0] == max(helped) and helped[0][1] > 1.2 and helped[-1] == (0, 1.0)
    assert helped[1][0] > 0


def test_nobody_helps_where_the_device_has_no_room_for_it():
    cfg = Layout(n_layer=16, n_embd=64, n_head=2, block_size=4096, vocab_size=64, pp=4, subsequences=8,
                 subsequence_cut="equal", unit_order="subsequence", activation="keep", msp=True)
    for known in (True, False):
        stages = [one if known else replace(one, rates=None) for one in facts_of(cfg, [0.1] * 8, 0.0)]
        alone = [one.alone() for one in stages]
        nbytes = [Sizes(p, tensors_of(cfg, 4)).device_bytes for p, *_ in alone]
        for more, helps in ((2**32, True), (0, False), (-1, False)):
            room = [replace(one, room=Room(2**50, n + more)) for one, n in zip(stages, nbytes, strict=True)]
            assert (shared(room, alone, room) != alone) == helps


def test_who_helps_depends_on_no_timing():
    """But on what is known of the machine's type, evenly where that is nothing."""
    cfg = Layout(n_layer=16, n_embd=64, n_head=2, block_size=4096, vocab_size=64, pp=4, subsequences=8,
                 subsequence_cut="equal", unit_order="subsequence", alpha=0.5, msp=True)
    typical = facts_of(cfg, [0.1 + 0.02 * i for i in range(8)], 0.02)
    unknown = [replace(one, rates=None) for one in typical]
    seen = {}
    for scale in (1e-6, 1.0, 50.0):
        stages = facts_of(cfg, [scale * (0.2 - 0.02 * i) for i in range(8)], 0.0)
        alone = [one.alone() for one in stages]
        for name, facts in (("typical", typical), ("unknown", unknown)):
            lent = [p.lent for p, *_ in shared(stages, alone, facts)]
            assert seen.setdefault(name, lent) == lent
    shares = even_shares(cfg)
    assert seen["unknown"] == [lent_by(shares, k) for k in range(4)] != seen["typical"]


def test_the_memory_is_what_its_lines_say():
    cfg = Layout(**KEYS, batch_size=2, pp=2, stage=1, msp=True, subsequences=4, activation="keep")
    cfg = replace(cfg, shares=even_shares(cfg))
    model = Model(GPT, cfg, CPU, torch.float32)
    model.reserve(2, cfg.block_size)
    p = model.swap.placement
    lines = activation_lines(cfg, p, 4)
    assert sum(line.device_bytes for line in lines) == model.swap.device_bytes
    places = {id(t.untyped_storage()): t for t in model.swap.buffers.values()}
    assert sum(t.nbytes for t in places.values()) == model.swap.device_bytes
    assert {"guest_weights", "guest_keys", "guest_gradients", "repaid"} <= {line.region for line in lines}
    model.close()


@pytest.mark.parametrize("family,tp", [("gpt", 1), ("llama", 2)])
def test_both_ends_of_a_message_have_the_bytes_of_the_formula(family, tp):
    for p, N in ((2, 3), (3, 3), (4, 6)):
        cfg = Layout(**KEYS | FAMILIES[family], pp=p, tp=tp, subsequences=N, msp=True)
        cfg, schedules, sent = with_random_shares(cfg, seed=N), [], {}
        for stage in range(p):
            mesh = Mesh(weights=Axis("tp", tp))
            model = Model(GPT, replace(cfg, stage=stage), CPU, torch.float32, mesh=mesh)
            model.reserve(1, cfg.block_size)
            swap = model.swap
            sizes = Sizes(swap.placement, tensors_of(cfg, 4), layer_numel(cfg, 1))
            steps, evaluation = (swap.placement.schedule(trains) for trains in (True, False))
            for step in (step for step in steps if step.is_message and step.peer is not None):
                tensors = swap.message(step)
                assert sum(t.nbytes for t in tensors) == sizes.moved(step) > 0
                sent[stage, step] = [(t.numel(), t.dtype) for t in tensors]
            schedules.append((steps, evaluation))
            model.close()
        for those in zip(*schedules, strict=True):
            validate_stages(those)
        assert sent and all(sent[other_end(*end)] == what for end, what in sent.items())


# --- gradients ---

KEYS = dict(n_layer=5, n_head=4, n_embd=64, vocab_size=150, block_size=512, unit_order="subsequence")
FAMILIES = {"gpt": dict(position="learned", bias=True), "llama": dict(
    norm="rmsnorm", mlp="swiglu", n_inner=112, n_kv_head=2, head_dim=24, tie_embeddings=False, qk_norm=True)}
FAMILIES["olmo"] = FAMILIES["llama"] | dict(norms="both", qk_norm_over="all")
CASES = [("pp2", "gpt", 2, "keep"), ("pp3", "gpt", 3, "swap"), ("pp3", "llama", 8, "memo"),
         ("pp4", "gpt", 4, "recompute"), ("pp4", "llama", 8, "keep"), ("pp2 tp2", "olmo", 8, "swap"),
         ("pp2 dp2", "gpt", 8, "keep")]
QUICK = CASES[0], CASES[2]


def family_keys(family, layers):
    return KEYS | FAMILIES[family] | dict(n_layer=layers, gradient_accumulation_steps=2)


@cache
def alone(family, layers):
    """(loss, gradient norm, {name: gradient}) of one process, which does not cut the sequence."""
    return step_alone(Layout(**family_keys(family, layers)))


def delayed(host, *args):
    """gradients() where each message, and each unit, is late by chance, and what leaves a helper is later
    than all else: what comes in its place must wait."""
    rng = random.Random(host.rank)

    def late(work, of):
        def call(*args):
            leaves = getattr(args[-1], "kind", "").startswith(("return", "repay"))
            time.sleep(2 * of if leaves else rng.random() * of)
            return work(*args)
        return call
    with patch.object(Model, "exchange", late(Model.exchange, 4e-3)), patch.object(
            Model, "unit_forward", staticmethod(late(Model.unit_forward, 2e-3))):
        return gradients(host, *args)


@pytest.mark.ranks
@pytest.mark.parametrize("layout,family,N,mode", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES])
def test_stages_that_help_give_the_gradients_of_one_process(layout, family, N, mode):
    layers = 8 if layout == "pp4" else 5  # two a stage: units of one helper follow each other
    cfg = Layout(**family_keys(family, layers) | layout_keys(layout, "ring"), msp=True, activation=mode,
                 subsequences=N, subsequence_cut="flops", alpha=0.5 if mode == "memo" else "auto")
    cfg = with_random_shares(cfg, seed=3) if N == 8 else replace(cfg, shares=even_shares(cfg))
    assert {piece.helper for piece in cfg.shares} == set(range(cfg.pp))
    [found] = on_ranks(layout, [cfg], False, work=delayed)
    agree(found, alone(family, layers), mode)


def trained(host, cfgs):
    """Of each config the losses of three steps; of the second one with evaluations between."""
    mesh, found = mesh_of(host, cfgs[0]), []
    for n, cfg in enumerate(cfg.of_rank(host.rank, host.size) for cfg in cfgs):
        (model, optimizer), losses = build(cfg, mesh), []
        for _ in range(3):
            if n == 1:
                model.forward(*random_batch(cfg, 1, cfg.block_size, CPU, seed=7))
            losses.append(loss_of_step(model, optimizer, cfg).item())
            optimizer.clip(1.0)
            if mesh.dp.rank:  # its weights come late to the others, and from there to helpers
                time.sleep(0.02)
            optimizer.step(1e-2)
        model.close()
        found.append(losses)
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_no_mode_no_optimizer_on_the_host_and_no_evaluation_changes_a_bit():
    """Units of 512 own rows, of homes and of guests, half of which can be recomputed alone."""
    cfg = Layout(**KEYS | FAMILIES["llama"] | dict(n_layer=3, block_size=2048), pp=2, subsequences=2,
                 subsequence_cut="equal", gradient_accumulation_steps=2, msp=True,
                 shares=equal_shares([2, 1], [1024] * 2, multiple=128))
    assert [piece.rows for piece in cfg.shares] == [512] * 2
    assert cfg.depths == (2, 1)
    ways = [dict(activation="keep"), dict(activation="swap"), dict(activation="recompute"),
            dict(alpha=0.5, optimizer_device="cpu")]
    found, *others = pool(4).run(trained, [replace(cfg, **way) for way in ways])
    assert others == [found] * 3 and found[0][2] < found[0][0]
    for way, losses in zip(ways, found, strict=True):
        assert losses == found[0], way


SHARED = [("pp2 cp2", "llama", "memo", "ring", 2), ("pp3 cp2", "gpt", "keep", "ring", 1),
          ("pp2 cp2", "llama", "recompute", "ulysses", 1), ("pp2 tp2", "llama", "swap", "metp", 2)]


@pytest.mark.ranks
@pytest.mark.parametrize("layout,family,mode,kind,B", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case != SHARED[0])) for case in SHARED])
def test_so_they_do_with_batches_and_where_ranks_share_a_sequence(layout, family, mode, kind, B):
    keys = KEYS | FAMILIES[family] | dict(gradient_accumulation_steps=2, batch_size=B, block_size=1024)
    if layout == "pp2 cp2":  # as many layers as stages and one
        keys |= dict(n_layer=3)
    cfg = Layout(**keys | layout_keys(layout, kind), msp=True, activation=mode, subsequences=4,
                 subsequence_cut="flops", alpha=0.5 if mode == "memo" else "auto")
    cfg = replace(cfg, shares=even_shares(cfg))
    slices = slice_lengths(cfg)  # each dealt to the ranks by itself
    assert max(map(len, slices)) == cfg.pp and sum(map(sum, slices)) == cfg.block_size
    [found] = on_ranks(layout, [cfg], True, work=delayed)
    agree(found, step_alone(Layout(**keys, subsequences=1)), mode)
    assert found[3] == 0  # the memory plan has all that is requested


def placements(host, args):
    """Of a run that is ready to train."""
    with pytest.MonkeyPatch.context() as m:
        bound_arena(m)
        run = train.set_up(args, Launch(host.rank, host.size, host.rank, host.size), host)
    found = run.decision.placement
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("swaps", [False, True])
def test_the_stages_of_a_run_agree(dataset, tmp_path, swaps):
    keys = dict(n_head=4, n_embd=64, block_size=1024, batch_size=1, pp=2, subsequences=4, msp=True,
                subsequence_cut="equal")
    if swaps:  # only one stage has units to swap
        keys |= dict(n_layer=3, subsequences=2, activation="swap")
    first, last = pool(2).run(placements, argv(dataset, tmp_path, **keys))
    assert first.lent == last.guests and first.guests == last.lent
    cfg = Layout(**dict(n_layer=2, vocab_size=64, unit_order="subsequence") | keys)
    # nothing that is measured counts
    assert sorted(first.lent + last.lent) == sorted(even_shares(cfg))


@pytest.mark.parametrize("keys,message", [
    (dict(), "msp=True goes with pp > 1 only, not pp=1 .*; try --pp=2"),
    (dict(pp="auto", tp=2), "msp=True goes with pp > 1 only, not pp=1 .*; try --pp=2"),
    (dict(pp="auto", subsequences=1), "with msp=True pp > 1, and at least pp subsequences"),
    (dict(pp=4, subsequences=2), "at least pp=4 subsequences, not 2 .*; try --subsequences=4")])
def test_bad_input(keys, message):
    with pytest.raises(ConfigError, match=message) as e:
        with_stages(Config(**keys, msp=True), world=2)
    assert "\n" not in str(e.value)


def test_each_communicator_has_a_stream():
    cfg = Layout(n_layer=16, msp=True, pp=14, subsequences=16)  # 26 with all others, 4 with neighbours, world
    check_streams(cfg, 14)
    with pytest.raises(ConfigError, match="pp=15 .* needs 33 communicators .* for 31 .*; try pp=14 or less"):
        check_streams(replace(cfg, pp=15), 15)


def test_a_search_takes_help_where_it_makes_a_layout_faster():
    cfg = load_config(["config/7b_1m.py", "--n_layer=6", "--n_embd=2048", "--n_head=16", "--pp=2", "--tp=1",
                       "--cp=1", "--block_size=32768", "--subsequences=8", "--unit_order=subsequence"])
    helped = []
    for rate in (1e8, 1e11):
        machine = hardware.machine("a800-80gb", network_bytes_per_s=rate, gpus_per_node=1)
        got = budget.estimate(cfg, machine, 2, fast_arena)
        found = search.with_help(got, fast_arena)
        helped.append(found.cfg.msp)
        assert found.fits and (found.tgs > got.tgs) == found.cfg.msp
        assert report.summary(found).startswith("pp=2 msp tp=1" if found.cfg.msp else "pp=2 tp=1")
    assert helped == [False, True] and found.asked == replace(cfg, msp=True)
