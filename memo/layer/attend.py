"""Attention as a layer takes it: queries meet pieces of keys and values, tile by tile.

Keys and values lie in `pieces` [(k, v)], in ascending order, the queries' own last: one piece where a
sequence is whole, one for each of several subsequences. A Meeting (memo/layer/tiles.py) says which tokens
these are, and so in which tiles the queries meet each piece: under the causal mask one full call of a kernel
for each piece before their own, and a causal one. They follow each other in this order; partial results are
merged through the logsumexp in fp32. So nothing has the length of all pieces, and each mode sums in the same
order. The backward of each call takes the merged out and lse. Gradients of keys and values of several
subsequences are added to `sums` [(dk, dv)], fp32 of the pieces' shapes; a single piece has no sums.

attend() and attend_backward() go by groups of heads: temporary tensors stay small. `kv`: the heads of keys
that some heads of queries read. Shapes as in memo/kernels/attention.py.

Norms of q and k, head by head (Qwen 3), stand in front of attention: the layer keeps q and k as they were
before. A group of heads is normed and rotated right before attention takes it, and again before its backward:
normed tensors are short, and none is copied to the host. A norm of all heads together (Olmo 2) does so with
all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from memo.config.config import Config
from memo.config.layer import heads_at_once, layer_of
from memo.kernels.attention import Gradients, Result
from memo.kernels.ops import Ops
from memo.kernels.rows import chunks
from memo.layer.activations import Activations, Pieces, Weights
from memo.layer.masks import EVERYTHING
from memo.layer.tiles import Meeting
from memo.parallel.mesh import Mesh
from memo.parallel.visits import Coming
from memo.system.axis import Axis

Meanwhile = Callable[[int, int], None]  # called between the blocks of a ring: see layer/cp.py
Ring = tuple[Coming, Meanwhile]  # what start_keys() gives, and that
Pair = tuple[torch.Tensor, torch.Tensor]
Kept = tuple[torch.Tensor, torch.Tensor]  # x and rstd, for the backward of a norm
SUMMED_ROWS = 2**12  # at once, of a sum over a row in fp32


def itself(k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k, v


def rounded(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return k.copy_(dk), v.copy_(dv)


class Attention(NamedTuple):
    """Holds attention on the ranks that share the tokens:

    forward(q, pieces, met) -> out (fp32 where it is merged), lse. `met`: a Meeting
    backward(dout, q, pieces, sums, out, lse, met)
        adds to `sums` -> [dq] (fp32 where it is a sum); without sums, of one piece, [dq, dk, dv]
    to_pieces(k, v): the rank's own (B, T, Hkv, D) -> as pieces of several subsequences hold them
    from_pieces(dk, dv, k, v)
        -> k, v, over which it writes the gradients of the rank's own: any memory of their shape and dtype;
        with norms per head (QKNorms) `k` comes as to_pieces got it
    start(k, v): sends these off before forward or backward, which get the other ranks' as `coming`

    `ranks`: among so many the heads are dealt in the pieces; `heads`: it takes multiples of so many. `name`,
    `label`, `takes_out`, `takes_lengths`: the kernel's.
    """

    name: str
    label: str
    forward: Callable[..., Result]
    backward: Callable[..., Gradients]
    to_pieces: Callable[[torch.Tensor, torch.Tensor], Pair] = itself
    from_pieces: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair] = rounded
    start: Callable[..., Coming] | None = None
    ranks: int = 1
    heads: int = 1
    takes_out: bool = False
    takes_lengths: bool = False

    def among(self, met: Meeting) -> "Attention":
        """Fixes which tokens meet."""
        return self._replace(forward=partial(self.forward, met=met), backward=partial(self.backward, met=met),
                             start=self.start and partial(self.start, met=met))


# --- group by group of heads ---

def groups_of(attention: Attention, shape: Sequence[int], pieces: Pieces) -> list[tuple[slice, slice]]:
    """Lists [(slice of the query heads that each rank is dealt, slice of the heads of keys that they read)]:
    see heads_at_once(). `shape`: (B, T, H, D) of the queries; the longest of them and the keys bounds all."""
    (B, T, H, D), ranks = shape, attention.ranks
    longest, sharing = max(T * ranks, *(k.shape[1] for k, _ in pieces)), H // ranks // pieces[0][0].shape[2]
    n = heads_at_once(B * longest, D, H // ranks, attention.heads, sharing)
    queries = [slice(i, min(i + n, H // ranks)) for i in range(0, H // ranks, n)]
    return [(h, slice(h.start // sharing, -(-h.stop // sharing))) for h in queries]


def dealt(attention: Attention, x: torch.Tensor, h: slice) -> torch.Tensor:
    """Views those heads of each rank's that `h` names: (B, T, H, D) -> (B, T, ranks, h, D)."""
    return x.unflatten(2, (attention.ranks, -1))[:, :, :, h]


def of_heads(pairs: Pieces, kv: slice) -> Pieces:
    return [(a[:, :, kv], b[:, :, kv]) for a, b in pairs]


def start_keys(attention: Attention, H: int, k: torch.Tensor, v: torch.Tensor) -> Coming | None:
    """Sends off the first keys and values that attend() of H query heads meets; None: none are sent."""
    if attention.start is None:
        return None
    _, kv = groups_of(attention, (*k.shape[:2], H, k.shape[3]), [(k, v)])[0]
    return attention.start(k[:, :, kv], v[:, :, kv])


def nothing(done: int, left: int) -> None:
    pass


def ends(groups: list[tuple[slice, slice]], h: slice, ring: Ring | None) -> dict[str, object]:
    """Gives the keys under way to the first group of heads, what to do meanwhile to the last."""
    if ring is None:
        return {}
    return dict(coming=ring[0] if h is groups[0][0] else None,
                meanwhile=ring[1] if h is groups[-1][0] else nothing)


def attend(attention: Attention, q: torch.Tensor, pieces: Pieces, out: torch.Tensor, lse: torch.Tensor,
           ring: Ring | None = None) -> Result:
    """Writes the attention of q to the pieces into out (B, T, H, D) and lse (B, H, T)."""
    groups, ranks = groups_of(attention, q.shape, pieces), attention.ranks
    for h, kv in groups:
        place = dealt(attention, out, h)
        where = dict(out=place.flatten(2, 3)) if attention.takes_out else {}
        out_, lse[:, h.start * ranks:h.stop * ranks] = attention.forward(
            dealt(attention, q, h).flatten(2, 3), of_heads(pieces, kv), **where, **ends(groups, h, ring))
        if not where:
            place.copy_(out_.view(place.shape))
        del out_  # before the next group's
    return out, lse


def attend_backward(attention: Attention, dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces,
                    out: torch.Tensor, lse: torch.Tensor, ring: Ring | None = None) -> Gradients:
    """Adds to `sums` -> [dq]; without sums [dq, dk, dv]. Several groups of heads write them over q, k, v, so
    that each gradient exists once. Groups that share a head of keys follow each other: without sums their
    gradients of it are summed in fp32."""
    groups, ranks = groups_of(attention, q.shape, pieces), attention.ranks
    shared, next_keys = None, [kv for _, kv in groups[1:]] + [None]  # the keys that the next group reads
    for (h, kv), following in zip(groups, next_keys, strict=True):
        dout_, q_, out_ = (dealt(attention, x, h).flatten(2, 3) for x in (dout, q, out))
        dq, *dkv = attention.backward(dout_, q_, of_heads(pieces, kv), of_heads(sums, kv), out_,
                                      lse[:, h.start * ranks:h.stop * ranks].contiguous(),
                                      **ends(groups, h, ring))
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


def by_groups(attention: Attention) -> Attention:
    """Makes attention of all heads, whose forward and backward are attend() and attend_backward()."""
    return attention._replace(forward=partial(attend, attention),
                              backward=partial(attend_backward, attention))


# --- slices of queries, where stages compute for each other ---

def in_slices(attention: Attention, meetings: Sequence[Meeting]) -> Attention:
    """Cuts queries of `attention` into slices: a Meeting for each. A slice meets those before it in full
    calls, like pieces, and itself in a causal one."""
    assert meetings  # reserve() gives each unit its own
    if len(meetings) == 1:
        return attention.among(*meetings)
    ranks = attention.ranks
    keys_ = [slice(*ends) for ends in pairwise(accumulate((m.rows for m in meetings), initial=0))]
    parts = [(slice(keys.start // ranks, keys.stop // ranks), keys, attention.among(meeting))
             for keys, meeting in zip(keys_, meetings, strict=True)]

    def met(pieces: Pieces, keys: slice) -> Pieces:
        rows = [slice(0, keys.start)] * (keys.start > 0) + [keys]
        return [*pieces[:-1], *((k[:, r], v[:, r]) for k, v in pieces[-1:] for r in rows)]

    def forward(q: torch.Tensor, pieces: Pieces) -> Result:
        out, lse = zip(*(part.forward(q[:, r], met(pieces, keys)) for r, keys, part in parts), strict=True)
        return torch.cat(out, 1), torch.cat(lse, 2)

    def backward(dout: torch.Tensor, q: torch.Tensor, pieces: Pieces, sums: Pieces, out: torch.Tensor,
                 lse: torch.Tensor) -> Gradients:
        return [torch.cat([part.backward(dout[:, r], q[:, r], met(pieces, keys), met(sums, keys), out[:, r],
                                         lse[:, :, r].contiguous())[0] for r, keys, part in parts], 1)]

    def to_pieces(k: torch.Tensor, v: torch.Tensor) -> Pair:
        ks, vs = zip(*(attention.to_pieces(k[:, r], v[:, r]) for r, *_ in parts), strict=True)
        return torch.cat(ks, 1), torch.cat(vs, 1)

    def from_pieces(dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
        for r, keys, _ in parts:
            attention.from_pieces(dk[:, keys], dv[:, keys], k[:, r], v[:, r])
        return k, v
    return attention._replace(forward=forward, backward=backward, to_pieces=to_pieces,
                              from_pieces=from_pieces)


# --- of a layer ---

@dataclass(frozen=True)
class QKNorms:
    """Norms each head of `q` or `k` (RMSNorm over D), or all heads together, which the ranks of `sharing`
    share out, and rotates it by `turn`. `w`, `dw`: of a layer."""

    ops: Ops
    w: Weights
    dw: Weights
    eps: float
    turn: torch.Tensor | None
    sharing: Axis | None = None

    def forward(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
        """Norms q or k. (B, T, h, D) -> the same, new."""
        w = self.w[f"{name}_norm_w"]
        rows = x.reshape(-1, len(w))  # a copy where the heads are some of several
        out, rstd = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float32, device=x.device)
        self.ops.norm_forward(rows, w, None, out, None, rstd, self.eps)
        if self.sharing and self.sharing.size > 1:
            own, rstd = rstd, self.mean(rstd**-2).rsqrt_()
            out.mul_((rstd / own)[:, None])
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
        if self.sharing and self.sharing.size > 1:
            # dx = r (g - xhat mean(g xhat)), g = dy w, xhat = x r; norm_backward() has the own heads' mean
            own = torch.empty_like(rstd)
            for dy_, x_, own_ in chunks(flat, rows, own, most=SUMMED_ROWS, cached=True):
                torch.mean((dy_.float() * x_).mul_(w), 1, out=own_)
            more = own.sub_(self.mean(own.clone())).mul_(rstd**3)
            self.ops.norm_backward(None, flat, rows, None, rstd, w, None, dw, None, out=flat)
            flat.addcmul_(rows, more.to(flat.dtype)[:, None])
        else:
            self.ops.norm_backward(None, flat, rows, None, rstd, w, None, dw, None, out=flat)
        return dy

    def mean(self, own: torch.Tensor) -> torch.Tensor:
        """Averages a number of each row over the ranks, in place."""
        assert self.sharing
        return self.sharing.sum(own).div_(self.sharing.size)

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

        def start(k: torch.Tensor, v: torch.Tensor) -> Coming:
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
    """Computes attention of a layer's q, k and v: over a whole sequence, or with several subsequences over
    those up to its own, which lie in pieces, `s.pieces`. Where the unit's own piece holds keys and values as
    the layer makes them, it is the unit's `k` and `v`; else put_keys() writes them there. `kv_heads`: of a
    rank."""

    def __init__(self, cfg: Config, w: Weights, dw: Weights, attention: tuple[Attention, Attention], ops: Ops,
                 mesh: Mesh) -> None:
        self.w, self.dw, self.ops, self.eps = w, dw, ops, cfg.norm_eps
        self.sharing = mesh.weights if cfg.qk_norm_over == "all" else None  # in a norm of all heads
        (self.whole, self.pieces), layer = attention, layer_of(cfg)
        self.head_dim = layer.head_dim
        self.kv_heads = layer.kv_heads // (1 if cfg.metp else mesh.weights.size)
        self.qk_norms = layer.qk_norms

    def heads(self, *rows: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Views (n, tp, width/tp) as (B, T, heads, D); `like` is the (B, H/tp, T) logsumexp."""
        return [x.view(like.shape[0], like.shape[2], -1, self.head_dim) for x in rows]

    def rotate(self, x: torch.Tensor, s: Activations, rows: slice = EVERYTHING, back: bool = False) -> None:
        """Rotates those rows of q or k, (n, tp, width/tp), in place; norms per head come before that."""
        if s.turn is not None and not self.qk_norms:
            self.ops.rotary(x, s.turn[rows], back)

    def norms(self, s: Activations) -> QKNorms:
        return QKNorms(self.ops, self.w, self.dw, self.eps, s.turn, self.sharing)

    def over(self, s: Activations) -> Attention:
        """Chooses the Attention to the whole sequence or to `s.pieces`, by groups of heads. Norms are in
        front: of each head inside a group, of all heads before there are groups."""
        attention = in_slices(self.pieces if s.pieces else self.whole, s.meetings)
        if not self.qk_norms:
            return by_groups(attention)
        norms, several = self.norms(s), bool(s.pieces)
        return (by_groups(norms.over(attention, several)) if self.sharing is None
                else norms.over(by_groups(attention), several))

    def keys_apart(self, s: Activations) -> bool:
        """Says whether the unit's own piece lacks keys and values as the layer makes them: so it does where
        they change on their way there, and where other stages compute later rows of several sequences, whose
        keys lie between."""
        return self.qk_norms or self.pieces.ranks > 1 or not s.pieces[-1][0].is_contiguous()

    def put_keys(self, s: Activations, k: torch.Tensor, v: torch.Tensor, kv: slice = EVERYTHING) -> None:
        """Writes the layer's k and v into the unit's own piece."""
        [own] = of_heads(s.pieces[-1:], kv)
        for place, tensor in zip(own, self.over(s).to_pieces(k, v), strict=True):
            place.copy_(tensor)

    def forward(self, s: Activations, q: torch.Tensor, keys: Pieces, out: torch.Tensor, lse: torch.Tensor,
                kv: slice = EVERYTHING, ring: Ring | None = None) -> None:
        """Writes into out and lse the attention of q to the pieces, else to `keys` [(k, v)]: see attend()."""
        self.over(s).forward(q, of_heads(s.pieces, kv) or keys, out, lse, ring)

    def backward(self, s: Activations, dout: torch.Tensor, q: torch.Tensor, keys: Pieces, out: torch.Tensor,
                 lse: torch.Tensor, kv: slice = EVERYTHING, ring: Ring | None = None) -> Gradients:
        """Computes dq, dk, dv of forward(). With pieces dq alone: the others are added to `s.sums`."""
        return self.over(s).backward(dout, q, of_heads(s.pieces, kv) or keys, of_heads(s.sums, kv), out, lse,
                                     ring)

    def key_gradients(self, s: Activations, k: torch.Tensor, v: torch.Tensor,
                      kv: slice = EVERYTHING) -> Gradients:
        """Writes dk, dv of the unit's own piece over k and v, when later subsequences and the unit have
        added all of theirs. `k`: with norms per head as the layer makes it."""
        [sums] = of_heads(s.sums[-1:], kv)
        return self.over(s).from_pieces(*sums, k, v)
