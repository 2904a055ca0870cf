"""How much the stages of a pipeline compute for each other: of each slot of memo/config/msp.py who helps
whom, and the part that a helper gets, so that all end together, where that is faster. The schedules of all
stages, run together, are the judge, with seconds modelled for the machine's type. Source: SPPO 6.2."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum

from memo.config import msp
from memo.config.formulas import layer_forward_flops
from memo.config.layer import tensors_of
from memo.config.layout import LANES, Layout
from memo.config.subsequences import ALIGNED, subsequence_lengths
from memo.decide.bubbles import StageFacts, micro_batch_s, with_bubbles
from memo.decide.placing import placed
from memo.decide.step_seconds import UnitRates
from memo.decide.where import Placed
from memo.errors import OutOfHostMemory
from memo.memory.flat import layer_numel
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes, shared_regions
from memo.schedule.step import Moved, Op, Step, Unit
from memo.system.hardware import COMMUNICATOR_BYTES

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
    """Makes what gives the seconds of a piece's messages of some kinds, which take turns on a lane, of one
    layer, beside those of the others at the same time, in the forward or `back`."""
    assert home.ends is not None
    lanes, cfg = home.ends.lanes, replace(home.cfg, shares=shares)
    if lanes is None:
        return lambda moved, piece, back: 0.0
    sizes = Sizes(placed(cfg, 2), tensors_of(cfg, home.itemsize), lanes.numel)

    def seconds(moved: Sequence[Moved], piece: msp.Help, back: bool) -> float:
        unit = Unit(0, msp.guest_number(piece, cfg.n_subsequences))
        steps = [Step(Op.SEND, unit, what, back, piece.helper) for what in moved]
        together = max(piece.turns, piece.together)
        return fsum(lanes.seconds(sizes.moved(step), step, together) for step in steps)
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
    try:
        together = with_bubbles(helped, [one.alone() for one in helped])
    except OutOfHostMemory:
        return list(alone)
    more, before = ([max(0, p.device_bytes(tensors_of(one.cfg, one.itemsize)) - one.room.spare_bytes)
                     for one, (p, *_) in zip(facts, those, strict=True)]
                    for facts, those in ((helped, together), (stages, alone)))
    if any(a > b for a, b in zip(more, before, strict=True)):  # the device lacks more
        return list(alone)
    if measured:  # what is faster was judged by what is typical
        return together
    faster = not all(one.timed for one in stages) or (
        micro_batch_s(helped, together) <= micro_batch_s(stages, alone))
    return together if faster else list(alone)


def with_shares(facts: StageFacts, shares: msp.Shares) -> StageFacts:
    """Makes the facts of a stage that shares what it computes: less room is left."""
    cfg = replace(facts.cfg, shares=shares)
    p = placed(cfg, 1)
    taken = sum(shared_regions(Sizes(p, tensors_of(cfg, facts.itemsize), layer_numel(cfg, 1))).values())
    if not facts.room.cpu:
        taken += lane_bytes(p)
    room = replace(facts.room, spare_bytes=facts.room.spare_bytes - taken)
    return replace(facts, cfg=cfg, room=room)


def lane_bytes(placement: Placement) -> int:
    """Counts a GPU's bytes for the communicators with stages that help, or are helped."""
    return LANES * len(placement.partners) * COMMUNICATOR_BYTES
