"""What a rank's axes (axis.py) are asked for, written down where nobody is at the other ends: its messages in
the order of its host, and where it waits for them. testing/rendezvous.py runs the programs of all ranks
together to see whether their messages meet. No torch.
"""

from typing import NamedTuple


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
