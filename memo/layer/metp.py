"""METP: weights travel, activations stay. The ranks that share a layer's parameters share the tokens too: a
rank does all of a layer for its own n rows, and the parts of the matrices that the other ranks hold come by.

    MLP       Visits (visits.py): the parts go round in a ring, a hop for each part that is used; in the
              backward their gradients go with them, and are home at the end
    attention broadcasts: group of heads by group, for all ranks must attend to the same heads at once; in the
              backward the gradients of a group are summed on the rank that holds its matrices

While one lot is used the next is on its way. A rank holds of each matrix what it holds with tensor
parallelism (tp.py), so flat buffers, optimizer and checkpoints know nothing of METP; it travels as products
take it (memo/kernels/matmul.py). Gradients of matrices are summed in fp32 in a fixed order. p: the ranks that
share the parameters. Source: METP (FITEE 2400602), algorithms 1 to 6.
"""

from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from memo.config.layer import METP_ROWS
from memo.kernels.matmul import Linear, Matmul, Operand
from memo.kernels.rows import cut
from memo.layer.activations import Weights
from memo.layer.mlp import Mlp
from memo.parallel.tp import bias_backward
from memo.parallel.visits import Ahead, Visits
from memo.system.axis import Axis, Hop, Works

Normed = Callable[[slice], torch.Tensor]  # rows of a norm's output, made when they are asked for


# --- the MLP: in a ring ---

def row_pieces(n: int) -> list[slice]:
    """Slices n rows, METP_ROWS in each or less."""
    return cut(0, n, most=METP_ROWS)


Parts = Mapping[str, Operand]  # {parameter: a rank's part}


def hidden_of(matmul: Matmul, x: Operand, ins: Iterable[Linear], like: torch.Tensor) -> list[torch.Tensor]:
    """Computes x w^T + b of several linears [(w, b or None)], in rows and dtype as `like`."""
    return [matmul.forward(x, w, like.new_empty(1, len(like), len(w)), b)[0] for w, b in ins]


def own_and_others(matmul: Matmul, own: Parts, visits: Visits) -> Iterator[Parts]:
    """Iterates over the matrices of each rank, own ones first, beside which two parts are on their way."""
    def arrived(part: Sequence[torch.Tensor]) -> Parts:
        return dict(zip(own, map(matmul.arrived, part, own.values()), strict=True))
    visits.prepare(2)
    return chain([own], map(arrived, visits))


def mlp_forward(matmul: Matmul, mlp: Mlp, own: Parts, visits: Visits, normed: Normed,
                residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Writes out (n, C) = residual, if any, + the MLP of x without its last bias, where normed(r) gives rows
    r of x (n, C). `own`: the rank's part of the matrices, which `visits` carries. Source: METP, 1."""
    for part in own_and_others(matmul, own, visits):
        ins, (w, _) = mlp.linears(part).values(), mlp.last_linear(part)
        for r in row_pieces(len(out)):  # nothing is as wide as F; of width F/p is a piece of rows
            hidden = hidden_of(matmul, matmul.rows(normed(r)[None]), ins, like=out[r])
            product = mlp.activated(hidden)  # (m, F/p)
            added = None if residual is None else residual[r][None]
            matmul.forward(matmul.rows(product[None]), w, out[r][None], added)
            del hidden, product  # before the next piece's
        residual = out
        del part, ins, w  # before the next hop takes memory
    return out


def mlp_backward(matmul: Matmul, mlp: Mlp, own: Parts, visits: Visits, normed: Normed, dy: torch.Tensor,
                 dws: Mapping[str, torch.Tensor], dx: torch.Tensor) -> Hop | None:
    """Writes the gradient of x over dx (n, C), and adds what the rank's rows give to the gradients `dws` of
    its matrices. What other ranks' rows give comes in the Works, to be added. Source: METP, algorithm 2."""
    travelling: Hop | None = None  # gradients of the part that comes next, at last those of the own one
    for part in own_and_others(matmul, own, visits):
        first = part is own
        gradients = dws if first else dict(zip(dws, map(torch.zeros_like, dws.values()), strict=True))
        part_backward(matmul, mlp, part, gradients, normed, dy, dx, write=first)
        if travelling is not None:
            # of the ranks where the part was before
            torch._foreach_add_([*gradients.values()], travelling.wait())
        if not first:
            travelling = visits.axis.shift(*gradients.values())
        del part, gradients  # before the next hop takes memory
    return travelling


def part_backward(matmul: Matmul, mlp: Mlp, part: Parts, gradients: Mapping[str, torch.Tensor],
                  normed: Normed, dy: torch.Tensor, dx: torch.Tensor, write: bool) -> None:
    """Adds to the gradients of a part of the MLP, computed again, and to dx, or with `write` writes it."""
    (ins, (w, _)), (dins, (dw, _)) = ((mlp.linears(of).values(), mlp.last_linear(of))
                                      for of in (part, gradients))
    for r in row_pieces(len(dy)):
        x, dy_ = matmul.rows(normed(r)[None]), matmul.gradients(dy[r][None])
        hidden = hidden_of(matmul, x, ins, like=dy[r])
        product = mlp.activated(hidden)[None]
        matmul.weight_gradient(dw, dy_, matmul.rows(product))
        mlp.activate_backward(matmul.input_gradient(dy_, w, product)[0], hidden)
        del product, dy_
        for i, (d, (w_in, _), (dw_in, db_in)) in enumerate(zip(hidden, ins, dins, strict=True)):
            bias_backward(d, db_in)
            d_ = matmul.gradients(d[None])
            matmul.weight_gradient(dw_in, d_, x)
            matmul.input_gradient(d_, w_in, dx[r][None], add=not write or i > 0)
        del x, hidden, d, d_  # before the next piece's


# --- attention: by groups of heads ---

class Heads(NamedTuple):
    """Names a group of heads: `q` of queries, `kv` of keys that they read; `first`, `last` to read these."""

    q: slice
    kv: slice
    first: bool
    last: bool

    def range_of(self, name: str, D: int) -> tuple[int, int, int]:
        """Finds (dim, first, end) of the heads' columns, D elements each, in attention's parameter `name`."""
        heads = self.kv if name[0] in "kv" else self.q
        return int(name == "proj_w"), heads.start * D, heads.stop * D

    def columns(self, held: torch.Tensor, name: str, D: int, alone: bool,
                new: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """Takes memory new(shape) for the group's columns of a parameter or gradient, of which the rank holds
        the part `held`; views them where it holds all, `alone`."""
        dim, first, end = self.range_of(name, D)
        if alone:
            return held.narrow(dim, first, end - first)
        return new([end - first if d == dim else n for d, n in enumerate(held.shape)])

    def shares(self, group: torch.Tensor, held: torch.Tensor, name: str,
               D: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yields (rank, its share of `group`, where that lies in the part that the rank holds), as views.
        `group`: the group's columns of a parameter or its gradient; `held`: the part that a rank holds.
        Several shares are rows of it, so that each is contiguous."""
        dim, first, end = self.range_of(name, D)
        for rank, start, at, n in pieces_of(first, end, held.shape[dim]):
            yield rank, group.narrow(dim, at, n), held.narrow(dim, start, n)


def groups_of_heads(H: int, Hkv: int, groups: int) -> list[Heads]:
    """Cuts H heads, and Hkv of keys and values, into so many Heads."""
    n, sharing = H // groups, H // Hkv
    return [Heads(slice(i, i + n), slice(i // sharing, -(-(i + n) // sharing)), i % sharing == 0,
                  (i + n) % sharing == 0) for i in range(0, H, n)]


def pieces_of(first: int, end: int, part: int) -> list[tuple[int, int, int, int]]:
    """Lists [(rank, first on it, first in the range, elements)] of [first, end), each rank holding `part`."""
    bounds = [(rank, max(first, rank * part), min(end, (rank + 1) * part))
              for rank in range(first // part, -(-end // part))]
    return [(rank, a - rank * part, a - first, b - a) for rank, a, b in bounds]


class Matrices(UserDict[str, Operand]):
    """Holds {name: a group's columns of it}; waits for a matrix, with its bias, however it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.works = defaultdict[str, list[Works[torch.Tensor]]](list)  # by the first letter of the names

    def __getitem__(self, name: str) -> Operand:
        for work in self.works.pop(name[0], ()):
            work.wait()
        return super().__getitem__(name)


def start_broadcasts(matmul: Matmul, axis: Axis, own: Parts, group: Heads, D: int) -> Matrices:
    """Sends the Matrices of a group to all ranks. `own`: {name of a parameter: the rank's part}."""
    matrices, alone = Matrices(), axis.size == 1
    for name, part in own.items():
        carried = matmul.carried(part)
        columns = group.columns(carried, name, D, alone, carried.new_empty)
        matrices[name] = matmul.arrived(columns, part)
        for rank, share, own_share in () if alone else group.shares(columns, carried, name, D):
            if rank == axis.rank:
                share.copy_(own_share)
            matrices.works[name[0]].append(axis.start_broadcast(share, rank))
    return matrices


class Projection:
    """Computes out = x, if any, + a w^T + b, of a w (C, Q) of which each of p ranks holds its part (C, Q/p).
    The parts of a (m, Q) get ready one after the other, and p pieces of w's rows come one after the other.
    Each column of `out` is the sum of the parts in order, whatever comes first: each sum rounds in the run's
    dtype."""

    def __init__(self, matmul: Matmul, axis: Axis, own: Operand, bias: torch.Tensor | None,
                 x: torch.Tensor | None, a: torch.Tensor, out: torch.Tensor) -> None:
        self.matmul, self.own, self.p = matmul, own, (p := axis.size)
        self.coming = Ahead(map(axis.start_gather, matmul.carried(own).tensor_split(p)))
        self.pieces = list[torch.Tensor]()  # of w, (p, C/p, Q/p)
        self.bias, self.parts, self.out = bias, a[None].chunk(p, 2), out
        self.ready = list[Operand]()  # the parts, as the products take them
        residuals = [None] * p if x is None else x.tensor_split(p, 1)
        self.columns = list(zip(residuals, out.tensor_split(p, 1), strict=True))

    def start(self, pieces: int) -> None:
        """Sends for the next pieces of w."""
        self.coming.prepare(len(self.coming.ready) + pieces)

    def add(self) -> None:
        """Adds the next part of a to the columns whose piece of w came before, then all parts up to it to
        those of the piece that comes now. With the last part the bias."""
        new = len(self.pieces)
        self.ready.append(self.matmul.rows(self.parts[new]))
        for i, (x, out) in enumerate(self.columns[:new + 1]):
            if i == new:
                self.pieces.append(next(self.coming))
            for j in range(new if i < new else 0, new + 1):
                w = self.matmul.arrived(self.pieces[i][j], self.own)
                for r in row_pieces(len(out)):
                    added = out if j else x
                    self.matmul.forward(self.ready[j][:, r], w, out[r][None],
                                        None if added is None else added[r][None])
        if new + 1 == self.p and self.bias is not None:
            self.out += self.bias


class Reductions:
    """Sends the gradients of groups of heads home: to the rank that holds the group's parameters, where
    they are added to `dw`. One group's are on their way while the next one's are computed."""

    def __init__(self, axis: Axis, dw: Weights, D: int) -> None:
        self.axis, self.dw, self.D = axis, dw, D
        self.under_way = deque[tuple[Heads, Works[torch.Tensor], torch.Tensor | None]]()

    def places(self, group: Heads, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Makes {name: fp32 tensor to add the group's gradient to}."""
        own, alone = {name: self.dw[name] for name in names}, self.axis.size == 1
        return {name: group.columns(dw, name, self.D, alone, dw.new_zeros) for name, dw in own.items()}

    def start(self, group: Heads, places: dict[str, torch.Tensor], *names: str) -> None:
        """Takes these gradients, where there are such, out of `places`, and sends them to other ranks."""
        for name in names:
            gradient = places.pop(name, None)
            if gradient is None or self.axis.size == 1:
                continue
            for rank, share, own in group.shares(gradient, self.dw[name], name, self.D):
                work = self.axis.start_reduce(share, rank)
                self.under_way.append((group, work, own if rank == self.axis.rank else None))

    def finish(self, before: Heads | None = None) -> None:
        """Waits for the gradients of all groups, or of those before one."""
        while self.under_way and (before is None or self.under_way[0][0].q.start < before.q.start):
            _, work, own = self.under_way.popleft()
            total = work.wait()
            if own is not None:
                own += total
