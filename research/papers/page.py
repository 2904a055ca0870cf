"""The page research/papers.md and its parts: what a part is, how its facts become Markdown."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "bench/results/papers", ROOT / "research/papers.md"
DRY, SIMULATED, MEASURED, COUNTED = "dry run", "simulated", "measured on the CPU", "counted"
MILLION = 2**20  # tokens
Facts = dict[str, Any]


def nothing() -> None:
    """What most parts need beside the repository and its requirements."""


class Part(NamedTuple):
    """A table or a figure. `how`: DRY, ...; make() -> its facts, as JSON holds them: `tables`, [(head,
    rows)], `hidden`, which of them are not on the page, `notes`, and what `draw`(facts, path) wants, which
    writes a picture. `check()` raises ConfigError where something is missing that it needs."""

    title: str
    how: str
    make: Callable[[], Facts]
    draw: Callable[[Facts, Path], None] | None = None
    check: Callable[[], None] = nothing


# --- cells ---

def thousands(tokens: int) -> str:
    return f"{tokens // 1024}K"


def points(fraction: float) -> float:
    """In percent, with one digit behind the point; the papers print two."""
    return round(100 * fraction, 1)


def cell(got: Any) -> float | str:
    """MFU of an Estimate in percent, or why it does not fit."""
    return points(got.mfu) if got.fits else got.reason


def off(pairs: list[tuple[Any, Any]]) -> Facts:
    """Of pairs (paper's, ours) in points: how far ours are off where both ran, and where just one did."""
    ran = [abs(ours - paper) for paper, ours in pairs
           if not isinstance(paper, str) and not isinstance(ours, str)]
    failed = [(isinstance(paper, str), isinstance(ours, str)) for paper, ours in pairs]
    return dict(cells=len(ran), mean=round(mean(ran), 2) if ran else None,
                worst=round(max(ran), 2) if ran else None,
                both_fail=failed.count((True, True)), only_papers_fails=failed.count((True, False)),
                only_ours_fails=failed.count((False, True)))


OFF_HEAD = ["points off", "cells", "/mean", "/worst", "fail in both", "/paper", "/here alone"]


def off_row(name: str, pairs: list[tuple[Any, Any]]) -> list:
    return [name, *off(pairs).values()]


# --- Markdown ---

def as_text(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: list[str], rows: list[list]) -> str:
    """Markdown; the floats of a column have equally many digits behind the point. A column "/name" stands
    in the one before it."""
    digits = [max(len(str(value).partition(".")[2]) if isinstance(value, float) else 0 for value in column)
              for column in zip(*rows, strict=True)]
    lines = [[*head], *([*map(as_text, row, digits)] for row in rows)]
    for line, at in product(lines, [at for at in reversed(range(len(head))) if head[at].startswith("/")]):
        pair = line[at - 1:at + 1]
        line[at - 1:at + 1] = ["/".join(text.strip("/") or "-" for text in pair) if any(pair) else ""]
    made = ["|" + "".join(f" {text} |" if text else " |" for text in line) + "\n" for line in lines]
    return "".join([made[0], "|" + "---|" * len(lines[0]) + "\n", *made[1:]])


def filled(text: str) -> str:
    """Lines of the page's width; of a command, which is indented, as it is."""
    if text.startswith("    "):
        return text
    return fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def section(name: str, part: Part, facts: Facts) -> str:
    picture = f"![{name}](../bench/results/papers/{name.replace('.', '_')}.png)\n"
    shown = [one for at, one in enumerate(facts["tables"]) if at not in facts.get("hidden", ())]
    return "\n".join([f"### {part.title}\n", filled(f"*{part.how}, `{name}`.*"),
                      *(table(head, rows) for head, rows in shown), *map(filled, facts.get("notes", ())),
                      *([picture] if part.draw else [])])


def page(papers: dict[str, Any], found: dict[str, Facts]) -> str:
    """research/papers.md, of {paper: module with NAME, ABOUT and PARTS} and {paper: {part: facts}}."""
    text = INTRODUCTION
    for paper, module in papers.items():
        text += f"\n## {module.NAME}\n\n{filled(module.ABOUT)}"
        for name, part in module.PARTS.items():
            if facts := found.get(paper, {}).get(name):
                text += "\n" + section(f"{paper}.{name}", part, facts)
    return text


INTRODUCTION = """# The papers beside memo

<!-- written by research/papers; change that, then `make papers` -->

Tables and figures of the three papers that memo implements, as far as arithmetic or a CPU can repeat them.
**No GPU has run memo**: *dry run* is the arithmetic of [memo.estimate](../docs/estimate.md) on the paper's
hardware, with five figures [fitted](#the-fit) to MEMO's 7B rows; *simulated* are rules played through;
*counted* bytes or elements of a traced layer; *measured on the CPU* small runs.

A column "x/y" has several figures in a cell; "paper/here": the paper's, then memo's. "oom", "oohm": out of
device or host memory. MFU and points are percent. Orange in pictures: the paper. Its figures are in
[testing/](../testing/paper.py); `python -m research.papers.facts FOLDER` finds each in the papers' texts, and
that what is called missing is. "Only drawn": no text prints it. `make papers` makes all anew, `python -m
research.papers memo.table3` one part; last digits of what is measured, Figure 11d's data and plans within a
time limit (MEMO's Figure 1, METP's 6) may differ elsewhere.
"""
