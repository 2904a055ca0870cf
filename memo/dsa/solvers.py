"""The solvers of one placement problem: greedy, the paper's mixed-integer program, CP-SAT, and CP-SAT on
blocks.

All see a Part, in which time is reduced to ranks and bytes to units without loss. A solver is a function of
the part, `best` (the offsets to beat), `stop` (the peak at which to stop), `highest` (the highest peak that
is still of use) and its seconds. It returns (offsets or None, a proven lower bound of the peak, seconds that
it took). The bound says nothing up to `stop`, since no solver looks for a lower peak. problem.validate checks
what a solver returns. Source: MEMO 4.2.

Seconds are of work: steps are counted, each for what it takes on a core of the machine at hand when this was
written, and no clock is read. One thread does all. So a result is the same on every machine, however busy.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from itertools import accumulate
from math import ceil, inf, isfinite
from typing import Any, Protocol

import numpy as np

from memo.dsa.gaps import Gaps

# Of each turn of coarse(): to how many blocks buffers are joined, as a fraction of their number, and the most
# area that joining two may waste, as a fraction of the two.
TURNS = ((0, 0.01), (0.3, inf), (0.2, inf), (0.45, inf))
FEW, MANY = 30, 1500  # buffers: with fewer CP-SAT needs no blocks, with more the joining takes too long
# buffers: with more, the quick in_order() comes first, and CP-SAT is left out: it would find nothing
LARGE = 10_000
MOST_PAIRS = 200_000  # of conflicting buffers that a MIP solver gets: two rows of the matrix for each
# of the MIP solvers, the least they accept: a binary this far from 0 lets buffers overlap by M times this
TOLERANCE = 1e-9
BRIEFLY = 20  # one part in so many of the time limit: briefly()'s, and the first turn of coarse()
COARSE_SHARE = 0.7  # of the time limit: all turns of coarse(); CP-SAT on the whole has the rest
LONGER = 1.25  # each turn of coarse() lasts so many times the one before

# seconds: of a buffer in an ordering of greedy(), and of each one placed before; of blocks, by n^3
PLACED_S, BEFORE_S, JOINED_S = 16e-6, 3e-10, 1e-9
# seconds of a unit of CP-SAT's deterministic time, and more for each buffer: 11 to 43 were measured with 500
# buffers, 46 to 135 with 9,500
UNIT_S, UNIT_BUFFER_S = 20, 1 / 150
# seconds of HiGHS for each pair, and pair of pairs: of the first node, which nothing else bounds; of others
ROOT_S, ROOT_PAIRS_S, NODE_S = 4e-3, 9e-6, 1.2e-5

Found = tuple[list[int] | None, int, float]  # what a solver returns
# what a MIP solver returns: values, an array or a list, or None; bound; seconds
Relaxed = tuple[Any, float, float]


@dataclass(frozen=True)
class Part:
    """Buffers of one stretch of time: tuples of half-open lifespans [lower, upper) in ranks, and of sizes in
    units.

    Rank t is the t-th of the greatest sets of buffers that are alive together: buffers conflict where they
    share a rank.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def load(self) -> int:
        """The most units alive at one time."""
        steps = [0] * (max(self.upper) + 1)
        for lower, upper, size in zip(self.lower, self.upper, self.size, strict=True):
            steps[lower] += size
            steps[upper] -= size
        return max(accumulate(steps))

    def peak(self, offsets: list[int]) -> int:
        return max(map(sum, zip(offsets, self.size, strict=True)))

    def n_pairs(self) -> int:
        """How many pairs of buffers conflict."""
        lower, upper = np.sort(self.lower), np.sort(self.upper)
        return int((np.searchsorted(lower, upper) - np.arange(1, len(upper) + 1)).sum())

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(i, j): arrays of the conflicting buffers, i < j."""
        lower, upper = np.array(self.lower), np.array(self.upper)
        later: list[np.ndarray] = [
            i + 1 + np.flatnonzero((lower[i + 1:] < upper[i]) & (upper[i + 1:] > lower[i]))
            for i in range(len(lower))]
        return np.repeat(np.arange(len(lower)), [len(j) for j in later]), np.concatenate(later)


def part_of(lower: Sequence[int], upper: Sequence[int], size: Sequence[int]) -> Part:
    """A Part of lifespans in any unit of time."""
    born, died, ranks, sets, grew = set(lower), set(upper), {}, 0, False
    for t in sorted(born | died):  # a set is a greatest one when the next thing that happens is a death
        if t in died and grew:
            sets, grew = sets + 1, False
        ranks[t] = sets
        grew |= t in born
    first, last = (tuple(map(ranks.__getitem__, times)) for times in (lower, upper))
    return Part(first, last, tuple(size))


def greedy(part: Part, stop: int, seconds: float = inf) -> tuple[list[int], float]:
    """(offsets, seconds that it took): the best of several orderings of best fit: each buffer into the lowest
    of the tightest gaps that take it. Orderings for which there are no `seconds` are left out; where there
    are none for any, the result is in_order()."""
    if len(part.size) == 1:
        return [0], 0.0
    n, took = len(part.size), 0.0
    each = n * (PLACED_S + BEFORE_S * n)
    size, lower, upper = (np.array(v, dtype=np.int64) for v in (part.size, part.lower, part.upper))
    span, best = upper - lower, in_order(part) if len(part.size) > LARGE else None
    area = -size * (span if int(size.max()) * int(span.max()) < 2**63 else span.astype(float))
    keys = [(-size,), (area,), (-span, -size), (lower, -size), (upper, -size), (-upper, -size)]
    for key in keys:
        if (best is not None and part.peak(best) <= stop) or took + each > seconds:
            break
        offsets = _best_fit(lower, upper, size, np.lexsort((lower, *reversed(key))))
        took += each
        if best is None or part.peak(offsets) < part.peak(best):
            best = offsets
    return in_order(part) if best is None else best, took


def _best_fit(lower: np.ndarray, upper: np.ndarray, size: np.ndarray, order: np.ndarray) -> list[int]:
    sky, offsets = np.iinfo(np.int64).max, [0] * len(order)
    # the placed buffers, the lowest first: lower, upper, offset, end
    table: np.ndarray = np.empty((4, len(order)), dtype=np.int64)
    for k, i in enumerate(order):
        born, died, bottom, top = table[:, :k]
        near = (born < upper[i]) & (died > lower[i])
        # where the gap below each near buffer begins, and the one above them all
        floor = np.maximum.accumulate(np.append(0, top[near]))
        gap = np.append(bottom[near], sky) - floor
        gap[gap < size[i]] = sky
        at = int(floor[gap.argmin()])
        place = np.searchsorted(bottom, at)
        table[:, place + 1:k + 1] = table[:, place:k].copy()
        table[:, place] = lower[i], upper[i], at, at + size[i]
        offsets[i] = at
    return offsets


def in_order(part: Part) -> list[int]:
    """Offsets as an allocator gives them, in order of time: each buffer takes the tightest gap that holds it.
    Seconds for a million buffers."""
    gaps, offsets, gone = Gaps(), [0] * len(part.size), 0
    dying = sorted(range(len(part.size)), key=part.upper.__getitem__)
    for i in sorted(range(len(part.size)), key=part.lower.__getitem__):
        while part.upper[dying[gone]] <= part.lower[i]:
            gaps.give(offsets[dying[gone]], part.size[dying[gone]])
            gone += 1
        offsets[i] = gaps.take(part.size[i])
    return offsets


def cpsat(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """CP-SAT: the rectangles of lifespan by size do not overlap in the plane of time and address."""
    if len(part.size) > LARGE:
        return None, 0, 0.0
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return lacking("ortools")
    model = cp_model.CpModel()
    offsets = [model.new_int_var(0, highest - size, "") for size in part.size]
    columns = [model.new_fixed_size_interval_var(lower, upper - lower, "")
               for lower, upper in zip(part.lower, part.upper, strict=True)]
    rows = [model.new_fixed_size_interval_var(*row, "") for row in zip(offsets, part.size, strict=True)]
    model.add_no_overlap_2d(columns, rows)
    floor = 0
    twins: dict[tuple, cp_model.IntVar] = {}
    for offset, kind in zip(offsets, zip(part.lower, part.upper, part.size, strict=True), strict=True):
        if kind[:2] == (0, max(part.upper)):  # alive all the time: may as well lie at the bottom
            model.add(offset == floor)
            floor += kind[2]
        elif kind in twins:  # of two alike either may lie above
            model.add(offset >= twins[kind] + kind[2])
        twins[kind] = offset
    if stop < highest:
        peak = model.new_int_var(max(stop, part.load), highest, "")
        for offset, size in zip(offsets, part.size, strict=True):
            model.add(offset + size <= peak)
        model.minimize(peak)
    solver, unit_s = cp_model.CpSolver(), UNIT_S + UNIT_BUFFER_S * len(part.size)
    solver.parameters.max_deterministic_time = seconds / unit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    took = unit_s * solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return None, highest + 1, took
    found = [solver.value(o) for o in offsets] if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, ceil(solver.best_objective_bound - TOLERANCE) if stop < highest else 0, took


def briefly(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """CP-SAT usually succeeds early: it gets 5% of the time first."""
    return cpsat(part, best, stop, highest, seconds / BRIEFLY)


def coarse(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """CP-SAT on coarser problems, whose rectangles are blocks of buffers: turn by turn other blocks, and
    longer.

    The requests of a network come in stacks and rows. Most good placements keep some of these together, and
    there are far fewer blocks than buffers.
    """
    left, n, offsets = COARSE_SHARE * seconds, len(part.size), None
    for turn in range(3 * len(TURNS) if FEW <= n <= MANY else 0):
        fraction, waste = TURNS[turn % len(TURNS)]
        left -= JOINED_S * n**3
        slot = min(left, seconds / BRIEFLY * LONGER**turn)
        if slot <= 0 or highest < stop:
            break
        blocks = _blocks(part, stop, int(n * fraction), waste, turn)
        lower, upper, size, _ = zip(*blocks, strict=True)
        found, _, took = cpsat(part_of(lower, upper, size), [], stop, highest, slot)
        left -= took
        if found is not None:
            offsets = [0] * n
            for at, (*_, members) in zip(found, blocks, strict=True):
                for i, shift in members:
                    offsets[i] = at + shift
            highest = part.peak(offsets) - 1
    return offsets, 0, COARSE_SHARE * seconds - left


def _blocks(part: Part, ceiling: int, count: int, most_waste: float,
            seed: int) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    """[(lower, upper, size, [(buffer, its offset in the block)])]: about `count` blocks whose load is within
    the ceiling.

    The pair that wastes the smallest part of its area is joined first: one upon the other where their
    lifespans meet, else one after the other at the same address. Seed 0 is exact; other seeds add noise.
    """
    n, noise = len(part.size), np.random.default_rng(seed)
    lower, upper, size = (np.array(v) for v in (part.lower, part.upper, part.size))
    there: np.ndarray = np.ones(n, bool)
    load, members = np.zeros(upper.max(), int), [[(i, 0)] for i in range(n)]
    for i in range(n):
        load[lower[i]:upper[i]] += size[i]

    def joined(i: int, j: int | slice) -> tuple:
        meet = (lower[i] < upper[j]) & (lower[j] < upper[i])
        return (np.minimum(lower[i], lower[j]), np.maximum(upper[i], upper[j]),
                np.where(meet, size[i] + size[j], np.maximum(size[i], size[j])), meet)

    def waste(i: int) -> np.ndarray:
        start, end, height, meet = joined(i, slice(None))
        area = (upper - lower) * size + (upper[i] - lower[i]) * size[i]
        cost = ((end - start) * height / area - 1) * np.exp(noise.normal(0, 0.5 * bool(seed), n))
        cost += np.where(meet, 0, 1e-3)  # where two pairs waste alike, a stack comes before a row
        return np.where(there & (np.arange(n) != i), cost, inf)

    cost, failed = np.stack([waste(i) for i in range(n)]), 0
    while there.sum() > count and failed < 10 * n:
        i, j = divmod(int(cost.argmin()), n)
        if cost[i, j] > most_waste or cost[i, j] == inf:
            break
        start, end, height, meet = joined(i, j)
        trial = load.copy()
        trial[lower[i]:upper[i]] -= size[i]
        trial[lower[j]:upper[j]] -= size[j]
        trial[start:end] += height
        if trial.max() > ceiling:  # this pair stays too much: loads only rise
            cost[i, j] = cost[j, i] = inf
            failed += 1
            continue
        load, there[j] = trial, False
        members[i] += [(k, shift + meet * size[i]) for k, shift in members[j]]
        lower[i], upper[i], size[i] = start, end, height
        cost[j], cost[:, j] = inf, inf
        cost[i] = cost[:, i] = waste(i)
    return [(int(lower[i]), int(upper[i]), int(size[i]), [(k, int(shift)) for k, shift in members[i]])
            for i in np.flatnonzero(there)]


def mip(part: Part, best: list[int], stop: int, highest: int, seconds: float,
        program_solver: Callable[..., Relaxed] | None = None) -> Found:
    """The paper's program, solved by HiGHS or another. z_ij says that i lies above j, of a conflicting pair;
    M is the peak of the placement to beat.

    A_i + S_i <= A_j + z_ij*M,  A_j + S_j <= A_i + (1 - z_ij)*M,  A_i + S_i <= peak <= M.  Source: MEMO 4.2.
    """
    if program_solver is None and importlib.util.find_spec("highspy") is None:
        return lacking("highspy")
    from scipy.sparse import csr_matrix

    n, pairs, M, size = len(part.size), part.n_pairs(), part.peak(best), np.array(part.size)
    if pairs > MOST_PAIRS:
        return None, 0, 0.0
    i, j = part.pairs()
    k, a, one = np.arange(pairs), np.arange(n), np.ones(pairs)
    z: np.ndarray = n + 1 + k  # the columns are A_0 .. A_n-1, peak, z
    rows = np.concatenate((k, k, k, pairs + k, pairs + k, pairs + k, 2 * pairs + a, 2 * pairs + a))
    columns = np.concatenate((i, j, z, j, i, z, a, np.full(n, n)))
    values = np.concatenate((one, -one, -M * one, one, -one, M * one, np.ones(n), -np.ones(n)))
    program = dict(matrix=csr_matrix((values, (rows, columns))),
                   most=np.concatenate((-size[i], M - size[j], -size)),
                   lower=np.concatenate((np.zeros(n), [max(stop, part.load)], 0 * one)),
                   upper=np.concatenate((M - size, [M], one)),
                   first=np.concatenate((best, [M], np.take(best, i) > np.take(best, j))))
    program = {name: array.astype(float) for name, array in program.items()}
    found, bound, took = (program_solver or _highs)(n, stop, seconds, **program)
    # an infinite bound: nothing is proven yet, or the solver says "infeasible", which is wrong: `best` exists
    trusted = M * TOLERANCE < 1e-3 and isfinite(bound)
    proven = min(M, ceil(bound - 1e-3)) if trusted else 0
    return None if found is None else _dropped(part, i, j, found), proven, took


def gurobi(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """The paper's program, solved by Gurobi, whose licence is the user's: only where it is asked for."""
    def solve(*given: Any, **program: Any) -> Relaxed:
        return _gurobi(*given, **program) or _highs(*given, **program)
    return mip(part, best, stop, highest, seconds, solve)


def _dropped(part: Part, i: np.ndarray, j: np.ndarray, values: Sequence[float]) -> list[int]:
    """Whole offsets in the order of the solver's, each as low as the order allows: rounding the solver's
    own could make buffers overlap."""
    below: list[list[int]] = [[] for _ in part.size]
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        low, high = (a, b) if (values[a], a) <= (values[b], b) else (b, a)
        below[high].append(low)
    offsets = [0] * len(part.size)
    for a in sorted(range(len(offsets)), key=lambda a: (values[a], a)):
        offsets[a] = max((offsets[b] + part.size[b] for b in below[a]), default=0)
    return offsets


class Matrix(Protocol):
    """Names what is read of a csr_matrix, whose module takes long to import."""

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def _highs(n: int, stop: int, seconds: float, matrix: Matrix, most: np.ndarray, lower: np.ndarray,
           upper: np.ndarray, first: np.ndarray) -> Relaxed:
    """(values or None, bound, seconds): the least column n, where matrix @ values <= most and the columns
    after n are 0 or 1. Nothing where there are not the seconds for the first node."""
    import highspy

    pairs = len(lower) - n - 1
    root_s = pairs * (ROOT_S + ROOT_PAIRS_S * pairs)
    nodes = int((seconds - root_s) / (NODE_S * pairs))
    if nodes < 1:
        return None, -inf, 0.0
    lp, solver, start = highspy.HighsLp(), highspy.Highs(), highspy.HighsSolution()
    columns = np.arange(len(lower))
    lp.num_row_, lp.num_col_, lp.col_cost_ = len(most), len(lower), (columns == n).astype(float)
    lp.col_lower_, lp.col_upper_ = lower, upper
    lp.row_lower_, lp.row_upper_ = np.full(len(most), -highspy.kHighsInf), most
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    lp.integrality_ = [whole if c > n else real for c in columns]
    options = dict(output_flag=False, threads=1, mip_max_nodes=nodes, objective_target=float(stop),
                   mip_rel_gap=0.0, mip_feasibility_tolerance=TOLERANCE,
                   primal_feasibility_tolerance=TOLERANCE)
    for option, value in options.items():
        solver.setOptionValue(option, value)
    solver.passModel(lp)
    start.col_value = first.tolist()
    solver.setSolution(start)
    solver.run()
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    took = root_s + max(0, info.mip_node_count) * NODE_S * pairs
    return solver.getSolution().col_value if found else None, info.mip_dual_bound, took


def _gurobi(n: int, stop: int, seconds: float, matrix: Matrix, most: np.ndarray, lower: np.ndarray,
            upper: np.ndarray, first: np.ndarray) -> Relaxed | None:
    """As _highs, on Gurobi; None where it is not installed or its licence does not let it."""
    if importlib.util.find_spec("gurobipy") is None:
        _say("gurobi: gurobipy is not installed; going on with HiGHS")
        return None
    import gurobipy

    settings = dict(WorkLimit=seconds, Threads=1, BestObjStop=float(stop), MIPGap=0.0, IntFeasTol=TOLERANCE,
                    FeasibilityTol=TOLERANCE)
    try:
        with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as model:
            columns = np.arange(len(lower))
            kinds = np.where(columns > n, "B", "C")  # binary, continuous
            x = model.addMVar(len(lower), lower, upper, (columns == n).astype(float), kinds)
            model.addMConstr(matrix, x, "<", most)  # type: ignore[call-overload]  # its types lack sparse ones
            x.setAttr("Start", first)
            for name, value in settings.items():
                model.setParam(name, value)
            model.optimize()
            return x.X if model.SolCount else None, model.ObjBound, model.Work
    except gurobipy.GurobiError as error:
        _say(f"gurobi: {error}; going on with HiGHS")
        return None


@cache
def libraries() -> tuple[str, ...]:
    """The solvers that are installed, with their versions: others may find other placements."""
    names = "ortools", "highspy", "gurobipy"
    return tuple(f"{name} {found.version}" for name in names for found in distributions(name=name))


def lacking(package: str) -> Found:
    """Say once that a solver's package is not there: what others have found stays."""
    _say(f"{package} is not installed, it would look for better placements; try pip install {package}")
    return None, 0, 0.0


@cache
def _say(line: str) -> None:
    """A line on stderr, once a process."""
    print(line, file=sys.stderr)


# {solver: what it tries in turns, after greedy}
METHODS = {"greedy": (), "mip": (mip,), "cpsat": (cpsat,), "gurobi": (gurobi,),
           "auto": (briefly, coarse, cpsat)}


