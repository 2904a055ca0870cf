"""The waits of a program, derived from what its steps touch. No torch.

A step waits for the last writer of what it reads, and for the last writer and all readers since of what it
writes; not for its own stream, which does one thing after the other, nor where another wait says so already.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from memo.schedule.access import Memory, Place
from memo.schedule.program import Fates, program
from memo.schedule.step import Step

# in launch order, for each step: the steps of other streams that must be done before, and the place that the
# wait for each protects
Waits = Mapping[Step, Place]
Schedule = Mapping[Step, Waits]


@lru_cache(16)  # most of the layouts that a search tries have the same
def schedule(fates: Fates, layers: int, subsequences: int = 1, order: str = "layer",
             trains: bool = True) -> Schedule:
    """Makes the schedule of a training step; without `trains`, of a forward that keeps nothing."""
    fates = fates.of(subsequences, trains)
    return with_waits(program(fates, layers, subsequences, order, trains),
                      Memory(fates, layers, subsequences, order, trains))


def with_waits(steps: Iterable[Step], memory: Memory) -> Schedule:
    """Derives what each step waits for.

    Every step has a clock: {stream: the number of its last step that is done for certain before}. A step has
    to wait only for those that the clock of its stream does not hold yet.
    """
    numbered: list[Step] = []
    clocks: list[dict[str, int]] = []
    clock_of: dict[str, dict[str, int]] = {}  # of each stream, behind its last step
    streams: list[str] = []  # of each step
    writer: dict[Place, int] = {}
    readers: dict[Place, dict[str, int]] = {}  # since it was written, the last one of each stream
    made: dict[Step, Waits] = {}
    for number, step in enumerate(steps):
        stream, (reads, writes) = step.stream, memory.access(step)
        clock = dict(clock_of.get(stream, {}))
        # a wait is named by the first place that it protects, of the writes, else of the reads
        before = {writer[place]: place for place in reversed(reads) if place in writer}
        for place in reversed(writes):
            if place in writer:
                before[writer[place]] = place
            if place in readers:
                before.update(dict.fromkeys(readers[place].values(), place))
        waits = {}
        for earlier in sorted(before, reverse=True):
            if streams[earlier] != stream and earlier > clock.get(streams[earlier], -1):
                waits[numbered[earlier]] = before[earlier]
                for other, n in clocks[earlier].items():
                    if n > clock.get(other, -1):
                        clock[other] = n
        made[step] = waits
        clock[stream] = number
        clock_of[stream] = clock
        clocks.append(clock)
        numbered.append(step)
        streams.append(stream)
        for place in reads:
            if place in readers:
                readers[place][stream] = number
            else:
                readers[place] = {stream: number}
        for place in writes:
            writer[place], readers[place] = number, {}
    return made


def compute_only(steps: Schedule) -> Schedule:
    """Picks the steps of the compute stream, which then wait for nobody."""
    return {step: {} for step in steps if step.computes}
