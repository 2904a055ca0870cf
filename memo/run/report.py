"""The texts of a run: its first and last lines, each step, plan.json, pictures."""

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from statistics import median

from tqdm import tqdm

from memo.checkpoint.manifest import CHECKPOINT
from memo.config.config import KEYS, MODEL_KEYS
from memo.config.formulas import flops_per_sample, parameters, percent
from memo.config.layer import n_rows
from memo.config.layout import pipeline_line, subsequences_line
from memo.config.msp import Help, shares_lines
from memo.config.rope import parse_scaling, said_factors
from memo.data.tokenizer import encode_text, load_tokenizer
from memo.decide.where import Rates
from memo.estimate.report import as_dict, what_set_it
from memo.huggingface.huggingface import OWN, save_own_files
from memo.memory.placement import Placement
from memo.plots.figures import loss_curve, memory_plan, timeline
from memo.plots.pipeline import pipeline
from memo.run.loggers import JsonlLogger, StepStats, read_metrics
from memo.run.state import Run, lock, rescues
from memo.schedule.spans import Span, on_one_clock
from memo.system.command import python
from memo.system.device import device_name
from memo.system.files import save_bytes, save_json
from memo.system.origin import differences

UNSAID = {"dataset", "out_dir", "init_from", "check_data", "allow_other_data"}  # where they change
SAMPLE_TOKENS = 200  # that memo.sample generates unless told otherwise
FILES = ("ckpt", "metrics.jsonl", "config.json", "plan.json", "loss.png", "timeline.png", "pipeline.png",
         "memory_plan.png")


def print_first_lines(run: Run) -> None:
    """Prints what the run will do, and where its tensors live."""
    cfg, m, mesh = run.cfg, run.model, run.mesh
    pp = f"pp={cfg.pp} " * (cfg.pp > 1)
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
          f"ops={m.gpt.ops.name}{why_ops}", *memory_table(run),
          f"run         steps {run.first} to {cfg.max_iters} in {run.out}",
          *(f"rescued     {folder} has what could not be saved in {run.out}; remove it if you need it no more"
            for folder in rescues(run.out)[1]),
          *(f"positions   {line}" for line in said_factors(parse_scaling(cfg.rope_scaling), cfg.block_size)),
          *(f"changed     {both}" for name, both in changed.items() if name not in UNSAID),
          sep="\n", flush=True)


def memory_table(run: Run) -> list[str]:
    """Lists the lines of the startup's table: what lives where, beside what was expected; alpha; rates."""
    cfg, lines, expected = run.cfg, run.lines, run.expected
    unit = "GiB, (estimated)" if expected else "GiB"
    stage = f", stage {cfg.stage}" * (cfg.pp > 1)
    out = [*filter(None, [pipeline_line(run.model.cfg, run.model.micro_batches),
                          subsequences_line(cfg, expected.chosen if expected else "")]),
           f"{'activation  ' + cfg.activation + stage:44}{'device':>9}{'host':>9}   {unit}"]
    last = {line.region: line for line in lines}  # beside which stands the estimate of the whole region
    for line in lines:
        guess = ""
        if expected and line is last[line.region]:
            guess = f"   ({next(filter(None, expected.bytes_of(line.region)), 0) / 2**30:.3f})"
        out.append(table_row(line.what, line.device_bytes, line.host_bytes, guess))
    sums = sum(line.device_bytes for line in lines), sum(line.host_bytes for line in lines)
    return [*out, table_row("in all", *sums), *alpha_and_rates(run), *stages_table(run)]


def table_row(what: str, device_bytes: int, host_bytes: int, more: str = "") -> str:
    device, host = (f"{n / 2**30:.3f}" if n else "" for n in (device_bytes, host_bytes))
    return f"            {what:32}{device:>9}{host:>9}{more}".rstrip()


def alpha_and_rates(run: Run) -> list[str]:
    """Lists the lines on what set alpha, and on what was measured."""
    def passes(of: Rates) -> str:
        return f"a layer's forward {of.forward_s * 1e3:.1f} ms, backward {of.backward_s * 1e3:.1f} ms"
    expected, decision = run.expected, run.decision
    plan, rates, p = decision.swap_plan, decision.rates, decision.placement
    lines = [f"alpha       {what_set_it(run.cfg, plan, p)}"] if plan else []
    if decision.alpha is not None and rates is not None:
        if p.input_only:
            lines.append(" " * 12 + f"{p.input_only} of {p.n_swapped} swapped {p.what} keep only their input")
        lines.append(f"rates       {passes(rates)}; {rates.offload_bytes_per_s / 1e9:.1f} GB/s to the host, "
                     f"{rates.prefetch_bytes_per_s / 1e9:.1f} GB/s back")
    if expected and expected.layer:
        lines.append(f"estimated   {passes(expected.layer)}; a step {expected.seconds['step']:.3g} s, "
                     f"TGS {expected.tgs:,.0f}, MFU {percent(expected.mfu)}")
    return lines


def stages_table(run: Run) -> list[str]:
    """Lists the lines on each of several stages' first rank."""
    cfg, records = run.cfg, run.stage_records
    lines = [f"{'stages':44}{'device':>9}{'host':>9}   GiB"] * bool(records)
    for one in records:
        device, host = (sum(line[end] for line in one["regions"]) for end in ("device_bytes", "host_bytes"))
        what = f"{one['stage']}: layers {one['layers'][0]} to {one['layers'][-1]}"
        alpha = "" if one["alpha"] is None else f"   alpha {one['alpha']:.3f}"
        lines.append(table_row(what, device, host, alpha))
    lent = [Help(**piece) for one in records for piece in one["placement"].get("lent", ())]
    return lines + (shares_lines(lent, cfg.pp, cfg.subsequences) if cfg.msp and records else [])


def title(run: Run) -> str:
    cfg = run.cfg
    return f"{run.data.folder.name}, {parameters(cfg) / 1e6:.1f}M parameters, context {cfg.block_size:,}"


def report_step(run: Run, stats: StepStats, spans: list[Span], replanned: bool) -> None:
    """Tells all of a step, and draws one of them; no failure ends the run. `replanned`: is its plan new?"""
    cfg, it = run.cfg, stats.iter
    drawn = it == min(run.first + 2, cfg.max_iters - 1)  # the third step of this process
    stage_spans = run.mesh.of_stages(spans) if drawn and cfg.pp > 1 else []
    if not run.speaks:
        return
    run.attempt("out_dir", keep_folder, run)
    if replanned:
        run.attempt("plan.json", save_plan, run, run.out)
    if drawn:
        name, plans = f"step {it}, {title(run)}", run.model.arena.plans
        draw_picture(run, "timeline.png", lambda path: timeline(spans, path.with_suffix(".json"), path,
                                                                name + ", stage 0" * bool(stage_spans)))
        if stage_spans:
            draw_picture(run, "pipeline.png", lambda path: pipeline(
                on_one_clock(stage_spans), cfg.subsequences, path, name))
        if plans:
            draw_picture(run, "memory_plan.png", lambda path: memory_plan(*plans[0], path, title(run)))
    if it % cfg.log_interval == 0 or stats.val_loss is not None or it == cfg.max_iters - 1:
        for logger in run.loggers:
            run.attempt(type(logger).__name__, logger.log, stats)
    if stats.val_loss is not None and it > run.first:  # the curve of a single step is no curve
        draw_loss(run)


def keep_folder(run: Run) -> bool:
    """Goes on in a new folder beside out_dir where that was removed in mid-run, or is another run's ->
    whether it does. Errors: ConfigError, OSError: there can be none."""
    if run.has_folder:
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


def placement_record(placement: Placement) -> dict[str, object]:
    """Lists the fields of a placement for plan.json, but those that say nothing here."""
    silent = {name for name in ("receives", "sends", "guests", "lent", "layers_come", "edges_come", "stays",
                                "near") if not getattr(placement, name)}
    silent |= set() if placement.several else {"cuts", "order", "keys", "stream", "dealt"}
    said = {name: value for name, value in asdict(placement).items() if name not in silent}
    return said | {name: [piece._asdict() for piece in getattr(placement, name)]
                   for name in said.keys() & {"guests", "lent"}}


def stage_record(run: Run) -> dict[str, object]:
    """Makes what plan.json holds of this rank's stage."""
    decision, plan, swap = run.decision, run.decision.swap_plan, run.model.swap
    return dict(alpha=decision.alpha, alpha_limits=plan and plan.limits, binds=plan and plan.binds,
                placement=placement_record(decision.placement), device_bytes=swap.device_bytes,
                host_bytes=swap.host_bytes, host_limit_bytes=decision.host_limit_bytes,
                rates=decision.rates and decision.rates.as_dict(),
                regions=[line._asdict() for line in run.lines])


def save_plan(run: Run, folder: Path) -> None:
    """Writes plan.json: what the run uses, from which rates, and what was expected."""
    cfg, expected = run.cfg, run.expected
    record = dict(activation=cfg.activation, batch_size=cfg.batch_size, block_size=cfg.block_size,
                  **stage_record(run), estimate=expected and as_dict(expected),
                  memory_plans=[asdict(plan) for _, plan in run.model.arena.plans])
    save_json(record | dict(stages=run.stage_records) if run.stage_records else record, folder / "plan.json")


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
    if not run.has_folder:
        print(f"done: {run.done} steps, which were saved; since then out_dir={run.out} was removed, or taken "
              "by another run")
        return
    print(f"done: {run.done} steps; {run.out}{os.sep} holds "
          f"{', '.join(f for f in FILES if (run.out / f).exists())}")
    if command := sample_with(run):
        print(f"try: {command}")
