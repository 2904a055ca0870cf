"""The papers beside memo: what is committed is found again, and is as near as it should be. What the pages
say of it: test_claims.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from research.papers.facts import TEXTS, missing
from testing.paper import PAPER

ROOT = Path(__file__).parents[1]
MEMO, METP = (json.loads((ROOT / f"bench/results/papers/{paper}.json").read_text())
              for paper in ("memo", "metp"))


@pytest.mark.parametrize("paper", TEXTS)
def test_the_facts_are_in_the_papers_texts(paper):
    """$PAPERS: the folder of the texts, which are no part of the repository."""
    if "PAPERS" not in os.environ:
        pytest.skip("PAPERS=none must be the folder of the papers' texts")
    facts, names = TEXTS[paper]
    text = "\n".join((Path(os.environ["PAPERS"]) / name).read_text() for name in names)
    assert missing(facts, text)[0] == []


def test_a_wrong_fact_is_found():
    """In a text that has some of them: a changed cell, cells in another order, what should be absent."""
    facts = dict(table5={"393216": PAPER["table5"]["mfu_percent"]["393216"]}, absent=["batch size"],
                 places={"table5": ["Sequence Length |", 400]})
    row = "Sequence Length | 384K | 52.09% | 52.31% | 52.45% | 52.58% | 53.04%" + " | ✗oohm" * 4
    assert missing(facts, row) == ([], 10)
    assert len(missing(facts, row.replace("52.45", "52.54"))[0]) == 1
    assert len(missing(facts, row.replace("52.31% | 52.45%", "52.45% | 52.31%"))[0]) == 1
    assert len(missing(facts, row + " batch size")[0]) == 1


@pytest.mark.slow
def test_what_is_committed_is_found_again():
    parts = ["memo.averages", "memo.table4", "memo.table5", "sppo.table3", "sppo.figure7"]
    done = subprocess.run([sys.executable, "-m", "research.papers", "--check", *parts], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_dry_run_is_as_near_as_it_should_be():
    off, totals = MEMO["table3"]["off"], MEMO["rivals"]["totals"]
    long, short = off["all, from 64K on"], off["all, 4K to 32K"]
    assert long["mean"] <= 1 and long["worst"] <= 3.5 and short["mean"] <= 4  # of four models
    assert all(of["mean"] <= 1 and of["worst"] <= 3 for of in (
        off[f"{model}, from 64K on"] for model in ("7B", "13B", "30B")))
    assert totals["cells"] == 128 and totals["agree"] >= 0.8 * totals["cells"]
    assert totals["strictly"] >= 0.9 * totals["pairs"]


def test_metp_sends_what_docs_metp_says():
    """The elements of docs/metp.md's table: of the MLP, of attention's matrices, of keys and values."""
    mlp, attention = (METP[part]["tables"][1][1] for part in ("table1", "table2"))
    for p, (*_, of_mlp), (*_, matrices, _, keys) in zip((2, 4, 8), mlp, attention, strict=True):
        assert (of_mlp, matrices, keys) == (24 * (p - 1) / p, 12 * (p - 1) / p, 6 * (p - 1) / p)
