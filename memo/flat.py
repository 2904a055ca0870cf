"""Flat buffers: every parameter, gradient and moment of a model is a view of one tensor.

So a norm, a cast or an optimizer step is one kernel over one tensor, and a shard is a range of it.
"""

from collections import namedtuple
from dataclasses import dataclass
from itertools import groupby
from math import prod

Piece = namedtuple("Piece", "name shape offsets tensor")
Piece.__doc__ = """A box of a stored tensor. `shape`: the whole tensor's, over all ranks; `offsets`: where the box begins in
it; `tensor`: a view with the box's shape and values."""


def whole(name, tensor):
    """A tensor as one Piece."""
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


@dataclass(frozen=True)
class Param:
    """Where a parameter lies. `offset` in elements."""

    offset: int
    shape: tuple

    @property
    def end(self):
        return self.offset + prod(self.shape)


def flat_layout(shapes, multiple=1):
    """{name: shape} -> {name: Param}, one behind the other, and [(start, end)] of the buckets: neighbours of one prefix (a
    layer, the embeddings, the final norm), each a multiple of `multiple` elements long."""
    layout, buckets, end = {}, [], 0
    for _, names in groupby(shapes, key=lambda name: name.rpartition(".")[0]):
        start = end
        for name in names:
            layout[name] = Param(end, tuple(shapes[name]))
            end = layout[name].end
        end = -(-end // multiple) * multiple
        buckets.append((start, end))
    return layout, buckets


def views(layout, flat):
    """{name: view of `flat` in the parameter's shape}."""
    return {name: flat[p.offset:p.end].view(p.shape) for name, p in layout.items()}


def joined(ranges):
    """[(start, end, what)] in ascending order, neighbours of the same `what` made one."""
    made = []
    for start, end, what in ranges:
        if made and made[-1][1:] == (start, what):
            start = made.pop()[0]
        made.append((start, end, what))
    return made


def boxes(start, end, width):
    """[(row, column, rows, columns)]: the elements [start, end) of a matrix with rows of `width`, in order, as at most three
    boxes: a part of a row, whole rows, a part of a row."""
    made = []
    while start < end:
        row, column = divmod(start, width)
        rows, columns = (end - start) // width, width
        if column or not rows:
            rows, columns = 1, min(width - column, end - start)
        made.append((row, column, rows, columns))
        start += rows * columns
    return made
