"""Seconds of the steps of a schedule: of the units that compute, whose seconds are modelled or measured, of
copies and messages, by the bytes of their places. The schedule's simulator (memo/schedule/simulate.py) says
which of them hide. Source: MEMO 4.1."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum, inf
from typing import NamedTuple, Self

from memo.config.layer import ATTENTION, Tensor
from memo.config.msp import Help
from memo.config.settings import Kind
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.schedule.program import EMBEDDING
from memo.schedule.step import COPIES, Moved, Op, Step


@dataclass
class UnitRates:
    """Seconds of a layer's unit at one subsequence, of so many `rows`. `sweep_s`: to make its keys and values
    again; `attention_s`, `groups_s`: to rebuild all rows of attention's output, and of each group."""

    rows: float
    forward_s: float
    backward_s: float
    sweep_s: float
    attention_s: float
    groups_s: dict[str, float]

    def of(self, kind: Kind | None) -> "UnitRates":
        """Finds the rates of a layer of one kind."""
        return self

    def among(self, kinds: Sequence[Kind]) -> Self:
        """Averages the rates over layers of these kinds."""
        return self

    def recompute_s(self, missing: dict[str, slice]) -> float:
        """Counts the seconds to recompute rows {tensor: slice}, as in Placement.missing."""
        parts = {name: (r.stop - r.start) / self.rows for name, r in missing.items()}
        groups_s: float = sum(parts.get(group, 0.0) * s for group, s in self.groups_s.items())
        return groups_s + (self.attention_s if parts.get(ATTENTION) else 0.0)


class MeanRates(UnitRates):
    """Averages the rates of layers of several kinds, each with its part of the layers."""

    def __init__(self, kinds: Mapping[Kind, tuple[UnitRates, float]]) -> None:
        self.kinds, (first, _), rates = kinds, next(iter(kinds.values())), kinds.values()
        for name, value in vars(first).items():
            if isinstance(value, float):
                setattr(self, name, fsum(part * getattr(unit, name) for unit, part in rates))
        self.rows = first.rows
        self.groups_s = {group: fsum(part * unit.groups_s[group] for unit, part in rates)
                         for group in first.groups_s}

    def of(self, kind: Kind | None) -> UnitRates:
        return self.kinds[kind][0] if kind else self

    def among(self, kinds: Sequence[Kind]) -> Self:
        parts = {kind: kinds.count(kind) / len(kinds) for kind in self.kinds}
        return type(self)({kind: (unit, parts[kind]) for kind, (unit, _) in self.kinds.items()})

    def recompute_s(self, missing: dict[str, slice]) -> float:
        return fsum(part * unit.recompute_s(missing) for unit, part in self.kinds.values())


def pieces_of(placement: Placement, units: Sequence[UnitRates]) -> list[tuple[UnitRates, float, float]]:
    """Lists (a layer's unit, part of its FLOPs, share of its rows) for each of Placement.lengths."""
    p, parts = placement, [1.0] * placement.subsequences
    for piece in p.lent:
        parts[piece.subsequence] -= piece.part
    cuts = p.cuts or (p.n_rows,)
    own = zip(units, parts, (n / whole for n, whole in zip(p.lengths, cuts, strict=False)), strict=True)
    return [*own, *((units[piece.subsequence], piece.part, piece.rows / cuts[piece.subsequence])
                    for piece in p.guests)]


class StateSeconds(NamedTuple):
    """Seconds in which a layer's parameters come, its gradients leave, the sums of earlier micro batches
    come. `embedding`, `head`: how many times as large they are as a layer."""

    weights_s: float = 0.0
    gradients_s: float = 0.0
    sums_s: float = 0.0
    embedding: float = 0.0
    head: float = 0.0


STAY = StateSeconds()  # nothing moves


class Lanes(NamedTuple):
    """Says what stages send each other where one computes rows of another: bytes/s to each stage, elements of
    a layer's parameters, bytes/s at which memory is read and written where a home adds what came."""

    bytes_per_s: tuple[float, ...]
    numel: int
    memory_bytes_per_s: float = inf

    def seconds(self, nbytes: float, step: Step, piece: Help) -> float:
        """Counts the seconds of a piece's message; bulk goes to, or comes from, several stages together."""
        assert step.peer is not None
        bulk = step.moved in (Moved.LOAN, Moved.REPAYMENT)
        return nbytes * (max(piece.turns, piece.together) if bulk else 1) / self.bytes_per_s[step.peer]


class Ends(NamedTuple):
    """Seconds of a stage beside its layers and copies: of all rows of a micro batch, with gradients; of each
    subsequence's messages to the next stage, and to the one before. `lanes`: None: help is free."""

    embedding_s: float
    head_s: float
    send_s: tuple[float, ...]
    send_gradient_s: tuple[float, ...]
    lanes: Lanes | None = None


def end_seconds(step: Step, ends: Ends, p: Placement, sizes: Sizes) -> float:
    """Finds the seconds of a step at the `ends` of a stage: head, embedding, messages, what help adds."""
    i, cuts, lanes = p.forward_order.piece(step.unit), p.cuts or (p.n_rows,), ends.lanes
    match step.op:
        case Op.HEAD:
            return ends.head_s * cuts[i] / p.n_rows
        case Op.EMBED | Op.EMBED_BACKWARD:
            return ends.embedding_s / 2 * cuts[i] / p.n_rows
        case Op.SEND if step.peer is None:
            return (ends.send_s if step.moved is Moved.STREAM else ends.send_gradient_s)[i]
        case Op.SEND if lanes:
            piece, _ = sizes.table.help_of(step)
            return lanes.seconds(sizes.moved(step), step, piece)
        case Op.ADD if lanes:  # two are read, one is written
            return 3 * sizes.moved(step) / lanes.memory_bytes_per_s
        case Op.BACKWARD if lanes and i in p.guest_of:
            zeroed = Step(Op.SEND, step.unit, Moved.REPAYMENT, True, p.guest_of[i].stage)  # before
            return sizes.moved(zeroed) / lanes.memory_bytes_per_s
    return 0.0


def step_seconds(placement: Placement, tensors: dict[str, Tensor], units: Sequence[UnitRates],
                 bytes_per_s: float, states: StateSeconds = STAY, ends: Ends | None = None,
                 kinds: Sequence[Kind] = ()) -> Callable[[Step], float]:
    """Makes what gives the seconds of a step of a stage's schedule: of a layer's `units` and `states`, of a
    copy at `bytes_per_s`; and of `ends`, if given: head and embedding, shared out by tokens, and messages.
    `kinds`: of the stage's layers; without them all are a mean one."""
    p, numel = placement, ends.lanes.numel if ends and ends.lanes else 0
    sizes, of_layers = Sizes(p, tensors, numel), tuple[Kind | None, ...](kinds or (None,))
    pieces = {kind: pieces_of(p, [unit.of(kind) for unit in units]) for kind in {*of_layers}}

    @cache
    def recompute_s(like: int, kind: Kind | None) -> float:
        unit, part, share = pieces[kind][p.kinds[like]]
        return part * unit.recompute_s({name: slice(0, round((r.stop - r.start) / share))
                                        for name, r in p.missing(like).items()})

    def seconds(step: Step) -> float:
        if step.of_states:
            size = {EMBEDDING: states.embedding, p.n_layer: states.head}.get(step.unit[0], 1.0)
            return size * (states.gradients_s if step.op is Op.OFFLOAD else
                           states.weights_s if step.moved is Moved.WEIGHTS else states.sums_s)
        if step.op in COPIES:
            return sizes.moved(step) / bytes_per_s
        beside_s = end_seconds(step, ends, p, sizes) if ends else 0.0
        if step.unit not in p.number:  # of what a helper repays
            return beside_s
        k = p.number[step.unit]
        kind = of_layers[step.unit.layer % len(of_layers)]  # a guest's layer counts as one of this stage
        unit, part, share = pieces[kind][p.kinds[k]]
        match step.op:
            case Op.FORWARD:
                return part * unit.forward_s
            case Op.RECOMPUTE:
                return recompute_s(p.like[k], kind)
            case Op.BACKWARD:
                return part * unit.backward_s + beside_s
            case Op.SWEEP:
                return share * unit.sweep_s
        return beside_s
    return seconds
