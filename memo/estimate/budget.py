"""What a config needs and gives on a machine: bytes of every region of all stages, alpha, seconds of a step,
MFU. Plain arithmetic; the arena of temporary tensors is handed in or had from arena.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from memo.backends import check_matmul
from memo.bubbles import StageFacts, with_bubbles
from memo.choose import Judged, choose
from memo.config import Config
from memo.decide import Placed, Rates, Room, margin_bytes, problems_of, spare_bytes
from memo.errors import ConfigError
from memo.estimate.arena import ArenaOf, fast_arena, itemsize_of, message_bytes, traced_arena
from memo.estimate.hardware import GIB, Machine
from memo.estimate.host import fullest_node_bytes, host_capacity, host_share
from memo.estimate.pipeline_seconds import ends_of, pipeline_s
from memo.estimate.regions import Line, Stage, activation_lines, cpu_spare, lane_bytes, states
from memo.estimate.roofline import LayerOfUnits, LayerSeconds
from memo.estimate.step_seconds import state_seconds, step_s
from memo.estimate.unit_seconds import layer_seconds
from memo.formulas import mfu, tgs
from memo.layer import tensors_of
from memo.layout import Layout, degrees
from memo.sharing import shared
from memo.swap import alpha
from memo.swap.placement import Placement


@dataclass(frozen=True)
class Estimate:
    """Of all `stages`, and of one of these, `shown`: that which lacks most memory, or is fullest. Bytes:
    `lines` are a rank's of that stage; `host_bytes` and capacity a node's. `seconds` and `layer` are empty
    where no speeds are known. `reason` and `why`: None where it fits, else oom or oohm, and a sentence.
    `chosen`: why there are so many stages and subsequences where they were auto, as in `asked`."""

    shown: Stage
    stages: tuple[Stage, ...]
    machine: Machine
    world: int
    dp: int
    layer: LayerSeconds | LayerOfUnits | None
    seconds: dict[str, float]
    mfu: float | None
    tgs: float | None
    capacity: int | None
    host_capacity: int
    reason: str | None
    why: str | None
    asked: Config
    chosen: str = ""

    @property
    def cfg(self) -> Layout:
        return self.shown.cfg

    @property
    def decided(self) -> Layout:
        """`asked` with numbers in place of auto."""
        return self.stages[0].cfg

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.shown.lines

    @property
    def placement(self) -> Placement:
        return self.shown.placement

    @property
    def plan(self) -> alpha.SwapPlan | None:
        return self.shown.plan

    def of_stage(self, stage: int) -> "Estimate":
        """The same, with the bytes of that stage."""
        return replace(self, shown=self.stages[stage])

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def only_tight(self) -> bool:
        """Whether it would fit without the margin of device memory, all stages of it."""
        beside_margins = max(one.device_bytes - one.bytes_of("margin")[0] for one in self.stages)
        enough_host = self.host_bytes <= self.host_capacity and not any(one.lacks for one in self.stages)
        return self.reason == "oom" and beside_margins <= (self.capacity or 0) and enough_host

    @property
    def local_ranks(self) -> int:
        return min(self.world, self.machine.node.gpus_per_node)

    @property
    def device_bytes(self) -> int:
        return self.shown.device_bytes

    @cached_property
    def host_bytes(self) -> int:
        return self.node_bytes(lambda stage: stage.host_bytes)

    def node_bytes(self, of_rank: Callable[[Stage], int]) -> int:
        """The sum over the ranks of a node, those of the fullest one."""
        return fullest_node_bytes([*map(of_rank, self.stages)], self.world, self.local_ranks)

    @property
    def alpha(self) -> float | None:
        return self.shown.alpha

    @property
    def binds(self) -> str:
        """What keeps this from being faster."""
        names = {"overlap": "PCIe", "host": "host memory", "device": "device memory"}
        if not self.fits:
            return "device memory" if self.reason == "oom" else "host memory"
        return names[self.plan.binds] if self.plan and self.plan.binds else "compute"

    @property
    def layer_offload_s(self) -> float | None:
        """Of a layer that is swapped, all its units; None where none is."""
        if self.plan is None or self.alpha is None:
            return None
        return self.plan.layer_bytes / self.machine.node.pcie_bytes_per_s

    def bytes_of(self, region: str) -> tuple[int, int]:
        return self.shown.bytes_of(region)


def modelled_rates(cfg: Layout, machine: Machine, world: int,
                   layer: LayerSeconds | LayerOfUnits | None) -> Rates | None:
    """The Rates of a layer, if its seconds are known."""
    if layer is None:
        return None
    rate, several = machine.node.pcie_bytes_per_s, len(layer.units) > 1
    units = tuple(layer.units) if several or cfg.layers_come else ()
    return Rates(layer.forward_s, layer.backward_s, layer.groups_s, rate, rate, None, units,
                 state_seconds(cfg, machine, layer.speeds, world, itemsize_of(cfg, machine)))


def decided(facts: StageFacts) -> tuple[Placed, str | None]:
    """(what a stage decides for itself, message of OutOfHostMemory or None)."""
    try:
        return facts.alone(), None
    except alpha.OutOfHostMemory as e:  # what it would be on a host that is large enough
        problems = problems_of(facts.cfg, facts.itemsize, facts.rates, facts.room)
        problem = min(problems, key=lambda problem: problem.least_bytes)
        least = problem.least_bytes if facts.cfg.finds_alpha else alpha.ANY_HOST
        placement, plan = replace(facts, room=replace(facts.room, host_bytes=least)).alone()
        assert plan is not None  # of a mode that copies
        return (placement, replace(plan, limits=problem.limits)), str(e)


class Beside(NamedTuple):
    """Of a stage: its parameters, with padding; the Lines of what lies beside its activations, but for
    temporary tensors; bytes of these, and what the head takes more; the room for activations."""

    numel: int
    lines: list[Line]
    transient: int
    head: int
    room: Room


def beside_activations(cfg: Layout, machine: Machine, world: int, arena: ArenaOf) -> Beside:
    """The Beside of a config that says which stage."""
    itemsize, capacity = itemsize_of(cfg, machine), machine.memory_bytes
    numel, _, lines = states(cfg, machine, world, itemsize)
    layer_bytes = sum(t.nbytes for t in tensors_of(cfg, itemsize).values())
    least = sum(line.device_bytes for line in lines) + layer_bytes
    if least > (capacity or machine.node.host_memory_bytes):
        arena = fast_arena  # it cannot fit: a trace, which may take long, would not change that
    transient, head = arena(cfg, machine) if cfg.memory_plan != "off" or not machine.cpu else (0, 0)
    on_host = sum(line.host_bytes for line in lines)
    limit = max(0, host_share(cfg, machine, world) - on_host)
    if machine.cpu:
        spare = cpu_spare(cfg, machine, lines, limit)
    else:
        assert capacity is not None  # it is not a CPU
        free = capacity - sum(line.device_bytes for line in lines)
        spare = spare_bytes(free, capacity, transient, head)
        lines.append(Line("margin", "margin for gaps", margin_bytes(capacity, transient, head)))
    return Beside(numel, lines, transient, head, Room(limit, spare, machine.cpu))


def stage_bytes(cfg: Layout, itemsize: int, beside: Beside, placed: Placed, lacks: str | None,
                data: int) -> Stage:
    """The Stage of a config that says which one. `data`: ranks that share its optimizer."""
    travelling = min(beside.transient, message_bytes(cfg, itemsize))
    lines = [*beside.lines, *activation_lines(cfg, placed[0], itemsize, data),
             Line("transient", "arena of temporary tensors", beside.transient - travelling)]
    lines += [Line("transient", "METP's matrices on their way", travelling)] * bool(travelling)
    lines += [Line("head", "more of it for the head", beside.head)] * bool(beside.head)
    if (lanes := lane_bytes(placed[0])) and not beside.room.cpu:
        lines.append(Line("communication", "NCCL communicators of stages that help", lanes))
    return Stage(cfg, beside.numel, tuple(lines), *placed, lacks)


def modelled_layer(cfg: Layout, machine: Machine) -> LayerSeconds | LayerOfUnits | None:
    """Seconds of a layer, where speeds are known."""
    itemsize = itemsize_of(cfg, machine)
    known = machine.speeds is not None and machine.speeds.itemsize == itemsize
    return layer_seconds(cfg, machine, itemsize) if known else None


def modelled_facts(cfg: Layout, machine: Machine, world: int, layer: LayerSeconds | LayerOfUnits | None,
                   room: Room) -> StageFacts:
    """Those of a config that says which stage. `layer`: modelled_layer()."""
    itemsize, rates = itemsize_of(cfg, machine), modelled_rates(cfg, machine, world, layer)
    ends = ends_of(cfg, machine, world, itemsize, layer.speeds) if layer and cfg.pp > 1 else None
    return StageFacts(cfg, itemsize, rates, room, ends)


def typical_facts(facts: StageFacts, machine: Machine, world: int) -> StageFacts:
    """The same with what is known of the machine's type in place of what was measured on it."""
    machine = machine.of_its_type
    return modelled_facts(facts.cfg, machine, world, modelled_layer(facts.cfg, machine), facts.room)


def every_stage(cfg: Layout, machine: Machine, world: int, layer: LayerSeconds | LayerOfUnits | None,
                arena: ArenaOf) -> tuple[Stage, ...]:
    """The Stages of a config. `layer`: its seconds, where they are known. What those that are alike have in
    common is looked at once."""
    known: dict[tuple[bool, bool, int], tuple[Beside, Placed, str | None]] = {}
    itemsize, facts = itemsize_of(cfg, machine), []
    for one in cfg.every_stage:
        kind = one.stage_kind
        beside = known[kind][0] if kind in known else beside_activations(one, machine, world, arena)
        facts.append(modelled_facts(one, machine, world, layer, beside.room))
        if kind not in known:
            known[kind] = beside, *decided(facts[-1])
    besides, alone, lacks = zip(*(known[stage.cfg.stage_kind] for stage in facts), strict=True)
    together = with_bubbles(facts, alone) if cfg.pp > 1 and not any(lacks) else alone
    if cfg.msp and not any(lacks):
        typical = [typical_facts(one, machine, world) for one in facts] if machine.measured else facts
        together = shared(facts, together, typical)
    found, made = [], dict[tuple[object, ...], Stage]()
    for stage, beside, placed, lack in zip(facts, besides, together, lacks, strict=True):
        like = stage.cfg.stage_kind, id(placed)  # what a stage decides for itself all of its kind have
        if like not in made:
            made[like] = stage_bytes(stage.cfg, itemsize, beside, placed, lack, world // (cfg.pp * cfg.tp))
        found.append(replace(made[like], cfg=stage.cfg))
    return tuple(found)


def estimate(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena) -> Estimate:
    """The Estimate of a config on `world` ranks of a machine. arena(cfg, machine) -> ArenaBytes. Errors:
    ConfigError for what cannot be, a layout that does not fill the world; not for what does not fit."""
    if cfg.undecided:
        return again(chosen(cfg, machine, world), machine, arena)
    asked, cfg = cfg, cfg if isinstance(cfg, Layout) else Layout.of(cfg)
    dp, itemsize = degrees(cfg, world), itemsize_of(cfg, machine)
    check_matmul(cfg, machine.capability, itemsize)
    if not cfg.vocab_size:
        raise ConfigError("vocab_size=0 must be known without a dataset; try --vocab_size=50257")
    layer = modelled_layer(cfg, machine)
    stages, seconds = every_stage(cfg, machine, world, layer, arena), dict[str, float]()
    if layer and cfg.pp > 1:
        seconds = pipeline_s(stages, machine, world, itemsize, layer)
    elif layer:
        seconds = step_s(cfg, machine, world, itemsize, layer, stages[0].placement, stages[0].numel)
    tokens = cfg.batch_size * cfg.micro_batches(dp) * cfg.block_size
    peak = machine.peak_flops_per_s if itemsize == 2 else None
    rate = tgs(tokens, world, seconds["step"]) if seconds else None
    shown = fullest(stages, machine.memory_bytes or inf, host_share(cfg, machine, world))
    got = Estimate(shown, stages, machine, world, dp, layer, seconds, mfu(cfg, rate, peak) if rate else None,
                   rate, machine.memory_bytes, host_capacity(cfg, machine, world), None, None, asked)
    reason, why = verdict(got)
    return replace(got, reason=reason, why=why)


def fullest(stages: tuple[Stage, ...], capacity: float, host: int) -> Stage:
    """The stage that lacks most bytes, of device and host together; where none lacks any, that with most on
    the device. `capacity`, `host`: what a rank has of each."""
    def lacking(one: Stage) -> float:
        return max(0, one.device_bytes - capacity) + max(0, one.host_bytes - host)
    return max(stages, key=lambda one: (lacking(one), one.device_bytes))


def verdict(got: Estimate) -> tuple[str | None, str | None]:
    """Whether it fits: an Estimate's (reason, why)."""
    node, reasons = got.machine.node, []
    stage = f"stage {got.cfg.stage}" if got.cfg.pp > 1 else "it"

    def lacks(reason: str, needs: float, has: float, what: str, who: str = "it") -> None:
        if needs > has:
            reasons.append((reason, f"{who} needs {needs / GIB:.4g} GiB of {what}, there are "
                                    f"{has / GIB:.4g}: {(needs - has) / GIB:.3g} GiB too much"))
    if got.capacity is not None:
        lacks("oom", got.device_bytes, got.capacity, "device memory", stage)
    else:  # one memory for both
        there = int(node.host_memory_bytes * alpha.HOST_SHARE)
        lacks("oohm", got.node_bytes(lambda one: one.host_bytes + one.device_bytes), there,
              "memory on a node")
    if got.shown.lacks:
        reasons.append(("oohm", f"{stage}: {got.shown.lacks}" if got.cfg.pp > 1 else got.shown.lacks))
    else:
        lacks("oohm", got.host_bytes, got.host_capacity, "host memory to swap to on a node")
    if not reasons:
        return None, None
    return reasons[0][0], "; and ".join(text for _, text in reasons)


def untimed(machine: Machine) -> Machine:
    """The machine without its speeds: whether a run fits is found faster so, and depends on no
    seconds, but for the shares of msp."""
    return replace(machine, speeds=None) if machine.speeds else machine


def chosen(cfg: Config, machine: Machine, world: int, bound: ArenaOf = fast_arena) -> Estimate:
    """The Estimate of what choose() takes of a config, with the Estimates of a machine of that type as the
    judge, and a bound of the temporary tensors; where no speeds are known of the type, by room alone."""
    def on(machine: Machine) -> Callable[[Layout], Estimate]:
        return cache(lambda one: estimate(one, machine, world, bound))
    machine = machine.of_its_type
    alone = timed = on(untimed(machine))
    if machine.speeds:
        timed = on(machine)  # asked for what fits alone: to simulate a schedule takes long
    if cfg.msp:  # shares, which take memory, are dealt by seconds
        alone = timed
    one, why = choose(cfg, lambda one: judged(timed(one) if alone(one).fits else alone(one)), world)
    return replace(timed(one), asked=cfg, chosen=why)


def again(got: Estimate, machine: Machine, arena: ArenaOf) -> Estimate:
    """The Estimate of what was chosen by chosen(), on that machine and with that arena."""
    if (machine, arena) == (got.machine, fast_arena):
        return got
    return replace(estimate(got.decided, machine, got.world, arena), asked=got.asked, chosen=got.chosen)


def judged(got: Estimate) -> Judged:
    """An Estimate as choose() takes it."""
    seconds = got.seconds.get("step", 0.0) / got.cfg.micro_batches(got.dp)
    if got.fits:
        return Judged(seconds, copies=got.alpha is not None or got.cfg.pp > 1)  # a bubble shrinks too
    host = max(0, got.host_bytes - got.host_capacity)
    if got.capacity is None:
        there = int(got.machine.node.host_memory_bytes * alpha.HOST_SHARE)
        device = max(0, got.node_bytes(lambda one: one.host_bytes + one.device_bytes) - there)
    else:
        device = max(0, got.device_bytes - got.capacity)
    small = [what for what, n in (("the device", device), ("the host", host)) if n]
    return Judged(seconds, max(1, host + device), " and ".join(small) or "the host")
