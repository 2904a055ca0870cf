"""Hard instances of the placement problem: which solver fits them under their capacity, and how fast.

    python -m bench.dsa_hard [--only=network_3,rows_1] [--solvers=greedy,mip,cpsat,auto] [--time_limit=60]
                             [more.csv ...]

The instances are those of testing/hard.py. Writes bench/results/dsa_hard.json; with --only, into the rows
that the file holds. Files in the CSV format are tried instead with --capacity, and not written down.
"""

import argparse
import json
import time
from pathlib import Path

from bench.machine import machine
from memo.dsa.__main__ import read_csv
from memo.dsa.problem import SOLVERS, NoPlacement, lower_bound, solve
from testing.hard import FAMILIES, hard


def tried(problem, solver, time_limit):
    start = time.perf_counter()
    try:
        solve(problem, solver, time_limit)
        solved = True
    except NoPlacement:
        solved = False
    return dict(solved=solved, seconds=round(time.perf_counter() - start, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--capacity", type=int, default=1 << 20)
    parser.add_argument("--only", default="")
    parser.add_argument("--solvers", default="greedy,mip,cpsat,auto")
    parser.add_argument("--time_limit", type=float, default=60.0)
    args = parser.parse_args()
    solvers = args.solvers.split(",")
    problems = {name: hard(name, **family) for name, family in FAMILIES.items() if not args.files}
    problems |= {Path(file).stem: read_csv(file, args.capacity) for file in args.files}
    rows = []
    print(f"{'instance':12}{'n':>5}{'pairs':>7}{'bound':>9}{'capacity':>10}"
          + "".join(f"{s:>12}" for s in solvers))
    for name, problem in problems.items():
        if args.only and name not in args.only.split(","):
            continue
        b = problem.buffers
        pairs = sum(b[i].lower < b[j].upper and b[j].lower < b[i].upper
                    for i in range(len(b)) for j in range(i))
        row = dict(name=name, n=len(b), pairs=pairs, lower_bound=lower_bound(problem),
                   capacity=problem.capacity)
        print(f"{name:12}{len(b):5}{pairs:7}{row['lower_bound']:9}{problem.capacity:10}", end="", flush=True)
        for solver in solvers:
            row[solver] = tried(problem, solver, args.time_limit)
            text = f"{row[solver]['seconds']:.1f} s" if row[solver]["solved"] else "-"
            print(f"{text:>12}", end="", flush=True)
        print()
        rows.append(row)
    counts = {solver: sum(row[solver]["solved"] for row in rows) for solver in solvers}
    print(f"solved of {len(rows)}: {counts}")
    out = Path(__file__).parent / "results" / "dsa_hard.json"
    if not args.files and set(solvers) == set(SOLVERS):
        before = ({row["name"]: row for row in json.loads(out.read_text())["rows"]}
                  if args.only and out.exists() else {})
        rows = list({**before, **{row["name"]: row for row in rows}}.values())
        counts = {solver: sum(row[solver]["solved"] for row in rows) for solver in solvers}
        out.write_text(json.dumps(dict(machine=machine(), time_limit_s=args.time_limit, solved=counts,
                                       rows=rows), indent=1)
                       + "\n")


if __name__ == "__main__":
    main()
