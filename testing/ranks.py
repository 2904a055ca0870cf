"""Processes that stand for ranks. Pools of them talk over gloo, and stay for the next test; all are forked
from a server that has imported torch: a process of its own takes two seconds for that."""

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from memo.errors import Unusable
from memo.planner.allocator import load_library
from memo.system import launch
from memo.system.command import run
from memo.system.launch import Launch, connected

TIMEOUT_S = 1800  # of what takes seconds: only what hangs takes so long, on a busy machine too
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["testing.ranks", "train", "torch._dynamo", "torch.distributed.checkpoint"])


def serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    launch.LOST_S = 10**6  # a pool without work is stopped, and says nothing
    # even a stopped rank ends with the server, which ends with the tests: none of its ranks holds it back
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with connected(Launch(rank, size, rank, size)) as host:
        while (job := pipe.recv()) is not None:
            work, args = job
            try:
                pipe.send((work(host, *args), None))
            except BaseException:
                pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    def __init__(self, size: int) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, work: Callable, *args: object) -> None:
        """work(host, *args) begins on every rank."""
        self.send_signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((work, args))

    def run(self, work: Callable, *args: object) -> list:
        """[work(host, *args) of every rank]. What one of them raises is raised here, and the pool is gone.
        Behind it the ranks are stopped: each of gloo's threads would wake up a hundred times a second."""
        self.start(work, *args)
        results, waiting = {}, dict(enumerate(self.pipes))
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), TIMEOUT_S)
            failed = None if ready else f"ranks {sorted(waiting)} did not answer within {TIMEOUT_S} s"
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                results[rank], error = waiting.pop(rank).recv()
                failed = failed or error
            if failed:
                for process in self.processes:
                    process.kill()
                pool.cache_clear()
                raise AssertionError(failed)
        self.send_signal(signal.SIGSTOP)
        return [results[rank] for rank in range(len(self.pipes))]

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        self.send_signal(signal.SIGCONT)
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(TIMEOUT_S)


def redirect(said: Path) -> None:
    """What this process says lies in `said`.out and .err from now on."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)


def enter(main: Callable, argv: list[str], rank: int, size: int, port: int, said: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    redirect(said)
    torch.set_num_threads(1)
    code = run(main, argv)
    sys.stdout.flush()
    os._exit(code)


def start_ranks(main: Callable, argv: list[str], size: int, folder: Path) -> list:
    """The processes of `size` ranks of a command, main(argv), which find in their environment what torchrun
    writes there: without its seconds of imports, its signals, and its end of all ranks when one is gone. What
    a rank says lies in folder/<rank>.out and .err."""
    port = free_port()
    ranks = [PROCESSES.Process(target=enter, args=(main, argv, rank, size, port, folder / str(rank)),
                               daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    return ranks


def agent(main: Callable, argv: list[str], options: list[str], said: Path) -> None:
    redirect(said)
    sys.stdout = os.fdopen(1, "w", 1)  # line by line: a rank may be killed
    os.environ["OMP_NUM_THREADS"] = "1"
    config, *_ = config_from_args(parse_args([*options, "--start-method=fork", "train.py"]))
    elastic_launch(config, main)(argv)


def start_agent(main: Callable, argv: list[str], *options: str, said: Path) -> BaseProcess:
    """The process of a torchrun with these options, without its seconds of imports: its ranks, main(argv),
    are forked. What all of them say lies in `said`.out and .err."""
    process = PROCESSES.Process(target=agent, args=(main, argv, list(options), said))
    process.start()
    return process


def children(pid: int) -> list[int]:
    """The processes that another one started: a torchrun's are its ranks, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@cache
def pool(size: int) -> Ranks:
    """The pool of `size` ranks."""
    with suppress(Unusable):
        load_library()  # the ranks, which start at once, would build it one beside the other
    made = Ranks(size)
    atexit.register(made.close)
    return made
