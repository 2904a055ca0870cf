"""The papers beside memo: what is committed is found again, and is as near as it should be. What the pages
say of it: test_claims.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMO, METP = (json.loads((ROOT / f"bench/results/papers/{paper}.json").read_text())
              for paper in ("memo", "metp"))


@pytest.mark.slow
def test_what_is_committed_is_found_again():
    parts = ["memo.averages", "memo.table4", "memo.table5", "sppo.table3", "sppo.figure7"]
    done = subprocess.run([sys.executable, "-m", "research.papers", "--check", *parts], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_dry_run_is_as_near_as_it_should_be():
    off, totals = MEMO["table3"]["off"], MEMO["rivals"]["totals"]
    long, short = off["all, from 64K on"], off["all, 4K to 32K"]
    assert long["mean"] <= 1 and long["worst"] <= 3 and short["mean"] <= 4
    of_the_fit = {group: (mean, worst) for group, mean, worst, *_ in MEMO["fit"]["tables"][1][1]}
    assert all(mean <= 1 and worst <= 3 for group, (mean, worst) in of_the_fit.items() if "64K" in group)
    assert totals["cells"] == 96 and totals["agree"] >= 0.8 * totals["cells"]
    assert totals["strictly"] >= 0.9 * totals["pairs"]


def test_metp_sends_what_docs_metp_says():
    """The elements of docs/metp.md's table: of the MLP, of attention's matrices, of keys and values."""
    mlp, attention = (METP[part]["tables"][1][1] for part in ("table1", "table2"))
    for p, (*_, of_mlp), (*_, matrices, _, keys) in zip((2, 4, 8), mlp, attention, strict=True):
        assert (of_mlp, matrices, keys) == (24 * (p - 1) / p, 12 * (p - 1) / p, 6 * (p - 1) / p)
