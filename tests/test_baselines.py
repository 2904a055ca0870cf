"""What memo is compared with: bytes against autograd's saved tensors, the pipeline against 1F1B played
through, the search against all of its space."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memo.config.layout import Layout
from memo.config.settings import Kind
from memo.errors import ConfigError
from memo.system import hardware
from memo.verify.reference import ReferenceLayer
from research.baseline_layer import ROTARY, logit_bytes, passes
from research.baselines import (
    DEEPSPEED,
    FP32,
    MEGATRON,
    Recompute,
    RivalLayout,
    best,
    device_bytes,
    in_turns_s,
    kept_bytes,
    layouts,
    longest,
    recomputes,
    run,
    step_s,
)

SHAPE = dict(n_layer=6, n_head=12, n_embd=768, vocab_size=50257, block_size=65536, dtype="bfloat16",
             subsequences=1)
A800 = hardware.machine("a800-80gb")


@pytest.mark.parametrize("mlp, kv_heads", [("gelu", 4), ("swiglu", 2)])
def test_a_layer_keeps_what_autograd_saves(mlp, kv_heads):
    cfg = Layout(n_layer=1, n_head=4, n_embd=64, n_kv_head=kv_heads, n_inner=160, vocab_size=64,
                 block_size=32, batch_size=2, mlp=mlp, subsequences=1)
    block, saved = ReferenceLayer(cfg, Kind(0, None)), {}

    def save(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor
    x = torch.randn(2, 32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        y = block(x, {})
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    found = sum(nbytes for at, nbytes in saved.items() if at not in parameters)
    unfused = 2 * 32 * 160 * FP32 if mlp == "swiglu" else 0  # autograd keeps silu(gate), too
    assert found == kept_bytes(RivalLayout(MEGATRON, cfg, 1, 1), FP32) + unfused
    assert y.requires_grad  # what was saved is still there
    one = RivalLayout(MEGATRON, replace(cfg, n_inner=256), 1, 1)
    if mlp == "gelu":  # arXiv 2205.05198: 34 s b h, without the two masks of dropout; and statistics in fp32
        assert kept_bytes(one) == 32 * 64 * 64 + 64 * (4 + 4) * FP32


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, of tensors of at least so many elements."""

    def __init__(self, least):
        super().__init__()
        self.least, self.nbytes = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view and func is not torch.ops.aten.unbind.int:
            read = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
            wrote = made if isinstance(made, (list, tuple)) else [made]
            self.nbytes += sum(t.nbytes for t in [*read, *wrote]
                               if isinstance(t, torch.Tensor) and t.numel() >= self.least)
        return made


def test_rotary_positions_without_fusion():
    """x cos + (-x2, x1) sin, as autograd goes through it, in both ways."""
    x, angles = torch.randn(64, 1, 8, 16, dtype=torch.bfloat16, requires_grad=True), torch.randn(64, 1, 1, 16)
    dy = torch.ones_like(x)
    for way in ("forward", "backward"):
        with Traffic(x.numel() // 2) as count:
            if way == "forward":
                one, two = x.view(64, 1, 8, 2, 8).unbind(-2)
                turned = torch.cat((-two, one), dim=-1)
                y = x * angles.cos().bfloat16() + turned * angles.sin().bfloat16()
            else:
                y.backward(dy)
        assert count.nbytes == ROTARY[DEEPSPEED] * x.nbytes, way


@pytest.mark.parametrize("system, ranks", [(MEGATRON, 1), (DEEPSPEED, 1), (DEEPSPEED, 2)])
def test_bytes_of_the_loss(system, ranks):
    """Each operation's, from the head's product to that of its gradient, without what is small."""
    cfg = Layout(**SHAPE | dict(cp=ranks, context_parallel="ulysses"))
    logits, grad = torch.randn(16, 512, dtype=torch.bfloat16), torch.ones(16, 1)
    with Traffic(logits.numel()) as count:
        x = logits.float()
        if ranks > 1:
            x = torch.softmax(x, -1)
            x.log()
        else:
            most = x.max(-1, keepdim=True).values
            x = x.sub_(most) if system == MEGATRON else x - most
            torch.exp(x, out=x)
            x.div_(x.sum(-1, keepdim=True))
        x.mul_(grad).bfloat16()
    assert count.nbytes == logit_bytes(system, cfg)[1] * logits.numel()


def test_passes_of_a_layer():
    """In C of a token, as research/baselines.md has them; Ulysses copies q, k, v, output once each way."""
    cfg = Layout(**SHAPE)
    ring, shared = (replace(cfg, cp=2, context_parallel=how) for how in ("ring", "ulysses"))
    of = {name: [n / cfg.n_embd for n in passes(*those)] for name, those in dict(
        megatron=(MEGATRON, cfg), ring=(MEGATRON, ring), whole=(DEEPSPEED, cfg),
        ulysses=(DEEPSPEED, shared)).items()}
    # the ring more. Forward: k and v put together 4, zeros 1, 1.75 blocks' outputs added 5.25, halves 1.5;
    # backward: copies 4, 1.75 blocks' gradients of q, k, v added, the first ones copied 12.75, halves 2.5
    assert of == dict(megatron=[24, 34], ring=[35.75, 53.25], whole=[40, 50], ulysses=[48, 58])


def played(stages, micros):
    """Seconds of 1F1B, a third of each stage's forward: every stage warms up, alternates, and ends."""
    pp, ends = len(stages), {}
    orders = []
    for k in range(pp):
        warm = min(micros, pp - 1 - k)
        steady = [(way, i + (warm if way == "F" else 0)) for i in range(micros - warm) for way in "FB"]
        orders.append([("F", i) for i in range(warm)] + steady
                      + [("B", i) for i in range(micros - warm, micros)])
    free = [0.0] * pp
    while any(orders):
        for k, order in enumerate(orders):
            while order:
                way, i = order[0]
                before = ("F", k - 1, i) if way == "F" else ("B", k + 1, i)
                if 0 <= before[1] < pp and before not in ends:
                    break
                free[k] = max(free[k], ends.get(before, 0.0)) + stages[k] * (1 / 3 if way == "F" else 2 / 3)
                ends[way, k, i] = free[k]
                order.pop(0)
    return max(free)


@pytest.mark.parametrize("stages", [[3.0], [3.0] * 4, [3.0, 3.0, 3.0, 6.0]], ids=["one", "equal", "head"])
def test_stages_take_turns_as_in_1f1b(stages):
    for micros in (4, 16):
        assert in_turns_s(stages, micros) == pytest.approx(played(stages, micros))


@pytest.mark.parametrize("system, room", [(MEGATRON, 9 * 10**9), (DEEPSPEED, 18 * 10**9)])
def test_the_best_is_the_best_of_every_layout(system, room):
    """Of a machine with little memory, so that something does not fit."""
    cfg, small, world, sequences, rates = Layout(**SHAPE), replace(A800, memory_bytes=room), 12, 12, []
    for tp, pp, cp, dp, batch in product(range(1, 13), repeat=5):
        if tp * pp * cp * dp != world or sequences % (dp * batch) or 6 % pp or 12 % tp:
            continue
        if (batch > 1) if system == MEGATRON else (tp * pp > 1 or 12 % cp):
            continue
        try:
            one = replace(cfg, tp=tp, pp=pp, cp=cp, batch_size=batch,
                          context_parallel="ring" if system == MEGATRON else "ulysses")
        except ConfigError:  # the sequence cannot be shared out
            continue
        layout = RivalLayout(system, one, dp, sequences // dp // batch)
        for recompute in recomputes(layout, False):
            if device_bytes(layout, recompute) <= small.memory_bytes:
                rates.append(sequences * 65536 / world / step_s(layout, small, recompute))
    found = best(system, cfg, small, world, sequences)
    assert found.fits and found.tgs == pytest.approx(max(rates)) and len(rates) > 4
    assert not best(system, cfg, replace(A800, memory_bytes=10**9), world, sequences).fits


def test_recomputing_takes_seconds_and_saves_bytes():
    cfg = Layout(**SHAPE)
    for one in layouts(MEGATRON, cfg, 8, 8):
        none, some, all_, pairs = (Recompute(0), Recompute(one.stage_layers // 2),
                                   Recompute(one.stage_layers), Recompute(one.stage_layers, 2))
        seconds = [step_s(one, A800, way) for way in (none, some, all_, pairs)]
        assert seconds == sorted(seconds) and seconds[2] == seconds[3]
        assert device_bytes(one, none) >= device_bytes(one, all_)
        assert run(one, A800).recompute == none


def test_ulysses_ends_at_the_number_of_heads():
    cfg = Layout(**SHAPE | dict(block_size=131072))
    assert {one.cfg.cp for one in layouts(DEEPSPEED, cfg, 64, 64)} == {1, 2, 4}  # that divide 12 and 64
    assert best(DEEPSPEED, cfg, A800, 64, 1) is None  # of 16 replicas 15 would have no sequence
    four, eight = (longest(DEEPSPEED, cfg, A800, world, 16) for world in (4, 8))
    assert eight.layout.cfg.block_size < 1.1 * four.layout.cfg.block_size  # only the states shrink
    ring = longest(MEGATRON, cfg, A800, 8, 16)
    assert ring.layout.cfg.block_size > eight.layout.cfg.block_size
    more = replace(cfg, block_size=ring.layout.cfg.block_size + 8192)
    assert ring.fits and not best(MEGATRON, more, A800, 8, 16).fits
