"""An independent check of a schedule: shares nothing with the function that makes it but the order of
the units and the words. No torch.

The validator goes through the steps in the order in which the host launches them, and knows for each place in
memory who wrote it last, what lies there, and who has read it since. A step is certain to be done before
another one only where the streams' own order and the waits say so."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from memo.swap.schedule import Fates, Key, Step, Unit, units_in_order

# places in memory: ("kept", buffer) rows that survive; ("rest", buffer) rows that may be recomputed; ("x",
# place) an input or its gradient; ("slab", unit) the host's copy. With several subsequences ("stream", i)
# what lies between two layers, or in place i of it where it is copied, ("slab stream", unit) the host's copy
# of a unit's input or of its gradient; ("keys", place) keys and values, ("slab keys", unit) the host's copy
# of them, ("sweep", place) an input that came back for a sweep. What lies there: (what, whose unit)
Place = tuple
Content = tuple


class Access(NamedTuple):
    """`reads`: [(place, content that must lie there)]; `writes`: [(place, content that lies there
    afterwards)]."""

    reads: list[tuple[Place, Content]]
    writes: list[tuple[Place, Content]]


class Mark(NamedTuple):
    """A step, the stream that does it, and its number among all."""

    stream: str
    number: int
    step: Step


class Memory:
    """Which step touches which place."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str) -> None:
        self.fates, self.layers, self.subsequences, self.order = fates, layers, subsequences, order
        self.copies_stream = fates.stream == "copied" and subsequences > 1
        self.in_turns = fates.stream != "whole" and subsequences > 1
        self.units = units_in_order(layers, subsequences, order)
        self.number = {unit: k for k, unit in enumerate(self.units)}
        # two buffers share the rows that are recomputed
        self.shares = fates.n_buffers == 2 and bool(fates.rebuilt)
        self.keys_of_layers: dict[int, list[tuple[Place, Content]]] = {}

    def kept(self, unit: Unit) -> Place:
        return "kept", self.number[unit] % self.fates.n_buffers

    def rest(self, unit: Unit) -> Place:
        return "rest", 0 if self.shares else self.number[unit] % self.fates.n_buffers

    def x(self, unit: Unit) -> Place:
        """Where the input of a unit lies; with one subsequence that of layer `layers` is the head's."""
        if self.fates.x_stays:
            return "x", unit
        n = self.fates.n_buffers
        return ("x", unit[0] % (n + 1)) if self.subsequences == 1 else ("x", self.number[unit] % n)

    def ends(self, unit: Unit) -> tuple[Place, Place]:
        """Where a unit finds its input and puts the gradient of it, and where it puts its output and finds
        the gradient of that."""
        layer, i = unit
        if self.subsequences == 1:
            return self.x(unit), self.x((layer + 1, i))
        if self.in_turns:  # three places in turns, for units or, subsequence by subsequence, for these
            i = (self.number[unit] if self.order == "layer" else i) % 3
        return ("stream", i), ("stream", i)

    def comes(self, unit: Unit) -> bool:
        """Whether a unit's input comes from the host, where the layer below has sent it."""
        return self.copies_stream and self.order == "layer" and unit[0] > 0

    def keys(self, unit: Unit) -> Place:
        layer, i = unit
        if self.fates.keys == "stay":
            return "keys", unit
        return ("keys", "first", layer % 2) if i == 0 else ("keys", i)

    def attention_reads(self, unit: Unit, own: bool) -> list[tuple[Place, Content]]:
        """Keys and values that a unit's attention reads, of the subsequences before, with `own` its own
        too."""
        layer, i = unit
        if self.subsequences == 1:
            return []
        if layer not in self.keys_of_layers:
            units = [(layer, j) for j in range(self.subsequences)]
            self.keys_of_layers[layer] = [(self.keys(other), ("keys", other)) for other in units]
        return self.keys_of_layers[layer][:i + own]

    def access(self, step: Step) -> Access:
        """What a step reads and writes."""
        unit, fates = step.unit, self.fates
        layer, i = unit
        k, slab, several = self.number[unit], ("slab", unit), self.subsequences > 1
        below, above = self.ends(unit)
        kept, rest, x = self.kept(unit), self.rest(unit), self.x(unit)
        x_here, activations = (x, ("x", unit)), (kept, ("kept", unit))
        own_keys, copied_keys = (self.keys(unit), ("keys", unit)), (("slab keys", unit), ("copy", unit))
        survives = [] if k in fates.input_only else [activations]
        inputs = [] if fates.x_stays else [x_here]
        sent, came = (inputs, []) if not self.comes(unit) else ([], [(("slab stream", unit), ("x", unit))])
        match step.kind:
            case "embedding" | "receive":
                return Access([], [(below, ("x", unit))])
            case "forward":
                apart = [x_here, own_keys] if several else []
                return Access([(below, ("x", unit)), *self.attention_reads(unit, own=False)],
                              [*apart, activations, (rest, ("rest", unit)), (above, ("x", (layer + 1, i)))])
            case "send":
                return Access([(above, ("x", (layer + 1, i)))], [])
            case "receive gradient":
                return Access([], [(above, ("dx", (layer + 1, i)))])
            case "head":
                return Access([(above, ("x", (layer + 1, i)))], [(above, ("dx", (layer + 1, i)))])
            case "offload":
                return Access(survives + sent, [(slab, ("copy", unit))])
            case "prefetch":
                copy = [(slab, ("copy", unit))] if survives + sent else []
                return Access([*copy, *(came if inputs else [])], survives + inputs)
            case "offload keys":
                return Access([own_keys], [copied_keys])
            case "prefetch keys":
                return Access([copied_keys], [own_keys])
            case "prefetch input":
                return Access(came or [(slab, ("copy", unit))], [(self.sweep_place(unit), ("x", unit))])
            case "sweep":
                back = k in fates.copied and not fates.x_stays
                return Access([(self.sweep_place(unit), ("x", unit)) if back else x_here], [own_keys])
            case "recompute":
                lost = [] if survives else [activations]
                reads = [] if survives else self.attention_reads(unit, own=True)
                return Access([x_here, *survives, *reads], [*lost, (rest, ("rest", unit))])
            case "backward":
                # of a unit that is copied and not rebuilt all rows are kept rows
                needs_rest = k in fates.rebuilt or k not in fates.copied
                rests = [(rest, ("rest", unit))] if needs_rest else []
                return Access([x_here, activations, *rests, (above, ("dx", (layer + 1, i))),
                               *self.attention_reads(unit, own=True)],
                              [(below, ("dx", unit)), (kept, ("used", unit))])
            case "embedding backward" | "send gradient":
                return Access([(below, ("dx", unit))], [])
        return self.stream_access(step)

    def stream_access(self, step: Step) -> Access:
        """The same of a step that copies what lies between layers."""
        unit, (layer, i), (place, _) = step.unit, step.unit, self.ends(step.unit)
        above = layer + 1, i
        match step.kind:
            case "offload stream":
                made = "x" if layer + 1 < self.layers else "dx", above
                return Access([(place, made)], [(("slab stream", above), made)])
            case "prefetch stream":
                return Access([(("slab stream", unit), ("x", unit))], [(place, ("x", unit))])
            case "prefetch gradient":
                return Access([(("slab stream", above), ("dx", above))], [(place, ("dx", above))])
            case "offload gradient":
                return Access([(place, ("dx", unit))], [(("slab stream", unit), ("dx", unit))])
        raise ValueError(f"{step.kind} {unit}: no such kind of step")

    def sweep_place(self, unit: Unit) -> Place:
        """Of an input that comes back for a sweep: two take turns."""
        return "sweep", self.turns[unit] % 2 if unit in self.turns else None

    @cached_property
    def turns(self) -> dict[Unit, int]:
        """The units whose input comes back, numbered in the order of those whose keys and values the sweeps
        replace."""
        replaced = {(layer, i): (layer + (1 if i else 2), i) for layer, i in self.units}
        came = [u for u in self.units if replaced[u] in self.number and self.number[u] in self.fates.copied]
        came.sort(key=lambda u: self.number[replaced[u]], reverse=True)
        return {unit: turn for turn, unit in enumerate(came)}


RULES = {  # by what a step finds that is not there, or not there for certain
    "x": "a unit is computed after its input", "dx": "a backward comes after that of the layer above",
    "kept": "a unit is read after it is computed",
    "rest": "rows that were dropped are recomputed before they are read",
    "copy": "a copy is fetched after it has left",
    "keys": "attention reads keys and values of its layer's subsequences"}


def rule_of_read(step: Step, what: str, copied: bool) -> str:
    """The rule that a step breaks which finds other content; `copied`: its unit went to the host."""
    if step.stream == "prefetch":
        return RULES["copy"]
    if step.kind == "offload":
        return "a unit is copied after it is computed, and before its buffer is overwritten"
    if step.stream == "send":
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
    if other.stream == "send":
        return "a place is overwritten after it was sent"
    if step.stream in ("prefetch", "receive"):
        return "a buffer is refilled after it was read"
    return "a place is written after it was read"


def validate_schedule(steps: Iterable[Step], fates: Fates, layers: int, subsequences: int = 1,
                      order: str = "layer", trains: bool = True) -> None:
    """`trains`: whether a backward follows. Errors: ValueError: the rule that the steps violate, and the
    steps."""
    memory = Memory(fates, layers, subsequences, order)
    streams: dict[str, Key] = {}  # the last step of each stream
    clocks: dict[Key, dict[str, int]] = {}  # of each stream the last step that is done for certain by then
    content: dict[Place, Content] = {}
    writer: dict[Place, Mark] = {}
    readers: dict[Place, dict[str, Mark]] = {}  # the last one of each stream since it was written

    def late(step: Step, other: Step, rule: str) -> ValueError:
        return ValueError(f"{rule}: {step.kind} {step.unit} does not wait for {other.kind} {other.unit}")
    for step in steps:
        if step.key in clocks:
            raise ValueError(f"each step comes once: {step.kind} {step.unit} comes again")
        stream, number = step.stream, len(clocks)
        clock = dict(clocks[streams[stream]]) if stream in streams else {}
        for key in step.waits:
            if key not in clocks:
                raise ValueError("a step waits for steps that are launched before it: "
                                 f"{step.kind} {step.unit} waits for {key}")
            their = clocks[key]
            clock = {name: max(clock.get(name, -1), their.get(name, -1)) for name in clock | their}
        clock[stream] = number
        clocks[step.key], streams[stream], mine = clock, step.key, Mark(stream, number, step)
        access = memory.access(step)
        for place, wanted in access.reads:
            there, other = content.get(place), writer.get(place)
            if other and there == wanted and clock.get(other.stream, -1) >= other.number:
                readers[place][stream] = mine
                continue
            rule = rule_of_read(step, wanted[0], memory.number[step.unit] in fates.copied)
            if other and there == wanted:
                raise late(step, other.step, rule)
            raise ValueError(f"{rule}: {step.kind} {step.unit} finds {there} where {wanted} must lie")
        for place, what in access.writes:
            for other in [writer[place], *readers[place].values()] if place in writer else []:
                if clock.get(other.stream, -1) < other.number:
                    raise late(step, other.step, rule_of_write(step, other.step))
            content[place], writer[place], readers[place] = what, mine, {}
    passes = ("forward", "backward")[:1 + trains]
    needed = {(kind, unit) for unit in memory.units for kind in passes}
    below = ("receive", "send gradient") if fates.receives else ("embedding", "embedding backward")
    above = ("send", "receive gradient")[:1 + trains] if fates.sends else ("head",)
    needed |= {(kind, (0, i)) for i in range(subsequences) for kind in below[:1 + trains]}
    needed |= {(kind, (layers - 1, i)) for i in range(subsequences) for kind in above}
    if lacking := sorted(needed - set(clocks)):
        kind, unit = lacking[0]
        raise ValueError(f"every unit has a forward and a backward: there is no {kind} {unit}")
    for layer, i in memory.units:  # attention reads the keys and values of the subsequences before
        for kind, earlier in zip(passes, (i - 1, i + 1), strict=False):
            if 0 <= earlier < subsequences:
                a, b = (kind, (layer, i)), (kind, (layer, earlier))
                if clocks[a]["compute"] < clocks[b]["compute"]:
                    raise ValueError(f"subsequences follow each other: {kind} {(layer, i)} comes before "
                                     f"{(layer, earlier)}")
