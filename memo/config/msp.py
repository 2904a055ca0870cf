"""Multiplexed sequence partitioning: which stages of a pipeline compute rows of which others, where the
former have nothing of their own to compute. No torch. Source: SPPO 6.2.

Stage s computes subsequence x in slot s + x. In the first p - 1 slots later stages have not begun, in the
last p - 1 earlier ones have ended: in each slot all idle stages help all busy ones. A busy unit is cut into
pieces in causal order: its home has the first one, each helper one of the others."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple


class Help(NamedTuple):
    """Holds the rows [first, end) of a subsequence that a `helper` computes in all `layers` of its `stage`.
    `part`: of FLOPs. Meanwhile it takes units of so many homes in `turns`; helpers work `together`."""

    stage: int
    subsequence: int
    helper: int
    first: int  # of a rank's own rows, where each sequence of a batch has as many
    end: int
    layers: int
    part: float
    turns: int = 1
    together: int = 1

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def before(self) -> bool:
        """Says whether the helper's own subsequences follow; otherwise they are done."""
        return self.stage + self.subsequence < self.helper


Shares = tuple[Help, ...]  # of all stages
# {(stage, subsequence): {helper: the part of the unit's FLOPs that it gets}}, in causal order
Parts = dict[tuple[int, int], dict[int, float]]
# (stage, subsequence, stages, subsequences) -> who helps there
Helping = Callable[[int, int, int, int], list[int]]


def guest_number(piece: Help, subsequences: int) -> int:
    """Numbers a helper's guest unit as if of another subsequence: its own are numbered from 0 on."""
    return subsequences * (1 + piece.stage) + piece.subsequence


def helpers(stage: int, subsequence: int, stages: int, subsequences: int) -> list[int]:
    """Lists the stages that are idle when one has this subsequence, and share its pieces in causal order."""
    slot = stage + subsequence
    return [k for k in range(stages) if slot < k or slot - k >= subsequences]


def dealt_helpers(stage: int, subsequence: int, stages: int, subsequences: int) -> list[int]:
    """Deals these helpers evenly to all busy stages -> one stage's: each then needs few stages' weights."""
    idle, slot = helpers(stage, subsequence, stages, subsequences), stage + subsequence
    busy = [k for k in range(stages) if 0 <= slot - k < subsequences]
    n, turn = len(idle), busy.index(stage)
    first, end = turn * n // len(busy), (turn + 1) * n // len(busy)
    return idle[first:max(end, first + 1)]


def helped_units(stages: int, subsequences: int) -> dict[tuple[int, int], list[int]]:
    """Finds {(stage, subsequence): its helpers} of all units next to the bubbles, slot by slot."""
    return {(slot - x, x): idle
            for slot in range(stages + subsequences - 1) for x in range(subsequences)[::-1]
            if 0 <= slot - x < stages and (idle := helpers(slot - x, x, stages, subsequences))}


def even_parts(stages: int, subsequences: int, helping: Helping = helpers) -> Parts:
    """Computes the Parts with which a home and its helpers compute as long; `helping` says who helps."""
    units = {unit: helping(*unit, stages, subsequences) for unit in helped_units(stages, subsequences)}
    turns = Counter((helper, sum(unit)) for unit, those in units.items() for helper in those)
    return {unit: dict.fromkeys(those, 1 / (len(those) + max(turns[helper, sum(unit)] for helper in those)))
            for unit, those in units.items()}


def shares_of(layers: Sequence[int], cuts: Sequence[int], multiple: int,
              flops: Callable[[int, int], float], parts: Parts) -> Shares:
    """Cuts subsequences of `cuts` rows, of stages with so many `layers`, into pieces that end as near to
    their `parts` as multiples of `multiple` rows allow. flops(x, n): of the first n rows of subsequence x."""
    pieces = list[Help]()
    for (stage, x), those in parts.items():
        every, ends, wanted = range(0, cuts[x], multiple), list[int](), 0.0
        for part in [1 - sum(those.values()), *those.values()][:-1]:
            wanted += part * flops(x, cuts[x])
            k = bisect_left(every, wanted, key=partial(flops, x))  # the first that has as many
            ends.append(min(every[max(0, k - 1):k + 1], key=lambda n: abs(flops(x, n) - wanted)))
        ends.append(cuts[x])
        pieces += [Help(stage, x, helper, first, end, layers[stage],
                        (flops(x, end) - flops(x, first)) / flops(x, cuts[x]))
                   for helper, first, end in zip(those, ends, ends[1:], strict=False) if 0 < first < end]
    return with_turns(pieces)


def with_turns(pieces: Sequence[Help]) -> Shares:
    """Counts the `turns` and `together` of pieces."""
    turns = Counter((p.helper, p.stage + p.subsequence) for p in pieces)
    together = Counter((p.stage, p.subsequence) for p in pieces)
    return tuple(p._replace(turns=turns[p.helper, p.stage + p.subsequence],
                            together=together[p.stage, p.subsequence]) for p in pieces)


def helping_pairs(shares: Iterable[Help]) -> list[tuple[int, int]]:
    """Lists the stages that compute for each other, two by two: the earlier one first."""
    return sorted({(min(p.stage, p.helper), max(p.stage, p.helper)) for p in shares})


def guest_units(guests: Shares, subsequences: int, before: bool) -> list[tuple[int, int]]:
    """Lists (layer, guest_number()) of a helper's units before its own, or behind, homes in turns."""
    units = [(piece.stage + piece.subsequence, layer, piece.stage, guest_number(piece, subsequences))
             for piece in guests if piece.before == before for layer in range(piece.layers)]
    return [(layer, number) for _, layer, _, number in sorted(units)]


def shares_lines(lent: Iterable[Help], stages: int, subsequences: int) -> list[str]:
    """Lists for people who computes how much of each unit next to the bubbles."""
    parts: dict[tuple[int, int], list[str]] = {unit: [] for unit in helped_units(stages, subsequences)}
    for piece in lent:
        parts[piece.stage, piece.subsequence].append(f"{piece.helper} {piece.part:.0%}")
    helped = sum(map(bool, parts.values()))
    lines = [f"msp         {helped} of {len(parts)} units next to the bubbles are helped (by stage, part)"]
    for stage in range(stages):
        units = [f"{x} ({', '.join(those) or 'alone'})" for (k, x), those in parts.items() if k == stage]
        lines.append(f"            {stage}: subsequences {', '.join(units)}")
    return lines
