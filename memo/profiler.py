"""The rates that the alpha program needs, measured before the first step at the run's own shape: seconds of a
layer's forward, backward and recompute, bytes per second of the copies between device and host.

The block and its buffers are handed in; measuring overwrites their contents, the gradients too.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial

from memo.command import Arguments, answer_early, run
from memo.schedule.step import Unit


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(ranks=True, prog="python -m memo.profiler",
                       description="Measures this machine for memo.estimate --gpu=here; under torchrun "
                       "with all its ranks at once.")
    parser.add_argument("--calibrate", action="store_true", required=True,
                        help="takes a minute or two, and stores it")
    parser.keys("device", "dtype")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import torch

from memo.config import Config
from memo.decide import Rates
from memo.device import pick_device, synchronize
from memo.estimate.calibrate import calibrate
from memo.estimate.hardware import calibration_path
from memo.estimate.step_seconds import StateSeconds, UnitRates
from memo.launch import read_launch
from memo.layer import ATTENTION, groups_of
from memo.optim import Optimizer
from memo.parallel.axis import Axis
from memo.parallel.mesh import ALONE, connected, open_mesh
from memo.protocols import LayerBlock, Model
from memo.swap.buffers import Swap, copy_bytes
from memo.swap.slab import HostSlab

STAGING_BYTES = 2**28  # of each direction's copies; large enough for the full speed of a bus
LONG_S = 0.5  # a call that takes longer is measured once


def least_seconds(device: torch.device, call: Callable, before: Callable = lambda: None,
                  host: Axis = ALONE.host) -> float:
    """Seconds of call(), which has run before: the least of three, or the first where that is long; on the
    slowest of the ranks of `host`, which all measure at once. `before` runs ahead of each, untimed."""
    best = float("inf")
    for _ in range(3):
        before()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, *host.max(time.perf_counter() - start))
        if best > LONG_S:
            break
    return best


def unit_rates(block: LayerBlock, swap: Swap, i: int, device: torch.device, host: Axis) -> UnitRates:
    """Of `block` at subsequence i, in the buffer of the first layer's unit; those of the subsequences before
    have run."""
    s, (_, y) = swap.units[Unit(0, i)], swap.between[Unit(0, i)]
    generator = torch.Generator(device).manual_seed(i)

    forward, backward = partial(block.forward, s, y), partial(block.backward, y, s)

    def refill() -> None:
        s.x.normal_(generator=generator)
        forward()

    def recompute_s(tensors: Iterable[str]) -> float:  # of all rows of these, and none of the others
        rows = dict.fromkeys(tensors, slice(None))
        return least_seconds(device, partial(block.recompute, s, rows), host=host)

    refill()  # untimed: libraries load, attention's kernels are chosen
    forward_s = least_seconds(device, forward, host=host)
    launches_s = recompute_s(())
    groups_s = {name: max(0.0, recompute_s(tensors) - launches_s)
                for name, tensors in groups_of(swap.tensors).items()}
    attention_s, sweep_s, p = 0.0, 0.0, swap.placement
    if p.several or p.layers_come:
        attention_s = max(0.0, recompute_s((ATTENTION,)) - launches_s)
    if p.several:
        sweep_s = least_seconds(device, partial(block.sweep, s, s.x), host=host)
    backward()
    backward_s = least_seconds(device, backward, before=refill, host=host)
    return UnitRates(len(s.x), forward_s, backward_s, sweep_s, attention_s, groups_s)


def layer_rates(block: LayerBlock, swap: Swap, device: torch.device,
                host: Axis) -> tuple[list[UnitRates], int | None]:
    """(units, transient_bytes) of `block`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    subsequences = sorted({unit.subsequence for unit in swap.units})
    units = [unit_rates(block, swap, i, device, host) for i in subsequences]
    transient = None
    if device.type == "cuda":
        transient = int(*host.max(torch.cuda.max_memory_allocated(device) - before))
    return units, transient


def copy_rates(swap: Swap, device: torch.device, pin: bool, host: Axis) -> tuple[float, float]:
    """(device to host, host to device) bytes per second, both directions busy at once, between a buffer and a
    host block of its own; all ranks of `host` copy at once."""
    buffer = max(swap.buffers.values(), key=lambda b: b.nbytes)
    nbytes = min(STAGING_BYTES, buffer.nbytes // 2)
    slab = HostSlab(2 * nbytes, device, pin)
    to_host = [(slab.bytes[:nbytes], buffer[:nbytes])]
    to_device = [(buffer[-nbytes:], slab.bytes[-nbytes:])]
    streams, rounds = swap.streams, 4
    host.max(0)  # ranks that share a link, or a host's memory, begin when all of them are ready
    try:
        for _ in range(rounds):
            streams.offload.launch("measure", copy_bytes, to_host)
            streams.prefetch.launch("measure", copy_bytes, to_device)
    finally:
        streams.offload.synchronize()
        streams.prefetch.synchronize()
        slab.close()
    spans = [s for s in streams.timeline.take() if s.label == "measure"]

    def rate(name: str) -> float:
        mine = [s for s in spans if s.stream == name][1:]  # the first one warms up
        return len(mine) * nbytes / (mine[-1].end_s - mine[0].start_s)
    return rate("offload"), rate("prefetch")


def measured_states(model: Model) -> StateSeconds:
    """The StateSeconds of a layer, on the slowest rank of those that measure at once: all."""
    optimizer, k = model.source, 1
    assert isinstance(optimizer, Optimizer)
    embedding, layer, *_, head = (end - start for start, end in model.buckets)

    def seconds(move: Callable, *args: object) -> float:
        return least_seconds(model.device, partial(move, k, *args), host=model.mesh.host)
    def leave(k: int) -> None:
        optimizer.start_sum(k).wait()
        optimizer.leave(k)
    found = StateSeconds(seconds(optimizer.bring_weights), seconds(leave),
                         seconds(optimizer.bring_sums, True) * (model.micro_batches > 1),
                         embedding / layer, head / layer)
    model.grads.zero_()
    optimizer.put(k)  # the gradients may have had the place of the weights
    return found


def measure(block: LayerBlock, swap: Swap, device: torch.device, pin: bool = True, peers: Axis = ALONE.peers,
            host: Axis = ALONE.host) -> Rates:
    """The Rates of `block` in the buffers of `swap`: of the slowest rank of `peers`, so that all of them
    decide alike. All ranks of `host` copy at once."""
    synchronize(device)
    swap.streams.timeline.take()
    units, transient = layer_rates(block, swap, device, peers)
    offload, prefetch = peers.max(*(-rate for rate in copy_rates(swap, device, pin, host)))  # of the slowest
    forward_s, backward_s = sum(unit.forward_s for unit in units), sum(unit.backward_s for unit in units)
    recompute_s = {name: sum(unit.groups_s[name] for unit in units) for name in units[0].groups_s}
    return Rates(forward_s, backward_s, recompute_s, -offload, -prefetch, transient,
                 tuple(units) if len(units) > 1 or swap.placement.layers_come else ())


def main(argv: list[str]) -> None:
    """python -m memo.profiler --calibrate. Errors: ConfigError."""
    args, launch = read_argv(argv), read_launch()
    device, dtype = pick_device(Config(device=args.device, dtype=args.dtype), launch.local_rank)
    if launch.rank == 0:
        calibration_path(launch.world)  # an error now rather than after the measuring
    launch.take(device)
    with connected(launch) as host:
        mesh = open_mesh(host, 1, host.size, device)
        measured = calibrate(mesh.weights, host, device, dtype, launch.local_world)
        mesh.close()
    if launch.rank == 0:
        ranks = measured["ranks"]
        print(f"{measured['device']}, {ranks} rank{'s' * (ranks > 1)}: slowest and fastest")
        for op, points in sorted(measured["speeds"].items()):
            if op in ("link", "network", "memory"):
                continue
            rates = [rate for _, rate in points]
            unit = "GFLOPs" if op.startswith(("matmul", "attention")) else "GB"
            print(f"  {op:20}{min(rates) / 1e9:>12.2f}{max(rates) / 1e9:>12.2f}  {unit}/s")
        print(f"stored in {calibration_path(measured['ranks'])}")


if __name__ == "__main__":
    sys.exit(run(main))
