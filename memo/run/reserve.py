"""The memory of a run: where activations and temporary tensors live, and what to do where it runs out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain

import torch

from memo.config.layout import Layout, pieces_near
from memo.data.batch import Data
from memo.decide import where
from memo.decide.pipeline import following, shared, with_bubbles
from memo.decide.where import Decision, Rates, Room, StageFacts, problem_of, swaps_layers, ways_of
from memo.errors import ConfigError, OutOfHostMemory, RunFailed, Unusable, reason, warn
from memo.estimate import regions, report
from memo.estimate.arena import fast_arena, head_bytes
from memo.estimate.budget import Estimate, modelled_facts
from memo.estimate.regions import Line
from memo.estimate.search import longest
from memo.layer.tiles import Packed
from memo.memory.slab import host_bytes
from memo.parallel.mesh import open_lanes
from memo.planner.allocator import Arena
from memo.planner.trace import Trace
from memo.run.measure import measure, measured_states
from memo.run.rehearsal import rehearsed_requests, traced_requests
from memo.schedule.passes import passes_of
from memo.schedule.simulate import in_one_order
from memo.schedule.streams import Streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.device import device_name, free_bytes, own_bytes, settle
from memo.system.hardware import NODES, Machine
from memo.system.launch import Launch


def gpu_decides(cfg: Layout, device: torch.device) -> bool:
    """Says whether alpha and the number of buffers are left to what is measured on a GPU."""
    return swaps_layers(cfg) and cfg.finds_alpha and device.type == "cuda"


def stages_share(cfg: Layout, world: int) -> bool:
    """Says whether stages may take memory for each other, or for a next sequence, as far as there is room."""
    return cfg.msp or (cfg.pp > 1 and regions.micros_of_rank(cfg, world) > 1)


def host_limit(cfg: Layout, launch: Launch, itemsize: int) -> int:
    """Counts what a rank has of the host's memory to swap to: its share without what checkpoints are copied
    to, and without master weights, moments and gradients where these live there. Errors: OutOfHostMemory."""
    if not (swaps_layers(cfg) or cfg.optimizer_on_host or stages_share(cfg, launch.world)):
        return 0
    first = launch.rank - launch.local_rank
    copies = regions.node_bytes(regions.copied_bytes(cfg, launch.world), launch.world,
                        range(first, first + launch.local_world))
    share = host_bytes(cfg.host_memory_gb, launch.local_world, reserved=copies)
    if not cfg.optimizer_on_host:
        return share
    sums = cfg.states == "host" and regions.micros_of_rank(cfg, launch.world) > 1
    each = regions.HOST_STATES_BYTES + itemsize * sums
    needs = regions.stage_state_bytes(cfg, launch.world, each)[cfg.stage]
    if needs > share:
        key, other = ("states=host", "states=sharded") if cfg.states == "host" else (
            "optimizer_device=cpu", "optimizer_device=auto")
        raise OutOfHostMemory(
            f"{key} needs {needs / 2**30:.4g} GiB of host memory for a rank's master weights, moments and "
            f"gradients, its share is {share / 2**30:.4g} GiB, enough for "
            f"{report.billions(share * launch.world / each)} parameters at any block_size; try a larger "
            f"host_memory_gb, more ranks, or {other}")
    return share - needs


def check_memory(cfg: Layout, device: torch.device, dtype: torch.dtype, limit: int) -> None:
    """Checks what can be before the device is touched. Errors: OutOfHostMemory, ConfigError."""
    if gpu_decides(cfg, device) and cfg.deterministic:
        raise ConfigError("deterministic=True needs alpha by hand on a GPU (measured rates differ from "
                          "run to run, and so would the rows that are recomputed); try --alpha=0.5 or "
                          "--activation=keep")
    if swaps_layers(cfg) and not gpu_decides(cfg, device):  # a GPU that has room for all layers needs no host
        room = Room(limit, cpu=device.type == "cpu")
        ways = [problem_of(cfg, dtype.itemsize, None, room, **way) for way in ways_of(cfg)]
        where.place_whole(cfg, ways, None)


def cpu_room(cfg: Layout, model: Model, limit: int) -> Room:
    """Finds the Room of the CPU with least; nothing need be measured for that."""
    host = model.mesh.host
    cpu = Machine(device_name(model.device), NODES["workstation"], None, None, None, torch.get_num_threads())
    _, states = regions.states(cfg, cpu, host.size, model.dtype.itemsize)
    spare = regions.cpu_spare(cfg, cpu, states, limit)
    return Room(limit, -int(*model.mesh.peers.max(-spare)), cpu=True)


def gpu_room(cfg: Layout, model: Model, rates: Rates, limit: int) -> Room:
    """Finds the Room of the fullest GPU beside one layer's transients; without a bound where nothing asks for
    one. Errors: ConfigError where alpha is to be found, and not even two buffers fit at alpha = 0."""
    finds = gpu_decides(cfg, model.device)
    if not (finds or where.keeps_rows(cfg) or stages_share(cfg, model.mesh.host.size)):
        return Room(limit)
    free, total = (-int(n) for n in model.mesh.peers.max(*(-n for n in free_bytes(model.device))))
    layer, head = rates.transient_bytes, head_bytes(cfg, model.dtype.itemsize)
    assert layer is not None  # on a GPU it is measured
    spare = max(0, where.spare_bytes(free, total, layer, max(0, head - layer)))
    least = min(problem_of(cfg, model.dtype.itemsize, None, Room(0), **way).device_bytes_at(0)
                for way in ways_of(cfg))
    if finds and spare < least:
        free -= total // where.GAPS
        longest = min(cfg.block_size * free // (layer + layer // where.SPARE_TRANSIENTS + least),
                      cfg.block_size * max(0, free - head) // least)
        longest -= longest % cfg.block_multiple
        order = "--unit_order=layer, " * (not cfg.by_layer and cfg.pp == 1)
        raise ConfigError(f"block_size={cfg.block_size} needs {least / 2**30:.4g} GiB of device memory for "
                          "two buffers of activations, the model's states and a layer's temporaries leave "
                          f"{spare / 2**30:.4g} GiB; try --block_size={longest}, {order}more --subsequences, "
                          "or --alpha=0 to try all the same")
    return Room(limit, spare)


def typical_documents(cfg: Layout, model: Model, data: Data) -> Packed | None:
    """Draws the micro batch that stands for all."""
    if not cfg.documents:
        return None
    first = data.packings["train"].typical(cfg.batch_size, cfg.seed) * cfg.batch_size
    batch = data.packed_batch("train", first, cfg.batch_size, cfg.seed, model.order)
    return model.on_device(batch).packed


def reserve_activations(cfg: Layout, model: Model, limit: int, streams: Streams | None = None,
                        machine: Machine | None = None, data: Data | None = None) -> Decision:
    """Measures where that matters, decides, and takes the memory of the activations: model.swap. All ranks
    call it and measure at once. `limit`: host_limit(); `machine`: for msp; `data`: a typical batch of its
    documents is measured. Errors: OutOfHostMemory."""
    B, T, pin = cfg.batch_size, cfg.block_size // cfg.cp, cfg.pin_memory
    rates, peers, host, itemsize = None, model.mesh.peers, model.mesh.host, model.dtype.itemsize
    limit, share = -int(*peers.max(-limit)), stages_share(cfg, host.size)
    cpu = model.device.type == "cpu" and not gpu_decides(cfg, model.device)
    asks = (swaps_layers(cfg) and cfg.finds_alpha) or share  # how much is free
    room = cpu_room(cfg, model, limit) if cpu and asks else Room(limit, cpu=cpu)
    problem = where.with_buffers(cfg, problem_of(cfg, itemsize, None, room), room)
    all_fit = cpu and not problem.n_swapped
    if (swaps_layers(cfg) and not all_fit) or cfg.msp or (share and not cpu):
        settle(model.device)
        # a unit's backward follows its forward
        model.reserve_forward(B, T, n_layer=1 + max(model.first_of_kinds), streams=streams, pin=pin)
        rates = measure(model, pin, typical_documents(cfg, model, data) if data else None)
        model.grads.zero_()
        model.close()
        if cfg.layers_come:
            rates = replace(rates, states=measured_states(model))
        if not cpu:
            room = gpu_room(cfg, model, rates, limit)
    else:
        host.max(0)  # other stages may measure, and wait for all ranks before they copy
    facts = StageFacts(cfg, itemsize, rates, room, where.measured_ends(cfg, rates))
    if cfg.pp == 1:
        found = facts.alone()
    else:  # copies also hide where a stage waits for others
        stages = host.objects(facts)[::peers.size]  # all ranks of a stage have the same
        together = with_bubbles(stages, [one.alone() for one in stages])
        named = replace(cfg, attention=model.gpt.attention.name, ops=model.gpt.ops.name)
        of_type = modelled_facts(named, machine.of_its_type, host.size, room) if machine else replace(
            facts, cfg=named, rates=None)
        typical = host.objects(of_type)[::peers.size]
        if cfg.msp:
            together = shared(stages, together, typical)
            shares = tuple(piece for one in together for piece in one.placement.lent)
            open_lanes(model.mesh, shares, model.device)
            model.cfg = replace(cfg, shares=shares)
        together = following(stages, together, model.micro_batches, typical)
        model.cfg = replace(model.cfg, leads=tuple(one.placement.lead for one in together))
        found = together[cfg.stage]
    model.reserve(B, T, found.placement, streams=streams, pin=pin)
    if model.cfg.shares:  # these stages would post messages in orders of their own
        train, evaluation = (in_one_order([one.placement.schedule(trains) for one in together])[cfg.stage]
                             for trains in (True, False))
        model.swap.set_passes(passes_of(found.placement.program, model.states, (train, evaluation)))
    return Decision(found.placement, found.plan, rates, limit)


def requests_of_a_step(model: Model, arena: Arena) -> Trace:
    """Records the memory requests of a step in a rehearsal, or traces them where torch's allocator, which
    fragments, has no room for one on some rank. Nothing is sent meanwhile, so no rank waits for that one."""
    trace, host = None, model.mesh.host
    with model.mesh.silenced(), suppress(torch.OutOfMemoryError):
        trace = rehearsed_requests(model, arena)
    all_have_room = all(host.objects(trace is not None))
    if trace is not None and all_have_room:
        return trace
    warn("memory_plan: a layer does not fit into what torch's allocator has free, so its requests are "
         "traced, not recorded; what kernels take for themselves is left to torch")
    if trace is None:
        arena.recorded()  # half a rehearsal, of no use
    cfg = replace(model.cfg, attention=model.gpt.attention.name, ops=model.gpt.ops.name)
    like = "cpu" if model.device.type == "cpu" else "meta"
    return traced_requests(
        lambda device: Model(model.make, cfg, device, model.dtype, mesh=model.mesh.silent()), *model.shape,
        model.swap.missing, like, keys=model.swap.placement.keys)


def plan_memory(cfg: Layout, model: Model) -> None:
    """Plans the addresses of a step's requests: model.arena. Where it cannot, the run goes on without."""
    if cfg.memory_plan == "off":
        return

    host, why = model.mesh.host, None
    told = f"memory_plan={cfg.memory_plan} is not to be had: {{}}; training goes on without it"
    try:
        arena = Arena(model.device, cfg.solver, guard=cfg.memory_plan_check)
    except Unusable as e:
        why = str(e)
    if whys := [w for w in host.objects(why) if w]:  # on any rank: a rehearsal takes all of them
        warn(told.format(whys[0]))
        return
    trace = requests_of_a_step(model, arena)
    try:
        arena.replay(trace)
        model.arena = arena
    except Unusable as e:
        print(f"warning: {told.format(e)}", file=sys.stderr)  # of this rank alone


def where_it_lives(cfg: Layout, decision: Decision, model: Model, optimizer: Optimizer) -> list[Line]:
    """Lists the Lines of a rank, which add up to all that is held from step to step."""
    states = sum(t.nbytes for t in optimizer.states().values() if t is not model.params)
    staging, replicas = optimizer.staging, model.mesh.replicas.size
    on_host = states if staging else 0
    shards = 0 if staging else sum(optimizer.sums[k].nbytes for k in optimizer.coming)
    grads = model.grads.nbytes + optimizer.kept.nbytes + shards, staging.nbytes if staging else 0
    positions = sum(t.nbytes for rows in {id(rows.positions): rows for rows in model.rows}.values()
                    for t in (*rows.positions, *chain(*rows.turns.values())) if t is not None)
    return [Line("params", "parameters", model.params.nbytes), Line("grads", "gradients", *grads),
            Line("optimizer", "optimizer", states - on_host, on_host),
            *regions.activation_lines(cfg, decision.placement, model.dtype.itemsize, replicas),
            Line("transient", "arena of temporary tensors", model.arena.stats().arena_bytes),
            Line("positions", "positions", positions)]


# --- where memory runs out ---

# {region: keys that make it smaller}
KNOBS = {"params": "--tp, --states=sharded or --states=host", "grads": "--tp, or --states=host",
         "optimizer": "--optimizer_device=cpu, --states=host, or more ranks",
         "rounding_buffers": "--cp or --tp, more --subsequences, or a lower --alpha",
         "transient": "--cp or --tp, or more --subsequences", "stream": "--cp or --tp",
         "keys": "--cp or --tp", "key_gradients": "--cp or --tp", "sweep": "more --subsequences",
         "resident": "--activation=memo"}
ACTIVATIONS = "rounding_buffers", "keys", "key_gradients", "stream", "sweep", "resident"  # taken at once


def explain(expected: Estimate | None, region: str, capacity: int | None, text: str) -> str:
    """Says of a run that found no memory for `region` and what is taken with it: what was expected, the knob
    of the largest, the longest context. `capacity`: bytes that others leave of a device, None on the host."""
    line = f"out of memory ({text}) while the region"
    if expected is None:
        return f"{line} {region} grew; try {KNOBS[region]}, or a smaller --block_size"
    cfg, machine = expected.cfg, expected.machine
    names = ACTIVATIONS if region in ACTIVATIONS else (region,)
    grew = {name: n for name in names if (n := max(expected.bytes_of(name)))} or {region: 0}
    largest = max(grew, key=grew.__getitem__)
    knob = KNOBS[largest]
    if largest in ("keys", "key_gradients"):
        knob += ", or --unit_order=layer" * (not cfg.by_layer and cfg.pp == 1)
        knob += ", or more --subsequences" * bool(pieces_near(cfg))
    if capacity is not None:
        assert machine.memory_bytes is not None  # `capacity` is of a device with its own
        machine = replace(machine, memory_bytes=min(capacity, machine.memory_bytes))
    line += (f"{'s' * (len(grew) > 1)} {', '.join(grew)} grew, estimated at {sum(grew.values()) / 2**30:.4g} "
             f"GiB of {expected.device_bytes / 2**30:.4g} in all")
    most = longest(cfg, machine, expected.world, fast_arena, documents=expected.documents)
    if most is None:
        return f"{line}; try {knob}; no block_size fits"
    if most.cfg.block_size >= cfg.block_size:
        line += ", which should fit: something else takes the memory, or the estimate is wrong"
    return f"{line}; try {knob}; the greatest block_size that would fit is {most.cfg.block_size}"


@contextmanager
def explaining(explain_lack: Callable[[str], str]) -> Iterator[None]:
    """Turns a lack of memory inside the block into RunFailed(explain_lack(torch's text))."""
    try:
        yield
    except RuntimeError as e:
        text = reason(e)
        # torch has no class of its own for a lack of the CPU's memory
        lack = isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in text
        if isinstance(e, RunFailed) or not lack:
            raise
        # CUDA's goes on about all that torch's allocator holds
        raise RunFailed(explain_lack(text.split(". ")[0])) from e


def naming_region(expected: Estimate | None, device: torch.device,
                  region: str) -> AbstractContextManager[None]:
    """Makes a lack of memory meanwhile an error that names its Line's `region`."""
    return explaining(lambda text: explain(expected, region, own_bytes(device), text))
