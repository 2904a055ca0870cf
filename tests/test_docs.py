"""The documents against the tree: folders, links, the width, and every command that is shown."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from memo.errors import ConfigError
from memo.run.load_config import load_config

ROOT = Path(__file__).parents[1]
PAGES = [*(page for folder in ("", "docs", "research") for page in sorted((ROOT / folder).glob("*.md"))),
         ROOT / "tests/nullcuda/README.md"]
BLOCK = re.compile(r"^    (?:\$ )?((?:python|torchrun|make|sbatch) (?:.*\\\n)*.*)\n(?:    (error: "
                   r"(?:.+\n)+))?", re.M)


def text_of(page):
    """A page without what is commented out."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def headings(page):
    """The anchors of a page, as the code hosts make them of headings."""
    titles = re.findall(r"^#+ (.*)", text_of(page), re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def commands():
    """[(page, command without its explanation, the error shown below it or "")]."""
    found = []
    for page in PAGES:
        for command, error in BLOCK.findall(text_of(page)):
            command = re.sub(r"\s*\\\n\s*", " ", command)
            command = re.sub(r"\[.*?\]|\.\.\.", "", re.split(r" {3,}", command)[0])
            found.append((page.name, command.strip(), " ".join(error.split())))
        for command in re.findall(r"`((?:python|make) [^`]+)`", text_of(page)):
            found.append((page.name, command, ""))
    return found


def test_the_tree_has_every_folder_once_and_each_file_says_what_it_is():
    rows = re.findall(r"^\| (`[^|]+`) \| .+ \| .+ \|$", text_of(ROOT / "docs/architecture.md"), re.M)
    there = [name for row in rows for name in re.findall(r"`([\w/]+/)`", row)]
    tops = "memo", "config", "data", "tests", "testing", "bench", "research"
    files = [path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")]
    folders = {f"{path.parent}/" if path.parts[0] == "memo" else f"{path.parts[0]}/" for path in files}
    assert sorted(there) == sorted(folders)
    linked = re.findall(r"\]\((\w+\.md)", text_of(ROOT / "docs/architecture.md"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {*linked, "architecture.md"}
    code = [path for path in files if path.parts[0] in ("memo", "testing", "bench", "research")]
    assert [path for path in code if path.name != "__init__.py"
            and not ast.get_docstring(ast.parse((ROOT / path).read_text()))] == []


def test_the_reading_path_is_about_as_long_as_it_says():
    page = text_of(ROOT / "README.md")
    [(lines, path)] = re.findall(r"\*\*MEMO in ([\d,]+) lines\.\*\*(.*?)Beside", page, re.S)
    files = re.findall(r"`([\w/]+\.py)`", path)
    found = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    assert abs(found - int(lines.replace(",", ""))) <= 50


def test_every_result_is_told_of():
    told = "".join(text_of(page) for page in PAGES)
    assert [path.name for path in (ROOT / "bench/results").iterdir() if path.name not in told] == []


def test_every_file_that_is_named_exists():
    folders = "memo|bench|research|testing|tests|config|docs|data"
    for page in PAGES:
        for name in re.findall(rf"`((?:{folders})/[\w/]+\.\w+)`", text_of(page)):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_points_to_something(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), target
            assert not anchor or anchor in headings(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_wider_than_110_columns(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 110] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_commands_are_found():
    shown = [command for _, command, _ in commands()]
    assert len(shown) > 50 and "python train.py config/stdlib.py --n_layr=3" in shown
    assert sum(bool(error) for _, _, error in commands()) >= 3


def parse(command):
    """Reads a command line as the command itself would, as far as no data is needed. Errors: ConfigError."""
    words = shlex.split(command.partition("#")[0])
    if words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), command
    elif "train.py" in words or words[0] == "sbatch":
        program = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
        load_config([word for word in words[program + 1:]
                     if not word.startswith(("--force", "--init_from="))])
    elif "-m" in words:
        name, argv = words[words.index("-m") + 1], words[words.index("-m") + 2:]
        if not name.startswith("memo."):
            script = ROOT / name.replace(".", "/")
            has_options(script / "__main__.py" if script.is_dir() else script.with_suffix(".py"), argv)
            return
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{name}.__main__")
        module.read_argv(argv)
    else:
        has_options(ROOT / words[1], words[2:])


def has_options(script, argv):
    assert script.exists()
    for arg in argv:
        assert not arg.startswith("--") or arg.partition("=")[0] in script.read_text(), arg


def error_of(command):
    try:
        parse(command)
    except ConfigError as e:
        return f"error: {e}"
    return ""


@pytest.mark.parametrize("page,command,error", commands())
def test_every_command_that_is_shown_is_one(page, command, error, monkeypatch):
    """And where an error is shown below it, it is that one; of too little host memory only a run can tell."""
    monkeypatch.chdir(ROOT)
    assert error_of(command) == ("" if "--host_memory_gb" in command else error)
