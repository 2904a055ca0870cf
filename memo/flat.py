"""Flat buffers: every parameter, gradient and moment of a model is a view of one tensor.

So a norm, a cast or an optimizer step is one kernel over one tensor, and a shard is a range of it.
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Param:
    """Where a parameter lies. `offset` in elements."""

    offset: int
    shape: tuple

    @property
    def end(self):
        return self.offset + prod(self.shape)


def flat_layout(shapes):
    """{name: shape} -> {name: Param}, one behind the other."""
    layout, end = {}, 0
    for name, shape in shapes.items():
        layout[name] = Param(end, tuple(shape))
        end = layout[name].end
    return layout


def numel(layout):
    return max(p.end for p in layout.values())


def views(layout, flat):
    """{name: view of `flat` in the parameter's shape}."""
    return {name: flat[p.offset:p.end].view(p.shape) for name, p in layout.items()}


def weight_decay_ranges(layout):
    """[(start, end, decays)]: maximal ranges of neighbours that all decay (matrices) or all do not (vectors)."""
    ranges = []
    for p in layout.values():
        decays = len(p.shape) >= 2
        if ranges and ranges[-1][2] == decays:
            ranges[-1] = (ranges[-1][0], p.end, decays)
        else:
            ranges.append((p.offset, p.end, decays))
    return ranges
