"""METP alone: its layer beside torch's own, the pieces that matrices are cut into, groups of heads. Layouts,
modes and bytes: test_parallel.py."""

from itertools import chain

import pytest
import torch

from memo.config.layer import head_groups, tensors_of
from memo.config.layout import Layout
from memo.kernels.matmul import RUN
from memo.layer.metp import groups_of_heads, own_and_others, pieces_of
from memo.parallel.mesh import ALONE, Mesh
from memo.parallel.visits import Visits
from memo.run.rehearsal import FakeArena
from memo.schedule.streams import open_streams
from memo.states.passes import Model
from memo.system.axis import Axis, Works
from model import GPT
from testing.ranks import pool
from tests.helpers import CPU, LLAMA, mesh_of, perturbed_weights

SHAPE = dict(n_layer=1, n_head=8, n_embd=64, vocab_size=128, block_size=1024, batch_size=2,
             position="learned", bias=True)


def torchs_layer():
    """torch's own layer with the weights of SHAPE's."""
    w = {name.removeprefix("h.0."): t for name, t in perturbed_weights(Layout(**SHAPE), CPU)}
    layer = torch.nn.TransformerEncoderLayer(64, 8, 256, 0.0, "gelu", norm_first=True, batch_first=True)
    with torch.no_grad():
        for kind, ours in (("weight", "w"), ("bias", "b")):
            getattr(layer.self_attn, f"in_proj_{kind}").copy_(torch.cat([w[f"{n}_{ours}"] for n in "qkv"]))
            for theirs, name in (("self_attn.out_proj", "proj"), ("linear1", "fc1"), ("linear2", "fc2"),
                                 ("norm1", "ln1"), ("norm2", "ln2")):
                layer.get_parameter(f"{theirs}.{kind}").copy_(w[f"{name}_{ours}"])
    return layer


def halves(host, cfg, x, dy):
    """{name: (B, T, C)} of this rank's own tokens, and their positions: mid, y, and the gradient of x."""
    mesh = mesh_of(host, cfg) if host else ALONE
    model = Model(GPT, cfg, CPU, torch.float32, mesh=mesh)
    model.load(perturbed_weights(cfg, CPU))
    B, T, tp = cfg.batch_size, cfg.block_size // cfg.cp, mesh.weights
    model.reserve(B, T)
    mine = model.rows[0].positions[0][:T][tp.rank::tp.size]
    (s, y), block = (model.swap.layers[0], model.swap.x[1]), model.gpt.blocks[0]
    s.x.copy_(x[:, mine].flatten(0, 1))
    s.turn = None  # no positions
    block.forward(s, y)
    made = dict(mid=s.mid.clone(), y=y.clone())
    y.copy_(dy[:, mine].flatten(0, 1))
    made["dx"] = block.backward(y, s).clone()
    model.close()
    return {name: t.unflatten(0, (B, -1)) for name, t in made.items()}, mine


@pytest.mark.ranks
@pytest.mark.parametrize("p", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_its_halves_are_those_of_torchs_own_layer(p):
    """The paper's test: average error per element below 1e-5."""
    layer, S = torchs_layer(), SHAPE["block_size"]
    x, dy = torch.randn(2, 2, S, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S)
    x.requires_grad_()
    mid = x + layer._sa_block(layer.norm1(x), mask, None, is_causal=True)
    y = layer(x, mask, is_causal=True)
    y.backward(dy)
    theirs = dict(mid=mid.detach(), y=y.detach(), dx=x.grad)
    cfg = Layout(**SHAPE, tensor_parallel="metp", tp=p, head_groups=8)
    args = cfg, x.detach(), dy
    for made, mine in pool(p).run(halves, *args) if p > 1 else [halves(None, *args)]:
        for name, ours in made.items():
            assert (ours - theirs[name][:, mine]).abs().mean() < 1e-5, name


class Line(Axis):
    """Four ranks. `log`: what happens to messages, whose n-th brings part n."""

    def shift(self, *part, by):
        assert by == 1
        if part == ("own",):
            self.log, self.n = [], 0
        else:
            assert part == (f"part {self.n}",)  # each is sent on as it came
        self.n += 1
        self.log.append("post")
        return Arrival(self.log, [f"part {self.n}"])


class Arrival(Works):
    def __init__(self, log, part):
        self.log, self.received = log, part

    def wait(self):
        self.log.append("wait")
        return self.received


@pytest.mark.parametrize("ahead,order", [
    (1, "post own wait post 1 wait post 2 wait 3"), (2, "post post own wait post 1 wait 2 wait 3")])
def test_parts_come_while_those_before_them_are_used(ahead, order):
    axis = Line("cp", 4)
    for [part] in chain([["own"]], Visits(axis, "own", ahead=ahead)):
        axis.log.append(part.removeprefix("part "))
    assert " ".join(axis.log) == order


def test_two_parts_of_the_mlp_come_while_the_own_one_is_used():
    axis = Line("hops", 4)
    for part in own_and_others(RUN, {"fc1_w": "own"}, Visits(axis, "own")):
        axis.log.append(part["fc1_w"].removeprefix("part "))
    assert " ".join(axis.log) == "post post own wait 1 wait post 2 wait 3"


def test_pieces_cover_a_range_once():
    for part in (1, 3, 8):
        for first in range(24):
            for end in range(first + 1, 25):
                whole = [rank * part + there + i for rank, there, at, n in pieces_of(first, end, part)
                         for i in range(n) if 0 <= there + i < part]
                assert whole == list(range(first, end))
                assert [at for _, _, at, _ in pieces_of(first, end, part)][0] == 0


@pytest.mark.parametrize("H,Hkv,groups", [(8, 8, 2), (8, 2, 4), (8, 2, 8), (8, 1, 4), (12, 4, 2)])
def test_groups_hold_the_keys_that_their_queries_read(H, Hkv, groups):
    found = groups_of_heads(H, Hkv, groups)
    assert [h for group in found for h in range(H)[group.q]] == list(range(H))
    for group in found:
        q, kv = range(H)[group.q], range(Hkv)[group.kv]
        assert {h * Hkv // H for h in q} == set(kv)
        # as attention counts them: query i of a group reads head i * len(kv) // len(q) of the group's
        assert [kv[i * len(kv) // len(q)] for i in range(len(q))] == [h * Hkv // H for h in q]


def test_the_groups_are_two_a_rank_or_as_many_as_it_takes():
    def groups(S, **keys):
        return head_groups(Layout(**dict(n_head=32, n_embd=4096, vocab_size=128, tensor_parallel="metp",
                                         block_size=S) | keys))
    assert groups(4096) == 2 and groups(4096, tp=4) == 8
    assert groups(2**20, tp=8) == 32  # one head each: 2^17 rows of 128 elements
    assert groups(2**19, tp=8) == 16 and groups(2**19, tp=8, head_groups=8) == 8
    assert groups(4096, tp=8, n_head=8, n_kv_head=2) == 8  # no rank has two heads
    assert groups(4096, tp=8, n_kv_head=8) == 8  # more would make each key twice


def test_a_layer_keeps_three_units():

    for family in ({}, LLAMA | dict(head_dim=8)):
        cfg = Layout(n_layer=1, n_head=8, n_embd=64, vocab_size=128, tp=2, tensor_parallel="metp", **family)
        tensors = tensors_of(cfg, 4)
        unit = 4096 // 2 * 64 * 4
        assert {n: t.nbytes for n, t in tensors.items()} == dict(
            x=unit, attn_out=unit, lse=4096 // 2 * 8 * 4, mid=unit)
        assert [n for n, t in tensors.items() if t.group] == ["mid"]


def most_at_once(arena, nbytes):
    """Of the requests for so many bytes, the most that lived at a time."""
    live = peak = 0
    sizes = {name: n for verb, name, n in arena.log if verb == "malloc"}
    for verb, name, _ in arena.log:
        live += (sizes.get(name) == nbytes) * ((verb == "malloc") - (verb == "free"))
        peak = max(peak, live)
    arena.log.clear()
    return peak


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_more_matrices_are_there_than_travel(p):
    cfg = Layout(n_layer=1, n_head=8, n_embd=64, n_inner=320, vocab_size=128, block_size=768 * p, tp=p,
                 tensor_parallel="metp", head_groups=8)
    mesh = Mesh(weights=Axis("tp", p), hops=Axis("hops", p), tokens=Axis("cp", p))
    model, arena = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh), FakeArena()
    model.reserve(1, cfg.block_size, streams=open_streams(CPU))
    block, s, y = model.gpt.blocks[0], model.swap.layers[0], model.swap.x[1]
    part, group = 320 // p * 64, 64 // 8 * 64  # elements: two matrices a part, four a group
    sets = 1 if p == 2 else 2
    arena.run("forward", block.forward, s, y)
    assert most_at_once(arena, 2 * part) == 2 * sets
    arena.run("forward", block.forward, s, y)
    assert most_at_once(arena, 2 * group) == 2 * 3  # of q, k and v; the projection's come whole
    arena.run("backward", block.backward, y, s)
    assert most_at_once(arena, 2 * part) == 2 * sets
    s.x.normal_()
    arena.run("forward", block.forward, s, y)
    arena.log.clear()
    arena.run("backward", block.backward, y, s)
    assert most_at_once(arena, 4 * part) == 2 * (2 if p == 2 else 3)
    arena.run("backward", block.backward, y, s)
    assert most_at_once(arena, 4 * group) == 2 * 4
