"""What each operation of a unit, a layer at one subsequence, costs a rank, at its own speed (hardware.py),
and what hides of a message beside them. A unit's seconds are the sums of lists of such Costs.

A rank's own rows are N = B*T/tp; `row_bytes`, those of one element of each, is the unit of elementwise
passes and messages, whose amounts are bytes read and written, or sent. Sizes that speeds depend on: of a
matrix product the geometric mean of the weight's dims, of attention the keys of a rank's block, of
elementwise passes their bytes. Source: MEMO 4.1.
"""

from collections.abc import Iterable
from math import fsum, sqrt
from typing import NamedTuple

from memo.backends import kernel_of
from memo.config import Config
from memo.estimate.hardware import FP8_PRODUCTS, Machine
from memo.layer import Operation, group_heads, head_groups, layer_of

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
# parts of a step that a Cost may count for
KERNELS, MESSAGES, REST = "attention", "messages", "rest of the layers"


class Cost(NamedTuple):
    """Seconds of something that a unit does; of a message those that nothing hides. `part`: of a step."""

    seconds: float
    part: str = REST


def total(costs: Iterable[Cost], part: str = "") -> float:
    """Sums the seconds of costs, or of those of a part."""
    return fsum(cost.seconds for cost in costs if part in ("", cost.part))


def units_of_passes(cfg: Config, machine: Machine) -> dict[str, int]:
    """{operation: tensors that it reads and writes} with the kernels of cfg.ops."""
    measured = machine.speeds is not None and "rotary" in machine.speeds.table
    return PASSES if measured else PASSES_OF.get(cfg.ops, PASSES)


def norm_of(cfg: Config) -> str:
    """The operation's name."""
    return {"layernorm": "norm", "rmsnorm": "rms norm"}[cfg.norm]


class Unit:
    """The sizes of a unit, and what one rank's operations on it cost. `lengths`: of several subsequences
    those up to the unit's own. `kernel`: of attention, see memo/backends.py; `ring`: ranks that its keys and
    values go round; `turns`: groups of heads that attention takes one after the other, each with messages of
    its own."""

    def __init__(self, cfg: Config, machine: Machine, itemsize: int, lengths: tuple[int, ...] = ()) -> None:
        assert machine.speeds is not None  # seconds are asked for only where they are known
        self.cfg, self.machine, self.speeds = cfg, machine, machine.speeds
        self.kernel = kernel_of(cfg, machine)
        self.layer = layer_of(cfg)
        *self.before, self.S = lengths or (cfg.block_size,)
        self.several = bool(lengths)
        B, T, C = cfg.batch_size, self.S // cfg.cp, cfg.n_embd
        self.rows, self.C, self.tp, self.cp = B * T, C, cfg.tp, cfg.cp
        self.own = self.rows / self.tp
        self.ring = cfg.token_ranks
        self.ulysses = self.ring > 1 and cfg.context_parallel == "ulysses"
        self.Q, self.KV = (heads * self.layer.head_dim for heads in (self.layer.heads, self.layer.kv_heads))
        self.row_bytes, self.itemsize = B * T // cfg.tp * itemsize, itemsize
        # keys and values that several groups of heads read travel once for each of these
        self.at_once = group_heads(cfg, max([*self.before, self.S]))
        self.groups_a_key = max(1, self.layer.heads // self.layer.kv_heads // self.at_once)
        self.kv_bytes = 2 * self.KV * self.row_bytes * self.groups_a_key
        parts = head_groups(cfg) if cfg.metp else cfg.tp  # of the heads
        self.turns = -(-self.layer.heads // parts // self.at_once) * (parts if cfg.metp else 1)
        scores = B * self.S**2 / 2 * self.Q  # that the mask leaves, times H D
        self.attention_flops = 4 * scores / (cfg.cp * cfg.tp)  # two products forward; five backward
        self.passes = units_of_passes(cfg, machine)
        fp8 = cfg.matmul == "fp8" and FP8_PRODUCTS in self.speeds.table  # else as fast as in the run's dtype
        self.matmul = FP8_PRODUCTS if fp8 else "matmul"
        # of messages that have products beside them
        self.hidden = self.speeds.rate("hidden") if "hidden" in self.speeds.table else 0.0

    # --- one operation ---

    def product(self, op: Operation) -> Cost:
        """Costs the product of all rows and a weight that the tp ranks share."""
        weights = op.gives * op.takes / self.tp
        return Cost(self.speeds.seconds(self.matmul, 2 * self.rows * weights, sqrt(weights)))

    def elementwise(self, op: str, elements: float) -> Cost:
        """Costs an operation that reads and writes so many elements a row."""
        nbytes = elements * self.row_bytes
        return Cost(self.speeds.seconds(op, nbytes, nbytes))

    def kernel_pass(self, op: str, width: int) -> Cost:
        """Costs an operation of PASSES on tensors so many elements wide."""
        return self.elementwise(op, self.passes[op] * width)

    def norm(self, way: str) -> Cost:
        return self.kernel_pass(f"{norm_of(self.cfg)} {way}", self.C)

    def copy(self, elements: float) -> Cost:
        return self.elementwise("copy", elements)

    def matrix_copy(self, elements: float) -> Cost:
        """Costs reading and writing so many elements of matrices."""
        return Cost(self.speeds.seconds("copy", elements * self.itemsize, elements * self.itemsize))

    def head_norms(self, way: str) -> list[Cost]:
        """Costs norming q and k head by head and rotating them, or their gradients back, in models that
        do."""
        if not self.layer.head_norms:
            return []
        width = self.Q + self.KV * self.groups_a_key
        return [self.kernel_pass(f"rms norm {way}", width),
                *[self.kernel_pass("rotary", width)] * (self.cfg.position == "rope")]

    def late(self, message_s: float, beside_s: float, hidden: float | None = None, first_s: float = 0.0,
             times: int = 1) -> Cost:
        """Costs what nothing hides of messages of so many seconds beside so many of computing. `first_s`: of
        those that come before the computing. `hidden`: the part of the best case that is reached, by default
        what the machine gets beside products: nothing on a CPU, or where it is not known."""
        hidden = self.hidden if hidden is None else hidden
        exposed_s = message_s - hidden * max(0.0, min(message_s, beside_s) - first_s)
        return Cost(times * exposed_s, MESSAGES)
