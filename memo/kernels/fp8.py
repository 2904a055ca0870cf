"""FP8 products with scales of now: operands are rounded, each row with its own scale, and summed in fp32.

    e4m3      inputs and weights: 3 bits of mantissa, magnitudes 2^-9 to 448
    e5m2      gradients: 2 bits, 2^-16 to 57,344
    scale     fp32, a power of two: to divide by it, and to multiply with it, rounds nothing

For y = x w^T, where s_x and s_dy are scales of rows (n,), and s_w is one of the whole matrix:

    y         s_x s_w (xq wq^T)
    dx        s_dy s_w (dyq wq)
    dw        m (f/m dyq)^T xq, where f = s_dy s_x and m is the largest f: the sum runs over the rows, so that
              their scales cannot stay outside. A power of two shifts exponents: f/m dyq is e5m2 again, but
              for rows so much smaller than the largest one that e5m2 has no exponent for them

A row's scale is of that row alone, so that a range of rows gets the same bits as all of them, whatever the
other ranks hold. Weights are rounded where they are used; those that travel (METP) where they come from.

torch._scaled_mm takes on a GPU: FP8 of both formats, not e5m2 twice; scales of rows on both sides, or one on
either side; a row-major first operand and a column-major second one, their widths multiples of 16; with
scales of rows a result in bf16, and e4m3 as the second operand; compute capability 8.9 and above. That of
8.9 ignores the strides of rows: backends.check_matmul() refuses tp there. Source: pytorch's aten/src/ATen/
native/cuda/ScaledBlas.cpp (_scaled_mm_out_cuda) and RowwiseScaledMM.cu (check_inputs,
f8f8bf16_rowwise_impl_sm89). `use_fast_accum`, sums of fewer bits, serves in the forward alone, as in torchao.
"""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from memo.errors import reason
from memo.kernels.rows import cut
from memo.system.axis import Axis, Works
from memo.system.device import synchronize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Index = int | slice | tuple[int | slice, ...]
EXPONENT = {E4M3: 7, E5M2: 14}  # of the largest element of a row, over its scale
LEAST = torch.finfo(torch.float32).tiny  # of fp32's normal numbers
TRITON = importlib.util.find_spec("triton") is not None
INFINITE = 0xff << 23  # fp32's bits of the exponent


@dataclass(eq=False)
class Scaled:
    """Holds what products take: of an input x = q * scale, q (..., n, K) in e4m3, scale (..., n) fp32; of a
    matrix w = q * scale, q (O, I) in e4m3, scale () fp32; of a gradient q = dy (..., n, K), which each
    product rounds, with the scales (..., n) of its rows in e5m2."""

    q: torch.Tensor
    scale: torch.Tensor

    def __getitem__(self, part: Index) -> "Scaled":
        return Scaled(self.q[part], self.scale[part])

    def __len__(self) -> int:
        return len(self.q)

    def transpose(self, first: int, second: int) -> "Scaled":
        return Scaled(self.q.transpose(first, second), self.scale.transpose(first, second))

    def t(self) -> "Scaled":
        return self.turned

    @cached_property
    def turned(self) -> "Scaled":
        """Turns a matrix into (I, O), once for the products of many pieces of rows."""
        return Scaled(self.q.t().contiguous(), self.scale)


Operand: TypeAlias = torch.Tensor | Scaled


def scale_of(amax: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Finds the power of two that gives the largest magnitude of a row, `amax`, the exponent EXPONENT; for
    zeros the least there is: they set no scale for other rows of a sum. Infinite where `amax` is."""
    power = amax.float().view(torch.int32).bitwise_and(INFINITE).view(torch.float32)  # without the mantissa
    return power.mul_(2.0**-EXPONENT[kind]).clamp_(min=LEAST)


def row_scales(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Finds the scales (..., n) of the rows of x (..., n, K)."""
    return scale_of(torch.linalg.vector_norm(x, math.inf, -1), kind)


def rounded(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounds x / scale, a power of two, to FP8, contiguous."""
    return torch.div(x, scale, out=torch.empty(x.shape, dtype=kind, device=x.device))


def rows(x: Operand) -> Scaled:
    """Rounds (..., K), each row with its own scale; what is Scaled already is as it was."""
    if isinstance(x, Scaled):
        return x
    scale = row_scales(x, E4M3)
    return Scaled(rounded(x, scale[..., None], E4M3), scale)


def gradients(dy: torch.Tensor) -> Scaled:
    return Scaled(dy, row_scales(dy, E5M2))


# what is kept of an input is what the products take of it

def kept(x: torch.Tensor, scale: torch.Tensor | None) -> Scaled:
    return rows(x) if scale is None else Scaled(x, scale)


def pieces(kept: Scaled, like: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    parts = cut(0, len(like), ranks=math.prod(like.shape[1:-1]))
    memory = torch.empty_like(like[:max(r.stop - r.start for r in parts)])  # of one piece at a time
    for r in parts:
        out = memory[:r.stop - r.start]
        yield r, out
        scale = kept.scale[r].copy_(row_scales(out, E4M3))
        torch.div(out, scale[..., None], out=kept.q[r])


def start_gather(axis: Axis, x: Scaled) -> Works[Scaled]:
    """Starts to gather all ranks' rows: (tp, n, K)."""
    q, scale = (axis.start_gather(t) for t in (x.q.view(torch.uint8), x.scale))
    return Works([q, scale], x, Scaled(q.received.view(E4M3), scale.received))


def place(x: Operand, dy: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(x.q.shape) if isinstance(x, Scaled) else x


def weights(w: Operand) -> Scaled:
    """Rounds (O, I), all with one scale; what is Scaled already is as it was."""
    if isinstance(w, Scaled):
        return w
    scale = scale_of(torch.linalg.vector_norm(w, math.inf), E4M3)
    return Scaled(rounded(w, scale, E4M3), scale)


# matrices that travel

def matrices(axis: Axis, parts: Sequence[torch.Tensor]) -> list[Scaled]:
    """Rounds with one scale for all ranks' parts: it need not travel, and rows of several make one matrix."""
    amax = torch.stack([torch.linalg.vector_norm(w, math.inf) for w in parts]).float()
    scales = scale_of(axis.gather(amax).amax(0), E4M3)
    return [Scaled(rounded(w, s, E4M3), s) for w, s in zip(parts, scales, strict=True)]


def carried(w: Operand) -> torch.Tensor:
    return w.q.view(torch.uint8) if isinstance(w, Scaled) else w  # a bias travels as it is


def arrived(t: torch.Tensor, like: Operand) -> Operand:
    return Scaled(t.view(E4M3), like.scale) if isinstance(like, Scaled) else t


def products(a: torch.Tensor, scale: torch.Tensor, w: Operand, outs: torch.Tensor,
             residual: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    """Computes outs (tp, n, O) = scale (tp, n) a (tp, n, I) w (O, I)^T + residual, (O,) or like outs."""
    by = weights(w)
    columns = by.scale.repeat(1, len(by))
    for i, out in enumerate(outs):
        to = out if residual is None else torch.empty_like(out)  # the residual may lie where the result goes
        if not out.is_meta:  # requests no memory; torch 2.13 has no meta kernel
            torch._scaled_mm(a[i], by.q.t(), scale[i][:, None].contiguous(), columns, out_dtype=to.dtype,
                             use_fast_accum=fast, out=to)
        if residual is not None:
            torch.add(residual if residual.dim() == 1 else residual[i], to, out=out)
    return outs


def failing(device: torch.device) -> str:
    """Says why a CUDA device computes no FP8 products, as some do not (pytorch issue 192707); else empty."""
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        forward(rows(x[None]), x, x[None])
        add_product(x.float(), *gradient_operands(gradients(x[None]), rows(x[None])))
        synchronize(device)
        return ""
    except Exception as e:  # Triton raises its own
        return reason(e)


def forward(x: Scaled, w: Operand, out: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Computes y = x w^T + residual."""
    return products(x.q, x.scale, w, out, residual, fast=True)


def input_gradient(g: Scaled, w: Operand, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """Computes dx = dy w, or adds it to dx."""
    dyq = rounded(g.q, g.scale[..., None], E5M2)
    return products(dyq, g.scale, w.t(), out, out if add else None)


def as_one(dys: Sequence[torch.Tensor], ws: Sequence[Scaled]) -> tuple[torch.Tensor, Scaled]:
    """Joins several dy, and their w: the scales go into the gradients, as far as they differ."""
    largest = torch.stack([w.scale for w in ws]).amax()
    dy = dys[0].new_empty(len(dys[0]), sum(map(len, ws)))
    for part, w, out in zip(dys, ws, dy.split([*map(len, ws)], 1), strict=True):
        torch.mul(part, w.scale / largest, out=out)
    return dy, Scaled(torch.cat([carried(w) for w in ws]).view(E4M3), largest)


def turn(dy: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, dyq: torch.Tensor,
         xq: torch.Tensor) -> None:
    """Writes dy (tp, n, O) times factor (tp, n) into dyq (O, tp n), and x (tp, n, I) into xq (I, tp n),
    square by square: torch reads a sector of 32 bytes for each element of a column."""
    from memo.kernels import fused
    n = dy.shape[1]
    for i, part in enumerate(factor.contiguous()):
        columns = slice(i * n, (i + 1) * n)
        fused.launch_turn(dy[i], dyq[:, columns], part)
        fused.launch_turn(x[i], xq[:, columns])


def gradient_operands(g: Scaled, x: Scaled) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes dyq (O, tp n), xq (I, tp n) and a scale: their product over all ranks' rows is dy^T x."""
    f = g.scale * x.scale  # (tp, n)
    largest = f.max().clamp_min(LEAST)
    # the GPU's kernels want both with the rows, over which the sum runs, as neighbours
    dyq = torch.empty(g.q.shape[-1], f.numel(), dtype=E5M2, device=f.device)
    xq = torch.empty(x.q.shape[-1], f.numel(), dtype=E4M3, device=f.device)
    factor = x.scale / largest
    if f.is_cuda and TRITON:
        turn(g.q, x.q, factor, dyq, xq)
    else:
        torch.mul(g.q.movedim(-1, 0), factor, out=dyq.unflatten(1, f.shape))
        xq.unflatten(1, f.shape).copy_(x.q.movedim(-1, 0))
    return dyq, xq, largest


def add_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
    """Adds scale a (O, n) b (I, n)^T, both in FP8, to dw (O, I)."""
    dw += torch._scaled_mm(a, b.t(), scale, torch.ones_like(scale), out_dtype=torch.float32)


def weight_gradient(dw: torch.Tensor, g: Scaled, x: Scaled) -> None:
    """Adds the sum of dy^T x over the rows of all ranks to dw (O, I)."""
    add_product(dw, *gradient_operands(g, x))
