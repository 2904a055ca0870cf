"""Is this very run right? python -m memo.verify [config/x.py] [--key=value ...]

Takes what train.py takes, cuts it to a size at which a CPU verifies it in seconds, with its layout, modes
and model as they are, and starts its ranks. Compares one plain process with a reference in fp64; this layout
with that process; its modes with each other; three steps of training with AdamW in fp64 and with the data's
own file; a resumed run and an exported one with that. It ends with the first check that is wrong.

--gpus=N     ranks in all; by default pp * tp * cp of the config
--full       leaves widths and vocabulary as they are
--json       one object in place of the lines
--device=cuda: on the GPUs that are there, else on the CPU

Exit code 0: all is right; 1: a check failed, its line comes first; 2: bad input."""

import sys
from dataclasses import replace

from memo.config.config import Config
from memo.config.keys import Keys, option, typed
from memo.errors import ConfigError
from memo.run.load_config import load_keys
from memo.system.command import answer_early, check_alone, run
from memo.verify.shrink import shrink

GPUS = option("--gpus", int, least=1, most=2**20, why="no cluster has as many")
FLAGS = ("full", "json")


def read_argv(argv: list[str]) -> tuple[Config, int, Keys]:
    """Reads a command line -> (the run's config, its ranks, flags). Errors: ConfigError."""
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        sys.exit()
    check_alone("python -m memo.verify")
    flags = {name: f"--{name}" in argv for name in FLAGS}
    given = [arg for arg in argv if arg.startswith("--gpus=")]
    rest = [arg for arg in argv if arg not in given and arg not in {f"--{name}" for name in FLAGS}]
    cfg = Config(**load_keys(rest))
    ranks = cfg.tp * cfg.cp * (1 if cfg.pp == "auto" else cfg.pp)
    world = typed(GPUS, given[-1].partition("=")[2], "--") if given else ranks
    if world < 1 or world % ranks:
        raise ConfigError(f"--gpus={world} must be a multiple of pp*tp*cp={ranks}")
    return cfg, world, flags


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import json
import time
from functools import partial

from memo.system.axis import Axis
from memo.verify.checks import Checks
from memo.verify.compare import Finding
from memo.verify.ranks import Told, run_ranks


def to_verify(cfg: Config, world: int, full: bool) -> tuple[Config, Keys, int, int, list[str]]:
    """Cuts a run -> (the config to verify, in fp32; keys of its own precision, {} where that is fp32; rows
    that are swapped in multiples; ranks; what was cut). Errors: ConfigError."""
    keys, ranks, split, cut = shrink(cfg, world, full)
    cuda = cfg.device == "cuda"
    faster = max(1.0, 1e-3 / cfg.learning_rate) if cfg.learning_rate else 1.0  # above the rounding of weights
    low = {}
    if cfg.matmul == "fp8" or cfg.dtype == "bfloat16" or (cuda and cfg.dtype == "auto"):
        low = dict(dtype="bfloat16" if cfg.dtype != "float32" else "float32", matmul=cfg.matmul)
        low |= dict(attention=cfg.attention) if cuda else {}
    small = replace(
        cfg, **keys, device="cuda" if cuda else "cpu", dtype="float32", matmul="bf16", init_from="scratch",
        eval_interval=2, eval_iters=2, save_interval=2, max_iters=3, warmup_iters=min(2, cfg.warmup_iters),
        lr_decay_iters=0, log_interval=1, keep_checkpoints=3, stall_timeout=0.0, wandb_log=False,
        check_data=False, documents=False, pack="best_fit", learning_rate=cfg.learning_rate * faster,
        min_lr=cfg.min_lr * faster, attention=cfg.attention if cfg.attention == "math" else "auto",
        ops=cfg.ops if cuda else "auto", memory_plan_check=cfg.memory_plan != "off")
    if cfg.host_memory_gb != "auto":
        small = replace(small, host_memory_gb=16.0)
    if cfg.documents:
        cut.append("documents=true -> false: masks of documents are not verified yet")
    if cfg.pp == "auto":
        small = replace(small, pp=1)
        cut.append("pp=auto -> 1: give --pp= of the run")
    return small, low, split, ranks, cut


def work(asked: Config, small: Config, low: Keys, split: int, host: Axis, told: Told) -> None:
    Checks(asked, small, low, split, host, told).run()


def main(argv: list[str]) -> int:
    """Runs the command line -> the exit code. Errors: ConfigError."""
    cfg, world, flags = read_argv(argv)
    small, low, split, ranks, cut = to_verify(cfg, world, flags["full"])
    found, began = list[Finding](), time.monotonic()
    where = f"{ranks} rank{'s' * (ranks > 1)} on {'GPUs' if small.device == 'cuda' else 'the CPU'}"
    run_ranks(partial(work, cfg, small, low, split), ranks, found.append)
    failed = [f for f in found if not f.right]
    if flags["json"]:
        print(json.dumps(dict(right=not failed, ranks=ranks, cut=cut, seconds=time.monotonic() - began,
                              checks=[f._asdict() for f in failed + [f for f in found if f.right]])))
    else:
        for f in failed + [f for f in found if f.right]:
            print(f"{f.check:10} {'right ' if f.right else 'WRONG '} {f.text}")
        print(f"{'cut':10} {where}: {', '.join(cut) or 'nothing'}")
        print("right" if not failed else f"{len(failed)} wrong")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run(main))
