"""Which token each row of a rank is. Data, positions, targets and evaluation ask here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from memo.config.layout import Layout
from memo.config.subsequences import slice_lengths
from memo.layer.tiles import Range, rank_ranges
from memo.parallel.mesh import Mesh


@dataclass(frozen=True)
class RowOrder:
    """Says which tokens of a sequence the ranks of `weights` embed together, and in which order.

    slices
        the tokens of each slice, by subsequences: a rank's rows are those of one subsequence after the other,
        in it those of one slice after the other. Each slice is dealt to the ranks by itself
    kind, size: how, and to how many ranks, that share the sequence: see tiles.rank_ranges()
    ranks
        whose rows take turns: that of `tokens`, whose tokens the ranks of `weights` have in turns; with METP
        the ranks of `weights`, each with a column of its own
    """

    slices: Sequence[tuple[int, ...]]
    kind: str = "ring"
    size: int = 1
    ranks: Sequence[int] = (0,)

    def columns(self) -> list[list[list[Range]]]:
        """Lists the ranges of tokens by subsequences, and of each by `ranks`."""
        starts = accumulate((n for slices in self.slices for n in slices), initial=0)
        placed = [[*zip(slices, starts, strict=False)] for slices in self.slices]
        return [[[(start + first, start + end) for length, start in slices
                  for first, end in rank_ranges(length, rank, self.size, self.kind)] for rank in self.ranks]
                for slices in placed]

    def deal(self, read: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
        """Lists [(..., T_i)] by subsequences, in the order of the rows, where read(first, end) gives (...,
        end - first) of a range of tokens. Columns are equally long: first comes the first token of each."""
        rows = (torch.cat([read(*r) for column in columns for r in column], -1) for columns in self.columns())
        return [t.unflatten(-1, (len(self.ranks), -1)).transpose(-1, -2).flatten(-2) for t in rows]

    def positions(self) -> list[torch.Tensor]:
        """Lists [(T_i,)] by subsequences: the tokens of the rows."""
        return self.deal(torch.arange)

    def slices_of(self, subsequence: int, first: int, end: int) -> list[int]:
        """Counts how many of a rank's tokens `first` to `end` of a subsequence are in each of its slices."""
        ends = accumulate(n // self.size for n in self.slices[subsequence])
        inside = [first, *(n for n in ends if first < n < end), end]
        return [b - a for a, b in pairwise(inside)]


def row_order(cfg: Layout, S: int, mesh: Mesh) -> RowOrder:
    tokens, tp = mesh.tokens, mesh.weights
    first = tokens.rank - tp.rank
    ranks = range(first, first + tp.size) if cfg.metp else (tokens.rank,)
    return RowOrder(slice_lengths(cfg, S), cfg.context_parallel, tokens.size, ranks)
