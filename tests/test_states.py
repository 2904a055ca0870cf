"""states=sharded and states=host: layers that come for each pass change no bit, and take two places."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import train
from memo import sample
from memo.config.formulas import parameters
from memo.config.layout import Layout
from memo.decide.where import Decision
from memo.errors import ConfigError, OutOfHostMemory
from memo.estimate.regions import states
from memo.memory.sizes import HOST_SHARE
from memo.parallel.mesh import ALONE
from memo.run.reserve import check_memory, host_limit, where_it_lives
from memo.states.passes import Model
from memo.system import hardware
from memo.system.launch import Launch
from model import GPT
from testing.ranks import pool
from tests.helpers import CPU, LLAMA, degrees_of, mesh_of, perturbed_weights, random_batch, step
from tests.layouts import build, layout_keys, train_steps

PLACES = "device", "sharded", "host"
OF_2019 = dict(position="learned", bias=True)
LARGE_ENDS = LLAMA | dict(vocab_size=1000, n_layer=4)  # embedding and head are larger than a layer
SMALL = Layout(n_layer=4, n_head=4, n_embd=64, vocab_size=150, block_size=512, grad_clip=0.1)


def trained(mesh, cfg, dtype, folder=None, then=None):
    """Losses, norms and states of three steps; see train_steps(). With `folder` it goes on with
    states=`then`."""
    *found, _ = train_steps(lambda resumes: build(replace(cfg, states=then) if resumes else cfg, mesh, dtype),
                            cfg, folder=folder)
    return found


def everywhere(host, cfg, dtype):
    """What a rank trains with the states in each of the three places."""
    return [trained(mesh_of(host, replace(cfg, states="host")), replace(cfg, states=where), dtype)
            for where in PLACES]


MODES = [dict(activation="keep"), dict(activation="recompute"), dict(activation="swap"), {}]


@pytest.mark.parametrize("keys", [
    dict(subsequences=N, gradient_accumulation_steps=micros, **mode, **family)
    for mode, family, N, micros in zip(MODES, (OF_2019, LARGE_ENDS) * 2, (1, 4, 4, 1), (1, 2, 3, 1),
                                       strict=True)]
    + [dict(subsequences=4, gradient_accumulation_steps=1, **LLAMA)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_where_states_are_changes_no_bit(keys, dtype, monkeypatch, one_thread):
    monkeypatch.setattr("memo.memory.slab.PIECE_BYTES", 2**14)  # many edges, at which copies are cut
    cfg = replace(SMALL, **keys)
    device, *others = (trained(ALONE, replace(cfg, states=where), dtype) for where in PLACES)
    assert others == [device, device]
    norms = [norm for _, norm in device[0]]
    assert min(norms) > 2 * cfg.grad_clip and len(set(norms)) == 3, "clipping clips"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,micro_batches,keys", [
    ("dp2", "ring", 2, {}), ("cp2", "ring", 1, dict(subsequences=4)), ("dp2", "ring", 4, LLAMA),
    ("tp4 dp2", "ring", 2, LLAMA), ("tp2 cp2 dp2", "ring", 2, {}),
    ("cp2", "ulysses", 3, dict(activation="swap")),
    ("tp2 cp2", "metp", 1, LLAMA), ("cp3", "ring", 1, dict(block_size=510, activation="recompute"))])
def test_in_any_layout(text, kind, micro_batches, keys):
    """The sums of several micro batches are made in another order: rounding may differ."""
    size = degrees_of(text)
    cfg = replace(SMALL, gradient_accumulation_steps=micro_batches, **layout_keys(text, kind) | keys)
    for device, *others in pool(size["tp"] * size["cp"] * size["dp"]).run(everywhere, cfg, torch.float32):
        for shown, found in others:
            if micro_batches == size["dp"]:
                assert [shown, found] == device
            assert torch.tensor(shown).allclose(torch.tensor(device[0]), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("first,then", [("host", "sharded"), ("sharded", "device"), ("device", "host")])
def test_a_run_goes_on_with_its_states_elsewhere(first, then, tmp_path, one_thread):
    cfg = replace(SMALL, n_layer=3)
    whole = trained(ALONE, cfg, torch.bfloat16)
    assert trained(ALONE, replace(cfg, states=first), torch.bfloat16, folder=tmp_path, then=then) == whole


@pytest.mark.parametrize("where,micros,family", [
    ("sharded", 1, {}), ("host", 2, {}), ("sharded", 2, LARGE_ENDS), ("host", 1, LLAMA),
    ("host", 2, LARGE_ENDS)], ids=str)
def test_two_layers_are_on_the_device_whatever_their_number(where, micros, family):
    """Embedding and head are layers where they have a matrix each, else they stay."""
    sizes = {}
    for L in (2, 4, 16):
        cfg = replace(SMALL, **family | dict(n_layer=L, states=where, gradient_accumulation_steps=micros))
        model, optimizer = build(cfg, ALONE, torch.bfloat16)
        first, layer, *_, last = (end - start for start, end in model.buckets)
        sizes[L] = model.params.nbytes, model.grads.nbytes
        most = layer + max(first, layer, last) if family else first + 2 * layer + last
        assert sizes[L] == (2 * most, 4 * most)
        machine = hardware.Machine("CPU", hardware.NODES["workstation"], None, None, None)
        decision = Decision(model.swap.placement, None, None, 0)
        there = where_it_lives(cfg, decision, model, optimizer)
        expected = [line for line in states(cfg, machine, 1, 2)[1] if line.region != "positions"]
        assert [line for line in there if line.region in ("params", "grads", "optimizer")] == expected
        model.close()
    assert len(set(sizes.values())) == 1


@pytest.mark.parametrize("N", [1, 3])
def test_a_model_that_is_not_trained_finds_its_layers_on_the_host(N):
    cfg, made = replace(SMALL, subsequences=N, **LLAMA), []
    for where in ("device", "host"):
        model = Model(GPT, replace(cfg, states=where), CPU, torch.bfloat16, grads=False)
        model.load(perturbed_weights(cfg, CPU))
        model.reserve_forward(1, 48)
        made.append((model.hidden(torch.arange(48)[None], lambda i, x: x.clone()),
                     [*sample.generate(model, [*range(40)], 8, seed=1)], len(model.params)))
        model.close()
    (x, tokens, every), (other, others, fewer) = made
    assert all(map(torch.equal, x, other)) and tokens == others and fewer < every


def evaluated(host, cfg, eval_iters):
    """The loss of an evaluation, and of the step behind it, for each place and each number of batches."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "batch", lambda run, split, step, i: random_batch(cfg, 1, cfg.block_size, CPU, i))
        found = []
        for where, n in product(PLACES, eval_iters):
            one = replace(cfg, states=where, eval_iters=n)
            model, optimizer = build(one, mesh_of(host, replace(cfg, states="host")), torch.float32)
            run = SimpleNamespace(cfg=one, mesh=model.mesh, model=model, device=CPU)
            found.append((train.evaluate(run), step(model, optimizer, one).item()))
            model.close()
    return found


@pytest.mark.ranks
def test_ranks_with_fewer_batches_to_evaluate_bring_as_many_layers():
    """All replicas must ask for a layer, or the messages of the step behind it would meet others."""
    for found in pool(2).run(evaluated, replace(SMALL, gradient_accumulation_steps=2), (1, 3)):
        assert found[:2] == found[2:4] == found[4:]


def sent(host, cfg):
    mesh = mesh_of(host, cfg)
    model, optimizer = build(cfg, mesh, torch.bfloat16)
    mesh.take_sent_bytes()
    step(model, optimizer, cfg)
    found = mesh.take_sent_bytes()
    model.close()
    return found["shards"], found["data"], [end - start for start, end in model.buckets]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("family", [{}, LARGE_ENDS], ids=["tied", "untied"])
def test_parameters_travel_twice_and_gradients_once(family):
    """But for the parameters of the last two layers, which are still there in the backward, and of the
    embedding, whose backward needs none; and for gradients, which are summed in fp32. Source: ZeRO 7.2.2, 3 P
    (d - 1)/d elements in all."""
    d, cfg = 2, replace(SMALL, states="sharded", gradient_accumulation_steps=2, **family)
    for shards, data, (embedding, *layers, head) in pool(d).run(sent, cfg):
        forward, back = (embedding + sum(layers) + head, sum(layers[:-1])) if family else (
            sum(layers), sum(layers[:-2]))
        assert shards == 2 * (forward + back) * (d - 1) // d
        assert data == 4 * (embedding + sum(layers) + head) * (d - 1) // d + 4 * (d - 1)  # and the loss


@pytest.mark.parametrize("keys,message", [
    (dict(pp=2), "goes with pp=1 only"), (dict(subsequences=4, unit_order="subsequence"), "unit_order=layer"),
    (dict(optimizer_device="cpu"), "try --states=host")])
def test_bad_input(keys, message):
    with pytest.raises(ConfigError, match=message):
        Layout(states="sharded", **keys)


ONE_RANK = Launch(0, 1, 0, 1)


def test_a_host_too_small_for_the_states_says_what_it_has_room_for(monkeypatch):
    monkeypatch.setattr("memo.memory.slab.available", lambda: 10**9)
    cfg = replace(SMALL, n_layer=24, n_embd=1024, states="host")
    with pytest.raises(OutOfHostMemory, match=r"^states=host needs 4\.\d+ GiB .* its share is 0\.838\d GiB, "
                                              r"enough for 56\.2M parameters at any block_size; try .* "
                                              r"or states=sharded$"):
        host_limit(cfg, ONE_RANK, 4)


def test_a_host_with_room_for_the_states_names_the_longest_context(monkeypatch):
    cfg, there = replace(SMALL, n_layer=24, states="host"), 0
    monkeypatch.setattr("memo.memory.slab.available", lambda: there)

    def refusal(block_size):
        one = replace(cfg, block_size=block_size)
        try:
            check_memory(one, CPU, torch.float32, host_limit(one, ONE_RANK, 4))
        except OutOfHostMemory as e:
            return str(e)
    states_bytes = 16 * parameters(cfg)
    there = (states_bytes + 10**6) / HOST_SHARE
    [longest] = re.findall(r"the largest block_size that fits is (\d+)$", refusal(8192))
    assert refusal(int(longest)) is None and refusal(int(longest) + 1)
    there = (states_bytes + 10**3) / HOST_SHARE
    assert refusal(8192).endswith("no block_size fits")
