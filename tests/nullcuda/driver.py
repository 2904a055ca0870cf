"""train.py on a machine that is modelled: python -m tests.nullcuda.driver REPORT [train.py's arguments]

The environment's NULL_JOB is a JSON object:

    gpu, figures   a hardware.machine() and its figures, for null CUDA and for the run's own estimate
    host_bytes     what is free on the host (default: the node's host memory)
    sparse         the host slab takes no pages: its zeros are not written, a fresh mapping's bytes are zero
    saves          false: without checkpoints, which are real files of a model's full size

REPORT gets {exit, error, alphas, estimated_alphas, counts: {phase: {count: n}}, races, peak_bytes,
host_peak_bytes, seconds}. Alphas: of each subsequence, None where nothing is swapped. Phases: startup, batch
(ids to the device), step (a step's forward and backward), clip, optimizer, between (all else in the loop).
"""

import json
import mmap
import os
import resource
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from memo.checkpoint.checkpoint import Saver
from memo.errors import BadState, last_line
from memo.memory import slab
from memo.states.optim import Optimizer
from memo.system import hardware
from tests.nullcuda.watch import NULL, watching

GPU = "h100-80gb"
PHASES = ((train, "train", "between"), (train, "batch", "batch"), (train, "forward_backward", "step"),
          (Optimizer, "clip", "clip"), (Optimizer, "step", "optimizer"))  # (where, function, phase)


def modelled(gpu=GPU, host_bytes=None, **figures):
    """The hardware.Machine of a job."""
    host = {} if host_bytes is None else dict(host_memory_bytes=host_bytes)
    return hardware.machine(gpu, **figures | host)


def environment(machine):
    """What null CUDA is told of a hardware.Machine. The node's figure of the link is a rank's share."""
    node, speeds = machine.node, machine.speeds
    figures = dict(MEMORY_BYTES=machine.memory_bytes, CONTEXT_BYTES=hardware.CONTEXT_BYTES,
                   COMMUNICATOR_BYTES=hardware.COMMUNICATOR_BYTES, LATENCY_S=speeds.overhead_s,
                   LINK_BYTES_PER_S=node.pcie_bytes_per_s,
                   DEVICE_BYTES_PER_S=speeds.rate("memory"), FLOPS_PER_S=speeds.rate("matmul"),
                   NETWORK_BYTES_PER_S=node.nvlink_bytes_per_s * speeds.rate("link"))
    return {f"NULL_{name}": repr(float(value)) for name, value in figures.items()}


class Phases:
    """The counts of what happens in each phase, an inner one's apart from those around it."""

    def __init__(self):
        self.counts, self.stack, self.mark = {}, ["startup"], NULL.counts()

    def settle(self):
        now, phase = NULL.counts(), self.counts.setdefault(self.stack[-1], {})
        for name, n in now.items():
            phase[name] = phase.get(name, 0) + n - self.mark[name]
        self.mark = now

    @contextmanager
    def phase(self, name):
        self.settle()
        self.stack.append(name)
        try:
            yield
        finally:
            self.settle()
            self.stack.pop()

    def of(self, where, name, phase):
        """Patches where.name: its calls are a phase, inside the training loop."""
        real = getattr(where, name)

        def call(*args, **kwargs):
            with self.phase(phase) if "between" in self.stack or phase == "between" else nullcontext():
                return real(*args, **kwargs)
        return patch.object(where, name, call)


class SparseZeros(TorchDispatchMode):
    """zero_() of 4 GiB and more of host memory writes nothing: the kernel gives zeros at the first touch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.zero_.default and args[0].is_cpu and args[0].nbytes >= 2**32:
            return args[0]
        return func(*args, **kwargs or {})


def sparse_mmap(fileno, length, flags):
    return mmap.mmap(fileno, length, flags=flags | 0x4000)  # Linux's MAP_NORESERVE; Python 3.13 has its name


def launched_alone(check):
    """The check of what is held twice, without its verdict: what nothing has computed differs."""
    def call(*args):
        with suppress(BadState):
            check(*args)
    return call


@contextmanager
def as_modelled(job):
    """The process believes to run on the job's machine."""
    machine = modelled(job.get("gpu", GPU), job.get("host_bytes"), **job.get("figures", {}))
    os.environ.update({k: v for k, v in environment(machine).items() if k not in os.environ})
    real = hardware.machine

    def with_figures(gpu, node=None, ranks=1, **figures):
        return real(gpu, node, ranks, **figures | (job.get("figures", {}) if gpu != "here" else {}))
    free = int(job.get("host_bytes", machine.node.host_memory_bytes))
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(hardware, "machine", with_figures))
        enter(patch.object(slab, "available", lambda: free))
        enter(patch("memo.run.prepare.available", lambda: free))
        enter(patch.object(Optimizer, "check_copies", launched_alone(Optimizer.check_copies)))
        enter(patch("memo.checkpoint.checkpoint.is_finite", lambda tensor: True))
        if job.get("sparse"):
            enter(patch.object(slab, "mmap", SimpleNamespace(**vars(mmap) | dict(mmap=sparse_mmap))))
            enter(SparseZeros())
        if not job.get("saves", True):
            enter(patch.object(Saver, "save", lambda *args: None))
        enter(watching(machine.speeds))
        yield machine


def run(argv, job):
    """The report of train.py with these arguments."""
    report, phases = dict(exit=0, error=None), Phases()

    def trained(run, stop, real=train.train):
        for name, decided in dict(alphas=run.decision.swap_plan,
                                  estimated_alphas=run.expected and run.expected.plan).items():
            report[name] = decided and decided.alphas
        return real(run, stop)
    with as_modelled(job), patch.object(train, "train", trained), ExitStack() as stack:
        for where, name, phase in PHASES:
            stack.enter_context(phases.of(where, name, phase))
        start = time.perf_counter()
        try:
            report["exit"] = train.main(argv)
        except Exception as e:
            report["exit"], report["error"] = 1, last_line(e)
            if report["error"] is None:
                raise
        phases.settle()
        report |= dict(counts=phases.counts, races=NULL.races(), peak_bytes=NULL.memory()[1],
                       host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                       seconds=time.perf_counter() - start)
    return report


def main(path, *argv):
    """Writes the report of this rank to `path`, a rank's number behind it if there are several."""
    report = run(list(argv), json.loads(os.environ.get("NULL_JOB", "{}")))
    rank = os.environ.get("RANK")
    Path(path if rank is None else f"{path}.{rank}").write_text(json.dumps(report, indent=1))
    return report["exit"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
