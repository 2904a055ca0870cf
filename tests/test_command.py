"""What the commands have in common."""

import importlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from memo import convert, profiler, sample
from memo.errors import ConfigError
from memo.planner import __main__ as planner_main
from memo.run import trace_step
from memo.system import command as commands
from memo.system.command import run
from memo.system.device import device_name
from tests.helpers import ROOT, told

SEVEN = ("-m", "memo.estimate", "config/7b_1m.py", "--gpus=8", "--gpu=a800-80gb", "--fast")


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    SEVEN, (*SEVEN, "--json"),
    *(("-m", f"memo.{name}", "--help")
      for name in ("estimate", "dsa", "planner", "profiler", "convert", "sample", "evaluate", "doctor")),
    ("train.py", "--help"), ("-m", "memo.run.trace_step", "--block_size=128", "--vocab_size=99")])
def test_a_command_ends_quietly_with_its_reader(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT,
                          text=True)
    os.close(writer)
    assert (done.returncode, told(done.stderr)) == (-signal.SIGPIPE, "")


COMMANDS = [("memo.sample", "out", "--prompt=a"), ("memo.evaluate", "out"),
            ("memo.convert", "to-hf", "out", "hf"), ("memo.profiler", "--calibrate"), ("memo.doctor",),
            ("memo.run.trace_step", "--vocab_size=9"), ("memo.estimate",),
            ("memo.dsa", "a.csv", "-o", "b"), ("memo.planner", "a.log", "-o", "b"),
            ("data/stdlib/prepare.py",), ("data/text/prepare.py", "--source=a", "--tokenizer=b"),
            ("data/chat/prepare.py", "--source=a", "--tokenizer=b")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_help_and_mistakes_are_told_before_torch_is_imported(tmp_path, command):
    for name in ("torch", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('too early')")
    program, *args = command
    start = [sys.executable, *(["-m"] if program.startswith("memo.") else []), program]
    for argv, code, says in ((["--help"], 0, "--"), ([*args, "--qqqq=1"], 2, "error: .*--qqqq=1"),
                             ([*args, "--qqqq"], 2, "error: .*--qqqq")):
        done = subprocess.run([*start, *argv], capture_output=True, text=True, cwd=ROOT,
                              env=os.environ | dict(PYTHONPATH=str(tmp_path)))
        told, silent = (done.stderr, done.stdout) if code else (done.stdout, done.stderr)
        assert done.returncode == code and re.search(says, told) and not silent, done.stderr
        assert not code or told.count("\n") == 1
        assert max(map(len, told.splitlines())) <= 125


@pytest.mark.parametrize("name", ["sample", "convert", "dsa", "planner", "estimate"])
def test_commands_of_one_process_say_so_under_torchrun(name, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = importlib.import_module(f"memo.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"memo.{name}.__main__")
    assert run(module.main, ["a", "b"]) == 2
    assert re.fullmatch(rf"error: python -m memo.{name} is one process, WORLD_SIZE=2 .*; start it without "
                        r"torchrun\n", capsys.readouterr().err)


@pytest.mark.slow
def test_no_module_of_the_current_folder_is_imported(tmp_path):
    """Unless memo lies there: a folder of a model of others may hold any file."""
    for name in ("safetensors", "tokenizers", "torch", "numpy", "difflib", "tqdm"):
        (tmp_path / f"{name}.py").write_text("print('THEIRS')")
    done = subprocess.run([sys.executable, "-m", "memo.convert", "from-hf", ".", "out"], capture_output=True,
                          text=True, cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout) == (2, "") and "config.json cannot be read" in done.stderr


@pytest.mark.slow
def test_an_installed_command_is_python_m():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts.values()) == {"memo.system.command:installed"}
    for name in scripts:
        start = (f"import sys; sys.argv[0] = '/bin/{name}'; "
                 "from memo.system.command import installed; sys.exit(installed())")
        ends = []
        for program in (("-c", start), ("-m", name.replace("-", "."))):
            done = subprocess.run([sys.executable, *program, "--help"], capture_output=True,
                                  text=True, cwd=ROOT)
            ends.append((done.returncode, done.stdout, done.stderr))
        assert ends[0] == ends[1] and ends[0][0] == 0 and ends[0][1], name


@pytest.mark.parametrize("main,argv,message", [
    (sample.main, ["o", "--prompt=a", "--temperature=inf"], "temperature=inf must be finite"),
    (sample.main, ["o", "--prompt=a", "--temperature=-1"], "temperature=-1.0 must be at least 0.0"),
    (sample.main, ["o", "--prompt=a", "--temperature=1e9"],
     "temperature=1000000000.0 must be at most 1000000.0 (all"),
    (sample.main, ["o", "--prompt=a", f"--seed={2**70}"], "(seeds have 63 bits)"),
    (sample.main, ["o", "--prompt=a", "--seed=-1"], "seed=-1 must be at least 0"),
    (sample.main, ["o", "--prompt=a", "--top_k=99999999999"],
     "top_k=99999999999 must be at most 4294967296 (no vocabulary"),
    (sample.main, ["o", "--prompt=a", "--max_new_tokens=0"], "max_new_tokens=0 must be at least 1"),
    (sample.main, ["o", "--prompt=a", "--max_new_tokens=9999999999"],
     "must be at most 2147483648 (rows are counted in 32"),
    (sample.main, ["o", "--prompt=a", "--max_new=1"], "unrecognized arguments: --max_new=1"),
    (sample.main, ["", "--prompt=a"], "out_dir='' must not be empty"),
    (planner_main.main, ["a.log", "-o", "b", "--alignment=0"], "alignment=0 must be at least 1"),
    (planner_main.main, ["a.log", "-o", "b", "--time_limit=nan"], "time_limit=nan must be at least 0.0"),
    (planner_main.main, ["a.log", "-o", "b", "--time_limit=1e99"],
     "(that is eleven days; what is found by then is used)"),
    (planner_main.main, ["a.log", "-o", ""], "output='' must not be empty"),
    (convert.main, ["to-hf", "", "hf"], "out_dir='' must not be empty"),
    (convert.main, ["from-hf", "a\nb", "hf"], "hf_folder='a\\nb' must be one line"),
    (profiler.main, ["--calibrate", "--dtype=float16"],
     "dtype='float16' must be one of auto, float32, bfloat16"),
    (trace_step.main, ["--vocab_size=9", "--multiprocessors=1e3"], "multiprocessors='1e3' must be int"),
    (trace_step.main, ["--vocab_size=9", "--multiprocessors=-1"], "multiprocessors=-1 must be at least 0"),
    (trace_step.main, [], "vocab_size=0 must be known without a dataset"),
])
def test_options_have_bounds(capsys, main, argv, message):
    assert run(main, argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("n,says", [(1, "CPU, 1 thread"), (2, "CPU, 2 threads")])
def test_threads_are_counted_in_english(monkeypatch, n, says):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n)
    assert device_name(torch.device("cpu")) == says


def test_a_package_that_is_missing_is_one_line(capsys):
    def needs(argv):
        import a_missing_package  # noqa: F401
    assert run(needs, []) == 2
    assert capsys.readouterr().err == ("error: a_missing_package is not installed, which this needs; "
                                       "try pip install -r requirements.txt\n")

    def breaks(argv):
        raise ModuleNotFoundError("No module named 'memo.other'", name="memo.other")
    assert run(breaks, []) == 1 and "Traceback" in capsys.readouterr().err


def test_an_error_of_a_file_names_it(capsys):
    assert run(lambda argv: Path("/no/such/file").read_text(), []) == 2
    assert capsys.readouterr().err == "error: /no/such/file: No such file or directory\n"


def test_a_rank_lost_by_a_calibration_is_one_line_without_a_checkpoint(monkeypatch, capsys):
    def lose(*args):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer\nmore of it")
    monkeypatch.setattr(profiler, "calibrate", lose)
    assert run(profiler.main, ["--calibrate", "--device=cpu"]) == 1
    assert capsys.readouterr() == (
        "", "error: lost another rank ([gloo/transport/tcp/pair.cc:534] Connection closed by peer); what "
            "is saved is whole; the other ranks' errors say why\n")


@pytest.mark.slow
def test_a_start_imports_nothing_that_can_wait():
    late = "matplotlib torch.distributed.checkpoint scipy highspy ortools wandb transformers"
    code = ("import sys, train, memo.estimate; "
            f"print(*(name for name in {late.split()} if name in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_an_error_is_one_line_whatever_was_typed(capsys):
    def main(argv):
        raise ConfigError(f"--search={argv[0]} takes no value")
    assert commands.run(main, ["a\nb\u2028\x1b[2J\udcff"]) == 2
    assert capsys.readouterr().err == "error: --search=a?b??[2J? takes no value\n"
