"""Offline dynamic storage allocation: addresses for buffers of known size and lifespan, at the least peak.

`solve` hands parts of a Problem to a solver; `validate`, which shares no code with these, checks the result.
Parts are reduced without loss: cut where no buffer is alive, to the moments where a greatest set of buffers
is; bytes become multiples of the sizes' unit. Source: MEMO 4.2."""

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from memo.dsa import solvers
from memo.system.command import Arguments

SOLVERS = tuple(solvers.METHODS)
MOST_BYTES = 2**60  # of all buffers together


class NoPlacement(RuntimeError):
    """Tells that no placement is under the capacity, or none was found in the time limit."""


def add_options(parser: Arguments, alignment: int, time_limit_of: str) -> None:
    """Adds the options of a search for a placement."""
    parser.option("--solver", default="auto", help="which one", choices=SOLVERS)
    parser.option("--time_limit", float, 60.0, f"seconds of work{time_limit_of}, counted in steps: what is "
                  "found is the same on every machine, however busy", least=0.0, most=1e6,
                  why="that is eleven days; what is found by then is used")
    parser.option("--alignment", int, alignment, "bytes; every offset is a multiple of it; torch has 512 on "
                  "CUDA", least=1, most=2**30, why="no page of memory is larger than 1 GiB")


class Buffer(NamedTuple):
    """Describes `size` bytes that are alive in the half-open lifespan [lower, upper)."""

    id: str
    lower: int
    upper: int
    size: int


@dataclass(frozen=True)
class Problem:
    """Holds what is to be placed. check_rules() in memo/dsa/__main__.py has the rules that buffers obey."""

    buffers: tuple[Buffer, ...]
    capacity: int | None = None  # bytes
    alignment: int = 1  # offsets are multiples of it; sizes are rounded up to that, and so are peaks

    def rounded(self, i: int) -> int:
        """Counts the bytes that buffer i takes up."""
        return -(-self.buffers[i].size // self.alignment) * self.alignment


@dataclass(frozen=True)
class Solution:
    """Holds `offsets` in the buffers' order, the `peak` where the highest ends, its proven `lower_bound`."""

    offsets: tuple[int, ...]
    peak: int
    lower_bound: int
    solver: str  # which one found it
    seconds: float

    @property
    def proven(self) -> bool:
        return self.peak == self.lower_bound

    @property
    def gap(self) -> float:
        """Bounds how far the peak is above the least there is, as a fraction of the bound."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def lower_bound(problem: Problem) -> int:
    """Finds the greatest number of bytes alive at one time: no placement has a lower peak."""
    return max((part.load for part, _ in _parts(problem)), default=0) * _unit(problem)


def validate(problem: Problem, solution: Solution) -> None:
    """Raises ValueError: the rule that `solution` breaks, and the buffers. Knows nothing of the solvers."""
    a, ends = problem.alignment, []
    if len(solution.offsets) != len(problem.buffers):
        raise ValueError(f"{len(solution.offsets)} offsets for {len(problem.buffers)} buffers")
    for b, offset in zip(problem.buffers, solution.offsets, strict=True):
        if type(offset) is not int or offset < 0:
            raise ValueError(f"buffer {b.id!r}: offset {offset!r} is not a whole number >= 0")
        if offset % a:
            raise ValueError(f"buffer {b.id!r}: offset {offset} is not a multiple of alignment={a}")
        ends.append(offset + b.size + -b.size % a)
    if problem.capacity is not None and solution.peak > problem.capacity:
        raise ValueError(f"peak={solution.peak} is above capacity={problem.capacity}")
    if solution.peak < solution.lower_bound:
        raise ValueError(f"peak={solution.peak} is below lower_bound={solution.lower_bound}")
    if solution.peak != max(ends, default=0):
        raise ValueError(f"peak={solution.peak} is not where the highest buffer ends, {max(ends, default=0)}")
    alive: list[tuple[int, int, int]] = []  # (offset, end, buffer), in order of offsets
    moments = [(b.lower, True, i) for i, b in enumerate(problem.buffers)]
    moments += [(b.upper, False, i) for i, b in enumerate(problem.buffers)]
    for _, born, i in sorted(moments):  # what dies goes before what is born
        place = solution.offsets[i], ends[i], i
        k = bisect_left(alive, place)
        if not born:
            del alive[k]
            continue
        for other in alive[max(0, k - 1):k + 1]:  # the others lie apart: if any overlaps, a neighbour does
            if place[0] < other[1] and other[0] < place[1]:
                first, second = ((problem.buffers[k].id, offset, end) for offset, end, k in (other, place))
                raise ValueError("buffers {!r} at [{}, {}) and {!r} at [{}, {}) overlap while both are "
                                 "alive".format(*first, *second))
        alive.insert(k, place)


def solve(problem: Problem, solver: str = "auto", time_limit: float = 60.0, enough: int = 0) -> Solution:
    """Finds the best Solution of `solver` in `time_limit` seconds of work, validated, never worse than
    greedy's: the least peak, or `enough` bytes; with a capacity the first that fits, or NoPlacement."""
    start, unit, decide = time.monotonic(), _unit(problem), problem.capacity is not None  # fit, or least peak
    parts = sorted(_parts(problem), key=lambda entry: -entry[0].load)
    bound = max((part.load for part, _ in parts), default=0)
    # the whole needs as much as its largest part: no other part gains by a lower peak
    stop = max(bound, enough // unit) if problem.capacity is None else problem.capacity // unit
    offsets, peak, found_by = [0] * len(problem.buffers), 0, ["greedy"]
    left = time_limit
    for part, members in parts:
        placed, part_bound, name, left = _solve_part(part, solver, stop, decide, left)
        for i, offset in zip(members, placed, strict=True):
            offsets[i] = offset * unit
        bound, peak = max(bound, part_bound), max(peak, part.peak(placed))
        found_by.append(name)
        if decide and peak > stop:
            why = "exists (proven" if bound > stop else (
                f"was found in {time_limit:g} s of work (raise the time limit")
            raise NoPlacement(f"no placement under capacity={problem.capacity} {why}; lower bound "
                              f"{bound * unit}, lowest peak found {peak * unit})")
        stop = max(stop, peak)
    solution = Solution(tuple(offsets), peak * unit, bound * unit, "+".join(dict.fromkeys(found_by)),
                        time.monotonic() - start)
    validate(problem, solution)
    return solution


def _solve_part(part: solvers.Part, solver: str, stop: int, decide: bool,
                seconds: float) -> tuple[list[int], int, str, float]:
    """Finds (offsets, bound, who found them, seconds left): the least peak, or one up to `stop`."""
    (best, took), bound, name = solvers.greedy(part, stop, seconds), part.load, "greedy"
    for finder, method, share in solvers.METHODS[solver] if len(part.size) <= solvers.LARGE else ():
        peak, seconds = part.peak(best), seconds - took
        if peak <= max(stop, bound) or seconds <= 0 or (decide and bound > stop):
            took = 0.0
            break
        offsets, proven, took = method(part, best, stop, stop if decide else peak - 1, seconds / share)
        if offsets is not None and part.peak(offsets) < peak:
            best, name = offsets, finder
        if proven > stop:  # the solvers look for nothing below `stop`: up to there their bound says nothing
            bound = max(bound, proven)
    return best, bound, name, seconds - took


def _unit(problem: Problem) -> int:
    """Finds the unit of all rounded sizes, and so of offsets of a best placement: sums of sizes."""
    return gcd(*map(problem.rounded, range(len(problem.buffers)))) or 1


def components(lifespans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Groups the indices of half-open (lower, upper) that a moment joins: between groups is no conflict."""
    groups: list[list[int]] = []
    end = None
    for i, (lower, upper) in sorted(enumerate(lifespans), key=lambda entry: entry[1][0]):
        if end is None or lower >= end:
            groups.append([])
            end = upper
        groups[-1].append(i)
        end = max(end, upper)
    return groups


def _parts(problem: Problem) -> list[tuple[solvers.Part, list[int]]]:
    """Cuts the problem where nothing lives on -> [(Part, indices of its buffers)]."""
    unit, buffers = _unit(problem), problem.buffers
    return [(solvers.part_of([buffers[i].lower for i in group], [buffers[i].upper for i in group],
                                 [problem.rounded(i) // unit for i in group]), group)
            for group in components((b.lower, b.upper) for b in buffers)]
