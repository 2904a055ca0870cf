"""Passes in a row: no step touches what another one still uses of parameters, gradients and the optimizer's
states, whatever passes came before; and what keeps them apart are the touches that each step states."""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from memo.schedule.access import AccessTable
from memo.schedule.passes import passes_of
from memo.schedule.program import Fates, Program, coming
from memo.schedule.states import States
from memo.schedule.step import Access

L = 4
KEEP, SWAP = Fates(L, frozenset(), frozenset()), Fates(2, frozenset(range(L - 2)), frozenset())
CASES = {
    "device": (SWAP, States(L)), "device, several": (SWAP, States(L, reduces=True)),
    "host": (SWAP, States(L, in_turns=range(L), on_host=True)),
    "host, several, more batches": (KEEP, States(L, reduces=True, on_host=True)),
    "layers come": (KEEP, States(L, coming(L, True, False), reduces=True)),
    "ends come": (KEEP, States(L, coming(L, True, True), reduces=True)),
    "layers come from the host": (SWAP, States(L, coming(L, True, False), reduces=True, on_host=True)),
    "for more batches": (SWAP, States(L, coming(L, True, True), on_host=True, apart=True))}


def fates_of(case):
    fates, states = CASES[case]
    return replace(fates, layers_come=len(states.come) > 0, edges_come=-1 in states.come)


def touched(step, states):
    """(what a step reads, what it writes) of parameters, gradients and states: said here once more."""
    layer, kind = step.unit.layer, step.kind.removesuffix(" back")

    def weights(j):
        return ("weights", j % 2, "in turns") if j in states.come else ("weights", j)

    def gradients(j):
        turns = j in states.come or j in states.in_turns
        return ("gradients", j % 2, "in turns") if turns else ("gradients", j)
    left, scale = ("left", layer), ("scale", 0)
    new = left if states.on_host and not states.apart else ("new", layer)
    every = [("left", j) for j in states.every]
    match kind:
        case "embedding" | "forward" | "embedding backward" | "backward" | "head":
            of = {"embedding": [-1], "embedding backward": [-1], "head": [L, -1]}.get(kind, [layer])
            of = of[:1] if -1 in states.come else of  # then the head's matrix is not the embedding's
            adds = [gradients(j) for j in of if kind == "head" or kind.endswith("backward")]
            return [weights(j) for j in of if kind != "embedding backward"], adds
        case "reduce weight gradients":
            return [], [gradients(layer)]
        case "offload weight gradients":
            return [], [gradients(layer), left]
        case "prefetch weight gradients":
            return [left], [gradients(layer)]
        case "gather weights":
            return [], [weights(layer)]
        case "prefetch weights":
            return [new], [weights(layer)]
        case "clip":
            return [*map(gradients, states.stay)], [scale, *every]
        case "offload scale":
            return [scale], every
        case "adamw on the host weights":
            return [left], [new]
        case "adamw":
            own = [gradients(layer), weights(layer)] if layer in states.stay else [new]
            return [left, scale], own
    return [], []


def race(passes, states, order):
    """The first two steps that may touch a place at once when the passes are launched in this order."""
    clocks, events, writer, readers, count = {}, {}, {}, {}, 0
    for step, waits in (pair for name in order for pair in getattr(passes, name).items()):
        clock, count = dict(clocks.get(step.stream, {})), count + 1
        for earlier in waits:
            for stream, number in events.get(earlier, {}).items():
                clock[stream] = max(number, clock.get(stream, 0))
        clock[step.stream] = count
        clocks[step.stream] = events[step] = clock
        reads, writes = touched(step, states)
        for place in (*reads, *writes):
            before = [writer[place]] if place in writer else []
            before += readers.get(place, []) if place in writes else []
            for other, stream, number in before:
                if clock.get(stream, 0) < number:
                    return f"{step} beside {other}: {place}"
        mine = step, step.stream, count
        for place in reads:
            readers.setdefault(place, []).append(mine)
        for place in writes:
            writer[place], readers[place] = mine, []
    return None


def first_race(passes, states):
    """The first one in passes of some training steps and evaluations, in several orders."""
    rng = random.Random(0)
    for batches in (1,) if states.in_turns else (1, 2):
        for _ in range(5):
            order = []
            for _ in range(3):
                order += ["evaluation"] * rng.randint(0, 2)
                order += ["forward", "backward"] * (batches - 1)
                order += ["forward", "last_backward", "clip", "update"]
            if found := race(passes, states, [*order, "evaluation"]):
                return found
    return None


@pytest.mark.parametrize("case", CASES)
def test_passes_in_any_order_have_no_race(case):
    states = CASES[case][1]
    assert first_race(passes_of(Program(fates_of(case), L), states), states) is None


def test_without_the_touches_of_any_kind_of_step_they_have():
    def kind(step):
        return step.op, step.moved
    seen, missed, stated = set(), set(), AccessTable.access
    for case, (_, states) in CASES.items():
        def made(case=case, states=states):
            return passes_of(Program(fates_of(case), L), states)
        kinds = {kind(step) for part in made() for step in part if any(touched(step, states))}
        seen |= kinds
        for silent in kinds - missed:
            def access(memory, step, silent=silent):
                return Access([], []) if kind(step) == silent else stated(memory, step)
            with patch.object(AccessTable, "access", access):
                if first_race(made(), states):
                    missed.add(silent)
    assert {str(k) for k in seen - missed} == set()
