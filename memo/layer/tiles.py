"""Which queries and keys meet, as ranges of rows. Without torch.

A rank's rows of a sequence are ranges of its tokens, in ascending order. A tile is one call of a kernel: a
range of rows of queries, and one of keys that all of them see; or of the same tokens, under the causal mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

Range = tuple[int, int]  # first, end


class Tile(NamedTuple):
    """Holds rows of queries and of keys that meet. `causal`: the i-th query sees the first i + 1 keys."""

    queries: slice
    keys: slice
    causal: bool


EVERYTHING = slice(None)
FULL, DIAGONAL = Tile(EVERYTHING, EVERYTHING, False), Tile(EVERYTHING, EVERYTHING, True)


def rank_ranges(S: int, rank: int, ranks: int, kind: str) -> list[Range]:
    """Lists the ranges of a sequence's S tokens that one of `ranks` holds. A ring deals out a zigzag: rank
    r has the chunks r and 2 ranks - 1 - r of 2 ranks, so that each has the same causal work."""
    if ranks == 1:
        return [(0, S)]
    chunks = [rank, 2 * ranks - 1 - rank] if kind == "ring" else [rank]
    length = S // (ranks * len(chunks))
    return [(i * length, (i + 1) * length) for i in chunks]


def tiles_of(queries: Sequence[Range], keys: Sequence[Range]) -> list[Tile]:
    """Lists the tiles in which queries meet the keys of no later token, the fewest there are. Tokens are
    given in the order of the rows; ranges of both are equal, or have no token in common."""
    if queries == keys:
        return [DIAGONAL]
    tiles, row = list[Tile](), 0
    for first, end in queries:
        seen = sum(b - a for a, b in keys if b <= first)
        rows, row = slice(row, row + end - first), row + end - first
        if tiles and tiles[-1].keys == slice(seen):
            rows = slice(tiles.pop().queries.start, rows.stop)
        if seen:
            tiles.append(Tile(rows, slice(seen), False))
    return tiles
