"""Things that are made ahead of its use; tensors in a ring, where each rank's visit all other ranks."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic

import torch

from memo.system.axis import Axis, Hop, T, Works


class Ahead(Generic[T]):
    """Iterates over `items`; makes `ahead` of them before they are asked for, from now on, prepare() more. A
    message under way is waited for when it is asked for."""

    def __init__(self, items: Iterator[T | Works[T]], ahead: int = 0) -> None:
        self.items, self.ahead, self.ready = items, ahead, deque[T | Works[T]]()
        self.prepare(ahead)

    def prepare(self, n: int = 1) -> None:
        """Makes items until n are ready, as far as there are so many."""
        self.ready.extend(islice(self.items, max(0, n - len(self.ready))))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self.prepare()
        if not self.ready:
            raise StopIteration
        item = self.ready.popleft()
        item = item.wait() if isinstance(item, Works) else item
        self.prepare(self.ahead)
        return item


def hops(axis: Axis, *sent: torch.Tensor) -> Iterator[Hop]:
    """Sends tensors to the next rank, then what has come, until all other ranks' have come by."""
    for left in reversed(range(axis.size - 1)):
        hop = axis.shift(*sent)  # what the hop before brings is sent on without a wait
        sent = tuple(hop.received) if left else ()
        yield hop


class Visits(Ahead[list[torch.Tensor]]):
    """Iterates over the tensors of the other ranks of `axis`, the rank before first. `ahead` hops are on
    their way beside the part in use."""

    def __init__(self, axis: Axis, *own: torch.Tensor, ahead: int = 1) -> None:
        self.axis = axis
        super().__init__(hops(axis, *own), ahead)
