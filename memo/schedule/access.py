"""What each step touches: the one statement from which the waits of a program follow. No torch.

A place is a region of memory that streams use one after the other; a step reads some places and writes some.
What is read and then written over, or added to, stands among the writes alone: a write waits for the last
writer and for all readers since. Memory that only the compute stream touches needs no place.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from memo.msp import guest_number
from memo.schedule.help import pieces_of, turns_of
from memo.schedule.program import (
    EMBEDDING,
    LAYER_PLACES,
    STREAM_PLACES,
    SWEEP_PLACES,
    Fates,
    streamed_units,
    swept_inputs,
    units_in_order,
)
from memo.schedule.states import ADDS, States
from memo.schedule.step import Moved, Op, Step, Unit


class Region(Enum):
    """What lies in a place. The value names it for people."""

    KEPT = "kept rows of buffer"
    REST = "rows to recompute of buffer"
    INPUT = "input"  # or its gradient
    SLAB = "slab of unit"
    # with several subsequences
    STREAM = "stream"
    SLAB_STREAM = "slab of the stream below"
    KEYS = "keys and values"
    SLAB_KEYS = "slab of keys and values"
    SWEEP = "input for a sweep"
    # of layers; between passes, and within one where they come
    WEIGHTS = "weights"
    WEIGHT_GRADIENTS = "gradients of weights"
    SUMS_OF_PASSES = "gradients that have left, of layer"
    MASTERS = "master weights of layer"
    SCALE = "scale of gradients"
    # of a home: rows that a helper computes; sums of gradients of keys and values; what is repaid
    STREAM_ROWS = "helper's rows of the stream"
    KEYS_ROWS = "helper's rows of keys and values"
    SUMS = "sums of key gradients"
    SUMS_ROWS = "helper's rows of sums of key gradients"
    REPAID = "place for what is repaid by stage"
    # of a helper
    GUEST_STREAM = "stream of guest"
    LOAN = "loan"
    ROWS = "rows before a guest's"
    ROW_SUMS = "sums before a guest's"
    GUEST_KEYS = "keys and values of a guest"
    GUEST_GRADIENTS = "gradients of a guest"

    __hash__ = object.__hash__


class Place(NamedTuple):
    """`at`: numbers that tell it from others of its region."""

    region: Region
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.region.value} {', '.join(map(str, self.at))}"


Places = list[Place]


class Access(NamedTuple):
    """What a step reads, and what it writes."""

    reads: Places
    writes: Places


class Memory:
    """The places of a stage, and which step touches which. `states`: where parameters and gradients of layers
    that stay are; None leaves them out, since within a pass the compute stream alone touches them."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str, trains: bool,
                 states: States | None = None) -> None:
        # loans would have to wait for layers that come
        assert not (fates.layers_come and (fates.guests or fates.lent))
        self.states = states
        self.fates = f = fates
        self.layers, self.subsequences, self.trains = layers, subsequences, trains
        self.come, self.by_layer = f.coming(layers), order == "layer"
        self.several = subsequences > 1
        self.in_turns = f.stream != "whole" and self.several
        self.units = units_in_order(layers, subsequences, order, f.guests)
        self.number = {unit: k for k, unit in enumerate(self.units)}
        self.streamed = streamed_units(f, layers, subsequences, order)
        # two buffers share the rows that are recomputed
        self.shares = f.n_buffers == 2 and bool(f.rebuilt)
        self.guests = {guest_number(piece, subsequences): piece for piece in f.guests}
        self.turn = turns_of(self.units, self.guests)
        self.lent = {(guest_number(piece, subsequences), piece.helper): piece for piece in f.lent}
        self.helpers = {x: [piece.helper for piece in pieces] for x, pieces in pieces_of(f.lent).items()}
        self.keys_of_layer: dict[int, Places] = {}

    # --- where things lie ---

    def kept(self, unit: Unit) -> Place:
        return Place(Region.KEPT, (self.number[unit] % self.fates.n_buffers,))

    def rest(self, unit: Unit) -> Place:
        return Place(Region.REST, (0 if self.shares else self.number[unit] % self.fates.n_buffers,))

    def input(self, unit: Unit) -> Place:
        """Where a unit keeps its input; with one subsequence that of layer `layers` is the head's."""
        if self.fates.x_stays:
            return Place(Region.INPUT, unit)
        n = self.fates.n_buffers
        return Place(Region.INPUT, (self.number[unit] % n if self.several else unit.layer % (n + 1),))

    def below(self, unit: Unit) -> Place:
        """Where a unit finds its input, and puts the gradient of it."""
        if unit.subsequence in self.guests:
            return Place(Region.GUEST_STREAM, (unit.subsequence,))
        if not self.several:
            return self.input(unit)
        turn = self.number[unit] if self.by_layer else unit.subsequence
        return Place(Region.STREAM, (turn % STREAM_PLACES if self.in_turns else unit.subsequence,))

    def above(self, unit: Unit) -> Place:
        """Where a unit puts its output, and finds the gradient of it: with several subsequences over its
        input."""
        return self.below(unit) if self.several else self.input(Unit(unit.layer + 1, 0))

    def with_rows(self, place: Place, unit: Unit) -> Places:
        """A place of the stream, with the rows there that helpers compute. Subsequences that have the place
        in turns may have other helpers there, under other names: what a helper sends comes before the
        subsequence leaves the place, so before the next one comes."""
        return [place, *(Place(Region.STREAM_ROWS, (*place.at, helper))
                         for helper in self.helpers.get(unit.subsequence, ()))]

    def keys(self, unit: Unit) -> Place:
        """Where a unit's own keys and values lie."""
        if unit.subsequence in self.guests:
            return Place(Region.GUEST_KEYS, (self.turn[unit],))
        if self.fates.keys == "stay":
            return Place(Region.KEYS, unit)
        layer, i = unit
        return Place(Region.KEYS, (i,) if i else (i, layer % 2))

    def all_keys(self, unit: Unit, helpers: int | None = None) -> Places:
        """Keys and values of a unit, with those of so many of its helpers (default: all)."""
        return [self.keys(unit), *(Place(Region.KEYS_ROWS, (*unit, helper))
                                   for helper in self.helpers.get(unit.subsequence, ())[:helpers])]

    def sums(self, unit: Unit, helpers: int | None = None) -> Places:
        """The sums of gradients of keys and values of a unit, of a home."""
        return [Place(Region.SUMS, unit), *(Place(Region.SUMS_ROWS, (*unit, helper))
                                            for helper in self.helpers.get(unit.subsequence, ())[:helpers])]

    def prefix(self, unit: Unit, own: bool) -> Places:
        """Keys and values that a unit's attention reads: of the subsequences before; with `own` its own
        too."""
        layer, i = unit
        if not self.several:
            return []
        if self.fates.keys != "copied" and not (self.fates.lent or self.fates.guests):
            return []  # nobody but the compute stream touches them
        if unit in self.turn:  # in a backward its own come with the loan
            loan = Place(Region.LOAN, (self.turn[unit],))
            return [loan] if own else [loan, Place(Region.ROWS, (self.turn[unit],))]
        if self.fates.lent:
            earlier = [place for x in range(i) for place in self.all_keys(Unit(layer, x))]
            return earlier + [self.keys(unit)] * own
        if layer not in self.keys_of_layer:
            self.keys_of_layer[layer] = [self.keys(Unit(layer, x)) for x in range(self.subsequences)]
        return self.keys_of_layer[layer][:i + own]

    def sweep_place(self, unit: Unit) -> Place:
        return Place(Region.SWEEP, (self.swept[unit] % SWEEP_PLACES,))

    @cached_property
    def swept(self) -> dict[Unit, int]:
        """Numbers the units whose input comes back for a sweep."""
        return {unit: number for number, unit in enumerate(swept_inputs(self.fates, self.units))}

    # --- who touches it ---

    def access(self, step: Step) -> Access:
        """States what a step touches."""
        if step.of_states:
            return self.of_states(step)
        if step.peer is not None:
            touched = (self.of_helper if step.unit in self.turn else self.of_home)(step)
        elif step.computes:
            touched = COMPUTES[step.op](self, step.unit)
        else:
            touched = MOVES[step.op, step.moved](self, step.unit)
        for layer in self.layers_of(step):
            if step.op not in (Op.EMBED_BACKWARD, Op.ADD):
                touched.reads.append(self.weights(layer))
            if step.op in ADDS or (step.op is Op.HEAD and self.trains):
                touched.writes.append(self.gradients(layer))
        return touched

    # --- parameters, gradients and the optimizer's states, layer by layer ---

    def layers_of(self, step: Step) -> Sequence[int]:
        """Lists the layers whose parameters a step reads, or to whose gradients it adds. The head's matrix
        may be the embedding's."""
        if step.unit in self.turn or step.op is Op.ZERO or not (
                step.computes or (step.op, step.moved) == (Op.SEND, Moved.LOAN)):
            return ()
        ends = {Op.EMBED: (EMBEDDING,), Op.EMBED_BACKWARD: (EMBEDDING,), Op.HEAD: (self.layers, EMBEDDING)}
        layers = ends.get(step.op, (step.unit.layer,))
        return layers if self.states else [layer for layer in layers[:1] if layer in self.come]

    def weights(self, layer: int) -> Place:
        return Place(Region.WEIGHTS, (layer % LAYER_PLACES if layer in self.come else layer,))

    def gradients(self, layer: int) -> Place:
        turns = layer in self.come or (self.states is not None and layer in self.states.in_turns)
        return Place(Region.WEIGHT_GRADIENTS, (layer % LAYER_PLACES if turns else layer,))

    def masters(self, layer: int) -> Place:
        """Where new parameters lie before they come to the device: on the host over the gradients."""
        over = self.states is not None and self.states.on_host and not self.states.apart
        return Place(Region.SUMS_OF_PASSES if over else Region.MASTERS, (layer,))

    def of_states(self, step: Step) -> Access:
        layer = step.unit.layer
        weights, gradients, masters = self.weights(layer), self.gradients(layer), self.masters(layer)
        left = Place(Region.SUMS_OF_PASSES, (layer,))
        match step.op, step.moved:
            case Op.PREFETCH, Moved.WEIGHTS:
                return Access([masters], [weights])
            case Op.PREFETCH, _:  # what earlier micro batches have left
                return Access([left], [gradients])
            case Op.OFFLOAD, Moved.WEIGHT_GRADIENTS:
                return Access([gradients], [left])
            case Op.REDUCE, _:
                return Access([], [gradients])
            case Op.GATHER, _:
                return Access([], [weights])
        assert self.states is not None
        scale, stay = Place(Region.SCALE, (0,)), self.states.stay
        every = [Place(Region.SUMS_OF_PASSES, (layer,)) for layer in self.states.every]
        match step.op:
            case Op.CLIP:  # sums what all tp ranks hold, in place
                return Access([], [*every, *map(self.gradients, stay), scale])
            case Op.OFFLOAD:
                return Access([scale], every)
            case Op.HOST_ADAMW:
                return Access([], [left, masters])
            case Op.ADAMW if layer in stay:  # and sets the gradients to zero
                return Access([], [gradients, weights])
            case Op.ADAMW:
                return Access([left], [masters])
        raise ValueError(f"{step}: nothing is known of what it touches")

    # --- steps that compute ---

    def embed(self, unit: Unit) -> Access:
        return Access([], self.with_rows(self.below(unit), unit))

    def forward(self, unit: Unit) -> Access:
        own = [self.input(unit), self.keys(unit)] if self.several else []
        return Access([self.below(unit), *self.prefix(unit, own=False)],
                      [self.kept(unit), self.rest(unit), *own, self.above(unit)])

    def head(self, unit: Unit) -> Access:
        # the gradient takes the place of what it is made of
        return Access([], self.with_rows(self.above(unit), unit))

    def recompute(self, unit: Unit) -> Access:
        reads, writes = self.survives(unit) + [self.input(unit)], [self.rest(unit)]
        if self.number[unit] in self.fates.input_only:
            reads += self.prefix(unit, own=True)
            writes.append(self.kept(unit))
        if unit in self.turn:
            reads.append(Place(Region.LOAN, (self.turn[unit],)))
        return Access(reads, writes)

    def sweep(self, unit: Unit) -> Access:
        return Access([self.sweep_place(unit) if unit in self.swept else self.input(unit)], [self.keys(unit)])

    def backward(self, unit: Unit) -> Access:
        k, fates, (layer, i) = self.number[unit], self.fates, unit
        reads = self.prefix(unit, own=True)
        # the gradients of input and output take the places of these
        writes = [self.kept(unit), self.input(unit), self.below(unit), self.above(unit)]
        # A unit that is not rebuilt has no rest rows if it is copied. With two buffers the same holds for all
        # but the last one.
        if k in fates.rebuilt or not (k in fates.copied or (self.shares and k < len(self.units) - 1)):
            reads = [self.rest(unit), *reads]
        if unit in self.turn:
            at = (self.turn[unit],)
            writes += [Place(region, at) for region in (Region.LOAN, Region.ROW_SUMS, Region.GUEST_GRADIENTS)]
        elif fates.lent:  # it adds to the sums of all before it and of its own, and uses its keys up
            earlier = [place for x in range(i) for place in self.sums(Unit(layer, x))]
            writes += [self.keys(unit), Place(Region.SUMS, unit), *earlier]
        return Access(reads, writes)

    def embed_backward(self, unit: Unit) -> Access:
        return Access(self.with_rows(self.below(unit), unit), [])

    def zero(self, unit: Unit) -> Access:
        """The sums of all units of a home, which helpers add to before its own backwards do."""
        return Access([], [place for layer in range(self.layers) for x in range(self.subsequences)
                           for place in self.sums(Unit(layer, x))])

    # --- copies, and messages with the neighbours ---

    def offload(self, unit: Unit) -> Access:
        kept, sent = self.survives(unit), [] if unit in self.streamed else self.own_input(unit)
        return Access(kept + sent, [Place(Region.SLAB, unit)])

    def prefetch(self, unit: Unit) -> Access:
        kept, inputs = self.survives(unit), self.own_input(unit)
        reads = [Place(Region.SLAB, unit)]
        if inputs and unit in self.streamed:
            reads.append(Place(Region.SLAB_STREAM, unit))
        return Access(reads, kept + inputs)

    def survives(self, unit: Unit) -> Places:
        return [] if self.number[unit] in self.fates.input_only else [self.kept(unit)]

    def own_input(self, unit: Unit) -> Places:
        return [] if self.fates.x_stays else [self.input(unit)]

    def prefetch_input(self, unit: Unit) -> Access:
        region = Region.SLAB_STREAM if unit in self.streamed else Region.SLAB
        return Access([Place(region, unit)], [self.sweep_place(unit)])

    def offload_stream(self, unit: Unit) -> Access:
        """An output that leaves, or the gradient of the last one."""
        return Access(self.with_rows(self.above(unit), unit), [slab_above(unit)])

    def prefetch_gradient(self, unit: Unit) -> Access:
        return Access([slab_above(unit)], self.with_rows(self.above(unit), unit))

    # --- a helper's messages with a home ---

    def of_helper(self, step: Step) -> Access:
        unit, at = step.unit, (self.turn[step.unit],)
        loan, rows, sums, keys, gradients = (Place(region, at) for region in (
            Region.LOAN, Region.ROWS, Region.ROW_SUMS, Region.GUEST_KEYS, Region.GUEST_GRADIENTS))
        first, last = unit.layer == 0, unit.layer == self.guests[unit.subsequence].layers - 1
        stream = [self.below(unit)]
        match step.op, step.moved, step.back:
            case Op.RECEIVE, Moved.LOAN, _:
                return Access([], [loan, keys] if step.back else [loan])
            case Op.RECEIVE, Moved.ROWS, back:
                return Access([], [sums if back else rows, *stream * (last if back else first)])
            case Op.SEND, Moved.RESULTS, True:
                return Access([sums, gradients, *stream * first], [])
            # guests cut these places differently: the next one's loan may lie over this one's keys
            case Op.SEND, Moved.RESULTS, False:
                return Access([loan, rows, keys, *stream * last], [])
            case Op.SEND, Moved.REPAYMENT, _:
                return Access([sums, gradients], [])
        raise ValueError(f"{step}: a helper has no such message")

    # --- a home's messages with a helper ---

    def of_home(self, step: Step) -> Access:
        helper, (layer, number) = step.peer, step.unit
        assert helper is not None
        x = self.lent[number, helper].subsequence
        unit, j = Unit(layer, x), self.helpers[x].index(helper)
        first, last = layer == 0, layer == self.layers - 1
        before, repaid = [Unit(layer, i) for i in range(x)], Place(Region.REPAID, (helper,))
        rows = [Place(Region.STREAM_ROWS, (*self.below(unit).at, helper))]
        match step.op, step.moved, step.back:
            case Op.SEND, Moved.LOAN, back:
                own = self.all_keys(unit, j + 1) if back else []
                return Access([*(place for other in before for place in self.all_keys(other)), *own], [])
            case Op.SEND, Moved.ROWS, True:
                return Access([*self.sums(unit, j + 1), *rows * last], [])
            case Op.SEND, Moved.ROWS, False:
                return Access([*self.all_keys(unit, j), *rows * first], [])
            case Op.RECEIVE, Moved.RESULTS, True:
                return Access([], [*self.sums(unit, j), *rows * first])
            case Op.RECEIVE, Moved.RESULTS, False:
                return Access([], [Place(Region.KEYS_ROWS, (*unit, helper)), *rows * last])
            case Op.RECEIVE, Moved.REPAYMENT, _:
                return Access([], [repaid])
            case Op.ADD, _, _:
                return Access([repaid], [place for other in before for place in self.sums(other)])
        raise ValueError(f"{step}: a home has no such message")


def slab_above(unit: Unit) -> Place:
    """The host's copy of what lies above a unit."""
    return Place(Region.SLAB_STREAM, (unit.layer + 1, unit.subsequence))


Touch = Callable[[Memory, Unit], Access]
COMPUTES: dict[Op, Touch] = {
    Op.EMBED: Memory.embed, Op.FORWARD: Memory.forward, Op.HEAD: Memory.head, Op.RECOMPUTE: Memory.recompute,
    Op.SWEEP: Memory.sweep, Op.BACKWARD: Memory.backward, Op.EMBED_BACKWARD: Memory.embed_backward,
    Op.ZERO: Memory.zero}
MOVES: dict[tuple[Op, Moved | None], Touch] = {
    (Op.OFFLOAD, Moved.ACTIVATIONS): Memory.offload,
    (Op.PREFETCH, Moved.ACTIVATIONS): Memory.prefetch,
    (Op.OFFLOAD, Moved.KEYS): lambda m, unit: Access([m.keys(unit)], [Place(Region.SLAB_KEYS, unit)]),
    (Op.PREFETCH, Moved.KEYS): lambda m, unit: Access([Place(Region.SLAB_KEYS, unit)], [m.keys(unit)]),
    (Op.PREFETCH, Moved.INPUT): Memory.prefetch_input,
    (Op.OFFLOAD, Moved.STREAM): Memory.offload_stream,
    (Op.PREFETCH, Moved.STREAM): lambda m, unit: Access([Place(Region.SLAB_STREAM, unit)], [m.below(unit)]),
    (Op.OFFLOAD, Moved.GRADIENT): lambda m, unit: Access([m.below(unit)], [Place(Region.SLAB_STREAM, unit)]),
    (Op.PREFETCH, Moved.GRADIENT): Memory.prefetch_gradient,
    (Op.RECEIVE, Moved.STREAM): Memory.embed,  # in the place of the embedding
    (Op.SEND, Moved.STREAM): lambda m, unit: Access(m.with_rows(m.above(unit), unit), []),
    (Op.RECEIVE, Moved.GRADIENT): Memory.head,
    (Op.SEND, Moved.GRADIENT): Memory.embed_backward}
