"""Shows a program on a screen: its launch order, what each step waits for, and why. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from memo.schedule.program import Fates, units_in_order
from memo.schedule.step import Step, Unit
from memo.schedule.waits import schedule

LAYERS, SUBSEQUENCES = 4, 2  # that are shown: the first half and the last half of them


def ends_of(n: int, most: int) -> list[int]:
    """Picks the first and the last of n numbers, `most` of them."""
    first = min(n, most) - min(n, most) // 2
    return [*range(first), *range(max(first, n - most // 2), n)]


class Few(NamedTuple):
    """A program cut down to `layers` and `subsequences`, by their numbers in the whole one."""

    fates: Fates
    layers: list[int]
    subsequences: list[int]


def shortened(fates: Fates, layers: int, subsequences: int, order: str) -> Few:
    """Leaves the middle layers and subsequences out. Each unit keeps its fate, but that the last n_buffers
    units are not copied. With MSP, and where the layers are too few for what is copied, all subsequences
    stay."""
    def needed(several: list[int]) -> int:
        """Layers of which some unit is copied."""
        return -(-fates.n_buffers // len(several)) + 1 if fates.copied else 0
    several = ends_of(subsequences, SUBSEQUENCES)
    if fates.guests or fates.lent or needed(several) > layers:
        several = [*range(subsequences)]
    like = ends_of(layers, max(LAYERS, needed(several)))
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
    return Few(few, like, several)


def listing(fates: Fates, layers: int, subsequences: int, order: str) -> Iterator[str]:
    """Yields the lines of a program of a few layers and subsequences."""
    few, like, several = shortened(fates, layers, subsequences, order)

    def name(step: Step) -> str:
        layer, i = step.unit
        of = "of the embedding" if layer < 0 else "of the head"
        if 0 <= layer < len(like):
            of = str(like[layer])
        return f"{step.kind} {of}" + f".{several[i] if i < len(several) else i}" * (
            subsequences > 1 and not step.of_states)
    shown = f"layers {', '.join(map(str, like))} of {layers}"
    if subsequences > 1:
        shown += f", subsequences {', '.join(map(str, several))} of {subsequences}"
    yield f"program     {shown}. Number, stream, step, what it waits for (place that the wait protects);"
    yield "            what another wait implies is left out"
    steps, back = schedule(few, len(like), len(several), order), False
    width = max(len(name(step)) for step in steps)
    for number, (step, waits) in enumerate(steps.items()):
        if step.back and not back:
            yield "            the backward:"
        back = back or step.back
        why = "; ".join(f"{name(earlier)} ({place})" for earlier, place in waits.items())
        yield f"{number:>11} {step.stream:9} {name(step):{width}}  {why}".rstrip()
