"""Shows a program on a screen: its launch order, what each step waits for, and why. No torch."""

from collections.abc import Iterator

from memo.schedule.periods import of_few
from memo.schedule.program import Program
from memo.schedule.step import Step
from memo.schedule.waits import schedule

LAYERS, SUBSEQUENCES = 4, 2  # that are shown: the first half and the last half of them


def ends_of(n: int, most: int) -> list[int]:
    """Picks the first and the last of n numbers, `most` of them."""
    first = min(n, most) - min(n, most) // 2
    return [*range(first), *range(max(first, n - most // 2), n)]


def shortened(program: Program) -> tuple[Program, list[int], list[int]]:
    """Leaves middle layers and subsequences out (of these none with MSP, or too few layers for copies): finds
    the program, and the numbers that its layers and subsequences have in the whole one."""
    fates = program.fates

    def needed(several: list[int]) -> int:
        """Counts the layers of which some unit is copied."""
        return -(-fates.n_buffers // len(several)) + 1 if fates.copied else 0
    # more than units of sliding layers read pieces: else none would give way
    shown = max([SUBSEQUENCES, *(n + 2 for n in fates.near if n < program.subsequences)])
    several = ends_of(program.subsequences, shown)
    if fates.guests or fates.lent or needed(several) > program.layers:
        several = [*range(program.subsequences)]
    layers = ends_of(program.layers, max(LAYERS, needed(several)))
    return of_few(program, layers, several), layers, several


def listing(program: Program) -> Iterator[str]:
    """Yields the lines of a program of a few layers and subsequences."""
    few, like, several = shortened(program)
    layers, subsequences = program.layers, program.subsequences

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
    steps, back = schedule(few), False
    width = max(len(name(step)) for step in steps)
    for number, (step, waits) in enumerate(steps.items()):
        if step.back and not back:
            yield "            the backward:"
        back = back or step.back
        why = "; ".join(f"{name(earlier)} ({place})" for earlier, place in waits.items())
        yield f"{number:>11} {step.stream:9} {name(step):{width}}  {why}".rstrip()
