"""What is expected of a run on the machine at hand: its estimate before it starts, and what is said when
memory runs out all the same."""

import contextlib
import sys
from dataclasses import replace

import torch

from memo.device import device_name, gpu_facts, own_bytes
from memo.errors import ConfigError
from memo.estimate import hardware
from memo.estimate.budget import estimate
from memo.estimate.search import explain, remedies
from memo.swap.slab import available


def machine_of(device, launch):
    """The hardware.Machine that this rank runs on: what is known of its GPU and this host, and what
    --calibrate measured."""
    try:
        measured = hardware.machine("here", ranks=launch.world)
    except ConfigError:
        measured = None
    name, cuda, threads = device_name(device), device.type == "cuda", launch.threads or torch.get_num_threads()
    short = hardware.gpu_named(name) if cuda else None
    if measured and (measured.name == name if cuda else measured.cpu and measured.threads == threads):
        found = measured
    elif short:
        found = hardware.machine(short)
    else:
        found = hardware.Machine(name, hardware.NODES["workstation"], None, None, None)
    node = replace(found.node, gpus_per_node=launch.local_world, host_memory_bytes=available())
    return replace(found, node=node, threads=threads, memory_bytes=own_bytes(device), **gpu_facts(device))


def expect(cfg, device, launch, arena, force):
    """The Estimate of this run, None where it is not to be had. Errors: ConfigError where it cannot fit,
    unless `force`."""
    try:
        got = estimate(cfg, machine_of(device, launch), launch.world, arena)
        others = [] if got.fits or got.only_tight or force else [text for text, _ in remedies(got)]
    except Exception as e:  # an estimate is not worth a run
        print(f"warning: no estimate: {type(e).__name__}: {e}", file=sys.stderr)
        return None
    if got.only_tight:
        print(f"warning: it will be tight: {got.why}, of which {got.bytes_of('margin')[0] / 2**30:.3g} are a margin",
              file=sys.stderr)
    elif not got.fits and not force:
        others = [text.replace("--gpus=", "ranks=") for text in others]
        raise ConfigError(f"block_size={cfg.block_size} does not fit: {got.why}; try {' or '.join([*others, '--force'])} "
                          "(to run it all the same)")
    return got


class OutOfMemory(RuntimeError):
    """The device's memory is used up on this rank. One line."""


@contextlib.contextmanager
def naming_region(expected, device, region):
    """Names the region of memory that grows meanwhile, should there be too little: a key of
    budget.Line.region."""
    try:
        yield
    except RuntimeError as e:
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        if isinstance(e, OutOfMemory) or not (isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in text):
            raise  # torch has no class of its own for the CPU's
        text = text.split(". ")[0]  # CUDA's goes on about all that torch's allocator holds
        raise OutOfMemory(explain(expected, region, own_bytes(device), text)) from e
