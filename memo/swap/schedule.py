"""The schedule of a training step: one pure function gives the list of steps; model.GPT executes the list,
`times_of` times it for the estimate, and memo/swap/validator.py checks it. No torch.

A unit is one layer at one subsequence: (layer, subsequence). Units are computed in order, one buffer each, in
turns:

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
Source: MEMO 4.1 and 4.3.2; SPPO 3.3 for stages, 4 for subsequences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from memo.msp import Shares, guest_units
from memo.swap.helping import Helper, Home
from memo.swap.layer_states import LayerStates, coming
from memo.swap.steps import BACK, Key, Step, Unit, stream_of

SWEEP_PLACES = 2  # for the inputs that sweeps read: one is read while the next one arrives
STREAM_PLACES = 3  # of a subsequence each, where the stream is copied, or sent to the next stage


@dataclass(frozen=True)
class Fates:
    """What becomes of the units' activations, each unit by its place in the order of the forward.

    `copied`: their activations go to the host and come back. `rebuilt`: some of their rows are recomputed.
    `input_only`: of these nothing but the input survives. `x_stays`: the inputs of all units stay on the
    device. Where there are several subsequences, `keys`: what becomes of keys and values: "stay" (those of
    all layers have places), "copied" or "made"; `stream`: of what lies between layers: "whole", "copied" or,
    with a few places that are sent, "passed". `receives`: another stage sends the input of the first layer;
    `sends`: another one takes the output of the last. `guests`: what the stage computes for others; `lent`:
    what others compute for it (memo/swap/helping.py). `layers_come`: the layers' parameters are on the device
    only while they are needed, with `edges_come` those of embedding and head too
    (memo/swap/layer_states.py).
    """

    n_buffers: int
    copied: frozenset[int]
    rebuilt: frozenset[int]
    input_only: frozenset[int] = frozenset()
    x_stays: bool = False
    keys: str = "stay"
    stream: str = "whole"
    receives: bool = False
    sends: bool = False
    guests: Shares = ()
    lent: Shares = ()
    layers_come: bool = False
    edges_come: bool = False

    def coming(self, layers: int) -> range:
        """The layers that come, embedding and head among them."""
        return coming(layers, self.layers_come, self.edges_come)


def units_in_order(layers: int, subsequences: int = 1, order: str = "layer",
                   guests: Shares = ()) -> list[Unit]:
    """The units in the order of the forward: layer by layer, or subsequence by subsequence; those of `guests`
    before them and behind them. The backward's is the reverse."""
    if order == "layer":
        return [(layer, i) for layer in range(layers) for i in range(subsequences)]
    before, behind = (guest_units(guests, subsequences, way) for way in (True, False))
    return [*before, *((layer, i) for i in range(subsequences) for layer in range(layers)), *behind]


def keys_below(unit: Unit) -> Unit:
    """The unit whose keys and values have the place of this one's before; its layer is negative where there
    is none."""
    layer, i = unit
    return layer - (1 if i else 2), i


def keys_leave(unit: Unit, layers: int) -> bool:
    """Whether a later layer takes over the place of a unit's keys and values."""
    layer, i = unit
    return layer + (1 if i else 2) < layers


def stream_leaves(layers: int, subsequences: int, order: str) -> list[Unit]:
    """The units of which what lies below them leaves the device, and its gradient; of layer `layers`, which
    is no unit: the gradient alone, that the head makes. Those of the last subsequences stay in their
    places."""
    of_layers = units_in_order(layers, subsequences, order) if order == "layer" else []
    heads = [(layers, i) for i in range(subsequences - STREAM_PLACES)]
    return [unit for unit in of_layers if unit[0] > 0] + heads


class Stream:
    """Which steps copy what lies between layers, or send it, and when its places are free."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str, trains: bool) -> None:
        self.fates, self.top, self.trains = fates, layers - 1, trains
        self.in_turns = fates.stream != "whole" and subsequences > 1
        copied = fates.stream == "copied" and subsequences > 1
        leave = stream_leaves(layers, subsequences, order) if copied else []
        self.leave = {unit for unit in leave if trains or unit[0] < layers}
        units = units_in_order(layers, subsequences, order)
        # those that have a place one after the other
        size = 1 if order == "layer" else layers
        self.turns = [units[k:k + size] for k in range(0, len(units), size)]
        self.turn_of = {unit: turn for turn, those in enumerate(self.turns) for unit in those}

    def arrives(self, unit: Unit) -> bool:
        """Whether a unit's input comes from the host, and its gradient goes there."""
        return unit in self.leave

    def leaves(self, unit: Unit) -> bool:
        """Whether a unit's output goes to the host, or the head's gradient, and the gradient comes from
        there."""
        return (unit[0] + 1, unit[1]) in self.leave

    def before(self, unit: Unit) -> tuple[Key, ...]:
        """In the forward, the step behind which a unit's place is free."""
        turn = self.turn_of[unit] - STREAM_PLACES
        if not self.in_turns or turn < 0:
            return ()
        last = self.turns[turn][-1]
        return ("offload stream" if self.leaves(last) else "send" if self.fates.sends else "head", last),

    def before_gradient(self, unit: Unit) -> tuple[Key, ...]:
        """In the backward, the steps behind which the gradient of a unit's output can come to its place."""
        turn, above = self.turn_of[unit] + STREAM_PLACES, (unit[0] + 1, unit[1])
        left: Key = ("offload gradient", above) if unit[0] < self.top else (
            "send" if self.fates.sends else "offload stream", unit)
        if not self.in_turns or turn >= len(self.turns):
            return left,
        first = self.turns[turn][0]
        return left, ("offload gradient" if self.arrives(first) else
                      "send gradient" if self.fates.receives else "embedding backward", first)


class Sweeps:
    """Which steps make keys and values again, and bring the inputs that these are made from."""

    def __init__(self, fates: Fates, units: list[Unit]) -> None:
        self.made, self.layers = fates.keys == "made", units[-1][0] + 1
        number = {unit: k for k, unit in enumerate(units)}
        swept = [below for unit in reversed(units) for below in self.swept_behind(unit)]
        # the units whose input comes back, in that order
        self.inputs = [] if fates.x_stays else [unit for unit in swept if number[unit] in fates.copied]
        self.come = set(self.inputs)
        self.following = dict(zip(self.inputs, self.inputs[SWEEP_PLACES:], strict=False))

    def swept_behind(self, unit: Unit) -> list[Unit]:
        """The unit whose keys and values a sweep makes behind the backward of another one, of the layer
        above: none where they are still there."""
        below = unit[0] - 1, unit[1]
        return [below] if self.made and below[0] >= 0 and keys_leave(below, self.layers) else []

    def first(self, stream: Stream, head: Key) -> Iterator[Step]:
        """Before a backward, behind the last `head`."""
        for unit in self.inputs[:SWEEP_PLACES]:
            # protects the slab: all copies have left; an input that was there in the forward has
            yield Step("prefetch input", unit, () if stream.arrives(unit) else (head,))

    def behind(self, unit: Unit, states: LayerStates) -> Iterator[Step]:
        """Behind the backward of a unit."""
        for swept in self.swept_behind(unit):
            back: tuple[Key, ...] = (("prefetch input", swept),) if swept in self.come else ()
            yield Step("sweep", swept, back + states.before_recompute(swept))
            if swept in self.following:  # protects the sweep, which reads what the copy is about to fill
                yield Step("prefetch input", self.following[swept], (("sweep", swept),))


def schedule(fates: Fates, layers: int, subsequences: int = 1, order: str = "layer") -> list[Step]:
    """The steps of a forward and a backward, in the order in which the host launches them."""
    units = units_in_order(layers, subsequences, order, fates.guests)
    if subsequences == 1:
        fates = replace(fates, keys="stay")
    stream = Stream(fates, layers, subsequences, order, trains=True)
    others = Home(fates.lent, layers, subsequences), Helper(fates.guests, units, subsequences)
    forward = forward_steps(fates, units, layers, subsequences, stream, *others)
    return with_needed_waits([*forward, *backward_steps(fates, units, subsequences, stream, *others)])


def evaluation(fates: Fates, layers: int, subsequences: int = 1, order: str = "layer") -> list[Step]:
    """The steps of a forward that keeps nothing: no copy leaves but those of the stream."""
    kept_nothing = replace(fates, copied=frozenset(), keys="made" if fates.keys == "copied" else fates.keys)
    units = units_in_order(layers, subsequences, order, fates.guests)
    stream = Stream(fates, layers, subsequences, order, trains=False)
    others = Home(fates.lent, layers, subsequences), Helper(fates.guests, units, subsequences)
    return with_needed_waits(forward_steps(kept_nothing, units, layers, subsequences, stream, *others))


def forward_steps(fates: Fates, units: list[Unit], layers: int, subsequences: int, stream: Stream,
                  home: Home, helper: Helper) -> Iterator[Step]:
    """The steps up to the last head, with all that each depends on."""
    n, number = fates.n_buffers, {unit: k for k, unit in enumerate(units)}
    states = LayerStates(fates.coming(layers), layers, subsequences, stream.trains)
    # of those that keep only their input, which the layer below has sent already, nothing is left to send
    to_host = {k for k in fates.copied if not (k in fates.input_only and stream.arrives(units[k]))}
    inputs = [(0, i) for i in range(subsequences)] if fates.receives else []
    following = dict(zip(inputs, inputs[1:], strict=False))
    yield from states.first()
    for unit in inputs[:1]:
        yield Step("receive", unit, stream.before(unit))
    yield from home.lend((0, 0))
    yield from helper.first(before=True)
    for k, unit in enumerate(units):
        if unit == (0, subsequences - 1):  # while the last subsequence is computed
            yield from helper.first(before=False)
        if unit in following:  # while the layers of this subsequence compute
            yield Step("receive", following[unit], stream.before(following[unit]))
        for layer, i in units[k + 1:k + 2]:
            if stream.arrives((layer, i)):  # while this unit computes
                left = "offload stream", (layer - 1, i)
                yield Step("prefetch stream", (layer, i), (left, *stream.before((layer, i))))
        # protects unit k - n: its copy still reads the buffer, and the input, that unit k is about to write
        waits: tuple[Key, ...] = (("offload", units[k - n]),) if k - n in to_host else ()
        if unit in helper.number:
            yield Step("forward", unit, waits + helper.before_forward(unit))
            yield from helper.after_forward(unit)
            if k in to_host:
                yield Step("offload", unit, (("forward", unit),))
            continue
        waits += home.before_forward(unit) + states.before_forward(("forward", unit))
        below = keys_below(unit)
        if fates.keys == "copied" and below in number:
            waits += ("offload keys", below),  # protects keys and values that still leave this unit's place
        if stream.arrives(unit):
            waits += ("prefetch stream", unit),  # protects this unit, whose input may not be there yet
        if unit in inputs:
            waits += ("receive", unit),
        elif unit[0] == 0:
            # protects what still leaves this unit's place
            yield Step("embedding", unit, stream.before(unit) + states.before_forward(("embedding", unit)))
            yield from states.after_forward(("embedding", unit))
        yield Step("forward", unit, waits)
        yield from home.after_forward(unit)
        yield from states.after_forward(("forward", unit))
        # the copies' waits protect the slab from a unit that is not computed yet
        if fates.keys == "copied" and keys_leave(unit, layers):
            yield Step("offload keys", unit, (("forward", unit),))
        if stream.leaves(unit) and unit[0] < layers - 1:
            yield Step("offload stream", unit, (("forward", unit),))
        if k in to_host:
            yield Step("offload", unit, (("forward", unit),))
        if unit[0] == layers - 1 and fates.sends:
            yield Step("send", unit, (("forward", unit), *home.complete(unit)))
        elif unit[0] == layers - 1:
            yield Step("head", unit, home.complete(unit) + states.before_forward(("head", unit)))
            if stream.leaves(unit):
                yield Step("offload stream", unit, (("head", unit),))


def backward_steps(fates: Fates, units: list[Unit], subsequences: int, stream: Stream, home: Home,
                   helper: Helper) -> Iterator[Step]:
    """The steps behind the last head, with all that each depends on."""
    n, number = fates.n_buffers, {unit: k for k, unit in enumerate(units)}
    layers = units[-1][0] + 1
    states = LayerStates(fates.coming(layers), layers, subsequences)
    sweeps = Sweeps(fates, units)
    yield from sweeps.first(stream, ("head", units[-1]))
    yield from states.first_back(("head", units[-1]))
    outputs = [(stream.top, i) for i in reversed(range(subsequences))] if fates.sends else []
    next_output = dict(zip(outputs, outputs[1:], strict=False))
    for unit in outputs[:1]:
        yield Step("receive gradient", unit, stream.before_gradient(unit))
    yield from home.lend_back(subsequences - 1)
    yield from helper.first_back(before=False)
    for k, unit in reversed(list(enumerate(units))):
        i, guest = unit[1], unit in helper.number
        if unit in next_output:  # while the layers of this subsequence compute
            yield Step("receive gradient", next_output[unit], stream.before_gradient(next_output[unit]))
        for earlier in units[max(0, k - 1):k]:
            if stream.leaves(earlier):  # while this unit computes
                yield Step("prefetch gradient", earlier, stream.before_gradient(earlier))
        # protects the unit's recompute and backward from what is not back yet. A layer's first backward unit
        # reads the keys and values of all subsequences; those of number 1 come last
        waits: tuple[Key, ...] = (("prefetch", unit),) if k in fates.copied else ()
        if fates.keys == "copied" and i == subsequences - 1 and (unit[0] + 1, 1) in number:
            waits += ("prefetch keys", (unit[0], 1)),
        arrived: tuple[Key, ...] = (("prefetch gradient", unit),) if stream.leaves(unit) else ()
        if unit in outputs:
            arrived = ("receive gradient", unit),
        if unit == (stream.top, 0):  # while the last subsequence is computed
            yield from helper.first_back(before=True)
        if unit == (stream.top, i) and not guest:
            yield from home.before_subsequence(i, arrived or (("head", unit),))
            yield from home.lend_back(i - 1)
        if guest:
            waits, arrived = waits + helper.before_recompute(unit), helper.before_backward(unit)
        if k in fates.rebuilt:
            yield Step("recompute", unit, waits + states.before_recompute(unit))
        if not guest:
            yield from home.add(unit)
            arrived += home.before_backward(unit) + states.before_backward(("backward", unit))
        yield Step("backward", unit, waits + arrived)
        done, below = (("backward", unit),), keys_below(unit)
        if guest:
            yield from helper.after_backward(unit)
        yield from states.after_backward(("backward", unit))
        if stream.arrives(unit):
            yield Step("offload gradient", unit, done)
        # the prefetches' waits protect this unit, whose backward reads what the copy is about to fill
        if fates.keys == "copied" and below in number:
            yield Step("prefetch keys", below, done)
        if k - n in fates.copied:
            yield Step("prefetch", units[k - n], done)
        yield from states.sums_behind(("backward", unit))
        yield from sweeps.behind(unit, states)
        if unit[0] == 0 and not guest:
            if fates.receives:
                yield Step("send gradient", unit, done + home.complete(unit, BACK))
            yield from home.add((-1, i))
            if not fates.receives:
                last: Key = "embedding backward", unit
                yield Step(*last, home.complete(unit, BACK) + states.before_backward(last))
                yield from states.after_backward(last)


def with_needed_waits(steps: Iterable[Step]) -> list[Step]:
    """The steps without the waits that say what the order of a stream and other waits say anyway."""
    kept: list[Step] = []
    done: dict[Key, dict[str, int]] = {}  # of each step: the number of each stream's last one done by then
    last: dict[str, dict[str, int]] = {}  # the same of each stream's last step
    for number, step in enumerate(steps):
        stream = step.stream
        clock, waits = dict(last.get(stream, {})), []
        for key in sorted(step.waits, key=lambda key: done[key][stream_of(key)], reverse=True):
            if done[key][stream_of(key)] > clock.get(stream_of(key), -1):
                waits.append(key)
                for other, n in done[key].items():
                    clock[other] = max(clock.get(other, -1), n)
        kept.append(step if len(waits) == len(step.waits) <= 1 else step._replace(waits=tuple(waits)))
        clock[stream] = number
        done[step.key] = last[stream] = clock
    return kept


def compute_only(steps: Iterable[Step]) -> list[Step]:
    """The steps of the compute stream alone, which wait for nobody."""
    return [step._replace(waits=()) for step in steps if step.stream == "compute"]


class Times(NamedTuple):
    """What a simulation gives: {key of a step: (start, end)} in seconds, and the seconds that the compute
    stream waited for copies."""

    spans: dict[Key, tuple[float, float]]
    stall_s: float


def times_of(steps: Iterable[Step], seconds: Callable[[Step], float]) -> Times:
    """The Times of the steps where each stream does one thing after the other, and a step takes
    seconds(step)."""
    now, stall_s = defaultdict[str, float](float), 0.0
    spans: dict[Key, tuple[float, float]] = {}
    for step in steps:
        stream = step.stream
        start = before = now[stream]
        for key in step.waits:
            start = max(start, spans[key][1])
        if stream == "compute":
            stall_s = stall_s + start - before
        now[stream] = end = start + seconds(step)
        spans[step.key] = start, end
    return Times(spans, stall_s)
