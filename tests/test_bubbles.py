"""The placements of all stages of a pipeline: copies that hide in bubbles, nothing slower, brute force."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

import train
from memo.config.layer import groups_of, tensors_of
from memo.config.layout import Layout
from memo.decide.pipeline import micro_batch_s, with_bubbles
from memo.decide.step_seconds import Ends, UnitRates, step_seconds
from memo.decide.where import Placed, Rates, Room, StageFacts, placed
from memo.memory.sizes import Sizes
from memo.schedule.periods import totals_of
from memo.system.launch import Launch
from testing.ranks import pool
from tests.helpers import argv, bound_arena

ROWS = 2048  # of a unit, where alphas in eighths are whole rows


def pipeline(n_layer=4, N=4, forward_s=(1.0,) * 4, alpha=0.5, head_s=0.0, recompute_s=1.0, mode="memo"):
    """The StageFacts of two stages with two buffers each. `alpha`: whose copies take a second; `head_s`: of a
    subsequence; `recompute_s`: of a second's forward."""
    cfg = Layout(n_layer=n_layer, n_head=1, n_embd=64, block_size=N * ROWS, vocab_size=64, batch_size=1, pp=2,
                 subsequences=N, subsequence_cut="equal", unit_order="subsequence", activation=mode,
                 alpha_mode="paper")
    tensors = tensors_of(cfg, 4)
    groups = groups_of(tensors)
    size = {group: sum(tensors[name].nbytes for name in names) for group, names in groups.items()}
    units = tuple(UnitRates(ROWS, s, 2 * s, 0.0, 0.0, {
        group: recompute_s * s * n / sum(size.values()) for group, n in size.items()}) for s in forward_s)
    always = sum(tensors[name].nbytes for name in ("x", "attn_out", "lse"))
    rate = (always + alpha * sum(size.values())) / N
    rates = Rates(units, rate, rate, 0)
    facts = []
    for one in cfg.every_stage:
        room = Room(2**50, Sizes(placed(one, 2), tensors).device_bytes)
        facts.append(StageFacts(one, 4, rates, room, Ends(0.0, N * head_s, (0.0,) * N, (0.0,) * N)))
    return facts


def apart(stages):
    """What each stage decides for itself."""
    return [one.alone() for one in stages]


def alone_s(stage, placement):
    """Totals of a stage that waits for nobody."""
    return totals_of(placement.program, step_seconds(placement, tensors_of(stage.cfg, 4), stage.rates.units,
                                            stage.rates.offload_bytes_per_s))


def test_a_copy_that_hides_in_the_bubble_alone():
    """The last stage has a head, so that the first one waits a second after each subsequence's two layers."""
    stages = pipeline(head_s=1.0)
    before, after = apart(stages), with_bubbles(stages, apart(stages))
    assert before[0][1].alphas[:3] == (0.5,) * 3 and after[0][1].alphas[:3] == (0.75, 0.75, 0.5)
    assert after[0][1].limits["overlap"] > before[0][1].limits["overlap"]
    assert alone_s(stages[0], before[0][0]).stall_s == 0 < alone_s(stages[0], after[0][0]).stall_s
    assert micro_batch_s(stages, after) < micro_batch_s(stages, before) - 0.1
    free = [replace(one, rates=replace(one.rates, offload_bytes_per_s=inf, prefetch_bytes_per_s=inf))
            for one in stages]
    assert micro_batch_s(stages, after) == pytest.approx(micro_batch_s(free, after), rel=0.02)  # copies hide


def test_rows_that_stay_travel_where_the_bubble_has_room_for_them():
    stages = pipeline(head_s=1.0, mode="swap")
    stages = [replace(one, room=replace(one.room, spare_bytes=4 * one.room.spare_bytes)) for one in stages]
    before, after = apart(stages), with_bubbles(stages, apart(stages))
    tensors = tensors_of(stages[0].cfg, 4)
    fewer, more = (Sizes(answers[0][0], tensors).region_bytes.get("resident", 0)
                   for answers in (after, before))
    assert fewer < more and not after[0][0].program.fates.rebuilt - before[0][0].program.fates.rebuilt
    assert micro_batch_s(stages, after) <= micro_batch_s(stages, before) * (1 + 1e-6)


def random_pipelines(n, seed):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        N = 4
        grows = rng.uniform(0, 1)
        forward_s = tuple(float(1 + grows * i) for i in range(N))
        yield pipeline(int(rng.integers(4, 7)), N, forward_s, float(rng.uniform(0, 1)),
                       float(rng.choice([0.0, rng.uniform(0, 3)])), float(rng.uniform(0.1, 1.5)))


@pytest.mark.slow
def test_no_step_is_slower_than_with_what_each_stage_decides_for_itself():
    faster = higher = 0
    for stages in random_pipelines(60, seed=1):
        before, after = apart(stages), with_bubbles(stages, apart(stages))
        a, b = (micro_batch_s(stages, answers) for answers in (before, after))
        assert b <= a * (1 + 1e-5)
        faster += b < 0.995 * a
        higher += any(q.plan.alpha > p.plan.alpha for p, q in zip(before, after, strict=True))
        for one, (placement, plan, _) in zip(stages, after, strict=True):
            assert Sizes(placement, tensors_of(one.cfg, 4)).device_bytes <= one.room.spare_bytes and plan.fits
    assert faster > 5 and higher > 30, (faster, higher)


def in_eighths(stage):
    """The placements of a stage with an alpha in eighths for each subsequence that has swapped units."""
    tensors, p = tensors_of(stage.cfg, 4), apart([stage])[0][0]
    swapped = 1 + max(i for _, i in p.units[:p.n_swapped])
    others = [name for name, t in tensors.items() if t.group]
    for eighths in product(range(9), repeat=swapped):
        rows = tuple(ROWS * k // 8 for k in eighths) + (ROWS,) * (p.subsequences - swapped)
        yield replace(p, kept={name: rows if name in others else p.n_rows for name in tensors})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_is_near_the_best_alphas_in_eighths(seed):
    """Of one stage after the other, until neither gets better."""
    [stages] = random_pipelines(1, seed=10 + seed)
    stages = pipeline(4, 4, tuple(u.forward_s for u in stages[0].rates.units), 0.5, 0.7)
    found = with_bubbles(stages, apart(stages))
    best = found
    all_of = [[*in_eighths(stage)] for stage in stages]
    least, before = micro_batch_s(stages, best), inf
    while least < before:
        before = least
        for k, every in enumerate(all_of):
            each = [[*best[:k], Placed(one, None), *best[k + 1:]] for one in every]
            best = min([best, *each], key=lambda those: micro_batch_s(stages, those))
        least = micro_batch_s(stages, best)
    assert micro_batch_s(stages, found) <= 1.03 * least


def test_stages_whose_seconds_are_not_known_stay_as_they_are():
    stages = pipeline(head_s=1.0)
    unknown = [stages[0], replace(stages[1], rates=None)]
    assert with_bubbles(unknown, apart(stages)) == apart(stages)


def decided(host, args):
    """Of a run that is ready to train: what its stages told each other, what all of them get, its own."""
    seen = []

    def spied(stages, alone):
        seen.append((stages, alone, with_bubbles(stages, alone)))
        return seen[0][-1]
    with pytest.MonkeyPatch.context() as m:
        m.setattr("memo.run.reserve.with_bubbles", spied)
        bound_arena(m)
        run = train.set_up(args, Launch(host.rank, host.size, host.rank, host.size), host)
    found = *seen[0], run.decision.placement, run.decision.rates
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_the_stages_of_a_run_decide_together(dataset, tmp_path):
    shape = dict(n_layer=5, n_head=4, n_embd=64, block_size=1024, batch_size=4, pp=2, subsequences=4,
                 subsequence_cut="equal", unit_order="subsequence", host_memory_gb=0.06)
    found = pool(2).run(decided, argv(dataset, tmp_path, **shape))
    wanted = with_bubbles(*found[0][:2])
    for k, (stages, alone, together, placement, rates) in enumerate(found):
        assert [one.cfg.stage for one in stages] == [0, 1] and stages[k].rates == rates
        assert together == wanted and placement == together[k][0]
        assert placement.n_swapped > 0 and alone == [one.alone() for one in stages]
    assert found[0][4] != found[1][4]  # each measured its own
