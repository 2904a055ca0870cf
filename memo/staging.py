"""The ways between a model's device and an optimizer in host memory: gradients come down, weights go up.
Those of layers that come for each pass (memo/schedule/program.py) are steps of the schedule; of all others:

    backward    the gradients of a bucket, complete and summed over the data ranks, leave on the offload
                stream while the layers below compute
    step        the host works bucket by bucket; the weights of one bucket go up on the prefetch stream while
                the host works on the next
    forward     waits for the weights of a bucket where it first needs them

Of layers that come, a thread takes the steps, one after the other, while the next forward begins: where the
parameters of a layer are fetched, its step is awaited.

One block of page-locked host memory serves both: the weights go up from where their gradients came down;
but those of layers that come again after their gradients have left, for another micro batch, have their own.
Source: ZeRO-Offload (arXiv 2101.06840).
"""

import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace

import torch

from memo.config import Config
from memo.device import free_bytes
from memo.errors import warn
from memo.flat import Range, staged_bytes
from memo.formulas import parameters
from memo.protocols import Model
from memo.schedule.step import Step
from memo.schedule.streams import CpuMark, CpuStream, Event, Streams, Timeline
from memo.swap.alpha import OutOfHostMemory
from memo.swap.buffers import Pairs, bytes_of, copy_bytes
from memo.swap.slab import HostSlab, host_bytes

SHARE = 0.8  # of a GPU's free memory, for the parameters of a model that is not trained


def with_place(cfg: Config, device: torch.device, dtype: torch.dtype) -> Config:
    """The config of a model that is not trained, with the place of its layers' parameters: the host where a
    GPU has too little room, which is said."""
    needs = dtype.itemsize * parameters(cfg) // cfg.tp
    if device.type != "cuda" or needs <= SHARE * free_bytes(device)[0]:
        return replace(cfg, states="device")
    warn(f"{needs / 2**30:.4g} GiB of parameters do not fit the device: layers come from the host, which "
         "takes time")
    return replace(cfg, states="host", unit_order="layer")


class HostWeights:
    """Host memory for the parameters that come, of a model that is not trained: it loads them to there, and
    they come from there. Errors: OutOfHostMemory."""

    def __init__(self, model: Model) -> None:
        self.model, buckets = model, [model.buckets[k] for k in model.coming]
        begin, end = buckets[0][0], buckets[-1][1]
        needs, there = model.dtype.itemsize * (end - begin), host_bytes("auto")
        if needs > there:
            raise OutOfHostMemory(f"the parameters that come need {needs / 2**30:.4g} GiB of host memory, "
                                  f"{there / 2**30:.4g} GiB are free; try a larger --tp")
        self.slab = HostSlab(needs, model.device, model.cfg.pin_memory)
        flat = self.slab.bytes.view(model.dtype)
        for k, (start, stop) in zip(model.coming, buckets, strict=True):
            model.loaded[k] = flat[start - begin:stop - begin]

    def work_of(self, step: Step) -> tuple:
        """(function, argument) of a step that brings a layer's parameters."""
        return self.bring_weights, step.unit.layer + 1

    def bring_weights(self, k: int) -> None:
        """Copies the parameters of bucket k to the device."""
        at = self.model.loaded[k].storage_offset() * self.model.dtype.itemsize
        copy_bytes(self.slab.pairs(at, bytes_of(self.model.bucket_params[k])))


class Arrival(namedtuple("Arrival", "compute uploaded works")):
    """Weights of a bucket on their way to all data ranks."""

    def wait(self) -> None:
        # protects the forward from weights that are still on their way up
        self.compute.wait(self.uploaded)
        self.works.wait()


class Staging:
    """Host memory for one shard: `grads` (numel,) in fp32 and `scale` (1,), what clipping divides them by;
    `nbytes` in all. The streams are those of the model's swap. Errors: OutOfHostMemory.
    """

    def __init__(self, model: Model, numel: int, pin: bool) -> None:
        self.model = model
        self.nbytes = staged_bytes(model.cfg, numel, model.micro_batches, model.dtype.itemsize)
        self.slab = HostSlab(self.nbytes, model.device, pin)
        floats = self.slab.bytes[:4 * (numel + 1)].view(torch.float32)
        self.grads, self.scale = floats.split((numel, 1))
        self.apart = self.nbytes > floats.nbytes  # whether weights have places of their own
        self.worker = CpuStream("optimizer", Timeline())
        weakref.finalize(self, self.worker.close)
        self.complete, self.used = Event("gradients complete"), Event("weights used")
        self.left, self.uploaded, self.stepped = ([Event(f"{what} {name}") for name in model.bucket_names]
                                                  for what in ("gradients", "weights", "step"))

    @property
    def streams(self) -> Streams:
        return self.model.swap.streams

    def sharer(self, k: int) -> int | None:
        """The bucket above k whose gradients were last in the place of bucket k's; None without one."""
        begins = [grads.storage_offset() for grads in self.model.bucket_grads]
        return begins.index(begins[k], k + 1) if begins[k] in begins[k + 1:] else None

    def bring(self, k: int, piece: torch.Tensor, shard: slice, reduced: Callable[[], None]) -> None:
        """Queues the way of bucket k's gradients: reduced() sums them over the data ranks, then `piece`, this
        rank's, goes to `shard` of the host's, and their place on the device is zero again."""
        compute, offload, *_ = self.streams
        compute.record(self.complete)
        # protects the host from gradients that are not complete yet; and the weights that went up from there,
        # for which the forward has waited
        offload.wait(self.complete)
        offload.launch(f"gradients {self.model.bucket_names[k]}", self.leave, k, piece, shard, reduced)
        offload.record(self.left[k])
        if k > 1 and (above := self.sharer(k - 1)) is not None:
            # protects the gradients of a layer above, which leave the place that the next layer adds to
            compute.wait(self.left[above])

    def pairs(self, place: int, t: torch.Tensor) -> Pairs:
        """[(bytes of t, on the device, their place from number `place` of the host's on)], for one copy
        each."""
        return self.slab.pairs(4 * place, bytes_of(t))

    def down(self, *parts: tuple[int, torch.Tensor]) -> None:
        """Copies each (first place on the host, tensor)."""
        for place, t in parts:
            copy_bytes([(host, device) for device, host in self.pairs(place, t)])

    def up(self, place: int, t: torch.Tensor) -> None:
        """Copies to a tensor what lies from that place of the host's on."""
        copy_bytes(self.pairs(place, t))

    def leave(self, k: int, piece: torch.Tensor, shard: slice, reduced: Callable[[], None]) -> None:
        reduced()
        self.down((shard.start, piece))
        self.model.bucket_grads[k].zero_()

    def weights_at(self, own: Range) -> int:
        """The first byte on the host of the weights of a bucket's Range."""
        return self.grads.nbytes + 4 + self.model.dtype.itemsize * own.at if self.apart else 4 * own.at

    def stage(self, own: Range, weights: torch.Tensor) -> None:
        """Puts `weights`, the masters of a bucket's Range `own`, where they go up from."""
        first, dtype = self.weights_at(own), self.model.dtype
        self.slab.bytes[first:first + dtype.itemsize * len(weights)].view(dtype).copy_(weights)

    def later(self, k: int, step: Callable[[], None]) -> None:
        """Has the thread take the step of bucket k."""
        if self.model.device.type == "cpu":  # whose clock the thread has; a GPU's timeline has another one
            self.worker.timeline = self.streams.timeline
        else:
            self.worker.timeline.clear()
        self.worker.launch(f"step {self.model.bucket_names[k]}", step)
        self.worker.record(self.stepped[k])

    def fetch(self, k: int, own: Range, part: torch.Tensor) -> None:
        """Copies what is staged of bucket k's Range `own` to `part`, its parameters on the device."""
        if isinstance(mark := self.stepped[k].mark, CpuMark):
            self.worker.wait_for(mark)
        copy_bytes(self.slab.pairs(self.weights_at(own), bytes_of(part)))

    def arrived(self) -> None:
        """Holds the compute stream until all gradients have left."""
        # protects the norm from sums that are not there yet, and the next backward from gradients that are
        # not zero
        self.streams.compute.wait(self.left[0])

    def complete_with(self, last: list[tuple[int, torch.Tensor]]) -> None:
        """Copies the last [(first place on the host, tensor)], and returns when all gradients are on the
        host, and the device is done with the weights, which send() overwrites."""
        compute, offload, *_ = self.streams
        compute.record(self.used)
        # protects the host from gradients that the compute stream still works on
        offload.wait(self.used)
        offload.launch("gradients of all tp ranks", self.down, *last)
        offload.synchronize()  # the host reads them next

    def send(self, k: int, own: Range, part: torch.Tensor) -> None:
        """Starts to bring what is staged of bucket k's Range `own` to `part`, this rank's part of its
        parameters, and to all data ranks' parameters."""
        model, (compute, _, prefetch, *_) = self.model, self.streams
        prefetch.launch(f"weights {model.bucket_names[k]}", self.fetch, k, own, part)
        prefetch.record(self.uploaded[k])
        works = prefetch.call(model.mesh.replicas.start_gather, part, model.bucket_params[k])
        model.arriving[k] = Arrival(compute, self.uploaded[k], works)
