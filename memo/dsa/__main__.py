"""Solves the problem in a CSV file:

    python -m memo.dsa requests.csv [--capacity=BYTES] [--solver=auto|greedy|mip|cpsat] [--time_limit=S]
                                    -o plan.csv
"""

import csv
import io
import sys
from argparse import Namespace
from pathlib import Path

from memo.config.keys import number_of, shown
from memo.dsa.problem import MOST_BYTES, Buffer, NoPlacement, Problem, Solution, add_options, solve
from memo.errors import ConfigError, reason
from memo.system.command import Arguments, end_with_reader, progress, run
from memo.system.files import check_other, read_table, save_bytes

COLUMNS = ("id", "lower", "upper", "size")
# the names in the first edition of the public benchmark (minimalloc)
OLD_COLUMNS = {"buffer": "id", "start": "lower", "end": "upper"}


def read_csv(path: str | Path, capacity: int | None = None, alignment: int = 1) -> Problem:
    """Reads a Problem from a CSV file like minimalloc's. Errors: with the line."""
    try:
        lines = read_table(path).split("\n")  # other signs that end lines have no place in a table
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}); give a CSV file") from None
    names = [OLD_COLUMNS.get(name.strip(), name.strip()) for name in lines[0].split(",")]
    for column in COLUMNS:
        if column not in names:
            what = f"column {column!r} is missing" if any(names) else "is empty"
            raise ConfigError(f"{path}:1: {what}; the first line must name {','.join(COLUMNS)}")
    buffers, where, rows = list[Buffer](), list[str](), csv.reader(lines[1:])
    try:
        for row in filter(None, rows):
            where.append(f"{path}:{rows.line_num + 1}")
            buffers.append(read_row(row, names, where[-1]))
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num + 1}: {error}; give plain numbers") from None
    if not buffers:
        raise ConfigError(f"{path}:2: there must be at least one buffer below the first line")
    problem = Problem(tuple(buffers), capacity, alignment)
    check_rules(problem, where)
    return problem


def check_rules(problem: Problem, where: list[str]) -> None:
    """Raises ConfigError at the place in the file, `where`, of a buffer that breaks a rule."""
    buffers, first, total = problem.buffers, dict[str, int](), 0
    for i, (b, at) in enumerate(zip(buffers, where, strict=True)):
        if b.lower >= b.upper:
            raise ConfigError(f"{at}: lower={shown(b.lower)} must be below upper={shown(b.upper)} (upper is "
                              f"exclusive); buffer {b.id!r} is never alive, leave it out")
        if b.size < 1:
            raise ConfigError(f"{at}: size={shown(b.size)} of buffer {b.id!r} must be at least 1 byte; leave "
                              "empty buffers out")
        total += problem.rounded(i)
        if total > MOST_BYTES:
            raise ConfigError(f"{at}: size={shown(b.size)} of buffer {b.id!r}: all sizes so far must add up "
                              f"to at most {MOST_BYTES} (the solvers count in 63 bits); give them in larger "
                              "units")
        if first.setdefault(b.id, i) != i:
            raise ConfigError(f"{at}: id={b.id!r} must be unique; it is also buffer number "
                              f"{first[b.id] + 1}, rename one")
    i = max(range(len(buffers)), key=lambda i: buffers[i].size)
    if problem.capacity is not None and problem.capacity < problem.rounded(i):
        raise ConfigError(f"{where[i]}: size={problem.rounded(i)} of buffer {buffers[i].id!r} must be at "
                          f"most capacity={problem.capacity}; raise the capacity")


def read_row(row: list[str], names: list[str], where: str) -> Buffer:
    """Reads the Buffer in a row that has these columns. Errors: ConfigError."""
    if len(row) != len(names):
        raise ConfigError(f"{where}: {len(row)} fields must be {len(names)}, as in the first line")
    id, *texts = (row[names.index(column)].strip(" \t") for column in COLUMNS)
    if not id.isprintable():
        raise ConfigError(f"{where}: id={id!r:.100} must be printable")
    numbers = []
    for column, text in zip(COLUMNS[1:], texts, strict=True):
        try:
            numbers.append(number_of(text))
        except ValueError:
            raise ConfigError(f"{where}: {column}={shown(text)} must be a whole number") from None
    return Buffer(id, *numbers)


def write_csv(path: str | Path, problem: Problem, solution: Solution) -> None:
    """Writes the buffers with a column `offset`, as replacing() does."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "offset"])
    writer.writerows((b.id, b.lower, b.upper, b.size, offset)
                     for b, offset in zip(problem.buffers, solution.offsets, strict=True))
    save_bytes(text.getvalue().encode(), path)


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.dsa", description=__doc__)
    parser.option("requests", help="CSV of id,lower,upper,size; upper is exclusive", least=1)
    parser.option("--output", help="the same with a column offset", short=["-o"], required=True, least=1)
    parser.option("--capacity", int, least=1,
                  help="bytes; stop at the first placement that fits, not at the least peak",
                  most=MOST_BYTES, why="so much is all that the buffers may take together")
    add_options(parser, 1, "")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs the command: 0 solved, 3 no placement under the capacity. Errors: ConfigError, bad input."""
    args = read_argv(argv)
    check_other(args.requests, args.output)
    with progress(lambda: f"reading {args.requests}"):
        problem = read_csv(args.requests, args.capacity, args.alignment)
    try:
        with progress(lambda: f"placing {len(problem.buffers):,} buffers, --time_limit={args.time_limit:g}"):
            solution = solve(problem, args.solver, args.time_limit)
    except NoPlacement as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    try:
        write_csv(args.output, problem, solution)
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written ({error.strerror}); choose another -o") from None
    quality = "proven optimal" if solution.proven else f"gap {solution.gap:.2%}"
    print(f"peak {solution.peak}, lower bound {solution.lower_bound}, {quality}, {solution.seconds:.2f} s, "
          f"found by {solution.solver}")
    return 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(run(main))
