"""A ring of ranks where layers have a sliding window: of keys and values only the halo travels, the rows that
queries of another rank see, straight to that rank, however long the pieces are. In the backward their
gradients, in fp32, go straight home, where they are added before the rank's own block. Shapes as in
memo/kernels/attention.py.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import NamedTuple, TypeVar

import torch

from memo.kernels.attention import Gradients, Kernel, Result
from memo.layer.activations import Pieces
from memo.layer.attend import Meanwhile, nothing
from memo.layer.masks import EVERYTHING, Ranges, Tiles
from memo.layer.pieces import merge_met, pieces_backward, pieces_forward, rows_met
from memo.layer.tiles import Meeting
from memo.parallel.visits import Ahead, Coming
from memo.system.axis import Axis, Hop

Made = TypeVar("Made")


class Route(NamedTuple):
    """Says what a rank sends to the rank `by` behind it, and what comes from the one as far before it: of
    each piece that has any the rows of keys, {number of the piece: ranges}; and the tiles in which those that
    come meet this rank's queries. Of two ranks with 16 tokens and a window of 3, rank 0 has tokens 0 to 3
    and 12 to 15, and sends rows 2 and 3; from rank 1 rows 6 and 7 come, tokens 10 and 11."""

    by: int | None  # None: in this batch no documents of any two ranks so far apart meet
    leaving: dict[int, Ranges]
    coming: dict[int, Ranges]
    tiles: list[Tiles]


def routes(axis: Axis, met: Meeting) -> list[Route]:
    """Lists the routes of a rank, one for each distance that the window reaches."""
    found = list[Route]()
    for by in met.reach:
        to, source = ((axis.rank + d) % axis.size for d in (by, -by))
        leaving, coming = ({i: rows for i, rows in enumerate(met.halo(*pair)) if rows}
                           for pair in ((to, axis.rank), (axis.rank, source)))
        tiles = met.tiles(axis.rank, source)
        found.append(Route(by if by in met.distances else None, leaving, coming, [tiles[i] for i in coming]))
    return found


def room(pieces: Pieces, rows: dict[int, Ranges], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Makes k and v, uninitialised, of `rows` of each piece."""
    return [t.new_empty(t.shape[0], sum(end - first for first, end in of), *t.shape[2:], dtype=dtype)
            for i, of in rows.items() for t in pieces[i]]


def pairs(tensors: Sequence[torch.Tensor]) -> Pieces:
    return [*zip(tensors[::2], tensors[1::2], strict=True)]


def sent(axis: Axis, met: Meeting, pieces: Pieces) -> Iterator[Hop]:
    """Sends each rank its halo: a Hop for each of the routes()."""
    for route in routes(axis, met):
        mine = [torch.cat([t[:, first:end] for first, end in rows], 1)
                for i, rows in route.leaving.items() for t in pieces[i]]
        yield axis.shift(*mine, by=route.by, into=room(pieces, route.coming))


def halo_start(axis: Axis, ahead: int, k: torch.Tensor, v: torch.Tensor, met: Meeting) -> Coming:
    return Ahead(sent(axis, met, [(k, v)]), ahead)


def halo_forward(kernel: Kernel, axis: Axis, ahead: int, q: torch.Tensor, pieces: Pieces, met: Meeting,
                 coming: Coming | None = None, meanwhile: Meanwhile = nothing) -> Result:
    """Computes out and lse: of the own pieces first, while the first halo travels."""
    coming = coming or Ahead(sent(axis, met, pieces), ahead)
    attend = partial(pieces_forward, kernel, fence=met.fence, part=True)
    out, lse = attend(q, pieces, met.tiles(axis.rank, axis.rank))
    out = out.float()
    for done, route in enumerate(ways := routes(axis, met), 1):
        meanwhile(done, len(ways) - done + 1)
        theirs, meets = pairs(next(coming)), any(route.tiles)
        part = attend(q, theirs, route.tiles) if theirs and (meets or met.fence) else None
        if part:
            rows = EVERYTHING if met.fence else rows_met(route.tiles)
            merge_met(kernel, met.fence, (out, lse), rows, part, meets)
        del theirs, part  # before the next halo's
    return out.to(q.dtype), lse


def halo_backward(kernel: Kernel, axis: Axis, ahead: int, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                  sums: Pieces, out: torch.Tensor, lse: torch.Tensor, met: Meeting,
                  coming: Coming | None = None, meanwhile: Meanwhile = nothing) -> Gradients:
    """Adds to `sums` -> [dq]; without sums, of one piece, [dq, dk, dv]."""
    coming = coming or Ahead(sent(axis, met, pieces), ahead)
    attend = partial(pieces_backward, kernel, dout, q, out=out, lse=lse, fence=met.fence)
    totals = sums or [tuple(torch.zeros_like(t, dtype=torch.float32) for t in pair) for pair in pieces]
    dq, home = torch.zeros_like(q, dtype=torch.float32), list[tuple[Route, Hop]]()

    def add_home() -> None:  # what other ranks have added to this one's keys and values
        while home:
            route, hop = home.pop()
            for (i, rows), pair in zip(route.leaving.items(), pairs(hop.wait()), strict=True):
                for total, g in zip(totals[i], pair, strict=True):
                    at = 0
                    for first, end in rows if route.by else ():
                        total[:, first:end] += g[:, at:at + end - first]
                        at += end - first
    for done, route in enumerate(ways := routes(axis, met), 1):
        theirs, meets = pairs(next(coming)), any(route.tiles)
        parts = [tuple(torch.zeros_like(t, dtype=torch.float32) for t in pair) for pair in theirs]
        if theirs and (meets or met.fence):
            [part] = attend(pieces=theirs, sums=parts, tiles=route.tiles)
            if meets:
                dq[:, EVERYTHING if met.fence else rows_met(route.tiles)].add_(part)
            del part  # before the next halo's
        del theirs
        add_home()
        home.append((route, axis.shift(*chain(*parts), by=route.by and axis.size - route.by,
                                       into=room(pieces, route.leaving, torch.float32))))
        meanwhile(done, len(ways) - done + 1)
    if not ways:  # a token sees itself alone; what is sent meanwhile is sent all the same
        meanwhile(1, 0)
    [part] = attend(pieces=pieces, sums=totals, tiles=met.tiles(axis.rank, axis.rank))
    dq.add_(part)
    add_home()
    return [dq] if sums else [g.to(q.dtype) for g in (dq, *totals[0])]


def near_or_whole(halo: Callable[..., Made], whole: Callable[..., Made]) -> Callable[..., Made]:
    """Makes one of two functions of a Meeting: of a layer with a sliding window, and without."""
    return lambda *args, met, **more: (halo if met.window < inf else whole)(*args, met=met, **more)
