"""Attention as a layer takes it: queries meet pieces of keys and values, tile by tile.

Keys and values lie in `pieces` [(k, v)], in ascending order, the queries' own last: one piece where a
sequence is whole, one for each of several subsequences. A Meeting (memo/layer/tiles.py) says which tokens
these are, and so in which tiles the queries meet each piece: under the causal mask one full call of a kernel
for each piece before their own, and a causal one. They follow each other in this order; partial results are
merged through the logsumexp in fp32. So nothing has the length of all pieces, and each mode sums in the same
order. The backward of each call takes the merged out and lse. Gradients of keys and values of several
subsequences are added to `sums` [(dk, dv)], fp32 of the pieces' shapes; a single piece has no sums.

attend() and attend_backward() go by groups of heads: temporary tensors stay small. Shapes as in
memo/kernels/attention.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from memo.config.layer import heads_at_once
from memo.kernels.attention import Gradients, Kernel, Result
from memo.layer.activations import Pieces
from memo.layer.tiles import EVERYTHING, Meeting, Tiles
from memo.parallel.visits import Visits

Meanwhile = Callable[[int, int], None]  # called between the blocks of a ring: see layer/cp.py
Ring = tuple[Visits, Meanwhile]  # what start_keys() gives, and that
Pair = tuple[torch.Tensor, torch.Tensor]


def itself(k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k, v


def rounded(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k.copy_(dk), v.copy_(dv)


class Attention(NamedTuple):
    """Holds attention on the ranks that share the tokens:

    forward(q, pieces, met) -> out (fp32 where it is merged), lse. `met`: a Meeting
    backward(dout, q, pieces, sums, out, lse, met)
        adds to `sums` -> [dq] (fp32 where it is a sum); without sums, of one piece, [dq, dk, dv]
    to_pieces(k, v): the rank's own (B, T, Hkv, D) -> as pieces of several subsequences hold them
    from_pieces(dk, dv, k, v)
        -> k, v, over which it writes the gradients of the rank's own: any memory of their shape and dtype;
        with norms per head (HeadNorms) `k` comes as to_pieces got it
    start(k, v): sends these off before forward or backward, which get the other ranks' as `coming`

    `ranks`: among so many the heads are dealt in the pieces; `heads`: it takes multiples of so many. `name`,
    `label`, `takes_out`: the kernel's.
    """

    name: str
    label: str
    forward: Callable[..., Result]
    backward: Callable[..., Gradients]
    to_pieces: Callable[[torch.Tensor, torch.Tensor], Pair] = itself
    from_pieces: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair] = rounded
    start: Callable[[torch.Tensor, torch.Tensor], Visits] | None = None
    ranks: int = 1
    heads: int = 1
    takes_out: bool = False

    def among(self, met: Meeting) -> "Attention":
        """Fixes which tokens meet."""
        return self._replace(forward=partial(self.forward, met=met), backward=partial(self.backward, met=met))


# --- group by group of heads ---

def groups_of(attention: Attention, shape: Sequence[int], pieces: Pieces) -> list[tuple[slice, slice]]:
    """Lists [(slice of the query heads that each rank is dealt, slice of the heads of keys that they read)]:
    see heads_at_once(). `shape`: (B, T, H, D) of the queries; the longest of them and the keys bounds all."""
    (B, T, H, D), ranks = shape, attention.ranks
    longest, sharing = max(T * ranks, *(k.shape[1] for k, _ in pieces)), H // ranks // pieces[0][0].shape[2]
    n = heads_at_once(B * longest, D, H // ranks, attention.heads, sharing)
    queries = [slice(i, min(i + n, H // ranks)) for i in range(0, H // ranks, n)]
    return [(h, slice(h.start // sharing, -(-h.stop // sharing))) for h in queries]


def dealt(attention: Attention, x: torch.Tensor, h: slice) -> torch.Tensor:
    """Views those heads of each rank's that `h` names: (B, T, H, D) -> (B, T, ranks, h, D)."""
    return x.unflatten(2, (attention.ranks, -1))[:, :, :, h]


def of_heads(pairs: Pieces, kv: slice) -> Pieces:
    return [(a[:, :, kv], b[:, :, kv]) for a, b in pairs]


def start_keys(attention: Attention, H: int, k: torch.Tensor, v: torch.Tensor) -> Visits | None:
    """Sends off the first keys and values that attend() of H query heads meets; None: none are sent."""
    if attention.start is None:
        return None
    _, kv = groups_of(attention, (*k.shape[:2], H, k.shape[3]), [(k, v)])[0]
    return attention.start(k[:, :, kv], v[:, :, kv])


def nothing(done: int, left: int) -> None:
    pass


def ends(groups: list[tuple[slice, slice]], h: slice, ring: Ring | None) -> dict[str, object]:
    """Gives the keys under way to the first group of heads, what to do meanwhile to the last."""
    if ring is None:
        return {}
    return dict(coming=ring[0] if h is groups[0][0] else None,
                meanwhile=ring[1] if h is groups[-1][0] else nothing)


def attend(attention: Attention, q: torch.Tensor, pieces: Pieces, out: torch.Tensor, lse: torch.Tensor,
           ring: Ring | None = None) -> None:
    """Writes the attention of q to the pieces into out (B, T, H, D) and lse (B, H, T)."""
    groups, ranks = groups_of(attention, q.shape, pieces), attention.ranks
    for h, kv in groups:
        place = dealt(attention, out, h)
        where = dict(out=place.flatten(2, 3)) if attention.takes_out else {}
        out_, lse[:, h.start * ranks:h.stop * ranks] = attention.forward(
            dealt(attention, q, h).flatten(2, 3), of_heads(pieces, kv), **where, **ends(groups, h, ring))
        if not where:
            place.copy_(out_.view(place.shape))
        del out_  # before the next group's


def attend_backward(attention: Attention, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, ring: Ring | None = None) -> Gradients:
    """Adds to `sums` -> [dq]; without sums [dq, dk, dv]. Several groups of heads write them over q, k, v, so
    that each gradient exists once. Groups that share a head of keys follow each other: without sums their
    gradients of it are summed in fp32."""
    groups, ranks = groups_of(attention, q.shape, pieces), attention.ranks
    shared, next_keys = None, [kv for _, kv in groups[1:]] + [None]  # the keys that the next group reads
    for (h, kv), following in zip(groups, next_keys, strict=True):
        dout_, q_, out_ = (dealt(attention, x, h).flatten(2, 3) for x in (dout, q, out))
        dq, *dkv = attention.backward(dout_, q_, of_heads(pieces, kv), of_heads(sums, kv), out_,
                                      lse[:, h.start * ranks:h.stop * ranks].contiguous(),
                                      **ends(groups, h, ring))
        del dout_, q_, out_
        if len(groups) == 1:
            return [dq.to(q.dtype), *dkv]
        place = dealt(attention, q, h)
        place.copy_(dq.view(place.shape))
        del dq  # before the next group's
        if shared is not None:
            dkv = [s.add_(g) for s, g in zip(shared, dkv, strict=True)]
        shared = [g.float() for g in dkv] if dkv and kv == following else None
        if dkv and shared is None:
            rounded(dkv[0], dkv[1], *of_heads(pieces, kv)[0])
        del dkv
    return [q] if sums else [q, *pieces[0]]


# --- the pieces that lie on this rank ---

def unmet(q: torch.Tensor) -> Result:
    """Makes out and lse of queries that have met no key yet: what is merged into them replaces them."""
    B, T, H, _ = q.shape
    # e^lse is 0; with -inf the merge of two such rows would be nan
    return torch.zeros_like(q, dtype=torch.float32), q.new_full((B, H, T), -1e30, dtype=torch.float32)


def merge_rows(kernel: Kernel, total: Result, rows: slice, part: Sequence[torch.Tensor]) -> None:
    """Merges the result of some rows into that of all, of which out is fp32."""
    assert kernel.merge
    kernel.merge(total[0][:, rows], total[1][..., rows], *part)


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


def pieces_forward(kernel: Kernel, q: torch.Tensor, pieces: Pieces, tiles: Sequence[Tiles],
                   **where: torch.Tensor) -> Result:
    """Computes out and lse of rows_met(); out is fp32 where there are several tiles. `tiles`: by pieces;
    `where`: out=, memory for the result, of a kernel that takes it."""
    rows, total = rows_met(tiles), None
    given = where if sum(map(len, tiles)) == 1 else {}
    for (k, v), of_piece in zip(pieces, tiles, strict=True):
        for queries, keys, causal in of_piece:
            part = kernel.forward(q[:, queries], k[:, keys], v[:, keys], causal, **given)
            if total is None and queries == rows:
                total = part
            else:
                total = (total[0].float(), total[1]) if total else unmet(q[:, rows])
                merge_rows(kernel, total, within(rows, queries), part)
            del part  # before the next tile's
    assert total is not None
    for out in where.values() if not given else ():
        out.copy_(total[0])
    return total


def pieces_backward(kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, tiles: Sequence[Tiles]) -> Gradients:
    """Adds to `sums` -> [dq] of rows_met(), fp32 of several tiles; of one piece without sums [dq, dk, dv]."""
    rows, dq, totals = rows_met(tiles), None, sums
    for number, ((k, v), of_piece) in enumerate(zip(pieces, tiles, strict=True)):
        for queries, keys, causal in of_piece:
            dq_, *dkv = kernel.backward(dout[:, queries], q[:, queries], k[:, keys], v[:, keys],
                                        out[:, queries], lse[..., queries].contiguous(), causal)
            if not sums and len(of_piece) == 1:
                return [dq_, *dkv]
            totals = totals or [tuple(torch.zeros_like(t, dtype=torch.float32) for t in (k, v))]
            for total, g in zip(totals[number], dkv, strict=True):
                total[:, keys].add_(g)
            del g, dkv
            if dq is None and queries == rows:
                dq = dq_
            else:
                dq = torch.zeros_like(q[:, rows], dtype=torch.float32) if dq is None else dq.float()
                dq[:, within(rows, queries)].add_(dq_)
            del dq_  # before the next tile's
    assert dq is not None
    return [dq] if sums else [dq, *totals[0]]


def in_slices(attention: Attention, meetings: Sequence[Meeting]) -> Attention:
    """Cuts queries of `attention` into slices, where stages compute for each other: a Meeting for each. A
    slice meets those before it in full calls, like pieces, and itself in a causal one."""
    assert meetings  # reserve() gives each unit its own
    if len(meetings) == 1:
        return attention.among(*meetings)
    ranks = attention.ranks
    keys_ = [slice(*ends) for ends in pairwise(accumulate((m.rows for m in meetings), initial=0))]
    parts = [(slice(keys.start // ranks, keys.stop // ranks), keys, attention.among(meeting))
             for keys, meeting in zip(keys_, meetings, strict=True)]

    def met(pieces: Pieces, keys: slice) -> Pieces:
        rows = [slice(0, keys.start)] * (keys.start > 0) + [keys]
        return [*pieces[:-1], *((k[:, r], v[:, r]) for k, v in pieces[-1:] for r in rows)]

    def forward(q: torch.Tensor, pieces: Pieces) -> Result:
        out, lse = zip(*(part.forward(q[:, r], met(pieces, keys)) for r, keys, part in parts), strict=True)
        return torch.cat(out, 1), torch.cat(lse, 2)

    def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces, out: torch.Tensor,
                 lse: torch.Tensor) -> Gradients:
        return [torch.cat([part.backward(dout[:, r], q[:, r], met(pieces, keys), met(sums, keys), out[:, r],
                                         lse[:, :, r].contiguous())[0] for r, keys, part in parts], 1)]

    def to_pieces(k: torch.Tensor, v: torch.Tensor) -> Pair:
        ks, vs = zip(*(attention.to_pieces(k[:, r], v[:, r]) for r, *_ in parts), strict=True)
        return torch.cat(ks, 1), torch.cat(vs, 1)

    def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
        for r, keys, _ in parts:
            attention.from_pieces(dk[:, keys], dv[:, keys], k[:, r], v[:, r])
        return k, v
    return attention._replace(forward=forward, backward=backward, to_pieces=to_pieces,
                              from_pieces=from_pieces)
