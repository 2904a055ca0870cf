"""The places in memory that the steps of a schedule touch, for the validator. No torch."""

from functools import cached_property
from typing import NamedTuple

from memo.schedule.order import forward_order
from memo.schedule.program import Fates, coming
from memo.schedule.step import Step, Unit

# places in memory: ("kept", buffer) rows that survive; ("rest", buffer) rows that may be recomputed; ("x",
# place) an input or its gradient; ("slab", unit) the host's copy. With several subsequences ("stream", i)
# what lies between two layers, or in place i of it where it is copied, ("slab stream", unit) the host's copy
# of a unit's input or of its gradient; ("keys", place) keys and values, ("slab keys", unit) the host's copy
# of them, ("sweep", place) an input that came back for a sweep. Where layers come, the embedding is number
# -1, the head the one above all: ("weights", place) and ("dw", place) of a layer's parameters and their
# gradients, ("host dw", layer). What lies there: (what, whose unit)
Place = tuple
Content = tuple


class Access(NamedTuple):
    """`reads`: [(place, content that must lie there)]; `writes`: [(place, content that lies there
    afterwards)]; `adds`: [(place of sums, who adds to them)], whose content is ("sums", all who have)."""

    reads: list[tuple[Place, Content]]
    writes: list[tuple[Place, Content]]
    adds: list[tuple[Place, Content]] = []


class Memory:
    """Which step touches which place."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str, trains: bool) -> None:
        self.fates, self.layers, self.subsequences, self.order = fates, layers, subsequences, order
        self.trains, self.come = trains, coming(layers, fates.layers_come, fates.edges_come)
        self.copies_stream = fates.stream == "copied" and subsequences > 1
        self.in_turns = fates.stream != "whole" and subsequences > 1
        self.units = forward_order(layers, subsequences, order, fates.guests).units
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

    def near(self, layer: int) -> int:
        """How many subsequences' keys a unit of a layer reads, its own among them."""
        return (self.fates.near or (self.subsequences,) * self.layers)[layer]

    @cached_property
    def ring(self) -> int:
        """How many places units of all layers take in turns, layer by layer, where all have a window."""
        most = max(map(self.near, range(self.layers)))
        return 0 if most == self.subsequences else most + (self.fates.keys == "copied")

    def keys(self, unit: Unit) -> Place:
        layer, i = unit
        if self.fates.keys == "stay":
            return "keys", unit
        if self.order == "subsequence":
            return "keys", layer, i % self.near(layer)
        if self.ring:
            return "keys", "ring", (layer * self.subsequences + i) % self.ring
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
        return self.keys_of_layers[layer][max(0, i - self.near(layer) + 1):i + own]

    def access(self, step: Step) -> Access:
        """What a step reads and writes, a layer's parameters and their gradients among it."""
        if step.of_states:
            return self.layer_access(step)
        found, (layer, i) = self.unit_access(step), step.unit
        layer = {"embedding": -1, "embedding backward": -1, "head": self.layers}.get(step.kind, layer)
        if not step.computes or layer not in self.come:
            return found
        if step.kind != "embedding backward":
            found.reads.append((("weights", layer % 2), ("weights", layer)))
        if step.kind.endswith("backward") or (step.kind == "head" and self.trains):
            # each adds to what so many subsequences have added; a backward goes from the last to the first
            place, n = ("dw", layer % 2), i if step.kind == "head" else self.subsequences - 1 - i
            found.reads.append((place, ("dw", (layer, n))))
            found.writes.append((place, ("dw", (layer, n + 1))))
        return found

    def layer_access(self, step: Step) -> Access:
        """The same of a step that brings a layer's parameters, or moves their gradients."""
        layer, _ = step.unit
        place, on_host = ("dw", layer % 2), ("host dw", layer)
        match step.kind:
            case "offload weight gradients":
                return Access([(place, ("dw", (layer, self.subsequences)))], [(on_host, ("dw", layer))])
            case "prefetch weight gradients" | "prefetch weight gradients back":
                return Access([], [(place, ("dw", (layer, 0)))])  # zero, or those of earlier micro batches
        return Access([], [(("weights", layer % 2), ("weights", layer))])

    def unit_access(self, step: Step) -> Access:
        """What else a step reads and writes."""
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
                # of a unit that is not rebuilt all rows are kept rows, where it is copied, or shares its rest
                # with the last unit
                whole = k in fates.copied or (self.shares and k < len(self.units) - 1)
                needs_rest = k in fates.rebuilt or not whole
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
        units = [unit for unit in self.units if unit[1] < self.subsequences]
        after = {unit: next((late for late in units[k + 1:] if self.keys(late) == self.keys(unit)), None)
                 for k, unit in enumerate(units)}
        came = [unit for unit in units if after[unit] and self.number[unit] in self.fates.copied]
        if self.order == "layer" and not self.ring:  # each behind the unit above, the first piece as well
            after = {unit: Unit(unit[0] + 1, unit[1]) for unit in came}
        came.sort(key=lambda unit: self.number[after[unit]], reverse=True)
        return {unit: turn for turn, unit in enumerate(came)}

    def messages(self) -> set[tuple[str, Unit]]:
        """Messages between homes and helpers that must come; here is none."""
        return set()
