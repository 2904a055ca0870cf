"""The papers' tables and figures beside memo: docs/papers.md, and JSON and pictures in bench/results/papers/.

    python -m bench.papers                      all
    python -m bench.papers memo                 one paper, or `beyond`: the same jobs by all of them
    python -m bench.papers memo.table5          one part
    python -m bench.papers --check memo.table5  writes nothing: is what is committed found again?
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.papers import beyond, memo, metp, sppo
from bench.papers.page import PAGE, RESULTS, page
from memo.files import save_json

CORES = 2  # where all parts are made
PAPERS = {"memo": memo, "metp": metp, "sppo": sppo, "beyond": beyond}


def path_of(paper):
    return RESULTS / f"{paper}.json"


def known(paper):
    """{part: facts}, as the paper's file has them."""
    found = json.loads(path_of(paper).read_text()) if path_of(paper).exists() else {}
    return {name: found[name] for name in PAPERS[paper].PARTS if name in found}


def made(one):
    """The facts of a part, as JSON gives them back."""
    paper, _, name = one.partition(".")
    start = time.perf_counter()
    facts = json.loads(json.dumps(PAPERS[paper].PARTS[name].make()))
    print(f"{one}: {time.perf_counter() - start:.1f} s", flush=True)
    return facts


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
    wrong, run = [], map if args.parts else ProcessPoolExecutor(CORES, get_context("spawn")).map
    for one, facts in zip(names, run(made, names), strict=True):
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
