"""The memory plan: from the requests of a training step to an address for each of them.

A Trace is the step's log, with `begin <segment>` and `end <segment>` around the pieces of the step, such as a
layer's forward. Level 1 solves each piece by itself, and equal pieces (the layers) once; level 2 puts one
pseudo block in the place of each and solves the whole step. Source: MEMO 4.2 and 4.3.3."""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from memo.dsa import problem, solvers
from memo.dsa.problem import Buffer, Problem, Solution, components, lower_bound, solve, validate
from memo.planner.trace import OUTSIDE, WHOLE, Request, Trace, requests_of
from memo.system.files import keep_json, kept_json

ALIGNMENT = {"cpu": 64, "cuda": 512}  # bytes; what torch's own blocks have
PLANNING_S = 10.0  # of work, for each of a run's problems; what is found by then is used
# left to greedy, for CP-SAT would take all that time: a peak of so many lower bounds; with solver=auto more
# buffers, of which CP-SAT found no better plan (METP's backward: 883 and 3315, 1.4% and 0.3% above the bound)
NEAR, MOST_SEARCHED = 1.001, 500
# An arena from the cache may take so many lower bounds: a damaged file could name any size. A plan of the
# solvers is at its bound or a few percent above (bench/planner.py); one beyond is made anew at every start.
MOST_ABOVE = 2
Lives = list[tuple[int, int, int]]  # (lower, upper, bytes) of each buffer


@dataclass(frozen=True)
class Plan:
    """Holds the memory of each request of a step."""

    arena_bytes: int
    lower_bound: int  # the most bytes in use at a time
    alignment: int
    solver: str
    seconds: float
    segments: dict  # {label: ((bytes, offset in the arena, or None: torch's) of each request)}
    levels: tuple  # what was solved

    @property
    def proven(self) -> bool:
        """Says whether no plan of the whole step can be smaller."""
        return self.arena_bytes == self.lower_bound


def problem_of(lives: Lives, alignment: int) -> Problem:
    """Makes the Problem of [(lower, upper, bytes)], the times replaced by their ranks."""
    ranks = {t: rank for rank, t in enumerate(sorted({t for *times, _ in lives for t in times}))}
    buffers = (Buffer(str(i), ranks[lower], ranks[upper], n) for i, (lower, upper, n) in enumerate(lives))
    return Problem(tuple(buffers), alignment=alignment)


@lru_cache(64)  # equal problems (a layer's, a chunk's of the head) are solved once; without its head, too
def solved(problem: Problem, solver: str, time_limit: float, enough: int) -> Solution:
    return solve(problem, solver, time_limit, enough)


@dataclass
class Levels:
    """Solves problems; `rows`: what each that is another took."""

    alignment: int
    solver: str
    time_limit: float
    rows: dict[tuple[Problem, int], dict] = field(default_factory=dict)

    def bound(self, lives: Lives) -> int:
        return lower_bound(problem_of(lives, self.alignment))

    def solve(self, name: str, lives: Lives, enough: int = 0) -> tuple[list[int], int]:
        """Finds (offsets, peak). `enough`: bytes, a peak that need not be lower."""
        offsets, peak = [0] * len(lives), 0
        enough = max(enough, int(NEAR * self.bound(lives)))
        for group in components((lower, upper) for lower, upper, _ in lives):
            problem = problem_of([lives[i] for i in group], self.alignment)
            many = self.solver == "auto" and len(group) > MOST_SEARCHED
            s = solved(problem, "greedy" if many else self.solver, self.time_limit, enough)
            self.rows.setdefault((problem, enough), dict(
                segment=name, n=len(group), lower_bound=s.lower_bound, peak=s.peak, proven=s.proven,
                solver=s.solver, seconds=s.seconds))
            peak = max(peak, s.peak)
            for i, offset in zip(group, s.offsets, strict=True):
                offsets[i] = offset
        return offsets, peak


def plan_trace(trace: Trace, solver: str = "auto", alignment: int = 1, time_limit: float = 60.0,
               one_level: bool = False) -> Plan:
    """Plans equal segments once, then the step with a pseudo block for each; or all requests at once."""
    start = time.perf_counter()
    requests, spans = requests_of(trace)
    levels = Levels(alignment, solver, time_limit)
    inside: dict[str, list[Request]] = {}
    blocks: list[tuple[list[Request], list[int], tuple[int, int, int]]] = []
    for r in (r for r in requests if r.planned):
        if one_level:
            blocks.append(([r], [0], (r.lower, r.upper, r.bytes)))
        elif r.freed_in == r.segment:
            inside.setdefault(r.segment, []).append(r)
        else:  # to level 2 a segment is one moment: what crosses its border is there throughout
            upper = spans[r.freed_in][1] if r.freed_in else r.upper
            blocks.append(([r], [0], (spans[r.segment][0], upper, r.bytes)))
    lives = {label: [(r.lower, r.upper, r.bytes) for r in its] for label, its in inside.items()}
    # the step needs as much as its largest segment: no other one gains by a lower peak
    enough = max(map(levels.bound, lives.values()), default=0) - levels.bound([life for *_, life in blocks])
    for label, its in inside.items():
        offsets, peak = levels.solve(label, lives[label], enough)
        blocks.append((its, offsets, (*spans[label], peak)))  # the pseudo block
    bases, _ = levels.solve(WHOLE, [life for *_, life in blocks])
    places = {(r.segment, r.k): base + offset for (its, offsets, _), base in zip(blocks, bases, strict=True)
              for r, offset in zip(its, offsets, strict=True)}
    in_order = [places[r.segment, r.k] for r in requests if r.planned]
    return placed(trace, solver, alignment, in_order, [*levels.rows.values()], time.perf_counter() - start)


def placed(trace: Trace, solver: str, alignment: int, offsets: list[int], levels: list[dict],
           seconds: float) -> Plan:
    """Makes the Plan with these offsets of the planned requests. Errors: ValueError, TypeError: overlap."""
    requests, spans = requests_of(trace)
    planned = [r for r in requests if r.planned]
    problem = problem_of([(r.lower, r.upper, r.bytes) for r in planned], alignment)
    peak = max((offset + problem.rounded(i) for i, offset in enumerate(offsets)), default=0)
    solution = Solution(tuple(offsets), peak, lower_bound(problem), solver, seconds)
    validate(problem, solution)
    segments: dict[str, list[tuple[int, int | None]]] = {label: [] for label in spans}
    left = iter(offsets)
    for r in requests:
        segments.setdefault(r.segment, []).append((r.bytes, next(left) if r.planned else None))
    segments.pop(OUTSIDE, None)
    return Plan(peak, solution.lower_bound, alignment, solver, seconds,
                {label: tuple(its) for label, its in segments.items()}, tuple(levels))


def cached_plan(trace: Trace, folder: Path | None, solver: str = "auto", alignment: int = 1) -> Plan:
    """Plans a trace, or reads its plan from `folder`, if any: without one that costs time only."""
    key = hashlib.sha256(f"{trace.text}{solver} {alignment} {PLANNING_S} {solvers.libraries()}".encode())
    # a better solver's plan is another
    for module in (__file__, Path(__file__).with_name("trace.py"), problem.__file__, solvers.__file__):
        key.update(Path(module).read_bytes())
    name = f"plan-{key.hexdigest()[:16]}.json"
    if folder is not None:
        with suppress(Exception):  # not there, or not what was written: whatever it is, it is made again
            plan = placed(trace, solver, alignment, **kept_json(folder, name))
            if plan.arena_bytes <= MOST_ABOVE * plan.lower_bound:
                return plan
    plan = plan_trace(trace, solver, alignment, PLANNING_S)
    offsets = [offset for its in plan.segments.values() for _, offset in its if offset is not None]
    keep_json(dict(offsets=offsets, levels=plan.levels, seconds=plan.seconds), folder, name)
    return plan
