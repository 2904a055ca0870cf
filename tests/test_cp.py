"""Context parallelism: the attention of one process, the bytes of the formulas, the work in balance."""

import pytest
import torch

from memo.kernels.attention import BACKENDS
from memo.kernels.ops import TORCH
from memo.layer.cp import attention_over_ranks
from memo.layer.tiles import RowOrder, one_sequence, rank_ranges
from memo.system.axis import Axis
from testing.ranks import pool


def positions(S, axis, kind):
    return torch.cat([torch.arange(*r) for r in rank_ranges(S, axis.rank, axis.size, kind)])


def scores(queries, keys, causal, T):
    """Scores that a block computes: all of a rectangle of queries and keys, or those up to the diagonal."""
    a, b = len(range(T)[queries]), len(range(T)[keys])
    return a * (a + 1) / 2 if causal else a * b


def attend(host, kind, dtype, limit, Hkv):
    """Every rank's part of attention and of its gradients is what one process finds; bytes as the formulas
    say."""
    axis = Axis("cp", host.size, host.rank, host.group)
    B, S, H, D = 2, 256, 4, 16
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, B, S, H, D, generator=generator).to(dtype)
    k, v = torch.randn(2, B, S, Hkv, D, generator=generator).to(dtype)
    mine = positions(S, axis, kind)
    for name in ("cpu", "math"):
        attention = BACKENDS[name]
        out, lse = attention.forward(q, k, v, True)
        want = [out, *attention.backward(dout, q, k, v, out, lse, True)]
        q_, k_, v_, dout_ = (t[:, mine].contiguous() for t in (q, k, v, dout))
        [met] = RowOrder([(S,)], kind, axis.size).meetings(0, 0, S // axis.size)
        parallel = attention_over_ranks(attention, axis, kind, TORCH.merge)[0].among(met)
        axis.sent_bytes = 0
        out_, lse_ = parallel.forward(q_, [(k_, v_)])
        cp, block, keys = axis.size, q_.nbytes, k_.nbytes
        every = max(keys, keys * cp // Hkv)  # where there are fewer heads than ranks, each goes to several
        exchanged = 2 * (block + every) * (cp - 1) // cp
        assert axis.sent_bytes == (2 * keys * (cp - 1) if kind == "ring" else exchanged)
        assert out_.dtype == dtype and lse_.shape == (B, H, S // cp)
        if kind == "ring":
            assert (lse_ - lse[..., mine]).abs().max() < limit
        found = [out_, *parallel.backward(dout_, q_, [(k_, v_)], [], out_, lse_)]
        for got, whole in zip(found, want, strict=True):
            error = (got - whole[:, mine]).float().norm() / whole[:, mine].float().norm()
            assert got.dtype == dtype and error < limit, (name, error)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("dtype,limit,Hkv", [(torch.float32, 1e-5, 4), (torch.float32, 1e-5, 2),
                                             (torch.float32, 1e-5, 1), (torch.bfloat16, 1e-2, 2)])
def test_attention_over_ranks_is_that_of_one_process(size, kind, dtype, limit, Hkv):
    pool(size).run(attend, kind, dtype, limit, Hkv)


def test_every_token_is_held_once():
    for cp in (1, 2, 4, 16, 64):
        for kind in ("ring", "ulysses"):
            ranks = [positions(128 * cp, Axis("cp", cp, rank), kind) for rank in range(cp)]
            assert torch.cat(ranks).sort().values.equal(torch.arange(128 * cp))
            assert {len(r) for r in ranks} == {128}


def test_the_zigzag_is_balanced_at_every_step_of_the_ring():
    T = 128
    for cp in (2, 4, 16, 64):
        [met] = RowOrder([(cp * T,)], "ring", cp).meetings(0, 0, T)
        work = [[sum(scores(*tile[:3], T) for tile in met.tiles(rank, (rank - step) % cp)[0])
                 for step in range(cp)] for rank in range(cp)]
        for step in range(cp):
            assert len({row[step] for row in work}) == 1
        total = sum(map(sum, work))
        assert total == cp * T * (cp * T + 1) / 2  # each pair of the whole causal square once


def test_one_rank_is_the_plain_attention():
    q, k, v, dout = torch.randn(4, 1, 64, 2, 16, generator=torch.Generator().manual_seed(0))
    alone = attention_over_ranks(BACKENDS["cpu"], Axis("cp"), "ring", TORCH.merge)[0].among(one_sequence(64))
    out, lse = BACKENDS["cpu"].forward(q, k, v, True)
    assert all(map(torch.equal, alone.forward(q, [(k, v)]), (out, lse)))
    want = BACKENDS["cpu"].backward(dout, q, k, v, out, lse, True)
    assert all(map(torch.equal, alone.backward(dout, q, [(k, v)], [], out, lse), want))
