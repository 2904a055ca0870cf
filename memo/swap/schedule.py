"""The schedule of a training step: one pure function gives the list of steps; model.GPT executes the list,
`times_of` times it for the estimate, and memo/swap/validator.py checks it. No torch.

A unit is one layer at one subsequence: (layer, subsequence). Units are computed in order, one buffer each, in
turns:

    forward    unit k computes in buffer k % n; then the offload stream copies what survives of it to the host
               slab, while the next units compute
    backward   the last n units are still in their buffers; when unit k is done, the prefetch stream refills
               its buffer with unit k - n, while the units between compute

`memo` and `swap` have n = 2 (or more where the device has room), `keep` has a buffer for each unit,
`recompute` has one: then nothing is copied. Source: MEMO 4.1 and 4.3.2; SPPO 4 for subsequences.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

STREAM = {"offload": "offload", "prefetch": "prefetch"}  # of a kind of step; all other kinds compute
Unit = tuple[int, int]  # layer, subsequence
Key = tuple[str, Unit]


class Step(NamedTuple):
    """One thing that one stream does. `waits`: the keys of steps of other streams that must be done before;
    what a stream was handed earlier is done before anyway.

    kind: embedding, forward, head (with `unit`: the last layer's), offload, prefetch, recompute, backward,
    embedding backward.
    """

    kind: str
    unit: Unit
    waits: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return self.kind, self.unit

    @property
    def stream(self) -> str:
        return STREAM.get(self.kind, "compute")


@dataclass(frozen=True)
class Fates:
    """What becomes of the units' activations, each unit by its place in the order of the forward.

    `copied`: their activations go to the host and come back. `rebuilt`: some of their rows are recomputed.
    `input_only`: of these nothing but the input survives. `x_stays`: the inputs of all units stay on the
    device.
    """

    n_buffers: int
    copied: frozenset[int]
    rebuilt: frozenset[int]
    input_only: frozenset[int] = frozenset()
    x_stays: bool = False


def units_in_order(layers: int, subsequences: int = 1, order: str = "layer") -> list[Unit]:
    """The units in the order of the forward: layer by layer, or subsequence by subsequence. The backward's is
    the reverse."""
    if order == "layer":
        return [(layer, i) for layer in range(layers) for i in range(subsequences)]
    return [(layer, i) for i in range(subsequences) for layer in range(layers)]


def schedule(fates: Fates, layers: int, subsequences: int = 1, order: str = "layer") -> list[Step]:
    """The steps of a forward and a backward, in the order in which the host launches them."""
    units, n, steps = units_in_order(layers, subsequences, order), fates.n_buffers, []
    for k, unit in enumerate(units):
        # protects unit k - n: its copy still reads the buffer, and the input, that unit k is about to write
        waits = (("offload", units[k - n]),) if k - n in fates.copied else ()
        if unit[0] == 0:
            steps.append(Step("embedding", unit, waits))
            waits = ()
        steps.append(Step("forward", unit, waits))
        if k in fates.copied:
            # protects the slab from a unit that is not computed yet
            steps.append(Step("offload", unit, (("forward", unit),)))
        if unit[0] == layers - 1:
            steps.append(Step("head", unit))
    for k, unit in reversed(list(enumerate(units))):
        # protects the unit's recompute and backward from a buffer that is not refilled yet
        waits = (("prefetch", unit),) if k in fates.copied else ()
        if k in fates.rebuilt:
            steps.append(Step("recompute", unit, waits))
            waits = ()
        steps.append(Step("backward", unit, waits))
        if k - n in fates.copied:
            # protects unit k: its backward still reads the buffer that the copy of unit k - n is about to
            # fill
            steps.append(Step("prefetch", units[k - n], (("backward", unit),)))
        if unit[0] == 0:
            steps.append(Step("embedding backward", unit))
    return steps


def compute_only(steps: Iterable[Step]) -> list[Step]:
    """The steps of the compute stream alone, which wait for nobody."""
    return [step._replace(waits=()) for step in steps if step.stream == "compute"]


class Times(NamedTuple):
    """What a simulation gives: {key of a step: (start, end)} in seconds, and the seconds that the compute
    stream waited for copies."""

    spans: dict[Key, tuple[float, float]]
    stall_s: float


def times_of(steps: Iterable[Step], seconds: Callable[[Step], float]) -> Times:
    """The Times of the steps where each stream does one thing after the other, and a step takes
    seconds(step)."""
    now, stall_s = {"compute": 0.0, "offload": 0.0, "prefetch": 0.0}, 0.0
    spans: dict[Key, tuple[float, float]] = {}
    for step in steps:
        before = now[step.stream]
        start = max([before, *(spans[key][1] for key in step.waits)])
        # of a unit's steps the first one may wait: embedding or forward, recompute or backward
        recomputed = step.kind == "backward" and ("recompute", step.unit) in spans
        if step.kind in ("embedding", "forward", "recompute", "backward") and not recomputed:
            stall_s = stall_s + start - before
        now[step.stream] = start + seconds(step)
        spans[step.key] = start, now[step.stream]
    return Times(spans, stall_s)
