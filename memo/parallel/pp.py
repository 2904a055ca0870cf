"""The schedules of all stages of a pipeline, run together: who waits how long for whom, and whether anybody
waits for ever. No torch.

Nothing is buffered: a message begins when its sender and its receiver have both come to it. From one stage to
the next each direction has a communicator of its own, which does what it is given in order. Source: SPPO 3.3.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache

from memo.swap.schedule import Times
from memo.swap.spans import wait_kind
from memo.swap.steps import SENT, Key, Step, is_forward, stream_of

AS_SENT = "a message is received as it was sent"
MET = "every message meets its other end"
STAGES_CIRCLE = "stages do not wait for each other in a circle"
# {kind of a message: (that of its other end, how many stages further that is)}
OTHER_ENDS = {"send": ("receive", 1), "receive": ("send", -1), "send gradient": ("receive gradient", -1),
        "receive gradient": ("send gradient", 1)}
# the same of messages between a home and a helper, whose kinds end in the number of the other stage
PARTNERS = {"lend": "borrow", "pass": "take", "return": "fetch", "repay": "collect"}
PARTNERS |= {other: kind for kind, other in PARTNERS.items()}
Lane = tuple[int, str]  # a stage and one of its streams


def of_unit(key: Key) -> str:
    kind, unit = key
    return f"{kind} of " + (f"subsequence {unit[1]}" if kind in OTHER_ENDS else f"unit {unit}")


def said(stage: int, step: Step) -> str:
    return f"stage {stage} in {of_unit(step.key)}"


@cache
def other_end(kind: str, stage: int) -> tuple[str, int] | None:
    """(kind, stage) of a message's other end; None where a step is no message."""
    if kind in OTHER_ENDS:
        other, further = OTHER_ENDS[kind]
        return other, stage + further
    first, *rest = kind.split(" ")
    if first not in PARTNERS:
        return None
    return " ".join([PARTNERS[first], str(stage), *rest[1:]]), int(rest[0])


class Stages:
    """All stages, each somewhere in its schedule. seconds(stage, step): a message takes those of its
    sender."""

    def __init__(self, schedules: Sequence[Sequence[Step]], seconds: Callable[[int, Step], float]) -> None:
        self.seconds = seconds
        self.spans: list[dict[Key, tuple[float, float]]] = [{} for _ in schedules]
        self.stall_s = [0.0] * len(schedules)
        self.free: dict[Lane, float] = defaultdict(float)
        self.lanes: dict[Lane, deque[Step]] = defaultdict(deque)
        self.waiting: dict[tuple[int, Key], list[Lane]] = defaultdict(list)
        # each end of what goes from stage to stage, in order: (kind, stage) -> steps that have been posted
        self.posted: dict[tuple[str, int], deque[tuple[Step, float]]] = defaultdict(deque)
        for stage, steps in enumerate(schedules):
            for step in steps:
                self.lanes[stage, step.stream].append(step)

    def run(self) -> list[Times]:
        """The Times of each stage; stalls are waits for copies alone. Errors: ValueError."""
        going = deque(self.lanes)
        while going:
            lane = going.popleft()
            while self.lanes[lane] and (done := self.advance(lane)):
                for stage, step in done:
                    going += self.waiting.pop((stage, step.key), ())
                    if (stage, step.stream) != lane:
                        going.append((stage, step.stream))
        if left := [lane for lane, steps in self.lanes.items() if steps]:
            raise ValueError(self.refusal(min(left)))
        return [Times(spans, stall) for spans, stall in zip(self.spans, self.stall_s, strict=True)]

    def lacks(self, stage: int, step: Step) -> Key | None:
        """A step of the same stage that `step` still waits for."""
        return next((key for key in step.waits if key not in self.spans[stage]), None)

    def advance(self, lane: Lane) -> list[tuple[int, Step]]:
        """What is done, of the lane's next step and, if that is a message, its other end; nothing if the step
        has to wait."""
        stage, stream = lane
        step, spans = self.lanes[lane][0], self.spans[stage]
        start = before = self.free[lane]
        for key in step.waits:
            if key not in spans:
                self.waiting[stage, key].append(lane)
                return []
            start = max(start, spans[key][1])
        if end := other_end(step.kind, stage):
            return self.meet(stage, step, start, *end)
        if stream == "compute" and start > before:
            bubble = max([before, *(spans[key][1] for key in step.waits if wait_kind(key) == "bubble")])
            self.stall_s[stage] += start - bubble
        self.finish(stage, step, start, start + self.seconds(stage, step))
        return [(stage, step)]

    def meet(self, stage: int, step: Step, start: float, kind: str, other: int) -> list[tuple[int, Step]]:
        """Both ends of a message, if the other one has been posted: that of a kind and a stage."""
        mine, theirs = (step.kind, stage), (kind, other)
        if not self.posted[mine]:  # a lane has one at a time
            self.posted[mine].append((step, start))
        if not self.posted[theirs]:
            return []
        (partner, since), _ = self.posted[theirs].popleft(), self.posted[mine].popleft()
        if partner.unit[1] != step.unit[1] or (step.kind not in OTHER_ENDS and partner.unit != step.unit):
            raise ValueError(f"{AS_SENT}: {said(stage, step)} meets {said(other, partner)}")
        sender = (stage, step) if step.kind.startswith(SENT) else (other, partner)
        start = max(start, since)
        for at, end in ((stage, step), (other, partner)):
            self.finish(at, end, start, start + self.seconds(*sender))
        return [(stage, step), (other, partner)]

    def finish(self, stage: int, step: Step, start: float, end: float) -> None:
        lane = stage, step.stream
        self.spans[stage][step.key] = start, end
        self.free[lane] = end
        self.lanes[lane].popleft()

    def refusal(self, lane: Lane) -> str:
        """Why a lane does not go on: who waits in what for whom."""
        path: list[Lane] = []
        texts: list[str] = []
        while lane not in path:
            path.append(lane)
            stage, step = lane[0], self.lanes[lane][0]
            if key := self.lacks(stage, step):
                lane = stage, stream_of(key)
                texts.append(f"{said(stage, step)} waits for its {of_unit(key)}")
            else:
                end = other_end(step.kind, stage)
                assert end is not None  # only a message waits for another stage
                lane = end[1], stream_of((end[0], step.unit))
                texts.append(f"{said(stage, step)} waits for stage {lane[0]}")
            if not self.lanes.get(lane):
                return f"{MET}: {texts[-1]}, which has come to its end"
        return f"{STAGES_CIRCLE}: {'; '.join(texts[path.index(lane):])}"


def times_of_stages(schedules: Sequence[Sequence[Step]],
                    seconds: Callable[[int, Step], float]) -> list[Times]:
    """The Times of each stage, all on one clock. Errors: ValueError: a message that meets another one, or
    none; stages that wait for each other."""
    return Stages(schedules, seconds).run()


def in_one_order(schedules: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """Sort the steps of each stage by when they begin if each takes as long, the forward's first -> schedules
    in which the messages of all stages have one order. So they meet even where a stage does its messages one
    after the other, whatever their communicators: each of several streams does its steps in the order as
    before. Errors: as times_of_stages()."""
    def ordered(stage: int, steps: Sequence[Step], spans: dict[Key, tuple[float, float]]) -> list[Step]:
        def place(step: Step) -> tuple:
            if (end := other_end(step.kind, stage)) is None:
                return not is_forward(step.kind), spans[step.key][0]
            sent = (stage, end[1], step.kind) if step.kind.startswith(SENT) else (end[1], stage, end[0])
            return not is_forward(step.kind), spans[step.key][0], sent
        return sorted(steps, key=place)
    times = times_of_stages(schedules, lambda stage, step: 1.0)
    return [ordered(k, steps, times[k].spans) for k, steps in enumerate(schedules)]
