"""An independent check of a schedule: shares nothing with what makes the program and the waits but the order
of the units, which layers come, which stream does a step, and the words. What each step touches is stated
here once more, with what must lie there (tests/places.py, tests/helping_places.py).

The replay goes through the steps in the order in which the host launches them, and knows for each place in
memory who wrote it last, what lies there, and who has read it since. A step is certain to be done before
another one only where the streams' own order and the waits say so."""

from typing import NamedTuple

from memo.schedule.program import Fates
from memo.schedule.step import Step, Unit
from memo.schedule.waits import Schedule
from tests.helping_places import SharedMemory
from tests.places import Content, Memory, Place

Key = tuple[str, Unit]


class Mark(NamedTuple):
    """A step, the stream that does it, and its number among all."""

    stream: str
    number: int
    step: Step


RULES = {  # by what a step finds that is not there, or not there for certain
    "x": "a unit is computed after its input", "dx": "a backward comes after that of the layer above",
    "kept": "a unit is read after it is computed",
    "rest": "rows that were dropped are recomputed before they are read",
    "copy": "a copy is fetched after it has left",
    "early": "a guest's unit is computed after what it borrows", "late": "and after what it takes",
    "sums": "sums of gradients are used when all have added to them", "repaid": "what is repaid is added",
    "gradients": "a guest's gradients are sent after they are made",
    "weights": "a layer is computed with after its parameters have come",
    "dw": "a layer's gradients are added to what has come, and leave when all is added",
    "keys": "attention reads keys and values of its layer's subsequences"}


def rule_of_read(step: Step, what: str, copied: bool) -> str:
    """The rule that a step breaks which finds other content; `copied`: its unit went to the host."""
    if step.stream == "prefetch":
        return RULES["copy"]
    if step.kind == "offload":
        return "a unit is copied after it is computed, and before its buffer is overwritten"
    if step.stream == "send" or step.kind.startswith(("lend", "return")):
        return "a message is sent after it is made, and before its place is overwritten"
    if step.stream == "offload" and what in ("x", "dx"):
        return "the stream is copied after it is made, and before its place is overwritten"
    if step.kind == "offload keys":
        return "keys and values are copied after they are made, and before others have their place"
    arrives = ("x", "kept", "keys") if copied else ("keys",)
    if step.kind in ("recompute", "backward", "sweep") and what in arrives:
        return "a copy is read after it has arrived"
    return RULES[what]


def rule_of_write(step: Step, other: Step) -> str:
    if other.stream == "offload":
        return "a buffer is overwritten after its copy has left"
    if other.stream.startswith(("send", "to")):
        return "a place is overwritten after it was sent"
    if step.stream.startswith(("prefetch", "receive", "from")):
        return "a buffer is refilled after it was read"
    return "a place is written after it was read"


def check_complete(memory: Memory, fates: Fates, clocks: dict[Key, dict[str, int]], layers: int,
                   subsequences: int, trains: bool) -> None:
    """Errors: ValueError: a step is missing, or subsequences of a layer are computed in another order.
    `clocks`: of each step, see validate_schedule()."""
    passes = ("forward", "backward")[:1 + trains]
    needed = {(kind, unit) for unit in memory.units for kind in passes}
    below = ("receive", "send gradient") if fates.receives else ("embedding", "embedding backward")
    above = ("send", "receive gradient")[:1 + trains] if fates.sends else ("head",)
    needed |= {(kind, (0, i)) for i in range(subsequences) for kind in below[:1 + trains]}
    needed |= {(kind, (layers - 1, i)) for i in range(subsequences) for kind in above}
    needed |= memory.messages()
    needed |= {("offload weight gradients", (layer, 0)) for layer in memory.come if trains}
    if lacking := sorted(needed - set(clocks)):
        kind, unit = lacking[0]
        raise ValueError(f"every unit has a forward and a backward: there is no {kind} {unit}")
    for layer, i in memory.units:  # attention reads the keys and values of the subsequences before
        for kind, earlier in zip(passes, (i - 1, i + 1), strict=False):
            if 0 <= earlier < subsequences and i < subsequences:
                a, b = (kind, (layer, i)), (kind, (layer, earlier))
                if clocks[a]["compute"] < clocks[b]["compute"]:
                    raise ValueError(f"subsequences follow each other: {kind} {(layer, i)} comes before "
                                     f"{(layer, earlier)}")


def validate_schedule(steps: Schedule, fates: Fates, layers: int, subsequences: int = 1,
                      order: str = "layer", trains: bool = True) -> None:
    """`trains`: whether a backward follows. Errors: ValueError: the rule that the steps violate, and the
    steps."""
    shared = fates.guests or fates.lent
    memory = (SharedMemory if shared else Memory)(fates, layers, subsequences, order, trains)
    streams: dict[str, Step] = {}  # the last step of each stream
    clocks: dict[Step, dict[str, int]] = {}  # of each stream the last step that is done for certain by then
    content: dict[Place, Content] = {}
    writer: dict[Place, Mark] = {}
    readers: dict[Place, dict[str, Mark]] = {}  # the last one of each stream since it was written

    def late(step: Step, other: Step, rule: str) -> ValueError:
        return ValueError(f"{rule}: {step} does not wait for {other}")
    for step, waits in steps.items():
        stream, number = step.stream, len(clocks)
        clock = dict(clocks[streams[stream]]) if stream in streams else {}
        for earlier in waits:
            if earlier not in clocks:
                raise ValueError(f"a step waits for steps that are launched before it: {step} waits for "
                                 f"{earlier}")
            their = clocks[earlier]
            clock = {name: max(clock.get(name, -1), their.get(name, -1)) for name in clock | their}
        clock[stream] = number
        clocks[step], streams[stream], mine = clock, step, Mark(stream, number, step)
        access = memory.access(step)
        for place, wanted in access.reads:
            there, other = content.get(place), writer.get(place)
            if other and there == wanted and clock.get(other.stream, -1) >= other.number:
                readers[place][stream] = mine
                continue
            rule = rule_of_read(step, wanted[0], memory.number.get(step.unit) in fates.copied)
            if other and there == wanted:
                raise late(step, other.step, rule)
            raise ValueError(f"{rule}: {step} finds {there} where {wanted} must lie")
        sums = [(place, ("sums", content[place][1] | {what})) for place, what in access.adds]
        for place, what in access.writes + sums:
            for other in [writer[place], *readers[place].values()] if place in writer else []:
                if clock.get(other.stream, -1) < other.number:
                    raise late(step, other.step, rule_of_write(step, other.step))
            content[place], writer[place], readers[place] = what, mine, {}
    named = {(step.kind, step.unit): clock for step, clock in clocks.items()}
    check_complete(memory, fates, named, layers, subsequences, trains)
