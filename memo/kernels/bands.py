"""Attention within a band: each query sees keys near its own, as in layers with a window. Shapes as in
memo/kernels/attention.py, of as many queries as keys."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from memo.kernels.backends import BAND_ROWS

aten = torch.ops.aten


class Band(NamedTuple):
    """Says, in the place of a causal mask, which keys the i-th query sees: from the (i - left)-th to the
    (i + right)-th; -1: to the last."""

    left: int
    right: int


def hidden_keys(rows: slice, keys: slice, band: Band, like: torch.Tensor) -> torch.Tensor:
    """Makes a mask of scores (rows, keys), of the dtype and the device of `like`: 0, or -inf of the keys that
    a query does not see."""
    distance = (torch.arange(keys.start, keys.stop, device=like.device)
                - torch.arange(rows.start, rows.stop, device=like.device)[:, None])
    hidden = distance < -band.left
    if band.right >= 0:
        hidden |= distance > band.right
    return torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


def blocks(n: int, band: Band) -> Iterator[tuple[slice, slice]]:
    """Cuts n queries into blocks -> (a block, the keys that any of it sees)."""
    for first in range(0, n, BAND_ROWS):
        end = min(first + BAND_ROWS, n)
        yield slice(first, end), slice(max(0, first - band.left),
                                       n if band.right < 0 else min(n, end + band.right))


def cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out and lse, block by block: the kernel computes what a mask hides too."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    # first: of fewer queries the requests for memory are the same, as many as there are
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for rows, keys in blocks(q.shape[2], band):
        out[:, :, rows], lse[:, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=hidden_keys(rows, keys, band, q))
    return out.transpose(1, 2), lse


def cpu_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor, band: Band) -> Sequence[torch.Tensor]:
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, sums = torch.empty_like(q), [torch.zeros_like(t, dtype=torch.float32) for t in (k, v)]
    for rows, keys in blocks(q.shape[2], band):
        dq[:, :, rows], *dkv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
            lse[:, :, rows].contiguous(), 0.0, False, attn_mask=hidden_keys(rows, keys, band, q))
        for total, part in zip(sums, dkv, strict=True):
            total[:, :, keys] += part
    return [t.transpose(1, 2).to(q.dtype) for t in (dq, *sums)]


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    T = q.shape[1]
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, T, T, 0.0, band.right == 0, False, window_size_left=band.left,
        window_size_right=band.right)
    return out, lse


def flash_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   lse: torch.Tensor, band: Band) -> Sequence[torch.Tensor]:
    T, unused = q.shape[1], torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    gradients: Sequence[torch.Tensor] = aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, T, T, 0.0, band.right == 0, unused, unused,
        window_size_left=band.left, window_size_right=band.right)
    return gradients
