"""Context parallelism: each of cp ranks holds T = S/cp tokens of every sequence, and attention goes round.

Ring: in a zigzag (memo/layer/tiles.py) every rank has the same causal work. Of a whole sequence keys and
values go round: while a rank attends to one block of them the next one travels; partial results are merged
through the logsumexp, in fp32. In the backward their gradients travel with them; their own rank adds last.

Of several subsequences, each in a zigzag, queries go round, and keys, values and their gradients stay at
home: a unit's messages are as long as its queries, however long the pieces before are. A rank's queries
travel on at once; their sum follows a rank behind, in size - 1 hops, and adds what each rank has computed
meanwhile. While the queries leave, the own ones meet the pieces before; while the sum comes home, their own
piece: so all messages have something to hide behind.

Ulysses: an all-to-all turns T tokens of all heads into S tokens of H/cp heads, and back; its logsumexp stays
(B, H/cp, S). Of keys and values only their own heads travel: of a whole sequence once for each group of query
heads that reads them (attend.py), of several subsequences once, when the pieces are made. Where cp does not
divide them, each goes to several ranks. Shapes as in memo/kernels/attention.py. The host waits for no GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd

import torch

from memo.kernels.attention import Gradients, Kernel, Result, for_any_mask
from memo.layer.activations import Pieces
from memo.layer.attend import Attention, Meanwhile, Pair, nothing
from memo.layer.halo import halo_backward, halo_forward, halo_start, near_or_whole
from memo.layer.masks import EVERYTHING
from memo.layer.pieces import (
    UNMET,
    each,
    merge_met,
    merge_rows,
    pieces_backward,
    pieces_forward,
    rows_met,
    rows_of_dout,
    rows_of_lse,
    unmet,
)
from memo.layer.tiles import Meeting
from memo.parallel.visits import Coming, Visits, jump
from memo.system.axis import Axis, Hop

# --- ring: keys and values of a whole sequence go round ---

# `coming`: ring_start(k, v). meanwhile(blocks done, blocks left) is called before each block but the first:
# what it sends hides behind those left, and gradients on their way behind what it computes.

def ring_start(axis: Axis, ahead: int, k: torch.Tensor, v: torch.Tensor, met: Meeting) -> Coming:
    return Visits(axis, k.contiguous(), v.contiguous(), ahead=ahead, needed=met.distances)


def ring_forward(kernel: Kernel, axis: Axis, ahead: int, q: torch.Tensor, pieces: Pieces, met: Meeting,
                 coming: Coming | None = None, meanwhile: Meanwhile = nothing) -> Result:
    [kv], total = [[t.contiguous() for t in pair] for pair in pieces], unmet(q) if met.fence else None
    coming = coming or ring_start(axis, ahead, kv[0], kv[1], met)
    for step in range(axis.size):
        if step > 0:
            meanwhile(step, axis.size - step)
            kv = next(coming)
        [tiles] = met.tiles(axis.rank, (axis.rank - step) % axis.size)
        for queries, keys, causal, of in each(tiles, met.fence):
            part = kernel.forward(q[of, queries], *(t[of, keys] for t in kv), causal)
            if total is None and (of, queries) == (EVERYTHING, EVERYTHING):
                total = part[0].float(), part[1]
            else:
                total = total or unmet(q)
                merge_rows(kernel, total, queries, part, of)
            del part  # before the next tile's
        del kv  # before the next hop, or the result, takes memory
    assert total is not None
    return total[0].to(q.dtype), total[1]


def arrived(travelling: Hop | None, made: bool, like: Sequence[torch.Tensor]) -> Gradients:
    """Finds the sums, fp32, of what the ranks add to that a block shaped `like` this came by. `made`: one of
    them has added something; they are 0 before."""
    if travelling is None:
        return [torch.zeros_like(t, dtype=torch.float32) for t in like]
    sums = travelling.wait()
    return sums if made else [t.zero_() for t in sums]


def ring_backward(kernel: Kernel, axis: Axis, ahead: int, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                  sums: Pieces, out: torch.Tensor, lse: torch.Tensor, met: Meeting,
                  coming: Coming | None = None, meanwhile: Meanwhile = nothing) -> Gradients:
    # one rank ahead, so that a rank's own block is the last: what the others add to dk and dv is home by then
    [own] = pieces
    coming = coming or ring_start(axis, ahead, *own, met)
    dq, travelling = torch.zeros_like(q, dtype=torch.float32), None
    stops = [*met.distances, axis.size]  # of dk and dv, which come home at last
    for step in range(1, axis.size + 1):
        if step > 1:
            meanwhile(step - 1, axis.size - step + 1)
        kv = next(coming, own)
        [tiles], made = met.tiles(axis.rank, (axis.rank - step) % axis.size), stops[0] < step
        dkv: Gradients = arrived(travelling, made, kv) if met.fence else ()
        for queries, keys, causal, of in each(tiles, met.fence):
            new = kernel.backward(
                rows_of_dout(dout, of, queries, met.fence), q[of, queries], *(t[of, keys] for t in kv),
                out[of, queries], rows_of_lse(lse, of, queries, met.fence), causal)
            dkv = dkv or arrived(travelling, made, kv)
            for g, rows, g_ in zip((dq, *dkv), (queries, keys, keys), new, strict=True):
                g[of, rows] += g_
            del g, g_, new  # before the next tile's
        dkv = dkv or arrived(travelling, made, kv)
        del kv
        travelling = axis.shift(*dkv, by=jump(stops, step + 1)) if step < axis.size else None
    return [g.to(q.dtype) for g in (dq, *dkv)]


# --- ring: queries of one subsequence of several pass, keys and values stay ---

def visitors(axis: Axis, met: Meeting, *own: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Iterates over (distance, what the rank so far before gave as `own`); `own` leaves at once."""
    return enumerate(Visits(axis, *(t.contiguous() for t in own), needed=met.distances), 1)


def met_before(home: Hop | None, q: torch.Tensor, made: bool) -> Result:
    """Finds out and lse of visiting queries: of the ranks that they came by. `made`: see arrived()."""
    if home is None:
        return unmet(q)
    out, lse = home.wait()
    return (out, lse) if made else (out.zero_(), lse.fill_(UNMET))


def passing_forward(kernel: Kernel, axis: Axis, q: torch.Tensor, pieces: Pieces, met: Meeting) -> Result:
    attend = partial(pieces_forward, kernel, fence=met.fence, part=True)
    tiles = met.tiles(axis.rank, axis.rank)
    coming, rows = visitors(axis, met, q), EVERYTHING if met.fence else rows_met(tiles[:-1])
    meets = any(tiles[:-1]) or (met.fence and len(tiles) > 1)
    before = attend(q, pieces[:-1], tiles[:-1]) if meets else None
    home: Hop | None = None
    stops = [*met.distances, axis.size]  # of the sums, which come home at last
    for step, (q_,) in coming:
        theirs = met.tiles((axis.rank - step) % axis.size, axis.rank)
        result = attend(q_, pieces, theirs) if any(theirs) or met.fence else None
        out, lse = met_before(home, q_, stops[0] < step)
        if result:
            rows_ = EVERYTHING if met.fence else rows_met(theirs)
            merge_met(kernel, met.fence, (out, lse), rows_, result, any(theirs))
        del result  # before the next visitor's
        home = axis.shift(out, lse, by=jump(stops, step + 1))
    del q_, out, lse
    out, lse = attend(q, pieces[-1:], tiles[-1:])
    out = out.float()
    if before:
        merge_met(kernel, met.fence, (out, lse), rows, before, any(tiles[:-1]))
    merge_met(kernel, met.fence, (out, lse), EVERYTHING, met_before(home, q, len(stops) > 1), len(stops) > 1)
    return out, lse


def passing_backward(kernel: Kernel, axis: Axis, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                     sums: Pieces, out: torch.Tensor, lse: torch.Tensor, met: Meeting) -> Gradients:
    attend, tiles = partial(pieces_backward, kernel, fence=met.fence), met.tiles(axis.rank, axis.rank)
    coming, rows = visitors(axis, met, dout, q, out, lse), EVERYTHING if met.fence else rows_met(tiles[:-1])
    meets = any(tiles[:-1]) or (met.fence and len(tiles) > 1)
    before = attend(dout, q, pieces[:-1], sums[:-1], out, lse, tiles[:-1]) if meets else []
    home: Hop | None = None
    stops = [*met.distances, axis.size]
    for step, (dout_, q_, out_, lse_) in coming:
        theirs = met.tiles((axis.rank - step) % axis.size, axis.rank)
        parts = attend(dout_, q_, pieces, sums, out_, lse_, theirs) if any(theirs) or met.fence else []
        [dq] = arrived(home, stops[0] < step, [q_])
        if parts and any(theirs):
            dq[:, EVERYTHING if met.fence else rows_met(theirs)].add_(*parts)
        del parts  # before the next visitor's
        home = axis.shift(dq, by=jump(stops, step + 1))
    del dout_, q_, out_, lse_, dq
    [dq] = attend(dout, q, pieces[-1:], sums[-1:], out, lse, tiles[-1:])
    dq = dq.float()
    if before:
        dq[:, rows].add_(*before)
    dq.add_(*arrived(home, len(stops) > 1, [q]))
    return [dq]


# --- Ulysses ---

def to_heads(axis: Axis, x: torch.Tensor) -> torch.Tensor:
    """Sends (B, T, H, D) -> (B, S, H/cp, D). Heads that cp does not divide go to several ranks each."""
    times = axis.size // gcd(x.shape[2], axis.size)
    x = x if times == 1 else x.repeat_interleave(times, 2)
    B, T, H, D = x.shape
    pieces = axis.exchange(x.view(B, T, axis.size, H // axis.size, D).permute(2, 0, 1, 3, 4).contiguous())
    return pieces.transpose(0, 1).reshape(B, axis.size * T, H // axis.size, D)


def to_tokens(axis: Axis, x: torch.Tensor, H: int) -> torch.Tensor:
    """Sends (B, S, heads, D) -> (B, T, H, D); sums gradients of heads that went to several ranks."""
    B, S, heads, D = x.shape
    pieces = axis.exchange(x.reshape(B, axis.size, S // axis.size, heads, D).transpose(0, 1).contiguous())
    x = pieces.permute(1, 2, 0, 3, 4).reshape(B, S // axis.size, axis.size * heads, D)
    return x if axis.size * heads == H else x.unflatten(2, (H, -1)).sum(3, dtype=torch.float32).to(x.dtype)


def pair_to_heads(axis: Axis, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return to_heads(axis, k), to_heads(axis, v)


def pair_to_tokens(axis: Axis, dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    for g, t in ((dk, k), (dv, v)):
        t.copy_(to_tokens(axis, g.to(t.dtype), t.shape[2]))
    return k, v


def ulysses_forward(kernel: Kernel, axis: Axis, whole: bool, q: torch.Tensor, pieces: Pieces,
                    met: Meeting) -> Result:
    """Computes out and lse. `whole`: `pieces` is one, of the rank's own tokens; else of to_pieces()."""
    (B, T, H, _), q_ = q.shape, to_heads(axis, q)
    pieces = [pair_to_heads(axis, *pair) for pair in pieces] if whole else pieces
    out, lse = pieces_forward(kernel, q_, pieces, met.tiles(), met.fence)
    del q_, pieces  # before the result takes memory
    return to_tokens(axis, out.to(q.dtype), H), lse.reshape(B, H, T)  # of the rank's heads: for the backward


def ulysses_backward(kernel: Kernel, axis: Axis, whole: bool, dout: torch.Tensor, q: torch.Tensor,
                     pieces: Pieces, sums: Pieces, out: torch.Tensor, lse: torch.Tensor,
                     met: Meeting) -> Gradients:
    B, T, H, _ = q.shape
    heads = [H, *(t.shape[2] for t in pieces[0])]
    dout_, q_ = to_heads(axis, dout), to_heads(axis, q)
    pieces = [pair_to_heads(axis, *pair) for pair in pieces] if whole else pieces
    gradients = pieces_backward(kernel, dout_, q_, pieces, sums, to_heads(axis, out),
                                lse.view(B, H // axis.size, axis.size * T), met.tiles(), met.fence)
    del dout_, q_, pieces  # before the results take memory
    return [to_tokens(axis, g.to(q.dtype), n) for g, n in zip(gradients, heads, strict=False)]


# --- one rank, and the choice ---

def attention_over_ranks(kernel: Kernel, axis: Axis, kind: str, merge: Callable[..., object],
                         ahead: int = 1) -> tuple[Attention, Attention]:
    """Makes of `kernel`, whose partial results `merge` of an Ops merges, attention over the tokens that the
    ranks of `axis` share by a ring or ulysses: (to a whole sequence, to pieces of several subsequences).
    `ahead`: blocks of keys on their way beside one."""
    kernel = for_any_mask(kernel._replace(merge=merge))
    if axis.size == 1:
        alone = Attention(
            kernel.name, kernel.label,
            lambda q, pieces, met, **where: pieces_forward(
                kernel, q, pieces, met.tiles(), met.fence, **where),
            lambda dout, q, pieces, sums, out, lse, met: pieces_backward(
                kernel, dout, q, pieces, sums, out, lse, met.tiles(), met.fence),
            takes_lengths=kernel.lengths is not None)
        return alone._replace(takes_out=kernel.takes_out), alone
    made = partial(Attention, kernel.name, f"{kind} of {axis.size}, {kernel.label}",
                   takes_lengths=kernel.lengths is not None)
    if kind == "ring":
        near = partial(halo_forward, kernel, axis, ahead)
        near_back = partial(halo_backward, kernel, axis, ahead)
        start = near_or_whole(partial(halo_start, axis, ahead), partial(ring_start, axis, ahead))
        return (made(near_or_whole(near, partial(ring_forward, kernel, axis, ahead)),
                     near_or_whole(near_back, partial(ring_backward, kernel, axis, ahead)), start=start),
                made(near_or_whole(near, partial(passing_forward, kernel, axis)),
                     near_or_whole(near_back, partial(passing_backward, kernel, axis))))
    return (made(partial(ulysses_forward, kernel, axis, True), partial(ulysses_backward, kernel, axis, True),
                 heads=axis.size),
            made(partial(ulysses_forward, kernel, axis, False),
                 partial(ulysses_backward, kernel, axis, False), partial(pair_to_heads, axis),
                 partial(pair_to_tokens, axis), ranks=axis.size))
