"""Context parallelism: each of cp ranks holds T = S/cp tokens of every sequence, and attention goes round.

Ring: in a zigzag rank r holds the chunks r and 2cp-1-r of 2cp, so that every rank has the same causal work.
While a rank attends to one block of keys and values the next one travels; partial results are merged through
the logsumexp, in fp32. In the backward the gradients of keys and values travel with their block, and its own
rank is the last to add to them. Ulysses: an all-to-all turns T tokens of all heads into S tokens of H/cp
heads, and back; its logsumexp stays (B, H/cp, S). Of keys and values only their own heads travel, once for
each group of query heads that reads them (attention.py); where cp does not divide a group's, each goes to
several ranks. Shapes as in memo/attention.py: (B, T, H, D), lse (B, H, T) fp32. Nothing here makes the host
wait for a GPU.
"""

from dataclasses import replace
from functools import partial
from math import gcd

import torch

from memo.attention import Attention, Gradients, Meanwhile, Merge, Result
from memo.layout import Layout
from memo.parallel.axis import Axis
from memo.parallel.mesh import Mesh
from memo.parallel.visits import Visits
from memo.subsequences import slice_lengths


def local_token_ranges(S: int, axis: Axis, kind: str) -> list[tuple[int, int]]:
    """[(first, end)]: the ranges of a sequence's S tokens that this rank of `axis` holds, in its order."""
    if axis.size == 1:
        return [(0, S)]
    pieces = [axis.rank, 2 * axis.size - 1 - axis.rank] if kind == "ring" else [axis.rank]
    length = S // (axis.size * len(pieces))
    return [(i * length, (i + 1) * length) for i in pieces]


def token_columns(cfg: Layout, S: int, mesh: Mesh) -> list[list[list[tuple[int, int]]]]:
    """The ranges of a sequence's S tokens that the ranks of `weights` embed together, by subsequences, and of
    each by columns: a rank's (B, T) has the tokens of one subsequence after the other, in it those of one
    slice after the other, and the columns take turns. One column, whose tokens these ranks have in turns;
    with METP one for each of them, which is its own."""
    tokens, tp, found, start = mesh.tokens, mesh.weights, [], 0
    ranks = range(tokens.rank - tp.rank, tokens.rank - tp.rank + tp.size) if cfg.metp else [tokens.rank]
    for slices in slice_lengths(cfg, S):
        columns: list[list[tuple[int, int]]] = [[] for _ in ranks]
        for length in slices:
            for column, rank in zip(columns, ranks, strict=True):
                mine = local_token_ranges(length, replace(tokens, rank=rank), cfg.context_parallel)
                column += [(start + first, start + end) for first, end in mine]
            start += length
        found.append(columns)
    return found


def local_positions(cfg: Layout, S: int, mesh: Mesh) -> list[torch.Tensor]:
    """[(T_i,)]: the positions of a sequence's S tokens that the ranks of `weights` embed together, by
    subsequences, in the order of a rank's (B, T)."""
    return [interleaved(torch.cat([torch.arange(*r) for column in columns for r in column]), len(columns))
            for columns in token_columns(cfg, S, mesh)]


def interleaved(x: torch.Tensor, columns: int) -> torch.Tensor:
    """(..., T), so many equally long columns one after the other -> (..., T): the first of each, the second
    of each, ..."""
    return x.unflatten(-1, (columns, -1)).transpose(-1, -2).flatten(-2)


# --- ring ---

def nothing(done: int, left: int) -> None:
    pass


def meeting_parts(source: int, rank: int, T: int) -> tuple[slice, slice, bool]:
    """(queries, keys, causal) that meet, of the queries of rank `rank` and the keys of rank `source`: its own
    under the mask; of an earlier rank's the first half, seen by all queries; all of a later rank's, seen by
    the second half of the queries."""
    everything, half = slice(None), T // 2
    if source == rank:
        return everything, everything, True
    return (everything, slice(half), False) if source < rank else (slice(half, None), everything, False)


# `coming`: ring_start(k, v). meanwhile(done, left) is called before each block but the first, with how many
# blocks are done and how many are left: what it sends has these to hide behind, and in a backward the
# gradients that are on their way have what it computes.

def ring_start(axis: Axis, ahead: int, k: torch.Tensor, v: torch.Tensor) -> Visits:
    return Visits(axis, k.contiguous(), v.contiguous(), ahead=ahead)


def ring_forward(attention: Attention, axis: Axis, ahead: int, merge: Merge, q: torch.Tensor,
                 k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, coming: Visits | None = None,
                 meanwhile: Meanwhile = nothing) -> Result:
    assert causal  # meeting_parts() knows no other
    T, kv = q.shape[1], [k.contiguous(), v.contiguous()]
    coming = coming or ring_start(axis, ahead, *kv)
    for step in range(axis.size):
        if step > 0:
            meanwhile(step, axis.size - step)
            kv = next(coming)
        queries, keys, causal = meeting_parts((axis.rank - step) % axis.size, axis.rank, T)
        out_, lse_ = attention.forward(q[:, queries], *(t[:, keys] for t in kv), causal, scale)
        if step == 0:
            out, lse = out_.float(), lse_
        else:
            merge(out[:, queries], lse[..., queries], out_, lse_)
        del kv  # before the next hop, or the result, takes memory
    return out.to(q.dtype), lse


def ring_backward(attention: Attention, axis: Axis, ahead: int, dout: torch.Tensor, q: torch.Tensor,
                  k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool,
                  scale: float, coming: Visits | None = None, meanwhile: Meanwhile = nothing) -> Gradients:
    # one rank ahead, so that a rank's own block is the last: what the others add to dk and dv is home by then
    assert causal
    T, coming = q.shape[1], coming or ring_start(axis, ahead, k, v)
    dq, travelling = torch.zeros_like(q, dtype=torch.float32), None
    for step in range(1, axis.size + 1):
        if step > 1:
            meanwhile(step - 1, axis.size - step + 1)
        kv = next(coming, (k, v))
        queries, keys, causal = meeting_parts((axis.rank - step) % axis.size, axis.rank, T)
        new = attention.backward(dout[:, queries], q[:, queries], *(t[:, keys] for t in kv), out[:, queries],
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


# --- Ulysses ---

def to_heads(axis: Axis, x: torch.Tensor) -> torch.Tensor:
    """(B, T, H, D) -> (B, S, H/cp, D). Of heads that cp does not divide each goes to as many ranks as it
    takes for all to have equally many."""
    times = axis.size // gcd(x.shape[2], axis.size)
    x = x if times == 1 else x.repeat_interleave(times, 2)
    B, T, H, D = x.shape
    pieces = axis.exchange(x.view(B, T, axis.size, H // axis.size, D).permute(2, 0, 1, 3, 4).contiguous())
    return pieces.transpose(0, 1).reshape(B, axis.size * T, H // axis.size, D)


def to_tokens(axis: Axis, x: torch.Tensor) -> torch.Tensor:  # (B, S, H/cp, D) -> (B, T, H, D)
    B, S, H, D = x.shape
    pieces = axis.exchange(x.reshape(B, axis.size, S // axis.size, H, D).transpose(0, 1).contiguous())
    return pieces.permute(1, 2, 0, 3, 4).reshape(B, S // axis.size, axis.size * H, D)


def ulysses_forward(attention: Attention, axis: Axis, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    causal: bool, scale: float) -> Result:
    B, T, H, _ = q.shape
    out, lse = attention.forward(*(to_heads(axis, t) for t in (q, k, v)), causal, scale)
    return to_tokens(axis, out), lse.reshape(B, H, T)  # of the rank's heads: for the backward only


def ulysses_backward(attention: Attention, axis: Axis, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                     v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool,
                     scale: float) -> Gradients:
    B, T, H, _ = q.shape
    gradients = attention.backward(*(to_heads(axis, t) for t in (dout, q, k, v, out)),
                                   lse.view(B, H // axis.size, axis.size * T), causal, scale)
    return tuple(summed(to_tokens(axis, g), t.shape[2]) for g, t in zip(gradients, (q, k, v), strict=True))


def summed(g: torch.Tensor, H: int) -> torch.Tensor:
    """The gradient of H heads from that of more: the sum over the ranks that had the same head."""
    if g.shape[2] == H:
        return g
    return g.unflatten(2, (H, -1)).sum(3, dtype=torch.float32).to(g.dtype)


def attention_over_ranks(attention: Attention, axis: Axis, kind: str, merge: Merge,
                         ahead: int = 1) -> Attention:
    """`attention` over the tokens of all ranks of `axis`: an Attention of the same shape. `merge`: that of an
    ops.Ops; `ahead`: blocks of keys and values that are on their way beside the one in use."""
    if axis.size == 1:
        return attention
    if kind == "ring":
        pair = (partial(ring_forward, attention, axis, ahead, merge),
                partial(ring_backward, attention, axis, ahead))
        heads, start = 1, partial(ring_start, axis, ahead)
    else:
        pair = partial(ulysses_forward, attention, axis), partial(ulysses_backward, attention, axis)
        heads, start = axis.size, None
    label = f"{kind} of {axis.size}, {attention.label}"
    return Attention(attention.name, *pair, heads=heads, label=label, start=start)
