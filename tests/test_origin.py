"""What numbers come from beside the keys: other data, code or kernels are found by ranks and by a resume."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import train
from memo.checkpoint import checkpoint
from memo.checkpoint.manifest import CHECKPOINT_JSON, manifest_text
from memo.data.batch import open_dataset
from memo.data.tokens import train_tokenizer, write_dataset
from memo.errors import ConfigError
from memo.system import files, origin
from memo.system.files import fingerprint
from memo.system.launch import same_everywhere
from memo.system.origin import code, differences
from tests.helpers import argv, losses

KEYS = dict(max_iters=2, lr_decay_iters=6, eval_interval=0, memory_plan="off", block_size=16, batch_size=1)


@pytest.fixture
def prepared(tmp_path):
    """prepared(documents) -> the folder of a dataset, always the same."""
    texts = [f"memory of the host {i} and more of it" for i in range(60)]
    tokenizer = train_tokenizer(texts, 300)

    def prepare(change=lambda texts: texts):
        write_dataset(tmp_path / "data", change(texts), tokenizer)
        return tmp_path / "data"
    return prepare


def resumed(out, *more):
    return train.main(["--init_from=resume", f"--out_dir={out}", "--max_iters=4", *more])


# --- fingerprints ---

def test_a_fingerprint_is_of_all_bytes_and_its_first_half_soon_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "STRETCH_BYTES", 16)
    path = tmp_path / "train.bin"
    whole = bytes(range(256)) * 64  # stretches of 16 bytes, 64 apart
    path.write_bytes(whole)
    before = fingerprint(path, True)
    assert len(before) == 32 and fingerprint(path, False) == before[:16]
    for at, seen in ((0, True), (15, True), (16, False), (63, False), (64, True), (len(whole) - 1, False)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        now = fingerprint(path, True)
        assert (now[:16] != before[:16]) == seen and now[16:] != before[16:]
    path.write_bytes(whole + b"\0")  # a stretch begins nowhere else
    assert fingerprint(path, False) != before[:16]


def test_ids_that_were_not_prepared_are_found_when_the_dataset_is_opened(prepared, monkeypatch):
    folder = prepared()
    meta = json.loads((folder / "meta.json").read_text())
    expected = {s: fingerprint(folder / f"{s}.bin", True) for s in ("train", "val")}
    starts = {f"{s}.docs": fingerprint(folder / f"{s}.docs", True) for s in expected}
    assert meta["fingerprints"] == expected | starts
    assert open_dataset(str(folder), 8).fingerprints == {f"{s} data": f for s, f in expected.items()}
    ids = np.fromfile(folder / "train.bin", np.uint16)
    ids[77] ^= 1
    ids.tofile(folder / "train.bin")
    with pytest.raises(ConfigError, match=r"train\.bin is not what was prepared: its fingerprint is "
                                          r"[0-9a-f]{16}, meta\.json has '[0-9a-f]{16}'; run python data/"):
        open_dataset(str(folder), 8)
    monkeypatch.setattr(files, "STRETCH_BYTES", 2)  # now this id is in none
    monkeypatch.setattr(files, "STRETCHES", 2)
    meta["fingerprints"] = {s: fingerprint(folder / f"{s}.bin", False) + f[16:]
                            for s, f in expected.items()}
    (folder / "meta.json").write_text(json.dumps(meta))
    open_dataset(str(folder), 8)
    with pytest.raises(ConfigError, match=r"its fingerprint is [0-9a-f]{32}, meta\.json has '[0-9a-f]{32}'"):
        open_dataset(str(folder), 8, whole=True)


@pytest.mark.parametrize("wrong", [3, [], {"train": 3}, {"train": None}])
def test_fingerprints_are_checked_like_all_of_meta_json(prepared, wrong):
    folder = prepared()
    meta = json.loads((folder / "meta.json").read_text()) | dict(fingerprints=wrong)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="meta.json: fingerprints=.* must be texts"):
        open_dataset(str(folder), 8)


# --- a resume ---

@pytest.mark.slow
@pytest.mark.parametrize("change", [
    lambda texts: texts[::-1], lambda texts: [*texts, "one document more"], lambda texts: texts[1:],
    lambda texts: [texts[0].replace("0", "1"), *texts[1:]]])
def test_other_train_data_end_a_resume_and_a_key_goes_on(prepared, tmp_path, change, capsys):
    out = tmp_path / "out"
    assert train.main(argv(prepared(), out, **KEYS)) == 0
    was = checkpoint.load(out).config["origin"]["train data"]
    now = open_dataset(str(prepared(change)), 8).fingerprints["train data"]
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            resumed(out)
        assert f"'{now}', was '{was}' in the checkpoint; give" in str(error.value)
    assert resumed(out, "--allow_other_data=true") == 0
    assert f"changed     train data='{now}', was '{was}'\n" in capsys.readouterr().out
    ckpt = checkpoint.load(out)
    assert (ckpt.iter, ckpt.config["origin"]["train data"]) == (4, now)
    assert resumed(out, "--max_iters=5") == 0  # from now on these are the run's
    prepared()
    with pytest.raises(ConfigError, match="allow_other_data"):  # what was allowed once is not for ever
        resumed(out, "--max_iters=6")


def test_another_dataset_is_other_data_and_the_same_one_elsewhere_is_not(prepared, dataset, tmp_path):
    out = tmp_path / "out"
    train.main(argv(prepared(), out, **KEYS))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert resumed(out, f"--dataset={tmp_path / 'copy'}", "--max_iters=3") == 0
    with pytest.raises(ConfigError, match=f"dataset={dataset}: .*train data='"):
        resumed(out, f"--dataset={dataset}")


@pytest.mark.slow
def test_other_val_data_are_said_and_nothing_is_where_nothing_changed(prepared, tmp_path, capsys):
    out = tmp_path / "out"
    train.main(argv(prepared(), out, **KEYS | dict(eval_interval=9)))
    resumed(out, "--max_iters=3")
    assert said_changes(capsys) == ["max_iters=3, was 2"]
    prepared(lambda texts: [*texts[:19], "something else", *texts[20:]])
    resumed(out)
    max_iters, val = said_changes(capsys)
    assert max_iters == "max_iters=4, was 3" and val.startswith("val data='")


def said_changes(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("changed     ") for line in lines if line.startswith("changed ")]


@pytest.mark.slow
def test_a_dataset_and_a_checkpoint_of_an_older_memo_are_known_by_their_stretches(prepared, tmp_path):
    """The dataset's meta.json had no fingerprints, and is prepared again by this memo."""
    out, folder = tmp_path / "out", prepared()
    meta = json.loads((folder / "meta.json").read_text())
    del meta["fingerprints"]
    (folder / "meta.json").write_text(json.dumps(meta))
    train.main(argv(folder, out, **KEYS))
    assert len(checkpoint.load(out).config["origin"]["train data"]) == 16
    prepared()
    assert resumed(out) == 0
    prepared(lambda texts: texts[1:])
    with pytest.raises(ConfigError, match="allow_other_data"):
        resumed(out, "--max_iters=5")
    reseal(out, origin=None)  # of before origins
    assert resumed(out, "--max_iters=5") == 0


def reseal(out, **changes):
    """Changes, or removes, keys in the newest checkpoint."""
    path = checkpoint.latest(out) / CHECKPOINT_JSON
    stored = {k: v for k, v in json.loads(path.read_text()).items() if k != "crc32"}
    stored["config"] = {k: v for k, v in (stored["config"] | changes).items() if v is not None}
    path.write_text(manifest_text(stored))


def test_what_else_has_changed_is_said_a_line_each(dataset, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    train.main(argv(dataset, out, **KEYS))
    stored = checkpoint.load(out).config
    reseal(out, learning_rate=0.5, origin=stored["origin"] | {"torch": "2.1", "memo": "0", "ranks": 7})
    capsys.readouterr()
    resumed(out, "--max_iters=3", "--beta1=0.5")
    here = code()
    assert said_changes(capsys) == [
        "max_iters=3, was 2", "beta1=0.5, was 0.9", f"memo='{here['memo']}', was '0'",
        f"torch='{here['torch']}', was '2.1'", "ranks=1, was 7"]
    reseal(out, origin=dict(torch="\x1b[2J", ranks=[1]))  # of a stranger
    resumed(out)
    assert "torch='" in (text := capsys.readouterr().out) and "\x1b" not in text


# --- code ---

def test_the_digest_of_the_sources_is_that_of_every_file(tmp_path, monkeypatch):
    root = tmp_path / "memo"
    (root / "memory").mkdir(parents=True)
    names = ("memo/a.py", "memo/memory/b.py", "memo/c.cpp", "model.py", "train.py")
    for name in names:
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(origin, "__file__", str(root / "run" / "state.py"))
    seen = {code()["memo"]}
    for name in names:
        (tmp_path / name).write_text("x = 2\n")
        seen.add(code()["memo"])
    assert len(seen) == 1 + len(names)


@pytest.mark.parametrize("name", ["memo", "torch", "train data", "val data", "attention in use", "ranks"])
def test_the_first_rank_with_another_origin_is_named(name):
    mine = {"memo": "1", "torch": "2", "train data": "3", "val data": "4", "attention in use": "5",
            "ranks": "6"}
    ranks = [(mine, "rank 0 (a)"), (mine, "rank 1 (b)"), (mine | {name: "other"}, "rank 2 (c)")]
    message = rf"^rank 2 \(c\) has {name}=other, rank 0 {name}={mine[name]}; same"
    with pytest.raises(ConfigError, match=message):
        same_everywhere(SimpleNamespace(objects=lambda value: ranks, rank=0), mine, "same")
    assert list(differences(mine, mine | {name: "other"})) == [name]


# --- Weights & Biases ---

def test_a_resumed_run_goes_on_in_its_run_of_weights_and_biases(dataset, tmp_path, monkeypatch):
    asked, out = [], tmp_path / "out"
    run = SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(
        init=lambda **keys: asked.append(keys) or run, login=lambda **k: False, Settings=SimpleNamespace))
    train.main(argv(dataset, out, wandb_log="true", **KEYS))
    resumed(out, "--max_iters=3")
    resumed(out, "--max_iters=4", "--wandb_log=false")
    resumed(out, "--max_iters=5", "--wandb_log=true")
    train.main(argv(dataset, tmp_path / "other", wandb_log="true", **KEYS))
    ids = [keys["id"] for keys in asked]
    assert len(ids) == 4 and len(set(ids[:3])) == 1 and ids[3] != ids[0]
    assert {keys["resume"] for keys in asked} == {"allow"}
    assert checkpoint.load(out).config["wandb_id"] == ids[0]
    reseal(out, wandb_id="../../x")  # of a stranger
    resumed(out, "--max_iters=6")
    assert "/" not in asked[-1]["id"] and len(losses(out)) == 6
