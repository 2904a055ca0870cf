"""What is written: whole, on the disk, under names that nobody can plant, over regular files or nothing."""

import contextlib
import os
import stat
import time

import pytest

from memo.checkpoint.checkpoint import pass_over
from memo.errors import ConfigError
from memo.huggingface.huggingface import save_own_files
from memo.run.state import lock
from memo.system import files
from memo.system.files import check_other, keep_json, kept_json, own_folder, replacing, save_bytes

PLANTS = {"a link to a file": lambda path, secret: path.symlink_to(secret),
          "a link to nothing": lambda path, secret: path.symlink_to(secret.with_name("new")),
          "a pipe": lambda path, secret: os.mkfifo(path),
          "a folder": lambda path, secret: path.mkdir(),
          "a link to a device": lambda path, secret: path.symlink_to("/dev/full")}


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text("mine")
    (tmp_path / "in").mkdir()
    return path


@pytest.mark.parametrize("plant", PLANTS)
def test_only_a_regular_file_is_replaced(tmp_path, secret, plant):
    path = tmp_path / "in" / "x.json"
    PLANTS[plant](path, secret)
    before = os.lstat(path)
    with pytest.raises(OSError, match="is no regular file"):
        save_bytes(b"new", path)
    assert os.path.samestat(before, os.lstat(path)) and os.listdir(secret.parent) == ["secret"]
    assert secret.read_text() == "mine" and os.listdir(path.parent) == ["x.json"]


@pytest.mark.parametrize("plant", [*(p for p in PLANTS if p != "a folder"), "a link to a folder", "a file"])
def test_a_folder_that_is_written_is_no_link(tmp_path, secret, plant):
    """None of those that memo makes in a folder: nothing is made, replaced or renamed behind one."""
    more = {"a file": lambda path, secret: path.touch(),
            "a link to a folder": lambda path, secret: path.symlink_to(secret.parent)}
    said = "must be a folder, and no link"
    for work, name in (
            (lambda path: own_folder(path), "x"),
            (lambda path: save_own_files({"secret": b"new"}, path.parent, "hf_files"), "hf_files"),
            (lambda path: save_own_files({"templates/secret": b"new"}, path.parent), "templates"),
            (lambda path: pass_over(path / "secret"), "ckpt")):
        path = tmp_path / "in" / name
        (PLANTS | more)[plant](path, secret)
        before = path.lstat()
        with pytest.raises(OSError, match=f"{name} {said}"):
            work(path)
        assert os.path.samestat(before, path.lstat()) and os.listdir(secret.parent) == ["secret"]
        assert secret.read_text() == "mine"
    save_own_files({"a/b.jinja": b"new"}, tmp_path / "made", "hf_files")
    assert (tmp_path / "made/hf_files/a/b.jinja").read_bytes() == b"new"


def test_what_is_planted_meanwhile_is_not_followed(tmp_path, secret):
    path = tmp_path / "in" / "x"
    writing = replacing(path)
    writing.__enter__().write(b"new")
    [new] = os.listdir(path.parent)
    path.symlink_to(secret)
    assert new.startswith(files.NEW) and len(new) > 20
    with pytest.raises(OSError, match="is no regular file"):
        writing.__exit__(None, None, None)
    assert os.listdir(path.parent) == ["x"] and secret.read_text() == "mine"


def test_a_folder_that_is_moved_is_still_the_one_that_is_written(tmp_path, secret):
    folder = tmp_path / "in"
    with replacing(folder / "secret") as file:
        file.write(b"new")
        folder.rename(tmp_path / "moved")
        folder.symlink_to(secret.parent)
    assert secret.read_text() == "mine" and (tmp_path / "moved" / "secret").read_bytes() == b"new"


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name, **more: (
            calls.append(name), real(*args, **more)))
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o600)
    save_bytes(b"new", path)
    assert calls == ["fsync", "replace", "fsync"] and path.read_bytes() == b"new"
    with contextlib.suppress(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("plant", [p for p in PLANTS if p != "a folder"] + ["another name of a file"])
def test_a_planted_lock_is_not_opened(tmp_path, secret, plant):
    link = PLANTS.get(plant, lambda path, secret: os.link(secret, path))
    link(tmp_path / "in" / ".lock", secret)
    with pytest.raises(ConfigError, match=r"^out_dir=.* cannot be written "):
        lock(tmp_path / "in", "me")
    assert secret.read_text() == "mine" and os.listdir(secret.parent) == ["secret"]


def test_a_lock_removes_what_a_killed_run_left(tmp_path):
    (tmp_path / f"{files.NEW}0123").write_text("half")
    lock(tmp_path, "me").close()
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("change", [
    lambda data: data[:-1], lambda data: data[1:], lambda data: b"", lambda data: data[:20],
    lambda data: data.replace(b"7", b"8", 1), lambda data: data + b" "])
def test_the_cache_is_believed_by_its_digest(tmp_path, change):
    keep_json(dict(a=[7, 7.5]), tmp_path, "x")
    assert kept_json(tmp_path, "x") == dict(a=[7, 7.5])
    assert stat.S_IMODE(os.stat(tmp_path / "x").st_mode) == 0o600
    (tmp_path / "x").write_bytes(change((tmp_path / "x").read_bytes()))
    with pytest.raises(ValueError, match="it is not what was stored"):
        kept_json(tmp_path, "x")


def test_a_cached_file_that_others_can_write_is_not_read(tmp_path):
    keep_json({}, tmp_path, "x")
    (tmp_path / "x").chmod(0o620)
    with pytest.raises(ValueError, match="others can write it"):
        kept_json(tmp_path, "x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_cache_below_another_users_folder_is_not_used(tmp_path, monkeypatch):
    parent = tmp_path / "theirs"
    parent.mkdir(mode=0o755)
    (parent / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(parent / "cache"))
    assert files.cache_place()[0] == parent / "cache" / "memo"
    os.chown(parent, 12345, 12345)
    folder, why = files.cache_place()
    assert folder is None and why.startswith(f"{parent} belongs to another user; set XDG_CACHE_HOME to a ")


def test_an_input_is_never_the_output(tmp_path):
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").symlink_to("a.csv")
    check_other(tmp_path / "a.csv", tmp_path / "c.csv")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(ConfigError, match="is what is read; choose another -o"):
            check_other(tmp_path / "a.csv", tmp_path / name)


def test_json_takes_bounded_time_and_memory(tmp_path):
    """Of the smallest values that there are, as many as may be: seconds, not minutes; one more is refused."""
    text = '{"a":[' + "{}," * (files.MOST_VALUES // 2 - 1) + "1]}"
    (tmp_path / "a.json").write_text(text)
    began = time.process_time()
    assert len(files.load_json(tmp_path / "a.json", "mend it")["a"]) > 130_000
    assert time.process_time() - began < 3
    (tmp_path / "a.json").write_text(text.replace("1]", "[]]"))
    with pytest.raises(ConfigError, match=r"a.json cannot be read \(it must have at most 262,144 values"):
        files.load_json(tmp_path / "a.json", "mend it")
    (tmp_path / "a.json").write_text(text.ljust(files.MOST_JSON_CHARS + 1))
    with pytest.raises(ConfigError, match=r"a.json cannot be read \(it must be at most 16,777,216"):
        files.load_json(tmp_path / "a.json", "mend it")
