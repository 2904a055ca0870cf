"""Attention of queries to pieces of keys that lie on this rank, tile by tile. Shapes as in
memo/kernels/attention.py.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from memo.kernels.attention import Gradients, Kernel, Result
from memo.layer.activations import Pieces
from memo.layer.masks import EVERYTHING, KINDS, Tile, Tiles
from memo.layer.tiles import Fence


def unmet(q: torch.Tensor) -> Result:
    """Makes out and lse of queries that have met no key yet: what is merged into them replaces them."""
    return torch.zeros_like(q, dtype=torch.float32), unmet_lse(q)


UNMET = -1e30  # a logsumexp: e^that is 0; with -inf the merge of two such rows would be nan


def unmet_lse(q: torch.Tensor) -> torch.Tensor:
    B, T, H, _ = q.shape
    return q.new_full((B, H, T), UNMET, dtype=torch.float32)


def marked(fence: Fence | None, varies: bool = True) -> Callable[[], object]:
    """Marks where tiles begin -> what to call before each; or, unless they vary, where they end."""
    return fence(varies) if fence else lambda: None


def each(tiles: Tiles, fence: Fence | None) -> Iterator[Tile]:
    """Iterates over tiles, marked. With documents those of a kind follow each other: each kind is planned."""
    for kind in range(KINDS):
        begin = marked(fence)
        for tile in tiles:
            if tile.kind == kind:
                begin()
                yield tile
    marked(fence, varies=False)


def rows_of_lse(lse: torch.Tensor, of: slice, queries: slice, fence: Fence | None) -> torch.Tensor:
    """Picks queries of the logsumexp, contiguous; with documents always new, so that it is planned."""
    rows = lse[of, :, queries]
    return rows.clone(memory_format=torch.contiguous_format) if fence else rows.contiguous()


def rows_of_dout(dout: torch.Tensor, of: slice, queries: slice, fence: Fence | None) -> torch.Tensor:
    """Picks queries of the output's gradient. The CPU's kernel copies what is not contiguous; with documents
    that is done here for all, so that it is planned."""
    rows = dout[of, queries]
    return rows.clone(memory_format=torch.contiguous_format) if fence and dout.is_cpu else rows


def merge_rows(kernel: Kernel, total: Result, rows: slice, part: Sequence[torch.Tensor],
               of: slice = EVERYTHING) -> None:
    """Merges the result of some rows of sequences `of` a batch into that of all, of which out is fp32."""
    assert kernel.merge
    kernel.merge(total[0][of, rows], total[1][of, :, rows], *part)


def rows_met(tiles: Sequence[Tiles]) -> slice:
    """Slices the queries from the first to the last that meet any key; nothing where none does."""
    met = [tile.queries for of_piece in tiles for tile in of_piece]
    if EVERYTHING in met:
        return EVERYTHING
    return slice(min(rows.start for rows in met), max(rows.stop for rows in met)) if met else slice(0)


def within(rows: slice, queries: slice) -> slice:
    """Finds queries among the `rows` that hold them."""
    if rows == queries:
        return EVERYTHING
    return queries if rows == EVERYTHING else slice(queries.start - rows.start, queries.stop - rows.start)


# With documents, `fence` of a Meeting, tiles differ from batch to batch. But requests for memory do not, but
# for those of a tile: sums have all rows, and before each tile the arena goes back to what is planned for
# one (fence). Of one piece a row is in one tile at most, for a rank's rows of a document are neighbours; but
# in a ring a window has edges.

def pieces_forward(kernel: Kernel, q: torch.Tensor, pieces: Pieces, tiles: Sequence[Tiles],
                   fence: Fence | None, part: bool = False, **where: torch.Tensor) -> Result:
    """Computes out and lse of rows_met(), with documents of all; out is fp32 where there are several tiles.
    `part`: more is merged with it. `tiles`: by pieces; `where`: out=, memory for it, of some kernels."""
    rows, total = EVERYTHING if fence else rows_met(tiles), None
    given = where if sum(map(len, tiles)) == 1 and not fence else {}
    merges = part or len(pieces) > 1
    if fence:
        total = unmet(q) if merges else (torch.zeros_like(q), unmet_lse(q))
    for (k, v), of_piece in zip(pieces, tiles, strict=True):
        for queries, keys, causal, of in each(of_piece, fence):
            found = kernel.forward(q[of, queries], k[of, keys], v[of, keys], causal, **given)
            if fence and total and not merges:
                total[0][of, queries], total[1][of, :, queries] = found
            elif total is None and (of, queries) == (EVERYTHING, rows):
                total = found
            else:
                total = (total[0].float(), total[1]) if total else unmet(q[:, rows])
                merge_rows(kernel, total, within(rows, queries), found, of)
            del found  # before the next tile's
    assert total is not None
    for out in where.values() if not given else ():
        out.copy_(total[0])
    return total


def pieces_backward(kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, tiles: Sequence[Tiles],
                    fence: Fence | None) -> Gradients:
    """Adds to `sums` -> [dq] of rows_met(), with documents of all, fp32 of several tiles; of one piece
    without sums [dq, dk, dv]."""
    rows, dq, totals = EVERYTHING if fence else rows_met(tiles), None, sums
    if fence:
        # padding meets nothing
        dq = torch.zeros_like(q, dtype=torch.float32 if sums else q.dtype)
        totals = totals or [tuple(torch.zeros_like(t) for t in pieces[0])]
    for number, ((k, v), of_piece) in enumerate(zip(pieces, tiles, strict=True)):
        for queries, keys, causal, of in each(of_piece, fence):
            dq_, *dkv = kernel.backward(
                rows_of_dout(dout, of, queries, fence), q[of, queries], k[of, keys], v[of, keys],
                out[of, queries], rows_of_lse(lse, of, queries, fence), causal)
            if fence and not sums and dq is not None:
                for g, part, at in zip((dq, *totals[0]), (dq_, *dkv), (queries, keys, keys), strict=True):
                    g[of, at] = part
                del dq_, dkv, part
                continue
            if not sums and len(of_piece) == 1:
                return [dq_, *dkv]
            totals = totals or [tuple(torch.zeros_like(t, dtype=torch.float32) for t in (k, v))]
            for total, g in zip(totals[number], dkv, strict=True):
                total[of, keys].add_(g)
            del g, dkv
            if dq is None and (of, queries) == (EVERYTHING, rows):
                dq = dq_
            else:
                dq = torch.zeros_like(q[:, rows], dtype=torch.float32) if dq is None else dq.float()
                dq[of, within(rows, queries)].add_(dq_)
            del dq_  # before the next tile's
    assert dq is not None
    return [dq] if sums else [dq, *totals[0]]


def merge_met(kernel: Kernel, fence: Fence | None, total: Result, rows: slice, part: Result,
              meets: bool) -> None:
    """Merges the result of some rows, if they meet any key; what is planned is the same where they do not."""
    begin = marked(fence)
    if meets:
        begin()
        merge_rows(kernel, total, rows, part)
    marked(fence, varies=False)
