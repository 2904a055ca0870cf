"""Items for tests/test_gpu_hour.py: one that is right, and others that end in every way an item may end."""

import os
import time

import torch

from bench.gpu_hour.notes import Skip


def right(notes, asked):
    notes.line("sum", 4.0, 4.2, "s", ok=True, entry="LAUNCH_S")


def wrong(notes, asked):
    notes.line("before", 1)
    notes.error("zeros", torch.zeros(3), torch.zeros(3).double())
    notes.error("norm", torch.ones(4), torch.ones(4).double() * 3)


def fails(notes, asked):
    with notes.trying("what may fail"):
        raise Skip("no such kernel")
    notes.line("before", float("nan"))
    raise RuntimeError("boom\nmore")


def out_of_memory(notes, asked):
    notes.line("before", 1)
    torch.empty(2**50, dtype=torch.uint8).fill_(1)


def hangs(notes, asked):
    notes.line("before", 1)
    if os.fork() == 0:  # which dies with it
        (asked.out / "child").write_text(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)


def dies(notes, asked):
    notes.line("before", 1)
    os.kill(os.getpid(), 11)


def absent(notes, asked):
    raise Skip("there is one GPU")
