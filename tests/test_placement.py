"""From a config to a placement: what is measured, decided, said, and taken."""

import json
import time
from dataclasses import replace
from math import ceil, inf
from types import SimpleNamespace

import pytest
import torch

from memo.config.config import Config, as_keys
from memo.config.formulas import parameters
from memo.config.layer import groups_of, layer_of, tensors_of
from memo.config.layout import Layout
from memo.decide.alpha import AlphaProblem, largest_block_size, paper
from memo.decide.step_seconds import UnitRates
from memo.decide.where import Rates, Room, place_rows, problem_of, with_buffers
from memo.errors import ConfigError, OutOfHostMemory
from memo.estimate.arena import fast_arena, head_bytes
from memo.estimate.budget import estimate
from memo.estimate.regions import granting, host_capacity, states
from memo.memory import slab
from memo.memory.buffers import copy_bytes
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.run import report, reserve
from memo.run.prepare import machine_of
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system import hardware
from memo.system.launch import Launch
from model import GPT
from testing.ranks import pool
from tests.helpers import gpt_layer, mesh_of

CPU = torch.device("cpu")
CFG = Layout(n_layer=5, n_head=2, n_embd=64, vocab_size=100, block_size=512)
PLENTY = 10**12  # bytes of host memory
RATES = Rates((UnitRates(1, 1.0, 2.0, 0.0, 0.0, {}),), 1e9, 1e9, transient_bytes=0)


def tensors(cfg=CFG, dtype=torch.float32):
    return tensors_of(cfg, dtype.itemsize)


def whole(cfg=CFG):
    return sum(t.nbytes for t in tensors(cfg).values())


ENOUGH = 4 * whole()  # for three swapped layers, not for all five


def fixed(alpha):
    return replace(CFG, alpha=alpha)


# --- Placement ---

def owners(p):
    """{tensor: [its rows as a range of memory, layer by layer]}."""
    return {t.name: [range(p.place(i, t.name), p.place(i, t.name) + p.n_rows) for i in range(p.n_layer)]
            for t in layer_of(CFG).skeletal if t.name != "x"}


@pytest.mark.parametrize("kept", [0, 128, 256, 512])
@pytest.mark.parametrize("n_buffers", [1, 2, 3, 5])
def test_what_survives_is_overwritten_by_no_later_layer_and_missing_is_the_rest(kept, n_buffers):
    p = Placement(5, n_buffers, 512, {n: kept for n, t in tensors().items() if t.group})
    found = zip(Sizes(p, tensors()).buffer_bytes.items(), tensors().values(), strict=True)
    spans = {name: n // (t.nbytes // 512) for (name, n), t in found}
    for name, places in owners(p).items():
        assert max(r.stop for r in places) == spans[name]  # all of the buffer, and nothing beyond it
        for i, mine in enumerate(places):
            rows, first = p.first_kept(i, name)
            survive = set(mine[first:first + rows])
            missing = p.missing(i).get(name, slice(0, 0))
            assert set(mine[missing]) == set(mine) - survive
            for later in places[i + 1:]:  # until the layer's copy is done, or its backward comes
                if i < p.n_swapped and later == mine:
                    break
                assert not survive & set(later)


def test_the_bytes_of_two_buffers_grow_with_alpha_and_the_device_limit_is_their_inverse():
    t = tensors()
    for alpha in (0.0, 0.25, 0.5, 1.0):
        p, _ = place_rows(fixed(alpha), problem_of(CFG, 4, None, Room(2**40, cpu=True)))
        taken = sum(Sizes(p, t).buffer_bytes.values())
        problem = replace(problem_of(CFG, 4, RATES, Room(2**40, cpu=True)), device_bytes=taken)
        assert problem.limits["device"] == pytest.approx(alpha)
        got = paper(problem)
        assert got.alpha == pytest.approx(alpha) and got.binds == ("device" if alpha < 1 else None)
    assert "device" not in problem_of(CFG, 4, RATES, Room(2**40, cpu=True)).limits


def stalls(L, n, f, c):
    """Seconds that a forward pass of L layers waits: layer i for the copy of layer i - n, one at a time."""
    now, done, waited = 0.0, [], 0.0
    for i in range(L):
        if i >= n:
            waited += max(0.0, done[i - n] - now)
            now = max(now, done[i - n])
        now += f
        if i < L - n:
            done.append(max(now, done[-1] if done else 0.0) + c)
    return waited


@pytest.mark.parametrize("L,n", [(3, 2), (32, 2), (8, 3), (32, 20), (32, 31)])
def test_the_overlap_limit_is_the_longest_copy_that_never_stalls(L, n):
    total = whole()
    p = AlphaProblem(Placement(L, n, 512), tensors(), (1.0,), total / 2.0, 2**50)  # a layer: two forwards
    limit = (p.limits["overlap"] * p.others_bytes + p.always_bytes) / total * 2.0
    if p.limits["overlap"] < 1:
        assert stalls(L, n, 1.0, limit * 0.999) == 0 < stalls(L, n, 1.0, limit * 1.001)
    else:
        assert stalls(L, n, 1.0, 2.0) == 0


# --- decide ---

def decided(cfg, limit=PLENTY):
    model = Model(GPT, cfg, "cpu", torch.float32)
    return model, reserve.reserve_activations(cfg, model, limit)


@pytest.mark.parametrize("activation,n_buffers,host", [("keep", 5, 0), ("recompute", 1, 0), ("swap", 2, 3)])
def test_the_modes(activation, n_buffers, host):
    model, d = decided(replace(CFG, activation=activation))
    assert d.placement.n_buffers == n_buffers and model.swap.host_bytes == host * whole()
    assert d.alpha == (1.0 if activation == "swap" else None)
    assert (d.rates is not None) == (activation == "swap")
    assert not model.grads.any()
    model.close()


@pytest.mark.parametrize("mode", ["paper", "per_tensor"])
def test_alpha_from_measured_rates(mode):
    model, d = decided(replace(CFG, alpha_mode=mode), ENOUGH)
    r = d.rates
    assert min(r.forward_s, r.backward_s, r.offload_bytes_per_s, r.prefetch_bytes_per_s) > 0
    assert set(r.recompute_s) == {"ln1_out", "q", "k", "v", "mid", "ln2_out", "fc1_out", "gelu_out"}
    # here they are microseconds
    assert all(s >= 0 for s in r.recompute_s.values()) and max(r.recompute_s.values()) > 0
    assert 0 <= d.alpha <= 1 and set(d.swap_plan.limits) == {"overlap", "host"}
    assert not model.grads.any()
    model.close()


@pytest.mark.parametrize("alpha", ["auto", 0.5, 0.0])
def test_what_is_said_is_what_was_taken(alpha):
    cfg = fixed(alpha)
    model, d = decided(cfg, ENOUGH)
    optimizer = Optimizer(model, cfg)
    rows = reserve.where_it_lives(cfg, d, model, optimizer)
    device = sum(line.device_bytes for line in rows)
    positions = model.rows[0].positions[0].nbytes + sum(t.nbytes for [t] in model.rows[0].turns.values())
    # fp32: own masters
    assert device == model.params.nbytes * 3 + model.grads.nbytes + model.swap.device_bytes + positions
    assert model.swap.device_bytes == sum(b.nbytes for b in model.swap.buffers.values())
    assert sum(line.host_bytes for line in rows) == model.swap.host_bytes == model.swap.slab.bytes.nbytes
    run = SimpleNamespace(cfg=cfg, decision=d, model=model, lines=rows, expected=None, stage_records=[])
    text = "\n".join(report.memory_table(run))
    assert "2 buffers for 5 layers" in text and "in all" in text
    assert ("others of 3 swapped layers" in text) == (d.alpha > 0)  # as measured rates have it
    assert f"alpha       {d.alpha:.3f}, " in text and (", given: overlap allows" in text) == (alpha != "auto")
    assert "overlap allows" in text and "host allows 1.00" in text
    plan = json.loads(json.dumps(report.stage_record(run)))
    assert plan["alpha"] == d.alpha and plan["host_bytes"] == model.swap.host_bytes
    assert plan["alpha_limits"].keys() == {"overlap", "host"} and plan["rates"]["forward_s"] > 0
    model.close()


@pytest.mark.parametrize("keys", [{}, dict(alpha_mode="paper"), dict(dtype="bfloat16")])
def test_a_cpu_keeps_all_layers_where_its_memory_holds_them_in_the_run_and_in_the_estimate(keys, monkeypatch):
    cfg, launch = replace(CFG, **keys), Launch(0, 1, 0, 1)
    model = Model(GPT, cfg, "cpu", torch.bfloat16 if "dtype" in keys else torch.float32)
    keep = reserve.reserve_activations(replace(cfg, activation="keep"), model, 0)
    kept = model.swap.device_bytes
    lines = reserve.where_it_lives(cfg, keep, model, Optimizer(model, cfg))  # of the tensors themselves
    cpu = machine_of(CPU, launch)
    needs = sum(line.device_bytes for line in lines) + sum(fast_arena(cfg, cpu))
    least = ceil((needs + 12 * parameters(cfg)) / 0.9)  # beside a checkpoint's copy
    for there, n in ((least, 5), (least - 1, 2)):
        monkeypatch.setattr(slab, "available", lambda there=there: there)
        node = replace(cpu.node, host_memory_bytes=there)
        assert estimate(cfg, replace(cpu, node=node), 1, fast_arena).placement.n_buffers == n
        d = reserve.reserve_activations(cfg, model, reserve.host_limit(cfg, launch, 4))
        assert d.placement.n_buffers == n and (d.rates is None) == (n == 5)  # nothing need be measured
        if n == 5:
            assert d.alpha is None and (model.swap.device_bytes, model.swap.host_bytes) == (kept, 0)
            table = report.alpha_and_rates(SimpleNamespace(cfg=cfg, decision=d, expected=None))
            assert table[0] == "alpha       none: all layers stay on the device"
    model.close()


def gpu_with(monkeypatch, free):
    """Makes the CPU pass for a GPU with so many free bytes beside the head's."""
    monkeypatch.setattr(reserve, "free_bytes", lambda device: (int(free) + head_bytes(CFG, 4), 0))
    monkeypatch.setattr(reserve, "gpu_decides", lambda cfg, device: cfg.finds_alpha)


def buffers(cfg, model, rates):
    """(rounding buffers, bytes that the device has for them)."""
    room = reserve.gpu_room(cfg, model, rates, PLENTY)
    p = with_buffers(cfg, problem_of(cfg, 4, rates, room), room)
    return p.placement.n_buffers, p.device_bytes


def test_a_gpu_with_room_keeps_more_layers_and_one_with_little_shares_more_rows(monkeypatch):
    model = Model(GPT, CFG, "cpu", torch.float32)
    x = tensors()["x"].nbytes
    for free, want in ((100 * whole(), 5), (5 * whole() + x, 5), (4 * whole() + x, 4), (3 * whole() + x, 3)):
        gpu_with(monkeypatch, free)
        assert buffers(CFG, model, RATES) == (want, inf)
        as_in_the_paper = (5, inf) if want == 5 else (2, free)  # every layer has a buffer, or there are two
        assert buffers(replace(CFG, alpha_mode="paper"), model, RATES) == as_in_the_paper
    gpu_with(monkeypatch, 3 * whole() + x - 1)
    assert buffers(CFG, model, RATES) == (2, 3 * whole() + x - 1)
    assert buffers(fixed(0.5), model, RATES) == (2, inf)
    assert buffers(replace(CFG, activation="swap"), model, RATES) == (2, inf)
    gpu_with(monkeypatch, 1.5 * whole())
    groups_s = dict.fromkeys(groups_of(tensors()), 1.0)
    rates = replace(RATES, units=(replace(RATES.units[0], groups_s=groups_s),))
    monkeypatch.setattr("memo.run.reserve.measure", lambda *a: rates)
    d = reserve.reserve_activations(CFG, model, PLENTY)
    assert 0 < d.alpha < 1 and d.swap_plan.binds == "device"
    assert model.swap.device_bytes <= 1.5 * whole() < model.swap.device_bytes + whole() / 4
    least = 2 * whole() + x - (whole() - 2 * x - tensors()["lse"].nbytes)
    gpu_with(monkeypatch, least)
    assert reserve.reserve_activations(CFG, model, PLENTY).alpha == 0 and model.swap.device_bytes == least
    gpu_with(monkeypatch, least - 1)
    wanted = (r"^block_size=512 needs .* GiB of device memory for two buffers of activations, .*; "
              r"try --block_size=511, more --subsequences, or --alpha=0 to try all the same$")
    with pytest.raises(ConfigError, match=wanted):
        reserve.reserve_activations(CFG, model, PLENTY)
    gpu_with(monkeypatch, 100 * whole())
    d = reserve.reserve_activations(CFG, model, PLENTY)
    assert d.alpha is None and d.placement.n_buffers == 5 and model.swap.host_bytes == 0
    model.close()


def reserved(host, keys, limits):
    """(when this rank was ready to copy, when its first copy began) as its rates were measured; None where
    they were not."""
    cfg, moments = Layout(**keys).of_rank(host.rank, host.size), []

    def slab_of(*args):
        time.sleep(0.3 * host.rank)  # ranks are not ready at the same time
        made = slab.HostSlab(*args)
        moments.append(time.monotonic())
        return made

    def copied(pairs):
        moments.append(time.monotonic())
        copy_bytes(pairs)
    model = Model(GPT, cfg, CPU, torch.float32, mesh=mesh_of(host, cfg))
    with pytest.MonkeyPatch.context() as m:
        m.setattr("memo.run.measure.HostSlab", slab_of)
        m.setattr("memo.run.measure.copy_bytes", copied)
        decision = reserve.reserve_activations(cfg, model, limits[host.rank])
    model.close()
    return moments[:2] if decision.rates else None


@pytest.mark.ranks
def test_all_stages_measure_their_copies_at_once():
    keys = dict(n_layer=8, n_head=2, n_embd=64, vocab_size=100, block_size=512, pp=2)
    found = pool(2).run(reserved, keys | dict(activation="swap"), (PLENTY, PLENTY))
    ready, began = zip(*found, strict=True)
    assert max(ready) <= min(began)
    # the layers of the last stage do not fit a CPU, those of the first one do: it need not measure
    layer = whole(Layout(**keys))
    first, last = pool(2).run(reserved, keys, (PLENTY, 3 * layer))
    assert first is None and last is not None


# --- too little host memory ---

def check(cfg, device=CPU, limit=PLENTY):
    reserve.check_memory(cfg, device, torch.float32, int(limit))


def test_too_little_host_memory_is_told_before_the_device_is_touched():
    little = 1.5 * whole()
    wanted = (r"^alpha=1 needs .* of host memory for 3 swapped layers, this rank has .*; "
              r"the largest alpha that fits is 0\.42\d, the largest block_size with this alpha 256$")
    with pytest.raises(OutOfHostMemory, match=wanted):
        check(replace(CFG, activation="swap"), limit=little)
    check(fixed(0.42), limit=little)
    check(CFG, limit=little)
    less = 3 * tensors()["x"].nbytes - 1
    wanted = (r"^block_size=512 needs .* of host memory for 3 swapped layers, .*; "
              r"the largest block_size that fits is 511$")
    with pytest.raises(OutOfHostMemory, match=wanted):
        check(CFG, limit=less)
    with pytest.raises(OutOfHostMemory, match="; --batch_size=3 fits, the largest block_size that fits is "):
        check(replace(CFG, batch_size=5), limit=9 * tensors()["x"].nbytes)
    check(replace(CFG, batch_size=3), limit=9 * tensors()["x"].nbytes)
    check(CFG, torch.device("cuda"), less)  # it may have room for all layers
    for activation in ("keep", "recompute"):
        check(replace(CFG, activation=activation), limit=less)


def test_an_optimizer_on_the_host_takes_its_part_of_it_first(monkeypatch):
    monkeypatch.setattr(slab, "available", lambda: 10**9)
    on_host = replace(CFG, optimizer_device="cpu", vocab_size=1000)
    states = 12 * (12 * CFG.n_layer * CFG.n_embd**2 + 1000 * CFG.n_embd)  # weights, two moments
    for world, local_world in ((1, 1), (4, 2)):
        launch = Launch(0, world, 0, local_world)
        share = 9 * 10**8 // local_world - states // world  # beside a checkpoint's copy of them
        assert reserve.host_limit(replace(CFG, vocab_size=1000), launch, 4) == share
        # gradients too, and no copy
        assert reserve.host_limit(on_host, launch, 4) == 9 * 10**8 // local_world - states * 16 // 12 // world
        granted = replace(CFG, vocab_size=1000, host_memory_gb=0.4)  # the copy comes on top
        assert reserve.host_limit(granted, launch, 4) == 4 * 10**8 // local_world
    wanted = (r"^host_memory_gb=0.9 must be at most 0.8\d+, 90% .* beside .* for a checkpoint.s copy; "
              r"try host_memory")
    with pytest.raises(OutOfHostMemory, match=wanted):
        reserve.host_limit(replace(CFG, vocab_size=1000, host_memory_gb=0.9), Launch(0, 1, 0, 1), 4)
    with pytest.raises(OutOfHostMemory,
                       match=r"^optimizer_device=cpu needs .* its share is .*; try a larger"):
        reserve.host_limit(replace(on_host, n_layer=2000, n_embd=1024), Launch(0, 1, 0, 1), 4)
    assert reserve.host_limit(replace(CFG, activation="keep"), Launch(0, 1, 0, 1), 4) == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("local_world", [6, 2])
def test_no_host_grants_more_than_it_has_beside_what_its_stages_hold(monkeypatch, local_world, tied):
    """Three stages: the first one and the last one have a large matrix of the vocabulary each."""
    monkeypatch.setattr(slab, "available", lambda: 10**9)
    cfg = replace(CFG, pp=3, optimizer_device="cpu", vocab_size=128000, tie_embeddings=tied,
                  gradient_accumulation_steps=2)
    here = replace(hardware.NODES["workstation"], gpus_per_node=local_world, host_memory_bytes=10**9)
    machine, limits, held = hardware.Machine("CPU", here, None, None, None), [], []
    for rank in range(6):
        one = cfg.of_rank(rank, 6)
        numel, _ = states(one, machine, 6, 4)
        held.append(numel // 2)  # of two replicas
        limits.append(reserve.host_limit(one, Launch(rank, 6, rank % local_world, local_world), 4))
    nodes = [range(first, first + local_world) for first in range(0, 6, local_world)]
    for node in nodes:  # weights, moments, gradients
        used = sum(limits[rank] + 16 * held[rank] for rank in node)
        assert used == pytest.approx(9e8, rel=1e-4)
    copies = max(sum(12 * held[rank] for rank in node) for node in nodes)  # of weights and moments
    assert host_capacity(cfg, machine, 6) == pytest.approx(9e8, rel=1e-4)
    cfg = replace(cfg, optimizer_device="auto")
    assert host_capacity(cfg, machine, 6) == pytest.approx(9e8 - copies, rel=1e-4)
    # what a node of GPUs grants by hand is granted to whatever stages a search tries
    one, gpus = granting(replace(cfg, pp=1), replace(hardware.machine("h100-80gb"), node=here), 6, 10**8)
    assert host_capacity(Layout.of(one, pp=3), gpus, 6) == 10**8
    undecided = Config(**as_keys(cfg) | dict(pp="auto", gradient_accumulation_steps=6))
    one, cpus = granting(undecided, replace(machine, node=replace(here, gpus_per_node=2)), 6, 10**8)
    assert {host_capacity(Layout.of(one, pp=pp), cpus, 6) for pp in (1, 2)} == {10**8}


def test_bitwise_runs_on_a_gpu_need_alpha_by_hand():
    cuda = torch.device("cuda")
    cfg = replace(CFG, deterministic=True)
    with pytest.raises(ConfigError,
                       match=r"^deterministic=True needs alpha by hand on a GPU .*; try --alpha=0.5 or"):
        check(cfg, cuda)
    for allowed in (replace(cfg, alpha=0.5), replace(cfg, activation="keep"), replace(cfg, n_layer=2)):
        check(allowed, cuda)
    check(cfg)


def test_copies_to_pageable_memory_of_a_gpu_hide_behind_nothing():
    on_gpu, on_cpu = Room(2**40), Room(2**40, cpu=True)
    cfg = replace(CFG, pin_memory=False)
    assert problem_of(cfg, 4, RATES, on_gpu).limits["overlap"] < 0
    assert problem_of(cfg, 4, RATES, on_cpu).limits["overlap"] == 1
    assert problem_of(CFG, 4, RATES, on_gpu).limits["overlap"] == 1


def test_below_alpha_0_the_least_number_of_layers_keeps_only_its_input():
    t = tensors()
    always = sum(t[n].nbytes for n in ("x", "attn_out", "lse"))
    model, d = decided(CFG, 3 * always - 1)
    assert d.placement.input_only == 1 and d.alpha == 0
    assert model.swap.host_bytes == 2 * always + t["x"].nbytes
    lines = report.alpha_and_rates(SimpleNamespace(cfg=CFG, decision=d, expected=None))
    assert lines[1].endswith("1 of 3 swapped layers keep only their input")
    model.close()


def test_the_longest_sequence_with_an_alpha():
    t = gpt_layer(64, 2).tensors(1, 4096, 2)
    p = AlphaProblem(Placement(10, 2, 4096), t, (1.0,), 1.0, 8 * sum(tensor.nbytes for tensor in t.values()))
    assert largest_block_size(p, 4096, alpha=1) == 4096
    assert largest_block_size(p, 4096, alpha=0) > 4096 * 7
