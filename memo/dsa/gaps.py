"""The free stretches of an address space, for solvers.in_order: none of its functions takes long with a
million buffers."""

from bisect import bisect_left, insort
from collections import defaultdict

END = 2**62  # units: more than all buffers of a problem take (problem.MOST_BYTES)


class Gaps:
    """The free stretches of the units 0 to END, none of which touch."""

    def __init__(self) -> None:
        # of (units, offset) in order, the smaller units on lower ones
        self.shelves: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.used = 0  # a bit for each shelf that is not empty
        self.starts: dict[int, int] = {}  # {offset: units} of each gap, by its start
        self.ends: dict[int, int] = {}  # and by its end
        self.add(0, END)

    def shelf(self, units: int) -> int:
        """Sixteen for each power of two."""
        bits = units.bit_length()
        return 16 * bits + (units << 5 >> bits) - 16

    def add(self, at: int, units: int) -> None:
        k = self.shelf(units)
        insort(self.shelves[k], (units, at))
        self.used |= 1 << k
        self.starts[at] = self.ends[at + units] = units

    def drop(self, at: int, units: int) -> None:
        k = self.shelf(units)
        del self.shelves[k][bisect_left(self.shelves[k], (units, at))], self.starts[at], self.ends[at + units]
        if not self.shelves[k]:
            self.used &= ~(1 << k)

    def take(self, units: int) -> int:
        """The offset of so many units, the lowest in the tightest gap."""
        k = self.shelf(units)
        place = bisect_left(self.shelves[k], (units,))
        if place == len(self.shelves[k]):
            above = self.used >> k + 1
            k, place = k + (above & -above).bit_length(), 0
        room, at = self.shelves[k][place]
        self.drop(at, room)
        if room > units:
            self.add(at + units, room - units)
        return at

    def give(self, at: int, units: int) -> None:
        if above := self.starts.get(at + units):
            self.drop(at + units, above)
            units += above
        if below := self.ends.get(at):
            at -= below
            self.drop(at, below)
            units += below
        self.add(at, units)
