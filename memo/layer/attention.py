"""Attention of a layer, of its q, k and v as it makes them: over a whole sequence, or with several
subsequences over those up to its own, which lie in pieces, `s.pieces`. Where the unit's own piece holds keys
and values as the layer makes them, it is the unit's `k` and `v`; else they are written into it (put_keys).
`kv`: the heads of keys that some heads of queries read. Shapes as in memo/kernels/attention.py.

Norms of q and k, head by head (Qwen 3), stand in front of attention: the layer keeps q and k as they were
before. A group of heads is normed and rotated right before attention takes it, and again before its backward:
normed tensors are short, and none is copied to the host.
"""

from dataclasses import dataclass

import torch

from memo.config.config import Config
from memo.config.layer import layer_of
from memo.kernels.attention import Gradients, Result
from memo.kernels.ops import Ops
from memo.layer.activations import Activations, Pieces, Weights
from memo.layer.attend import Attention, Pair, Ring, attend, attend_backward, in_slices, of_heads
from memo.layer.tiles import EVERYTHING
from memo.parallel.mesh import Mesh
from memo.parallel.visits import Visits

Kept = tuple[torch.Tensor, torch.Tensor]  # x and rstd, for the backward


@dataclass(frozen=True)
class HeadNorms:
    """Norms each head of `q` or `k` (RMSNorm over D), and rotates it by `turn`. `w`, `dw`: of a layer."""

    ops: Ops
    w: Weights
    dw: Weights
    eps: float
    turn: torch.Tensor | None

    def forward(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
        """Norms q or k. (B, T, h, D) -> the same, new."""
        rows = x.reshape(-1, x.shape[-1])  # a copy where the heads are some of several
        out, rstd = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float32, device=x.device)
        self.ops.norm_forward(rows, self.w[f"{name}_norm_w"], None, out, None, rstd, self.eps)
        out = out.view(x.shape)
        self.rotate(out, back=False)
        return out, (rows, rstd)

    def backward(self, name: str, dy: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Finds the gradient of x from that of what forward() gave, which is used up; adds to dw."""
        rows, rstd = kept
        dy = dy.contiguous()
        self.rotate(dy, back=True)
        w, dw = (of[f"{name}_norm_w"] for of in (self.w, self.dw))
        flat = dy.view(rows.shape)
        self.ops.norm_backward(None, flat, rows, None, rstd, w, None, dw, None, out=flat)
        return dy

    def rotate(self, x: torch.Tensor, back: bool) -> None:
        """Rotates in place, (B, T, h, D) by (n, tp, D/2), where B T = n tp."""
        if self.turn is not None:
            self.ops.rotary(x.view(*self.turn.shape[:2], -1), self.turn, back)

    def over(self, attention: Attention, several: bool) -> Attention:
        """Makes `attention` take q and k before their norms; pieces of `several` hold normed keys."""

        def normed(pieces: Pieces) -> tuple[Pieces, list[Kept]]:
            if several:
                return pieces, []
            [(k, v)] = pieces
            k, kept = self.forward("k", k)
            return [(k, v)], [kept]

        def start(k: torch.Tensor, v: torch.Tensor) -> Visits:
            assert attention.start is not None
            return attention.start(self.forward("k", k)[0], v)

        def forward(q: torch.Tensor, pieces: Pieces, *how: object, **more: object) -> Result:
            q, _ = self.forward("q", q)
            return attention.forward(q, normed(pieces)[0], *how, **more)

        def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, *how: object,
                     **more: object) -> Gradients:
            q, q_kept = self.forward("q", q)
            pieces, k_kept = normed(pieces)
            dq, *dkv = attention.backward(dout, q, pieces, *how, **more)
            dq = dq.to(q.dtype)
            del q, pieces
            dq = self.backward("q", dq, q_kept)
            if dkv:
                dkv[0] = self.backward("k", dkv[0], *k_kept)
            return [dq, *dkv]

        def to_pieces(k: torch.Tensor, v: torch.Tensor) -> Pair:
            return attention.to_pieces(self.forward("k", k)[0], v)

        def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
            place, kept = self.forward("k", k)
            dk, dv = attention.from_pieces(dk, dv, place, v)
            return k.copy_(self.backward("k", dk, kept)), dv
        return attention._replace(forward=forward, backward=backward, start=attention.start and start,
                                  to_pieces=to_pieces, from_pieces=from_pieces)


class LayerAttention:
    """Holds the Attention to a whole sequence, that to pieces, and norms per head. `kv_heads`: of a rank."""

    def __init__(self, cfg: Config, w: Weights, dw: Weights, attention: tuple[Attention, Attention], ops: Ops,
                 mesh: Mesh) -> None:
        self.w, self.dw, self.ops, self.eps = w, dw, ops, cfg.norm_eps
        (self.whole, self.pieces), layer = attention, layer_of(cfg)
        self.head_dim = layer.head_dim
        self.kv_heads = layer.kv_heads // (1 if cfg.metp else mesh.weights.size)
        self.head_norms = layer.head_norms
        self.keys_change = layer.head_norms or self.pieces.ranks > 1  # on their way to a piece

    def heads(self, *rows: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Views (n, tp, width/tp) as (B, T, heads, D); `like` is the (B, H/tp, T) logsumexp."""
        return [x.view(like.shape[0], like.shape[2], -1, self.head_dim) for x in rows]

    def rotate(self, x: torch.Tensor, s: Activations, rows: slice = EVERYTHING, back: bool = False) -> None:
        """Rotates those rows of q or k, (n, tp, width/tp), in place; norms per head come before that."""
        if s.turn is not None and not self.head_norms:
            self.ops.rotary(x, s.turn[rows], back)

    def norms(self, s: Activations) -> HeadNorms:
        return HeadNorms(self.ops, self.w, self.dw, self.eps, s.turn)

    def over(self, s: Activations) -> Attention:
        """Chooses the Attention to the whole sequence or to `s.pieces`, with norms per head in front."""
        attention = in_slices(self.pieces if s.pieces else self.whole, s.meetings)
        return self.norms(s).over(attention, bool(s.pieces)) if self.head_norms else attention

    def keys_apart(self, s: Activations) -> bool:
        """Says whether the unit's own piece lacks keys and values as the layer makes them: so it does,
        too, where other stages compute later rows of several sequences, whose keys lie between."""
        return self.keys_change or not s.pieces[-1][0].is_contiguous()

    def put_keys(self, s: Activations, k: torch.Tensor, v: torch.Tensor, kv: slice = EVERYTHING) -> None:
        """Writes the layer's k and v into the unit's own piece."""
        [own] = of_heads(s.pieces[-1:], kv)
        for place, tensor in zip(own, self.over(s).to_pieces(k, v), strict=True):
            place.copy_(tensor)

    def forward(self, s: Activations, q: torch.Tensor, keys: Pieces, out: torch.Tensor, lse: torch.Tensor,
                kv: slice = EVERYTHING, ring: Ring | None = None) -> None:
        """Writes into out and lse the attention of q to the pieces, else to `keys` [(k, v)]: see attend()."""
        attend(self.over(s), q, of_heads(s.pieces, kv) or keys, out, lse, ring)

    def backward(self, s: Activations, dout: torch.Tensor, q: torch.Tensor, keys: Pieces, out: torch.Tensor,
                 lse: torch.Tensor, kv: slice = EVERYTHING, ring: Ring | None = None) -> Gradients:
        """Computes dq, dk, dv of forward(). With pieces dq alone: the others are added to `s.sums`."""
        return attend_backward(self.over(s), dout, q, of_heads(s.pieces, kv) or keys,
                               of_heads(s.sums, kv), out, lse, ring)

    def key_gradients(self, s: Activations, k: torch.Tensor, v: torch.Tensor,
                      kv: slice = EVERYTHING) -> Gradients:
        """Writes dk, dv of the unit's own piece over k and v, when later subsequences and the unit have
        added all of theirs. `k`: with norms per head as the layer makes it."""
        [sums] = of_heads(s.sums[-1:], kv)
        return self.over(s).from_pieces(*sums, k, v)
