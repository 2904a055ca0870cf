"""The steps with which stages of a pipeline compute rows for each other (memo/msp.py): what a home lends to
its helpers and gets back, and what a helper borrows, takes and returns. No torch. Source: SPPO 6.2.

A helper's units are units of its own schedule. Of each, messages, home to helper and helper to home:

    lend -> borrow     the layer's weights, keys and values of the subsequences before; early. In the backward
                       also those of the unit's own subsequence
    pass -> take       what other pieces of the unit have made: keys and values of the rows before its own;
                       in the backward the sums of their gradients, up to its own rows. With them the rows of
                       x, or of dy
    return -> fetch    keys and values of its rows; in the backward the sums of gradients that it has added
                       to. With them the rows of y, or of dx
    repay -> collect   in the backward: gradients of the weights, and of keys and values of the subsequences
                       before, which the home adds to its own, in a fixed order

Pieces of a unit so follow each other within a layer, in the backward the last one first, and one helper
computes while another one is a layer ahead. Helpers have two places for what comes early and for gradients,
homes one for what each helper repays.

Two stages have a lane for each direction, which does what it is given in order. What is early or late takes
turns with what others wait for: lend, pass, lend, pass; in the backward return, repay, return, repay. So the
bulk of a unit travels while the unit before is computed, or the one behind.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from memo.msp import Help, Shares, guest_number
from memo.swap.steps import BACK, Key, Step, Unit

PLACES = 2  # of a helper: a unit is computed in one while what the next one needs comes into the other


class Home:
    """What a stage lends. Its messages have the units of its helpers, (layer, guest_number())."""

    def __init__(self, lent: Shares, layers: int, subsequences: int) -> None:
        self.layers, self.subsequences = layers, subsequences
        self.pieces: dict[int, list[Help]] = defaultdict(list)
        for piece in sorted(lent, key=lambda piece: (piece.subsequence, piece.first)):
            self.pieces[piece.subsequence].append(piece)
        self.summed: dict[int, Key] = {}  # of each layer the last step that has added to its sums
        self.added: dict[int, Key] = {}  # of each helper the last step that has used its place

    def unit(self, layer: int, piece: Help) -> Unit:
        return layer, guest_number(piece, self.subsequences)

    def keys(self, kind: str, layer: int, pieces: Sequence[Help], end: str = "") -> tuple[Key, ...]:
        """Of these steps of so many pieces."""
        return tuple((f"{kind} {piece.helper}{end}", self.unit(layer, piece)) for piece in pieces) if (
            pieces) else ()

    # --- forward ---

    def lend(self, unit: Unit) -> Iterator[Step]:
        layer, x = unit
        before = layer, x - 1  # whose keys are lent, too
        for key in self.keys("lend", layer, self.pieces.get(x, ())):
            yield Step(*key, (("forward", before), *self.complete(before)) if x else ())

    def complete(self, unit: Unit, end: str = "") -> tuple[Key, ...]:
        """The steps behind which all rows of a unit are computed that others have."""
        layer, x = unit
        return self.keys("fetch", layer, self.pieces.get(x, ()), end)

    def before_forward(self, unit: Unit) -> tuple[Key, ...]:
        """What a unit's forward waits for: keys and values of the subsequence before."""
        return self.complete((unit[0], unit[1] - 1))

    def after_forward(self, unit: Unit) -> Iterator[Step]:
        layer, x = unit
        if not self.pieces:
            return
        made: tuple[Key, ...] = (("forward", unit),)
        for piece in self.pieces.get(x, ()):
            [passed], [fetched] = (self.keys(kind, layer, [piece]) for kind in ("pass", "fetch"))
            yield Step(*passed, made)  # protects the rows before, which may not be there yet
            # protects the rows of x, which those of y are about to overwrite
            yield Step(*fetched, self.keys("pass", 0, [piece]) if layer == self.layers - 1 else ())
            made += fetched,
        yield from self.lend((layer + 1, x) if layer + 1 < self.layers else (0, x + 1))

    # --- backward ---

    def lend_back(self, x: int) -> Iterator[Step]:
        """To those who help with this subsequence, and with none behind it."""
        behind = {piece.helper for i, those in self.pieces.items() if i > x for piece in those}
        for piece in self.pieces.get(x, ()):
            if piece.helper not in behind:
                yield self.lend_one(self.layers - 1, piece)

    def lend_one(self, layer: int, piece: Help) -> Step:
        pieces = self.pieces[piece.subsequence]
        up_to = self.keys("fetch", layer, pieces[:pieces.index(piece) + 1])
        [lent] = self.keys("lend", layer, [piece], BACK)
        return Step(*lent, (("forward", (layer, piece.subsequence)), *up_to))

    def lend_next(self, layer: int, piece: Help) -> Iterator[Step]:
        """What a helper needs for its next unit."""
        if layer > 0:
            yield self.lend_one(layer - 1, piece)
            return
        earlier = [one for x, those in self.pieces.items() if x < piece.subsequence
                   for one in those if one.helper == piece.helper]
        if earlier:
            yield self.lend_one(self.layers - 1, max(earlier, key=lambda one: one.subsequence))

    def before_subsequence(self, x: int, arrived: tuple[Key, ...]) -> Iterator[Step]:
        """The first messages of a subsequence's backward; add_one() has the others. `arrived`: the step that
        brings dy."""
        pieces = self.pieces.get(x, [])
        for layer in reversed(range(max(0, self.layers - 2), self.layers)):
            for piece in reversed(pieces):
                yield from self.sums_of(layer, piece, arrived if layer == self.layers - 1 else ())
                if layer == self.layers - 1:
                    yield self.collect(layer, piece)

    def sums_of(self, layer: int, piece: Help, arrived: tuple[Key, ...] = ()) -> Iterator[Step]:
        """Sends sums to a helper, and what it needs for its next unit; gets the sums back."""
        pieces = self.pieces[piece.subsequence]
        later = pieces[pieces.index(piece) + 1:][:1]
        # protects the sums that later subsequences, and rows, still add to
        waits = self.keys("fetch", layer, later, BACK)
        if not later and layer in self.summed:
            waits = self.summed[layer],
        [passed], [fetched] = (self.keys(kind, layer, [piece], BACK) for kind in ("pass", "fetch"))
        yield Step(*passed, waits + arrived)
        yield from self.lend_next(layer, piece)
        # protects the sums, and the rows of dy, that come back changed
        dy = self.keys("pass", self.layers - 1, [piece], BACK) if layer == 0 else ()
        yield Step(*fetched, (passed, *dy))

    def collect(self, layer: int, piece: Help) -> Step:
        [collected] = self.keys("collect", layer, [piece], BACK)
        return Step(*collected, (self.added[piece.helper],) if piece.helper in self.added else ())

    def before_backward(self, unit: Unit) -> tuple[Key, ...]:
        """What the backward of a unit waits for: sums of gradients of its rows, with those of all later ones;
        its keys and values, which it overwrites, must have left."""
        layer, x = unit
        pieces = self.pieces.get(x, ())
        self.summed[layer] = "backward", unit
        return (*self.keys("fetch", layer, pieces[:1], BACK), *self.keys("lend", layer, pieces, BACK))

    def add(self, unit: Unit) -> Iterator[Step]:
        """What the home adds before the backward of one of its units; layer -1 stands behind all."""
        layer, x = unit
        pieces = self.pieces.get(x, [])
        turns = max((piece.turns for piece in pieces), default=1)
        for turn in range(self.layers) if pieces else ():
            for ahead, piece in reversed([*enumerate(pieces)]):
                # pieces are done one after the other: this one is so many units of the home ahead; a unit
                # more is left to the message
                before = self.layers - 1 - max(0, turn + 1 - ahead // turns)
                if before == layer:
                    yield from self.add_one(self.layers - 1 - turn, piece)

    def add_one(self, layer: int, piece: Help) -> Iterator[Step]:
        [added], [collected] = (self.keys(kind, layer, [piece], BACK) for kind in ("add", "collect"))
        yield Step(*added, (collected,))
        self.summed[layer] = self.added[piece.helper] = added
        if layer > 0:
            yield self.collect(layer - 1, piece)
        if layer > 1:
            yield from self.sums_of(layer - 2, piece)


class Helper:
    """What a stage computes for others: its guests' units are `units`, in the order of the forward."""

    def __init__(self, guests: Shares, units: Sequence[Unit], subsequences: int) -> None:
        self.pieces = {guest_number(piece, subsequences): piece for piece in guests}
        self.units = [unit for unit in units if unit[1] in self.pieces]
        self.number = {unit: k for k, unit in enumerate(self.units)}
        self.n_before = sum(self.pieces[number].before for _, number in self.units)

    def key(self, kind: str, unit: Unit, end: str = "") -> Key:
        return f"{kind} {self.pieces[unit[1]].stage}{end}", unit

    def phase(self, before: bool) -> range:
        """The numbers of the units before the stage's own, or behind them."""
        return range(self.n_before) if before else range(self.n_before, len(self.units))

    # --- forward ---

    def first(self, before: bool) -> Iterator[Step]:
        for k in self.phase(before)[:PLACES]:
            yield from self.arrive(k)

    def arrive(self, k: int) -> Iterator[Step]:
        """What unit k needs."""
        unit, waits = self.units[k], tuple[Key, ...]()
        if k >= PLACES:  # protects what is computed with, and sent, from what comes in its place
            earlier = self.units[k - PLACES]
            waits = ("forward", earlier), self.key("return", earlier)
        yield Step(*self.key("borrow", unit), waits)
        yield Step(*self.key("take", unit), waits)

    def before_forward(self, unit: Unit) -> tuple[Key, ...]:
        return self.key("borrow", unit), self.key("take", unit)

    def after_forward(self, unit: Unit) -> Iterator[Step]:
        yield Step(*self.key("return", unit), (("forward", unit),))
        k = self.number[unit] + PLACES
        if k in self.phase(self.pieces[unit[1]].before):
            yield from self.arrive(k)

    # --- backward ---

    def first_back(self, before: bool) -> Iterator[Step]:
        for k in self.phase(before)[::-1][:PLACES]:
            yield from self.arrive_back(k)

    def arrive_back(self, k: int) -> Iterator[Step]:
        unit, later = self.units[k], k + PLACES
        if later < len(self.units):
            before = self.units[later]
            used: tuple[Key, ...] = ("backward", before),
            sent: tuple[Key, ...] = self.key("return", before, BACK), self.key("repay", before, BACK)
        else:
            used, sent = (("forward", unit), self.key("return", unit)), ()
        yield Step(*self.key("borrow", unit, BACK), used)
        layer, number = unit
        if layer == self.pieces[number].layers - 1:  # protects the rows of y, which dy is about to overwrite
            sent += self.key("return", unit),
        yield Step(*self.key("take", unit, BACK), sent)

    def before_recompute(self, unit: Unit) -> tuple[Key, ...]:
        return self.key("borrow", unit, BACK),

    def before_backward(self, unit: Unit) -> tuple[Key, ...]:
        return self.key("borrow", unit, BACK), self.key("take", unit, BACK)

    def after_backward(self, unit: Unit) -> Iterator[Step]:
        done = (("backward", unit),)
        yield Step(*self.key("return", unit, BACK), done)
        yield Step(*self.key("repay", unit, BACK), done)
        k = self.number[unit] - PLACES
        if k in self.phase(self.pieces[unit[1]].before):
            yield from self.arrive_back(k)
