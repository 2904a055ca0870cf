"""A rank's parameters and their gradients, each in one flat buffer; views; boxes of stored tensors."""

from collections import namedtuple
from collections.abc import Iterable
from math import isfinite

import torch

from memo.config.layout import Layout
from memo.memory import flat
from memo.parallel.mesh import Mesh
from memo.parallel.tp import local

Piece = namedtuple("Piece", "name shape offsets tensor")
Piece.__doc__ = """A box of a stored tensor. `shape`: the whole tensor's, over all ranks; `offsets`: where the
box begins in it; `tensor`: a view with the box's shape and values."""


def whole(name: str, tensor: torch.Tensor) -> Piece:
    """Makes one Piece of a tensor."""
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def is_finite(t: torch.Tensor) -> bool:
    ends = (part.aminmax() for part in t.reshape(-1).split(2**28) if part.numel())
    return all(isfinite(low) and isfinite(high) for low, high in ends)


def bucket_views(layout: dict[str, flat.Location], buckets: list[tuple[int, int]],
                 parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views `parts`, the flat tensors of the buckets, as parameters -> {name: view in its shape}."""
    starts = {name: buckets[p.bucket][0] for name, p in layout.items()}
    return {name: parts[p.bucket][p.offset - starts[name]:p.end - starts[name]].view(p.shape)
            for name, p in layout.items()}


def views(layout: dict[str, flat.Location], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views a flat `tensor` as parameters -> {name: view in its shape}."""
    return {name: tensor[p.offset:p.end].view(p.shape) for name, p in layout.items()}


class Parameters:
    """Holds a rank's parameters and, with `grads`, their gradients (fp32): one tensor each, so that a norm, a
    cast or an optimizer step is one kernel, and a shard is a range.

    `buckets`: [(start, end)] of embeddings, each layer, final norm; mesh.replicas can share each out equally.
    `bucket_params`, `bucket_grads`: those of each, flat; some may take turns in two places
    (memo/memory/flat.py). `coming`: the buckets whose parameters come for each pass. `loaded`: to where
    load() copies each bucket.
    """

    def __init__(self, cfg: Layout, device: torch.device, dtype: torch.dtype, grads: bool,
                 mesh: Mesh) -> None:
        self.cfg, self.device, self.dtype, self.mesh = cfg, torch.device(device), dtype, mesh
        self.layout, self.buckets = flat.local_layout(cfg, mesh.weights.size, mesh.replicas.size)
        self.micro_batches = cfg.micro_batches(mesh.dp.size) // mesh.dp.size  # in a step
        self.coming = flat.weights_in_turns(cfg)
        places, numel = flat.bucket_places(self.buckets, self.coming)
        self.params = torch.zeros(numel, dtype=dtype, device=device)
        self.bucket_params = [self.params[at:end] for at, end in places]
        places, numel = flat.bucket_places(self.buckets, flat.gradients_in_turns(cfg, self.micro_batches))
        self.grads = torch.zeros(numel if grads else 0, dtype=torch.float32, device=device)
        self.bucket_grads = [self.grads[at:end] for at, end in places]
        self.loaded = list(self.bucket_params)
        self.states = flat.states_of(cfg, mesh.replicas.size, self.micro_batches)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this rank's parts of (name, tensor) pairs, whole or these parts, into the parameters."""
        views_of = bucket_views(self.layout, self.buckets, self.loaded)
        for name, tensor in named_tensors:
            views_of[name].copy_(local(tensor, self.layout[name].whole, self.mesh.weights))
