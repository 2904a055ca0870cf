"""The process mesh: world = pp * dp * cp * tp. tp is innermost, so that it stays inside a node; the stages
of a pipeline send each other least, so pp is outermost. Axes are passed as arguments.

An Axis is this rank's place in a line of ranks, with the messages between them: over NCCL between GPUs, over
gloo between CPUs. With one rank every call is free and returns its argument. `sent_bytes` counts the bytes
that this rank sends. Sums and gathers take an algorithm of a library; they count as a ring, which sends the
least.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from memo.device import synchronize
from memo.launch import FOREVER, Launch, connection_errors, process_group
from memo.layout import communicators
from memo.msp import Help, helping_pairs
from memo.parallel.rendezvous import Communicator, Notes, Program

# of a long first message: NCCL connects each of its algorithms, and takes memory, at its first use
FIRST_BYTES = 2**25
# the second name is that before torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works:
    """Messages under way. wait() holds up the device's stream (on CUDA not the host) and gives `received`.
    The tensors must stay until then, and so must the Works."""

    def __init__(self, works: Sequence, sent: Any, received: Any) -> None:
        self.works, self.sent, self.received = works, sent, received

    def wait(self) -> Any:
        """`received`, which from now on belongs to the caller."""
        for work in self.works:
            work.wait()
        received, self.works, self.sent, self.received = self.received, (), None, None
        return received


# gloo releases its tensors, and buffers of its own, some time after wait(). The memory plan needs the
# requests of a segment released where the code says so. So gloo gets tensors that own nothing, and a thread
# without segments calls it.
def borrowed(t: torch.Tensor) -> torch.Tensor:
    """`t`, flat, for a library to work on; the caller keeps `t` until that is done."""
    t = t.view(-1)
    if not t.is_cpu:
        return t
    return torch.frombuffer((ctypes.c_char * t.nbytes).from_address(t.data_ptr()), dtype=t.dtype)


CALLER = ThreadPoolExecutor(1, "memo gloo")


def start_collective(call: Callable, received: torch.Tensor, sent: torch.Tensor,
                     group: dist.ProcessGroup) -> Any:
    """The work of call(received, sent), a collective of torch.distributed."""
    start = partial(call, borrowed(received), borrowed(sent), group=group, async_op=True)
    return CALLER.submit(start).result() if sent.is_cpu else start()


@dataclass
class Axis:
    """This rank's place in a line of `size` ranks. Without a `group` nothing is sent, and received tensors
    are uninitialised: shapes, memory requests and bytes are as with a group. `notes`: where such an Axis
    writes down what it is asked for; `sender`: over gloo the thread that shifts. Tensors are contiguous."""

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    sent_bytes: int = field(default=0, compare=False)
    notes: Notes | None = field(default=None, compare=False)
    sender: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "memo shift"),
                                       compare=False, repr=False)

    def start(self, kind: str, sent_bytes: int, call: Callable, received: torch.Tensor, sent: torch.Tensor,
              **ends: int) -> Works:
        """Works of call(received, sent). `kind`, `ends`: see Notes.post()."""
        self.sent_bytes += sent_bytes
        if self.group is None:
            works = self.noted(kind, sent.nbytes, **ends)
        else:
            works = [start_collective(call, received, sent, self.group)] if sent.nbytes else ()
        return Works(works, sent, received)

    def noted(self, kind: str, nbytes: int, **ends: int) -> Sequence:
        """What stands for the works of a message that nobody sends."""
        return () if self.notes is None or nbytes == 0 else [self.notes.post(kind, nbytes, **ends)]

    def start_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Works:
        """Works of `out`, (size, *x.shape) or flat: every rank's x. x may be this rank's part of `out`."""
        if out is None:
            out = x[None] if self.size == 1 else x.new_empty(self.size, *x.shape)
        return self.start("gather", x.nbytes * (self.size - 1), ALL_GATHER, out, x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(size, *x.shape): every rank's x."""
        return self.start_gather(x).wait()

    def start_scatter_sum(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Works:
        """Works of `out`: the sum over all ranks of this rank's part of x, (size, ...) or flat. `out` may
        be that part."""
        if out is None:
            out = x[0] if self.size == 1 else torch.empty_like(x[0])
        sent_bytes = x.nbytes // self.size * (self.size - 1)
        return self.start("scatter_sum", sent_bytes, REDUCE_SCATTER, out, x)

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """(size, ...) -> (...): the sum over all ranks of x[this rank]."""
        return self.start_scatter_sum(x).wait()

    def sum(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """x, in place: the sum over all ranks."""
        if self.size > 1:
            self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
            if self.group is None:
                for work in self.noted("sum", x.nbytes):
                    work.wait()
            elif x.nbytes:
                dist.all_reduce(borrowed(x), op, group=self.group)
        return x

    def max(self, *numbers: float) -> Sequence[float]:
        """[the largest of all ranks' first numbers, of their second numbers, ...]."""
        if self.size == 1:
            return numbers
        return self.sum(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """(size, ...) -> the same shape: x[i] goes to rank i, result[i] comes from there."""
        if self.size == 1:
            return x
        sent_bytes = x.nbytes // self.size * (self.size - 1)
        return self.start("exchange", sent_bytes, dist.all_to_all_single, torch.empty_like(x), x).wait()

    def start_broadcast(self, x: torch.Tensor, owner: int) -> Works:
        """Works of x, which rank `owner` sends, and which is written over on the others."""
        # as a ring, which ends before it comes back to the owner
        nbytes = 0 if (self.rank + 1) % self.size == owner else x.nbytes
        return self.start("broadcast", nbytes,
                          lambda here, _, **how: dist.broadcast(here, group_src=owner, **how),
                          x, x, source=owner)

    def start_reduce(self, x: torch.Tensor, owner: int) -> Works:
        """Works of x, which on rank `owner` becomes the sum over all ranks, and is used up on the others."""
        nbytes = 0 if self.rank == owner else x.nbytes
        return self.start("reduce", nbytes,
                          lambda here, _, **how: dist.reduce(here, group_dst=owner, **how),
                          x, x, to=owner)

    def shift(self, *tensors: torch.Tensor) -> Works:
        """Starts to send tensors to the next rank -> Works of the tensors that the rank before sends. Shifts
        are done one after the other: one may send what the one before it brings, without a wait for that."""
        nbytes = sum(t.nbytes for t in tensors)
        self.sent_bytes += nbytes
        here = [torch.empty_like(t) for t in tensors]
        to, source = ((self.rank + d) % self.size for d in (1, -1))
        if self.group is None:  # the tensors live as long as if they were sent
            return Works(self.noted("shift", nbytes, to=to, source=source), tensors, here)
        ops = [dist.P2POp(call, borrowed(t), group=self.group, group_peer=peer) for call, ts, peer in
               ((dist.isend, tensors, to), (dist.irecv, here, source)) for t in ts]
        if not here[0].is_cpu:  # NCCL has a stream for them
            return Works(dist.batch_isend_irecv(ops), tensors, here)
        done = self.sender.submit(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])
        return Works([SimpleNamespace(wait=done.result)], tensors, here)

    def send(self, *tensors: torch.Tensor) -> Works:
        """Starts to send tensors to the other rank of two -> Works of them."""
        return self.to_other("send", dist.isend, tensors)

    def receive(self, *out: torch.Tensor) -> Works:
        """Works of `out`, which the other rank of two sends."""
        return self.to_other("receive", dist.irecv, out)

    def to_other(self, kind: str, call: Callable, tensors: Sequence[torch.Tensor]) -> Works:
        end, other = ("to" if kind == "send" else "source"), 1 - self.rank
        nbytes = sum(x.nbytes for x in tensors)
        self.sent_bytes += nbytes * (kind == "send")
        if self.group is None:
            return Works(self.noted(kind, nbytes, **{end: other}), tensors, tensors)
        ops = [dist.P2POp(call, borrowed(x), group=self.group, group_peer=other) for x in tensors]
        return Works(dist.batch_isend_irecv(ops), tensors, tensors)

    def warm(self, kinds: Iterable[str], device: torch.device) -> None:
        """Sends first messages, short and long, by each of these methods: communicators are made
        and take memory."""
        for nbytes in (4, FIRST_BYTES) if device.type == "cuda" else (4,):
            x = torch.zeros(self.size, -(-nbytes // 4 // self.size), device=device)
            for kind in kinds:
                sent = getattr(self, kind)(x[0] if kind == "gather" else x, *[0] * kind.startswith("start"))
                if isinstance(sent, Works):
                    sent.wait()
        synchronize(device)
        self.sent_bytes = 0

    def another(self) -> Any:
        """Another gloo group of the same ranks, for a second thread; None for a single rank."""
        if self.size == 1:
            return None
        return dist.new_group(dist.get_process_group_ranks(self.group), FOREVER, "gloo")

    def objects(self, value: Any) -> list:
        """[the value of each rank]; anything that can be pickled."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class Link:
    """What a stage has with a neighbour of its pipeline: an Axis of the two ranks for each direction, for
    `x`, which the earlier stage sends, and for `dx`."""

    x: Axis = field(default_factory=partial(Axis, "pp"))
    dx: Axis = field(default_factory=partial(Axis, "pp"))


@dataclass(frozen=True)
class Mesh:
    """What this rank shares, and with which ranks: three roles, and what fills them. By default each has this
    rank alone.

        weights   share a layer's parameters, each has a part: tensor parallelism, the axis tp
        tokens    share the sequences in attention, each has some tokens: context parallelism, the axis cp;
                  with METP the cp * tp ranks, tp innermost
        replicas  hold the same parameters, share the optimizer's states: the dp * cp ranks of the axis data

    `hops`: the ranks of `weights` once more, where METP's matrices go round; `shards`: those of `replicas`,
    where the parameters of layers that come are put together. `pp`: the stages of a
    pipeline, which send over the links `before` and `behind` this one; `tied`: of the first and the last
    one, where both hold the embedding's matrix. `lanes`: {stream of a schedule: an Axis of two ranks, of this
    stage and of another one that it helps, or that helps it}: see open_lanes(). `peers`: the ranks of this
    rank's stage, as `host`.
    """

    weights: Axis = field(default_factory=partial(Axis, "tp"))
    hops: Axis = field(default_factory=partial(Axis, "hops"))
    tokens: Axis = field(default_factory=partial(Axis, "cp"))
    dp: Axis = field(default_factory=partial(Axis, "dp"))  # deals out micro batches: nothing is sent over it
    replicas: Axis = field(default_factory=partial(Axis, "data"))
    shards: Axis = field(default_factory=partial(Axis, "shards"))
    world: Axis = field(default_factory=partial(Axis, "world"))  # all ranks, over the devices' network
    host: Axis = field(default_factory=partial(Axis, "host"))  # all ranks, over gloo, from host to host
    peers: Axis = field(default_factory=partial(Axis, "peers"))
    pp: Axis = field(default_factory=partial(Axis, "pp"))  # nothing is sent over it
    tied: Axis = field(default_factory=partial(Axis, "tied"))
    before: Link = field(default_factory=Link)
    behind: Link = field(default_factory=Link)
    lanes: dict[str, Axis] = field(default_factory=dict)

    def over_network(self) -> tuple[Axis, ...]:
        """The axes whose messages travel over the devices' network."""
        return (self.weights, self.hops, self.tokens, self.replicas, self.shards, self.world, self.tied,
                self.before.x, self.before.dx, self.behind.x, self.behind.dx, *self.lanes.values())

    def close(self) -> None:
        """Gives the groups back that open_mesh() made."""
        for group in dict.fromkeys(axis.group for axis in self.over_network() if axis.group is not None):
            dist.destroy_process_group(group)
        for axis in self.over_network():
            axis.group = None
            axis.sender.shutdown()
        if self.peers.group is not self.host.group:
            dist.destroy_process_group(self.peers.group)

    def silent(self) -> "Mesh":
        """The same mesh, which sends nothing."""
        def of(a: Any) -> Any:
            if isinstance(a, dict):
                return {name: of(axis) for name, axis in a.items()}
            return Link(of(a.x), of(a.dx)) if isinstance(a, Link) else Axis(a.name, a.size, a.rank)
        return Mesh(*map(of, vars(self).values()))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Meanwhile nothing is sent over the devices' network: a rank that fails leaves no
        other one waiting."""
        groups = [axis.group for axis in self.over_network()]
        try:
            for axis in self.over_network():
                axis.group = None
            yield
        finally:
            for axis, group in zip(self.over_network(), groups, strict=True):
                axis.group = group

    def take_sent_bytes(self) -> dict[str, int]:
        """{axis: bytes sent since the last call} of the axes with several ranks, those to the stages before
        and behind as "pp"; not of `world`, which carries scalars."""
        sent: dict[str, int] = {}
        for axis in self.over_network():
            if axis.size > 1 and axis is not self.world:
                sent[axis.name] = sent.get(axis.name, 0) + axis.sent_bytes
                axis.sent_bytes = 0
        return sent

    def of_stages(self, value: Any) -> list:
        """[the value of each stage's first rank] on rank 0, on the others empty; all first ranks must call
        it. Values may be large: nobody else sends or gets any."""
        first = range(0, self.host.size, self.peers.size)
        if self.host.rank in first[1:]:
            dist.send_object_list([value], group=self.host.group, group_dst=0)
        if self.host.rank > 0:
            return []
        values: list = [value]
        for rank in first[1:]:
            received: list = [None]
            dist.recv_object_list(received, group=self.host.group, group_src=rank)
            values += received
        return values

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas of the last stage's `loss`, on all ranks."""
        loss = self.replicas.sum(loss)
        if self.pp.size == 1:
            return loss
        return self.world.sum(loss * (self.replicas.rank == self.weights.rank == 0))


ALONE = Mesh()


@contextmanager
def connected(launch: Launch) -> Iterator[Axis]:
    """The Axis of all ranks, over gloo, while the process is one of several: see process_group()."""
    with process_group(launch) as group:
        yield Axis("host", launch.world, launch.rank, group)


def lines_of(tp: int, cp: int, dp: int, metp: bool, pp: int = 1) -> dict[str, list[list[int]]]:
    """{axis: the lines of ranks that it has}: which of all ranks send each other its messages."""
    ranks = torch.arange(pp * dp * cp * tp).view(pp * dp, cp, tp)
    tokens = ranks.view(pp * dp, -1) if metp else ranks.transpose(1, 2).reshape(-1, cp)
    data = ranks.view(pp, -1, tp).transpose(1, 2).reshape(pp * tp, -1)
    return dict(tp=ranks.view(-1, tp).tolist(), hops=ranks.view(-1, tp).tolist(), cp=tokens.tolist(),
                data=data.tolist(), shards=data.tolist(), world=ranks.view(1, -1).tolist(),
                peers=ranks.view(pp, -1).tolist())


def mesh_of_axes(axes: dict[str, Axis], tp: int, cp: int, host: Axis, pp: int = 1, **others: Any) -> Mesh:
    """The Mesh of a rank, by the names of its axes. An axis that is not among them has this rank alone."""
    roles = dict(weights="tp", hops="hops", tokens="cp", replicas="data", shards="shards", world="world")
    dp = host.size // (pp * cp * tp)
    made: dict[str, Any] = {role: axes[name] for role, name in roles.items() if name in axes}
    return Mesh(**made | {"peers": host} | others, dp=Axis("dp", dp, host.rank // (cp * tp) % dp), host=host,
                pp=Axis("pp", pp, host.rank // (dp * cp * tp)))


def noted_mesh(rank: int, tp: int, cp: int, dp: int = 1, metp: bool = False) -> tuple[Mesh, Program]:
    """The Mesh of one of dp * cp * tp ranks, with nobody at the other ends, and the Program that grows with
    what its axes are asked for."""
    lines, program = lines_of(tp, cp, dp, metp), Program()
    axes: dict[str, Axis] = {}
    for name, carrier in communicators(tp, cp, dp, metp).items():
        [mine] = [line for line in lines[name] if rank in line]
        notes = Notes(program, Communicator(carrier, tuple(mine)))
        axes[name] = Axis(name, len(mine), mine.index(rank), notes=notes)
    return mesh_of_axes(axes, tp, cp, Axis("host", dp * cp * tp, rank)), program


def open_axis(name: str, host: Axis, lines: list[list[int]], kinds: Iterable[str], device: torch.device,
              carrier: Any = None, backend: str = "") -> Axis | None:
    """The Axis of the line that has this rank, if one has; all ranks must call it. Sends the first messages
    of these `kinds`: so communicators take their memory of the device now, and a network that carries no
    messages is found. `carrier`: the group, where another axis has one that serves."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    mine = next((line for line in lines if host.rank in line), [])
    ends = f", {mine[0]} to {mine[-1]}" if mine else ""
    with connection_errors(f"axis {name} ({len(mine)} ranks{ends}) over {backend}", host.rank, backend):
        # each rank makes the groups of all lines
        groups = [carrier] if carrier else [dist.new_group(line, FOREVER, backend) for line in lines]
        if not mine:
            return None
        group = carrier or groups[lines.index(mine)]
        axis = Axis(name, len(mine), mine.index(host.rank), group)
        axis.warm(kinds, device)
        return axis


def open_mesh(host: Axis, cp: int, tp: int, device: torch.device, context_parallel: str = "ring",
              metp: bool = False, pp: int = 1, tied: bool = False, layers_come: bool = False) -> Mesh:
    """The Mesh of the ranks on the Axis `host`; all of them must call it. `tied`: whether the first stage of
    several and the last one hold the same matrix; `layers_come`: see communicators()."""
    dp = host.size // (pp * cp * tp)
    lines = lines_of(tp, cp, dp, metp, pp)
    axes: dict[str, Axis] = {}
    shared, hops = ["gather", "scatter_sum", "sum"], ["shift" if context_parallel == "ring" else "exchange"]
    rooted = ["start_broadcast", "start_reduce"] if metp else []
    kinds = dict(tp=shared + rooted, hops=["shift"], cp=hops, data=shared, shards=["gather"], world=["sum"])
    for name, carrier in communicators(tp, cp, dp, metp, pp, layers_come).items():
        group = None if carrier == name else axes[carrier].group
        axis = open_axis(name, host, lines[name], kinds[name], device, group)
        assert axis is not None  # every rank is in a line
        axes[name] = axis
    others: dict[str, Any] = {}
    if pp > 1:
        others = {"peers": open_axis("peers", host, lines["peers"], [], device, backend="gloo")}
        ranks = lines["peers"]  # of each stage
        for a, b in pairwise(ranks):
            pairs = [list(pair) for pair in zip(a, b, strict=True)]
            x, dx = (open_axis("pp", host, pairs, ["shift"], device) for _ in range(2))
            if x and dx:
                others["behind" if host.rank in a else "before"] = Link(x, dx)
        if tied:
            pairs = [list(pair) for pair in zip(ranks[0], ranks[-1], strict=True)]
            if ends := open_axis("tied", host, pairs, ["sum"], device):
                others["tied"] = ends
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the long messages
    return mesh_of_axes(axes, tp, cp, host, pp, **others)


def open_lanes(mesh: Mesh, shares: Iterable[Help], device: torch.device) -> None:
    """Opens the lanes between stages that compute for each other. All ranks must call it, with the same
    `shares`, those of all stages."""
    ranks = torch.arange(mesh.host.size).view(mesh.pp.size, -1).tolist()  # of each stage
    for source, to in sorted(way for pair in helping_pairs(shares) for way in (pair, pair[::-1])):
        pairs = [sorted(pair) for pair in zip(ranks[source], ranks[to], strict=True)]
        if axis := open_axis("msp", mesh.host, pairs, ["shift"], device):
            mesh.lanes[f"to {to}" if mesh.pp.rank == source else f"from {source}"] = axis
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the long messages
