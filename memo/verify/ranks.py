"""Processes that stand for the ranks of a run that is verified, and the pipes by which they tell."""

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig

import memo.checkpoint.dcp  # noqa: F401 - a second, here once for all ranks
from memo.errors import ConfigError, RunFailed, reason
from memo.system.axis import Axis
from memo.system.command import progress
from memo.system.launch import Launch, connected

SILENT_S = 300  # no rank says anything for so long: they wait for each other


class Told:
    """Holds a rank's pipe to the process that has started it: no message of torch.distributed is needed to
    compare ranks, for these are what is verified."""

    def __init__(self, rank: int, world: int, pipe: Connection, folder: Path) -> None:
        self.rank, self.world, self.pipe, self.folder = rank, world, pipe, folder

    def share(self, value: Any) -> list[Any]:
        """Gives each rank the values of all."""
        # as bytes: torch would send each tensor by a file of its own
        self.pipe.send(("share", pickle.dumps(value)))
        return [pickle.loads(theirs) for theirs in self.pipe.recv()]

    def say(self, kind: str, value: object) -> None:
        self.pipe.send((kind, value))


def serve(work: Callable[[Axis, Told], None], told: Told, port: int) -> None:
    """Is a rank: calls work(host, told), and tells how it ended."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    for number in (1, 2):  # what memo prints is no part of the report
        os.dup2(os.open(told.folder / f"{told.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(told.rank))
    torch.set_num_threads(1)  # a cut run's operations are too short to share
    try:
        with connected(Launch(told.rank, told.world, told.rank, told.world)) as host:
            work(host, told)
            told.share(None)  # the others are done too
    except BaseException as e:
        told.say("error", (isinstance(e, ConfigError), f"{type(e).__name__}: {reason(e)}"))
        raise
    told.say("done", None)


def last_words(path: Path) -> str:
    """Finds the last line that a rank has printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter(errors + lines[::-1]), "")


def run_ranks(work: Callable[[Axis, Told], None], world: int, found: Callable[[Any], object]) -> None:
    """Runs work(host, told) in `world` processes, and calls found(value) for each told.say("found", value).
    Errors: ConfigError; RunFailed: a rank has failed, or is gone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    stage = ["starting"]
    with tempfile.TemporaryDirectory(prefix="memo-verify-", ignore_cleanup_errors=True) as folder:
        pipes, ranks = [], []
        context = multiprocessing.get_context("fork")  # they need not import torch again
        for rank in range(world):
            mine, its = context.Pipe()
            ranks.append(context.Process(target=serve, daemon=True, args=(
                work, Told(rank, world, its, Path(folder)), port)))
            ranks[-1].start()
            its.close()
            pipes.append(mine)
        try:
            with progress(lambda: f"verifying on {world} rank{'s' * (world > 1)}: {stage[0]}"):
                listen(pipes, Path(folder), stage, found)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def listen(pipes: list[Connection], folder: Path, stage: list[str], found: Callable[[Any], object]) -> None:
    """Passes on what ranks share, until all are done. Errors: as run_ranks()."""
    shared, left = dict[int, object](), set(range(len(pipes)))
    while left:
        ready = wait([pipes[rank] for rank in left], SILENT_S)
        if not ready:
            raise RunFailed(f"{stage[0]}: no rank has said anything for {SILENT_S} s, each waits for another")
        for rank in [rank for rank in left if pipes[rank] in ready]:
            try:
                kind, value = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                time.sleep(0.5)  # for its last words
                why = last_words(folder / f"{rank}.txt")
                raise RunFailed(f"{stage[0]}: rank {rank} is gone{why and f': {why}'}") from None
            match kind:
                case "share":
                    shared[rank] = value
                case "stage":
                    stage[0] = value
                case "found":
                    found(value)
                case "error" if value[0]:
                    raise ConfigError(value[1].partition(": ")[2])
                case "error":
                    raise RunFailed(f"{stage[0]}: rank {rank}: {value[1]}")
                case "done":
                    left.discard(rank)
        if len(shared) == len(pipes):
            values = [shared[rank] for rank in range(len(pipes))]
            for pipe in pipes:
                pipe.send(values)
            shared.clear()
