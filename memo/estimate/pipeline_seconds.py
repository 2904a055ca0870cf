"""Seconds of a step, in which the schedules of all stages run together (memo/schedule/simulate.py): of its
layers, of head and embedding, of the optimizer and of all messages. Source: MEMO 4.1, SPPO 3.3."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil, fsum, sqrt

from memo.config.layer import CHUNK_ROWS, INPUT, head_rows, logit_bytes, n_rows, tensors_of
from memo.config.layout import Layout, subsequence_lengths, unit_rows
from memo.decide.step_seconds import STAY, Ends, Lanes, StateSeconds, step_seconds
from memo.estimate.regions import Stage, micros_of_rank
from memo.estimate.roofline import NORMS, units_of_passes
from memo.estimate.unit_seconds import ModelledRates
from memo.memory.flat import bucket_numels, layer_numel, weights_in_turns
from memo.schedule.passes import schedule_of_sequences
from memo.schedule.periods import totals_of
from memo.schedule.program import LAYER_PLACES
from memo.schedule.simulate import Times, end_of, times_of_stages
from memo.schedule.spans import Span, simulated_spans
from memo.schedule.step import Op
from memo.system.hardware import Machine

ADAMW_BYTES = 28  # a parameter, fp32: weight, two moments, gradient are read, all but the gradient written
# One part in so many of the gradients' sum, and of the parameters' way back, is always exposed: the bucket at
# the end. An assumption, the same for all models: the L + 2 buckets are not equal.
BUCKETS = 30
MESSAGE_BYTES = 2**28  # of a long one, whose rate counts
LAYERS = Op.FORWARD, Op.RECOMPUTE, Op.SWEEP, Op.BACKWARD
PIPELINE_ENDS = Op.EMBED, Op.HEAD, Op.EMBED_BACKWARD  # of the pipeline


def state_seconds(cfg: Layout, machine: Machine, world: int, itemsize: int) -> StateSeconds:
    """Counts the seconds to move a layer's states: to the host or within the device, and between ranks."""
    if not cfg.layers_come:
        return STAY
    data = world // cfg.tp
    embedding, layer, *_, head = bucket_numels(cfg, data)
    shard, sums = layer / data, float(micros_of_rank(cfg, world) > 1)

    def moved_s(nbytes: float) -> float:  # in fp32 where they are on the device: of the master weights
        if cfg.states == "host":
            return nbytes / machine.node.pcie_bytes_per_s
        return machine.seconds("copy", nbytes + 4 * shard, nbytes)

    def message_s(op: str, nbytes: float) -> float:
        return machine.message_s(op, nbytes * (data - 1), world, cfg.tp) if data > 1 else 0.0
    params, gradients = itemsize * shard, 4 * shard
    return StateSeconds(moved_s(params) + message_s("gather", params),
                        moved_s(gradients) + message_s("scatter", gradients), sums * moved_s(gradients),
                        embedding / layer, head / layer)


def head_s(cfg: Layout, machine: Machine, itemsize: int, learned: float) -> float:
    """Counts the seconds of final norm, logits, loss and their gradients, chunk by chunk. `learned`: the part
    of the rows that it computes."""
    rows, C = ceil(learned * cfg.batch_size * cfg.block_size / cfg.cp), cfg.n_embd
    V, u = cfg.padded_vocab_size / cfg.tp, rows * C * itemsize / cfg.tp
    chunk = head_rows(V, logit_bytes(itemsize, cfg.ops != "torch"), machine.cpu)
    # read and written in fp32 by each chunk
    dw = machine.seconds("copy", 8 * V * C * rows / chunk, 8 * V * C)
    matmuls = 3 * machine.seconds("matmul", 2 * rows * C * V, sqrt(C * V))
    units = units_of_passes(cfg, machine)
    losses = machine.seconds("cross entropy", units["cross entropy"] * rows * V * itemsize, rows * V)
    passes = (f"{NORMS[cfg.norm]} {way}" for way in ("forward", "backward"))
    norms = sum(machine.seconds(op, units[op] * u, u) for op in passes)
    # inputs and their gradients; logsumexps, and a sum of what the targets have, which is a scattered
    # sum and a gather
    messages = rows_of_tp_s(cfg, machine, max(1, chunk // cfg.tp) * cfg.tp, [
        ("gather", C * itemsize), ("scatter", C * itemsize), ("gather", 4 * cfg.tp), ("scatter", 4),
        ("gather", 4)])
    return matmuls + dw + losses + messages + norms


def embedding_s(cfg: Layout, machine: Machine, itemsize: int) -> float:
    """Counts the seconds of the embedding and its gradient."""
    row = cfg.n_embd * itemsize
    u = cfg.batch_size * cfg.block_size // cfg.cp * row / cfg.tp
    messages = rows_of_tp_s(cfg, machine, CHUNK_ROWS, [("scatter", row), ("gather", row)])
    return messages + machine.seconds("copy", 8 * u * cfg.tp, u)


def rows_of_tp_s(cfg: Layout, machine: Machine, most: int, messages: Sequence[tuple[str, int]]) -> float:
    """Counts the seconds of messages (op, bytes that each other rank gets of an own row) between the tp
    ranks, about all rows of these, `most` or fewer of a subsequence at a time."""
    rows = [cfg.batch_size * n // cfg.cp for n in subsequence_lengths(cfg)]
    pieces = sum(-(-n // most) for n in rows)
    sent = sum(rows) / cfg.tp / pieces * (cfg.tp - 1)
    return pieces * sum(machine.message_s(op, nbytes * sent, cfg.tp) for op, nbytes in messages)


def optimizer_s(cfg: Layout, machine: Machine, numel: int, itemsize: int, data: int,
                local_ranks: int, forward_s: float) -> float:
    """Counts the seconds of the gradients' norm, of AdamW on this rank's shard with their scaling, of the
    cast of its weights. On the host AdamW runs at the speed of the host's memory, which the ranks share;
    weights go up meanwhile and in the next forward. That of layers that come runs beside this forward, which
    brings them: it waits for the first two, and for what steps before them."""
    shard = numel / data
    adamw = (ADAMW_BYTES + 4 * (cfg.grad_clip > 0)) * shard  # clipping stores the scaled gradients
    cast = (4 + itemsize) * shard
    if cfg.optimizer_on_host and not machine.cpu:  # they go over PCIe (memo/states/optim.py)
        host_s = (adamw + cast) * local_ranks / machine.node.host_bytes_per_s
        if cfg.layers_come:
            first = sum(bucket_numels(cfg, data)[:weights_in_turns(cfg).start + LAYER_PLACES])
            return max(host_s * first / numel, host_s - forward_s)
        up_s = itemsize * shard / machine.node.pcie_bytes_per_s
        return host_s + max(0.0, up_s - host_s - forward_s)
    rest = machine.seconds("copy", 4 * shard + 4 * numel, 4 * numel)  # norm; all gradients to zero
    return rest + machine.seconds("adamw", adamw, adamw) + machine.seconds("copy", cast, cast)


def data_s(cfg: Layout, machine: Machine, numel: int, itemsize: int, data: int, world: int, forward_s: float,
           backward_s: float) -> float:
    """Counts the exposed seconds of the gradients' sum and way to the host, beside the last backward, and of
    the parameters' way back to all ranks, beside the next forward. On a CPU nothing hides."""
    gradients = params = 0.0
    if data > 1:
        gradients = machine.message_s("scatter", 4 * numel * (data - 1) / data, world, cfg.tp)
        params = machine.message_s("gather", itemsize * numel * (data - 1) / data, world, cfg.tp)
    if machine.cpu:
        return gradients + params
    if cfg.optimizer_on_host:  # a layer's place is free when its gradients are summed and gone
        gradients += 4 * numel / data / machine.node.pcie_bytes_per_s
    return max(gradients / BUCKETS, gradients - backward_s) + max(params / BUCKETS, params - forward_s)


def hop_s(machine: Machine, world: int, pp: int, stage: int, nbytes: float, further: int = 1) -> float:
    """Counts the seconds of so many bytes between ranks of a stage and the next one, or `further`."""
    ranks, node = world // pp, machine.node.gpus_per_node
    inside = stage * ranks // node == ((stage + 1 + further) * ranks - 1) // node
    return machine.message_s("shift", nbytes, 2 * ranks if inside else world)


def ends_of(cfg: Layout, machine: Machine, world: int, itemsize: int, learned: float) -> Ends:
    """Models the Ends of a config that says which stage. `learned`: see head_s()."""
    row, B = tensors_of(cfg, itemsize)[INPUT].nbytes // n_rows(cfg), cfg.batch_size
    cuts = unit_rows(cfg, B, cfg.block_size // cfg.cp)
    send, send_gradient = (tuple(hop_s(machine, world, cfg.pp, first, row * n) for n in cuts)
                           for first in (cfg.stage, cfg.stage - 1))
    ends = Ends(embedding_s(cfg, machine, itemsize), head_s(cfg, machine, itemsize, learned), send,
                send_gradient)
    if cfg.msp:
        rates = tuple(MESSAGE_BYTES / hop_s(machine, world, cfg.pp, min(cfg.stage, other), MESSAGE_BYTES,
                                            abs(cfg.stage - other)) for other in range(cfg.pp))
        memory = MESSAGE_BYTES / machine.seconds("copy", MESSAGE_BYTES, MESSAGE_BYTES)
        return ends._replace(lanes=Lanes(rates, layer_numel(cfg, world // (cfg.pp * cfg.tp)), memory))
    return ends


def pipeline_times(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
                   layer: ModelledRates, number: int = 1) -> list[Times]:
    """Simulates so many micro batches -> the Times of each stage, all on one clock."""
    seconds = [step_seconds(stage.placement, tensors_of(stage.cfg, itemsize), layer.units,
                            machine.node.pcie_bytes_per_s,
                            ends=ends_of(stage.cfg, machine, world, itemsize, layer.learned),
                            kinds=stage.cfg.stage_kinds)
               for stage in stages]
    if number == 1:
        schedules = [stage.placement.schedule() for stage in stages]
        return times_of_stages(schedules, lambda k, step: seconds[k](step))
    made = [schedule_of_sequences(stage.placement.program, number) for stage in stages]
    return times_of_stages([steps for steps, _ in made], lambda k, step: seconds[k](made[k][1][step]))


def pipeline_spans(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
                   layer: ModelledRates) -> list[list[Span]]:
    """Simulates a micro batch -> the spans of each stage, all on one clock."""
    times = pipeline_times(stages, machine, world, itemsize, layer)
    return [simulated_spans(stage.placement.schedule(), time)
            for stage, time in zip(stages, times, strict=True)]


def least_s(cfg: Layout, world: int, layer: ModelledRates) -> float:
    """Bounds a step's seconds from below: by computing, and by waiting for the first or last subsequence."""
    layers, units = cfg.depths, layer.units
    each = [unit.forward_s + unit.backward_s for unit in units]
    longest = max(layers[0] * fsum(each) + sum(layers[1:]) * each[-1],
                  layers[-1] * fsum(each) + sum(layers[:-1]) * each[0])
    if cfg.msp:  # which fills the bubbles at best
        longest = sum(layers) * fsum(each) / cfg.pp
    return micros_of_rank(cfg, world) * longest


def alone_s(stage: Stage, machine: Machine, world: int, itemsize: int,
            layer: ModelledRates) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Simulates a micro batch in one stage -> ({part: seconds}, [its layers' (forward, backward)])."""
    cfg, p, units = stage.cfg, stage.placement, layer.units
    forward, backward, stall = stage.totals or totals_of(p.program, step_seconds(
        p, tensors_of(cfg, itemsize), units, machine.node.pcie_bytes_per_s,
        state_seconds(cfg, machine, world, itemsize), kinds=cfg.stage_kinds), cfg.layers_alike)
    again = fsum(n * units[p.kinds[k]].recompute_s(p.missing(k)) for k, n in Counter(p.like).items())
    swept = [unit.subsequence for unit in p.units if p.keys == "made" and unit in p.key_places.leaving]
    parts = {"attention": cfg.n_layer * fsum(unit.attention_kernels_s for unit in units),
             "messages": cfg.n_layer * fsum(unit.messages_s for unit in units),
             "recompute": again + sum(units[i].sweep_s for i in swept), "stall": stall}
    parts["rest of the layers"] = forward + backward - sum(parts.values())
    parts["head and embedding"] = (head_s(cfg, machine, itemsize, layer.learned)
                                   + embedding_s(cfg, machine, itemsize))
    return parts, [(forward, backward)]


def together_s(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
               layer: ModelledRates) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Simulates a micro batch in several stages, as alone_s(): the means of all, and of waits, "bubble"; of
    those that follow each other also the mean."""
    cfg, times = stages[0].cfg, pipeline_times(stages, machine, world, itemsize, layer)
    step_s = end_of(times)
    if (more := micros_of_rank(cfg, world) - 1) and any(stage.placement.follows for stage in stages):
        two = pipeline_times(stages, machine, world, itemsize, layer, 2)
        step_s = (step_s + more * (end_of(two) - step_s)) / (1 + more)  # each more is as long as the second
    spent: list[dict[Op, float]] = [defaultdict(float) for _ in stages]
    for of, one in zip(spent, times, strict=True):
        for step, (start, end) in one.spans.items():
            if step.computes:
                of[step.op] += end - start
    mean = {op: fsum(of[op] for of in spent) / cfg.pp for op in (*LAYERS, *PIPELINE_ENDS)}
    share = cfg.n_layer / cfg.pp
    parts = {"attention": share * fsum(unit.attention_kernels_s for unit in layer.units),
             "messages": share * fsum(unit.messages_s for unit in layer.units),
             "recompute": mean[Op.RECOMPUTE] + mean[Op.SWEEP]}
    parts["rest of the layers"] = fsum(mean[op] for op in LAYERS) - sum(parts.values())
    parts["stall"] = fsum(one.stall_s for one in times) / cfg.pp
    parts["head and embedding"] = fsum(mean[op] for op in PIPELINE_ENDS)
    parts["bubble"] = step_s - sum(parts.values())
    return parts, [(of[Op.FORWARD], sum(of[op] for op in LAYERS[1:])) for of in spent]


def step_s(stages: Sequence[Stage], machine: Machine, world: int, itemsize: int,
           layer: ModelledRates) -> dict[str, float]:
    """Counts {part: seconds} of a step, which add up to its "step"; gradients and optimizer are the slowest
    stage's."""
    parts, passes = (together_s(stages, machine, world, itemsize, layer) if len(stages) > 1 else
                     alone_s(stages[0], machine, world, itemsize, layer))
    parts = {name: micros_of_rank(stages[0].cfg, world) * seconds for name, seconds in parts.items()}

    def at_last(stage: Stage, passes: tuple[float, float]) -> tuple[float, float]:
        cfg, data = stage.cfg, world // (stage.cfg.pp * stage.cfg.tp)
        come = weights_in_turns(cfg)  # by steps of the schedule
        stays = stage.numel - sum(n for k, n in enumerate(bucket_numels(cfg, data)) if k in come)
        messages = data_s(cfg, machine, stays, itemsize, data, world, *passes)
        if cfg.ties_stages and (cfg.has_embedding or cfg.has_head):  # both sum the gradients of one matrix
            nbytes = 4 * cfg.padded_vocab_size * cfg.n_embd * cfg.pp // world
            messages += machine.message_s("shift", nbytes, world)
        local_ranks = min(world, machine.node.gpus_per_node)
        return messages, optimizer_s(cfg, machine, stage.numel, itemsize, data, local_ranks, passes[0])
    parts["gradients and parameters"], parts["optimizer"] = max(map(at_last, stages, passes), key=sum)
    return parts | {"step": sum(parts.values())}
