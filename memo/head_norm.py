"""Norms of q and k, head by head, in front of attention (Qwen 3). The layer keeps q and k as they were
before.

A group of heads is normed and rotated right before attention takes it, and again before its backward: no
normed tensor is longer there than that, and none is copied to the host. Shapes: q (B, T, H, D), k (B, T, Hkv,
D); positions in `turn` as in memo/ops.py.
"""


import torch

from memo.activations import Pieces, Weights
from memo.attention import Attention, Gradients, Result
from memo.ops import Ops
from memo.parallel.prefix import PrefixAttention
from memo.parallel.visits import Visits


def normed_heads(ops: Ops, x: torch.Tensor, w: torch.Tensor, eps: float,
                 turn: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(RMSNorm over D of each head, rotated; x and rstd for the backward). (B, T, h, D) -> the same, new."""
    rows = x.reshape(-1, x.shape[-1])  # a copy where the heads are some of several
    out, rstd = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float32, device=x.device)
    ops.norm_forward(rows, w, None, out, None, rstd, eps)
    out = out.view(x.shape)
    if turn is not None:
        rotate(ops, out, turn, back=False)
    return out, (rows, rstd)


def normed_heads_backward(ops: Ops, dy: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor],
                          w: torch.Tensor, dw: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
    """The gradient of x, from that of normed_heads, which is used up; adds to dw."""
    rows, rstd = kept
    dy = dy.contiguous()
    if turn is not None:
        rotate(ops, dy, turn, back=True)
    flat = dy.view(rows.shape)
    ops.norm_backward(None, flat, rows, None, rstd, w, None, dw, None, out=flat)
    return dy


def rotate(ops: Ops, x: torch.Tensor, turn: torch.Tensor, back: bool) -> None:
    """In place, (B, T, h, D) by (n, tp, D/2), where B T = n tp."""
    ops.rotary(x.view(*turn.shape[:2], -1), turn, back)


def over_normed_heads(attention: Attention, ops: Ops, w: Weights, dw: Weights, eps: float,
                      turn: torch.Tensor | None) -> Attention:
    """`attention` of normed and rotated q and k: an Attention of the same shape. `w`, `dw`: of a layer, by
    name."""

    def start(k: torch.Tensor, v: torch.Tensor) -> Visits:
        return attention.start(normed_heads(ops, k, w.k_norm_w, eps, turn)[0], v)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float,
                **more: object) -> Result:
        q, _ = normed_heads(ops, q, w.q_norm_w, eps, turn)
        k, _ = normed_heads(ops, k, w.k_norm_w, eps, turn)
        return attention.forward(q, k, v, causal, scale, **more)

    def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor, causal: bool, scale: float, **more: object) -> Gradients:
        q, q_kept = normed_heads(ops, q, w.q_norm_w, eps, turn)
        k, k_kept = normed_heads(ops, k, w.k_norm_w, eps, turn)
        dq, dk, dv = attention.backward(dout, q, k, v, out, lse, causal, scale, **more)
        del q, k
        dq = normed_heads_backward(ops, dq, q_kept, w.q_norm_w, dw.q_norm_w, turn)
        dk = normed_heads_backward(ops, dk, k_kept, w.k_norm_w, dw.k_norm_w, turn)
        return dq, dk, dv
    return attention._replace(forward=forward, backward=backward, start=attention.start and start)


def prefix_of_normed_heads(prefix: PrefixAttention, ops: Ops, w: Weights, dw: Weights,
                           eps: float, turn: torch.Tensor | None) -> PrefixAttention:
    """`prefix` of normed and rotated q and k: a PrefixAttention of the same shape. Queries are normed when
    attention takes them, as above; keys once, by to_pieces, for many queries read them: pieces hold normed
    keys. `turn`: of the queries' subsequence."""

    def forward(q: torch.Tensor, pieces: Pieces, scale: float) -> Result:
        q, _ = normed_heads(ops, q, w.q_norm_w, eps, turn)
        return prefix.forward(q, pieces, scale)

    def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces, out: torch.Tensor,
                 lse: torch.Tensor, scale: float) -> torch.Tensor:
        q, kept = normed_heads(ops, q, w.q_norm_w, eps, turn)
        dq = prefix.backward(dout, q, pieces, sums, out, lse, scale).to(q.dtype)
        return normed_heads_backward(ops, dq, kept, w.q_norm_w, dw.q_norm_w, turn)

    def to_pieces(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return prefix.to_pieces(normed_heads(ops, k, w.k_norm_w, eps, turn)[0], v)

    def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor,
                    v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place, kept = normed_heads(ops, k, w.k_norm_w, eps, turn)
        dk, dv = prefix.from_pieces(dk, dv, place, v)
        return k.copy_(normed_heads_backward(ops, dk, kept, w.k_norm_w, dw.k_norm_w, turn)), dv
    return prefix._replace(forward=forward, backward=backward, to_pieces=to_pieces, from_pieces=from_pieces)
