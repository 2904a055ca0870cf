"""Every layout gives the loss and the gradients of one process; in one layout every mode and alpha gives the same bits."""

import re

import pytest
import torch

from memo import placement
from memo.allocator import Arena
from memo.config import Config
from memo.flat import views
from memo.mesh import ALONE, open_mesh
from memo.optim import Optimizer
from model import GPT
from tests.ranks import pool
from tests.test_model import perturbed_weights, random_batch
from tests.test_swap import COSTS

CPU = torch.device("cpu")
S, MICRO_BATCHES = 2048, 2
KEYS = dict(n_layer=3, n_head=8, n_embd=64, vocab_size=150, block_size=S, gradient_accumulation_steps=MICRO_BATCHES)
POSITIONS = {"rope": {}, "learned": dict(position="learned", bias=True, gelu="tanh")}
MODES = [dict(activation="keep"), dict(activation="recompute"), *(dict(activation="memo", alpha=a) for a in (0.0, 0.5, 1.0)),
         dict(activation="memo", alpha_mode="per_tensor")]
LAYOUTS = ["tp2", "tp4", "cp2", "cp4", "tp2 cp2", "dp2", "tp2 dp2", "cp2 dp2", "tp2 cp2 dp2"]


def degrees_of(text):
    """"tp2 cp2" -> dict(tp=2, cp=2, dp=1)."""
    return dict(tp=1, cp=1, dp=1) | {name: int(n) for name, n in re.findall(r"(\w\w)(\d)", text)}


def build(cfg, mesh):
    """(model, optimizer) with weights that tell tokens apart and make attention choose: at initial ones the gradients of q
    and k are so small that one process misses them by 2e-4 in fp32."""
    model = GPT(cfg, CPU, torch.float32, mesh=mesh)
    optimizer = Optimizer(model, cfg)
    large = ("q_w", "k_w", "wte", "wpe")
    optimizer.load((name, w * 8 if name.endswith(large) else w) for name, w in perturbed_weights(cfg, CPU))
    B, T = cfg.batch_size, S // cfg.cp
    nbytes = {name: t.nbytes for name, t in placement.tensors_of(cfg, torch.float32).items()}
    hidden = 0.6 if cfg.finds_alpha else 1.0
    p = placement.Problem(nbytes, cfg.n_layer, hidden * sum(nbytes.values()), 1.0, 10**12)
    model.reserve(B, T, placement.place(cfg, p, placement.n_rows(cfg), COSTS)[0])
    return model, optimizer


def local_batch(model, cfg, seed):
    """This rank's tokens and targets of a batch that the seed gives."""
    tokens, targets = random_batch(cfg, cfg.batch_size, S, CPU, seed)
    mine = model.positions[:S // cfg.cp]
    return tokens[:, mine].contiguous(), targets[:, mine].contiguous()


def step(model, optimizer, cfg, seed=3):
    """Loss of a step, as all ranks know it; gradients are reduced."""
    mesh, loss = model.mesh, torch.zeros(())
    micros = list(range(mesh.dp.rank, MICRO_BATCHES, mesh.dp.size))
    for micro in micros:
        batch = local_batch(model, cfg, seed + micro)
        part = 1 / (MICRO_BATCHES * cfg.cp)
        loss += model.forward(*batch, scale=part) * part
        model.backward(optimizer.reduce if micro == micros[-1] else lambda k: None)
    mesh.data.sum(loss)
    return loss


def whole(optimizer, flat):
    """[(name, offsets, values)] of what this rank has to add to a whole copy of `flat`, a shard."""
    states = optimizer.states
    optimizer.states = lambda: {"it": flat}
    try:
        return [(p.name.removeprefix("it."), p.shape, p.offsets, p.tensor.clone()) for p in optimizer.pieces(saved=True)]
    finally:
        optimizer.states = states


def assembled(ranks):
    """{name: tensor} from what whole() gave on every rank; each element must come once."""
    tensors, seen = {}, {}
    for pieces in ranks:
        for name, shape, offsets, values in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            tensors.setdefault(name, torch.zeros(shape))[box] = values
            seen.setdefault(name, torch.zeros(shape))[box] += 1
    assert all((s == 1).all() for s in seen.values())
    return tensors


def gradients(host, cfgs, plan):
    """For each config (loss, gradient norm, gradients as whole() gives them, requests that missed the plan)."""
    mesh = open_mesh(host, cfgs[0].cp, cfgs[0].tp, CPU)
    made = []
    for cfg in cfgs:
        model, optimizer = build(cfg, mesh)
        if plan:
            arena = Arena(CPU, "greedy", guard=True)
            arena.replay(placement.requests_of_a_step(model, arena))
            model.arena = arena
        loss = step(model, optimizer, cfg)
        norm = optimizer.clip(0.0)
        shard = torch.cat([model.grads[own.start:own.end] for own in optimizer.own])
        made.append((loss.item(), norm.item(), whole(optimizer, shard), model.arena.stats().misses))
        model.close()
    return made


def on_ranks(text, cfgs, plan=True):
    """[(loss, norm, {name: gradient}, misses)] of the configs in a layout; all ranks agree on the loss and the norm."""
    size = degrees_of(text)
    ranks = pool(size["tp"] * size["cp"] * size["dp"]).run(gradients, cfgs, plan)
    made = []
    for case in zip(*ranks, strict=True):
        assert len({r[:2] for r in case}) == 1
        made.append((*case[0][:2], assembled([r[2] for r in case]), sum(r[3] for r in case)))
    return made


@pytest.fixture(scope="module")
def alone():
    """{position: (loss, norm, gradients)} of one process."""
    made = {}
    for position, keys in POSITIONS.items():
        cfg = Config(**KEYS, **keys, activation="keep")
        model, optimizer = build(cfg, ALONE)
        loss = step(model, optimizer, cfg)
        made[position] = loss.item(), optimizer.clip(0.0).item(), views(model.layout, model.grads)
    return made


def relative_error(mine, reference, name):
    like = name.replace("k_b", "q_b")  # no loss depends on k's bias: its gradient is noise, small beside that of q's
    return ((mine[name] - reference[name]).norm() / reference[like].norm()).item()


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_layout_gives_the_gradients_of_one_process(text, kind, position, alone):
    size = degrees_of(text)
    if kind == "ulysses" and size["cp"] == 1:
        pytest.skip("nothing to exchange")
    modes = MODES if position == "rope" else [MODES[1], MODES[3]]
    keys = KEYS | POSITIONS[position] | dict(tp=size["tp"], cp=size["cp"], context_parallel=kind)
    first, *others = on_ranks(text, [Config(**keys, **mode) for mode in modes])
    loss, norm, reference = alone[position]
    assert abs(first[0] - loss) <= 1e-5 * loss
    assert abs(first[1] - norm) <= 1e-4 * norm  # torch sums squares on the CPU in fp32, one after the other
    assert set(first[2]) == set(reference)
    worst = max((relative_error(first[2], reference, name), name) for name in reference)
    assert worst[0] <= 1e-5, worst
    assert first[3] == 0, "requests that missed the memory plan"
    for mode, other in zip(modes[1:], others, strict=True):
        assert other[:2] == first[:2] and other[3] == 0, mode
        assert all(torch.equal(other[2][name], first[2][name]) for name in reference), mode
