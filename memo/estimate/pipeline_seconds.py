"""Seconds of a step of a pipeline: the schedules of all stages run together (memo/schedule/simulate.py), each
with the modelled seconds of its stage. Source: SPPO 3.3."""

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from memo.estimate.hardware import Machine, Speeds
from memo.estimate.regions import Stage
from memo.estimate.step_seconds import (
    Ends,
    Lanes,
    data_s,
    embedding_s,
    head_s,
    micros_of_rank,
    optimizer_s,
    stage_seconds,
)
from memo.estimate.unit_seconds import LayerSeconds
from memo.flat import layer_numel
from memo.layer import INPUT, n_rows, tensors_of
from memo.layout import Layout
from memo.schedule.simulate import Times, times_of_stages
from memo.schedule.spans import Span, simulated_spans
from memo.schedule.step import Op
from memo.subsequences import unit_rows

MESSAGE_BYTES = 2**28  # of a long one, whose rate counts
LAYERS = Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD
PIPELINE_ENDS = Op.EMBED, Op.HEAD, Op.EMBED_BACKWARD  # of the pipeline


def hop_s(machine: Machine, world: int, pp: int, stage: int, nbytes: float, further: int = 1) -> float:
    """Seconds of so many bytes between a rank of a stage and its neighbour in the next one, or `further` than
    that. They stay inside a node where all ranks of both stages are on one."""
    ranks, node = world // pp, machine.node.gpus_per_node
    inside = stage * ranks // node == ((stage + 1 + further) * ranks - 1) // node
    return machine.message_s("shift", nbytes, 2 * ranks if inside else world)


def tied_s(stage: Stage, machine: Machine, world: int) -> float:
    """Seconds in which the first stage and the last one sum the gradients of a matrix that both hold: each
    rank those of its part of the optimizer."""
    cfg = stage.cfg
    if not (cfg.ties_stages and (cfg.has_embedding or cfg.has_head)):
        return 0.0
    nbytes = 4 * cfg.padded_vocab_size * cfg.n_embd * cfg.pp // world
    return machine.message_s("shift", nbytes, world)


def ends_of(cfg: Layout, machine: Machine, world: int, itemsize: int, speeds: Speeds) -> Ends:
    """The Ends of a config that says which stage."""
    row, B = tensors_of(cfg, itemsize)[INPUT].nbytes // n_rows(cfg), cfg.batch_size
    cuts = unit_rows(cfg, B, cfg.block_size // cfg.cp)
    send, send_gradient = (tuple(hop_s(machine, world, cfg.pp, first, row * n) for n in cuts)
                           for first in (cfg.stage, cfg.stage - 1))
    return Ends(embedding_s(cfg, machine, speeds, itemsize), head_s(cfg, machine, speeds, itemsize), send,
                send_gradient, lanes_of(cfg, machine, world, speeds) if cfg.msp else None)


def lanes_of(cfg: Layout, machine: Machine, world: int, speeds: Speeds) -> Lanes:
    """The Lanes of a config that says which stage."""
    rates = []
    for other in range(cfg.pp):
        first, last = sorted((cfg.stage, other))
        rates.append(MESSAGE_BYTES / hop_s(machine, world, cfg.pp, first, MESSAGE_BYTES, last - first))
    memory = MESSAGE_BYTES / speeds.seconds("copy", MESSAGE_BYTES, MESSAGE_BYTES)
    return Lanes(tuple(rates), layer_numel(cfg, world // (cfg.pp * cfg.tp)), memory)


def pipeline_times(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
                   layer: LayerSeconds) -> list[Times]:
    """The Times of each stage in a micro batch, all on one clock."""
    seconds = [stage_seconds(stage.placement, tensors_of(stage.cfg, itemsize), layer.units,
                             machine.node.pcie_bytes_per_s,
                             ends_of(stage.cfg, machine, world, itemsize, layer.speeds)) for stage in stages]
    schedules = [stage.placement.schedule() for stage in stages]
    return times_of_stages(schedules, lambda k, step: seconds[k](step))


def pipeline_spans(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
                   layer: LayerSeconds) -> list[list[Span]]:
    """The same as spans of each stage."""
    times = pipeline_times(stages, machine, world, itemsize, layer)
    return [simulated_spans(stage.placement.schedule(), time)
            for stage, time in zip(stages, times, strict=True)]


def least_s(stages: Sequence[Stage], world: int, layer: LayerSeconds) -> float:
    """Seconds that a step takes at least: the last stage waits for the first subsequence, the first stage
    for the last one, and each computes all."""
    layers, units = [stage.placement.n_layer for stage in stages], layer.units
    each = [unit.forward_s + unit.backward_s for unit in units]
    longest = max(layers[0] * fsum(each) + sum(layers[1:]) * each[-1],
                  layers[-1] * fsum(each) + sum(layers[:-1]) * each[0])
    if stages[0].cfg.msp:  # which fills the bubbles at best
        longest = sum(layers) * fsum(each) / len(stages)
    return micros_of_rank(stages[0].cfg, world) * longest


def pipeline_s(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
               layer: LayerSeconds) -> dict[str, float]:
    """{part: seconds} of a step, which add up to its "step": the means of all stages. "bubble": a stage waits
    for another one, or has nothing left to do. Micro batches follow each other, for no stage begins one
    before it has ended the one before; gradients and optimizer are those of the slowest stage."""
    cfg, data = stages[0].cfg, world // (stages[0].cfg.pp * stages[0].cfg.tp)
    times = pipeline_times(stages, machine, world, itemsize, layer)
    spent: list[dict[Op, float]] = [defaultdict(float) for _ in stages]
    for of, one in zip(spent, times, strict=True):
        for step, (start, end) in one.spans.items():
            if step.computes:
                of[step.op] += end - start
    mean = {op: fsum(of[op] for of in spent) / cfg.pp for op in (*LAYERS, *PIPELINE_ENDS)}
    share = cfg.n_layer / cfg.pp
    parts = {"attention": share * layer.attention_kernels_s, "messages": share * layer.messages_s,
             "recompute": mean[Op.RECOMPUTE]}
    parts["rest of the layers"] = fsum(mean[op] for op in LAYERS) - sum(parts.values())
    parts["stall"] = fsum(one.stall_s for one in times) / cfg.pp
    parts["head and embedding"] = fsum(mean[op] for op in PIPELINE_ENDS)
    parts["bubble"] = max(end for one in times for _, end in one.spans.values()) - sum(parts.values())
    parts = {name: micros_of_rank(cfg, world) * seconds for name, seconds in parts.items()}

    def at_last(stage: Stage, of: dict[Op, float]) -> tuple[float, float]:
        forward, backward = of[Op.FORWARD], of[Op.RECOMPUTE] + of[Op.BACKWARD]
        messages = data_s(stage.cfg, machine, stage.numel, itemsize, data, world, forward, backward)
        local_ranks = min(world, machine.node.gpus_per_node)
        return messages + tied_s(stage, machine, world), optimizer_s(
            stage.cfg, machine, layer.speeds, stage.numel, itemsize, data, local_ranks, forward)
    parts["gradients and parameters"], parts["optimizer"] = max(map(at_last, stages, spent), key=sum)
    return parts | {"step": sum(parts.values())}
