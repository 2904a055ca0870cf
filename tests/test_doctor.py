"""python -m memo.doctor: what it finds, and the faults that it names, each with its remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memo import doctor
from memo.errors import OutOfHostMemory, Unusable
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena
from memo.system.command import run
from testing.ranks import TIMEOUT_S, start_ranks

CPU = torch.device("cpu")
HERE = doctor.Here(ALONE.host, 1, CPU, torch.float32)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(doctor.LOCK_BYTES, "cpu", 2**21)
    monkeypatch.setattr(doctor, "copy_rate", lambda nbytes, device, host: 5e9)


def found(check, here=HERE):
    return {f.what: f for f in doctor.findings_of(check, here)}


def faults(check, here=HERE):
    return {name: f.remedy for name, f in found(check, here).items() if f.remedy}


def rows(capsys, *argv):
    """(exit code, what is told of each thing in JSON) of the command."""
    code = run(doctor.main, ["--device=cpu", "--json", *argv])
    told = json.loads(capsys.readouterr().out)
    assert told["faults"] == sum(bool(f["remedy"]) for f in told["findings"])
    return code, {f["what"]: f for f in told["findings"]}


def test_a_machine_without_a_fault(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "attentions", lambda *_: {})
    code, told = rows(capsys)
    assert code == 0 and not [f for f in told.values() if f["remedy"]]
    assert told["torch"]["found"].startswith(torch.__version__)
    assert told["attention=cpu"]["found"] == told["ops=torch"]["found"] == "chosen"
    assert told["copies in host memory"]["found"] == "5 GB/s" and "TFLOP/s" in told["matmul"]["found"]
    assert told["cache folder"]["found"].endswith("memo")
    assert told["ops=triton"]["found"] == "they need a CUDA device"


def test_no_compiler(capsys, monkeypatch, tmp_path):
    def lacking(device):
        raise Unusable("there is no C++ compiler, g++ (No such file or directory)")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "Arena", lacking)
    monkeypatch.setattr(doctor, "speeds", lambda here: iter(()))
    code, told = rows(capsys)
    assert code == 1 and told["g++"]["found"] == "none" and "apt-get install g++" in told["g++"]["remedy"]
    assert "no C++ compiler" in told["memory plan's library"]["remedy"]
    assert "--memory_plan=off" in told["memory plan's library"]["remedy"]


def test_the_table_has_the_fault_below_its_row(capsys, monkeypatch, tmp_path):
    Arena(torch.device("cpu")).close()  # builds its library, which needs no compiler from then on
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "TOGETHER", ())
    assert run(doctor.main, ["--device=cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    row = next(i for i, line in enumerate(lines) if line.split() == ["g++", "none"])
    assert lines[row + 1].startswith("    FAULT: install g++") and lines[-1] == "1 fault"


def test_locked_memory_that_is_refused(monkeypatch):
    def refused(nbytes, device):
        raise OutOfHostMemory("page-locking 4 GiB failed (ulimit -l is 64 KiB); try `ulimit -l unlimited`")

    def never(*_):
        raise AssertionError("copies cannot be measured")
    monkeypatch.setattr(doctor, "HostSlab", refused)
    monkeypatch.setattr(doctor, "copy_rate", never)
    told = found(doctor.host_memory)
    assert told["host memory taken"].found == "refused"
    assert faults(doctor.host_memory) == {
        "host memory taken": "page-locking 4 GiB failed (ulimit -l is 64 KiB); try `ulimit -l unlimited`"}


def test_packages_that_are_missing_or_old(monkeypatch):
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: real(name) * (name not in ("tqdm", "wandb")))
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.10.1"))
    assert faults(doctor.packages) == {"tqdm": "pip install -r requirements.txt",
                                       "torch": "install torch 2.11 or newer, see docs/install.md"}
    assert found(doctor.packages)["wandb"].found == "not installed: no --wandb_log"


def test_a_gpu_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver", lambda: "470.1 for CUDA up to 11.4")
    assert "there is one (driver 470.1 for CUDA up to 11.4); install torch" in faults(doctor.devices)["GPU"]


def test_a_cache_folder_that_cannot_be(monkeypatch):
    monkeypatch.setattr(doctor, "cache_place", lambda: (None, "/x can be written by others; chmod go-w /x"))
    assert faults(doctor.memory_plan) == {"cache folder": "/x can be written by others; chmod go-w /x"}


def test_a_rate_below_half_of_what_is_expected_is_a_fault(monkeypatch):
    monkeypatch.setattr("memo.doctor.gpu_named", lambda name: "h100-80gb")  # 25 GB/s each way
    here = doctor.Here(ALONE.host, 1, CPU, torch.float32)
    assert faults(doctor.host_memory, here).keys() == {"copies in host memory"}  # 5
    assert found(doctor.host_memory, here)["copies in host memory"].expected == "25 GB/s"
    monkeypatch.setattr(doctor, "copy_rate", lambda nbytes, device, host: 13e9)
    assert faults(doctor.host_memory, here) == {}


def test_a_check_that_fails_is_a_fault(monkeypatch):
    def broken(*_):
        raise RuntimeError("an odd library\nmore")
    monkeypatch.setattr(doctor, "resolve_ops", broken)
    assert faults(doctor.kernels) == {"kernels": "an odd library; see docs/install.md"}


def on_another_driver(argv):
    """Rank 1 has another driver, and no g++."""
    doctor.LOCK_BYTES["cpu"], doctor.PAIR_BYTES["cpu"] = 2**21, 2**12
    doctor.copy_rate, doctor.speeds = (lambda *_: 5e9), (lambda here: iter(()))
    doctor.TOGETHER = doctor.alike, doctor.host_memory, doctor.pairs
    other = os.environ["RANK"] == "1"
    doctor.driver = lambda: "570.86" if other else "580.95"
    if other:
        os.environ["PATH"] = ""
    return doctor.main(argv)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_on_another_driver_and_one_without_a_compiler(tmp_path):
    ranks = start_ranks(on_another_driver, ["--device=cpu", "--json"], 3, tmp_path)
    for process in ranks:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [1, 1, 1], (tmp_path / "0.err").read_text()
    told = {f["what"]: f for f in json.loads((tmp_path / "0.out").read_text())["findings"]}
    assert {(tmp_path / f"{rank}.out").read_text() for rank in (1, 2)} == {""}
    assert told["ranks"]["remedy"].startswith("rank 1 (")
    assert "has driver=570.86, rank 0 driver=580.95; give all hosts one driver" in told["ranks"]["remedy"]
    [of_rank] = [what for what in told if what.startswith("rank 1 (") and what.endswith("): g++")]
    assert "install g++" in told[of_rank]["remedy"] and not told["g++"]["remedy"]
    [pairs] = [what for what in told if what.startswith("gloo in a host, slowest pair ")]
    assert told[pairs]["found"].endswith(" GB/s") and told[pairs]["found"] != "0 GB/s"


def test_mistakes(capsys):
    assert run(doctor.main, ["--jsn"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --jsn; see --help\n"


def test_it_starts_without_the_packages_whose_lack_it_tells():
    blocked = "import sys; sys.modules |= dict.fromkeys(sys.argv[1:]); import memo.doctor"
    subprocess.run([sys.executable, "-c", blocked, *doctor.WITHOUT.keys() - {"numpy"}], check=True,
                   timeout=TIMEOUT_S)
