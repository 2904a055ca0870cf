"""What a schedule is a list of: a step is one thing that one stream does. No torch."""

from functools import cache
from typing import NamedTuple

# kinds of steps of a forward, beside messages between a home and a helper
FORWARD = ("embedding", "forward", "head", "offload", "offload keys", "offload stream", "prefetch stream",
           "prefetch weights", "prefetch weight gradients", "receive", "send")
# {kind of a message between a home and a helper, which is another stage: its stream}, the other one's number
# behind both
LANES = {"lend": "to", "repay": "to", "pass": "to", "return": "to",
         "borrow": "from", "collect": "from", "take": "from", "fetch": "from"}
SENT = "send", "lend", "pass", "return", "repay"  # what the kinds of those begin with that send
BACK = " back"  # ends the kinds of those of a backward
Unit = tuple[int, int]  # layer, subsequence
Key = tuple[str, Unit]


@cache
def stream_of_kind(kind: str) -> str:
    first, *others = kind.split(" ")
    if first in LANES:
        return f"{LANES[first]} {others[0]}"
    return first if first in ("offload", "prefetch", "send", "receive") else "compute"


@cache
def is_forward(kind: str) -> bool:
    """Whether a step is of a forward, not of a backward."""
    first = kind.partition(" ")[0]
    return kind in FORWARD or (first in LANES and not kind.endswith(BACK))


def is_of_states(kind: str) -> bool:
    """Whether a step brings a layer's parameters, or moves their gradients; embedding and head are layers."""
    return "weight" in kind


def stream_of(key: Key) -> str:
    return stream_of_kind(key[0])


def is_message(key: Key) -> bool:
    return stream_of(key) not in ("compute", "offload", "prefetch")


class Step(NamedTuple):
    """One thing that one stream does. `waits`: the keys of steps of other streams that must be done before;
    what a stream was handed earlier is done before anyway.

    kind: embedding, forward, head (with `unit`: the last layer's), offload, prefetch, recompute, backward,
    embedding backward; of a unit's keys and values: offload keys and prefetch keys, or prefetch input and
    sweep, which makes them again from that input; of the stream: prefetch stream of a unit's input and
    offload stream of its output, or of the gradient that the head puts there; prefetch gradient of that of
    its output and offload gradient of that of its input. Between stages: receive of the first layer's input
    and send of the last one's output; receive gradient of that, send gradient of the input's. Messages
    between a home and its helpers, and "add", by which a home adds what is repaid: see helping.py. Of a
    layer, with its first unit: prefetch weights, and the like, see layer_states.py.
    """

    kind: str
    unit: Unit
    waits: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return self.kind, self.unit

    @property
    def stream(self) -> str:
        return stream_of(self.key)

    @property
    def is_message(self) -> bool:
        """Whether another stage is at the other end."""
        return is_message(self.key)
