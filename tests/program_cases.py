"""Every program that the tests of launch orders know: cases() yields them, digests() of their orders."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from memo.config.msp import dealt_helpers, even_parts, helpers, shares_of
from memo.schedule.order import forward_order
from memo.schedule.program import Fates, Program
from memo.schedule.step import Op


@dataclass(frozen=True)
class Case:
    """A program. `group`: whose digest it is part of."""

    group: str
    program: Program


ENDS = (False, False), (True, True), (True, False), (False, True)  # whether a stage receives, and sends
STATES = (False, False), (True, False), (True, True)  # whether layers come, and the edges
SWAPS = (  # which units are copied, which rebuilt, which keep their input alone; whether inputs stay
    ("none", "none", "none", False), ("all", "none", "none", False), ("all", "all", "none", False),
    ("all", "all", "some", False), ("none", "all", "all", True))


def stage_cases() -> Iterator[Case]:
    """Yields the programs of stages that nobody helps, of up to six layers and five subsequences."""
    for L, N, order in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 5), ("layer", "subsequence")):
        units = L * N
        for n in sorted({1, 2, 3, units} & {*range(units + 1)}) if N > 1 or order == "layer" else ():
            for swap in SWAPS:
                if swap[0] == "all" or n == units or swap[3]:
                    yield from swap_cases(L, N, order, n, *swap)


def swap_cases(L: int, N: int, order: str, n: int, copies: str, rebuilds: str, inputs: str,
               x_stays: bool) -> Iterator[Case]:
    """Yields the programs of n buffers and what of SWAPS is given."""
    units, by_layer = L * N, N > 1 and order == "layer"
    swapped = frozenset(range(max(0, units - n)))
    copied = swapped if copies == "all" else frozenset()
    rebuilt = frozenset(range(units if inputs == "all" else units - 1 if n == 2 else max(0, units - n))
                        if rebuilds == "all" else ())
    only = frozenset(range(units)) if inputs == "all" else frozenset(
        range(len(swapped) // 2 if inputs == "some" else 0))
    for keys, stream, (come, edges), (receives, sends), trains in itertools.product(
            ("stay", "copied", "made") if by_layer else ("stay",),
            ("whole", "copied") if N > 1 else ("whole",),
            STATES, ENDS, (True, False)):
        if (come or receives or sends) and (order == "layer") != come or (come and (receives or sends)):
            continue
        passed = "passed" if sends and N > 1 else stream
        fates = Fates(n, copied, rebuilt, only, x_stays, keys=keys, stream=passed, receives=receives,
                      sends=sends, layers_come=come, edges_come=edges)
        yield Case(f"{order} {keys} {passed}" + " states" * come, Program(fates, L, N, order, trains))


def helped_cases() -> Iterator[Case]:
    """Yields the programs of stages that compute rows for each other."""
    for (p, N, L), helping in itertools.product(
            [(2, 2, 2), (2, 4, 2), (2, 4, 3), (3, 3, 2), (3, 5, 2), (4, 4, 2), (4, 6, 2)],
            (helpers, dealt_helpers)):
        shares = shares_of([L] * p, [64] * N, 1, lambda x, n: float(n) * (1 + x) + n * n / 100,
                           even_parts(p, N, helping))
        for stage, rebuild, trains in itertools.product(range(p), (False, True), (True, False)):
            guests, lent = (tuple(piece for piece in shares if getattr(piece, name) == stage)
                            for name in ("helper", "stage"))
            units = len(forward_order(L, N, "subsequence", guests).units)
            for n in (units, 2):
                fates = Fates(n, frozenset(range(max(0, units - n))),
                              frozenset(range(units - 1) if rebuild else ()), receives=stage > 0,
                              stream="passed" if stage < p - 1 else "whole", sends=stage < p - 1,
                              guests=guests, lent=lent)
                yield Case("helped", Program(fates, L, N, "subsequence", trains))


def cases() -> Iterator[Case]:
    """Yields all cases, 9,000 and more."""
    yield from stage_cases()
    yield from helped_cases()


def digests(every: int = 1) -> dict[str, str]:
    """Digests the launch orders of each group's cases, of every so many."""
    made: dict[str, hashlib._Hash] = {}
    for case in itertools.islice(cases(), 0, None, every):
        digest = made.setdefault(case.group, hashlib.sha256())
        # ZERO came to them later
        for step in (step for step in case.program.steps() if step.op is not Op.ZERO):
            digest.update(f"{step.kind} {tuple(step.unit)}\n".encode())
    return {group: digest.hexdigest()[:16] for group, digest in sorted(made.items())}
