"""Which token each row of a rank is (RowOrder: data, positions, targets and evaluation ask there), and which
tokens of all ranks and subsequences meet (Meeting). A rank's rows of a sequence are ranges of its tokens, in
ascending order. memo/layer/masks.py says which of two ranges meet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import ceil, inf
from typing import NamedTuple

import torch

from memo.config.layout import Layout, slice_lengths
from memo.kernels.attention import Lengths
from memo.kernels.backends import most_documents
from memo.kernels.bands import Band
from memo.layer.masks import (
    CAUSAL,
    EVERYTHING,
    Mask,
    Range,
    Ranges,
    Tile,
    Tiles,
    joined,
    keys_seen,
    stretches,
    tiles_of,
)
from memo.parallel.mesh import Mesh

Fence = Callable[[bool], Callable[[], object]]
Move = Callable[[torch.Tensor], torch.Tensor]
FEW = 8  # documents of a batch's own piece that are a call each


@dataclass(eq=False)
class Meeting:
    """Says which tokens the queries and the pieces of keys of attention are, and who sees whom.

    queries[rank], pieces[number][rank]: ranges of tokens, of each rank that holds a part of them; with
    Ulysses of all ranks together. The last piece has the queries' own keys
    """

    queries: Sequence[Ranges]
    pieces: Sequence[Sequence[Ranges]]
    masks: Sequence[Mask] = (CAUSAL,)  # of each sequence of a batch; one: of all
    fence: Fence | None = None  # with documents: NoArena.fence()
    place: Move | None = None  # to the device, with a kernel of Lengths
    known: dict[tuple[int, int], list[Tiles]] = field(default_factory=dict, init=False)
    halos: dict[tuple[int, int], list[Ranges]] = field(default_factory=dict, init=False)

    def tiles(self, rank: int = 0, source: int = 0) -> list[Tiles]:
        """Lists for each piece the tiles of the queries of `rank` and the keys of `source`."""
        if (rank, source) not in self.known:  # all layers and heads ask again
            found = [self.tiles_of_batch(self.queries[rank], piece[source]) for piece in self.pieces]
            if self.place and rank == source:
                squares = [tile for tile in found[-1] if tile.queries == tile.keys]  # of each document
                if len(squares) > FEW:
                    others = (tile for tile in found[-1] if tile.queries != tile.keys)
                    # those longer than a window came first
                    squares.sort(key=lambda tile: (tile.of.start or 0, tile.queries.start or 0))
                    found[-1] = (*others, *self.calls_by_lengths(tuple(squares)))
            if rank != source and self.window < inf:  # keys are a halo's rows, one range behind the other
                found = [tuple(tile._replace(keys=within_ranges(tile.keys, rows)) for tile in tiles)
                         for tiles, rows in zip(found, self.halo(rank, source), strict=True)]
            self.known[rank, source] = found
        return self.known[rank, source]

    @property
    def window(self) -> float:
        """Finds the tokens that a token sees, whatever documents there are."""
        return self.masks[0].window

    @cached_property
    def one_document(self) -> "Meeting":
        """Makes the Meeting under the window alone: a halo is as long in each batch."""
        return replace(self, masks=(CAUSAL.near(int(self.window)),))

    @cached_property
    def reach(self) -> list[int]:
        """Lists the distances between ranks that the window reaches: see `distances`."""
        return self.one_document.distances

    def halo(self, rank: int, source: int) -> list[Ranges]:
        """Lists for each piece the rows of the keys of `source` that queries of `rank` see through the
        window."""
        if (rank, source) not in self.halos:
            queries, mask = self.queries[rank], self.one_document.masks[0]
            self.halos[rank, source] = [rows_of_keys(tiles_of(queries, piece[source], mask), piece[source])
                                        for piece in self.pieces]
        return self.halos[rank, source]

    def own_tiles(self, rank: int) -> list[Tiles]:
        """Lists those of a rank's queries and its own keys; with Ulysses all ranks are one."""
        return self.tiles(*[rank % len(self.queries)] * 2)

    def calls_by_lengths(self, causal: Tiles) -> Tiles:
        """Replaces the causal tiles of a batch, one for each document, by calls of a kernel that takes the
        documents' lengths. One call does the batch. With padding, or more documents than a call may have,
        each sequence has calls of its own, each of documents that follow one another."""
        of_sequences = [[0] for _ in self.masks]  # where documents start, and the end
        for tile in causal:
            for starts in of_sequences[tile.of]:
                starts.append(self.rows if tile.queries == EVERYTHING else tile.queries.stop)
        whole = [0] + [b * self.rows + end for b, starts in enumerate(of_sequences) for end in starts[1:]]
        full = all(starts[-1] == self.rows for starts in of_sequences)
        if full and len(whole) - 1 <= most_documents(whole[-1]):
            return (Tile(EVERYTHING, EVERYTHING, self.lengths(whole)),)
        calls = list[Tile]()
        for b, starts in enumerate(of_sequences):
            n = len(starts) - 1
            parts = ceil(n / most_documents(self.rows)) or 1  # calls of about as many documents
            of = slice(b, b + 1) if len(of_sequences) > 1 else EVERYTHING
            for first, end in pairwise(n * i // parts for i in range(parts + 1)) if n else ():
                rows = slice(starts[first], starts[end])
                calls.append(Tile(rows, rows, self.lengths(starts[first:end + 1]), of))
        return tuple(calls)

    def lengths(self, starts: Sequence[int], longest: int = 2) -> Lengths:
        """Puts the Lengths of documents that begin at `starts` on the device; they say that the longest has
        `longest` rows or more. Two at least: flash-attn 2 orders lse otherwise where it is told of one row,
        and query heads share keys."""
        assert self.place
        longest = max(longest, *(end - start for start, end in pairwise(starts)))
        return Lengths(self.place(torch.tensor(starts, dtype=torch.int32) - starts[0]), longest,
                       int(self.window) - 1 if self.window < longest else -1)

    def rehearse(self, rank: int) -> None:
        """Puts the largest tiles of each kind in a rehearsal, whose plan serves all batches: calls by
        lengths, and with a window those at its edges, which documents may cut anywhere."""
        B, ranks = len(self.masks), range(len(self.queries))
        for other in ranks if self.window < inf else ():
            for pair in {(rank % len(ranks), other), (other, rank % len(ranks))}:
                own = pair[0] == pair[1]
                held = [piece[pair[1]] for piece in self.pieces] if own else self.halo(*pair)
                *before, last = map(self.largest, self.tiles(*pair), held)
                if own:  # who alone has its own keys
                    last += (Tile(EVERYTHING, EVERYTHING, Band(int(self.window) - 1, 0)),)
                self.known[pair] = [*before, last]
        tiles = self.own_tiles(rank)
        calls = [(EVERYTHING, B * self.rows)] + [(slice(0, 1), self.rows)] * (B > 1)
        for of, rows in calls if self.place else ():
            n = min(rows, most_documents(rows))
            worst = self.lengths([rows * i // n for i in range(n + 1)], self.rows)
            tiles[-1] = (*tiles[-1], Tile(EVERYTHING, EVERYTHING, worst, of))

    def largest(self, of_piece: Tiles, keys: Ranges) -> Tiles:
        """Lists the largest tile of each kind, but of a rank's own keys, where one document has those
        `of_piece`. A full tile requests as much as a causal one."""
        n, m = (min(int(self.window), rows) for rows in (self.rows, sum(end - first for first, end in keys)))
        edge = slice(0, min(n, m))
        return (Tile(slice(0, n), slice(0, m), False), Tile(edge, edge, Band(0, -1))) if of_piece else ()

    def tiles_of_batch(self, queries: Ranges, keys: Ranges) -> Tiles:
        """Lists the tiles of all sequences; neighbours of one mask share theirs."""
        if len({*self.masks}) == 1:
            return tiles_of(queries, keys, self.masks[0])
        found, first = list[Tile](), 0
        for mask, alike in groupby(self.masks):
            end = first + len([*alike])
            found += [tile._replace(of=slice(first, end)) for tile in tiles_of(queries, keys, mask)]
            first = end
        return tuple(found)

    @cached_property
    def distances(self) -> list[int]:
        """Lists, ascending, how many ranks lie between some queries and keys of another rank's that meet."""
        ranks, found = len(self.queries), {0}
        for mask in {*self.masks}:
            owner = {key: rank for piece in self.pieces for rank, ranges in enumerate(piece)
                     for key in stretches(ranges, mask)}
            seen = keys_seen([*owner], mask)
            for rank, ranges in enumerate(self.queries):
                for query in stretches(ranges, mask):
                    if len(found) < ranks:
                        found |= {(rank - owner[key]) % ranks for key in seen(query)}
        return sorted(found)[1:]

    @property
    def rows(self) -> int:
        """Counts the queries of one of `queries`: all have equally many."""
        return sum(end - first for first, end in self.queries[0])


def one_sequence(S: int, window: int = 0) -> Meeting:
    """Makes the Meeting of a whole sequence on one rank, with a sliding window where it is not 0."""
    return Meeting([((0, S),)], [[((0, S),)]], (CAUSAL.near(window),))


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


def rows_of_keys(tiles: Tiles, keys: Ranges) -> Ranges:
    """Joins the rows of all keys that the tiles have, ascending."""
    held = sum(end - first for first, end in keys)
    return tuple(joined(sorted(tile.keys.indices(held)[:2] for tile in tiles)))


def within_ranges(rows: slice, ranges: Ranges) -> slice:
    """Finds rows, all of them in one of the ascending `ranges`, where these lie one behind the other."""
    before, whole = 0, sum(end - first for first, end in ranges)
    for first, end in ranges:
        start, stop = (first, end) if rows == EVERYTHING else (rows.start, rows.stop)
        if first <= start and stop <= end:
            found = slice(before + start - first, before + stop - first)
            return EVERYTHING if found == slice(0, whole) else found
        before += end - first
    raise ValueError(f"{rows} is in none of {ranges}")


# --- the tokens of a rank's rows ---

@dataclass(frozen=True)
class RowOrder:
    """Says which tokens of a sequence the ranks of `weights` embed together, and in which order.

    slices
        the tokens of each slice, by subsequences: a rank's rows are those of one subsequence after the other,
        in it those of one slice after the other. Each slice is dealt to the ranks by itself
    kind, size: how, and to how many ranks, that share the sequence: see rank_ranges()
    masks: who sees whom, of each sequence of a batch; one: of all
    ranks
        whose rows take turns: that of `tokens`, whose tokens the ranks of `weights` have in turns; with METP
        the ranks of `weights`, each with a column of its own
    """

    slices: Sequence[tuple[int, ...]]
    kind: str = "ring"
    size: int = 1
    ranks: Sequence[int] = (0,)
    masks: Sequence[Mask] = (CAUSAL,)

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

    def meetings(self, subsequence: int, first: int, end: int, fence: Fence | None = None,
                 place: Move | None = None) -> list[Meeting]:
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
                        [*before, *[rows(subsequence, first, a)] * (a > first), queries], self.masks, fence,
                        place)
                for a, b in pairwise([first, *(n for n in ends if first < n < end), end])]


UNLEARNED = -1  # the target of a token behind which nothing is learned


class Learned(NamedTuple):
    """Says which of a rank's n own rows of a subsequence the head computes: (m,) `rows`, whole chunks, the
    first `own` of which are learned; the others fill up, for all tp ranks have equally many. `targets` (m,
    tp): of these rows of all tp ranks, UNLEARNED where they fill up. `rest`: own rows not learned."""

    rows: torch.Tensor
    targets: torch.Tensor
    own: int
    rest: torch.Tensor

    def to(self, move: Move) -> "Learned":
        return Learned(move(self.rows), move(self.targets), self.own, move(self.rest))


class Packed(NamedTuple):
    """Says where the documents of a batch are. `positions` (B, T): of a rank's tokens, each in its piece of a
    document. `ends`: for each sequence those of its pieces; behind the last is padding. `learned`: by
    subsequences, what Model.on_device() finds."""

    positions: torch.Tensor
    ends: tuple[tuple[int, ...], ...]
    learned: Sequence[Learned] = ()


class Batch(NamedTuple):
    """Holds tokens and targets (B, T), int64; nothing is learned where a target is UNLEARNED. `packed`:
    with documents alone."""

    tokens: torch.Tensor
    targets: torch.Tensor
    packed: Packed | None = None


def row_order(cfg: Layout, S: int, mesh: Mesh) -> RowOrder:
    tokens, tp = mesh.tokens, mesh.weights
    first = tokens.rank - tp.rank
    ranks = range(first, first + tp.size) if cfg.metp else (tokens.rank,)
    return RowOrder(slice_lengths(cfg, S), cfg.context_parallel, tokens.size, ranks)
