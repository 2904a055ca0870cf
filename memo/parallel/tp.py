"""Tensor parallelism with Megatron's sequence parallelism: linears and embedding, each a pair of
x_forward / x_backward, over the tp ranks of an Axis.

Tokens are dealt out in turns: token t belongs to rank t % tp. Norms, residuals and biases behind a sum see a
rank's own n = N/tp rows (n, C). What is split by heads or columns has all N rows, in the tokens' order, seen
as (n, tp, width), so that a range of own rows is a range of all ranks' rows too. In between

    gather        (n, C) of every rank -> (tp, n, C); row i of rank r is token i * tp + r
    scatter_sum   (tp, n, C), partial sums of every rank -> (n, C)

With one rank all this is a view. On GPUs two pieces of rows are under way at once: the messages of one travel
while the other computes. Source: MEMO 3.1, Megatron-LM (arXiv 2205.05198).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from memo.config.layer import Parameter
from memo.kernels.matmul import Linear, Matmul, Operand
from memo.kernels.rows import chunks, cut, own_ids
from memo.system.axis import Axis, Works

# --- pieces of rows in turns ---

def pieces_at_once(axis: Axis, device: torch.device) -> int:
    """Counts pieces of rows under way at once: two but on a CPU, which carries the messages itself."""
    return 2 if axis.size > 1 and device.type != "cpu" else 1


def in_turns(axis: Axis, device: torch.device, first: int, end: int,
             work: Callable[[slice], Iterator[None]]) -> None:
    """Runs work(r) for pieces r of own rows first..end. Where it yields, its message is on its way, and the
    other piece computes. What pieces add to a tensor they add in their order."""
    at_once = pieces_at_once(axis, device)
    under_way: deque[Iterator[None]] = deque()

    def go_on(piece: Iterator[None]) -> None:
        if next(piece, "ended") != "ended":
            under_way.append(piece)
    for r in cut(first, end, axis.size, at_once):
        go_on(work(r))
        while len(under_way) == at_once:
            go_on(under_way.popleft())
    while under_way:
        go_on(under_way.popleft())


def local(tensor: torch.Tensor, p: Parameter, axis: Axis) -> torch.Tensor:
    """Views this rank's part of a parameter. `tensor`: all of it, or this part."""
    if p.split_dim is None or tensor.shape == p.local_shape(axis.size):
        return tensor
    copies = p.copies(axis.size)
    return tensor.chunk(axis.size // copies, p.split_dim)[axis.rank // copies]


def bias_backward(dy: torch.Tensor, db: torch.Tensor | None) -> None:
    if db is not None:
        db += dy.sum(0, dtype=torch.float32)


# --- linears; `matmul`: how their products are computed ---

# column-parallel: y = x w^T + b, where each rank has some of y's columns; the forward is one product

def column_backward(matmul: Matmul, axis: Axis, dys: Sequence[torch.Tensor], x: Operand,
                    linears: Iterable[Linear], gradients: Iterable[Linear]) -> Works[torch.Tensor]:
    """Computes dx, the sum of dy w over linears (w, b) of the same x: (n, tp, O/tp), (tp, n, I) -> Works of
    (n, I). `gradients`: (dw, db) of each, which it adds to. Uses x up."""
    x, taken = matmul.rows(x), [matmul.gradients(dy.transpose(0, 1)) for dy in dys]
    for dy, dy_, (dw, db) in zip(dys, taken, gradients, strict=True):
        bias_backward(dy.flatten(0, 1), db)
        matmul.weight_gradient(dw, dy_, x)
    dx = matmul.place(x, dys[0])
    for i, (dy_, (w, _)) in enumerate(zip(taken, linears, strict=True)):
        matmul.input_gradient(dy_, w, dx, add=i > 0)
    return axis.start_scatter_sum(dx)


# row-parallel: y = residual + x w^T + b, where each rank has some of x's columns

def row_forward(matmul: Matmul, axis: Axis, residual: torch.Tensor | None, x: Callable[[slice], Operand],
                w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor,
                rows: slice = slice(None)) -> torch.Tensor:
    """Computes `rows` of `out` (n, C) from residual (n, C) or None, x (n, tp, I/tp), w (C, I/tp). `x`: gives
    rows r as x(r)."""
    def piece(r: slice) -> Iterator[None]:
        x_ = matmul.rows(x(r).transpose(0, 1))
        if axis.size == 1:
            matmul.forward(x_, w, out[r][None], None if residual is None else residual[r][None])
        else:
            partial_sums = out.new_empty(axis.size, *out[r].shape)
            total = axis.start_scatter_sum(matmul.forward(x_, w, partial_sums))
            del x_, partial_sums  # the message has the sums, until it is through
            yield
            if residual is None:
                out[r].copy_(total.wait())
            else:
                torch.add(residual[r], total.wait(), out=out[r])
    in_turns(axis, out.device, *rows.indices(len(out))[:2], piece)
    if b is not None:
        out[rows].add_(b)
    return out


# (tp, n, C) -> dx (n, tp, I/tp), over `out`, by default matmul.place() of x
def row_backward(matmul: Matmul, dy: torch.Tensor, x: Operand, w: torch.Tensor, dw: torch.Tensor,
                 out: torch.Tensor | None = None) -> torch.Tensor:
    taken = matmul.gradients(dy)
    matmul.weight_gradient(dw, taken, matmul.rows(x.transpose(0, 1)))
    out = matmul.place(x, dy) if out is None else out
    matmul.input_gradient(taken, w, out.transpose(0, 1))
    return out


# --- vocabulary-parallel: each rank has some rows of the embedding ---

# (n, tp), (V/tp, C) -> scale * (n, C)
def embedding_forward(axis: Axis, ids: torch.Tensor, w: torch.Tensor, out: torch.Tensor,
                      scale: float = 1.0) -> torch.Tensor:
    for chunk, out_ in chunks(ids, out, ranks=axis.size):
        parts = out_[None] if axis.size == 1 else out.new_empty(axis.size, *out_.shape)
        for ids_, part in zip(chunk.unbind(1), parts, strict=True):
            own, mask = own_ids(axis, ids_, len(w))
            torch.index_select(w, 0, own, out=part)
            part.mul_((mask if scale == 1 else mask * scale)[:, None])
        if axis.size > 1:
            out_.copy_(axis.scatter_sum(parts))
    return out


# (n, tp), (n, C) -> onto (V/tp, C)
def embedding_backward(axis: Axis, ids: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor,
                       scale: float = 1.0) -> None:
    for chunk, dx_chunk in chunks(ids, dx, ranks=axis.size):
        for ids_, dx_ in zip(chunk.unbind(1), axis.gather(dx_chunk), strict=True):
            own, mask = own_ids(axis, ids_, len(dw))
            # without a name of its own the fp32 copy is gone before the next one is made
            dw.index_add_(0, own, torch.mul(dx_, (mask if scale == 1 else mask * scale)[:, None],
                                            out=dx_.new_empty(dx_.shape, dtype=torch.float32)))
