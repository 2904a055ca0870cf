"""Shows a program on a screen: its launch order, what each step waits for, and why. No torch."""

from collections.abc import Iterator
from dataclasses import replace

from memo.schedule.program import Fates, units_in_order
from memo.schedule.step import Step, Unit
from memo.schedule.waits import schedule

LAYERS, SUBSEQUENCES = 4, 2  # that are shown: the first half and the last half of them


def ends_of(n: int, most: int) -> list[int]:
    """Picks the first and the last of n numbers, `most` of them."""
    first = min(n, most) - min(n, most) // 2
    return [*range(first), *range(max(first, n - most // 2), n)]


def shortened(fates: Fates, layers: int, subsequences: int, order: str) -> tuple[Fates, int, int]:
    """Leaves the middle layers and subsequences out -> (fates, layers, subsequences). Each unit keeps its
    fate. With MSP all subsequences stay: stages help each other with few of them."""
    several = range(subsequences) if fates.guests or fates.lent else ends_of(subsequences, SUBSEQUENCES)
    in_flight = -(-fates.n_buffers // len(several)) + 1 if fates.copied else 0  # more must be shown
    like = ends_of(layers, max(LAYERS, in_flight))
    guests, lent = (tuple(piece._replace(layers=len(like)) for piece in pieces)
                    for pieces in (fates.guests, fates.lent))
    number = {unit: k for k, unit in enumerate(units_in_order(layers, subsequences, order, fates.guests))}
    units = units_in_order(len(like), len(several), order, guests)
    whole = [number[Unit(like[layer], several[i] if i < len(several) else i)] for layer, i in units]
    n = min(fates.n_buffers, len(units))

    def picked(those: frozenset[int]) -> frozenset[int]:
        return frozenset(k for k, other in enumerate(whole) if other in those)
    copied = frozenset(k for k in picked(fates.copied) if k < len(units) - n)
    few = replace(fates, n_buffers=n, copied=copied, rebuilt=picked(fates.rebuilt),
                  input_only=picked(fates.input_only), guests=guests, lent=lent)
    return few, len(like), len(several)


def listing(fates: Fates, layers: int, subsequences: int, order: str) -> Iterator[str]:
    """Yields the lines of a program of a few layers and subsequences."""
    few, L, N = shortened(fates, layers, subsequences, order)

    def name(step: Step) -> str:
        layer, i = step.unit
        return f"{step.kind} {layer}" + f".{i}" * (N > 1)
    yield (f"program     of {L} of {layers} layers" + f", {N} of {subsequences} subsequences" * (N > 1)
           + ": number, stream, step, what it waits for (and the place that the wait protects)")
    back = False
    for number, (step, waits) in enumerate(schedule(few, L, N, order).items()):
        if step.back and not back:
            yield "            the backward:"
        back = back or step.back
        why = "; ".join(f"{name(earlier)} ({place})" for earlier, place in waits.items())
        yield f"{number:>11} {step.stream:9} {name(step):26} {why}".rstrip()
