"""FP8 products against fp64, their scales, and a layer's gradients against the reference with FP8 linears."""

from dataclasses import replace

import pytest
import torch

from memo.config.layer import tensors_of
from memo.config.layout import Layout, subsequence_lengths
from memo.errors import ConfigError
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.search import estimate_or_none, search
from memo.kernels import fp8
from memo.kernels.backends import check_matmul
from memo.kernels.fp8 import E4M3, E5M2
from memo.kernels.matmul import FP8
from memo.memory.parameters import views
from memo.parallel.mesh import ALONE
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.hardware import machine
from memo.verify.reference import Reference
from model import GPT
from testing.gradients import worst_gradient
from tests.helpers import CPU, LLAMA, error, perturbed_weights, random_batch
from tests.layouts import layout_keys, on_ranks, step_alone

# largest magnitude; the least that a row's largest has, over its scale
KINDS = {E4M3: (448, 2**7), E5M2: (57344, 2**14)}
SMALLEST = 2.0**-126  # of fp32's normal numbers


@pytest.fixture(autouse=True)
def same_numbers():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scales_are_powers_of_two_that_use_the_range(kind):
    most, least = KINDS[kind]
    amax = torch.tensor([1e-3, 0.9999, 1.0, 3.0, most, most + 1, 5e4, 3e38, SMALLEST * least, 2.0**-149, 0.0])
    scale = fp8.scale_of(amax, kind)
    assert scale.isfinite().all() and (torch.frexp(scale)[0] == 0.5).all()
    over = amax / scale
    assert (over <= most).all() and (over[:-2] >= least).all() and (scale[-2:] == SMALLEST).all()
    assert (over[:-2].to(kind).float() / over[:-2] - 1).abs().max() <= {E4M3: 2**-4, E5M2: 2**-3}[kind]


def made(n, K, dtype, spread=0, size=1.0, large=2):
    """(tp, n, K) of about a size, whose rows differ in magnitude, by 2^spread either way; among them zeros,
    and with a single large element row `large`."""
    x = size * torch.randn(2, n, K)
    x *= 2.0 ** torch.randint(-spread, spread + 1, (2, n, 1))
    x[0, 1], x[1, large, 3] = 0.0, 100 * x.abs().max()
    return x.to(dtype)


def exact(q, scale):
    """(rows of all ranks, K) fp64."""
    return (q.double() * scale[..., None].double()).flatten(0, 1)


# "limit": results in bf16 round by 2^-9. "allows": the relative error of a product whose operands round by
# 2^-4 at most, or 2^-3
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-3), (torch.bfloat16, 2**-8)],
                         ids=["fp32", "bf16"])
@pytest.mark.parametrize("spread", [0, 20])
def test_products_against_fp64(dtype, limit, spread):
    n, K, M = 48, 64, 80
    x, dy = made(n, K, dtype, spread), made(n, M, dtype, spread, size=1e-12, large=5)
    w, b = (torch.randn(M, K) / 50).to(dtype), torch.randn(M).to(dtype)
    xq, g, wq = FP8.rows(x), FP8.gradients(dy), fp8.weights(w)
    x_, dy_ = exact(xq.q, xq.scale), exact((g.q.float() / g.scale[..., None]).to(E5M2), g.scale)
    assert FP8.rows(xq) is xq
    y, dx, dw = torch.empty(n, 2, M, dtype=dtype), torch.empty(2, n, K, dtype=dtype), torch.zeros(M, K)
    fp32 = [t.flatten(0, -2).double() for t in (x, dy, w)]
    wq = wq.q.double() * wq.scale.double()

    def near(got, product, operands, allows):
        got = got.double()
        assert error(got, product) < limit
        assert 2**-8 < error(got, operands) < allows
    FP8.forward(xq, w, y.transpose(0, 1))
    near(y.transpose(0, 1).flatten(0, 1), x_ @ wq.t(), fp32[0] @ fp32[2].t(), 2 * 2**-4)
    plain = y.double()
    FP8.forward(xq, w, y.transpose(0, 1), b)
    assert error(y.double(), plain + b.double()) < 2 * limit
    FP8.input_gradient(g, w, dx)
    near(dx.flatten(0, 1), dy_ @ wq, fp32[1] @ fp32[2], 2**-3 + 2**-4)
    once = dx.double()
    FP8.input_gradient(g, w, dx, add=True)
    assert error(dx.double(), 2 * once) < 2 * limit
    for _ in range(2):
        FP8.weight_gradient(dw, g, xq)
    near(dw / 2, dy_.t() @ x_, fp32[1].t() @ fp32[0], 2**-3 + 2**-4)


def test_products_of_nothing_are_nothing():
    zeros, tiny = torch.zeros(1, 16, 16), torch.full((1, 16, 16), 1e-38)
    for dy, x in ((zeros, zeros), (zeros, tiny), (tiny, tiny)):
        dw = torch.zeros(16, 16)
        FP8.weight_gradient(dw, FP8.gradients(dy), FP8.rows(x))
        assert not dw.any()
    for x, w in ((zeros, zeros[0]), (zeros, tiny[0]), (torch.randn(1, 16, 16), zeros[0])):
        assert not FP8.forward(FP8.rows(x), w, torch.empty(1, 16, 16)).any()
        assert not FP8.input_gradient(FP8.gradients(x), w, torch.empty(1, 16, 16)).any()


def test_numbers_below_the_normal_ones_keep_some_of_their_bits():
    x, w = torch.full((1, 16, 16), 1.25 * 2.0**-130), torch.eye(16)
    assert torch.equal(FP8.forward(FP8.rows(x), 2.0**20 * w, torch.empty(1, 16, 16)), 2.0**20 * x)
    assert torch.equal(FP8.forward(FP8.rows(2.0**20 * torch.eye(16)[None]), x[0], torch.empty(1, 16, 16)),
                       2.0**20 * x)
    assert torch.equal(FP8.input_gradient(FP8.gradients(x), 2.0**20 * w, torch.empty(1, 16, 16)), 2.0**20 * x)


def test_matrices_that_travel_are_as_others():
    ws = [size * torch.randn(64, 32) for size in (100.0, 1.0)]
    sent, dys = FP8.matrices(ALONE.weights, ws), torch.randn(2, 48, 64)
    came = [FP8.arrived(FP8.carried(w).clone(), w) for w in sent]
    assert all(FP8.carried(w).nbytes == w.q.numel() for w in sent)
    dx = torch.empty(2, 1, 48, 32)
    for w, matrix, dy, out in zip(ws, came, dys, dx, strict=True):
        x, g = FP8.rows(torch.randn(1, 48, 32)), FP8.gradients(dy[None])
        assert torch.equal(*(FP8.forward(x, one, torch.empty(1, 48, 64)) for one in (w, matrix)))
        FP8.input_gradient(g, matrix, out)
        assert torch.equal(FP8.input_gradient(g, w, torch.empty_like(out)), out)
    dy, w = FP8.as_one([*dys], came)
    assert error(FP8.input_gradient(FP8.gradients(dy[None]), w, torch.empty(1, 48, 32)), dx.sum(0)) < 1e-5


def test_what_is_not_finite_is_never_hidden():
    x = torch.randn(1, 3, 16)
    x[0, 1, 5], x[0, 2, 5] = float("inf"), float("nan")
    y = FP8.forward(FP8.rows(x), torch.randn(16, 16), torch.empty(1, 3, 16))
    assert y[0, 0].isfinite().all() and not y[0, 1:].isfinite().any()


def test_a_range_of_rows_has_the_bits_of_the_whole():
    x, w = made(1024, 96, torch.float32, 9), torch.randn(64, 96)
    whole, part = FP8.rows(x), FP8.rows(x[:, 256:768])
    assert torch.equal(part.q.view(torch.uint8), whole[:, 256:768].q.view(torch.uint8))
    assert torch.equal(part.scale, whole[:, 256:768].scale)
    y = FP8.forward(whole, w, torch.empty(2, 1024, 64))
    assert torch.equal(FP8.forward(part, w, torch.empty(2, 512, 64)), y[:, 256:768])


def test_ranks_that_share_columns_round_them_as_one_process_does():
    """With tp: their scales are others, but all are powers of two."""
    x = 2.0 ** torch.randint(-6, 6, (2, 48, 64)) * (1 + torch.rand(2, 48, 64))  # none is too small for e4m3
    whole, part = FP8.rows(x), FP8.rows(x[..., :4])
    assert not torch.equal(part.scale, whole.scale)
    assert torch.equal(exact(part.q, part.scale), exact(whole.q, whole.scale)[:, :4])


def test_a_tensor_of_more_than_2_31_elements():
    n, K = 2**16, 2**15 + 16
    x, dy, w = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1, n, K), (1, n, 64),
                                                                                      (64, K)))
    xq = FP8.rows(x)
    assert xq.q.numel() > 2**31 and xq.scale.shape == (1, n)
    FP8.forward(xq, w, dy)
    FP8.input_gradient(FP8.gradients(dy), w, x)
    [matrix] = FP8.matrices(ALONE.weights, [x[0]])
    FP8.forward(FP8.rows(x[:, :64]), matrix, torch.empty(1, 64, n, dtype=x.dtype, device="meta"))
    FP8.input_gradient(FP8.gradients(torch.empty(1, 64, n, dtype=x.dtype, device="meta")), matrix, x[:, :64])
    FP8.weight_gradient(torch.empty(64, K, device="meta"), FP8.gradients(dy), xq)


def test_what_has_no_fp8_says_so():
    alone, tp2 = (Layout(matmul="fp8", tp=tp) for tp in (1, 2))
    for cfg, capability, itemsize in ((tp2, (0, 0), 4), (alone, (8, 9), 2), (tp2, (10, 0), 2),
                                      (replace(tp2, tensor_parallel="metp"), (8, 9), 2),
                                      (replace(tp2, matmul="bf16"), (8, 0), 4)):
        check_matmul(cfg, capability, itemsize)
    for cfg, capability, itemsize, message in (
            (alone, (8, 0), 2, "8.9 or above.*, not 8.0; try --matmul=bf16"),
            (alone, (9, 0), 4, "dtype=bfloat16 only.*; try --dtype=bfloat16"),
            (tp2, (8, 9), 2, "tp=2 needs .* 9.0 or above, not 8.9 .*; try --tensor_parallel=metp or")):
        with pytest.raises(ConfigError, match=message):
            check_matmul(cfg, capability, itemsize)


def test_a_device_without_such_products_is_named(monkeypatch):
    def refused(*args, **kwargs):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nmore")
    cpu = torch.device("cpu")
    assert fp8.failing(cpu) == ""
    monkeypatch.setattr(torch, "_scaled_mm", refused)
    assert fp8.failing(cpu) == "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"


def test_no_search_and_no_remedy_has_what_is_refused():
    """Remedies ask estimate_or_none()."""
    cfg, ada = Layout(matmul="fp8", vocab_size=512, tp=2), machine("l40s")
    assert all(got.cfg.tp == 1 or got.cfg.metp for got in search(cfg, ada, 2, fast_arena))
    assert estimate_or_none(cfg, ada, 2, fast_arena) is None
    assert estimate_or_none(replace(cfg, tensor_parallel="metp"), ada, 2, fast_arena)
    assert estimate_or_none(cfg, machine("h100-80gb"), 2, fast_arena)
    with pytest.raises(ConfigError, match="tp=2 needs .* 9.0"):
        estimate(cfg, ada, 2, fast_arena)


@pytest.mark.parametrize("keys,message", [
    (dict(n_embd=40), "n_embd=40"), (dict(n_inner=96, tp=4), "n_inner/tp=24"),
    (dict(n_kv_head=1, head_dim=24), "n_kv_head[*]head_dim/tp=24"),
    (dict(n_head=8, tp=2, tensor_parallel="metp", head_groups=8), "n_head[*]head_dim/head_groups=8")],
    ids=str)
def test_widths_that_fp8_products_cannot_take(keys, message):
    with pytest.raises(ConfigError, match=f"^{message} % 16 != 0 .*; try --matmul=bf16$"):
        Layout(**dict(n_embd=64, n_head=4, matmul="fp8") | keys)


def test_every_unit_has_rows_that_fp8_products_can_take():
    with pytest.raises(ConfigError, match=r"block_size=1032 % \(16\*cp\*tp\)=16 .* try block_size=1024"):
        Layout(matmul="fp8", block_size=1032)
    for keys in (dict(block_size=1040, subsequences=2), dict(block_size=98304, cp=8, tp=4, subsequences=15)):
        cfg = Layout(matmul="fp8", **keys)  # their lengths are no multiples of 128 for each rank
        ranks = cfg.cp * cfg.tp
        assert not any(n // ranks % 16 for n in subsequence_lengths(cfg))
        assert any(n // ranks % 16 for n in subsequence_lengths(replace(cfg, matmul="bf16")))


# --- a layer ---

def rounded(x, kind, dims=-1):
    """x as FP8 holds it, with a scale of each row, or of all."""
    amax = x.abs().amax(dims, keepdim=True)
    exponent = torch.frexp(amax)[1] - 1 - {E4M3: 7, E5M2: 14}[kind]
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)
    return (x / scale).to(kind).to(x.dtype) * scale


class Fp8Linear(torch.autograd.Function):
    """y = x w^T as the products are to be, from rounded operands in the dtype of x."""

    @staticmethod
    def forward(ctx, x, w):
        x, w = rounded(x, E4M3), rounded(w, E4M3, (0, 1))
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        (x, w), dy = ctx.saved_tensors, rounded(dy, E5M2)
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def fp8_reference(cfg):
    """The Reference whose layers' linears are Fp8Linear; in fp32, as what is rounded there."""
    reference = Reference(cfg, torch.float32)
    for linear in (m for m in reference.h.modules() if isinstance(m, torch.nn.Linear)):
        def forward(x, m=linear):
            y = Fp8Linear.apply(x, m.weight)
            return y if m.bias is None else y + m.bias
        linear.forward = forward
    return reference


FAMILIES = dict(bias=True), LLAMA | dict(n_inner=96, head_dim=16)


@pytest.mark.parametrize("keys", FAMILIES, ids=["gpt", "llama"])
def test_gradients_against_an_fp8_reference(keys):
    cfg = Layout(n_layer=2, n_head=4, n_embd=64, vocab_size=128, block_size=64, matmul="fp8", **keys)
    model = Model(GPT, cfg, CPU, torch.float32)
    Optimizer(model, cfg).load(perturbed_weights(cfg, CPU))
    reference = fp8_reference(cfg).load(perturbed_weights(cfg, CPU))
    batch = random_batch(cfg, 2, 64, CPU)
    loss, want = model.forward(*batch, scale=1.0), reference(*batch)
    model.backward()
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-5 * want.item()
    grads = views(model.layout, model.grads)
    assert worst_gradient(reference, grads)[0] < 1e-3
    plain = Reference(cfg).load(perturbed_weights(cfg, CPU))
    plain(*batch).backward()
    assert worst_gradient(plain, grads)[0] > 1e-2  # it is FP8 indeed


def test_inputs_that_only_products_read_are_kept_in_fp8():
    N, C, F = 512, 64, 256
    def kept(matmul, **keys):
        cfg = Layout(n_embd=C, n_head=4, n_inner=F, block_size=N, matmul=matmul, tp=2, **keys)
        return {name: t.nbytes * 2 for name, t in tensors_of(cfg, 2).items()}  # of both ranks
    for keys, halved in ((dict(), dict(ln1_out=C, ln2_out=C, gelu_out=F)),
                         (dict(mlp="swiglu"), dict(ln1_out=C, ln2_out=C))):
        half = {name: N * width for name, width in halved.items()}
        scales = {f"{name}_scale": 4 * N * (2 if name == "gelu_out" else 1) for name in halved}
        assert kept("fp8", **keys) == kept("bf16", **keys) | half | scales
    assert kept("fp8", tensor_parallel="metp") == kept("bf16", tensor_parallel="metp")


TWO = dict(subsequences=2, block_size=2048)
LAYOUTS = [("tp2", "ring", {}), ("cp2 pp2", "ring", TWO), ("tp2", "metp", FAMILIES[1]),
           ("tp2 cp2", "metp", TWO), ("tp2 dp2", "metp", dict(gradient_accumulation_steps=2))]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,keys", LAYOUTS, ids=str)
def test_layouts_agree(text, kind, keys):
    cfg = Layout(n_layer=2, n_head=4, n_embd=64, vocab_size=128, matmul="fp8",
                 **dict(block_size=1024, batch_size=1, activation="memo") | keys)
    loss, norm, expected = step_alone(replace(cfg, subsequences=1))
    modes = [replace(cfg, **layout_keys(text, kind), activation=mode) for mode in ("memo", "recompute")]
    (loss_, norm_, found, _), again = on_ranks(text, modes, False)
    assert again[:2] == (loss_, norm_) and all(torch.equal(again[2][name], found[name]) for name in found)
    assert abs(loss_ - loss) < 1e-3 * loss and abs(norm_ - norm) < 1e-3 * norm
    assert error(*(torch.cat([g[name].flatten() for name in expected]) for g in (found, expected))) < 1e-3
    # one number that rounds the other way may stand in the row that weighs most
    assert max(error(found[name], expected[name]) for name in expected) < 1e-2
