"""The skeletal activations of one layer: the one table of what is kept between its forward and its backward, and where.

Rows are tokens: the B*T tokens of a rank's sequences, one after the other, are N rows, and every tensor here but
`lse` is (N, width), so that a range of rows is contiguous and whatever is token-wise can be done on any range.
Source: MEMO 3.1 and 4.1; DESIGN section 2.
"""

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Placement:
    """Where the skeletal activations of L layers are between their forward and their backward.

    Layer i computes in buffer i % n_buffers, and the last n_buffers layers stay in theirs. Of every other layer the
    rows [0, kept[name]) of each tensor survive: `x` on the device if x_stays, all else in the host slab. The rest is
    recomputed. A layer below `input_only` keeps x alone, and so recomputes its attention too. The modes are points of
    this: keep (a buffer for each layer), recompute (one buffer, x_stays, only inputs), swap and memo.
    """

    n_layer: int
    n_buffers: int
    n_rows: int
    kept: dict = field(default_factory=dict)  # {tensor: rows}
    input_only: int = 0
    x_stays: bool = False

    @property
    def n_inputs(self):
        """Buffers for the layers' inputs and the last one's output, which is one more than there are layers in flight:
        a layer writes the next one's input while an earlier one's is still copied."""
        return self.n_layer + 1 if self.x_stays else self.n_buffers + 1

    def kept_rows(self, i):
        """{tensor: how many first rows of it survive} for layer i; None where it stays in its buffer as it is."""
        if i >= self.n_layer - self.n_buffers:
            return None
        if i >= self.input_only:
            return self.kept
        return {name: self.n_rows if name == "x" else 0 for name in self.kept}

    def swapped_bytes(self, i, slots):
        """{tensor: bytes of layer i that go to the host}: of each its first rows, of `lse` always all."""
        kept = self.kept_rows(i) or {}
        nbytes = {name: slots[name].nbytes * rows // self.n_rows for name, rows in kept.items()}
        return {name: n for name, n in nbytes.items() if n and not (name == "x" and self.x_stays)}

    def host_bytes(self, slots):
        """Bytes of the host slab: of all that is offloaded in one forward pass."""
        return sum(sum(self.swapped_bytes(i, slots).values()) for i in range(self.n_layer))

    def device_bytes(self, slots, buffer_bytes):
        """Bytes of all buffers. Without x_stays they do not depend on n_layer."""
        return self.n_buffers * buffer_bytes + (self.n_inputs - self.n_buffers) * slots["x"].nbytes
