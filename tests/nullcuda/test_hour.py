"""The GPU hour on null CUDA: every item runs to its end, is interrupted and resumed, and the report has all.
What it says of numbers is worth nothing here: checks of zeros fail, as they should."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from bench.gpu_hour.items import ALL, ITEMS
from tests.nullcuda.runs import ROOT

SMALL = ("--attention=flash", "--n_embd=256", "--longest=2048", "--host_memory_gb=1")
# null CUDA has no expandable segments
RUN = os.environ | dict(PYTORCH_CUDA_ALLOC_CONF="", OMP_NUM_THREADS="1")


def hour(out, *more, **environment):
    command = [sys.executable, "-m", "bench.gpu_hour", f"--out={out}", *SMALL, *more]
    return subprocess.Popen(command, cwd=ROOT, env=RUN | environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def report_of(out):
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A folder in which the hour was interrupted in its second item, and then played to its end."""
    out = tmp_path_factory.mktemp("hour")
    process = hour(out)
    while not (out / "items" / "A2.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "interrupted; call again to go on" in process.communicate()[0] and process.returncode == 0
    assert [*report_of(out)["items"]] == ["A1"]
    first = (out / "items" / "A1.json").stat().st_mtime_ns
    process = hour(out)
    text = process.communicate()[0]
    assert process.returncode == 0 and f"{len(ALL) - 1} items" in text
    assert (out / "items" / "A1.json").stat().st_mtime_ns == first
    return out


def test_every_item_runs_to_its_end(played):
    told = report_of(played)
    assert [*told["items"]] == [*ITEMS] and told["not_run"] == []
    for name, found in told["items"].items():
        log = (played / "items" / f"{name}.log").read_text()[-3000:]
        assert found["lines"] or found["skipped"] == "there is one GPU", log
        assert "error" not in found and "timed out" not in found["verdict"], log
        assert not any("Error: CUDA" in str(line.get("measured")) for line in found["lines"]), log
    assert {name for name, found in told["items"].items() if "skipped" in found} == {"A7", "B6"}


def test_no_number_is_right_where_nothing_is_computed(played):
    items = report_of(played)["items"]
    assert [name for name in ("A2", "A3", "A4", "A5", "A6") if items[name]["verdict"] == "pass"] == []
    checks = [line["ok"] for line in items["A2"]["lines"] if line["unit"] == "away"]
    assert len(checks) > 150 and not any(checks)


def test_rivals_and_memo_have_seconds(played):
    for name, found in report_of(played)["items"].items():
        if name[0] == "C" and name != "C7":
            lines = {line["case"]: line for line in found["lines"] if "case" in line}
            assert {"memo", "torch checkpoint"} <= {*lines}
            assert all(line.get("step_s", 0) > 0 for line in lines.values()), lines


def test_the_report_tells_all(played):
    text = (played / "report.md").read_text()
    assert [name for name in ITEMS if f"| {name} | {ITEMS[name].question} | " not in text] == []
    page = (played / "gpu.md").read_text()
    assert "## What to change" in page and "EFFICIENCY['hopper']" in page and len(page) < len(text)


def test_two_gpus_have_layouts_and_messages(tmp_path):
    process = hour(tmp_path, "A7", "B6", NULL_DEVICES="2")
    assert process.wait() == 0
    items = report_of(tmp_path)["items"]
    assert {line["what"].partition(":")[0] for line in items["A7"]["lines"] if "sent_bytes" in line} >= {
        "tp2", "metp2", "ring2", "ulysses2", "pp2", "dp2 sharded"}
    assert {line["what"].split()[0] for line in items["B6"]["lines"]} >= {"gather", "scatter", "shift"}
