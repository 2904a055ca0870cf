"""Norms of q and k, head by head, in front of attention (Qwen 3). The layer keeps q and k as they were
before.

A group of heads is normed and rotated right before attention takes it, and again before its backward: no
normed tensor is longer there than that, and none is copied to the host. Shapes: q (B, T, H, D), k (B, T, Hkv,
D); positions in `turn` as in memo/ops.py.
"""

from dataclasses import dataclass

import torch

from memo.activations import Weights
from memo.attention import Attention, Gradients, Result
from memo.ops import Ops
from memo.parallel.prefix import PrefixAttention
from memo.parallel.visits import Visits

Kept = tuple[torch.Tensor, torch.Tensor]  # x and rstd, for the backward


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over D of each head of `q` or `k`, which is rotated then. `w`, `dw`: of a layer."""

    ops: Ops
    w: Weights
    dw: Weights
    eps: float
    turn: torch.Tensor | None

    def forward(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
        """Norms q or k. (B, T, h, D) -> the same, new."""
        rows = x.reshape(-1, x.shape[-1])  # a copy where the heads are some of several
        out, rstd = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float32, device=x.device)
        self.ops.norm_forward(rows, getattr(self.w, f"{name}_norm_w"), None, out, None, rstd, self.eps)
        out = out.view(x.shape)
        self.rotate(out, back=False)
        return out, (rows, rstd)

    def backward(self, name: str, dy: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Finds the gradient of x from that of what forward() gave, which is used up; adds to dw."""
        rows, rstd = kept
        dy = dy.contiguous()
        self.rotate(dy, back=True)
        w, dw = (getattr(of, f"{name}_norm_w") for of in (self.w, self.dw))
        flat = dy.view(rows.shape)
        self.ops.norm_backward(None, flat, rows, None, rstd, w, None, dw, None, out=flat)
        return dy

    def rotate(self, x: torch.Tensor, back: bool) -> None:
        """Rotates in place, (B, T, h, D) by (n, tp, D/2), where B T = n tp."""
        if self.turn is not None:
            self.ops.rotary(x.view(*self.turn.shape[:2], -1), self.turn, back)

    def over(self, attention: Attention) -> Attention:
        """`attention` of normed q and k: an Attention of the same shape."""

        def start(k: torch.Tensor, v: torch.Tensor) -> Visits:
            return attention.start(self.forward("k", k)[0], v)

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: object,
                    **more: object) -> Result:
            q, _ = self.forward("q", q)
            k, _ = self.forward("k", k)
            return attention.forward(q, k, v, *how, **more)

        def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *how: object,
                     **more: object) -> Gradients:
            q, q_kept = self.forward("q", q)
            k, k_kept = self.forward("k", k)
            dq, dk, dv = attention.backward(dout, q, k, *how, **more)
            del q, k
            dq = self.backward("q", dq, q_kept)
            dk = self.backward("k", dk, k_kept)
            return dq, dk, dv
        return attention._replace(forward=forward, backward=backward, start=attention.start and start)

    def over_prefix(self, prefix: PrefixAttention) -> PrefixAttention:
        """`prefix` of normed q and k: a PrefixAttention of the same shape. Queries are normed when attention
        takes them; keys once, by to_pieces, for many queries read them: pieces hold normed keys."""

        def forward(q: torch.Tensor, *pieces: object) -> Result:
            q, _ = self.forward("q", q)
            return prefix.forward(q, *pieces)

        def backward(dout: torch.Tensor, q: torch.Tensor, *pieces: object) -> torch.Tensor:
            q, kept = self.forward("q", q)
            dq = prefix.backward(dout, q, *pieces).to(q.dtype)
            return self.backward("q", dq, kept)

        def to_pieces(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return prefix.to_pieces(self.forward("k", k)[0], v)

        def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor,
                        v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            place, kept = self.forward("k", k)
            dk, dv = prefix.from_pieces(dk, dv, place, v)
            return k.copy_(self.backward("k", dk, kept)), dv
        return prefix._replace(forward=forward, backward=backward, to_pieces=to_pieces,
                               from_pieces=from_pieces)
