"""The steps with which stages of a pipeline compute rows for each other (memo/config/msp.py), in launch
order: of a home, which lends to its helpers, and of a helper. No torch. Source: SPPO 6.2.

A helper's units are units of its own program. Of each, messages, home to helper and helper to home:

    lend -> borrow     LOAN: the layer's weights, keys and values of the subsequences before; early. In the
                       backward also those of the unit's own subsequence
    pass -> take       ROWS: what other pieces of the unit have made: keys and values of the rows before its
                       own; in the backward the sums of their gradients, up to its own rows. With them the
                       rows of x, or of dy
    return -> fetch    RESULTS: keys and values of its rows; in the backward the sums of gradients that it has
                       added to. With them the rows of y, or of dx
    repay -> collect   REPAYMENT, in the backward: gradients of the weights, and of keys and values of the
                       subsequences before, which the home adds to its own, in a fixed order

Pieces of a unit so follow each other within a layer, in the backward the last one first; one helper computes
while another is a layer ahead. Helpers have two places, homes one for what each helper repays.

Two stages have a lane for each direction, which does what it is given in order. What is early or late takes
turns with what others wait for: lend, pass, lend, pass; in the backward return, repay, return, repay. So the
bulk of a unit travels while the unit before is computed, or the one behind.
"""

from collections.abc import Iterator, Sequence

from memo.config.msp import Help, Shares, guest_number
from memo.schedule.step import Moved, Op, Step, Unit

HELPER_PLACES = 2  # a unit is computed in one while what the next one needs comes into the other


class Home:
    """Says what a stage lends: `pieces` of each subsequence, in causal order. Messages have its helpers'
    units."""

    def __init__(self, lent: Shares, layers: int, subsequences: int) -> None:
        self.layers, self.subsequences = layers, subsequences
        self.pieces: dict[int, list[Help]] = {}
        for piece in sorted(lent, key=lambda piece: (piece.subsequence, piece.first)):
            self.pieces.setdefault(piece.subsequence, []).append(piece)

    def step(self, op: Op, moved: Moved | None, layer: int, piece: Help, back: bool = False) -> Step:
        return Step(op, Unit(layer, guest_number(piece, self.subsequences)), moved, back, piece.helper)

    def lend(self, layer: int, x: int) -> Iterator[Step]:
        for piece in self.pieces.get(x, ()):
            yield self.step(Op.SEND, Moved.LOAN, layer, piece)

    def after_forward(self, unit: Unit) -> Iterator[Step]:
        """Yields what helpers need for this unit and send of it, and what they need early for the next."""
        layer, x = unit
        for piece in self.pieces.get(x, ()):
            yield self.step(Op.SEND, Moved.ROWS, layer, piece)
            yield self.step(Op.RECEIVE, Moved.RESULTS, layer, piece)
        yield from self.lend(*((layer + 1, x) if layer + 1 < self.layers else (0, x + 1)))

    def lend_back(self, x: int) -> Iterator[Step]:
        """Yields the first loans to those who help with this subsequence, and with none behind it."""
        behind = {piece.helper for i, pieces in self.pieces.items() if i > x for piece in pieces}
        for piece in self.pieces.get(x, ()):
            if piece.helper not in behind:
                yield self.step(Op.SEND, Moved.LOAN, self.layers - 1, piece, back=True)

    def begin_back(self, x: int) -> Iterator[Step]:
        """Yields the first messages of a subsequence's backward; add() has the others."""
        for layer in reversed(range(max(0, self.layers - 2), self.layers)):
            for piece in reversed(self.pieces.get(x, ())):
                yield from self.exchange(layer, piece)
                if layer == self.layers - 1:
                    yield self.step(Op.RECEIVE, Moved.REPAYMENT, layer, piece, back=True)

    def exchange(self, layer: int, piece: Help) -> Iterator[Step]:
        """Yields the sending of sums to a helper, of what its next unit needs, and the sums' return."""
        yield self.step(Op.SEND, Moved.ROWS, layer, piece, back=True)
        if layer > 0:
            yield self.step(Op.SEND, Moved.LOAN, layer - 1, piece, back=True)
        else:  # this helper's next unit: the top layer of the latest earlier subsequence that it helps with
            earlier = [other for x, pieces in self.pieces.items() if x < piece.subsequence
                       for other in pieces if other.helper == piece.helper]
            if earlier:
                latest = max(earlier, key=lambda other: other.subsequence)
                yield self.step(Op.SEND, Moved.LOAN, self.layers - 1, latest, back=True)
        yield self.step(Op.RECEIVE, Moved.RESULTS, layer, piece, back=True)

    def add(self, layer: int, x: int) -> Iterator[Step]:
        """Yields what a home adds before the backward of a unit, and what that makes room for; -1: behind."""
        pieces = self.pieces.get(x, ())
        turns = max((piece.turns for piece in pieces), default=1)
        for turn in range(self.layers) if pieces else ():
            for ahead, piece in reversed([*enumerate(pieces)]):
                # pieces are done one by one: this one is so many units ahead, and one for the message
                if self.layers - 1 - max(0, turn + 1 - ahead // turns) == layer:
                    repaid = self.layers - 1 - turn
                    yield self.step(Op.ADD, None, repaid, piece, back=True)
                    if repaid > 0:
                        yield self.step(Op.RECEIVE, Moved.REPAYMENT, repaid - 1, piece, back=True)
                    if repaid > 1:
                        yield from self.exchange(repaid - 2, piece)


class Helper:
    """Says what a stage computes for others: its guests' units are among `units`, in the order of the
    forward. `number`: of each of them; `turn`: of its place; `pieces`: of each guest, by its number."""

    def __init__(self, guests: Shares, units: Sequence[Unit], subsequences: int) -> None:
        self.pieces = {guest_number(piece, subsequences): piece for piece in guests}
        self.units = [unit for unit in units if unit.subsequence in self.pieces]
        self.number = {unit: k for k, unit in enumerate(self.units)}
        self.turn = {unit: k % HELPER_PLACES for k, unit in enumerate(self.units)}
        self.n_before = sum(self.pieces[unit.subsequence].before for unit in self.units)

    def step(self, op: Op, moved: Moved, unit: Unit, back: bool = False) -> Step:
        return Step(op, unit, moved, back, self.pieces[unit.subsequence].stage)

    def phase(self, before: bool) -> range:
        """Numbers the units before the stage's own, or behind them."""
        return range(self.n_before) if before else range(self.n_before, len(self.units))

    def needs(self, k: int, back: bool = False) -> Iterator[Step]:
        """Yields the coming of what unit k needs, where there is such a unit."""
        for moved in (Moved.LOAN, Moved.ROWS):
            yield self.step(Op.RECEIVE, moved, self.units[k], back)

    def arrive(self, before: bool, back: bool = False) -> Iterator[Step]:
        """Yields the coming of what the first units of a phase need."""
        for k in self.phase(before)[::-1 if back else 1][:HELPER_PLACES]:
            yield from self.needs(k, back)

    def after(self, unit: Unit, back: bool = False) -> Iterator[Step]:
        """Yields the leaving of a unit's results, and the coming of what the next unit in its place needs."""
        for moved in (Moved.RESULTS, Moved.REPAYMENT)[:1 + back]:
            yield self.step(Op.SEND, moved, unit, back)
        k = self.number[unit] + (-HELPER_PLACES if back else HELPER_PLACES)
        if k in self.phase(self.pieces[unit.subsequence].before):
            yield from self.needs(k, back)
