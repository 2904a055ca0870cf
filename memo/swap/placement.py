"""Where the skeletal activations of all layers are between their forward and their backward. Source: MEMO 4.1."""

from dataclasses import dataclass, field

from memo.layer import TABLE


@dataclass(frozen=True)
class Placement:
    """Where the skeletal activations of L layers are between their forward and their backward.

    Layer i computes in buffer i % n_buffers. Of a swapped layer, `kept[name]` of the N rows of each tensor survive: `x` on
    the device if x_stays, all else in the host slab. They are the first rows in an even buffer and the last in an odd one,
    and two buffers lie in memory so that their other rows, which are recomputed anyway, are the same:

        buffer 0   kept rows | shared rows                          N + kept rows in all, not 2 N
        buffer 1               shared rows | kept rows

    The last n_buffers layers are not swapped, only the last one is whole. A swapped layer below `input_only` keeps x alone,
    and so recomputes its attention too. The modes are points of this: keep (a buffer for each layer), recompute (one
    buffer, x_stays, only inputs), swap and memo.
    """

    n_layer: int
    n_buffers: int
    n_rows: int
    kept: dict = field(default_factory=dict)  # {tensor: rows}; all of those it does not name
    input_only: int = 0
    x_stays: bool = False

    @property
    def n_inputs(self):
        """Buffers for the layers' inputs and the last one's output, which is one more than there are layers in flight:
        a layer writes the next one's input while an earlier one's is still copied."""
        return self.n_layer + 1 if self.x_stays else self.n_buffers + 1

    @property
    def n_swapped(self):
        return self.n_layer - self.n_buffers

    def shift(self, name):
        """Rows from one buffer's `name` to the next one's."""
        return self.kept.get(name, self.n_rows) if self.n_buffers == 2 else self.n_rows

    def first_kept(self, i, name):
        """(rows of tensor `name` of layer i that survive, the first of them)."""
        N = self.n_rows
        if i < min(self.input_only, self.n_swapped) and name != "x":
            rows = 0
        elif i < self.n_swapped or (i < self.n_layer - 1 and self.n_buffers == 2):
            rows = self.kept.get(name, N)
        else:
            rows = N
        return rows, (N - rows) * (i % self.n_buffers % 2)

    def missing(self, i):
        """{tensor: slice of the rows that layer i recomputes}; empty where there are none."""
        N, rows = self.n_rows, {}
        for t in TABLE:
            kept, first = self.first_kept(i, t.name)
            rows[t.name] = slice(0, first) if first else slice(kept, N)
        return rows if any(r.stop > r.start for r in rows.values()) else {}

    def swapped(self, i, tensors):
        """{tensor: (first byte, bytes) of what layer i sends to the host}."""
        ranges = {}
        for name, t in tensors.items() if i < self.n_swapped else ():
            kept, first = self.first_kept(i, name)
            if kept and not (name == "x" and self.x_stays):
                ranges[name] = t.nbytes * first // self.n_rows, t.nbytes * kept // self.n_rows
        return ranges

    def host_bytes(self, tensors):
        """Bytes of the host slab: of all that is offloaded in one forward pass."""
        return sum(n for i in range(self.n_layer) for _, n in self.swapped(i, tensors).values())

    def buffer_bytes(self, tensors):
        """{tensor: bytes of all its buffers on the device}. Without x_stays they do not depend on n_layer, but for keep."""
        spans = {name: self.n_rows + (self.n_buffers - 1) * self.shift(name) for name in tensors}
        spans["x"] = self.n_inputs * self.n_rows
        return {name: t.nbytes * spans[name] // self.n_rows for name, t in tensors.items()}
