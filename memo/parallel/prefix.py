"""Attention over a prefix: queries of one subsequence, keys and values of all subsequences up to it.

Keys and values lie in `pieces` [(k, v)], one a subsequence, in ascending order; the queries' own is the last.
The queries meet each piece before it in a full call, and their own in a causal one, in this order; partial
results are merged through the logsumexp in fp32. So nothing has the prefix's size, and each mode sums in the
same order. The backward of each call takes the merged out and lse; gradients of keys and values are added to
`sums` [(dk, dv)], fp32 of the pieces' shapes.

Ring: queries go round, and keys, values and their gradients stay at home: a unit's messages are as long as
its queries, however long the prefix is. Tokens lie in a zigzag within each subsequence, so that of a piece
before every query sees every key. A rank's queries travel on at once; their sum follows a rank behind, and
adds on each rank what that rank has computed meanwhile. It starts at the next rank, and comes home while the
own queries meet their own piece; while the queries leave, they meet the pieces before. So all messages have
something to hide behind, and the sum makes size - 1 hops. Ulysses: pieces are exchanged once, when they are
made; queries are exchanged for each call. Shapes as in memo/attention.py: (B, T, H, D), lse (B, H, T) fp32.
Where stages compute for each other, a subsequence may have several slices, with a zigzag each: in_slices().
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from memo.activations import Pieces
from memo.attention import Attention, Merge, Result, slices_of_heads
from memo.parallel.axis import Axis, Hop
from memo.parallel.cp import meeting_parts, summed, to_heads, to_tokens
from memo.parallel.visits import Visits

PrefixAttention = namedtuple("PrefixAttention", "forward backward to_pieces from_pieces ranks")
PrefixAttention.__doc__ = """Attention over a prefix on the ranks that share the tokens:

    forward(q, pieces, scale)
        (B, T, H, D) -> out (fp32 where it is merged), lse
    backward(dout, q, pieces, sums, out, lse, scale)
        -> dq (fp32 where it is a sum); adds to `sums`
    to_pieces(k, v)
        the rank's own (B, T, Hkv, D) -> as pieces hold them; Ulysses: (B, S, Hkv/cp, D), heads dealt as
        cp.to_heads does
    from_pieces(dk, dv, k, v)
        -> k, v, over which it writes the gradients of the rank's own: any memory of their shape and dtype;
        with norms per head (layer_attention.py) `k` comes as to_pieces got it
    ranks
        among so many ranks the heads are dealt in the pieces
"""

Meeting = tuple[slice, slice, bool]  # queries, keys, causal: what meets of a piece

EVERYTHING = slice(None)
FULL, DIAGONAL = (EVERYTHING, EVERYTHING, False), (EVERYTHING, EVERYTHING, True)


# --- group by group of heads ---

def prefix_groups(prefix: PrefixAttention, q: torch.Tensor, pieces: Pieces) -> list[tuple[slice, slice]]:
    """attention.slices_of_heads, of the heads that each rank is dealt; the longest of queries and keys bounds
    them."""
    B, T, H, D = q.shape
    longest = max(T * prefix.ranks, *(k.shape[1] for k, _ in pieces))
    return slices_of_heads(B * longest, D, H // prefix.ranks, pieces[0][0].shape[2])


def dealt(prefix: PrefixAttention, x: torch.Tensor, h: slice) -> torch.Tensor:
    """Of the heads that each rank is dealt those of `h`, a view: (B, T, H, D) -> (B, T, ranks, h, D)."""
    return x.unflatten(2, (prefix.ranks, -1))[:, :, :, h]


def of_heads(pairs: Pieces, kv: slice) -> Pieces:
    return [(a[:, :, kv], b[:, :, kv]) for a, b in pairs]


def attend_prefix(prefix: PrefixAttention, q: torch.Tensor, pieces: Pieces, scale: float, out: torch.Tensor,
                  lse: torch.Tensor) -> None:
    """Writes prefix.forward into out (B, T, H, D) and lse (B, H, T)."""
    for h, kv in prefix_groups(prefix, q, pieces):
        got, rows = dealt(prefix, out, h), slice(h.start * prefix.ranks, h.stop * prefix.ranks)
        out_, lse[:, rows] = prefix.forward(dealt(prefix, q, h).flatten(2, 3), of_heads(pieces, kv), scale)
        got.copy_(out_.view(got.shape))
        del out_  # before the next group's


def attend_prefix_backward(prefix: PrefixAttention, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                           sums: Pieces, out: torch.Tensor, lse: torch.Tensor, scale: float) -> torch.Tensor:
    """-> dq; adds to `sums`. Several groups of heads write it over q: each gradient exists once."""
    groups = prefix_groups(prefix, q, pieces)
    for h, kv in groups:
        dout_, q_, out_ = (dealt(prefix, x, h).flatten(2, 3) for x in (dout, q, out))
        lse_ = lse[:, h.start * prefix.ranks:h.stop * prefix.ranks].contiguous()
        dq = prefix.backward(dout_, q_, of_heads(pieces, kv), of_heads(sums, kv), out_, lse_, scale)
        del dout_, q_, out_
        if len(groups) == 1:
            return dq.to(q.dtype)
        place = dealt(prefix, q, h)
        place.copy_(dq.view(place.shape))
        del dq  # before the next group's
    return q


# --- the pieces that lie on this rank ---

def rows_met(pieces: Pieces, last: Meeting) -> slice:
    """The queries that meet any of the pieces, where `last` says what meets of the last one."""
    return last[0] if len(pieces) == 1 else EVERYTHING


def pieces_forward(attention: Attention, merge: Merge, q: torch.Tensor, pieces: Pieces, scale: float,
                   last: Meeting = DIAGONAL) -> Result:
    """Of the rows_met: out, fp32 where there are several pieces, and lse."""
    for number, (k, v) in enumerate(pieces, 1):
        queries, keys, causal = last if number == len(pieces) else FULL
        out_, lse_ = attention.forward(q[:, queries], k[:, keys], v[:, keys], causal, scale)
        if number == 1:
            out, lse = out_, lse_
        else:
            out = out.float()
            merge(out[:, queries], lse[..., queries], out_, lse_)
        del out_, lse_  # before the next piece's
    return out, lse


def pieces_backward(attention: Attention, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, scale: float,
                    last: Meeting = DIAGONAL) -> torch.Tensor:
    """dq of the rows_met, fp32 where there are several pieces; adds to `sums`."""
    for number, ((k, v), totals) in enumerate(zip(pieces, sums, strict=True), 1):
        queries, keys, causal = last if number == len(pieces) else FULL
        dq_, *dkv = attention.backward(dout[:, queries], q[:, queries], k[:, keys], v[:, keys],
                                       out[:, queries], lse[..., queries].contiguous(), causal, scale)
        for total, g in zip(totals, dkv, strict=True):
            total[:, keys].add_(g)
        del g, dkv
        if number == 1:
            dq = dq_
        else:
            dq = dq.float()
            dq[:, queries].add_(dq_)
        del dq_  # before the next piece's
    return dq


def in_slices(prefix: PrefixAttention, slices: Sequence[int]) -> PrefixAttention:
    """`prefix` of queries of so many tokens in each of several slices: a PrefixAttention of the same shape. A
    slice meets those before it in a full call, like pieces, and itself in a causal one."""
    if len(slices) < 2:
        return prefix
    mine = [slice(first, end) for first, end in pairwise(accumulate(slices, initial=0))]
    both = [(r, slice(r.start * prefix.ranks, r.stop * prefix.ranks)) for r in mine]  # of queries, of keys

    def met(pieces: Pieces, keys: slice) -> Pieces:
        parts = [slice(0, keys.start)] * (keys.start > 0) + [keys]
        return [*pieces[:-1], *((k[:, r], v[:, r]) for k, v in pieces[-1:] for r in parts)]

    def forward(q: torch.Tensor, pieces: Pieces, scale: float) -> Result:
        out, lse = zip(*(prefix.forward(q[:, r], met(pieces, keys), scale) for r, keys in both), strict=True)
        return torch.cat(out, 1), torch.cat(lse, 2)

    def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces, out: torch.Tensor,
                 lse: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.cat([prefix.backward(dout[:, r], q[:, r], met(pieces, keys), met(sums, keys), out[:, r],
                                          lse[:, :, r].contiguous(), scale) for r, keys in both], 1)

    def to_pieces(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = [prefix.to_pieces(k[:, r], v[:, r]) for r in mine]
        return torch.cat([k for k, _ in found], 1), torch.cat([v for _, v in found], 1)

    def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor,
                    v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for r, keys in both:
            prefix.from_pieces(dk[:, keys], dv[:, keys], k[:, r], v[:, r])
        return k, v
    return PrefixAttention(forward, backward, to_pieces, from_pieces, prefix.ranks)


# --- ring: queries pass, keys and values stay ---

def visitors(axis: Axis, *own: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(rank, what it gave as `own`) of the other ranks, one after the other. `own` leaves at once; the next
    ones come while the caller computes."""
    visits = Visits(axis, *(t.contiguous() for t in own))
    return (((axis.rank - step) % axis.size, here) for step, here in enumerate(visits, 1))


def passing_forward(attention: Attention, axis: Axis, merge: Merge, q: torch.Tensor, pieces: Pieces,
                    scale: float) -> Result:
    attend, (B, T, H, _) = partial(pieces_forward, attention, merge), q.shape
    coming = visitors(axis, q)
    before = attend(q, pieces[:-1], scale, FULL) if len(pieces) > 1 else None
    home: Hop | None = None
    for rank, (q_,) in coming:
        last = meeting_parts(axis.rank, rank, T)
        rows, found = rows_met(pieces, last), attend(q_, pieces, scale, last)
        if home is None:  # of what no query has met yet, e^lse is 0
            out = torch.zeros_like(q_, dtype=torch.float32)
            lse = out.new_full((B, H, T), -torch.inf)
        else:
            out, lse = home.wait()
        merge(out[:, rows], lse[..., rows], *found)
        del found  # before the next visitor's
        home = axis.shift(out, lse)
    del q_, out, lse
    out, lse = attend(q, pieces[-1:], scale)
    out = out.float()
    if before is not None:
        merge(out, lse, *before)
    assert home is not None  # there are other ranks
    merge(out, lse, *home.wait())
    return out, lse


def passing_backward(attention: Attention, axis: Axis, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                     sums: Pieces, out: torch.Tensor, lse: torch.Tensor, scale: float) -> torch.Tensor:
    attend = partial(pieces_backward, attention)
    coming = visitors(axis, dout, q, out, lse)
    before = attend(dout, q, pieces[:-1], sums[:-1], out, lse, scale, FULL) if len(pieces) > 1 else None
    home: Hop | None = None
    for rank, (dout_, q_, out_, lse_) in coming:
        last = meeting_parts(axis.rank, rank, q.shape[1])
        found = attend(dout_, q_, pieces, sums, out_, lse_, scale, last)
        dq = torch.zeros_like(q_, dtype=torch.float32) if home is None else home.wait()[0]
        dq[:, rows_met(pieces, last)].add_(found)
        del found  # before the next visitor's
        home = axis.shift(dq)
    del dout_, q_, out_, lse_, dq
    dq = attend(dout, q, pieces[-1:], sums[-1:], out, lse, scale).float()
    if before is not None:
        dq.add_(before)
    assert home is not None
    return dq.add_(*home.wait())


# --- Ulysses: pieces of all tokens, of a rank's heads ---

def dealt_forward(attention: Attention, axis: Axis, merge: Merge, q: torch.Tensor, pieces: Pieces,
                  scale: float) -> Result:
    B, T, H, _ = q.shape
    out, lse = pieces_forward(attention, merge, to_heads(axis, q), pieces, scale)
    return to_tokens(axis, out.to(q.dtype)), lse.reshape(B, H, T)  # of the rank's heads, for the backward


def dealt_backward(attention: Attention, axis: Axis, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                   sums: Pieces, out: torch.Tensor, lse: torch.Tensor, scale: float) -> torch.Tensor:
    B, T, H, _ = q.shape
    dout_, q_, out_ = (to_heads(axis, t) for t in (dout, q, out))
    lse_ = lse.view(B, H // axis.size, axis.size * T)
    dq = pieces_backward(attention, dout_, q_, pieces, sums, out_, lse_, scale)
    return to_tokens(axis, dq.to(q.dtype))


def exchanged_back(axis: Axis, dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor,
                   v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for g, t in ((dk, k), (dv, v)):
        t.copy_(summed(to_tokens(axis, g.to(t.dtype)), t.shape[2]))
    return k, v


def rounded(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor,
            v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k.copy_(dk), v.copy_(dv)


def over_prefix(attention: Attention, axis: Axis, kind: str, merge: Merge) -> PrefixAttention:
    """`attention`, of one rank, over a prefix whose tokens all ranks of `axis` share. `kind`: ring or
    ulysses; `merge`: that of an ops.Ops."""
    here = (lambda k, v: (k, v)), rounded, 1  # pieces hold what the rank makes
    if axis.size == 1:
        return PrefixAttention(partial(pieces_forward, attention, merge), partial(pieces_backward, attention),
                               *here)
    if kind == "ring":
        return PrefixAttention(partial(passing_forward, attention, axis, merge),
                               partial(passing_backward, attention, axis), *here)
    return PrefixAttention(partial(dealt_forward, attention, axis, merge),
                           partial(dealt_backward, attention, axis),
                           lambda k, v: (to_heads(axis, k), to_heads(axis, v)),
                           partial(exchanged_back, axis), axis.size)
