"""The papers beside memo: what is committed is found again, is as near as it should be, and is what the
documents say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMO, METP, SPPO = (json.loads((ROOT / f"bench/results/papers/{paper}.json").read_text())
                    for paper in ("memo", "metp", "sppo"))
TABLE3, TOTALS = MEMO["table3"], MEMO["rivals"]["totals"]
LONG, SHORT = TABLE3["off"]["long"], TABLE3["off"]["short"]


@pytest.mark.slow
def test_what_is_committed_is_found_again():
    parts = ["memo.averages", "memo.table4", "memo.table5", "sppo.table3", "sppo.figure7"]
    done = subprocess.run([sys.executable, "-m", "bench.papers", "--check", *parts], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_dry_run_is_as_near_as_it_should_be():
    assert LONG["mean"] <= 1 and LONG["worst"] <= 3 and SHORT["mean"] <= 4
    assert TOTALS["cells"] == 96 and TOTALS["agree"] >= 0.8 * TOTALS["cells"]
    assert TOTALS["right"] >= 0.9 * TOTALS["pairs"]


def of(model):
    return TABLE3["off"][f"{model}, from 64K on"]["mean"]


@pytest.mark.parametrize("page, claim", [
    ("README.md", f"7B (fitted) {of('7B'):.1f}, 13B {of('13B'):.1f}, 30B {of('30B'):.1f}; worst "
                  f"{LONG['worst']:.1f}"),
    ("docs/results.md", f"{SPPO['table4']['tables'][2][1][0][1]} times as fast as Megatron-LM"),
    ("docs/results.md", f"{LONG['mean']:.1f} points off from 64K on (7B {of('7B'):.1f}, 13B {of('13B'):.1f}, "
                        f"30B {of('30B'):.1f}), {SHORT['mean']:.1f} below"),
    ("docs/results.md", f"from {MEMO['figure6']['crossing'][0]}K tokens on"),
    ("docs/results.md", f"{TOTALS['agree']} of {TOTALS['cells']} cells run out of memory"),
    ("docs/results.md", f"takes {METP['figure4']['saved'][0]}% less memory"),
    ("docs/estimate.md", f"with {TABLE3['tables'][0][1][0][4]:.0f}% MFU"),
    ("docs/estimate.md", f"{SHORT['mean']:.1f} points off from 4K to 32K"),
    ("docs/estimate.md", f"at most {max(TABLE3['above'].values()):.1f} points above"),
    ("docs/baselines.md", f"{TOTALS['agree']} of {TOTALS['cells']}"),
    ("docs/baselines.md", f"in {TOTALS['right']} of {TOTALS['pairs']} pairs")])
def test_what_the_documents_say_is_what_was_found(page, claim):
    assert claim in " ".join((ROOT / page).read_text().split())
