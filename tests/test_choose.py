"""subsequences=auto: which numbers are tried, what is taken, and that all else knows numbers."""

import json
import random
from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace

import pytest

import train
from memo.config.config import Config, as_keys
from memo.config.layer import layer_of, tensors_of
from memo.config.layout import Layout
from memo.decide.choose import Judged, choose, choose_subsequences, numbers_of, with_stages
from memo.decide.step_seconds import step_seconds
from memo.decide.where import Rates, Room, all_kept, decide, place_whole, problem_of
from memo.errors import ConfigError, OutOfHostMemory
from memo.estimate.__main__ import main
from memo.estimate.arena import fast_arena
from memo.estimate.budget import choose_fastest, estimate
from memo.estimate.search import estimate_or_none, longest
from memo.estimate.unit_seconds import modelled_rates
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.run.prepare import saved_choice
from memo.schedule.periods import totals_of
from memo.system import hardware
from tests.helpers import argv, choosing, losses

AUTO = dict(subsequences="auto", subsequence_cut="auto", unit_order="auto", states="auto")
ONE = dict(subsequences=1, subsequence_cut="equal", unit_order="layer")
H100 = hardware.machine("h100-80gb")
SMALL = dict(n_layer=6, n_head=8, n_embd=1024, vocab_size=1024, dtype="bfloat16")


def numbers(cfg):
    return cfg.subsequences, cfg.subsequence_cut, cfg.unit_order


def made(S=2**16, **keys):
    return Config(**SMALL | AUTO | dict(block_size=S) | keys)


def test_the_numbers_that_are_tried():
    assert numbers_of(made(2**16)) == [1, 2, 4, 8, 16, 32]
    assert numbers_of(made(4095)) == [1] and numbers_of(made(512)) == [1]
    assert numbers_of(made(2**24))[-1] == 256
    assert numbers_of(made(2**16, cp=4, tp=4)) == [1, 2, 4, 8, 16]  # 128 times what a ring needs is more
    assert numbers_of(made(2**16, subsequences=3)) == [3]


@pytest.mark.parametrize(("seconds", "lacks", "taken", "why"), [
    ({1: 1.0, 2: 1.1, 4: 1.2}, {}, 1, "none is 3% faster"),
    ({1: 1.0, 2: 0.98, 4: 0.975}, {}, 1, "none is 3% faster"),  # equals: the fewest
    ({1: 1.0, 2: 0.98, 4: 0.9, 8: 0.95}, {}, 4, "faster than 2"),
    ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}, {1: 9, 2: 4}, 4, "2 does not fit the device"),
    ({1: 1.0, 2: 1.1, 4: 1.2, 8: 0.9}, {1: 9, 2: 4}, 8, "faster than 4"),
    ({}, {1: 9}, 2, "1 does not fit"), ({}, {}, 1, "it fits"),  # no speeds are known
    ({}, {1: 5, 2: 9, 4: 6}, 8, "4 does not fit"),  # several need what one alone does not
    ({}, {1: 9, 2: 8, 4: 7.9, 8: 7.8}, 8, "none fits the device")])
def test_the_fewest_of_the_fastest_that_fit(seconds, lacks, taken, why):
    def judge(one):
        n = one.subsequences
        lacking = lacks.get(n, 7.79 if len(lacks) == 4 else 0)
        return Judged(lacking, seconds.get(n, 2.0 * n if seconds else 0.0), "the device")
    cfg, said = choose_subsequences(made(subsequence_cut="equal", unit_order="layer"), judge)
    assert cfg.subsequences == taken and why in said


def test_it_stops_where_more_only_cost_time_and_orders_come_last():
    tried = []

    def judge(one):
        tried.append(numbers(one))
        seconds = {1: 2.0, 2: 1.0, 4: 3.0, 8: 4.0}[one.subsequences] - 0.1 * (one.unit_order != "layer")
        return Judged(0, seconds)
    found = choose_subsequences(made(), judge)[0]
    assert numbers(found) == (2, "equal", "subsequence")  # faster by more than equally
    assert tried == [(1, "equal", "layer"), *product((2, 4, 8), ("equal", "flops"), ("layer",)),
                     (2, "equal", "subsequence"), (2, "flops", "subsequence")]
    alone = choose_subsequences(made(), lambda one: Judged(one.unit_order == "layer", 1.0, "the host"))[0]
    assert numbers(alone) == (2, "equal", "subsequence")  # it alone fits


@pytest.mark.parametrize(("seconds", "lacks", "taken", "why"), [
    ({1: 9.0, 2: 6.0, 4: 5.0, 8: 7.0}, (), 4,
     "with pp=2 the same tokens take 1.20 times as long; 64 subsequences"),
    ({1: 9.0, 2: 5.1, 4: 5.0, 8: 7.0}, (), 2, "with pp=4 the same tokens take 0.98"),  # equals: the fewest
    ({1: 1.0, 2: 6.0, 4: 5.0, 8: 7.0}, (1, 4), 2, "with pp=8 the same tokens take 1.17 times"),
    ({}, (1,), 2, "pp=4 fits too"), ({}, (1, 2, 4), 8, "no other fits"),
    ({}, (1, 2, 4, 8), 8, "no number of stages fits the device")])
def test_the_fewest_stages_of_the_fastest_that_fit(seconds, lacks, taken, why):
    cfg = made(2**20, n_layer=12, pp="auto", gradient_accumulation_steps=8)
    assert [one.pp for one in with_stages(cfg, 8)] == [1, 2, 4, 8]
    one, said = choose(cfg, lambda one: Judged((9 - one.pp) * (one.pp in lacks), seconds.get(one.pp, 0.0),
                                               "the device"), 8)
    assert one.pp == taken and said.startswith(f"pp={taken} chosen, ") and why in said
    assert cfg.undecided and not one.undecided and (one.unit_order == "subsequence") == (taken > 1)


@pytest.mark.parametrize("lacks, seconds, world, taken", [
    ((), {"sharded": 0.5, "host": 0.5}, 2, "device"), (("device",), {"sharded": 2.0, "host": 1.5}, 2, "host"),
    (("device",), {"sharded": 1.0, "host": 1.5}, 2, "sharded"), (("device",), {}, 1, "host"),
    (("device", "sharded"), {"host": 9.0}, 2, "host"),
    (("device", "sharded", "host"), {}, 2, "device")])  # none fits: the least is lacking there
def test_states_leave_the_device_only_where_that_is_too_small(lacks, seconds, world, taken):
    def judge(one):
        short = dict(device=1, sharded=2, host=3)[one.states] * (one.states in lacks)
        return Judged(short, seconds.get(one.states, 1.0), "the device")
    one, why = choose(made(4096, gradient_accumulation_steps=world), judge, world)
    assert one.states == taken and not one.undecided
    assert ("states=device does not fit the device" in why) == (taken != "device")
    stages = made(2**20, pp=2, unit_order="subsequence", gradient_accumulation_steps=world)
    assert choose(stages, judge, 2 * world)[0].states == "device"  # stages need all their layers


def test_stages_leave_alone_what_is_given():
    given = dict(subsequences=24, subsequence_cut="equal", pp="auto", gradient_accumulation_steps=4)
    for one in with_stages(made(2**20, **given), 4):
        assert (one.subsequences, one.subsequence_cut) == (24, "equal")
    layer = made(2**20, pp="auto", unit_order="layer", gradient_accumulation_steps=4)
    assert [one.pp for one in with_stages(layer, 4)] == [1]
    with pytest.raises(ConfigError, match=r"^pp=auto has no room .* WORLD_SIZE\(24\), .*; try "
                                          r"--gradient_accumulation_steps=auto, or another tp or cp$"):
        with_stages(made(tp=8, pp="auto", gradient_accumulation_steps=1), 24)
    dealt = made(tp=8, pp="auto", n_layer=8)  # each dp rank gets one micro batch
    assert [(one.pp, one.micro_batches(3 // one.pp)) for one in with_stages(dealt, 24)] == [(1, 3)]
    # others do not deal a single micro batch out
    alone = made(2**15, pp="auto", n_layer=8, gradient_accumulation_steps=1)
    for lacks, said in ((0, "no other is possible; 16 subsequences"),
                        (1, "no other is possible; it does not fit the host")):
        one, why = choose(alone, lambda one, lacks=lacks: Judged(lacks, 1.0, "the host"), 8)
        assert one.pp == 8 and why.startswith(f"pp=8 chosen, {said}")
    more = made(tp=8, pp="auto", n_layer=8, gradient_accumulation_steps=3)
    assert [one.pp for one in with_stages(more, 24)] == [1]
    with pytest.raises(ConfigError, match=r"^pp=auto has no room .*; try 8 ranks$"):
        with_stages(made(tp=8, pp="auto"), 12)
    with pytest.raises(ConfigError, match="pp=auto needs the number of ranks .*; give --gpus="):
        main(["config/7b_1m.py", "--gpu=h100-80gb", "--pp=auto", "--fast"])


def test_a_resumed_run_keeps_its_stages_while_they_fill_the_world():
    cfg = made(pp="auto")
    asked = {name: value for name, value in as_keys(cfg).items() if value == "auto"}
    four = Layout.of(cfg, pp=4, subsequences=16, subsequence_cut="flops", unit_order="subsequence")
    ckpt = SimpleNamespace(config=as_keys(four) | dict(asked=asked))
    assert saved_choice(cfg, ckpt, 4) == four
    assert saved_choice(cfg, ckpt, 2) is None and saved_choice(made(pp=4), ckpt, 4) is None


def test_nothing_is_tried_without_need():
    tried = []

    def judge(one):
        tried.append(numbers(one))
        return Judged(one.subsequences < 2, 1.0, copies=False)
    assert choose_subsequences(made(4095), judge) == (Layout.of(made(4095), **ONE), "") and not tried
    assert choose_subsequences(made(), judge)[0].subsequences == 2  # it fits and copies nothing
    assert tried == [(1, "equal", "layer"), (2, "equal", "layer")]


def test_what_nobody_has_decided_on_is_one_subsequence_or_equal_ones_layer_by_layer():
    cfg, four = Config(**SMALL), Config(**SMALL, subsequences=4)
    assert cfg.undecided and four.undecided and not Config(**SMALL, subsequences=1,
                                                                  states="device").undecided
    L, one = cfg.n_layer, Layout.of(cfg)
    assert all_kept(one, 1, 4096) == all_kept(replace(one, **ONE), 1, 4096) == Placement(L, L, 4096)
    assert all_kept(Layout.of(four), 1, 4096) == Placement(L, 4 * L, 4096, cuts=(1024,) * 4)
    assert layer_of(cfg) == layer_of(replace(cfg, **ONE)) != layer_of(four)


def simulated(room, rate):
    """A judge: decide() and the schedule's simulator, with modelled seconds of a layer."""
    def judge(one):
        rates = Rates(modelled_rates(one, H100, 2).units, rate, rate, None)
        try:
            placement, *_ = decide(one, 2, rates, room)
        except OutOfHostMemory:
            return Judged(inf, where="the host")
        tensors = tensors_of(one, 2)
        over = Sizes(placement, tensors).device_bytes - room.spare_bytes
        seconds = step_seconds(placement, tensors, rates.units, rate)
        forward, backward, _ = totals_of(placement.program, seconds)
        return Judged(max(0, over), forward + backward, "the device")
    return judge


@pytest.mark.parametrize("S, rate", [
    (2**16, 10e9), *(pytest.param(2**16, rate, marks=pytest.mark.slow) for rate in (2e9, 50e9)),
    *(pytest.param(2**18, rate, marks=pytest.mark.slow) for rate in (2e9, 10e9, 50e9))])
def test_the_choice_is_near_the_best_of_a_grid(S, rate):
    """Over N, cut, order and alpha in eighths, on a device that four units of a quarter fit."""
    cfg = made(S)
    layer = sum(t.nbytes for t in tensors_of(cfg, 2).values())
    room = Room(2**40, 1.6 * layer)
    judge = simulated(room, rate)
    got = judge(choose_subsequences(cfg, judge)[0])
    assert not got.lacking
    best = inf
    for n in (1, 4, 16):
        for cut in ("equal", "flops"):
            one = Layout.of(cfg, subsequences=n, subsequence_cut=cut, unit_order="layer")
            costs = modelled_rates(one, H100, 2)
            for k in range(9):
                fixed = replace(one, alpha=k / 8)
                try:
                    placement, *_ = place_whole(fixed, [problem_of(fixed, 2, None, room)], None)
                except OutOfHostMemory:
                    continue
                tensors = tensors_of(one, 2)
                if Sizes(placement, tensors).device_bytes <= room.spare_bytes:
                    seconds = step_seconds(placement, tensors, costs.units, rate)
                    best = min(best, sum(totals_of(placement.program, seconds)[:2]))
    assert best < inf and got.seconds <= 1.03 * best


def big(S, **keys):
    shape = dict(n_layer=32, n_head=32, n_embd=4096, vocab_size=50257, tp=8, dtype="bfloat16")
    return Config(**shape | AUTO | dict(block_size=S) | keys)


@pytest.mark.slow
def test_one_where_it_fits_and_several_where_it_does_not():
    assert estimate(big(2**20), H100, 8, fast_arena).cfg.subsequences == 1
    got = estimate(big(2**22), H100, 8, fast_arena)
    n, cut, order = numbers(got.cfg)
    assert n > 1 and order == "layer" and got.fits and not got.cfg.undecided and got.asked.undecided
    assert got.chosen == f"chosen, {n // 2} does not fit the device"
    fewer = replace(got.cfg, subsequences=n // 2)
    assert not estimate(fewer, H100, 8, fast_arena).fits
    assert estimate(got.cfg, H100, 8, fast_arena).seconds == got.seconds  # behind it there are numbers only


def test_a_host_that_is_too_small_is_named():
    small = replace(H100, node=replace(H100.node, host_memory_bytes=int(2e11)))
    got = estimate(big(2**22), small, 8, fast_arena)
    assert not got.fits and got.chosen.startswith("chosen, none fits") and "the host" in got.chosen


@pytest.mark.slow
def test_the_longest_context_needs_several(monkeypatch):
    monkeypatch.setattr("memo.decide.choose.MOST_SUBSEQUENCES", 16)  # for speed
    cfg = big(2**20, n_layer=4, unit_order="layer", subsequence_cut="equal")
    small = replace(H100, memory_bytes=int(16e9))
    most = longest(cfg, small, 8, fast_arena)
    whole = longest(replace(cfg, subsequences=1), small, 8, fast_arena)
    assert most.cfg.subsequences > 1 and most.fits and most.cfg.block_size > 1.3 * whole.cfg.block_size
    few = estimate_or_none(most.asked, small, 8, fast_arena)
    assert few.cfg.subsequences <= most.cfg.subsequences and few.fits


def calibrated(machine, factor, name):
    """As --calibrate found it on a machine of that name, `factor` times as fast with full attention, which
    many subsequences have more of."""
    table = {op: [(size, rate * (factor if "full" in op else 1)) for size, rate in points]
             for op, points in H100.speeds.table.items()}
    table |= {f"{kernel} full {way}": [(1, factor * rate) for _, rate in H100.speeds.table[f"{kernel} {way}"]]
              for kernel in ("cudnn", "attention") for way in ("forward", "backward")}
    itemsize = 4 if machine.cpu else 2
    return replace(machine, name=name, speeds=hardware.Speeds(table, 0.0, itemsize), measured=True)


@pytest.mark.slow
def test_what_was_measured_of_a_machine_chooses_nothing(monkeypatch):
    """But its type does, where that is known."""
    monkeypatch.setattr("memo.decide.choose.MOST_SUBSEQUENCES", 8)  # for speed
    small = replace(H100, memory_bytes=int(12e9))
    cfg = big(2**18, n_layer=8)
    of_type = choose_fastest(cfg, small, 8)
    for factor in (0.01, 1, 100):
        machine = calibrated(small, factor, "NVIDIA H100 80GB HBM3")
        got = choose_fastest(cfg, machine, 8)
        assert (numbers(got.cfg), got.chosen) == (numbers(of_type.cfg), of_type.chosen)
        shown = estimate(cfg, machine, 8, fast_arena)
        assert numbers(shown.cfg) == numbers(of_type.cfg) and shown.seconds  # as --gpu=here says it
        assert shown.seconds != of_type.seconds
        other = choose_fastest(cfg, calibrated(small, factor, "NVIDIA of tomorrow"), 8)
        fewest = choose_fastest(cfg, replace(small, speeds=None), 8)
        assert (numbers(other.cfg), other.chosen) == (numbers(fewest.cfg), fewest.chosen)
    cpu = hardware.Machine("CPU, 2 threads", hardware.NODES["workstation"], None, None, None)
    for factor in (0.01, 100):
        got = choose_fastest(big(2**16, n_layer=4, tp=1, dtype="auto", n_embd=512, n_head=8, alpha=0.5),
                     calibrated(cpu, factor, cpu.name), 1)
        assert numbers(got.cfg) == (1, "equal", "layer") and got.chosen == "chosen, it fits" and got.alpha


def test_the_command_line(capsys):
    argv = ["config/7b_1m.py", "--gpus=8", "--gpu=h100-80gb", "--tp=8", "--cp=1", "--vocab_size=50257",
            "--fast"]
    main([*argv, "--block_size=4194304"])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("sequence"))
    assert "subsequences of" in line and line.endswith("layer by layer: chosen, 2 does not fit the device")
    with pytest.raises(ConfigError, match="must be of type int or auto|must be int or auto"):
        main([*argv, "--subsequences=many"])
    with pytest.raises(ConfigError, match="must be one of auto, equal, flops"):
        main([*argv, "--subsequence_cut=half"])



# --- runs ---

@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(), dict(alpha=0.0), dict(activation="swap")])
def test_no_timing_changes_a_bit_of_a_run(dataset, tmp_path, monkeypatch, capsys, keys):
    """Whatever seconds are measured: the same numbers, the same losses."""
    choosing(monkeypatch)
    seen, rng = set(), random.Random(0)

    def least_seconds(device, call, before=lambda: None, host=None):
        before()
        call()
        return 10 ** rng.uniform(-9, 3)
    for out in map(str, range(3)):
        if out != "0":
            monkeypatch.setattr("memo.run.measure.least_seconds", least_seconds)
            monkeypatch.setattr("memo.run.measure.copy_rates",
                                lambda *_: (10 ** rng.uniform(0, 14),) * 2)
        train.main(argv(dataset, tmp_path / out, n_layer=4, block_size=512, max_iters=2, warmup_iters=0,
                        host_memory_gb=0.01, **keys))
        assert "\nsequence    1 subsequence: chosen, it fits\n" in capsys.readouterr().out
        stored = json.loads((tmp_path / out / "config.json").read_text())
        assert {name: stored[name] for name in ONE} == ONE and stored["asked"] == AUTO
        plan = json.loads((tmp_path / out / "plan.json").read_text())
        assert plan["rates"]  # it swaps: seconds were measured
        stored |= dict(out_dir="", wandb_id="")
        seen.add((str(stored), str(losses(tmp_path / out))))
    assert len(seen) == 1


@pytest.mark.parametrize("stages,said", [({}, ""), (dict(pp="auto"), " --pp=1")])
def test_a_run_goes_on_where_the_estimate_fails(dataset, tmp_path, monkeypatch, capsys, stages, said):
    def fails(error):
        def chosen(*_, **more):
            raise error
        monkeypatch.setattr("memo.run.prepare.choose_fastest", chosen)
    monkeypatch.setattr("memo.decide.choose.LEAST_TOKENS", 128)
    keys = dict(block_size=512, max_iters=1, warmup_iters=0) | stages
    fails(KeyError("speeds"))
    assert train.main(argv(dataset, tmp_path / "a", **keys)) == 0
    numbers = f"--subsequences=1 --subsequence_cut=equal --unit_order=layer{said} --states=device"
    told = f"warning: no estimate: KeyError: 'speeds'; the run goes on with {numbers}\n"
    assert told in capsys.readouterr().err
    stored = json.loads((tmp_path / "a/config.json").read_text())
    assert {name: stored[name] for name in ONE} == ONE and stored["asked"] == AUTO | stages
    fails(ConfigError("a rule"))  # the user's
    with pytest.raises(ConfigError, match="^a rule$"):
        train.main(argv(dataset, tmp_path / "b", **keys))


def test_the_choice_of_a_checkpoint_without_the_key_states_is_the_device():
    cfg = Config(**SMALL)
    stored = as_keys(replace(cfg, **ONE, states="device")) | dict(asked=dict(AUTO))
    younger = saved_choice(cfg, SimpleNamespace(config=stored), 1)
    del stored["states"], stored["asked"]["states"]
    assert younger == Layout.of(cfg, **ONE, states="device")
    assert saved_choice(cfg, SimpleNamespace(config=stored), 1) == younger
    assert saved_choice(replace(cfg, states="host"), SimpleNamespace(config=stored), 1) is None


def test_what_is_wrong_is_said_before_anything_is_touched(dataset, tmp_path, monkeypatch):
    with pytest.raises(OutOfHostMemory, match="^host_memory_gb=1e\\+06 must be at most"):
        train.main(argv(dataset, tmp_path / "out", n_layer=4, host_memory_gb=1e6))
    assert not (tmp_path / "out").exists()
    train.main(argv(dataset, tmp_path, **ONE, max_iters=2, save_interval=1))
    (tmp_path / "ckpt/2/checkpoint.json").write_text("damaged")

    def chosen(*_, **more):
        raise ConfigError("the last check")
    monkeypatch.setattr("memo.run.prepare.choose_fastest", chosen)
    with pytest.raises(ConfigError, match="^the last check$"):
        train.main([f"--out_dir={tmp_path}", "--init_from=resume", "--subsequences=auto"])
    assert {folder.name for folder in (tmp_path / "ckpt").iterdir()} == {"1", "2"}  # none is set aside yet


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_chosen(dataset, tmp_path, monkeypatch, capsys):
    """And its losses are to the last bit those of a run that was never stopped."""
    def toss(n):
        def chosen(cfg, machine, world, **more):
            one = replace(cfg, subsequences=n, subsequence_cut="flops", unit_order="layer",
                          states="device")
            return estimate(one, machine, world, fast_arena).but(chosen="tossed")
        monkeypatch.setattr("memo.run.prepare.choose_fastest", chosen)

    def resumed(*more):
        train.main(["--init_from=resume", f"--out_dir={tmp_path / 'halves'}", *more])
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sequence")]
        return line
    choosing(monkeypatch)
    keys = dict(block_size=512, n_layer=3, alpha=0.5, batch_size=1, lr_decay_iters=4, save_interval=2,
                solver="greedy")
    toss(4)
    train.main(argv(dataset, tmp_path / "whole", **keys | dict(max_iters=4)))
    train.main(argv(dataset, tmp_path / "halves", **keys | dict(max_iters=2)))
    toss(2)
    capsys.readouterr()
    assert resumed("--max_iters=4") == "sequence    4 subsequences of 128 tokens, layer by layer: as before"
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    two = "sequence    2 subsequences of 256 tokens, layer by layer"
    assert resumed("--batch_size=2") == f"{two}: tossed; before: subsequences=4"
    monkeypatch.setattr("memo.run.prepare.estimate", lambda cfg, *a: estimate(cfg, *a).but(
        untimed=SimpleNamespace(fits=cfg.subsequences != 4)))
    assert resumed() == f"{two}: tossed; before: subsequences=4"
