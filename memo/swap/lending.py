"""The tensors that stages of a pipeline send each other where one computes rows of another: parts of what a
home has, and a helper's places for them (memo/schedule/help.py). Source: SPPO 6.2.

Of each sequence of a batch, rows of a subsequence are neighbours: a message has parts of each, all
contiguous.
"""

from collections.abc import Callable

import torch

from memo.msp import Help
from memo.schedule.help import HELPER_PLACES, turns_of
from memo.schedule.step import Moved, Step, Unit
from memo.swap.placement import Placement
from memo.swap.shared_bytes import guest_rows, help_of, keys_before, repaid_rows

Tensors = list[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
Pieces = list[Pair]


def of_rows(pair: Pair, rows: slice, tokens: int) -> Pair:
    """Those rows of keys and values (B, T, Hkv, D) with so many tokens for each."""
    k, v = (t[:, rows.start * tokens // len(t):rows.stop * tokens // len(t)] for t in pair)
    return k, v


def of_sequences(stream: torch.Tensor, B: int, first: int, end: int) -> torch.Tensor:
    """Those rows of B sequences, equally many of each: (n, ...) -> (B, rows, ...)."""
    return stream.unflatten(0, (B, -1))[:, first // B:end // B]


class Lending:
    """`cut`: Swap.cut. `piece(region, byte, rows, dtype)` -> (k, v) there. `numel`: elements of a layer's
    parameters. `weights`, `gradients`: of a helper's two places, flat. `repaid`: {helper: place of gradients
    of the weights, and of sums of keys and values, flat}."""

    def __init__(self, placement: Placement, cut: Callable[..., torch.Tensor], piece: Callable[..., Pair],
                 B: int, numel: int, row: int, tokens: int, dtype: torch.dtype) -> None:
        p, self.placement, self.B, self.tokens = placement, placement, B, tokens
        self.row = row  # elements of keys and values of a row
        rows, size, fp32 = guest_rows(p), dtype.itemsize, torch.float32
        places = range(HELPER_PLACES) if p.guests else ()
        self.weights = [cut("guest_weights", k * numel * size, (numel,), dtype) for k in places]
        begins = [4 * k * (numel + rows * row) for k in places]
        self.gradients = [cut("guest_gradients", at, (numel,), fp32) for at in begins]
        self.turn = turns_of(p.units, p.guest_of)
        self.keys, self.sums = dict[Unit, Pieces](), dict[Unit, Pieces]()
        self.key_bytes, self.sum_bytes = dict[Unit, torch.Tensor](), dict[Unit, torch.Tensor]()
        for unit, turn in self.turn.items():
            guest = p.guest_of[unit[1]]
            lengths = [*p.cuts[:guest.subsequence], guest.end]
            before = keys_before(p, guest) * row
            for region, at, kind, pieces, flat in (
                    ("guest_keys", turn * rows * row * size, dtype, self.keys, self.key_bytes),
                    ("guest_gradients", begins[turn] + 4 * numel, fp32, self.sums, self.sum_bytes)):
                begin = [at + sum(lengths[:i]) * row * kind.itemsize for i in range(len(lengths))]
                pieces[unit] = [piece(region, *where, kind) for where in zip(begin, lengths, strict=True)]
                flat[unit] = cut(region, at, (before,), kind)
        self.repaid: dict[int, torch.Tensor] = {}
        end = 0
        for helper, before in repaid_rows(p).items():
            n = numel + row * before
            self.repaid[helper] = cut("repaid", end, (n,), fp32)
            end += 4 * n
        for unit in [Unit(layer, x) for layer in range(p.n_layer) for x in range(p.subsequences) if p.lent]:
            (layer, x), before = unit, sum(p.cuts[:unit[1]])
            for region, at, kind, pieces, flat in (
                    ("keys", p.key_place(Unit(layer, 0)), dtype, self.keys, self.key_bytes),
                    ("key_gradients", p.key_gradient_place(Unit(layer, 0)), fp32, self.sums, self.sum_bytes)):
                begin = row * kind.itemsize * at
                flat[unit] = cut(region, begin, (before * row,), kind)
                pieces[unit] = [piece(region, begin + row * kind.itemsize * before, p.cuts[x], kind)]

    def pieces_of(self, unit: Unit, pieces: dict[Unit, Pieces]) -> Pieces:
        """What a guest's queries meet of `keys`, or `sums`: the rows before its own are a piece."""
        guest, (*before, last) = self.placement.guest_of[unit[1]], pieces[unit]
        parts = (slice(0, guest.first), slice(guest.first, guest.end))
        return [*before, *(of_rows(last, part, self.tokens) for part in parts)]

    def zeroed(self, unit: Unit) -> Tensors:
        """What is 0 before a guest's backward: it is to be added to."""
        return [self.gradients[self.turn[unit]], self.sum_bytes[unit]]

    def lent_at(self, step: Step) -> tuple[Help, Unit]:
        """Of a home's step, what is lent, and the home's unit."""
        piece = help_of(self.placement, step)
        return piece, Unit(step.unit.layer, piece.subsequence)

    def message(self, step: Step, whole: dict[Unit, tuple[torch.Tensor, torch.Tensor]],
                params: Callable[[int], torch.Tensor]) -> Tensors:
        """What a step sends or receives, equal at both ends. `whole`: Swap.whole; params(layer): of a home,
        flat."""
        back, unit = step.back, step.unit
        if guest := self.placement.guest_of.get(unit[1]):
            turn, stream = self.turn[unit], of_sequences(whole[unit][0], self.B, 0, guest.rows)
            weights, repaid = self.weights[turn], [self.gradients[turn], self.sum_bytes[unit]]
        else:
            guest, unit = self.lent_at(step)
            weights, stream = params(unit[0]), of_sequences(whole[unit][0], self.B, guest.first, guest.end)
            repaid = self.repaid_of(guest, unit, len(weights))
        keys, sums = (pieces[unit][-1] for pieces in (self.keys, self.sums))
        first, last = unit[0] == 0, unit[0] == guest.layers - 1
        before, up_to, own = slice(0, guest.first), slice(0, guest.end), slice(guest.first, guest.end)
        flat: Tensors = []
        pair: Pair | tuple[()] = ()
        ends = False
        match step.moved:
            case Moved.REPAYMENT:
                flat = repaid
            case Moved.LOAN:
                flat = [weights, self.key_bytes[unit]]
                pair = of_rows(keys, up_to, self.tokens) if back else ()
            case Moved.ROWS:
                pair, ends = (of_rows(sums, up_to, self.tokens), last) if back else (
                    of_rows(keys, before, self.tokens), first)
            case Moved.RESULTS:
                pair, ends = (of_rows(sums, before, self.tokens), first) if back else (
                    of_rows(keys, own, self.tokens), last)
        found = [*flat, *(part for t in (*pair, *[stream] * ends) for part in t)]
        return [t for t in found if t.numel()]

    def repaid_of(self, guest: Help, unit: Unit, numel: int) -> Tensors:
        """Gradients of the weights, and sums of keys and values, where a helper repays them."""
        place, end = self.repaid[guest.helper], numel + len(self.sum_bytes[unit])
        return [place[:numel], place[numel:end]]

    def add(self, step: Step, gradients: torch.Tensor) -> None:
        """Adds what a helper has repaid to the `gradients` of a layer, flat, and to the sums."""
        guest, unit = self.lent_at(step)
        for total, more in zip((gradients, self.sum_bytes[unit]), self.repaid_of(guest, unit, len(gradients)),
                               strict=True):
            total.add_(more)
