"""Executes a schedule: the host hands each step to its stream, in launch order, behind the steps that it
waits for. The host itself waits for nothing (but on the CPU, which is its own device).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from memo.schedule.spans import wait_kind, wait_label
from memo.schedule.step import Step
from memo.schedule.streams import Event, Streams, between_stages, stream_named
from memo.schedule.waits import Schedule


class Work(NamedTuple):
    """What a step does: call(*arguments), called `label` in the timeline."""

    label: str
    call: Callable[..., object]
    arguments: tuple[object, ...]


class Executor:
    """Runs schedules on the streams of a device. label(step) names a step; `layers_come`: whether parameters
    come to the device and gradients leave it."""

    def __init__(self, streams: Streams, label: Callable[[Step], str], layers_come: bool) -> None:
        self.streams, self.label, self.layers_come = streams, label, layers_come
        self.events: dict[Step, Event] = {}  # of steps that others wait for
        self.reasons: dict[tuple[Step, Step], str] = {}  # {(a step, one that it waits for): why}

    def expect(self, schedules: Iterable[Schedule]) -> None:
        """Makes the events of the schedules that will run, and their labels: not at every step."""
        self.reasons = {(step, earlier): wait_label(self.label, step, earlier, place)
                        for schedule in schedules for step, waits in schedule.items()
                        for earlier, place in waits.items()}
        self.events = {step: Event(self.label(step), wait_kind(step)) for _, step in self.reasons}

    def run(self, steps: Schedule, work_of: Callable[[Step], Work], completes: Callable[[Step], int | None],
            done: Callable[[int], None]) -> None:
        """Launches the steps. work_of(step): what it does; completes(step): the bucket of parameters whose
        gradients are complete behind it, for which done(bucket) is called; None where there is none."""
        complete: list[int] = []
        self.begin(next(iter(steps)))
        for step, waits in steps.items():
            # Late on purpose: the copies behind the last unit are queued first, so that they start before
            # the messages of done().
            while step.computes and complete:
                done(complete.pop())
            stream = stream_named(self.streams, step.stream)
            for earlier in sorted(waits, key=wait_kind):  # bubbles first: copies may hide in them
                assert self.events[earlier].mark is not None  # it has been launched
                stream.wait(self.events[earlier], self.reasons[step, earlier])
            work = work_of(step)
            stream.launch(work.label, work.call, *work.arguments)
            if step in self.events:
                stream.record(self.events[step])
            if (bucket := completes(step)) is not None:
                complete.append(bucket)
        self.end()
        for bucket in reversed(complete):
            done(bucket)

    def begin(self, first: Step) -> None:
        """Before a pass: protects what the pass before still computes with from what comes from other stages,
        and parameters that the optimizer has just written from being lent. Before a forward it protects them
        from layers that come. Other copies need nothing: compute has waited for all of the pass before."""
        come = [self.streams.prefetch] * (self.layers_come and not first.back)
        if others := between_stages(self.streams) + come:
            before = Event("compute of the pass before")
            self.streams.compute.record(before)
            for stream in others:
                if stream is not self.streams.send:  # which sends nothing before it is computed
                    stream.wait(before)

    def end(self) -> None:
        """Behind a pass: protects what is still sent from the next one."""
        for stream in [one for one in between_stages(self.streams) if one is not self.streams.receive]:
            sent = Event("all sent", "bubble")
            stream.record(sent)
            self.streams.compute.wait(sent)
        if self.layers_come:  # the norm, and the next backward, which adds to their places
            left = Event("all gradients left")
            self.streams.offload.record(left)
            self.streams.compute.wait(left)
