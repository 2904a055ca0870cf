"""Norms, SwiGLU, rotary positions: torch's kernels, the fused ones (Triton's interpreter) and
transformer-engine's (a stand-in with its versions' parameters) against fp64."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from memo.config.layout import Layout
from memo.errors import ConfigError
from memo.kernels import fp8, ops, rows, te
from memo.kernels.backends import first_that_serves
from memo.kernels.matmul import matmul_of
from memo.kernels.ops import TE, TORCH, TRITON, resolve_ops, rotations
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT
from tests import fake_te
from tests.helpers import LLAMA, perturbed_weights, random_batch

CPU, EPS, ROOT = torch.device("cpu"), 1e-5, Path(__file__).parents[1]
BF16 = 2**-7  # of 8 bits; Triton's interpreter cuts off what torch rounds


def install_te(monkeypatch, version):
    fake_te.install(monkeypatch, version)
    monkeypatch.setattr(te, "installed", te.installed.__wrapped__)  # known anew each time


def kernels(name, monkeypatch):
    if name == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where triton is imported, nothing else does here
        pytest.importorskip("triton")
        return TRITON
    if name == "te":
        install_te(monkeypatch, "2.20.2")
        return TORCH._replace(name="te", norm_forward=TE.norm_forward, norm_backward=TE.norm_backward)
    return TORCH


@pytest.fixture(params=["torch", "triton"])
def kind(request, monkeypatch):
    return kernels(request.param, monkeypatch)


@pytest.fixture(params=["torch", "triton", "te"])
def norms(request, monkeypatch):
    return kernels(request.param, monkeypatch)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def sums_limit(norms, dtype):
    """Of gradients of w and b: fp32, whatever the dtype, but te rounds them to w's dtype."""
    return BF16 if norms.name == "te" and dtype == torch.bfloat16 else 1e-4


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("N,C", [(7, 64), (21, 96), (3, 5), (9, 300)])
def test_norm_forward_and_backward(norms, N, C, bias, dtype, limit, monkeypatch):
    monkeypatch.setattr(ops, "PROGRAMS", 4)
    monkeypatch.setattr(ops, "WHOLE_ROW", 128)
    x, dy, residual = (torch.randn(N, C).to(dtype) for _ in range(3))
    w, b = (1 + torch.randn(C) / 4).to(dtype), torch.randn(C).to(dtype) if bias else None
    out, mean, rstd = torch.empty_like(x), torch.empty(N), torch.empty(N)
    norms.norm_forward(x, w, b, out, mean, rstd, EPS)
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
            norms.norm_backward(add, like, x, mean, rstd, w, b, dw, db, into)
            assert error(into, x_.grad + (0 if add is None else add.double())) < limit
            assert error(dw - 1, w_.grad) < sums_limit(norms, dtype)
            assert not bias or error(db - 1, b_.grad) < sums_limit(norms, dtype)


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("N,C,eps", [(7, 64, 1e-5), (21, 96, 1e-6), (600, 5, 0.5), (9, 300, 1e-5)])
def test_rms_norm_forward_and_backward(norms, N, C, eps, dtype, limit, monkeypatch):
    monkeypatch.setattr(ops, "WHOLE_ROW", 128)
    monkeypatch.setattr(ops, "PROGRAMS", 4)
    monkeypatch.setattr(rows, "CACHED_ELEMENTS", 4 * C)  # several chunks
    monkeypatch.setattr(te, "CHUNK_ROWS", 1)
    monkeypatch.setattr(te, "CHUNK_ELEMENTS", 256 * C)
    x, dy, residual = (torch.randn(N, C).to(dtype) for _ in range(3))
    w, out, rstd = (1 + torch.randn(C) / 4).to(dtype), torch.empty_like(x), torch.empty(N)
    norms.norm_forward(x, w, None, out, None, rstd, eps)
    x_, w_ = x.double().requires_grad_(), w.double().requires_grad_()
    want = x_ * (x_.square().mean(1, keepdim=True) + eps).rsqrt() * w_
    want.backward(dy.double())
    assert error(out, want.detach()) < limit
    assert error(rstd, (x.double().square().mean(1) + eps).rsqrt()) < 1e-6
    for add in (None, residual):
        for into in (torch.empty_like(x), dy.clone()):
            dw, like = torch.ones(C), into if into.equal(dy) else dy  # over dy itself
            norms.norm_backward(add, like, x, None, rstd, w, None, dw, None, into)
            assert error(into, x_.grad + (0 if add is None else add.double())) < limit
            assert error(dw - 1, w_.grad) < sums_limit(norms, dtype)


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, 2 * BF16)],
                         ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape,gelu", [((5, 2, 24), False), ((3, 1, 2000), False), ((3, 1, 2000), True)])
def test_swiglu_forward_and_backward(kind, shape, gelu, dtype, limit, monkeypatch):
    """(n, tp, F/tp). The gradients take the places of gate and up; dy is used up."""
    monkeypatch.setattr(rows, "CACHED_ELEMENTS", 2 * shape[1] * shape[2])  # several chunks
    gate, up, dy = (3 * torch.randn(shape).to(dtype) for _ in range(3))
    gate_, up_ = (t.double().requires_grad_() for t in (gate, up))
    want = (F.gelu(gate_, approximate="tanh") if gelu else F.silu(gate_)) * up_
    want.backward(dy.double())
    out = torch.empty_like(gate)
    kind.swiglu_forward(gate, up, out, gelu)
    assert error(out, want.detach()) < limit
    kind.swiglu_backward(dy.clone(), gate, up, gelu)
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
        kind.rotary(got := x.clone(), turn, back)
        assert error(got, want) < limit


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size,V", [(1, 96), (1, 9000), (2, 5000)])
def test_cross_entropy_and_its_gradient(kind, size, V, dtype, limit):
    """Over ranks that have V columns each; the last one's last columns are padding."""
    rows, meeting, given = 5, threading.Barrier(size), {}
    logits = (4 * torch.randn(rows, size * V)).to(dtype)
    logits[:, -30:] = torch.finfo(dtype).min
    logits[0, 3] = 60.0  # as good as certain
    target = torch.tensor([3, 0, V - 32, (size - 1) * V, size * V - 31])
    want = logits.double().requires_grad_()
    log_p = want.log_softmax(1)[torch.arange(rows), target]
    log_p.sum().neg().backward()

    class Line(Axis):
        def gather(self, x):
            given[self.rank] = x
            meeting.wait()
            every = torch.stack([given[r] for r in range(size)])
            meeting.wait()
            return every

        def sum(self, x):
            return x.copy_(self.gather(x.clone()).sum(0))

    def rank(r):
        mine = logits[:, r * V:(r + 1) * V].contiguous()
        alone, none = kind.cross_entropy(Line("tp", size, r), mine.clone(), target, False)
        got, dlogits = kind.cross_entropy(Line("tp", size, r), mine, target, True)
        assert none is None and torch.equal(alone, got) and dlogits.dtype == dtype
        return got, dlogits
    with ThreadPoolExecutor(size) as pool:
        results = [*pool.map(rank, range(size))]
    gradient = torch.cat([dlogits for _, dlogits in results], 1)
    assert error(gradient, want.grad) < limit and error(gradient[1:], want.grad[1:]) < limit
    for got, _ in results:
        assert got.shape == (rows,) and got.dtype == torch.float32 and error(got, log_p.detach()) < 1e-6


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
def test_a_range_of_rows_gets_the_bits_of_all(norms, norm):
    x, w = torch.randn(40, 96).bfloat16(), torch.randn(96).bfloat16()
    whole, part, rstd = torch.empty_like(x), torch.empty(9, 96).bfloat16(), torch.empty(40)
    mean, few = (torch.empty(40), torch.empty(9)) if norm == "layernorm" else (None, None)
    norms.norm_forward(x, w, None, whole, mean, rstd, EPS)
    norms.norm_forward(x[7:16], w, None, part, few, rstd[:9], EPS)
    norms.norm_forward(x[:0], w, None, part[:0], few if few is None else few[:0], rstd[:0], EPS)
    assert torch.equal(part, whole[7:16])
    if norms.name == "te":  # which refuses tensors without elements
        norms.norm_backward(None, x[:0], x[:0], None, rstd[:0], w, None, torch.zeros(96), None, x[:0])
    gates = [whole.clone(), x.clone()], [whole[7:16].clone(), x[7:16].clone()]
    for gate, up in gates:
        norms.swiglu_backward(torch.ones_like(gate), gate, up)
    assert all(torch.equal(some, every[7:16]) for every, some in zip(*gates, strict=True))


@pytest.mark.parametrize("fused", [TRITON, TE], ids=lambda ops: ops.name)
def test_what_fused_kernels_request_is_traced_without_them(fused):
    x, w, dw = (torch.empty(*shape, device="meta") for shape in ((8, 64), (64,), (64,)))
    mean = rstd = torch.empty(8, device="meta")
    for kept in (mean, None):
        fused.norm_forward(x, w, None, x, kept, rstd, EPS)
        assert fused.norm_backward(x, x, x, kept, rstd, w, None, dw, None, x) is x
    fused.swiglu_forward(x, x, x)
    fused.swiglu_backward(x, x, x)
    name = "auto" if fused is TRITON else "te"
    assert resolve_ops(name, torch.device("meta")) == (fused, "")


@pytest.mark.parametrize("tp,n,K", [(1, 16, 48), (2, 70, 130)])
def test_fp8_operands_are_turned_as_torch_turns_them(tp, n, K, monkeypatch):
    kernels("triton", monkeypatch)
    dy, x = torch.randn(tp, n, K + 7)[..., :K].bfloat16(), fp8.rows(torch.randn(tp, n, 2 * K))
    factor = 2.0 ** torch.randint(-6, 6, (tp, n))
    dy[0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    dyq, xq = torch.zeros(K, tp * n, dtype=fp8.E5M2), torch.zeros(2 * K, tp * n, dtype=fp8.E4M3)
    fp8.turn(dy, x.q, factor, dyq, xq)
    want = (dy.float() * factor[..., None]).flatten(0, 1).t().to(fp8.E5M2)
    assert dyq[2, 0].isnan() and want[2, 0].isnan()
    dyq[2, 0] = want[2, 0]  # of several
    assert dyq.view(torch.uint8).equal(want.view(torch.uint8))
    assert xq.view(torch.uint8).equal(x.q.flatten(0, 1).t().contiguous().view(torch.uint8))


def test_torchs_own_operations_have_the_parameters_that_are_given():
    """Of 2.11, 2.13 and 2.14; another torch may call them otherwise without a word."""
    sources = "".join(path.read_text() for path in (ROOT / "memo").rglob("*.py"))
    lines = (ROOT / "tests" / "schemas.txt").read_text().splitlines()
    known = {line.partition("(")[0].removeprefix("aten::"): line for line in lines}
    assert {name.removesuffix(".default") for name in re.findall(r"ops\.aten\.([a-z_A-Z.]+)\(", sources)} <= {
        *known}
    for name, line in known.items():
        operation, _, overload = name.partition(".")
        assert str(getattr(getattr(torch.ops.aten, operation), overload or "default")._schema) == line


# --- transformer-engine's product ---

@pytest.mark.parametrize("version", ["2.2.0", "2.20.2"])
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_of_weights_are_added_where_they_lie(strided, version, monkeypatch):
    """By te's product, or where rows lie apart, which te does not see, by torch's."""
    install_te(monkeypatch, version)
    dy, x = (torch.randn(2, 48, width).bfloat16() for width in (32, 64))
    product, dw = matmul_of("fp8", "te"), torch.ones(32, 96 if strided else 64)[:, :64]
    g, taken = product.gradients(dy), product.rows(x)
    product.weight_gradient(dw, g, taken)
    dyq, xq, scale = fp8.gradient_operands(g, taken)
    assert error(dw - 1, scale * dyq.double() @ xq.double().t()) < 1e-5


@pytest.mark.parametrize("keys, products", [
    (dict(matmul="bf16"), 0), (LLAMA | dict(matmul="fp8", n_embd=64, n_inner=128, head_dim=16), 7)],
    ids=["GPT", "Llama in FP8"])
def test_a_layers_gradients_with_te_are_those_with_torch(keys, products, monkeypatch):
    cfg = Layout(n_layer=1, n_head=4, vocab_size=128, block_size=64, attention="math", position="rope",
                 **dict(n_embd=64) | keys)
    grads, called = {}, []
    monkeypatch.setattr(te, "add_fp8_product",
                        lambda *args, real=te.add_fp8_product: (called.append(1), real(*args)))
    for name in ("torch", "te"):
        found = kernels(name, monkeypatch)
        monkeypatch.setattr("model.resolve_ops", lambda *_, found=found: (found, ""))
        model = Model(GPT, cfg, CPU, torch.bfloat16)
        Optimizer(model, cfg).load(perturbed_weights(cfg, CPU))
        model.forward(*random_batch(cfg, 1, 64, CPU), scale=1.0)
        model.backward()
        grads[name] = model.grads
    assert len(called) == products
    assert error(grads["te"], grads["torch"].double()) < 2e-2


# --- the choice ---

def test_absent_kernels_are_an_error_only_by_name():
    assert resolve_ops("auto", CPU) == (TORCH, "they need a CUDA device")
    assert resolve_ops("torch", CPU) == (TORCH, "")
    for name in ("triton", "te"):
        with pytest.raises(ConfigError, match=f"^ops={name} is not available: they need a CUDA device; "
                                              "try ops=auto$"):
            resolve_ops(name, CPU)
    assert first_that_serves("ops", "auto", dict(triton="", torch="")) == ("triton", [])
    assert first_that_serves("ops", "auto", dict(triton="no", torch="")) == ("torch", ["triton"])
    assert first_that_serves("ops", "te", dict(te="")) == ("te", [])


@pytest.mark.parametrize("version, why", [
    (None, "transformer-engine is not installed (docs/install.md)"),
    ("2.1.0", "transformer-engine 2.1.0 is older than 2.2; install a version that requirements-gpu.txt "
              "names"),
    ("3.0.0", "transformer-engine 3.0.0 has another rmsnorm_bwd, which wants arg6; install a version that "
              "requirements-gpu.txt names"),
    ("2.2.0", ""), ("2.20.2", "")])
def test_what_cannot_be_called_of_transformer_engine_is_said_in_a_line(version, why, monkeypatch):
    install_te(monkeypatch, version)
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: name)  # Triton's
    assert ops.lacking("te", torch.device("cuda")) == why
    if why:
        with pytest.raises(ConfigError) as e:
            resolve_ops("te", torch.device("cuda"), launch=False)
        assert str(e.value) == f"ops=te is not available: {why}; try ops=auto"
    else:
        assert resolve_ops("te", torch.device("cuda"), launch=False) == (TE, f"transformer-engine {version}")
