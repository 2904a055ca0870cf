"""Bytes of every region of a rank but for temporary tensors: model states, activations; and of a node's host
memory. The run and the estimate have them from here. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memo.config.config import Config
from memo.config.formulas import parameters
from memo.config.keys import counted
from memo.config.layer import INPUT, layer_of, n_rows, tensors_of
from memo.config.layout import Layout, n_communicators
from memo.decide import alpha
from memo.decide.choose import with_stages
from memo.estimate.arena import fast_arena
from memo.memory import flat
from memo.memory.placement import Placement
from memo.memory.sizes import HOST_SHARE, Sizes, granted_bytes
from memo.schedule.periods import Totals
from memo.system.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine

STATES_BYTES = 12  # of a parameter: fp32 master weight and two moments
HOST_STATES_BYTES = STATES_BYTES + 4  # with its gradient, where the optimizer lives on the host


class Line(NamedTuple):
    """Bytes of a rank under one heading; `region` as in plan.json, `what` for people."""

    region: str
    what: str
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """Says what a rank of one stage holds. `numel`: its parameters, with padding; `totals`: seconds of all
    layers, where they were simulated; `lacks`: why its share of the host is too small, if it is."""

    cfg: Layout
    numel: int
    lines: tuple[Line, ...]
    placement: Placement
    plan: alpha.SwapPlan | None
    totals: Totals | None
    lacks: str | None

    @property
    def device_bytes(self) -> int:
        return sum(line.device_bytes for line in self.lines)

    @property
    def host_bytes(self) -> int:
        return sum(line.host_bytes for line in self.lines)

    @property
    def alpha(self) -> float | None:
        """None where nothing is swapped."""
        return self.plan.alpha if self.plan and self.placement.n_swapped > 0 else None

    def bytes_of(self, region: str) -> tuple[int, int]:
        """Adds up (device, host) bytes of a region; the transient one, an arena, has the head's."""
        names = ("transient", "head") if region == "transient" else (region,)
        mine = [line for line in self.lines if line.region in names]
        return sum(line.device_bytes for line in mine), sum(line.host_bytes for line in mine)


def micros_of_rank(cfg: Layout, world: int) -> int:
    """Counts the micro batches of a rank in a step."""
    dp = world // (cfg.pp * cfg.cp * cfg.tp)
    return cfg.micro_batches(dp) // dp


def states(cfg: Layout, machine: Machine, world: int, itemsize: int) -> tuple[int, list[Line]]:
    """Counts (parameters of a rank, padded, Lines of all but activations)."""
    data = world // (cfg.pp * cfg.tp)
    layout, buckets = flat.local_layout(cfg, cfg.tp, data)
    T, D, micros = cfg.block_size // cfg.cp, cfg.head_width, micros_of_rank(cfg, world)
    numel, on_host = buckets[-1][1], cfg.optimizer_on_host
    whole = data == 1 and itemsize == 4 and not on_host and not cfg.layers_come  # the weights are the masters
    optimizer = (STATES_BYTES - 4 * whole) * numel // data
    come, leave = flat.weights_in_turns(cfg), flat.gradients_in_turns(cfg, micros)
    params, grads = (flat.bucket_places(buckets, in_turns)[1] for in_turns in (come, leave))
    grads, staged = 4 * grads, 0
    if on_host:  # see Staging in memo/states/optim.py
        grads += 4 * flat.shared_numel(layout, cfg.tp)
        staged = flat.staged_bytes(cfg, numel // data, micros, itemsize)
    else:
        grads += 4 * sum(buckets[k][1] - buckets[k][0] for k in come) // data
    # rows of rotations: with METP of own rows alone
    turned = n_rows(cfg) if cfg.metp else cfg.batch_size * T
    turned *= len({kind.rope for kind in cfg.kinds if kind.rope})
    lines = [Line("params", "parameters", itemsize * params), Line("grads", "gradients", grads, staged),
             Line("optimizer", "optimizer", 0 if on_host else optimizer, optimizer if on_host else 0),
             Line("positions", "positions", 8 * cfg.batch_size * T + 8 * D // 2 * turned)]
    if not machine.cpu:
        made = n_communicators(cfg, world)
        lines += [Line("batch", "tokens and targets", 16 * cfg.batch_size * T * micros),
                  Line("communication", counted(made, "NCCL communicator"),
                       made * COMMUNICATOR_BYTES),
                  Line("context", "CUDA's context", CONTEXT_BYTES)]
    return numel, [line for line in lines if line.device_bytes or line.host_bytes]


def held_words(p: Placement, places: int) -> str:
    """Says of which layers the device has places for keys and values, or of how many units."""
    if p.order == "layer" and places in (p.subsequences, p.subsequences + 1):  # two for the first piece
        return counted(1, "layer")
    units = p.n_layer * p.subsequences
    return counted(p.n_layer, "layer") if places == units else f"{places} of {units} units"


def activation_lines(cfg: Layout, placement: Placement, itemsize: int, data: int = 1) -> list[Line]:
    """Lists the Lines of skeletal activations, and of what stages lend. `data`: see local_layout."""
    p, tensors = placement, tensors_of(cfg, itemsize)
    sizes = Sizes(p, tensors, flat.layer_numel(cfg, data) if p.guests or p.lent else 0)
    buffers, n, L = sizes.buffer_bytes, p.n_buffers, p.n_layer
    inputs = buffers.pop(INPUT)
    always = ", ".join(name for name, t in tensors.items()
                       if not t.group and name != INPUT and not p.apart(name))
    swapped = {INPUT: 0, always: 0, "others": 0}
    for name, nbytes in sizes.survivor_bytes().items():
        swapped["others" if tensors[name].group else INPUT if name == INPUT else always] += nbytes
    of = f"{L} x {p.subsequences} units" if p.several else counted(L, "layer")
    swaps = f"{p.n_swapped} swapped {p.what}"
    keys_of, sums_of = (held_words(p, len(laid.first)) for laid in p.keys_laid_out) if p.several else ("", "")
    what = {"keys": f"keys and values of {keys_of}", "key_gradients": f"their gradients of {sums_of}",
            "stream": "stream between two layers" if p.stream == "whole" else "places of the stream",
            "resident": "rows whose copy is here", "sweep": "inputs to make keys again",
            "guest_weights": "weights of other stages", "guest_keys": "keys and values of other stages",
            "guest_gradients": "gradients for other stages", "repaid": "gradients from other stages"}
    regions, keys, stream = sizes.region_bytes | sizes.lent_bytes, sizes.keys_bytes, sizes.stream_bytes
    lines = [Line("rounding_buffers", f"{counted(n, 'buffer')} for {of}", sum(buffers.values())),
             Line("rounding_buffers", f"{p.n_inputs} buffers for their inputs", inputs),
             *(Line(region, what[region], nbytes) for region, nbytes in regions.items() if nbytes),
             *(Line("swap", f"{name} of {swaps}", 0, nbytes) for name, nbytes in swapped.items() if nbytes)]
    lines += [Line("swap", "stream between the layers", 0, stream)] * bool(stream)
    leaving = len(p.key_places.leaving)
    return lines + [Line("swap", f"keys and values of {leaving} units", 0, keys)] * bool(keys)


def cpu_spare(cfg: Layout, machine: Machine, lines: list[Line], limit: int) -> int:
    """Counts a CPU's bytes for the buffers of activations: what is left of `limit`, a rank's share of the
    host, beside the model's states (the `lines` of states()) and a bound of the temporary tensors."""
    return limit - sum(line.device_bytes for line in lines) - sum(fast_arena(cfg, machine))


# --- the host memory of a node: for swapped activations and the optimizer, beside a checkpoint's copy ---

def host_capacity(cfg: Layout, machine: Machine, world: int) -> int:
    """Counts a node's bytes for swapped activations and an optimizer on the host: what host_memory_gb grants,
    or what a checkpoint's copy leaves. Errors: ConfigError where the node has fewer."""
    return granted_bytes(cfg.host_memory_gb, machine.node.host_memory_bytes,
                         snapshot_bytes(cfg, machine, world), "what a node has")


def node_bytes(of_stages: Sequence[int], world: int, ranks: range) -> int:
    """Adds up the bytes of the `ranks` of a node, of `world`. The ranks of a stage follow each other."""
    n = max(1, world // len(of_stages))
    return sum(nbytes * max(0, min(ranks.stop, (k + 1) * n) - max(ranks.start, k * n))
               for k, nbytes in enumerate(of_stages))


def fullest_node_bytes(of_stages: Sequence[int], world: int, local_ranks: int) -> int:
    """Finds the most node_bytes() of any node."""
    nodes = range(0, world if len(of_stages) > 1 else 1, local_ranks)
    return max(node_bytes(of_stages, world, range(first, min(first + local_ranks, world))) for first in nodes)


def stage_state_bytes(cfg: Layout, world: int, each: int = STATES_BYTES) -> list[int]:
    """Counts a rank's part of each stage's optimizer, or of what takes `each` bytes a parameter."""
    numels, ranks = [n * layer_of(cfg).matrix_elements for n in cfg.depths], max(1, world // cfg.pp)
    for stage in {0, cfg.pp - 1} if cfg.tie_embeddings else (0, -1):
        numels[stage] += cfg.vocab_size * cfg.n_embd
    return [each * numel // ranks for numel in numels]


def copied_bytes(cfg: Layout, world: int) -> list[int]:
    """Counts, for a rank of each stage, what a checkpoint's copy takes: none of states on the host."""
    return stage_state_bytes(cfg, world, 0 if cfg.optimizer_on_host else STATES_BYTES)


def snapshot_bytes(cfg: Layout, machine: Machine, world: int) -> int:
    """Adds up copied_bytes() on the fullest node."""
    return fullest_node_bytes(copied_bytes(cfg, world), world, machine.node.gpus_per_node)


def granting(cfg: Config, machine: Machine, world: int, nbytes: int) -> tuple[Config, Machine]:
    """Makes (cfg, machine) of a node that grants so many bytes of host memory, whatever it has."""
    # a GPU's node has enough for the copy in any layout; a CPU's memory is the device's too
    copy = 2 * STATES_BYTES * parameters(cfg)
    if machine.cpu:
        every = with_stages(cfg, world) if cfg.pp == "auto" else [cfg]
        # msp, which takes none of it, is not for the one subsequence that nobody has decided on
        copy = max(snapshot_bytes(Layout.of(one, msp=False), machine, world) for one in every)
    node = replace(machine.node, host_memory_bytes=int((nbytes + copy) / HOST_SHARE) + 2)
    return replace(cfg, host_memory_gb=nbytes / 1e9), replace(machine, node=node)
