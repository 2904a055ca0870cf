"""What steps touch: places in memory, and the parts of what units have that copies and messages move. Which
step touches which: memo/schedule/access.py. No torch.
"""

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from memo.schedule.step import Op, Unit


class Region(Enum):
    """Says what lies in a place. The value names it for people."""

    KEPT = "kept rows of buffer"
    REST = "rows to recompute of buffer"
    INPUT = "input"  # or its gradient
    SLAB = "slab of unit"
    # with several subsequences
    STREAM = "stream"
    SLAB_STREAM = "slab of the stream below"
    KEYS = "keys and values"
    SLAB_KEYS = "slab of keys and values"
    SWEEP = "input for a sweep"
    # of layers; between passes, and within one where they come
    WEIGHTS = "weights"
    WEIGHT_GRADIENTS = "gradients of weights"
    SUMS_OF_PASSES = "gradients that have left, of layer"
    MASTERS = "master weights of layer"
    SCALE = "scale of gradients"
    # of a home: rows that a helper computes; sums of gradients of keys and values; what is repaid
    STREAM_ROWS = "helper's rows of the stream"
    KEYS_ROWS = "helper's rows of keys and values"
    SUMS = "sums of key gradients"
    SUMS_ROWS = "helper's rows of sums of key gradients"
    REPAID = "place for what is repaid by stage"
    # of a helper; guests cut the last two differently: a part of one may lie over any of another
    GUEST_STREAM = "stream of guest"
    GUEST_KEYS = "keys and values of a guest"  # and the weights
    GUEST_GRADIENTS = "gradients of a guest"

    __hash__ = object.__hash__


class Place(NamedTuple):
    """`at`: numbers that tell it from others of its region."""

    region: Region
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.region.value} {', '.join(map(str, self.at))}"


@lru_cache(2**16)  # a program asks for the same ones again and again
def place_at(region: Region, *at: int) -> Place:
    """Makes a place."""
    return Place(region, at)


Places = list[Place]
LEAVING = Op.OFFLOAD, Op.SEND  # the device


class Content(Enum):
    """Says what a copy or a message moves of a unit. Of a stream: or the gradient there."""

    KEPT = "what survives of it, but for its input"
    INPUT = "its input"
    SWEPT = "its input, where a sweep reads it"
    BELOW = "its input in the stream"
    ABOVE = "its output in the stream"
    KEYS = "its keys and values"
    SUMS = "the sums of their gradients"
    LOAN = "its layer's parameters, keys and values of the subsequences before"
    REPAID = "gradients of these"

    __hash__ = object.__hash__


class Part(NamedTuple):
    """Says what a copy or a message moves of a unit. `rows`: (first, end) of its subsequence; None: all."""

    content: Content
    unit: Unit
    rows: tuple[int, int] | None = None


class Access(NamedTuple):
    """Says what a step reads, and what it writes."""

    reads: Places
    writes: Places
