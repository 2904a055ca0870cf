"""The mutations of tests/mutations.py still apply, and the tests that must find them are there."""

import ast
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, ROOT, Mutation


def test_names_tell_them_apart():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 15


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_applies_and_its_tests_are_there(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    ast.parse(changed := text.replace(mutation.old, mutation.new))  # an error that Python finds is not silent
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


@pytest.mark.parametrize("code,said,word,what", [
    (1, "FAILED tests/a.py::test_b[1] - assert 0\n1 failed", "found", "tests/a.py::test_b[1]"),
    (0, "1 passed", "missed", "tests/a.py::test_b"), (None, "", "not run", "no end within 9 s"),
    (4, "ERROR: not found: a.py\n\n", "not run", "pytest: ERROR: not found: a.py"),
    (2, "1 error", "not run", "pytest: 1 error"), (1, "1 error", "not run", "pytest: 1 error")])
def test_what_pytest_says_is_the_verdict(code, said, word, what, monkeypatch):
    monkeypatch.setattr(mutations, "copy_tree", lambda to: (to / "a.py").write_text("x = 1\n"))
    monkeypatch.setattr(mutations, "run_tests", lambda tree, tests, timeout_s: (code, said))
    mutation = Mutation("m", "a.py", "x = 1", "x = 2", ("tests/a.py::test_b",))
    assert mutations.verdict(mutation, 9) == (word, what)


@pytest.mark.parametrize("text,n", [("x = 1\nx = 1\n", 2), ("y = 1\n", 0)])
def test_what_does_not_stand_there_once_is_refused(text, n, tmp_path: Path):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match=f"stands {n} times in a.py"):
        Mutation("m", "a.py", "x = 1", "x = 2", ()).apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == text
