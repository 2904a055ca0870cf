"""How much the stages of a pipeline compute for each other: of each slot of memo/msp.py the part that a
helper gets, so that all end together, where that is faster. The schedules of all stages, run together, are
the judge. The run hands in what its stages measured, the estimate what it models. No torch. Source: SPPO 6.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import fsum

from memo.bubbles import StageFacts, micro_batch_s, with_bubbles
from memo.config import Config
from memo.decide import Placed
from memo.estimate.regions import lane_bytes
from memo.flat import layer_numel
from memo.formulas import layer_forward_flops
from memo.layer import keys_dealt, n_rows, tensors_of
from memo.msp import Help, Shares, helped_units, shares_of
from memo.subsequences import ALIGNED, subsequence_lengths
from memo.swap.alpha import OutOfHostMemory
from memo.swap.placement import Placement
from memo.swap.placing import placed
from memo.swap.shared_bytes import SharedBytes, shared_regions
from memo.swap.steps import BACK, Step

FASTER = 0.99  # at most so much of a slot's seconds is left where help is worth its messages
Part = Callable[[int, int], float]


def flops_of_rows(cfg: Config, x: int, rows: int) -> float:
    """Of a layer's forward, of one sequence: of the first own rows of subsequence x."""
    lengths = subsequence_lengths(cfg)
    before, tokens = sum(lengths[:x]), rows * cfg.cp * cfg.tp // cfg.batch_size
    return layer_forward_flops(cfg, before + tokens) - (layer_forward_flops(cfg, before) if x else 0)


def shares_with(cfg: Config, part: Part) -> Shares:
    """The Shares of a config. part(stage, x): of a unit's FLOPs, what each of its helpers gets."""
    ranks = cfg.cp * cfg.tp
    cuts = [cfg.batch_size * n // ranks for n in subsequence_lengths(cfg)]
    layers = [len(replace(cfg, stage=k).layers) for k in range(cfg.pp)]
    multiple = cfg.batch_size * cfg.block_multiple // ranks  # of rows: as many of each sequence, and zigzag
    if all(n % (ALIGNED * multiple) == 0 and n >= 2 * cfg.pp * ALIGNED * multiple for n in cuts):
        multiple *= ALIGNED
    return shares_of(layers, cuts, multiple, partial(flops_of_rows, cfg), part)


def even_shares(cfg: Config) -> Shares:
    """The Shares where messages are free: in each slot every stage computes as much."""
    return shares_with(cfg, lambda stage, x: 1 / cfg.pp)


def fastest_part(forward_s: float, backward_s: float, message_s: float, message_back_s: float, helpers: int,
                 turns: int) -> float:
    """Of a unit's FLOPs, what each of so many helpers gets, who take so many units in turns: the part with
    which home, helpers and messages, which hide behind both, are done soonest; 0 where that is not worth
    it."""
    def slot_s(part: float) -> float:
        computing = max(1 - part * helpers, part * turns) if part else 1.0
        return (max(computing * forward_s, message_s * (part > 0))
                + max(computing * backward_s, message_back_s * (part > 0)))
    late = (1 - message_s / forward_s) / helpers, (1 - message_back_s / backward_s) / helpers
    most = 1 / (helpers + turns)
    best = min([most, *(part for part in late if 0 < part < most)], key=slot_s)
    return best if slot_s(best) < FASTER * slot_s(0.0) else 0.0


def parts_of(stages: Sequence[StageFacts]) -> dict[tuple[int, int], float]:
    """{(stage, subsequence): fastest_part()} of all units next to the bubbles."""
    found, cfg = {}, stages[0].cfg
    free = even_shares(cfg)
    seconds = [lane_seconds(one, free) for one in stages]
    for (stage, x), those in helped_units(cfg.pp, cfg.n_subsequences).items():
        rates = stages[stage].rates
        assert rates is not None
        if pieces := [piece for piece in free if piece[:2] == (stage, x)]:
            forward = max(seconds[stage](("lend", "pass"), piece, "") for piece in pieces)
            back = max(seconds[stage](kinds, piece, BACK) for piece in pieces
                       for kinds in (("lend", "pass"), ("repay", "return")))
            unit = rates.units[x]
            found[stage, x] = fastest_part(unit.forward_s, unit.backward_s, forward, back, len(those),
                                           pieces[0].turns)
    return found


def lane_seconds(home: StageFacts, shares: Shares) -> Callable[[Sequence[str], Help, str], float]:
    """-> what gives the seconds of a piece's messages of some kinds, which take turns on a lane, of one
    layer, beside those of the others at the same time; `end`: of the steps' kinds."""
    assert home.ends is not None
    lanes, cfg = home.ends.lanes, replace(home.cfg, shares=shares)
    if lanes is None:
        return lambda kinds, piece, end: 0.0
    sizes = SharedBytes(placed(cfg, 2, n_rows(cfg)), tensors_of(cfg, home.itemsize), lanes.numel,
                        lanes.dealt)

    def seconds(kinds: Sequence[str], piece: Help, end: str) -> float:
        steps = [Step(f"{kind} {piece.helper}{end}", (0, piece.subsequence)) for kind in kinds]
        together = max(piece.turns, piece.together)
        return fsum(lanes.seconds(sizes.sent(step), step, together) for step in steps)
    return seconds


def kept(facts: StageFacts, shares: Shares) -> Placement:
    """Of a stage that keeps all activations: what is left are its computing and its messages."""
    cfg = replace(facts.cfg, shares=shares)
    p = placed(cfg, 1, n_rows(cfg))
    return placed(cfg, p.n_units, n_rows(cfg))


def decided_shares(stages: Sequence[StageFacts]) -> Shares:
    """The Shares that are fastest: those before the stages' own subsequences, those behind them, both or
    none. All stages must have the same facts, and get the same answer."""
    cfg = replace(stages[0].cfg, stage=0)
    if not timed(stages):
        return even_shares(cfg)
    parts = parts_of(stages)
    whole = shares_with(cfg, lambda stage, x: parts.get((stage, x), 0.0))
    ways = [(), whole, *(tuple(piece for piece in whole if piece.before == before)
                         for before in (True, False))]

    def seconds(shares: Shares) -> float:
        return micro_batch_s(stages, [kept(one, shares) for one in stages])
    return min(dict.fromkeys(ways), key=seconds)


def shared(stages: Sequence[StageFacts], alone: Sequence[Placed]) -> list[Placed]:
    """The Placed of each stage where stages compute for each other; `alone`: where none does, which is what
    they get where that is faster, or host or device have no room for more."""
    found = decided_shares(stages)
    helped = [with_shares(one, found) for one in stages]
    if not found:
        return list(alone)
    try:
        together = with_bubbles(helped, [one.alone() for one in helped])
    except OutOfHostMemory:
        return list(alone)
    lacking = [[lacking_bytes(*one) for one in zip(facts, those, strict=True)]
               for facts, those in ((helped, together), (stages, alone))]
    if any(more > before for more, before in zip(*lacking, strict=True)):
        return list(alone)
    seconds = [micro_batch_s(facts, [p for p, _ in those])
               for facts, those in ((helped, together), (stages, alone)) if timed(stages)]
    return together if seconds == sorted(seconds) else list(alone)


def timed(stages: Sequence[StageFacts]) -> bool:
    """Whether seconds decide: all stages know theirs, and these may differ from run to run."""
    return not stages[0].cfg.deterministic and all(
        one.rates and one.rates.units and one.ends for one in stages)


def lacking_bytes(facts: StageFacts, placed: Placed) -> float:
    """Of the device, for a stage's activations."""
    nbytes = placed[0].device_bytes(tensors_of(facts.cfg, facts.itemsize), keys_dealt(facts.cfg))
    return max(0, nbytes - facts.room.spare_bytes)


def with_shares(facts: StageFacts, shares: Shares) -> StageFacts:
    """The facts of a stage that shares what it computes: less room is left."""
    cfg = replace(facts.cfg, shares=shares)
    p = placed(cfg, 1, n_rows(cfg))
    taken = sum(shared_regions(p, tensors_of(cfg, facts.itemsize), layer_numel(cfg, 1),
                               keys_dealt(cfg)).values())
    if not facts.room.cpu:
        taken += lane_bytes(p)
    room = replace(facts.room, spare_bytes=facts.room.spare_bytes - taken)
    return replace(facts, cfg=cfg, room=room)
