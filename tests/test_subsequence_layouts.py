"""Several subsequences on several ranks give the loss and gradients of one process with one subsequence; in a
layout all modes give the same bits."""

from functools import cache

import pytest
import torch

from memo.config.layout import Layout
from memo.memory.parameters import views
from memo.parallel.mesh import ALONE
from tests.helpers import LLAMA, step
from tests.layouts import agree, build, layout_keys, on_ranks

KEYS = dict(n_layer=3, n_head=8, n_embd=64, vocab_size=150)
FAMILIES = {"gpt": dict(position="learned", bias=True),
            "rope": dict(batch_size=2, gradient_accumulation_steps=2),
            "llama": LLAMA | dict(qkv_bias=True, batch_size=2), "one": LLAMA | dict(n_kv_head=1),
            "qwen": LLAMA | dict(n_kv_head=4, qk_norm=True)}
MODES = {"keep": {}, "recompute": {}, "swap": {}, "memo": dict(alpha=0.5)}
# {layout: [(kind, family, N, order, cut, mode)]}; N = 8 has subsequences of 48 tokens. METP sends a message
# for each group of heads and earlier subsequence
CASES = {
    "tp2": [("ring", "rope", 3, "layer", "equal", "recompute"),
            ("ring", "llama", 8, "subsequence", "flops", "keep"),
            ("ring", "qwen", 2, "layer", "flops", "swap")],
    "cp2": [("ring", "rope", 8, "subsequence", "equal", "recompute"),
            ("ring", "one", 3, "layer", "flops", "swap"),
            ("ring", "qwen", 2, "subsequence", "flops", "keep"),
            ("ulysses", "gpt", 3, "layer", "equal", "swap"),
            ("ulysses", "one", 2, "subsequence", "flops", "keep"),
            ("ulysses", "qwen", 8, "layer", "flops", "recompute")],
    "tp2 cp2": [("ring", "qwen", 3, "layer", "flops", "keep"),
                ("ring", "llama", 8, "subsequence", "equal", "swap"),
                ("ulysses", "gpt", 3, "subsequence", "flops", "recompute"),
                ("ulysses", "llama", 2, "layer", "equal", "recompute")],
    "metp2": [("metp", "gpt", 3, "layer", "equal", "swap"),
              ("metp", "llama", 5, "subsequence", "flops", "recompute")],
    "metp2 cp2": [("metp", "qwen", 2, "layer", "flops", "recompute")],
    "metp4": [("metp", "one", 3, "layer", "flops", "recompute"),
              ("metp", "llama", 2, "subsequence", "equal", "swap")],
    "dp2": [("ring", "rope", 3, "subsequence", "flops", "recompute"),
            ("ring", "rope", 8, "layer", "equal", "keep")]}


def config(layout, kind, family, S, N, order="layer", cut="equal", mode="keep", **others):
    keys = KEYS | FAMILIES[family] | layout_keys(layout, kind) | MODES[mode]
    if kind == "metp":
        keys |= dict(head_groups=8 if family == "qwen" else 4)  # several read one head of keys, but for GPT's
    return Layout(**keys | others, block_size=S, activation=mode, subsequences=N, unit_order=order,
                  subsequence_cut=cut)


@cache
def alone(family, S, **others):
    """(loss, gradient norm, {name: gradient}) of one process, which does not cut the sequence."""
    model, optimizer = build(cfg := config("", "ring", family, S, 1, **others), ALONE)
    loss = step(model, optimizer, cfg)
    return loss.item(), optimizer.clip(0.0).item(), views(model.layout, model.grads)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("layout", list(CASES))
def test_subsequences_give_the_gradients_of_one(layout):
    text, cases = layout.replace("me", ""), CASES[layout]
    cfgs = [config(text, case[0], case[1], 384, *case[2:]) for case in cases]
    for case, found in zip(cases, on_ranks(text, cfgs, False), strict=True):
        agree(found, alone(case[1], 384), case)


SLOW = pytest.mark.slow
ROPE, COPIED_LLAMA = ("rope", "equal", "swap"), ("llama", "flops", "memo")


@pytest.mark.ranks
@pytest.mark.parametrize("layout, kind, cases", [
    pytest.param("tp2", "ring", [ROPE, COPIED_LLAMA], marks=SLOW), ("cp2", "ring", [ROPE, COPIED_LLAMA]),
    pytest.param("metp2", "metp", [COPIED_LLAMA], marks=SLOW)])
def test_a_copied_stream_gives_the_same_bits(layout, kind, cases):
    cfgs = [config(layout.replace("me", ""), kind, family, 384, 4, "layer", cut, mode)
            for family, cut, mode in cases]
    whole, copied = (on_ranks(layout.replace("me", ""), cfgs, False, torch.float32, stream)
                     for stream in ("whole", "copied"))
    for a, b in zip(whole, copied, strict=True):
        assert a[:2] == b[:2] and all(torch.equal(b[2][name], g) for name, g in a[2].items())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind, family, order, modes", [
    ("ring", "llama", "layer", MODES), ("metp", "llama", "subsequence", ["keep", "swap", "memo"]),
    ("metp", "one", "layer", ["keep", "recompute", "memo"])])
def test_all_modes_give_the_same_bits(kind, family, order, modes):
    """Units of 512 own rows, the fewest of which half can be recomputed alone; the memory is as planned."""
    cfgs = [config("tp2", kind, family, 512, 2, order, mode=mode, batch_size=4) for mode in modes]
    first, *others = on_ranks("tp2", cfgs, True)
    agree(first, alone(family, 512, batch_size=4), "keep")
    assert first[3] == 0
    for mode, other in zip(list(modes)[1:], others, strict=True):
        assert other[:2] == first[:2] and other[3] == 0, mode
        assert all(torch.equal(other[2][name], g) for name, g in first[2].items()), mode
