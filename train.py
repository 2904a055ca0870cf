"""Trains a GPT: python train.py [config/x.py] [--key=value ...]"""

import contextlib
import fcntl
import math
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from memo import checkpoint, convert, placement
from memo.attention import resolve_attention
from memo.batch import open_dataset
from memo.config import ConfigError, help_text, load_config, save_config, save_json
from memo.device import device_name, device_peak_bytes, pick_device, set_deterministic
from memo.hardware import peak_flops_per_s
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
from memo.optim import Optimizer
from memo.plots import loss_curve, memory_plan, timeline
from memo.streams import stall_s
from memo.tokens import load_tokenizer
from model import GPT, initial_weights


class TrainingError(RuntimeError):
    """A run that cannot go on. One line."""


def learning_rate(cfg, it):
    """Linear warmup, then a cosine from learning_rate down to min_lr at decay_iters."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = min(1.0, (it - cfg.warmup_iters) / max(1, cfg.decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.learning_rate - cfg.min_lr)


class StopSignal:
    """SIGINT and SIGTERM only take a note, so that the step is finished and saved; a second one stops at once."""

    def __enter__(self):
        self.number = None
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame):
        self.number = number
        print(f"\n{signal.Signals(number).name}: finishing this step, then saving (again to stop at once)", file=sys.stderr)
        for s in self.before:
            signal.signal(s, signal.SIG_DFL)

    def __exit__(self, *exc):
        for s, handler in self.before.items():
            signal.signal(s, handler)


def lock(out):
    """Makes `out` and holds it for this process, so that two runs never write there at once; returns the open lock."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w")  # noqa: SIM115  held until the process ends
    except OSError as e:
        raise ConfigError(f"out_dir={out} cannot be written ({e.strerror}); choose another --out_dir") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"out_dir={out} is in use by another run; wait for it or choose another --out_dir") from None
    return file


def check_tokenizer(data, folder, whose):
    """Errors: the data was made with another tokenizer than the one that lies in `folder` beside the weights."""
    mine, theirs = data.folder / "tokenizer.json", Path(folder) / "tokenizer.json"
    if mine.exists() and theirs.exists() and load_tokenizer(mine).to_str() != load_tokenizer(theirs).to_str():
        raise ConfigError(f"dataset={data.folder} was made with another tokenizer than {whose}; prepare it again with "
                          f"data/text/prepare.py --tokenizer={theirs}")


def setup(cfg):
    """Everything a run needs. Files that can be wrong are checked before the device is touched."""
    data = open_dataset(cfg.dataset, cfg.block_size)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or data.vocab_size)
    if cfg.vocab_size < data.vocab_size:
        raise ConfigError(f"vocab_size={cfg.vocab_size} must be >= {data.vocab_size}, the vocabulary of "
                          f"dataset={cfg.dataset}; leave it out, or prepare the text with the tokenizer of the weights")
    out = Path(cfg.out_dir)
    ckpt = checkpoint.load(out) if cfg.init_from == "resume" else None
    if ckpt is None and (out / checkpoint.FILE).exists():
        raise ConfigError(f"out_dir={out} already holds a checkpoint, which init_from={cfg.init_from} would overwrite; "
                          "go on with --init_from=resume or choose another --out_dir")
    hf = cfg.init_from.removeprefix("hf:") if cfg.init_from.startswith("hf:") else None
    if ckpt is not None or hf:
        check_tokenizer(data, out if ckpt is not None else hf, f"the weights of init_from={cfg.init_from}")
    set_deterministic(cfg.deterministic)
    device, dtype = pick_device(cfg)
    resolve_attention(cfg.attention, device, dtype, cfg.n_embd // cfg.n_head)
    placement.check(cfg, device, dtype)
    locked = lock(out)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg, device, dtype)
    optimizer = Optimizer(model, cfg)
    if ckpt is not None:
        checkpoint.restore(ckpt, model, optimizer)
    elif hf:
        optimizer.load(convert.hf_tensors(hf, cfg))
    else:
        optimizer.load(initial_weights(cfg, cfg.seed, device))
    first = ckpt.iter if ckpt is not None else 0
    decision = placement.decide(cfg, model)
    placement.plan_memory(cfg, model)
    if (data.folder / "tokenizer.json").exists():
        shutil.copyfile(data.folder / "tokenizer.json", out / "tokenizer.json")
    peak = peak_flops_per_s(device_name(device)) if dtype == torch.bfloat16 else None
    run = SimpleNamespace(cfg=cfg, data=data, device=device, model=model, optimizer=optimizer, first=first, out=out,
                          peak=peak, lock=locked, decision=decision)
    save_config(cfg, out / "config.json")
    save_plan(run)
    return run


def describe(run):
    """What is about to happen, and what lives where, in a few lines."""
    cfg, m = run.cfg, run.model
    train_tokens = len(run.data.tokens["train"])
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    print(f"model       L={cfg.n_layer} C={cfg.n_embd} H={cfg.n_head} V={cfg.vocab_size} S={cfg.block_size} "
          f"position={cfg.position}: {parameters(cfg) / 1e6:.1f}M parameters\n"
          f"data        {run.data.folder.name}: {train_tokens:,} tokens for training, {tokens:,} in a step, "
          f"{flops_per_sample(cfg) / cfg.block_size / 1e9:.2f} GFLOPs a token\n"
          f"device      {device_name(run.device)}, {str(m.dtype).removeprefix('torch.')}, attention={m.attention.name}, "
          f"peak {f'{run.peak / 1e12:.0f} TFLOP/s' if run.peak else 'n/a'}\n"
          f"{placement.describe(cfg, run.decision, m, run.optimizer)}\n"
          f"run         steps {run.first} to {cfg.max_iters} in {run.out}")


def evaluate(run):
    """Mean loss over eval_iters batches of the validation split, the same ones each time."""
    cfg, total = run.cfg, 0.0
    for i in range(cfg.eval_iters):
        tokens, targets, _ = run.data.batch("val", 0, i, cfg.batch_size, cfg.block_size, cfg.seed)
        total += run.model.forward(tokens.to(run.device), targets.to(run.device)).item()
    return total / cfg.eval_iters


def forward_backward(run, it):
    """The gradients of step `it`, over all its micro batches -> (loss tensor, where in the data they were)."""
    cfg, parts = run.cfg, run.cfg.gradient_accumulation_steps
    loss, offsets, batches = 0.0, [], []
    for micro in range(parts):  # all of them first: the device is not kept waiting for the host between two
        tokens, targets, where = run.data.batch("train", it, micro, cfg.batch_size, cfg.block_size, cfg.seed)
        batches.append((tokens.to(run.device), targets.to(run.device)))
        offsets += where
    for batch in batches:
        loss = loss + run.model.forward(*batch, scale=1 / parts) / parts
        run.model.backward()
    return loss, offsets


def save(run, it, last=False):
    """Saves a checkpoint that goes on with step `it`. A failed one in mid-run is a warning: the next may succeed."""
    try:
        checkpoint.save(run.out, run.model, run.optimizer, run.cfg, it)
    except checkpoint.CheckpointError as e:
        if last:
            raise
        print(f"\nwarning: {e}; training goes on", file=sys.stderr)


def not_finite(run, it, loss, grad_norm, offsets):
    saved = run.out / checkpoint.FILE
    try:
        good = f"the last good checkpoint is {saved}, before step {checkpoint.load(run.out).iter}"
    except checkpoint.CheckpointError:
        good = "there is no good checkpoint yet"
    return TrainingError(f"loss={loss} grad_norm={grad_norm} at iter={it} (sequences at tokens {offsets} of the train "
                         f"split) must be finite; nothing was saved over: {good}; "
                         "try a lower --learning_rate or more --warmup_iters")


def train(run, loggers, stop):
    """The loop, from step run.first on; returns the number of steps done in the whole run."""
    cfg, swap, arena = run.cfg, run.model.swap, run.model.arena
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    for it in range(run.first, cfg.max_iters):
        last = it == cfg.max_iters - 1
        val_loss = evaluate(run) if cfg.eval_interval and (it % cfg.eval_interval == 0 or last) else None
        swap.streams.timeline.clear()
        start, lr = time.perf_counter(), learning_rate(cfg, it)
        loss, offsets = forward_backward(run, it)
        grad_norm = arena.run("clip", run.optimizer.clip, cfg.grad_clip)
        loss, grad_norm = torch.stack((loss, grad_norm)).tolist()  # the one place where the host waits for the device
        if not math.isfinite(loss + grad_norm):
            raise not_finite(run, it, loss, grad_norm, offsets)
        arena.run("optimizer", run.optimizer.step, lr)
        step_s = time.perf_counter() - start
        rate = tgs(tokens, 1, step_s)
        spans = swap.streams.timeline.take()
        stats = StepStats(it, loss, lr, grad_norm, step_s, tokens, rate, mfu(cfg, rate, run.peak), alpha=run.decision.alpha,
                          offload_bytes=swap.host_bytes * cfg.gradient_accumulation_steps, stall_s=stall_s(spans),
                          transient_peak_bytes=arena.stats(reset_peak=True).peak_bytes,
                          device_peak_bytes=device_peak_bytes(run.device), host_bytes=swap.host_bytes, val_loss=val_loss)
        if arena.settle():
            save_plan(run)
        if it == min(run.first + 2, cfg.max_iters - 1):
            picture(timeline, spans, run.out / "timeline.json", run.out / "timeline.png", f"step {it}, {title(run)}")
            if arena.plans:
                picture(memory_plan, *arena.plans[0], run.out / "memory_plan.png", title(run))
        if it % cfg.log_interval == 0 or val_loss is not None or last:
            for logger in loggers:
                logger.log(stats)
        if last or stop.number:
            return it + 1
        if cfg.save_interval and (it + 1) % cfg.save_interval == 0:
            save(run, it + 1)
    raise AssertionError("main() starts no run without steps")


def save_plan(run):
    save_json(placement.as_dict(run.cfg, run.decision, run.model), run.out / "plan.json")


def title(run):
    return f"{run.data.folder.name}, {parameters(run.cfg) / 1e6:.1f}M parameters, context {run.cfg.block_size:,}"


def picture(draw, *args):
    try:
        draw(*args)
    except Exception as e:  # a picture is not worth a run
        print(f"warning: no {draw.__name__}: {type(e).__name__}: {e}", file=sys.stderr)


def main(argv=None):
    """Trains as `argv` says; returns the exit code: 0, or 128 + the signal that stopped the run. Errors: ConfigError for
    the user's mistakes, TrainingError when the loss is not finite."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\n{help_text()}")
        return 0
    run = setup(load_config(argv))
    with contextlib.closing(run.model.arena), contextlib.closing(run.model):
        return go(run)


def go(run):
    """From the startup's lines to the last one; returns main's exit code."""
    cfg = run.cfg
    describe(run)
    if run.first >= cfg.max_iters:
        print(f"max_iters={cfg.max_iters} steps are done already; raise --max_iters to go on")
        return 0
    loggers = [JsonlLogger(run.out / "metrics.jsonl", run.first), ConsoleLogger(cfg.max_iters, run.first)]
    if cfg.wandb_log:
        loggers.append(WandbLogger(cfg, asdict(cfg)))
    try:
        with StopSignal() as stop:
            done = train(run, loggers, stop)
            save(run, done, last=True)
    finally:
        for logger in loggers:
            logger.close()
    picture(loss_curve, run.out / "metrics.jsonl", run.out / "loss.png", title(run), cfg.vocab_size)
    if stop.number:
        print(f"stopped by {signal.Signals(stop.number).name} after {done} of {cfg.max_iters} steps, saved in {run.out}; "
              f"go on with: python train.py --init_from=resume --out_dir={run.out}")
        return 128 + stop.number
    val = [r["val_loss"] for r in read_metrics(run.out / "metrics.jsonl") if r.get("val_loss") is not None]
    if val:
        print(f"validation loss {val[0]:.3f} -> {val[-1]:.3f}, {val[-1] / math.log(cfg.vocab_size):.0%} of ln V")
    files = ("ckpt.safetensors", "metrics.jsonl", "config.json", "plan.json", "loss.png", "timeline.png", "memory_plan.png")
    print(f"done: {done} steps; {run.out}/ holds {', '.join(f for f in files if (run.out / f).exists())}\n"
          f'try: python -m memo.sample {run.out} --prompt="def main("')
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, TrainingError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the last checkpoint, if there is one, is whole")
    except RuntimeError as e:  # torch has no class of its own for the CPU's
        if not isinstance(e, torch.OutOfMemoryError) and "allocate" not in str(e):
            raise
        sys.exit(f"error: out of memory ({str(e).splitlines()[0]}); try a smaller --batch_size, --block_size or --n_embd")
