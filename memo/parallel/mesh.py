"""The process mesh: world = dp * cp * tp. tp is innermost, so that it stays inside a node; pipeline parallelism would be
outermost. The only reader of torchrun's environment; axes are passed as arguments.

An Axis is this rank's place in a line of ranks, and what they say to each other: over NCCL between GPUs, over gloo between
CPUs. With one rank every call is free and returns its argument. `sent_bytes` counts what this rank sends; of what takes a
library's algorithm (sums, gathers) the least that it must send, as a ring does.
"""

import ctypes
import os
import re
import socket
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from uuid import uuid4

import torch
import torch.distributed as dist

from memo.command import progress
from memo.config import communicators
from memo.device import synchronize
from memo.errors import ConfigError

FOREVER = timedelta(days=365)  # of a message: a rank may wait for a forward of hours. Pulse looks after who is alive
CONNECT_S = 600  # of a first message
LOST_S, BEAT_S = 600, 30  # Pulse: seconds without a sign of life from a rank that is lost; from one sign to the next
MOST_RANKS = 2**20
FIRST_BYTES = 2**25  # of a long first message: NCCL connects each of its algorithms, and takes memory, at its first use

# `id`: of a node's torchrun, the same until it ends; `threads`: for a rank, where torchrun left it just one
Launch = namedtuple("Launch", "rank world local_rank local_world restarts id threads", defaults=(0,))


def whole_number(environment, name, default, least, most):
    """The value of an environment variable. Errors: ConfigError."""
    text = environment.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text} in the environment must be a whole number from {least} to {most}; start the "
                          "ranks with torchrun, which sets it")
    return int(text)


def launched(environment=os.environ):
    """The Launch that torchrun put into the environment; without torchrun a single process."""
    if "TORCHELASTIC_RUN_ID" not in environment and "WORLD_SIZE" not in environment:
        return Launch(0, 1, 0, 1, 0, "")
    number = partial(whole_number, environment)
    world = number("WORLD_SIZE", 1, 1, MOST_RANKS)
    rank, restarts = number("RANK", 0, 0, world - 1), number("TORCHELASTIC_RESTART_COUNT", 0, 0, 10**9 - 1)
    local_world = number("LOCAL_WORLD_SIZE", 1, 1, world)
    local_rank = number("LOCAL_RANK", 0, 0, local_world - 1)
    name = environment.get("TORCHELASTIC_RUN_ID", "none")  # "none" is everybody's who gave none
    threads = 0
    if local_world > 1 and environment.get("OMP_NUM_THREADS") == "1" and hasattr(os, "sched_getaffinity"):
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
    return Launch(rank, world, local_rank, local_world, restarts,
                  name if name != "none" else f"{socket.gethostname()} {os.getppid()}", threads)


ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works:
    """Messages under way: `received` is there after wait(), which holds up the device's stream, on CUDA not the host. The
    tensors must stay until then, and so must this."""

    def __init__(self, works, sent, received):
        self.works, self.sent, self.received = works, sent, received

    def wait(self):
        """What was received; from now on the caller's alone."""
        for work in self.works:
            work.wait()
        received, self.works, self.sent, self.received = self.received, (), None, None
        return received


# gloo lets go of its tensors, and of buffers of its own, some time after wait(); the memory plan wants what a segment asks
# for gone where the code says so. So gloo is lent tensors that own nothing, and called from a thread without segments.
def lent(t):
    """`t`, flat, for a library to work on; the caller keeps `t` until that is done."""
    t = t.view(-1)
    return t if not t.is_cpu else torch.frombuffer((ctypes.c_char * t.nbytes).from_address(t.data_ptr()), dtype=t.dtype)


CALLER = ThreadPoolExecutor(1, "memo gloo")


def begun(call, received, sent, group):
    """The work of call(received, sent), a collective of torch.distributed."""
    begin = partial(call, lent(received), lent(sent), group=group, async_op=True)
    return CALLER.submit(begin).result() if sent.is_cpu else begin()


@dataclass
class Axis:
    """This rank's place in a line of `size` ranks. Without a `group` nothing is sent, and what would come is whatever lay
    there: shapes, memory requests and bytes are as they would be. Tensors are contiguous."""

    name: str
    size: int = 1
    rank: int = 0
    group: object = None
    sent_bytes: int = field(default=0, compare=False)

    def start(self, sent_bytes, call, received, sent):
        self.sent_bytes += sent_bytes
        works = [begun(call, received, sent, self.group)] if self.group is not None and sent.nbytes else ()
        return Works(works, sent, received)

    def start_gather(self, x, out=None):
        """Works of `out`, (size, *x.shape) or flat: every rank's x. x may be this rank's part of `out`."""
        if out is None:
            out = x[None] if self.size == 1 else x.new_empty(self.size, *x.shape)
        return self.start(x.nbytes * (self.size - 1), ALL_GATHER, out, x)

    def gather(self, x):
        """(size, *x.shape): every rank's x."""
        return self.start_gather(x).wait()

    def start_scatter_sum(self, x, out=None):
        """Works of `out`, the sum over all ranks of this rank's part of x, (size, ...) or flat. It may be that part."""
        if out is None:
            out = x[0] if self.size == 1 else torch.empty_like(x[0])
        return self.start(x.nbytes // self.size * (self.size - 1), REDUCE_SCATTER, out, x)

    def scatter_sum(self, x):
        """(size, ...) -> (...): the sum over all ranks of x[this rank]."""
        return self.start_scatter_sum(x).wait()

    def sum(self, x, op=dist.ReduceOp.SUM):
        """x, in place: the sum over all ranks."""
        if self.size > 1:
            self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
            if self.group is not None and x.nbytes:
                dist.all_reduce(lent(x), op, group=self.group)
        return x

    def max(self, *numbers):
        """[the largest of every rank's]."""
        if self.size == 1:
            return numbers
        return self.sum(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()

    def exchange(self, x):
        """(size, ...): x[i] goes to rank i, and what comes from there takes its place."""
        if self.size == 1:
            return x
        return self.start(x.nbytes // self.size * (self.size - 1), dist.all_to_all_single, torch.empty_like(x), x).wait()

    def shift(self, *tensors):
        """Starts to send tensors to the next rank; -> Works of those that come from the one before."""
        self.sent_bytes += sum(t.nbytes for t in tensors)
        here = [torch.empty_like(t) for t in tensors]
        if self.group is None:
            return Works((), None, here)
        to, source = (dist.get_global_rank(self.group, (self.rank + d) % self.size) for d in (1, -1))
        ops = [dist.P2POp(call, lent(t), peer, self.group) for call, ts, peer in
               ((dist.isend, tensors, to), (dist.irecv, here, source)) for t in ts]
        return Works(dist.batch_isend_irecv(ops), tensors, here)

    def warm(self, kinds, device):
        """Sends first messages, short and long, in each of these ways: communicators are made, and take their memory."""
        for nbytes in (4, FIRST_BYTES) if device.type == "cuda" else (4,):
            x = torch.zeros(self.size, -(-nbytes // 4 // self.size), device=device)
            for kind in kinds:
                sent = getattr(self, kind)(x[0] if kind == "gather" else x)
                if kind == "shift":
                    sent.wait()
        synchronize(device)
        self.sent_bytes = 0

    def another(self):
        """A gloo group of the same ranks, for a thread that talks beside this one; None where there are no others."""
        if self.size == 1:
            return None
        return dist.new_group(dist.get_process_group_ranks(self.group), FOREVER, "gloo")

    def objects(self, value):
        """[every rank's value]; anything that can be pickled."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


class Mesh(namedtuple("Mesh", "tp cp dp data world host", defaults=map(Axis, ("tp", "cp", "dp", "data", "world", "host")))):
    """The axes of this rank. `data`: the dp * cp ranks that hold the same parameters, among which the optimizer is sharded;
    `world` and `host`: all ranks, over the devices' network and over gloo, for tensors in host memory; `dp` only counts."""

    def close(self):
        """Gives the groups back that open_mesh() made."""
        axes = (self.tp, self.cp, self.data, self.world)
        for group in dict.fromkeys(axis.group for axis in axes if axis.group is not None):
            dist.destroy_process_group(group)
        for axis in axes:
            axis.group = None

    def silent(self):
        """The same mesh with nobody at the other ends."""
        return Mesh(*(Axis(a.name, a.size, a.rank) for a in self))

    @contextmanager
    def silenced(self):
        """Meanwhile nothing is sent over the devices' network, so that a rank which fails leaves no other waiting."""
        axes = (self.tp, self.cp, self.data, self.world)
        groups = [axis.group for axis in axes]
        try:
            for axis in axes:
                axis.group = None
            yield
        finally:
            for axis, group in zip(axes, groups, strict=True):
                axis.group = group

    def take_sent_bytes(self):
        """{axis: bytes sent since the last call} of the axes that have several ranks; but for the scalars over `world`."""
        sent = {}
        for axis in (self.tp, self.cp, self.data):
            if axis.size > 1:
                sent[axis.name], axis.sent_bytes = axis.sent_bytes, 0
        return sent


ALONE = Mesh()


class Agreed(ConfigError):
    """An error that all ranks raise together."""


def together(host, work, *args):
    """work(*args), which talks to no other rank. Errors: one line on all ranks of `host`, whichever of them a ConfigError or
    OSError came on."""
    result, error = None, None
    try:
        result = work(*args)
    except (ConfigError, OSError) as e:
        if host.size == 1:
            raise
        error = str(e)
    errors = host.objects(error and (error, place(host.rank)))
    if found := [e for e in errors if e]:
        text, where = found[0]
        raise Agreed(text if all(e and e[0] == text for e in errors) else f"{where}: {text}")
    return result


def same_everywhere(host, what, remedy):
    """Errors: {name: value} is not the same on all ranks."""
    for rank, (theirs, where) in enumerate(host.objects((what, place(host.rank)))):
        if rank == 0:
            first = theirs
        elif differs := [name for name in first if theirs[name] != first[name]]:
            name = differs[0]
            raise Agreed(f"{where} has {name}={theirs[name]}, rank 0 {name}={first[name]}; {remedy}")


def place(rank):
    return f"rank {rank} ({socket.gethostname()})"


def meeting(store, rank, world):
    """A name for what the ranks that are there now write into the store. torchrun may keep its store over a restart, and its
    count of restarts is each node's own: the addresses of ranks that are gone must not be found again."""
    me = uuid4().hex
    if rank > 0:
        store.set(f"hello {rank}", me)
        name = store.get(f"answer {me}").decode()  # waits
        store.add(f"here {name}", 1)
        return name
    answered = set()
    with progress(lambda: f"waiting for {world - 1 - len(answered)} of {world} ranks"):
        while store.add(f"here {me}", 0) < world - 1:
            for r in range(1, world):
                if store.check([f"hello {r}"]) and (who := store.get(f"hello {r}").decode()) not in answered:
                    store.set(f"answer {who}", me)
                    answered.add(who)
            time.sleep(0.01)
    return me


def open_store(launch, environment=os.environ):
    """The store through which the ranks find each other: torchrun's, or rank 0's own."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", launch.rank, launch.world))[0]
    address, port = environment.get("MASTER_ADDR", ""), whole_number(environment, "MASTER_PORT", "", 1, 65535)
    with progress(lambda: f"rank {launch.rank}: waiting for rank 0 at {address}:{port}"):
        return dist.TCPStore(address, port, launch.world, launch.rank == 0, timedelta(seconds=CONNECT_S),
                             wait_for_workers=False, multi_tenant=True)


class Pulse:
    """Ends this process when the rank before it is gone, at once, or says nothing for LOST_S: a GPU would wait for days for
    that one's messages, and torchrun on another node would not notice. Each rank tells the next one every BEAT_S that it
    is alive (0), in the end that it stops (1)."""

    def __init__(self, rank, world):
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOST_S))
        self.before, self.next = (rank - 1) % world, (rank + 1) % world
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, name="memo pulse", daemon=True) for work in (self.listen, self.beat)]
        for thread in self.threads:
            thread.start()

    def listen(self):
        heard = torch.zeros(1)
        try:
            while not heard.item():
                dist.recv(heard, self.before, self.group)
        except RuntimeError:
            time.sleep(1)  # whoever knows more may say it first
            leave(f"{place(dist.get_rank())}: lost rank {self.before}; the last checkpoint is whole")

    def beat(self):
        with suppress(RuntimeError):  # the next rank is gone: it, or who listens to it, says so
            while not self.stopped.wait(BEAT_S):
                dist.send(torch.zeros(1), self.next, self.group)
            dist.send(torch.ones(1), self.next, self.group)

    def stop(self):
        """All ranks leave in good order."""
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def leave(line):
    """Ends the process at once, whatever its threads wait for."""
    print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def connecting(what, rank, backend):
    """Ends this process, with a line on `what`, where its ranks do not reach each other: at the library's error, and after
    CONNECT_S without one."""
    name = f"{backend.upper()}_SOCKET_IFNAME"
    check = (f"check that their hosts reach each other, past firewalls and over the right interface ({name} is "
             f"{os.environ.get(name, 'not set')})" + "; NCCL_DEBUG=INFO says more" * (backend == "nccl"))
    timer = threading.Timer(CONNECT_S, lambda: leave(f"{place(rank)}: {what}: no answer within {CONNECT_S} s; {check}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        said = str(e).splitlines() or [type(e).__name__]
        leave(f"{place(rank)}: {what}: {' ... '.join(dict.fromkeys((said[0], said[-1])))}; {check}")
    finally:
        timer.cancel()


@contextmanager
def connected(launch):
    """The Axis of all ranks, over gloo, while the process is one of several. Where it ends with an error so does the
    process: for an orderly end it would have to wait for ranks that may be gone."""
    if launch.world == 1:
        yield Axis("host")
        return
    rank, world = launch.rank, launch.world
    with connecting(f"all {world} ranks over gloo", rank, "gloo"):
        store = open_store(launch)
        name = meeting(store, rank, world)
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=FOREVER)
        pulse = Pulse(rank, world)
    yield Axis("host", world, rank, dist.group.WORLD)
    pulse.stop()
    dist.destroy_process_group()


def open_mesh(host, cp, tp, device, context_parallel="ring"):
    """The Mesh of the ranks on the Axis `host`. All of them must call it. The first messages of each axis are sent: what
    communicators take of the device is taken, and a network that does not carry them is found now."""
    dp = host.size // (cp * tp)
    ranks = torch.arange(host.size).view(dp, cp, tp)
    backend = "nccl" if device.type == "cuda" else "gloo"
    lines = dict(tp=ranks.view(-1, tp), cp=ranks.transpose(1, 2).reshape(-1, cp),
                 data=ranks.permute(2, 0, 1).reshape(tp, -1), world=ranks.view(1, -1))
    shared = ("gather", "scatter_sum", "sum")
    kinds = dict(tp=shared, cp=["shift" if context_parallel == "ring" else "exchange"], data=shared, world=["sum"])
    axes = {name: Axis(name) for name in lines}
    for name, carrier in communicators(tp, cp, dp).items():
        [mine] = [line for line in lines[name].tolist() if host.rank in line]
        with connecting(f"axis {name} ({len(mine)} ranks, {mine[0]} to {mine[-1]}) over {backend}", host.rank, backend):
            group = axes[carrier].group
            if carrier == name:  # all ranks make the groups of all lines
                made = [dist.new_group(line, FOREVER, backend) for line in lines[name].tolist()]
                group = made[lines[name].tolist().index(mine)]
            axes[name] = Axis(name, len(mine), mine.index(host.rank), group)
            axes[name].warm(kinds[name], device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the long messages
    return Mesh(dp=Axis("dp", dp, host.rank // (cp * tp)), host=host, **axes)
