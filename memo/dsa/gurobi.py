"""The paper's program solved by Gurobi, whose licence is the user's: imported only where it is asked for."""

import importlib.util

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
    if importlib.util.find_spec("gurobipy") is None:
        raise NoGurobi("gurobipy is not installed")
    import gurobipy
    from scipy.sparse import csr_matrix

    settings = dict(WorkLimit=seconds, Threads=1, BestObjStop=float(program.stop), MIPGap=0.0,
                    IntFeasTol=TOLERANCE, FeasibilityTol=TOLERANCE)
    try:
        with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as model:
            columns = np.arange(len(program.lower))
            kinds = np.where(columns > program.n, "B", "C")  # binary, continuous
            x = model.addMVar(len(columns), program.lower, program.upper,
                              (columns == program.n).astype(float), kinds)
            matrix = csr_matrix((program.values, program.columns, program.starts))
            model.addMConstr(matrix, x, "<", program.most)  # type: ignore[call-overload]  # types lack these
            x.setAttr("Start", program.first)
            for name, value in settings.items():
                model.setParam(name, value)
            model.optimize()
            return np.array(x.X) if model.SolCount else None, model.ObjBound, model.Work
    except gurobipy.GurobiError as error:
        raise NoGurobi(str(error)) from None
