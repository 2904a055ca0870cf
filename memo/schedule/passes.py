"""The schedules of a run, in parts: of micro batches, evaluations and updates, in any order. No torch.

Stages of a pipeline wait for each other where a sequence begins and where it ends. Of several sequences in a
step only the first begins so, and only the last ends so. For a stage has computed a sequence's forward some
time before its gradients come back; meanwhile it computes the first subsequences of the next one: it leads
them. The stage behind it receives those early that it does not lead itself. Here are two stages, a sequence
in four subsequences (0 to 3; gradients d to a), and the next one (4 to 7):

    stage 0    0 1 2 3 4 5 d c b a 6 7 h g f e
    stage 1      0 1 2 3 d c b a 4 5 6 7 h g f e      receives 4 and 5 during the backward of the first

Two sequences take turns in memory. What is led has places of its own; all else of the second sequence has
those of the first. Gradients are added in the same order as otherwise, so no bit changes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from memo.schedule.access import AccessTable
from memo.schedule.program import Program
from memo.schedule.states import States
from memo.schedule.step import Place, Step, Unit
from memo.schedule.waits import Pass, Schedule

Steps = TypeVar("Steps")


class Turn(NamedTuple, Generic[Steps]):
    """Holds the parts of a sequence among others: its lead; the rest of its forward; its backward, before
    another one's; or as the last of all."""

    lead: Steps
    forward: Steps
    backward: Steps
    last_backward: Steps


def turns_of(program: Program) -> Iterator[Turn[Sequence[Step]]]:
    """Yields the steps of the two sequences that take turns."""
    lead, early, N = program.fates.lead, program.fates.early, program.subsequences
    for turn in range(2):
        yield Turn([*program.forward(turn, range(lead))], [*program.forward(turn, range(lead, N), early)],
                   [*program.backward(turn, early)], [*program.backward(turn)])


class Passes(NamedTuple):
    """Holds the schedules of a run, in parts that are launched at once. Passes follow each other in any
    order, so a step also waits for what each of them may have left. Equal steps of all passes share an event:
    to wait for one that its own pass has not launched yet is to wait for an earlier pass. `last_backward`: of
    the last micro batch, which sends gradients away; `clip`, `update` follow. Where sequences follow each
    other, `turns` has their parts, and `forward` is the first one's."""

    evaluation: Schedule
    forward: Schedule = {}
    backward: Schedule = {}
    last_backward: Schedule = {}
    clip: Schedule = {}
    update: Schedule = {}
    turns: tuple[Turn[Schedule], ...] = ()

    @property
    def parts(self) -> list[Schedule]:
        """Lists all schedules, the update last."""
        evaluation, forward, *others, clip, update, turns = self
        return [*(part for turn in turns for part in turn), forward, *others, evaluation, clip, update]

    def compute_only(self) -> "Passes":
        """Picks the steps of the compute stream, which then wait for nobody; of no sequences in turns."""
        def only(part: Schedule) -> Schedule:
            return {step: {} for step in part if step.computes}
        return Passes(only(self.evaluation), only(self.forward), only(self.backward),
                      only(self.last_backward), only(self.clip), only(self.update))


def passes_of(program: Program, states: States,
              orders: tuple[Iterable[Step], Iterable[Step]] | None = None) -> Passes:
    """Makes the Passes of a stage; of a program that does not train the evaluation alone. `orders`: the
    launch orders of a training pass and of an evaluation, where they are not the programs'."""
    alone = replace(program, trains=False)
    train, evaluation = ([*steps] for steps in orders or (program.steps(), alone.steps()))
    evaluated = Pass(evaluation, AccessTable(alone, states))
    if not program.trains:
        return Passes(evaluated.schedule([evaluated]))
    if program.follows:
        return passes_in_turns(program, states, evaluated)
    table, early_steps = AccessTable(program, states), [*states.with_sums(train)]
    last = Pass(states.with_reductions(train, program.subsequences), table)
    update = Pass(states.update(), table)
    # micro batches before the last one have a pass of their own where that has more steps
    early = [Pass(early_steps, table)] if len(early_steps) < len(last.steps) else []
    before = [evaluated, last, update, *early]

    def part(steps: Schedule, back: bool) -> Schedule:
        return {step: waits for step, waits in steps.items() if step.back == back}
    ended = last.schedule(before)  # the forward of all micro batches, and the backward where none is `early`
    backward = part(early[0].schedule(before) if early else ended, True)
    clip, *rest = update.schedule([last]).items()  # it follows the last at once
    return Passes(evaluated.schedule(before), part(ended, False), backward, part(ended, True), dict([clip]),
                  dict(rest))

def passes_in_turns(program: Program, states: States, evaluated: Pass) -> Passes:
    """Makes the Passes of a stage whose sequences follow each other."""
    table, turns, begin = AccessTable(program, states), [*turns_of(program)], [*program.forward()]
    others, update = turns[::-1], Pass(states.update(), table)
    last = [[*states.with_reductions([*turn.forward, *turn.last_backward], 2 * program.subsequences)]
            for turn in turns]
    steps = [[*turn.forward, *other.lead, *turn.backward] for turn, other in zip(turns, others, strict=True)]
    # a step's first sequence takes the first turn
    steps += [*last, [*begin, *turns[1].lead, *turns[0].backward], [*begin, *turns[0].last_backward]]
    passes = [*(Pass(each, table) for each in steps), update]
    waits: dict[Step, dict[Step, Place]] = defaultdict(dict)
    for one in passes:
        for step, earlier in one.schedule([evaluated, *passes]).items():
            waits[step] |= earlier

    def part(those: Iterable[Step]) -> Schedule:
        return {step: waits[step] for step in those}
    found = tuple(Turn(part(turn.lead), part(turn.forward), part(turn.backward), part(of[len(turn.forward):]))
                  for turn, of in zip(turns, last, strict=True))
    clip, *rest = update.steps
    return Passes(evaluated.schedule([evaluated, *passes]), part(begin), part(turns[0].last_backward),
                  found[0].last_backward, part([clip]), part(rest), found)


def schedule_of_sequences(program: Program, number: int) -> tuple[Schedule, dict[Step, Step]]:
    """Makes the schedule of a step of so many sequences, whose subsequences count on -> (it, {step: as the
    program names it})."""
    N, named, follows = program.subsequences, dict[Step, Step](), program.follows
    begin, end = [*program.forward()], [*program.backward()]
    turns = [*turns_of(program)] if follows else [Turn([], begin, end, end)]
    for m in range(number):
        turn, other, more = turns[m % len(turns)], turns[(m + 1) % len(turns)], m + 1 < number
        for step in chain(turn.forward if m else begin, other.lead if more else (),
                          turn.backward if more else turn.last_backward):
            of, i = divmod(step.unit.subsequence, N)
            ahead = follows and of != m % 2  # of the next sequence
            named[step._replace(unit=Unit(step.unit.layer, (m + ahead) * N + i))] = step
    return Pass(named, AccessTable(program), named).schedule(), named
