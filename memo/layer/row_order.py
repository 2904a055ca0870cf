"""Which token each row of a rank is. Data, positions, targets and evaluation ask here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

import torch

from memo.config.layout import Layout, slice_lengths
from memo.layer.tiles import CAUSAL, Mask, Meeting, Range, Ranges, rank_ranges, rows_of
from memo.parallel.mesh import Mesh


@dataclass(frozen=True)
class RowOrder:
    """Says which tokens of a sequence the ranks of `weights` embed together, and in which order.

    slices
        the tokens of each slice, by subsequences: a rank's rows are those of one subsequence after the other,
        in it those of one slice after the other. Each slice is dealt to the ranks by itself
    kind, size: how, and to how many ranks, that share the sequence: see tiles.rank_ranges()
    mask: who sees whom
    ranks
        whose rows take turns: that of `tokens`, whose tokens the ranks of `weights` have in turns; with METP
        the ranks of `weights`, each with a column of its own
    """

    slices: Sequence[tuple[int, ...]]
    kind: str = "ring"
    size: int = 1
    ranks: Sequence[int] = (0,)
    mask: Mask = CAUSAL

    def dealt(self, rank: int) -> list[list[Range]]:
        """Lists by subsequences the ranges of tokens that one of the `size` ranks holds."""
        starts = accumulate((n for slices in self.slices for n in slices), initial=0)
        return [[(start + first, start + end) for length, start in zip(slices, starts, strict=False)
                 for first, end in rank_ranges(length, rank, self.size, self.kind)] for slices in self.slices]

    def columns(self) -> list[list[list[Range]]]:
        """Lists the ranges of tokens by subsequences, and of each by `ranks`."""
        return [[*of_ranks] for of_ranks in zip(*map(self.dealt, self.ranks), strict=True)]

    def deal(self, read: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
        """Lists [(..., T_i)] by subsequences, in the order of the rows, where read(first, end) gives (...,
        end - first) of a range of tokens. Columns are equally long: first comes the first token of each."""
        rows = (torch.cat([read(*r) for column in columns for r in column], -1) for columns in self.columns())
        return [t.unflatten(-1, (len(self.ranks), -1)).transpose(-1, -2).flatten(-2) for t in rows]

    def positions(self) -> list[torch.Tensor]:
        """Lists [(T_i,)] by subsequences: the tokens of the rows."""
        return self.deal(torch.arange)

    def meetings(self, subsequence: int, first: int, end: int) -> list[Meeting]:
        """Says which tokens meet where a rank's tokens `first` to `end` of a subsequence are the queries, for
        each slice of these. The pieces are the subsequences before, what is before `first`, what is between
        it and the slice, and the slice itself. With Ulysses a rank has the tokens of all, for some heads."""
        order = replace(self, size=1) if self.kind == "ulysses" else self
        times, held = self.size // order.size, [*zip(*map(order.dealt, range(order.size)), strict=True)]

        # with Ulysses `first` and `end` are ends of slices: each slice is dealt by itself
        def rows(i: int, first: int, end: float) -> list[Ranges]:
            return [rows_of(ranges, first * times, end * times) for ranges in held[i]]
        before = [rows(i, 0, inf) for i in range(subsequence)] + [rows(subsequence, 0, first)] * (first > 0)
        ends = accumulate(n // self.size for n in self.slices[subsequence])
        return [Meeting(queries := rows(subsequence, a, b),
                        [*before, *[rows(subsequence, first, a)] * (a > first), queries], self.mask)
                for a, b in pairwise([first, *(n for n in ends if first < n < end), end])]


def row_order(cfg: Layout, S: int, mesh: Mesh) -> RowOrder:
    tokens, tp = mesh.tokens, mesh.weights
    first = tokens.rank - tp.rank
    ranks = range(first, first + tp.size) if cfg.metp else (tokens.rank,)
    return RowOrder(slice_lengths(cfg, S), cfg.context_parallel, tokens.size, ranks)
