"""Bytes that stages of a pipeline send each other where one computes rows of another, and of the places for
them (memo/schedule/help.py). No torch."""

from math import prod

from memo.layer import INPUT, Tensor
from memo.msp import Help
from memo.schedule.help import HELPER_PLACES
from memo.schedule.step import Moved, Step
from memo.swap.placement import Placement


def keys_before(placement: Placement, piece: Help) -> int:
    """Rows of the keys and values of the subsequences before that of a piece."""
    return sum(placement.cuts[:piece.subsequence])


def guest_rows(placement: Placement) -> int:
    """Rows of a helper's place for keys and values."""
    return max((keys_before(placement, piece) + piece.end for piece in placement.guests), default=0)


def repaid_rows(placement: Placement) -> dict[int, int]:
    """{helper: rows of keys and values of which a home has a place for what the helper repays}."""
    rows: dict[int, int] = {}
    for piece in placement.lent:
        rows[piece.helper] = max(rows.get(piece.helper, 0), keys_before(placement, piece))
    return rows


def help_of(placement: Placement, step: Step) -> Help:
    """Finds what a message between a home and a helper is about, or what a home adds."""
    number = step.unit.subsequence
    if number in placement.guest_of:
        return placement.guest_of[number]
    assert step.peer is not None
    return placement.lent_to[number % placement.subsequences, step.peer]


class SharedBytes:
    """`tensors`: of one layer, all rows; `numel`: elements of a layer's parameters, with padding."""

    def __init__(self, placement: Placement, tensors: dict[str, Tensor], numel: int) -> None:
        p = self.placement = placement
        self.itemsize = tensors[INPUT].nbytes // prod(tensors[INPUT].shape)
        self.x_row = p.row_bytes(tensors[INPUT])
        # elements of a row's keys and values
        self.row = p.keys_row_bytes(tensors) // self.itemsize
        self.numel = numel

    def sent(self, step: Step) -> int:
        """Counts the bytes of such a message, or of what a home adds."""
        piece, back, layer = help_of(self.placement, step), step.back, step.unit.layer
        before, first, last = keys_before(self.placement, piece), layer == 0, layer == piece.layers - 1
        match step.moved:
            case Moved.LOAN:
                return self.itemsize * (self.numel + self.row * (before + back * piece.end))
            case Moved.REPAYMENT | None:
                return 4 * (self.numel + self.row * before)
            case Moved.ROWS:
                keys, x = (4 * piece.end, last) if back else (self.itemsize * piece.first, first)
            case _:
                keys, x = (4 * piece.first, first) if back else (self.itemsize * piece.rows, last)
        return keys * self.row + x * piece.rows * self.x_row


def shared_regions(placement: Placement, tensors: dict[str, Tensor], numel: int) -> dict[str, int]:
    """{region: bytes on the device}: as a helper two places for weights, for keys and values, and for
    gradients of both; as a home one for what each helper repays. Arguments as for SharedBytes."""
    p = placement
    if not (p.guests or p.lent):
        return {}
    shared = SharedBytes(p, tensors, numel)
    row, rows, itemsize = shared.row, guest_rows(p), shared.itemsize
    found = {"guest_weights": HELPER_PLACES * numel * itemsize * bool(p.guests),
             "guest_keys": HELPER_PLACES * rows * row * itemsize,
             "guest_gradients": HELPER_PLACES * 4 * (numel + rows * row) * bool(p.guests),
             "repaid": sum(4 * (numel + n * row) for n in repaid_rows(p).values())}
    return {name: nbytes for name, nbytes in found.items() if nbytes}
