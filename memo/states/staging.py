"""The host memory between a model's device and an optimizer on the host: gradients come down, weights go up,
by steps of the schedule. One page-locked block serves both, but for layers that come again for another micro
batch: weights go up from where their gradients came down. Source: ZeRO-Offload (arXiv 2101.06840)."""

import torch

from memo.config.config import Config
from memo.config.formulas import parameters
from memo.config.layout import Layout
from memo.errors import OutOfHostMemory, warn
from memo.memory.flat import Range, staged_bytes
from memo.memory.parameters import Parameters
from memo.memory.slab import HostSlab, host_bytes
from memo.schedule.step import Step
from memo.system.device import free_bytes

SHARE = 0.8  # of a GPU's free memory, for the parameters of a model that is not trained


def with_place(cfg: Config, device: torch.device, dtype: torch.dtype) -> Layout:
    """Lays out a model that is not trained: where a GPU has too little room, on the host, with a warning."""
    needs = dtype.itemsize * parameters(cfg) // cfg.tp
    if device.type != "cuda" or needs <= SHARE * free_bytes(device)[0]:
        return Layout.whole(cfg, states="device")
    warn(f"{needs / 2**30:.4g} GiB of parameters do not fit the device: layers come from the host, which "
         "takes time")
    return Layout.whole(cfg, states="host", unit_order="layer")


class HostWeights:
    """Holds in host memory the parameters that come, of a model not trained. Errors: OutOfHostMemory."""

    def __init__(self, model: Parameters) -> None:
        self.model, buckets = model, [model.buckets[k] for k in model.coming]
        begin, end = buckets[0][0], buckets[-1][1]
        needed, free = model.dtype.itemsize * (end - begin), host_bytes("auto")
        if needed > free:
            raise OutOfHostMemory(f"the parameters that come need {needed / 2**30:.4g} GiB of host memory, "
                                  f"{free / 2**30:.4g} GiB are free; try a larger --tp")
        self.slab = HostSlab(needed, model.device, model.cfg.pin_memory)
        flat = self.slab.bytes.view(model.dtype)
        for k, (start, stop) in zip(model.coming, buckets, strict=True):
            model.loaded[k] = flat[start - begin:stop - begin]

    def work_of(self, step: Step) -> tuple:
        """Finds (function, argument) of a step that brings a layer's parameters."""
        return self.bring_weights, step.unit.layer + 1

    def bring_weights(self, k: int) -> None:
        self.slab.copy(self.model.bucket_params[k], self.model.loaded[k])


class Staging:
    """Holds `grads` (numel,) of one shard, fp32, and `scale` (1,), their divisor. Errors: OutOfHostMemory."""

    def __init__(self, model: Parameters, numel: int, pin: bool) -> None:
        self.dtype, self.apart = model.dtype, model.states.apart
        self.nbytes = staged_bytes(model.cfg, numel, model.micro_batches, model.dtype.itemsize)
        self.slab = HostSlab(self.nbytes, model.device, pin)
        self.grads, self.scale = self.slab.bytes[:4 * (numel + 1)].view(torch.float32).split((numel, 1))

    def weights(self, own: Range) -> torch.Tensor:
        """Views where the new parameters of a bucket's Range go up from."""
        first = self.grads.nbytes + 4 + self.dtype.itemsize * own.at if self.apart else 4 * own.at
        return self.slab.bytes[first:first + self.dtype.itemsize * (own.end - own.start)].view(self.dtype)
