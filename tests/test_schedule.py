"""The schedule: what is made is valid, what is changed in a way that matters is not, and times add up."""

import itertools
import random
import re
from dataclasses import replace
from unittest.mock import patch

import pytest

from memo.memory.placement import Placement
from memo.schedule import periods
from memo.schedule.access import AccessTable
from memo.schedule.listing import listing, shortened
from memo.schedule.order import STREAM_PLACES, forward_order
from memo.schedule.passes import Passes
from memo.schedule.program import Fates, Program
from memo.schedule.simulate import times_of
from memo.schedule.step import Access, Op
from memo.schedule.waits import Pass, schedule
from tests.helpers import unaware
from tests.program_cases import cases, digests
from tests.replay import RULES, validate_schedule

BACK = " back"


def instances(n, seed=0):
    """n random (fates, layers, subsequences, order), all kinds of modes among them."""
    rng, windows = random.Random(seed), random.Random(seed + 1000)
    for _ in range(n):
        layers, subsequences = rng.randint(1, 6), rng.randint(1, 4)
        order = rng.choice(["layer", "subsequence"])
        units = layers * subsequences
        mode = rng.choice(["keep", "recompute", *["swap"] * 6])
        by_layer = subsequences > 1 and order == "layer"
        near = tuple(windows.choice([windows.randint(1, subsequences), subsequences]) for _ in range(layers))
        near = near if subsequences > 1 and windows.random() < 0.5 and min(near) < subsequences else ()
        if mode == "keep":
            yield Fates(units, frozenset(), frozenset()), layers, subsequences, order
            continue
        if mode == "recompute":
            dropped, keys = frozenset(range(units - 1)), "made" if by_layer or near else "stay"
            fates = Fates(1, frozenset(), dropped, dropped, x_stays=True, keys=keys, near=near)
            yield fates, layers, subsequences, order
            continue
        buffers = rng.randint(1, min(5, units))
        copied = frozenset(range(units - buffers))
        rebuilt = copied if rng.random() < 0.7 else frozenset()
        if buffers == 2 and rebuilt:
            rebuilt |= {units - 2}  # it shares rows with the last unit
        some = rebuilt and rng.random() < 0.3
        inputs = frozenset(range(rng.randint(0, len(copied)))) if some else frozenset()
        ways = ["copied", "made", "stay"] if by_layer or near else ["stay"]
        keys = (rng if by_layer else windows).choice(ways)
        stream = rng.choice(["whole", "copied"]) if subsequences > 1 else "whole"
        fates = Fates(buffers, copied, rebuilt, inputs, keys=keys, near=near, stream=stream)
        yield fates, layers, subsequences, order


def refusal(steps, instance, trains=True):
    """The rule that the steps violate, None if there is none."""
    try:
        validate_schedule(steps, *instance, trains=trains)
    except ValueError as e:
        return str(e)
    return None


def with_layers_that_come(instances):
    """Those of the instances in which layers may come, and do."""
    for k, (fates, layers, subsequences, order) in enumerate(instances):
        if subsequences == 1 or order == "layer":
            yield replace(fates, layers_come=True, edges_come=k % 2 == 1), layers, subsequences, order


def test_every_schedule_that_is_made_is_valid():
    for instance in [*instances(500), *with_layers_that_come(instances(200, seed=4))]:
        steps = schedule(Program(*instance))
        assert refusal(steps, instance) is None, instance
        assert refusal(schedule(Program(*instance, trains=False)), instance, trains=False) is None, instance


# the launch orders of every nineteenth of the programs of tests/program_cases.py
DIGESTS = {
    "helped": "f8b320ecd81d8bce",
    "layer copied copied": "4223853ec0bd0d63",
    "layer copied copied states": "c2e12d077e66e84a",
    "layer copied whole": "3aa73a0d049318f5",
    "layer copied whole states": "445c57fd9429b70e",
    "layer made copied": "cf78fa94fb36f929",
    "layer made copied states": "5211959c1a15ec62",
    "layer made whole": "a082a3822e432769",
    "layer made whole states": "17c2102910a673a8",
    "layer stay copied": "81428a48ab084557",
    "layer stay copied states": "a6e78d2f94104fbd",
    "layer stay whole": "a1c94245334fab8e",
    "layer stay whole states": "93cff6c263578385",
    "subsequence stay copied": "cb75459fd4b94e43",
    "subsequence stay passed": "966adff88e618ada",
    "subsequence stay whole": "e25e86b8ed3105b1",
}


def test_launch_orders_are_what_they_were():
    assert digests(19) == DIGESTS


COMPUTED = "a unit is computed after its input"
COPIED = "a unit is copied after it is computed, and before its buffer is overwritten"
LEFT, FETCHED = "a buffer is overwritten after its copy has left", "a copy is fetched after it has left"
KEYS_COPIED = "keys and values are copied after they are made, and before others have their place"
KEYS_READ = "attention reads keys and values of its layer's subsequences"
REFILLED, ARRIVED = "a buffer is refilled after it was read", "a copy is read after it has arrived"
ABOVE = "a backward comes after that of the layer above"
DROPPED = "rows that were dropped are recomputed before they are read"
READ = "a unit is read after it is computed"
COMPLETE = "every unit has a forward and a backward"
WRITTEN = "a place is written after it was read"
STREAM = "the stream is copied after it is made, and before its place is overwritten"


def arrives(unit, instance):
    """Whether a unit's input comes from the host."""
    fates, layers, *how = instance
    return fates.stream == "copied" and unit in forward_order(layers, *how, ()).stream_leaves


def rule_of_wait(step, wait, instance):
    """The rule that a schedule breaks without this wait of a step: each is needed."""
    match step.kind:
        case "offload":
            return COPIED
        case "offload keys":
            return KEYS_COPIED
        case "offload stream" | "offload gradient":
            return STREAM
        case "forward" if wait.kind == "prefetch stream":
            return COMPUTED
        case "backward" if wait.kind == "prefetch gradient" and wait.unit == step.unit or (
                wait.kind == "prefetch keys" and arrives((step.unit[0] + 1, step.unit[1]), instance)):
            return {ABOVE, ARRIVED}  # with it the unit's own copy comes, or its gradient has come before
        case "prefetch input" if wait.kind == "offload":
            return FETCHED
        case "prefetch stream" | "prefetch gradient":  # the copy and the place, by one wait or two
            return {FETCHED, REFILLED, LEFT}
    if wait.kind in ("offload", "offload keys", "offload stream"):
        return LEFT
    if step.stream == "prefetch":
        # of the first ones: by nothing else their stream knows that the copies have left
        return {REFILLED, FETCHED}
    return ARRIVED


@pytest.mark.slow
def test_each_wait_of_a_schedule_is_needed():
    seen = set()
    for instance in instances(300, seed=1):
        steps = schedule(Program(*instance))
        for step, waits in steps.items():
            for wait in waits:
                why = refusal(unaware(steps, step, wait), instance)
                rule = rule_of_wait(step, wait, instance)
                found = why and why.partition(":")[0]
                assert found == rule or isinstance(rule, set) and found in rule, (step, wait, why, instance)
                seen.add((step.kind, wait.kind, found))
    assert seen == {
        ("offload", "forward", COPIED), ("offload", "embedding", COPIED),
        ("offload keys", "forward", KEYS_COPIED),
        ("forward", "offload", LEFT), ("forward", "offload keys", LEFT),
        ("embedding", "offload stream", LEFT), ("forward", "prefetch stream", COMPUTED),
        ("offload stream", "forward", STREAM), ("offload stream", "head", STREAM),
        ("offload gradient", "backward", STREAM), ("prefetch input", "offload", FETCHED),
        *(("prefetch stream", "offload stream", rule) for rule in (FETCHED, REFILLED)),
        *(("prefetch gradient", "offload gradient", rule) for rule in (FETCHED, REFILLED, LEFT)),
        *(("prefetch gradient", "embedding backward", rule) for rule in (FETCHED, REFILLED)),
        ("backward", "prefetch keys", ABOVE), ("backward", "prefetch gradient", ABOVE),
        ("backward", "prefetch gradient", ARRIVED),
        *((kind, "backward", rule) for kind in ("prefetch", "prefetch keys") for rule in (REFILLED, FETCHED)),
        ("prefetch input", "sweep", REFILLED),
        ("sweep", "prefetch input", ARRIVED), *((kind, copy, ARRIVED) for kind in ("recompute", "backward")
                                                for copy in ("prefetch", "prefetch keys"))}


def without(steps, gone):
    """The steps but for one. Whoever waited for it waits for the step before it in its stream, and the next
    step of its stream has its waits: the order of the others stays."""
    same = [step for step in steps if step.stream == gone.stream]
    k = same.index(gone)
    before, after = same[:k][-1:], same[k + 1:k + 2]
    others = {step: dict.fromkeys(w for wait in waits for w in (before if wait == gone else [wait]))
              for step, waits in steps.items() if step != gone}
    return others | {step: dict.fromkeys((*steps[gone], *others[step])) for step in after}


def rule_of_step(step, instance):
    """(the rule that a schedule breaks without this step, the kind of step that breaks it); (None, None)
    where it breaks none."""
    fates, layers, subsequences, order = instance
    units = forward_order(layers, subsequences, order, ()).units
    k, layer = units.index(step.unit), step.unit[0]
    only_input, last_layer = k in fates.input_only, layer == layers - 1
    came, leaves = arrives(step.unit, instance), arrives((layer + 1, step.unit[1]), instance)
    near = fates.near[layer] if fates.near else subsequences
    match step.kind:
        case "embedding":
            return COMPUTED, "forward"
        case "prefetch stream":
            return COMPUTED, "forward"
        case "prefetch gradient":
            return ABOVE, "backward"
        case "head" if leaves:
            return STREAM, "offload stream"
        case "backward" if came:
            return STREAM, "offload gradient"
        case "forward" if fates.keys == "copied" and step.unit in Program(*instance).key_places.leaving:
            return KEYS_COPIED, "offload keys"
        case "forward" if leaves and not last_layer:
            return STREAM, "offload stream"
        case "forward" if k in fates.copied and (subsequences > 1 or not only_input):
            return COPIED, "offload"
        case "forward" if (order == "layer" and not last_layer and near > 1
                           and step.unit[1] < subsequences - 1):
            return KEYS_READ, "forward"  # which comes before the layer above
        case "forward":
            return COMPUTED, "head" if last_layer else "forward"
        case "head":
            return ABOVE, "backward"
        case "offload":  # of its readers the first
            inputs = () if came else ("prefetch input",)
            return FETCHED, next(other.kind for other in schedule(Program(*instance))
                                 if other.unit == step.unit and other.kind in ("prefetch", *inputs))
        case "offload keys":
            return FETCHED, "prefetch keys"
        case "prefetch keys" | "sweep":  # the first backward that reads it
            first = units.index((layer, min(step.unit[1] + near, subsequences) - 1))
            return ARRIVED, "recompute" if first in fates.input_only else "backward"
        case "prefetch input":
            return ARRIVED, "sweep"
        case "prefetch":
            return ARRIVED, "recompute" if k in fates.rebuilt else "backward"
        case "recompute" if only_input:
            return ARRIVED if k in fates.copied else READ, "backward"
        case "recompute":
            return DROPPED, "backward"
        case "backward":
            return ABOVE, "embedding backward" if layer == 0 else "backward"
    return COMPLETE, "there is no embedding backward"


@pytest.mark.slow
def test_a_schedule_without_one_of_its_steps_is_not():
    seen = set()
    for instance in instances(50, seed=2):
        steps, three = schedule(Program(*instance)), instance[2] == STREAM_PLACES
        for step in steps:
            if three and step.kind in ("prefetch stream", "prefetch gradient"):
                continue  # it finds there what it brings
            why = refusal(without(steps, step), instance)
            if step.kind in ("offload stream", "offload gradient"):
                # its place is not free, or the copy is not there: whatever comes first
                assert why.partition(":")[0] in (FETCHED, REFILLED, LEFT, WRITTEN), (step, why, instance)
                seen.add((step.kind, FETCHED))
                continue
            rule, kind = rule_of_step(step, instance)
            found = re.match(r"(.*?): (.*?) \(\d", why) if why else None
            assert (found.groups() if found else (None, None)) == (rule, kind), (step, why, rule, instance)
            seen.add((step.kind, rule))
    assert {kind for kind, _ in seen} == {step.kind for step in steps} | {
        "offload", "prefetch", "recompute", "offload keys", "prefetch keys", "prefetch input", "sweep",
        *(f"{way} {what}" for way in ("offload", "prefetch") for what in ("stream", "gradient"))}
    rules = {COMPUTED, COPIED, STREAM, KEYS_COPIED, KEYS_READ, ABOVE, FETCHED, ARRIVED, READ, DROPPED,
             COMPLETE}
    assert {rule for _, rule in seen} == rules


COME, ADDED = (RULES[what] for what in ("weights", "dw"))


@pytest.mark.slow
def test_of_steps_that_move_layers_each_is_needed_and_each_wait():
    seen = set()
    for instance in with_layers_that_come(instances(100, seed=5)):
        steps = schedule(Program(*instance))
        for step, waits in steps.items():
            for wait in waits:
                if step.of_states or wait.of_states:
                    why = refusal(unaware(steps, step, wait), instance)
                    seen.add((step.kind, wait.kind, why and why.partition(":")[0]))
            if step.of_states:
                why = refusal(without(steps, step), instance)
                seen.add((step.kind, None, why and why.partition(":")[0]))
    assert seen == {
        *((kind, None, COME) for kind in ("prefetch weights", "prefetch weights back")),
        *((f"prefetch weight gradients{way}", None, ADDED) for way in ("", BACK)),
        *((kind, "prefetch weights", COME) for kind in ("embedding", "forward")),
        ("forward", "prefetch weights", COMPUTED),  # its input has come before on the same stream
        ("head", "prefetch weight gradients", COME),
        *(("prefetch weights", kind, REFILLED) for kind in ("embedding", "forward")),
        # the copies that come before on the same stream have no wait of their own
        *((kind, "prefetch weights back", why) for kind in ("recompute", "sweep") for why in (COME, ARRIVED)),
        *(("backward", "prefetch weight gradients back", why) for why in (COME, ADDED)),
        ("embedding backward", "prefetch weight gradients back", ADDED),
        *(("prefetch weights back", kind, REFILLED) for kind in ("head", "backward")),
        # before the embedding's no parameters come back, which wait for the layer that has the place
        *(("prefetch weight gradients back", "offload weight gradients", why) for why in (LEFT, REFILLED)),
        *(("offload weight gradients", None, why) for why in (COMPLETE, REFILLED)),
        *(("offload weight gradients", kind, ADDED) for kind in ("head", "backward", "embedding backward"))}


@pytest.mark.slow
def test_a_schedule_whose_steps_change_places_is_not():
    """Two steps that depend on each other, at any distance: a unit and the next, a unit and its own copy,
    ..."""
    rng, wrong = random.Random(3), 0
    for instance in instances(400, seed=3):
        fates, layers, subsequences, order = instance
        steps = [*schedule(Program(*instance)).items()]
        place = {(step.kind, step.unit): k for k, (step, _) in enumerate(steps)}
        units = forward_order(layers, subsequences, order, ()).units
        a = rng.randrange(len(units))
        unit, last = units[a], (layers - 1, 0)
        layer, i = unit
        pairs = [(("forward", unit), ("backward", unit)), (("head", last), ("backward", last))]
        for there, before in ((layer > 0, (layer - 1, i)), (i > 0, (layer, i - 1))):
            if there:
                pairs += [(("forward", before), ("forward", unit)),
                          (("backward", unit), ("backward", before))]
        if a in fates.copied:
            pairs += [(("offload", unit), ("prefetch", unit)), (("prefetch", unit), ("backward", unit))]
            if subsequences > 1 or a not in fates.input_only:  # an input alone may leave before
                pairs.append((("forward", unit), ("offload", unit)))
        for x, y in pairs:
            i, j = place[x], place[y]
            mutant = list(steps)
            mutant[i], mutant[j] = steps[j], steps[i]
            assert i < j and refusal(dict(mutant), instance), (x, y, instance)
            wrong += 1
    assert wrong > 1000


@pytest.mark.parametrize("kept,n_buffers,input_only,kinds", [
    ({}, 5, 0, {"forward": 5, "backward": 5}),
    ({"x": 512, "q": 256}, 2, 0, {"forward": 5, "backward": 5, "offload": 3, "prefetch": 3, "recompute": 4}),
    ({"x": 512, "q": 512}, 2, 0, {"forward": 5, "backward": 5, "offload": 3, "prefetch": 3}),
    ({"x": 512, "q": 256}, 3, 1, {"forward": 5, "backward": 5, "offload": 2, "prefetch": 2, "recompute": 2})])
def test_a_placement_says_the_fates_of_its_layers(kept, n_buffers, input_only, kinds):
    p = Placement(5, n_buffers, 512, kept, input_only)
    steps = schedule(p.program)
    assert refusal(steps, (p.program.fates, 5)) is None
    count = {kind: sum(step.kind == kind for step in steps) for kind in {step.kind for step in steps}}
    assert count == kinds | {"embedding": 1, "head": 1, "embedding backward": 1}
    assert [*Passes(steps).compute_only().evaluation] == [step for step in steps if step.stream == "compute"]
    whole = Placement(5, 1, 512, {"x": 512, "q": 0}, 5, x_stays=True)
    first_four = frozenset(range(4))
    assert whole.program.fates == Fates(1, frozenset(), first_four, first_four, x_stays=True)


def test_times_by_hand():
    """Three layers of 2 s forward, 3 s backward; a copy of 5 s each way of the first: the last one waits for
    it."""
    steps = schedule(Program(Fates(2, frozenset({0}), frozenset({0, 1})), 3))
    seconds = {"forward": 2.0, "backward": 3.0, "recompute": 1.0, "offload": 5.0, "prefetch": 5.0}
    times = times_of(steps, lambda step: seconds.get(step.kind, 0.0))
    spans = {str(step): span for step, span in times.spans.items()}
    assert spans["offload (0, 0)"] == (2, 7)
    assert spans["forward (2, 0)"] == (7, 9)  # 3 s after the second layer
    assert spans["backward (2, 0)"] == (9, 12) and spans["prefetch (0, 0)"] == (12, 17)
    assert spans["backward (1, 0)"] == (13, 16) and spans["recompute (0, 0)"] == (17, 18)
    assert spans["backward (0, 0)"] == (18, 21) and times.stall_s == 4


def test_no_stream_does_two_things_at_once_and_nothing_starts_before_what_it_waits_for():
    rng = random.Random(4)
    for instance in instances(300, seed=4):
        steps = schedule(Program(*instance))
        lengths = {step: rng.random() for step in steps}
        times, ends = times_of(steps, lambda step: lengths[step]), {}  # noqa: B023
        for step, waits in steps.items():
            start, end = times.spans[step]
            assert start == max([0.0, ends.get(step.stream, 0.0), *(times.spans[w][1] for w in waits)])
            assert end == start + lengths[step]
            ends[step.stream] = end
        total = sum(lengths[step] for step in steps if step.stream == "compute")
        assert ends["compute"] == pytest.approx(total + times.stall_s)
        alone = Passes(steps).compute_only().evaluation
        assert times_of(alone, lambda step: lengths[step]).stall_s == 0  # noqa: B023


def test_the_validator_knows_shared_rows():
    """Two buffers share the rows that are recomputed: the last but one layer, which is not copied, has lost
    its own."""
    fates = Fates(2, frozenset({0}), frozenset({0, 1}))
    steps = {step: waits for step, waits in schedule(Program(fates, 3)).items()
             if (step.op, step.unit) != (Op.RECOMPUTE, (1, 0))}
    with pytest.raises(ValueError, match="rows that were dropped are recomputed before they are read: back"):
        validate_schedule(steps, fates, 3)
    apart = replace(fates, n_buffers=3, copied=frozenset(), rebuilt=frozenset())
    validate_schedule(schedule(Program(apart, 3)), apart, 3)
    # of one subsequence all rows survive
    some = Placement(3, 2, 1024, {"fc1_out": (512, 0)}, cuts=(512, 512)).program.fates
    assert some.rebuilt == {1, 3} and some.copied == {0, 1, 2, 3}
    validate_schedule(schedule(Program(some, 3, 2)), some, 3, 2)


def random_problem(rng):
    """(fates, layers, subsequences, order, seconds of a step) of many layers."""
    layers, N, order = rng.choice([24, 40]), rng.randint(2, 5), rng.choice(["layer", "subsequence"])
    units = forward_order(layers, N, order, ()).units
    n, number = rng.choice([1, 2, 2, 3, 5]), {unit: k for k, unit in enumerate(units)}
    copied = frozenset(range(len(units) - n))
    rebuilt = (copied | {len(units) - 2} if n == 2 else copied) if rng.random() < 0.7 else frozenset()
    some = rng.randint(0, len(copied)) if rebuilt and rng.random() < 0.5 else 0
    inputs = frozenset(sorted(copied, key=lambda k: (units[k][1], k))[:some])
    keys = rng.choice(["copied", "made", "stay"]) if order == "layer" else "stay"
    forward = [rng.random() + 0.2 * i for i in range(N)]
    copies = [rng.choice([0.3, 1, 1.02, 2]) * sum(forward) / N for _ in range(N)]
    tables = dict(forward=forward, backward=[2 * s for s in forward], recompute=[0.4 * s for s in forward],
                  sweep=[0.1] * N, offload=copies, prefetch=copies)

    def seconds(step):
        table = tables.get(step.kind, [0.0] * N if step.stream == "compute" else [0.2 * s for s in copies])
        gives_up = step.kind in ("offload", "prefetch") and number[step.unit] in inputs
        return table[step.unit[1]] * (0.5 if gives_up else 1)
    return Fates(n, copied, rebuilt, inputs, keys=keys), layers, N, order, seconds


@pytest.mark.slow
def test_seconds_of_few_layers_are_those_of_all():
    rng, few = random.Random(0), 0
    for _ in range(60):
        *instance, seconds = random_problem(rng)
        with patch.object(periods, "schedule", wraps=schedule) as simulated:
            found = periods.totals_of(Program(*instance), seconds)
        every = periods.totals(times_of(schedule(Program(*instance)), seconds))
        assert found == pytest.approx(every, rel=1e-9, abs=1e-9 * sum(every[:2])), instance
        few += all(call.args[0].layers < instance[1] for call in simulated.call_args_list)
    assert few > 30


def test_a_program_on_a_screen_has_its_few_layers_and_each_wait():
    fates = Fates(2, frozenset(range(30)), frozenset(range(31)))
    lines = [*listing(Program(fates, 32))]
    assert lines[0].startswith("program     layers 0, 1, 30, 31 of 32. ")
    assert "          5 compute   forward 30            offload 0 (kept rows of buffer 0)" in lines
    assert sum(line.split()[0].isdigit() for line in lines) == 18
    many = Fates(200, frozenset(range(56)), frozenset(range(56)))  # more buffers than two subsequences have
    assert sum(" offload " in line for line in listing(Program(many, 32, 8))) > 0
    for instance in instances(60, seed=6):
        few, _, _ = shortened(Program(*instance))
        steps = schedule(few)
        assert refusal(steps, (few.fates, few.layers, few.subsequences, few.order)) is None, instance
        assert bool(few.copied) == bool(instance[0].copied), instance
        lines = [*listing(Program(*instance))]
        assert len(lines) == 3 + len(steps)
        assert sum(line.count("(") for line in lines[2:]) == sum(map(len, steps.values()))


def test_touches_that_an_operation_does_not_state_are_missed():
    """Without all that steps of one kind read or write, some program lacks waits, and the replay finds it."""
    def kind(step):
        return step.op, step.moved, step.peer is not None and step.back
    missed, seen = set(), set()
    for case in itertools.islice(cases(), 0, None, 23):
        p, said = case.program, AccessTable.access
        steps = [*p.steps()]
        kinds = {kind(step) for step in steps}
        seen |= kinds
        for silent in kinds - missed:
            def access(memory, step, silent=silent, said=said):
                return Access([], []) if kind(step) == silent else said(memory, step)
            with patch.object(AccessTable, "access", access):
                waits = Pass(steps, AccessTable(p)).schedule()
            if refusal(waits, (p.fates, p.layers, p.subsequences, p.order), p.trains):
                missed.add(silent)
    assert {str(k) for k in seen - missed} == set()
