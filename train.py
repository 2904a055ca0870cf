"""Trains a GPT: python train.py [config/x.py] [--key=value ...]
on several GPUs: torchrun --nproc_per_node=8 train.py [config/x.py] [--key=value ...]
--force starts a run that the estimate (python -m memo.estimate) says cannot fit."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save: no traceback

import contextlib
import sys

from memo import command
from memo.config import degrees, help_text, load_config
from memo.ending import guard_console
from memo.errors import CheckpointError, ConfigError, reason, warn
from memo.manifest import Damaged, latest


def config_of(argv, passed_over=()):
    """The Config of a command line; --force is train.py's own. --help ends the process."""
    if "--help" in argv or "-h" in argv:
        command.end_with_reader()
        print(f"{__doc__}\n\n{help_text()}")
        raise SystemExit
    return load_config([arg for arg in argv if arg != "--force"], passed_over)


def answer(argv):
    """What can be said before torch is imported."""
    with contextlib.suppress(Damaged):  # setup() passes the damaged checkpoint over
        config_of(argv)


if __name__ == "__main__":
    guard_console()
    command.answer_early(answer)

import math
import os
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import torch

from memo import checkpoint, convert, memory
from memo.attention import resolve_attention
from memo.batch import open_dataset, to_device
from memo.device import device_name, device_peak_bytes, pick_device, set_deterministic
from memo.ending import Beside, Interrupted, StepGivenUp, StopSignal, handling, interrupt
from memo.estimate.budget import traced_arena
from memo.estimate.expected import OutOfMemory, expect, naming_region
from memo.estimate.hardware import peak_flops_per_s
from memo.metrics import ConsoleLogger, JsonlLogger, StepStats, WandbLogger, mfu, tgs
from memo.ops import resolve_ops
from memo.optim import Optimizer
from memo.out_dir import holds, lock, see
from memo.parallel.cp import local_token_ranges
from memo.parallel.mesh import Agreed, connected, launched, open_mesh, place, same_everywhere, together
from memo.report import describe, draw_loss, draw_step, finish, furnish, go_on_with, save_plan
from memo.swap.streams import stall_s
from memo.tokens import load_tokenizer
from model import GPT, initial_weights
from trace_step import trace_step

MOST_FAILED_SAVES = 5  # in a row: a run whose work cannot be saved stops


class RunFailed(RuntimeError):
    """An error of this rank while it trains. One line."""


class TrainingError(RunFailed):
    """A run that cannot go on, on all ranks alike."""


class NotFinite(TrainingError):
    """The loss is not finite. The state is not worth to be saved."""


def learning_rate(cfg, it):
    """Linear warmup, then a cosine from learning_rate down to min_lr at decay_iters."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = min(1.0, (it - cfg.warmup_iters) / max(1, cfg.decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


def restarted(argv, host, launches):
    """Whether torchrun starts this run again after a failure, and there is a checkpoint of it to go on from."""
    ours = False  # rank 0 looks
    if host.rank == 0 and any(launch.restarts for launch in launches):
        with contextlib.suppress(ConfigError, OSError):  # for check() to tell
            cfg = config_of(argv)
            held_by = (Path(cfg.out_dir) / ".lock").read_text().splitlines()
            ours = (cfg.init_from != "resume" and latest(cfg.out_dir) is not None
                    and any(launch.id in held_by for launch in launches))
    return host.objects(ours)[0]


def check_tokenizer(data, folder, whose):
    """Errors: the data was made with another tokenizer than the one that lies in `folder` beside the weights."""
    mine, theirs = data.folder / "tokenizer.json", Path(folder) / "tokenizer.json"
    if mine.exists() and theirs.exists() and load_tokenizer(mine).to_str() != load_tokenizer(theirs).to_str():
        raise ConfigError(f"dataset={data.folder} was made with another tokenizer than {whose}; prepare it again with "
                          f"data/text/prepare.py --tokenizer={theirs}")


def arena_here(cfg, machine):
    """budget.traced_arena in this process."""
    return traced_arena(cfg, machine, lambda keys: trace_step(replace(cfg, attention=keys["attention"]), keys["device"],
                                                              keys["threads"], keys["multiprocessors"]))


def check(argv, launch, passed_over=()):
    """What can be wrong before the device is touched, and needs no other rank -> what was found on the way. Errors: Damaged:
    the checkpoint to resume from, the newest that is not `passed_over`."""
    force = "--force" in argv
    cfg = config_of(argv, passed_over)
    degrees(cfg, launch.world)
    data = open_dataset(cfg.dataset, cfg.block_size)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or data.vocab_size)
    if cfg.vocab_size < data.vocab_size:
        raise ConfigError(f"vocab_size={cfg.vocab_size} must be >= {data.vocab_size}, the vocabulary of "
                          f"dataset={cfg.dataset}; leave it out, or prepare the text with the tokenizer of the weights")
    out = Path(cfg.out_dir)
    ckpt = checkpoint.load(out, launch.rank, launch.world, passed_over) if cfg.init_from == "resume" else None
    if ckpt is None and latest(out):
        raise ConfigError(f"out_dir={out} already holds a checkpoint, which init_from={cfg.init_from} would overwrite; "
                          "go on with --init_from=resume or choose another --out_dir")
    hf = cfg.init_from.removeprefix("hf:") if cfg.init_from.startswith("hf:") else None
    if ckpt is not None or hf:
        check_tokenizer(data, out if ckpt is not None else hf, f"the weights of init_from={cfg.init_from}")
    set_deterministic(cfg.deterministic)
    device, dtype = pick_device(cfg, launch.local_rank)
    attention = resolve_attention(cfg.attention, device, dtype, cfg.n_embd // cfg.n_head)
    limit = memory.host_limit(cfg, launch)
    memory.check(cfg, device, dtype, limit)
    ops, _ = resolve_ops(cfg.ops, device, launch=False)
    resolved = replace(cfg, attention=attention.name, ops=ops.name)  # so that the estimate has the kernels of the run
    expected = expect(resolved, device, launch, arena_here, force) if launch.rank == 0 else None
    return SimpleNamespace(cfg=cfg, data=data, out=out, ckpt=ckpt, hf=hf, device=device, dtype=dtype, limit=limit,
                           expected=expected)


def checked(argv, launch, host):
    """What check() found. A checkpoint that is damaged, whichever rank saw it, is passed over for the one before it."""
    passed_over = {}

    def found():
        try:
            return check(argv, launch, passed_over), None
        except Damaged as e:
            return None, (e.folder, str(e))
    while True:
        run, damaged = together(host, found)
        damaged = [d for d in host.objects(damaged) if d]
        if not damaged:
            run.passed_over = passed_over
            return run
        passed_over |= dict(damaged[:1])


def set_aside(passed_over):
    """Renames the damaged checkpoints, so that the run can write others in their place."""
    for folder, why in passed_over.items():
        warn(f"checkpoint passed over: {why}")
        checkpoint.pass_over(folder)


def setup(argv, launch, host):
    """Everything a run needs. `host`: the Axis of all ranks."""
    launches = host.objects(launch)
    if restarted(argv, host, launches):
        argv = [*argv, "--init_from=resume"]
    run = checked(argv, launch, host)
    cfg, device, dtype, ckpt = run.cfg, run.device, run.dtype, run.ckpt
    here = {"torch": torch.__version__, "its device": device.type, "its dtype": str(dtype),
            "checkpoint": ckpt and ckpt.iter}
    same_everywhere(host, asdict(cfg) | here, "start all ranks with the same command, on hosts that are alike")
    if host.size > 1:  # it reads much of the data
        same_everywhere(host, {f"hash of dataset {cfg.dataset}": run.data.fingerprint()}, "give all hosts the same data")
    run.who = host.objects("\n".join([*sorted({launch.id for launch in launches}), uuid4().hex]))[0]
    run.one_host = launch.local_world == launch.world
    run.lock = together(host, lambda: lock(run.out, run.who) if launch.rank == 0 else None)
    together(host, see, run.out, run.who)
    together(host, lambda: set_aside(run.passed_over) if launch.rank == 0 else None)
    if launch.threads:
        torch.set_num_threads(launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(cfg.seed)
    run.mesh = open_mesh(host, cfg.cp, cfg.tp, device, cfg.context_parallel)
    run.ranges = local_token_ranges(cfg.block_size, run.mesh.cp, cfg.context_parallel)
    run.expected = host.objects(run.expected)[0]
    with naming_region(run.expected, device, "params"):
        run.model = model = GPT(cfg, device, dtype, mesh=run.mesh)
    with naming_region(run.expected, device, "optimizer"):
        run.optimizer = Optimizer(model, cfg)
        if ckpt is not None:
            together(host, checkpoint.restore, ckpt, model, run.optimizer)
            run.optimizer.publish()
        elif run.hf:
            together(host, lambda: run.optimizer.load(convert.hf_tensors(run.hf, cfg)))
        else:
            run.optimizer.load(initial_weights(cfg, cfg.seed, device))
    run.first = run.done = ckpt.iter if ckpt is not None else 0
    with naming_region(run.expected, device, "rounding_buffers"):
        run.decision = memory.reserve_activations(cfg, model, run.limit)
    with naming_region(run.expected, device, "transient"):
        memory.plan_memory(cfg, model)
    run.lines = memory.where_it_lives(cfg, run.decision, model, run.optimizer)
    run.saver = checkpoint.Saver(run.out, host.another(), cfg.pin_memory, cfg.keep_checkpoints, ckpt and ckpt.iter)
    run.failed_saves, run.beside, run.drawn = 0, Beside(), set()
    run.peak = peak_flops_per_s(device_name(device)) if dtype == torch.bfloat16 else None
    run.speaks = launch.rank == 0  # prints, logs and draws
    run.loggers = together(host, open_loggers, run) if run.speaks else together(host, list)
    return run


def open_loggers(run):
    """The loggers of a run, in a furnished out_dir. Errors: ConfigError: out_dir cannot be written."""
    cfg = run.cfg
    try:
        furnish(run, run.out)
        loggers = [JsonlLogger(run.out / "metrics.jsonl", run.first)]
    except OSError as e:
        raise ConfigError(f"out_dir={run.out} cannot be written ({reason(e)}); free some space there or choose another "
                          "--out_dir") from None
    return loggers + [ConsoleLogger(cfg.max_iters, run.first)] + ([WandbLogger(cfg, asdict(cfg))] if cfg.wandb_log else [])


def batch(run, *which):
    """(tokens, targets) of this rank, on its device; `which`: split, step, micro batch."""
    cfg = run.cfg
    tokens_targets = run.data.batch(*which, cfg.batch_size, cfg.block_size, cfg.seed, run.ranges)
    return [to_device(t, run.device, cfg.pin_memory) for t in tokens_targets]


def evaluate(run):
    """Mean loss over eval_iters batches of the validation split, the same ones each time."""
    cfg, mesh = run.cfg, run.mesh
    total = torch.zeros((), device=run.device)
    for i in range(mesh.dp.rank, cfg.eval_iters, mesh.dp.size):
        total += run.model.forward(*batch(run, "val", 0, i))
    return mesh.data.sum(total).item() / (cfg.eval_iters * cfg.cp)


def forward_backward(run, it):
    """The gradients of step `it`, over all its micro batches, on their way to the ranks that need them -> loss tensor."""
    cfg, mesh = run.cfg, run.mesh
    part, loss = 1 / (cfg.gradient_accumulation_steps * cfg.cp), torch.zeros((), device=run.device)
    micros = range(mesh.dp.rank, cfg.gradient_accumulation_steps, mesh.dp.size)
    batches = [batch(run, "train", it, micro) for micro in micros]  # all of them first: the device need not wait later
    for i, tokens_targets in enumerate(batches):
        loss += run.model.forward(*tokens_targets, scale=part) * part
        run.model.backward(run.optimizer.reduce if i == len(batches) - 1 else lambda bucket: None)
    return mesh.data.sum(loss)


def save(run):
    """Starts to save a checkpoint of the steps done, and waits for the last one. That the one before failed is a warning:
    this one may succeed. Errors: TrainingError, after too many failures."""
    try:
        run.saver.wait()
        run.failed_saves = 0
    except CheckpointError as e:
        run.failed_saves += 1
        if run.failed_saves == MOST_FAILED_SAVES:
            raise TrainingError(f"{run.failed_saves} saves in a row failed: {e}") from None
        if run.speaks:
            print(f"\nwarning: {e}; training goes on", file=sys.stderr)
    run.saver.save(run.optimizer.pieces(saved=True), run.cfg, run.done)


def save_last(run):
    """Saves the steps done, in another folder where out_dir cannot take them, and waits. Errors: TrainingError, on all
    ranks: it says where they are saved, if they are."""
    host, speaks = run.mesh.host, run.speaks

    def write(saver):
        saver.save(run.optimizer.pieces(saved=True), run.cfg, run.done)
        with command.progress(lambda: f"writing {saver.folder}") if speaks else contextlib.nullcontext():
            together(host, saver.wait)
    with contextlib.suppress(CheckpointError):  # of the save before
        run.saver.wait()
    try:
        write(run.saver)
        return
    except ConfigError as e:
        error = str(e)
    folder = None
    with contextlib.suppress(OSError):
        if speaks and run.one_host:
            folder = Path(tempfile.mkdtemp(prefix="memo-saved-"))
    folder = host.objects(folder)[0]
    if folder is None:
        raise TrainingError(error)
    try:
        write(checkpoint.Saver(folder, run.saver.group, run.cfg.pin_memory))
    except ConfigError as e:
        if speaks:
            shutil.rmtree(folder, ignore_errors=True)
        raise TrainingError(f"{error}; nor could it be saved elsewhere: {e}") from None
    if speaks:
        run.beside("config.json", furnish, run, folder)
    raise TrainingError(f"{error}; {run.done} steps are saved in {folder} instead; go on with: {go_on_with(run, folder)}")


def keep_folder(run):
    """Makes out_dir again where somebody removed it in mid-run. The next checkpoint is written there."""
    if not holds(run.lock, run.out):
        run.lock = lock(run.out, run.who)
        furnish(run, run.out)
        print(f"\nwarning: out_dir={run.out} was removed; it is made again, without what it held", file=sys.stderr)


def not_finite(run, it, loss, grad_norm):
    run.saver.join()  # the one under way is good
    cfg, saved = run.cfg, latest(run.out)
    good = f"the last good checkpoint is {saved}, before step {saved.name}" if saved else "there is no good checkpoint yet"
    offsets = [o for micro in range(cfg.gradient_accumulation_steps)
               for o in run.data.offsets("train", it, micro, cfg.batch_size, cfg.block_size, cfg.seed)]
    return NotFinite(f"loss={loss} grad_norm={grad_norm} at iter={it} (sequences at tokens {offsets} of the train "
                     f"split) must be finite; nothing was saved over: {good}; "
                     "try a lower --learning_rate or more --warmup_iters")


def train(run, stop):
    """The loop, from step run.first on. run.done: the number of steps whose result weights and optimizer hold."""
    cfg, mesh, swap, arena = run.cfg, run.mesh, run.model.swap, run.model.arena
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    for it in range(run.first, cfg.max_iters):
        run.step = it
        last = it == cfg.max_iters - 1
        with stop.interruptible():
            val_loss = evaluate(run) if cfg.eval_interval and (it % cfg.eval_interval == 0 or last) else None
            swap.streams.timeline.clear()
            mesh.take_sent_bytes()
            start, lr = time.perf_counter(), learning_rate(cfg, it)
            loss = forward_backward(run, it)
            grad_norm = arena.run("clip", run.optimizer.clip, cfg.grad_clip)
            loss, grad_norm = torch.stack((loss, grad_norm)).tolist()  # the one place where the host waits for the device
        if not math.isfinite(loss + grad_norm):
            raise not_finite(run, it, loss, grad_norm)
        spans = swap.streams.timeline.take()  # weights still go up from the host afterwards: no picture has them
        run.saver.copied()  # the last checkpoint is of the states that the optimizer is about to change
        run.done = None  # neither the states before nor those after: no moment to save
        arena.run("optimizer", run.optimizer.step, lr)
        run.done = it + 1
        step_s = time.perf_counter() - start
        step_s, stalled_s, stopped = mesh.host.max(step_s, stall_s(spans), stop.number)  # of the slowest rank
        rate = tgs(tokens, mesh.host.size, step_s)
        stats = StepStats(it, loss, lr, grad_norm, step_s, tokens, rate, mfu(cfg, rate, run.peak), alpha=run.decision.alpha,
                          offload_bytes=swap.host_bytes * (cfg.gradient_accumulation_steps // mesh.dp.size),
                          stall_s=stalled_s, transient_peak_bytes=arena.stats(reset_peak=True).peak_bytes,
                          device_peak_bytes=device_peak_bytes(run.device), host_bytes=swap.host_bytes,
                          sent_bytes=mesh.take_sent_bytes(), val_loss=val_loss)
        tell(run, stats, spans, arena.settle())
        if stopped:  # what all agreed on: a signal that came meanwhile is another step's
            stop.number = int(stopped)
            return
        if cfg.save_interval and run.done % cfg.save_interval == 0 and not last:
            save(run)


def tell(run, stats, spans, replanned):
    """Everything that is told of a step. No failure of it ends the run."""
    cfg, it = run.cfg, stats.iter
    if not run.speaks:
        return
    run.beside("out_dir", keep_folder, run)
    if replanned:
        run.beside("plan.json", save_plan, run, run.out)
    if it == min(run.first + 2, cfg.max_iters - 1):
        draw_step(run, spans, it)
    if it % cfg.log_interval == 0 or stats.val_loss is not None or it == cfg.max_iters - 1:
        for logger in run.loggers:
            run.beside(type(logger).__name__, logger.log, stats)
    if stats.val_loss is not None and it > run.first:  # of one step there is nothing to see
        draw_loss(run)


def main(argv=None):
    """Trains as `argv` and torchrun say; returns the exit code: 0, or 128 + the signal that stopped the run. Errors:
    ConfigError for the user's mistakes, TrainingError for a run that failed."""
    argv = sys.argv[1:] if argv is None else argv
    launch = launched()
    try:
        with handling(interrupt), connected(launch) as host:
            with leaving(host):
                run = setup(argv, launch, host)
            with (contextlib.closing(run.mesh), contextlib.closing(run.model.arena), contextlib.closing(run.model),
                  contextlib.closing(run.saver), leaving(host, run)):
                return go(run)
    except Interrupted as e:
        if launch.rank == 0:
            print("interrupted; what is saved is whole", file=sys.stderr, flush=True)
        if launch.world > 1:
            os._exit(128 + e.number)
        return 128 + e.number


@contextlib.contextmanager
def leaving(host, run=None):
    """A rank of several that fails says so and ends at once; where all fail together rank 0 speaks for them."""
    try:
        yield
    except Exception as e:
        if host.size == 1:
            raise
        common, where = isinstance(e, (Agreed, TrainingError)), place(host.rank) + (f", step {run.step}" if run else "")
        if host.rank == 0 or not common:
            line = last_line(e) or traceback.format_exc()
            print(f"error: {line if common else f'{where}: {line}'}", file=sys.stderr, flush=True)
        if common and host.rank > 0:
            time.sleep(0.5)  # torchrun ends all ranks when the first one is gone
        sys.stdout.flush()
        os._exit(2 if run is None and isinstance(e, (ConfigError, OSError)) else 1)


def go(run):
    """From the startup's lines to the last one; returns main's exit code."""
    cfg, run.step, host = run.cfg, run.first, run.mesh.host
    stop = StopSignal(quiet=not run.speaks, alone=host.size == 1)
    try:
        if run.speaks:
            describe(run)
        if run.first >= cfg.max_iters:
            if run.speaks:
                print(f"max_iters={cfg.max_iters} steps are done already; raise --max_iters to go on")
            return 0
        with handling(stop), naming_region(run.expected, run.device, "transient"):
            try:
                train(run, stop)
            except StepGivenUp:
                pass
            except Exception as e:
                save_after(run, e)
                if isinstance(e, (ConfigError, OSError)):  # too late to be a user's mistake
                    raise RunFailed(str(e)) from e
                raise
            if run.done > run.first:
                save_last(run)
            stop.number = int(*host.max(stop.number))  # it may have come to some ranks while they saved
    finally:
        for logger in run.loggers:
            run.beside(type(logger).__name__, logger.close)
    if run.speaks:
        if stop.number or not cfg.eval_interval:  # otherwise the last step was evaluated
            draw_loss(run)
        run.beside("last lines", finish, run, stop.number)
    return 128 + stop.number if stop.number else 0


def save_after(run, e):
    """Saves the steps done before the run ends with the exception `e`, where the state is good and all ranks are here."""
    together_here = run.mesh.host.size == 1 or isinstance(e, TrainingError)
    if run.done in (None, run.first) or isinstance(e, NotFinite) or not together_here:
        return
    try:
        save_last(run)
        line = f"{run.done} steps are saved in {run.out}; go on with: {go_on_with(run, run.out)}"
    except Exception as again:  # a device that is lost, say
        line = f"after {run.done} steps: {reason(again)}"
    if run.speaks:
        print(line, file=sys.stderr)


def last_line(e):
    """What is said of the exception that ends a run; None where it should be shown whole."""
    if isinstance(e, (ConfigError, RunFailed, OutOfMemory, OSError)):
        return str(e)
    if isinstance(e, RuntimeError):
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        if any(word in text for word in ("gloo", "Gloo", "NCCL", "TCPStore")):
            return f"lost another rank ({text}); the last checkpoint is whole; the other ranks' errors say why"
    return None


def run_to_the_end():
    """The exit code of main()."""
    try:
        return command.run(main)
    except Exception as e:
        print(f"error: {line}" if (line := last_line(e)) else traceback.format_exc(), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run_to_the_end())
