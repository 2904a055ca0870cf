"""Views of flat tensors (memo/memory/flat.py), and boxes of stored ones."""

from collections import namedtuple
from math import isfinite

import torch

from memo.memory.flat import Location

Piece = namedtuple("Piece", "name shape offsets tensor")
Piece.__doc__ = """A box of a stored tensor. `shape`: the whole tensor's, over all ranks; `offsets`: where the
box begins in it; `tensor`: a view with the box's shape and values."""


def whole(name: str, tensor: torch.Tensor) -> Piece:
    """Makes one Piece of a tensor."""
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def is_finite(t: torch.Tensor) -> bool:
    ends = (part.aminmax() for part in t.reshape(-1).split(2**28) if part.numel())
    return all(isfinite(low) and isfinite(high) for low, high in ends)


def bucket_views(layout: dict[str, Location], buckets: list[tuple[int, int]],
                 parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views `parts`, the flat tensors of the buckets, as parameters -> {name: view in its shape}."""
    starts = {name: buckets[p.bucket][0] for name, p in layout.items()}
    return {name: parts[p.bucket][p.offset - starts[name]:p.end - starts[name]].view(p.shape)
            for name, p in layout.items()}


def views(layout: dict[str, Location], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views `flat` as parameters -> {name: view in its shape}."""
    return {name: flat[p.offset:p.end].view(p.shape) for name, p in layout.items()}
