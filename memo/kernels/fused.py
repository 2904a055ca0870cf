"""Fused kernels in Triton, for what takes torch several passes over memory: see memo/kernels/ops.py.

A row of C elements is one program's, whole and in fp32 registers. Statistics, gradients of parameters and
rotations are fp32. tests/test_ops.py runs the kernels in Triton's interpreter against fp64; no GPU has yet.
"""

import torch
import triton
import triton.language as tl

MERGED_ROWS = 32  # of a head, by one program
ELEMENTS = 4096  # of a SwiGLU, or of a row of logits, at once by one program
SQUARE = 64  # rows and columns that a program turns


@triton.jit
def norm_forward_kernel(x, w, b, out, mean, rstd, C, eps,
                        HAS_MEAN: tl.constexpr, HAS_B: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = c < C
    v = tl.load(x + row * C + c, mask=inside, other=0.0).to(tl.float32)
    centred = v
    if HAS_MEAN:
        m = tl.sum(v, 0) / C
        centred = tl.where(inside, v - m, 0.0)
        tl.store(mean + row, m)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    y = centred * r * tl.load(w + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        y += tl.load(b + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, y, mask=inside)
    tl.store(rstd + row, r)


@triton.jit
def norm_means_kernel(dy, x, mean, rstd, w, means, N, C, HAS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Computes a row's means of g and of g xhat, for norm_backward_kernel where it is longer than a block."""
    row = tl.program_id(0).to(tl.int64)
    m, r, g_sum, along = 0.0, tl.load(rstd + row), 0.0, 0.0
    if HAS_MEAN:
        m = tl.load(mean + row)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < C
        g = (tl.load(dy + row * C + c, mask=inside, other=0.0).to(tl.float32)
             * tl.load(w + c, mask=inside, other=0.0).to(tl.float32))
        along += tl.sum(g * ((tl.load(x + row * C + c, mask=inside, other=0.0).to(tl.float32) - m) * r), 0)
        g_sum += tl.sum(g, 0)
    tl.store(means + row, g_sum / C)
    tl.store(means + N + row, along / C)


@triton.jit
def norm_backward_kernel(residual, dy, x, mean, rstd, w, means, sums, out, N, C, programs,
                         HAS_RESIDUAL: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_B: tl.constexpr,
                         WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy w, xhat = (x - mean) rstd; means over the
    row, of RMSNorm the last one alone. Not WHOLE: of a block of columns, whose rows' means are in `means`."""
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    gain = tl.load(w + c, mask=inside, other=0.0).to(tl.float32)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for k in range(tl.cdiv(N - p, programs)):
        row = p.to(tl.int64) + k * programs
        at = row * C + c
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        r, xhat = tl.load(rstd + row), tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_MEAN:
            xhat = tl.where(inside, xhat - tl.load(mean + row), 0.0)
        xhat *= r
        g = d * gain
        if WHOLE:
            dx = g - xhat * (tl.sum(g * xhat, 0) / C)
            if HAS_MEAN:
                dx -= tl.sum(g, 0) / C
        else:
            dx = g - xhat * tl.load(means + N + row)
            if HAS_MEAN:
                dx -= tl.load(means + row)
        dx *= r
        if HAS_RESIDUAL:
            dx += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, dx, mask=inside)
        dw += d * xhat
        if HAS_B:
            db += d
    tl.store(sums + p * C + c, dw, mask=inside)
    if HAS_B:
        tl.store(sums + (programs + p) * C + c, db, mask=inside)


@triton.jit
def rotary_kernel(x, turn, width, D, row_stride, turn_stride, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Turns a row's pairs (a, b) into (a cos - b sin, a sin + b cos); `turn`: (cos, sin) D/2 times a row."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    pairs = tl.load(x + row * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    angles = tl.load(turn + row * turn_stride + i % D, mask=inside, other=0.0)
    a, b = tl.split(tl.reshape(pairs, (BLOCK // 2, 2)))
    cos, sin = tl.split(tl.reshape(angles, (BLOCK // 2, 2)))
    if BACK:
        sin = -sin
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK,))
    tl.store(x + row * row_stride + i, turned, mask=inside)


@triton.jit
def merge_kernel(out, lse, out_, lse_, H, T, D, out_b, out_t, out_h, lse_b, lse_h,
                 other_b, other_t, other_h, lse_b_, lse_h_,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr):
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    t, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    rows, inside = t < T, (t < T)[:, None] & (d < D)[None, :]
    a = tl.load(lse + b * lse_b + h * lse_h + t, mask=rows, other=0.0)
    a_ = tl.load(lse_ + b * lse_b_ + h * lse_h_ + t, mask=rows, other=0.0)
    both = tl.maximum(a, a_) + tl.log(1.0 + tl.exp(-tl.abs(a - a_)))
    at = b.to(tl.int64) * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    at_ = b.to(tl.int64) * other_b + h * other_h + t[:, None] * other_t + d[None, :]
    part = tl.load(out + at, mask=inside, other=0.0) * tl.exp(a - both)[:, None]
    part_ = tl.load(out_ + at_, mask=inside, other=0.0).to(tl.float32) * tl.exp(a_ - both)[:, None]
    tl.store(out + at, part + part_, mask=inside)
    tl.store(lse + b * lse_b + h * lse_h + t, both, mask=rows)


@triton.jit
def gate_of(g, GELU: tl.constexpr):
    """Finds (t, dt/dg) with which g s, s = 1 / (1 + e^-t), is silu(g), t = g, or the tanh form of gelu(g)."""
    t, slope = g, 1.0
    if GELU:  # 1 + tanh(u) is 2 / (1 + e^-2u)
        t = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return t, slope


@triton.jit
def swiglu_forward_kernel(gate, up, out, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    t, _ = gate_of(g, GELU)
    tl.store(out + i, g / (1.0 + tl.exp(-t)) * u, mask=inside)


@triton.jit
def swiglu_backward_kernel(dy, gate, up, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Computes from silu(g) or gelu(g), g s, whose derivative is s (1 + g (1 - s) dt/dg): see gate_of."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    d = tl.load(dy + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    t, slope = gate_of(g, GELU)
    s = 1.0 / (1.0 + tl.exp(-t))
    tl.store(gate + i, d * u * s * (1.0 + g * (1.0 - s) * slope), mask=inside)
    tl.store(up + i, d * g * s, mask=inside)


@triton.jit
def logsumexp_kernel(logits, target, lse, of_target, V, first, BLOCK: tl.constexpr):
    """Computes a row's logsumexp, and its target's logit, 0 where the columns from `first` on lack it."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(logits + row * V + c, mask=c < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(v, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(v - larger), 0)
        largest = larger
    tl.store(lse + row, largest + tl.log(total))
    at = tl.load(target + row) - first
    inside = (at >= 0) & (at < V)
    tl.store(of_target + row, tl.load(logits + row * V + at, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def logits_backward_kernel(logits, target, lse, V, first, BLOCK: tl.constexpr):
    """Computes the gradient of a row's cross entropy over its logits: their softmax, less 1 at the target."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < V
    p = tl.exp(tl.load(logits + row * V + c, mask=inside, other=0.0).to(tl.float32) - tl.load(lse + row))
    p = tl.where(c == tl.load(target + row) - first, p - 1.0, p)
    tl.store(logits + row * V + c, p, mask=inside)


@triton.jit
def turn_kernel(x, factor, out, N, K, row_stride, column_stride, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Turns a square of x (N, K) into one of out (K, N), a byte an element; rows times `factor`, in e5m2."""
    n, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    v = tl.load(x + n.to(tl.int64)[:, None] * row_stride + k[None, :], mask=inside)
    if SCALED:
        v = v.to(tl.float32) * tl.load(factor + n, mask=n < N)[:, None]
        # e5m2 is the upper byte of fp16, which holds the products of bf16 and powers of two; to even
        bits = v.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        v = tl.where(v != v, 0x7F, (bits + 0x7F + ((bits >> 8) & 1)) >> 8).to(tl.uint8)
    tl.store(out + k.to(tl.int64)[:, None] * column_stride + n[None, :], tl.trans(v), mask=tl.trans(inside))


def warps(block: int) -> int:
    """Counts a program's warps: about 16 elements a thread."""
    return min(32, max(1, block // 512))


def launch_norm_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor,
                        mean: torch.Tensor | None, rstd: torch.Tensor, eps: float) -> None:
    assert x.is_contiguous() and out.is_contiguous()
    N, C = x.shape
    block = triton.next_power_of_2(C)
    norm_forward_kernel[(N,)](x, w, w if b is None else b, out, rstd if mean is None else mean, rstd, C, eps,
                              mean is not None, b is not None, block, num_warps=warps(block))


def launch_norm_backward(residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                         mean: torch.Tensor | None, rstd: torch.Tensor, w: torch.Tensor, sums: torch.Tensor,
                         means: torch.Tensor | None, out: torch.Tensor, most: int) -> None:
    """Writes dx, and into `sums` (1, programs, C) fp32 what each program adds to dw, with a bias (2, ...),
    for db too. `means`: memory, (2, N) fp32, where a row has more than `most` columns, a power of 2."""
    assert all(t is None or t.is_contiguous() for t in (residual, dy, x, out))
    N, C = x.shape
    programs, block = sums.shape[1], min(most, triton.next_power_of_2(C))
    if means is not None:
        norm_means_kernel[(N,)](dy, x, rstd if mean is None else mean, rstd, w, means, N, C,
                                mean is not None, block, num_warps=warps(block))
    norm_backward_kernel[(programs, triton.cdiv(C, block))](
        x if residual is None else residual, dy, x, rstd if mean is None else mean, rstd, w,
        rstd if means is None else means, sums, out, N, C, programs, residual is not None, mean is not None,
        len(sums) == 2, means is None, block, num_warps=warps(block))


def launch_rotary(x: torch.Tensor, turn: torch.Tensor, back: bool) -> None:
    """Rotates x (..., heads * D), rows any distance apart, in place by turn (..., D/2) complex64."""
    x, turn = x.view(-1, x.shape[-1]), turn.view(-1, turn.shape[-1])
    assert x.stride(1) == 1
    rows, width = x.shape
    angles = torch.view_as_real(turn).flatten(1)  # (rows, D)
    block = min(4096, triton.next_power_of_2(width))
    rotary_kernel[(rows, triton.cdiv(width, block))](
        x, angles, width, angles.shape[1], x.stride(0), angles.stride(0), back, block, num_warps=warps(block))


def launch_merge(out: torch.Tensor, lse: torch.Tensor, out_: torch.Tensor, lse_: torch.Tensor) -> None:
    """Merges out_ and lse_ into out (B, T, H, D) fp32 and lse (B, H, T); last dims are contiguous."""
    assert all(x.stride(-1) == 1 for x in (out, lse, out_, lse_))
    B, T, H, D = out.shape
    block = triton.next_power_of_2(D)
    merge_kernel[(triton.cdiv(T, MERGED_ROWS), B * H)](  # of the second there may be 65,535
        out, lse, out_, lse_, H, T, D, *out.stride()[:3], *lse.stride()[:2], *out_.stride()[:3],
        *lse_.stride()[:2], MERGED_ROWS, block, num_warps=warps(MERGED_ROWS * block))


def launch_swiglu_forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor,
                          gelu: bool = False) -> None:
    """Writes silu(gate) or gelu(gate), * up into `out`, all of one shape, contiguous; `out` may be either."""
    assert all(t.is_contiguous() for t in (gate, up, out))
    n = gate.numel()
    swiglu_forward_kernel[(triton.cdiv(n, ELEMENTS),)](gate, up, out, n, gelu, ELEMENTS,
                                                         num_warps=warps(ELEMENTS))


def launch_swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                           gelu: bool = False) -> None:
    """Writes the gradients over gate and up, all of one shape, contiguous."""
    assert all(t.is_contiguous() for t in (dy, gate, up))
    n = gate.numel()
    swiglu_backward_kernel[(triton.cdiv(n, ELEMENTS),)](dy, gate, up, n, gelu, ELEMENTS,
                                                          num_warps=warps(ELEMENTS))


def launch_logsumexp(logits: torch.Tensor, target: torch.Tensor, first: int, lse: torch.Tensor,
                     of_target: torch.Tensor) -> None:
    """Writes lse, of_target (rows,) fp32 of logits (rows, V), columns from `first` on; target: int64."""
    assert all(t.is_contiguous() for t in (logits, target, lse, of_target))
    rows, V = logits.shape
    logsumexp_kernel[(rows,)](logits, target, lse, of_target, V, first, ELEMENTS, num_warps=warps(ELEMENTS))


def launch_logits_backward(logits: torch.Tensor, target: torch.Tensor, first: int, lse: torch.Tensor) -> None:
    """Writes the gradient over logits; shapes as launch_logsumexp's."""
    assert all(t.is_contiguous() for t in (logits, target, lse))
    rows, V = logits.shape
    logits_backward_kernel[(rows, triton.cdiv(V, ELEMENTS))](logits, target, lse, V, first, ELEMENTS,
                                                             num_warps=warps(ELEMENTS))


def launch_turn(x: torch.Tensor, out: torch.Tensor, factor: torch.Tensor | None = None) -> None:
    """Writes x (N, K)^T into out (K, N), FP8: bytes as they are, or with `factor` (N,) fp32 x, in any
    dtype, times this in e5m2. Neighbours lie along the last dim of x, of out, of `factor`."""
    assert x.stride(1) == out.stride(1) == 1 and (factor is None or factor.is_contiguous())
    N, K = x.shape
    turn_kernel[(triton.cdiv(N, SQUARE), triton.cdiv(K, SQUARE))](
        x.view(torch.uint8) if factor is None else x, x if factor is None else factor, out.view(torch.uint8),
        N, K, x.stride(0), out.stride(0), factor is not None, SQUARE)
