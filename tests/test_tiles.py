"""Tiles against the causal mask itself, pair by pair."""

import pytest

from memo.layer.cp import ring_tile
from memo.layer.tiles import DIAGONAL, rank_ranges, tiles_of


def rows(ranges):
    """The tokens of ranges."""
    return [t for first, end in ranges for t in range(first, end)]


def met(tiles, queries, keys):
    """{(query, key)} of the tiles, as tokens; no pair is in two of them."""
    pairs = []
    for tile in tiles:
        mine, theirs = rows(queries)[tile.queries], rows(keys)[tile.keys]
        assert not tile.causal or mine == theirs
        pairs += [(q, k) for i, q in enumerate(mine) for j, k in enumerate(theirs)
                  if j <= i or not tile.causal]
    assert len(pairs) == len({*pairs})
    return {*pairs}


def check(queries, keys):
    tiles = tiles_of(queries, keys)
    assert met(tiles, queries, keys) == {(q, k) for q in rows(queries) for k in rows(keys) if k <= q}
    return tiles


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tiles_between_ranks_are_the_causal_mask(ranks, kind):
    S = 4 * ranks
    held = [rank_ranges(S, rank, ranks, kind) for rank in range(ranks)]
    assert sorted(t for ranges in held for t in rows(ranges)) == [*range(S)]
    for q in range(ranks):
        for k in range(ranks):
            tiles = check(held[q], held[k])
            assert len(tiles) == (1 if kind == "ring" else k <= q)
            if kind == "ring" and ranks > 1:
                assert tiles == [ring_tile(k, q, ranks, 4)]


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
    assert tiles_of([(0, 3)], [(0, 3)]) == [DIAGONAL]
