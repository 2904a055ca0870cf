"""Attention as a layer takes it, whoever has the other tokens: of its q, k and v as it makes them, over one
sequence, or with several subsequences over those up to its own.

Keys and values of several subsequences lie in pieces, `s.pieces`, which later subsequences read. Where a
piece holds them as the layer makes them, it is the unit's own `k` and `v`; else they are written into it
(put_keys). `kv`: the heads of keys that some heads of queries read. Shapes as in memo/attention.py.
"""

from collections.abc import Sequence

import torch

from memo.activations import Activations, Weights
from memo.attention import Attention, Gradients, Meanwhile, attend, attend_backward
from memo.config import Config
from memo.head_norm import HeadNorms
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
