"""Plans the addresses of a request log: python -m memo.planner requests.log -o plan.json"""

import sys
from argparse import Namespace
from dataclasses import asdict

from memo.dsa.problem import add_options
from memo.errors import ConfigError
from memo.planner.plan import plan_trace
from memo.planner.trace import parse_trace, requests_of
from memo.system.command import Arguments, end_with_reader, progress, run
from memo.system.files import check_other, read_table, reading, save_json


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.planner", description="Plans the addresses of a request log: "
                       "malloc <tensor> <bytes>, free <tensor> <bytes>, begin <segment>, end <segment>.")
    parser.option("log", help="the request log", least=1)
    parser.option("--output", help="the plan, JSON", short=["-o"], required=True, least=1)
    add_options(parser, 512, " for each problem")
    parser.add_argument("--one_level", action="store_true", help="solve all requests at once")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Runs the command. Errors: ConfigError, bad input."""
    args = read_argv(argv)
    check_other(args.log, args.output)
    with progress(lambda: f"reading {args.log}"):
        with reading(args.log, "give a request log"):
            text = read_table(args.log)
        trace = parse_trace(text, args.log)
    if not any(r.planned for r in requests_of(trace)[0]):
        raise ConfigError(f"{args.log} must hold at least one malloc, inside its segments if it marks any")
    n, limit = len(trace.events), args.time_limit
    with progress(lambda: f"planning {n:,} requests, --time_limit={limit:g} for each problem"):
        plan = plan_trace(trace, args.solver, args.alignment, limit, args.one_level)
    names = {label: [name for verb, name, _ in its if verb in ("malloc", "keep")]
             for label, its in trace.segments.items()}
    requests = {label: [(name, *place) for name, place in zip(names[label], places, strict=True)]
                for label, places in plan.segments.items()}  # (tensor, bytes, offset)
    try:
        save_json(asdict(plan) | dict(segments=requests), args.output)
    except OSError as e:
        raise ConfigError(f"{args.output} cannot be written ({e.strerror}); choose another -o") from None
    for row in plan.levels:
        quality = "proven optimal" if row["proven"] else "not proven"
        print(f"{row['segment']}: {row['n']} blocks, peak {row['peak']:,} bytes, lower bound "
              f"{row['lower_bound']:,}, {quality}, {row['solver']}, {row['seconds']:.2f} s")
    gap = plan.arena_bytes / plan.lower_bound - 1
    quality = "proven optimal" if plan.proven else f"{gap:.2%} above the lower bound"
    print(f"{len(plan.segments)} segments in an arena of {plan.arena_bytes:,} bytes, {quality}, "
          f"{plan.seconds:.2f} s: {args.output}")


if __name__ == "__main__":
    end_with_reader()
    sys.exit(run(main))
