"""The solvers of a placement problem: greedy, the paper's mixed-integer program, CP-SAT, CP-SAT on blocks.

A solver is a function of a Part, `best` (the offsets to beat), `stop` (the peak at which to stop), `highest`
(the highest peak that is still of use) and its seconds. It returns (offsets or None, a proven lower bound of
the peak, which says nothing up to `stop`, seconds that it took). Seconds are of work: steps of one thread are
counted, no clock is read: a result is the same on every machine, however busy. Source: MEMO 4.2."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from itertools import accumulate
from math import ceil, inf, isfinite

import numpy as np

# of each turn of coarse(): the number of blocks as a fraction of buffers; how much area joining two may waste
TURNS = ((0, 0.01), (0.3, inf), (0.2, inf), (0.45, inf))
FEW, MANY = 30, 1500  # buffers: with fewer CP-SAT needs no blocks, with more the joining takes too long
LARGE = 10_000  # buffers: with more only greedy looks for a placement, the others would find nothing
MOST_PAIRS = 200_000  # of conflicting buffers that a MIP solver gets: two rows of the matrix for each
# of the MIP solvers, the least they accept: a binary this far from 0 lets buffers overlap by M times this
TOLERANCE = 1e-9
BRIEFLY = 20  # one part in so many of the time limit: a first try, which often works; coarse()'s first turn
COARSE_SHARE = 0.7  # of the time limit: all turns of coarse(); CP-SAT on the whole has the rest
LONGER = 1.25  # each turn of coarse() lasts so many times the one before

# seconds: of a buffer in an ordering of greedy(), and of each one placed before; of blocks, by n^3
PLACED_S, BEFORE_S, JOINED_S = 16e-6, 3e-10, 1e-9
# seconds of CP-SAT's deterministic unit, and for each buffer: measured 11 to 43 with 500, 46 to 135 with 9500
UNIT_S, UNIT_BUFFER_S = 20, 1 / 150
# seconds of HiGHS for each pair, and pair of pairs: of the first node, which nothing else bounds; of others
ROOT_S, ROOT_PAIRS_S, NODE_S = 4e-3, 9e-6, 1.2e-5

Found = tuple[list[int] | None, int, float]  # what a solver returns
Relaxed = tuple[np.ndarray | None, float, float]  # what a MIP solver returns: offsets, bound, seconds


@dataclass(frozen=True)
class Part:
    """Holds buffers of one stretch of time."""

    lower: tuple[int, ...]  # of half-open lifespans; t: the t-th in time of the greatest sets alive together
    upper: tuple[int, ...]
    size: tuple[int, ...]  # in units

    @property
    def load(self) -> int:
        """Finds the most units alive at one time."""
        steps = [0] * (max(self.upper) + 1)
        for lower, upper, size in zip(self.lower, self.upper, self.size, strict=True):
            steps[lower] += size
            steps[upper] -= size
        return max(accumulate(steps))

    def peak(self, offsets: list[int]) -> int:
        return max(map(sum, zip(offsets, self.size, strict=True)))


def part_of(lower: Sequence[int], upper: Sequence[int], size: Sequence[int]) -> Part:
    """Makes a Part of lifespans in any unit of time."""
    born, died, ranks, sets, grew = set(lower), set(upper), {}, 0, False
    for t in sorted(born | died):  # a set is a greatest one when the next thing that happens is a death
        if t in died and grew:
            sets, grew = sets + 1, False
        ranks[t] = sets
        grew |= t in born
    first, last = (tuple(map(ranks.__getitem__, times)) for times in (lower, upper))
    return Part(first, last, tuple(size))


def greedy(part: Part, stop: int, seconds: float = inf) -> tuple[list[int], float]:
    """Finds (offsets, seconds taken) by best fit, into the lowest of the tightest gaps, in several orders."""
    if len(part.size) == 1:
        return [0], 0.0
    n, took = len(part.size), 0.0
    best: list[int] = []
    each = n * (PLACED_S + BEFORE_S * n)
    size, lower, upper = (np.array(v, dtype=np.int64) for v in (part.size, part.lower, part.upper))
    span = upper - lower
    area = -size * (span if int(size.max()) * int(span.max()) < 2**63 else span.astype(float))
    for key in ((-size,), (area,), (-span, -size), (lower, -size), (upper, -size), (-upper, -size)):
        if best and (part.peak(best) <= stop or took + each > seconds):
            break
        offsets = _best_fit(lower, upper, size, np.lexsort((lower, *reversed(key))))
        took += each
        if not best or part.peak(offsets) < part.peak(best):
            best = offsets
    return best, took


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


def cpsat(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """Solves by CP-SAT: rectangles of lifespan by size do not overlap in the plane of time and address."""
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
    values = [solver.value(o) for o in offsets] if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return values, ceil(solver.best_objective_bound - TOLERANCE) if stop < highest else 0, took


def coarse(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """Solves by CP-SAT for blocks of buffers, in turns: good placements keep stacks and rows together."""
    left, n, offsets = COARSE_SHARE * seconds, len(part.size), None
    for turn in range(3 * len(TURNS) if FEW <= n <= MANY else 0):
        fraction, waste = TURNS[turn % len(TURNS)]
        left -= JOINED_S * n**3
        slot = min(left, seconds / BRIEFLY * LONGER**turn)
        if slot <= 0 or highest < stop:
            break
        blocks = _blocks(part, stop, int(n * fraction), waste, turn)
        lower, upper, size, _ = zip(*blocks, strict=True)
        places, _, took = cpsat(part_of(lower, upper, size), [], stop, highest, slot)
        left -= took
        if places is not None:
            offsets = [0] * n
            for at, (*_, members) in zip(places, blocks, strict=True):
                for i, shift in members:
                    offsets[i] = at + shift
            highest = part.peak(offsets) - 1
    return offsets, 0, COARSE_SHARE * seconds - left


def _blocks(part: Part, ceiling: int, count: int, most_waste: float,
            seed: int) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    """Joins buffers to about `count` blocks, whose load is within the ceiling: [(lower, upper, size,
    [(buffer, its offset in the block)])]. First the pair that wastes least of its area: one upon the other
    where lifespans meet, else one after the other at the same address. Seeds above 0 add noise."""
    n, noise = len(part.size), np.random.default_rng(seed)
    lower, upper, size = (np.array(v) for v in (part.lower, part.upper, part.size))
    left: np.ndarray = np.ones(n, bool)
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
        return np.where(left & (np.arange(n) != i), cost, inf)

    cost, failed = np.stack([waste(i) for i in range(n)]), 0
    while left.sum() > count and failed < 10 * n:
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
        load, left[j] = trial, False
        members[i] += [(k, shift + meet * size[i]) for k, shift in members[j]]
        lower[i], upper[i], size[i] = start, end, height
        cost[j], cost[:, j] = inf, inf
        cost[i] = cost[:, i] = waste(i)
    return [(int(lower[i]), int(upper[i]), int(size[i]), [(k, int(shift)) for k, shift in members[i]])
            for i in np.flatnonzero(left)]


def mip(part: Part, best: list[int], stop: int, highest: int, seconds: float, gurobi: bool = False) -> Found:
    """Solves the paper's mixed-integer program by HiGHS, or by Gurobi: offsets `at` of the least peak at
    which buffers i[k] and j[k], alive together, do not overlap; z[k] is 1 where i[k] lies above j[k], or 0.

    at_i + size_i <= at_j + M*z,  at_j + size_j <= at_i + M*(1 - z),  at + size <= peak,  least <= peak <= M.

    M is the peak of `best`, which are a solution. A peak of `stop` is good enough. Source: MEMO 4.2."""
    born, died, M = np.array(part.lower), np.array(part.upper), part.peak(best)
    i, j = np.nonzero(np.triu((born[:, None] < died) & (born < died[:, None]), 1))
    if len(i) > MOST_PAIRS:
        return None, 0, 0.0
    values, bound, took = (_gurobi if gurobi else _highs)(
        np.array(part.size, float), i, j, float(M), float(max(stop, part.load)), np.array(best, float),
        float(stop), seconds)
    # an infinite bound: nothing is proven yet, or the solver says "infeasible", which is wrong: `best` exists
    trusted = M * TOLERANCE < 1e-3 and isfinite(bound)
    proven = min(M, ceil(bound - 1e-3)) if trusted else 0
    if values is None:
        return None, proven, took
    # in the solver's order each falls to a whole number, maybe lower: rounded ones could overlap
    return _best_fit(born, died, np.array(part.size), np.argsort(values, kind="stable")), proven, took


def _highs(size: np.ndarray, i: np.ndarray, j: np.ndarray, M: float, least: float, best: np.ndarray,
           stop: float, seconds: float) -> Relaxed:
    """Solves mip()'s program by HiGHS. Nothing comes of it without the seconds for the first node."""
    try:
        import highspy
    except ImportError:
        return lacking("highspy")
    pairs = len(i)
    root_s = pairs * (ROOT_S + ROOT_PAIRS_S * pairs)
    nodes = int((seconds - root_s) / (NODE_S * pairs))
    if nodes < 1:
        return None, -inf, 0.0
    solver, start = highspy.Highs(), highspy.HighsSolution()
    options = dict(output_flag=False, threads=1, mip_max_nodes=nodes, objective_target=stop, mip_rel_gap=0.0,
                   mip_feasibility_tolerance=TOLERANCE, primal_feasibility_tolerance=TOLERANCE)
    for option, value in options.items():
        solver.setOptionValue(option, value)
    at = solver.addVariables(len(size), ub=(M - size).tolist(), out_array=True)
    peak = solver.addVariable(least, M, obj=1.0)
    z = solver.addBinaries(pairs, out_array=True)
    solver.addConstrs(at[i] + size[i] <= at[j] + M * z)
    solver.addConstrs(at[j] + size[j] <= at[i] + M * (1 - z))
    solver.addConstrs(at + size <= peak)
    start.col_value = [*best, M, *(best[i] > best[j])]
    solver.setSolution(start)
    solver.run()
    info = solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    offsets = np.array(solver.getSolution().col_value[:len(size)]) if feasible else None
    return offsets, info.mip_dual_bound, root_s + max(0, info.mip_node_count) * NODE_S * pairs


def _gurobi(size: np.ndarray, i: np.ndarray, j: np.ndarray, M: float, least: float, best: np.ndarray,
            stop: float, seconds: float) -> Relaxed:
    """Solves it by Gurobi, whose licence is the user's; where there is none by HiGHS, and says so."""
    first, second = i.tolist(), j.tolist()
    settings = dict(WorkLimit=seconds, Threads=1, BestObjStop=stop, MIPGap=0.0, IntFeasTol=TOLERANCE,
                    FeasibilityTol=TOLERANCE)
    try:
        import gurobipy
        with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as model:
            at, z = model.addMVar(len(size), ub=M - size), model.addMVar(len(i), vtype="B")
            peak = model.addMVar(1, least, M, obj=1.0)
            model.addConstr(at[first] + size[i] <= at[second] + M * z)
            model.addConstr(at[second] + size[j] <= at[first] + M * (1 - z))
            model.addConstr(at + size <= peak)
            for variable, value in ((at, best), (peak, M), (z, best[i] > best[j])):
                variable.setAttr("Start", value)
            for name, value in settings.items():
                model.setParam(name, value)
            model.optimize()
            return np.array(at.X) if model.SolCount else None, model.ObjBound, model.Work
    except ImportError:
        why = "gurobipy is not installed"
    except gurobipy.GurobiError as error:
        why = str(error)
    say(f"gurobi: {why}; going on with HiGHS")
    return _highs(size, i, j, M, least, best, stop, seconds)


@cache
def libraries() -> tuple[str, ...]:
    """Lists the solvers that are installed, with their versions: others may find other placements."""
    names = "ortools", "highspy", "gurobipy"
    return tuple(f"{name} {installed.version}" for name in names for installed in distributions(name=name))


def lacking(package: str) -> tuple[None, int, float]:
    """Says once that a solver's package is not there: what others have found stays."""
    say(f"{package} is not installed, it would look for better placements; try pip install {package}")
    return None, 0, 0.0


@cache
def say(line: str) -> None:
    """Prints a line on stderr, once a process."""
    print(line, file=sys.stderr)


Method = Callable[[Part, list[int], int, int, float], Found]
# {solver: (name, function, one part in so many of the time limit) of what it tries in turns, after greedy}
METHODS: dict[str, tuple[tuple[str, Method, int], ...]] = {
    "auto": (("cpsat", cpsat, BRIEFLY), ("cpsat", coarse, 1), ("cpsat", cpsat, 1)), "greedy": (),
    "mip": (("mip", mip, 1),), "cpsat": (("cpsat", cpsat, 1),),
    "gurobi": (("gurobi", partial(mip, gurobi=True), 1),)}
