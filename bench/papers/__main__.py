"""The papers' tables and figures beside memo: docs/papers.md, and JSON and pictures in bench/results/papers/.

    python -m bench.papers                      all
    python -m bench.papers memo                 one paper, or `beyond`: the same jobs by all of them
    python -m bench.papers memo.table5          one part
    python -m bench.papers --check memo.table5  writes nothing: is what is committed found again?
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.papers.page import PAGE, RESULTS, page
from bench.papers.parts import PAPERS, known, made, path_of
from memo.files import save_json

CORES = 2  # so many parts are made at a time


def main():
    every = [f"{paper}.{name}" for paper, module in PAPERS.items() for name in module.PARTS]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PAPERS, *every], metavar="part", default=[])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = set(args.parts) or set(PAPERS)
    every.reverse()  # the last takes longest
    names = [one for one in every if {one, one.partition(".")[0]} & wanted]
    wrong, workers = [], ThreadPoolExecutor(CORES)
    for one, facts in zip(names, workers.map(made, names), strict=True):
        paper, _, name = one.partition(".")
        part = PAPERS[paper].PARTS[name]
        if args.check:
            wrong += [one] * (facts != known(paper).get(name))
            continue
        save_json(known(paper) | {name: facts}, path_of(paper))
        if part.draw:
            part.draw(facts, RESULTS / f"{paper}_{name}.png")
    text = page(PAPERS, {paper: known(paper) for paper in PAPERS})
    if args.check:
        wrong += [PAGE.name] * (text != PAGE.read_text())
        return f"not as committed: {', '.join(wrong)}" if wrong else 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
