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
