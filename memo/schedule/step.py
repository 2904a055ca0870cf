"""The steps of a program: a step is one thing that one stream does. And what steps touch: places in
memory, and the parts of what units have that copies and messages move. Which step touches which:
memo/schedule/access.py. No torch.
"""

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Op(Enum):
    """Says what a step does. ADD: a home adds what a helper has repaid. The last five:
    memo/schedule/states.py."""

    EMBED = "embedding"
    FORWARD = "forward"
    HEAD = "head"
    RECOMPUTE = "recompute"
    SWEEP = "sweep"  # makes a unit's keys and values again, from its input
    BACKWARD = "backward"
    EMBED_BACKWARD = "embedding backward"
    ADD = "add"
    OFFLOAD = "offload"  # device to host
    PREFETCH = "prefetch"  # host to device
    SEND = "send"  # to another stage
    RECEIVE = "receive"
    ZERO = "zero"  # the sums that helpers add to
    REDUCE = "reduce"  # sums gradients over the ranks that hold the same parameters, a piece to each
    GATHER = "gather"  # the new parameters of all these ranks
    CLIP = "clip"
    ADAMW = "adamw"
    HOST_ADAMW = "adamw on the host"

    __hash__ = object.__hash__  # steps are keys of large tables; Enum's own hash is a Python function


class Moved(Enum):
    """Says what a copy or a message moves.

    STREAM is what lies between two layers; GRADIENT is the gradient there. WEIGHTS and WEIGHT_GRADIENTS are
    a layer's, in steps of its first unit; embedding and head are layers of their own. The last four go
    between a home and its helper (memo/schedule/help.py), under names of their own: LOAN is lent and
    borrowed, ROWS are passed and taken, RESULTS returned and fetched, REPAYMENT repaid and collected.
    """

    ACTIVATIONS = ""
    KEYS = "keys"
    INPUT = "input"  # of a unit, for a sweep
    STREAM = "stream"
    GRADIENT = "gradient"
    WEIGHTS = "weights"
    WEIGHT_GRADIENTS = "weight gradients"
    SCALE = "scale"  # of gradients, and what else an optimizer on the host needs of the norm
    LOAN = "loan"
    ROWS = "rows"
    RESULTS = "results"
    REPAYMENT = "repayment"

    __hash__ = object.__hash__


class Unit(NamedTuple):
    """A layer at one subsequence, or at what a stage computes for another one (msp.guest_number)."""

    layer: int
    subsequence: int


COPIES, MESSAGES = (Op.OFFLOAD, Op.PREFETCH), (Op.SEND, Op.RECEIVE)
HELP_NAMES: dict[tuple[Op, Moved | None], str] = {
    (Op.SEND, Moved.LOAN): "lend", (Op.RECEIVE, Moved.LOAN): "borrow",
    (Op.SEND, Moved.ROWS): "pass", (Op.RECEIVE, Moved.ROWS): "take",
    (Op.SEND, Moved.RESULTS): "return", (Op.RECEIVE, Moved.RESULTS): "fetch",
    (Op.SEND, Moved.REPAYMENT): "repay", (Op.RECEIVE, Moved.REPAYMENT): "collect"}
STATES = Moved.WEIGHTS, Moved.WEIGHT_GRADIENTS, Moved.SCALE
STREAMS = {op: op.value for op in Op} | {
    Op.REDUCE: "replicas", Op.GATHER: "replicas", Op.HOST_ADAMW: "optimizer"}


class Step(NamedTuple):
    """One thing that one stream does, once in a program. `back`: whether it is part of the backward. `peer`:
    the other stage, of a message between a home and a helper, or of an ADD."""

    op: Op
    unit: Unit
    moved: Moved | None = None
    back: bool = False
    peer: int | None = None

    @property
    def computes(self) -> bool:
        """Says whether the compute stream does it."""
        return self.moved is None

    @property
    def is_message(self) -> bool:
        """Says whether another stage is at the other end."""
        return self.op in MESSAGES

    @property
    def leaves(self) -> bool:
        """Says whether what it moves leaves the device."""
        return self.op in (Op.OFFLOAD, Op.SEND)

    @property
    def of_states(self) -> bool:
        """Says whether it brings a layer's parameters, moves their gradients, or makes new ones."""
        return self.moved in STATES or self.op in (Op.CLIP, Op.ADAMW)

    @property
    def stream(self) -> str:
        """Names the stream. What a stream was handed earlier is done before."""
        if self.moved is None:
            return "compute"
        if self.peer is None:
            return STREAMS[self.op]
        return f"{'to' if self.op is Op.SEND else 'from'} {self.peer}"

    @property
    def kind(self) -> str:
        """Names the step without its unit, for people: in pictures, tables and errors."""
        name = HELP_NAMES.get((self.op, self.moved))
        words = [name or self.op.value]
        if name is None and self.moved and self.moved is not Moved.ACTIVATIONS and not (
                self.is_message and self.moved is Moved.STREAM):
            words.append(self.moved.value)
        if self.peer is not None:
            words.append(str(self.peer))
        twice = self.op is Op.PREFETCH and self.of_states  # in the forward, and in the backward
        return " ".join(words + ["back"] * (self.back and (self.peer is not None or twice)))

    def __str__(self) -> str:
        return f"{self.kind} ({self.unit.layer}, {self.unit.subsequence})"


# --- what steps touch ---

class Region(Enum):
    """Says what lies in a place. The value names it for people."""

    KEPT = "kept rows of buffer"
    DROPPED = "rows to recompute of buffer"
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
    """Memory that streams use in turns; `at`: which one of its region."""

    region: Region
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.region.value} {', '.join(map(str, self.at))}"


@lru_cache(2**16)  # a program asks for the same ones again and again
def place_at(region: Region, *at: int) -> Place:
    """Makes a place."""
    return Place(region, at)


Places = list[Place]


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
    """One thing that a copy or a message moves; `rows`: (first, end) of its subsequence; None: all."""

    content: Content
    unit: Unit
    rows: tuple[int, int] | None = None


class Access(NamedTuple):
    """Says what a step reads, and what it writes: also what it reads and then writes over, or adds to."""

    reads: Places
    writes: Places
