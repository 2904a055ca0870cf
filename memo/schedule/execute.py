"""Executes schedules: the host hands each step to its stream, in launch order, behind the steps that it waits
for. The host itself waits only for its own threads: on a CPU those of all streams, else the optimizer's.
"""

from collections.abc import Callable, Sequence
from functools import cache

from memo.schedule.spans import wait_kind, wait_label
from memo.schedule.step import Step
from memo.schedule.streams import Event, Streams
from memo.schedule.waits import Schedule

# what a stream's launch() takes: a label, without which it is not in the timeline; a function, its arguments
Work = tuple[str, Callable[..., object], *tuple[object, ...]]


class Executor:
    """Runs schedules on the streams of a device. label(step) names a step."""

    def __init__(self, streams: Streams, label: Callable[[Step], str]) -> None:
        self.streams, self.label = streams, label
        self.events: dict[Step, Event] = {}  # of steps that others, or settle(), wait for
        self.reasons: dict[tuple[Step, Step], str] = {}  # {(a step, one that it waits for): why}

    def expect(self, schedules: Sequence[Schedule]) -> None:
        """Makes the events of the schedules that run() will get, the update last, and their labels: not at
        every step."""
        name = cache(self.label)
        self.reasons = {(step, earlier): wait_label(name, step, earlier, place)
                        for schedule in schedules for step, waits in schedule.items()
                        for earlier, place in waits.items()}
        ends = {step.stream: step for step in schedules[-1] if not step.computes}.values()
        waited = (*ends, *(earlier for _, earlier in self.reasons))
        self.events = {step: Event(name(step), wait_kind(step)) for step in waited}

    def settle(self, steps: Schedule) -> None:
        """Makes compute, and where streams are the host's the caller too, wait for the newest launch of each
        step that has an event. Errors: what went wrong until then in their streams."""
        for step in steps:
            if step in self.events:
                self.streams.compute.hold(self.events[step])

    def run(self, steps: Schedule, work_of: Callable[[Step], Work]) -> None:
        """Launches the steps. work_of(step): what it does."""
        for step, waits in steps.items():
            stream = self.streams.named(step.stream)
            for earlier in sorted(waits, key=wait_kind):  # messages before copies: for the timeline
                stream.wait(self.events[earlier], self.reasons[step, earlier])
            stream.launch(*work_of(step))
            if step in self.events:
                stream.record(self.events[step])
