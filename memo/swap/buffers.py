"""Rounding buffers, the host slab, and the copies between them: the memory that a schedule of steps is
executed in. Source: MEMO 4.1 and 4.3.2.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from memo.layer import INPUT, Layer
from memo.swap.placement import Placement
from memo.swap.schedule import Step, schedule
from memo.swap.slab import HostSlab
from memo.swap.streams import Event, Streams, close_streams, open_streams
from memo.swap.validator import validate_schedule

# what a wait for a step of this kind is called in the timeline
EVENT_NAMES = {"forward": "computed", "offload": "offloaded", "backward": "done", "prefetch": "prefetched"}
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # bytes on the device and on the host, for one copy each


def copy_bytes(pairs: Pairs) -> None:
    """[(destination, source)]; without waiting for it on CUDA."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


class Swap:
    """The activations of all layers of a (B, T) batch that tp ranks share, placed as `placement` says.

    `tensors`: {name: Tensor} of one layer. `layers[i]`: the skeletal tensors of layer i, views of its buffer.
    `x[i]`: (n, C), the input of layer i, and x[L] the output of the last layer; in the backward their places
    hold the gradients of the same tensors. `missing[i]`: {tensor: the rows to recompute}. `steps`: the
    schedule; whoever executes it hands each step to launch(). Nothing is allocated by then, and the host
    waits for nothing (but on the CPU, which is its own device). Errors: OutOfHostMemory.
    """

    def __init__(self, placement: Placement, layer: Layer, B: int, T: int, dtype: torch.dtype,
                 device: torch.device, tp: int = 1, streams: Streams | None = None, pin: bool = True) -> None:
        p = self.placement = placement
        tensors = self.tensors = layer.tensors(B, T, dtype.itemsize, tp)
        nbytes = p.buffer_bytes(tensors)
        self.device_bytes, self.host_bytes = sum(nbytes.values()), p.host_bytes(tensors)
        self.streams = streams or open_streams(device)
        self.buffers: Any = {name: torch.empty(n, dtype=torch.uint8, device=device)
                             for name, n in nbytes.items()}

        def view(name: str, buffer: int) -> torch.Tensor:
            t = tensors[name]
            shift = t.nbytes if name == INPUT else t.nbytes * p.shift(name) // p.n_rows
            flat = self.buffers[name][buffer * shift:buffer * shift + t.nbytes]
            return flat.view(torch.float32 if t.fp32 else dtype).view(t.shape)
        self.x = [view(INPUT, i % p.n_inputs) for i in range(p.n_layer + 1)]
        # all but the inputs, which are one more than there are layers in flight
        shared = [name for name in tensors if name != INPUT]
        self.layers = [SimpleNamespace(x=self.x[i], **{name: view(name, i % p.n_buffers) for name in shared})
                       for i in range(p.n_layer)]
        self.missing = [p.missing(i) for i in range(p.n_layer)]
        self.slab = HostSlab(self.host_bytes, device, pin) if self.host_bytes else None
        self.pairs = self.swapped_pairs()
        self.set_steps(schedule(p.fates, p.n_layer))
        validate_schedule(self.steps, p.fates, p.n_layer)

    def set_steps(self, steps: list[Step]) -> None:
        """Makes `steps` the schedule."""
        self.steps = steps
        awaited = [key for step in steps for key in step.waits]
        self.events = {(kind, unit): Event(f"{EVENT_NAMES[kind]} {unit[0]}") for kind, unit in awaited}

    def swapped_pairs(self) -> list[Pairs]:
        """Of each layer [(bytes on the device, their bytes in the slab)]; empty where nothing is copied."""
        pairs: list[Pairs] = [[] for _ in self.layers]
        end = 0
        if self.slab is None:
            return pairs
        for i, layer in enumerate(self.layers):
            for name, (first, n) in self.placement.swapped(i, self.tensors).items():
                flat = getattr(layer, name).view(-1).view(torch.uint8)
                pairs[i] += self.slab.pairs(end, flat[first:first + n])
                end += n
        return pairs

    def wait(self, step: Step) -> None:
        """Holds back the stream of `step` until the steps are done that `step` waits for."""
        for key in step.waits:
            getattr(self.streams, step.stream).wait(self.events[key])

    def launch(self, step: Step, label: str | None = None, work: Callable | None = None, *args: Any) -> None:
        """Hands `step` to its stream, and notes it for the steps that wait for it. work(*args): what a step
        of the compute stream does."""
        stream = getattr(self.streams, step.stream)
        layer, _ = step.unit
        if step.kind == "offload":
            to_host = [(host, device) for device, host in self.pairs[layer]]
            stream.launch(f"offload {layer}", copy_bytes, to_host)
        elif step.kind == "prefetch":
            stream.launch(f"prefetch {layer}", copy_bytes, self.pairs[layer])
        else:
            stream.launch(label, work, *args)
        if step.key in self.events:
            stream.record(self.events[step.key])

    def close(self) -> None:
        """Waits for the copies under way and gives the memory back."""
        close_streams(self.streams)
        self.pairs, self.layers, self.x, self.buffers = [], [], [], None
        if self.slab is not None:
            self.slab.close()
            self.slab = None
