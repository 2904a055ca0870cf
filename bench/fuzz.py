"""Does anything that can be given to memo end in a traceback, hang, run planted code or lose what was
trained?

    python -m bench.fuzz [--seed=0] [--cases=2000] [--kinds=argv,json] [--out=bench/results/fuzz.json]
    python -m bench.fuzz --seed=0 --only=17      one case again: its commands, files and output, which stay

Seeded random cases of the kinds in bench/fuzz_cases.py. A black box: command lines and files, a copy of the
sources in a scratch folder, nothing of memo is imported here. Each command must end
  traceback   without a traceback, a backtrace or a crash,
  hang        within 20 s,
  exit        with 0, 1 (a run that failed), 2 (bad input), 3 (memo.dsa only), or by a signal that was sent,
  line        where it fails, with exactly one line `error: ...` on stderr, the last one,
  canary      without running what was planted,
  loss        without loss of what was saved or trained.

Two servers import torch once and fork a child for each command; the child executes the program as `python`
does.
"""

import argparse
import compileall
import gc
import importlib
import json
import os
import platform
import queue
import random
import re
import resource
import runpy
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import count, islice
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
SOURCES = ("memo", "config", "train.py", "model.py", "data/stdlib/prepare.py",
           "data/text/prepare.py")
LIMIT_S = 20
MEMORY_BYTES = 10 * 2**30  # of a command: a machine of 24 GiB must outlive what asks for too much
FILE_BYTES = 2 * 2**30
CRASH = re.compile(r"Traceback \(most recent call last\)|Exception ignored|Segmentation|terminate called"
                   r"|Fatal Python|C\+\+ CapturedTraceback|frame #\d+:|stack smashing|double free"
                   r"|panicked at")
LIBRARIES = ("torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.metadata",
             "torch.optim.adamw", "torch._subclasses.fake_tensor", "torch.utils._python_dispatch", "numpy",
             "tokenizers", "tqdm", "matplotlib.figure", "matplotlib.pyplot",
             "matplotlib.backends.backend_agg", "safetensors.torch", "scipy.optimize",
             "ortools.sat.python.cp_model", "datasets", "pyarrow.parquet")


# --- a server: forks, waits, sends signals; its children become the commands ---

def redirect(job, writer):
    """File descriptors 0 to 2 and Python's streams of a child."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, to in ((1, job["stdout"]), (2, job["stderr"])):
        how = os.O_WRONLY | os.O_CREAT | (0 if to == "/dev/full" else os.O_TRUNC)
        os.dup2(writer if to == "pipe" else os.open(to, how, 0o644), fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115


def happen(event, pid):
    """One of: a signal; a file or folder that goes, is cut short, or becomes a file."""
    _, what, arg = event
    with suppress(OSError):
        if what == "signal":
            os.kill(pid, arg)
        elif what == "truncate":
            os.truncate(arg, os.path.getsize(arg) // 3)
        else:
            shutil.rmtree(arg) if os.path.isdir(arg) else os.unlink(arg)
            if what == "replace":
                Path(arg).write_text("no folder any more")


def watch(pid, job, reader):
    """Waits for the child -> what the driver is told."""
    begin, end, events, seen = time.monotonic(), os.pidfd_open(pid), sorted(job["at"]), []
    if reader is not None and job["head"] == 0:
        os.close(reader)
        reader = None
    hung = False
    while True:
        due = min(events[0][0] if events else LIMIT_S, LIMIT_S)
        files = [end] + [reader] * (reader is not None)
        ready, _, _ = select.select(files, [], [], max(0, begin + due - time.monotonic()))
        if end in ready:
            break
        if reader in ready:
            job["head"] -= os.read(reader, 2**16).count(b"\n")
            if job["head"] <= 0:
                os.close(reader)
                reader = None
        elif events and not ready:
            event = events.pop(0)
            lines = 0
            if job["watch"] and os.path.exists(job["watch"]):
                lines = Path(job["watch"]).read_bytes().count(b"\n")
            seen.append((event, lines))
            happen(event, pid)
        elif not ready:
            hung = True
            break
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # whatever it has started too
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for fd in [end] + [reader] * (reader is not None):
        os.close(fd)
    return dict(code=code, hung=hung, seconds=time.monotonic() - begin, happened=seen)


def serve(connection):
    """Answers jobs until there are no more. Returns in the children only: what they are to become."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)
        reader, writer = os.pipe() if "pipe" in (job["stdout"], job["stderr"]) else (None, None)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with suppress(OSError):
                os.close(reader if reader is not None else -1)
            redirect(job, writer)
            return job
        if writer is not None:
            os.close(writer)
        connection.send(watch(pid, job, reader))


def become(job):
    """Executes the command of `job` in this process as `python` does."""
    os.chdir(job["cwd"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"],) * 2)
    os.environ.clear()
    os.environ.update(job["env"])
    sys.dont_write_bytecode = True  # Python takes what a full disk cut short for whole
    argv = job["argv"]
    if job["real"]:
        os.execve(sys.executable, [sys.executable, *map(os.fsencode, argv)], os.environ)
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else list(argv)
    sys.path[0] = "" if module else str(Path(argv[0]).parent)
    sys.path.insert(1, job["env"]["PYTHONPATH"])
    for name in [n for n in sys.modules if n.partition(".")[0] in ("bench", "multiprocessing", "concurrent")]:
        del sys.modules[name]
    if module:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


# --- a case ---

class Case:
    """One seeded case: its folder, its commands, and what they broke."""

    def __init__(self, seed, number, kind, there, server, verbose=False):
        self.number, self.kind, self.there, self.server, self.verbose = number, kind, there, server, verbose
        self.rng, self.broken, self.codes, self.longest = random.Random(f"{seed}/{number}"), [], [], 0.0
        self.folder = Path(there.scratch) / f"case{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.cwd = self.folder / "here"
        self.cwd.mkdir(parents=True)
        self.canary, self.command = self.folder / "canary", ""
        self.cache = there.cache

    def breaks(self, rule, why):
        self.broken.append(dict(kind=self.kind, number=self.number, rule=rule, why=self.short(why, 300),
                                command=self.short(self.command, 400)))

    def short(self, text, most):
        text = text.replace(str(self.folder), "CASE").replace(str(self.there.scratch), "SCRATCH")
        text = text.replace(self.there.usual, "TINY")
        text = text.encode(errors="backslashreplace").decode()
        return text if len(text) <= most else f"{text[:most // 2]} ... {text[-most // 2:]}"

    def run(self, *argv, at=(), stdout=None, stderr=None, head=0, watch=None, real=False,
            file_bytes=FILE_BYTES):
        """Runs a command and judges how it ends. `at`: [(seconds, "signal", "remove", "truncate" or
        "replace", what)]. stdout, stderr: a file, or "pipe", which is closed after `head` lines. `watch`: a
        file whose lines are counted when something happens. `real`: as a process of its own. `file_bytes`: no
        file may become larger."""
        argv = [str(a) for a in argv]
        program = argv[1] if argv[0] == "-m" else argv[0]
        if argv[0] != "-m":
            argv[0] = str(self.there.sources / argv[0])
        out, err = self.folder / f"out{len(self.codes)}", self.folder / f"err{len(self.codes)}"
        env = dict(PATH=os.environ["PATH"], HOME=str(self.folder), XDG_CACHE_HOME=str(self.cache),
                   LANG="C.UTF-8", PYTHONPATH=str(self.there.sources), OMP_NUM_THREADS="1",
                   OPENBLAS_NUM_THREADS="1", WANDB_MODE="disabled", HF_HUB_OFFLINE="1",
                   HF_DATASETS_OFFLINE="1", TMPDIR=str(self.folder), PYTHONDONTWRITEBYTECODE="1")
        self.command = shlex.join(["python", *argv])
        self.server.send(dict(argv=argv, cwd=str(self.cwd), env=env, at=list(at), head=head, real=real,
                              stdout=str(stdout or out), stderr=str(stderr or err), file_bytes=file_bytes,
                              watch=str(watch) if watch else None))
        ended = SimpleNamespace(program=program, **self.server.recv())
        ended.out, ended.err = (p.read_bytes().decode(errors="replace") if p.exists() else ""
                                for p in (out, err))
        ended.sent = [event[2] for event, _ in ended.happened if event[1] == "signal"]
        ended.piped, ended.heard = "pipe" in (stdout, stderr), stderr is None and file_bytes == FILE_BYTES
        self.codes.append("killed after 20 s" if ended.hung else ended.code)
        self.longest = max(self.longest, ended.seconds)
        self.judge(ended)
        if self.verbose:
            print(f"$ {self.command[:2000]}\n  happened: {ended.happened}\n"
                  f"  exit {ended.code}, {ended.seconds:.2f} s\n"
                  f"  stdout: {ended.out[-3000:]}\n  stderr: {ended.err[-6000:]}")
        return ended

    def judge(self, ended):
        if self.canary.exists():
            self.breaks("canary", "planted code ran")
        if ended.hung:
            self.breaks("hang",
                        f"killed after {LIMIT_S} s; said last: {(ended.out + ended.err).strip()[-150:]}")
            return
        text = ended.err + ended.out
        early = ended.sent and str(self.there.sources) not in text  # a signal before the program's first line
        if (found := CRASH.search(text)) and not early:
            lines = text[found.start():].strip().splitlines()
            whys = [x for x in lines if re.match(r"\w[\w.]*(Error|Exception|Interrupt|Warning)\b", x)]
            places = [x.split('"')[1] + x.split('"')[2] for x in lines if x.startswith("  File ")]
            self.breaks("traceback", f"{(whys or lines)[-1]} at {(places or ['?'])[-1]}")
        allowed = {0, 1, 2, *(128 + n for n in ended.sent), *(-n for n in ended.sent)}
        if ended.program == "memo.dsa":
            allowed.add(3)
        if ended.piped and ended.program != "train.py":
            allowed |= {-signal.SIGPIPE, 128 + signal.SIGPIPE}
        if ended.code == 1 and (ended.program != "train.py" or ended.heard and not ended.out):
            self.breaks("exit", f"exit code 1 before a run began: bad input is 2; {ended.err.strip()[-200:]}")
        if ended.code not in allowed and not (early and ended.code == 1):
            self.breaks("exit", f"exit code {ended.code}; {text.strip()[-200:]}")
        if ended.code in (1, 2, 3) and ended.heard and not found:
            lines = [line for line in ended.err.split("\n") if line.strip()] or [""]
            n = sum(line.startswith("error:") for line in lines)
            if n != 1 or not lines[-1].startswith("error:"):
                self.breaks("line", f"exit code {ended.code}, {n} lines error:, the last is {lines[-1]!r}")


def one(kinds, seed, number, kind, there, servers, keep=False):
    """Runs a case with a server that is free."""
    server = servers.get()
    case = Case(seed, number, kind, there, server, verbose=keep)
    try:
        kinds[kind](case, there)
    except Exception:
        case.breaks("bench", f"the bench itself failed: {traceback.format_exc()[-300:]}")
    finally:
        servers.put(server)
        if keep:
            print(*sorted(p for p in case.folder.rglob("*")), *case.broken, sep="\n")
        else:
            shutil.rmtree(case.folder, ignore_errors=True)
    return case


# --- the bench ---

def kind_of(kinds, number):
    return list(kinds)[number % len(kinds)]



def start_servers(n):
    """Connections to `n` servers. Returns (None, job) in the children of the servers."""
    os.environ |= dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            with suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()  # a child need not look through them when it ends
    connections = []
    for _ in range(n):
        mine, its = Pipe()
        if os.fork() == 0:
            for connection in [mine, *connections]:
                connection.close()
            return None, serve(its)
        its.close()
        connections.append(mine)
    return connections, None


def results(args, done, began):
    """What is stored."""
    import torch

    from bench.machine import machine
    broken = sorted((b for case in done for b in case.broken),
                    key=lambda b: (b["rule"], b["kind"], b["number"]))
    seconds = {}
    for case in done:
        seconds[case.kind] = max(seconds.get(case.kind, 0), case.longest)
    return dict(machine=machine(), seed=args.seed, python=platform.python_version(), torch=torch.__version__,
                cases=len(done), cases_by_kind=Counter(c.kind for c in done),
                commands=sum(len(c.codes) for c in done),
                ended_by_exit_code=Counter(str(code) for c in done for code in c.codes),
                broken_cases=len({b["number"] for b in broken}),
                broken_by_rule=Counter(b["rule"] for b in broken),
                broken_by_kind=Counter(b["kind"] for b in broken), longest_s_by_kind=seconds,
                seconds=time.monotonic() - began, broken=broken)


def main():
    """Runs the cases. Returns in the children of the servers only: what they are to become."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--only", default="", help="run these cases alone, 17 or 17,23, and show them")
    parser.add_argument("--out", default=ROOT / "bench/results/fuzz.json")
    args = parser.parse_args()
    from bench.fuzz_cases import KINDS  # not in the children: they never need it
    from bench.fuzz_there import TINY, flags, prepare
    names = args.kinds.split(",") if args.kinds else list(KINDS)
    began, scratch = time.monotonic(), Path(tempfile.mkdtemp(prefix="memo-fuzz-"))
    connections, job = start_servers(2)
    if connections is None:
        return job
    servers = queue.Queue()
    for connection in connections:
        servers.put(connection)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (scratch / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, scratch / "sources" / name)
    compileall.compile_dir(scratch / "sources", quiet=1)
    there = SimpleNamespace(scratch=scratch, sources=scratch / "sources", cache=scratch / "cache",
                            usual=" ".join(flags(**TINY)))
    only = [int(n) for n in args.only.split(",") if n]
    wanted = {kind_of(KINDS, n) for n in only} or names
    prepare(there, Case(args.seed, "prepare", "prepare", there, connections[0]), wanted)
    print(f"prepared in {time.monotonic() - began:.0f} s: {scratch}", flush=True)
    for n in only:
        one(KINDS, args.seed, n, kind_of(KINDS, n), there, servers, keep=True)
    if only:
        return sys.exit(0)
    done = []
    with ThreadPoolExecutor(len(connections)) as pool:
        numbers = islice((n for n in count() if kind_of(KINDS, n) in names), args.cases)
        futures = [pool.submit(one, KINDS, args.seed, n, kind_of(KINDS, n), there, servers) for n in numbers]
        for future in as_completed(futures):
            case = future.result()
            done.append(case)
            for b in case.broken:
                print(f"{b['number']} {b['kind']} {b['rule']}: {b['why']}\n    {b['command']}", flush=True)
            if len(done) % 100 == 0:
                print(f"{len(done)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    out = results(args, done, began)
    Path(args.out).write_text(json.dumps(out, indent=1) + "\n")
    shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({k: v for k, v in out.items() if k != "broken"}, indent=1))
    sys.exit(bool(out["broken"]))


if __name__ == "__main__":
    become(main())
