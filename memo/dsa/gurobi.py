"""The paper's program solved by Gurobi, whose licence is the user's: imported only where it is asked for."""

import numpy as np

from memo.dsa.solvers import TOLERANCE, Found, Part, Program, Relaxed, mip, say


class NoGurobi(RuntimeError):
    """Gurobi is not installed, or its licence does not let it."""


def gurobi(part: Part, best: list[int], stop: int, highest: int, seconds: float) -> Found:
    """Solve the paper's program by Gurobi; by HiGHS where there is none, and say so once."""
    try:
        return mip(part, best, stop, highest, seconds, solve_program)
    except NoGurobi as error:
        say(f"gurobi: {error}; going on with HiGHS")
        return mip(part, best, stop, highest, seconds)


def solve_program(program: Program, seconds: float) -> Relaxed:
    """Solve a Program. Errors: NoGurobi."""
    try:
        import gurobipy
    except ImportError:
        raise NoGurobi("gurobipy is not installed") from None
    size, i, j, M, least, best, stop = program
    first, second = i.tolist(), j.tolist()
    settings = dict(WorkLimit=seconds, Threads=1, BestObjStop=stop, MIPGap=0.0, IntFeasTol=TOLERANCE,
                    FeasibilityTol=TOLERANCE)
    try:
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
    except gurobipy.GurobiError as error:
        raise NoGurobi(str(error)) from None
