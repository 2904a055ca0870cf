"""The program of a training step: what is launched, in which order. No step says what it waits for: that
follows from what steps touch (memo/schedule/access.py, waits.py). No torch.

A unit is one layer at one subsequence. Units are computed in order, one buffer each, in turns:

    forward    unit k computes in buffer k % n; then the offload stream copies what survives of it to the host
               slab, while the next units compute
    backward   the last n units are still in their buffers; when unit k is done, the prefetch stream refills
               its buffer with unit k - n, while the units between compute

`memo` and `swap` have n = 2 (or more where the device has room), `keep` has a buffer for each unit,
`recompute` has one: then nothing is copied.

With several subsequences a unit reads the keys and values of its layer's earlier subsequences. Layer by layer
their places are those of one layer, which the next layer's take over piece by piece: the piece of a
subsequence leaves for the slab, and comes back when the backward of the layer above has used up the one that
lies there; or it is made again from the layer's input, by a sweep. The first piece has two places, which even
and odd layers use: a layer's first backward unit reads all pieces, so the first one must come back while the
layer above still needs its own. A sweep comes right behind the backward of the unit above.

What lies between two layers, the stream, is whole on the device or has a few places there, which units take
in turns: one arrives, one is computed on, one leaves. A unit's output takes the place of its input and leaves
for the slab, from where it comes back as the input of the layer above; so the gradient in the backward, over
that input. Subsequence by subsequence only the head's gradients leave: all layers of a subsequence have one
place.

A stage of a pipeline that is not the first receives its first layer's input in the place of the embedding,
and sends the gradient of it; one that is not the last sends its last layer's output in the place of the head,
and receives the gradient of that. Each message is posted while the subsequence before is computed.

Where layers take turns in two places for their parameters (memo/flat.py), those of layer j come when the
forward of layer j - 2 is done, and again in the backward when that of layer j + 2 is done, whose gradients
leave then. The embedding is layer -1, the head the one above all; where both have one matrix, they stay.
Source: MEMO 4.1 and 4.3.2; SPPO 3.3 for stages, 4 for subsequences; ZeRO (arXiv 1910.02054), stages 2 and 3,
ZeRO-Infinity (arXiv 2104.07857) for layers that come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memo.msp import Shares, guest_units
from memo.schedule.help import Helper, Home
from memo.schedule.step import Moved, Op, Step, Unit

SWEEP_PLACES = 2  # for the inputs that sweeps read: one is read while the next one arrives
STREAM_PLACES = 3  # of a subsequence each, where the stream is copied, or sent to the next stage
LAYER_PLACES = 2  # for parameters, and for gradients: one is computed with while the other comes or goes
EMBEDDING = -1  # its number among the layers that come; the head's is that of layers


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What becomes of a stage's other tensors, whatever its units keep.

    Where there are several subsequences, `keys`: what becomes of keys and values: "stay" (those of all layers
    have places), "copied" or "made"; `stream`: of what lies between layers: "whole", "copied" or, with a few
    places that are sent, "passed". `receives`: another stage sends the input of the first layer; `sends`:
    another one takes the output of the last. `guests`: what the stage computes for others; `lent`: what
    others compute for it (memo/schedule/help.py). `layers_come`: the layers' parameters are on the device
    only while they are needed, with `edges_come` those of embedding and head too.
    """

    keys: str = "stay"
    stream: str = "whole"
    receives: bool = False
    sends: bool = False
    guests: Shares = ()
    lent: Shares = ()
    layers_come: bool = False
    edges_come: bool = False


@dataclass(frozen=True)
class Fates(Surroundings):
    """What becomes of the units' activations, each unit by its place in the order of the forward.

    `copied`: their activations go to the host and come back. `rebuilt`: some of their rows are recomputed.
    `input_only`: of these nothing but the input survives. `x_stays`: the inputs of all units stay on the
    device.
    """

    n_buffers: int
    copied: frozenset[int]
    rebuilt: frozenset[int]
    input_only: frozenset[int] = frozenset()
    x_stays: bool = False

    def coming(self, layers: int) -> range:
        """Numbers the layers that come, embedding and head among them."""
        return coming(layers, self.layers_come, self.edges_come)

    def of(self, subsequences: int, trains: bool) -> "Fates":
        """Changes the fates to those that count: one subsequence has no keys apart; a forward alone keeps
        nothing, and no copy leaves but the stream's."""
        fates = replace(self, keys="stay") if subsequences == 1 else self
        if trains:
            return fates
        return replace(fates, copied=frozenset(), keys="made" if fates.keys == "copied" else fates.keys)


def coming(layers: int, layers_come: bool, edges_come: bool) -> range:
    """Numbers the layers that take turns in two places; with `edges_come` embedding and head too. Beside a
    single layer these two would need the same place in turns, subsequence by subsequence: there they stay."""
    edges = edges_come and layers > 1
    return range(-edges, layers + edges) if layers_come else range(0)


def layer_of(step: Step, layers: int) -> int:
    """Finds the layer whose parameters a step uses, of `layers`."""
    ends = {Op.EMBED: EMBEDDING, Op.EMBED_BACKWARD: EMBEDDING, Op.HEAD: layers}
    return ends.get(step.op, step.unit.layer)


def units_in_order(layers: int, subsequences: int = 1, order: str = "layer",
                   guests: Shares = ()) -> list[Unit]:
    """Lists the units in the order of the forward: layer by layer, or subsequence by subsequence; those of
    `guests` before them and behind them. The backward's is the reverse."""
    if order == "layer":
        return [Unit(layer, i) for layer in range(layers) for i in range(subsequences)]
    before, behind = ([Unit(*unit) for unit in guest_units(guests, subsequences, way)]
                      for way in (True, False))
    return [*before, *(Unit(layer, i) for i in range(subsequences) for layer in range(layers)), *behind]


def keys_below(unit: Unit) -> Unit:
    """Finds the unit whose keys and values had the place of this one's before; its layer is negative where
    there is none."""
    layer, i = unit
    return Unit(layer - (1 if i else 2), i)


def keys_leave(unit: Unit, layers: int) -> bool:
    """Whether a later layer takes over the place of a unit's keys and values."""
    layer, i = unit
    return layer + (1 if i else 2) < layers


def stream_leaves(layers: int, subsequences: int, order: str) -> list[Unit]:
    """Lists the units of which what lies below them leaves the device, and its gradient; of layer `layers`,
    which is no unit: the gradient alone, that the head makes. Those of the last subsequences stay in their
    places."""
    of_layers = units_in_order(layers, subsequences, order) if order == "layer" else []
    heads = [Unit(layers, i) for i in range(subsequences - STREAM_PLACES)]
    return [unit for unit in of_layers if unit.layer > 0] + heads


def streamed_units(fates: Fates, layers: int, subsequences: int, order: str) -> set[Unit]:
    """Picks the units of which what lies below them comes from the host, and its gradient goes there."""
    copied = fates.stream == "copied" and subsequences > 1
    return {*stream_leaves(layers, subsequences, order)} if copied else set()


def program(fates: Fates, layers: int, subsequences: int = 1, order: str = "layer",
            trains: bool = True) -> Iterator[Step]:
    """Yields the steps of a forward, with `trains` also of the backward, in the order in which the host
    launches them. `fates`: as Fates.of() has them."""
    made = Program(fates, layers, subsequences, order, trains)
    yield from made.forward()
    if trains:
        yield from made.backward()


def swept_inputs(fates: Fates, units: Sequence[Unit]) -> list[Unit]:
    """Lists the units whose input comes back for a sweep, in the order of the sweeps."""
    number = {unit: k for k, unit in enumerate(units)}
    layers = units[-1].layer + 1
    swept = [below for unit in reversed(units) for below in swept_behind(unit, fates, layers)]
    return [] if fates.x_stays else [unit for unit in swept if number[unit] in fates.copied]


def swept_behind(unit: Unit, fates: Fates, layers: int) -> list[Unit]:
    """Lists the unit whose keys and values a sweep makes behind the backward of another one, of the layer
    above: none where they are still there."""
    below = Unit(unit.layer - 1, unit.subsequence)
    return [below] if fates.keys == "made" and below.layer >= 0 and keys_leave(below, layers) else []


class Program:
    """The steps of a forward and of a backward."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str, trains: bool) -> None:
        self.fates, self.layers, self.subsequences, self.trains = fates, layers, subsequences, trains
        self.units = units_in_order(layers, subsequences, order, fates.guests)
        self.number = {unit: k for k, unit in enumerate(self.units)}
        leave = streamed_units(fates, layers, subsequences, order)
        self.streamed = {unit for unit in leave if trains or unit.layer < layers}
        self.come = fates.coming(layers)
        self.sweeps = swept_inputs(fates, self.units) if subsequences > 1 else []
        self.input_after = dict(zip(self.sweeps, self.sweeps[SWEEP_PLACES:], strict=False))
        self.home = Home(fates.lent, layers, subsequences)
        self.helper = Helper(fates.guests, self.units, subsequences)

    def streams_output(self, unit: Unit) -> bool:
        """Whether a unit's output goes to the host, or the head's gradient, and the gradient comes from
        there."""
        return (unit.layer + 1, unit.subsequence) in self.streamed

    # --- forward ---

    def forward(self) -> Iterator[Step]:
        """Yields the steps up to the last head."""
        fates, last = self.fates, self.subsequences - 1
        for layer in self.come[:LAYER_PLACES]:
            yield from self.bring(layer)
        if fates.receives:
            yield Step(Op.RECEIVE, Unit(0, 0), Moved.STREAM)
        yield from self.home.lend(0, 0)
        yield from self.helper.arrive(before=True)
        for k, unit in enumerate(self.units):
            layer, i = unit
            if unit == (0, last):  # while the last subsequence is computed
                yield from self.helper.arrive(before=False)
            if fates.receives and layer == 0 and i < last:  # while this subsequence is computed
                yield Step(Op.RECEIVE, Unit(0, i + 1), Moved.STREAM)
            for following in self.units[k + 1:k + 2]:
                if following in self.streamed:  # while this unit is computed
                    yield Step(Op.PREFETCH, following, Moved.STREAM)
            if unit in self.helper.number:
                yield Step(Op.FORWARD, unit)
                yield from self.helper.after_forward(unit)
                yield from self.offload(k)
            else:
                yield from self.forward_of(k)

    def forward_of(self, k: int) -> Iterator[Step]:
        """Yields the forward of a unit of the stage's own, and what comes behind it."""
        fates, unit = self.fates, self.units[k]
        layer, i = unit
        if layer == 0 and not fates.receives:
            yield Step(Op.EMBED, unit)
            yield from self.next_layer(EMBEDDING, i)
        yield Step(Op.FORWARD, unit)
        yield from self.home.after_forward(unit)
        yield from self.next_layer(layer, i)
        if fates.keys == "copied" and keys_leave(unit, self.layers):
            yield Step(Op.OFFLOAD, unit, Moved.KEYS)
        if self.streams_output(unit) and layer < self.layers - 1:
            yield Step(Op.OFFLOAD, unit, Moved.STREAM)
        yield from self.offload(k)
        if layer == self.layers - 1 and fates.sends:
            yield Step(Op.SEND, unit, Moved.STREAM)
        elif layer == self.layers - 1:
            yield Step(Op.HEAD, unit)
            if self.streams_output(unit):
                yield Step(Op.OFFLOAD, unit, Moved.STREAM)

    def offload(self, k: int) -> Iterator[Step]:
        """Yields the copy of what survives of unit k. Of one that keeps its input alone, which the layer
        below has sent already, nothing is left to send."""
        unit = self.units[k]
        if k in self.fates.copied and not (k in self.fates.input_only and unit in self.streamed):
            yield Step(Op.OFFLOAD, unit, Moved.ACTIVATIONS)

    # --- backward ---

    def backward(self) -> Iterator[Step]:
        """Yields the steps behind the last head."""
        fates, top, last = self.fates, self.layers - 1, self.subsequences - 1
        if fates.lent:
            yield Step(Op.ZERO, Unit(0, 0), back=True)
        for unit in self.sweeps[:SWEEP_PLACES]:
            yield Step(Op.PREFETCH, unit, Moved.INPUT, back=True)
        for layer in reversed(self.come[-LAYER_PLACES:]):
            if layer != self.layers:  # the head's came in the forward
                yield self.sums(layer)
        if self.layers in self.come:
            yield from self.drop(self.layers)
            yield from self.next_sums(self.layers)
        if fates.sends:
            yield Step(Op.RECEIVE, Unit(top, last), Moved.GRADIENT, back=True)
        yield from self.home.lend_back(last)
        yield from self.helper.arrive_back(before=False)
        for k, unit in reversed([*enumerate(self.units)]):
            layer, i = unit
            if fates.sends and layer == top and 0 < i <= last:  # while the layers of this one compute
                yield Step(Op.RECEIVE, Unit(top, i - 1), Moved.GRADIENT, back=True)
            for earlier in self.units[max(0, k - 1):k]:
                if self.streams_output(earlier):  # while this unit is computed
                    yield Step(Op.PREFETCH, earlier, Moved.GRADIENT, back=True)
            if unit == (top, 0):
                yield from self.helper.arrive_back(before=True)
            if layer == top and unit not in self.helper.number:
                yield from self.home.begin_back(i)
                yield from self.home.lend_back(i - 1)
            yield from self.backward_of(k)

    def backward_of(self, k: int) -> Iterator[Step]:
        """Yields the backward of a unit, and what comes behind it."""
        fates, unit, n = self.fates, self.units[k], self.fates.n_buffers
        (layer, i), guest = unit, unit in self.helper.number
        if k in fates.rebuilt:
            yield Step(Op.RECOMPUTE, unit, back=True)
        if not guest:
            yield from self.home.add(layer, i)
        yield Step(Op.BACKWARD, unit, back=True)
        if guest:
            yield from self.helper.after_backward(unit)
        complete = layer in self.come and i == 0  # a layer's gradients
        if complete:
            yield from self.drop(layer)
        if unit in self.streamed:
            yield Step(Op.OFFLOAD, unit, Moved.GRADIENT, back=True)
        if fates.keys == "copied" and (below := keys_below(unit)) in self.number:
            yield Step(Op.PREFETCH, below, Moved.KEYS, back=True)
        if k - n in fates.copied:
            yield Step(Op.PREFETCH, self.units[k - n], Moved.ACTIVATIONS, back=True)
        if complete:  # behind the prefetches of activations, which need not wait for gradients to leave
            yield from self.next_sums(layer)
        for swept in swept_behind(unit, fates, self.layers):
            yield Step(Op.SWEEP, swept, back=True)
            if swept in self.input_after:
                yield Step(Op.PREFETCH, self.input_after[swept], Moved.INPUT, back=True)
        if layer == 0 and not guest:
            yield from self.end_of_backward(unit)

    def end_of_backward(self, unit: Unit) -> Iterator[Step]:
        """Yields what comes behind the backward of a subsequence's first layer."""
        i = unit.subsequence
        if self.fates.receives:
            yield Step(Op.SEND, unit, Moved.GRADIENT, back=True)
        yield from self.home.add(-1, i)
        if not self.fates.receives:
            yield Step(Op.EMBED_BACKWARD, unit, back=True)
            if EMBEDDING in self.come and i == 0:
                yield from self.drop(EMBEDDING)

    # --- layers that come ---

    def bring(self, layer: int) -> Iterator[Step]:
        """Yields the coming of a layer's parameters in the forward; the head's backward is part of it."""
        yield Step(Op.PREFETCH, Unit(layer, 0), Moved.WEIGHTS)
        if layer == self.layers and self.trains:
            yield Step(Op.PREFETCH, Unit(layer, 0), Moved.WEIGHT_GRADIENTS)

    def next_layer(self, layer: int, i: int) -> Iterator[Step]:
        """Yields the coming of the layer that takes over the place of one whose forward is done."""
        if layer in self.come and i == self.subsequences - 1 and layer + LAYER_PLACES in self.come:
            yield from self.bring(layer + LAYER_PLACES)

    def drop(self, layer: int) -> Iterator[Step]:
        """Yields the leaving of a layer's gradients, and the coming of the parameters that follow."""
        yield Step(Op.OFFLOAD, Unit(layer, 0), Moved.WEIGHT_GRADIENTS, back=True)
        below = layer - LAYER_PLACES
        # these come twice: the last two are still in their places, and the embedding's backward needs none
        if below in range(max(0, self.come.start), self.come.stop - LAYER_PLACES):
            yield Step(Op.PREFETCH, Unit(below, 0), Moved.WEIGHTS, back=True)

    def sums(self, layer: int) -> Step:
        """Makes the step by which come what earlier micro batches have left of a layer's gradients."""
        return Step(Op.PREFETCH, Unit(layer, 0), Moved.WEIGHT_GRADIENTS, back=True)

    def next_sums(self, layer: int) -> Iterator[Step]:
        """Yields the coming of those sums of the layer that takes over the place of one that has left."""
        if layer - LAYER_PLACES in self.come:
            yield self.sums(layer - LAYER_PLACES)
