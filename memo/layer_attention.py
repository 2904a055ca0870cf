"""Attention as a layer takes it, whoever has the other tokens: of its q, k and v as it makes them, over one
sequence, or with several subsequences over those up to its own.

Keys and values of several subsequences lie in pieces, `s.pieces`, which later subsequences read. Where a
piece holds them as the layer makes them, it is the unit's own `k` and `v`; else they are written into it
(put_keys). `kv`: the heads of keys that some heads of queries read. Shapes as in memo/attention.py.

Norms of q and k, head by head (Qwen 3), stand in front of attention: the layer keeps q and k as they were
before. A group of heads is normed and rotated right before attention takes it, and again before its backward:
no normed tensor is longer there than that, and none is copied to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memo.activations import Activations, Weights
from memo.attention import Attention, Gradients, Meanwhile, Result, attend, attend_backward
from memo.config import Config
from memo.layer import layer_of
from memo.ops import Ops
from memo.parallel.mesh import Mesh
from memo.parallel.prefix import (
    EVERYTHING,
    PrefixAttention,
    attend_prefix,
    attend_prefix_backward,
    in_slices,
    of_heads,
)
from memo.parallel.visits import Visits

Kept = tuple[torch.Tensor, torch.Tensor]  # x and rstd, for the backward


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over D of each head of `q` or `k`, which is rotated then. `w`, `dw`: of a layer; positions in
    `turn` as in memo/ops.py."""

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


class LayerAttention:
    """Holds the Attention of one sequence, the PrefixAttention of several subsequences, and norms per head
    where the family has some. `turn`: rotations, or None; `kv_heads`: of a rank."""

    def __init__(self, cfg: Config, w: Weights, dw: Weights, attention: Attention, prefix: PrefixAttention,
                 ops: Ops, mesh: Mesh) -> None:
        self.w, self.dw, self.ops, self.eps = w, dw, ops, cfg.norm_eps
        self.attention, self.prefix, layer = attention, prefix, layer_of(cfg)
        # the product of a query and a key has a variance of D; the softmax wants 1
        self.head_dim, self.scale = layer.head_dim, layer.head_dim ** -0.5
        self.kv_heads = layer.kv_heads // (1 if cfg.metp else mesh.weights.size)
        self.head_norms = layer.head_norms
        self.keys_change = layer.head_norms or prefix.ranks > 1  # on their way to a piece

    def heads(self, *rows: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Views (n, tp, width/tp) as (B, T, heads, D); `like` is the (B, H/tp, T) logsumexp."""
        B, _, T = like.shape
        return [x.view(B, T, -1, self.head_dim) for x in rows]

    def norms(self, turn: torch.Tensor | None) -> HeadNorms:
        """The norms of q and k, where the family has some."""
        return HeadNorms(self.ops, self.w, self.dw, self.eps, turn)

    def over_sequence(self, turn: torch.Tensor | None) -> Attention:
        """The Attention of q and k as the layer makes them."""
        return self.norms(turn).over(self.attention) if self.head_norms else self.attention

    def over_pieces(self, s: Activations, turn: torch.Tensor | None) -> PrefixAttention:
        """The same over `s.pieces`."""
        prefix = in_slices(self.prefix, s.slices)
        return self.norms(turn).over_prefix(prefix) if self.head_norms else prefix

    def keys_apart(self, s: Activations) -> bool:
        """Says whether the unit's own piece does not hold keys and values as the layer makes them; so, too,
        where other stages compute the later rows of several sequences, whose keys lie between."""
        return self.keys_change or not s.pieces[-1][0].is_contiguous()

    def put_keys(self, s: Activations, turn: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
                 kv: slice = EVERYTHING) -> None:
        """Writes the layer's k and v into the unit's own piece."""
        [own] = of_heads(s.pieces[-1:], kv)
        for place, tensor in zip(own, self.over_pieces(s, turn).to_pieces(k, v), strict=True):
            place.copy_(tensor)

    def forward(self, s: Activations, turn: torch.Tensor | None, q: torch.Tensor,
                keys: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, kv: slice = EVERYTHING,
                coming: Visits | None = None, meanwhile: Meanwhile | None = None) -> None:
        """Writes into out and lse the attention of q to the pieces, or where there are none to `keys`, (k,
        v). `coming`, `meanwhile`: see attend()."""
        if s.pieces:
            attend_prefix(self.over_pieces(s, turn), q, of_heads(s.pieces, kv), self.scale, out, lse)
        else:
            k, v = keys
            attend(self.over_sequence(turn), q, k, v, True, self.scale, out, lse, coming, meanwhile)

    def backward(self, s: Activations, turn: torch.Tensor | None, dout: torch.Tensor, q: torch.Tensor,
                 keys: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, kv: slice = EVERYTHING,
                 coming: Visits | None = None, meanwhile: Meanwhile | None = None) -> Gradients:
        """-> dq, dk, dv of forward(). With pieces dq alone: the others are added to `s.sums`."""
        if s.pieces:
            return [attend_prefix_backward(self.over_pieces(s, turn), dout, q, of_heads(s.pieces, kv),
                                           of_heads(s.sums, kv), out, lse, self.scale)]
        k, v = keys
        return attend_backward(self.over_sequence(turn), dout, q, k, v, out, lse, True, self.scale, coming,
                               meanwhile)

    def key_gradients(self, s: Activations, turn: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
                      kv: slice = EVERYTHING) -> Gradients:
        """-> dk, dv of the unit's own piece, over k and v, when later subsequences and the unit have added
        all of theirs. `k`: with norms per head as the layer makes it."""
        [sums] = of_heads(s.sums[-1:], kv)
        return self.over_pieces(s, turn).from_pieces(*sums, k, v)
