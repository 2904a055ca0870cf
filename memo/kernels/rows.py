"""Pieces of rows: what is done row by row is done piece by piece."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import torch

from memo.config.layer import CHUNK_ROWS, SPLIT_ROWS
from memo.system.axis import Axis

CACHED_ELEMENTS = 2**18  # of a chunk on a CPU: with its temporary tensors 4 MiB in fp32


def cut(first: int, end: int, ranks: int = 1, at_once: int = 1, most: int | None = None) -> list[slice]:
    """Cuts a rank's own rows first..end into slices, nearly equal, at least `at_once` of them, so many of
    which together have `most` rows, by default CHUNK_ROWS, of `ranks` ranks or less (each rounded up to
    SPLIT_ROWS own ones), never fewer than SPLIT_ROWS out of more: bits of products would differ."""
    whole = (end - first) // SPLIT_ROWS
    n = max(1, min(whole, max(at_once, -(-(end - first) * ranks * at_once // (most or CHUNK_ROWS)))))
    edges = [first - (-i * whole // n) * SPLIT_ROWS for i in range(n)] + [end]
    return [slice(*edge) for edge in pairwise(edges)]


def chunks(first: torch.Tensor, *others: torch.Tensor | None, ranks: int = 1, most: int | None = None,
           cached: bool = False) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors, cut into the same ranges of rows; None as it is. `cached`: on a CPU of so few rows
    that several passes over them stay in its cache."""
    n, slices = len(first), cut(0, len(first), ranks, most=most)
    if cached and first.is_cpu:
        few = max(1, CACHED_ELEMENTS // prod(first.shape[1:]))
        slices = [slice(i, i + few) for i in range(0, n, few)]
    for r in slices:
        yield [t if t is None else t[r] for t in (first, *others)]


def stretches(n: int, rows: dict[str, slice]) -> list[tuple[int, int, list[str]]]:
    """Cuts n rows at the ends of {name: slice}: lists [(first, end, names that have these rows)]."""
    bounds = {name: r.indices(n)[:2] for name, r in rows.items()}
    edges = sorted({edge for bound in bounds.values() for edge in bound})
    named = [(first, end, [name for name, (start, stop) in bounds.items() if start <= first and end <= stop])
             for first, end in pairwise(edges)]
    return [stretch for stretch in named if stretch[2]]


def own_ids(axis: Axis, ids: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts ids from the first of this rank's V -> (ids, mask of its own); others become any of its own."""
    ids = ids - axis.rank * V
    return ids.clamp(0, V - 1), (ids >= 0) & (ids < V)
