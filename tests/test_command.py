"""What the commands have in common."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEVEN = ("-m", "memo.estimate", "config/7b_1m.py", "--gpus=8", "--gpu=a800-80gb", "--fast")


@pytest.mark.parametrize("command", [
    SEVEN, (*SEVEN, "--json"), *(("-m", f"memo.{name}", "--help") for name in ("estimate", "dsa", "planner", "profiler",
                                                                               "convert", "sample")),
    ("train.py", "--help"), ("trace_step.py", "--block_size=128", "--vocab_size=99")])
def test_a_command_ends_quietly_with_its_reader(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_start_imports_nothing_that_can_wait():
    late = "matplotlib torch.distributed.checkpoint scipy highspy ortools wandb transformers"
    code = f"import sys, train, memo.estimate; print(*(name for name in {late.split()} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("\n", "")
