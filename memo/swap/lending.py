"""Where lies what stages of a pipeline lend each other: a helper's two places for a unit of a guest, and a
home's for what helpers repay (memo/schedule/help.py). Source: SPPO 6.2.

Of each sequence of a batch, rows of a subsequence are neighbours: a message has parts of each, all
contiguous.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch

from memo.activations import Pieces
from memo.schedule.help import HELPER_PLACES, turns_of
from memo.schedule.step import Unit
from memo.swap.placement import Placement
from memo.swap.sizes import guest_rows, repaid_rows

Pair = tuple[torch.Tensor, torch.Tensor]


def of_rows(pair: Pair, rows: tuple[int, int], tokens: int) -> Pair:
    """Picks rows of keys and values (B, T, Hkv, D) with so many tokens for each."""
    k, v = (t[:, rows[0] * tokens // len(t):rows[1] * tokens // len(t)] for t in pair)
    return k, v


def of_sequences(stream: torch.Tensor, B: int, first: int, end: int) -> torch.Tensor:
    """Picks rows of B sequences, equally many of each: (n, ...) -> (B, rows, ...)."""
    return stream.unflatten(0, (B, -1))[:, first // B:end // B]


def flat(pieces: Pieces) -> list[torch.Tensor]:
    """Finds keys and values that are neighbours in memory as one tensor; nothing where there are none."""
    numel = sum(t.numel() for pair in pieces for t in pair)
    return [pieces[0][0].as_strided((numel,), (1,))] if numel else []


class Lending:
    """`cut`: Swap.cut. `piece(region, byte, rows, dtype)` -> (k, v) there. `numel`: elements of a layer's
    parameters; `row`: of keys and values of a row. `weights`, `gradients`: of a helper's two places, flat;
    `turn`: which of them each guest's unit has. `keys`, `sums`: of a guest's unit, piece by piece, the last
    one up to its own rows. `repaid`: {helper: place of gradients of the weights, and of sums of keys and
    values, flat}."""

    def __init__(self, placement: Placement, cut: Callable[..., torch.Tensor], piece: Callable[..., Pair],
                 numel: int, row: int, dtype: torch.dtype) -> None:
        p, rows, size, fp32 = placement, guest_rows(placement), dtype.itemsize, torch.float32
        places = range(HELPER_PLACES) if p.guests else ()
        self.weights = [cut("guest_weights", k * numel * size, (numel,), dtype) for k in places]
        begins = [4 * k * (numel + rows * row) for k in places]
        self.gradients = [cut("guest_gradients", at, (numel,), fp32) for at in begins]
        self.turn = turns_of(p.units, p.guest_of)
        self.keys, self.sums = dict[Unit, Pieces](), dict[Unit, Pieces]()
        for unit, turn in self.turn.items():
            guest = p.guest_of[unit.subsequence]
            ends = [*accumulate([*p.cuts[:guest.subsequence], guest.end], initial=0)]
            for pieces, region, at, kind in (
                    (self.keys, "guest_keys", turn * rows * row * size, dtype),
                    (self.sums, "guest_gradients", begins[turn] + 4 * numel, fp32)):
                pieces[unit] = [piece(region, at + first * row * kind.itemsize, end - first, kind)
                                for first, end in pairwise(ends)]
        sizes = {helper: numel + row * before for helper, before in repaid_rows(p).items()}
        begins = [4 * at for at in accumulate(sizes.values(), initial=0)]
        self.repaid = {helper: cut("repaid", at, (n,), fp32)
                       for (helper, n), at in zip(sizes.items(), begins, strict=False)}
