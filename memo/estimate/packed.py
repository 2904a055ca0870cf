"""What attention does of a batch of packed documents: counted from its tiles (memo/layer/tiles.py)."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memo.config.formulas import squares_met
from memo.estimate.roofline import Calls, Met, Unit
from memo.kernels.bands import Band
from memo.layer.masks import Ranges, documents
from memo.layer.tiles import Meeting, RowOrder

Ends = tuple[tuple[int, ...], ...]  # of a Sample


def met_by_ranks(u: Unit, i: int, lengths: Sequence[int], ends: Ends) -> list[Met]:
    """Counts what attention of the i-th subsequence does on each rank that shares the tokens."""
    order = RowOrder([(n,) for n in lengths], u.cfg.context_parallel, u.ring,
                     masks=[documents(of, u.kind.window) for of in ends])
    [meeting] = order.meetings(i, 0, lengths[i] // u.ring)
    # of many documents few reach back, and no window far: what is before the first ones meets nothing
    first, window = sum(lengths[:i]), u.kind.window or sum(lengths)
    start = min(([0, *of][bisect_right(of, first)] for of in ends if first < of[-1]), default=first)
    start = max(start, first - window + 1)
    begins = [sum(lengths[:k + 1]) > start for k in range(i)]
    near = replace(meeting, pieces=[piece for piece, meets in
                                    zip(meeting.pieces, [*begins, True], strict=True) if meets])
    return [met_of_rank(u, near, rank, several=i > 0) for rank in range(len(meeting.queries))]


def met_of_rank(u: Unit, meeting: Meeting, rank: int, several: bool) -> Met:
    B, ranks = u.cfg.batch_size, len(meeting.queries)
    # of a pair on this rank, with all heads that it has; groups of heads take turns
    flops = 4 * u.Q * (1 if u.ulysses else u.ring) / (u.cp * u.tp) / u.turns
    own, earlier = Counter[Calls](), Counter[Calls]()
    queries = keys = sent = 0
    met = meeting.distances if u.kind.window else range(1, ranks)  # distances at which ranks meet

    def count_rows(of_pieces: Sequence[Ranges]) -> int:
        return sum(end - first for ranges in of_pieces for first, end in ranges)

    def count(part: slice, of: int) -> int:
        start, end, _ = part.indices(of)
        return end - start
    for distance in (0, *met):
        other = (rank - distance) % ranks
        # of a whole sequence keys come by, or a halo of them; of several subsequences queries
        at, source = (other, rank) if several and not u.kind.window else (rank, other)
        halo = u.kind.window and distance
        rows = meeting.halo(at, source) if halo else [piece[source] for piece in meeting.pieces]
        sent += count_rows(meeting.halo((rank + distance) % ranks, rank)) if halo else 0
        for piece, tiles, ranges in zip(meeting.pieces, meeting.tiles(at, source), rows, strict=True):
            held = count_rows([ranges])
            for tile in tiles:
                n, m, of = count(tile.queries, meeting.rows), count(tile.keys, held), count(tile.of, B)
                slides = isinstance(tile.causal, Band) and tile.causal.right == 0
                pairs = of * (squares_met(n, u.kind.window if slides else 0) / 2 if tile.causal else n * m)
                (own if piece is meeting.pieces[-1] else earlier)[
                    Calls(flops * pairs, min(m, u.kind.window or m), not tile.causal,
                          band=isinstance(tile.causal, Band))] += u.turns
                queries, keys = queries + of * n, keys + of * m
    of_rows = queries / (B * meeting.rows)
    mine, before = ([one._replace(times=times) for one, times in of.items()] for of in (own, earlier))
    # alone each part of a result goes to its place; else all are merged
    alone = ranks == 1 and not several
    return Met(mine, before, len(meeting.distances), 0 if alone else of_rows, of_rows,
               keys / (B * meeting.rows), alone, sent / meeting.rows)
