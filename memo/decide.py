"""The one decision: where the activations live, from rates and room. The run hands in what it measured, the
estimate what it models. No torch. Source: MEMO 4.1.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf

from memo.config import Config
from memo.layer import KEYS_VALUES, groups_of, keys_dealt, n_rows, tensors_of
from memo.subsequences import subsequence_lengths
from memo.swap.alpha import AlphaProblem, SwapPlan, place_rows, placed, swaps_layers
from memo.swap.placement import Placement

GAPS = 32  # one part in so many of the device's memory is lost to gaps between the allocator's blocks
SPARE_TRANSIENTS = 4  # and one part in so many of what a layer takes beside its buffers is kept free


@dataclass(frozen=True)
class Rates:
    """Seconds are of one layer at the run's shape, all rows."""

    forward_s: float
    backward_s: float
    recompute_s: dict[str, float]  # {group of the layer: seconds}
    offload_bytes_per_s: float  # device to host and host to device, while both are busy
    prefetch_bytes_per_s: float
    transient_bytes: int | None  # the most a layer takes beside its buffers and parameters; None: not known


@dataclass(frozen=True)
class Room:
    """What a rank has. `host_bytes`: to swap to. `spare_bytes`: of the device, for buffers of activations;
    infinite where nothing bounds them. `cpu`: the device is the host."""

    host_bytes: int
    spare_bytes: float = inf
    cpu: bool = False


@dataclass(frozen=True)
class Decision:
    """What was decided. `swap_plan` is None in the modes that copy nothing, `rates` where they were not
    measured."""

    placement: Placement
    swap_plan: SwapPlan | None
    rates: Rates | None
    host_limit_bytes: int  # this rank's share

    @property
    def alpha(self) -> float | None:
        """None where no layer is swapped."""
        return self.swap_plan.alpha if self.swap_plan and self.placement.n_swapped > 0 else None


def problem_of(cfg: Config, itemsize: int, rates: Rates | None, room: Room) -> AlphaProblem:
    """The alpha program's problem with two buffers; without rates every copy hides."""
    seconds, rate = (rates.forward_s, rates.offload_bytes_per_s) if rates else (inf, 1.0)
    if not room.cpu and not cfg.pin_memory:
        seconds = 0.0  # on CUDA a copy to pageable memory holds the host up, and hides behind nothing
    N = len(subsequence_lengths(cfg))  # units share a layer's bytes and seconds equally, on average
    travelling = tensors = tensors_of(cfg, itemsize)
    if N > 1 and cfg.unit_order == "subsequence":  # keys and values stay on the device
        travelling = {name: t for name, t in tensors.items() if name not in KEYS_VALUES}
    units = {name: replace(t, nbytes=t.nbytes // N) for name, t in travelling.items()}
    problem = AlphaProblem(units, cfg.n_layer * N, seconds / N, rate, room.host_bytes)
    if N == 1:
        return problem
    nothing = {name: 0 if t.group else n_rows(cfg) for name, t in tensors.items()}
    least, most = (placed(cfg, 2, n_rows(cfg), kept).device_bytes(tensors, keys_dealt(cfg))
                   for kept in (nothing, None))
    return replace(problem, taken=(least, most))


def with_buffers(cfg: Config, itemsize: int, problem: AlphaProblem, room: Room) -> AlphaProblem:
    """The problem with as many buffers as there is room for, where that is for memo to find.

    A buffer more is a unit less to swap: where more than two fit whole, up to one a unit, they are taken;
    with alpha_mode=paper, either all of them or two. So on a CPU, whose memory is the host's: there a copy
    frees nothing and takes the time of the cores that compute. Where all do not fit there, the host's limit
    alone bounds the two.
    """
    if not (swaps_layers(cfg) and cfg.finds_alpha):
        return problem
    tensors, units = tensors_of(cfg, itemsize), problem.n_layer

    def fits(n: int) -> bool:
        return placed(cfg, n, n_rows(cfg)).device_bytes(tensors, keys_dealt(cfg)) <= room.spare_bytes
    if fits(units):
        return replace(problem, n_buffers=units)
    if room.cpu or cfg.alpha_mode == "paper" or not fits(3):
        return replace(problem, device_bytes=inf if room.cpu else room.spare_bytes)
    return replace(problem, n_buffers=2 + bisect_left(range(3, units), True, key=lambda n: not fits(n)))


def decide(cfg: Config, itemsize: int, rates: Rates | None, room: Room) -> tuple[Placement, SwapPlan | None]:
    """Errors: OutOfHostMemory, before anything is allocated."""
    problem = with_buffers(cfg, itemsize, problem_of(cfg, itemsize, rates, room), room)
    costs = rates.recompute_s if rates else dict.fromkeys(groups_of(problem.tensors), 1.0)
    return place_rows(cfg, problem, n_rows(cfg), costs)


def margin_bytes(total_bytes: int, transient_bytes: int, head_bytes: int) -> int:
    """Of a GPU with `total_bytes`, what is left free for gaps. `transient_bytes`: what a layer takes beside
    its buffers; `head_bytes`: what the head takes more."""
    return total_bytes // GAPS + max(0, transient_bytes // SPARE_TRANSIENTS - head_bytes)


def spare_bytes(free_bytes: int, total_bytes: int, transient_bytes: int, head_bytes: int) -> int:
    """Of a GPU's free bytes, those for buffers of activations; negative where there is too little. Arguments
    as for margin_bytes."""
    return free_bytes - margin_bytes(total_bytes, transient_bytes, head_bytes) - transient_bytes - head_bytes
