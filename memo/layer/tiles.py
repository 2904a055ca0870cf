"""Which queries and keys meet, as ranges of rows. Without torch.

A rank's rows of a sequence are ranges of its tokens, in ascending order. A mask says which earlier tokens a
query sees. A tile is one call of a kernel: a range of rows of queries, and one of keys that all of them see;
or of the same tokens, under the causal mask.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

Range = tuple[int, int]  # first, end
Ranges = tuple[Range, ...]


class Tile(NamedTuple):
    """Holds rows of queries and of keys that meet. `causal`: the i-th query sees the first i + 1 keys."""

    queries: slice
    keys: slice
    causal: bool


Tiles = tuple[Tile, ...]
EVERYTHING = slice(None)


class Mask(NamedTuple):
    """Says which tokens a query sees, of those before it. `borders`: tokens, ascending, at which a sequence
    is cut into parts; sees(i, j): whether queries in part i see keys in part j, always where i = j."""

    borders: tuple[int, ...] = ()
    sees: Callable[[int, int], bool] = operator.ge


CAUSAL = Mask()


@dataclass(eq=False)
class Meeting:
    """Says which tokens the queries and the pieces of keys of attention are, and who sees whom.

    queries[rank], pieces[number][rank]: ranges of tokens, of each rank that holds a part of them; with
    Ulysses of all ranks together. The last piece has the queries' own keys
    """

    queries: Sequence[Ranges]
    pieces: Sequence[Sequence[Ranges]]
    mask: Mask = CAUSAL
    known: dict[tuple[int, int], list[Tiles]] = field(default_factory=dict, init=False)

    def tiles(self, rank: int = 0, source: int = 0) -> list[Tiles]:
        """Lists for each piece the tiles of the queries of `rank` and the keys of `source`."""
        if (rank, source) not in self.known:  # all layers and heads ask again
            self.known[rank, source] = [tiles_of(self.queries[rank], piece[source], self.mask)
                                        for piece in self.pieces]
        return self.known[rank, source]

    @property
    def rows(self) -> int:
        """Counts the queries of one of `queries`: all have equally many."""
        return sum(end - first for first, end in self.queries[0])


def one_sequence(S: int) -> Meeting:
    """Makes the Meeting of a whole sequence on one rank."""
    return Meeting([((0, S),)], [[((0, S),)]])


def rank_ranges(S: int, rank: int, ranks: int, kind: str) -> list[Range]:
    """Lists the ranges of a sequence's S tokens that one of `ranks` holds. A ring deals out a zigzag: rank
    r has the chunks r and 2 ranks - 1 - r of 2 ranks, so that each has the same causal work."""
    if ranks == 1:
        return [(0, S)]
    chunks = [rank, 2 * ranks - 1 - rank] if kind == "ring" else [rank]
    length = S // (ranks * len(chunks))
    return [(i * length, (i + 1) * length) for i in chunks]


def rows_of(ranges: Sequence[Range], first: float, end: float) -> Ranges:
    """Finds the tokens in rows `first` to `end`, where `ranges` are the tokens of all rows."""
    found, row = list[Range](), 0
    for a, b in ranges:
        low, high = max(a, a + first - row), min(b, a + end - row)
        found += [(int(low), int(high))] * (low < high)
        row += b - a
    return tuple(found)


class Stretch(NamedTuple):
    """Holds tokens in one part of a mask, and their rows."""

    tokens: Range
    rows: Range
    part: int


def stretches(ranges: Ranges, mask: Mask) -> list[Stretch]:
    """Cuts ranges of tokens at the borders of a mask."""
    found, row = list[Stretch](), 0
    for part, (low, high) in enumerate(pairwise((-inf, *mask.borders, inf))):
        for tokens in ((int(max(a, low)), int(min(b, high))) for a, b in ranges
                       if max(a, low) < min(b, high)):
            rows = row, row + tokens[1] - tokens[0]
            found.append(Stretch(tokens, rows, part))
            row = rows[1]
    return found


def joined(rows: Sequence[Range]) -> list[Range]:
    """Joins ranges of rows that follow each other."""
    found = list[Range]()
    for first, end in rows:
        if found and found[-1][1] == first:
            first, _ = found.pop()
        found.append((first, end))
    return found


def tiles_of(queries: Ranges, keys: Ranges, mask: Mask = CAUSAL) -> Tiles:
    """Lists the tiles in which queries meet the keys that they see: under the causal mask the fewest there
    are. Tokens are given in the order of the rows; ranges of both are equal, or have no token in common."""
    all_queries, all_keys = stretches(queries, mask), stretches(keys, mask)
    own_keys = {key.tokens: key for key in all_keys}
    full, causal = list[tuple[Range, Range]](), list[tuple[Range, Range]]()  # rows of queries, of keys
    square = list[Stretch]()  # the keys of the last causal tile
    for query in all_queries:
        seen = [key for key in all_keys
                if key.tokens[1] <= query.tokens[0] and mask.sees(query.part, key.part)]
        if own := own_keys.get(query.tokens):
            grows = square and square[-1].rows[1] == own.rows[0] and causal[-1][0][1] == query.rows[0]
            if grows and all(key in seen for key in square):
                first = causal.pop()[0][0]
            else:
                first, square = query.rows[0], []
            seen = [key for key in seen if key not in square]
            square = [*square, own]
            causal.append(((first, query.rows[1]), (square[0].rows[0], own.rows[1])))
        for rows in joined([key.rows for key in seen]):
            # the queries right before may see the same keys
            same = [tile for tile in full if tile[1] == rows and tile[0][1] == query.rows[0]]
            full = [tile for tile in full if tile not in same]
            full.append((((same or [(query.rows, rows)])[0][0][0], query.rows[1]), rows))

    def of_rows(rows: Range, all_rows: list[Stretch]) -> slice:
        return EVERYTHING if rows == (0, all_rows[-1].rows[1]) else slice(*rows)
    return tuple(Tile(of_rows(q, all_queries), of_rows(k, all_keys), tiles is causal)
                 for tiles in (full, causal) for q, k in tiles)
