"""Bytes of every region of a rank but for temporary tensors: model states, activations. The run and the
estimate have them from here. Plain arithmetic."""

from dataclasses import dataclass
from typing import NamedTuple

from memo.estimate.arena import fast_arena
from memo.estimate.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine
from memo.estimate.host import STATES_BYTES
from memo.flat import (
    bucket_places,
    gradients_in_turns,
    layer_numel,
    local_layout,
    shared_numel,
    staged_bytes,
    weights_in_turns,
)
from memo.layer import INPUT, n_rows, tensors_of
from memo.layout import LANES, Layout, n_communicators
from memo.swap.alpha import SwapPlan
from memo.swap.placement import Placement
from memo.swap.sizes import Sizes, shared_regions


class Line(NamedTuple):
    """Bytes of a rank under one heading; `region` as in plan.json, `what` for people."""

    region: str
    what: str
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """What a rank of one stage of the pipeline holds; there may be just one stage. `numel`: its parameters,
    with padding; `lacks`: why its share of the host is too small, None where it is not."""

    cfg: Layout
    numel: int
    lines: tuple[Line, ...]
    placement: Placement
    plan: SwapPlan | None
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
        """(device, host) bytes of a rank; the head's are the transient region's too, which is one arena."""
        names = ("transient", "head") if region == "transient" else (region,)
        mine = [line for line in self.lines if line.region in names]
        return sum(line.device_bytes for line in mine), sum(line.host_bytes for line in mine)


def micros_of_rank(cfg: Layout, world: int) -> int:
    """Count the micro batches of a rank in a step."""
    dp = world // (cfg.pp * cfg.cp * cfg.tp)
    return cfg.micro_batches(dp) // dp


def states(cfg: Layout, machine: Machine, world: int, itemsize: int) -> tuple[int, int, list[Line]]:
    """(parameters of this rank with padding, ranks that share its optimizer, [Line] of what does not depend
    on the activations)."""
    data = world // (cfg.pp * cfg.tp)
    layout, buckets = local_layout(cfg, cfg.tp, data)
    T, D, micros = cfg.block_size // cfg.cp, cfg.head_width, micros_of_rank(cfg, world)
    numel, on_host = buckets[-1][1], cfg.optimizer_on_host
    whole = data == 1 and itemsize == 4 and not on_host and not cfg.layers_come  # the weights are the masters
    optimizer = (STATES_BYTES - 4 * whole) * numel // data
    come, leave = weights_in_turns(cfg), gradients_in_turns(cfg, micros)
    params, grads = (bucket_places(buckets, in_turns)[1] for in_turns in (come, leave))
    grads, staged = 4 * grads, 0
    if on_host:  # see memo/staging.py
        grads += 4 * shared_numel(layout, cfg.tp)
        staged = staged_bytes(cfg, numel // data, micros, itemsize)
    else:
        grads += 4 * sum(buckets[k][1] - buckets[k][0] for k in come) // data
    # rows of rotations: with METP of own rows alone
    turned = 0 if cfg.position != "rope" else n_rows(cfg) if cfg.metp else cfg.batch_size * T
    lines = [Line("params", "parameters", itemsize * params), Line("grads", "gradients", grads, staged),
             Line("optimizer", "optimizer", 0 if on_host else optimizer, optimizer if on_host else 0),
             Line("positions", "positions", 8 * cfg.batch_size * T + 8 * D // 2 * turned)]
    if not machine.cpu:
        made = n_communicators(cfg, world)
        lines += [Line("batch", "tokens and targets", 16 * cfg.batch_size * T * micros),
                  Line("communication", f"{made} NCCL communicator{'s' * (made != 1)}",
                       made * COMMUNICATOR_BYTES),
                  Line("context", "CUDA's context", CONTEXT_BYTES)]
    return numel, data, [line for line in lines if line.device_bytes or line.host_bytes]


def activation_lines(cfg: Layout, placement: Placement, itemsize: int, data: int = 1) -> list[Line]:
    """[Line] of the skeletal activations, on device and host, and of what stages lend each other. `data`: see
    local_layout."""
    p, tensors = placement, tensors_of(cfg, itemsize)
    buffers, n, L = p.buffer_bytes(tensors), p.n_buffers, p.n_layer
    inputs = buffers.pop(INPUT)
    always = ", ".join(name for name, t in tensors.items()
                       if not t.group and name != INPUT and not p.apart(name))
    swapped = {INPUT: 0, always: 0, "others": 0}
    for name, nbytes in p.survivor_bytes(tensors).items():
        swapped["others" if tensors[name].group else INPUT if name == INPUT else always] += nbytes
    of, swaps = f"{L} layer{'s' * (L > 1)}", f"{p.n_swapped} swapped layers"
    if p.several:
        of, swaps = f"{L} x {p.subsequences} units", f"{p.n_swapped} swapped units"
    layers = [f"{held} layer{'s' * (held > 1)}" for held in
              (L if p.keys == "stay" else 1, L if p.order == "subsequence" else 1)]
    what = {"keys": f"keys and values of {layers[0]}", "key_gradients": f"their gradients of {layers[1]}",
            "stream": "stream between two layers" if p.stream == "whole" else "places of the stream",
            "resident": "rows whose copy is here",
            "sweep": "inputs to make keys again"}
    what |= {"guest_weights": "weights of other stages", "guest_keys": "keys and values of other stages",
             "guest_gradients": "gradients for other stages", "repaid": "gradients from other stages"}
    regions, keys = p.region_bytes(tensors), p.keys_bytes(tensors)
    if p.guests or p.lent:
        regions |= shared_regions(Sizes(p, tensors, layer_numel(cfg, data)))
    lines = [Line("rounding_buffers", f"{n} buffer{'s' * (n > 1)} for {of}", sum(buffers.values())),
             Line("rounding_buffers", f"{p.n_inputs} buffers for their inputs", inputs),
             *(Line(region, what[region], nbytes) for region, nbytes in regions.items() if nbytes),
             *(Line("swap", f"{name} of {swaps}", 0, nbytes) for name, nbytes in swapped.items() if nbytes)]
    stream = p.stream_bytes(tensors)
    lines += [Line("swap", "stream between the layers", 0, stream)] * bool(stream)
    leaving = sum(p.forward_order.keys_leaving.values())
    return lines + [Line("swap", f"keys and values of {leaving} units", 0, keys)] * bool(keys)


def lane_bytes(placement: Placement) -> int:
    """Of a GPU, for the communicators with stages that help, or are helped."""
    return LANES * len(placement.partners) * COMMUNICATOR_BYTES


def cpu_spare(cfg: Layout, machine: Machine, lines: list[Line], limit: int) -> int:
    """Bytes of a CPU's memory for the buffers of activations: what is left of `limit`, a rank's share of the
    host, beside the model's states (the `lines` of states()) and a bound of the temporary tensors. The same
    in the run."""
    return limit - sum(line.device_bytes for line in lines) - sum(fast_arena(cfg, machine))
