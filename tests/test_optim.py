"""The optimizer's norm, and the optimizer on the host: its bits are those of the one on the device."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from memo.config.layout import Layout
from memo.estimate.regions import states
from memo.memory import flat
from memo.memory.parameters import views
from memo.parallel.mesh import ALONE
from memo.states.optim import Optimizer, square_sum
from memo.states.passes import Model
from memo.system import hardware
from model import GPT
from testing.ranks import pool
from tests.helpers import degrees_of, mesh_of, perturbed_weights
from tests.helpers import step as forward_backward
from tests.layouts import train_steps

CPU = torch.device("cpu")
KEYS = dict(n_layer=3, n_head=4, n_embd=64, vocab_size=300, block_size=256)


@pytest.mark.slow
@pytest.mark.parametrize("n,kind", [*product([1, 100, 2**14, 2**24 + 77], ["normal", "alike"]),
                                    (10**8, "alike")])
def test_a_norm_is_that_of_fp64(n, kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator).mul_(1e-3) if kind == "normal" else torch.full((n,), 0.1)
    exact = sum(part.double().square().sum() for part in x.split(2**22)).sqrt()
    assert square_sum(x).sqrt() == pytest.approx(exact.item(), rel=1e-6)


def norm_of(cfg):
    """(norm, that of fp64) of gradients that depend on the parameter alone."""
    model = Model(GPT, cfg, CPU, torch.float32)
    for name, g in views(model.layout, model.grads).items():
        g.normal_(generator=torch.Generator().manual_seed(sum(map(ord, name))))
    model.reserve(1, cfg.block_size)
    norm = Optimizer(model, cfg).clip(1.0)
    return norm, model.buckets


def test_padding_changes_no_bit_of_the_norm(monkeypatch):
    cfg = Layout(**KEYS)
    norm, buckets = norm_of(cfg)
    monkeypatch.setattr(flat, "ALIGNED_ELEMENTS", 7 * flat.ALIGNED_ELEMENTS)  # as of seven data ranks
    monkeypatch.setattr(flat, "known_layout", flat.known_layout.__wrapped__)
    padded, others = norm_of(cfg)
    assert buckets != others and norm == padded and norm.dtype == torch.float32


# --- the optimizer on the host ---

SMALL = Layout(n_layer=5, n_head=4, n_embd=64, vocab_size=150, block_size=512, position="learned", bias=True)


def trained(mesh, cfg, dtype, steps=3, folder=None):
    """What train_steps() gives, where every layer keeps its activations."""
    def fresh(resumes):
        model = Model(GPT, cfg, CPU, dtype, mesh=mesh)
        model.reserve(cfg.batch_size, cfg.block_size // cfg.cp)
        optimizer = Optimizer(model, cfg)
        optimizer.load(perturbed_weights(cfg, CPU))
        return model, optimizer
    return train_steps(fresh, cfg, steps, folder)


def both(host, cfg, dtype):
    """What the optimizer does on the device and on the host, on this rank."""
    mesh = mesh_of(host, cfg)
    return [trained(mesh, replace(cfg, optimizer_device=where), dtype) for where in ("auto", "cpu")]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches,dtype", [(1, torch.float32), (2, torch.bfloat16)])
def test_an_optimizer_on_the_host_changes_no_bit(micro_batches, dtype, monkeypatch):
    monkeypatch.setattr("memo.memory.slab.PIECE_BYTES", 2**12)  # many edges, at which copies are cut
    cfg = replace(SMALL, gradient_accumulation_steps=micro_batches, grad_clip=0.1)
    device, host = (trained(ALONE, replace(cfg, optimizer_device=where), dtype) for where in ("auto", "cpu"))
    assert device == host
    norms = [norm for _, norm in host[0]]
    assert min(norms) > 2 * cfg.grad_clip and len(set(norms)) == 3, "clipping clips"


@pytest.mark.slow
def test_a_resumed_run_with_the_optimizer_on_the_host_is_the_run(tmp_path):
    cfg = replace(SMALL, optimizer_device="cpu")
    assert trained(ALONE, cfg, torch.bfloat16) == trained(ALONE, cfg, torch.bfloat16, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,micro_batches",
                         [("dp2", 2), ("dp2", 4), ("tp4", 1), ("tp2 cp2 dp2", 2)])
def test_an_optimizer_on_the_host_changes_no_bit_in_any_layout(text, micro_batches):
    size = degrees_of(text)
    cfg = replace(SMALL, tp=size["tp"], cp=size["cp"], gradient_accumulation_steps=micro_batches)
    cfg = replace(cfg, grad_clip=0.1, n_kv_head=2)  # of which four ranks hold copies
    for device, host in pool(size["tp"] * size["cp"] * size["dp"]).run(both, cfg, torch.bfloat16):
        assert device == host


@pytest.mark.parametrize("micro_batches, order", [(1, "layer"), (2, "subsequence")])
def test_with_subsequences_it_changes_no_bit(micro_batches, order, one_thread):
    """And the gradients of all micro batches, and of all subsequences, add up."""
    cfg = replace(SMALL, n_layer=3, gradient_accumulation_steps=micro_batches, grad_clip=0.1)
    several = replace(cfg, subsequences=3, unit_order=order)
    shown, *_ = trained(ALONE, cfg, torch.float32, steps=2)
    device, host = (trained(ALONE, replace(several, optimizer_device=where), torch.float32, steps=2)
                    for where in ("auto", "cpu"))
    assert device == host
    assert torch.tensor(device[0]).allclose(torch.tensor(shown), rtol=1e-4, atol=0)


@pytest.mark.parametrize("keys,layers", [
    ({}, 2), (dict(gradient_accumulation_steps=2), 5), (dict(subsequences=4), 2),
    (dict(subsequences=4, unit_order="subsequence"), 5)], ids=str)
def test_layers_whose_gradients_leave_take_turns_in_two_places(keys, layers):
    cfg = replace(SMALL, optimizer_device="cpu", **keys)
    model = Model(GPT, cfg, CPU, torch.float32)
    first, layer, *_, last = (end - start for start, end in model.buckets)
    assert model.grads.numel() == first + layers * layer + last
    _, lines = states(cfg, hardware.Machine("CPU", hardware.NODES["workstation"], None, None, None), 1, 4)
    assert [line.device_bytes for line in lines if line.region == "grads"] == [model.grads.nbytes]
    places = [grads.data_ptr() for grads in model.bucket_grads]
    assert len(set(places)) == layers + 2 and (places[1] == places[3]) == (layers == 2)
    for k, (block, grads) in enumerate(zip(model.gpt.blocks, model.bucket_grads[1:-1], strict=True)):
        for name in ("q_w", "ln1_w"):
            dw, p = getattr(block.dw, name), model.layout[f"h.{k}.{name}"]
            assert dw.data_ptr() == grads.data_ptr() + 4 * (p.offset - model.buckets[k + 1][0])


def test_gradients_leave_while_the_backward_goes_on():
    cfg = replace(SMALL, optimizer_device="cpu", gradient_accumulation_steps=1)
    model = Model(GPT, cfg, CPU, torch.float32)
    model.reserve(cfg.batch_size, cfg.block_size)
    optimizer = Optimizer(model, cfg)
    optimizer.load(perturbed_weights(cfg, CPU))
    forward_backward(model, optimizer, cfg)
    optimizer.clip(1.0)
    spans = model.swap.streams.timeline.take()
    left = {s.label: s for s in spans if s.kind == "launch" and s.stream == "offload"}
    names = "of the head", 4, 3, 2, 1, 0, "of the embedding"
    assert list(left) == [f"offload weight gradients {name}" for name in names]
    began = {s.label: s.start_s for s in spans if s.stream == "compute" and s.kind == "launch"}
    for above in (2, 3, 4):  # no layer adds to a place before the layer above has left it
        assert left[f"offload weight gradients {above}"].end_s <= began[f"backward {above - 2}"]
    assert not model.grads.any()
    model.close()
