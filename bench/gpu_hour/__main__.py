"""The GPU hour: everything that only a card can tell, on whatever GPUs are here, offline.

    python -m bench.gpu_hour [A B C D] [--out=out/gpu_hour] [--again=A2,C1] [--seconds=580]

A: does it run, is it right. B: bytes and rates. C: MFU beside rivals. D: what no rival holds. Letters or
items (A2); all of them by default. Each item is a process with a limit; what one does leaves the others'
results. The next call goes on with what is not finished; --again=A2 repeats an item, --again=all all those
that are named.
--seconds: no item starts that might last longer than what is left of these. --attention, --n_embd, --longest,
--host_memory_gb: the kernel, the width, the most tokens and the host's memory that steps may have; small ones
try the script. Written to --out after each item: report.md, report.json, the one file to post, and gpu.md, a
page of it. docs/gpu.md says what each item answers.
"""

import argparse
import sys
from pathlib import Path

from bench.gpu_hour.items import GROUPS, ITEMS
from bench.gpu_hour.orchestra import play


def read_argv(argv):
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_hour", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="A2", help="letters or items")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_hour"))
    parser.add_argument("--again", default="", help="items to repeat, with commas between; all")
    parser.add_argument("--seconds", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--n_embd", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=2**31)
    parser.add_argument("--host_memory_gb", default="auto", type=lambda v: v if v == "auto" else float(v))
    parser.add_argument("--item", help=argparse.SUPPRESS)
    parser.add_argument("--function", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out = args.out.absolute()
    if unknown := [one for one in args.which if one not in {*GROUPS, *ITEMS}]:
        parser.error(f"{unknown[0]} is no letter and no item; there are {', '.join([*GROUPS, *ITEMS])}")
    return args


def main(argv):
    args = read_argv(argv)
    if args.item:
        from bench.gpu_hour.notes import run_item
        return run_item(args.item, args.function or ITEMS[args.item].function, args)
    return play(ITEMS, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
