"""The costs of a unit by tensor parallelism, and the seconds of a layer's units, of which there is one a
subsequence: the sums of their Costs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from math import fsum
from types import ModuleType

from memo.config.layer import ATTENTION, CHUNK_ROWS, SPLIT_ROWS, Operation
from memo.config.layout import Layout, subsequence_lengths
from memo.config.settings import Kind
from memo.decide.step_seconds import MeanRates, UnitRates
from memo.decide.where import Rates
from memo.estimate import roofline
from memo.estimate.metp_seconds import Metp
from memo.estimate.roofline import KERNELS, MESSAGES, Before, Cost, Met, Sample, Unit, dealing, total
from memo.system.hardware import Machine


class Block(Unit):
    """Costs a unit by tensor parallelism."""

    # --- products and their messages ---

    def together(self, op: Operation) -> list[Operation]:
        """Finds the products that share the message of op's input."""
        return [other for other in self.layer.operations
                if (other.kind, other.reads) == (op.kind, op.reads)]

    @property
    def pieces(self) -> int:
        """Counts pieces of a rank's own rows, as tp.in_turns cuts them."""
        at_once = 2 if self.tp > 1 and not self.machine.cpu else 1
        return max(1, min(self.rows // self.tp // SPLIT_ROWS,
                          max(at_once, -(-at_once * self.rows // CHUNK_ROWS))))

    @property
    def inputs(self) -> list[tuple[str, float]]:
        """Lists the messages of a product's input: (op, elements of the run's dtype a row)."""
        fp8 = [("gather", self.C / self.itemsize), ("gather", self.SCALE_BYTES / self.itemsize)]
        return fp8 if self.cfg.matmul == "fp8" else [("gather", self.C)]

    def messages(self, products: Iterable[Operation], messages: Sequence[tuple[str, float]],
                 times: int = 1) -> Cost:
        """Costs gathers and scattered sums, (op, elements a row), beside products, each so many times, piece
        by piece: at best the first message and what all take longer than the computing is exposed."""
        if self.tp == 1:
            return Cost(0.0, MESSAGES)
        pieces = self.pieces
        piece = self.row_bytes * (self.tp - 1) / pieces  # bytes of one element of each row
        seconds = [pieces * self.machine.message_s(op, width * piece, self.tp) for op, width in messages]
        beside_s = times * total(map(self.product, products))
        return self.late(sum(seconds), beside_s, None if pieces > 1 else 0.0, seconds[0] / pieces)

    def input_message(self, ops: Sequence[Operation]) -> Cost:
        """Costs the message of operations with one input, or of the sum that a row product gives."""
        return self.messages(ops, self.inputs if ops[0].kind == "column" else [("scatter", self.C)])

    def backward_messages(self) -> list[Cost]:
        """Costs a backward's messages, half by half, last product first. A row product gathers its gradient;
        column products of one input gather that input again and scatter the sum of its gradients."""
        products = [op for op in self.layer.operations if op.kind in ("column", "row")]
        before, costs = self.together(products[0]), list[Cost]()
        for half in (products[len(before):], before):
            messages: list[tuple[str, float]] = []
            for op in reversed(half):
                if op.kind == "row":
                    messages.append(("gather", self.C))
                elif op is self.together(op)[0]:
                    messages += [*self.inputs, ("scatter", self.C)]
            costs.append(self.messages(half, messages, 2))
        return costs

    def rounding(self, op: Operation, way: str) -> list[Cost]:
        """Costs what FP8 products do beside a product: with an input once for all that have it. Own rows are
        rounded before a gather, the gathered rows of a gradient behind it."""
        if self.cfg.matmul != "fp8":
            return []
        column, weights, together = op.kind == "column", op.gives * op.takes / self.tp, self.together(op)
        costs = [self.matrix_copy(self.ROUNDING * weights)] * self.pieces
        if way == "forward":
            rounded = self.copy(self.ROUNDING * op.takes).seconds / (len(together) if column else 1)
            residual = not column and self.tp == 1  # which is added behind the product
            return [*costs, Cost(rounded), *[self.copy(self.ADDING * op.gives)] * residual]
        x, dy = (op.takes * self.tp, op.gives) if column else (op.takes, op.gives * self.tp)
        costs += [self.copy((self.ROUNDING + self.TURNING_GRADIENT) * dy), self.copy(self.TURNING_INPUT * x)]
        if column and op is not together[0]:  # its gradient is added to that of the first
            costs.append(self.copy(self.ADDING * x))
        if self.cfg.ops != "te":
            costs += [self.matrix_copy(self.GRADIENT_BYTES / self.itemsize * weights)] * self.pieces
        return costs

    # --- the passes: `attend`, `attend_backward` are what attention() costs ---

    def forward(self, attend: list[Cost]) -> list[Cost]:
        return [*attend, *self.rest]

    def backward(self, attend: list[Cost], attend_backward: list[Cost]) -> list[Cost]:
        return [*attend_backward, *self.rest_backward]

    def operation(self, op: Operation) -> list[Cost]:
        """Costs an operation of the forward on all rows, with its part of the message of its input."""
        if op.kind == "norm":
            return [self.norm("forward")]
        if op.kind == "behind":
            return [self.norm("forward"), self.copy(3 * op.gives)]
        if op.kind == "activation":
            return [self.elementwise("gelu forward", op.takes + op.gives)]
        ops, costs = self.together(op), [self.product(op), *self.rounding(op, "forward")]
        message = self.input_message(ops).seconds
        if op.kind == "row":  # residual + x w^T: each of the tp ranks has a part of the sum
            costs += [self.copy(3 * op.gives)] * (self.tp > 1)
            costs += [self.kernel_pass("swiglu forward", op.takes)] * op.gated
            return [*costs, Cost(message, MESSAGES)]
        sharing = [one for one in ops if all(one is not key for key in self.layer.keys)]
        part = sum(one is op for one in sharing) / len(sharing)
        return [*costs, *[self.kernel_pass("rotary", op.gives)] * op.rotary, Cost(part * message, MESSAGES)]

    @cached_property
    def groups_s(self) -> dict[str, float]:
        """Counts the seconds to make each group of tensors again."""
        return {group: total(self.operation(op)) for group, op in self.layer.groups.items()}

    @cached_property
    def rest(self) -> list[Cost]:
        """Costs a forward but for attention."""
        return [cost for op in self.layer.operations for cost in self.operation(op)]

    @cached_property
    def rest_backward(self) -> list[Cost]:
        """Costs dx and dw of each product, and what is made again for them."""
        costs = list[Cost]()
        for op in self.layer.operations:
            if op.kind == "norm":
                costs.append(self.norm("backward"))
            elif op.kind == "behind":  # whose statistics are made again
                costs += [self.norm("forward"), self.norm("backward")]
            elif op.kind == "activation":
                costs.append(self.elementwise("gelu backward", 2 * op.gives + op.takes))
            else:
                costs += [*[self.product(op)] * 2, *self.rounding(op, "backward")]
            if op.gated:
                costs += [self.kernel_pass(f"swiglu {way}", op.takes) for way in ("forward", "backward")]
            costs += [self.kernel_pass("rotary", op.gives)] * op.rotary
        return costs + self.backward_messages()

    def keys_again(self, names: str) -> list[Cost]:
        """Costs making k, or k and v, from the norm's output when nothing else is made."""
        keys = self.layer.keys[:len(names)]
        return [*(cost for op in keys for cost in self.operation(op)), self.input_message(keys)]


class UnitSeconds(UnitRates):
    """Adds up a unit's Costs; `attention_kernels_s`, `messages_s`: parts of forward and backward together."""

    def __init__(self, unit: Block | Metp, met: Met) -> None:
        self.unit, u, self.rows = unit, unit, unit.own
        self.attend, attend_backward = roofline.attention(u, met)
        forward, sweep = u.forward(self.attend), list[Cost]()
        backward = u.backward(self.attend, attend_backward)
        if u.several:
            copied = u.copy(2 * u.C)  # the input between the stream and the unit, and dx back
            keys = [*dealing(u), *u.sums_of_norms(1)]
            forward += [copied, *keys]
            before_norms = [*u.keys_again("k"), *u.sums_of_norms(2)]
            backward += [copied, *(before_norms if u.layer.qk_norms else ())]
            sweep = [*[u.norm("forward")] * (u.cfg.norms != "behind"), *u.keys_again("kv"), *keys]
        self.forward_s, self.backward_s, self.sweep_s = map(total, (forward, backward, sweep))
        self.attention_kernels_s, self.messages_s = (total(forward + backward, part)
                                                     for part in (KERNELS, MESSAGES))
        self.groups_s = u.groups_s
        self.attention_s = total(u.rebuilt(1, 0, self.attend) if isinstance(u, Metp) else self.attend)

    def recompute_s(self, missing: dict[str, slice]) -> float:
        if not isinstance(self.unit, Metp):
            return super().recompute_s(missing)
        parts = {name: (r.stop - r.start) / self.rows for name, r in missing.items()}
        attention, projected = (parts.pop(name, 0.0) for name in (ATTENTION, self.unit.layer.projected))
        others_s: float = sum(parts.get(group, 0.0) * s for group, s in self.groups_s.items())
        return total(self.unit.rebuilt(attention, projected, self.attend)) + others_s


class MeanSeconds(MeanRates):
    attention_kernels_s: float
    messages_s: float


@dataclass(frozen=True)
class ModelledRates(Rates):
    units: tuple[UnitSeconds | MeanSeconds, ...]
    learned: float = 1.0  # the part of all rows that the head computes
    imbalance: float = 1.0  # attention's seconds on the slowest rank that shares the tokens, over the mean


def modelled_rates(cfg: Layout, machine: Machine, itemsize: int,
                   documents: roofline.SampleOf | None = None) -> ModelledRates | None:
    """Models the Rates of a layer of a config whose states stay; None where no speeds of its dtype are
    known. `documents`: where a sequence is not one alone."""
    if machine.speeds is None or machine.speeds.itemsize != itemsize:
        return None
    return known_rates(Layout.whole(cfg, optimizer_device="auto", states="device", activation="memo",
                                      alpha_mode="per_tensor"), machine, itemsize,
                       documents and documents(cfg))


@lru_cache(64)  # layouts that differ in stages, modes or the optimizer's place alone have the same
def known_rates(cfg: Layout, machine: Machine, itemsize: int, sample: Sample | None) -> ModelledRates:
    counts = Counter(cfg.kinds)
    of_kinds = [rates_of_kind(cfg, machine, itemsize, sample, kind) for kind in counts]
    if len(of_kinds) == 1:
        return of_kinds[0]
    parts = [n / cfg.n_layer for n in counts.values()]
    units = tuple(MeanSeconds(dict(zip(counts, zip(of, parts, strict=True), strict=True)))
                  for of in zip(*(rates.units for rates in of_kinds), strict=True))
    imbalance = fsum(part * rates.imbalance for rates, part in zip(of_kinds, parts, strict=True))
    return replace(of_kinds[0], units=units, imbalance=imbalance)


def rates_of_kind(cfg: Layout, machine: Machine, itemsize: int, sample: Sample | None,
                  kind: Kind) -> ModelledRates:
    """Models the Rates of a layer of one kind."""
    lengths, make = subsequence_lengths(cfg), Metp if cfg.metp else Block
    of_length = {S: make(cfg, machine, itemsize, S, kind) for S in lengths}
    before, units, longest_s, mean_s = Before(), list[UnitSeconds](), 0.0, 0.0
    for i, S in enumerate(lengths):
        u = of_length[S]
        met = [roofline.one_document(u, before)]
        if sample or kind.window:
            packed: ModuleType = import_module("memo.estimate.packed")  # which needs torch
            whole = ((sum(lengths),),) * cfg.batch_size
            met = packed.met_by_ranks(u, i, lengths, sample.ends if sample else whole)
        seconds = [roofline.kernels_s(u, of_rank) for of_rank in met]
        longest_s, mean_s = longest_s + max(seconds), mean_s + fsum(seconds) / len(seconds)
        units.append(UnitSeconds(u, met[seconds.index(max(seconds))]))
        before[S] += 1
    rate = machine.node.pcie_bytes_per_s
    learned = sample.share.learned / (cfg.batch_size * cfg.block_size) if sample else 1.0
    return ModelledRates(tuple(units), rate, rate, None, learned=learned,
                         imbalance=longest_s / mean_s if mean_s else 1.0)
