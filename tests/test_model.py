"""Gradients of every parameter and of the input against autograd's, piece by piece and whole."""

import itertools

import pytest
import torch

from memo.config.layer import CHUNK_ROWS, HEAD_ROWS, SPLIT_ROWS, layer_of
from memo.config.layout import Layout
from memo.kernels.ops import rotary, rotations
from memo.kernels.rows import cut
from memo.layer.edges import Edges
from memo.memory.buffers import bytes_of
from memo.memory.parameters import views
from memo.planner.plan import plan_trace
from memo.run.rehearsal import traced_requests
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.verify.reference import Reference
from model import GPT, initial_weights
from testing.gradients import worst_gradient
from tests.helpers import GEMMA, LLAMA, OLMO, error, half_rotary, perturbed_weights, random_batch

YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}'
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def compare(cfg, B, T, device, dtype, limit):
    model = Model(GPT, cfg, device, dtype)
    Optimizer(model, cfg).load(perturbed_weights(cfg, device))
    rounded = {n: w.float() for n, w in views(model.layout, model.params).items()}
    reference = Reference(cfg).to(device).load(rounded.items())
    tokens, targets = random_batch(cfg, B, T, device)
    for _ in range(2):  # twice: what a first pass leaves in the buffers must not matter
        model.grads.zero_()
        loss = model.forward(tokens, targets, scale=1.0)
        model.backward()
        dx = model.swap.x[0]
    inputs = []
    reference.h[0].register_forward_pre_hook(lambda layer, given: inputs.append(given[0]))
    want = reference(tokens, targets)
    inputs[0].retain_grad()
    want.backward()
    assert abs(loss.item() - want.item()) <= limit * want.item()
    assert error(dx.double(), inputs[0].grad.reshape(dx.shape)) <= limit, "input"
    grads = views(model.layout, model.grads)
    assert {name: g.shape for name, g in reference.gradients().items()} == {
        name: g.shape for name, g in grads.items()}
    worst, names = worst_gradient(reference, grads)
    assert worst <= limit, names
    assert not grads["wte"][cfg.vocab_size:].any(), "padding of the vocabulary"


CASES = [(*which, *size) for which in itertools.product(("learned", "rope"), (True, False))
         for size in ((3, 32), (1, 64), (3, 128))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position,bias,B,D", CASES)
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_gradients_match_autograd(position, bias, B, D, dtype, limit, device):
    gelu = "tanh" if bias else "exact"
    cfg = Layout(n_layer=2, n_head=2, n_embd=2 * D, vocab_size=211, block_size=129,
                 position=position, bias=bias, gelu=gelu)
    compare(cfg, B, 129, device, dtype, limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", [
    LLAMA, LLAMA | dict(n_kv_head=1, head_dim=0, tie_embeddings=True),
    LLAMA | dict(n_kv_head=4, qkv_bias=True), LLAMA | dict(head_dim=32, qk_norm=True, rope_theta=1e6),
    LLAMA | half_rotary(8) | dict(qk_norm=True, qkv_bias=True, head_dim=8), LLAMA | half_rotary(24, 129),
    LLAMA | dict(rope_scaling=YARN), dict(norm="rmsnorm", qk_norm=True), OLMO, OLMO | dict(head_dim=8),
    dict(norms="both", bias=True), GEMMA,
    dict(mlp="swiglu", n_kv_head=2, position="learned")], ids=str)
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_gradients_of_other_families_match_autograd(keys, dtype, limit, device):
    cfg = Layout(n_layer=2, n_head=4, n_embd=64, vocab_size=211, block_size=129, **keys)
    compare(cfg, 2, 129, device, dtype, limit)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_groups_that_share_keys_give_the_gradients_of_one_group(heads, monkeypatch):
    cfg = Layout(n_layer=1, n_head=8, n_embd=64, vocab_size=64, block_size=64, n_kv_head=2)
    monkeypatch.setattr("memo.config.layer.GROUP_ELEMENTS", heads * 64 * 8)  # with 3: two, as of four
    compare(cfg, 1, 64, "cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_over_several_head_chunks(device, monkeypatch):
    monkeypatch.setattr("memo.config.layer.HEAD_ROWS", 50)
    cfg = Layout(n_layer=1, n_head=2, n_embd=64, vocab_size=130, block_size=77)
    compare(cfg, 2, 77, device, torch.float32, 1e-5)


def test_accumulated_micro_batches_equal_one_large_batch():
    cfg = Layout(n_layer=2, n_head=2, n_embd=64, vocab_size=100, block_size=64, position="learned")
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(perturbed_weights(cfg, "cpu"))
    tokens, targets = random_batch(cfg, 4, 64, "cpu")
    model.forward(tokens, targets, scale=1.0)
    model.backward()
    whole = model.grads.clone()
    model.grads.zero_()
    for half in (slice(0, 2), slice(2, 4)):
        model.forward(tokens[half], targets[half], scale=0.5)
        model.backward()
    assert error(model.grads, whole) < 1e-5


def test_evaluation_changes_no_gradient_and_gives_the_same_loss():
    cfg = Layout(n_layer=2, n_head=2, n_embd=64, vocab_size=100, block_size=64)
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(perturbed_weights(cfg, "cpu"))
    batch = random_batch(cfg, 1, 64, "cpu")
    loss = model.forward(*batch, scale=1.0)
    model.backward()
    before = model.grads.clone()
    assert torch.equal(model.forward(*batch), loss)
    assert torch.equal(model.grads, before)


@pytest.mark.parametrize("keys", [dict(position="learned", bias=True), dict(bias=True), LLAMA,
                                  LLAMA | dict(qk_norm=True), OLMO, GEMMA,
                                  OLMO | dict(head_dim=16, matmul="fp8"), dict(matmul="fp8")], ids=str)
def test_recompute_gives_the_same_bits(keys):
    cfg = Layout(n_layer=1, n_head=2, n_embd=64, vocab_size=100, block_size=512, **keys)
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(perturbed_weights(cfg, "cpu"))
    model.forward(*random_batch(cfg, 2, 512, "cpu"))
    (s,) = model.swap.layers
    names = [t.name for t in layer_of(cfg).skeletal if t.group]
    kept = {n: getattr(s, n).clone() for n in names}
    tail = slice(384, None)
    for n in names:
        getattr(s, n)[tail] = float("nan")
    model.gpt.blocks[0].recompute(s, dict.fromkeys(names, tail))
    for n in names:
        assert torch.equal(bytes_of(getattr(s, n)), bytes_of(kept[n])), n


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("most", [2**16, 300])
def test_recompute_of_other_rows_of_each_tensor_gives_the_same_bits(first, most, monkeypatch):
    monkeypatch.setattr("memo.kernels.rows.CHUNK_ROWS", most)
    cfg = Layout(n_layer=1, n_head=2, n_embd=64, vocab_size=100, block_size=1700, bias=True)
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(perturbed_weights(cfg, "cpu"))
    model.forward(*random_batch(cfg, 1, 1700, "cpu"))
    (s,) = model.swap.layers
    kept = dict(ln1_out=1280, q=256, k=1024, v=512, mid=1280, ln2_out=0, fc1_out=768, gelu_out=1700)
    rows = {n: slice(0, 1700 - k) if first else slice(k, 1700) for n, k in kept.items()}
    want = {n: getattr(s, n).clone() for n in kept}
    for n, r in rows.items():
        getattr(s, n)[r] = float("nan")
    model.gpt.blocks[0].recompute(s, rows)
    for n in kept:
        assert torch.equal(getattr(s, n), want[n]), n


@pytest.mark.parametrize("rows,ranks",
                         [(0, 1), (1, 1), (255, 8), (700, 1), (2**16, 1), (2**16 + 1, 1), (2**20 + 300, 3),
                          (2**18 - 1, 8)])
def test_a_chunk_is_neither_too_large_nor_too_small(rows, ranks):
    parts = cut(5, 5 + rows, ranks)
    assert [r.start for r in parts] == [5, *(r.stop for r in parts[:-1])] and parts[-1].stop == 5 + rows
    sizes = [r.stop - r.start for r in parts]
    assert max(sizes) - min(sizes) < 2 * SPLIT_ROWS and min(sizes) >= min(rows, SPLIT_ROWS)
    assert max(sizes) <= max(SPLIT_ROWS,
                             CHUNK_ROWS // ranks + SPLIT_ROWS * (CHUNK_ROWS % (ranks * SPLIT_ROWS) > 0))
    assert all(r.start % SPLIT_ROWS == 5 for r in parts)


def test_rotary_positions_stay_exact_at_ten_million_tokens():
    D, theta, t = 128, 10000.0, 9_999_999
    got = rotations(torch.tensor([t]), D, theta)[0]
    for j in range(D // 2):
        angle = torch.tensor(t, dtype=torch.float64) * theta ** (-2 * j / D)
        assert abs(got[j].real.item() - angle.cos().item()) < 1e-6
        assert abs(got[j].imag.item() - angle.sin().item()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_backward_undoes_forward_and_scores_see_distance_only(dtype):
    x = torch.randn(7, 64).to(dtype)
    turn = rotations(torch.arange(7), 32, 10000.0)
    rotary(there := x.clone(), turn, back=False)
    assert not torch.equal(there, x)
    rotary(there, turn, back=True)
    assert torch.allclose(there, x, atol=1e-5 if dtype == torch.float32 else 5e-2)
    q, k = torch.randn(2, 1, 32)
    def score(m, n):
        a, b = q.clone(), k.clone()
        for z, p in ((a, m), (b, n)):
            rotary(z, rotations(torch.tensor([p]), 32, 10000.0), back=False)
        return (a * b).sum()
    assert torch.allclose(score(5, 3), score(1005, 1003), atol=1e-4)


@pytest.mark.slow
def test_full_logits_never_exist():
    cfg = Layout(n_layer=1, n_head=1, n_embd=16, vocab_size=50257, block_size=2 * HEAD_ROWS)
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(initial_weights(cfg, 0, "cpu"))
    tokens, targets = random_batch(cfg, 1, cfg.block_size, "cpu")
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t._base is None:
                    largest = max(largest, t.numel())
            return out

    with Watch():
        model.forward(tokens, targets, scale=1.0)
        model.backward()
    assert HEAD_ROWS * 50257 <= largest < 1.1 * HEAD_ROWS * 50304


def test_adamw_decays_matrices_only_and_clips_the_global_norm():
    cfg = Layout(n_layer=2, n_head=2, n_embd=64, vocab_size=128, block_size=64, bias=True, position="learned",
                 weight_decay=0.5)
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(perturbed_weights(cfg, "cpu"))
    reference = Reference(cfg).load(views(model.layout, model.params).items())
    matrices, vectors = ([p for p in reference.parameters() if (p.dim() >= 2) == m] for m in (True, False))
    adamw = torch.optim.AdamW([dict(params=matrices, weight_decay=0.5),
                               dict(params=vectors, weight_decay=0.0)],
                              lr=1e-3, betas=(cfg.beta1, cfg.beta2), foreach=False)
    for i in range(5):
        batch = random_batch(cfg, 1, 64, "cpu", seed=i)
        model.forward(*batch, scale=1.0)
        model.backward()
        norm = optimizer.clip(0.1)
        optimizer.step(1e-3)
        adamw.zero_grad()
        reference(*batch).backward()
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        adamw.step()
        assert abs(norm.item() - want.item()) < 1e-4 * want.item()
    mine = views(model.layout, model.params)
    for name, p in reference.memo_names().items():
        if not name.endswith("k_b"):  # no loss depends on the k bias: AdamW makes steps of rounding noise
            assert error(mine[name], p.detach()) < 1e-5, name


# --- what is requested of a GPU, traced without one ---

def gpu_step(cfg):
    """(names of the operations, arena bytes) of a step of a GPU's rank, traced on "meta"."""
    names = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.name())
            return func(*args, **(kwargs or {}))
    with Names():
        trace = traced_requests(lambda device: Model(GPT, cfg, device, torch.bfloat16), 1, cfg.block_size,
                                [{}])
    return names, plan_trace(trace).arena_bytes


def test_a_trace_takes_no_kernel_that_torch_2_11_lacks_on_meta(monkeypatch):
    monkeypatch.setattr(Edges, "head", lambda *args: None)
    names, _ = gpu_step(Layout(n_layer=1, n_head=2, n_embd=64, vocab_size=128, block_size=512,
                               attention="flash"))
    assert "aten::addmm.dtype_out" not in names and any("flash_attention_backward" in name for name in names)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_no_second_copy_in_fp32_of_a_chunk_of_rows(kernels, monkeypatch):
    """At 128K tokens: rotary positions and the embedding's gradient used to hold two, 2.18 GB."""
    monkeypatch.setattr(Edges, "head", lambda *args: None)
    cfg = Layout(n_layer=1, n_head=32, n_embd=4096, vocab_size=50257, block_size=2**17, attention="flash",
                 ops=kernels)
    _, nbytes = gpu_step(cfg)
    assert nbytes <= 1.05 * 2**16 * 4096 * 4
