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

from collections.abc import Iterator
from functools import partial
from math import gcd

import torch

from memo.kernels.attention import Gradients, Kernel, Result
from memo.layer.activations import Pieces
from memo.layer.attend import Attention, Meanwhile, Merge, Pair, pieces_backward, pieces_forward, rows_met
from memo.layer.tiles import FULL, Tile, rank_ranges, tiles_of
from memo.parallel.visits import Visits
from memo.system.axis import Axis, Hop


def ring_tile(source: int, rank: int, ranks: int, T: int) -> Tile:
    """Finds the tile of T queries of rank `rank` and T keys of rank `source` that meet, in a zigzag."""
    queries, keys = (rank_ranges(ranks * T, r, ranks, "ring") for r in (rank, source))
    [tile] = tiles_of(queries, keys)
    return tile


# --- ring: keys and values of a whole sequence go round ---

# `coming`: ring_start(k, v). meanwhile(blocks done, blocks left) is called before each block but the first:
# what it sends hides behind those left, and gradients on their way behind what it computes.

def ring_start(axis: Axis, ahead: int, k: torch.Tensor, v: torch.Tensor) -> Visits:
    return Visits(axis, k.contiguous(), v.contiguous(), ahead=ahead)


def nothing(done: int, left: int) -> None:
    pass


def ring_forward(kernel: Kernel, axis: Axis, ahead: int, merge: Merge, q: torch.Tensor, pieces: Pieces,
                 scale: float, coming: Visits | None = None, meanwhile: Meanwhile = nothing) -> Result:
    [kv], T = [[t.contiguous() for t in pair] for pair in pieces], q.shape[1]
    coming = coming or ring_start(axis, ahead, *kv)
    for step in range(axis.size):
        if step > 0:
            meanwhile(step, axis.size - step)
            kv = next(coming)
        queries, keys, causal = ring_tile((axis.rank - step) % axis.size, axis.rank, axis.size, T)
        out_, lse_ = kernel.forward(q[:, queries], *(t[:, keys] for t in kv), causal, scale)
        if step == 0:
            out, lse = out_.float(), lse_
        else:
            merge(out[:, queries], lse[..., queries], out_, lse_)
        del kv  # before the next hop, or the result, takes memory
    return out.to(q.dtype), lse


def ring_backward(kernel: Kernel, axis: Axis, ahead: int, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                  sums: Pieces, out: torch.Tensor, lse: torch.Tensor, scale: float,
                  coming: Visits | None = None, meanwhile: Meanwhile = nothing) -> Gradients:
    # one rank ahead, so that a rank's own block is the last: what the others add to dk and dv is home by then
    [own], T = pieces, q.shape[1]
    coming = coming or ring_start(axis, ahead, *own)
    dq, travelling = torch.zeros_like(q, dtype=torch.float32), None
    for step in range(1, axis.size + 1):
        if step > 1:
            meanwhile(step - 1, axis.size - step + 1)
        kv = next(coming, own)
        queries, keys, causal = ring_tile((axis.rank - step) % axis.size, axis.rank, axis.size, T)
        new = kernel.backward(dout[:, queries], q[:, queries], *(t[:, keys] for t in kv), out[:, queries],
                              lse[..., queries].contiguous(), causal, scale)
        if travelling is None:
            dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in kv)
        else:
            dk, dv = travelling.wait()  # of the block that is here now, from the ranks it was at before
        for g, rows, g_ in zip((dq, dk, dv), (queries, keys, keys), new, strict=True):
            g[:, rows] += g_
        del g_, new, kv  # before the next step's
        travelling = axis.shift(dk, dv) if step < axis.size else None
    return [g.to(q.dtype) for g in (dq, dk, dv)]


# --- ring: queries of one subsequence of several pass, keys and values stay ---

def visitors(axis: Axis, *own: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Iterates over (rank, what it gave as `own`) of the other ranks; `own` leaves at once."""
    visits = Visits(axis, *(t.contiguous() for t in own))
    return (((axis.rank - step) % axis.size, tensors) for step, tensors in enumerate(visits, 1))


def passing_forward(kernel: Kernel, axis: Axis, merge: Merge, q: torch.Tensor, pieces: Pieces,
                    scale: float) -> Result:
    attend, (B, T, H, _) = partial(pieces_forward, kernel, merge), q.shape
    coming = visitors(axis, q)
    before = attend(q, pieces[:-1], scale, FULL) if len(pieces) > 1 else None
    home: Hop | None = None
    for rank, (q_,) in coming:
        last = ring_tile(axis.rank, rank, axis.size, T)
        rows, result = rows_met(pieces, last), attend(q_, pieces, scale, last)
        if home is None:  # of what no query has met yet, e^lse is 0
            out = torch.zeros_like(q_, dtype=torch.float32)
            lse = out.new_full((B, H, T), -torch.inf)
        else:
            out, lse = home.wait()
        merge(out[:, rows], lse[..., rows], *result)
        del result  # before the next visitor's
        home = axis.shift(out, lse)
    del q_, out, lse
    out, lse = attend(q, pieces[-1:], scale)
    out = out.float()
    if before is not None:
        merge(out, lse, *before)
    assert home is not None  # there are other ranks
    merge(out, lse, *home.wait())
    return out, lse


def passing_backward(kernel: Kernel, axis: Axis, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces,
                     sums: Pieces, out: torch.Tensor, lse: torch.Tensor, scale: float) -> Gradients:
    attend = partial(pieces_backward, kernel)
    coming = visitors(axis, dout, q, out, lse)
    before = attend(dout, q, pieces[:-1], sums[:-1], out, lse, scale, FULL) if len(pieces) > 1 else []
    home: Hop | None = None
    for rank, (dout_, q_, out_, lse_) in coming:
        last = ring_tile(axis.rank, rank, axis.size, q.shape[1])
        [dq_] = attend(dout_, q_, pieces, sums, out_, lse_, scale, last)
        dq = torch.zeros_like(q_, dtype=torch.float32) if home is None else home.wait()[0]
        dq[:, rows_met(pieces, last)].add_(dq_)
        del dq_  # before the next visitor's
        home = axis.shift(dq)
    del dout_, q_, out_, lse_, dq
    [dq] = attend(dout, q, pieces[-1:], sums[-1:], out, lse, scale)
    dq = dq.float()
    assert home is not None
    for more in (*before, *home.wait()):
        dq.add_(more)
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


def ulysses_forward(kernel: Kernel, axis: Axis, merge: Merge, whole: bool, q: torch.Tensor, pieces: Pieces,
                    scale: float) -> Result:
    """Computes out and lse. `whole`: `pieces` is one, of the rank's own tokens; else of to_pieces()."""
    (B, T, H, _), q_ = q.shape, to_heads(axis, q)
    pieces = [pair_to_heads(axis, *pair) for pair in pieces] if whole else pieces
    out, lse = pieces_forward(kernel, merge, q_, pieces, scale)
    del q_, pieces  # before the result takes memory
    return to_tokens(axis, out.to(q.dtype), H), lse.reshape(B, H, T)  # of the rank's heads: for the backward


def ulysses_backward(kernel: Kernel, axis: Axis, whole: bool, dout: torch.Tensor, q: torch.Tensor,
                     pieces: Pieces, sums: Pieces, out: torch.Tensor, lse: torch.Tensor,
                     scale: float) -> Gradients:
    B, T, H, _ = q.shape
    heads = [H, *(t.shape[2] for t in pieces[0])]
    dout_, q_ = to_heads(axis, dout), to_heads(axis, q)
    pieces = [pair_to_heads(axis, *pair) for pair in pieces] if whole else pieces
    gradients = pieces_backward(kernel, dout_, q_, pieces, sums, to_heads(axis, out),
                                lse.view(B, H // axis.size, axis.size * T), scale)
    del dout_, q_, pieces  # before the results take memory
    return [to_tokens(axis, g.to(q.dtype), n) for g, n in zip(gradients, heads, strict=False)]


def attention_over_ranks(kernel: Kernel, axis: Axis, kind: str, merge: Merge,
                         ahead: int = 1) -> tuple[Attention, Attention]:
    """Makes of `kernel` attention over the tokens that the ranks of `axis` share by a ring or ulysses: (to a
    whole sequence, to pieces of several subsequences). `ahead`: blocks of keys on their way beside one."""
    if axis.size == 1:
        alone = Attention(kernel.name, kernel.label, partial(pieces_forward, kernel, merge),
                          partial(pieces_backward, kernel))
        return alone._replace(takes_out=kernel.takes_out), alone
    made = partial(Attention, kernel.name, f"{kind} of {axis.size}, {kernel.label}")
    if kind == "ring":
        return (made(partial(ring_forward, kernel, axis, ahead, merge),
                     partial(ring_backward, kernel, axis, ahead), start=partial(ring_start, axis, ahead)),
                made(partial(passing_forward, kernel, axis, merge), partial(passing_backward, kernel, axis)))
    return (made(partial(ulysses_forward, kernel, axis, merge, True),
                 partial(ulysses_backward, kernel, axis, True), heads=axis.size),
            made(partial(ulysses_forward, kernel, axis, merge, False),
                 partial(ulysses_backward, kernel, axis, False), partial(pair_to_heads, axis),
                 partial(pair_to_tokens, axis), ranks=axis.size))
