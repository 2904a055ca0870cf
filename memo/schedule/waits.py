"""The waits of a program, derived from what its steps touch. No torch.

A step waits for the last writer of what it reads. For what it writes it waits for the last writer and for all
readers since; that writer has waited for the readers before. No step waits for its own stream, which does one
thing after the other, nor where another wait says so already.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from memo.schedule.access import AccessTable
from memo.schedule.program import Program
from memo.schedule.step import Access, Place, Step

# {a step of another stream that must be done before: the place that both touch}
Waits = Mapping[Step, Place]
Schedule = Mapping[Step, Waits]  # in launch order
Clock = dict[str, int]  # {stream: the number of its last step that is done for certain}


@lru_cache(16)  # most of the layouts that a search tries have the same
def schedule(program: Program) -> Schedule:
    """Makes the schedule of a program."""
    return Pass(program.steps(), AccessTable(program)).schedule()


class Pass:
    """Derives the waits of a pass: a micro batch's forward and backward, an evaluation, an update. Steps have
    numbers, in launch order. Every step has a clock, of what is done for certain when it is; a step has to
    wait only for what its stream's clock does not hold yet."""

    def __init__(self, steps: Iterable[Step], table: AccessTable, named: Mapping[Step, Step] = {}) -> None:
        self.steps = [*steps]
        self.streams = [step.stream for step in self.steps]
        self.waits: list[dict[int, Place]] = []
        self.clocks: list[Clock] = []
        self.clock_of: dict[str, Clock] = {}  # of each stream, behind its last step
        self.writer: dict[Place, int] = {}
        # since it was written, the last one of each stream
        self.readers: dict[Place, Clock] = defaultdict(dict)
        # of each step: the places that its pass has not ordered for its stream: it may wait for a pass before
        self.first: list[Access] = []
        for number, step in enumerate(self.steps):
            self.add(number, table.access(named.get(step, step)))

    def add(self, number: int, access: Access) -> None:
        """Derives the waits of the next step."""
        stream, writer, readers = self.streams[number], self.writer, self.readers
        clock = dict(self.clock_of.get(stream, ()))
        self.waits.append(self.needed(access, clock))
        clock[stream] = number
        self.clock_of[stream] = clock
        self.clocks.append(clock)
        self.first.append(Access([place for place in access.reads
                                  if place not in writer and stream not in readers[place]],
                                 [place for place in access.writes if place not in writer]))
        for place in access.reads:
            readers[place][stream] = number
        for place in access.writes:
            readers.pop(place, None)
            writer[place] = number

    def needed(self, access: Access, clock: Clock) -> dict[int, Place]:
        """Finds the steps of the pass that a next one waits for, those that `clock` does not hold. Advances
        `clock`. A wait is named by the first place that it protects, of the writes, else of the reads."""
        writer, earlier = self.writer, dict[int, Place]()
        for place in reversed(access.reads):
            if place in writer:
                earlier[writer[place]] = place
        for place in reversed(access.writes):
            if place in writer:
                earlier[writer[place]] = place
            if place in self.readers:
                earlier |= dict.fromkeys(self.readers[place].values(), place)
        waits = {}
        for k in sorted(earlier, reverse=True):
            if k > clock.get(self.streams[k], -1):
                waits[k] = earlier[k]
                advance(clock, self.clocks[k])
        return waits

    def waits_for(self, before: "Pass") -> Iterator[tuple[Step, Waits]]:
        """Yields (step, the steps of `before` that it waits for); `before` is a pass that ran to its end."""
        clocks, clock_of = list[Clock](), dict(before.clock_of)
        for step, stream, own, first in zip(self.steps, self.streams, self.waits, self.first, strict=True):
            clock, touches = clock_of.get(stream, {}), any(first)
            if own or touches:
                clock_of[stream] = clock = dict(clock)
                for k in own:
                    advance(clock, clocks[k])
            clocks.append(clock)
            if touches and (waits := before.needed(first, clock)):
                yield step, {before.steps[k]: place for k, place in waits.items()}

    def schedule(self, before: Sequence["Pass"] = ()) -> Schedule:
        """Makes the schedule of the pass where each of those `before` may have run."""
        made = {step: {self.steps[k]: place for k, place in own.items()}
                for step, own in zip(self.steps, self.waits, strict=True)}
        for other in before:
            for step, waits in self.waits_for(other):
                made[step] |= waits
        return made


def advance(clock: Clock, other: Clock) -> None:
    """Adds to a clock what another one holds."""
    for stream, number in other.items():
        if number > clock.get(stream, -1):
            clock[stream] = number
