"""What the tests of several ranks share: models in a layout, and their gradients put together."""

import hashlib
from dataclasses import replace

import torch

from memo.checkpoint import checkpoint
from memo.config.layer import tensors_of
from memo.decide.where import Room, place_rows, problem_of
from memo.memory.parameters import views
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena
from memo.run import reserve
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT
from testing.ranks import pool
from tests.helpers import CPU, costs_of, degrees_of, mesh_of, perturbed_weights, save_states, step


def layout_keys(text, kind):
    """The config's keys of a layout such as "tp2 cp2"; `kind`: ring, ulysses, metp."""
    size = degrees_of(text)
    what = dict(tensor_parallel="metp") if kind == "metp" else dict(context_parallel=kind)
    return dict(tp=size["tp"], cp=size["cp"], pp=size["pp"]) | what


def build(cfg, mesh, dtype=torch.float32, stream=""):
    """(model, optimizer) with weights that tell tokens apart and make attention choose: at initial ones the
    gradients of q and k are so small that one process misses them by 2e-4 in fp32."""
    model = Model(GPT, cfg, CPU, dtype, mesh=mesh)
    optimizer = Optimizer(model, cfg)
    large = ("q_w", "k_w", "wte", "wpe")
    optimizer.load((name, w * 8 if name.endswith(large) else w) for name, w in perturbed_weights(cfg, CPU))
    tensors = tensors_of(cfg, dtype.itemsize)
    hidden = 0.6 if cfg.finds_alpha else 1.0
    p = problem_of(cfg, dtype.itemsize, None, Room(10**12, cpu=True))
    layer = hidden * sum(t.nbytes for t in tensors.values())
    p = replace(p, forward_s=tuple(layer * part for part in p.parts), offload_bytes_per_s=1.0)
    placement, _ = place_rows(cfg, p, costs_of(tensors))
    if stream and cfg.has_head:
        placement = replace(placement, stream=stream)
    model.reserve(cfg.batch_size, cfg.block_size // cfg.cp, placement)
    return model, optimizer


def step_alone(cfg):
    """(loss, gradient norm, {name: gradient}) of one process."""
    model, optimizer = build(cfg, ALONE)
    loss = step(model, optimizer, cfg)
    return loss.item(), optimizer.clip(0.0).item(), views(model.layout, model.grads)


def train_steps(make, cfg, steps=3, folder=None, take=step):
    """([(loss, norm) of each step], a hash of each of this rank's states, a hash of what it has of the
    parameters) of the model and the optimizer that make(False) gives. With `folder` it stops after two steps,
    and make(True) goes on from its checkpoint. take(model, optimizer, cfg) -> the loss of a step."""
    def hashed(t):
        return hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest()
    (model, optimizer), shown = make(False), []
    for i in range(steps):
        if folder and i == 2:
            save_states(folder, optimizer, cfg, i)
            model.close()
            model, optimizer = make(True)
            checkpoint.restore(checkpoint.load(folder), model, optimizer)
            optimizer.publish()
        loss = take(model, optimizer, cfg)
        shown.append((loss.item(), optimizer.clip(cfg.grad_clip).item()))
        optimizer.step(1e-2)
    optimizer.pieces()  # behind the last step
    states = [hashed(t) for t in optimizer.states().values()]
    model.close()  # when all parameters have arrived
    return shown, states, hashed(model.params)


def whole(optimizer, flat):
    """[(name, offsets, values)] of what this rank has to add to a whole copy of `flat`, a shard."""
    states = optimizer.states
    optimizer.states = lambda: {"it": flat}
    try:
        return [(p.name.removeprefix("it."), p.shape, p.offsets, p.tensor.clone())
                for p in optimizer.pieces(saved=True)]
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


def gradients(host, cfgs, plan, dtype=torch.float32, stream=""):
    """For each config (loss, gradient norm, gradients as of whole(), requests that missed the plan)."""
    mesh, made = mesh_of(host, cfgs[0]), []
    for cfg in (cfg.of_rank(host.rank, host.size) for cfg in cfgs):
        model, optimizer = build(cfg, mesh, dtype, stream)
        if plan:
            arena = Arena(CPU, "greedy", guard=True)
            arena.replay(reserve.requests_of_a_step(model, arena))
            model.arena = arena
        loss = step(model, optimizer, cfg)
        norm = optimizer.clip(0.0)
        shard = torch.cat([model.grads[own.start:own.end] for own in optimizer.own])
        made.append((loss.item(), norm.item(), whole(optimizer, shard), model.arena.stats().misses))
        model.close()
    return made


def make_small(m):
    """Pieces are as small as they may be, a rank's 256 rows, and two are under way at once, as on a GPU;
    groups of heads are small too."""
    m.setattr("memo.kernels.rows.CHUNK_ROWS", 256)
    m.setattr("memo.parallel.tp.pieces_at_once", lambda axis, device: 2)
    m.setattr("memo.config.layer.GROUP_ELEMENTS", 1)
    m.setattr("memo.config.layer.METP_ELEMENTS", 1)
    m.setattr("memo.layer.metp.METP_ROWS", 256)


def on_ranks(text, cfgs, *how, work=gradients):
    """[(loss, norm, {name: gradient}, misses)] of the configs in a layout; ranks agree on loss and norm."""
    size = degrees_of(text)
    ranks = pool(size["pp"] * size["tp"] * size["cp"] * size["dp"]).run(work, cfgs, *how)
    made = []
    for case in zip(*ranks, strict=True):
        assert len({r[:2] for r in case}) == 1
        made.append((*case[0][:2], assembled([r[2] for r in case]), sum(r[3] for r in case), *case[0][4:]))
    return made


def relative_error(mine, reference, name):
    like = name.replace("k_b", "q_b")  # no loss depends on k's bias: its gradient is small noise beside q's
    return ((mine[name] - reference[name]).norm() / reference[like].norm()).item()


def agree(found, reference, what):
    """Loss, norm and every gradient that a layout has `found` are those of a `reference`, one process."""
    loss, norm, expected = reference
    assert abs(found[0] - loss) <= 1e-5 * loss, what
    assert abs(found[1] - norm) <= 1e-4 * norm, what
    assert set(found[2]) == set(expected), what
    worst = max((relative_error(found[2], expected, name), name) for name in expected)
    assert worst[0] <= 1e-5, (what, worst)
