"""Tensors in a ring: each rank's visit all other ranks, a hop to the next rank at a time."""

from collections import deque
from collections.abc import Sequence

import torch

from memo.system.axis import Axis, Hop


class Visits:
    """Iterates over the tensors of the other ranks of `axis`, the rank before first. `ahead` hops are on
    their way beside the part in use, from now on. Each sends what the one before brings, without a wait."""

    def __init__(self, axis: Axis, *own: torch.Tensor, ahead: int = 1) -> None:
        self.axis, self.ahead, self.left = axis, ahead, axis.size - 1
        self.hops = deque[Hop]()
        self.last: Sequence[torch.Tensor] = own  # what the next hop sends
        self.post(ahead)

    def post(self, n: int) -> None:
        """Starts hops, of those that are left, until n are on their way."""
        while self.left and len(self.hops) < n:
            self.left -= 1
            self.hops.append(self.axis.shift(*self.last))
            self.last = self.hops[-1].received if self.left else ()

    def __iter__(self) -> "Visits":
        return self

    def __next__(self) -> list[torch.Tensor]:
        if not self.hops:
            raise StopIteration
        tensors = self.hops.popleft().wait()
        self.post(self.ahead)
        return tensors
