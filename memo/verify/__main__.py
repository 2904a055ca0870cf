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

from memo.config.config import Config
from memo.config.keys import Keys, counted, option, typed
from memo.errors import ConfigError
from memo.run.load_config import load_keys
from memo.system.command import answer_early, check_alone, run

GPUS = option("--gpus", int, least=1, most=2**20, why="no cluster has as many")
FLAGS = ("--full", "--json")


def read_argv(argv: list[str]) -> tuple[Config, int, Keys]:
    """Reads a command line -> (the run's config, its ranks, flags). Errors: ConfigError."""
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        sys.exit()
    check_alone("python -m memo.verify")
    given = [arg for arg in argv if arg.startswith("--gpus=")]
    cfg = Config(**load_keys([arg for arg in argv if arg not in (*given, *FLAGS)]))
    ranks = cfg.tp * cfg.cp * (1 if cfg.pp == "auto" else cfg.pp)
    world = typed(GPUS, given[-1].partition("=")[2], "--") if given else ranks
    if world < 1 or world % ranks:
        raise ConfigError(f"--gpus={world} must be a multiple of pp*tp*cp={ranks}")
    return cfg, world, {flag: flag in argv for flag in FLAGS}


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import json
import time

from memo.verify.checks import Checks
from memo.verify.compare import Finding
from memo.verify.ranks import run_ranks
from memo.verify.shrink import shrink


def main(argv: list[str]) -> int:
    """Runs the command line -> the exit code. Errors: ConfigError."""
    cfg, world, flags = read_argv(argv)
    cut, every, began = shrink(cfg, world, flags["--full"]), list[Finding](), time.monotonic()
    run_ranks(lambda host, told: Checks(cfg, cut, host, told).run(), cut.ranks, every.append)
    every.sort(key=lambda found: found.right)  # what is wrong comes first
    wrong = sum(not found.right for found in every)
    if flags["--json"]:
        print(json.dumps(dict(right=not wrong, ranks=cut.ranks, cut=cut.words,
                              seconds=time.monotonic() - began, checks=[found._asdict() for found in every])))
        return int(wrong > 0)
    for found in every:
        print(f"{found.check:10} {'right ' if found.right else 'WRONG '} {found.text}")
    where = (f"{counted(cut.ranks, 'rank')} on {'GPUs' if cut.cfg.device == 'cuda' else 'the CPU'}, "
             f"a text of its own in place of dataset={cfg.dataset}")
    print(f"{'cut':10} {where}: {', '.join(cut.words) or 'nothing'}")
    print(f"{wrong} wrong" if wrong else "right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(run(main))
