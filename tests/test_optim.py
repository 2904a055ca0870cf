"""The optimizer's norm."""

import pytest
import torch

from memo import flat
from memo.config import Config
from memo.optim import Optimizer, square_sum
from model import GPT

CPU = torch.device("cpu")
KEYS = dict(n_layer=3, n_head=4, n_embd=64, vocab_size=300, block_size=256)


@pytest.mark.parametrize("n", [1, 100, 2**14, 2**24 + 77, 10**8])
@pytest.mark.parametrize("kind", ["normal", "alike"])
def test_a_norm_is_that_of_fp64(n, kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator).mul_(1e-3) if kind == "normal" else torch.full((n,), 0.1)
    exact = sum(part.double().square().sum() for part in x.split(2**22)).sqrt()
    assert square_sum(x).sqrt() == pytest.approx(exact.item(), rel=1e-6)


def norm_of(cfg):
    """(norm, that of fp64) of gradients that depend on the parameter alone."""
    model = GPT(cfg, CPU, torch.float32)
    for name, g in flat.views(model.layout, model.grads).items():
        g.normal_(generator=torch.Generator().manual_seed(sum(map(ord, name))))
    norm = Optimizer(model, cfg).clip(1.0)
    return norm, model.buckets


def test_padding_changes_no_bit_of_the_norm(monkeypatch):
    cfg = Config(**KEYS)
    norm, buckets = norm_of(cfg)
    monkeypatch.setattr(flat, "ALIGNED", 7 * flat.ALIGNED)  # as of seven data ranks
    padded, others = norm_of(cfg)
    assert buckets != others and norm == padded and norm.dtype == torch.float32
