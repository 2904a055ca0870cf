"""The parts that all commands share: how they read arguments, what they say, which signals end them, and how.
Exit codes: 0; 1 a run that failed; 2 bad input; 128 + the number of the signal that ended it."""

import argparse
import atexit
import mmap
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from memo.config.config import KEYS
from memo.config.keys import CONTROL, check_value, help_width, kind_of, option, typed
from memo.errors import ConfigError, last_line, reason

FIRST_S = 3  # after so long something is said
THREAD_BYTES = 2**25  # its stack, and what it takes to begin
# that the kernel sends again and again once a limit or a timer is up
TIMED = (signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
# that end a run; batch systems can send SIGUSR1, SIGUSR2 or SIGXCPU before a job's time is up
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
           *TIMED)
HEAR_S = 3
SAME_S = 1.0  # signals within so many seconds are one request: a terminal and torchrun both send SIGINT

# as signal.signal() takes it, SIG_DFL is an int; None: C code's
Handler = Callable[[int, FrameType | None], object] | int | None


class Arguments(argparse.ArgumentParser):
    """Parses arguments like argparse, but with errors of one line, bounds, and no abbreviated options."""

    def __init__(self, ranks: bool = False, prog: str | None = None, description: str | None = None) -> None:
        """Makes a parser. `ranks`: whether the command works in several processes, under torchrun."""
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=40, width=help_width())
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=formatter)
        self.options: list[Field] = []
        self.ranks = ranks

    def option(self, name: str, kind: type = str, default: object = None, help: str = "",
               short: Sequence[str] = (), required: bool = False, **bounds: Any) -> None:
        """Adds an argument, or where the name starts with -- an option, with values as in keys.option()."""
        f = option(name.removeprefix("--"), kind, default, help, **bounds)
        self.options.append(f)
        told = [" | ".join(f.metadata["choices"])] if f.metadata["choices"] else []
        if default is not None:
            told.append(f"default {default}")
        more: dict[str, Any] = dict(help=f"{help} ({'; '.join(told)})" if told else help)
        if name.startswith("--"):
            more |= dict(dest=f.name, default=default, required=required)
        self.add_argument(*short, name, **more)

    def keys(self, *names: str) -> None:
        """Adds options that are keys of the configuration."""
        for key in (KEYS[name] for name in names):
            self.option(f"--{key.name}", kind_of(key), key.default, **key.metadata)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if not self.ranks:
            check_alone(self.prog)
        parsed, rest = super().parse_known_args(args, namespace)
        for f in self.options:
            if isinstance(value := getattr(parsed, f.name), str):
                setattr(parsed, f.name, value := typed(f, value, "--"))
                check_value(f, value)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def check_alone(command: str) -> None:
    """Raises ConfigError where a command is one of several ranks, each of which would do it all."""
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(f"{command} is one process, WORLD_SIZE={world} in the environment is of several; "
                          "start it without torchrun")


def run(main: Callable[[list[str]], object], argv: list[str] | None = None) -> int:
    """Runs main(argv) -> exit code. Users' mistakes, and what last_line() knows, are told in one line."""
    argv = sys.argv[1:] if argv is None else argv
    handle(signal.SIGINT, signal.default_int_handler)  # answer_early() had others
    handle(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    try:
        code = main(argv)
        return code if isinstance(code, int) else 0
    except (ConfigError, OSError) as e:
        text = str(e)
        if isinstance(e, OSError) and e.filename and e.strerror:
            text = f"{e.filename}: {e.strerror}"
        print(f"error: {'?'.join(CONTROL.split(text))}", file=sys.stderr)  # an argument may hold line breaks
        return 2
    except (KeyboardInterrupt, Interrupted) as e:
        print(str(e) or "interrupted", file=sys.stderr)
        return 128 + getattr(e, "number", signal.SIGINT)
    except Exception as e:
        print(f"error: {line}" if (line := last_line(e)) else traceback.format_exc(), file=sys.stderr)
        return 2 if line and isinstance(e, ModuleNotFoundError) else 1


def answer_early(read: Callable[[list[str]], object], trains: bool = False) -> None:
    """Answers --help and typos before torch is imported, which takes seconds, on rank 0. Then no signal gives
    a traceback, nor a full disk, on which torch cannot write, and torch's C++ does not warn."""
    if not trains:
        end_with_reader()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    helps = {"--help", "-h"} & set(sys.argv)
    if helps and os.environ.get("RANK", "0") != "0":
        sys.exit()
    reads = os.environ.get("WORLD_SIZE", "1") == "1" or helps
    if reads and (code := run(read)):
        sys.exit(code)
    for number in (signal.SIGINT, signal.SIGTERM):
        handle(number, lambda number, frame: os._exit(128 + number))
    sys.excepthook = import_failed


def import_failed(kind: type[BaseException], e: BaseException, trace: TracebackType | None) -> None:
    """Ends the process like bad input where an import met an OSError, or a package is not there."""
    line = last_line(e)
    if issubclass(kind, OSError):
        line = f"torch cannot be imported ({reason(e)}); free some space, or set TMPDIR"
    elif line is None or not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, e, trace)
        return
    print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(2)


def end_with_reader() -> None:
    """Ends the process by SIGPIPE without a reader (`| head`). A run must not: a socket may break."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def installed() -> None:
    """Runs an installed command: memo-estimate does what `python -m memo.estimate` does."""
    name = Path(sys.argv[0]).stem.removeprefix("memo-")
    runpy.run_module(f"memo.{name}", run_name="__main__", alter_sys=True)


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread. Errors: RuntimeError: no memory: Python would wait for ever for such a thread."""
    try:
        mmap.mmap(-1, THREAD_BYTES).close()
    except OSError:
        raise RuntimeError("no memory for a thread") from None
    thread.start()


class Console:
    """Stands for stdout or stderr: where a disk is full or the reader is gone, text is lost, not the run."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115  close() does
        self.stream.reconfigure(errors="backslashreplace")  # names of files may hold any bytes

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a signal's handler writes too
            return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def close(self) -> None:
        """Drops what cannot be written, so that Python's own end of the process does not fail on it."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def guard_console() -> None:
    """Makes stdout and stderr Consoles, to the end of the process."""
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    atexit.register(sys.stderr.close)
    atexit.register(sys.stdout.close)


# --- what a command says ---

@contextmanager
def progress(text: Callable[[], str], speaks: bool = True) -> Iterator[None]:
    """Prints text(), a line, on stderr meanwhile: after FIRST_S seconds, then whenever the time so far has
    doubled, at least every minute. Nothing where this process does not speak."""
    over, start = threading.Event(), time.monotonic()

    def tell() -> None:
        pause: float = FIRST_S
        while not over.wait(pause):
            passed = time.monotonic() - start
            with suppress(OSError):  # a console that fails
                print(f"{text()}, {passed:.0f} s so far", file=sys.stderr, flush=True)
            pause = min(60, passed)
    teller = threading.Thread(target=tell, name="memo progress", daemon=True)
    with suppress(RuntimeError):  # no memory for a thread: a line is not worth the work
        if speaks:
            start_thread(teller)
    try:
        yield
    finally:
        over.set()
        if teller.ident:
            teller.join()


def python() -> str:
    """Names the running Python for a shell: python, where that is the same one, else its path."""
    if Path(shutil.which("python") or "").absolute() == Path(sys.executable):
        return "python"
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# --- signals ---

class Interrupted(BaseException):
    """Tells that a signal ends the process while no step is under way."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted; what is saved is whole")
        self.number = number


class StepGivenUp(BaseException):
    """Tells of a second signal: the step under way is not to be finished."""


def handle(number: int, handler: Handler) -> None:
    """Sets a signal's handler, unless it is ignored (as under nohup), or a profiler's in C."""
    if signal.getsignal(number) not in (signal.SIG_IGN, None):
        signal.signal(number, handler)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Calls handler(number, frame) for SIGNALS meanwhile."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            handle(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            handle(number, earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises Interrupted at a signal meanwhile; ends the process where C++ does not hear it in HEAR_S."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)  # what is written there is the signal's number

    def end_unheard() -> None:
        while number := os.read(reader, 1):
            for _ in range(1 + 10 * HEAR_S):
                if signal.getsignal(number[0]) is not interrupt:  # it was heard, or a step is under way
                    break
                time.sleep(0.1)
            else:
                os._exit(128 + number[0])
        os.close(reader)
    threading.Thread(target=end_unheard, name="memo signals", daemon=True).start()
    try:
        with handling(interrupt):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


class StopSignal:
    """Handles signals while a run trains. The first is noted in `number`: the step is finished and saved. The
    second raises StepGivenUp inside interruptible(): the state before the step is saved; with several ranks,
    which must agree, it changes nothing. The third ends the process. `alone`: there is one rank."""

    def __init__(self, quiet: bool, alone: bool) -> None:
        self.quiet, self.alone, self.may_give_up = quiet, alone, False
        self.number, self.requests, self.last_s = 0, 0, -SAME_S  # of the first signal, or 0; signals so far

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets the step be given up meanwhile: weights and optimizer do not change."""
        self.may_give_up = True
        try:
            yield
        finally:
            self.may_give_up = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.last_s < SAME_S or (number in TIMED and number == self.number):
            return
        self.last_s = now
        self.number, self.requests = self.number or number, self.requests + 1
        if not self.quiet:
            doing = "finishing this step, then saving" if self.requests == 1 or not self.alone else "saving"
            more = "to stop at once, unsaved" if self.requests > 1 else "to save without this step"
            again = f" (again {more})" if self.alone else ""
            print(f"\n{signal.Signals(number).name}: {doing}{again}", file=sys.stderr)
        if self.alone and self.requests == 2 and self.may_give_up:
            raise StepGivenUp
        if self.requests > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
