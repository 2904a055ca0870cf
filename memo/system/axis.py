"""This rank's place in a line of ranks, with the messages between them: over NCCL between GPUs, over gloo
between CPUs. With one rank every call is free and returns its argument. `sent_bytes` counts the bytes that
this rank sends. Sums and gathers take an algorithm of a library; they count as a ring, which sends the least.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from memo.system.device import synchronize

T = TypeVar("T")
FOREVER = timedelta(days=365)  # for a message: a forward may take hours; start_pulse() finds lost ranks
# of a long first message: NCCL connects each of its algorithms, and takes memory, at its first use
FIRST_BYTES = 2**25
# the second name is that before torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# {line of ranks: (number, kind) of the message that this rank has come to last}, the newest behind
CAME: dict[str, tuple[int, str]] = {}
WRITTEN = [0]  # writes of checkpoints by this process


def come(line: str, kind: str) -> None:
    """Notes for the Watch of this rank that it has come to a message of a line of ranks; "" is none."""
    if line:
        number, _ = CAME.pop(line, (0, ""))
        CAME[line] = number + 1, kind


class Works(Generic[T]):
    """Holds messages under way. wait() holds up the device's stream (on CUDA not the host) and gives
    `received`. The tensors must stay until then, and so must the Works."""

    def __init__(self, works: Sequence[dist.Work | Future[list[object]]], sent: object, received: T) -> None:
        self.works, self.sent, self.received = works, sent, received

    def wait(self) -> T:
        """Waits for `received`, which from now on belongs to the caller."""
        self.settle()
        received = self.received
        del self.sent, self.received
        return received

    def settle(self) -> None:
        """Waits, and keeps what is received."""
        for work in self.works:
            work.result() if isinstance(work, Future) else work.wait()
        self.works = ()


Hop = Works[list[torch.Tensor]]  # of what the rank before sends


# gloo releases its tensors, and buffers of its own, some time after wait(), and the memory plan needs them
# released where the code says so: gloo gets tensors that own nothing, from a thread without segments
def borrowed(t: torch.Tensor) -> torch.Tensor:
    """Flattens `t` for a library to work on; the caller keeps `t` until that is done."""
    t = t.view(-1)
    if not t.is_cpu:
        return t
    return torch.frombuffer((ctypes.c_char * t.nbytes).from_address(t.data_ptr()), dtype=t.dtype)


CALLER = ThreadPoolExecutor(1, "memo gloo")


def start_collective(call: Callable[..., dist.Work], received: torch.Tensor, sent: torch.Tensor,
                     group: dist.ProcessGroup) -> dist.Work:
    """Starts call(received, sent), a collective of torch.distributed."""
    start = partial(call, borrowed(received), borrowed(sent), group=group, async_op=True)
    return CALLER.submit(start).result() if sent.is_cpu else start()


@dataclass
class Axis:
    """Holds this rank's place in a line of `size` ranks. Without a `group` nothing is sent, and received
    tensors are uninitialised: shapes, requests and bytes are as with one. Tensors are contiguous."""

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sent_bytes: int = field(default=0, compare=False)
    line: str = field(default="", compare=False)  # its name in CAME
    store: dist.Store | None = field(default=None, compare=False)  # by which the ranks have met
    # over gloo the thread that shifts
    sender: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "memo shift"),
                                       compare=False, repr=False)

    def start(self, kind: str, sent_bytes: int, call: Callable[..., dist.Work], received: torch.Tensor,
              sent: torch.Tensor, **ends: int) -> Works[torch.Tensor]:
        """Starts call(received, sent). `kind`, `ends`: see noted()."""
        self.sent_bytes += sent_bytes
        if self.group is None:
            works = self.noted(kind, sent.nbytes, **ends)
        else:
            come(self.line, kind)
            works = [start_collective(call, received, sent, self.group)] if sent.nbytes else ()
        return Works(works, sent, received)

    def noted(self, kind: str, nbytes: int, **ends: int) -> Sequence[dist.Work]:
        """Stands for the works of a message that nobody sends: see testing/notes.py."""
        return ()

    def start_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Works[torch.Tensor]:
        """Starts to gather every rank's x to `out`, (size, *x.shape) or flat, which may hold x."""
        if out is None:
            out = x[None] if self.size == 1 else x.new_empty(self.size, *x.shape)
        return self.start("gather", x.nbytes * (self.size - 1), ALL_GATHER, out, x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's x: (size, *x.shape)."""
        return self.start_gather(x).wait()

    def start_scatter_sum(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Works[torch.Tensor]:
        """Starts to sum all ranks' x, (size, ...) or flat -> this rank's part in `out`, maybe one of x."""
        if out is None:
            out = x[0] if self.size == 1 else torch.empty_like(x[0])
        sent_bytes = x.nbytes // self.size * (self.size - 1)
        return self.start("scatter_sum", sent_bytes, REDUCE_SCATTER, out, x)

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x[this rank] over all ranks: (size, ...) -> (...)."""
        return self.start_scatter_sum(x).wait()

    def sum(self, x: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
        """Sums x over all ranks, in place."""
        if self.size > 1:
            self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
            if self.group is None:
                for work in self.noted("sum", x.nbytes):
                    work.wait()
            elif x.nbytes:
                come(self.line, "sum")
                dist.all_reduce(borrowed(x), op, group=self.group)
        return x

    def max(self, *numbers: float) -> Sequence[float]:
        """Finds the largest of all ranks' first numbers, of their second numbers, ..."""
        if self.size == 1:
            return numbers
        return self.sum(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Sends x[i] to rank i: (size, ...) -> the same shape, where result[i] comes from rank i."""
        if self.size == 1:
            return x
        sent_bytes = x.nbytes // self.size * (self.size - 1)
        return self.start("exchange", sent_bytes, dist.all_to_all_single, torch.empty_like(x), x).wait()

    def start_broadcast(self, x: torch.Tensor, owner: int) -> Works[torch.Tensor]:
        """Starts to send x from rank `owner`; it is written over on the others."""
        # as a ring, which ends before it comes back to the owner
        nbytes = 0 if (self.rank + 1) % self.size == owner else x.nbytes
        return self.start("broadcast", nbytes, lambda t, _, **how: dist.broadcast(t, group_src=owner, **how),
                          x, x, source=owner)

    def start_reduce(self, x: torch.Tensor, owner: int) -> Works[torch.Tensor]:
        """Starts to sum x over all ranks, to rank `owner`; on the others it is used up."""
        nbytes = 0 if self.rank == owner else x.nbytes
        return self.start("reduce", nbytes, lambda t, _, **how: dist.reduce(t, group_dst=owner, **how),
                          x, x, to=owner)

    def shift(self, *tensors: torch.Tensor, by: int | None = 1,
              into: list[torch.Tensor] | None = None) -> Hop:
        """Sends tensors `by` ranks on, to the next -> Works of those that come from as many before. Shifts
        are done one after the other: one may send what the one before it brings, without a wait for that.
        By 0 they are copied; None: nothing is sent, and what is received is uninitialised. `into`: memory for
        what comes, where that is shaped otherwise, or nothing."""
        received = [torch.empty_like(t) for t in tensors] if into is None else into
        if not by:
            for r, t in zip(received, tensors if by == 0 else (), strict=False):
                r.copy_(t)
            return Works((), tensors, received)
        to, source = ((self.rank + d) % self.size for d in (by, -by))
        return Works(self.post("shift", tensors, received, to=to, source=source), tensors, received)

    def jumps(self, *tensors: torch.Tensor) -> None:
        """Sends tensors to each of the other ranks."""
        for by in range(1, self.size):
            self.shift(*tensors, by=by).wait()

    def send(self, *tensors: torch.Tensor) -> Works[Sequence[torch.Tensor]]:
        """Starts to send tensors to the other rank of two."""
        return Works(self.post("send", tensors, (), to=1 - self.rank), tensors, tensors)

    def receive(self, *out: torch.Tensor) -> Works[Sequence[torch.Tensor]]:
        """Starts to receive `out` from the other rank of two."""
        return Works(self.post("receive", (), out, source=1 - self.rank), out, out)

    def post(self, kind: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor],
             **ends: int) -> Sequence[dist.Work | Future[list[object]]]:
        """Starts to send and receive tensors; `ends`: the ranks `to` and `source`."""
        self.sent_bytes += sum(t.nbytes for t in sent)
        if self.group is None:
            return self.noted(kind, sum(t.nbytes for t in sent or received), **ends)
        come(self.line, kind)
        ops = [dist.P2POp(call, borrowed(t), group=self.group, group_peer=ends[end]) for call, ts, end in
               ((dist.isend, sent, "to"), (dist.irecv, received, "source")) for t in ts]
        if not ops:
            return ()
        if kind == "shift" and (*sent, *received)[0].is_cpu:  # NCCL has a stream for shifts
            return [self.sender.submit(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])]
        return dist.batch_isend_irecv(ops)

    def warm(self, kinds: Iterable[str], device: torch.device) -> None:
        """Sends first messages, short and long, by these methods: communicators take their memory."""
        for nbytes in (4, FIRST_BYTES) if device.type == "cuda" else (4,):
            x = torch.zeros(self.size, -(-nbytes // 4 // self.size), device=device)
            for kind in kinds:
                sent = getattr(self, kind)(x[0] if kind == "gather" else x, *[0] * kind.startswith("start"))
                if isinstance(sent, Works):
                    sent.wait()
        synchronize(device)
        self.sent_bytes = 0

    def another(self) -> "Axis":
        """Makes the same line of ranks over another gloo group, for a second thread."""
        ranks = self.group and dist.get_process_group_ranks(self.group)
        return Axis(self.name, self.size, self.rank, ranks and dist.new_group(ranks, FOREVER, "gloo"))

    def objects(self, value: T) -> list[T]:
        """Gathers the value of each rank; anything that can be pickled."""
        if self.group is None:
            return [value]
        come(self.line, "objects")
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
