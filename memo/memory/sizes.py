"""Bytes of what copies and messages move, and of places for rows of other stages. No torch."""

from math import prod
from typing import Literal

from memo.config.layer import INPUT, Tensor
from memo.errors import OutOfHostMemory
from memo.memory.placement import Placement
from memo.schedule.access import Memory
from memo.schedule.help import HELPER_PLACES
from memo.schedule.step import Content, Part, Step

HOST_SHARE = 0.9  # of a host's free memory that a run may take; the rest is for batches and other processes


class Sizes:
    """Counts the bytes of parts. `tensors`: of a layer, all rows; `numel`: of its parameters, padded."""

    def __init__(self, placement: Placement, tensors: dict[str, Tensor], numel: int = 0) -> None:
        p = self.placement = placement
        self.memory = Memory(p.program)
        itemsize = tensors[INPUT].nbytes // prod(tensors[INPUT].shape)
        x, keys = p.row_bytes(tensors[INPUT]), p.keys_row_bytes(tensors) if p.several else 0
        streams = Content.INPUT, Content.SWEPT, Content.BELOW, Content.ABOVE
        self.row_bytes = dict.fromkeys(streams, x) | dict.fromkeys((Content.KEYS, Content.LOAN), keys)
        self.row_bytes |= dict.fromkeys((Content.SUMS, Content.REPAID), 4 * (keys // itemsize))
        self.layer_bytes = {Content.LOAN: itemsize * numel, Content.REPAID: 4 * numel}
        # of units that are not alike: {tensor: (first byte, bytes)} of what goes to the host
        self.kept = {k: p.kept_bytes(k, tensors) for k in set(p.like)}
        self.survivor_bytes = {  # of their inputs, and of all others
            (k, content): sum(n for name, (_, n) in kept.items()
                              if (name == INPUT) == (content is Content.INPUT))
            for k, kept in self.kept.items() for content in (Content.KEPT, Content.INPUT)}

    def moved(self, step: Step) -> int:
        """Counts the bytes that a copy moves to or from the host, or a message; or what a home adds."""
        return sum(map(self.of, self.memory.moves(step)))

    def of(self, part: Part) -> int:
        """Counts the bytes of a part; of what stays on the device none."""
        p, (content, unit, rows) = self.placement, part
        if content is Content.KEPT or (content is Content.INPUT and unit not in self.memory.streamed):
            return self.survivor_bytes[p.like[p.number[unit]], content]
        x = unit.subsequence % p.subsequences  # a guest's, too
        match content:
            case Content.LOAN | Content.REPAID:
                return self.layer_bytes[content] + self.row_bytes[content] * sum(p.cuts[:x])
            case _ if rows is not None:
                n = rows[1] - rows[0]
            case Content.BELOW | Content.ABOVE:
                n = p.cuts[x] if p.cuts else p.n_rows
            case Content.INPUT | Content.SWEPT:
                n = p.first_kept(p.number[unit], INPUT)[0]
            case _:
                n = p.rows(p.number[unit])
        return self.row_bytes[content] * n


def repaid_rows(placement: Placement) -> dict[int, int]:
    """Counts for each helper the rows of keys and values that a home has a place for."""
    rows: dict[int, int] = {}
    for piece in placement.lent:
        rows[piece.helper] = max(rows.get(piece.helper, 0), sum(placement.cuts[:piece.subsequence]))
    return rows


def shared_regions(sizes: Sizes) -> dict[str, int]:
    """Counts bytes of regions on the device: two places each as a helper, one of each helper as a home."""
    p = sizes.placement
    weights, gradients = sizes.layer_bytes.values()
    keys, sums = (sizes.row_bytes[content] for content in (Content.KEYS, Content.SUMS))
    rows = max((sum(p.cuts[:piece.subsequence]) + piece.end for piece in p.guests), default=0)  # and before
    found = {"guest_weights": HELPER_PLACES * weights * bool(p.guests),
             "guest_keys": HELPER_PLACES * rows * keys,
             "guest_gradients": HELPER_PLACES * (gradients + rows * sums) * bool(p.guests),
             "repaid": sum(gradients + n * sums for n in repaid_rows(p).values())}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def granted_bytes(host_memory_gb: float | Literal["auto"], there_bytes: int, reserved: int,
                  where: str) -> int:
    """Counts the bytes that a host grants: host_memory_gb (1e9 bytes), or HOST_SHARE of what is there
    beside `reserved` bytes. `where`: words for what is there. Errors: OutOfHostMemory: more is asked for."""
    most = max(0, int(there_bytes * HOST_SHARE) - reserved)
    if host_memory_gb == "auto":
        return most
    if host_memory_gb * 1e9 > most:
        beside = f" beside {reserved / 1e9:.4g} for a checkpoint's copy" if reserved else ""
        raise OutOfHostMemory(f"host_memory_gb={host_memory_gb:g} must be at most {most / 1e9:.4g}, "
                              f"{HOST_SHARE:.0%} of {where}{beside}; try host_memory_gb=auto")
    return int(host_memory_gb * 1e9)
