"""The alpha program against brute force, a greedy knapsack and the paper's Tables 4 and 5."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from scipy.optimize import linprog

from memo.config.layer import decoder_layer, groups_of, tensors_of
from memo.config.layout import Layout, unit_rows
from memo.decide.alpha import AlphaProblem, fixed_alpha, largest_block_size, paper, per_tensor, plan
from memo.decide.step_seconds import StateSeconds, UnitRates, step_seconds
from memo.decide.where import Rates, Room, decide, place_whole, placed, problem_of, rows_that_stay, ways_of
from memo.errors import OutOfHostMemory
from memo.memory.placement import Placement, rows
from memo.memory.sizes import Sizes
from memo.schedule.periods import totals_of
from memo.schedule.step import Op
from testing.paper import PAPER
from tests.helpers import gpt_layer

# half of the 2 TB is lost to blocks rounded up to powers of two
HOST_BYTES = 1.035e12 / PAPER["setup"]["gpus_per_node"]
OFFLOAD_BYTES_PER_S = 10.5e9


LAYER = gpt_layer(256, 4)
OTHERS = [t.name for t in LAYER.skeletal if t.group]
GROUPS = groups_of(LAYER.tensors(1, 1, 4))


def skeletal(B, T, C, H, itemsize, tp=1):
    return gpt_layer(C, H).tensors(B, T, itemsize, tp)


def problem(tensors, n_layer, forward_s, rate, host_bytes):
    """The AlphaProblem of one subsequence in two buffers."""
    return AlphaProblem(Placement(n_layer, 2, tensors["x"].shape[0]), tensors, (forward_s,), rate, host_bytes)


def instances(n=300, seed=0, lacking=0.2):
    """Random problems and their generator. Each limit, as an alpha, is uniform in [-lacking, 1 + lacking]."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        tp, H = 2 ** int(rng.integers(0, 3)), 4 * int(rng.integers(1, 9))
        tensors = skeletal(int(rng.integers(1, 4)), 64 * int(rng.integers(1, 5000)), H * 64, H,
                           int(rng.choice([2, 4])), tp=tp)
        tensors = {name: replace(t, nbytes=int(t.nbytes)) for name, t in tensors.items()}
        p = problem(tensors, int(rng.integers(3, 90)), 1.0, 1.0, 1)
        forward_s, host = p.always_bytes + p.others_bytes * rng.uniform(-lacking, 1 + lacking, 2)
        yield replace(p, forward_s=(max(forward_s, 0) / 3e9,), offload_bytes_per_s=3e9,
                      host_bytes=int(max(0, host) * p.n_swapped)), rng


def copied(p, fractions):
    """Bytes of one layer, tensor by tensor."""
    return sum(b * fractions.get(name, (1,))[0] for name, b in p.nbytes.items())


def under_limits(p, fractions, slack=0.0):
    layer = copied(p, fractions) * (1 - slack)
    return (layer / p.offload_bytes_per_s <= p.forward_s[0]) & (p.n_swapped * layer <= p.host_bytes)


def test_the_groups_are_the_others():
    assert sorted(n for g in GROUPS.values() for n in g) == sorted(OTHERS)
    assert set(OTHERS).isdisjoint({"x", "attn_out", "lse"})


def test_closed_form_against_brute_force():
    grid = np.linspace(0, 1, 2001)
    over = 0
    for p, _ in instances():
        allowed = grid[under_limits(p, dict.fromkeys(OTHERS, (grid,)))]
        got = paper(p)
        assert all(f == (pytest.approx(got.alpha, abs=1e-12),) for f in got.fractions.values())
        if allowed.size:
            assert allowed[-1] - 1e-12 <= got.alpha <= allowed[-1] + grid[1]
            assert under_limits(p, got.fractions, slack=1e-14)
        else:
            over += 1
            assert got.alpha == 0 and min(got.limits.values()) < 0
        assert got.host_bytes <= p.host_bytes or not got.fits
    assert 20 < over < 150


def test_the_limits_are_reported_one_by_one():
    tensors = skeletal(1, 4096, 256, 4, 2)
    p = problem(tensors, 12, 1.0, 1.0, 1)
    always, others, layer = p.always_bytes, p.others_bytes, sum(t.nbytes for t in tensors.values())

    def limits(overlap, host):
        return paper(problem(tensors, 12, (always + overlap * others) / 1e9, 1e9,
                             10 * always + 10 * others * host))

    got = limits(0.78, 1.5)
    assert got.limits == pytest.approx({"overlap": 0.78, "host": 1}) and got.binds == "overlap"
    assert got.alpha == pytest.approx(0.78) and got.input_only == 0
    assert got.layer_bytes == int(always + got.alpha * others)
    assert got.host_bytes == 10 * got.layer_bytes
    got = limits(0.78, 0.25)
    assert got.limits == pytest.approx({"overlap": 0.78, "host": 0.25}) and got.binds == "host"
    got = limits(1, 1)
    assert got.alpha == 1 and got.limits["host"] == 1 and got.host_bytes == 10 * layer
    got = limits(3, 3)
    assert got.alpha == 1 and got.limits == {"overlap": 1, "host": 1} and got.binds is None
    got = limits(-0.1, 0.5)  # the copy of x and attn_out does not hide, and is made all the same
    assert got.limits["overlap"] == pytest.approx(-0.1) and got.binds == "overlap" and got.alpha == 0
    assert got.layer_bytes == always and got.input_only == 0 and got.fits


@pytest.mark.parametrize("n_layer", [1, 2])
def test_the_last_two_layers_are_never_swapped(n_layer):
    p = problem(skeletal(1, 4096, 256, 4, 2), n_layer, 0.0, 1.0, 0)
    for got in (paper(p), fixed_alpha(p, 1, 4096), per_tensor(p, dict.fromkeys(GROUPS, 1.0))):
        assert got.alpha == 1 and got.host_bytes == got.layer_bytes == got.input_only == 0
        assert got.fits and got.binds is None
    assert largest_block_size(p, 4096, 2) == inf


def most_saved(p, recompute_s):
    """The linear program: the most seconds under both limits."""
    saved, size = ([of[g] for g in GROUPS] for of in
                   (recompute_s, {g: sum(p.nbytes[n] for n in names) for g, names in GROUPS.items()}))
    room = [max(0, n - p.always_bytes)
            for n in (p.forward_s[0] * p.offload_bytes_per_s, p.host_bytes / p.n_swapped)]
    scale = max(size)
    got = linprog([-s / max(saved) for s in saved], A_ub=[[n / scale for n in size]] * 2,
                  b_ub=[n / scale for n in room], bounds=(0, 1), method="highs")
    return -got.fun * max(saved)


@pytest.mark.slow
def test_per_tensor_is_the_linear_programs_best_and_never_worse_than_paper():
    better = 0
    for p, rng in instances(seed=1):
        recompute_s = dict(zip(GROUPS, 10 ** rng.uniform(-6, -1, len(GROUPS)), strict=True))
        recompute_s["gelu_out"] *= rng.integers(0, 2)
        got, single = per_tensor(p, recompute_s), paper(p)
        saved, paper_saved = (sum(recompute_s[g] * q.fractions[g][0] for g in GROUPS) for q in (got, single))
        assert saved == pytest.approx(most_saved(p, recompute_s), rel=1e-5, abs=1e-12)
        assert saved >= paper_saved * (1 - 1e-6)
        better += saved > 1.05 * paper_saved
        assert all(0 <= f[0] <= 1 for f in got.fractions.values())
        assert all(len({got.fractions[n] for n in names}) == 1 for names in GROUPS.values())
        assert got.alpha * p.others_bytes == pytest.approx(copied(p, got.fractions) - p.always_bytes)
        assert got.host_bytes <= p.host_bytes or not got.fits
        assert (got.limits, got.binds) == (single.limits, single.binds)
        assert got.input_only == single.input_only
        if min(got.limits.values()) >= 0:
            assert under_limits(p, got.fractions, slack=1e-14)
    assert better > 100


def test_input_only_are_the_least_that_fit():
    below = oohm = 0
    for p, _ in instances(seed=2, lacking=0.3):
        x, always, layers = p.nbytes["x"], p.always_bytes, p.n_swapped
        enough = [n for n in range(layers + 1) if n * x + (layers - n) * always <= p.host_bytes]
        got = paper(p)
        assert got.fits == bool(enough)
        assert got.input_only == (enough[0] if enough else layers)
        if enough and enough[0]:
            below += 1
            assert got.alpha == 0 and got.limits["host"] < 0
            assert got.host_bytes == enough[0] * x + (layers - enough[0]) * always
        if not enough:
            oohm += 1
            assert got.host_bytes == layers * x == layers * got.layer_bytes
    assert below > 20 and oohm > 20


def test_an_alpha_by_hand():
    tensors = skeletal(2, 4096, 256, 4, 2)
    layer = sum(t.nbytes for t in tensors.values())
    p = problem(tensors, 12, 0.0, 1.0, 10 * layer)  # the host holds all to the byte; time does not count
    got = fixed_alpha(p, 1, 4096)
    assert got.alpha == 1 and got.host_bytes == 10 * layer and got.layer_bytes == layer and got.fits
    assert fixed_alpha(p, 0, 4096).host_bytes == 10 * p.always_bytes
    short = problem(tensors, 12, 0.0, 1.0, 5 * layer)
    with pytest.raises(OutOfHostMemory,
                       match=r"^alpha=1 needs 0\.\d+ GiB .* 10 swapped layers, this rank has 0\.\d+ GiB; "
                             r"the largest alpha that fits is 0\.42\d, "
                             r"the largest block_size with this alpha 2048$") as e:
        fixed_alpha(short, 1, 4096)
    largest = float(str(e.value).split("fits is ")[1].split(",")[0])
    assert fixed_alpha(short, largest, 4096).host_bytes <= 5 * layer
    with pytest.raises(OutOfHostMemory):
        fixed_alpha(short, largest + 0.001, 4096)
    with pytest.raises(OutOfHostMemory, match="not even alpha=0 fits; try alpha=auto"):
        fixed_alpha(problem(tensors, 12, 1.0, 1.0, 10 * tensors["x"].nbytes), 0, 4096)


@pytest.mark.parametrize("fraction,n,granularity,want", [
    (0, 4096, 256, 0), (1, 4096, 256, 4096), (1, 1000, 256, 1000), (0.999, 1000, 256, 512),
    (0.999, 200, 256, 0), (0.999, 4096, 256, 3840), (0.5, 4096, 256, 2048),
    (0.81, 98304, 98304 // 8, 6 * 98304 // 8), (0.29, 100, 1, 29), (0.3, 10 * 256, 256, 3 * 256),
    (1e-9, 4096, 256, 0)])
def test_rows(fraction, n, granularity, want):
    assert rows(fraction, n, granularity) == want


def test_the_largest_block_size_is_the_last_that_fits():
    rng = np.random.default_rng(3)
    for _ in range(100):
        cp, n_layer, host = (int(v) for v in rng.integers([1, 3, 2**24], [5, 90, 2**40]))

        def of(S):
            return problem(skeletal(2, S // cp, 512, 8, 2, tp=2), n_layer, 1.0, 1e9, host)  # noqa: B023

        longest = largest_block_size(of(2400), 2400, 2 * cp)
        assert longest % (2 * cp) == 0
        assert paper(of(longest)).fits and not paper(of(longest + 2 * cp)).fits


# The paper's 7B on one node of 8 A800, bf16.

def paper_problem(table, S, host_bytes=HOST_BYTES):
    """Forward at 62% of the peak: a third of the layer's 6 S P_layer + 6 C S^2 FLOPs, over all GPUs."""
    m = PAPER["models"][table["model"]]
    C, tp, cp = m["n_embd"], table["tp"], table["cp"]
    flops = 2 * S * 12 * C**2 + 2 * C * S**2
    forward_s = flops / table["gpus"] / (0.62 * PAPER["peak_flops"])
    tensors = skeletal(1, S // cp, C, m["n_head"], 2, tp=tp)
    return problem(tensors, m["n_layer"], forward_s, OFFLOAD_BYTES_PER_S, host_bytes)


@pytest.mark.parametrize("S", [196608, 262144, 327680])
def test_the_best_alpha_of_table_5(S):
    table = PAPER["table5"]
    measured = [mfu for mfu in table["mfu_percent"][str(S)] if mfu != "oohm"]
    best = table["alpha"][measured.index(max(measured))]
    assert rows(paper(paper_problem(table, S)).alpha, S, S // 8) / S == best


def test_the_oohm_cells_of_table_4():
    table = PAPER["table4"]
    for S, cell in zip(table["seq_tokens"], table["mfu_percent"]["full_swap+plan"], strict=True):
        if cell == "oohm":
            with pytest.raises(OutOfHostMemory):
                fixed_alpha(paper_problem(table, S), 1, S)
        else:
            assert fixed_alpha(paper_problem(table, S), 1, S).fits


def test_what_ran_in_the_paper_fits():
    table = PAPER["table4"]
    for S, cell in zip(table["seq_tokens"], table["mfu_percent"]["memo"], strict=True):
        got = paper(paper_problem(table, S))
        assert cell != "oohm"
        assert got.fits and got.input_only == 0


def test_a_slab_of_the_exact_size_swaps_longer_sequences():
    """All of the node's memory instead of half of it: the first OOHM cell of Table 4 fits."""
    host = PAPER["setup"]["host_memory_bytes_per_node"] / PAPER["setup"]["gpus_per_node"]
    assert fixed_alpha(paper_problem(PAPER["table4"], 393216, host), 1, 393216).fits


def test_the_plan_of_rounded_fractions_is_what_is_copied():
    p = paper_problem(PAPER["table5"], 196608)
    N = 196608 // PAPER["table5"]["cp"]
    chosen = paper(p)
    rounded = plan(p, {n: (rows(f, N, N // 8) / N,) for n, (f,) in chosen.fractions.items()})
    assert rounded.alpha == 0.75 and rounded.host_bytes == 30 * (p.always_bytes + p.others_bytes * 3 // 4)
    assert rounded.host_bytes < chosen.host_bytes


# --- several subsequences ---

CFG = Layout(n_layer=2, n_head=2, n_embd=64, vocab_size=100, block_size=4096, subsequences=4,
             alpha_mode="paper")
ITEMSIZE = 4


def rates_of(cfg, rate, backward=2.0, recompute=0.5):
    """Rates whose units take a second for each 1,024 own rows, and for their share of attention, as much
    again in the last one; copies at `rate`, in units of what a layer's rows need beside its forward."""
    cuts, units, before = unit_rows(cfg, 1, cfg.block_size), [], 0
    tensors = tensors_of(cfg, ITEMSIZE)
    nbytes = {g: sum(tensors[n].nbytes for n in names) for g, names in groups_of(tensors).items()}
    for n in cuts or (cfg.block_size,):
        forward_s = n / 1024 * (1 + (before + n / 2) / cfg.block_size)
        others = {g: recompute * n / 1024 * b / sum(nbytes.values()) for g, b in nbytes.items()}
        units.append(UnitRates(n, forward_s, backward * forward_s, n / 4096, forward_s - n / 2048, others))
        before += n
    forward_s = sum(unit.forward_s for unit in units)
    speed = rate * sum(t.nbytes for t in tensors.values()) / forward_s
    return Rates(tuple(units), speed, speed, None)


def step_of(placement, tensors, rates):
    """(seconds, of which waiting)."""
    forward, backward, stall = totals_of(placement.program, step_seconds(
        placement, tensors, rates.units, rates.offload_bytes_per_s, rates.states))
    return forward + backward, stall


def best_of_all(cfg, rates, host_bytes):
    """The fewest seconds over all fates: each subsequence's alpha in quarters, keys copied or made, where no
    copy stalls that would not with alpha = 0."""
    tensors, best = tensors_of(cfg, ITEMSIZE), inf
    p = placed(cfg, 2)
    for keys in {p.keys, "made"} if p.keys == "copied" else {p.keys}:
        for quarters in product(range(5), repeat=len(p.cuts)):
            kept = {name: tuple(n * q // 4 for n, q in zip(p.cuts, quarters, strict=True)) if t.group
                    else cfg.block_size for name, t in tensors.items()}
            one = replace(p, keys=keys, kept=kept)
            if Sizes(one, tensors).host_bytes > host_bytes:
                continue
            seconds, stall = step_of(one, tensors, rates)
            if not any(quarters):
                least = stall  # product() gives this one first
            if stall <= least + 1e-9:
                best = min(best, seconds)
    return best


@pytest.mark.parametrize("rate", [1.1, 1.5])
@pytest.mark.parametrize("N", [1, 4])
def test_alpha_leaves_room_on_the_link_for_states(N, rate):
    """The step is no slower, in the simulator's time, than with the alpha of states that stay."""
    cfg = replace(CFG, n_layer=8, subsequences=N, states="host")
    tensors, rates = tensors_of(cfg, ITEMSIZE), rates_of(cfg, rate, recompute=0.1)
    found = []
    for part in (0.0, 1.2, 1.6):  # of a layer's forward, on the same link
        one = replace(rates, states=StateSeconds(part * rates.forward_s, part * rates.forward_s))
        problems = [problem_of(cfg, ITEMSIZE, one, Room(2**40), **way) for way in ways_of(cfg)]
        found.append((one, *place_whole(cfg, problems, one)[:2]))
    alphas = [plan.alpha for _, _, plan in found]
    assert alphas == sorted(alphas, reverse=True) and alphas[0] > alphas[2] + 0.1
    (_, before, _), *others = found
    steps = [[step_of(p, tensors, one) for p in (placement, before)] for one, placement, _ in others]
    assert all(mine <= theirs for mine, theirs in steps) and steps[-1][0] < steps[-1][1]


def slow(**keys):
    return pytest.param(keys, marks=pytest.mark.slow)


TWO = dict(n_layer=4, subsequences=2)


@pytest.mark.parametrize("rate", [0.7, 1.1, 1.5])
@pytest.mark.parametrize("keys", [
    TWO, TWO | dict(subsequence_cut="flops"), TWO | dict(unit_order="subsequence"), slow(),
    slow(subsequence_cut="flops"), slow(unit_order="subsequence")], ids=str)
def test_the_program_is_as_good_as_the_best_of_all_fates(keys, rate):
    cfg = replace(CFG, **keys)
    rates, tensors = rates_of(cfg, rate), tensors_of(cfg, ITEMSIZE)
    whole = sum(t.nbytes for t in tensors.values()) * cfg.n_layer
    for host in (whole, whole // 3):
        problems = [problem_of(cfg, ITEMSIZE, rates, Room(host), **one) for one in ways_of(cfg)]
        placement, plan, _ = place_whole(cfg, problems, rates)
        got, best = step_of(placement, tensors, rates)[0], best_of_all(cfg, rates, host)
        print(keys, rate, host, plan.alphas, placement.keys, got, best)
        assert Sizes(placement, tensors).host_bytes <= host
        assert got <= best * 1.02


def test_with_one_subsequence_the_program_is_memos():
    tensors = skeletal(1, 4096, 256, 4, 2)
    always = sum(tensors[n].nbytes for n in ("x", "attn_out", "lse"))
    others = sum(t.nbytes for t in tensors.values()) - always
    for seconds, host in product((1.5, 2.5, 9.0), (3, 6, 40)):
        host *= 10 * always
        got = paper(problem(tensors, 12, seconds * always / 1e9, 1e9, host))
        copied_in_time = min(1.0, (seconds * always / 1e9 * 1e9 - always) / others)
        fits = min(1.0, (host - 10 * always) / (10 * others))
        assert got.alphas == (max(0.0, min(copied_in_time, fits)),) and got.alpha == got.alphas[0]


@pytest.mark.parametrize("carried", [0.3, 0.7, 5.0])
def test_with_recompute_forbidden_and_equal_flops_the_ratios_are_sppos(carried):
    """`carried`: of the first subsequence's activations what the link carries while the next one computes."""
    N, cuts = 8, (2048, 1536, 1280, 1024, 896, 768, 640, 512)  # equal FLOPs: early ones are longer
    p = Placement(1, 2, sum(cuts), cuts=cuts, order="subsequence")
    layer = decoder_layer(64, 2, 2, 32, 256, subsequences=True)
    problem = AlphaProblem(p, layer.tensors(1, sum(cuts), 4), (1.0,) * N, 1.0, 2**40, 2.0**40)
    whole = problem.always_bytes + problem.others_bytes
    A = [whole * n // sum(cuts) for n in cuts]
    link = carried * A[0]
    problem = replace(problem, offload_bytes_per_s=link)
    stays = rows_that_stay(problem)
    placement = replace(p, stays=stays)
    sizes = Sizes(placement, problem.tensors)
    travels = [sizes.moved(step) for step in placement.schedule() if step.op is Op.OFFLOAD]
    rests = [sum(n for _, n in sizes.kept_bytes(k, resident=True).values())
             for k in range(N)]
    row = whole / sum(cuts)
    for i in range(N - 2):
        assert travels[i] + rests[i] == A[i]  # nothing is computed again
        assert travels[i] == pytest.approx(min(A[i], link), abs=row)
        assert travels[i] <= min(A[i], link) + 1
    assert len(travels) == N - 2 and rests[-2:] == [0, 0]  # the last ones stay in their buffers
    units = [UnitRates(n, 1.0, 2.0, 0.0, 0.0, {}) for n in cuts]
    forward, backward, stall = totals_of(
        placement.program, step_seconds(placement, problem.tensors, units, link))
    assert (forward, backward, stall) == (N, 2 * N, 0)
    resident = sum(rests)
    if resident:  # on a device with half the room half as many rows stay
        least = Sizes(p, problem.tensors).device_bytes
        half = replace(p, stays=rows_that_stay(replace(problem, device_bytes=least + resident / 2)))
        here = sum(Sizes(half, problem.tensors).survivor_bytes(resident=True).values())
        assert resident / 2 - N * row <= here <= resident / 2
        assert Sizes(half, problem.tensors).device_bytes <= least + resident / 2
        assert not rows_that_stay(replace(problem, device_bytes=least - 1))


@pytest.mark.parametrize("cut", ["equal", "flops"])
@pytest.mark.parametrize("order", ["layer", "subsequence"])
def test_the_slab_never_exceeds_the_host_and_nearly_fills_it(cut, order):
    cfg = replace(CFG, n_layer=6, block_size=2**15, subsequence_cut=cut, unit_order=order)
    whole = cfg.n_layer * sum(t.nbytes for t in tensors_of(cfg, ITEMSIZE).values())
    rates = rates_of(cfg, 5.0)
    for mode, n_buffers, part in product(("paper", "per_tensor"), (2, 3, 7), np.linspace(0.02, 1, 15)):
        host, way = int(part * whole), replace(cfg, alpha_mode=mode)
        problems = [problem_of(way, ITEMSIZE, rates, Room(host), **one) for one in ways_of(way)]
        problems = [replace(p, placement=replace(p.placement, n_buffers=n_buffers)) for p in problems]
        try:
            p, plan, _ = place_whole(way, problems, rates)
        except OutOfHostMemory:
            assert all(host < problem.least_bytes for problem in problems)
            continue
        taken = Sizes(p, problems[0].tensors).host_bytes
        assert taken <= host
        if plan.alpha and plan.binds == "host":
            assert plan.host_bytes == pytest.approx(taken, abs=p.n_units) and taken > host - whole / 20


def test_a_host_that_lacks_room_has_keys_made_again_then_attention():
    cfg = replace(CFG, n_layer=6)
    copied, made, *_ = [problem_of(cfg, ITEMSIZE, None, Room(0), **one) for one in ways_of(cfg)]
    assert (copied.placement.keys, made.placement.keys) == ("copied", "made")

    def found(host):
        p, *_ = place_whole(cfg, [replace(way, host_bytes=host) for way in (copied, made)], None)
        assert Sizes(p, copied.tensors).host_bytes <= host
        return p.keys, p.input_only
    assert found(copied.needed_bytes(0)) == ("copied", 0)
    assert found(copied.needed_bytes(0) - 1) == ("made", 0)
    assert found(made.needed_bytes(0)) == ("made", 0)
    unit = made.unit_bytes(made.always_bytes, [0] * 4)[0] - made.input_bytes[0]
    assert found(made.needed_bytes(0) - 1) == ("made", 1)
    assert found(made.needed_bytes(0) - unit - 1) == ("made", 2)
    assert found(made.least_bytes) == ("made", made.n_swapped)
    with pytest.raises(OutOfHostMemory, match=r"^block_size=4096 needs .* 22 swapped units, "):
        found(made.least_bytes - 1)
    half = made.needed_bytes(0.5)
    ways = [replace(way, host_bytes=half) for way in (copied, made)]
    p, *_ = place_whole(replace(cfg, alpha=0.5), ways, None)
    assert p.keys == "made" and Sizes(p, made.tensors).host_bytes == half


def test_the_stream_is_copied_where_it_does_not_fit_whole():
    cfg = replace(CFG, n_layer=6, subsequences=8, alpha=0.0)
    tensors, host = tensors_of(cfg, ITEMSIZE), 10**12
    whole, *_ = decide(cfg, ITEMSIZE, None, Room(host))
    need = Sizes(whole, tensors).device_bytes
    for spare, stream in ((need, "whole"), (need - 1, "copied"), (0, "copied")):
        p, *_ = decide(cfg, ITEMSIZE, None, Room(host, spare))
        assert (p.stream, p.keys) == (stream, "copied")
    before, after = Sizes(whole, tensors), Sizes(p, tensors)
    assert after.device_bytes < need and after.host_bytes > before.host_bytes
