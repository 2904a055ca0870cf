"""Bytes of activations: of their memory on device and host; of what copies and messages move. No torch."""

from collections import Counter
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import Literal

from memo.config.layer import INPUT, KEYS_VALUES, Tensor
from memo.errors import OutOfHostMemory
from memo.memory.placement import Placement
from memo.schedule.access import AccessTable
from memo.schedule.help import HELPER_PLACES
from memo.schedule.program import SWEEP_PLACES
from memo.schedule.step import Content, Part, Step

HOST_SHARE = 0.9  # of a host's free memory that a run may take; the rest is for batches and other processes


class Sizes:
    """Counts the bytes of activations that are placed. `tensors`: of a layer, all rows; `numel`: of its
    parameters, padded, where stages lend them. `row_bytes`: of one own row of each tensor; `keys_row_bytes`:
    of its keys and values in the pieces that attention over a prefix reads; `sent_keys_row_bytes`: of those
    that go to the host."""

    def __init__(self, placement: Placement, tensors: dict[str, Tensor], numel: int = 0) -> None:
        p, self.tensors = placement, tensors
        self.placement = p
        self.itemsize = tensors[INPUT].nbytes // prod(tensors[INPUT].shape)
        self.row_bytes = {name: t.nbytes // p.n_rows for name, t in tensors.items()}
        self.keys_row_bytes = p.dealt * sum(self.row_bytes[name] for name in KEYS_VALUES) if p.several else 0
        self.sent_keys_row_bytes = self.keys_row_bytes * (p.keys == "copied")
        self.sums_row_bytes = 4 * (self.keys_row_bytes // self.itemsize)
        self.layer_bytes = {Content.LOAN: self.itemsize * numel, Content.REPAID: 4 * numel}

    # --- the device ---

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """Counts for each tensor the bytes of all its buffers."""
        found = {}
        for name, nbytes in self.row_bytes.items():
            if not self.placement.apart(name):
                first, length = self.placement.buffers_of(name)[-1]
                found[name] = nbytes * (first + length)
        return found

    @property
    def region_bytes(self) -> dict[str, int]:
        """Counts bytes besides buffers: keys and values, sums of gradients, streams, inputs."""
        p, x = self.placement, self.row_bytes[INPUT]
        resident = {"resident": sum(self.survivor_bytes(resident=True).values())} if p.stays else {}
        if not p.several:
            return resident
        keys, sums = p.keys_laid_out
        made = p.keys == "made" and not p.x_stays  # from inputs that swapped units have sent
        leaving = p.key_places.leaving if made else ()
        sweeps = (unit for unit in p.units[:max(0, p.n_swapped)] if unit in leaving)
        return resident | {
            "keys": self.keys_row_bytes * keys.rows,
            "key_gradients": self.sums_row_bytes * sums.rows,
            "stream": x * (p.own_stream_rows + sum(piece.rows for piece in p.guests)),
            "sweep": x * max(p.cuts) * len([*islice(sweeps, SWEEP_PLACES)]) * made}

    @property
    def device_bytes(self) -> int:
        """Counts the bytes of all buffers and regions, but for what stages lend each other."""
        return sum(self.buffer_bytes.values()) + sum(self.region_bytes.values())

    @property
    def lent_bytes(self) -> dict[str, int]:
        """Counts bytes of regions for what stages lend: two places each as a helper, one of each helper as a
        home."""
        p, (weights, gradients), sums = self.placement, self.layer_bytes.values(), self.sums_row_bytes
        rows = max((sum(p.cuts[:piece.subsequence]) + piece.end for piece in p.guests), default=0)
        found = {"guest_weights": HELPER_PLACES * weights * bool(p.guests),
                 "guest_keys": HELPER_PLACES * rows * self.keys_row_bytes,  # and of those before
                 "guest_gradients": HELPER_PLACES * (gradients + rows * sums) * bool(p.guests),
                 "repaid": sum(gradients + n * sums for n in self.repaid_rows.values())}
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    @property
    def repaid_rows(self) -> dict[int, int]:
        """Counts for each helper the rows of keys and values that a home has a place for."""
        rows: dict[int, int] = {}
        for piece in self.placement.lent:
            rows[piece.helper] = max(rows.get(piece.helper, 0), sum(self.placement.cuts[:piece.subsequence]))
        return rows

    # --- the host ---

    @property
    def host_bytes(self) -> int:
        """Counts the bytes of the host slab: of all that a forward offloads."""
        return self.stream_bytes + sum(self.survivor_bytes().values()) + self.keys_bytes

    @property
    def stream_bytes(self) -> int:
        """Counts the bytes that go to the host of what lies between layers."""
        return self.row_bytes[INPUT] * self.placement.stream_rows.end

    @property
    def layer_keys_bytes(self) -> int:
        """Counts the bytes of keys and values that a layer sends, in the mean of all layers."""
        p = self.placement
        return self.sent_keys_row_bytes * p.n_rows if p.order == "layer" else self.keys_bytes // p.n_layer

    @property
    def keys_bytes(self) -> int:
        """Counts the bytes of keys and values that go to the host, of all units."""
        p = self.placement
        return self.sent_keys_row_bytes * sum(n * p.cuts[i] for i, n in p.key_places.leaving_pieces.items())

    def survivor_bytes(self, resident: bool = False) -> dict[str, int]:
        """Counts {tensor: bytes of what all units send to the host, or to where it stays}."""
        p, found = self.placement, dict.fromkeys(self.tensors, 0)
        given = [rows for rows in (*p.kept.values(), *p.stays.values()) if isinstance(rows, tuple)]
        for k, units in Counter(p.first_alike([*zip(p.lengths, *given, strict=True)])).items():
            for name, (_, nbytes) in self.kept_bytes(k, resident).items():
                if name != INPUT or not (p.x_stays or p.units[k] in p.stream_rows):
                    found[name] += units * nbytes
        return {name: n for name, n in found.items() if n}

    def kept_bytes(self, k: int, resident: bool = False) -> dict[str, tuple[int, int]]:
        """Finds {tensor: (first byte, bytes) of what unit k sends to the host; or, `resident`, to where it
        stays on the device}; of its input too, wherever that is."""
        p, ranges = self.placement, {}
        for name, nbytes in self.row_bytes.items() if k < p.n_swapped else ():
            if not p.apart(name):
                kept, first = p.first_kept(k, name)
                stay = min(kept, p.part(p.kinds[k], p.stays.get(name, 0)))
                n = stay if resident else kept - stay
                ranges[name] = nbytes * (first + (kept - n) * resident), nbytes * n
        return {name: (first, n) for name, (first, n) in ranges.items() if n}

    # --- what moves ---

    @cached_property
    def table(self) -> AccessTable:
        return AccessTable(self.placement.program)

    @cached_property
    def kept(self) -> dict[tuple[int, Content, bool], dict[str, tuple[int, int]]]:
        """Finds kept_bytes() of units that are not alike: of their inputs, and of all else."""
        found = {}
        for k, resident in product(set(self.placement.like), {False, bool(self.placement.stays)}):
            ranges = self.kept_bytes(k, resident)
            found[k, Content.INPUT, resident] = {name: ranges.pop(name) for name in ranges.keys() & {INPUT}}
            found[k, Content.KEPT, resident] = ranges
        return found

    def moved(self, step: Step) -> int:
        """Counts the bytes that a copy moves to or from the host, or a message; or what a home adds."""
        return sum(map(self.of, self.table.moves(step)))

    def of(self, part: Part) -> int:
        """Counts the bytes of a part; of what stays on the device none."""
        p, (content, unit, rows) = self.placement, part
        if content is Content.KEPT or (content is Content.INPUT and unit not in self.table.streamed):
            return sum(n for _, n in self.kept[p.like[p.number[unit]], content, False].values())
        x = unit.subsequence % p.subsequences  # a guest's, too
        n = rows[1] - rows[0] if rows else p.rows(p.number[unit])
        match content:
            case Content.KEYS:
                return self.keys_row_bytes * n
            case Content.SUMS:
                return self.sums_row_bytes * n
            case Content.LOAN:
                return self.layer_bytes[content] + self.keys_row_bytes * sum(p.cuts[:x])
            case Content.REPAID:
                return self.layer_bytes[content] + self.sums_row_bytes * sum(p.cuts[:x])
            case Content.INPUT | Content.SWEPT:
                n = p.first_kept(p.number[unit], INPUT)[0]
            case _ if rows is None:  # between layers
                n = p.cuts[x] if p.cuts else p.n_rows
        return self.row_bytes[INPUT] * n


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
