"""The waits of a program, derived from what its steps touch. No torch.

A step waits for the last writer of what it reads, and for the last writer and all readers since of what it
writes; not for its own stream, which does one thing after the other, nor where another wait says so already.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from memo.schedule.access import Memory
from memo.schedule.place import Access, Place
from memo.schedule.program import Program
from memo.schedule.states import States
from memo.schedule.step import Step

# in launch order, for each step: the steps of other streams that must be done before, and the place that the
# wait for each protects
Waits = Mapping[Step, Place]
Schedule = Mapping[Step, Waits]
# {stream, or a number of another pass and a stream there: the number of its last step that is done for
# certain}
Clock = dict[str | tuple[int, str], float]


class Done(NamedTuple):
    """A step that has touched a place, as its pass leaves it: `number` in its pass, `clock` behind it."""

    step: Step
    number: int
    clock: Clock
    wrote: bool


class Left(NamedTuple):
    """What a pass leaves: of each place the last writer and the readers since; of each stream its clock."""

    touched: dict[Place, list[Done]]
    clocks: dict[str, Clock]


@lru_cache(16)  # most of the layouts that a search tries have the same
def schedule(program: Program) -> Schedule:
    """Makes the schedule of a program."""
    return with_waits(program.steps(), Memory(program))


def with_waits(steps: Iterable[Step], memory: Memory, before: Sequence[Left] = ()) -> Schedule:
    """Derives what each step of a pass waits for: within it, and of passes that leave what is `before`."""
    return dict(Waiting(before).of(touches(steps, memory)))


def touches(steps: Iterable[Step], memory: Memory) -> Iterator[tuple[Step, Access]]:
    """Yields the steps, each with what it touches."""
    return ((step, memory.access(step)) for step in steps)


class Waiting:
    """Derives the waits of the steps of a pass, one after the other.

    Every step has a clock, of what is done for certain before it. A step has to wait only for what the clock
    of its stream does not hold yet. `before`: what each pass that may have run before leaves; a step whose
    place one of them has touched waits for that pass too.
    """

    def __init__(self, before: Sequence[Left] = ()) -> None:
        self.steps: list[Step] = []
        self.streams: list[str] = []  # of each step
        self.clocks: list[Clock] = []
        self.clock_of: dict[str, Clock] = {}  # of each stream, behind its last step
        self.writer: dict[Place, int] = {}
        # since it was written, the last one of each stream
        self.readers: dict[Place, dict[str, int]] = defaultdict(dict)
        self.before = [dict(left.touched) for left in before]
        for n, left in enumerate(before):  # a stream goes on where any pass has left it
            for stream, clock in left.clocks.items():
                self.clock_of.setdefault(stream, {}).update(of_pass(n, clock))

    def of(self, touched: Iterable[tuple[Step, Access]]) -> Iterator[tuple[Step, Waits]]:
        """Yields the steps, each with its waits, from what they touch."""
        streams, writer, readers = self.streams, self.writer, self.readers
        for number, (step, access) in enumerate(touched):
            stream, (reads, writes) = step.stream, access
            # a wait is named by the first place that it protects, of the writes, else of the reads
            earlier = {}
            for place in reversed(reads):
                if place in writer and streams[writer[place]] != stream:
                    earlier[writer[place]] = place
            for place in reversed(writes):
                if place in writer and streams[writer[place]] != stream:
                    earlier[writer[place]] = place
                if place in readers:
                    earlier |= {k: place for other, k in readers[place].items() if other != stream}
            clock, waits = dict(self.clock_of.get(stream, {})), {}
            for other in sorted(earlier, reverse=True):
                if other > clock.get(streams[other], -1):
                    waits[self.steps[other]] = earlier[other]
                    advance(clock, self.clocks[other])
            for n, left in enumerate(self.before):
                waits |= waits_for(n, left, stream, clock, access)
            clock[stream] = number
            self.clock_of[stream] = clock
            self.clocks.append(clock)
            self.steps.append(step)
            streams.append(stream)
            for place in reads:
                readers[place][stream] = number
            for place in writes:
                writer[place] = number
                readers.pop(place, None)
            yield step, waits

    def left(self) -> Left:
        """Says who has touched each place last."""
        touched: dict[Place, list[Done]] = {}
        for place in self.writer.keys() | self.readers.keys():
            those = {number: False for number in self.readers.get(place, {}).values()}
            those |= {self.writer[place]: True} if place in self.writer else {}
            touched[place] = [Done(self.steps[k], k, self.clocks[k], wrote) for k, wrote in those.items()]
        return Left(touched, self.clock_of)


def of_pass(n: int, clock: Clock) -> Clock:
    """Marks what a clock of the n-th pass before says of that pass."""
    return {(n, stream): number for stream, number in clock.items() if isinstance(stream, str)}


def waits_for(n: int, left: dict[Place, list[Done]], stream: str, clock: Clock,
              access: Access) -> dict[Step, Place]:
    """Finds the waits of a stream's next step for what the n-th pass before has `left`, and advances the
    clock."""
    touched = [(done, place) for place in access.writes for done in left.pop(place, ())]
    touched += [(done, place) for place in access.reads for done in left.get(place, ()) if done.wrote]
    waits: dict[Step, Place] = {}
    for done, place in sorted(touched, key=lambda pair: -pair[0].number):
        if done.step.stream != stream and done.number > clock.get((n, done.step.stream), -1):
            waits.setdefault(done.step, place)
            advance(clock, of_pass(n, done.clock))
    return waits


def advance(clock: Clock, other: Clock) -> None:
    """Adds to a clock what another one holds."""
    for stream, number in other.items():
        if number > clock.get(stream, -1):
            clock[stream] = number


def compute_only(steps: Schedule) -> Schedule:
    """Picks the steps of the compute stream, which then wait for nobody."""
    return {step: {} for step in steps if step.computes}


class Passes(NamedTuple):
    """The schedules of a run, in parts that are launched at once. Passes follow each other in any order, so a
    step also waits for what each of them may have left. Where it waits for a step that its own pass launches
    later, that of an earlier pass is meant.

    `last_backward`: of a step's last micro batch, which sends gradients away, and which `clip` and `update`
    follow.
    """

    evaluation: Schedule
    forward: Schedule = {}
    backward: Schedule = {}
    last_backward: Schedule = {}
    clip: Schedule = {}
    update: Schedule = {}

    def compute_only(self) -> "Passes":
        """Leaves the steps of all other streams out."""
        return Passes(*map(compute_only, self))


def passes_of(program: Program, states: States,
              orders: tuple[Iterable[Step], Iterable[Step]] | None = None) -> Passes:
    """Makes the Passes of a stage; of a program that does not train the evaluation alone. `orders`: the
    launch orders of a training pass and of an evaluation, where they are not the programs'."""
    alone, trains = replace(program, trains=False), program.trains
    train, evaluation = ([*steps] for steps in orders or (program.steps(), alone.steps()))
    memory, touched = Memory(program, states), {"evaluation": [*touches(evaluation, Memory(alone, states))]}
    if trains:
        last, early = [*states.with_reductions(train, program.subsequences)], [*states.with_sums(train)]
        touched |= {"last": [*touches(last, memory)], "update": [*touches(states.update(), memory)]}
        if len(early) < len(last):  # micro batches before the last one have a pass of their own
            touched["early"] = [*touches(early, memory)]
    left = dict[str, Left]()
    for name, steps in touched.items():
        waiting = Waiting()
        deque(waiting.of(steps), maxlen=0)
        left[name] = waiting.left()

    def derived(name: str) -> Schedule:
        before = [left["last"]] if name == "update" else [*left.values()]  # which follows the last at once
        return dict(Waiting(before).of(touched[name]))

    def part(steps: Schedule, back: bool) -> Schedule:
        return {step: waits for step, waits in steps.items() if step.back == back}
    if not trains:
        return Passes(derived("evaluation"))
    ended = derived("last")
    last_backward = part(ended, True)
    backward = part(derived("early"), True) if "early" in touched else last_backward
    clip, *rest = derived("update").items()
    return Passes(derived("evaluation"), part(ended, False), backward, last_backward, dict([clip]),
                  dict(rest))
