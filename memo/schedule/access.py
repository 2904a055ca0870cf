"""The places that each step touches: the one statement from which the waits of a program follow. No torch.

A place is a region of memory that streams use one after the other; a step reads some places and writes some.
What is read and then written over, or added to, stands among the writes alone: a write waits for the last
writer and for all readers since. Memory that only the compute stream touches needs no place. Rows to
recompute have one all the same: it adds no wait, but lets the replay check them (tests/replay.py).

A copy or a message moves parts of what units have, the same at both ends. It touches the places where these
lie. Bytes of parts: memo/memory/sizes.py; their tensors: memo/memory/buffers.py.
"""

from collections.abc import Sequence
from math import inf

from memo.config.msp import Help, guest_number
from memo.schedule.order import STREAM_PLACES
from memo.schedule.program import EMBEDDING, LAYER_PLACES, SWEEP_PLACES, Program, layer_of
from memo.schedule.states import ADDS, States
from memo.schedule.step import Access, Content, Moved, Op, Part, Place, Places, Region, Step, Unit, place_at


class AccessTable:
    """States the places of a stage, and which step touches which. `states`: where parameters and gradients of
    layers that stay are; None leaves these out: within a pass the compute stream alone touches them."""

    def __init__(self, program: Program, states: States | None = None) -> None:
        self.program, self.fates = program, program.fates
        f = program.fates
        # loans would have to wait for layers that come
        assert not (f.layers_come and (f.guests or f.lent))
        self.states, self.all_count = states or States(program.layers, program.come), states is not None
        self.several, self.by_layer = program.several, program.order == "layer"
        self.units, self.number, self.streamed = program.units, program.number, program.streamed
        self.home, self.buffer = program.forward_order.home, program.forward_order.buffer
        self.in_turns = f.stream != "whole" and self.several
        # two buffers share the rows that are recomputed
        self.shares = f.n_buffers == 2 and bool(f.rebuilt)
        self.guests, self.turn = program.helper.pieces, program.helper.turn
        self.lent = {(guest_number(piece, program.subsequences), piece.helper): piece for piece in f.lent}
        self.pieces = program.home.pieces
        self.swept = {unit: number for number, unit in enumerate(program.swept)}
        self.keys_of_layer: dict[int, Places] = {}

    # --- where things lie ---

    def kept(self, unit: Unit) -> Place:
        return place_at(Region.KEPT, self.buffer(self.number[unit], self.fates.n_buffers))

    def dropped(self, unit: Unit) -> Place:
        return place_at(Region.DROPPED, 0 if self.shares else self.kept(unit).at[0])

    def input(self, unit: Unit) -> Place:
        """Finds where a unit keeps its input; with one subsequence that of layer `layers` is the head's."""
        if self.fates.x_stays:
            return place_at(Region.INPUT, *self.home(unit))
        n = self.fates.n_buffers
        return place_at(Region.INPUT, self.kept(unit).at[0] if self.several else unit.layer % (n + 1))

    def below(self, unit: Unit) -> Place:
        """Finds where a unit's input comes from, and where the gradient of it goes."""
        if unit.subsequence in self.guests:
            return place_at(Region.GUEST_STREAM, unit.subsequence)
        if not self.several:
            return self.input(unit)
        number, N = unit.subsequence, self.program.subsequences
        begin, early = self.fates.lead, self.fates.early
        if begin <= number % N < begin + early:  # it may come during the backward of the sequence before
            places = STREAM_PLACES if self.in_turns else N
            return place_at(Region.STREAM, places + number % N - begin + early * (number >= N))
        turn = self.number[unit] if self.by_layer else number
        return place_at(Region.STREAM, turn % STREAM_PLACES if self.in_turns else number % N)

    def above(self, unit: Unit) -> Place:
        """Finds where a unit's output goes, and its gradient comes from: of several subsequences below()."""
        return self.below(unit) if self.several else self.input(Unit(unit.layer + 1, 0))

    def keys(self, unit: Unit) -> Place:
        """Finds where a unit's own keys and values lie."""
        if unit.subsequence in self.guests:
            return place_at(Region.GUEST_KEYS, self.turn[unit])
        return place_at(Region.KEYS, *self.program.key_places.at(unit))

    def places(self, part: Part) -> Places:
        """Lists where a part lies on the device; of what is repaid: what a home adds it to."""
        content, unit, rows = part
        match content:
            case Content.KEPT:
                return [self.kept(unit)]
            case Content.INPUT:
                return [self.input(unit)]
            case Content.SWEPT:
                return [place_at(Region.SWEEP, self.swept[unit] % SWEEP_PLACES)]
            case Content.BELOW | Content.ABOVE:
                own = (self.below if content is Content.BELOW else self.above)(unit)
                return self.with_helped(own, Region.STREAM_ROWS, unit, rows)
            case Content.SUMS | Content.REPAID if unit in self.turn:
                return [place_at(Region.GUEST_GRADIENTS, self.turn[unit])]
            case Content.KEYS:
                return self.with_helped(self.keys(unit), Region.KEYS_ROWS, unit, rows)
            case Content.SUMS:
                return self.with_helped(place_at(Region.SUMS, *unit), Region.SUMS_ROWS, unit, rows)
            case Content.LOAN if unit in self.turn:
                return [self.keys(unit)]
        # the layer's parameters: layers_of() has them
        one = Content.KEYS if content is Content.LOAN else Content.SUMS
        return [place for x in range(unit.subsequence)
                for place in self.places(Part(one, Unit(unit.layer, x)))]

    def with_helped(self, own: Place, helped: Region, unit: Unit, rows: tuple[int, int] | None) -> Places:
        """Cuts the place of a unit's rows, or of some: the stage's own come first, then those of helpers.

        Subsequences that have a place in turns may have other helpers there, under other names: what a helper
        sends comes before the subsequence leaves the place, so before the next one comes."""
        if unit in self.turn:
            return [own]
        first, end = rows or (0, inf)
        return [own] * (first == 0) + [place_at(helped, *own.at, piece.helper)
                                       for piece in self.pieces.get(unit.subsequence, ())
                                       if first <= piece.first and piece.end <= end]

    def slab(self, part: Part) -> Place:
        """Finds the host's copy of a part."""
        content, unit, _ = part
        if content in (Content.BELOW, Content.ABOVE):
            return place_at(Region.SLAB_STREAM, unit.layer + (content is Content.ABOVE), unit.subsequence)
        if unit in self.streamed and content in (Content.INPUT, Content.SWEPT):
            return place_at(Region.SLAB_STREAM, *unit)
        return place_at(Region.SLAB_KEYS if content is Content.KEYS else Region.SLAB, *self.home(unit))

    def prefix(self, unit: Unit, own: bool) -> Places:
        """Lists keys and values that a unit's attention reads: of those before, with `own` its own too."""
        layer, i = unit
        if not self.several:
            return []
        if self.program.keys != "copied" and not (self.fates.lent or self.fates.guests):
            return []  # nobody but the compute stream touches them
        if unit in self.turn:
            return [self.keys(unit)]
        if self.fates.lent:
            return self.places(Part(Content.LOAN, unit)) + [self.keys(unit)] * own
        if layer not in self.keys_of_layer:
            self.keys_of_layer[layer] = [self.keys(Unit(layer, x)) for x in range(self.program.subsequences)]
        return self.keys_of_layer[layer][self.program.key_places.oldest(unit):i + own]

    # --- what moves ---

    def moves(self, step: Step) -> list[Part]:
        """States what a copy moves, or a message, whose ends have the same parts in the same order; of an
        addition what it adds. Nothing of other steps, nor of states."""
        unit = step.unit
        match step.moved:
            case Moved.ACTIVATIONS:
                kept = [Part(Content.KEPT, unit)] * (self.number[unit] not in self.fates.input_only)
                # the layer below has sent an input that is in the stream
                inside = not self.fates.x_stays and (step.op is Op.PREFETCH or unit not in self.streamed)
                return kept + [Part(Content.INPUT, unit)] * inside
            case Moved.KEYS:
                return [Part(Content.KEYS, unit)]
            case Moved.INPUT:
                return [Part(Content.SWEPT, unit)]
            case Moved.STREAM | Moved.GRADIENT:  # activations go up, gradients down
                up = (step.moved is Moved.STREAM) == step.leaves
                return [Part(Content.ABOVE if up else Content.BELOW, unit)]
        return self.helps(step) if step.peer is not None else []

    def helps(self, step: Step) -> list[Part]:
        """States the same of what goes between a home and a helper."""
        piece, unit = self.help_of(step)
        own, before, up_to = (piece.first, piece.end), (0, piece.first), (0, piece.end)
        below = [Part(Content.BELOW, unit, own)] * (unit.layer == 0)
        above = [Part(Content.ABOVE, unit, own)] * (unit.layer == piece.layers - 1)
        match step.moved, step.back:
            case Moved.LOAN, back:
                return [Part(Content.LOAN, unit)] + [Part(Content.KEYS, unit, up_to)] * back
            case Moved.ROWS, False:
                return [Part(Content.KEYS, unit, before), *below]
            case Moved.ROWS, True:
                return [Part(Content.SUMS, unit, up_to), *above]
            case Moved.RESULTS, False:
                return [Part(Content.KEYS, unit, own), *above]
            case Moved.RESULTS, True:
                return [Part(Content.SUMS, unit, before), *below]
        return [Part(Content.REPAID, unit)]

    def help_of(self, step: Step) -> tuple[Help, Unit]:
        """Finds what a step between a home and a helper is about, and this stage's unit."""
        layer, number = step.unit
        if number in self.guests:
            return self.guests[number], step.unit
        assert step.peer is not None
        piece = self.lent[number, step.peer]
        return piece, Unit(layer, piece.subsequence)

    # --- who touches it ---

    def access(self, step: Step) -> Access:
        """States what a step touches."""
        if step.of_states:
            return self.of_states(step)
        if step.op is Op.ADD or (step.op is Op.RECEIVE and step.moved is Moved.REPAYMENT):
            assert step.peer is not None  # the helper
            repaid = [place_at(Region.REPAID, step.peer)]
            touched = Access(repaid, self.places(*self.moves(step))) if step.computes else Access([], repaid)
        elif step.computes:
            touched = self.of_unit(step)
        else:  # a copy or a message touches where its parts lie
            parts = self.moves(step)
            here = [place for part in parts for place in self.places(part)]
            there = [self.slab(part) for part in parts] if not step.is_message else []
            touched = Access(here, there) if step.leaves else Access(there, here)
        for layer in self.layers_of(step) if self.all_count or self.program.come else ():
            if step.op not in (Op.EMBED_BACKWARD, Op.ADD):
                touched.reads.append(self.weights(layer))
            if step.op in ADDS or (step.op is Op.HEAD and self.program.trains):
                touched.writes.append(self.gradients(layer))
        return touched

    # --- parameters, gradients and the optimizer's states, layer by layer ---

    def layers_of(self, step: Step) -> Sequence[int]:
        """Lists the layers whose parameters a step reads, or to whose gradients it adds, if these count."""
        if step.unit in self.turn or step.op is Op.ZERO or not (
                step.computes or (step.op, step.moved) == (Op.SEND, Moved.LOAN)):
            return ()
        layer = layer_of(step, self.program.layers)
        if not self.all_count:
            return (layer,) * (layer in self.program.come)
        return (layer, EMBEDDING) if step.op is Op.HEAD and EMBEDDING not in self.program.come else (layer,)

    def weights(self, layer: int) -> Place:
        return place_at(Region.WEIGHTS, layer % LAYER_PLACES if layer in self.program.come else layer)

    def gradients(self, layer: int) -> Place:
        turns = layer in self.program.come or layer in self.states.in_turns
        return place_at(Region.WEIGHT_GRADIENTS, layer % LAYER_PLACES if turns else layer)

    def of_states(self, step: Step) -> Access:
        layer = step.unit.layer
        weights, gradients = self.weights(layer), self.gradients(layer)
        left, scale = place_at(Region.SUMS_OF_PASSES, layer), place_at(Region.SCALE, 0)
        # where new parameters lie before they come to the device: on the host over the gradients
        over = self.states.on_host and not self.states.apart
        masters = left if over else place_at(Region.MASTERS, layer)
        every, stay = [place_at(Region.SUMS_OF_PASSES, k) for k in self.states.every], self.states.stay
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
            case Op.CLIP, _:  # sums what all tp ranks hold, in place
                return Access([], [*every, *map(self.gradients, stay), scale])
            case Op.OFFLOAD, _:
                return Access([scale], every)
            case Op.HOST_ADAMW, _:
                return Access([], [left, masters])
            case Op.ADAMW, _ if layer in stay:  # and sets the gradients to zero
                return Access([], [gradients, weights])
            case Op.ADAMW, _:
                return Access([left], [masters])
        raise ValueError(f"{step}: nothing is known of what it touches")

    # --- steps that compute ---

    def of_unit(self, step: Step) -> Access:
        """States what a step that computes touches, but for a layer's parameters."""
        unit = step.unit
        match step.op:
            case Op.EMBED:
                return Access([], self.places(Part(Content.BELOW, unit)))
            case Op.FORWARD:
                own = [self.input(unit), self.keys(unit)] if self.several else []
                return Access([self.below(unit), *self.prefix(unit, own=False)],
                              [self.kept(unit), self.dropped(unit), *own, self.above(unit)])
            case Op.HEAD:  # the gradient takes the place of what it is made of
                return Access([], self.places(Part(Content.ABOVE, unit)))
            case Op.RECOMPUTE:
                return self.recompute(unit)
            case Op.SWEEP:
                content = Content.SWEPT if unit in self.swept else Content.INPUT
                return Access(self.places(Part(content, unit)), [self.keys(unit)])
            case Op.BACKWARD:
                return self.backward(unit)
            case Op.EMBED_BACKWARD:
                return Access(self.places(Part(Content.BELOW, unit)), [])
        # ZERO: the sums of all units of a home, which helpers add to before its own backwards do
        units = [Unit(layer, x) for layer in range(self.program.layers)
                 for x in range(self.program.subsequences)]
        return Access([], [place for one in units for place in self.places(Part(Content.SUMS, one))])

    def recompute(self, unit: Unit) -> Access:
        if self.number[unit] in self.fates.input_only:
            reads = [self.input(unit), *self.prefix(unit, own=True)]
            writes = [self.dropped(unit), self.kept(unit)]
        else:
            reads, writes = [self.kept(unit), self.input(unit)], [self.dropped(unit)]
        if unit in self.turn:
            reads.append(self.keys(unit))
        return Access(reads, writes)

    def backward(self, unit: Unit) -> Access:
        k, fates, copied = self.number[unit], self.fates, self.program.copied
        reads = self.prefix(unit, own=True)
        # the gradients of input and output take the places of these
        writes = [self.kept(unit), self.input(unit), self.below(unit), self.above(unit)]
        # a unit that is not rebuilt drops no row if it is copied, or in two buffers not the last one
        if k in fates.rebuilt or not (k in copied or (self.shares and k < len(self.units) - 1)):
            reads = [self.dropped(unit), *reads]
        if unit in self.turn:
            writes += [self.keys(unit), *self.places(Part(Content.REPAID, unit))]
        elif fates.lent:  # it adds to the sums of all before it and of its own, and uses its keys up
            sums = place_at(Region.SUMS, *unit)
            writes += [self.keys(unit), sums, *self.places(Part(Content.REPAID, unit))]
        return Access(reads, writes)
