"""Does a name that memo writes lead out of its folders, hang it, or lose what stands there?

    python -m bench.plants [command ...]      a quarter of an hour on two cores; needs strace

Each command runs twice on small input under strace: the names that it opens for writing, makes, renames or
removes both times can be planted, the others are drawn anew by every run; of names that differ in a digest
only, one is taken. Then, for each such name and each plant, the command runs in a fresh copy of the input
with the plant in place. Wrong is: something outside has changed; what was planted is not there any more (but
a second name of a file may be replaced, and so may what stands in wandb's own folder); a traceback; an error
of more than a line; no end within LIMIT_S seconds.

Folders that the command line or the environment name may be links to folders. Not planted: what torch, wandb
and matplotlib keep in the home folder, beside memo's cache and in TMPDIR.

Writes bench/results/plants.json.
"""

import atexit
import contextlib
import functools
import importlib
import itertools
import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.machine import store_parts
from memo.run import measure

ROOT = Path(__file__).parents[1]
LIMIT_S = 120
TINY = ("--n_layer=2 --n_head=2 --n_embd=16 --block_size=64 --batch_size=1 --max_iters=3 --eval_interval=2 "
        "--eval_iters=1 --save_interval=1 --device=cpu --dataset=data --lr_decay_iters=3 --warmup_iters=0 "
        "--position=learned --keep_checkpoints=2").split()
COMMANDS = {
    "train": ["train.py", *TINY, "--init_from=hf:hf", "--out_dir=out"],
    "train, wandb": ["train.py", *TINY, "--out_dir=out", "--wandb_log=true"],
    "resume": ["train.py", *TINY, "--out_dir=run", "--init_from=resume", "--max_iters=4"],
    "evaluate": ["memo.evaluate", "run", "--batches=1"],
    "sample": ["memo.sample", "run", "--prompt=the", "--max_new_tokens=2"],
    "from-hf": ["memo.convert", "from-hf", "hf", "made"],
    "to-hf": ["memo.convert", "to-hf", "run", "made"],
    "text": ["data/text/prepare.py", "--source=text.txt", "--tokenizer=train:300", "--out_dir=made"],
    "text again": ["data/text/prepare.py", "--source=text.txt", "--tokenizer=train:300", "--out_dir=data"],
    "stdlib": ["data/stdlib/prepare.py", "--vocab_size=300", "--out_dir=made"],
    "estimate": ["memo.estimate", *TINY, "--gpu=a800-80gb", "--gpus=1", "--fast", "--plot=a.png"],
    "planner": ["memo.planner", "a.log", "-o", "plan.json"],
    "dsa": ["memo.dsa", "a.csv", "-o", "plan.csv"],
    "calibrate": ["memo.profiler", "--calibrate", "--device=cpu"],
    "trace_step": ["memo.run.trace_step", *TINY, "--vocab_size=300"],
}
NAMED = {"out", "made", "data", "run", "cache"}  # the command line names these folders: they may be links
WRITES = re.compile(r"\d+ +(?:open(?:at)?\(.*O_(?:WRONLY|RDWR|CREAT|TRUNC)|(?:creat|rename|mkdir|rmdir|"
                    r"unlink|link|symlink|truncate|mknod|chmod|chown|fchownat|fchmodat|utimensat)(?:at2?)?\()")
PATHS = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
DIGEST = re.compile(r"-[0-9a-f]{16}(?=\.)")
THEIRS = re.compile(r"home|cache/(?!memo)\w+|tmp/(?!memo)|.*\.pyc$")  # of libraries


def plant_link(what):
    return lambda path, outside: path.symlink_to(outside / what)


PLANTS = {
    "link to a file": plant_link("file"),
    "link to nothing": plant_link("new"),
    "link to a folder": plant_link("folder"),
    "link to a device": lambda path, outside: path.symlink_to("/dev/full"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "device": lambda path, outside: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7)),
    "folder": lambda path, outside: (path.mkdir(), (path / "mine").write_text("mine")),
    "second name of a file": lambda path, outside: os.link(outside / "file", path),
}


def start(case, argv, stopped=False):
    """Run a command in a forked process, in the folder `case` -> its pid."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(case)
        os.environ |= dict(HOME=f"{case}/home", TMPDIR=f"{case}/tmp", XDG_CACHE_HOME=f"{case}/cache",
                           MPLCONFIGDIR=f"{case}/home", WANDB_MODE="offline", PYTHONPATH=str(ROOT))
        tempfile.tempdir = None
        said = os.open(f"{case}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.argv = argv
        if argv[0].endswith(".py"):
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end(pid):
    """Wait for a command, kill what it left running -> its exit code; None: it hung."""
    code, deadline = None, time.monotonic() + LIMIT_S
    try:
        while code is None and time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


class Lab:
    """A folder for experiments, with what the commands read: `given`, of which each case gets a copy."""

    def __init__(self, folder):
        self.folder, self.given, self.numbers = folder, folder / "given", itertools.count()
        for name in ("home", "tmp", "cache"):
            (self.given / name).mkdir(parents=True, mode=0o700)
        (self.given / "a.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
        (self.given / "a.log").write_text("malloc a 10\nmalloc b 20\nfree a 10\nfree b 20\n")
        (self.given / "text.txt").write_text("".join(f"the memory {i * i} of step {i}\n" for i in range(999)))
        self.must("text", out_dir="data")
        self.must("train, wandb", out_dir="first", wandb_log="false")
        self.must("to-hf", ["memo.convert", "to-hf", "first", "hf"])
        (self.given / "hf/additional_chat_templates").mkdir()
        for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
            (self.given / "hf" / name).write_text("{{ messages }}")
        self.must("train", out_dir="run")
        (self.given / "tmp").rename(folder / "tmp")
        (self.given / "tmp").mkdir()

    def must(self, name, argv=None, **keys):
        code = end(start(self.given, argv or COMMANDS[name] + [f"--{k}={v}" for k, v in keys.items()]))
        if code != 0:
            raise SystemExit(f"{name} ends with {code}: {Path(f'{self.given}.said').read_text()[-500:]}")

    def fresh(self, cold=False):
        """-> a new copy of what is given; `cold`: with an empty cache."""
        case = shutil.copytree(self.given, self.folder / f"case{next(self.numbers):04}", symlinks=True)
        if cold:
            shutil.rmtree(case / "cache/memo")
        return case

    def written(self, name):
        """-> the names, below a case's folder, that a command writes, makes, renames or removes."""
        case, found = self.fresh(cold=True), set()
        pid = start(case, COMMANDS[name], stopped=True)
        os.waitpid(pid, os.WUNTRACED)
        log = Path(f"{case}.log")
        with subprocess.Popen(["strace", "-f", "-y", "-s4096", "-e", "trace=%file", "-o", log, "-p",
                               str(pid)], stderr=subprocess.PIPE, text=True) as tracer:
            tracer.stderr.readline()  # it is attached
            os.kill(pid, signal.SIGCONT)
            if (code := end(pid)) != 0:
                raise SystemExit(f"{name} ends with {code}: {Path(f'{case}.said').read_text()[-500:]}")
        for line in log.read_text(errors="replace").splitlines():
            for folder, path in PATHS.findall(line) if WRITES.match(line) else ():
                path = os.path.normpath(os.path.join(case, folder, path))
                if path.startswith(f"{case}/") and not THEIRS.match(short := path[len(f"{case}/"):]):
                    found.add(short)
        shutil.rmtree(case)
        return found

    def wrong(self, command, name, plant):
        """-> what is wrong after a command that finds a plant at `name`; "" if nothing is."""
        case = self.fresh()
        path, outside = case / name, Path(f"{case}.outside")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (outside / "folder/9").mkdir(parents=True)
        (outside / "folder/9/checkpoint.json").write_text("damaged")
        (outside / "folder/8.0123.tmp").mkdir()
        (outside / "folder/additional_chat_templates").mkdir()
        (outside / "file").write_text("mine")
        if path.is_dir():
            shutil.copytree(path, outside / "folder", dirs_exist_ok=True)
            path.rename(f"{case}.was")
        elif path.exists():
            path.rename(outside / "file")
        PLANTS[plant](path, outside)
        planted, before = path.lstat(), tree(outside)
        code = end(start(case, COMMANDS[command]))
        said = Path(f"{case}.said").read_text(errors="replace")
        kept = [found for p in case.rglob("*") if os.path.samestat(found := p.lstat(), planted)
                and stat.S_IFMT(found.st_mode) == stat.S_IFMT(planted.st_mode)]  # a number comes again
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        found = [what for what, is_so in {
            "hangs": code is None,
            "a traceback": "Traceback" in said,
            f"ends with {code}": code is not None and (code not in (0, 1, 2) or len(errors) != (code > 0)),
            f"changed outside: {sorted({row[0] for row in before ^ tree(outside)})}": before != tree(outside),
            "not there any more": not kept and plant != "second name of a file" and "/wandb/" not in name,
            "its content is lost": plant == "folder" and not [*case.rglob("mine")],
        }.items() if is_so]
        for rest in case.parent.glob(f"{case.name}*"):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        return "; ".join(found)

    def try_all(self, command, rounds):
        first, second = self.written(command), self.written(command)
        kinds = {DIGEST.sub("", name): name for name in sorted(first & second)}  # a plan is one of a hundred
        names = sorted(kinds.values())
        if command == "train, wandb":  # the others are those of "train"
            names = [n for n in names if n.startswith("out/wandb")] + ["out/.wandb", "out/wandb/settings"]
        cases = [(name, plant) for name in names for plant in PLANTS
                 if plant != "link to a folder" or name not in NAMED]
        with ThreadPoolExecutor(2) as pool:
            wrong = {": ".join(case): text for case, text in zip(cases, pool.map(
                lambda case: self.wrong(command, *case), cases), strict=True) if text}
        print(f"{command}: {len(names)} names, {len(cases)} plants, {len(wrong)} wrong", *wrong.items(),
              sep="\n    ", flush=True)
        return dict(names=names, drawn=len(first - second), plants=len(cases), wrong=wrong)


def tree(folder):
    """{(path, mode, time of change, content)} of all that is in a folder."""
    return {(str(p.relative_to(folder)), (found := p.lstat()).st_mode, found.st_mtime_ns,
             p.read_bytes() if p.is_file() else b"")
            for p in (folder, *folder.rglob("*"))}


def main():
    torch.set_num_threads(1)
    for name in ("memo.plots.figures", "matplotlib.pyplot", "tokenizers", "memo.checkpoint.dcp",
                 "memo.convert", "train"):
        importlib.import_module(name)
    measure.REPEATS, measure.LEAST_S, measure.ROUNDS = 1, 0.0, 1  # the file counts, not what is in it
    matmuls, attentions = measure.matmuls, measure.attentions
    measure.matmuls = lambda size, rows, *how: matmuls(size, rows // 64, *how)
    measure.attentions = lambda T, *how: attentions(T // 8, *how)
    folder = Path(tempfile.mkdtemp())  # no TemporaryDirectory: a forked command would remove it at its end
    paths = sysconfig.get_paths() | dict(stdlib=str(folder / "sources"))
    shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / "json", paths["stdlib"])
    sysconfig.get_paths = lambda: paths
    try:
        lab = Lab(folder / "lab")
        store_parts(__doc__, ROOT / "bench/results/plants.json",
                    {name: functools.partial(lab.try_all, name) for name in COMMANDS})
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
