"""Where the activations of all stages of a pipeline live, found together: a copy that hides in a bubble is
hidden; and how much stages compute for each other. The run hands in what its stages measured, the estimate
what it models; the schedules of all stages, run together, are the judge. No torch. Source: SPPO 5.2, 6.2.

A stage alone has for a subsequence's copies the seconds in which its layers compute. In the pipeline it also
has those between this subsequence and the next one: of the head, and where stages that take longer leave it
time. Of each slot of memo/config/msp.py is found who helps whom, and which part a helper gets, so that all
end together, where that is faster."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import fsum, inf

from memo.config import msp
from memo.config.formulas import layer_forward_flops
from memo.config.layer import tensors_of
from memo.config.layout import ALIGNED, LANES, Layout, subsequence_lengths
from memo.decide.step_seconds import UnitRates
from memo.decide.where import STALL, Placed, StageFacts, keeps_rows, largest_part, place_rows, placed
from memo.errors import OutOfHostMemory
from memo.memory.flat import layer_numel
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.schedule.passes import schedule_of_sequences
from memo.schedule.simulate import end_of, times_of_stages
from memo.schedule.step import Moved, Op, Step, Unit
from memo.system.hardware import COMMUNICATOR_BYTES

WORTH = 1.01  # times what a stage copies alone: a smaller gain is not worth the simulations
PART_HALVINGS = 3  # of the part of the seconds between subsequences that copies may take


def copied(placed: Placed) -> int:
    """Counts the bytes that a stage sends to the host."""
    return placed.plan.host_bytes if placed.plan else 0


def micro_batch_s(stages: Sequence[StageFacts], placed: Sequence[Placed]) -> float:
    """Simulates the seconds of a micro batch."""
    seconds = [stage.seconds(one.placement) for stage, one in zip(stages, placed, strict=True)]
    return end_of(times_of_stages([one.placement.schedule() for one in placed],
                                  lambda k, step: seconds[k](step)))


def seconds_between(stages: Sequence[StageFacts]) -> list[list[float]]:
    """Counts for each stage and subsequence the most seconds from its last layer's forward to the next one's
    first, as early or as late as may be without delaying the last forward of all; 0: of the last."""
    last, numbers = len(stages) - 1, range(stages[0].cfg.subsequences)
    layers, whole, sends = zip(*(stage.forward_s for stage in stages), strict=True)
    early: dict[tuple[int, int], float] = defaultdict(float)  # begins
    late: dict[tuple[int, int], float] = {}
    for i, k in product(numbers, range(last + 1)):
        if i > 0:
            early[k, i] = early[k, i - 1] + whole[k][i - 1]
        if k > 0:
            early[k, i] = max(early[k, i], early[k - 1, i] + whole[k - 1][i] + sends[k - 1][i])
    end = early[last, numbers[-1]] + whole[last][-1]
    for i, k in product(reversed(numbers), range(last, -1, -1)):
        until = late[k + 1, i] - sends[k][i] if k < last else end
        late[k, i] = min(until, late.get((k, i + 1), inf)) - whole[k][i]
    return [[max(begin[k, i + 1] - begin[k, i] for begin in (early, late)) - layers[k][i]
             for i in numbers[:-1]] + [0.0] for k in range(last + 1)]


def with_bubbles(stages: Sequence[StageFacts], alone: Sequence[Placed]) -> list[Placed]:
    """Places the activations of all stages; `alone`: what each decides for itself. Copies take what part of
    the seconds between subsequences makes the step no slower: all of it for all stages, or what goes for one
    kind of stage after the other. As alone where seconds are not known, or hardly more would be copied."""
    found = list(alone)
    if not all(stage.timed for stage in stages):
        return found
    problems = {k: stage.problem(p) for k, (stage, (p, *_)) in enumerate(zip(stages, alone, strict=True))
                if (stage.cfg.finds_alpha or keeps_rows(stage.cfg)) and p.n_swapped > 0}
    if not problems:
        return found
    between = seconds_between(stages)

    def of(k: int, part: float) -> Placed:
        """Places a stage's with this part of the seconds between its subsequences."""
        problem, rates = problems[k], stages[k].rates
        assert rates is not None
        guests = [0.0] * len(problem.placement.guests)
        longer = tuple(s and s + part * more / problem.placement.n_layer  # 0: copies hide behind nothing
                       for s, more in zip(problem.forward_s, [*between[k], *guests], strict=True))
        return Placed(*place_rows(stages[k].cfg, replace(problem, forward_s=longer), rates.recompute_s))
    adaptive = [k for k in problems if copied(of(k, 1.0)) > WORTH * copied(alone[k])]
    if not adaptive:
        return found
    best = micro_batch_s(stages, found)

    def take(those: Sequence[int], part: float) -> bool:
        """Goes on with that part for these stages if the step is no slower then; says whether."""
        nonlocal best, found
        tried = [of(k, part) if k in those else one for k, one in enumerate(found)]
        seconds = micro_batch_s(stages, tried)
        if seconds > best * (1 + STALL):
            return False
        best, found = min(best, seconds), tried
        return True
    if take(adaptive, 1.0):
        return found
    for kind in dict.fromkeys(stages[k].cfg.stage_kind for k in adaptive):
        those = [k for k in adaptive if stages[k].cfg.stage_kind == kind]
        if not take(those, 1.0):
            largest_part(partial(take, those), PART_HALVINGS)
    return found


# --- who computes for whom ---

FASTER = 0.99  # at most so much of a slot's seconds is left where help is worth its messages


def shares_with(cfg: Layout, parts: msp.Parts) -> msp.Shares:
    """Makes the Shares of a config of Parts."""
    ranks, lengths = cfg.cp * cfg.tp, subsequence_lengths(cfg)
    cuts = [cfg.batch_size * n // ranks for n in lengths]
    multiple = cfg.batch_size * cfg.block_multiple // ranks  # of rows: as many of each sequence, and zigzag
    aligned = ALIGNED * cfg.batch_size * cfg.layout_multiple // ranks
    if all(n % aligned == 0 and n >= 2 * cfg.pp * aligned for n in cuts):
        multiple = aligned

    def flops(x: int, rows: int) -> float:  # of a layer's forward, a sequence's first rows of subsequence x
        before, tokens = sum(lengths[:x]), rows * ranks // cfg.batch_size
        return layer_forward_flops(cfg, before + tokens) - layer_forward_flops(cfg, before)
    return msp.shares_of(cfg.depths, cuts, multiple, flops, parts)


def even_shares(cfg: Layout, helping: msp.Helping = msp.helpers) -> msp.Shares:
    """Makes the Shares with which, messages free, every stage computes as much in each slot."""
    return shares_with(cfg, msp.even_parts(cfg.pp, cfg.subsequences, helping))


def fastest_part(unit: UnitRates, message_s: float, message_back_s: float, n: int,
                 turns: int) -> tuple[float, float]:
    """Finds (seconds of a unit's slot, the part of its FLOPs that each of n helpers gets, who take so many
    units in turns) with which home, helpers and messages, which hide behind both, are done soonest."""
    def slot_s(part: float) -> float:
        computing = max(1 - part * n, part * turns)
        return max(computing * unit.forward_s, message_s) + max(computing * unit.backward_s, message_back_s)
    late = (1 - message_s / unit.forward_s) / n, (1 - message_back_s / unit.backward_s) / n
    most = 1 / (n + turns)
    best = min([most, *(part for part in late if 0 < part < most)], key=slot_s)
    return slot_s(best), best


def fastest_parts(stages: Sequence[StageFacts], helping: msp.Helping) -> msp.Parts:
    """Finds the Parts soonest done: all helpers help, fewer, or none where messages outweigh it."""
    found, cfg = msp.Parts(), stages[0].cfg
    free = even_shares(cfg, helping)
    seconds = [lane_seconds(one, free) for one in stages]
    for unit in dict.fromkeys(piece[:2] for piece in free):
        (stage, x), pieces = unit, [piece for piece in free if piece[:2] == unit]
        rates = stages[stage].rates
        assert rates is not None
        alone_s = rates.units[x].forward_s + rates.units[x].backward_s
        best = FASTER * alone_s, 0.0, 0
        for n in range(1, len(pieces) + 1):
            those = [piece._replace(together=n) for piece in pieces[:n]]
            forward = max(seconds[stage]((Moved.LOAN, Moved.ROWS), piece, False) for piece in those)
            back = max(seconds[stage](way, piece, True) for piece in those
                       for way in ((Moved.LOAN, Moved.ROWS), (Moved.REPAYMENT, Moved.RESULTS)))
            best = min(best, (*fastest_part(rates.units[x], forward, back, n, pieces[0].turns), n))
        _, part, n = best
        if n:
            found[unit] = dict.fromkeys((piece.helper for piece in pieces[:n]), part)
    return found


def lane_seconds(home: StageFacts, shares: msp.Shares) -> Callable[[Sequence[Moved], msp.Help, bool], float]:
    """Makes what gives the seconds of a piece's messages of some kinds, in a layer's forward or `back`."""
    assert home.ends is not None
    lanes, cfg = home.ends.lanes, replace(home.cfg, shares=shares)
    if lanes is None:
        return lambda moved, piece, back: 0.0
    sizes = Sizes(placed(cfg, 2), tensors_of(cfg, home.itemsize), lanes.numel)

    def seconds(moved: Sequence[Moved], piece: msp.Help, back: bool) -> float:
        unit = Unit(0, msp.guest_number(piece, cfg.n_subsequences))
        steps = [Step(Op.SEND, unit, what, back, piece.helper) for what in moved]
        return fsum(lanes.seconds(sizes.moved(step), step, piece) for step in steps)
    return seconds


def decided_shares(stages: Sequence[StageFacts]) -> msp.Shares:
    """Decides the fastest Shares: idle stages help all busy ones, or are dealt out to them; before their own
    subsequences, behind them, both or not at all. All stages must have the same facts."""
    cfg = stages[0].cfg
    if not all(one.timed for one in stages):
        return even_shares(cfg)
    ways: list[msp.Shares] = [()]
    for helping in (msp.helpers, msp.dealt_helpers):
        whole = shares_with(cfg, fastest_parts(stages, helping))
        ways += [whole, *(tuple(piece for piece in whole if piece.before == before)
                          for before in (True, False))]

    def seconds(shares: msp.Shares) -> float:  # where all activations stay: of computing and messages alone
        return micro_batch_s(stages, [Placed(placed(replace(one.cfg, shares=shares), sys.maxsize), None)
                                      for one in stages])
    return min(dict.fromkeys(ways), key=seconds)


def shared(stages: Sequence[StageFacts], alone: Sequence[Placed],
           typical: Sequence[StageFacts]) -> list[Placed]:
    """Places the activations of stages that compute for each other; `alone`: where none does, which is what
    they get where that is faster, or host or device have no room for more. `typical`: the facts that say who
    helps, which changes bits: those of the machine's type where `stages` are measured, else `stages`."""
    measured = typical is not stages
    if measured:
        judged = shared(typical, with_bubbles(typical, [one.alone() for one in typical]), typical)
        found = tuple(piece for one in judged for piece in one.placement.lent)
    else:
        found = decided_shares(stages)
    if not found:
        return list(alone)
    helped = [with_shares(one, found) for one in stages]
    together = with_room(helped, stages, alone)
    if together is None:
        return list(alone)
    if measured:  # what is faster was judged by what is typical
        return together
    faster = not all(one.timed for one in stages) or (
        micro_batch_s(helped, together) <= micro_batch_s(stages, alone))
    return together if faster else list(alone)


def with_room(changed: Sequence[StageFacts], stages: Sequence[StageFacts],
              placed: Sequence[Placed]) -> list[Placed] | None:
    """Places the activations of stages with `changed` facts; None where host or device have no room for more
    than as they are `placed`."""
    try:
        found = with_bubbles(changed, [one.alone() for one in changed])
    except OutOfHostMemory:
        return None
    more, before = ([max(0, Sizes(p, tensors_of(one.cfg, one.itemsize)).device_bytes - one.room.spare_bytes)
                     for one, (p, *_) in zip(facts, those, strict=True)]
                    for facts, those in ((changed, found), (stages, placed)))
    return None if any(a > b for a, b in zip(more, before, strict=True)) else found


# --- sequences that follow each other ---

# A stage has done its part of a sequence's forward long before the gradients of it come back. Meanwhile it
# computes the first subsequences of the next one: as many as it has time for. So no stage waits between
# sequences, and a step of M has the bubble of one, (pp - 1) / (N M) of the computing.

LEADS = 1, 2, 3, 4  # that are tried, for each stage that is behind; 3: a backward takes two forwards
FEWER = 0.999  # at most so much of a step's seconds is left where it is worth to lead more


def following(stages: Sequence[StageFacts], placed: Sequence[Placed], number: int,
              typical: Sequence[StageFacts]) -> list[Placed]:
    """Places the activations of stages whose `number` of sequences in a step follow each other; as `placed`
    where that is not faster, or there is no room for parts of two sequences. `typical`: see shared()."""
    cfg = stages[0].cfg
    N = len(subsequence_lengths(cfg))
    if min(number, N, cfg.pp) == 1 or any(one.placement.guests for one in placed):
        return list(placed)

    def led(leads: tuple[int, ...]) -> list[StageFacts]:
        return [replace(one, cfg=replace(one.cfg, leads=leads)) for one in stages]
    if typical is not stages:
        try:
            judged = with_bubbles(typical, [one.alone() for one in typical])
        except OutOfHostMemory:
            return list(placed)
        leads = tuple(one.placement.lead for one in following(typical, judged, number, typical))
        return with_room(led(leads), stages, placed) or list(placed)
    timed = all(one.timed for one in stages)
    best, found = sequences_s(stages, placed, number) if timed else inf, list(placed)
    for each in LEADS if timed else LEADS[2:3]:
        facts = led(tuple(min(N, each * (cfg.pp - 1 - k)) for k in range(cfg.pp)))
        if (tried := with_room(facts, stages, placed)) is None:
            break
        if not timed or (seconds := sequences_s(facts, tried, number)) < FEWER * best:
            best, found = seconds if timed else best, tried
    return found


def sequences_s(stages: Sequence[StageFacts], placed: Sequence[Placed], number: int) -> float:
    """Simulates the seconds of so many sequences: of two, and each more takes as long as the second."""
    def simulated_s(few: int) -> float:
        made = [schedule_of_sequences(one.placement.program, few) for one in placed]
        seconds = [stage.seconds(one.placement) for stage, one in zip(stages, placed, strict=True)]
        every = times_of_stages([schedule for schedule, _ in made],
                                lambda k, step: seconds[k](made[k][1][step]))
        return end_of(every)
    one, two = map(simulated_s, (1, 2))
    return one + (number - 1) * (two - one)


def with_shares(facts: StageFacts, shares: msp.Shares) -> StageFacts:
    """Makes the facts of a stage that shares what it computes: less room is left."""
    cfg = replace(facts.cfg, shares=shares)
    p = placed(cfg, 1)
    taken = sum(Sizes(p, tensors_of(cfg, facts.itemsize), layer_numel(cfg, 1)).lent_bytes.values())
    if not facts.room.cpu:
        taken += lane_bytes(p)
    room = replace(facts.room, spare_bytes=facts.room.spare_bytes - taken)
    return replace(facts, cfg=cfg, room=room)


def lane_bytes(placement: Placement) -> int:
    """Counts a GPU's bytes for the communicators with stages that help, or are helped."""
    return LANES * len(placement.partners) * COMMUNICATOR_BYTES
