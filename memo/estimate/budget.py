"""The needs and the speed of a config on a machine: bytes of every region of all stages, alpha, seconds of a
step, MFU. Plain arithmetic; the arena of temporary tensors is handed in or had from arena.py."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from memo.config.config import Config
from memo.config.formulas import mfu, model_flops, tgs
from memo.config.layer import tensors_of
from memo.config.layout import Layout, StageKind, degrees
from memo.decide import alpha
from memo.decide.choose import Judged, choose
from memo.decide.pipeline import following, lane_bytes, shared, with_bubbles
from memo.decide.where import Placed, Room, StageFacts, margin_bytes, problems_of, spare_bytes
from memo.errors import ConfigError, OutOfHostMemory
from memo.estimate import regions
from memo.estimate.arena import ArenaOf, fast_arena, itemsize_of, message_bytes, traced_arena
from memo.estimate.pipeline_seconds import ends_of, least_s, state_seconds, step_s
from memo.estimate.regions import Line, Stage
from memo.estimate.roofline import Sample, SampleOf
from memo.estimate.unit_seconds import ModelledRates, modelled_rates
from memo.kernels.backends import check_matmul, kernel_of
from memo.memory.placement import Placement
from memo.memory.sizes import HOST_SHARE
from memo.system.hardware import GIB, Machine


class Lack(NamedTuple):
    """Says how many bytes lack, and `where`; the `reason`, "oom" or "oohm" of a node's memory; why, a
    sentence."""

    nbytes: int
    where: str
    reason: str
    why: str


class Beside(NamedTuple):
    """Says what a stage has beside its activations: parameters, with padding; Lines, but for temporary
    tensors; bytes of these, and what the head takes more; the room that is left."""

    numel: int
    lines: list[Line]
    transient: int
    head: int
    room: Room


@dataclass(eq=False)
class Estimate:
    """Says what a config with numbers, `decided`, needs and gives on `world` ranks of a machine; arena(cfg,
    machine) -> ArenaBytes. Found when first asked for are bytes of all `stages`, of one, `shown`, then
    seconds, empty where no speeds are known. Bytes are a rank's of that stage, `host_bytes` and capacity a
    node's. `chosen`: why these numbers, where they were auto in `asked`. Errors: ConfigError for what cannot
    be, a layout that does not fill the world; not for what does not fit. `documents`: of modelled_rates()."""

    decided: Layout
    machine: Machine
    world: int
    arena: ArenaOf
    asked: Config
    chosen: str = ""
    documents: SampleOf | None = None
    dp: int = field(init=False)

    def __post_init__(self) -> None:
        cfg, machine = self.decided, self.machine
        self.dp = degrees(cfg, self.world)
        check_matmul(cfg, machine.capability, self.itemsize)
        kernel_of(cfg, machine)
        if not cfg.vocab_size:
            raise ConfigError("vocab_size=0 must be known without a dataset; try --vocab_size=50257")

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.decided, self.machine)

    def but(self, **values: object) -> "Estimate":
        """Copies it, with all that was found of it, but for these values, on which none of that depends."""
        other = copy(self)
        vars(other).update(values)
        return other

    def on(self, machine: Machine, arena: ArenaOf) -> "Estimate":
        """Estimates the same numbers on that machine and with that arena."""
        if (machine, arena) == (self.machine, self.arena):
            return self
        return Estimate(self.decided, machine, self.world, arena, self.asked, self.chosen, self.documents)

    @cached_property
    def untimed(self) -> "Estimate":
        """Estimates without speeds, where every copy hides: that is faster, and says whether it fits."""
        if not self.machine.speeds:
            return self
        return self.on(replace(self.machine, speeds=None), self.arena).but(besides=self.besides)

    # --- bytes ---

    @cached_property
    def besides(self) -> dict[StageKind, Beside]:
        """Finds what a stage of each kind has beside its activations."""
        share = self.host_capacity // self.local_ranks
        return {one.stage_kind: beside_activations(one, self.machine, self.world, self.arena, share)
                for one in {one.stage_kind: one for one in self.decided.every_stage[::-1]}.values()}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        cfg, machine, world = self.decided, self.machine, self.world
        facts = [modelled_facts(one, machine, world, self.besides[one.stage_kind].room, self.documents)
                 for one in cfg.every_stage]
        kinds = {one.cfg.stage_kind: one for one in facts[::-1]}
        of_kinds = {kind: decided_alone(one) for kind, one in kinds.items()}
        alone, lacks = zip(*(of_kinds[one.cfg.stage_kind] for one in facts), strict=True)
        together = with_bubbles(facts, alone) if cfg.pp > 1 and not any(lacks) else alone
        micros = regions.micros_of_rank(cfg, world)
        if (cfg.msp or (cfg.pp > 1 and micros > 1)) and not any(lacks):
            typical = facts if not machine.measured else [
                modelled_facts(one.cfg, machine.of_its_type, world, one.room, self.documents)
                for one in facts]
            together = shared(facts, together, typical) if cfg.msp else together
            together = following(facts, together, micros, typical)
        made = dict[tuple[object, ...], Stage]()
        for stage, placed, lack in zip(facts, together, lacks, strict=True):
            kind = stage.cfg.stage_kind, id(placed)  # what a stage decides for itself all of its kind have
            if kind not in made:
                made[kind] = stage_bytes(stage.cfg, self.itemsize, self.besides[kind[0]], placed, lack,
                                         world // (cfg.pp * cfg.tp))
        return tuple(replace(made[stage.cfg.stage_kind, id(placed)], cfg=stage.cfg)
                     for stage, placed in zip(facts, together, strict=True))

    @cached_property
    def shown(self) -> Stage:
        """Picks the stage that is shown: the worst, where but() has chosen no other."""
        return self.worst

    @cached_property
    def worst(self) -> Stage:
        """Finds the stage that lacks most bytes, else that with most on the device."""
        host = self.host_capacity // self.local_ranks

        def lacking(stage: Stage) -> float:
            return (max(0, stage.device_bytes - (self.capacity or inf)) + max(0, stage.host_bytes - host))
        return max(self.stages, key=lambda stage: (lacking(stage), stage.device_bytes))

    @property
    def cfg(self) -> Layout:
        """Shows `decided` of the stage that is shown."""
        return self.shown.cfg

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.shown.lines

    @property
    def placement(self) -> Placement:
        return self.shown.placement

    @property
    def plan(self) -> alpha.SwapPlan | None:
        return self.shown.plan

    @property
    def alpha(self) -> float | None:
        return self.shown.alpha

    @property
    def device_bytes(self) -> int:
        return self.shown.device_bytes

    def bytes_of(self, region: str) -> tuple[int, int]:
        return self.shown.bytes_of(region)

    @property
    def local_ranks(self) -> int:
        return min(self.world, self.machine.node.gpus_per_node)

    @cached_property
    def host_capacity(self) -> int:
        return regions.host_capacity(self.decided, self.machine, self.world)

    @cached_property
    def host_bytes(self) -> int:
        return self.node_bytes([stage.host_bytes for stage in self.stages])

    def node_bytes(self, of_stages: Sequence[int]) -> int:
        """Adds up what the ranks of the fullest node have; `of_stages`: a rank of each."""
        return regions.fullest_node_bytes(of_stages, self.world, self.local_ranks)

    # --- whether it fits ---

    @property
    def capacity(self) -> int | None:
        return self.machine.memory_bytes

    @cached_property
    def lacks(self) -> list[Lack]:
        """Lists what device and host have too little of."""
        def lack(where: str, reason: str, who: str, what: str, needs: int, has: int) -> Lack:
            return Lack(max(0, needs - has), where, reason, f"{who} needs {needs / GIB:.4g} GiB of {what}, "
                        f"there are {has / GIB:.4g}: {(needs - has) / GIB:.3g} GiB too much")
        worst, several = self.worst, self.decided.pp > 1
        stage, why = f"stage {worst.cfg.stage}" if several else "it", worst.lacks
        if self.capacity is not None:
            device = lack("the device", "oom", stage, "device memory", worst.device_bytes, self.capacity)
        else:  # one memory for both
            device = lack("the device", "oohm", "it", "memory on a node",
                          self.node_bytes([stage.host_bytes + stage.device_bytes for stage in self.stages]),
                          int(self.machine.node.host_memory_bytes * HOST_SHARE))
        host = lack("the host", "oohm", "it", "host memory to swap to on a node", self.host_bytes,
                    self.host_capacity)
        if why:
            host = host._replace(why=f"{stage}: {why}" if several else why)
        return [device] * (device.nbytes > 0) + [host] * (host.nbytes > 0 or why is not None)

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def reason(self) -> str | None:
        """Says which memory lacks, "oom" or "oohm"; None where none does."""
        return self.lacks[0].reason if self.lacks else None

    @property
    def why(self) -> str | None:
        return "; and ".join(lack.why for lack in self.lacks) or None

    @property
    def only_tight(self) -> bool:
        """Says whether it would fit, all stages of it, without the margin of device memory."""
        beside_margins = max(stage.device_bytes - stage.bytes_of("margin")[0] for stage in self.stages)
        return (self.device_alone and beside_margins <= (self.capacity or 0)
                and not any(stage.lacks for stage in self.stages))

    @property
    def device_alone(self) -> bool:
        """Says whether a GPU's memory lacks, and no other."""
        return [lack.reason for lack in self.lacks] == ["oom"]

    @property
    def judged(self) -> Judged:
        """Answers what choose() asks."""
        seconds = self.seconds.get("step", 0.0) / self.decided.micro_batches(self.dp)
        if self.fits:  # a bubble shrinks with more subsequences, too
            return Judged(0, seconds, copies=self.alpha is not None or self.decided.pp > 1)
        small = [lack.where for lack in self.lacks if lack.nbytes]
        nbytes = max(1, sum(lack.nbytes for lack in self.lacks))
        return Judged(nbytes, seconds, " and ".join(small) or "the host", device_alone=self.device_alone)

    # --- seconds ---

    @property
    def sample(self) -> Sample | None:
        return self.documents and self.documents(self.decided)

    @cached_property
    def layer(self) -> ModelledRates | None:
        return modelled_rates(self.decided, self.machine, self.itemsize, self.documents)

    @cached_property
    def seconds(self) -> dict[str, float]:
        layer = self.layer
        return step_s(self.stages, self.machine, self.world, self.itemsize, layer) if layer else {}

    def rate(self, step_s: float) -> float:
        """Counts the tokens per GPU and second."""
        cfg = self.decided
        tokens = self.sample.share.tokens if self.sample else cfg.batch_size * cfg.block_size
        return tgs(tokens * cfg.micro_batches(self.dp), self.world, step_s)

    @property
    def tgs(self) -> float | None:
        return self.rate(self.seconds["step"]) if self.seconds else None

    @property
    def most_tgs(self) -> float:
        """Bounds its tgs, with no schedule simulated."""
        layer = self.layer
        return self.rate(least_s(self.decided, self.world, layer)) if layer else inf

    @property
    def mfu(self) -> float | None:
        peak = self.machine.peak_flops_per_s if self.itemsize == 2 else None
        flops = self.sample and model_flops(self.decided, *self.sample.share) / self.sample.share.tokens
        return mfu(self.decided, self.tgs, peak, flops) if self.tgs else None

    @property
    def binds(self) -> str:
        """Says what keeps this from being faster."""
        names = {"overlap": "PCIe", "host": "host memory", "device": "device memory"}
        if not self.fits:
            return "device memory" if self.reason == "oom" else "host memory"
        return names[self.plan.binds] if self.plan and self.plan.binds else "compute"


def decided_alone(facts: StageFacts) -> tuple[Placed, str | None]:
    """Decides for one stage alone -> (Placed, message of OutOfHostMemory or None)."""
    try:
        return facts.alone(), None
    except OutOfHostMemory as e:  # what it would be on a host that is large enough
        problems = problems_of(facts.cfg, facts.itemsize, facts.rates, facts.room)
        problem = min(problems, key=lambda problem: problem.least_bytes)
        least = problem.least_bytes if facts.cfg.finds_alpha else alpha.ANY_HOST
        found = replace(facts, room=replace(facts.room, host_bytes=least)).alone()
        assert found.plan is not None  # of a mode that copies
        return found._replace(plan=replace(found.plan, limits=problem.limits)), str(e)


def beside_activations(cfg: Layout, machine: Machine, world: int, arena: ArenaOf, share: int) -> Beside:
    """Finds the Beside of a config that says which stage. `share`: a rank's bytes of the host."""
    itemsize, capacity = itemsize_of(cfg, machine), machine.memory_bytes
    numel, lines = regions.states(cfg, machine, world, itemsize)
    layer_bytes = sum(t.nbytes for t in tensors_of(cfg, itemsize).values())
    least = sum(line.device_bytes for line in lines) + layer_bytes
    if least > (capacity or machine.node.host_memory_bytes):
        arena = fast_arena  # it cannot fit: a trace, which may take long, would not change that
    transient, head = arena(cfg, machine) if cfg.memory_plan != "off" or not machine.cpu else (0, 0)
    limit = max(0, share - sum(line.host_bytes for line in lines))
    if machine.cpu:
        spare = regions.cpu_spare(cfg, machine, lines, limit)
    else:
        assert capacity is not None  # it is not a CPU
        free = capacity - sum(line.device_bytes for line in lines)
        spare = spare_bytes(free, capacity, transient, head)
        lines.append(Line("margin", "margin for gaps", margin_bytes(capacity, transient, head)))
    return Beside(numel, lines, transient, head, Room(limit, spare, machine.cpu))


def stage_bytes(cfg: Layout, itemsize: int, beside: Beside, placed: Placed, lacks: str | None,
                data: int) -> Stage:
    """Adds up the Stage of a config that says which one. `data`: ranks that share its optimizer."""
    travelling = min(beside.transient, message_bytes(cfg, itemsize))
    lines = [*beside.lines, *regions.activation_lines(cfg, placed[0], itemsize, data),
             Line("transient", "arena of temporary tensors", beside.transient - travelling)]
    if cfg.documents and placed.placement.follows:  # each of two sequences has its own
        lines += [line._replace(what=f"{line.what} of a next sequence") for line in beside.lines
                  if line.region == "positions"]
    lines += [Line("transient", "METP's matrices on their way", travelling)] * bool(travelling)
    lines += [Line("head", "more of it for the head", beside.head)] * bool(beside.head)
    if (lanes := lane_bytes(placed[0])) and not beside.room.cpu:
        lines.append(Line("communication", "NCCL communicators of stages that help", lanes))
    return Stage(cfg, beside.numel, tuple(lines), *placed, lacks)


def modelled_facts(cfg: Layout, machine: Machine, world: int, room: Room,
                   documents: SampleOf | None = None) -> StageFacts:
    """Models the StageFacts of a config that says which stage, as far as speeds are known."""
    itemsize = itemsize_of(cfg, machine)
    if (rates := modelled_rates(cfg, machine, itemsize, documents)) is None:
        return StageFacts(cfg, itemsize, None, room, None)
    rates = replace(rates, units=tuple(unit.among(cfg.stage_kinds) for unit in rates.units))
    if cfg.layers_come:
        rates = replace(rates, states=state_seconds(cfg, machine, world, itemsize))
    ends = ends_of(cfg, machine, world, itemsize, rates.learned) if cfg.pp > 1 else None
    return StageFacts(cfg, itemsize, rates, room, ends)


def estimate(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena,
             documents: SampleOf | None = None) -> Estimate:
    """Makes the Estimate of a config, of what choose_fastest() takes where numbers are open. Errors: its."""
    if cfg.undecided:
        return choose_fastest(cfg, machine, world, documents=documents).on(machine, arena)
    got = Estimate(cfg if isinstance(cfg, Layout) else Layout.of(cfg), machine, world, arena, cfg,
                   documents=documents)
    _ = got.host_capacity  # an error now, not when it is asked whether it fits
    return got


def choose_fastest(cfg: Config, machine: Machine, world: int, bound: ArenaOf = fast_arena,
                   documents: SampleOf | None = None) -> Estimate:
    """Chooses what a config leaves open -> its Estimate on a machine of that type, with a bound."""
    def judge(got: Estimate) -> Judged:
        # to simulate a schedule takes long; shares of msp, which take memory, are dealt by seconds
        return (got if cfg.msp or got.untimed.fits else got.untimed).judged
    return choose_numbers(cfg, machine.of_its_type, world, bound, judge, documents)[0]


def choose_numbers(cfg: Config, machine: Machine, world: int, bound: ArenaOf,
                   judge: Callable[[Estimate], Judged],
                   documents: SampleOf | None = None) -> tuple[Estimate, Judged]:
    """Chooses what a config leaves open -> its Estimate, and how that was judged."""
    of = cache(lambda one: Estimate(one, machine, world, bound, one, documents=documents))
    judged = cache(lambda one: judge(of(one)))
    one, why = choose(cfg, judged, world)
    return of(one).but(asked=cfg, chosen=why), judged(one)
