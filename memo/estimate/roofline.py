"""Seconds of a layer: the sum of its operations, each at its own speed (hardware.py), and the exposed seconds
of messages.

A rank's own rows are N = B*T/tp; `row_bytes`, those of one element of each, is the unit of elementwise
passes and messages, whose amounts are bytes read and written, or sent. Sizes that speeds depend on: of a
matrix product the geometric mean of the weight's dims, of attention the keys of a rank's block, of
elementwise passes their bytes. Source: MEMO 4.1.
"""

from collections.abc import Sequence
from math import fsum, gcd, sqrt

from memo.backends import kernel_of
from memo.config import Config
from memo.estimate.hardware import FP8_PRODUCTS, Machine, Speeds
from memo.layer import (
    ATTENTION,
    CHUNK_ROWS,
    SPLIT_ROWS,
    Operation,
    group_heads,
    layer_of,
)

# Tensors that fused kernels read and write (memo/ops.py). A measured operation (calibrate.py) counts as one
# such pass, whatever kernels it took.
PASSES = {"norm forward": 2, "norm backward": 4, "rms norm forward": 2, "rms norm backward": 4, "rotary": 2,
          "merge": 5, "swiglu forward": 3, "swiglu backward": 5, "cross entropy": 3}
# with ops=torch on a GPU
PASSES_OF_TORCH = {"norm forward": 4, "norm backward": 8, "rms norm forward": 20, "rms norm backward": 48,
                   "rotary": 10, "merge": 9, "swiglu forward": 5, "swiglu backward": 13, "cross entropy": 6}
PASSES_OF = {"torch": PASSES_OF_TORCH, "te": PASSES | {"norm backward": 6, "rms norm backward": 6}}  # cfg.ops
# Tensors that FP8 products read and write (memo/fp8.py), in bf16: to round one to FP8 it is read for the
# largest element of each row, and again, and written at half the width; for the gradient of a weight that of
# the result is shifted and turned, and the input turned. What a product is added to comes behind it: a
# weight's gradient in fp32.
ROUNDING, TURNING_GRADIENT, TURNING_INPUT, ADDING, GRADIENT_BYTES = 2.5, 5, 1, 3, 12
SCALE_BYTES = 4  # of a row in FP8, beside a byte an element
ATTENTION_BACKWARD = 2.5  # FLOPs over the forward's: five matrix products, the forward has two


def units_of_passes(cfg: Config, speeds: Speeds) -> dict[str, int]:
    """{operation: tensors that it reads and writes} with the kernels of cfg.ops."""
    return PASSES if "rotary" in speeds.table else PASSES_OF.get(cfg.ops, PASSES)


def norm_of(cfg: Config) -> str:
    """The operation's name."""
    return {"layernorm": "norm", "rmsnorm": "rms norm"}[cfg.norm]


class LayerSeconds:
    """Seconds of one layer's operations on one rank, with tensor_parallel=megatron; with metp see
    metp_seconds.py. `groups_s`: to rebuild each group of the layer, all rows; `kernel`: of attention, see
    memo/backends.py; `ring`: ranks that its keys and values go round. `lengths`: of several subsequences
    those up to the one that is computed, see unit_seconds.py; `sweep_s`: to make its keys and values
    again."""

    sweep_s = 0.0

    def __init__(self, cfg: Config, machine: Machine, itemsize: int, lengths: tuple[int, ...] = ()) -> None:
        assert machine.speeds is not None  # seconds are asked for only where they are known
        self.cfg, self.machine, self.speeds = cfg, machine, machine.speeds
        self.kernel = kernel_of(cfg, machine)
        self.layer = layer_of(cfg)
        *self.before, self.S = lengths or (cfg.block_size,)
        B, T, C = cfg.batch_size, self.S // cfg.cp, cfg.n_embd
        self.rows, self.C, self.tp, self.cp = B * T, C, cfg.tp, cfg.cp
        self.ring = cfg.token_ranks
        self.Q, self.KV = (heads * self.layer.head_dim for heads in (self.layer.heads, self.layer.kv_heads))
        self.row_bytes, self.itemsize = B * T // cfg.tp * itemsize, itemsize
        # messages of a product's input, each of so many elements of the run's dtype a row
        widths = (C / itemsize, SCALE_BYTES / itemsize) if cfg.matmul == "fp8" else (C,)
        self.inputs = [("gather", width) for width in widths]
        # keys and values that several groups of heads read travel once for each of these
        self.at_once = group_heads(cfg, max([*self.before, self.S]))
        self.groups_a_key = max(1, self.layer.heads // self.layer.kv_heads // self.at_once)
        self.kv_bytes = 2 * self.KV * self.row_bytes * self.groups_a_key
        scores = B * self.S**2 / 2 * self.Q  # that the mask leaves, times H D
        self.attention_flops = 4 * scores / (cfg.cp * cfg.tp)  # two products forward; five backward
        self.passes = units_of_passes(cfg, self.speeds)
        fp8 = cfg.matmul == "fp8" and FP8_PRODUCTS in self.speeds.table  # else as fast as in the run's dtype
        self.matmul = FP8_PRODUCTS if fp8 else "matmul"
        self.attention_kernels_s = sum(self.kernels_s())
        both = self.attention_forward_s() + self.attention_backward_s()
        self.attention_messages_s = both - self.attention_kernels_s  # with what merges the blocks
        self.set_seconds()

    def set_seconds(self) -> None:
        """attention_s (to rebuild attn_out), groups_s, forward_s, backward_s; messages_s, the exposed seconds
        of both."""
        self.halves, self.pieces = self.products_by_half(), self.pieces_of_rows()
        self.groups_s = {group: self.operation_s(op) for group, op in self.layer.groups.items()}
        self.attention_s = self.attention_out_s()
        output = self.operation_s(self.layer.operations[-1])
        keys = fsum(map(self.operation_s, self.layer.keys))
        self.forward_s = sum(self.groups_s.values()) + self.attention_s + output + keys
        self.backward_s = self.backward()
        before, after = (sum(map(self.message_s, half)) for half in self.halves)
        self.messages_s = before + after + self.exposed_in_backward_s() + self.attention_messages_s

    def products_by_half(self) -> tuple[list[list[Operation]], list[list[Operation]]]:
        """(products before attention, products behind it): each a list, for every input, of the list of its
        operations."""
        halves: tuple[list[list[Operation]], list[list[Operation]]] = [], []
        attention = False
        for op in self.layer.operations:
            attention = attention or op.reads == ATTENTION
            if op.kind not in ("column", "row"):
                continue
            half = halves[attention]
            if half and op.kind == "column" and half[-1][0].reads == op.reads:
                half[-1].append(op)
            else:
                half.append([op])
        return halves

    def together(self, op: Operation) -> list[Operation]:
        """The operations that share the message of op's input."""
        return next(ops for half in self.halves for ops in half if op in ops)

    def message_s(self, ops: list[Operation]) -> float:
        """Exposed seconds of the message of operations with one input."""
        messages = self.inputs if ops[0].kind == "column" else [("scatter", self.C)]
        return self.exposed_s(fsum(map(self.product_s, ops)), *messages)

    def message_part(self, op: Operation) -> float:
        """What counts as the operation's own of the message of its input. Keys and values in no group need
        none: they are made with the queries."""
        groups = [one for one in self.together(op) if all(one is not key for key in self.layer.keys)]
        return sum(one is op for one in groups) / len(groups)

    def product_s(self, op: Operation) -> float:
        return self.matmul_s(op.gives, op.takes)

    def rounding_s(self, op: Operation, way: str) -> float:
        """Seconds of what FP8 products do beside a product: with an input once for all that have it. Own rows
        are rounded before a gather, the gathered rows of a gradient behind it."""
        if self.cfg.matmul != "fp8":
            return 0.0
        column, weights, pieces = op.kind == "column", op.gives * op.takes / self.tp, self.pieces_of_rows()
        seconds = pieces * self.matrix_s(ROUNDING * weights)
        if way == "forward":
            seconds += self.copy_s(ROUNDING * op.takes) / (len(self.together(op)) if column else 1)
            residual = not column and self.tp == 1  # which is added behind the product
            return seconds + self.copy_s(ADDING * op.gives) if residual else seconds
        x, dy = (op.takes * self.tp, op.gives) if column else (op.takes, op.gives * self.tp)
        if column and op is not self.together(op)[0]:  # its gradient is added to that of the first
            seconds += self.copy_s(ADDING * x)
        if self.cfg.ops != "te":
            seconds += pieces * self.matrix_s(GRADIENT_BYTES / self.itemsize * weights)
        return seconds + self.copy_s((ROUNDING + TURNING_GRADIENT) * dy) + self.copy_s(TURNING_INPUT * x)

    def operation_s(self, op: Operation) -> float:
        """Of all rows."""
        if op.kind == "norm":
            return self.pass_s(f"{norm_of(self.cfg)} forward", self.C)
        if op.kind == "activation":
            return self.bytes_s("gelu forward", op.takes + op.gives)
        if op.kind == "row":  # residual + x w^T: each of the tp ranks has a part of the sum
            copied = self.copy_s(3 * op.gives) if self.tp > 1 else 0.0
            gated = self.pass_s("swiglu forward", op.takes) if op.gated else 0.0
            return self.product_s(op) + self.message_s([op]) + copied + gated + self.rounding_s(op, "forward")
        ops = self.together(op)
        rotary = self.pass_s("rotary", op.gives) if op.rotary else 0.0
        message = self.message_part(op) * self.message_s(ops)
        return message + self.product_s(op) + rotary + self.rounding_s(op, "forward")

    def kernels_s(self) -> list[float]:
        """Seconds of attention's kernels (forward, backward) on this rank's share of the scores. In a ring
        the mask halves the own block alone; of the others all queries see half the keys, or half the queries
        all."""
        ring = 1 if self.cfg.context_parallel == "ulysses" else self.ring
        own, flops = self.attention_flops / ring, self.attention_flops
        return [self.kernel_s(way, own, self.S) + (self.kernel_s(way, flops - own, self.S, full=True)
                                                   if ring > 1 else 0.0) for way in ("forward", "backward")]

    def kernel_s(self, way: str, flops: float, keys: int, full: bool = False) -> float:
        """Seconds of a forward of so many FLOPs over so many keys of a sequence, or of its backward. `full`:
        all queries see all of them."""
        size = keys // (1 if self.cfg.context_parallel == "ulysses" else self.ring)
        name = self.kernel if f"{self.kernel} forward" in self.speeds.table else "attention"
        for more in (" full",) * full + (" deterministic",) * self.cfg.deterministic:
            name += more * (f"{name}{more} {way}" in self.speeds.table)
        part = ATTENTION_BACKWARD if way == "backward" else 1.0
        return self.speeds.seconds(f"{name} {way}", part * flops, size)

    def matmul_s(self, gives: int, takes: int) -> float:
        """Seconds of all rows times a weight of (gives, takes) elements, shared by the tp ranks."""
        weights = gives * takes / self.tp
        return self.speeds.seconds(self.matmul, 2 * self.rows * weights, sqrt(weights))

    def bytes_s(self, op: str, elements: float) -> float:
        """Seconds of an operation that reads and writes so many elements a row."""
        nbytes = elements * self.row_bytes
        return self.speeds.seconds(op, nbytes, nbytes)

    def pass_s(self, op: str, width: int) -> float:
        """Seconds of an operation of PASSES on tensors so many elements wide."""
        return self.bytes_s(op, self.passes[op] * width)

    def copy_s(self, elements: float) -> float:
        return self.bytes_s("copy", elements)

    def matrix_s(self, elements: float) -> float:
        """Seconds to read and write so many elements of matrices."""
        return self.speeds.seconds("copy", elements * self.itemsize, elements * self.itemsize)

    def head_norms_s(self, way: str) -> float:
        """Seconds to norm q and k head by head and to rotate them, or their gradients back."""
        width = self.Q + self.KV * self.groups_a_key
        rotary = self.pass_s("rotary", width) if self.cfg.position == "rope" else 0.0
        return self.pass_s(f"rms norm {way}", width) + rotary

    def attention_out_s(self) -> float:
        """Seconds to make attn_out from q, k and v."""
        seconds = self.attention_forward_s() + self.copy_s(2 * self.Q)  # into attn_out
        return seconds + self.head_norms_s("forward") if self.layer.head_norms else seconds

    def pieces_of_rows(self) -> int:
        """Pieces of a rank's own rows, as tp.in_turns cuts them."""
        at_once = 2 if self.tp > 1 and not self.machine.cpu else 1
        return max(1, min(self.rows // self.tp // SPLIT_ROWS,
                          max(at_once, -(-at_once * self.rows // CHUNK_ROWS))))

    def exposed_s(self, compute_s: float, *messages: tuple[str, float]) -> float:
        """Exposed seconds of gathers and scattered sums of all rows, (op, elements a row), beside `compute_s`
        seconds of computing. Rows go piece by piece, on a GPU two under way. At best the first message of the
        first piece is exposed, and the seconds by which all messages take longer than the computing. The
        machine's "hidden" is the part of that best case that it reaches; on a CPU, and where it is not known,
        nothing hides."""
        if self.tp == 1:
            return 0.0
        piece = self.row_bytes * (self.tp - 1) / self.pieces  # bytes of one element of each row
        seconds = [self.pieces * self.machine.message_s(op, width * piece, self.tp)
                   for op, width in messages]
        hidden = self.speeds.rate("hidden") if "hidden" in self.speeds.table and self.pieces > 1 else 0.0
        best = seconds[0] / self.pieces + max(0.0, sum(seconds) - compute_s)
        return sum(seconds) - hidden * max(0.0, sum(seconds) - best)

    def exposed_in_backward_s(self) -> float:
        """Exposed seconds of a backward's messages: the half behind attention, then the one before it, each
        from its last product to its first. A row product gathers its gradient; column products of one input
        gather that input again and scatter the sum of its gradients."""
        seconds = 0.0
        for half in reversed(self.halves):
            messages: list[tuple[str, float]] = []
            for ops in reversed(half):
                inputs = [*self.inputs, ("scatter", self.C)]
                messages += inputs if ops[0].kind == "column" else [("gather", self.C)]
            products = fsum(self.product_s(op) for ops in half for op in ops)
            seconds += self.exposed_s(2 * products, *messages)
        return seconds

    def backward(self) -> float:
        ops = self.layer.operations
        linears = [op for op in ops if op.kind in ("column", "row")]
        products = fsum(map(self.product_s, linears))
        norms = sum(op.kind == "norm" for op in ops)
        passes = norms * self.pass_s(f"{norm_of(self.cfg)} backward", self.C)
        for op in ops:
            if op.kind == "activation":
                passes += self.bytes_s("gelu backward", 2 * op.gives + op.takes)
            if op.gated:
                passes += sum(self.pass_s(f"swiglu {way}", op.takes) for way in ("forward", "backward"))
        passes += fsum(self.pass_s("rotary", op.gives) for op in ops if op.rotary)
        passes += fsum(self.rounding_s(op, "backward") for op in linears)
        if self.layer.head_norms:  # once more, then of their gradients
            passes += sum(map(self.head_norms_s, ("forward", "backward")))
        if self.at_once < self.cfg.n_head // self.tp:
            passes += self.copy_s(2 * (self.Q + 2 * self.KV))  # a group's dq, dk, dv go where q, k, v were
        # dx and dw of each product
        return 2 * products + passes + self.exposed_in_backward_s() + self.attention_backward_s()

    # --- attention, over the ranks that share the tokens ---

    @property
    def turns(self) -> int:
        """Groups of heads that attention takes one after the other, each with messages of its own."""
        return -(-self.layer.heads // self.tp // self.at_once)

    def hop_s(self, nbytes: float) -> float:
        """Seconds of hops to the next rank, of so many bytes of all groups of heads."""
        ranks = self.cp * self.tp
        return self.turns * self.machine.message_s("shift", nbytes / self.turns, ranks, ranks // self.ring)

    def late_s(self, messages_s: float, blocks_s: float) -> float:
        """Exposed seconds of messages beside so many seconds of attention; on a CPU, which carries them
        itself, nothing hides."""
        return max(0.0, messages_s - (0.0 if self.machine.cpu else blocks_s))

    def late_hops_s(self, block_s: float) -> float:
        """Exposed seconds of a forward's hops of keys and values, each beside a block."""
        return (self.ring - 1) * self.late_s(self.hop_s(self.kv_bytes), block_s)

    def late_hops_back_s(self, block_s: float) -> float:
        """The same of a backward, whose first hop has nothing before it. Gradients, in fp32, go beside the
        block behind theirs: beside the own block, the last one, alone."""
        keys, gradients = self.hop_s(self.kv_bytes), self.hop_s(self.kv_bytes * 4 // self.itemsize)
        between = (self.ring - 2) * self.late_s(keys + gradients, block_s)
        return keys + between + self.late_s(gradients, block_s)

    def exchange_s(self, width: int, times: int) -> float:
        """Seconds of all-to-alls of Ulysses, all of them exposed, of so many tensors that together are so
        many elements wide."""
        nbytes = width * self.row_bytes * (self.cp - 1) / self.cp
        message = times * self.machine.message_s("exchange", nbytes / times, self.cp * self.tp, self.tp)
        return message + self.copy_s(4 * width)

    def exchanges_s(self) -> float:
        """Seconds of the all-to-alls of q, k, v and attention's output, group of heads by group. A head of
        keys and values that several ranks read goes to each."""
        kv_heads = max(1, self.at_once * self.layer.kv_heads // self.layer.heads)  # of a group
        dealt = self.cp // gcd(kv_heads, self.cp) * self.groups_a_key * self.KV
        return 2 * self.exchange_s(self.Q, self.turns) + 2 * self.exchange_s(dealt, self.turns)

    def attention_forward_s(self) -> float:
        kernels = self.kernels_s()[0]
        if self.ring == 1:
            return kernels
        if self.cfg.context_parallel == "ulysses":
            return kernels + self.exchanges_s()
        # 6: to fp32 and back. 0.75: all queries are merged for an earlier rank's block, half of them for a
        # later rank's
        merge = self.copy_s(6 * self.Q) + 0.75 * (self.ring - 1) * self.pass_s("merge", self.Q)
        return kernels + merge + self.late_hops_s(kernels / self.ring)

    def attention_backward_s(self) -> float:
        kernels = self.kernels_s()[1]
        if self.ring == 1:
            return kernels
        if self.cfg.context_parallel == "ulysses":
            return kernels + 2 * self.exchanges_s()
        merge = self.copy_s((2 + self.ring * (1 + 8 // self.itemsize)) * (self.Q + 2 * self.KV))
        return kernels + merge + self.late_hops_back_s(kernels / self.ring)

    def recompute_s(self, missing: dict[str, slice]) -> float:
        """Seconds to recompute rows {tensor: slice}, as in Placement.missing."""
        if not missing:
            return 0.0
        own = self.rows / self.tp
        part = {name: (r.stop - r.start) / own for name, r in missing.items()}
        seconds: float = sum(part.get(group, 0.0) * s for group, s in self.groups_s.items())
        return seconds + (self.attention_s if part.get(ATTENTION) else 0.0)


class LayerOfUnits:
    """Seconds of a layer: the sums of those of its `units`, one a subsequence."""

    def __init__(self, units: Sequence[LayerSeconds]) -> None:
        self.units, self.speeds = units, units[0].speeds
        self.forward_s, self.backward_s, self.attention_kernels_s, self.messages_s = (
            fsum(getattr(unit, name) for unit in units)
            for name in ("forward_s", "backward_s", "attention_kernels_s", "messages_s"))
        self.groups_s = {group: fsum(unit.groups_s[group] for unit in units) for group in units[0].groups_s}
