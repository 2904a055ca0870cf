"""Seconds of a layer, and of the head, of Megatron-LM and of Megatron-DeepSpeed with DeepSpeed-Ulysses:
matrix products, attention's kernels and links at the rates of memo's own layer; and every pass that their
published code makes over memory, at the rate of the machine's memory. A fused kernel reads and writes each
tensor once.

Source: the repositories as they were when MEMO appeared, in July 2024, with their defaults: Megatron-LM
fd5cfec with TransformerEngine 8e039fd; Megatron-DeepSpeed 73252c0 with DeepSpeed 83aa184. Passes are counted
for a micro batch of one sequence; larger ones take more.
"""

from math import fsum

from memo.config.config import Config
from memo.config.layer import Operation, layer_of
from memo.config.layout import Layout
from memo.estimate.pipeline_seconds import rows_of_tp_s
from memo.estimate.roofline import Before, hop_s, kernels_s, late_hop, one_document, total
from memo.estimate.unit_seconds import Block
from memo.system.hardware import Machine

MEGATRON, DEEPSPEED = "megatron", "deepspeed"
BF16, FP32 = 2, 4
# Tensors read and written where positions are rotated into one. Megatron-LM: fused
# (megatron/core/models/common/embeddings/rotary_pos_embedding.py). Megatron-DeepSpeed
# (megatron/model/rotary_pos_embedding.py): two products, half of it negated, a concatenation, a sum
ROTARY = {MEGATRON: 2, DEEPSPEED: 10}


def logit_bytes(system: str, cfg: Config) -> tuple[int, int]:
    """(bytes of a logit at the most, bytes of it that are read and written from the head's product to that of
    its gradient). Megatron-LM (megatron/core/tensor_parallel/cross_entropy.py): cast to fp32, largest,
    difference, exponential, sum, quotient, product with the gradient, cast to bf16, all but the casts in
    place. Megatron-DeepSpeed likewise, with a difference of its own; with Ulysses
    (megatron/core/sequence_parallel/cross_entropy.py) cast, softmax, its logarithm, product, cast."""
    casts, once, twice = 2 * (BF16 + FP32), FP32, 2 * FP32
    if system == DEEPSPEED and cfg.cp > 1:
        return BF16 + 3 * FP32, casts + 3 * twice
    return BF16 + FP32 * (2 if system == DEEPSPEED else 1), casts + 2 * once + 4 * twice


def passes(system: str, cfg: Config) -> tuple[float, float]:
    """Elements of a token that a layer's (forward, backward) reads and writes beside its products and
    attention's kernels. Of both systems: norms, the sums with the residual stream, and in the backward those
    of its gradients (megatron/core/transformer/transformer_layer.py, megatron/model/transformer.py); the
    activation; rotary positions; v, a part of the product's result, made contiguous; in the backward dq, dk
    and dv put together."""
    layer, C, F = layer_of(cfg), cfg.n_embd, cfg.inner_width
    Q, KV = (heads * layer.head_dim for heads in (layer.heads, layer.kv_heads))
    activation, its_backward = (3 * F, 5 * F) if cfg.mlp == "swiglu" else (2 * F, 3 * F)
    rotary = ROTARY[system] * (Q + KV)
    forward = 2 * (2 * C + 3 * C) + activation + rotary + 2 * KV
    backward = 2 * (3 * C + 3 * C) + its_backward + rotary + 2 * (Q + 2 * KV)
    if cfg.cp == 1:
        return forward, backward
    if system == DEEPSPEED:
        return forward + ulysses_copies(Q, KV), backward + ulysses_copies(Q, KV)
    return forward + ring_forward(cfg.cp, Q, KV), backward + ring_backward(cfg.cp, Q, KV)


def ulysses_copies(Q: int, KV: int) -> float:
    """single_all_to_all (deepspeed/sequence/layer.py): q, k, v are copied before their messages, attention's
    output behind its own; in the backward the output's gradient before, those of q, k, v behind."""
    return 2 * (Q + 2 * KV) + 2 * Q


def merged(ranks: int) -> float:
    """Rows of a ring's blocks over a rank's own: all for its own block and for an earlier rank's, half for a
    later one's; the mean rank's."""
    return 1 + 0.75 * (ranks - 1)


def ring_forward(ranks: int, Q: int, KV: int) -> float:
    """AttnFuncWithCP (transformer_engine/pytorch/attention.py): k and v put together, an output of zeros to
    which each block's is added with its weight; for an earlier rank's block half of k and v made contiguous,
    for a later one's half of q."""
    return 4 * KV + Q + 3 * merged(ranks) * Q + (ranks - 1) / 2 * (2 * KV + Q)


def ring_backward(ranks: int, Q: int, KV: int) -> float:
    """k and v are copied; each block's dq, dk, dv are added, the first ones copied; halves of k and v, or of
    q, the output and its gradient made contiguous."""
    return 4 * KV + (3 * merged(ranks) - 1) * (Q + 2 * KV) + (ranks - 1) / 2 * (2 * KV + 3 * Q)


def layer_s(system: str, cfg: Layout, machine: Machine) -> tuple[float, float]:
    """Seconds of a layer's (forward, backward) on a rank, of a micro batch. Messages of tp hide as far as the
    machine's figures say, a ring's hops beside attention over the block at hand, Ulysses' all-to-alls not at
    all. A ring sends keys and values, in the backward with their gradients behind them, all in bf16."""
    layer, ranks = Block(cfg, machine, BF16), cfg.cp
    linears = [op for op in layer.layer.operations if op.kind in ("column", "row")]
    products, inputs = total(map(layer.product, linears)), [layer.together(op) for op in linears]
    late = fsum(layer.input_message(ops).seconds for ops, op in zip(inputs, linears, strict=True)
                if op is ops[0])
    kernels = [kernels_s(layer, one_document(layer, Before()), way) for way in ("forward", "backward")]
    passed = [layer.copy(elements).seconds for elements in passes(system, cfg)]
    forward = products + late + kernels[0] + passed[0]
    backward = 2 * products + total(layer.backward_messages()) + kernels[1] + passed[1]
    if ranks == 1:
        return forward, backward
    if system == DEEPSPEED:
        share = layer.row_bytes * (ranks - 1) / ranks
        sent = 2 * fsum(machine.message_s("exchange", width * share, ranks) for width in (layer.Q, layer.KV))
        return forward + sent, backward + sent
    keys_s, beside = hop_s(layer, 2 * layer.KV * layer.row_bytes), [seconds / ranks for seconds in kernels]
    forward += late_hop(layer, keys_s, beside[0], ranks - 1).seconds
    return forward, backward + total([late_hop(layer, keys_s, beside[1], 2),
                                      late_hop(layer, 2 * keys_s, beside[1], ranks - 2)])


def head_s(system: str, cfg: Layout, machine: Machine) -> float:
    """Seconds of the final norm, the logits, the loss and their gradients, of all rows at once."""
    layer = Block(cfg, machine, BF16)
    V, C, speeds = cfg.padded_vocab_size, cfg.n_embd, machine.speeds
    assert speeds is not None  # seconds are asked for only where they are known
    nbytes = logit_bytes(system, cfg)[1] * layer.rows * V / cfg.tp
    logits, passed = layer.product(Operation("column", "x", C, V)), layer.copy((2 + 3) * C)
    return (3 * logits.seconds + speeds.seconds("copy", nbytes, nbytes) + passed.seconds
            + rows_of_tp_s(cfg, machine, layer.rows, [("gather", BF16 * C), ("scatter", BF16 * C)]))
