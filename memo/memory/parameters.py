"""A rank's parameters and their gradients, each in one flat buffer."""

from collections.abc import Iterable

import torch

from memo.config.layout import Layout
from memo.memory.flat import bucket_places, gradients_in_turns, local_layout, states_of, weights_in_turns
from memo.memory.views import bucket_views
from memo.parallel.mesh import Mesh
from memo.parallel.tp import local


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
        self.layout, self.buckets = local_layout(cfg, mesh.weights.size, mesh.replicas.size)
        self.micro_batches = cfg.micro_batches(mesh.dp.size) // mesh.dp.size  # in a step
        self.coming = weights_in_turns(cfg)
        places, numel = bucket_places(self.buckets, self.coming)
        self.params = torch.zeros(numel, dtype=dtype, device=device)
        self.bucket_params = [self.params[at:end] for at, end in places]
        places, numel = bucket_places(self.buckets, gradients_in_turns(cfg, self.micro_batches))
        self.grads = torch.zeros(numel if grads else 0, dtype=torch.float32, device=device)
        self.bucket_grads = [self.grads[at:end] for at, end in places]
        self.loaded = list(self.bucket_params)
        self.states = states_of(cfg, mesh.replicas.size, self.micro_batches)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this rank's parts of (name, tensor) pairs, whole or these parts, into the parameters."""
        views_of = bucket_views(self.layout, self.buckets, self.loaded)
        for name, tensor in named_tensors:
            views_of[name].copy_(local(tensor, self.layout[name].whole, self.mesh.weights))
