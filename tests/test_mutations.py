"""The mutations of tests/mutations.py still apply; some are found, each by the check it is a matter of."""

import ast
from pathlib import Path

import pytest

from memo.run.load_config import load_config
from tests import mutations
from tests.mutations import MODEL, MUTATIONS, ROOT, Mutation


def test_names_tell_them_apart():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 40


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_applies_to_a_run_that_there_is(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    ast.parse(changed := text.replace(mutation.old, mutation.new))  # an error that Python finds is not silent
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    load_config([key for key in (MODEL + " " + mutation.keys).split() if not key.startswith("--gpus=")])


@pytest.mark.parametrize("ended,word,what", [
    ((1, "data", "a token"), "found", "data: a token"), ((1, "layout", "half"), "misled", "layout: half"),
    ((0, "layout", "x"), "missed", "all is right with "), ((None, "", ""), "not run", "no end within 9 s"),
    ((2, "", "no such key"), "not run", "exit code 2: no such key")])
def test_what_verify_says_is_the_verdict(ended, word, what, monkeypatch):
    monkeypatch.setattr(mutations, "copy_tree", lambda to: (to / "a.py").write_text("x = 1\n"))
    monkeypatch.setattr(mutations, "verified", lambda tree, keys, timeout_s: ended)
    assert mutations.verdict(Mutation("m", "a.py", "x = 1", "x = 2", "data"), 9) == (word, what)


@pytest.mark.parametrize("text,n", [("x = 1\nx = 1\n", 2), ("y = 1\n", 0)])
def test_what_does_not_stand_there_once_is_refused(text, n, tmp_path: Path):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match=f"stands {n} times in a.py"):
        Mutation("m", "a.py", "x = 1", "x = 2", "data").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == text


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mean-of-a-chunk", "gradients-times-cp", "rolled-labels"])
def test_some_are_found(name):
    [mutation] = [m for m in MUTATIONS if m.name == name]
    word, what = mutations.verdict(mutation)
    assert word == "found", what
