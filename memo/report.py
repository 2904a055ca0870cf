"""What a run says: its first and last lines, plan.json, pictures. A picture or plan.json that fails is a warning."""

import math
import os
import shlex
import signal
from statistics import median

from memo import memory
from memo.command import python
from memo.config import save_config
from memo.device import device_name
from memo.files import save_bytes, save_json
from memo.layer import n_rows
from memo.metrics import flops_per_sample, parameters, read_metrics, say
from memo.plots import loss_curve, memory_plan, timeline
from memo.tokens import load_tokenizer

SAMPLE_TOKENS = 200  # that memo.sample generates unless told otherwise
FILES = ("ckpt", "metrics.jsonl", "config.json", "plan.json", "loss.png", "timeline.png", "memory_plan.png")


def describe(run):
    """Prints what is about to happen, and what lives where, in a few lines."""
    cfg, m, mesh = run.cfg, run.model, run.mesh
    train_tokens = len(run.data.tokens["train"])
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    print(f"model       L={cfg.n_layer} C={cfg.n_embd} H={cfg.n_head} V={cfg.vocab_size} S={cfg.block_size} "
          f"position={cfg.position}: {parameters(cfg) / 1e6:.1f}M parameters\n"
          f"data        {run.data.folder.name}: {train_tokens:,} tokens for training, {tokens:,} in a step, "
          f"{flops_per_sample(cfg) / cfg.block_size / 1e9:.2f} GFLOPs a token\n"
          f"ranks       {mesh.host.size}: dp={mesh.dp.size} cp={cfg.cp} tp={cfg.tp}; "
          f"{m.params.numel() / 1e6:.1f}M weights, {n_rows(cfg):,} tokens each\n"
          f"device      {device_name(run.device)}, {str(m.dtype).removeprefix('torch.')}, "
          f"peak {f'{run.peak / 1e12:.0f} TFLOP/s' if run.peak else 'n/a'}, attention={m.attention.label}, "
          f"ops={m.ops.name}{f': {m.why_ops}' if m.why_ops and run.device.type == 'cuda' else ''}\n"
          f"{memory.memory_table(cfg, run.decision, run.lines, run.expected)}\n"
          f"run         steps {run.first} to {cfg.max_iters} in {run.out}", flush=True)


def title(run):
    return f"{run.data.folder.name}, {parameters(run.cfg) / 1e6:.1f}M parameters, context {run.cfg.block_size:,}"


# --- files ---

def furnish(run, folder):
    """Writes what `folder` holds beside metrics and checkpoints: config.json, plan.json, the data's tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = run.data.folder / "tokenizer.json"
    if tokenizer.exists():
        save_bytes(tokenizer.read_bytes(), folder / "tokenizer.json")
    save_config(run.cfg, folder / "config.json")
    save_plan(run, folder)


def save_plan(run, folder):
    save_json(memory.plan_record(run.cfg, run.decision, run.model, run.lines, run.expected), folder / "plan.json")


def draw(run, name, work):
    """work(path) makes the picture `name` in out_dir. Its file is named the first time."""
    path = run.out / name
    if run.beside(name, work, path) and path not in run.drawn:
        run.drawn.add(path)
        say(f"picture     {path}")


def draw_loss(run):
    draw(run, "loss.png", lambda path: loss_curve(run.out / "metrics.jsonl", path, title(run), run.cfg.vocab_size))


def draw_step(run, spans, it):
    """The timeline and the memory plan of step `it`."""
    draw(run, "timeline.png", lambda path: timeline(spans, path.with_suffix(".json"), path, f"step {it}, {title(run)}"))
    if run.model.arena.plans:
        draw(run, "memory_plan.png", lambda path: memory_plan(*run.model.arena.plans[0], path, title(run)))


# --- the end ---

def go_on_with(run, folder):
    """The command that resumes from `folder`."""
    world, here = run.mesh.host.size, run.one_host
    start = python() if world == 1 else f"torchrun --nproc_per_node={world}" if here else "the same torchrun ..."
    return f"{start} train.py --init_from=resume --out_dir={shlex.quote(str(folder))}"


def sample_with(run):
    """The command that generates from the run's checkpoint, with a prompt from its own data; None where that has no words,
    or no tokenizer."""
    if not (run.out / "tokenizer.json").exists():
        return None
    tokenizer, S = load_tokenizer(run.out / "tokenizer.json"), run.cfg.block_size
    words = tokenizer.decode(run.data.tokens["val"][:64].tolist()).lstrip("@").split()[:3]
    room = S - len(tokenizer.encode(" ".join(words)).ids)
    if not words or room < 1:
        return None
    shorter = f" --max_new_tokens={room}" * (room < SAMPLE_TOKENS)
    return f"{python()} -m memo.sample {shlex.quote(str(run.out))} --prompt={shlex.quote(' '.join(words))}{shorter}"


def finish(run, number):
    """Prints the last lines. `number`: of the signal that stopped the run, or 0."""
    cfg = run.cfg
    if number:
        where = f"saved in {run.out}; go on with: {go_on_with(run, run.out)}" if run.done else "nothing to save"
        print(f"stopped by {signal.Signals(number).name} after {run.done} of {cfg.max_iters} steps, {where}")
        return
    rows = read_metrics(run.out / "metrics.jsonl") if (run.out / "metrics.jsonl").exists() else []
    steps_s = [r["step_s"] for r in rows if r["iter"] >= run.first]  # none where the disk was full
    if steps_s and run.expected and run.expected.seconds:
        print(f"step {median(steps_s):.3g} s (median), estimated {run.expected.seconds['step']:.3g} s")
    val = [r["val_loss"] for r in rows if r.get("val_loss") is not None]
    if val:
        print(f"validation loss {val[0]:.3f} -> {val[-1]:.3f}, {val[-1] / math.log(cfg.vocab_size):.0%} of ln V")
    print(f"done: {run.done} steps; {run.out}{os.sep} holds {', '.join(f for f in FILES if (run.out / f).exists())}")
    if command := sample_with(run):
        print(f"try: {command}")
