"""The memory plan: from the requests of a training step to an address for each of them.

A Trace is the step's log, `malloc <tensor> <bytes>` and `free <tensor> <bytes>`, with `begin <segment>` and
`end <segment>` around the pieces of the step: the embedding, a layer's forward, the head, a layer's backward,
the optimizer. Level 1 solves each piece by itself, and equal pieces (the layers) once; level 2 puts one
pseudo block in the place of each and solves the whole step. Source: MEMO 4.2 and 4.3.2.

    python -m memo.planner requests.log -o plan.json
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from memo.dsa import problem, solvers
from memo.dsa.problem import Buffer, Problem, Solution, components, lower_bound, solve, validate
from memo.files import keep_json, kept_json, readable_json
from memo.planner.trace import OUTSIDE, WHOLE, Trace, marked

ALIGNMENT = {"cpu": 64, "cuda": 512}  # bytes; what torch's own blocks have
PLANNING_S = 10.0  # of work, for each of a run's problems; what is found by then is used
# What is left to greedy, for CP-SAT would take all that time: a peak of so many lower bounds; and, with
# solver=auto, a problem of more buffers, of which CP-SAT found no better plan (METP's backward: 883 and 3,315
# buffers, peaks 1.4% and 0.3% above the bound).
NEAR, MOST_SEARCHED = 1.001, 500
# the fields of one of Plan.levels
LEVEL = dict(segment=str, n=int, lower_bound=int, peak=int, proven=bool, solver=str, seconds=float)
# An arena from the cache may take so many lower bounds: a damaged file could name any size. A plan of the
# solvers is at its bound or a few percent above (bench/planner.py); one beyond is made anew at every start.
MOST_ABOVE = 2
Lives = list[tuple[int, int, int]]  # (lower, upper, bytes) of each buffer


@dataclass(frozen=True)
class Plan:
    """Where each request of each segment gets its memory: request k of `segments[label]` is (bytes, offset in
    the arena), the offset None where it is left to torch. `lower_bound` is the greatest sum of bytes in use
    at one time; `levels` tells what was solved: [{segment, n, lower_bound, peak, proven, solver, seconds}].
    """

    arena_bytes: int
    lower_bound: int
    alignment: int
    solver: str
    seconds: float
    segments: dict
    levels: tuple

    @property
    def proven(self) -> bool:
        """Whether no plan of the whole step can be smaller."""
        return self.arena_bytes == self.lower_bound

    def __hash__(self) -> int:
        return hash(readable_json(asdict(self)))

    @classmethod
    def of(cls, stored: dict) -> "Plan":
        """Make the Plan whose fields JSON has kept."""
        segments = {label: tuple(map(tuple, its)) for label, its in stored["segments"].items()}
        return cls(**stored | dict(segments=segments, levels=tuple(stored["levels"])))


@dataclass
class Request:
    """One tensor to plan: request k of a segment, alive from event `lower` of the trace to `upper`.
    `freed_in`: the segment that frees it; OUTSIDE where none does."""

    segment: str
    k: int
    bytes: int
    lower: int
    upper: int
    freed_in: str = OUTSIDE


def requests_of(trace: Trace) -> tuple[list[Request], dict[str, list[int]], dict[str, tuple[int, int]]]:
    """([Request], {segment: [bytes of all its requests]}, {segment: (lower, upper)})."""
    requests: list[Request] = []
    live: dict[str, Request] = {}
    sizes: dict[str, list[int]] = {}
    spans: dict[str, tuple[int, int]] = {}
    segment = OUTSIDE
    for now, (verb, name, nbytes) in enumerate(trace.events):
        if verb == "begin":
            segment, sizes[name], spans[name] = name, [], (now, now)
        elif verb == "end":
            spans[segment], segment = (spans[segment][0], now + 1), OUTSIDE
        elif verb == "free" and name in live:
            live[name].upper, live.pop(name).freed_in = now, segment
        elif segment != OUTSIDE and verb in ("malloc", "keep"):
            if verb == "malloc":
                live[name] = Request(segment, len(sizes[segment]), nbytes, now, len(trace.events))
                requests.append(live[name])
            sizes[segment].append(nbytes)
    return requests, sizes, spans


class Levels:
    """Solves what it is given, equal problems once (a layer's, or a chunk's of the head), and remembers what
    it took."""

    def __init__(self, alignment: int, solver: str, time_limit: float) -> None:
        self.alignment, self.how = alignment, (solver, time_limit)
        self.solutions: dict[tuple[Problem, int], Solution] = {}
        self.rows: list[dict] = []

    def problem(self, lives: Lives) -> Problem:
        """The Problem of [(lower, upper, bytes)], the times replaced by their ranks."""
        times = sorted({t for lower, upper, _ in lives for t in (lower, upper)})
        ranks = {t: rank for rank, t in enumerate(times)}
        buffers = (Buffer(str(i), ranks[lower], ranks[upper], n) for i, (lower, upper, n) in enumerate(lives))
        return Problem(tuple(buffers), alignment=self.alignment)

    def bound(self, lives: Lives) -> int:
        return lower_bound(self.problem(lives))

    def solve(self, name: str, lives: Lives, enough: int = 0) -> tuple[list[int], int]:
        """(offsets, peak). `enough`: bytes, a peak that need not be lower."""
        offsets, peak = [0] * len(lives), 0
        enough = max(enough, int(NEAR * self.bound(lives)))
        for group in components((lower, upper) for lower, upper, _ in lives):
            solution = self.solution(name, self.problem([lives[i] for i in group]), enough)
            peak = max(peak, solution.peak)
            for i, offset in zip(group, solution.offsets, strict=True):
                offsets[i] = offset
        return offsets, peak

    def solution(self, name: str, problem: Problem, enough: int) -> Solution:
        key = problem, enough
        if key not in self.solutions:
            solver, time_limit = self.how
            if solver == "auto" and len(problem.buffers) > MOST_SEARCHED:
                solver = "greedy"
            s = self.solutions[key] = solved(problem, solver, time_limit, enough)
            self.rows.append(dict(segment=name, n=len(problem.buffers), lower_bound=s.lower_bound,
                                  peak=s.peak, proven=s.proven, solver=s.solver, seconds=s.seconds))
        return self.solutions[key]


@lru_cache(64)  # the layers of a step are planned without its head, too
def solved(problem: Problem, solver: str, time_limit: float, enough: int) -> Solution:
    return solve(problem, solver, time_limit, enough)


def compose(trace: Trace, solver: str, alignment: int, time_limit: float, by_segment: bool) -> Plan:
    """The validated Plan of a trace, in two levels or in one."""
    start = time.perf_counter()
    requests, sizes, spans = requests_of(marked(trace))
    levels = Levels(alignment, solver, time_limit)
    inside: dict[str, list[Request]] = {}
    lives: dict[str, Lives] = {}
    blocks: list[tuple[list[Request], list[int], tuple[int, int, int]]] = []
    for r in requests:
        if by_segment and r.freed_in == r.segment:
            inside.setdefault(r.segment, []).append(r)
            lives.setdefault(r.segment, []).append((r.lower, r.upper, r.bytes))
        elif by_segment:  # to level 2 a segment is one moment: what crosses its border is there throughout
            upper = spans[r.freed_in][1] if r.freed_in else r.upper
            blocks.append(([r], [0], (spans[r.segment][0], upper, r.bytes)))
        else:
            blocks.append(([r], [0], (r.lower, r.upper, r.bytes)))
    # the step needs as much as its largest segment: no other one gains by a lower peak
    enough = max(map(levels.bound, lives.values()), default=0) - levels.bound([life for *_, life in blocks])
    for label, mine in inside.items():
        offsets, peak = levels.solve(label, lives[label], enough)
        blocks.append((mine, offsets, (*spans[label], peak)))  # the pseudo block
    bases, arena_bytes = levels.solve(WHOLE, [life for *_, life in blocks])
    places: dict[str, list] = {label: [(n, None) for n in nbytes] for label, nbytes in sizes.items()}
    for (mine, offsets, _), base in zip(blocks, bases, strict=True):
        for r, offset in zip(mine, offsets, strict=True):
            places[r.segment][r.k] = (r.bytes, base + offset)
    bound = levels.bound([(r.lower, r.upper, r.bytes) for r in requests])
    segments = {label: tuple(its) for label, its in places.items()}
    seconds = time.perf_counter() - start
    plan = Plan(arena_bytes, bound, alignment, solver, seconds, segments, tuple(levels.rows))
    validate_plan(trace, plan)
    return plan


def validate_plan(trace: Trace, plan: Plan) -> None:
    """Raises ValueError where `plan` is not one of `trace`: other segments or requests, tensors that overlap,
    a place for what is left to torch, another lower bound."""
    requests, sizes, _ = requests_of(marked(trace))
    if {label: [n for n, _ in segment] for label, segment in plan.segments.items()} != sizes:
        raise ValueError("the plan's requests are not the trace's")
    places = {(label, k) for label, segment in plan.segments.items()
              for k, (_, offset) in enumerate(segment) if offset is not None}
    if places != {(r.segment, r.k) for r in requests}:
        raise ValueError("the plan has places for other requests")
    levels = Levels(plan.alignment, plan.solver, 0.0)
    problem = levels.problem([(r.lower, r.upper, r.bytes) for r in requests])
    offsets = tuple(plan.segments[r.segment][r.k][1] for r in requests)
    if plan.lower_bound != lower_bound(problem):
        raise ValueError("the plan's lower bound is not the trace's")
    validate(problem, Solution(offsets, plan.arena_bytes, plan.lower_bound, plan.solver, plan.seconds))


def bilevel(trace: Trace, solver: str = "auto", alignment: int = 1, time_limit: float = 60.0) -> Plan:
    """The Plan of a trace in two levels: equal segments are solved once, then the step with a pseudo block
    for each. Source: MEMO 4.2."""
    return compose(trace, solver, alignment, time_limit, by_segment=True)


def one_level(trace: Trace, solver: str = "auto", alignment: int = 1, time_limit: float = 60.0) -> Plan:
    """The Plan of a trace, all its requests solved at once."""
    return compose(trace, solver, alignment, time_limit, by_segment=False)


def cached_plan(trace: Trace, folder: Path | None, solver: str = "auto", alignment: int = 1) -> Plan:
    """The bilevel Plan of a trace, from `folder` where it was made before; a folder that cannot be used, or
    None, costs time only."""
    key = hashlib.sha256(f"{trace.text}{solver} {alignment} {PLANNING_S} {solvers.libraries()}".encode())
    # a better solver's plan is another
    sources = (problem.__file__, solvers.__file__)
    for module in (__file__, Path(__file__).with_name("trace.py"), *sources):
        key.update(Path(module).read_bytes())
    name = f"plan-{key.hexdigest()[:16]}.json"
    if folder is not None:
        with suppress(Exception):  # not there, or not what was written: whatever it is, it is made again
            return believed_plan(Plan.of(kept_json(folder, name)), trace, solver, alignment)
    plan = bilevel(trace, solver, alignment, PLANNING_S)
    keep_json(asdict(plan), folder, name)
    return plan


def believed_plan(plan: Plan, trace: Trace, solver: str, alignment: int) -> Plan:
    """`plan`, from a file. Raises what it may where it is not one that was asked for."""
    kinds = [type(getattr(plan, f.name)) is f.type for f in fields(plan)]
    kinds += [type(n) is int for segment in plan.segments.values() for n, _ in segment]
    kinds += [{name: type(value) for name, value in row.items()} == LEVEL for row in plan.levels]
    if not all(kinds) or (plan.solver, plan.alignment) != (solver, alignment):
        raise ValueError("it is not the plan that was asked for")
    if plan.arena_bytes > MOST_ABOVE * plan.lower_bound:
        raise ValueError("its arena is too large")
    validate_plan(trace, plan)
    return plan

