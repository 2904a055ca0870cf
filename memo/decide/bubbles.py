"""Where the activations of all stages of a pipeline live, found together: a copy that hides in a bubble is
hidden. The run hands in what its stages measured, the estimate what it models. No torch. Source: SPPO 5.2.

A stage alone has for a subsequence's copies the seconds in which its layers compute. In the pipeline it also
has those between this subsequence and the next one: of the head, and where stages that take longer leave it
time. Whether the copies then hide, the pipeline says: the schedules of all stages, run together."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

from memo.config.formulas import head_share
from memo.config.layer import tensors_of
from memo.config.layout import Layout
from memo.config.subsequences import subsequence_lengths
from memo.decide.alpha import AlphaProblem
from memo.decide.placing import place_rows, rests
from memo.decide.step_seconds import Ends, step_seconds
from memo.decide.where import STALL, Placed, Rates, Room, decide, largest_part, problems_of
from memo.memory.placement import Placement
from memo.schedule.simulate import times_of_stages
from memo.schedule.step import Step

WORTH = 1.01  # times what a stage copies alone: a smaller gain is not worth the simulations
PART_HALVINGS = 3  # of the part of the seconds between subsequences that copies may take


@dataclass(frozen=True)
class StageFacts:
    """What decides where a stage's activations live. `rates`: None where they do not matter to the stage."""

    cfg: Layout  # says which stage
    itemsize: int
    rates: Rates | None
    room: Room
    ends: Ends | None

    @property
    def timed(self) -> bool:
        """Says whether seconds are known, and decide."""
        return bool(self.rates and self.rates.units and self.ends)

    def seconds(self, placement: Placement) -> Callable[[Step], float]:
        """Makes what gives the seconds of a step of the stage's schedule."""
        assert self.rates is not None and self.ends is not None
        rate = min(self.rates.offload_bytes_per_s, self.rates.prefetch_bytes_per_s)
        return step_seconds(placement, tensors_of(self.cfg, self.itemsize), self.rates.units, rate,
                            ends=self.ends)

    def alone(self) -> Placed:
        """Decides for the stage by itself. Errors: OutOfHostMemory."""
        return decide(self.cfg, self.itemsize, self.rates, self.room)

    @property
    def forward_s(self) -> tuple[list[float], list[float], tuple[float, ...]]:
        """Counts for each subsequence seconds of the forwards of all layers, the same with embedding and
        head, and of the message to the next stage."""
        assert self.rates is not None and self.ends is not None
        cfg, ends = self.cfg, self.ends
        beside = cfg.has_embedding * ends.embedding_s / 2 + cfg.has_head * ends.head_s
        layers = [len(cfg.layers) * unit.forward_s for unit in self.rates.units]
        lengths = subsequence_lengths(cfg)
        whole = [s + beside * n / sum(lengths) for s, n in zip(layers, lengths, strict=True)]
        return layers, whole, ends.send_s

    def problem(self, placement: Placement) -> AlphaProblem:
        """Finds the problem that `placement` is an answer to."""
        return next(problem for problem in problems_of(self.cfg, self.itemsize, self.rates, self.room)
                    if problem.placement.stream == placement.stream)


def measured_ends(cfg: Layout, rates: Rates | None) -> Ends | None:
    """Makes the Ends of a stage that has measured its layers: the head goes at the speed of a layer's
    forward, as head_share() counts it; its gradients take twice as long. Messages take no time."""
    if rates is None:
        return None
    free = (0.0,) * len(subsequence_lengths(cfg))
    return Ends(0.0, 3 * head_share(cfg) * rates.forward_s, free, free)


def copied(placed: Placed) -> int:
    """Counts the bytes that a stage sends to the host."""
    return placed.plan.host_bytes if placed.plan else 0


def micro_batch_s(stages: Sequence[StageFacts], placed: Sequence[Placed]) -> float:
    """Simulates the seconds of a micro batch."""
    seconds = [stage.seconds(one.placement) for stage, one in zip(stages, placed, strict=True)]
    every = times_of_stages([one.placement.schedule() for one in placed], lambda k, step: seconds[k](step))
    return max(end for one in every for _, end in one.spans.values())


def seconds_between(stages: Sequence[StageFacts]) -> list[list[float]]:
    """Counts for each stage and subsequence the most seconds from the end of its last layer's forward to the
    first layer's of the next subsequence that do not delay the last forward of all, where no copy is made: if
    each subsequence comes as early as it can, or as late; 0 for the last one."""
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
    the seconds between subsequences does not make the step slower: all of it, if that is so for all stages at
    once; else as much as that goes for one stage after the other, those that are alike together. Where
    seconds are not known, or hardly more would be copied, they are as alone."""
    found = list(alone)
    if not all(stage.timed for stage in stages):
        return found
    problems = {k: stage.problem(p) for k, (stage, (p, *_)) in enumerate(zip(stages, alone, strict=True))
                if (stage.cfg.finds_alpha or rests(stage.cfg)) and p.n_swapped > 0}
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
