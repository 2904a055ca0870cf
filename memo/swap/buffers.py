"""Rounding buffers, host slab, and the schedule that moves skeletal activations between them while the GPU computes.

    forward    layer i computes in buffer i % n; then the offload stream copies what survives of it to the slab while
               the next layers compute
    backward   the last n layers are still in their buffers; when layer i is done, the prefetch stream refills its
               buffer with layer i - n while the layers between compute

`memo` and `swap` have n = 2 (or more where the device has room), `keep` has n = L and `recompute` n = 1: then nothing
is copied. Source: MEMO 4.1 and 4.3.2; DESIGN section 3.
"""

from types import SimpleNamespace

import torch

from memo.layer import layout
from memo.swap.slab import HostSlab
from memo.swap.streams import Event, close_streams, open_streams


def copy_bytes(pairs):
    """[(destination, source)]; without waiting for it on CUDA."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


class Swap:
    """The activations of all layers of a (B, T) batch that tp ranks share, placed as `placement` says.

    `layers[i]`: the skeletal tensors of layer i, views of its buffer. `x[i]`: (n, C), the input of layer i, and x[L] the
    output of the last; in the backward their places hold the gradients of the same tensors. `missing[i]`: {tensor: the
    rows to recompute}. The caller brackets each layer's forward with before_forward and after_forward, and so
    on; nothing is allocated and the host waits for nothing (but on the CPU, which is its own device).
    Errors: OutOfHostMemory.
    """

    def __init__(self, placement, B, T, C, H, dtype, device, tp=1, streams=None, pin=True):
        p = self.placement = placement
        tensors = layout(B, T, C, H, dtype.itemsize, tp)
        nbytes = p.buffer_bytes(tensors)
        self.device_bytes, self.host_bytes = sum(nbytes.values()), p.host_bytes(tensors)
        self.streams = streams or open_streams(device)
        self.buffers = {name: torch.empty(n, dtype=torch.uint8, device=device) for name, n in nbytes.items()}

        def view(name, buffer):
            t = tensors[name]
            shift = t.nbytes if name == "x" else t.nbytes * p.shift(name) // p.n_rows
            flat = self.buffers[name][buffer * shift:buffer * shift + t.nbytes]
            return flat.view(torch.float32 if t.fp32 else dtype).view(t.shape)
        self.x = [view("x", i % p.n_inputs) for i in range(p.n_layer + 1)]
        self.layers = [SimpleNamespace(**{name: view(name, i % p.n_buffers) for name in tensors if name != "x"}, x=self.x[i])
                       for i in range(p.n_layer)]
        self.missing = [p.missing(i) for i in range(p.n_layer)]
        self.slab = HostSlab(self.host_bytes, device, pin) if self.host_bytes else None
        self.pairs = self.swapped_pairs(tensors)
        self.computed, self.offloaded, self.done, self.prefetched = (
            [Event(f"{name} {i}") for i in range(p.n_layer)] for name in ("computed", "offloaded", "done", "prefetched"))

    def swapped_pairs(self, tensors):
        """Of each layer [(bytes on the device, their bytes in the slab)]; empty where nothing is copied."""
        pairs, end = [], 0
        for i, layer in enumerate(self.layers):
            pairs.append([])
            for name, (first, n) in self.placement.swapped(i, tensors).items():
                flat = getattr(layer, name).view(-1).view(torch.uint8)
                pairs[i] += self.slab.pairs(end, flat[first:first + n])
                end += n
        return pairs

    # --- forward ---

    def before_forward(self, i):
        j = i - self.placement.n_buffers
        if j >= 0 and self.pairs[j]:
            # protects layer j: its copy still reads the buffer (and the input) that layer i is about to write
            self.streams.compute.wait(self.offloaded[j])

    def after_forward(self, i):
        if self.pairs[i]:
            self.streams.compute.record(self.computed[i])
            # protects the slab from a layer i that is not computed yet
            self.streams.offload.wait(self.computed[i])
            self.streams.offload.launch(f"offload {i}", copy_bytes, [(host, device) for device, host in self.pairs[i]])
            self.streams.offload.record(self.offloaded[i])

    # --- backward ---

    def before_backward(self, i):
        if self.pairs[i]:
            # protects layer i's recompute and backward from a buffer that is not refilled yet
            self.streams.compute.wait(self.prefetched[i])

    def after_backward(self, i):
        j = i - self.placement.n_buffers
        if j >= 0 and self.pairs[j]:
            self.streams.compute.record(self.done[i])
            # protects layer i: its backward still reads the buffer that layer j's copy is about to fill
            self.streams.prefetch.wait(self.done[i])
            self.streams.prefetch.launch(f"prefetch {j}", copy_bytes, self.pairs[j])
            self.streams.prefetch.record(self.prefetched[j])

    def close(self):
        """Waits for the copies under way and gives the memory back."""
        close_streams(self.streams)
        self.pairs = self.layers = self.x = self.buffers = None
        if self.slab is not None:
            self.slab.close()
            self.slab = None
