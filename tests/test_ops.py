"""Norms, SwiGLU, rotary positions: torch's kernels and the fused ones (Triton's interpreter) against fp64."""

import pytest
import torch

from memo import ops
from memo.errors import ConfigError
from memo.ops import TORCH, TRITON, resolve_ops, rotations

CPU, EPS = torch.device("cpu"), 1e-5
BF16 = 2**-7  # of 8 bits; Triton's interpreter cuts off what torch rounds


@pytest.fixture(params=["torch", "triton"])
def kind(request, monkeypatch):
    if request.param == "torch":
        return TORCH
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where triton is imported, which nothing else does here
    pytest.importorskip("triton")
    return TRITON


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("N,C", [(7, 64), (21, 96), (3, 5)])
def test_norm_forward_and_backward(kind, N, C, bias, dtype, limit, monkeypatch):
    monkeypatch.setattr(ops, "PROGRAMS", 4)
    x, dy, residual = (torch.randn(N, C).to(dtype) for _ in range(3))
    w, b = (1 + torch.randn(C) / 4).to(dtype), torch.randn(C).to(dtype) if bias else None
    out, mean, rstd = torch.empty_like(x), torch.empty(N), torch.empty(N)
    kind.norm_forward(x, w, b, out, mean, rstd, EPS)
    x_, w_, b_ = (t if t is None else t.double().requires_grad_() for t in (x, w, b))
    want = torch.nn.functional.layer_norm(x_, (C,), w_, b_, EPS)
    want.backward(dy.double())
    assert error(out, want.detach()) < limit
    assert error(mean, x.double().mean(1)) < 1e-5
    assert error(rstd, (x.double().var(1, correction=0) + EPS).rsqrt()) < 1e-5
    for add in (None, residual):
        for into in (torch.empty_like(x), dy.clone()):
            dw, db = torch.ones(C), torch.ones(C) if bias else None
            like = into if into.equal(dy) else dy  # over dy itself
            kind.norm_backward(add, like, x, mean, rstd, w, b, dw, db, into)
            assert error(into, x_.grad + (0 if add is None else add.double())) < limit
            assert error(dw - 1, w_.grad) < 1e-4  # fp32, whatever the dtype
            assert not bias or error(db - 1, b_.grad) < 1e-4


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("N,C,eps", [(7, 64, 1e-5), (21, 96, 1e-6), (3, 5, 0.5)])
def test_rms_norm_forward_and_backward(kind, N, C, eps, dtype, limit, monkeypatch):
    monkeypatch.setattr(ops, "PROGRAMS", 4)
    monkeypatch.setattr(ops, "CACHED_ELEMENTS", 4 * C)  # several chunks
    x, dy, residual = (torch.randn(N, C).to(dtype) for _ in range(3))
    w, out, rstd = (1 + torch.randn(C) / 4).to(dtype), torch.empty_like(x), torch.empty(N)
    kind.norm_forward(x, w, None, out, None, rstd, eps)
    x_, w_ = x.double().requires_grad_(), w.double().requires_grad_()
    want = x_ * (x_.square().mean(1, keepdim=True) + eps).rsqrt() * w_
    want.backward(dy.double())
    assert error(out, want.detach()) < limit
    assert error(rstd, (x.double().square().mean(1) + eps).rsqrt()) < 1e-6
    for add in (None, residual):
        for into in (torch.empty_like(x), dy.clone()):
            dw, like = torch.ones(C), into if into.equal(dy) else dy  # over dy itself
            kind.norm_backward(add, like, x, None, rstd, w, None, dw, None, into)
            assert error(into, x_.grad + (0 if add is None else add.double())) < limit
            assert error(dw - 1, w_.grad) < 1e-4  # fp32, whatever the dtype


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, 2 * BF16)],
                         ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(5, 2, 24), (3, 1, 2000)])
def test_swiglu_forward_and_backward(kind, shape, dtype, limit, monkeypatch):
    """(n, tp, F/tp). The gradients take the places of gate and up; dy is used up."""
    monkeypatch.setattr(ops, "CACHED_ELEMENTS", 2 * shape[1] * shape[2])  # several chunks
    gate, up, dy = (3 * torch.randn(shape).to(dtype) for _ in range(3))
    gate_, up_ = (t.double().requires_grad_() for t in (gate, up))
    want = gate_ * gate_.sigmoid() * up_
    want.backward(dy.double())
    out = torch.empty_like(gate)
    assert kind.swiglu_forward(gate, up, out) is out and error(out, want.detach()) < limit
    got = kind.swiglu_backward(dy.clone(), gate, up)
    assert got[0] is gate and got[1] is up
    assert error(gate, gate_.grad) < limit and error(up, up_.grad) < limit


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads,D", [(3, 64), (2, 96), (33, 128)])
def test_rotary_turns_every_pair(kind, heads, D, dtype, limit):
    n, tp = 2, 2
    turn = rotations(torch.arange(100, 100 + n * tp), D, 1e4, [1.0] * (D // 2)).view(n, tp, D // 2)
    x = torch.randn(n, tp, heads * D).to(dtype)
    pairs = torch.view_as_complex(x.double().view(n, tp, heads, D // 2, 2))
    for back in (False, True):
        there = turn.conj() if back else turn
        want = torch.view_as_real(pairs * there[:, :, None]).reshape(x.shape)
        got = kind.rotary(x.clone(), turn, back)
        assert error(got, want) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_merged_parts_are_attention_to_all_keys(kind, dtype):
    B, T, H, D, keys = 2, 37, 3, 24, 10
    scores, v = torch.randn(B, H, T, keys).double() * 5, torch.randn(B, H, keys, D).double()
    halves = zip(scores.split(5, -1), v.split(5, 2), strict=True)
    (out, lse), (out_, lse_) = (
        (torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v_).to(dtype), s.logsumexp(-1).float())
        for s, v_ in halves)
    longer = torch.zeros(B, T + 3, H, D), torch.zeros(B, H, T + 3)  # views of something else, as in a ring
    out, lse = longer[0][:, 3:].copy_(out), longer[1][..., 3:].copy_(lse)
    kind.merge(out, lse, out_, lse_)
    want = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v)
    assert error(out, want) < (1e-6 if dtype == torch.float32 else BF16)
    assert error(lse, scores.logsumexp(-1)) < 1e-6
    assert not longer[0][:, :3].any() and not longer[1][..., :3].any()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_range_of_rows_gets_the_bits_of_all(kind, norm):
    x, w = torch.randn(40, 96).bfloat16(), torch.randn(96).bfloat16()
    whole, part, rstd = torch.empty_like(x), torch.empty(9, 96).bfloat16(), torch.empty(40)
    mean, few = (torch.empty(40), torch.empty(9)) if norm == "layernorm" else (None, None)
    kind.norm_forward(x, w, None, whole, mean, rstd, EPS)
    kind.norm_forward(x[7:16], w, None, part, few, rstd[:9], EPS)
    assert torch.equal(part, whole[7:16])
    gates = [whole.clone(), x.clone()], [whole[7:16].clone(), x[7:16].clone()]
    for gate, up in gates:
        kind.swiglu_backward(torch.ones_like(gate), gate, up)
    assert all(torch.equal(some, every[7:16]) for every, some in zip(*gates, strict=True))


def test_what_fused_kernels_request_is_traced_without_triton():
    x, w, dw = (torch.empty(*shape, device="meta") for shape in ((8, 64), (64,), (64,)))
    mean = rstd = torch.empty(8, device="meta")
    for kept in (mean, None):
        TRITON.norm_forward(x, w, None, x, kept, rstd, EPS)
        assert TRITON.norm_backward(x, x, x, kept, rstd, w, None, dw, None, x) is x
    assert TRITON.swiglu_forward(x, x, x) is x and TRITON.swiglu_backward(x, x, x) == (x, x)
    assert resolve_ops("auto", torch.device("meta")) == (TRITON, "")


def test_absent_kernels_are_an_error_only_by_name():
    assert resolve_ops("auto", CPU) == (TORCH, "they need a CUDA device")
    assert resolve_ops("torch", CPU) == (TORCH, "")
    with pytest.raises(ConfigError,
                       match="ops=triton is not available: they need a CUDA device; try ops=auto"):
        resolve_ops("triton", CPU)
