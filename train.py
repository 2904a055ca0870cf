"""Trains a GPT: python train.py [config/x.py] [--key=value ...]
on several GPUs: torchrun --nproc_per_node=8 train.py [config/x.py] [--key=value ...]
--force starts a run that the estimate (python -m memo.estimate) says cannot fit."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports prints no traceback

import contextlib
import sys

from memo.checkpoint.manifest import Damaged
from memo.config.config import Config
from memo.run.load_config import keys_help, read_run
from memo.system import command


def read_argv(argv: list[str]) -> None:
    """Answers what needs no torch: --help, and a key that is wrong."""
    if {"--help", "-h"} & set(argv):
        command.end_with_reader()
        print(f"{__doc__}\n\n{keys_help()}")
        raise SystemExit
    with contextlib.suppress(Damaged):  # prepare_run() passes the damaged checkpoint over
        read_run(argv)


if __name__ == "__main__":  # a typo and --help are answered at once: to import torch takes seconds
    command.guard_console()
    command.answer_early(read_argv, trains=True)

import math
import time

import torch

from memo.checkpoint import checkpoint
from memo.config.formulas import mfu, model_flops, tgs
from memo.huggingface.weights import HfWeights
from memo.layer.tiles import Batch
from memo.parallel.mesh import open_mesh
from memo.run import reserve
from memo.run.ending import complete, not_finite, save
from memo.run.loggers import StepStats
from memo.run.prepare import open_run, prepare_run
from memo.run.report import report_step
from memo.run.reserve import naming_region
from memo.run.state import Run
from memo.schedule.spans import busy_s, length_s, stall_s
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis
from memo.system.device import device_peak_bytes
from memo.system.launch import Launch, connected, rank_errors, read_launch, together
from model import GPT, initial_weights

# --- before the first step ---

def set_up(argv: list[str], launch: Launch, host: Axis) -> Run:
    """Makes a run that is ready for its first step. `host`: the Axis of all ranks. Errors: ConfigError."""
    # all that can be wrong is found before a device is touched; all ranks agree on it
    decided = prepare_run(argv, launch, host)
    cfg, device = decided.cfg, decided.device
    # ranks that share a sequence (cp) or a layer (tp), or hold the same parameters (replicas); stages (pp)
    mesh = open_mesh(host, cfg.cp, cfg.tp, device, cfg.context_parallel, cfg.metp, cfg.pp, cfg.ties_stages,
                     cfg.layers_come, cfg.documents)

    with naming_region(decided.expected, device, "params"):  # names it, should the device's memory end there
        model = Model(GPT, cfg, device, decided.dtype, mesh=mesh)
    with naming_region(decided.expected, device, "optimizer"):
        optimizer = Optimizer(model, cfg)
        # the weights go to the optimizer, which holds them in fp32 and gives the model rounded copies
        if decided.ckpt is not None:
            together(host, checkpoint.restore, decided.ckpt, model, optimizer)
            optimizer.publish()
        elif hf := decided.hf:
            together(host, lambda: optimizer.load(HfWeights(hf, cfg, mesh.weights.rank, mesh.weights.size)))
        else:
            optimizer.load(initial_weights(cfg, cfg.seed, device))

    # measures a layer and both copies, sets alpha, takes buffers and slab: model.swap (memory/buffers.py)
    with naming_region(decided.expected, device, "rounding_buffers"):
        decision = reserve.reserve_activations(cfg, model, decided.host_limit_bytes, machine=decided.machine,
                                               data=decided.data)
    # rehearses a layer of each kind, and gives temporary tensors addresses
    with naming_region(decided.expected, device, "transient"):
        reserve.plan_memory(cfg, model)
    return open_run(decided, mesh, model, optimizer, decision)


# --- a step ---

def learning_rate(cfg: Config, it: int) -> float:
    """Warms up linearly, then follows a cosine from learning_rate down to min_lr at decay_iters."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = min(1.0, (it - cfg.warmup_iters) / max(1, cfg.decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


def batch(run: Run, split: str, step: int, micro_step: int) -> Batch:
    """Draws tokens and targets of this rank's part of each sequence, (B, T) each, on its device."""
    # drawn by (seed, step, micro step): a resumed run goes on with the very batches it would have had
    return run.model.on_device(run.data.draw(run.cfg, split, step, micro_step, run.mesh.dp.size, run.order))


def evaluate(run: Run) -> float:
    """Computes the mean loss over eval_iters batches of the validation split, the same ones each time."""
    cfg, mesh = run.cfg, run.mesh
    learned = run.data.share(cfg, "val", 0, cfg.eval_iters).learned if cfg.documents else 0
    total = torch.zeros((), device=run.device)
    for first in range(0, cfg.eval_iters, mesh.dp.size):  # the dp ranks deal the batches out
        i = first + mesh.dp.rank
        if i < cfg.eval_iters:
            total += run.model.forward(*batch(run, "val", 0, i), learned=learned)
        elif cfg.layers_come:  # to all dp ranks at once: who has no batch left goes along
            run.model.forward(*batch(run, "val", 0, first), learned=learned)
    # each of the cp ranks has the mean over its own tokens; with documents its part of the mean of all
    return mesh.mean_loss(total).item() / (1 if learned else cfg.eval_iters * cfg.cp)


def forward_backward(run: Run, it: int) -> torch.Tensor:
    """Computes the loss of step `it`, with documents the mean over its learned tokens, whichever rank has
    them. Its gradients are on their way to the ranks that need them."""
    cfg, mesh = run.cfg, run.mesh
    # micro_batches: all dp ranks'; part: the weight of one of them, on one cp rank, in the mean of all tokens
    micro_batches = cfg.micro_batches(mesh.dp.size)
    learned = run.data.share(cfg, "train", it, micro_batches).learned if cfg.documents else 0
    part = 1.0 if cfg.documents else 1 / (micro_batches * cfg.cp)
    loss = torch.zeros((), device=run.device)
    # all batches first: the device need not wait for one later
    batches = [batch(run, "train", it, i) for i in range(mesh.dp.rank, micro_batches, mesh.dp.size)]
    for i, one in enumerate(batches):
        loss += run.model.forward(*one, scale=part, learned=learned, following=batches[i + 1:i + 2]) * part
        # the last backward sends each bucket of gradients as soon as it is complete
        run.model.backward(last=i == len(batches) - 1)
    return mesh.mean_loss(loss)


# --- the loop ---

def train(run: Run, stop: command.StopSignal) -> None:
    """Takes all steps from run.first on. run.done counts the steps that are done."""
    cfg, mesh, swap, arena = run.cfg, run.mesh, run.model.swap, run.model.arena
    for it in range(run.first, cfg.max_iters):
        run.step, last = it, it == cfg.max_iters - 1
        # several ranks: all evaluate, step and save at the same counts, or one would wait for ever
        with stop.interruptible():  # weights and optimizer do not change: a second signal gives the step up
            evaluates = cfg.eval_interval and (it % cfg.eval_interval == 0 or last)
            val_loss = evaluate(run) if evaluates else None
            if evaluates:  # the step begins: neither its time nor its figures have the evaluation in them
                swap.streams.timeline.clear()
            mesh.take_sent_bytes()
            start, lr = time.perf_counter(), learning_rate(cfg, it)
            loss = forward_backward(run, it)
            # clip and optimizer are segments of the memory plan too: their temporary tensors have addresses
            grad_norm = arena.run("clip", run.optimizer.clip, cfg.grad_clip)
            # only here the host waits for the device; both tensors are free before the optimizer has its own
            loss, grad_norm = torch.stack((loss, grad_norm)).tolist()
        if not math.isfinite(loss + grad_norm):
            raise not_finite(run, loss, grad_norm)  # before the optimizer takes it into the weights
        # all of this step's; with an optimizer on the host also the last one's, which ran beside the forward
        spans = swap.streams.timeline.take()
        run.saver.copied()  # the save under way still reads the states that the optimizer is about to change
        # an error in here leaves states of neither step; a host thread's steps are awaited by whoever saves
        run.whole = False
        arena.run("optimizer", run.optimizer.step, lr)
        run.done, run.whole = it + 1, True

        # a step takes the time of the slowest rank; a signal to one rank stops all ranks at the same step
        figures = time.perf_counter() - start, stall_s(spans), stop.number, length_s(spans), busy_s(spans)
        every = mesh.host.gather(torch.tensor(figures, dtype=torch.float64))
        step_s, stalled_s, stopped, longest_s, _ = every.amax(0).tolist()
        run.slowest_s = max(run.slowest_s, step_s)
        bubble_s = longest_s - every[:, -1].mean().item() if cfg.pp > 1 else None
        share = run.data.share(cfg, "train", it, cfg.micro_batches(mesh.dp.size))
        rate = tgs(share.tokens, mesh.host.size, step_s)
        stats = StepStats(it, loss, lr, grad_norm, step_s, share.tokens, rate,
                          mfu(cfg, rate, run.peak, model_flops(cfg, *share) / share.tokens),
                          run.decision.alpha, swap.offload_bytes * run.model.micro_batches, stalled_s,
                          bubble_s=bubble_s, transient_peak_bytes=arena.stats(reset_peak=True).peak_bytes,
                          device_peak_bytes=device_peak_bytes(run.device), host_bytes=swap.host_bytes,
                          sent_bytes=mesh.take_sent_bytes(), val_loss=val_loss,
                          target_tokens=share.learned if cfg.documents else None)
        # the arena plans segments without a plan: after the first step clip and optimizer. Others keep theirs
        report_step(run, stats, spans, arena.settle())
        if stopped:  # by every rank alike: complete() saves what is done
            stop.number = int(stopped)  # a signal that came after the ranks agreed is for another step
            return
        if cfg.save_interval and run.done % cfg.save_interval == 0 and not last:
            save(run)  # the steps after the last multiple are saved by complete()


def main(argv: list[str] | None = None) -> int:
    """Trains as `argv` and torchrun say -> exit code: 0, or 128 + the signal that stopped the run. Errors:
    ConfigError, TrainingError; Interrupted by a signal while no step is under way."""
    argv = sys.argv[1:] if argv is None else argv
    launch = read_launch()
    with command.interruptible(), connected(launch) as host:
        with rank_errors(host):
            run = set_up(argv, launch, host)
        with contextlib.closing(run), rank_errors(host, run.where):
            return complete(run, train)  # first lines, train(), last save, last lines


if __name__ == "__main__":
    sys.exit(command.run(main))
