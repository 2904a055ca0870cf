"""A copy of the optimizer's states for a checkpoint, made while training goes on. From a GPU the copy goes
through two small blocks of page-locked host memory: a GPU's copies to other memory are slow."""

import torch

from memo.swap.slab import HostSlab
from memo.views import Piece

STAGED_BYTES = 2**24  # of one block: enough for a bus's full speed, little beside the copy itself


class Copier:
    """Copies pieces to the host, from a thread of its own while training goes on."""

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self.slab: HostSlab | None = None  # page-locked once

    def copy(self, pieces: list[Piece], reached: torch.cuda.Event | None) -> list[Piece]:
        """The fp32 pieces in host memory of their own. `reached`: a GPU's event behind their last change."""
        if reached is None:
            return [p._replace(tensor=torch.empty(p.tensor.shape).copy_(p.tensor)) for p in pieces]
        device = pieces[0].tensor.device
        copies, stream = [torch.empty(p.tensor.shape) for p in pieces], torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self.slab = self.slab or HostSlab(2 * STAGED_BYTES, device, self.pin)
            # protects the copy from an optimizer step that is still under way
            stream.wait_event(reached)
            self.through(self.slab, copies, [p.tensor for p in pieces], stream)
        return [p._replace(tensor=t) for p, t in zip(pieces, copies, strict=True)]

    def through(self, slab: HostSlab, copies: list[torch.Tensor], tensors: list[torch.Tensor],
                stream: torch.cuda.Stream) -> None:
        """Part by part through the two blocks: one is filled while the other one is emptied."""
        blocks = slab.bytes.view(torch.float32).split(STAGED_BYTES // 4)
        parts = [part for pair in zip(copies, tensors, strict=True)
                 for part in zip(*(t.view(-1).split(STAGED_BYTES // 4) for t in pair), strict=True)]
        filled = [torch.cuda.Event() for _ in parts]
        for i in range(len(parts) + 1):
            if i < len(parts):
                blocks[i % 2][:len(parts[i][1])].copy_(parts[i][1], non_blocking=True)
                filled[i].record(stream)
            if i > 0:
                copy, _ = parts[i - 1]
                filled[i - 1].synchronize()  # of this thread only
                copy.copy_(blocks[(i - 1) % 2][:len(copy)])
