"""The page research/papers.md and its parts: what a part is, how its facts become Markdown."""

from collections.abc import Callable
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
    """A table or a figure. `source`: what it is in the paper; `how`: DRY, ...; make() -> its facts, as JSON
    holds them: `tables`, [(head, rows)], `notes`, and what `draw`(facts, path) wants, which writes the
    picture that `caption` is of. `check`() raises ConfigError where something is missing that it needs."""

    title: str
    source: str
    how: str
    make: Callable[[], Facts]
    draw: Callable[[Facts, Path], None] | None = None
    caption: str = ""
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


OFF_HEAD = ["points off", "cells", "mean", "worst", "fail in both", "in the paper alone", "here alone"]


def off_row(name: str, pairs: list[tuple[Any, Any]]) -> list:
    return [name, *off(pairs).values()]


# --- Markdown ---

def shown(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: list[str], rows: list[list]) -> str:
    """Markdown; the floats of a column have equally many digits behind the point."""
    digits = [max(len(str(value).partition(".")[2]) if isinstance(value, float) else 0 for value in column)
              for column in zip(*rows, strict=True)]
    lines = [head, ["---"] * len(head), *([*map(shown, row, digits)] for row in rows)]
    return "".join("|" + "".join(f" {text} |" if text else " |" for text in line) + "\n" for line in lines)


def filled(text: str) -> str:
    """Lines of the page's width; of a command, which is indented, as it is."""
    if text.startswith("    "):
        return text
    return fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def section(name: str, part: Part, facts: Facts) -> str:
    source = filled(f"*{part.source}; here: {part.how}, `python -m research.papers {name}`.*")
    picture = f"![{part.title}](../bench/results/papers/{name.replace('.', '_')}.png)\n"
    return "\n".join([f"### {part.title}\n", source, *(table(head, rows) for head, rows in facts["tables"]),
                      *map(filled, facts.get("notes", ())),
                      *([picture, filled(f"*{part.caption}*")] if part.draw else [])])


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

Tables and figures of the three papers that memo implements, as far as arithmetic, a trace, a simulation or a
CPU can repeat them. `make papers` writes this page, its pictures and `bench/results/papers/` anew. **No GPU
has run memo**, so each part says how its figures came about:

- *dry run*: the arithmetic of [memo.estimate](../docs/estimate.md), on the hardware that the paper names.
  Five of its figures are [fitted](#the-fit) to MEMO's 7B rows alone: three speeds of the A800, which the A100
  has too, PCIe's rate and the host memory of MEMO's nodes;
- *simulated*: rules played through, as of a schedule or of torch's allocator;
- *counted*: bytes or elements that a traced layer asks for or sends;
- *measured on the CPU*: computed here, small.

The papers' own figures are measured on their GPUs; here they stand in columns named "paper" or "published",
and are orange in the pictures. "The facts at hand" are what [testing/](../testing/paper.py) holds of the
papers. "oom" and "oohm": out of device or host memory. What only GPUs could show (speeds, curves of large
models, stalls of the allocator) is not here.

Made again, the page is the same, with these exceptions. What is measured has other last digits with another
CPU or torch, and MEMO's Figure 11d another dataset, which is Python's own library, with another Python. The
plans of MEMO's Figure 1 and METP's Figure 6 are those of a solver with a time limit.
"""
