"""The GPU hour without a GPU: whatever an item does, the others' results and the report are there."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu_hour import report
from bench.gpu_hour.__main__ import main, read_argv
from bench.gpu_hour.items import ALL, ITEMS, Item
from bench.gpu_hour.orchestra import play, read, verdict

ROOT = Path(__file__).parents[1]
ENDS = {"right": "pass", "wrong": "fail: 2 of 3 lines, first zeros", "fails": "fail: RuntimeError: boom",
        "out_of_memory": "fail: RuntimeError: [enforce fail", "hangs": "timed out after 25 s, with 1 lines",
        "dies": "fail: killed by SIGSEGV", "absent": "skipped: there is one GPU"}


def planted(*names, limit_s=60):
    return {name: Item(name, f"{name}?", 25 if name == "hangs" else limit_s, f"tests.hour_items:{name}")
            for name in names}


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_an_item_that_fails_hangs_or_dies_leaves_the_others(tmp_path, capsys):
    items, args = planted(*ENDS), read_argv([f"--out={tmp_path}"])
    assert play(items, args) == 0
    found = {name: read(tmp_path / "items" / f"{name}.json") for name in ENDS}
    for name, ending in ENDS.items():
        assert found[name]["verdict"].startswith(ending), found[name]["verdict"]
        assert name in ("fails", "right", "absent") or found[name]["lines"][0]["what"] == "before"
    assert gone(int((tmp_path / "child").read_text()))
    told = json.loads((tmp_path / "report.json").read_text())
    assert [*told["items"]] == [*ENDS] and told["not_run"] == []
    assert any(line.startswith("wrong: norm: 6.7e-01, at most 7.8e-03") for line in told["change"])
    page = (tmp_path / "report.md").read_text()
    assert all(f"| {name} | {name}? | " in page for name in ENDS) and "| zeros | nan" in page
    # what is finished is not run again, but for what is named
    before = {name: (tmp_path / "items" / f"{name}.json").stat().st_mtime_ns for name in ENDS}
    play(items, read_argv([f"--out={tmp_path}", "--again=absent"]))
    after = {name: (tmp_path / "items" / f"{name}.json").stat().st_mtime_ns for name in ENDS}
    assert [name for name in ENDS if before[name] != after[name]] == ["absent"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_hour_goes_on_where_it_was(number, tmp_path):
    code = ("import sys; from bench.gpu_hour.__main__ import read_argv;"
            "from bench.gpu_hour.orchestra import play; from tests.test_gpu_hour import planted;"
            f"sys.exit(play(planted('absent', 'hangs'), read_argv(['--out={tmp_path}'])))")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "child").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert "interrupted; call again to go on" in process.communicate()[0] and process.returncode == 0
    assert gone(int((tmp_path / "child").read_text()))
    told = json.loads((tmp_path / "report.json").read_text())
    assert [*told["items"]] == ["absent"] and told["not_run"] == ["hangs"]
    play(planted("absent", "right"), read_argv([f"--out={tmp_path}"]))
    assert [*json.loads((tmp_path / "report.json").read_text())["items"]] == ["absent", "right"]


@pytest.mark.slow
def test_nothing_starts_that_may_last_longer_than_is_left(tmp_path, capsys):
    items = planted("right", limit_s=500) | planted("absent")
    play(items, read_argv([f"--out={tmp_path}", "--seconds=100"]))
    assert "not started, for want of seconds: right" in capsys.readouterr().out
    assert [*json.loads((tmp_path / "report.json").read_text())["items"]] == ["absent"]


def test_without_a_gpu_an_item_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("bench.gpu_hour.notes.end_with", lambda parent: None)
    (tmp_path / "items").mkdir()
    for item in (one for one in ALL if one.name != "A1"):
        from bench.gpu_hour.notes import device
        device.cache_clear()
        assert main([f"--item={item.name}", f"--out={tmp_path}"]) == 0, item.name
        found = read(tmp_path / "items" / f"{item.name}.json")
        assert verdict(found, 0, 1) == "skipped: torch finds no CUDA GPU", item.name


def test_every_fused_kernel_is_checked():
    from bench.gpu_hour.kernels import CHECKS
    from memo.kernels.ops import Ops
    assert {*CHECKS} == {*Ops._fields} - {"name"}


def test_figures_that_differ_are_said_as_the_table_has_them():
    line = dict(what="cudnn causal forward", measured=660.0, predicted=600.0, unit="TFLOP/s", ok=None)
    told = dict(B3=dict(verdict="pass", lines=[line | dict(entry="matmul"), line | dict(entry="LAUNCH_S"),
                                               line | dict(entry="memory", measured=620.0), line,
                                               line | dict(entry="cudnn forward", of_peak=0.66)]))
    assert report.changes(told, "NVIDIA H100 80GB HBM3") == [
        "B3: EFFICIENCY['hopper']['matmul']: 0.700 is 0.770 (cudnn causal forward)",
        "B3: LAUNCH_S: 600 is 660 TFLOP/s (cudnn causal forward)",
        "B3: EFFICIENCY['hopper']['cudnn forward']: 0.600 is 0.660 (cudnn causal forward)"]
    assert report.changes({}, "NVIDIA B900") == [
        "memo/system/hardware.py: GPUS does not know 'NVIDIA B900'"]


def test_the_page_tells_every_item():
    page = (ROOT / "docs/gpu.md").read_text()
    assert [item.name for item in ALL if f"| {item.name} | {item.limit_s} s |" not in page] == []
    assert len(ITEMS) == len(ALL)
    assert max(item.limit_s for item in ALL) <= 580
