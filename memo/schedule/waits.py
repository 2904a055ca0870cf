"""The waits of a program, derived from what its steps touch. No torch.

A step waits for the last writer of what it reads, and for the last writer and all readers since of what it
writes; not for its own stream, which does one thing after the other, nor where another wait says so already.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

from memo.schedule.access import Memory
from memo.schedule.place import Access, Place
from memo.schedule.program import Program
from memo.schedule.states import States
from memo.schedule.step import Step

# {step of another stream that must be done before: the place that this protects}, for steps in launch order
Waits = Mapping[Step, Place]
Schedule = Mapping[Step, Waits]
# {stream: the number of its last step that is done for certain}; of several passes before: (pass, stream)
Clock = dict[str, int]
Clocks = dict[tuple[int, str], int]
K = TypeVar("K")


class Done(NamedTuple):
    """A step that has touched a place, as its pass leaves it: `number` in its pass, `clock` behind it."""

    step: Step
    number: int
    clock: Clock
    wrote: bool


@lru_cache(16)  # most of the layouts that a search tries have the same
def schedule(program: Program) -> Schedule:
    """Makes the schedule of a program."""
    return with_waits(program.steps(), Memory(program))


def with_waits(steps: Iterable[Step], memory: Memory) -> Schedule:
    """Derives what each step of a pass waits for within it."""
    return Pass(steps, memory).schedule()


class Pass:
    """Derives the waits of a pass. Steps have numbers, in launch order. Every step has a clock, of what is
    done for certain before it; it has to wait only for what the clock of its stream does not hold yet."""

    def __init__(self, steps: Iterable[Step], memory: Memory) -> None:
        self.steps = [*steps]
        self.streams = [step.stream for step in self.steps]
        self.waits: list[dict[int, Place]] = []
        self.clocks: list[Clock] = []
        self.clock_of: dict[str, Clock] = {}  # of each stream, behind its last step
        self.writer: dict[Place, int] = {}
        # since it was written, the last one of each stream
        self.readers: dict[Place, dict[str, int]] = defaultdict(dict)
        # of each step: what its stream touches first, so as passes before have left it
        self.first: list[Access] = []
        for number, step in enumerate(self.steps):
            self.add(number, memory.access(step))

    def add(self, number: int, access: Access) -> None:
        """Derives the waits of the next step."""
        stream, streams, writer, readers = self.streams[number], self.streams, self.writer, self.readers
        # a wait is named by the first place that it protects, of the writes, else of the reads
        earlier = dict[int, Place]()
        first = Access([], [])
        for place in reversed(access.reads):
            by = readers[place]
            if place in writer:
                if streams[writer[place]] != stream:
                    earlier[writer[place]] = place
            elif stream not in by:
                first.reads.append(place)
            by[stream] = number
        for place in reversed(access.writes):
            if place not in writer:
                first.writes.append(place)
            elif streams[writer[place]] != stream:
                earlier[writer[place]] = place
            if place in readers:
                earlier |= {k: place for other, k in readers.pop(place).items() if other != stream}
            writer[place] = number
        clock, waits = dict(self.clock_of.get(stream, {})), {}
        for other in sorted(earlier, reverse=True):
            if other > clock.get(streams[other], -1):
                waits[other] = earlier[other]
                advance(clock, self.clocks[other])
        clock[stream] = number
        self.clock_of[stream] = clock
        self.clocks.append(clock)
        self.waits.append(waits)
        self.first.append(first)

    @cached_property
    def left(self) -> dict[Place, list[Done]]:
        """Finds who has touched each place last: its writer, and the readers since."""
        left = defaultdict[Place, list[Done]](list)
        for place, by in self.readers.items():
            left[place] += [Done(self.steps[k], k, self.clocks[k], False) for k in {*by.values()}]
        for place, k in self.writer.items():
            left[place].append(Done(self.steps[k], k, self.clocks[k], True))
        return left

    def schedule(self, before: Sequence["Pass"] = ()) -> Schedule:
        """Makes the schedule of the pass where each of those `before` may have run. A step whose place one of
        them has touched last waits for that pass too."""
        left = [dict(other.left) for other in before]
        clock_of: dict[str, Clocks] = {}  # a stream goes on where any pass has left it
        for n, other in enumerate(before):
            for stream, clock in other.clock_of.items():
                clock_of.setdefault(stream, {}).update(of_pass(n, clock))
        clocks, made = list[Clocks](), dict[Step, Waits]()
        for step, stream, own, first in zip(self.steps, self.streams, self.waits, self.first, strict=True):
            waits = {self.steps[k]: place for k, place in own.items()}
            before_it = clock_of.get(stream, {})
            if own or any(first):
                before_it = dict(before_it)
                for k in own:
                    advance(before_it, clocks[k])
                for n, touched in enumerate(left):
                    waits |= waits_for(n, touched, stream, before_it, first)
                clock_of[stream] = before_it
            clocks.append(before_it)
            made[step] = waits
        return made


def of_pass(n: int, clock: Clock) -> Clocks:
    """Marks a clock as that of the n-th pass before."""
    return {(n, stream): number for stream, number in clock.items()}


def waits_for(n: int, left: dict[Place, list[Done]], stream: str, clock: Clocks,
              first: Access) -> dict[Step, Place]:
    """Finds the waits of a stream's next step for what the n-th pass before has `left` in the places that it
    is the `first` to touch, and advances the clock."""
    touched = [(done, place) for place in reversed(first.writes) for done in left.pop(place, ())]
    touched += [(done, place) for place in reversed(first.reads) for done in left.get(place, ())
                if done.wrote]
    waits: dict[Step, Place] = {}
    for done, place in sorted(touched, key=lambda pair: -pair[0].number):
        if done.step.stream != stream and done.number > clock.get((n, done.step.stream), -1):
            waits.setdefault(done.step, place)
            advance(clock, of_pass(n, done.clock))
    return waits


def advance(clock: dict[K, int], other: Mapping[K, int]) -> None:
    """Adds to a clock what another one holds."""
    for stream, number in other.items():
        if number > clock.get(stream, -1):
            clock[stream] = number


class Passes(NamedTuple):
    """The schedules of a run, in parts that are launched at once. Passes follow each other in any order, so a
    step also waits for what each of them may have left: a step that its own pass launches later is an earlier
    pass's. `last_backward`: of the last micro batch, which sends gradients away; `clip`, `update` follow."""

    evaluation: Schedule
    forward: Schedule = {}
    backward: Schedule = {}
    last_backward: Schedule = {}
    clip: Schedule = {}
    update: Schedule = {}

    def compute_only(self) -> "Passes":
        """Picks the steps of the compute stream, which then wait for nobody."""
        return Passes(*({step: {} for step in part if step.computes} for part in self))


def passes_of(program: Program, states: States,
              orders: tuple[Iterable[Step], Iterable[Step]] | None = None) -> Passes:
    """Makes the Passes of a stage; of a program that does not train the evaluation alone. `orders`: the
    launch orders of a training pass and of an evaluation, where they are not the programs'."""
    alone, trains = replace(program, trains=False), program.trains
    train, evaluation = ([*steps] for steps in orders or (program.steps(), alone.steps()))
    memory, passes = Memory(program, states), {"evaluation": Pass(evaluation, Memory(alone, states))}
    if trains:
        last, early = [*states.with_reductions(train, program.subsequences)], [*states.with_sums(train)]
        passes |= {"last": Pass(last, memory), "update": Pass(states.update(), memory)}
        if len(early) < len(last):  # micro batches before the last one have a pass of their own
            passes["early"] = Pass(early, memory)

    def derived(name: str) -> Schedule:  # the update follows the last at once
        return passes[name].schedule([passes["last"]] if name == "update" else [*passes.values()])

    def part(steps: Schedule, back: bool) -> Schedule:
        return {step: waits for step, waits in steps.items() if step.back == back}
    if not trains:
        return Passes(derived("evaluation"))
    ended = derived("last")
    last_backward = part(ended, True)
    backward = part(derived("early"), True) if "early" in passes else last_backward
    clip, *rest = derived("update").items()
    return Passes(derived("evaluation"), part(ended, False), backward, last_backward, dict([clip]),
                  dict(rest))
