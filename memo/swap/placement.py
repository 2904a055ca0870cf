"""Where the skeletal activations of all layers are between their forward and their backward. No torch.
Source: MEMO 4.1 and 4.3.2."""

from dataclasses import dataclass, field

from memo.layer import INPUT, Tensor
from memo.swap.schedule import Fates


@dataclass(frozen=True)
class Placement:
    """Where the skeletal activations of L layers are between their forward and their backward.

    Layer i computes in buffer i % n_buffers. Of a swapped layer, `kept[name]` of the N rows of each tensor
    survive: `x` on the device if x_stays, all else in the host slab. They are the first rows in an even
    buffer and the last in an odd one, and two buffers lie in memory so that their other rows, which are
    recomputed anyway, are the same:

        buffer 0   kept rows | shared rows                          N + kept rows in all, not 2 N
        buffer 1               shared rows | kept rows

    The last n_buffers layers are not swapped, only the last one is whole. A swapped layer below `input_only`
    keeps x alone, and so recomputes its attention too. The modes are points of this: keep (a buffer for each
    layer), recompute (one buffer, x_stays, only inputs), swap and memo.
    """

    n_layer: int
    n_buffers: int
    n_rows: int
    kept: dict = field(default_factory=dict)  # {tensor: rows}; all rows of those it does not name
    input_only: int = 0  # with any, `kept` names all tensors
    x_stays: bool = False

    @property
    def n_inputs(self) -> int:
        """Buffers for the layers' inputs and the last one's output, which is one more than there are layers
        in flight: a layer writes the next one's input while an earlier one's is still copied."""
        return self.n_layer + 1 if self.x_stays else self.n_buffers + 1

    @property
    def n_swapped(self) -> int:
        return self.n_layer - self.n_buffers

    def shift(self, name: str) -> int:
        """Rows from one buffer's `name` to the next one's."""
        return self.kept.get(name, self.n_rows) if self.n_buffers == 2 else self.n_rows

    def first_kept(self, i: int, name: str) -> tuple[int, int]:
        """(rows of tensor `name` of layer i that survive, the first of them)."""
        N = self.n_rows
        if i < min(self.input_only, self.n_swapped) and name != INPUT:
            rows = 0
        elif i < self.n_swapped or (i < self.n_layer - 1 and self.n_buffers == 2):
            rows = self.kept.get(name, N)
        else:
            rows = N
        return rows, (N - rows) * (i % self.n_buffers % 2)

    def missing(self, i: int) -> dict[str, slice]:
        """{tensor: slice of its rows that layer i recomputes}, of the tensors that lack any."""
        N, rows = self.n_rows, {}
        for name in self.kept:
            n, first = self.first_kept(i, name)
            if n < N:
                rows[name] = slice(0, first) if first else slice(n, N)
        return rows

    def swapped(self, i: int, tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
        """{tensor: (first byte, bytes) of what layer i sends to the host}."""
        ranges = {}
        for name, t in tensors.items() if i < self.n_swapped else ():
            kept, first = self.first_kept(i, name)
            if kept and not (name == INPUT and self.x_stays):
                ranges[name] = t.nbytes * first // self.n_rows, t.nbytes * kept // self.n_rows
        return ranges

    @property
    def fates(self) -> Fates:
        """What the schedule needs to know of the layers."""
        layers, swapped = range(self.n_layer), range(self.n_swapped)
        input_only = frozenset(swapped[:self.input_only])
        return Fates(self.n_buffers, frozenset(swapped) - (input_only if self.x_stays else set()),
                     frozenset(i for i in layers if self.missing(i)), input_only, self.x_stays)

    def host_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Bytes of the host slab: of all that is offloaded in one forward pass."""
        return sum(n for i in range(self.n_layer) for _, n in self.swapped(i, tensors).values())

    def buffer_bytes(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        """{tensor: bytes of all its buffers on the device}. Without x_stays they do not depend on n_layer,
        but for keep."""
        spans = {name: self.n_rows + (self.n_buffers - 1) * self.shift(name) for name in tensors}
        spans[INPUT] = self.n_inputs * self.n_rows
        return {name: t.nbytes * spans[name] // self.n_rows for name, t in tensors.items()}
