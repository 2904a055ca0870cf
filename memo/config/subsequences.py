"""Where a sequence is cut into subsequences: at multiples of 128 * cfg.layout_multiple, so that products are
aligned; where these are too few, or do not fill the sequence, of cfg.block_multiple. Without torch."""

from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise

from memo.config.formulas import layer_forward_terms, percent
from memo.config.layout import Layout

ALIGNED = 128  # multiples of what the layout needs


def subsequence_lengths(cfg: Layout, S: int | None = None) -> tuple[int, ...]:
    """Counts the tokens of each subsequence of S, a multiple of cfg.block_multiple (default: block_size).
    Another length may have fewer, none shorter than 128 * cfg.layout_multiple."""
    S, aligned = S or cfg.block_size, ALIGNED * cfg.layout_multiple
    N = max(1, min(cfg.subsequences, S // (cfg.block_multiple if cfg.block_size == S else aligned)))
    multiple = aligned if S % aligned == 0 and N * aligned <= S else cfg.block_multiple
    count = S // multiple
    counts = (equal_flops(*layer_forward_terms(cfg), count, multiple, N) if cfg.subsequence_cut == "flops"
              else [count // N + (i < count % N) for i in range(N)])  # the earlier ones have one more
    return tuple(n * multiple for n in counts)


def slice_lengths(cfg: Layout, S: int | None = None) -> list[tuple[int, ...]]:
    """Counts each subsequence's tokens by slices, each dealt by itself to the ranks that share it. Slices end
    where helped rows end, so that what comes before them on a rank comes before them on all."""
    lengths = subsequence_lengths(cfg, S)
    if cfg.token_ranks == 1 or S not in (None, cfg.block_size):
        return [(n,) for n in lengths]
    ends = [{n} for n in lengths]
    for piece in cfg.shares:
        ends[piece.subsequence] |= {rows * cfg.cp * cfg.tp // cfg.batch_size
                                    for rows in (piece.first, piece.end)}
    return [tuple(end - first for first, end in pairwise(sorted({0} | inner))) for inner in ends]


def unit_rows(cfg: Layout, B: int, T: int) -> tuple[int, ...]:
    """Counts a rank's own rows of each subsequence, of B sequences with T tokens on a rank of cp."""
    return tuple(B * n // (cfg.cp * cfg.tp) for n in subsequence_lengths(cfg, T * cfg.cp))


@lru_cache(512)  # configs that differ in other keys alone have the same
def equal_flops(linear: int, square: int, count: int, multiple: int, N: int) -> list[int]:
    """Deals `count` multiples to N subsequences, at least one each, with equal FLOPs of a layer's forward."""
    def flops(k: int) -> int:  # asked for thousands of times
        return N * (linear + square * multiple * k) * multiple * k
    ends = [0]
    for i in range(1, N):
        wanted = i * flops(count) // N
        k = bisect_left(range(count), wanted, key=flops)  # the first that has as many
        nearest = min((max(0, k - 1), k), key=lambda k: abs(flops(k) - wanted))
        ends.append(min(max(nearest, ends[-1] + 1), count - (N - i)))
    return [end - first for first, end in pairwise([*ends, count])]


def pipeline_line(cfg: Layout) -> str:
    """Describes the layers of each stage, and how long stages wait for each other; "" for one stage."""
    if cfg.pp == 1:
        return ""
    N = len(subsequence_lengths(cfg))
    s = "s" * (N > 1)
    return (f"pipeline    {cfg.pp} stages of {', '.join(map(str, cfg.depths))} layers, {N} subsequence{s}: "
            f"bubble {cfg.pp - 1}/{N} = {percent((cfg.pp - 1) / N)} of the computing")


def subsequences_line(cfg: Layout, chosen: str = "") -> str:
    """Describes how a sequence is cut, and its units' order; "" where it is not cut. `chosen`: why so."""
    lengths, why = subsequence_lengths(cfg), f": {chosen}" * bool(chosen)
    if len(lengths) == 1:
        return f"sequence    1 subsequence{why}" * bool(chosen)
    shortest, most = min(lengths), max(lengths)
    each = f"{most:,}" if shortest == most else f"{shortest:,} to {most:,}"
    order = "layer by layer" if cfg.by_layer else "subsequence by subsequence"
    return f"sequence    {len(lengths)} subsequences of {each} tokens, {order}{why}"
