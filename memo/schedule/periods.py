"""The seconds of a schedule whose layers repeat, from a simulation of a few of them. No torch.

Where layers of one kind follow each other, a simulation soon is in a steady state: all steps of a layer come
so much later (in the backward: earlier) than those of the layer below. Each more such layer then adds just
that. A step waits for nothing that is more than a few layers away, its reach; so a state is steady where as
many layers in a row keep that distance, in all their steps. Without a steady state all layers are simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from memo.schedule.program import EMBEDDING, Program
from memo.schedule.simulate import Times, times_of
from memo.schedule.step import Moved, Op, Step, Unit
from memo.schedule.waits import schedule

STEADY = 1e-12  # distances whose difference is no larger a part of all seconds are equal


class Totals(NamedTuple):
    """Seconds of all forwards, of all backwards, and those that the compute stream waited for copies."""

    forward_s: float
    backward_s: float
    stall_s: float


def totals_of(program: Program, seconds: Callable[[Step], float], alike: bool = True) -> Totals:
    """Sums a program's seconds, where a step takes seconds(step), as long in each layer if `alike`."""
    if alike and program.several and not program.fates.guests and not program.fates.lent:
        reach, runs = reach_of(program), runs_of(program)
        for most in (3 * reach + 2, 6 * reach + 4):
            short = [min(n, most) for n in runs]
            if sum(short) <= program.layers // 2 and (
                    found := totals_of_few(program, runs, short, reach, seconds)):
                return found
    return totals(times_of(schedule(program), seconds))


def totals(times: Times) -> Totals:
    """Reads the Totals off the Times of all steps."""
    forward = max(end for step, (_, end) in times.spans.items() if step.op is Op.FORWARD)
    end = max(end for step, (_, end) in times.spans.items()
              if step.op is Op.BACKWARD or (step.op is Op.OFFLOAD and step.moved is Moved.WEIGHT_GRADIENTS))
    return Totals(forward, end - forward, times.stall_s)


def reach_of(program: Program) -> int:
    """Layers that lie between a step and those that it waits for, at most."""
    if not program.copied:
        return 2  # of keys and values
    return max(2, -(-program.fates.n_buffers // (program.subsequences if program.order == "layer" else 1)))


def runs_of(program: Program) -> list[int]:
    """Counts the layers in a row whose units have the same fates, from the first layer on."""
    f, kinds = program.fates, list[list[tuple[bool, ...]]]([] for _ in range(program.layers))
    for k, (layer, _) in enumerate(program.units):
        kinds[layer].append((k in f.copied, k in f.rebuilt, k in f.input_only))
    return [len(list(run)) for _, run in groupby(kinds)]


def of_few(program: Program, layers: Sequence[int], subsequences: Sequence[int]) -> Program:
    """Makes the program of some layers and subsequences: of like units, the last n_buffers not copied."""
    f = program.fates
    assert len(subsequences) == program.subsequences or not (f.guests or f.lent)  # guests have their numbers
    guests, lent = (tuple(piece._replace(layers=len(layers)) for piece in pieces)
                    for pieces in (f.guests, f.lent))
    near = tuple(min(len(subsequences), f.near[layer]) for layer in layers) if f.near else ()
    alone = replace(f, guests=guests, lent=lent, near=near, lead=0, early=0)  # no sequence follows
    few = replace(program, fates=alone, layers=len(layers), subsequences=len(subsequences))
    like = [program.number[Unit(layers[layer], subsequences[i] if i < len(subsequences) else i)]
            for layer, i in few.units]
    n = min(f.n_buffers, len(like))
    copied, rebuilt, input_only = (frozenset(k for k, other in enumerate(like) if other in units)
                                   for units in (f.copied, f.rebuilt, f.input_only))
    copied = frozenset(k for k in copied if k < len(like) - n)
    return replace(few, fates=replace(few.fates, n_buffers=n, copied=copied, rebuilt=rebuilt,
                                      input_only=input_only))


def totals_of_few(program: Program, runs: list[int], short: list[int], reach: int,
                  seconds: Callable[[Step], float]) -> Totals | None:
    """Finds the Totals from so many layers of each run; None where their state is not steady."""
    like, firsts, first = list[int](), list[int](), 0  # of each layer one of all layers that is the same
    for n, few in zip(runs, short, strict=True):
        firsts.append(len(like))
        like += range(first, first + few)
        first += n
    few_layers = of_few(program, like, range(program.subsequences))
    # {a layer's number among the few: among all}, and the head's; the embedding has one number
    there = {EMBEDDING: EMBEDDING, **dict(enumerate((*like, program.layers)))}
    times = times_of(schedule(few_layers), lambda step: seconds(
        step._replace(unit=Unit(there[step.unit.layer], step.unit.subsequence))))
    found = totals(times)
    for n, few, first in zip(runs, short, firsts, strict=True):
        if n > few:
            last = first + (few + reach) // 2
            more = seconds_of_one(times, last - reach, last, program.order)
            if more is None:
                return None
            found = Totals(*(a + (n - few) * b for a, b in zip(found, more, strict=True)))
    return found


def seconds_of_one(times: Times, first: int, last: int, order: str) -> Totals | None:
    """Finds what a layer more adds to those from `first` to `last`; None: they are in no steady state."""
    ends: list[dict[Step, float]] = [{} for _ in range(first, last + 1)]  # as of layer 0
    computing = 0.0
    for step, (start, end) in times.spans.items():
        layer, i = step.unit
        if first <= layer <= last:
            ends[layer - first][step._replace(unit=Unit(0, i))] = end
            if layer == last and step.computes:
                computing += end - start
    # of the forward, of the backward; each subsequence's where it is one
    apart: dict[tuple[bool, int], set[float]] = {}
    for below, above in zip(ends, ends[1:], strict=False):
        if below.keys() != above.keys():
            return None
        for step in above:
            distance = above[step] - below[step]
            apart.setdefault((distance > 0, step.unit[1] * (order != "layer")), set()).add(distance)
    equal = STEADY * max(end for _, end in times.spans.values())
    if any(max(distances) - min(distances) > equal for distances in apart.values()):
        return None
    forward, backward = (sum(abs(min(distances)) for (later, _), distances in apart.items() if later == way)
                         for way in (True, False))
    stall_s = forward + backward - computing
    return Totals(forward, backward, stall_s if stall_s > equal else 0.0)  # not what rounding leaves
