"""Do the messages of all ranks meet? Their programs run together here, with nothing in them but messages.
No torch.

    program       what a rank's axes (axis.py) are asked for, in the order of its host: posts, and waits
    communicator  the ranks that a message is among, and one order of the messages among them
    queue         of a rank, one for all its communicators: a message starts when those that the rank posted
                  before are done. NCCL keeps that order with NCCL_LAUNCH_ORDER_IMPLICIT, and a GPU may have
                  no second queue. Where messages meet so, they do with a queue for each communicator too
    wait          holds up the rank: what it posts later starts when the message is done. So it is on CUDA:
                  a wait holds up the stream, and a message starts behind what the stream has before it. Here
                  a rank has one stream; with several there is less to wait for
    collective    is done when it is next on all ranks of its communicator
    send          is done when the receive is next on the other rank, and the other way round: nothing is
                  buffered, as over NCCL. A shift is both at once, to one rank and from another

What can be done is done, in any order: no message can take another one's partner, so all orders end alike.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from testing.notes import Communicator, Post, Wait

# the ends of a message from rank to rank; all other kinds are collectives
HALVES = {"shift": ("to", "source"), "send": ("to",), "receive": ("source",)}
SAME = "the ranks of a communicator post the same collectives in one order"
EQUAL = "a message is sent as long as it is received"
POSTED = "a message is posted before it is waited for"
ENDED = "every message meets its other ends"
CIRCLE = "ranks do not wait for each other in a circle"



@dataclass(eq=False)
class UnderWay:
    """A message that a rank has posted. `lacks`: the ends that it has not met."""

    rank: int
    post: Post
    lacks: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lacks = set(HALVES.get(self.post.kind, ()))

    @property
    def is_collective(self) -> bool:
        return self.post.kind not in HALVES

    def __str__(self) -> str:
        return f"post {self.post.number} ({self.post})"


def difference(rule: str, a: UnderWay, b: UnderWay) -> str:
    return f"{rule}: rank {a.rank} has {a} where rank {b.rank} has {b}"


class Rendezvous:
    """All ranks, each somewhere in its program."""

    def __init__(self, programs: Mapping[int, Sequence[Post | Wait]]) -> None:
        self.programs = programs
        self.at = dict.fromkeys(programs, 0)
        self.queues: dict[int, deque[UnderWay]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], Post] = {}
        self.done: set[tuple[int, int]] = set()

    def go_on(self, rank: int) -> Communicator | None:
        """Goes on to the end, or to a wait for what is not done -> the communicator of the message that is
        next, if there is one."""
        program, queue = self.programs[rank], self.queues[rank]
        while self.at[rank] < len(program):
            step = program[self.at[rank]]
            key = rank, step.number
            if isinstance(step, Post):
                self.posted[key] = step
                queue.append(UnderWay(rank, step))
            elif key not in self.posted:
                raise ValueError(f"{POSTED}: rank {rank} waits for its post {step.number} before")
            elif key not in self.done:
                break
            self.at[rank] += 1
        return queue[0].post.communicator if queue else None

    def next_on(self, rank: int, communicator: Communicator) -> UnderWay | None:
        queue = self.queues.get(rank)
        return queue[0] if queue and queue[0].post.communicator == communicator else None

    def meet(self, communicator: Communicator) -> Iterator[int]:
        """Does what can be done on a communicator; yields the ranks that had a part in it."""
        def first() -> list[UnderWay]:
            return [m for rank in communicator.ranks if (m := self.next_on(rank, communicator))]
        while done := self.collective(first(), len(communicator.ranks)) or self.ends_met(first()):
            for message in done:
                self.queues[message.rank].popleft()
                self.done.add((message.rank, message.post.number))
                yield message.rank

    def collective(self, first: list[UnderWay], size: int) -> list[UnderWay]:
        """The collective that all of `size` ranks have come to, or nothing."""
        here = [m for m in first if m.is_collective]
        for other in here[1:]:
            if other.post[1:] != here[0].post[1:]:
                raise ValueError(difference(SAME, here[0], other))
        return here if len(here) == size else []

    def ends_met(self, first: list[UnderWay]) -> list[UnderWay]:
        """The messages from rank to rank that have met their ends."""
        for m in first:
            other = self.next_on(self.partner(m), m.post.communicator) if "to" in m.lacks else None
            if other is None or "source" not in other.lacks or other.post.source != m.rank:
                continue
            if m.post.nbytes != other.post.nbytes:
                raise ValueError(difference(EQUAL, m, other))
            m.lacks.remove("to")
            other.lacks.remove("source")
        return [m for m in first if not m.is_collective and not m.lacks]

    # --- when nothing can go on ---

    def holding(self, rank: int) -> UnderWay | None:
        """The message that a rank cannot go on without; None at its end."""
        queue = self.queues.get(rank)
        return queue[0] if queue else None

    def partner(self, message: UnderWay) -> int:
        """A rank that a message waits for."""
        if not message.is_collective:
            end = next(end for end in HALVES[message.post.kind] if end in message.lacks)
            return getattr(message.post, end)
        communicator = message.post.communicator
        others = {rank: self.next_on(rank, communicator) for rank in communicator.ranks}
        return next(rank for rank, other in others.items() if other is None or not other.is_collective)

    def refusal(self, message: UnderWay) -> str:
        """Why a message is not done: who waits in what for whom."""
        path: list[UnderWay] = []
        said: list[str] = []
        while message not in path:
            path.append(message)
            partner = self.partner(message)
            said.append(f"rank {message.rank} waits in {message} for rank {partner}")
            # which does something else before, or has to go on first
            before = self.next_on(partner, message.post.communicator) or self.holding(partner)
            if before is None:
                return f"{ENDED}: {said[-1]}, which has come to its end"
            message = before
        return f"{CIRCLE}: {'; '.join(said[path.index(message):])}"


def validate_programs(programs: Mapping[int, Sequence[Post | Wait]]) -> None:
    """`programs`: {rank: its Program}. Errors: ValueError: the rule that the programs violate, and the
    messages of both ends."""
    ranks, going = Rendezvous(programs), list(programs)
    while going:
        if communicator := ranks.go_on(going.pop()):
            going += ranks.meet(communicator)
    if left := [queue[0] for queue in ranks.queues.values() if queue]:
        raise ValueError(ranks.refusal(min(left, key=lambda message: message.rank)))
