"""Runs schedules without a device: when each step begins and ends, of one stage, or of all stages of a
pipeline together: who waits how long for whom, and whether anybody waits for ever. No torch.

Between a forward and its backward nothing is held back here, while a run waits for all messages. Nothing is
buffered: a message begins when its sender and its receiver have both come to it. From one stage to
the next each direction has a communicator of its own, which does what it is given in order. Source: SPPO 3.3.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memo.schedule.step import Op, Step
from memo.schedule.waits import Schedule, Waits

AS_SENT = "a message is received as it was sent"
MET = "every message meets its other end"
STAGES_CIRCLE = "stages do not wait for each other in a circle"
Lane = tuple[int, str]  # a stage and one of its streams


class Times(NamedTuple):
    """Says when each step begins and ends, and how long the compute stream waited for copies, in seconds."""

    spans: dict[Step, tuple[float, float]]
    stall_s: float


def times_of(steps: Schedule, seconds: Callable[[Step], float]) -> Times:
    """Simulates one stage: each stream does one thing after the other, and a step takes seconds(step)."""
    now, stall_s = defaultdict[str, float](float), 0.0
    spans: dict[Step, tuple[float, float]] = {}
    for step, waits in steps.items():
        stream = step.stream
        start = before = now[stream]
        for earlier in waits:
            start = max(start, spans[earlier][1])
        if step.computes:
            stall_s = stall_s + start - before
        now[stream] = end = start + seconds(step)
        spans[step] = start, end
    return Times(spans, stall_s)


def described(step: Step) -> str:
    unit = tuple(step.unit)
    between = step.is_message and step.peer is None  # of neighbours, by subsequences
    return f"{step.kind} of " + (f"subsequence {unit[1]}" if between else f"unit {unit}")


def said(stage: int, step: Step) -> str:
    return f"stage {stage} in {described(step)}"


def other_end(stage: int, step: Step) -> tuple[int, Step] | None:
    """Finds the other end of a message: its stage, and its step but for the unit; None of no message."""
    if not step.is_message:
        return None
    op = Op.RECEIVE if step.op is Op.SEND else Op.SEND
    if step.peer is not None:
        return step.peer, step._replace(op=op, peer=stage)
    # activations go up, gradients down
    return stage + (1 if (step.op is Op.SEND) != step.back else -1), step._replace(op=op)


class Stages:
    """All stages, each somewhere in its schedule. A message takes seconds(stage, step) of its sender."""

    def __init__(self, schedules: Sequence[Schedule], seconds: Callable[[int, Step], float]) -> None:
        self.seconds = seconds
        self.spans: list[dict[Step, tuple[float, float]]] = [{} for _ in schedules]
        self.stall_s = [0.0] * len(schedules)
        self.free: dict[Lane, float] = defaultdict(float)
        self.lanes: dict[Lane, deque[tuple[Step, Waits]]] = defaultdict(deque)
        self.waiting: dict[tuple[int, Step], list[Lane]] = defaultdict(list)
        self.posted: dict[tuple[object, ...], tuple[Step, float]] = {}
        for stage, steps in enumerate(schedules):
            for step, waits in steps.items():
                self.lanes[stage, step.stream].append((step, waits))

    def run(self) -> list[Times]:
        """Simulates all steps; stalls are waits for copies alone. Errors: ValueError."""
        going = deque(self.lanes)
        while going:
            lane = going.popleft()
            while self.lanes[lane] and (done := self.advance(lane)):
                for stage, step in done:
                    going += self.waiting.pop((stage, step), ())
                    if (stage, step.stream) != lane:
                        going.append((stage, step.stream))
        if left := [lane for lane, steps in self.lanes.items() if steps]:
            raise ValueError(self.refusal(min(left)))
        return [Times(spans, stall) for spans, stall in zip(self.spans, self.stall_s, strict=True)]

    def advance(self, lane: Lane) -> list[tuple[int, Step]]:
        """Does the lane's next step, of a message both ends; returns what was done: nothing if it waits."""
        stage, _ = lane
        (step, waits), spans = self.lanes[lane][0], self.spans[stage]
        start = before = self.free[lane]
        for earlier in waits:
            if earlier not in spans:
                self.waiting[stage, earlier].append(lane)
                return []
            start = max(start, spans[earlier][1])
        if end := other_end(stage, step):
            return self.meet(stage, step, start, *end)
        if step.computes and start > before:
            bubble = max([before, *(spans[earlier][1] for earlier in waits if earlier.is_message)])
            self.stall_s[stage] += start - bubble
        self.finish(stage, step, start, start + self.seconds(stage, step))
        return [(stage, step)]

    def meet(self, stage: int, step: Step, start: float, other: int, end: Step) -> list[tuple[int, Step]]:
        """Does both ends of a message, if the other one has been posted: `end` of the stage `other`."""
        # a stage posts messages of a kind, to or from another one, in order
        mine, theirs = (stage, step.op, *step[2:]), (other, end.op, *end[2:])
        self.posted.setdefault(mine, (step, start))  # a lane has one at a time
        if theirs not in self.posted:
            return []
        (partner, since), _ = self.posted.pop(theirs), self.posted.pop(mine)
        if partner.unit[1] != step.unit[1] or (step.peer is not None and partner.unit != step.unit):
            raise ValueError(f"{AS_SENT}: {said(stage, step)} meets {said(other, partner)}")
        sender = (stage, step) if step.op is Op.SEND else (other, partner)
        start = max(start, since)
        both = [(stage, step), (other, partner)]
        for at, of_it in both:
            self.finish(at, of_it, start, start + self.seconds(*sender))
        return both

    def finish(self, stage: int, step: Step, start: float, end: float) -> None:
        lane = stage, step.stream
        self.spans[stage][step] = start, end
        self.free[lane] = end
        self.lanes[lane].popleft()

    def refusal(self, lane: Lane) -> str:
        """Explains why a lane does not go on: who waits in what for whom."""
        path: list[Lane] = []
        texts: list[str] = []
        while lane not in path:
            path.append(lane)
            stage, (step, waits) = lane[0], self.lanes[lane][0]
            lacks = next((earlier for earlier in waits if earlier not in self.spans[stage]), None)
            if lacks:
                lane = stage, lacks.stream
                texts.append(f"{said(stage, step)} waits for its {described(lacks)}")
            else:
                end = other_end(stage, step)
                assert end is not None  # only a message waits for another stage
                lane = end[0], end[1].stream
                texts.append(f"{said(stage, step)} waits for stage {lane[0]}")
            if not self.lanes.get(lane):
                return f"{MET}: {texts[-1]}, which has come to its end"
        return f"{STAGES_CIRCLE}: {'; '.join(texts[path.index(lane):])}"


def times_of_stages(schedules: Sequence[Schedule],
                    seconds: Callable[[int, Step], float]) -> list[Times]:
    """Simulates all stages on one clock. Errors: ValueError: messages that do not meet, waits in a circle."""
    return Stages(schedules, seconds).run()


def end_of(times: Sequence[Times]) -> float:
    """Finds when the last step of all ends."""
    return max(end for one in times for _, end in one.spans.values())


def in_one_order(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Sorts the steps of each stage by when they begin if each takes as long, the forward's first, so that
    the messages of all stages have one order: they meet even where a stage does one after the other, whatever
    their communicators. Each stream does its steps in the order as before. Errors: as times_of_stages()."""
    def ordered(stage: int, steps: Schedule, spans: dict[Step, tuple[float, float]]) -> Schedule:
        def place(step: Step) -> tuple[object, ...]:
            if (end := other_end(stage, step)) is None:
                return step.back, spans[step][0]
            (source, sent), (to, _) = ((stage, step), end) if step.op is Op.SEND else (end, (stage, step))
            return step.back, spans[step][0], (source, to, sent.kind)
        return {step: steps[step] for step in sorted(steps, key=place)}
    times = times_of_stages(schedules, lambda stage, step: 1.0)
    return [ordered(k, steps, times[k].spans) for k, steps in enumerate(schedules)]
