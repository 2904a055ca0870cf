"""What a rank's axes (memo/system/axis.py) are asked for, written down where nobody is at the other ends:
its messages in the order of its host, and where it waits for them. rendezvous.py runs the programs of all
ranks together to see whether their messages meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from memo.config.layout import communicators
from memo.parallel.mesh import Mesh, lines_of, mesh_of_axes
from memo.system.axis import Axis


class Communicator(NamedTuple):
    name: str
    ranks: tuple[int, ...]


class Post(NamedTuple):
    """A message, which its rank knows by the number. `to`, `source`: the rank that it goes to, and the rank
    that it comes from, where there is one."""

    number: int
    communicator: Communicator
    kind: str
    nbytes: int
    to: int | None = None
    source: int | None = None

    def __str__(self) -> str:
        ends = "".join(f" {name} {rank}" for name, rank in (("to", self.to), ("from", self.source))
                       if rank is not None)
        name, ranks = self.communicator
        return f"{self.kind}{ends} of {self.nbytes} bytes on {name} of ranks {', '.join(map(str, ranks))}"


class Wait(NamedTuple):
    number: int


class Program(list[Post | Wait]):
    """What a rank posts and waits for."""


class Noted(NamedTuple):
    """Stands for the work of a message that nobody sends."""

    program: Program
    number: int

    def wait(self) -> None:
        self.program.append(Wait(self.number))


class Notes(NamedTuple):
    """Where an Axis without a group writes down what it is asked for."""

    program: Program
    communicator: Communicator

    def post(self, kind: str, nbytes: int, **ends: int) -> Noted:
        """`ends`: Post's `to` and `source`, as places among the communicator's ranks."""
        number = len(self.program)
        ranks = {end: self.communicator.ranks[place] for end, place in ends.items()}
        self.program.append(Post(number, self.communicator, kind, nbytes, **ranks))
        return Noted(self.program, number)


@dataclass(kw_only=True)
class NotedAxis(Axis):
    """An Axis without a group, which writes down in `notes` what it is asked for."""

    notes: Notes

    def noted(self, kind: str, nbytes: int, **ends: int) -> Sequence[dist.Work]:
        """Notes a message of so many bytes. `kind`, `ends`: see Notes.post()."""
        return [self.notes.post(kind, nbytes, **ends)] if nbytes else ()


def noted_mesh(rank: int, tp: int, cp: int, dp: int = 1, metp: bool = False) -> tuple[Mesh, Program]:
    """The Mesh of one of dp * cp * tp ranks, with nobody at the other ends, and the Program that grows with
    what its axes are asked for."""
    lines, program = lines_of(tp, cp, dp, metp), Program()
    axes: dict[str, Axis] = {}
    for name, carrier in communicators(tp, cp, dp, metp).items():
        [mine] = [line for line in lines[name] if rank in line]
        notes = Notes(program, Communicator(carrier, tuple(mine)))
        axes[name] = NotedAxis(name, len(mine), mine.index(rank), notes=notes)
    return mesh_of_axes(axes, tp, cp, Axis("host", dp * cp * tp, rank)), program
