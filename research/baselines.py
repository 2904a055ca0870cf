"""What memo is compared with, by arithmetic: Megatron-LM, and DeepSpeed-Ulysses with ZeRO-3, each in the
fastest layout of its own space that fits. The papers' page and tests have both from here.

Fair to their owners: the same rates of kernels, links and memory as in memo's dry run, for what their own
code does (research/baseline_layer.py); and a rival has the device to the last byte: no fragments, no margin.

A layer keeps for its backward what Korthikanti et al. (arXiv 2205.05198, section 4) count, with flash
attention, which keeps no scores, and without dropout: 32 bytes a token and element of C for GPT (34 with the
masks of dropout). Selective recomputation drops the scores, so here it would change nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from memo.config.config import Config
from memo.config.formulas import mfu, tgs
from memo.config.layer import layer_of
from memo.config.layout import Layout
from memo.decide.choose import degrees_of
from memo.estimate.pipeline_seconds import data_s, embedding_s, hop_s, optimizer_s
from memo.estimate.search import config_with
from memo.system.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine
from research.baseline_layer import BF16, DEEPSPEED, FP32, MEGATRON, head_s, layer_s, logit_bytes

OPTIMIZER_BYTES = 12  # of a parameter: weight and two moments in fp32
MOST_TP = 16
TOKENS_A_RANK = 1024  # a longest context is a multiple of so many times the ranks


class Recompute(NamedTuple):
    """So many layers of each stage run their forward again, of which each `together` keep one input; the
    others keep all. Megatron-LM: --recompute-method=block, with several together uniform."""

    layers: int = 0
    together: int = 1


class RivalLayout(NamedTuple):
    """A system's layout. `cfg`: tp, pp, cp (of DeepSpeed the ranks of Ulysses), the sequences of a micro
    batch as its batch_size. `micros`: micro batches of a rank in a step."""

    system: str
    cfg: Layout
    dp: int
    micros: int

    @property
    def world(self) -> int:
        return self.dp * self.cfg.pp * self.cfg.cp * self.cfg.tp

    @property
    def stage_layers(self) -> int:
        return self.cfg.n_layer // self.cfg.pp

    @property
    def rows(self) -> int:
        """Tokens of a micro batch that the tp ranks of a rank have together."""
        return self.cfg.batch_size * self.cfg.block_size // self.cfg.cp


class Run(NamedTuple):
    """What a step of a layout takes. `device_bytes`: of the fullest rank; `mfu`: 1 is all of the peak."""

    layout: RivalLayout
    recompute: Recompute
    device_bytes: float
    fits: bool
    step_s: float
    tgs: float
    mfu: float


# --- bytes ---

def row_elements(one: RivalLayout) -> tuple[int, int]:
    """(elements of a token that a layer keeps, elements more that its backward takes at the most), of all tp
    ranks together. Kept are the inputs of both halves and their norms, q, k, v, attention's output, and of
    the MLP what its first matrices give and what its last one takes. Ulysses keeps attention's output before
    and behind its all-to-all. The backward is fullest with two gradients in the MLP, or with what sequence
    parallelism gathers: the output of a norm and its gradient, whole on each rank."""
    cfg, layer = one.cfg, layer_of(one.cfg)
    C, F, first = cfg.n_embd, cfg.inner_width, cfg.inner_width * (2 if cfg.mlp == "swiglu" else 1)
    Q, KV = (heads * layer.head_dim for heads in (layer.heads, layer.kv_heads))
    kept = 4 * C + 2 * Q + 2 * KV + first + F + Q * (one.system == DEEPSPEED and cfg.cp > 1)
    gathered = 2 * cfg.tp * C if cfg.tp > 1 else 0  # when what the last matrix took is gone
    return kept, C + first + max(0, gathered - F)


def kept_bytes(one: RivalLayout, itemsize: int = BF16) -> float:
    """Of a layer that keeps all, with the statistics of two LayerNorms and of attention, in fp32."""
    return one.rows * (itemsize * row_elements(one)[0] + FP32 * (4 + one.cfg.n_head)) / one.cfg.tp


def state_bytes(one: RivalLayout, stage: int) -> float:
    """Parameters, gradients and optimizer of a rank. Megatron-LM with its distributed optimizer: 6 + 12/d
    bytes a parameter, d its dp * cp ranks (Megatron Core's guide, "Distributed Optimizer"). ZeRO-3: 16 bytes,
    shared by all ranks (arXiv 1910.02054), and in bf16 what is gathered: two layers and a gradient, or the
    head and its gradient."""
    cfg, matrices = one.cfg, layer_of(one.cfg).matrix_elements
    table = cfg.padded_vocab_size * cfg.n_embd
    tables = (stage == 0) + (stage == cfg.pp - 1) * (cfg.pp > 1 or not cfg.tie_embeddings)
    numel = one.stage_layers * matrices + tables * table
    if one.system == DEEPSPEED:
        return (2 * BF16 + OPTIMIZER_BYTES) * numel / one.world + BF16 * max(3 * matrices, 2 * table)
    return (BF16 + FP32 + OPTIMIZER_BYTES / (one.dp * cfg.cp)) * numel / cfg.tp


def activation_bytes(one: RivalLayout, stage: int, recompute: Recompute) -> float:
    """Of a rank of a stage. In 1F1B micro batches are under way for it and for each stage behind it; one of
    them is in a layer's backward, or at the head."""
    cfg, (again, together) = one.cfg, recompute
    x, kept = BF16 * one.rows * cfg.n_embd / cfg.tp, kept_bytes(one)
    inputs, whole = again // together * x, (one.stage_layers - again) * kept
    layers = inputs + max(whole, together * kept - x if again else 0.0)
    backward = layers + BF16 * one.rows * row_elements(one)[1] / cfg.tp
    # the head's input and its gradient are whole on each tp rank
    logits = logit_bytes(one.system, cfg)[0] * cfg.padded_vocab_size / cfg.tp
    logits = one.rows * (logits + 2 * BF16 * cfg.n_embd)
    head = inputs + whole + logits if stage == cfg.pp - 1 else 0.0
    return (min(one.micros, cfg.pp - stage) - 1) * (inputs + whole) + max(backward, head)


def device_bytes(one: RivalLayout, recompute: Recompute) -> float:
    """Of the fullest rank, with CUDA's context and a communicator for each axis of several ranks."""
    cfg = one.cfg
    axes = sum(ranks > 1 for ranks in (cfg.tp, cfg.cp, cfg.pp, one.dp * cfg.cp))
    return CONTEXT_BYTES + axes * COMMUNICATOR_BYTES + max(
        state_bytes(one, stage) + activation_bytes(one, stage, recompute) for stage in {0, cfg.pp - 1})


# --- seconds ---

def layers_s(one: RivalLayout, machine: Machine, recompute: Recompute) -> tuple[float, float]:
    """Seconds of (forward, backward) of all layers of a stage, a micro batch, with what recomputes them and
    ZeRO-3's messages."""
    forward, backward = layer_s(one.system, one.cfg, machine)
    stage = one.stage_layers * forward, one.stage_layers * backward + recompute.layers * forward
    return with_zero(one, machine, *stage) if one.system == DEEPSPEED else stage


def with_zero(one: RivalLayout, machine: Machine, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Seconds of (forward, backward) with ZeRO-3's messages beside them, which hide as those of tp do: the
    machine's "hidden" part of them. Parameters are gathered once in each of both: recomputed layers keep
    theirs for the backward behind it (partitioned_param_coordinator.py: stage3_max_reuse_distance).
    Gradients are copied to a bucket, put together by rank, divided and sent (stage3.py,
    coalesced_collectives.py)."""
    cfg, world, speeds = one.cfg, one.world, machine.speeds
    assert speeds is not None  # seconds are asked for only where they are known
    layers = one.stage_layers * layer_of(cfg).matrix_elements
    table = cfg.padded_vocab_size * cfg.n_embd  # is gathered for the embedding and for the head

    def sent_s(op: str, numel: int) -> float:
        return machine.message_s(op, BF16 * numel * (world - 1) / world, world) if world > 1 else 0.0

    def beside(compute_s: float, message_s: float) -> float:
        return compute_s + message_s - speeds.rate("hidden") * min(compute_s, message_s)
    copied = 3 * 2 * BF16 * (layers + table) * (world > 1)
    sent = sent_s("gather", layers) + sent_s("scatter", layers + table)
    return (beside(forward_s, sent_s("gather", layers + 2 * table)),
            beside(backward_s, sent) + speeds.seconds("copy", copied, copied))


def in_turns_s(stages: Sequence[float], micros: int) -> float:
    """Seconds of 1F1B, of each stage's seconds for a micro batch: the first one goes through all stages, then
    the slowest stage takes the others. The bubble is (pp - 1)/micros where stages are equal."""
    return sum(stages) + (micros - 1) * max(stages)


def step_s(one: RivalLayout, machine: Machine, recompute: Recompute) -> float:
    """Seconds of a step. Messages of data parallelism hide as memo's do; Megatron-LM does so with
    --overlap-grad-reduce and --overlap-param-gather, and scales its gradients before
    (megatron/core/distributed/param_and_grad_buffer.py)."""
    cfg, world = one.cfg, one.world
    forward, backward = layers_s(one, machine, recompute)
    stages = [forward + backward] * cfg.pp
    if cfg.pp > 1:  # no work is beside x and dx
        hops = 2 * hop_s(machine, world, cfg.pp, 0, BF16 * one.rows * cfg.n_embd / cfg.tp)
        stages = [seconds + hops for seconds in stages]
    stages[0] += embedding_s(cfg, machine, BF16)
    stages[-1] += head_s(one.system, cfg, machine)
    numel = one.stage_layers * layer_of(cfg).matrix_elements + cfg.padded_vocab_size * cfg.n_embd
    numel, data = (numel // world, 1) if one.system == DEEPSPEED else (numel // cfg.tp, one.dp * cfg.cp)
    ranks, scaled = min(world, machine.node.gpus_per_node), 2 * FP32 * numel * (data > 1)
    return (in_turns_s(stages, one.micros) + machine.seconds("copy", scaled, scaled)
            + data_s(cfg, machine, numel, BF16, data, world, forward, backward)
            + optimizer_s(cfg, machine, numel, BF16, data, ranks, forward))


# --- the fastest ---

def layouts(system: str, cfg: Config, world: int, sequences: int) -> Iterator[RivalLayout]:
    """The space of a system on so many ranks, with so many sequences a step. Megatron-LM: tp to MOST_TP, cp
    by a ring, equal stages, a sequence a micro batch. DeepSpeed: Ulysses with as many ranks as divide the
    heads, and any micro batch, for all of which ZeRO-3 gathers once."""
    mine, degrees = system == MEGATRON, degrees_of(world)
    tps = [tp for tp in degrees if tp <= MOST_TP and cfg.kv_heads % tp == 0] if mine else [1]
    pps = [pp for pp in degrees if cfg.n_layer % pp == 0] if mine else [1]
    for tp, pp, cp in product(tps, pps, degrees):
        dp, rest = divmod(world, tp * pp * cp)
        if rest or sequences % dp or (not mine and cfg.kv_heads % cp):
            continue
        for batch in [1] if mine else degrees_of(sequences // dp):
            one = config_with(cfg, tp=tp, pp=pp, cp=cp, context_parallel="ring" if mine else "ulysses",
                              batch_size=batch, gradient_accumulation_steps=sequences // batch,
                              subsequences=1)
            if one:
                yield RivalLayout(system, Layout.of(one), dp, sequences // dp // batch)


def recomputes(one: RivalLayout, all_or_none: bool) -> Iterator[Recompute]:
    """Those that a system offers, fastest first: none, with Megatron-LM some layers, all layers, all layers
    of which several keep one input. `all_or_none`: none or all, each with its input."""
    n = one.stage_layers
    some = one.system == MEGATRON and not all_or_none
    yield from (Recompute(k) for k in (range(n) if some else (0,)))
    yield from (Recompute(n, together) for together in ((1,) if all_or_none else degrees_of(n)))


def run(one: RivalLayout, machine: Machine, all_or_none: bool = False) -> Run:
    """A RivalLayout with its fastest recomputation that fits, or, where none does, with the one that takes
    least."""
    room = machine.memory_bytes
    assert room is not None  # it is a GPU
    every = [(device_bytes(one, recompute), recompute) for recompute in recomputes(one, all_or_none)]
    nbytes, recompute = next((pair for pair in every if pair[0] <= room), min(every))
    seconds = step_s(one, machine, recompute)
    rate = tgs(one.micros * one.dp * one.cfg.batch_size * one.cfg.block_size, one.world, seconds)
    return Run(one, recompute, nbytes, nbytes <= room, seconds, rate,
               mfu(one.cfg, rate, machine.peak_flops_per_s) or 0.0)


def best(system: str, cfg: Config, machine: Machine, world: int, sequences: int, all_or_none: bool = False,
         pp: int | None = None) -> Run | None:
    """The fastest Run that fits, of those with `pp` stages where that is given; where none does, that which
    takes least; None where there is no layout."""
    runs = [run(one, machine, all_or_none) for one in layouts(system, cfg, world, sequences)
            if pp in (None, one.cfg.pp)]
    return max((r for r in runs if r.fits), key=lambda r: r.tgs,
               default=min(runs, key=lambda r: r.device_bytes, default=None))


def longest(system: str, cfg: Config, machine: Machine, world: int, sequences: int) -> Run | None:
    """The best Run of the greatest block_size that fits; None where not one does."""
    room, unit = machine.memory_bytes, TOKENS_A_RANK * world
    assert room is not None  # it is a GPU

    def fits(n: int) -> bool:
        every = layouts(system, replace(cfg, block_size=n * unit), world, sequences)
        return any(device_bytes(one, recompute) <= room
                   for one in every for recompute in recomputes(one, False))
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return best(system, replace(cfg, block_size=low * unit), machine, world, sequences) if low else None
