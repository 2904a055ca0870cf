"""Several processes as one run: torchrun's environment, how ranks find each other and fail together. `host`
is the Axis of all ranks over gloo (memo/system/axis.py)."""

import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from memo.errors import ConfigError, DataError, TrainingError, last_line
from memo.system.axis import FOREVER, Axis, T
from memo.system.command import Interrupted, progress

CONNECT_S = 600  # for a first message
LOST_S, BEAT_S = 600, 30  # a rank that says nothing for LOST_S is lost; it says something every BEAT_S
MOST_RANKS = 2**20
ALIKE = "start all ranks with the same command, memo and data, on hosts that are alike"
LEAVES = threading.Lock()


# --- torchrun ---

@dataclass(frozen=True)
class Launch:
    """Holds what torchrun says of this process."""

    rank: int
    world: int  # ranks in all
    local_rank: int
    local_world: int  # ranks on this host
    threads: int = 0  # CPU threads to use, where torchrun left a rank just one; 0: as torch has it

    def take(self, device: torch.device) -> None:
        """Takes this rank's threads and its GPU, if `device` is one."""
        if self.threads:
            torch.set_num_threads(self.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)


def whole_number(name: str, default: int | str, least: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text} in the environment must be a whole number from {least} to {most}; "
                          "start the ranks with torchrun, which sets it")
    return int(text)


def read_launch() -> Launch:
    """Reads torchrun's environment; without torchrun it is a single process. Errors: ConfigError."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Launch(0, 1, 0, 1)
    world = whole_number("WORLD_SIZE", 1, 1, MOST_RANKS)
    rank = whole_number("RANK", 0, 0, world - 1)
    local_world = whole_number("LOCAL_WORLD_SIZE", 1, 1, world)
    local_rank = whole_number("LOCAL_RANK", 0, 0, local_world - 1)
    threads = 0
    if local_world > 1 and os.environ.get("OMP_NUM_THREADS") == "1" and hasattr(os, "sched_getaffinity"):
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
    return Launch(rank, world, local_rank, local_world, threads)


def follow_torchrun() -> None:
    """Sends this process SIGTERM when torchrun, which started it, is gone: it saves and ends."""
    started_by = os.getppid()

    def follow() -> None:
        while os.getppid() == started_by:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=follow, name="memo torchrun", daemon=True).start()


def run_name() -> str:
    """Gives this run a random name, which torchrun's own store keeps for those that it starts again."""
    name = uuid4().hex
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with suppress(RuntimeError, KeyError, ValueError):  # without it the run is another one
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False)
            return store.compare_set("memo run", "", name).decode()
    return name


# --- errors of several ranks ---

class Agreed(ConfigError):
    """Tells of an error that all ranks raise together."""


def rank_name(rank: int) -> str:
    """Names a rank of this host, for messages."""
    return f"rank {rank} ({socket.gethostname()})"


def together(host: Axis, work: Callable[..., T], *args: object) -> T:
    """Calls work(*args), which talks to no other rank. One rank's ConfigError or OSError is Agreed on all."""
    results, error = list[T](), None
    try:
        results = [work(*args)]
    except (ConfigError, OSError) as e:
        if host.size == 1:
            raise
        error = str(e)
    errors = host.objects(error and (error, rank_name(host.rank)))
    if failed := [e for e in errors if e]:
        text, where = failed[0]
        raise Agreed(text if all(e and e[0] == text for e in errors) else f"{where}: {text}")
    return results[0]


def of_first(host: Axis, work: Callable[..., T], *args: object) -> T:
    """Calls work(*args) on rank 0, as together() does -> its result, on all ranks."""
    results: list = host.objects(together(host, lambda: None if host.rank else work(*args)))
    return results[0]


def same_everywhere(host: Axis, values: dict[str, object], remedy: str = ALIKE) -> None:
    """Raises Agreed where `values` {name: value} are not the same on all ranks."""
    (first, _), *others = host.objects((values, rank_name(host.rank)))
    for theirs, where in others:
        for name in first:
            if theirs[name] != first[name]:
                raise Agreed(f"{where} has {name}={theirs[name]}, rank 0 {name}={first[name]}; {remedy}")


def leave(line: str, wait_s: float = 0, code: int = 1) -> None:
    """Ends the process, `wait_s` after it has said the line, if any, whatever its threads wait for."""
    with LEAVES:  # the first thread that knows a reason
        if line:
            print(f"error: {line}", file=sys.stderr, flush=True)
        time.sleep(wait_s)
        os._exit(code)


@contextmanager
def rank_errors(host: Axis, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Ends this process at once where it is one of several and the with-block raises: an orderly end would
    wait for ranks that may be gone. Rank 0 reports an error that all share. `where`: how far a run is."""
    try:
        yield
    except Exception as e:
        if host.size == 1:
            raise
        common = isinstance(e, (Agreed, TrainingError))
        line = last_line(e) or traceback.format_exc()
        if not common:
            line = f"{rank_name(host.rank)}{where() if where else ''}: {line}"
        early = where is None and isinstance(e, (ConfigError, OSError))
        with suppress(OSError):
            sys.stdout.flush()
        # torchrun ends all ranks when the first one is gone: that is the one which says why
        silent = common and host.rank > 0
        leave("" if silent else line, 0.5 * silent, 2 if early or isinstance(e, DataError) else 1)


# --- connections ---

def meeting(store: dist.Store, rank: int, world: int) -> str:
    """Names what the present ranks write into the store, which torchrun may keep over a restart: the
    addresses of ranks that are gone must not be found. Errors: ConfigError: this rank is of another run."""
    me = uuid4().hex
    if rank > 0:
        with progress(lambda: f"rank {rank}: waiting for rank 0 to answer"):
            while not store.check([f"answer {me}"]):
                store.set(f"hello {rank}", me)  # again: another process may have said so in between
                with suppress(dist.DistStoreError):
                    store.wait([f"answer {me}"], timedelta(seconds=1))
        name, theirs = store.get(f"answer {me}").decode().split()
        if int(theirs) != world or store.add(f"here {name} {rank}", 1) > 1:
            raise ConfigError(f"RANK={rank} WORLD_SIZE={world} does not go with the rank 0 found, of "
                              f"WORLD_SIZE={theirs}, or is there twice; give all ranks of a run the same "
                              "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and each another RANK")
        store.get(f"all {name}")  # waits, as rank 0 says
        return name
    answered, missing = set[str](), [*range(1, world)]
    with progress(lambda: f"waiting for {len(missing)} of {world} ranks: {missing[:9]}"):
        while missing:
            for r in range(1, world):
                if store.check([f"hello {r}"]) and (who := store.get(f"hello {r}").decode()) not in answered:
                    store.set(f"answer {who}", f"{me} {world}")
                    answered.add(who)
            missing = [r for r in missing if not store.check([f"here {me} {r}"])]
            time.sleep(0.01)
    store.set(f"all {me}", "")
    return me


def open_store(launch: Launch) -> dist.Store:
    """Opens the store through which the ranks find each other: torchrun's, or rank 0's own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", launch.rank, launch.world))[0]
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR, the host of rank 0, is not set in the environment; start the ranks "
                          "with torchrun, which sets it")
    address, port = os.environ["MASTER_ADDR"], whole_number("MASTER_PORT", "", 1, 65535)
    with progress(lambda: f"rank {launch.rank}: waiting for rank 0 at {address}:{port}"):
        try:
            return dist.TCPStore(address, port, launch.world, launch.rank == 0, timedelta(seconds=CONNECT_S),
                                 wait_for_workers=False, multi_tenant=True)
        except RuntimeError as e:
            if "EADDRINUSE" not in str(e):
                raise
            raise ConfigError(f"MASTER_PORT={port} is in use on this host, by another run perhaps; choose "
                              "another one for all ranks") from None


def start_pulse(rank: int, world: int) -> Callable[[], None]:
    """Ends this process at once when the rank before it is gone, or says nothing for LOST_S: a GPU would wait
    for days. Each rank tells the next every BEAT_S that it lives (0), or stops (1) -> what stops it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOST_S))
    before, after, stopped = (rank - 1) % world, (rank + 1) % world, threading.Event()

    def listen() -> None:
        heard = torch.zeros(1)
        try:
            while not heard.item():
                dist.recv(heard, before, group)
        except RuntimeError:
            time.sleep(1)  # another thread may know the cause and report it first
            leave(f"{rank_name(rank)}: lost rank {before}; what is saved is whole")

    def beat() -> None:
        with suppress(RuntimeError):  # the next rank is gone: another rank, which listens to it, reports that
            while not stopped.wait(BEAT_S):
                dist.send(torch.zeros(1), after, group)
            dist.send(torch.ones(1), after, group)

    def stop() -> None:
        stopped.set()
        for thread in threads:
            thread.join()
    threads = [threading.Thread(target=work, name="memo pulse", daemon=True) for work in (listen, beat)]
    for thread in threads:
        thread.start()
    return stop


@contextmanager
def connection_errors(what: str, rank: int, backend: str, limit_s: float = 0) -> Iterator[None]:
    """Ends this process, with a line, where ranks do not reach each other: at an error, or in `limit_s`."""
    limit_s = limit_s or CONNECT_S
    name = f"{backend.upper()}_SOCKET_IFNAME"
    check = ("check that their hosts reach each other, past firewalls and over the right interface "
             f"({name} is {os.environ.get(name, 'not set')})")
    if backend == "nccl":
        check += "; NCCL_DEBUG=INFO says more"
    silence = f"{rank_name(rank)}: {what}: no answer within {limit_s} s; {check}"
    timer = threading.Timer(limit_s, leave, [silence])
    timer.daemon = True
    timer.start()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        said = str(e).splitlines() or [type(e).__name__]
        leave(f"{rank_name(rank)}: {what}: {' ... '.join(dict.fromkeys((said[0], said[-1])))}; {check}")
    finally:
        timer.cancel()


@contextmanager
def connected(launch: Launch) -> Iterator[Axis]:
    """Yields the Axis of all ranks, over gloo. At an error the process must end, too."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow_torchrun()
    if launch.world == 1:
        yield Axis("host", line="all ranks")
        return
    rank, world = launch.rank, launch.world
    try:
        with connection_errors(f"all {world} ranks over gloo", rank, "gloo"):
            store = open_store(launch)
            store = dist.PrefixStore(meeting(store, rank, world), store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=FOREVER)
            stop_pulse = start_pulse(rank, world)
        yield Axis("host", world, rank, dist.group.WORLD, store=store, line="all ranks")
    except Interrupted as e:
        if rank == 0:
            print(e, file=sys.stderr, flush=True)
        os._exit(128 + e.number)  # an orderly end would wait for the other ranks, which may be gone
    stop_pulse()
    dist.destroy_process_group()
