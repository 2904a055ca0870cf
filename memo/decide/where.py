"""The one decision: where the activations live, from rates and room. The run hands in what it measured, the
estimate what it models. No torch. Source: MEMO 4.1."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from math import ceil, fsum, inf
from typing import NamedTuple

from memo.config.formulas import head_share
from memo.config.layer import INPUT, SPLIT_ROWS, Tensor, groups_of, keys_dealt, tensors_of
from memo.config.layout import Layout, pieces_near, subsequence_lengths, unit_rows
from memo.decide import alpha
from memo.decide.alpha import AlphaProblem, Fractions, SwapPlan
from memo.decide.step_seconds import STAY, Ends, StateSeconds, UnitRates, pieces_of, step_seconds
from memo.errors import OutOfHostMemory
from memo.memory.placement import Placement, Rows, rows
from memo.memory.sizes import Sizes
from memo.schedule.periods import Totals, totals_of
from memo.schedule.step import Step


def keeps_rows(cfg: Layout) -> bool:
    """Says whether rows whose copies do not hide stay on the device, as far as that has room."""
    return cfg.activation == "swap" and cfg.subsequences > 1


def rows_that_stay(problem: AlphaProblem) -> Rows:
    """Finds Placement.stays where recompute is forbidden: of each tensor but x the rows beyond what the link
    carries while the next unit computes, or what the device has room for. Source: SPPO 5.2."""
    p, x = problem.placement, problem.nbytes[INPUT]
    room = problem.device_bytes - problem.sizes.device_bytes
    whole = problem.always_bytes + problem.others_bytes
    idle = [(1 - a) * problem.others_bytes / (whole - x) for a in problem.overlap]
    parts = [min(part, 1.0) if c else 0.0 for part, c in zip(idle, problem.swapped, strict=True)]
    needs = sum(c * n * part for c, n, part in zip(problem.swapped, problem.parts, parts, strict=True))
    needs *= whole - x
    if not needs or room <= 0:
        return {}
    if needs <= room:
        stay = tuple(ceil(part * n) for part, n in zip(parts, problem.lengths, strict=True))
    else:
        stay = tuple(int(part * n * room / needs) for part, n in zip(parts, problem.lengths, strict=True))
    return {name: stay for name in problem.tensors if name != INPUT and not p.apart(name)}


def swaps_layers(cfg: Layout) -> bool:
    """Says whether the mode swaps any layers."""
    return cfg.activation in ("swap", "memo") and len(cfg.layers) * cfg.subsequences > 2


@lru_cache(16)  # each of the ways_of() a config has it
def all_kept(cfg: Layout, B: int, T: int) -> Placement:
    """Makes the Placement of B sequences, T tokens each on a rank of cp, in as many buffers as units."""
    cuts = unit_rows(cfg, B, T)
    placement = Placement(len(cfg.layers), 1, B * T // cfg.tp, cuts=cuts if len(cuts) > 1 else (),
                          order="layer" if cfg.by_layer else "subsequence", dealt=keys_dealt(cfg),
                          receives=not cfg.has_embedding, sends=not cfg.has_head,
                          guests=tuple(piece for piece in cfg.shares if piece.helper == cfg.stage),
                          lent=tuple(piece for piece in cfg.shares if piece.stage == cfg.stage),
                          near=pieces_near(cfg, T * cfg.cp), layers_come=cfg.layers_come,
                          edges_come=cfg.edges_come, lead=cfg.lead, early=cfg.early)
    return replace(placement, n_buffers=placement.n_units)


def placed(cfg: Layout, n_buffers: int, keys: str = "", stream: str = "") -> Placement:
    """Places the units of a config in so many buffers. `keys`: what becomes of keys and values, by default
    layer by layer "copied", else "stay"; `stream`: of what lies between layers, "whole", or "passed" on."""
    whole = all_kept(cfg, cfg.batch_size, cfg.block_size // cfg.cp)
    keys = keys or ("copied" if cfg.by_layer else "stay")
    stay = not whole.keys_may_leave or n_buffers >= whole.n_units
    return replace(whole, n_buffers=min(whole.n_units, n_buffers), keys="stay" if stay else keys,
                   stream=stream or ("whole" if cfg.has_head else "passed"))


def with_stream(placement: Placement, tensors: dict[str, Tensor], spare_bytes: float) -> Placement:
    """Places the stream whole where buffers and regions then fit so many bytes of the device; else copied,
    if that takes fewer. Modes that copy nothing have it whole; all stages but the last one pass it on."""
    if placement.sends:
        return replace(placement, stream="passed")
    whole, copied = replace(placement, stream="whole"), replace(placement, stream="copied")
    nbytes, fewer = (Sizes(p, tensors).device_bytes for p in (whole, copied))
    return copied if whole.program.copied and fewer < nbytes and nbytes > spare_bytes else whole


def kept_rows(chosen: Fractions, most: Fractions, cuts: Sequence[int],
              granularity: int) -> dict[str, tuple[int, ...]]:
    """Rounds {tensor: rows of each subsequence} down to multiples of `granularity`. What is left goes to the
    next subsequence, up to its fraction in `most`; that has no more units, so no more rows are swapped."""
    found = {}
    for name, fractions in chosen.items():
        kept, left = [], 0.0
        for n, f, highest in zip(cuts, fractions, most[name], strict=True):
            kept.append(rows(min(f + left / n, highest), n, granularity))
            left += f * n - kept[-1]
        found[name] = tuple(kept)
    return found


def place_rows(cfg: Layout, problem: AlphaProblem,
               recompute_s: dict[str, float] | None = None) -> tuple[Placement, SwapPlan | None]:
    """Makes rows of the mode for the problem of a config; the SwapPlan is None where nothing is copied.
    `recompute_s`: for per_tensor, which needs it. Errors: OutOfHostMemory."""
    N, cuts = problem.placement.n_rows, problem.lengths
    if cfg.activation == "keep":
        return placed(cfg, problem.placement.n_units), None
    if cfg.activation == "recompute":
        only_input = {name: N if name == INPUT else 0 for name in problem.tensors}
        p = placed(cfg, 1, keys="made" if cfg.by_layer else problem.placement.keys)
        return replace(p, kept=only_input, input_only=p.n_units, x_stays=True), None
    on_any_host = replace(problem, host_bytes=alpha.ANY_HOST)
    if not cfg.finds_alpha:
        given = 1.0 if cfg.activation == "swap" else cfg.alpha
        chosen = most = alpha.fixed_alpha(problem, given, cfg.block_size, cfg.block_multiple)
    elif cfg.alpha_mode == "per_tensor" and problem.n_swapped:
        assert recompute_s is not None  # per_tensor needs it
        chosen, most = (alpha.per_tensor(p, recompute_s) for p in (problem, on_any_host))
    else:
        chosen, most = alpha.paper(problem), alpha.paper(on_any_host)
    if not chosen.fits:
        longest = alpha.largest_block_size(problem, cfg.block_size, cfg.block_multiple)
        remedy = f"the largest block_size that fits is {longest}" if longest else (
            "no block_size fits" + ", the model's states take all of it" * (problem.host_bytes <= 0))
        if fewer := int(problem.host_bytes) * cfg.batch_size // problem.least_bytes:
            remedy = f"--batch_size={fewer} fits, {remedy}"
        raise alpha.out_of_host_memory(problem, f"block_size={cfg.block_size}", problem.least_bytes, remedy)
    granularity = SPLIT_ROWS if len(cuts) > 1 else max(1, min(SPLIT_ROWS, N // 16))
    by_unit = kept_rows({name: chosen.fractions[name] for name in problem.others}, most.fractions, cuts,
                        granularity)
    chosen = replace(alpha.plan(problem, {name: tuple(k / n for k, n in zip(kept, cuts, strict=True))
                                    for name, kept in by_unit.items()}), binds=chosen.binds)
    kept: Rows = {name: N if name not in by_unit else by_unit[name] if len(cuts) > 1 else by_unit[name][0]
                  for name in problem.tensors}
    placement = replace(problem.placement, kept=kept, input_only=chosen.input_only)
    if keeps_rows(cfg) and problem.device_bytes < inf and (stays := rows_that_stay(problem)):
        placement = replace(placement, stays=stays)
        here = sum(Sizes(placement, problem.tensors).survivor_bytes(resident=True).values())
        chosen = replace(chosen, host_bytes=chosen.host_bytes - here,
                         layer_bytes=chosen.layer_bytes - here * N // problem.swapped_rows)
    return placement, chosen


GAPS = 32  # one part in so many of the device's memory is lost to gaps between the allocator's blocks
STALL = 1e-6  # of a step's seconds: waiting that does not count
HALVINGS = 6  # of the rate that alpha is found with, where copies do not hide
SPARE_TRANSIENTS = 4  # and one part in so many of what a layer takes beside its buffers is kept free


@dataclass(frozen=True)
class Rates:
    """Says how fast a layer is at the run's shape, measured or modelled: its `units`, one a subsequence."""

    units: tuple[UnitRates, ...]
    offload_bytes_per_s: float  # device to host and host to device, while both are busy
    prefetch_bytes_per_s: float
    transient_bytes: int | None  # the most a layer takes beside its buffers and parameters; None: not known
    states: StateSeconds = STAY

    @cached_property
    def forward_s(self) -> float:
        return fsum(unit.forward_s for unit in self.units)

    @cached_property
    def backward_s(self) -> float:
        return fsum(unit.backward_s for unit in self.units)

    @cached_property
    def recompute_s(self) -> dict[str, float]:
        """Counts {group of the layer: seconds to rebuild all rows}."""
        return {group: fsum(unit.groups_s[group] for unit in self.units) for group in self.units[0].groups_s}

    @property
    def both_bytes_per_s(self) -> float:
        """Finds the rate at which copies go both ways."""
        return min(self.offload_bytes_per_s, self.prefetch_bytes_per_s)

    def as_dict(self) -> dict[str, object]:
        """Makes plan.json's entry of measured ones."""
        said = asdict(self) | dict(forward_s=self.forward_s, backward_s=self.backward_s,
                                   recompute_s=self.recompute_s)
        told = dict(units=len(self.units) > 1 or any(self.states), states=any(self.states))
        return {name: value for name, value in said.items() if told.get(name, True)}


class Placed(NamedTuple):
    """Says where a stage's activations live. `totals`: seconds of all its layers, where these were
    simulated."""

    placement: Placement
    plan: SwapPlan | None
    totals: Totals | None = None


@dataclass(frozen=True)
class Room:
    """Says what a rank has: bytes to swap to, and of the device for buffers of activations. `cpu`: one
    memory."""

    host_bytes: int
    spare_bytes: float = inf
    cpu: bool = False


@dataclass(frozen=True)
class Decision:
    """Says what was decided; `swap_plan` is None in modes that copy nothing, `rates` not measured ones."""

    placement: Placement
    swap_plan: SwapPlan | None
    rates: Rates | None
    host_limit_bytes: int  # this rank's share

    @property
    def alpha(self) -> float | None:
        """None where no layer is swapped."""
        return self.swap_plan.alpha if self.swap_plan and self.placement.n_swapped > 0 else None


def ways_of(cfg: Layout) -> list[dict[str, str]]:
    """Lists what placed() may be given beside the config; the first serves where others do too."""
    leave = placed(cfg, 1).keys_may_leave
    if cfg.activation == "recompute" and not cfg.by_layer and leave:
        return [dict(keys="stay"), dict(keys="made")]
    if cfg.subsequences == 1 or not swaps_layers(cfg):
        return [{}]
    keys = ("stay",) * (not cfg.by_layer) + ("copied", "made") * leave
    streams = ("whole",) + ("copied",) * (not cfg.early) if cfg.has_head else ("passed",)
    return [dict(keys=way, stream=stream) for stream in streams for way in keys]


def problem_of(cfg: Layout, itemsize: int, rates: Rates | None, room: Room, keys: str = "",
               stream: str = "") -> AlphaProblem:
    """Poses the alpha program's problem with two buffers; without rates every copy hides."""
    p, rate = placed(cfg, 2, keys=keys, stream=stream), rates.offload_bytes_per_s if rates else 1.0
    seconds = (inf,) * len(p.lengths)
    if not room.cpu and not cfg.pin_memory:
        # on CUDA a copy to pageable memory holds the host up, and hides behind nothing
        seconds = (0.0,) * len(p.lengths)
    elif rates:
        pieces = pieces_of(p, rates.units) if p.several else ()
        seconds = tuple(part * unit.forward_s for unit, part, _ in pieces) or (rates.forward_s,)
    return AlphaProblem(p, tensors_of(cfg, itemsize), seconds, rate, room.host_bytes)


def with_buffers(cfg: Layout, problem: AlphaProblem, room: Room) -> AlphaProblem:
    """Gives the problem as many buffers as there is room for, where that is for memo to find. A buffer more
    is a unit less to swap: where more than two fit whole, up to one a unit, they are taken; with
    alpha_mode=paper, or on a CPU, either all of them or two. A CPU's memory is the host's: there a copy frees
    nothing and takes the time of the cores that compute. So the two have no limit of the device's; overlap
    and host bound alpha as on a GPU."""
    if keeps_rows(cfg) and not room.cpu:
        return replace(problem, device_bytes=room.spare_bytes)
    if not (swaps_layers(cfg) and cfg.finds_alpha):
        return problem
    p, units = problem.placement, problem.placement.n_units
    whole = placed(cfg, units, stream=p.stream)  # whose keys stay

    def fits(p: Placement) -> bool:
        return Sizes(p, problem.tensors).device_bytes <= room.spare_bytes
    if (three := fits(replace(p, n_buffers=3))) and fits(whole):
        return replace(problem, placement=whole)
    if room.cpu or cfg.alpha_mode == "paper" or not three:
        return replace(problem, device_bytes=inf if room.cpu else room.spare_bytes)
    n = 2 + bisect_left(range(3, units), True, key=lambda n: not fits(replace(p, n_buffers=n)))
    return replace(problem, placement=replace(p, n_buffers=n))


def problems_of(cfg: Layout, itemsize: int, rates: Rates | None, room: Room) -> Iterator[AlphaProblem]:
    """Poses the problem of each of the ways_of() a config, with its buffers."""
    for way in ways_of(cfg):
        yield with_buffers(cfg, problem_of(cfg, itemsize, rates, room, **way), room)


def place_whole(cfg: Layout, problems: Iterable[AlphaProblem], rates: Rates | None,
                spare_bytes: float = inf) -> Placed:
    """Places rows for the problem whose step is the fastest as the schedule's simulator sees it; where there
    are no rates, or alpha is given, for the first that takes attention from the fewest units. Those that fit
    so many bytes of the device come first, and those with the stream whole; else the one that lacks least.
    Errors: OutOfHostMemory where none fits the host, of the one that needs least: the longest context."""
    judged: list[tuple[float, float, Placed]] = []
    refused: dict[int, OutOfHostMemory] = {}  # {bytes of the host that are needed at least: why}
    for problem in problems:
        if problem.placement.stream == "copied" and any(not over for over, *_ in judged):
            break
        try:
            if rates and cfg.finds_alpha and problem.n_swapped and (
                    problem.placement.several or cfg.layers_come or not cfg.layers_alike):
                seconds, found = hidden(cfg, problem, rates)
            else:
                costs = rates.recompute_s if rates else dict.fromkeys(groups_of(problem.tensors), 1.0)
                found = Placed(*place_rows(cfg, problem, costs))
                seconds = found.placement.input_only
            over = max(0, Sizes(found.placement, problem.tensors).device_bytes - spare_bytes)
            judged.append((over, seconds, found))
        except OutOfHostMemory as e:
            refused.setdefault(problem.least_bytes, e)
    if not judged:
        raise refused[min(refused)]
    return min(judged, key=lambda one: one[:2])[2]


def decide(cfg: Layout, itemsize: int, rates: Rates | None, room: Room) -> Placed:
    """Decides where a stage's activations live. Errors: OutOfHostMemory, before any is allocated."""
    return place_whole(cfg, problems_of(cfg, itemsize, rates, room), rates,
                       inf if room.cpu else room.spare_bytes)


def hidden(cfg: Layout, problem: AlphaProblem, rates: Rates) -> tuple[float, Placed]:
    """Finds (seconds of all layers, Placed) with the most rows whose copies hide, as the schedule's simulator
    sees it: where copies hold the computing up, as those of keys, of states or of the backward may, the
    alpha program counts on a part of the real rate; or with the program's rows, where that is faster."""
    @cache
    def simulated(part: float) -> tuple[float, float, Placed]:
        less = replace(problem, offload_bytes_per_s=part * problem.offload_bytes_per_s)
        placement, plan = place_rows(cfg, less, rates.recompute_s)
        forward_s, backward_s, stall_s = totals = totals_of(placement.program, step_seconds(
            placement, problem.tensors, rates.units, rates.both_bytes_per_s, rates.states,
            kinds=cfg.stage_kinds), cfg.layers_alike)
        return forward_s + backward_s, stall_s, Placed(placement, plan, totals)
    seconds, stall_s, found = simulated(1.0)
    if stall_s > STALL * seconds:
        most = simulated(0.0)[1] + STALL * simulated(0.0)[0]  # with alpha = 0 that cannot be helped
        if stall_s > most:
            part = largest_part(lambda part: simulated(part)[1] <= most, HALVINGS)
            if simulated(part)[0] <= seconds:  # a stall may cost less than rows that are rebuilt
                seconds, _, found = simulated(part)
    return seconds, found


def largest_part(hides: Callable[[float], bool], halvings: int) -> float:
    """Bisects for the largest part, below 1, of what copies may count on with which they hide, as with 0."""
    low, high = 0.0, 1.0
    for _ in range(halvings):
        part = (low + high) / 2
        low, high = (part, high) if hides(part) else (low, part)
    return low


@dataclass(frozen=True)
class StageFacts:
    """Says what decides where a stage's activations live. `rates`: None where they do not matter to the
    stage."""

    cfg: Layout  # says which stage
    itemsize: int
    rates: Rates | None
    room: Room
    ends: Ends | None

    @property
    def timed(self) -> bool:
        """Says whether seconds are known, and decide."""
        return bool(self.rates and len(self.rates.units) > 1 and self.ends)

    def seconds(self, placement: Placement) -> Callable[[Step], float]:
        """Makes what gives the seconds of a step of the stage's schedule."""
        assert self.rates is not None and self.ends is not None
        return step_seconds(placement, tensors_of(self.cfg, self.itemsize), self.rates.units,
                            self.rates.both_bytes_per_s, ends=self.ends, kinds=self.cfg.stage_kinds)

    def alone(self) -> Placed:
        """Decides for the stage by itself. Errors: OutOfHostMemory."""
        return decide(self.cfg, self.itemsize, self.rates, self.room)

    @property
    def forward_s(self) -> tuple[list[float], list[float], tuple[float, ...]]:
        """Counts each subsequence's seconds of all layers, of these with both ends, and of its message."""
        assert self.rates is not None and self.ends is not None
        cfg, ends = self.cfg, self.ends
        beside = cfg.has_embedding * ends.embedding_s / 2 + cfg.has_head * ends.head_s
        layers = [sum(unit.of(kind).forward_s for kind in cfg.stage_kinds) for unit in self.rates.units]
        lengths = subsequence_lengths(cfg)
        whole = [s + beside * n / sum(lengths) for s, n in zip(layers, lengths, strict=True)]
        return layers, whole, ends.send_s

    def problem(self, placement: Placement) -> AlphaProblem:
        """Finds the problem that `placement` is an answer to."""
        ways = placement.stream, placement.keys
        return next(problem for problem in problems_of(self.cfg, self.itemsize, self.rates, self.room)
                    if (problem.placement.stream, problem.placement.keys) == ways)


def measured_ends(cfg: Layout, rates: Rates | None) -> Ends | None:
    """Makes the Ends of a stage whose layers were measured: the head as fast as these, messages free."""
    if rates is None:
        return None
    free = (0.0,) * len(subsequence_lengths(cfg))
    head_s = 3 * head_share(cfg) * rates.forward_s  # its gradients take twice as long
    return Ends(0.0, head_s, free, free)


def margin_bytes(total_bytes: int, transient_bytes: int, head_bytes: int) -> int:
    """Counts a GPU's bytes that are left free for gaps. `head_bytes`: what the head takes beyond a layer."""
    return total_bytes // GAPS + max(0, transient_bytes // SPARE_TRANSIENTS - head_bytes)


def spare_bytes(free_bytes: int, total_bytes: int, transient_bytes: int, head_bytes: int) -> int:
    """Counts those of a GPU's free bytes that are for buffers; negative where there is too little."""
    return free_bytes - margin_bytes(total_bytes, transient_bytes, head_bytes) - transient_bytes - head_bytes
