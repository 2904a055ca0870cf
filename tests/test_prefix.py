"""Attention over a prefix in pieces is that of the whole sequence, on one rank and on several."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo.config import layer
from memo.kernels.attention import BACKENDS, Kernel, installed_kernel, math_backward, math_forward
from memo.kernels.ops import TORCH, rotations
from memo.layer.activations import Weights
from memo.layer.attend import QKNorms, attend, attend_backward
from memo.layer.cp import attention_over_ranks
from memo.layer.masks import CAUSAL, Mask, documents
from memo.layer.tiles import RowOrder, one_sequence
from memo.parallel.mesh import ALONE
from memo.system.axis import Axis
from testing.notes import noted_mesh
from testing.ranks import pool
from testing.rendezvous import validate_programs
from tests import fakes
from tests.helpers import error

H, D = 4, 16
CUTS = {1: (64,), 2: (64, 32), 3: (64, 48, 32), 5: (48, 16, 32, 16, 16)}  # tokens of each subsequence


def tensors(S, Hkv, B=2, dtype=torch.float32):
    """q, k, v, dout of a whole sequence."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, heads, D, generator=g).to(dtype) for heads in (H, Hkv, Hkv, H)]


def exact(q, k, v, dout):
    """out, dq, dk, dv of the whole sequence."""
    q, k, v, dout = (t.float() for t in (q, k, v, dout))
    out, lse = math_forward(q, k, v, True)
    return out, *math_backward(dout, q, k, v, out, lse, True)


def order_of(cut, axis=ALONE.tokens, kind="ring"):
    """The RowOrder of a rank."""
    return RowOrder([(n,) for n in cut], kind, axis.size, (axis.rank,))


def meeting(order, i):
    """Which tokens meet in subsequence i."""
    [met] = order.meetings(i, 0, sum(order.slices[i]) // order.size)
    return met


def over_prefix(*how):
    """The Attention to pieces."""
    return attention_over_ranks(*how)[1]


def pass_over(prefix_at, order, q, k, v, dout):
    """out, dq, dk, dv of the whole sequence at a rank's tokens; zeros elsewhere. As a layer is executed: all
    units' forwards, then all backwards, the last first. `prefix_at`: the Attention at tokens."""
    mine = order.positions()
    prefixes = [prefix_at(at).among(meeting(order, i)) for i, at in enumerate(mine)]
    found = [torch.zeros_like(t) for t in (q, q, k, v)]
    pieces, units = [], []
    for at, prefix in zip(mine, prefixes, strict=True):
        pieces.append(prefix.to_pieces(k[:, at], v[:, at]))
        out, lse = torch.empty_like(q[:, at]), torch.empty(len(q), H, len(at))
        attend(prefix, q[:, at], pieces, out, lse)
        found[0][:, at] = out
        units.append((out, lse))
    sums = [tuple(torch.zeros_like(t, dtype=torch.float32) for t in piece) for piece in pieces]
    for i in reversed(range(len(mine))):
        at, prefix = mine[i], prefixes[i]
        [dq] = attend_backward(prefix, dout[:, at], q[:, at], pieces[:i + 1], sums[:i + 1], *units[i])
        assert dq.dtype == q.dtype
        found[1][:, at] = dq
        for whole, g in zip(found[2:], prefix.from_pieces(*sums[i], k[:, at], v[:, at]), strict=True):
            whole[:, at] = g
    return found


def alone(name="cpu"):
    """The Attention of one rank, at any tokens."""
    prefix = over_prefix(BACKENDS[name], ALONE.tokens, "ring", TORCH.merge)
    return lambda at: prefix


def compare(found, want, order, limit):
    at = torch.cat(order.positions())
    for got, whole in zip(found, want, strict=True):
        assert error(got[:, at].float(), whole[:, at]) < limit


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize("Hkv", [1, 2, 4])
@pytest.mark.parametrize("N", list(CUTS))
def test_pieces_are_the_whole_sequence(N, Hkv, name):
    for B in (1, 2):
        whole = tensors(sum(CUTS[N]), Hkv, B)
        order = order_of(CUTS[N])
        compare(pass_over(alone(name), order, *whole), exact(*whole), order, 1e-5)


@pytest.mark.parametrize("Hkv", [1, 2, 4])
def test_groups_of_heads_are_bounded_by_the_longest_piece(Hkv, monkeypatch):
    whole, order = tensors(sum(CUTS[3]), Hkv), order_of(CUTS[3])
    heads = []

    def forward(q, *others):
        heads.append((q.shape[1], q.shape[2]))
        return BACKENDS["cpu"].forward(q, *others)
    prefix = over_prefix(BACKENDS["cpu"]._replace(forward=forward), ALONE.tokens, "ring", TORCH.merge)
    monkeypatch.setattr(layer, "GROUP_ELEMENTS", 2 * 64 * 2 * D)  # two heads of the first piece, B = 2
    compare(pass_over(lambda at: prefix, order, *whole), exact(*whole), order, 1e-5)
    assert set(heads) == {(64, 2), (48, 2), (32, 2)}  # although four heads of 32 queries would fit


def test_groups_that_the_caller_makes_are_all_heads():
    """As METP calls it: q of some heads, and those heads of the pieces, which they write into."""
    q, k, v, dout = tensors(sum(CUTS[3]), 2)
    order = order_of(CUTS[3])
    [*before, last], prefix = order.positions(), alone()(None).among(meeting(order, 2))
    pieces = [(k[:, at], v[:, at]) for at in (*before, last)]

    def attended(*groups):
        sums = [tuple(torch.zeros_like(t) for t in piece) for piece in pieces]
        out, lse, dq = torch.zeros_like(q[:, last]), torch.zeros(2, H, len(last)), []
        for h, kv in groups:
            of = [[tuple(t[:, :, kv] for t in pair) for pair in pairs] for pairs in (pieces, sums)]
            mine = q[:, last][:, :, h], dout[:, last][:, :, h], out[:, :, h], lse[:, h]
            attend(prefix, mine[0], of[0], *mine[2:])
            dq += attend_backward(prefix, mine[1], mine[0], *of, *mine[2:])
        return [out, lse, torch.cat(dq, 2), *(t for pair in sums for t in pair)]
    want = attended((slice(H), slice(2)))
    assert all(a.equal(b) for a, b in zip(attended((slice(2), slice(1)), (slice(2, H), slice(1, 2))), want,
                                          strict=True))


def test_one_piece_is_the_plain_call():
    q, k, v, dout = tensors(64, 2, dtype=torch.bfloat16)
    calls = []

    def called(which):
        def call(*args):
            calls.append(args)
            return getattr(BACKENDS["cpu"], which)(*args)
        return call
    kernel = Kernel("cpu", called("forward"), called("backward"))
    prefix = over_prefix(kernel, ALONE.tokens, "ring", TORCH.merge).among(one_sequence(64))
    out, lse, sums = torch.empty_like(q), torch.empty(2, H, 64), tuple(torch.zeros(2, 2, 64, 2, D))
    attend(prefix, q, [(k, v)], out, lse)
    [dq] = attend_backward(prefix, dout, q, [(k, v)], [sums], out, lse)
    want_out, want_lse = BACKENDS["cpu"].forward(q, k, v, True)
    want = BACKENDS["cpu"].backward(dout, q, k, v, want_out, want_lse, True)
    assert len(calls) == 2 and calls[0][3] is calls[1][6] is True
    assert out.equal(want_out) and lse.equal(want_lse) and dq.equal(want[0])
    for g, g_ in zip(prefix.from_pieces(*sums, k, v), want[1:], strict=True):
        assert g.equal(g_)


def test_in_bf16():
    whole, order = tensors(sum(CUTS[5]), 2, dtype=torch.bfloat16), order_of(CUTS[5])
    compare(pass_over(alone(), order, *whole), exact(*whole), order, 1e-2)


@pytest.mark.parametrize("version", ["2.8.3", "3", "4 beta 27"])
def test_packages_kernels_over_pieces(version, monkeypatch):
    """With the strides of a projection's columns."""
    fakes.install(monkeypatch, version)
    q, k, v, dout = tensors(sum(CUTS[3]), 2)
    q, k, v = torch.cat((q, k, v), 2).split((H, 2, 2), 2)
    order = order_of(CUTS[3])
    prefix = over_prefix(installed_kernel(fakes.KERNEL[version[0]]), ALONE.tokens, "ring", TORCH.merge)
    monkeypatch.setattr(layer, "GROUP_ELEMENTS", 2 * 64 * D)  # one head
    compare(pass_over(lambda at: prefix, order, q, k, v, dout), exact(q, k, v, dout), order, 1e-5)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for t in tree_leaves(made):
            if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("kind,size", [("ring", 1), ("ring", 2), ("ulysses", 2)])
def test_nothing_is_larger_than_the_queries_or_keys_of_a_group(kind, size, monkeypatch):
    T, axis = 16, Axis("cp", size)  # tokens of a rank, in each of eight pieces
    q, k, v, dout = tensors(T, 2)
    prefix = over_prefix(BACKENDS["cpu"], axis, kind, TORCH.merge).among(
        meeting(order_of((T * size,) * 8, axis, kind), 7))
    monkeypatch.setattr(layer, "GROUP_ELEMENTS", q.numel() // 2)  # two heads of a rank's queries
    pieces = [prefix.to_pieces(k, v) for _ in range(8)]
    sums = [tuple(torch.zeros_like(t) for t in piece) for piece in pieces]
    out, lse = torch.zeros_like(q), torch.zeros(2, H, T)
    with Largest() as largest:
        attend(prefix, q, pieces, out, lse)
        attend_backward(prefix, dout, q, pieces, sums, out, lse)
    assert largest.nbytes == q.nbytes // 2


# --- several ranks ---

def over_ranks(host, kind):
    """Every rank's part is that of the whole sequence: all cuts and numbers of heads, in one group and in
    several."""
    axis = Axis("cp", host.size, host.rank, host.group)
    prefix = over_prefix(BACKENDS["cpu"], axis, kind, TORCH.merge)
    for i, cut in enumerate(CUTS.values()):
        for Hkv in (1, 2, 4) if host.size == 2 else (1, 2, 4)[i % 3:][:1]:
            whole, order = tensors(sum(cut), Hkv, B := 1 + (Hkv == 2)), order_of(cut, axis, kind)
            want = exact(*whole)
            compare(pass_over(lambda at: prefix, order, *whole), want, order, 1e-5)
            with pytest.MonkeyPatch.context() as patch:  # two groups of a ring; one head of Ulysses
                patch.setattr(layer, "GROUP_ELEMENTS", B * max(cut) // axis.size * 2 * D)
                compare(pass_over(lambda at: prefix, order, *whole), want, order, 1e-5)
    whole, order = tensors(sum(CUTS[5]), 2, dtype=torch.bfloat16), order_of(CUTS[5], axis, kind)
    compare(pass_over(lambda at: prefix, order, *whole), exact(*whole), order, 1e-2)


SLOW = pytest.mark.slow
KINDS = [("ring", 2), ("ulysses", 2), *(pytest.param(kind, 4, marks=SLOW) for kind in ("ring", "ulysses"))]


@pytest.mark.ranks
@pytest.mark.parametrize("kind,size", KINDS)
def test_over_ranks_pieces_are_the_whole_sequence(kind, size):
    pool(size).run(over_ranks, kind)


def sent(kind, size, N, Hkv, dtype):
    """Bytes that a rank of `size` sends in a layer's forward and backward over N equal subsequences; their
    messages meet."""
    programs, counts = {}, set()
    for rank in range(size):
        mesh, programs[rank] = noted_mesh(rank, tp=1, cp=size)
        prefix = over_prefix(BACKENDS["cpu"], mesh.tokens, kind, TORCH.merge)
        order = order_of((128 // N,) * N, mesh.tokens, kind)
        pass_over(lambda at, prefix=prefix: prefix, order, *tensors(128, Hkv, dtype=dtype))
        counts.add(mesh.tokens.sent_bytes)
    validate_programs(programs)
    [count] = counts
    return count


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("dtype,Hkv", [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 1)])
def test_bytes_do_not_grow_with_the_number_of_subsequences(size, dtype, Hkv):
    axis = Axis("cp", size)
    plain = attention_over_ranks(BACKENDS["cpu"], axis, "ring", TORCH.merge)[0].among(
        meeting(order_of((128,), axis), 0))
    q, k, v, dout = tensors(128 // size, Hkv, dtype=dtype)
    plain.backward(dout, q, [(k, v)], [], *plain.forward(q, [(k, v)]))
    keys = (size - 1) * (4 * k.nbytes + 2 * 4 * k.numel())  # k, v, once more, with gradients in fp32
    assert axis.sent_bytes == keys
    # q, then q, dout, out; out and dq in fp32, and lse with both
    queries = (size - 1) * (4 * q.nbytes + 2 * 4 * (q.numel() + q.numel() // D))
    assert [sent("ring", size, N, Hkv, dtype) for N in (4, 16)] == [queries, queries]
    assert queries < keys * (16 + 1) / 2  # subsequence i of 16 would pass i + 1 of their keys and values
    exchanged = [sent("ulysses", size, N, Hkv, dtype) for N in (1, 4, 16)]
    assert exchanged[0] == exchanged[1] == exchanged[2] < queries


# --- other masks ---

def pairs_seen(S, mask):
    part = torch.bucketize(torch.arange(S), torch.tensor(mask.borders), right=True).tolist()
    return torch.tensor([[j <= i and mask.sees(part[i], part[j]) for j in range(S)] for i in range(S)])


def masked(q, k, v, dout, masks):
    """out, dq, dk, dv of whole sequences under their masks, by autograd in fp64."""
    given = [t.double().requires_grad_() for t in (q, k, v)]
    seen = torch.stack([pairs_seen(q.shape[1], mask) for mask in masks])[:, None]
    q_, k_, v_ = (t.transpose(1, 2) for t in given)
    out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, seen, enable_gqa=True)
    out.transpose(1, 2).backward(dout.double())
    return [t.float() for t in (out.detach().transpose(1, 2), *(t.grad for t in given))]


def behind_a_hole(i, j):
    return i == j or j != 1


def over_masks(host, kind):
    """Documents, and a hole, over pieces and over a whole sequence. `host`: an Axis."""
    axis = Axis("cp", host.size, host.rank, host.group)
    short, long = documents((1, 2, 20, 33, 70, 95, 96)), documents((80, 96))
    hole = Mask((24, 52), behind_a_hole)
    for cut, masks in product(((96,), (48, 16, 32)), ([short], [hole], [short, long], [long, CAUSAL])):
        order, whole = replace(order_of(cut, axis, kind), masks=masks), tensors(96, 2)
        for several in {True, len(cut) > 1}:
            made = attention_over_ranks(BACKENDS["cpu"], axis, kind, TORCH.merge)[several]
            if several:
                found = pass_over(lambda at, made=made: made, order, *whole)
            else:
                at = order.positions()[0]
                q, k, v, dout = (t[:, at] for t in whole)
                made = made.among(meeting(order, 0))
                out, lse = made.forward(q, [(k, v)])
                found = [torch.zeros_like(t) for t in (whole[0], *whole[:3])]
                gradients = made.backward(dout, q, [(k, v)], [], out, lse)
                for t, g in zip(found, (out, *gradients), strict=True):
                    t[:, at] = g
            compare(found, masked(*whole, masks), order, 1e-5)


# --- norms per head ---

W = Weights(q_norm_w=torch.linspace(0.5, 1.5, D), k_norm_w=torch.linspace(1.2, 0.3, D))


def normed_exact(q, k, v, dout):
    """out and the gradients of q, k, v and of the two weights, by autograd."""
    given = [t.clone().requires_grad_() for t in (q, k, v, W.q_norm_w, W.k_norm_w)]
    turn = rotations(torch.arange(q.shape[1]), D, 100.0)[:, None]

    def normed(x, w):
        pairs = torch.nn.functional.rms_norm(x, (D,), w, 1e-5).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (normed(given[0], given[3]), normed(given[1], given[4]), given[2])),
        is_causal=True, enable_gqa=True).transpose(1, 2)
    out.backward(dout)
    return [out, *(t.grad for t in given)]


def over_normed(host, kind):
    """`host`: an Axis."""
    axis, cut = Axis("cp", host.size, host.rank, host.group), CUTS[3]
    prefix = over_prefix(BACKENDS["cpu"], axis, kind, TORCH.merge)
    for elements in (2**26, 2 * max(cut) // axis.size * 2 * D):
        dw = Weights(q_norm_w=torch.zeros(D), k_norm_w=torch.zeros(D))

        def prefix_at(at, dw=dw):
            turn = rotations(at.repeat(2), D, 100.0)[:, None]
            return QKNorms(TORCH, W, dw, 1e-5, turn).over(prefix, several=True)
        whole, order = tensors(sum(cut), 2), order_of(cut, axis, kind)
        *want, dq_norm_w, dk_norm_w = normed_exact(*whole)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "GROUP_ELEMENTS", elements)
            compare(pass_over(prefix_at, order, *whole), want, order, 1e-5)
        assert error(axis.sum(dw.q_norm_w), dq_norm_w) < 1e-5
        assert error(axis.sum(dw.k_norm_w), dk_norm_w) < 1e-5


@pytest.mark.parametrize("over", [over_masks, over_normed])
def test_masks_and_norms_per_head(over):
    over(ALONE.tokens, "ring")


@pytest.mark.ranks
@pytest.mark.parametrize("kind,size", KINDS)
@pytest.mark.parametrize("over", [over_masks, over_normed])
def test_masks_and_norms_per_head_over_ranks(over, kind, size):
    pool(size).run(over, kind)
