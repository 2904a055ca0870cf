"""One layer, forward and backward written out by hand: x -> mid = x + attention(ln1 x) -> mid + mlp(ln2 mid).

    s         the skeletal activations of the layer: named views of one buffer, see memo/layer.py
    n, tp     a rank's own rows, and the ranks that share a layer; (n, tp, width) is all their rows, in order
    dy, dx    gradients of the loss; parameter gradients accumulate in fp32

Every piece is a pair x_forward / x_backward. Pieces write where they are told (`out`), and the backward
writes over skeletal tensors that nobody reads any more: so a layer needs hardly any memory besides its
buffer. What is token-wise goes piece by piece of rows (parallel/tp.py), attention group by group of heads
(attention.py). Source: the layer of MEMO 3.1 (pre-norm GPT).
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch

from memo.attention import Attention, attend, attend_backward
from memo.config import Config
from memo.layer import layer_of
from memo.ops import Ops, gelu_backward, gelu_forward
from memo.parallel.mesh import Axis
from memo.parallel.tp import (
    bias_backward,
    column_linear_backward,
    column_linear_forward,
    in_turns,
    row_linear_backward,
    row_linear_forward,
)

EVERY_ROW, NO_ROWS = slice(None), slice(0)


def stretches(n: int, rows: dict[str, slice]) -> list[tuple[int, int, list[str]]]:
    """[(first, end, names)]: of n rows those that some of {name: slice} have, each with the names of all that
    have them."""
    bounds = {name: r.indices(n)[:2] for name, r in rows.items()}
    edges = sorted({edge for bound in bounds.values() for edge in bound})
    found = [(first, end, [name for name, (start, stop) in bounds.items() if start <= first and end <= stop])
             for first, end in pairwise(edges)]
    return [stretch for stretch in found if stretch[2]]


class Block:
    """Two halves, cut at `mid`. `w` and `dw`: this rank's parameters and their gradients, by name; `tp`: the
    Axis of the ranks that have the others.

    `rows`: {skeletal tensor: the slice of its rows to compute}. Whatever is token-wise can be computed for
    any range of rows and gives the same bits as the whole: recomputing a part of a layer rests on that.
    """

    def __init__(self, cfg: Config, w: SimpleNamespace, dw: SimpleNamespace, attention: Attention, ops: Ops,
                 tp: Axis) -> None:
        self.w, self.dw, self.attention, self.ops, self.tp = w, dw, attention, ops, tp
        self.gelu = "tanh" if cfg.gelu == "tanh" else "none"  # torch's names
        # the product of a query and a key has a variance of D; the softmax wants 1
        self.scale = (cfg.n_embd // cfg.n_head) ** -0.5
        names = [t.name for t in layer_of(cfg).skeletal]
        self.every_row, self.no_rows = dict.fromkeys(names, EVERY_ROW), dict.fromkeys(names, NO_ROWS)

    # --- forward ---

    def forward(self, s: SimpleNamespace, turn: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """`s.x` -> `out` (n, C), the next layer's x; fills the rest of `s`. `turn`: rotations, or None."""
        self.recompute(s, turn, self.every_row)  # for the first time
        return self.output(s, out)

    def recompute(self, s: SimpleNamespace, turn: torch.Tensor | None, rows: dict[str, slice]) -> None:
        """`rows` of the skeletal tensors from x; none of a tensor that `rows` does not name. All of it goes
        token by token, but for attention, which runs whole if any row of attn_out is wanted, and not at all
        otherwise. Source: MEMO 4.1."""
        # The order is that of the forward, and each piece reads what the piece before has made: rows that are
        # missing here came back from the host, or never left the buffer.
        rows = self.no_rows | rows
        self.queries_keys_values(s, turn, rows)
        if len(s.attn_out[rows["attn_out"]]):
            q, k, v, out = self.heads(s.q, s.k, s.v, s.attn_out, like=s.lse)  # (B, T, H/tp, D) each
            attend(self.attention, q, k, v, True, self.scale, out, s.lse)
        self.projection(s, rows)
        self.mlp(s, rows)

    def extend(self, s: SimpleNamespace, turn: torch.Tensor | None, rows: slice, attention: Attention,
               out: torch.Tensor) -> None:
        """The forward of one sequence's `rows` alone, whose queries see the keys and values of the rows
        before: `s` has those already. So text is generated. `attention`: an Attention that takes fewer
        queries than keys."""
        tensors = dict.fromkeys(self.every_row, rows)
        self.queries_keys_values(s, turn, tensors)
        H = s.lse.shape[1]
        q, k, v = (t.view(1, len(t), H, -1) for t in (s.q[rows], s.k[:rows.stop], s.v[:rows.stop]))
        s.attn_out[rows].view(q.shape).copy_(attention.forward(q, k, v, rows.start == 0, self.scale)[0])
        self.projection(s, tensors)
        self.mlp(s, tensors)
        self.output(s, out, rows)

    def queries_keys_values(self, s: SimpleNamespace, turn: torch.Tensor | None,
                            rows: dict[str, slice]) -> None:
        """ln1_out, q, k, v from x."""
        w, r = self.w, rows["ln1_out"]
        self.ops.layernorm_forward(s.x[r], w.ln1_w, w.ln1_b, s.ln1_out[r], s.ln1_mean[r], s.ln1_rstd[r])
        linears = dict(zip("qkv", zip((s.q, s.k, s.v), *self.qkv(w), strict=True), strict=True))
        # q, k and v may lack different rows: rows that several lack are gathered once for all of them
        for first, end, names in stretches(len(s.x), {name: rows[name] for name in "qkv"}):
            def project(r: slice, names: list[str] = names) -> Iterator[None]:
                x = self.tp.start_gather(s.ln1_out[r])
                yield  # the message travels, the other piece computes
                x = x.wait()  # (tp, n, C): the rows of all tp ranks
                for y, w_, b in (linears[name] for name in names):
                    column_linear_forward(x, w_, b, out=y[r])  # (n, tp, C/tp)
            in_turns(self.tp, s.x.device, first, end, project)
        if turn is not None:
            for name in "qk":
                self.ops.rotary(getattr(s, name)[rows[name]], turn[rows[name]], back=False)

    def projection(self, s: SimpleNamespace, rows: dict[str, slice]) -> None:
        """mid from x and attn_out: the end of the attention half."""
        w, r = self.w, rows["mid"]
        row_linear_forward(self.tp, s.x[r], s.attn_out[r], w.proj_w, w.proj_b, out=s.mid[r])  # (n, C)

    def mlp(self, s: SimpleNamespace, rows: dict[str, slice]) -> None:
        """ln2_out, fc1_out, gelu_out from mid: the MLP half but for its output."""
        w, r = self.w, rows["ln2_out"]
        self.ops.layernorm_forward(s.mid[r], w.ln2_w, w.ln2_b, s.ln2_out[r], s.ln2_mean[r], s.ln2_rstd[r])

        def widen(r: slice) -> Iterator[None]:
            x = self.tp.start_gather(s.ln2_out[r])
            yield
            column_linear_forward(x.wait(), w.fc1_w, w.fc1_b, out=s.fc1_out[r])  # (n, tp, 4C/tp)
        first, end, _ = rows["fc1_out"].indices(len(s.x))
        in_turns(self.tp, s.x.device, first, end, widen)
        r = rows["gelu_out"]
        gelu_forward(s.fc1_out[r], self.gelu, out=s.gelu_out[r])

    def output(self, s: SimpleNamespace, out: torch.Tensor, r: slice = EVERY_ROW) -> torch.Tensor:
        """Rows r of `out` (n, C), the next layer's x, from mid and gelu_out."""
        return row_linear_forward(self.tp, s.mid[r], s.gelu_out[r], self.w.fc2_w, self.w.fc2_b, out=out[r])

    # --- backward ---

    def backward(self, dy: torch.Tensor, s: SimpleNamespace, turn: torch.Tensor | None) -> torch.Tensor:
        """Writes dx over s.x, adds to the parameters' gradients, and uses up dy (n, C) and the rest of
        `s`."""
        # The MLP half and the projection first, for they go piece by piece.
        dout = s.ln2_out.view(s.attn_out.shape)  # piece by piece it takes the place of ln2's output
        in_turns(self.tp, dy.device, 0, len(dy), partial(self.after_attention_backward, dy, s, dout))
        # attention needs all rows: between the two halves every piece has to be done
        dout_, q, k, v, out = self.heads(dout, s.q, s.k, s.v, s.attn_out, like=s.lse)
        gradients = attend_backward(self.attention, dout_, q, k, v, out, s.lse, True, self.scale)
        dqkv = [g.reshape(s.q.shape) for g in gradients]  # (n, tp, C/tp) each
        del gradients
        for g in dqkv[:2] if turn is not None else ():
            self.ops.rotary(g, turn, back=True)
        in_turns(self.tp, dy.device, 0, len(dy), partial(self.queries_keys_values_backward, dy, s, dqkv))
        return s.x

    # Generators: each yields where a message is on its way, as tp.in_turns wants, and another piece computes
    # meanwhile.

    def after_attention_backward(self, dy: torch.Tensor, s: SimpleNamespace, dout: torch.Tensor,
                                 r: slice) -> Iterator[None]:
        """Rows r: the MLP half, then the projection: nothing between the two needs other rows."""
        yield from self.mlp_backward(dy, s, r)
        yield from self.projection_backward(dy, s, dout, r)

    def mlp_backward(self, dy: torch.Tensor, s: SimpleNamespace, r: slice) -> Iterator[None]:
        """out = mid + gelu(ln2(mid) fc1) fc2. Rows r: writes the gradient of mid over dy."""
        w, dw, tp, dy = self.w, self.dw, self.tp, dy[r]
        message = tp.start_gather(dy)  # every rank has columns of fc2, and needs the rows of all
        yield
        bias_backward(dy, dw.fc2_b)  # own rows only: the tp ranks' sums are added up in the optimizer
        d = row_linear_backward(message.wait(), s.gelu_out[r], w.fc2_w, dw.fc2_w, out=s.gelu_out[r])
        message = tp.start_gather(s.ln2_out[r])  # travels while the GELU computes
        d = gelu_backward(d, s.fc1_out[r], self.gelu, out=d)
        yield
        message = column_linear_backward(tp, [d], message.wait(), [w.fc1_w], [dw.fc1_w], [dw.fc1_b])
        yield
        # the residual's gradient, dy, is added inside
        self.ops.layernorm_backward(dy, message.wait(), s.mid[r], s.ln2_mean[r], s.ln2_rstd[r],
                                    w.ln2_w, w.ln2_b, dw.ln2_w, dw.ln2_b, out=dy)

    def projection_backward(self, dy: torch.Tensor, s: SimpleNamespace, dout: torch.Tensor,
                            r: slice) -> Iterator[None]:
        """mid = x + attn_out proj. Rows r: writes the gradient of attn_out into `dout`; that of x on this way
        is dy."""
        w, dw, dy = self.w, self.dw, dy[r]
        message = self.tp.start_gather(dy)
        yield
        bias_backward(dy, dw.proj_b)
        row_linear_backward(message.wait(), s.attn_out[r], w.proj_w, dw.proj_w, out=dout[r])

    def queries_keys_values_backward(self, dy: torch.Tensor, s: SimpleNamespace, dqkv: list[torch.Tensor],
                                     r: slice) -> Iterator[None]:
        """Rows r: writes the gradients of x, on its ways through mid (dy) and through q, k, v = ln1(x) qkv,
        over x."""
        w, dw, tp = self.w, self.dw, self.tp
        message = tp.start_gather(s.ln1_out[r])
        yield
        dys, (matrices, _) = [g[r] for g in dqkv], self.qkv(w)
        message = column_linear_backward(tp, dys, message.wait(), matrices, *self.qkv(dw))  # one sum of three
        yield
        self.ops.layernorm_backward(dy[r], message.wait(), s.x[r], s.ln1_mean[r], s.ln1_rstd[r],
                                    w.ln1_w, w.ln1_b, dw.ln1_w, dw.ln1_b, out=s.x[r])

    @staticmethod
    def qkv(w: SimpleNamespace) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The matrices of q, k and v, and their biases."""
        return [w.q_w, w.k_w, w.v_w], [w.q_b, w.k_b, w.v_b]

    @staticmethod
    def heads(*rows: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """(n, tp, C/tp) -> (B, T, H/tp, D), as views; `like` is the (B, H/tp, T) logsumexp."""
        B, H, T = like.shape
        return [x.view(B, T, H, -1) for x in rows]
