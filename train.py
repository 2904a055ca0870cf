"""Trains a GPT: python train.py [config/x.py] [--key=value ...]
on several GPUs: torchrun --nproc_per_node=8 train.py [config/x.py] [--key=value ...]
--force starts a run that the estimate (python -m memo.estimate) says cannot fit."""

import contextlib
import math
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from uuid import uuid4

import torch

from memo import checkpoint, convert, placement
from memo.attention import resolve_attention
from memo.batch import open_dataset, to_device
from memo.budget import traced_arena
from memo.command import end_with_reader
from memo.config import degrees, help_text, load_config, save_config
from memo.cp import held
from memo.device import device_name, device_peak_bytes, pick_device, set_deterministic
from memo.errors import ConfigError
from memo.expected import OutOfMemory, expect, growing
from memo.files import save_json
from memo.hardware import peak_flops_per_s
from memo.mesh import Agreed, connected, launched, open_mesh, place, same_everywhere, together
from memo.metrics import (
    ConsoleLogger,
    JsonlLogger,
    StepStats,
    WandbLogger,
    flops_per_sample,
    mfu,
    parameters,
    read_metrics,
    tgs,
)
from memo.ops import resolve_ops
from memo.optim import Optimizer
from memo.out_dir import lock, see
from memo.plots import loss_curve, memory_plan, timeline
from memo.streams import stall_s
from memo.tokens import load_tokenizer
from model import GPT, initial_weights
from trace_step import trace_step


class TrainingError(RuntimeError):
    """A run that cannot go on, on any rank. One line."""


def learning_rate(cfg, it):
    """Linear warmup, then a cosine from learning_rate down to min_lr at decay_iters."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = min(1.0, (it - cfg.warmup_iters) / max(1, cfg.decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


class StopSignal:
    """SIGINT and SIGTERM only take a note, so that the step is finished and saved; a second one stops at once."""

    def __init__(self, quiet):
        self.number, self.quiet = 0, quiet

    def __enter__(self):
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame):
        self.number = number
        if not self.quiet:
            name = signal.Signals(number).name
            print(f"\n{name}: finishing this step, then saving (again to stop at once)", file=sys.stderr)
        for s in self.before:
            signal.signal(s, signal.SIG_DFL)

    def __exit__(self, *exc):
        for s, handler in self.before.items():
            signal.signal(s, handler)


def config_of(argv):
    """The Config of a command line; --force is train.py's own."""
    return load_config([arg for arg in argv if arg != "--force"])


def restarted(argv, host, launches):
    """Whether torchrun starts this run again after a failure, and there is a checkpoint of it to go on from."""
    ours = False  # rank 0 looks
    if host.rank == 0 and any(launch.restarts for launch in launches):
        with contextlib.suppress(ConfigError, OSError):  # for check() to tell
            cfg = config_of(argv)
            held_by = (Path(cfg.out_dir) / ".lock").read_text().splitlines()
            ours = (cfg.init_from != "resume" and checkpoint.latest(cfg.out_dir) is not None
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


def check(argv, launch):
    """What can be wrong before the device is touched, and needs no other rank -> what was found on the way."""
    force = "--force" in argv
    cfg = config_of(argv)
    degrees(cfg, launch.world)
    data = open_dataset(cfg.dataset, cfg.block_size)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or data.vocab_size)
    if cfg.vocab_size < data.vocab_size:
        raise ConfigError(f"vocab_size={cfg.vocab_size} must be >= {data.vocab_size}, the vocabulary of "
                          f"dataset={cfg.dataset}; leave it out, or prepare the text with the tokenizer of the weights")
    out = Path(cfg.out_dir)
    ckpt = checkpoint.load(out, launch.rank, launch.world) if cfg.init_from == "resume" else None
    if ckpt is None and checkpoint.latest(out):
        raise ConfigError(f"out_dir={out} already holds a checkpoint, which init_from={cfg.init_from} would overwrite; "
                          "go on with --init_from=resume or choose another --out_dir")
    hf = cfg.init_from.removeprefix("hf:") if cfg.init_from.startswith("hf:") else None
    if ckpt is not None or hf:
        check_tokenizer(data, out if ckpt is not None else hf, f"the weights of init_from={cfg.init_from}")
    set_deterministic(cfg.deterministic)
    device, dtype = pick_device(cfg, launch.local_rank)
    attention = resolve_attention(cfg.attention, device, dtype, cfg.n_embd // cfg.n_head)
    limit = placement.host_limit(cfg, launch)
    placement.check(cfg, device, dtype, limit)
    ops, _ = resolve_ops(cfg.ops, device, launch=False)
    resolved = replace(cfg, attention=attention.name, ops=ops.name)  # so that the estimate has the kernels of the run
    expected = expect(resolved, device, launch, arena_here, force) if launch.rank == 0 else None
    return SimpleNamespace(cfg=cfg, data=data, out=out, ckpt=ckpt, hf=hf, device=device, dtype=dtype, limit=limit,
                           expected=expected)


def setup(argv, launch, host):
    """Everything a run needs. `host`: the Axis of all ranks."""
    launches = host.objects(launch)
    if restarted(argv, host, launches):
        argv = [*argv, "--init_from=resume"]
    run = together(host, check, argv, launch)
    cfg, device, dtype, ckpt = run.cfg, run.device, run.dtype, run.ckpt
    here = {"torch": torch.__version__, "its device": device.type, "its dtype": str(dtype)}
    same_everywhere(host, asdict(cfg) | here, "start all ranks with the same command, on hosts that are alike")
    if host.size > 1:  # it reads much of the data
        same_everywhere(host, {f"hash of dataset {cfg.dataset}": run.data.fingerprint()}, "give all hosts the same data")
    who = host.objects("\n".join([*sorted({launch.id for launch in launches}), uuid4().hex]))[0]
    run.lock = together(host, lambda: lock(run.out, who) if launch.rank == 0 else None)
    together(host, see, run.out, who)
    if launch.threads:
        torch.set_num_threads(launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(cfg.seed)
    run.mesh = open_mesh(host, cfg.cp, cfg.tp, device, cfg.context_parallel)
    run.ranges = held(cfg.block_size, run.mesh.cp, cfg.context_parallel)
    run.expected = host.objects(run.expected)[0]
    with growing(run.expected, device, "params"):
        run.model = model = GPT(cfg, device, dtype, mesh=run.mesh)
    with growing(run.expected, device, "optimizer"):
        run.optimizer = Optimizer(model, cfg)
        if ckpt is not None:
            together(host, checkpoint.restore, ckpt, model, run.optimizer)
            run.optimizer.publish()
        elif run.hf:
            together(host, lambda: run.optimizer.load(convert.hf_tensors(run.hf, cfg)))
        else:
            run.optimizer.load(initial_weights(cfg, cfg.seed, device))
    run.first = ckpt.iter if ckpt is not None else 0
    with growing(run.expected, device, "rounding_buffers"):
        run.decision = placement.decide(cfg, model, run.limit)
    with growing(run.expected, device, "transient"):
        placement.plan_memory(cfg, model)
    run.lines = placement.where_it_lives(cfg, run.decision, model, run.optimizer)
    run.saver = checkpoint.Saver(run.out, host.another(), cfg.pin_memory)
    run.peak = peak_flops_per_s(device_name(device)) if dtype == torch.bfloat16 else None
    run.speaks = launch.rank == 0  # prints, logs and draws
    if run.speaks:
        if (run.data.folder / "tokenizer.json").exists():
            shutil.copyfile(run.data.folder / "tokenizer.json", run.out / "tokenizer.json")
        save_config(cfg, run.out / "config.json")
        save_plan(run)
    return run


def describe(run):
    """What is about to happen, and what lives where, in a few lines."""
    cfg, m, mesh = run.cfg, run.model, run.mesh
    train_tokens = len(run.data.tokens["train"])
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    print(f"model       L={cfg.n_layer} C={cfg.n_embd} H={cfg.n_head} V={cfg.vocab_size} S={cfg.block_size} "
          f"position={cfg.position}: {parameters(cfg) / 1e6:.1f}M parameters\n"
          f"data        {run.data.folder.name}: {train_tokens:,} tokens for training, {tokens:,} in a step, "
          f"{flops_per_sample(cfg) / cfg.block_size / 1e9:.2f} GFLOPs a token\n"
          f"ranks       {mesh.host.size}: dp={mesh.dp.size} cp={cfg.cp} tp={cfg.tp}; {m.params.numel() / 1e6:.1f}M weights, "
          f"{placement.n_rows(cfg):,} tokens each\n"
          f"device      {device_name(run.device)}, {str(m.dtype).removeprefix('torch.')}, "
          f"peak {f'{run.peak / 1e12:.0f} TFLOP/s' if run.peak else 'n/a'}, attention={m.attention.label}, "
          f"ops={m.ops.name}{f': {m.why_ops}' if m.why_ops and run.device.type == 'cuda' else ''}\n"
          f"{placement.describe(cfg, run.decision, run.lines, run.expected)}\n"
          f"run         steps {run.first} to {cfg.max_iters} in {run.out}")


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


def save(run, it, last=False):
    """Starts to save a checkpoint that goes on with step `it`, and waits for the last one. That the one before failed is a
    warning: this one may succeed."""
    try:
        run.saver.wait()
    except checkpoint.CheckpointError as e:
        if run.speaks:
            print(f"\nwarning: {e}; training goes on", file=sys.stderr)
    run.saver.save(run.optimizer.pieces(saved=True), run.cfg, it)
    if last:
        together(run.mesh.host, run.saver.wait)


def not_finite(run, it, loss, grad_norm):
    run.saver.join()  # the one under way is good
    cfg, saved = run.cfg, checkpoint.latest(run.out)
    good = f"the last good checkpoint is {saved}, before step {saved.name}" if saved else "there is no good checkpoint yet"
    offsets = [o for micro in range(cfg.gradient_accumulation_steps)
               for o in run.data.offsets("train", it, micro, cfg.batch_size, cfg.block_size, cfg.seed)]
    return TrainingError(f"loss={loss} grad_norm={grad_norm} at iter={it} (sequences at tokens {offsets} of the train "
                         f"split) must be finite; nothing was saved over: {good}; "
                         "try a lower --learning_rate or more --warmup_iters")


def train(run, loggers, stop):
    """The loop, from step run.first on; returns the number of steps done in the whole run."""
    cfg, mesh, swap, arena = run.cfg, run.mesh, run.model.swap, run.model.arena
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    for it in range(run.first, cfg.max_iters):
        run.step = it
        last = it == cfg.max_iters - 1
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
        arena.run("optimizer", run.optimizer.step, lr)
        step_s = time.perf_counter() - start
        step_s, stalled_s, stopped = mesh.host.max(step_s, stall_s(spans), stop.number)  # of the slowest rank
        stop.number = int(stopped)  # all stop at once
        rate = tgs(tokens, mesh.host.size, step_s)
        stats = StepStats(it, loss, lr, grad_norm, step_s, tokens, rate, mfu(cfg, rate, run.peak), alpha=run.decision.alpha,
                          offload_bytes=swap.host_bytes * (cfg.gradient_accumulation_steps // mesh.dp.size),
                          stall_s=stalled_s, transient_peak_bytes=arena.stats(reset_peak=True).peak_bytes,
                          device_peak_bytes=device_peak_bytes(run.device), host_bytes=swap.host_bytes,
                          sent_bytes=mesh.take_sent_bytes(), val_loss=val_loss)
        if arena.settle() and run.speaks:
            beside(save_plan, run)
        if run.speaks and it == min(run.first + 2, cfg.max_iters - 1):
            beside(timeline, spans, run.out / "timeline.json", run.out / "timeline.png", f"step {it}, {title(run)}")
            if arena.plans:
                beside(memory_plan, *arena.plans[0], run.out / "memory_plan.png", title(run))
        if it % cfg.log_interval == 0 or val_loss is not None or last:
            for logger in loggers:
                logger.log(stats)
        if last or stop.number:
            return it + 1
        if cfg.save_interval and (it + 1) % cfg.save_interval == 0:
            save(run, it + 1)
    raise AssertionError("main() starts no run without steps")


def save_plan(run):
    save_json(placement.as_dict(run.cfg, run.decision, run.model, run.lines, run.expected), run.out / "plan.json")


def title(run):
    return f"{run.data.folder.name}, {parameters(run.cfg) / 1e6:.1f}M parameters, context {run.cfg.block_size:,}"


def beside(work, *args):
    try:
        work(*args)
    except Exception as e:  # a picture is not worth a run
        print(f"warning: no {work.__name__}: {type(e).__name__}: {e}", file=sys.stderr)


def main(argv=None):
    """Trains as `argv` and torchrun say; returns the exit code: 0, or 128 + the signal that stopped the run. Errors:
    ConfigError for the user's mistakes, TrainingError when the loss is not finite."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\n{help_text()}")
        return 0
    launch = launched()
    with connected(launch) as host:
        with leaving(host):
            run = setup(argv, launch, host)
        with (contextlib.closing(run.mesh), contextlib.closing(run.model.arena), contextlib.closing(run.model),
              contextlib.closing(run.saver), leaving(host, run)):
            return go(run)


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
        os._exit(1)


def go(run):
    """From the startup's lines to the last one; returns main's exit code."""
    cfg, run.step = run.cfg, run.first
    if run.speaks:
        describe(run)
    if run.first >= cfg.max_iters:
        if run.speaks:
            print(f"max_iters={cfg.max_iters} steps are done already; raise --max_iters to go on")
        return 0
    loggers = []
    if run.speaks:
        loggers = [JsonlLogger(run.out / "metrics.jsonl", run.first), ConsoleLogger(cfg.max_iters, run.first)]
    if run.speaks and cfg.wandb_log:
        loggers.append(WandbLogger(cfg, asdict(cfg)))
    try:
        with StopSignal(quiet=not run.speaks) as stop, growing(run.expected, run.device, "transient"):
            done = train(run, loggers, stop)
            save(run, done, last=True)
            stop.number = int(*run.mesh.host.max(stop.number))  # it may have come to some ranks while they saved
    finally:
        for logger in loggers:
            logger.close()
    if run.speaks:
        finish(run, done, stop)
    return 128 + stop.number if stop.number else 0


def finish(run, done, stop):
    """The last picture and the last lines."""
    cfg = run.cfg
    beside(loss_curve, run.out / "metrics.jsonl", run.out / "loss.png", title(run), cfg.vocab_size)
    if stop.number:
        print(f"stopped by {signal.Signals(stop.number).name} after {done} of {cfg.max_iters} steps, saved in {run.out}; "
              f"go on with: python train.py --init_from=resume --out_dir={run.out}")
        return
    rows = read_metrics(run.out / "metrics.jsonl")
    steps_s = [r["step_s"] for r in rows if r["iter"] >= run.first]  # none where the disk was full
    if steps_s and run.expected and run.expected.seconds:
        print(f"step {median(steps_s):.3g} s (median), estimated {run.expected.seconds['step']:.3g} s")
    val = [r["val_loss"] for r in rows if r.get("val_loss") is not None]
    if val:
        print(f"validation loss {val[0]:.3f} -> {val[-1]:.3f}, {val[-1] / math.log(cfg.vocab_size):.0%} of ln V")
    files = ("ckpt", "metrics.jsonl", "config.json", "plan.json", "loss.png", "timeline.png", "memory_plan.png")
    print(f"done: {done} steps; {run.out}/ holds {', '.join(f for f in files if (run.out / f).exists())}\n"
          f'try: python -m memo.sample {run.out} --prompt="def main("')


def last_line(e):
    """What is said of the exception that ends a run; None where it should be shown whole."""
    if isinstance(e, (ConfigError, TrainingError, OutOfMemory, OSError)):
        return str(e)
    if isinstance(e, RuntimeError):
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        if any(word in text for word in ("gloo", "Gloo", "NCCL", "TCPStore")):
            return f"lost another rank ({text}); the last checkpoint is whole; the other ranks' errors say why"
    return None


if __name__ == "__main__":
    if sys.argv[1:] in (["--help"], ["-h"]):
        end_with_reader()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the last checkpoint, if there is one, is whole")
    except Exception as e:
        if (line := last_line(e)) is None:
            raise
        sys.exit(f"error: {line}")
