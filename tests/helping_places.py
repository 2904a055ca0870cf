"""What the validator knows of stages that compute rows for each other (memo/schedule/help.py, with which it
shares nothing but the words). No torch."""

from collections import defaultdict

from memo.schedule.program import Fates
from memo.schedule.step import Step, Unit
from tests.places import Access, Content, Memory, Place

Reads = list[tuple[Place, Content]]
BACK = " back"


class SharedMemory(Memory):
    """Of a home, places of the rows that a helper computes, beside those of Memory, which are then those of
    the home's own rows: ("stream rows", place, helper), ("keys rows", unit, helper), ("sums rows", unit,
    helper). ("sums", unit): fp32 sums of gradients; content: who has added to them. ("repaid", helper).

    Of a helper: ("guest stream", guest), and of two places each ("early", place) what is borrowed, ("late",
    place) what is taken, ("made", place) keys and values of its rows, ("gradients", place)."""

    def __init__(self, fates: Fates, layers: int, subsequences: int, order: str, trains: bool) -> None:
        super().__init__(fates, layers, subsequences, order, trains)
        self.guests = {subsequences * (1 + p.stage) + p.subsequence: p for p in fates.guests}
        self.lent = {(subsequences * (1 + p.stage) + p.subsequence, p.helper): p for p in fates.lent}
        self.helpers: dict[int, list[int]] = defaultdict(list)  # of each subsequence, in causal order
        for piece in sorted(fates.lent, key=lambda p: p.first):
            self.helpers[piece.subsequence].append(piece.helper)
        self.turn = {unit: k % 2 for k, unit in enumerate(u for u in self.units if u[1] in self.guests)}

    # --- where things lie ---

    def ends(self, unit: Unit) -> tuple[Place, Place]:
        if unit[1] in self.guests:
            return ("guest stream", unit[1]), ("guest stream", unit[1])
        return super().ends(unit)

    def keys(self, unit: Unit) -> Place:
        return ("made", self.turn[unit]) if unit[1] in self.guests else super().keys(unit)

    def attention_reads(self, unit: Unit, own: bool) -> Reads:
        if unit[1] in self.guests:  # its own come with what is borrowed for the backward
            late = [] if own else [(("late", self.turn[unit]), ("late", unit))]
            return [(("early", self.turn[unit]), ("early", unit, own)), *late]
        layer, i = unit
        mine = [(self.keys(unit), ("keys", unit))] if own else []
        return [one for x in range(i) for one in self.all_keys((layer, x))] + mine

    def all_keys(self, unit: Unit, helpers: int | None = None) -> Reads:
        """Keys and values of a unit, those of so many of its helpers (default: all)."""
        whose = self.helpers[unit[1]][:helpers]
        return [(self.keys(unit), ("keys", unit)), *((("keys rows", unit, r), ("keys", unit)) for r in whose)]

    def rows(self, place: Place, x: int, content: Content) -> Reads:
        """The helpers' rows of what lies in a place of the stream."""
        return [(("stream rows", place, helper), content) for helper in self.helpers[x]]

    def sums(self, unit: Unit, helpers: int | None = None) -> list[Place]:
        """Places of the sums of a unit, of the rows of so many helpers (default: all)."""
        return [("sums", unit), *(("sums rows", unit, r) for r in self.helpers[unit[1]][:helpers])]

    def added(self, unit: Unit, helpers: int) -> Content:
        """Who has added to the sums of a unit when all later ones have, and its helpers but for the first so
        many."""
        _, x = unit
        later = {(j, r) for j in range(x + 1, self.subsequences) for r in (None, *self.helpers[j])}
        return "sums", frozenset(later | {(x, r) for r in self.helpers[x][helpers:]})

    # --- who touches it ---

    def access(self, step: Step) -> Access:
        unit = step.unit
        if step.kind == "zero":
            units = [(layer, x) for layer in range(self.layers) for x in range(self.subsequences)]
            nobody = "sums", frozenset()
            return Access([], [(place, nobody) for other in units for place in self.sums(other)])
        if step.peer is not None:
            return self.guest_access(step) if unit[1] in self.guests else self.home_access(step)
        reads, writes, _ = super().access(step)
        if unit[1] in self.guests:
            return Access(*self.with_guest(step, reads, writes))
        layer, x = unit
        adds: list[tuple[Place, Content]] = []
        below, above = self.ends(unit)
        whole = {"embedding": below, "receive": below, "embedding backward": below, "send gradient": below}
        if step.kind not in ("forward", "backward", "recompute", "offload", "prefetch"):
            place = whole.get(step.kind, above)
            reads += [one for at, what in reads if at == place for one in self.rows(place, x, what)]
            writes += [one for at, what in writes if at == place for one in self.rows(place, x, what)]
        if step.kind == "backward":
            reads.append((("sums", unit), self.added(unit, 0)))
            adds = [(place, (x, None)) for j in range(x) for place in self.sums((layer, j))]
            writes.append((self.keys(unit), ("dk", unit)))
        return Access(reads, writes, adds)

    def with_guest(self, step: Step, reads: Reads, writes: Reads) -> tuple[Reads, Reads]:
        """What a guest's unit reads and writes; its gradients too."""
        unit, turn = step.unit, self.turn[step.unit]
        if step.kind in ("recompute", "backward"):
            reads.append((("early", turn), ("early", unit, True)))
        if step.kind == "backward":
            reads.append((("late", turn, BACK), ("late", unit)))
            writes += [(("late", turn, BACK), ("sums", unit)), (("gradients", turn), ("gradients", unit)),
                       (("early", turn), ("used", unit))]
        return reads, writes

    def guest_access(self, step: Step) -> Access:
        unit, turn, back = step.unit, self.turn[step.unit], step.kind.endswith(BACK)
        (layer, number), stream = unit, ("guest stream", unit[1])
        top = layer == self.guests[number].layers - 1
        gradients = [(("late", turn, BACK), ("sums", unit)), (("gradients", turn), ("gradients", unit))]
        match step.kind.split(" ")[0]:
            case "borrow":
                made = [(("made", turn), ("used", unit))] * back
                return Access([], [(("early", turn), ("early", unit, back)), *made])
            case "take" if back:
                dy = [(stream, ("dx", (layer + 1, number)))] * top
                return Access([], [(("late", turn, BACK), ("late", unit)), *dy])
            case "take":
                return Access([], [(("late", turn), ("late", unit)), *[(stream, ("x", unit))] * (layer == 0)])
            case "return" if back:
                dx = [(stream, ("dx", unit))] * (layer == 0)
                return Access([*gradients, *dx], [])
            case "return":  # of another guest other parts of the place lie where these do
                keys = [(("early", turn), ("early", unit, False)), (("late", turn), ("late", unit)),
                        (("made", turn), ("keys", unit))]
                return Access([*keys, *[(stream, ("x", (layer + 1, number)))] * top], [])
            case "repay":
                return Access(gradients, [])
        raise ValueError(f"{step.kind} {unit}: no such kind of step")

    def home_access(self, step: Step) -> Access:
        first, peer, *_ = step.kind.split(" ")
        helper, back, layer = int(peer), step.kind.endswith(BACK), step.unit[0]
        x = self.lent[step.unit[1], helper].subsequence
        unit, j = (layer, x), self.helpers[x].index(helper)
        below, above = self.ends(unit)
        top, prefix = layer == self.layers - 1, [(layer, i) for i in range(x)]
        repaid: Reads = [(("repaid", helper), ("repaid", step.unit))]
        match first:
            case "lend":
                own = self.all_keys(unit, j + 1) if back else []
                return Access([*(one for i in prefix for one in self.all_keys(i)), *own], [])
            case "pass" if back:
                sums = [(place, self.added(unit, j + 1)) for place in self.sums(unit, j + 1)]
                return Access([*sums, *[(("stream rows", above, helper), ("dx", (layer + 1, x)))] * top], [])
            case "pass":
                rows = [(("stream rows", below, helper), ("x", unit))] * (layer == 0)
                return Access([*self.all_keys(unit, j), *rows], [])
            case "fetch" if back:
                sums = [(place, self.added(unit, j)) for place in self.sums(unit, j)]
                return Access([], [*sums, *[(("stream rows", below, helper), ("dx", unit))] * (layer == 0)])
            case "fetch":
                rows = [(("stream rows", above, helper), ("x", (layer + 1, x)))] * top
                return Access([], [(("keys rows", unit, helper), ("keys", unit)), *rows])
            case "collect":
                return Access([], repaid)
            case "add":
                return Access(repaid, [], [(place, (x, helper)) for i in prefix for place in self.sums(i)])
        raise ValueError(f"{step.kind} {step.unit}: no such kind of step")

    def messages(self) -> set[tuple[str, Unit]]:
        """The messages with other stages that must come, and what is made of them."""
        def of(home: bool, end: str) -> tuple[str, ...]:
            each = ("lend", "pass", "fetch") if home else ("borrow", "take", "return")
            return each + (("collect", "add") if home else ("repay",)) * bool(end)
        ends, layers = ("", BACK)[:1 + self.trains], range(self.layers)
        mine = {(f"{kind} {r}{end}", (layer, number)) for number, r in self.lent for layer in layers
                for end in ends for kind in of(True, end)}
        return mine | {(f"{kind} {guest.stage}{end}", (layer, number))
                       for number, guest in self.guests.items() for layer in range(guest.layers)
                       for end in ends for kind in of(False, end)}
