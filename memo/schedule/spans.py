"""The spans of a step, which streams leave (memo/schedule/streams.py) or a simulation
(memo/schedule/simulate.py), and the seconds that they add up to. No torch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from memo.schedule.simulate import Times
from memo.schedule.step import Op, Place, Step
from memo.schedule.waits import Schedule


class Span(NamedTuple):
    """Says what ran when. `kind`: launch, or wait, for a copy; bubble, a wait for a stage; ranks, for
    replicas."""

    stream: str
    kind: str
    label: str
    start_s: float
    end_s: float


def wait_kind(step: Step) -> str:
    """Names the kind of a Span in which a stream waits for a step."""
    if step.op in (Op.REDUCE, Op.GATHER):
        return "ranks"
    return "bubble" if step.is_message else "wait"


def wait_label(name: Callable[[Step], str], step: Step, earlier: Step, place: Place) -> str:
    """Says what a wait of a step is for. name(step): as the timeline has it."""
    return f"{name(step)} waits for {name(earlier)}: {place}"


def spent_s(spans: Iterable[Span], *kinds: str) -> float:
    """Sums the seconds of the compute stream's spans of these kinds."""
    return sum(s.end_s - s.start_s for s in spans if s.stream == "compute" and s.kind in kinds)


def stall_s(spans: Iterable[Span]) -> float:
    """Sums the seconds that the compute stream spent waiting for copies."""
    return spent_s(spans, "wait")


def busy_s(spans: Iterable[Span]) -> float:
    """Sums the seconds that the compute stream computed, or waited for a copy or for replicas."""
    return spent_s(spans, "launch", "wait", "ranks")


def length_s(spans: Iterable[Span]) -> float:
    """Measures the seconds from the compute stream's first span to its last one."""
    ends = [(s.start_s, s.end_s) for s in spans if s.stream == "compute"]
    return max(end for _, end in ends) - min(start for start, _ in ends)


def simulated_spans(steps: Schedule, times: Times) -> list[Span]:
    """Makes the spans that a stage's steps would leave in these Times."""
    spans, free = list[Span](), 0.0

    def name(step: Step) -> str:
        return f"{step.kind} {'.'.join(map(str, step.unit))}"
    for step, waits in steps.items():
        if step.computes:
            for earlier in sorted(waits, key=wait_kind):
                if (end := times.spans[earlier][1]) > free:
                    label = wait_label(name, step, earlier, waits[earlier])
                    spans.append(Span("compute", wait_kind(earlier), label, free, end))
                    free = end
            free = times.spans[step][1]
        spans.append(Span(step.stream, "launch", name(step), *times.spans[step]))
    return spans


def sent_and_received(sender: Iterable[Span], receiver: Iterable[Span],
                      what: str = "") -> list[tuple[Span, Span]]:
    """Pairs the ends of each message to a neighbour, in order. `what`: " gradient" of gradients."""
    def ends(spans: Iterable[Span], kind: str) -> list[Span]:
        return [s for s in spans if s.kind == "launch" and s.label.rpartition(" ")[0] == kind + what]
    return list(zip(ends(sender, "send"), ends(receiver, "receive"), strict=True))


def on_one_clock(stages: Sequence[list[Span]]) -> list[list[Span]]:
    """Moves the spans of each stage of a step, which have clocks of their own, to that of stage 0.

    Hosts have no clock in common, nor have their GPUs. But no message arrives before it is sent: the messages
    of one direction say how much later a neighbour's clock may have begun at most, those of the other one how
    much later at least. The middle is exact to half the time that the fastest message takes there and back.
    """
    moved, later = list(stages[:1]), 0.0
    for here, there in pairwise(stages):
        # the shortest message of each direction, as the clocks of its ends have it
        up_s, back_s = (min(received.end_s - sent.start_s for sent, received in messages) for messages in (
            sent_and_received(here, there), sent_and_received(there, here, " gradient")))
        later += (up_s - back_s) / 2
        moved.append([s._replace(start_s=s.start_s - later, end_s=s.end_s - later) for s in there])
    return moved
