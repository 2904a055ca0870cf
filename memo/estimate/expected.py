"""The estimate of a run on the machine at hand, before the run starts, and the message when memory runs out
all the same."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from memo.config import Config
from memo.device import device_name, gpu_facts, own_bytes
from memo.errors import ConfigError, RunFailed
from memo.estimate import hardware
from memo.estimate.arena import ArenaOf
from memo.estimate.budget import Estimate, estimate
from memo.estimate.search import explain, remedies
from memo.launch import Launch
from memo.swap.slab import available


def machine_of(device: torch.device, launch: Launch) -> hardware.Machine:
    """The hardware.Machine that this rank runs on: the known figures of its GPU and this host, and those that
    --calibrate measured."""
    try:
        measured = hardware.machine("here", ranks=launch.world)
    except ConfigError:
        measured = None
    name, cuda = device_name(device), device.type == "cuda"
    threads = launch.threads or torch.get_num_threads()
    short = hardware.gpu_named(name) if cuda else None
    if measured and (measured.name == name if cuda else measured.cpu and measured.threads == threads):
        found = measured
    elif short:
        found = hardware.machine(short)
    else:
        found = hardware.Machine(name, hardware.NODES["workstation"], None, None, None)
    node = replace(found.node, gpus_per_node=launch.local_world, host_memory_bytes=available())
    return replace(found, node=node, threads=threads, memory_bytes=own_bytes(device), **gpu_facts(device))


def expect(cfg: Config, device: torch.device, launch: Launch, arena: ArenaOf, force: bool) -> Estimate | None:
    """The Estimate of this run; None, with a warning, where the estimate fails. Errors: ConfigError where the
    run cannot fit, unless `force`."""
    try:
        got = estimate(cfg, machine_of(device, launch), launch.world, arena)
        _ = got.seconds  # what fails, fails here
        others = [] if got.fits or got.only_tight or force else [text for text, _ in remedies(got)]
    except Exception as e:  # an estimate is not worth a run
        print(f"warning: no estimate: {type(e).__name__}: {e}", file=sys.stderr)
        return None
    if got.only_tight:
        margin = got.bytes_of("margin")[0] / 2**30
        print(f"warning: it will be tight: {got.why}, of which {margin:.3g} are a margin", file=sys.stderr)
    elif not got.fits and not force:
        others = [text.replace("--gpus=", "ranks=") for text in others]
        remedy = " or ".join([*others, "--force"])
        raise ConfigError(f"block_size={cfg.block_size} does not fit: {got.why}; try {remedy} "
                          "(to run it all the same)")
    return got


class OutOfMemory(RunFailed):
    """The device's memory is used up on this rank. One line."""


def lack_of_memory(e: RuntimeError) -> str | None:
    """The text of an error that comes of a lack of the device's memory; None of any other error."""
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    # torch has no class of its own for a lack of the CPU's memory
    lack = isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in text
    return text.split(". ")[0] if lack else None  # CUDA's goes on about all that torch's allocator holds


@contextlib.contextmanager
def naming_region(expected: Estimate | None, device: torch.device, region: str) -> Iterator[None]:
    """Turns a lack of memory inside the block into an OutOfMemory that names `region`, a regions.Line.region:
    the memory that the block takes."""
    try:
        yield
    except RuntimeError as e:
        text = lack_of_memory(e)
        if isinstance(e, OutOfMemory) or text is None:
            raise
        raise OutOfMemory(explain(expected, region, own_bytes(device), text)) from e
