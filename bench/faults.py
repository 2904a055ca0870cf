"""Is what a run said to have saved there, whatever happens to its folder?

    python -m bench.faults [calls] [memory] [power] [races]      under twenty minutes on two cores

A tiny run of three steps, each saved, is disturbed by a preloaded library (bench/faults.c), and then resumed:
the states must be those of a run that was left alone, to the last bit, as torch's own reader of checkpoints
sees them.

calls   each call that changes a file in out_dir fails (no space, an I/O error), or the process is killed
        before it, after it, or half-way through it
memory  50 limits of the address space, from the save on
power   the log of all calls, cut at random places: what was not synced is dropped, in part or whole
races   another run starts while the first is stopped at each of its calls that touch out_dir, also after
        the folder was removed: no checkpoint of a run that says "done" is lost

Writes bench/results/faults.json.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import memo.run.report
import train
from bench.machine import store_parts
from memo.checkpoint import checkpoint
from memo.checkpoint.manifest import checkpoints
from memo.run.loggers import read_metrics
from memo.system.command import run

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_suffix(".c")
KINDS = ("no space", "I/O error", "killed before", "killed after", "killed half-way")
STOPPED = 6  # the kind of a run that is stopped
KEYS = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=64,
    max_iters=3,
    save_interval=1,
    eval_interval=0,
    device="cpu",
    memory_plan="off",
    lr_decay_iters=3,
    warmup_iters=0,
)
LIMITS, SAMPLES = 50, 200


def preloaded() -> ctypes.CDLL:
    """The library, in this process; which is started again with it where it was not."""
    path = Path(tempfile.gettempdir()) / f"memo-faults-{os.getuid()}" / "faults.so"
    if os.environ.get("LD_PRELOAD") != str(path):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
        os.environ |= dict(LD_PRELOAD=str(path), OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "bench.faults", *sys.argv[1:]])
    return ctypes.CDLL(str(path))


class Lab:
    """A folder for experiments, with a dataset."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, preloaded()
        memo.run.report.draw_picture = lambda *args: None  # they take longer than the run
        data = folder / "data"
        data.mkdir()
        for split in ("train", "val"):
            np.arange(4096, dtype="<u2").__mod__(50).tofile(data / f"{split}.bin")
        counts = dict(train=dict(tokens=4096), val=dict(tokens=4096))
        (data / "meta.json").write_text(json.dumps(dict(dtype="uint16", vocab_size=50, counts=counts)))

    def start(
        self,
        out: Path,
        number: int = -1,
        kind: int = 0,
        log: int = -1,
        before: Callable[[], object] = lambda: None,
        **keys: object,
    ) -> int:
        """Start a run in a forked process, disturbed at its call `number` -> its pid."""
        argv = [
            f"--{k}={v}" for k, v in (KEYS | dict(dataset=self.folder / "data", out_dir=out) | keys).items()
        ]
        if pid := os.fork():
            return pid
        said = os.open(f"{out}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        self.library.faults_start(str(out).encode(), number, kind, log)
        before()
        code = 99
        with contextlib.suppress(BaseException):
            code = run(train.main, argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(said, f"\ncalls: {self.library.faults_count()}\n".encode())
        os._exit(code)

    def end(self, pid: int, seconds: float = 120) -> int:
        """Wait for a run -> its exit code; one that hangs is killed, and its code is 98."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 98

    def run(self, out: Path, **how: object) -> int:
        return self.end(self.start(out, **how))  # type: ignore[arg-type]

    def said(self, out: Path) -> str:
        return Path(f"{out}.said").read_text(errors="replace")

    def finish(self, out: Path) -> int:
        """Go on from what is in `out` to the end, as a user would -> the exit code."""
        return self.run(out, **dict(init_from="resume") if checkpoints(out) else {})

    def fresh(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder)) / "out"


def state_of(out: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint, as torch's own reader has them."""
    folder = checkpoints(out)[0]
    reader = dcp.FileSystemReader(folder)
    state = {
        name: torch.empty(stored.size) for name, stored in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()} | {"iter": folder.name.encode()}


def judged(lab: Lab, out: Path, whole: tuple[dict, list]) -> str:
    """Go on after a fault, and say what is wrong, or "". `whole`: (states, losses) of a run left alone."""
    said = lab.said(out)
    for folder in re.findall(r"are saved in (\S+?)(?: instead)?;", said):
        if not checkpoints(folder):
            return f"said to be saved in {folder}, nothing is there"
    if "Traceback" in said:
        return "a traceback"
    if "done: 3 steps" in said and not (checkpoints(out) and checkpoints(out)[0].name == "3"):
        return "done, and step 3 is not there"
    if (code := lab.finish(out)) != 0:
        return f"resume ends with {code}: {lab.said(out).strip().splitlines()[-2][:200]}"
    if state_of(out) != whole[0]:
        return "other states"
    losses = [(row["iter"], row["loss"]) for row in read_metrics(out / "metrics.jsonl")]
    return "" if set(losses) <= set(whole[1]) else "other losses"


def left_alone(lab: Lab) -> tuple[Path, tuple[dict, list], int]:
    """A run that nothing disturbs -> (its folder, (states, losses), its calls)."""
    out = lab.fresh()
    assert lab.run(out) == 0, lab.said(out)
    losses = [(row["iter"], row["loss"]) for row in read_metrics(out / "metrics.jsonl")]
    return out, (state_of(out), losses), int(re.findall(r"calls: (\d+)", lab.said(out))[-1])


def tally(cases: Iterator[tuple[str, Callable[[], str]]]) -> dict:
    """Run cases, two at a time -> how many, and what was wrong."""
    wrong, n, began = [], 0, time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for name, text in pool.map(lambda case: (case[0], case[1]()), list(cases)):
            n += 1
            if text:
                wrong.append(f"{name}: {text}")
                print(wrong[-1], flush=True)
    print(f"{n} cases, {len(wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
    return dict(cases=n, wrong=wrong)


def calls(lab: Lab) -> dict:
    _, whole, n = left_alone(lab)

    def case(number: int, kind: int) -> str:
        out = lab.fresh()
        lab.run(out, number=number, kind=kind)
        text = judged(lab, out, whole)
        shutil.rmtree(out.parent)
        return text

    return dict(calls=n) | tally(
        (f"call {number} {name}", lambda number=number, kind=kind: case(number, kind))
        for number in range(n)
        for kind, name in enumerate(KINDS, 1)
    )


def memory(lab: Lab) -> dict:
    _, whole, _ = left_alone(lab)

    def limited(more: int) -> Callable[[], None]:
        real = checkpoint.Saver.save

        def save(self: checkpoint.Saver, *args: object) -> None:
            if args[-1] == 2:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
            real(self, *args)  # type: ignore[arg-type]

        return lambda: setattr(checkpoint.Saver, "save", save)

    def case(more: int) -> str:
        out = lab.fresh()
        lab.run(out, before=limited(more))
        return judged(lab, out, whole)

    return tally(
        (f"{more:,} bytes more", lambda more=more: case(more))
        for more in (int(2 ** (k * 27 / LIMITS)) for k in range(LIMITS))
    )


# --- power cuts ---


def entries(log: bytes) -> list[tuple[str, str, str, int, bytes]]:
    """[(call, path, other path, offset, data)] of a log of bench/faults.c."""
    found, at = [], 0
    while at < len(log):
        end = log.index(b"\n", at)
        name, path, other, offset, n = log[at:end].decode().split("\t")
        at = end + 1 + int(n)
        found.append((name, path, other, int(offset), log[end + 1 : at]))
    return found


def after_a_cut(made: list, out: str, rng: random.Random) -> tuple[dict[str, bytes | None], set[str]]:
    """What a disk may hold after the calls `made` and a power cut -> ({path: content; None: a folder}, names
    of the checkpoints that are certain). Content is certain where its file was synced since, a name where its
    folder was; what is not certain is there or not, by chance."""
    contents, names, sizes = dict[int, list], dict[str, int | None](), 0
    contents, disk = {}, dict[str, int | None]()  # names: as the run sees them; disk: certain ones
    pending: list[tuple[str, list]] = []  # (folder, [(path, file or "gone")])
    folder_of = os.path.dirname
    certain = set()
    names[out] = disk[out] = None

    def moved(table: dict, a: str, b: str) -> None:
        for path in [p for p in table if p == a or p.startswith(a + "/")]:
            table[b + path[len(a) :]] = table.pop(path)

    for call, path, other, offset, data in made:
        if call in ("create", "mkdir"):
            sizes += 1
            names[path] = None if call == "mkdir" else sizes
            if call == "create":
                contents[sizes] = []
            pending.append((folder_of(path), ["make", path, names[path]]))
        elif call in ("write", "truncate") and names.get(path) is not None:
            contents[names[path]].append([call, offset, data, False])
        elif call == "rename":
            moved(names, path, other)
            pending.append((folder_of(other), ["move", path, other]))
        elif call == "unlink":
            names.pop(path, None)
            pending.append((folder_of(path), ["gone", path, None]))
        elif call == "fsync" and names.get(path) is not None:
            for part in contents[names[path]]:
                part[3] = True
        elif call == "fsync":
            for folder, entry in [e for e in pending if e[0] == path]:
                apply(disk, entry, moved)
                pending.remove((folder, entry))
                if entry[0] == "move" and re.fullmatch(r".*/ckpt/\d+", entry[2]):
                    certain.add(os.path.basename(entry[2]))
                if entry[0] == "move" and entry[1].rpartition("/")[2].isdigit():
                    certain.discard(os.path.basename(entry[1]))
    for _, entry in pending:  # some of the rest, in order
        if rng.random() < 0.5:
            apply(disk, entry, moved)
            if entry[0] == "move":
                certain.discard(os.path.basename(entry[1]))
    found: dict[str, bytes | None] = {}
    for path, file in disk.items():
        if file is None:
            found[path] = None
            continue
        text = b""
        for call, offset, data, synced in contents[file]:
            if synced or rng.random() < 0.5:
                text = (
                    text[:offset]
                    if call == "truncate"
                    else (text[:offset].ljust(offset, b"\0") + data + text[offset + len(data) :])
                )
        found[path] = text
    return found, certain


def apply(disk: dict, entry: list, moved: Callable) -> None:
    kind, path, what = entry
    if kind == "make":
        disk[path] = what
    elif kind == "gone":
        for name in [p for p in disk if p == path or p.startswith(path + "/")]:
            del disk[name]
    else:
        moved(disk, path, what)


def power(lab: Lab) -> dict:
    _, whole, _ = left_alone(lab)
    out = lab.fresh()
    with tempfile.TemporaryFile() as log:
        assert lab.run(out, log=log.fileno()) == 0
        log.seek(0)
        made = entries(log.read())

    def case(seed: int) -> str:
        rng, there = random.Random(seed), lab.fresh()
        disk, certain = after_a_cut(made[: rng.randrange(len(made) + 1)], str(out), rng)
        for path, text in sorted(disk.items()):
            place = there / Path(path).relative_to(out)
            if text is None:
                place.mkdir(parents=True, exist_ok=True)
            elif place.parent.is_dir():
                place.write_bytes(text)
        if lost := certain - {folder.name for folder in checkpoints(there)}:
            return f"checkpoints {sorted(lost)} were synced and are gone"
        Path(f"{there}.said").touch()
        text = judged(lab, there, whole)
        shutil.rmtree(there.parent)
        return text

    return dict(calls=len(made)) | tally(
        (f"cut {seed}", lambda seed=seed: case(seed)) for seed in range(SAMPLES)
    )


# --- races ---


def races(lab: Lab) -> dict:
    states = {}
    for seed in (1, 2):
        out = lab.fresh()
        assert lab.run(out, seed=seed) == 0
        states[seed] = state_of(out)
    out = lab.fresh()
    lab.run(out, number=10**6, kind=STOPPED, seed=1)
    n = int(re.findall(r"calls: (\d+)", lab.said(out))[-1])

    def case(number: int, removed: bool) -> str:
        out = lab.fresh()
        first = lab.start(out, number=number, kind=STOPPED, seed=1)
        os.waitpid(first, os.WUNTRACED)  # stopped, or over
        if removed:
            shutil.rmtree(out, ignore_errors=True)
        before = Path(f"{out}.said").read_text()
        second = lab.run(out, seed=2)
        middle = lab.said(out)[len(before) :]
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(first, signal.SIGCONT)
            lab.end(first)
        last = lab.said(out)[len(before) + len(middle) :]
        for seed, text in ((2, middle), (1, last)):
            for folder in re.findall(r"done: 3 steps; (\S+?)/ holds", text):
                there = Path(folder)
                if not checkpoints(there) or state_of(there) != states[seed]:
                    return f"run {seed} is done in {there.name}, and its checkpoint is not there"
        if second not in (0, 2):
            return f"the second run ends with {second}"
        return "a traceback" if "Traceback" in middle + last else ""

    return dict(calls=n) | tally(
        (
            f"stopped at {number}" + ", folder removed" * removed,
            lambda number=number, removed=removed: case(number, removed),
        )
        for number in range(n)
        for removed in (False, True)
    )


def main() -> None:
    preloaded()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        parts = {
            work.__name__: (lambda rounds, work=work: work(lab)) for work in (calls, memory, power, races)
        }
        store_parts(__doc__, ROOT / "bench/results/faults.json", parts)


if __name__ == "__main__":
    main()
