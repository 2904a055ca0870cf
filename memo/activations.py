"""The skeletal activations of one layer: the one table of what is kept between its forward and its backward.

Rows are tokens: the B*T tokens of a rank's sequences, one after the other, are N rows, and every tensor here but
`lse` is (N, width), so that a range of rows is contiguous and whatever is token-wise can be done on any range.
Source: MEMO 3.1 and 4.1; DESIGN section 2.
"""

from dataclasses import dataclass
from math import prod

ALIGNMENT = 512  # bytes; what CUDA's allocator gives, enough for every kernel's vector loads


@dataclass(frozen=True)
class Skeletal:
    """One row of the table. Its elements per token: units * C/tp, or one per head (`lse`), or one (a statistic)."""

    name: str
    units: int = 0
    per_head: bool = False
    other: bool = True  # one of the "others": token-wise in x and attn_out, so it can be recomputed from them


TABLE = (
    Skeletal("x", 1, other=False),         # layer input
    Skeletal("attn_out", 1, other=False),  # recomputing attention is what costs
    Skeletal("lse", per_head=True, other=False),
    Skeletal("ln1_out", 1),
    Skeletal("ln1_mean"),
    Skeletal("ln1_rstd"),
    Skeletal("q", 1),
    Skeletal("k", 1),
    Skeletal("v", 1),
    Skeletal("mid", 1),                    # x + attention branch
    Skeletal("ln2_out", 1),
    Skeletal("ln2_mean"),
    Skeletal("ln2_rstd"),
    Skeletal("fc1_out", 4),
    Skeletal("gelu_out", 4),
)


@dataclass(frozen=True)
class Slot:
    """Where a skeletal tensor lies in a layer's buffer. `offset` and `nbytes` in bytes."""

    offset: int
    nbytes: int
    shape: tuple
    fp32: bool  # statistics and the logsumexp are fp32 whatever the dtype of the run


def layout(B, T, C, H, itemsize, tp=1):
    """({name: Slot}, bytes of the whole buffer) for one layer's skeletal tensors. `itemsize` in bytes."""
    slots, end = {}, 0
    for t in TABLE:
        shape = (B * T, t.units * C // tp) if t.units else (B, H // tp, T) if t.per_head else (B * T,)
        nbytes = prod(shape) * (itemsize if t.units else 4)
        slots[t.name] = Slot(end, nbytes, shape, fp32=not t.units)
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return slots, end
