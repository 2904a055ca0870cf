"""The papers' tables and figures beside memo: writes research/papers.md, and bench/results/papers/.

    python -m research.papers                      all
    python -m research.papers memo                 one paper, or `beyond`: the same jobs by all of them
    python -m research.papers memo.table5          one part
    python -m research.papers --check memo.table5  writes nothing: is what is committed found again?

A part is kept as soon as it is made. One that fails stays as it was, and the exit code is 1.
"""

import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from difflib import get_close_matches

from memo.errors import ConfigError, reason
from memo.system.command import Arguments, run
from research.papers.page import PAGE, RESULTS, page
from research.papers.parts import EVERY, PAPERS, committed, keep, known, made

CORES = 2  # so many parts are made at a time


def wanted(names):
    """The parts that `names`, papers and parts, stand for; all where there are none. Errors: ConfigError: an
    unknown name; what a part needs is not there."""
    for name in names:
        if name not in PAPERS and name not in EVERY:
            near = get_close_matches(name, [*PAPERS, *EVERY], n=1, cutoff=0)
            raise ConfigError(f"part={name} must be one of {', '.join(PAPERS)}, or one of their parts; try "
                              f"{near[0]}")
    found = [one for one in EVERY if not names or {one, one.partition(".")[0]} & {*names}]
    for one in found:
        EVERY[one].check()
    return found[::-1]  # the last takes longest


def main(argv):
    parser = Arguments(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part")
    parser.add_argument("--check", action="store_true")
    args, wrong = parser.parse_args(argv), []

    def tell(error):
        wrong.append(error)
        print(f"error: {error}", file=sys.stderr, flush=True)
    names, workers = wanted(args.parts), ThreadPoolExecutor(CORES)
    making = {workers.submit(made, one): one for one in names}
    try:
        for done in as_completed(making):
            one = making[done]
            try:
                facts = done.result()
                if not args.check:
                    keep(one, facts)
                elif facts != committed(one):
                    tell(f"{one} is not as committed; try python -m research.papers {one}")
            except Exception as e:
                tell(f"{one} failed: {reason(e)}; try python -m research.papers.parts {one}")
    finally:
        workers.shutdown(cancel_futures=True)
    text = page(PAPERS, {paper: known(paper) for paper in PAPERS})
    if not args.check:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        tell(f"{PAGE.name} is not what {RESULTS.name}/*.json give; try python -m research.papers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run(main))
