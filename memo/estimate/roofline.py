"""The costs of each operation of a unit, a layer at one subsequence, at its own speed (hardware.py),
and what hides of a message beside them. A unit's seconds are the sums of lists of such Costs. Attention is
alone, in a ring, by Ulysses, or over the keys and values of all subsequences up to the unit's own
(memo/layer/attend.py).

A rank's own rows are N = B*T/tp; `row_bytes`, those of one element of each, is the unit of elementwise
passes and messages, whose amounts are bytes read and written, or sent. Sizes that speeds depend on: of a
matrix product the geometric mean of the weight's dims, of attention the keys of a rank's block, of
elementwise passes their bytes. Source: MEMO 4.1."""

from collections import Counter
from collections.abc import Callable, Iterable
from math import fsum, gcd, sqrt
from typing import NamedTuple

from memo.config.config import Config
from memo.config.formulas import squares_met
from memo.config.layer import Operation, group_heads, head_groups, keys_dealt, layer_of
from memo.config.layout import Layout, subsequence_lengths
from memo.config.settings import Kind
from memo.data.packing import Share
from memo.kernels.backends import by_bands, kernel_of
from memo.system.hardware import FP8_PRODUCTS, Machine

# Tensors that fused kernels read and write (memo/kernels/ops.py). A measured operation counts as one such
# pass, whatever kernels it took.
PASSES = {"norm forward": 2, "norm backward": 4, "rms norm forward": 2, "rms norm backward": 4, "rotary": 2,
          "merge": 5, "swiglu forward": 3, "swiglu backward": 5, "cross entropy": 3}
# with ops=torch on a GPU
PASSES_OF_TORCH = {"norm forward": 4, "norm backward": 8, "rms norm forward": 20, "rms norm backward": 48,
                   "rotary": 10, "merge": 9, "swiglu forward": 5, "swiglu backward": 13, "cross entropy": 6}
PASSES_OF = {"torch": PASSES_OF_TORCH, "te": PASSES | {"norm backward": 6, "rms norm backward": 6}}  # cfg.ops
NORMS = {"layernorm": "norm", "rmsnorm": "rms norm"}  # {cfg.norm: its operation}
ATTENTION_BACKWARD = 2.5  # FLOPs over the forward's: five matrix products, the forward has two
# parts of a step that a Cost may count for
KERNELS, MESSAGES, REST = "attention", "messages", "rest of the layers"
WAYS = "forward", "backward"
Before = Counter[int]  # the subsequences before a unit's own: how many there are of each length


class Calls(NamedTuple):
    """Says what so many calls of a kernel do together: FLOPs of a forward over so many keys each; `full`:
    without a mask; `band`: at the edge of a window, or within one."""

    flops: float
    keys: int
    full: bool
    times: int = 1
    band: bool = False


class Sample(NamedTuple):
    """Describes a micro batch of packed documents: for each sequence the ends of its pieces; and what
    all of them hold."""

    ends: tuple[tuple[int, ...], ...]
    share: Share


SampleOf = Callable[[Config], Sample]  # the one that stands for all, of any batch_size and block_size


class Met(NamedTuple):
    """Says what attention of a unit does on a rank: calls over the unit's own keys, and over those before;
    the hops to other ranks; and in units of the unit's rows, all queries or all keys, how many of partial
    results are merged, and of their gradients added. `copied`: each part of a result goes to its place.
    `halo`: with a window, in units of the unit's rows, the keys that are sent in all hops."""

    own: list[Calls]
    earlier: list[Calls]
    hops: int = 0
    merged: float = 0.0
    queries: float = 0.0
    keys: float = 0.0
    copied: bool = False
    halo: float = 0.0


class Cost(NamedTuple):
    """Seconds of what a unit does; of a message those that nothing hides. `part`: of a step."""

    seconds: float
    part: str = REST


Kernels = list[tuple[list[Cost], list[Cost]]]  # of each way: over a unit's own keys, over all before these


def total(costs: Iterable[Cost], part: str = "") -> float:
    """Sums the seconds of costs, or of those of a part."""
    return fsum(cost.seconds for cost in costs if part in ("", cost.part))


def units_of_passes(cfg: Config, machine: Machine) -> dict[str, int]:
    """Looks up {operation: tensors that it reads and writes} with the kernels of cfg.ops."""
    measured = machine.speeds is not None and "rotary" in machine.speeds.table
    return PASSES if measured else PASSES_OF.get(cfg.ops, PASSES)


class Unit:
    """Sizes of a unit of S tokens, and what one rank's operations on it cost, whatever is before it.
    `kernel`: of attention, see memo/kernels/backends.py; `ring`: ranks that keys and values go round;
    `turns`: groups of heads that attention takes in turns, each with its own messages."""

    # Tensors that FP8 products read and write (memo/kernels/fp8.py), in bf16: to round one to FP8 it is read
    # for the largest element of each row, and again, and written at half the width; for the gradient of a
    # weight that of the result is shifted and turned, and the input turned. What a product is added to comes
    # behind it: a weight's gradient in fp32.
    ROUNDING, TURNING_GRADIENT, TURNING_INPUT, ADDING, GRADIENT_BYTES = 2.5, 5, 1, 3, 12
    SCALE_BYTES = 4  # of a row in FP8, beside a byte an element

    def __init__(self, cfg: Layout, machine: Machine, itemsize: int, S: int | None = None,
                 kind: Kind | None = None) -> None:
        assert machine.speeds is not None  # seconds are asked for only where they are known
        self.cfg, self.machine, self.speeds = cfg, machine, machine.speeds
        self.kind = kind or cfg.kinds[0]
        self.kernel = kernel_of(cfg, machine)
        self.layer = layer_of(cfg, self.kind)
        lengths = subsequence_lengths(cfg)
        self.S, self.several = S or max(lengths), len(lengths) > 1
        B, T, C = cfg.batch_size, self.S // cfg.cp, cfg.n_embd
        self.rows, self.C, self.tp, self.cp = B * T, C, cfg.tp, cfg.cp
        self.own = self.rows / self.tp
        self.ring = cfg.token_ranks
        self.ulysses = self.ring > 1 and cfg.context_parallel == "ulysses"
        self.Q, self.KV = (heads * self.layer.head_dim for heads in (self.layer.heads, self.layer.kv_heads))
        self.row_bytes, self.itemsize = B * T // cfg.tp * itemsize, itemsize
        # keys and values that several groups of heads read travel once for each of these
        self.at_once = group_heads(cfg, max(lengths))
        self.groups_a_key = max(1, self.layer.heads // self.layer.kv_heads // self.at_once)
        self.kv_bytes = 2 * self.KV * self.row_bytes * self.groups_a_key
        parts = head_groups(cfg) if cfg.metp else cfg.tp  # of the heads
        self.heads_made = self.layer.heads // parts  # of q, which exist at a time
        self.turns = -(-self.heads_made // self.at_once) * (parts if cfg.metp else 1)
        scores = B * squares_met(self.S, self.kind.window) / 2 * self.Q  # that the mask leaves, times H D
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
        return self.kernel_pass(f"{NORMS[self.cfg.norm]} {way}", self.C)

    def copy(self, elements: float) -> Cost:
        return self.elementwise("copy", elements)

    def matrix_copy(self, elements: float) -> Cost:
        """Costs reading and writing so many elements of matrices."""
        return Cost(self.speeds.seconds("copy", elements * self.itemsize, elements * self.itemsize))

    def head_norms(self, way: str) -> list[Cost]:
        """Costs norming q and k and rotating them, or their gradients back."""
        if not self.layer.qk_norms:
            return []
        width = self.Q + self.KV * self.groups_a_key
        return [self.kernel_pass(f"rms norm {way}", width),
                *[self.kernel_pass("rotary", width)] * (self.kind.rope is not None)]

    def sums_of_norms(self, times: int) -> list[Cost]:
        """Costs sums over the ranks of tp of a number a row, in norms of all heads together."""
        nbytes = 4 * self.rows * (self.tp - 1) / self.tp
        one_s = sum(self.machine.message_s(op, nbytes, self.tp) for op in ("scatter", "gather"))
        return [Cost(times * one_s, MESSAGES)] * (self.cfg.qk_norm_over == "all" and self.tp > 1)

    def late(self, message_s: float, beside_s: float, hidden: float | None = None, first_s: float = 0.0,
             times: int = 1) -> Cost:
        """Costs what nothing hides of messages of so many seconds beside so many of computing. `first_s`: of
        those that come before the computing. `hidden`: the part of the best case that is reached, by default
        what the machine gets beside products: nothing on a CPU, or where it is not known."""
        hidden = self.hidden if hidden is None else hidden
        exposed_s = message_s - hidden * max(0.0, min(message_s, beside_s) - first_s)
        return Cost(times * exposed_s, MESSAGES)


# --- attention ---

def kernel(u: Unit, way: str, calls: Calls) -> Cost:
    """Costs calls of a kernel, forward or backward."""
    name = by_bands(u.kernel) if calls.band else u.kernel
    name = name if f"{name} forward" in u.speeds.table else "attention"
    for more in (" full",) * calls.full + (" deterministic",) * u.cfg.deterministic:
        name += more * (f"{name}{more} {way}" in u.speeds.table)
    part = ATTENTION_BACKWARD if way == "backward" else 1.0
    return Cost(calls.times * u.speeds.seconds(f"{name} {way}", part * calls.flops, calls.keys), KERNELS)


def one_document(u: Unit, before: Before) -> Met:
    """Counts what attention does where a sequence is one document. In a ring the mask halves the own block
    alone; of the others all queries see half the keys, or half see all."""
    ring, flops = 1 if u.ulysses else u.ring, u.attention_flops
    own = [Calls(flops / ring, u.S // ring, full=False)]
    own += [Calls(flops - flops / ring, u.S // ring, full=True)] * (ring > 1)
    earlier = [Calls(flops * 2 * n / u.S, n // ring, True, times) for n, times in before.items()]
    if not u.several:  # all queries are merged for an earlier rank's block, half of them for a later one's
        return Met(own, earlier, u.ring - 1, 0.75 * (ring - 1), ring, ring)
    n = before.total() + 1
    # of a visitor's own piece half of the queries meet a rank before it
    merged = n - 1 if ring == 1 else ring * n - 0.25 * (ring - 1)
    # pieces whose sums grow, in units of the own one
    keys = ring * (1 + sum(length * times for length, times in before.items()) / u.S)
    return Met(own, earlier, u.ring - 1, merged, merged, keys)


def kernels_s(u: Unit, met: Met, way: str = "forward") -> float:
    """Counts the seconds of a unit's kernels."""
    return total(kernel(u, way, calls) for calls in (*met.own, *met.earlier))


def attention(u: Unit, met: Met) -> tuple[list[Cost], list[Cost]]:
    """Costs attn_out from q, k and v, and dq, dk, dv from its gradient; those of several groups of heads go
    where q, k, v were."""
    kernels = [([kernel(u, way, of) for of in met.own], [kernel(u, way, of) for of in met.earlier])
               for way in WAYS]
    beside = prefix(u, met, kernels) if u.several else alone(u, met) if u.ring == 1 else (
        ulysses(u) if u.ulysses else ring(u, met, kernels))
    forward, backward = ([*own, *earlier, *more]
                         for (own, earlier), more in zip(kernels, beside, strict=True))
    norms, moved = u.head_norms("forward"), [u.copy(2 * (u.Q + 2 * u.KV))] * (u.at_once < u.heads_made)
    normed = 1 if u.several else 2  # keys of several subsequences are normed where they are made
    return ([*forward, u.copy(2 * u.Q), *norms, *u.sums_of_norms(normed)],
            [*backward, *moved, *norms, *u.head_norms("backward"), *u.sums_of_norms(2 * normed)])


# --- a ring ---

def hop_s(u: Unit, nbytes: float) -> float:
    """Counts the seconds of hops to the next rank, of so many bytes of all groups of heads."""
    ranks = u.cp * u.tp
    return u.turns * u.machine.message_s("shift", nbytes / u.turns, ranks, ranks // u.ring)


def late_hop(u: Unit, message_s: float, block_s: float, times: int = 1) -> Cost:
    """Costs hops beside attention, which hides all of them; on a CPU, which carries them itself, nothing."""
    return u.late(message_s, block_s, 0.0 if u.machine.cpu else 1.0, times=times)


def alone(u: Unit, met: Met) -> tuple[list[Cost], list[Cost]]:
    """Costs what goes beside the calls of a whole sequence on one rank."""
    return [u.copy(2 * u.Q)] * met.copied, [u.copy(2 * (u.Q + 2 * u.KV))] * met.copied


def ring(u: Unit, met: Met, kernels: Kernels) -> tuple[list[Cost], list[Cost]]:
    """Costs sending keys and values round, each hop beside a block, and merging the blocks, which counts as
    messages. A backward's first hop has nothing before it; gradients, in fp32, go beside the block behind
    theirs: beside the own block, the last one, alone. METP's hops go two ahead, and a group's first ones
    beside the group before: all hide behind all blocks, but for the first ones of a backward's first group,
    and of each turn of a group behind its first. Hiding behind a group's products is not counted."""
    # 6: to fp32 and back
    merge = u.copy(6 * u.Q).seconds + met.merged * u.kernel_pass("merge", u.Q).seconds
    added = 1 + 8 // u.itemsize
    merge_back = u.copy((2 + met.queries * added) * u.Q + (2 + met.keys * added) * 2 * u.KV).seconds
    forward_s, backward_s = (total(own) for own, _ in kernels)
    if not met.hops:
        return [Cost(merge, MESSAGES)], [Cost(merge_back, MESSAGES)]
    sent = u.kv_bytes * (met.halo / met.hops if u.kind.window else 1)  # in a hop
    keys, gradients = hop_s(u, sent), hop_s(u, sent * 4 / u.itemsize)
    if u.cfg.metp:
        first = keys * (u.turns - head_groups(u.cfg) + 1) / u.turns
        hops = [late_hop(u, met.hops * keys, forward_s)]
        hops_back = [late_hop(u, met.hops * (keys + gradients) - first, backward_s)]
    else:
        first, block_s, block_back_s = keys, forward_s / (met.hops + 1), backward_s / (met.hops + 1)
        hops = [late_hop(u, keys, block_s, met.hops)]
        hops_back = [late_hop(u, keys + gradients, block_back_s, met.hops - 1),
                     late_hop(u, gradients, block_back_s)]
    return [Cost(merge, MESSAGES), *hops], [Cost(merge_back, MESSAGES), Cost(first, MESSAGES), *hops_back]


# --- Ulysses ---

def exchange(u: Unit, width: int, times: int) -> Cost:
    """Costs all-to-alls, all of them exposed, of so many tensors that together are so many elements wide."""
    nbytes = width * u.row_bytes * (u.cp - 1) / u.cp
    message = times * u.machine.message_s("exchange", nbytes / times, u.cp * u.tp, u.tp)
    return Cost(message + u.copy(4 * width).seconds, MESSAGES)


def ulysses(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs all-to-alls of q, k, v and attn_out by groups of heads; twice as many in the backward."""
    kv_heads = max(1, u.at_once * u.layer.kv_heads // u.layer.heads)  # of a group
    dealt = u.cp // gcd(kv_heads, u.cp) * u.groups_a_key * u.KV
    exchanges = [exchange(u, u.Q, u.turns), exchange(u, dealt, u.turns)] * 2
    return exchanges, exchanges * 2


# --- a prefix ---

def dealing(u: Unit) -> list[Cost]:
    """Costs the all-to-alls of k and v, or of their gradients, in the pieces of all ranks."""
    return [exchange(u, keys_dealt(u.cfg) * u.KV, 1)] * 2 if u.ulysses else []


def prefix(u: Unit, met: Met, kernels: Kernels) -> tuple[list[Cost], list[Cost]]:
    """Costs merging partial results, and adding up partial gradients, in fp32, and messages. A ring passes
    queries, and their sums on the way home; Ulysses exchanges q, out; backward dout, q, out, dq, dk, dv."""
    merges, added = met.merged, 1 + 8 // u.itemsize
    forward = [u.copy(6 * u.Q), Cost(merges * u.kernel_pass("merge", u.Q).seconds)] if merges else []
    backward = [u.copy((2 + added * met.queries) * u.Q + (2 + added * met.keys) * 2 * u.KV)]
    if u.ulysses:
        exchanged = exchange(u, u.Q, u.turns)
        return [*forward, *[exchanged] * 2], [*backward, *[exchanged] * 4, *dealing(u)]
    if met.hops and u.kind.window:
        keys, gradients = (hop_s(u, u.kv_bytes * met.halo * n / u.itemsize) for n in (u.itemsize, 4))
        forward.append(late_hop(u, keys, total(kernels[0][0])))
        backward.append(late_hop(u, keys + gradients, total(kernels[1][0])))
    elif met.hops:
        fp32 = u.row_bytes * 4 // u.itemsize
        lse, queries = fp32 * u.layer.heads, u.Q * u.row_bytes
        forward += passing(u, met.hops, *kernels[0], queries, u.Q * fp32 + lse)
        backward += passing(u, met.hops, *kernels[1], 3 * queries + lse, u.Q * fp32)
    return forward, backward


def passing(u: Unit, hops: int, own: list[Cost], earlier: list[Cost], leaving: float,
            home: float) -> list[Cost]:
    """Costs what passes the ring: `leaving` bytes of queries, and their sums on the way home, a rank behind.
    The first hop hides behind the own queries' pieces before, the last one behind their own piece."""
    before_s, own_s = total(earlier) / (hops + 1), total(own) / (hops + 1)
    leave, come = hop_s(u, leaving), hop_s(u, home)
    return [late_hop(u, leave, before_s), late_hop(u, leave + come, before_s + own_s, hops - 1),
            late_hop(u, come, own_s)]
