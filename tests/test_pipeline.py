"""Stages of a pipeline, fed with subsequences, give the loss and gradients of one process; in a layout all
modes give the same bits."""

from functools import cache

import pytest

from memo.config import Config
from memo.flat import views
from memo.parallel.mesh import ALONE
from tests.helpers import LLAMA, step
from tests.layouts import build, layout_keys, on_ranks, relative_error

KEYS = dict(n_layer=5, n_head=4, n_embd=64, vocab_size=150, block_size=512, unit_order="subsequence")
FAMILIES = {"gpt": dict(position="learned", bias=True, gradient_accumulation_steps=3),
            "rope": dict(batch_size=2, gradient_accumulation_steps=2),
            "llama": LLAMA | dict(qkv_bias=True, batch_size=2)}
MODES = {"keep": {}, "recompute": {}, "swap": {}, "memo": dict(alpha=0.5)}


def config(layout, family, N, cut="equal", mode="keep", **more):
    kind = "metp" if "metp" in layout else "ring"
    keys = KEYS | FAMILIES[family] | layout_keys(layout.replace("me", ""), kind) | MODES[mode] | more
    return Config(**keys, activation=mode, subsequences=N, subsequence_cut=cut)


@cache
def alone(family):
    """(loss, gradient norm, {name: gradient}) of one process, which does not cut the sequence."""
    model, optimizer = build(cfg := config("", family, 1), ALONE)
    loss = step(model, optimizer, cfg)
    return loss.item(), optimizer.clip(0.0).item(), views(model.layout, model.grads)


def agree(found, reference, what):
    loss, norm, expected = reference
    assert abs(found[0] - loss) <= 1e-5 * loss, what
    assert abs(found[1] - norm) <= 1e-4 * norm, what
    assert set(found[2]) == set(expected)
    worst = max((relative_error(found[2], expected, name), name) for name in expected)
    assert worst[0] <= 1e-5, (what, worst)


@pytest.mark.ranks
@pytest.mark.parametrize("layout,family,N,mode", [
    ("pp2", "gpt", 2, "keep"), ("pp2", "rope", 1, "memo"), ("pp2", "llama", 8, "swap"),
    ("pp3", "gpt", 8, "recompute"), ("pp3", "rope", 3, "swap"), ("pp4", "llama", 4, "memo")])
def test_stages_give_the_gradients_of_one_process(layout, family, N, mode):
    [found] = on_ranks(layout, [config(layout, family, N, "flops" if N == 8 else "equal", mode)], False)
    agree(found, alone(family), mode)
