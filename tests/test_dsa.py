"""Placements are the best (brute force), the validator finds every broken rule, mistakes are one line."""

import os
import random
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import combinations, count, product
from math import inf

import numpy as np
import pytest

from memo.dsa import __main__ as dsa_main
from memo.dsa import solvers
from memo.dsa.__main__ import read_csv, write_csv
from memo.dsa.problem import (
    SOLVERS,
    Buffer,
    NoPlacement,
    Problem,
    Solution,
    _unit,
    lower_bound,
    solve,
    validate,
)
from memo.system import command
from testing.busy import busy
from testing.hard import FAMILIES, hard
from tests.helpers import ROOT, told

GIB = 2**30


def problem_of(rows, **kwargs):
    return Problem(tuple(Buffer(f"b{i}", *row) for i, row in enumerate(rows)), **kwargs)


def random_problem(rng):
    horizon, largest = rng.randint(2, 12), rng.choice([3, 9, 40])
    lowers = [rng.randrange(horizon) for _ in range(rng.randint(1, 8))]
    rows = [(lower, rng.randint(lower + 1, horizon), rng.randint(1, largest)) for lower in lowers]
    return problem_of(rows, alignment=rng.choice([1, 1, 1, 4]))


@cache
def least_peak(problem):
    """Brute force: every order from the bottom up, each buffer right above those that it meets, and none
    below the one before it: the lowest placement has its buffers in such an order."""
    buffers = {b: b.size + -b.size % problem.alignment for b in problem.buffers}
    load = max(sum(size for b, size in buffers.items() if b.lower <= t < b.upper)
               for t in {b.lower for b in buffers})
    best = sum(buffers.values())

    def place(left, placed, peak, floor):
        nonlocal best
        best = best if left else min(best, peak)
        for b in left:
            at = max((top for other, top in placed if other.lower < b.upper and b.lower < other.upper),
                     default=0)
            top = at + buffers[b]
            if at >= floor and max(peak, top) < best > load:
                place([other for other in left if other is not b], placed + [(b, top)], max(peak, top), at)

    place(list(buffers), [], 0, 0)
    return best


def towers(part, stop, seconds):
    """Instead of greedy: every buffer above all others."""
    return [sum(part.size[:i]) for i in range(len(part.size))], 0.0


# Small problems whose least peak is above their load, 6, found at random: only a solver can prove it.
GAPS = [
    [(0, 1, 2), (0, 2, 4), (1, 3, 1), (2, 4, 2), (3, 4, 1), (4, 5, 3), (1, 6, 1), (2, 6, 2),
     (5, 7, 3), (6, 7, 3)],
    [(0, 1, 4), (1, 2, 3), (0, 3, 1), (2, 3, 2), (0, 3, 1), (3, 4, 4), (1, 4, 1), (2, 5, 1),
     (4, 6, 5), (5, 6, 1)],
    [(0, 1, 5), (1, 2, 3), (2, 3, 1), (0, 3, 1), (2, 4, 1), (1, 5, 2), (3, 5, 2), (2, 5, 1),
     (4, 6, 1), (5, 6, 5)],
]


@pytest.mark.slow
@pytest.mark.parametrize("solver,instances,helped",
                         [("auto", 500, True), ("cpsat", 300, False), ("mip", 150, False)])
def test_the_proven_optimum_is_that_of_brute_force(solver, instances, helped, monkeypatch):
    if not helped:
        monkeypatch.setattr(solvers, "greedy", towers)  # greedy would leave the solver little to do
    rng, found_by = random.Random(0), []
    for _ in range(instances):
        problem = random_problem(rng)
        solution, least = solve(problem, solver), least_peak(problem)
        validate(problem, solution)
        assert (solution.peak, solution.proven) == (least, True), problem
        found_by.append(solution.solver)
    assert helped or sum(solver in name for name in found_by) > instances / 3


@pytest.mark.slow
@pytest.mark.parametrize("rows, solver", [(GAPS[0], "auto"), *product(GAPS[1:], ["cpsat", "mip"])])
def test_a_least_peak_above_the_load_is_proven(rows, solver):
    problem = problem_of(rows)
    solution = solve(problem, solver)
    assert (lower_bound(problem), least_peak(problem)) == (6, 7)
    assert (solution.peak, solution.lower_bound, solution.proven, solution.gap) == (7, 7, True, 0.0)
    greedy = solve(problem, "greedy")
    assert greedy.lower_bound == 6 and not greedy.proven and greedy.gap == greedy.peak / 6 - 1
    with pytest.raises(NoPlacement, match=r"capacity=6 exists \(proven"):
        solve(replace(problem, capacity=6), solver)


@pytest.mark.parametrize("solver", ["mip", "gurobi", "cpsat", "auto"])
def test_80_gib_in_bytes(solver):
    """A binary that is 1e-6 away from 0 lets two buffers overlap by 1e-6 * M, here 80 KiB."""
    for unit in (8 * GIB, 512 * 1024, 8 * GIB - 513):
        problem = problem_of([(lower, upper, size * unit) for lower, upper, size in GAPS[0]])
        solution = solve(problem, solver)
        assert (solution.peak, solution.lower_bound) == (7 * unit, 7 * unit)
    # no common unit
    odd = [(lower, upper, size * 8 * GIB + i) for i, (lower, upper, size) in enumerate(GAPS[0])]
    assert _unit(problem_of(odd)) == 1
    solution, least = solve(problem_of(odd), solver), solve(problem_of(odd), "cpsat")
    assert least.proven and least.peak <= solution.peak <= least.peak * 1.001
    # the program claims no proof
    lowest = lower_bound(problem_of(odd))
    assert solution.proven or (solver in ("mip", "gurobi") and solution.lower_bound == lowest)


@pytest.mark.parametrize("answer", [(None, -inf), (None, inf), (np.zeros(10), 3.0),
                                    (np.tile((1e-7, -1e-7), 5), 6.0)])
def test_what_a_mip_solver_says_is_not_believed(answer, monkeypatch):
    monkeypatch.setattr(solvers, "_highs", lambda *program: (*answer, 1.0))
    solution = solve(problem_of(GAPS[0]), "mip")
    assert solution.lower_bound == 6 and solution.peak >= 7


@pytest.mark.parametrize("solver, package", [("auto", "ortools"), ("cpsat", "ortools"), ("mip", "highspy")])
def test_a_package_that_is_not_there_costs_only_quality(solver, package, monkeypatch, capsys):
    solvers.say.cache_clear()
    for name in ("ortools.sat.python", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    for _ in range(2):
        solution = solve(problem_of(GAPS[0]), solver)
        validate(problem_of(GAPS[0]), solution)
    assert capsys.readouterr().err.count(f"{package} is not installed, it would look for better") == 1


def test_without_gurobi_highs_solves_its_program_and_a_line_says_so(monkeypatch, capsys):
    solvers.say.cache_clear()
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    for _ in range(2):
        assert solve(problem_of(GAPS[1]), "gurobi").proven
    assert capsys.readouterr().err == "gurobi: gurobipy is not installed; going on with HiGHS\n"


def test_a_part_gains_nothing_below_the_peak_of_another():
    later = [(lower + 10, upper + 10, size) for lower, upper, size in GAPS[1]]
    problem = problem_of(GAPS[0] + later + [(20, 30, 3)])
    solution = solve(problem)
    assert (solution.peak, solution.proven) == (7, True)
    empty = solve(Problem(()))
    assert (empty.offsets, empty.peak, empty.lower_bound, empty.gap) == ((), 0, 0, 0.0)


def test_alignment():
    problem = problem_of([(0, 2, 5), (1, 3, 3), (2, 4, 9)], alignment=4)
    solution = solve(problem)
    assert (solution.peak, solution.proven, lower_bound(problem)) == (16, True, 16)
    assert all(offset % 4 == 0 for offset in solution.offsets)
    with pytest.raises(NoPlacement, match=r"exists \(proven"):
        solve(replace(problem, capacity=15))


@pytest.mark.slow
def test_greedy_finds_a_placement_of_many():
    rng = random.Random(0)
    rows = [(t, t + rng.choice([1, 3, 10, 100, 3000]), rng.randint(1, 10**9)) for t in range(5000)]
    assert solve(problem_of(rows), "greedy", time_limit=1.0).gap < 1  # quick: it gets no more


def many(n, longest=100):
    rng = random.Random(1)
    rows = ((t, t + rng.randint(1, longest), rng.randint(1, 10**6))
            for t in (rng.randrange(n) for _ in range(n)))
    return problem_of(list(rows))


def test_greedy_ends_with_its_time():
    """One ordering is there at any rate. Of 2,000 buffers each takes 33 ms."""
    part, took = solvers.part_of(*zip(*(b[1:] for b in many(2000).buffers), strict=True)), []
    for seconds in (0.0, 0.07, 1.0):
        took.append(solvers.greedy(part, 0, seconds)[1])
    assert [round(s / took[0]) for s in took] == [1, 2, 6]
    assert solve(many(2000), "auto", 0).gap < 0.2


@pytest.mark.parametrize("seed", range(40))
def test_the_validator_finds_what_looking_at_all_pairs_finds(seed):
    rng = random.Random(seed)
    rows = [(lower, lower + rng.randint(1, 30), rng.choice([1, 2, 3, 64, 10**12]))
            for lower in (rng.randrange(60) for _ in range(150))]
    part = solvers.part_of(*zip(*rows, strict=True))
    (offsets, _), problem = solvers.greedy(part, 0, 0), problem_of(rows)

    def overlap(offsets):
        return any(a[0] < b[1] and b[0] < a[1] and p < q + b[2] and q < p + a[2]
                   for (a, p), (b, q) in combinations(zip(rows, offsets, strict=True), 2))

    def refused(offsets):
        try:
            validate(problem, Solution(tuple(offsets), part.peak(offsets), 0, "", 0.0))
        except ValueError as e:
            return "overlap while both are alive" in str(e)
        return False
    assert not overlap(offsets) and not refused(offsets)
    for _ in range(10):  # a few changed ones, some of which still are placements
        i = rng.randrange(len(rows))
        moved = [*offsets[:i], max(0, offsets[i] + rng.choice([-2, -1, 1, 2, 10**9])), *offsets[i + 1:]]
        assert overlap(moved) == refused(moved)


def test_the_largest_sizes_are_solved():
    most = [(i, 10**6 * (i + 2), 2**60 // 16 - i) for i in range(16)]
    for solver in SOLVERS:
        assert solve(problem_of(most), solver, 1.0).proven


@pytest.mark.slow
def test_hard_instances_fit_where_greedy_does_not():
    for name in ("network_1", "network_4"):
        problem = hard(name, **FAMILIES[name])
        assert lower_bound(problem) == problem.capacity
        with pytest.raises(NoPlacement, match="was found in 60 s of work"):
            solve(problem, "greedy")
        assert solve(problem, "auto", 60).peak == problem.capacity


@pytest.mark.slow
def test_the_time_limit_returns_the_best_so_far_with_its_gap():
    problem = replace(hard("network_4", **FAMILIES["network_4"]), capacity=None)
    for solver in ("cpsat", "mip"):
        solution = solve(problem, solver, time_limit=1.0)
        assert solution.peak <= solve(problem, "greedy").peak and solution.lower_bound == lower_bound(problem)
        assert solution.gap > 0 and not solution.proven


def test_no_clock_ends_a_search(monkeypatch):
    """On a machine that is so busy that an hour passes between two looks at a clock."""
    problem, hours = many(300), count(0, 3600)
    found = solve(problem, "greedy", 10.0)
    monkeypatch.setattr("time.monotonic", lambda: float(next(hours)))
    assert solve(problem, "greedy", 10.0).offsets == found.offsets


@contextmanager
def busy_core():
    """Three processes compute beside this one, all on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with busy(3):
            yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("solver, limit", [("cpsat", 0.5), ("auto", 1.5), ("mip", 2.0), ("gurobi", 0.5)])
def test_a_busy_machine_places_as_an_idle_one_does(solver, limit):
    """Each is stopped by its limit, at the same step."""
    if solver == "gurobi":
        pytest.importorskip("gurobipy")
    rng, rows = random.Random(0), []
    for _ in range(32):  # small enough for Gurobi's free licence
        lower = rng.randrange(32)
        rows.append((lower, lower + rng.randint(1, 16), rng.randint(1, 50)))
    problem = problem_of(rows) if solver in ("mip", "gurobi") else replace(
        hard("trim_3", **FAMILIES["trim_3"]), capacity=None)
    found = set()
    for around in (nullcontext, busy_core):
        with around():
            solution = solve(problem, solver, limit)
        found.add((solution.offsets, solution.lower_bound, solution.solver))
    assert len(found) == 1 and not solution.proven


@pytest.mark.slow
def test_gurobi_says_once_that_its_licence_is_too_small(capfd):
    pytest.importorskip("gurobipy")
    solvers.say.cache_clear()
    problem = replace(hard("network_1", **FAMILIES["network_1"]), capacity=None)
    for _ in range(2):
        solve(problem, "gurobi", time_limit=0.5)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("gurobi: ")]
    assert len(lines) == 1 and lines[0].endswith("going on with HiGHS") and out == ""


GOOD = Problem((Buffer("a", 0, 2, 4), Buffer("b", 1, 3, 4), Buffer("c", 2, 4, 4)), capacity=12, alignment=4)


@pytest.mark.parametrize("change,message", [
    (dict(offsets=(0, 4)), "2 offsets for 3 buffers"),
    (dict(offsets=(-4, 4, 0)), "buffer 'a': offset -4 is not"),
    (dict(offsets=(0.0, 4, 0)), "buffer 'a': offset 0.0 is not"),
    (dict(offsets=(0, 6, 0)), "buffer 'b': offset 6 is not a multiple of alignment=4"),
    (dict(offsets=(0, 0, 4)), r"buffers 'a' at \[0, 4\) and 'b' at \[0, 4\) overlap"),
    (dict(offsets=(0, 4, 4)), "buffers 'b' at .* and 'c' at .* overlap"),
    (dict(offsets=(0, 8, 0)), "peak=8 is not where the highest buffer ends, 12"),
    (dict(offsets=(0, 12, 0), peak=16), "peak=16 is above capacity=12"),
    (dict(lower_bound=12), "peak=8 is below lower_bound=12"),
    (dict(peak=12), "peak=12 is not where the highest buffer ends, 8"),
])
def test_the_validator_names_what_is_broken(change, message):
    good = Solution((0, 4, 0), 8, 8, "test", 0.0)
    validate(GOOD, good)
    with pytest.raises(ValueError, match=message):
        validate(GOOD, replace(good, **change))


def test_no_placement_is_believed_that_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(solvers, "greedy", lambda part, stop, seconds: ([0, 0, 1][-len(part.size):], 0.0))
    with pytest.raises(ValueError, match="overlap"):
        solve(GOOD, "greedy")


def test_csv_there_and_back(tmp_path):
    solution = solve(GOOD)
    write_csv(tmp_path / "plan.csv", GOOD, solution)
    text = (tmp_path / "plan.csv").read_text()
    assert text.splitlines()[:2] == ["id,lower,upper,size,offset", f"a,0,2,4,{solution.offsets[0]}"]
    assert read_csv(tmp_path / "plan.csv", capacity=12, alignment=4) == GOOD
    (tmp_path / "old.csv").write_text("buffer,start,end,size\r\na,0,2,4\r\n\r\nb,1,3,4\r\nc, 2, 4, 4\r\n")
    assert read_csv(tmp_path / "old.csv").buffers == GOOD.buffers
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())  # as a spreadsheet writes it
    assert read_csv(tmp_path / "bom.csv").buffers == GOOD.buffers


def run(tmp_path, text, *args):
    (tmp_path / "r.csv").write_text(text)
    command = [sys.executable, "-m", "memo.dsa", str(tmp_path / "r.csv"), "-o", str(tmp_path / "plan.csv"),
               *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


HEAD = "id,lower,upper,size\n"


@pytest.mark.parametrize("text,args,message", [
    (HEAD + "a,0,2,4\nb,3,3,4\n", [], "r.csv:3: lower=3 must be below upper=3"),
    (HEAD + "a,5,2,4\n", [], "r.csv:2: lower=5 must be below upper=2"),
    (HEAD + "a,0,2,-4\n", [], "r.csv:2: size=-4 of buffer 'a' must be at least 1"),
    (HEAD + "a,0,2,0\n", [], "r.csv:2: size=0 of buffer 'a' must be at least 1"),
    (HEAD + "a,0,2,4\nb,0,2,9\n", ["--capacity=8"],
     "r.csv:3: size=9 of buffer 'b' must be at most capacity=8"),
    (HEAD + "a,0,two,4\n", [], "r.csv:2: upper='two' must be a whole number"),
    (HEAD + "a,0,2,4.5\n", [], "r.csv:2: size='4.5' must be a whole number"),
    (HEAD + "a,0,2,1_0\n", [], "r.csv:2: size='1_0' must be a whole number"),
    (HEAD + "a,0,2,4\u2028\n", [], "r.csv:2: size='4\\u2028' must be a whole number"),
    (HEAD + "a\0,0,2,4\n", [], "r.csv:2: id='a\\x00' must be printable"),
    (HEAD + "a,0,2\n", [], "r.csv:2: 3 fields must be 4"),
    ("id,lower,size\na,0,4\n", [], "r.csv:1: column 'upper' is missing"),
    (HEAD + "a,0,2,4\nb,0,2,4\na,3,4,4\n", [], "r.csv:4: id='a' must be unique"),
    ("", [], "r.csv:1: is empty"),
    (HEAD, [], "r.csv:2: there must be at least one buffer"),
    (None, [], "r.csv: cannot be read (No such file or directory)"),
    (b"\xff\xfe\x00", [], "r.csv: cannot be read"),
    (HEAD + f"a,0,2,{2**63}\n", [],
     f"r.csv:2: size={2**63} of buffer 'a': all sizes so far must add up to at most"),
    (HEAD + f"a,0,2,1{'0' * 4000}\n", [],
     "r.csv:2: size=<a number of 13288 bits> of buffer 'a': all sizes so far"),
    (HEAD + f"a,0,2,{2**60 - 4}\nb,3,4,1\nc,3,4,1\n", ["--alignment=4"],
     f"r.csv:4: size=1 of buffer 'c': all sizes so far must add up to at most {2**60}"),
    (HEAD + f"a,0,2,1{'0' * 5000}\n", [], "r.csv:2: size='10000"),
    (HEAD + f'"{"a" * 200_000}",0,2,1\n', [], "a line of 200,008 characters must have at most 16,384"),
    (HEAD + "\n" * 2**20, [], "r.csv: cannot be read (it must have at most 1,048,576 lines)"),
    (HEAD + "a,0,2,4\n", ["--alignment=0"], "alignment=0 must be at least 1"),
    (HEAD + "a,0,2,4\n", ["--alignment=1e9"], "alignment='1e9' must be int"),
    (HEAD + "a,0,2,4\n", ["--alignment=10000000000"],
     "alignment=10000000000 must be at most 1073741824 (no page"),
    (HEAD + "a,0,2,4\n", ["--capacity=0"], "capacity=0 must be at least 1"),
    (HEAD + "a,0,2,4\n", ["--capacity=99999999999999999999"],
     "must be at most 1152921504606846976 (so much is all"),
    (HEAD + "a,0,2,4\n", ["--time_limit=nan"], "time_limit=nan must be"),
    (HEAD + "a,0,2,4\n", ["--time_limit=inf"], "time_limit=inf must be finite"),
    (HEAD + "a,0,2,4\n", ["--time_limit=1e9"],
     "time_limit=1000000000.0 must be at most 1000000.0 (that is eleven days"),
    (HEAD + "a,0,2,4\n", ["--time=1"], "unrecognized arguments: --time=1; see --help"),
    (HEAD + "a,0,2,4\n", ["--solver=best"], "solver='best' must be one of auto, greedy, mip, cpsat"),
])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, text, args, message):
    if text is not None:
        (tmp_path / "r.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    code = command.run(dsa_main.main, [str(tmp_path / "r.csv"), "-o", str(tmp_path / "plan.csv"), *args])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "plan.csv").exists()


@pytest.mark.slow
def test_the_command_line(tmp_path):
    assert (bad := run(tmp_path, HEAD + "a,0,2,-1\n")).returncode == 2 and told(bad.stderr).count("\n") == 1
    full = HEAD + "a,0,2,4\nb,1,3,4\n"
    none = run(tmp_path, full, "--capacity=7")
    assert none.returncode == 3 and not none.stdout
    assert none.stderr.startswith("error: no placement under capacity=7 exists (proven")
    done = run(tmp_path, full, "--capacity=9", "--solver=greedy", "--time_limit=5", "--alignment=1")
    assert done.returncode == 0 and done.stdout.startswith("peak 8, lower bound 8, proven optimal, 0.")
    plan = read_csv(tmp_path / "plan.csv")
    assert len(plan.buffers) == 2
    assert run(tmp_path, full, "--solver=best").returncode == 2
