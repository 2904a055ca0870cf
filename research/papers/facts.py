"""Are the facts of testing/*_paper.json in the papers' texts, each near its place? The texts are no part of
the repository.

    python -m research.papers.facts FOLDER      with memo.txt, memo_page.txt, metp.txt, sppo.txt

`places` of a file: {path of facts: [words where they begin, how many characters they are in]}. A list of
numbers must stand there in its order, a formula word for word. `absent`: what the page says that the text
does not have. Notes, and what is in words, are not looked at.
"""

import re
import sys
from itertools import groupby
from pathlib import Path

from testing.paper import METP, PAPER, SPPO

TEXTS = {"memo": (PAPER, ["memo.txt", "memo_page.txt"]), "metp": (METP, ["metp.txt"]),
         "sppo": (SPPO, ["sppo.txt"])}
SMALL = {2: "two", 4: "four", 8: "eight"}
WORDS = {"source", "places", "network", "note", "notes", "notation", "inconsistent", "equations",
         "heuristics", "absent"}
UNITS = [(2**10, ["K", "k"]), (2**20, ["M", " million", "-million"]), (1e6, [" MB"]),
         (1e9, ["GB", " GB", " Gbps"]), (1e12, ["TB", " TB", " TFLOPS", " TFLOPs"])]
GAP = ".{0,24}?"  # between two numbers of a list


def plain(text):
    """A text in one line, its fractions as a/b."""
    def divided(found):
        top = f"({found[1]})" if re.search("[+-]", found[1]) else found[1]
        return f"{top}/{found[2]}"
    text = re.sub(r"\{\\(?:rm|text)\{(\w+)\}\}", r"\1", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", divided, text)
    return " ".join(re.sub(r"[$\\]", "", text).split())


def forms(value):
    """How a paper may print a number, or a word."""
    if value is None:
        return ["-"]
    if isinstance(value, str):
        return [value]
    found = {str(value), f"{value:,}", f"{value:g}", f"{value:.2f}", f"{value:.3f}", f"{100 * value:g}%",
             f"{value:.0e}".replace("1e-0", "10^{-"), SMALL.get(value, "-")}
    found |= {f"{value / unit:g}{name}" for unit, names in UNITS for name in names if value >= unit}
    if value % 2**20 == 0:
        found.add(str(value // 2**20))  # of "1, 2, 4 and 8 million"
    return sorted(found, key=len, reverse=True)


def pattern(values):
    every = ("|".join(map(re.escape, forms(one))) for one in values)
    return GAP.join(rf"(?<![\d.])(?:{one})(?!\d|\.\d)" for one in every)


def sequences(fact, path=()):
    """[(path, what must stand there in this order)]"""
    if path == ("table3",):
        for _, those in groupby(fact, key=lambda row: row["seq_tokens"]):
            rows = [*those]
            for key in "mfu", "tgs", "wall":
                yield path, [row.get(key, row.get("fail")) for row in rows]
    elif isinstance(fact, dict) and all(k.isdigit() and not isinstance(v, list) for k, v in fact.items()):
        yield path, [*map(int, fact)]
        yield path, [*dict.fromkeys(fact.values())]
    elif isinstance(fact, dict):
        for key, value in fact.items():
            if key not in WORDS:
                yield from ([((*path, key), [int(key), *value])] if key.isdigit()
                            else sequences(value, (*path, key)))
    elif isinstance(fact, list) and fact and isinstance(fact[0], (dict, list)):
        for value in fact:
            yield from sequences(value, path)
    elif fact not in (None, []):
        yield path, fact if isinstance(fact, list) else [fact]


def missing(facts, text):
    """["path: what is wrong"], and how many numbers were looked for."""
    wrong, looked, places, text = [], 0, facts["places"], plain(text)
    for path, values in sequences(facts):
        names = [".".join(path[:n]) for n in range(len(path), 0, -1)]
        begin, size = next((places[name] for name in names if name in places), ("", 0))
        at = text.find(begin) if begin else -1
        there, looked = text[at:at + size], looked + len(values)
        if isinstance(values[0], str) and "h^2" in values[0]:
            asked, there = ".*?".join(re.escape(v.replace(" ", "")) for v in values), there.replace(" ", "")
        else:
            asked = pattern(values)
        if at < 0 or not re.search(asked, there, re.IGNORECASE):
            wrong.append(f"{names[0]}: {values} is not within {size} characters of {begin!r}")
    said = [one for one in facts["absent"] if re.search(one, text, re.IGNORECASE)]
    return wrong + [f"{one} is in the text" for one in said], looked


def main(folder):
    """The exit code."""
    wrong = []
    for paper, (facts, names) in TEXTS.items():
        found, looked = missing(facts, "\n".join((Path(folder) / name).read_text() for name in names))
        wrong += [f"{paper}: {one}" for one in found]
        print(f"{paper}: {looked} looked for, {len(found)} not found")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
