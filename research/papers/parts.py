"""What research.papers makes, by its names, and what is committed of it.

    python -m research.papers.parts memo.table5     prints the facts of a part, as JSON
"""

import json
import subprocess
import sys
import time

from memo.system.files import save_json
from research.papers import beyond, memo, metp, sppo
from research.papers.page import RESULTS

PAPERS = {"memo": memo, "metp": metp, "sppo": sppo, "beyond": beyond}
EVERY = {f"{paper}.{name}": part for paper, module in PAPERS.items() for name, part in module.PARTS.items()}


def path_of(paper):
    return RESULTS / f"{paper}.json"


def known(paper):
    """{part: facts}, as the paper's file has them."""
    found = json.loads(path_of(paper).read_text()) if path_of(paper).exists() else {}
    return {name: found[name] for name in PAPERS[paper].PARTS if name in found}


def committed(one):
    """The facts of a part; None where there are none yet."""
    paper, _, name = one.partition(".")
    return known(paper).get(name)


def keep(one, facts):
    """Draws a part, and puts its facts into the paper's file."""
    paper, _, name = one.partition(".")
    if EVERY[one].draw:
        EVERY[one].draw(facts, RESULTS / f"{paper}_{name}.png")
    save_json(known(paper) | {name: facts}, path_of(paper))


def made(one):
    """The facts of a part, from a process of its own: it takes its threads and ranks with it. Errors:
    RuntimeError: what that process said last."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", __name__, one], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1])
    print(f"{one}: {time.perf_counter() - start:.1f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(EVERY[sys.argv[1]].make()))
