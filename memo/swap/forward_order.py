"""Units in the order of the forward, and what follows from this order alone: found once for the many
placements of a search that have the same. No torch."""

from collections import Counter
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from memo.msp import Shares, guest_number
from memo.schedule.program import keys_leave, stream_leaves, units_in_order
from memo.schedule.step import Unit


class ForwardOrder(NamedTuple):
    """Units in the order of the forward. `number`: the place of each; `likes`: the place of its subsequence,
    or guest, in Placement.lengths; `keys_leaving`: {such a place: its units whose keys and values give way to
    another layer's}; `neighbours`: pairs of such places that are one after the other."""

    units: list[Unit]
    number: dict[Unit, int]
    likes: list[int]
    keys_leaving: Counter[int]
    neighbours: set[tuple[int, int]]


@lru_cache(16)  # many placements of a search have the same
def forward_order(layers: int, subsequences: int, order: str, guests: Shares) -> ForwardOrder:
    units = units_in_order(layers, subsequences, order, guests)
    numbers = (*range(subsequences), *(guest_number(piece, subsequences) for piece in guests))
    places = {number: k for k, number in enumerate(numbers)}
    likes = [places[i] for _, i in units]
    leaving = Counter(places[i] for layer, i in units if keys_leave(Unit(layer, i), layers))
    return ForwardOrder(units, {unit: k for k, unit in enumerate(units)}, likes, leaving, {*pairwise(likes)})


@lru_cache(64)
def units_of_first(layers: int, subsequences: int, order: str, guests: Shares, n: int) -> Counter[int]:
    """{place of a subsequence, or guest, in Placement.lengths: its units among the first n}."""
    return Counter(forward_order(layers, subsequences, order, guests).likes[:n])


@lru_cache(64)
def streamed_of_first(layers: int, subsequences: int, order: str, guests: Shares, n: int) -> Counter[int]:
    """The same of those whose input leaves, where the stream is copied."""
    its = forward_order(layers, subsequences, order, guests)
    leave = {*stream_leaves(layers, subsequences, order)}
    return Counter(i for i, unit in zip(its.likes[:n], its.units, strict=False) if unit in leave)


@lru_cache(128)
def buffers_in_turns(layers: int, subsequences: int, order: str, guests: Shares, lengths: tuple[int, ...],
                     n: int) -> list[tuple[int, int]]:
    """[(first row, rows)] of n buffers, one after the other, that units of `lengths` take in turns."""
    rows = [*map(lengths.__getitem__, forward_order(layers, subsequences, order, guests).likes)]
    longest = [max(rows[b::n]) for b in range(n)]
    return list(zip(accumulate(longest, initial=0), longest, strict=False))


@lru_cache(16)
def stream_places(layers: int, order: str, cuts: tuple[int, ...],
                  forward_only: bool) -> tuple[dict[Unit, tuple[int, int]], int]:
    """(Placement.stream_rows of a stream that is copied, the rows of the slab that these take)."""
    places, end, firsts = dict[Unit, tuple[int, int]](), 0, [0, *accumulate(cuts)]
    for unit in stream_leaves(layers, len(cuts), order):
        i = unit.subsequence
        places[unit] = firsts[i] if forward_only else end, cuts[i]
        end = max(end, sum(places[unit]))
    return places, end
