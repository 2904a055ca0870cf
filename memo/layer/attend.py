"""Attention as a layer takes it: queries meet pieces of keys and values, tile by tile.

Keys and values lie in `pieces` [(k, v)], in ascending order, the queries' own last: one piece where a
sequence is whole, one for each of several subsequences. The queries meet each piece before their own in a
full call of a kernel, and their own in a causal one, in this order; partial results are merged through the
logsumexp in fp32. So nothing has the length of all pieces, and each mode sums in the same order. The backward
of each call takes the merged out and lse. Gradients of keys and values of several subsequences are added to
`sums` [(dk, dv)], fp32 of the pieces' shapes; a single piece has no sums.

attend() and attend_backward() go by groups of heads: temporary tensors stay small. Shapes as in
memo/kernels/attention.py.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from memo.config.layer import heads_at_once
from memo.kernels.attention import Gradients, Kernel, Result
from memo.layer.activations import Pieces
from memo.layer.tiles import DIAGONAL, EVERYTHING, FULL, Tile
from memo.parallel.visits import Visits

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]  # that of an ops.Ops
Meanwhile = Callable[[int, int], None]  # called between the blocks of a ring: see layer/cp.py
Pair = tuple[torch.Tensor, torch.Tensor]


def itself(k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k, v


def rounded(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k.copy_(dk), v.copy_(dv)


class Attention(NamedTuple):
    """Holds attention on the ranks that share the tokens:

    forward(q, pieces, scale) -> out (fp32 where it is merged), lse
    backward(dout, q, pieces, sums, out, lse, scale)
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


# --- group by group of heads ---

def slices_of_heads(rows: int, D: int, H: int, Hkv: int, multiple: int = 1) -> list[tuple[slice, slice]]:
    """Lists [(slice of H query heads, slice of the Hkv of keys that they read)]: see heads_at_once()."""
    sharing = H // Hkv
    heads = heads_at_once(rows, D, H, multiple, sharing)
    queries = [slice(i, min(i + heads, H)) for i in range(0, H, heads)]
    return [(h, slice(h.start // sharing, -(-h.stop // sharing))) for h in queries]


def groups_of(attention: Attention, q: torch.Tensor, pieces: Pieces) -> list[tuple[slice, slice]]:
    """Lists slices_of_heads() of what each rank is dealt; the longest of queries and keys bounds them."""
    B, T, H, D = q.shape
    longest = max(T * attention.ranks, *(k.shape[1] for k, _ in pieces))
    return slices_of_heads(B * longest, D, H // attention.ranks, pieces[0][0].shape[2], attention.heads)


def dealt(attention: Attention, x: torch.Tensor, h: slice) -> torch.Tensor:
    """Views those heads of each rank's that `h` names: (B, T, H, D) -> (B, T, ranks, h, D)."""
    return x.unflatten(2, (attention.ranks, -1))[:, :, :, h]


def of_heads(pairs: Pieces, kv: slice) -> Pieces:
    return [(a[:, :, kv], b[:, :, kv]) for a, b in pairs]


def start_keys(attention: Attention, H: int, k: torch.Tensor, v: torch.Tensor) -> Visits | None:
    """Sends off the keys and values that attend() of H query heads gets as `coming`; None: none are sent."""
    if attention.start is None:
        return None
    B, T, Hkv, D = k.shape
    _, kv = slices_of_heads(B * T, D, H, Hkv, attention.heads)[0]
    return attention.start(k[:, :, kv], v[:, :, kv])


def ends(groups: list[tuple[slice, slice]], h: slice, coming: Visits | None,
         meanwhile: Meanwhile | None) -> dict[str, object]:
    """Gives `coming` to the first group of heads and `meanwhile` to the last, where there are such."""
    given = dict(coming=coming if h is groups[0][0] else None,
                 meanwhile=meanwhile if h is groups[-1][0] else None)
    return {name: value for name, value in given.items() if value is not None}


def attend(attention: Attention, q: torch.Tensor, pieces: Pieces, scale: float, out: torch.Tensor,
           lse: torch.Tensor, coming: Visits | None = None, meanwhile: Meanwhile | None = None) -> None:
    """Writes the attention of q to the pieces into out (B, T, H, D) and lse (B, H, T). `coming`: see
    start_keys(); `meanwhile` is called between the blocks of a ring (layer/cp.py)."""
    groups, ranks = groups_of(attention, q, pieces), attention.ranks
    for h, kv in groups:
        place = dealt(attention, out, h)
        where = dict(out=place.flatten(2, 3)) if attention.takes_out else {}
        out_, lse[:, h.start * ranks:h.stop * ranks] = attention.forward(
            dealt(attention, q, h).flatten(2, 3), of_heads(pieces, kv), scale, **where,
            **ends(groups, h, coming, meanwhile))
        if not where:
            place.copy_(out_.view(place.shape))
        del out_  # before the next group's


def attend_backward(attention: Attention, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, scale: float, coming: Visits | None = None,
                    meanwhile: Meanwhile | None = None) -> Gradients:
    """Adds to `sums` -> [dq]; without sums [dq, dk, dv]. `coming`, `meanwhile`: as attend(). Several
    groups of heads write them over q, k, v, so that each gradient exists once. Groups that share a head of
    keys follow each other: without sums their gradients of it are summed in fp32."""
    groups, ranks = groups_of(attention, q, pieces), attention.ranks
    shared, next_keys = None, [kv for _, kv in groups[1:]] + [None]  # the keys that the next group reads
    for (h, kv), following in zip(groups, next_keys, strict=True):
        dout_, q_, out_ = (dealt(attention, x, h).flatten(2, 3) for x in (dout, q, out))
        dq, *dkv = attention.backward(dout_, q_, of_heads(pieces, kv), of_heads(sums, kv), out_,
                                      lse[:, h.start * ranks:h.stop * ranks].contiguous(), scale,
                                      **ends(groups, h, coming, meanwhile))
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

def rows_met(pieces: Pieces, last: Tile) -> slice:
    """Slices the queries that meet any of the pieces, where `last` says what meets of the last one."""
    return last.queries if len(pieces) == 1 else EVERYTHING


def pieces_forward(kernel: Kernel, merge: Merge, q: torch.Tensor, pieces: Pieces, scale: float,
                   last: Tile = DIAGONAL, **where: torch.Tensor) -> Result:
    """Computes out and lse of the rows_met(); out is fp32 where there are several pieces."""
    for number, (k, v) in enumerate(pieces, 1):
        queries, keys, causal = last if number == len(pieces) else FULL
        out_, lse_ = kernel.forward(q[:, queries], k[:, keys], v[:, keys], causal, scale, **where)
        if number == 1:
            out, lse = out_, lse_
        else:
            out = out.float()
            merge(out[:, queries], lse[..., queries], out_, lse_)
        del out_, lse_  # before the next piece's
    return out, lse


def pieces_backward(kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, scale: float, last: Tile = DIAGONAL) -> Gradients:
    """Adds to `sums` -> [dq] of rows_met(), fp32 of several pieces; without sums, of one, [dq, dk, dv]."""
    for number, (k, v) in enumerate(pieces, 1):
        queries, keys, causal = last if number == len(pieces) else FULL
        dq_, *dkv = kernel.backward(dout[:, queries], q[:, queries], k[:, keys], v[:, keys], out[:, queries],
                                    lse[..., queries].contiguous(), causal, scale)
        if not sums:
            return [dq_, *dkv]
        for total, g in zip(sums[number - 1], dkv, strict=True):
            total[:, keys].add_(g)
        del g, dkv
        if number == 1:
            dq = dq_
        else:
            dq = dq.float()
            dq[:, queries].add_(dq_)
        del dq_  # before the next piece's
    return [dq]


def in_slices(attention: Attention, slices: Sequence[int]) -> Attention:
    """Cuts queries of `attention` into slices of so many tokens, where stages compute for each other. A
    slice meets those before it in a full call, like pieces, and itself in a causal one."""
    if len(slices) < 2:
        return attention
    own, ranks = [slice(*ends) for ends in pairwise(accumulate(slices, initial=0))], attention.ranks
    both = [(r, slice(r.start * ranks, r.stop * ranks)) for r in own]  # of queries, of keys

    def met(pieces: Pieces, keys: slice) -> Pieces:
        parts = [slice(0, keys.start)] * (keys.start > 0) + [keys]
        return [*pieces[:-1], *((k[:, r], v[:, r]) for k, v in pieces[-1:] for r in parts)]

    def forward(q: torch.Tensor, pieces: Pieces, scale: float) -> Result:
        out, lse = zip(*(attention.forward(q[:, r], met(pieces, keys), scale) for r, keys in both),
                       strict=True)
        return torch.cat(out, 1), torch.cat(lse, 2)

    def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces, out: torch.Tensor,
                 lse: torch.Tensor, scale: float) -> Gradients:
        return [torch.cat([attention.backward(
            dout[:, r], q[:, r], met(pieces, keys), met(sums, keys), out[:, r], lse[:, :, r].contiguous(),
            scale)[0] for r, keys in both], 1)]

    def to_pieces(k: torch.Tensor, v: torch.Tensor) -> Pair:
        ks, vs = zip(*(attention.to_pieces(k[:, r], v[:, r]) for r in own), strict=True)
        return torch.cat(ks, 1), torch.cat(vs, 1)

    def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
        for r, keys in both:
            attention.from_pieces(dk[:, keys], dv[:, keys], k[:, r], v[:, r])
        return k, v
    return attention._replace(forward=forward, backward=backward, to_pieces=to_pieces,
                              from_pieces=from_pieces)
