"""Which queries and keys of a sequence meet, as ranges of rows.

A mask says which earlier tokens a query sees. A tile is one call of a kernel: a range of rows of queries, and
one of keys that all of them see; or of as many keys, under the causal mask or within a band.
"""

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from memo.kernels.attention import Lengths, Sees
from memo.kernels.bands import Band

Range = tuple[int, int]  # first, end
Ranges = tuple[Range, ...]


class Tile(NamedTuple):
    """Holds rows of queries and of keys that meet. `causal`: the i-th query sees the first i + 1 keys; with a
    Band those near the i-th; with Lengths those of its document. `of`: the sequences of a batch in which they
    do."""

    queries: slice
    keys: slice
    causal: Sees
    of: slice = slice(None)

    @property
    def kind(self) -> int:
        """Numbers, below KINDS, what requests memory alike: by itself, by lengths, of a batch or of a
        sequence, or within a band, of a window or at its edge."""
        if isinstance(self.causal, Band):
            return 3 + (self.causal.right != 0)
        return isinstance(self.causal, Lengths) * (1 + (self.of != EVERYTHING))


Tiles = tuple[Tile, ...]
EVERYTHING = slice(None)
KINDS = 5


class Mask(NamedTuple):
    """Says which tokens a query sees, of those before it. `borders`: tokens, ascending, at which a sequence
    is cut into parts; sees(i, j): whether queries in part i see keys in part j, always where i = j. From
    `end` on is padding, which sees nothing, and which nothing sees. `window`: a query sees so many keys, its
    own the last of them."""

    borders: tuple[int, ...] = ()
    sees: Callable[[int, int], bool] = operator.ge
    end: float = inf
    window: float = inf

    def near(self, window: int) -> "Mask":
        """Adds a sliding window to a mask; 0: none."""
        return self._replace(window=window or inf)


CAUSAL = Mask()


def documents(ends: Sequence[int], window: int = 0) -> Mask:
    """Makes the Mask of a sequence whose tokens see those of their own document alone. `ends`: of the
    documents; behind the last is padding. `window`: as in Mask.near()."""
    return Mask(tuple(ends), operator.eq, ends[-1]).near(window)


class Stretch(NamedTuple):
    """Holds tokens in one part of a mask, and their rows."""

    tokens: Range
    rows: Range
    part: int


def stretches(ranges: Ranges, mask: Mask) -> list[Stretch]:
    """Cuts ranges of tokens at the borders of a mask."""
    found, row = list[Stretch](), 0
    for a, b in ranges:
        part, last = bisect_right(mask.borders, a), bisect_left(mask.borders, b)
        for k, tokens in enumerate(pairwise((a, *mask.borders[part:last], b)), part):
            rows = row, row + tokens[1] - tokens[0]
            found.append(Stretch(tokens, rows, k))
            row = rows[1]
    return found


def joined(rows: Sequence[Range]) -> list[Range]:
    """Joins ascending ranges of rows that follow each other, or overlap."""
    found = list[Range]()
    for first, end in rows:
        if found and first <= found[-1][1]:
            first, before = found.pop()
            end = max(before, end)
        found.append((first, end))
    return found


def keys_seen(keys: Sequence[Stretch], mask: Mask) -> Callable[[Stretch], list[Stretch]]:
    """Makes a function that finds the keys before a stretch of queries that any of these sees; padding sees
    none."""
    of_part = defaultdict[int, list[Stretch]](list)
    for key in keys:
        of_part[key.part].append(key)

    def seen(query: Stretch) -> list[Stretch]:
        first, part = query.tokens[0], query.part
        # of many documents few keys are worth a look
        near = of_part.get(part, ()) if mask.sees is operator.eq else keys
        return [key for key in near if key.tokens[1] <= first < min(mask.end, key.tokens[1] + mask.window - 1)
                and mask.sees(part, key.part)]
    return seen


def edge_of_window(query: Stretch, key: Stretch, window: int) -> list[tuple[Range, Range, Sees]]:
    """Lists the tiles of queries that see some of the keys before them: those near all of these; those whose
    window ends among them see a triangle of as many, and the keys behind it."""
    (a, b), (c, d) = query.tokens, key.tokens
    end_all = min(b, max(a, c + window))
    end = min(b, d + window - 1)  # from here on none is seen
    first, last = end_all - window + 1, end - window + 1  # the first keys that the others see; their end

    def rows(of: Stretch, start: int, stop: int) -> Range:
        return of.rows[0] + start - of.tokens[0], of.rows[0] + stop - of.tokens[0]
    triangle = rows(query, end_all, end)
    tiles: list[tuple[Range, Range, Sees]] = [
        (rows(query, a, end_all), key.rows, False), (triangle, rows(key, first, last), Band(0, -1)),
        (triangle, rows(key, last, d), False)]
    return [tile for tile in tiles if all(start < stop for start, stop in tile[:2])]


def tiles_of(queries: Ranges, keys: Ranges, mask: Mask = CAUSAL) -> Tiles:
    """Lists the tiles in which queries meet the keys that they see: under the causal mask the fewest there
    are. Tokens are given in the order of the rows; ranges of both are equal, or have no token in common. At
    the edge of a window a query sees part of the keys before it."""
    all_queries, all_keys = stretches(queries, mask), stretches(keys, mask)
    own_keys = {key.tokens: key for key in all_keys}
    keys_of = keys_seen(all_keys, mask)
    full, causal = list[tuple[Range, Range]](), list[tuple[Range, Range]]()  # rows of queries, of keys
    square = list[Stretch]()  # the keys of the last causal tile
    banded, W = list[tuple[Range, Range, Sees]](), mask.window
    for query in (query for query in all_queries if query.tokens[0] < mask.end):
        seen, own = list[Stretch](), own_keys.get(query.tokens)
        for key in keys_of(query):
            if query.tokens[1] - key.tokens[0] <= W:
                seen.append(key)
            else:
                banded += edge_of_window(query, key, int(W))
        if own and query.tokens[1] - query.tokens[0] > W:
            banded.append((query.rows, own.rows, Band(int(W) - 1, 0)))
            square = []
        elif own:
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
    tiles = [*((q, k, False) for q, k in full), *banded, *((q, k, True) for q, k in causal)]
    return tuple(Tile(of_rows(q, all_queries), of_rows(k, all_keys), causal) for q, k, causal in tiles)
