"""The program of a training step: what is launched, in which order. No step says what it waits for: that
follows from what steps touch (memo/schedule/access.py, waits.py). No torch.

A unit is one layer at one subsequence. Units are computed in order, one buffer each, in turns:

    forward    unit k computes in buffer k % n; then the offload stream copies what survives of it to the host
               slab, while the next units compute
    backward   the last n units are still in their buffers, but for rows that two buffers share
               (memo/memory/placement.py); when unit k is done, the prefetch stream refills its buffer with
               unit k - n, while the units between compute; missing rows are recomputed before a backward

`memo` has n = 2 or more, `swap` 2. `keep` has a buffer for each unit, `recompute` one; these copy nothing.
That is MEMO. The rest is of subsequences, of stages, of layers that come: skip it at first.

With several subsequences a unit reads the keys and values of its layer's earlier ones. Layer by layer only
one layer's lie on the device. The next layer writes over them, a subsequence (a piece) at a time: so each
piece is copied to the slab first. It comes back when the backward of the unit that took its place is done; or
a sweep makes it again from the layer's input, right behind that backward (memo/schedule/keys.py).

What lies between two layers, the residual stream (STREAM in names; no CUDA stream), is whole on the device or
has a few places there, which units take in turns: one arrives, one is computed on, one leaves. A unit's
output takes the place of its input, leaves for the slab and comes back as the input of the layer above; so
does the gradient in the backward, over that input. Subsequence by subsequence only the head's gradients
leave: all layers of a subsequence have one place.

A stage of a pipeline that is not the first receives its first layer's input instead of embedding, and sends
the gradient of it; one that is not the last sends its last layer's output instead of having a head, and
receives the gradient of that. Each message is posted while the subsequence before is computed.

Where layers take turns in two places for their parameters (memo/memory/flat.py), those of layer j come when
the forward of layer j - 2 is done, and again in the backward when that of layer j + 2 is done, whose
gradients leave then. The embedding is layer -1, the head the one above all; where both have one matrix, they
stay. Source: MEMO 4.1 and 4.3.4; SPPO 3.3 for stages, 4 for subsequences; ZeRO (arXiv 1910.02054), stages 2
and 3, ZeRO-Infinity (arXiv 2104.07857) for layers that come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memo.config.msp import Shares
from memo.schedule.help import Helper, Home
from memo.schedule.keys import KeyPlaces, key_places
from memo.schedule.order import ForwardOrder, InOrder, forward_order
from memo.schedule.step import Moved, Op, Step, Unit

SWEEP_PLACES = 2  # for the inputs that sweeps read: one is read while the next one arrives
LAYER_PLACES = 2  # for parameters, and for gradients: one is computed with while the other comes or goes
EMBEDDING = -1  # its number among the layers that come; the head's is that of layers


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Says what becomes of a stage's other tensors, whatever its units keep.

    With several subsequences, `keys` "stay" (those of all layers have places), are "copied" or "made"; of
    each layer a unit reads at most `near` pieces of keys, its own the last; (): all up to its own. The
    `stream` between layers is "whole", "copied" or, with a few places that are sent, "passed". `receives`:
    another stage sends the input of the first layer; `sends`: one takes the output of the last. `guests`:
    what the stage computes for others (MSP); `lent`: what others compute for it (memo/schedule/help.py).
    `layers_come`: the layers' parameters are on the device only while needed; `edges_come`: the edges' too.

    Where a pipeline's sequences follow each other, the stage computes `lead` subsequences of the next one
    before a sequence's backward, and receives `early` more during it.
    """

    keys: str = "stay"
    near: tuple[int, ...] = ()
    stream: str = "whole"
    receives: bool = False
    sends: bool = False
    guests: Shares = ()
    lent: Shares = ()
    layers_come: bool = False
    edges_come: bool = False
    lead: int = 0
    early: int = 0


@dataclass(frozen=True)
class Fates(Surroundings):
    """Says what becomes of the units' activations. A unit is its number in the order of the forward.

    `copied`: their activations go to the host and come back. `rebuilt`: some of their rows are recomputed.
    `input_only`: of these nothing but the input survives. `x_stays`: all units' inputs stay on the device.
    """

    n_buffers: int
    copied: frozenset[int]
    rebuilt: frozenset[int]
    input_only: frozenset[int] = frozenset()
    x_stays: bool = False


def coming(layers: int, layers_come: bool, edges_come: bool) -> range:
    """Numbers the layers that take turns in two places; with `edges_come` embedding and head too. Beside a
    single layer these two would need the same place in turns, subsequence by subsequence: there they stay."""
    edges = edges_come and layers > 1
    return range(-edges, layers + edges) if layers_come else range(0)


def layer_of(step: Step, layers: int) -> int:
    """Finds the layer whose parameters a step uses, of `layers`."""
    ends = {Op.EMBED: EMBEDDING, Op.EMBED_BACKWARD: EMBEDDING, Op.HEAD: layers}
    return ends.get(step.op, step.unit.layer)


@dataclass(frozen=True)
class Program(InOrder):
    """Lists the steps of a forward, with `trains` also of the backward, in the order in which the host
    launches them. `order`: of the units, by "layer" or by "subsequence"."""

    fates: Fates
    layers: int
    subsequences: int = 1
    order: str = "layer"
    trains: bool = True

    def steps(self) -> Iterator[Step]:
        """Yields the steps."""
        yield from self.forward()
        if self.trains:
            yield from self.backward()

    # --- what it is about ---

    @cached_property
    def keys(self) -> str:
        """Says what becomes of keys and values, see Surroundings. A forward alone copies none."""
        if not self.several:
            return "stay"
        return "made" if self.fates.keys == "copied" and not self.trains else self.fates.keys

    @cached_property
    def key_places(self) -> KeyPlaces:
        return key_places(self.forward_order, self.fates.keys, self.fates.near)

    @cached_property
    def copied(self) -> frozenset[int]:
        """Numbers the units whose activations are copied: none in a forward alone, which keeps nothing."""
        return self.fates.copied if self.trains else frozenset()

    @cached_property
    def forward_order(self) -> ForwardOrder:
        f = self.fates
        return forward_order(self.layers, self.subsequences, self.order, f.guests, f.lead, f.early)

    @cached_property
    def streamed(self) -> set[Unit]:
        """Collects the units whose input comes from the host, and whose dx goes there."""
        copied = self.fates.stream == "copied" and self.several
        return {*self.forward_order.stream_leaves} if copied else set()

    @cached_property
    def come(self) -> range:
        """Numbers the layers whose parameters come, embedding and head among them."""
        return coming(self.layers, self.fates.layers_come, self.fates.edges_come)

    @cached_property
    def swept(self) -> list[Unit]:
        """Lists the units whose input comes back for a sweep, in the order of the sweeps."""
        swept = [below for unit in reversed(self.units) for below in self.swept_behind(unit)]
        return [] if self.fates.x_stays else [unit for unit in swept if self.number[unit] in self.copied]

    def swept_behind(self, unit: Unit) -> list[Unit]:
        """Lists the unit whose keys a sweep makes behind the backward of this one; none: they are there."""
        made = self.key_places.made_behind(unit) if self.keys == "made" else None
        return [made] if made else []

    @cached_property
    def input_after(self) -> dict[Unit, Unit]:
        """Finds the unit whose input a sweep makes room for."""
        return dict(zip(self.swept, self.swept[SWEEP_PLACES:], strict=False))

    @cached_property
    def home(self) -> Home:
        return Home(self.fates.lent, self.layers, self.subsequences)

    @cached_property
    def helper(self) -> Helper:
        return Helper(self.fates.guests, self.units, self.subsequences)

    def streams_output(self, unit: Unit) -> bool:
        """Says whether a unit's output goes to the host, or the head's gradient, and gradients come back."""
        return (unit.layer + 1, unit.subsequence) in self.streamed and (
            self.trains or unit.layer < self.layers - 1)

    # --- forward ---

    def forward(self, turn: int = 0, some: range | None = None, here: int = 0) -> Iterator[Step]:
        """Yields the steps up to the last head of the sequence whose `turn` it is; or those of `some`
        subsequences, of which so many have come."""
        N, L, fates, units = self.subsequences, self.layers, self.fates, self.forward_order.sequences[turn]
        if some is not None:
            units = units[some.start * L:some.stop * L]
        if not units:
            return
        first, *later = (turn * N + i for i in (some or range(N)))
        for layer in self.come[:LAYER_PLACES]:
            yield from self.bring(layer)
        if fates.receives and not here:
            yield Step(Op.RECEIVE, Unit(0, first), Moved.STREAM)
        yield from self.home.lend(0, 0)
        yield from self.helper.arrive(before=True)
        for k, unit in enumerate(units):
            layer, i = unit
            if unit == (0, N - 1):  # while the last subsequence is computed
                yield from self.helper.arrive(before=False)
            if fates.receives and layer == 0 and i + 1 in later[max(0, here - 1):]:
                yield Step(Op.RECEIVE, Unit(0, i + 1), Moved.STREAM)  # while this subsequence is computed
            for following in units[k + 1:k + 2]:
                if following in self.streamed:  # while this unit is computed
                    yield Step(Op.PREFETCH, following, Moved.STREAM)
            if unit in self.helper.number:
                yield Step(Op.FORWARD, unit)
                yield from self.helper.after(unit)
                yield from self.offload(unit)
            else:
                yield from self.forward_of(unit)

    def forward_of(self, unit: Unit) -> Iterator[Step]:
        """Yields the forward of a unit of the stage's own, and what comes behind it."""
        fates = self.fates
        layer, i = unit
        if layer == 0 and not fates.receives:
            yield Step(Op.EMBED, unit)
            yield from self.next_layer(EMBEDDING, i)
        yield Step(Op.FORWARD, unit)
        yield from self.home.after_forward(unit)
        yield from self.next_layer(layer, i)
        if self.keys == "copied" and unit in self.key_places.leaving:
            yield Step(Op.OFFLOAD, unit, Moved.KEYS)
        if self.streams_output(unit) and layer < self.layers - 1:
            yield Step(Op.OFFLOAD, unit, Moved.STREAM)
        yield from self.offload(unit)
        if layer == self.layers - 1 and fates.sends:
            yield Step(Op.SEND, unit, Moved.STREAM)
        elif layer == self.layers - 1:
            yield Step(Op.HEAD, unit)
            if self.streams_output(unit):
                yield Step(Op.OFFLOAD, unit, Moved.STREAM)

    def offload(self, unit: Unit) -> Iterator[Step]:
        """Yields the copy of what survives of a unit; none of an input that the layer below has sent."""
        k = self.number[unit]
        if k in self.copied and not (k in self.fates.input_only and unit in self.streamed):
            yield Step(Op.OFFLOAD, unit, Moved.ACTIVATIONS)

    # --- backward ---

    def backward(self, turn: int = 0, early: int = 0) -> Iterator[Step]:
        """Yields the steps behind the last head of the sequence whose `turn` it is. So many subsequences of
        the next one come meanwhile."""
        fates, top, units = self.fates, self.layers - 1, self.forward_order.sequences[turn]
        first = turn * self.subsequences
        last = first + self.subsequences - 1
        for unit in reversed(units[-fates.n_buffers:]):
            if self.number[unit] in self.copied:  # others have had its buffer since
                yield Step(Op.PREFETCH, unit, Moved.ACTIVATIONS, back=True)
        if fates.lent:
            yield Step(Op.ZERO, Unit(0, 0), back=True)
        for unit in self.swept[:SWEEP_PLACES]:
            yield Step(Op.PREFETCH, unit, Moved.INPUT, back=True)
        for layer in reversed(self.come[-LAYER_PLACES:]):
            if layer != self.layers:  # the head's came in the forward
                yield from self.next_gradients(layer + LAYER_PLACES)
        if self.layers in self.come:
            yield from self.send_gradients(self.layers)
            yield from self.next_gradients(self.layers)
        if fates.sends:
            yield Step(Op.RECEIVE, Unit(top, last), Moved.GRADIENT, back=True)
        for i in range(early):  # as the stage before leads them; behind those that this one leads
            yield Step(Op.RECEIVE, Unit(0, (1 - turn) * self.subsequences + fates.lead + i), Moved.STREAM)
        yield from self.home.lend_back(last)
        yield from self.helper.arrive(before=False, back=True)
        for k, unit in reversed([*enumerate(units)]):
            layer, i = unit
            if fates.sends and layer == top and first < i <= last:  # while the layers of this one compute
                yield Step(Op.RECEIVE, Unit(top, i - 1), Moved.GRADIENT, back=True)
            for earlier in units[max(0, k - 1):k]:
                if self.streams_output(earlier):  # while this unit is computed
                    yield Step(Op.PREFETCH, earlier, Moved.GRADIENT, back=True)
            if unit == (top, 0):
                yield from self.helper.arrive(before=True, back=True)
            if layer == top and unit not in self.helper.number:
                yield from self.home.begin_back(i)
                yield from self.home.lend_back(i - 1)
            yield from self.backward_of(unit, units[k - fates.n_buffers] if k >= fates.n_buffers else None)

    def backward_of(self, unit: Unit, following: Unit | None) -> Iterator[Step]:
        """Yields the backward of a unit, and what comes behind it; `following`: who takes over its buffer."""
        fates = self.fates
        (layer, i), guest = unit, unit in self.helper.number
        if self.number[unit] in fates.rebuilt:
            yield Step(Op.RECOMPUTE, unit, back=True)
        if not guest:
            yield from self.home.add(layer, i)
        yield Step(Op.BACKWARD, unit, back=True)
        if guest:
            yield from self.helper.after(unit, back=True)
        complete = layer in self.come and i == 0  # a layer's gradients
        if complete:
            yield from self.send_gradients(layer)
        if unit in self.streamed:
            yield Step(Op.OFFLOAD, unit, Moved.GRADIENT, back=True)
        if self.keys == "copied" and (before := self.key_places.before.get(unit)):
            yield Step(Op.PREFETCH, before, Moved.KEYS, back=True)
        if following and self.number[following] in self.copied:
            yield Step(Op.PREFETCH, following, Moved.ACTIVATIONS, back=True)
        if complete:  # behind the prefetches of activations, which need not wait for gradients to leave
            yield from self.next_gradients(layer)
        for swept in self.swept_behind(unit):
            yield Step(Op.SWEEP, swept, back=True)
            if swept in self.input_after:
                yield Step(Op.PREFETCH, self.input_after[swept], Moved.INPUT, back=True)
        if layer > 0 or guest:
            return
        if fates.receives:
            yield Step(Op.SEND, unit, Moved.GRADIENT, back=True)
        yield from self.home.add(-1, i)
        if not fates.receives:
            yield Step(Op.EMBED_BACKWARD, unit, back=True)
            if EMBEDDING in self.come and i == 0:
                yield from self.send_gradients(EMBEDDING)

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

    def send_gradients(self, layer: int) -> Iterator[Step]:
        """Yields the offload of a layer's gradients, and the prefetch of the parameters that follow."""
        yield Step(Op.OFFLOAD, Unit(layer, 0), Moved.WEIGHT_GRADIENTS, back=True)
        below = layer - LAYER_PLACES
        # these come twice: the last two are still in their places, and the embedding's backward needs none
        if below in range(max(0, self.come.start), self.come.stop - LAYER_PLACES):
            yield Step(Op.PREFETCH, Unit(below, 0), Moved.WEIGHTS, back=True)

    def next_gradients(self, layer: int) -> Iterator[Step]:
        """Yields the prefetch of the gradients that earlier micro batches have summed, of the layer whose
        turn it is in the place of `layer`."""
        if layer - LAYER_PLACES in self.come:
            yield Step(Op.PREFETCH, Unit(layer - LAYER_PLACES, 0), Moved.WEIGHT_GRADIENTS, back=True)
