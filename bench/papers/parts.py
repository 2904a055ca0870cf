"""What bench.papers makes, by its names: a module of its own, which the processes that make it import."""

import json
import time

from bench.papers import beyond, memo, metp, sppo
from bench.papers.page import RESULTS

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
