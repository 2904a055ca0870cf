"""What bench.papers makes, by its names, and what is committed of it.

    python -m bench.papers.parts memo.table5     prints the facts of a part, as JSON
"""

import json
import subprocess
import sys
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
    """The facts of a part, from a process of its own: it takes its threads and ranks with it."""
    start = time.perf_counter()
    command = [sys.executable, "-m", __name__, one]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{one}: {time.perf_counter() - start:.1f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    paper, _, name = sys.argv[1].partition(".")
    print(json.dumps(PAPERS[paper].PARTS[name].make()))
