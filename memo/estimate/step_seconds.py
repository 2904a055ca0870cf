"""Seconds of a step: of its layers, beside which copies hide (memo/schedule/simulate.py), of head and
embedding, of the optimizer and of the gradients' and parameters' messages. Source: MEMO 4.1 on which copies
and messages hide behind which operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple, Protocol

from memo.estimate.hardware import Machine, Speeds
from memo.estimate.roofline import norm_of, units_of_passes
from memo.estimate.unit_seconds import LayerSeconds
from memo.flat import bucket_numels, weights_in_turns
from memo.layer import CHUNK_ROWS, Tensor, head_rows, logit_bytes, tensors_of
from memo.layout import Layout
from memo.schedule.order import keys_leave
from memo.schedule.periods import Totals, totals_of
from memo.schedule.program import EMBEDDING, LAYER_PLACES
from memo.schedule.step import COPIES, Moved, Op, Step
from memo.subsequences import subsequence_lengths
from memo.swap.placement import Placement
from memo.swap.sizes import Sizes

ADAMW_BYTES = 28  # a parameter, fp32: weight, two moments, gradient are read, all but the gradient written
# One part in so many of the gradients' sum, and of the parameters' way back, is always exposed: the bucket at
# the end. An assumption, the same for all models: the L + 2 buckets are not equal.
BUCKETS = 30


def with_copies(sizes: Sizes, compute_s: Callable[[Step], float],
                bytes_per_s: float) -> Callable[[Step], float]:
    """-> what gives the seconds of a step that copies, and of others compute_s(step)."""
    def seconds(step: Step) -> float:
        if step.op not in COPIES or step.of_states:
            return compute_s(step)
        return sizes.moved(step) / bytes_per_s
    return seconds


def swap_s(placement: Placement, tensors: dict[str, Tensor], compute_s: Callable[[Step], float],
           bytes_per_s: float) -> Totals:
    """The Totals of all layers, as the schedule runs. compute_s(step): of a step that
    computes; embedding and head are counted by themselves."""
    return totals_of(placement.program, with_copies(Sizes(placement, tensors), compute_s, bytes_per_s))


class UnitRates(Protocol):
    """Seconds of a layer's unit at one subsequence. `sweep_s`: to make its keys and values again.
    recompute_s(missing): to recompute rows, as in Placement.missing."""

    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def sweep_s(self) -> float: ...

    def recompute_s(self, missing: dict[str, slice]) -> float: ...


@dataclass(frozen=True)
class PartOfUnit:
    """The UnitRates of a piece of a unit's rows. `part`: of the unit's FLOPs; `rows`: of its rows."""

    unit: UnitRates
    part: float
    rows: float

    @property
    def forward_s(self) -> float:
        return self.part * self.unit.forward_s

    @property
    def backward_s(self) -> float:
        return self.part * self.unit.backward_s

    @property
    def sweep_s(self) -> float:
        return self.rows * self.unit.sweep_s

    def recompute_s(self, missing: dict[str, slice]) -> float:
        whole = {name: slice(0, round((r.stop - r.start) / self.rows)) for name, r in missing.items()}
        return self.part * self.unit.recompute_s(whole)


def rates_of(placement: Placement, units: Sequence[UnitRates]) -> list[UnitRates]:
    """The UnitRates of a layer's units of whole subsequences made those of Placement.lengths."""
    p, parts = placement, [1.0] * placement.subsequences
    for piece in p.lent:
        parts[piece.subsequence] -= piece.part
    own = [unit if part == 1 else PartOfUnit(unit, part, n / whole)
           for unit, part, n, whole in zip(units, parts, p.lengths, p.cuts or (p.n_rows,), strict=False)]
    return own + [PartOfUnit(units[piece.subsequence], piece.part, piece.rows / p.cuts[piece.subsequence])
                  for piece in p.guests]


class StateSeconds(NamedTuple):
    """Seconds of the steps that move a layer's states (memo/schedule/program.py): its parameters come, its
    gradients leave, the sums of earlier micro batches come. `embedding`, `head`: how many times as large they
    are as a layer."""

    weights_s: float = 0.0
    gradients_s: float = 0.0
    sums_s: float = 0.0
    embedding: float = 0.0
    head: float = 0.0

    def of(self, step: Step, head: int) -> float:
        """`head`: its number among the layers."""
        size = {EMBEDDING: self.embedding, head: self.head}.get(step.unit[0], 1.0)
        if step.op is Op.OFFLOAD:
            return size * self.gradients_s
        return size * (self.weights_s if step.moved is Moved.WEIGHTS else self.sums_s)


STAY = StateSeconds()  # nothing moves


def state_seconds(cfg: Layout, machine: Machine, speeds: Speeds, world: int, itemsize: int) -> StateSeconds:
    """The StateSeconds of a machine: to and from the host, or within the device's memory, and between the
    ranks that have shards."""
    if not cfg.layers_come:
        return STAY
    data = world // cfg.tp
    embedding, layer, *_, head = bucket_numels(cfg, data)
    shard, sums = layer / data, float(micros_of_rank(cfg, world) > 1)

    def moved_s(nbytes: float) -> float:  # in fp32 where they are on the device: of the master weights
        if cfg.states == "host":
            return nbytes / machine.node.pcie_bytes_per_s
        return speeds.seconds("copy", nbytes + 4 * shard, nbytes)

    def message_s(op: str, nbytes: float) -> float:
        return machine.message_s(op, nbytes * (data - 1), world, cfg.tp) if data > 1 else 0.0
    params, gradients = itemsize * shard, 4 * shard
    return StateSeconds(moved_s(params) + message_s("gather", params),
                        moved_s(gradients) + message_s("scatter", gradients), sums * moved_s(gradients),
                        embedding / layer, head / layer)


def compute_seconds(placement: Placement, units: Sequence[UnitRates],
                    states: StateSeconds = STAY) -> Callable[[Step], float]:
    """-> what gives the seconds of a step that computes, of those of a layer's units, or moves a layer's
    states; embedding and head are counted by themselves."""
    p, rates = placement, rates_of(placement, units)
    of_likes = {k: rates[p.likes[k]].recompute_s(p.missing(k)) for k in set(p.like)}

    def seconds(step: Step) -> float:
        if step.of_states:
            return states.of(step, p.n_layer)
        if step.unit not in p.number:  # of what a helper repays
            return 0.0
        unit = rates[p.likes[p.number[step.unit]]]
        match step.op:
            case Op.FORWARD:
                return unit.forward_s
            case Op.RECOMPUTE:
                return of_likes[p.like[p.number[step.unit]]]
            case Op.BACKWARD:
                return unit.backward_s
            case Op.SWEEP:
                return unit.sweep_s
        return 0.0
    return seconds


class Lanes(NamedTuple):
    """What stages send each other where one computes rows of another: bytes/s to each stage, elements of a
    layer's parameters, bytes/s at which memory is read and written where a home adds what came."""

    bytes_per_s: tuple[float, ...]
    numel: int
    memory_bytes_per_s: float = inf

    def seconds(self, nbytes: float, step: Step, together: int) -> float:
        """Of a message to the step's peer, where bulk goes to, or comes from, so many stages at once."""
        assert step.peer is not None
        bulk = step.moved in (Moved.LOAN, Moved.REPAYMENT)
        return nbytes * (together if bulk else 1) / self.bytes_per_s[step.peer]


class Ends(NamedTuple):
    """Seconds of a stage beside its layers and copies: of all rows of a micro batch, with their gradients; of
    the messages of each subsequence to the next stage, and to the one before. `lanes`: None where messages
    between a home and its helpers are free."""

    embedding_s: float
    head_s: float
    send_s: tuple[float, ...]
    send_gradient_s: tuple[float, ...]
    lanes: Lanes | None = None


def stage_seconds(placement: Placement, tensors: dict[str, Tensor], units: Sequence[UnitRates],
                  bytes_per_s: float, ends: Ends) -> Callable[[Step], float]:
    """-> what gives the seconds of a step of a stage's schedule. Those of head and embedding are shared out
    by tokens."""
    p, lanes = placement, ends.lanes
    sizes = Sizes(p, tensors, lanes.numel if lanes else 0)
    others = with_copies(sizes, compute_seconds(p, units), bytes_per_s)
    cuts = p.cuts or (p.n_rows,)

    def seconds(step: Step) -> float:
        i = step.unit.subsequence
        match step.op:
            case Op.HEAD:
                return ends.head_s * cuts[i] / p.n_rows
            case Op.EMBED | Op.EMBED_BACKWARD:
                return ends.embedding_s / 2 * cuts[i] / p.n_rows
            case Op.SEND if step.peer is None:
                return (ends.send_s if step.moved is Moved.STREAM else ends.send_gradient_s)[i]
            case Op.SEND if lanes:
                piece, _ = sizes.memory.help_of(step)
                return lanes.seconds(sizes.moved(step), step, max(piece.turns, piece.together))
            case Op.ADD if lanes:  # two are read, one is written
                return 3 * sizes.moved(step) / lanes.memory_bytes_per_s
            case Op.BACKWARD if lanes and i in p.guest_of:
                zeroed = Step(Op.SEND, step.unit, Moved.REPAYMENT, True, p.guest_of[i].stage)  # before
                return others(step) + sizes.moved(zeroed) / lanes.memory_bytes_per_s
        return others(step)
    return seconds


def head_s(cfg: Layout, machine: Machine, speeds: Speeds, itemsize: int) -> float:
    """Seconds of final norm, logits, loss and their gradients, chunk by chunk."""
    rows, C = cfg.batch_size * cfg.block_size // cfg.cp, cfg.n_embd
    V, u = cfg.padded_vocab_size / cfg.tp, rows * C * itemsize / cfg.tp
    chunk = head_rows(V, logit_bytes(itemsize, cfg.ops != "torch"), machine.cpu)
    dw = speeds.seconds("copy", 8 * V * C * rows / chunk, 8 * V * C)  # read and written in fp32 by each chunk
    matmuls = 3 * speeds.seconds("matmul", 2 * rows * C * V, sqrt(C * V))
    units = units_of_passes(cfg, speeds)
    losses = speeds.seconds("cross entropy", units["cross entropy"] * rows * V * itemsize, rows * V)
    passes = (f"{norm_of(cfg)} {way}" for way in ("forward", "backward"))
    norms = sum(speeds.seconds(op, units[op] * u, u) for op in passes)
    # inputs and their gradients; logsumexps, and a sum of what the targets have, which is a scattered
    # sum and a gather
    messages = rows_of_tp_s(cfg, machine, max(1, chunk // cfg.tp) * cfg.tp, [
        ("gather", C * itemsize), ("scatter", C * itemsize), ("gather", 4 * cfg.tp), ("scatter", 4),
        ("gather", 4)])
    return matmuls + dw + losses + messages + norms


def embedding_s(cfg: Layout, machine: Machine, speeds: Speeds, itemsize: int) -> float:
    """Seconds of the embedding and its gradient."""
    row = cfg.n_embd * itemsize
    u = cfg.batch_size * cfg.block_size // cfg.cp * row / cfg.tp
    messages = rows_of_tp_s(cfg, machine, CHUNK_ROWS, [("scatter", row), ("gather", row)])
    return messages + speeds.seconds("copy", 8 * u * cfg.tp, u)


def rows_of_tp_s(cfg: Layout, machine: Machine, most: int, messages: Sequence[tuple[str, int]]) -> float:
    """Seconds of messages (op, bytes that each other rank gets of an own row) between the tp ranks, about all
    rows of these, `most` or fewer of a subsequence at a time."""
    rows = [cfg.batch_size * n // cfg.cp for n in subsequence_lengths(cfg)]
    pieces = sum(-(-n // most) for n in rows)
    sent = sum(rows) / cfg.tp / pieces * (cfg.tp - 1)
    return pieces * sum(machine.message_s(op, nbytes * sent, cfg.tp) for op, nbytes in messages)


def steps_on_host(cfg: Layout, machine: Machine) -> bool:
    """Whether gradients and weights go over PCIe, to the optimizer and back (memo/staging.py)."""
    return cfg.optimizer_on_host and not machine.cpu


def optimizer_s(cfg: Layout, machine: Machine, speeds: Speeds, numel: int, itemsize: int, data: int,
                local_ranks: int, forward_s: float) -> float:
    """Seconds of the gradients' norm, of AdamW on this rank's shard with their scaling, of the cast of its
    weights. On the host AdamW runs at the speed of the host's memory, which the ranks share; weights go up
    meanwhile and in the next forward. That of layers that come runs beside this forward, which brings them:
    it waits for the first two, and for what steps before them."""
    shard = numel / data
    adamw = (ADAMW_BYTES + 4 * (cfg.grad_clip > 0)) * shard  # clipping stores the scaled gradients
    cast = (4 + itemsize) * shard
    if steps_on_host(cfg, machine):
        host_s = (adamw + cast) * local_ranks / machine.node.host_bytes_per_s
        if cfg.layers_come:
            first = sum(bucket_numels(cfg, data)[:weights_in_turns(cfg).start + LAYER_PLACES])
            return max(host_s * first / numel, host_s - forward_s)
        up_s = itemsize * shard / machine.node.pcie_bytes_per_s
        return host_s + max(0.0, up_s - host_s - forward_s)
    rest = speeds.seconds("copy", 4 * shard + 4 * numel, 4 * numel)  # norm; all gradients to zero
    return rest + speeds.seconds("adamw", adamw, adamw) + speeds.seconds("copy", cast, cast)


def data_s(cfg: Layout, machine: Machine, numel: int, itemsize: int, data: int, world: int, forward_s: float,
           backward_s: float) -> float:
    """Exposed seconds of the gradients' sum and way to the host, beside the last backward, and of the
    parameters' way back to all ranks, beside the next forward. The last bucket of each is always exposed:
    see BUCKETS. On a CPU nothing hides."""
    gradients = params = 0.0
    if data > 1:
        gradients = machine.message_s("scatter", 4 * numel * (data - 1) / data, world, cfg.tp)
        params = machine.message_s("gather", itemsize * numel * (data - 1) / data, world, cfg.tp)
    if machine.cpu:
        return gradients + params
    if steps_on_host(cfg, machine):  # a layer's place is free when its gradients are summed and gone
        gradients += 4 * numel / data / machine.node.pcie_bytes_per_s
    return max(gradients / BUCKETS, gradients - backward_s) + max(params / BUCKETS, params - forward_s)


def micros_of_rank(cfg: Layout, world: int) -> int:
    """Count the micro batches of a rank in a step."""
    dp = world // (cfg.pp * cfg.cp * cfg.tp)
    return cfg.micro_batches(dp) // dp


def step_s(cfg: Layout, machine: Machine, world: int, itemsize: int,
           layer: LayerSeconds, placement: Placement, numel: int) -> dict[str, float]:
    """{part: seconds} of a step in one stage, which add up to its "step"."""
    p, tensors, micros = placement, tensors_of(cfg, itemsize), micros_of_rank(cfg, world)
    computed = compute_seconds(p, layer.units, state_seconds(cfg, machine, layer.speeds, world, itemsize))
    recompute = sum(computed(Step(Op.RECOMPUTE, unit, back=True)) for unit in p.units)
    swept = [unit.subsequence for unit in p.units if p.keys == "made" and keys_leave(unit, p.n_layer)]
    forward, backward, stall = swap_s(p, tensors, computed, machine.node.pcie_bytes_per_s)
    parts = {"attention": cfg.n_layer * layer.attention_kernels_s, "messages": cfg.n_layer * layer.messages_s,
             "recompute": recompute + sum(layer.units[i].sweep_s for i in swept), "stall": stall}
    parts["rest of the layers"] = forward + backward - sum(parts.values())
    ends = head_s(cfg, machine, layer.speeds, itemsize), embedding_s(cfg, machine, layer.speeds, itemsize)
    parts["head and embedding"] = sum(ends)
    parts = {name: micros * seconds for name, seconds in parts.items()}
    data, local_ranks = world // cfg.tp, min(world, machine.node.gpus_per_node)
    come = weights_in_turns(cfg)  # by steps of the schedule
    stays = sum(n for k, n in enumerate(bucket_numels(cfg, data)) if k not in come)
    parts["gradients and parameters"] = data_s(cfg, machine, stays, itemsize, data, world, forward, backward)
    parts["optimizer"] = optimizer_s(cfg, machine, layer.speeds, numel, itemsize, data, local_ranks, forward)
    return parts | {"step": sum(parts.values())}
