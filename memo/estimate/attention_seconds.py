"""What attention costs a rank, over the ranks that share the tokens: alone, in a ring, by Ulysses, and over
the keys and values of all subsequences up to the unit's own (memo/attend.py)."""

from collections import Counter
from functools import lru_cache
from math import gcd

from memo.estimate.roofline import ATTENTION_BACKWARD, KERNELS, MESSAGES, Cost, Unit, total
from memo.layer import head_groups, keys_dealt

WAYS = "forward", "backward"


def kernel(u: Unit, way: str, flops: float, keys: int, full: bool = False) -> Cost:
    """Costs a forward of so many FLOPs over so many keys of a sequence, or its backward. `full`: all queries
    see all of them."""
    size = keys // (1 if u.ulysses else u.ring)
    name = u.kernel if f"{u.kernel} forward" in u.speeds.table else "attention"
    for more in (" full",) * full + (" deterministic",) * u.cfg.deterministic:
        name += more * (f"{name}{more} {way}" in u.speeds.table)
    part = ATTENTION_BACKWARD if way == "backward" else 1.0
    return Cost(u.speeds.seconds(f"{name} {way}", part * flops, size), KERNELS)


def own_kernels(u: Unit, way: str) -> list[Cost]:
    """Costs the kernels on this rank's share of the scores, but for those of subsequences before. In a
    ring the mask halves the own block alone; of the others all queries see half the keys, or half the
    queries all."""
    ring = 1 if u.ulysses else u.ring
    own, flops = u.attention_flops / ring, u.attention_flops
    return [kernel(u, way, own, u.S), *[kernel(u, way, flops - own, u.S, full=True)] * (ring > 1)]


def kernels_before(u: Unit, way: str) -> list[Cost]:
    """Costs the kernels over the keys of all subsequences before."""
    return [Cost(times * kernel(u, way, u.attention_flops * 2 * n / u.S, n, full=True).seconds, KERNELS)
            for n, times in Counter(u.before).items()]


@lru_cache(1)  # a unit's passes all ask for it
def attention(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs (forward, backward) of attention, from q, k and v on."""
    both = prefix if u.several else ulysses if u.ulysses else ring
    forward, backward = both(u) if u.several or u.ring > 1 else ([], [])
    return ([*own_kernels(u, "forward"), *kernels_before(u, "forward"), *forward],
            [*own_kernels(u, "backward"), *kernels_before(u, "backward"), *backward])


# --- a ring ---

def hop_s(u: Unit, nbytes: float) -> float:
    """Counts the seconds of hops to the next rank, of so many bytes of all groups of heads."""
    ranks = u.cp * u.tp
    return u.turns * u.machine.message_s("shift", nbytes / u.turns, ranks, ranks // u.ring)


def late_hop(u: Unit, message_s: float, block_s: float, times: int = 1) -> Cost:
    """Costs hops beside attention, which hides all of them; on a CPU, which carries them itself, nothing."""
    return u.late(message_s, block_s, 0.0 if u.machine.cpu else 1.0, times=times)


def ring(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs sending keys and values round, and merging the blocks, which counts as messages."""
    # 6: to fp32 and back. 0.75: all queries are merged for an earlier rank's block, half of them for a later
    # rank's
    merge = u.copy(6 * u.Q).seconds + 0.75 * (u.ring - 1) * u.kernel_pass("merge", u.Q).seconds
    merge_back = u.copy((2 + u.ring * (1 + 8 // u.itemsize)) * (u.Q + 2 * u.KV)).seconds
    hops = (metp_hops if u.cfg.metp else hops_of_blocks)(u)
    forward, backward = ([Cost(s, MESSAGES), *late]
                         for s, late in zip((merge, merge_back), hops, strict=True))
    return forward, backward


def hops_of_blocks(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs hops of keys and values, each beside a block. A backward's first hop has nothing before it;
    gradients, in fp32, go beside the block behind theirs: beside the own block, the last one, alone."""
    forward_s, backward_s = (total(own_kernels(u, way)) / u.ring for way in WAYS)
    keys, gradients = hop_s(u, u.kv_bytes), hop_s(u, u.kv_bytes * 4 // u.itemsize)
    return ([late_hop(u, keys, forward_s, u.ring - 1)],
            [Cost(keys, MESSAGES), late_hop(u, keys + gradients, backward_s, u.ring - 2),
             late_hop(u, gradients, backward_s)])


def metp_hops(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs hops by METP, which go two ahead, and a group's first ones beside the group before: all of
    them hide behind all blocks, but for a backward's first hops that have nothing before them: of the
    first group, and of each turn of a group behind its first. What hides behind a group's products, too,
    is not counted."""
    forward_s, backward_s = (u.ring * (total(own_kernels(u, way)) / u.ring) for way in WAYS)
    keys, gradients = hop_s(u, u.kv_bytes), hop_s(u, u.kv_bytes * 4 // u.itemsize)
    first = keys * (u.turns - head_groups(u.cfg) + 1) / u.turns
    return ([late_hop(u, (u.ring - 1) * keys, forward_s)],
            [Cost(first, MESSAGES), late_hop(u, (u.ring - 1) * (keys + gradients) - first, backward_s)])


# --- Ulysses ---

def exchange(u: Unit, width: int, times: int) -> Cost:
    """Costs all-to-alls, all of them exposed, of so many tensors that together are so many elements wide."""
    nbytes = width * u.row_bytes * (u.cp - 1) / u.cp
    message = times * u.machine.message_s("exchange", nbytes / times, u.cp * u.tp, u.tp)
    return Cost(message + u.copy(4 * width).seconds, MESSAGES)


def ulysses(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs all-to-alls of q, k, v and attention's output, group of heads by group; twice as many in the
    backward. A head of keys and values that several ranks read goes to each."""
    kv_heads = max(1, u.at_once * u.layer.kv_heads // u.layer.heads)  # of a group
    dealt = u.cp // gcd(kv_heads, u.cp) * u.groups_a_key * u.KV
    exchanges = [exchange(u, u.Q, u.turns), exchange(u, dealt, u.turns)] * 2
    return exchanges, exchanges * 2


# --- a prefix ---

def dealing(u: Unit) -> list[Cost]:
    """Costs the all-to-alls of k and v, or of their gradients, in the pieces of all ranks."""
    return [exchange(u, keys_dealt(u.cfg) * u.KV, 1)] * 2 if u.ulysses else []


def prefix(u: Unit) -> tuple[list[Cost], list[Cost]]:
    """Costs merging partial results, and adding up partial gradients, in fp32, and messages. A ring passes
    queries, and their sums on the way home; Ulysses exchanges q and out, in the backward dout, q, out and dq,
    and dk and dv."""
    n, p = len(u.before) + 1, 1 if u.ulysses else u.ring
    # of a visitor's own piece half of the queries meet a rank before it
    merges = n - 1 if p == 1 else p * n - 0.25 * (p - 1)
    forward = [u.copy(6 * u.Q), Cost(merges * u.kernel_pass("merge", u.Q).seconds)] if merges else []
    keys = p * (1 + sum(u.before) / u.S)  # pieces whose sums grow, in units of the own one
    added = 1 + 8 // u.itemsize
    backward = [u.copy((2 + added * merges) * u.Q + (2 + added * keys) * 2 * u.KV)]
    if u.ulysses:
        exchanged = exchange(u, u.Q, u.turns)
        return [*forward, *[exchanged] * 2], [*backward, *[exchanged] * 4, *dealing(u)]
    if u.ring > 1:
        fp32 = u.row_bytes * 4 // u.itemsize
        lse, queries = fp32 * u.layer.heads, u.Q * u.row_bytes
        forward += passing(u, "forward", queries, u.Q * fp32 + lse)
        backward += passing(u, "backward", 3 * queries + lse, u.Q * fp32)
    return forward, backward


def passing(u: Unit, way: str, leaving: float, home: float) -> list[Cost]:
    """Costs what passes the ring: `leaving` bytes of queries, and their sums on the way home, a rank behind.
    The first hop hides behind the own queries' pieces before, the last one behind their own piece."""
    before, own = (total(costs(u, way)) / u.ring for costs in (kernels_before, own_kernels))
    leave, come = hop_s(u, leaving), hop_s(u, home)
    return [late_hop(u, leave, before), late_hop(u, leave + come, before + own, u.ring - 2),
            late_hop(u, come, own)]
