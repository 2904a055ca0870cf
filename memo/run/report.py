"""What a run tells: its first and last lines, each step, plan.json, pictures."""

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from statistics import median

from tqdm import tqdm

from memo.checkpoint.manifest import CHECKPOINT
from memo.config.config import KEYS, MODEL_KEYS
from memo.config.formulas import flops_per_sample, parameters
from memo.config.layer import n_rows
from memo.data.tokenizer import encode_text, load_tokenizer
from memo.huggingface.huggingface import OWN, save_own_files
from memo.plots.figures import loss_curve, memory_plan, timeline
from memo.plots.pipeline import pipeline
from memo.run import reserve
from memo.run.loggers import JsonlLogger, StepStats, read_metrics
from memo.run.state import Run
from memo.schedule.spans import Span, on_one_clock
from memo.system.command import python
from memo.system.device import device_name
from memo.system.files import save_bytes, save_json
from memo.system.origin import differences
from memo.system.out_dir import is_locked, lock, rescues

UNSAID = {"dataset", "out_dir", "init_from", "check_data", "allow_other_data"}  # where they change
SAMPLE_TOKENS = 200  # that memo.sample generates unless told otherwise
FILES = ("ckpt", "metrics.jsonl", "config.json", "plan.json", "loss.png", "timeline.png", "pipeline.png",
         "memory_plan.png")


def print_first_lines(run: Run) -> None:
    """Prints what the run will do, and where its tensors live."""
    cfg, m, mesh = run.cfg, run.model, run.mesh
    pp = f"pp={cfg.pp} " * (cfg.pp > 1)
    table = reserve.memory_table(cfg, run.decision, run.lines, run.expected)
    train_tokens = len(run.data.tokens["train"])
    tokens = cfg.batch_size * cfg.micro_batches(mesh.dp.size) * cfg.block_size
    peak = f"{run.peak / 1e12:.0f} TFLOP/s" if run.peak else "n/a"
    why_ops = f": {m.gpt.why_ops}" if m.gpt.why_ops and run.device.type == "cuda" else ""
    was = run.ckpt.config if run.ckpt else {}
    if run.ckpt and run.ckpt.iter == 0:  # from memo.convert: nobody has chosen how to train
        was = {name: was.get(name) for name in MODEL_KEYS}
    changed = differences(was | was.get("origin", {}), {k: run.stored[k] for k in KEYS} | run.origin)
    print(f"model       L={cfg.n_layer} C={cfg.n_embd} H={cfg.n_head} V={cfg.vocab_size} S={cfg.block_size} "
          f"position={cfg.position}: {parameters(cfg) / 1e6:.1f}M parameters\n"
          f"data        {run.data.folder.name}: {train_tokens:,} tokens for training, {tokens:,} in a step, "
          f"{flops_per_sample(cfg) / cfg.block_size / 1e9:.2f} GFLOPs a token\n"
          f"ranks       {mesh.host.size}: {pp}dp={mesh.dp.size} cp={cfg.cp} tp={cfg.tp}; "
          f"{m.buckets[-1][1] / 1e6:.1f}M weights, {n_rows(cfg):,} tokens each\n"
          f"device      {device_name(run.device)}, {str(m.dtype).removeprefix('torch.')}, "
          f"peak {peak}, attention={m.gpt.attention.label}, "
          f"ops={m.gpt.ops.name}{why_ops}", table, *reserve.stages_table(cfg, run.stage_records),
          f"run         steps {run.first} to {cfg.max_iters} in {run.out}",
          *(f"rescued     {folder} has what could not be saved in {run.out}; remove it if you need it no more"
            for folder in rescues(run.out)[1]),
          *(f"changed     {both}" for name, both in changed.items() if name not in UNSAID),
          sep="\n", flush=True)


def title(run: Run) -> str:
    cfg = run.cfg
    return f"{run.data.folder.name}, {parameters(cfg) / 1e6:.1f}M parameters, context {cfg.block_size:,}"


def report_step(run: Run, stats: StepStats, spans: list[Span], replanned: bool) -> None:
    """Tells all of a step; no failure ends the run. `replanned`: whether the memory plan is new."""
    cfg, it = run.cfg, stats.iter
    drawn = it == min(run.first + 2, cfg.max_iters - 1)  # the third step of this process
    stage_spans = run.mesh.of_stages(spans) if drawn and cfg.pp > 1 else []
    if not run.speaks:
        return
    run.attempt("out_dir", keep_folder, run)
    if replanned:
        run.attempt("plan.json", save_plan, run, run.out)
    if drawn:
        draw_step(run, spans, stage_spans, it)
    if it % cfg.log_interval == 0 or stats.val_loss is not None or it == cfg.max_iters - 1:
        for logger in run.loggers:
            run.attempt(type(logger).__name__, logger.log, stats)
    if stats.val_loss is not None and it > run.first:  # the curve of a single step is no curve
        draw_loss(run)


def keep_folder(run: Run) -> bool:
    """Goes on in a new folder beside out_dir where that was removed in mid-run, or is another run's ->
    whether it does. Errors: ConfigError, OSError: there can be none."""
    if run.lock is not None and is_locked(run.out, run.lock):
        return False
    before = run.out.absolute()
    out = before.with_name(f"{before.name}-{token_hex(4)}")
    held = lock(out, run.owner)
    furnish(run, out)
    run.out, run.lock = out, held
    run.saver.folder = run.out / CHECKPOINT
    for logger in run.loggers:
        if isinstance(logger, JsonlLogger):
            logger.path = run.out / "metrics.jsonl"
    print(f"\nwarning: out_dir={before} was removed, or is another run's by now; this run goes on in "
          f"out_dir={run.out}, without what it had written before", file=sys.stderr)
    return True


def furnish(run: Run, folder: Path) -> None:
    """Writes config.json, plan.json, the data's tokenizer.json and what came with the model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_json(run.stored, folder / "config.json")  # first: what stands beside it is the run's
    save_own_files(run.own, folder, OWN)
    if (tokenizer := run.data.folder / "tokenizer.json").exists():
        save_bytes(tokenizer.read_bytes(), folder / "tokenizer.json")
    save_plan(run, folder)


def save_plan(run: Run, folder: Path) -> None:
    record = reserve.plan_record(run.cfg, run.decision, run.model, run.lines, run.expected)
    if run.stage_records:
        record["stages"] = run.stage_records
    save_json(record, folder / "plan.json")


def draw_picture(run: Run, name: str, work: Callable[[Path], None]) -> None:
    """Draws the picture `name` in out_dir by work(path), and names the file the first time."""
    line = f"picture     {run.out / name}"
    if run.attempt(name, work, run.out / name) and line not in run.told:
        run.told.add(line)
        tqdm.write(line)  # above a progress bar
        sys.stdout.flush()


def draw_loss(run: Run) -> None:
    draw_picture(run, "loss.png", lambda path: loss_curve(
        read_metrics(run.out / "metrics.jsonl"), path, title(run), run.cfg.vocab_size))


def draw_step(run: Run, spans: list[Span], stage_spans: list[list[Span]], it: int) -> None:
    """Draws the timeline and memory plan of step `it`, and the pipeline of several stages' `stage_spans`."""
    name = f"step {it}, {title(run)}"
    draw_picture(run, "timeline.png", lambda path: timeline(spans, path.with_suffix(".json"), path,
                                                            name + ", stage 0" * bool(stage_spans)))
    if stage_spans:
        draw_picture(run, "pipeline.png", lambda path: pipeline(
            on_one_clock(stage_spans), run.cfg.subsequences, path, name))
    if run.model.arena.plans:
        trace, plan = run.model.arena.plans[0]
        draw_picture(run, "memory_plan.png", lambda path: memory_plan(trace, plan, path, title(run)))


def go_on_with(run: Run, folder: Path) -> str:
    """Writes the command that resumes from `folder`."""
    world = run.mesh.host.size
    several = f"torchrun --nproc_per_node={world}" if run.one_host else "the same torchrun ..."
    start = python() if world == 1 else several
    return f"{start} train.py --init_from=resume --out_dir={shlex.quote(str(folder))}"


def sample_with(run: Run) -> str | None:
    """Writes the command that generates from the checkpoint, with words of the data; None without any."""
    if not (run.out / "tokenizer.json").exists():
        return None
    tokenizer, S = load_tokenizer(run.out / "tokenizer.json"), run.cfg.block_size
    words = tokenizer.decode(run.data.tokens["train"][:64].tolist()).lstrip("@").split()[:3]
    room = S - len(encode_text(tokenizer, " ".join(words)))
    if not words or room < 1:
        return None
    shorter = f" --max_new_tokens={room}" if room < SAMPLE_TOKENS else ""
    prompt = shlex.quote(" ".join(words))
    return f"{python()} -m memo.sample {shlex.quote(str(run.out))} --prompt={prompt}{shorter}"


def print_last_lines(run: Run, number: int) -> None:
    """Prints how the run ended. `number`: of the signal that stopped it, or 0."""
    cfg = run.cfg
    if number:
        where = (f"saved in {run.out}; go on with: {go_on_with(run, run.out)}" if run.done
                 else "nothing to save")
        print(f"stopped by {signal.Signals(number).name} after {run.done} of {cfg.max_iters} steps, {where}")
        return
    rows = read_metrics(run.out / "metrics.jsonl") if (run.out / "metrics.jsonl").exists() else []
    steps_s = [r["step_s"] for r in rows if r["iter"] >= run.first]  # none where the disk was full
    if steps_s and run.expected and run.expected.seconds:
        print(f"step {median(steps_s):.3g} s (median), estimated {run.expected.seconds['step']:.3g} s")
    val = [r["val_loss"] for r in rows if r.get("val_loss") is not None]
    if val:
        print(f"validation loss {val[0]:.3f} -> {val[-1]:.3f}, {val[-1] / math.log(cfg.vocab_size):.0%} of "
              "ln V")
    if run.lock and not is_locked(run.out, run.lock):
        print(f"done: {run.done} steps, which were saved; since then out_dir={run.out} was removed, or taken "
              "by another run")
        return
    print(f"done: {run.done} steps; {run.out}{os.sep} holds "
          f"{', '.join(f for f in FILES if (run.out / f).exists())}")
    if command := sample_with(run):
        print(f"try: {command}")
