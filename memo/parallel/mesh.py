"""The process mesh: world = pp * dp * cp * tp. tp is innermost, so that it stays inside a node; pp outermost,
for stages send each other least. Its axes (memo/system/axis.py) are passed as arguments, by their role."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from memo.config.layout import communicators
from memo.config.msp import Help, helping_pairs
from memo.system.axis import FOREVER, Axis, T
from memo.system.launch import connection_errors


@dataclass(frozen=True)
class Mesh:
    """Holds what this rank shares, and with which ranks, in three roles; by default each has this rank alone.

        weights   share a layer's parameters, each has a part: tensor parallelism, the axis tp
        tokens    share the sequences in attention, each has some tokens: context parallelism, the axis cp;
                  with METP the cp * tp ranks, tp innermost
        replicas  hold the same parameters, share the optimizer's states: the dp * cp ranks of the axis data

    `hops`: the ranks of `weights` once more, where METP's matrices go round; `shards`: those of `replicas`,
    where the parameters of layers that come are put together. `pp`: the stages of a pipeline; `tied`: the
    first and the last, where both hold the embedding's matrix. `lanes`: {stream of a schedule: an Axis of two
    ranks, of this stage and of another one}; activations go up to the next stage, gradients "back" down; for
    those of stages that help see open_lanes(). `peers`: the ranks of this rank's stage, as `host`."""

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
    lanes: dict[str, Axis] = field(default_factory=dict)

    def over_network(self) -> tuple[Axis, ...]:
        """Lists the axes whose messages travel over the devices' network."""
        return (self.weights, self.hops, self.tokens, self.replicas, self.shards, self.world, self.tied,
                *self.lanes.values())

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
        """Copies the mesh, but sends nothing."""
        def bare(a: Axis) -> Axis:
            return Axis(a.name, a.size, a.rank)
        axes = {name: bare(a) for name, a in vars(self).items() if isinstance(a, Axis)}
        return Mesh(**axes, lanes={name: bare(a) for name, a in self.lanes.items()})

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Sends nothing over the devices' network: a rank that fails leaves no other one waiting."""
        groups = [axis.group for axis in self.over_network()]
        try:
            for axis in self.over_network():
                axis.group = None
            yield
        finally:
            for axis, group in zip(self.over_network(), groups, strict=True):
                axis.group = group

    def take_sent_bytes(self) -> dict[str, int]:
        """Counts {axis: bytes sent since the last call} of several ranks, but `world`, which has scalars."""
        sent: dict[str, int] = {}
        for axis in self.over_network():
            if axis.size > 1 and axis is not self.world:
                sent[axis.name] = sent.get(axis.name, 0) + axis.sent_bytes
                axis.sent_bytes = 0
        return sent

    def of_stages(self, value: T) -> list[T]:
        """Gathers the value of each stage's first rank on rank 0, else []; all first ranks must call it."""
        first = range(0, self.host.size, self.peers.size)
        if self.host.rank in first[1:]:
            dist.send_object_list([value], group=self.host.group, group_dst=0)
        if self.host.rank > 0:
            return []
        values = [value]
        for rank in first[1:]:
            received = [value]
            dist.recv_object_list(received, group=self.host.group, group_src=rank)
            values += received
        return values

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Sums the last stage's `loss` over the replicas, on all ranks."""
        loss = self.replicas.sum(loss)
        if self.pp.size == 1:
            return loss
        return self.world.sum(loss * (self.replicas.rank == self.weights.rank == 0))


ALONE = Mesh()


def lines_of(tp: int, cp: int, dp: int, metp: bool, pp: int = 1) -> dict[str, list[list[int]]]:
    """Lists {axis: its lines of ranks}: which of all ranks send each other its messages."""
    ranks = torch.arange(pp * dp * cp * tp).view(pp * dp, cp, tp)
    tokens = ranks.view(pp * dp, -1) if metp else ranks.transpose(1, 2).reshape(-1, cp)
    data = ranks.view(pp, -1, tp).transpose(1, 2).reshape(pp * tp, -1)
    return dict(tp=ranks.view(-1, tp).tolist(), hops=ranks.view(-1, tp).tolist(), cp=tokens.tolist(),
                data=data.tolist(), shards=data.tolist(), world=ranks.view(1, -1).tolist(),
                peers=ranks.view(pp, -1).tolist())


def mesh_of_axes(axes: dict[str, Axis], tp: int, cp: int, host: Axis, pp: int = 1,
                 lanes: dict[str, Axis] | None = None) -> Mesh:
    """Makes a rank's Mesh of axes by their names. An axis that is not among them has this rank alone."""
    dp, roles = host.size // (pp * cp * tp), dict(tp="weights", cp="tokens", data="replicas")
    named = {roles.get(name, name): axis for name, axis in (dict(host=host, peers=host) | axes).items()}
    return Mesh(**named, dp=Axis("dp", dp, host.rank // (cp * tp) % dp),
                pp=Axis("pp", pp, host.rank // (dp * cp * tp)), lanes=lanes or {})


def options_of(name: str, backend: str) -> object:
    """Tells NCCL of an axis: hops that hide behind attention start before its waiting blocks."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=name in ("cp", "hops", "pp", "msp"))
    options._timeout = FOREVER  # torch warns where it is not that of the group
    return options


def open_axis(name: str, host: Axis, lines: list[list[int]], kinds: Iterable[str], device: torch.device,
              carrier: dist.ProcessGroup | None = None, backend: str = "") -> Axis:
    """Opens the Axis of the line that has this rank, else one of it alone; all ranks must call it. First
    messages of these `kinds` take communicators' memory now, and try the network. `carrier`: the group, if
    there is one."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    members = next((line for line in lines if host.rank in line), [])
    ends = f", {members[0]} to {members[-1]}" if members else ""
    with connection_errors(f"axis {name} ({len(members)} ranks{ends}) over {backend}", host.rank, backend):
        # each rank makes the groups of all lines
        groups = [carrier] if carrier else [
            dist.new_group(line, FOREVER, backend, options_of(name, backend)) for line in lines]
        if not members:
            return Axis(name)
        group = carrier or groups[lines.index(members)]
        axis = Axis(name, len(members), members.index(host.rank), group,
                    line=f"axis {name} (ranks {members[0]} to {members[-1]}, group {group.group_name})")
        axis.warm(kinds, device)
        return axis


def open_mesh(host: Axis, cp: int, tp: int, device: torch.device, context_parallel: str = "ring",
              metp: bool = False, pp: int = 1, tied: bool = False, layers_come: bool = False,
              documents: bool = False) -> Mesh:
    """Opens the Mesh of the ranks on the Axis `host`; all of them must call it. `tied`: the first stage of
    several and the last one hold the same matrix; `layers_come`: see communicators(). With `documents` a ring
    leaves out hops, and so sends to each of its ranks."""
    dp = host.size // (pp * cp * tp)
    lines, axes, lanes = lines_of(tp, cp, dp, metp, pp), dict[str, Axis](), dict[str, Axis]()
    shared, ring = ["gather", "scatter_sum", "sum"], "jumps" if documents else "shift"
    hops = [ring if context_parallel == "ring" else "exchange"]
    rooted = ["start_broadcast", "start_reduce"] if metp else []
    kinds = dict(tp=shared + rooted, hops=["shift"], cp=hops, data=shared, shards=["gather"], world=["sum"])
    for name, carrier in communicators(tp, cp, dp, metp, pp, layers_come).items():
        axes[name] = open_axis(name, host, lines[name], kinds[name], device,
                               None if carrier == name else axes[carrier].group)
    if pp > 1:
        axes["peers"] = open_axis("peers", host, lines["peers"], [], device, backend="gloo")
        ranks = lines["peers"]  # of each stage
        for a, b in pairwise(ranks):
            pairs = [list(pair) for pair in zip(a, b, strict=True)]
            for back in ("", " back"):
                axis = open_axis("pp", host, pairs, ["shift"], device)
                if axis.group:
                    lanes[("send" if (host.rank in a) != bool(back) else "receive") + back] = axis
        if tied:
            pairs = [list(pair) for pair in zip(ranks[0], ranks[-1], strict=True)]
            axes["tied"] = open_axis("tied", host, pairs, ["sum"], device)
    torch.cuda.empty_cache()  # of the long messages
    return mesh_of_axes(axes, tp, cp, host, pp, lanes)


def open_lanes(mesh: Mesh, shares: Iterable[Help], device: torch.device) -> None:
    """Opens the lanes between stages that help each other by all `shares`. All ranks must call it."""
    ranks = torch.arange(mesh.host.size).view(mesh.pp.size, -1).tolist()  # of each stage
    for source, to in sorted(way for pair in helping_pairs(shares) for way in (pair, pair[::-1])):
        pairs = [sorted(pair) for pair in zip(ranks[source], ranks[to], strict=True)]
        axis = open_axis("msp", mesh.host, pairs, ["shift"], device)
        if axis.group:
            mesh.lanes[f"to {to}" if mesh.pp.rank == source else f"from {source}"] = axis
    torch.cuda.empty_cache()  # of the long messages
