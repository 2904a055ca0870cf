"""Things that are made ahead of its use; tensors in a ring, where each rank's visit all other ranks."""

from collections import deque
from collections.abc import Iterator, Sequence
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


def jump(stops: Sequence[int], at: int) -> int | None:
    """Counts by how many ranks to move tensors on, when a ring comes to the distance `at` from the rank that
    they are of; ranks that do not need them are left out. `stops`: the distances, ascending, at which they
    are made or needed. At a stop: as many as from the stop before; between stops 0, they wait; None where
    there is nothing to move: up to the first stop, and behind the last."""
    before, after = [stop for stop in stops if stop < at], [stop for stop in stops if stop >= at]
    if not before or not after:
        return None
    return at - before[-1] if after[0] == at else 0


def hops(axis: Axis, needed: Sequence[int], *sent: torch.Tensor) -> Iterator[Hop]:
    """Sends tensors round the ranks: a Hop for each distance from 1 on, of which those count at which they
    are `needed`."""
    hop: Hop | None = None
    for distance in range(1, axis.size):
        by = jump((0, *needed), distance)
        if by == 0 and hop:
            hop.settle()
        hop = axis.shift(*sent, by=by)  # what the hop before brings is sent on without a wait
        sent = tuple(hop.received) if distance < axis.size - 1 else ()
        yield hop


Coming = Ahead[list[torch.Tensor]]  # what other ranks send, one after the other


class Visits(Coming):
    """Iterates over the tensors of the other ranks of `axis`, the rank before first. `ahead` hops are on
    their way beside the part in use. `needed`: see hops(); by default at all distances."""

    def __init__(self, axis: Axis, *own: torch.Tensor, ahead: int = 1,
                 needed: Sequence[int] | None = None) -> None:
        self.axis = axis
        super().__init__(hops(axis, range(1, axis.size) if needed is None else needed, *own), ahead)
