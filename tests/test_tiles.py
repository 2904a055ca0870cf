"""Tiles against the causal mask itself, pair by pair."""

import operator
import random
from bisect import bisect_right
from itertools import accumulate, pairwise

import pytest

from memo.kernels.bands import Band
from memo.layer.masks import CAUSAL, EVERYTHING, Mask, Tile, tiles_of
from memo.layer.tiles import rank_ranges


def rows(ranges):
    """The tokens of ranges."""
    return [t for first, end in ranges for t in range(first, end)]


def met(tiles, queries, keys):
    """{(query, key)} of the tiles, as tokens; no pair is in two of them."""
    pairs = []
    for tile in tiles:
        mine, theirs = rows(queries)[tile.queries], rows(keys)[tile.keys]
        assert not tile.causal or len(mine) == len(theirs) > 0
        band = tile.causal if isinstance(tile.causal, Band) else Band(len(mine), 0 if tile.causal else -1)
        pairs += [(q, k) for i, q in enumerate(mine) for j, k in enumerate(theirs)
                  if tile.causal is False or (j >= i - band.left and (band.right < 0 or j <= i + band.right))]
    assert len(pairs) == len({*pairs})
    return {*pairs}


def check(queries, keys, mask=CAUSAL):
    tiles = tiles_of(tuple(queries), tuple(keys), mask)

    def part(token):
        return bisect_right(mask.borders, token)
    assert met(tiles, queries, keys) == {(q, k) for q in rows(queries) for k in rows(keys)
                                         if q - mask.window < k <= q and mask.sees(part(q), part(k))}
    return tiles


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tiles_between_ranks_are_the_causal_mask(ranks, kind):
    S = 4 * ranks
    held = [tuple(rank_ranges(S, rank, ranks, kind)) for rank in range(ranks)]
    assert sorted(t for ranges in held for t in rows(ranges)) == [*range(S)]
    for q in range(ranks):
        for k in range(ranks):
            tiles = check(held[q], held[k])
            assert len(tiles) == (1 if kind == "ring" else k <= q)


def test_tiles_of_any_ranges_are_the_causal_mask():
    """Queries and keys that take turns in stretches of any length; neighbours with the same keys share a
    tile."""
    for pattern in range(2**9):
        sides = [[], []]
        for i in range(9):
            side = pattern >> i & 1
            first = i * (i + 1) // 2
            sides[side].append((first, first + i + 1))
        tiles = check(*sides)
        seen = [sum(b <= first for _, b in sides[1]) for first, _ in sides[0]]
        assert len(tiles) == len({*seen} - {0})
    assert tiles_of(((0, 3),), ((0, 3),)) == (Tile(EVERYTHING, EVERYTHING, True),)
    assert tiles_of(((0, 3),), ((0, 3),), CAUSAL.near(2)) == (Tile(EVERYTHING, EVERYTHING, Band(1, 0)),)
    assert len(tiles_of(((8, 16),), ((0, 8),), CAUSAL.near(4))) == 1  # the edge of the window alone


@pytest.mark.parametrize("window", [0, 1, 2, 5, 9, 17])
@pytest.mark.parametrize("sees", [operator.ge, operator.eq, lambda i, j: i == j or j != 1])
def test_tiles_are_those_of_any_mask(sees, window):
    """What a query sees of other parts: all, as under the causal mask; nothing, as of other documents; all
    but a hole. With a sliding window, and without."""
    generator = random.Random(0)
    for _ in range(300):
        ends = [*accumulate(generator.choices(range(1, 6), k=9), initial=0)]
        sides = [[], [], []]
        for stretch in pairwise(ends):
            generator.choice(sides).append(stretch)
        mask = Mask(tuple(sorted(generator.sample(range(1, ends[-1]), 2))), sees).near(window)
        check(sides[0], sides[1], mask)
        tiles = check(sides[0], sides[0], mask)
        assert len(tiles) <= 1 or sees is not operator.ge or window
