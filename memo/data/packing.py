"""Which tokens of a dataset with documents each sequence of a run holds: whole documents packed into
sequences (best_fit), or windows of the stream as it is (in_order); and the order in which a run takes them.

A sequence is a list of pieces, each of one document; what it lacks is padding. Pieces of an epoch hold every
token once. All follows from the documents' starts, S and the seed, in any layout of ranks.

    pieces     0      | 1        | 2   | 3  | padding
    positions  0 .. a | 0 ..   b | 0 c | 0 d| 0 ...
"""

import fcntl
import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memo.system.files import cache_place, keep, kept, open_file, open_lock

MANY = 2**17  # documents; fewer are packed in a tenth of a second


class Share(NamedTuple):
    """Counts what sequences hold: `tokens`, without padding; `learned` ones, which have a target; `squares`,
    twice the pairs of a query and a key that meet, summed over the pieces."""

    tokens: int
    learned: int
    squares: float


@dataclass(frozen=True, eq=False)
class Packing:
    """Holds the sequences of S tokens of an epoch. Of piece i: its first token in the file, its length, and
    whether it ends its document, so that nothing is learned behind its last token, and how many of its tokens
    are learned. Sequence k has pieces bounds[k] to bounds[k + 1]. `window`: as
    formulas.squares_met() takes it."""

    S: int
    first: np.ndarray
    length: np.ndarray
    ends: np.ndarray
    learned: np.ndarray
    bounds: np.ndarray
    window: tuple[int, float] = 0, 1.0

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def shares(self) -> np.ndarray:
        """Counts (tokens, learned, squares) of each sequence: (sequences, 3)."""
        window, part = self.window
        hidden = (part * np.maximum(0, self.length - (window or self.S))**2).astype(np.int64)
        of_pieces = np.stack((self.length, self.learned, self.length**2 - hidden), 1)
        return np.add.reduceat(of_pieces, self.bounds[:-1], 0)

    def pieces(self, k: int) -> list[tuple[int, int, bool]]:
        """Lists (first token, length, whether it ends its document) of the pieces of sequence k."""
        of = slice(self.bounds[k], self.bounds[k + 1])
        return [*zip(*(t[of].tolist() for t in (self.first, self.length, self.ends)), strict=True)]

    def numbers(self, first: int, count: int, seed: int) -> list[int]:
        """Lists which sequences of the packing a run of that seed takes from number `first` on: each epoch is
        a permutation of all."""
        n, found = len(self), list[int]()
        while count > 0:
            epoch, place = divmod(first, n)
            taken = permutation(n, seed, epoch)[place:place + count].tolist()
            found, first, count = found + taken, first + len(taken), count - len(taken)
        return found

    def share(self, first: int, count: int, seed: int) -> Share:
        """Counts what `count` sequences of a run hold together, from number `first` on."""
        return Share(*self.shares[self.numbers(first, count, seed)].sum(0).tolist())

    def batches(self, B: int, seed: int) -> np.ndarray:
        """Counts the Share of each micro batch of B sequences of a run's first epoch: (batches, 3)."""
        count = max(1, len(self) // B)
        shares: np.ndarray = self.shares[self.numbers(0, count * B, seed)].reshape(count, B, 3).sum(1)
        return shares

    def typical(self, B: int, seed: int) -> int:
        """Finds the micro batch of the first epoch whose pairs are nearest to the mean."""
        squares = self.batches(B, seed)[:, 2]
        return int(np.abs(squares - squares.mean()).argmin())


def ends_of(pieces: Sequence[tuple[int, int, bool]]) -> tuple[int, ...]:
    """Lists where the pieces of a sequence end in it."""
    return tuple(accumulate(length for _, length, _ in pieces))


@lru_cache(4)  # the epochs under way of both splits
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, n)).permutation(n)


def pack(starts: np.ndarray, tokens: int, S: int, how: str) -> Packing:
    """Packs documents, of which `starts` are the first of all `tokens`, into sequences of S. `how`: best_fit,
    or in_order."""
    ends: np.ndarray = np.append(starts[1:], tokens)
    stop: np.ndarray
    if how == "in_order":
        cuts = np.union1d(starts, np.arange(0, tokens, S))
        first, stop = cuts, np.append(cuts[1:], tokens)
        sequence = first // S
    else:
        first, stop, sequence = best_fit(starts, ends, S)
    bounds = np.asarray(np.searchsorted(sequence, np.arange(int(sequence[-1]) + 2)))
    return packing_of(S, np.stack((first, stop - first, np.isin(stop, ends, assume_unique=True))), bounds)


def packing_of(S: int, pieces: np.ndarray, bounds: np.ndarray) -> Packing:
    first, length, ends = pieces
    return Packing(S, first, length, ends.astype(bool), length - ends, bounds)


def packed_once(starts: np.ndarray, tokens: int, S: int, how: str) -> Packing:
    """Packs as pack(); many documents once for all ranks and runs of this machine, which find the packing in
    the cache. One rank makes it while the others wait; where nothing can be kept each makes its own."""
    folder, _ = cache_place()
    if folder is None or len(starts) < MANY:
        return pack(starts, tokens, S, how)
    made_from = f"{tokens} {S} {how} ".encode() + Path(__file__).read_bytes() + starts.tobytes()
    path = folder / f"packing-{hashlib.sha256(made_from).hexdigest()[:16]}"
    most_bytes = 8 * 4 * (len(starts) + tokens // S + 2)
    # something else may have the name, and some network file systems know no locks
    with suppress(OSError):
        if found := stored_packing(S, path, most_bytes):
            return found
        with open_lock(folder / "packing.lock", 0o600) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if found := stored_packing(S, path, most_bytes):  # another rank was first
                return found
            packing = pack(starts, tokens, S, how)
            columns = [len(packing.first)], packing.first, packing.length, packing.ends, packing.bounds
            with suppress(OSError):  # a full disk
                keep(np.concatenate(columns).astype(np.int64).tobytes(), path)
            return packing
    return pack(starts, tokens, S, how)


def stored_packing(S: int, path: Path, most_bytes: int) -> Packing | None:
    """Reads a packing from the cache; None: it has none that is whole, and as it was made."""
    with suppress(FileNotFoundError, ValueError), open(open_file(path), "rb") as file:
        stored = np.frombuffer(kept(file.fileno(), most_bytes), np.int64)
        end = 1 + 3 * int(stored[0])
        return packing_of(S, stored[1:end].reshape(3, -1), stored[end:])
    return None


def best_fit(starts: np.ndarray, ends: np.ndarray, S: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents longer than S into pieces, and puts each piece, the longest first, where it leaves the
    least room -> (first, end, sequence) of all pieces, by sequences. Source: arXiv 2404.10830 (best-fit
    packing)."""
    times = -((starts - ends) // S)  # pieces of each document
    number = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)  # of a piece in its document
    first = np.repeat(starts, times) + S * number
    end = np.minimum(first + S, np.repeat(ends, times))
    length = end - first
    by_length = np.argsort(-length, kind="stable")
    sequence: np.ndarray = np.empty(len(first), np.int64)
    used = 0  # sequences
    free: dict[int, np.ndarray] = {}  # {room: sequences that have so much}
    rooms: list[int] = []  # these, ascending
    groups = np.flatnonzero(np.diff(length[by_length], prepend=-1))
    for i, j in zip(groups.tolist(), [*groups[1:].tolist(), len(first)], strict=True):
        n = int(length[by_length[i]])
        while i < j:  # all pieces of one length; a sequence takes as many as fit
            room = rooms[at] if (at := bisect_left(rooms, n)) < len(rooms) else S
            each = room // n
            wanted = -(-(j - i) // each)
            if at < len(rooms):
                there = free.pop(rooms.pop(at))
                taken, left = there[:wanted], there[wanted:]
                if len(left):
                    free[room] = left
                    insort(rooms, room)
            else:
                taken = np.arange(used, used + wanted)
                used += wanted
            placed = min(j - i, each * len(taken))
            sequence[by_length[i:i + placed]] = np.repeat(taken, each)[:placed]
            i += placed
            few = placed % each  # what the last sequence got, if fewer
            whole = taken[:-1] if few else taken
            for rest, those in ((room - each * n, whole), (room - few * n, taken[-1:] if few else taken[:0])):
                if rest and len(those):
                    if rest not in free:
                        insort(rooms, rest)
                    free[rest] = np.concatenate((free[rest], those)) if rest in free else those
    order = np.lexsort((first, sequence))
    return first[order], end[order], sequence[order]
