"""A run before its first step: the checks of each rank, what all ranks agree on, the Run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from shutil import rmtree
from typing import IO
from uuid import uuid4

import torch

from memo.checkpoint import checkpoint
from memo.checkpoint.manifest import CHECKPOINT, Damaged, checkpoints, latest
from memo.config.config import CHOSEN_KEYS, LAYOUT_KEYS, Config, as_keys
from memo.config.keys import Keys
from memo.config.layout import Layout, check_streams
from memo.data.batch import SPLITS, Data, open_dataset
from memo.data.tokenizer import OtherForm, find_tokenizer, what_decides
from memo.decide.choose import fewest, numbers_of, with_stages
from memo.decide.where import Decision
from memo.errors import ConfigError, elsewhere, reason, warn
from memo.estimate.arena import fast_arena, traced_arena
from memo.estimate.budget import Estimate, choose_fastest, estimate
from memo.estimate.search import remedies
from memo.huggingface.huggingface import CONFIG, OWN, own_files
from memo.huggingface.weights import check_folder
from memo.kernels.attention import resolve_attention
from memo.kernels.backends import aligned, check_matmul
from memo.kernels.ops import resolve_ops
from memo.layer.tiles import row_order
from memo.memory.slab import available
from memo.parallel.mesh import Mesh
from memo.run import reserve
from memo.run.load_config import read_run
from memo.run.loggers import ConsoleLogger, JsonlLogger, WandbLogger
from memo.run.report import furnish, stage_record
from memo.run.state import LOCK, Checked, Decided, Run, check_shared, lock
from memo.run.trace_step import trace_step
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system import hardware
from memo.system.axis import Axis, T
from memo.system.command import progress
from memo.system.device import device_name, gpu_facts, own_bytes, pick_device, set_deterministic
from memo.system.files import load_json, own_folder, read_text
from memo.system.hardware import NODES, Machine, peak_flops_per_s
from memo.system.launch import Launch, of_first, run_name, same_everywhere, together
from memo.system.origin import code, differences

arena_here = partial(traced_arena, trace=trace_step)


# --- one rank ---

def check_same_tokenizer(data: Data, folder: str | Path, weights: str) -> None:
    """Checks that the data was made with the tokenizer in the weights' folder. Errors: ConfigError."""
    if not (mine := find_tokenizer(data.folder)):
        return
    try:
        theirs, why = find_tokenizer(folder) or find_tokenizer(Path(folder) / OWN), f"{folder} holds none"
    except OtherForm as e:
        theirs, why = None, str(e)
    if not theirs:
        warn(f"whether dataset={data.folder} was made with the tokenizer of {weights} is not known: {why}")
    elif what_decides(mine) != what_decides(theirs):
        raise ConfigError(f"dataset={data.folder} was made with another tokenizer than {weights}; prepare it "
                          f"again with data/text/prepare.py --tokenizer={folder}")


def check_out_dir(out: Path, read: dict[str, str | Path | None], resumes: bool) -> None:
    """Refuses a folder whose files are not a run's. `read`: folders that keys name. Errors: ConfigError."""
    for key, folder in read.items():
        if folder and out.is_dir() and out.samefile(folder):
            raise ConfigError(f"out_dir={out} is what {key} reads, and its files would be replaced; choose "
                              "another --out_dir")
    config = out / CONFIG
    if not resumes and config.is_file() and "block_size" not in load_json(config, "choose another --out_dir"):
        raise ConfigError(f"{config} is not of a run, and would be replaced; choose another --out_dir")


def check_rank(argv: list[str], launch: Launch, passed_over: dict[Path, str]) -> Checked:
    """Checks what needs neither other ranks nor the device. Errors: ConfigError; Damaged: the checkpoint to
    resume from, the newest not `passed_over`."""
    cfg, force = read_run(argv, passed_over)
    with_stages(cfg, launch.world)  # an error now rather than after the data
    with progress(lambda: f"reading dataset {cfg.dataset}", launch.rank == 0):
        data = open_dataset(cfg.dataset, cfg.block_size, SPLITS if cfg.eval_interval else SPLITS[:1],
                            cfg.check_data, cfg.pack if cfg.documents else "", cfg.windows)
    if data.meta["weights"] and not cfg.documents:
        raise ConfigError(f"documents=false must be true for dataset={cfg.dataset}, whose weights say which "
                          "tokens are learned; add --documents=true")
    cfg = replace(cfg, vocab_size=cfg.vocab_size or data.vocab_size)
    if cfg.vocab_size < data.vocab_size:
        raise ConfigError(f"vocab_size={cfg.vocab_size} must be >= {data.vocab_size}, the vocabulary of "
                          f"dataset={cfg.dataset}; leave it out, or prepare the text with the tokenizer of "
                          "the weights")
    out, ckpt = Path(cfg.out_dir), None
    if cfg.init_from == "resume":
        ckpt = checkpoint.load(out, launch.rank, launch.world, passed_over)
    elif latest(out):
        raise ConfigError(f"out_dir={out} already holds a checkpoint, which init_from={cfg.init_from} would "
                          "overwrite; go on with --init_from=resume or choose another --out_dir")
    hf = cfg.init_from.removeprefix("hf:") if cfg.init_from.startswith("hf:") else None
    check_out_dir(out, dict(init_from=hf, dataset=data.folder), resumes=ckpt is not None)
    if hf:
        check_folder(hf, cfg)
    if ckpt is not None or hf:
        check_same_tokenizer(data, hf or out, f"the weights of init_from={cfg.init_from}")
    was = ckpt.config.get("origin", {}) if ckpt else {}
    others = [text for name, text in differences(was, data.fingerprints).items() if name.startswith("train")]
    if others and not cfg.allow_other_data:
        raise ConfigError(f"dataset={cfg.dataset}: fingerprint of {others[0]} in the checkpoint; give the "
                          "run its own data, or go on with these: --allow_other_data=true")
    set_deterministic(cfg.deterministic)
    device, dtype = pick_device(cfg, launch.local_rank)
    attention = resolve_attention(cfg.attention, device, dtype, cfg.head_width, aligned(cfg),
                                  window=cfg.window > 0)
    ops, _ = resolve_ops(cfg.ops, device, launch=False)
    check_matmul(cfg, gpu_facts(device)["capability"], dtype.itemsize)
    origin = code() | data.fingerprints | {
        "ranks": launch.world, "device in use": device_name(device), "dtype in use": str(dtype),
        "attention in use": attention.name, "ops in use": ops.name}
    if cfg.undecided:  # with more stages some host holds more
        least = fewest(cfg, launch.world).of_rank(launch.rank, launch.world)
        reserve.host_limit(least, launch, dtype.itemsize)
    return Checked(cfg=cfg, data=data, out=out, ckpt=ckpt, hf=hf, device=device, dtype=dtype,
                   speaks=launch.rank == 0, one_host=launch.local_world == launch.world, force=force,
                   kernels=dict(attention=attention.name, ops=ops.name), origin=origin)


def machine_of(device: torch.device, launch: Launch) -> Machine:
    """Finds the Machine of this rank: known figures of its GPU and host, and what --calibrate measured."""
    name, cuda = device_name(device), device.type == "cuda"
    threads = launch.threads or torch.get_num_threads()
    short = hardware.gpu_named(name)  # no CPU is called like one
    found = hardware.machine(short) if short else Machine(name, NODES["workstation"], None, None, None)
    with suppress(ConfigError):  # nothing is measured
        here = hardware.machine("here", ranks=launch.world)
        if here.name == name if cuda else here.cpu and here.threads == threads:
            found = here
    node = replace(found.node, gpus_per_node=launch.local_world, host_memory_bytes=available())
    return replace(found, node=node, threads=threads, memory_bytes=own_bytes(device), **gpu_facts(device))


def expect(found: Decided, launch: Launch, why: str) -> Estimate | None:
    """Estimates this run, or warns that it cannot. `why`: of its layout. Errors: ConfigError: no room."""
    cfg = replace(found.cfg, **found.kernels)
    try:
        machine = machine_of(found.device, launch)
        got = estimate(cfg, machine, launch.world, arena_here, found.documents).but(chosen=why)
        _ = got.seconds  # what fails, fails here
        lacks = not (got.fits or got.only_tight or found.force)
        others = [text.replace("--gpus=", "ranks=") for text, _ in remedies(got)] if lacks else []
    except Exception as e:  # an estimate is not worth a run
        warn(f"no estimate: {type(e).__name__}: {e}")
        return None
    if got.only_tight:
        margin = got.bytes_of("margin")[0] / 2**30
        warn(f"it will be tight: {got.why}, of which {margin:.3g} are a margin")
    elif lacks:
        raise ConfigError(f"block_size={cfg.block_size} does not fit: {got.why}; try "
                          f"{' or '.join([*others, '--force'])} (to run it all the same)")
    return got


def check_room(found: Checked, layout: Layout, launch: Launch) -> Decided:
    """Checks that a layout has memory. Errors: ConfigError."""
    cfg, device = layout.of_rank(launch.rank, launch.world), found.device
    if device.type == "cuda":
        check_streams(cfg, launch.world)
    limit = reserve.host_limit(cfg, launch, found.dtype.itemsize)
    reserve.check_memory(cfg, device, found.dtype, limit)
    if found.speaks and cfg.states == "sharded" and launch.world == cfg.tp:
        warn("states=sharded has one replica here, so nobody shares its states; states=host takes less of "
             "the device")
    return Decided(**vars(found) | dict(cfg=cfg, host_limit_bytes=limit))


# --- all ranks ---

def choose_layout(found: Checked, launch: Launch) -> tuple[Keys, str]:
    """Chooses the CHOSEN_KEYS -> (these, why): the checkpoint's, while they fit, for the losses' bits; else
    the fastest on a machine of this type; where an estimate fails the fewest. Errors: ConfigError."""
    if not found.cfg.undecided:
        return {}, ""
    cfg, saved = found.cfg, saved_keys(found.ckpt)
    before, stages = saved_choice(cfg, found.ckpt, launch.world), with_stages(cfg, launch.world)
    chooses = len(stages) > 1 or numbers_of(cfg) != [1] or cfg.states == "auto"
    try:
        machine = machine_of(found.device, launch)
        if before and chooses and estimate(replace(before, **found.kernels), machine, launch.world,
                                           fast_arena).untimed.fits:
            one, why = before, "as before"
        else:
            got = choose_fastest(replace(cfg, **found.kernels), machine, launch.world,
                                 documents=found.documents)
            one, why = got.decided, got.chosen
    except (ConfigError, OSError):
        raise
    except Exception as e:
        one, why = before or fewest(cfg, launch.world), "chosen without an estimate"
        told = " ".join(f"--{name}={getattr(one, name)}" for name in CHOSEN_KEYS
                        if getattr(cfg, name) == "auto")
        warn(f"no estimate: {type(e).__name__}: {e}; the run goes on with {told}")
    numbers = {name: getattr(one, name) for name in CHOSEN_KEYS}
    others = [f"{name}={saved[name]}" for name in numbers if saved and saved[name] != numbers[name]]
    return numbers, why + f"; before: {' '.join(others)}" * bool(why and others)


def saved_keys(ckpt: checkpoint.Checkpoint | None) -> Keys:
    """Reads the keys of a checkpoint whose run has chosen some, "asked" among them; else none."""
    stored = dict(ckpt.config) if ckpt and "asked" in ckpt.config else {}
    if stored and "states" not in stored:  # a younger key: without it they were on the device
        return stored | dict(states="device", asked=stored["asked"] | dict(states="auto"))
    return stored


def saved_choice(cfg: Config, ckpt: checkpoint.Checkpoint | None, world: int) -> Layout | None:
    """Makes the Layout that the checkpoint's run has chosen; None where something else was asked for."""
    saved = saved_keys(ckpt)
    asked = saved | saved.get("asked", {})
    same = saved and all(asked.get(name) == getattr(cfg, name) for name in {*CHOSEN_KEYS, *LAYOUT_KEYS})
    if not same or saved["pp"] not in [one.pp for one in with_stages(cfg, world)]:
        return None
    return Layout.of(cfg, **{name: saved[name] for name in CHOSEN_KEYS})


def restarted(argv: list[str], name: str) -> Path | None:
    """Finds the folder, out_dir or beside it, with a checkpoint of the run `name`, which starts again."""
    with suppress(ConfigError):  # check_rank() tells them
        out = Path(read_run(argv)[0].out_dir).absolute()
        for folder in (*out.parent.glob(f"{escape(out.name)}-" + "?" * 8), out):
            with suppress(OSError, ValueError):
                if latest(folder) and name in read_text(folder / LOCK).splitlines():
                    return folder
    return None


def check_ranks(host: Axis, check: Callable[[dict[Path, str]], T]) -> tuple[T, dict[Path, str]]:
    """Runs check(passed_over) on all ranks -> (its result on this rank, passed_over: {folder: why}). A
    checkpoint that is damaged, on whichever rank, is passed over for the one before it."""
    passed_over: dict[Path, str] = {}

    def attempt() -> T | Damaged:
        try:
            return check(passed_over)
        except Damaged as e:
            return e
    while True:
        found = together(host, attempt)
        damaged = (found.folder, str(found)) if isinstance(found, Damaged) else None
        everywhere = [d for d in host.objects(damaged) if d]
        if not isinstance(found, Damaged) and not everywhere:
            return found, passed_over
        passed_over |= dict(everywhere[:1])


def lock_again_checked(found: Decided, passed_over: dict[Path, str]) -> IO:
    """Locks out_dir. Errors: ConfigError: also where another run has come and gone since it was checked."""
    held = lock(found.out, found.owner)
    there = next((folder for folder in checkpoints(found.out) if folder not in passed_over), None)
    wanted = found.ckpt and found.ckpt.path
    if there != wanted:
        held.close()
        raise ConfigError(f"out_dir={found.out} held {wanted or 'no checkpoint'} a moment ago, now it holds "
                          f"{there or 'none'}: another run was there meanwhile; start again")
    return held


def prepare_run(argv: list[str], launch: Launch, host: Axis) -> Decided:
    """Checks the run on all ranks of `host`, locks out_dir, and sets up torch. Errors: ConfigError."""
    name = of_first(host, run_name)
    if before := of_first(host, restarted, argv, name):
        argv = [*argv, "--init_from=resume", f"--out_dir={before}"]
    checked, passed_over = check_ranks(host, partial(check_rank, argv, launch))
    cfg, device = checked.cfg, checked.device
    here = checked.origin | {"device in use": device.type, "checkpoint": checked.ckpt and checked.ckpt.iter}
    same_everywhere(host, as_keys(cfg) | here)
    numbers, why = of_first(host, choose_layout, checked, launch)  # in place of all ranks' auto
    found = together(host, check_room, checked, Layout.of(cfg, **numbers), launch)
    found.asked = {name: "auto" for name in numbers if getattr(cfg, name) == "auto"}
    if expected := of_first(host, expect, found, launch, why):
        found.expected = expected.but(shown=expected.stages[found.cfg.stage])
    # one run at a time writes there, and all its ranks to the same folder
    found.owner = host.objects(f"{name}\n{uuid4().hex}")[0]
    found.lock = together(host, lambda: lock_again_checked(found, passed_over) if found.speaks else None)
    together(host, check_shared, found.out, found.owner)
    launch.take(device)
    for folder, why in passed_over.items():  # nothing is left to check: the run writes others in their place
        warn(f"checkpoint passed over: {why}")
        of_first(host, checkpoint.pass_over, folder)
    torch.manual_seed(cfg.seed)
    return found


def open_run(found: Decided, mesh: Mesh, model: Model, optimizer: Optimizer, decision: Decision) -> Run:
    """Makes the Run of a model that is ready to train, and out_dir's first files. Errors: ConfigError."""
    cfg, first = found.cfg, found.ckpt.iter if found.ckpt else 0
    # an optimizer on the host has no room for a copy: its next step waits for the disk
    saver = checkpoint.Saver(found.out, mesh.host.another(), cfg.pin_memory, cfg.keep_checkpoints,
                             first if found.ckpt else None, copies=not cfg.optimizer_on_host,
                             lease=lambda out: run.lock is None or (out == run.out and run.has_folder))
    run = Run(**vars(found), mesh=mesh, model=model, optimizer=optimizer, decision=decision, saver=saver,
              order=row_order(model.cfg, cfg.block_size, mesh),
              lines=reserve.where_it_lives(cfg, decision, model, optimizer),
              peak=peak_flops_per_s(device_name(found.device)) if found.dtype == torch.bfloat16 else None,
              first=first, step=first, done=first)
    if cfg.pp > 1:
        run.stage_records = mesh.of_stages(dict(stage=cfg.stage, layers=list(cfg.layers)) | stage_record(run))
    run.loggers = together(mesh.host, lambda: open_loggers(run) if run.speaks else [])
    return run


def open_loggers(run: Run) -> list:
    """Writes the first files of out_dir -> the loggers. Errors: ConfigError: out_dir cannot be written."""
    cfg = run.cfg
    try:
        own = Path(run.hf or run.out / OWN)
        run.own = own_files(own) if run.hf or run.ckpt else {}
        if not run.ckpt and (run.out / CONFIG).exists():  # of a run that has left no checkpoint
            rmtree(run.out / OWN, ignore_errors=True)
        own_folder(run.out / CHECKPOINT)  # an error now rather than at the first save
        furnish(run, run.out)
        loggers: list = [JsonlLogger(run.out / "metrics.jsonl", run.first)]
    except OSError as e:
        raise ConfigError(f"out_dir={run.out} cannot be written ({reason(e)}); "
                          f"{elsewhere(e, '--out_dir')}") from None
    loggers.append(ConsoleLogger(cfg.max_iters, run.first))
    if cfg.wandb_log:
        loggers.append(WandbLogger(cfg, as_keys(cfg), run.stored["wandb_id"]))
    return loggers
