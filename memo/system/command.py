"""What all commands share: how they read arguments, how they end, what they say meanwhile.
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
from types import TracebackType
from typing import Any, NoReturn

from memo.config.config import KEYS
from memo.config.keys import CONTROL, check_value, help_width, kind_of, option, typed
from memo.errors import ConfigError, last_line, reason
from memo.system.signals import Interrupted, handle

FIRST_S = 3  # after so long something is said
THREAD_BYTES = 2**25  # its stack, and what it takes to begin


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


def run(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Runs main(argv) -> exit code. Users' mistakes, and what last_line() knows, are told in one line."""
    argv = sys.argv[1:] if argv is None else argv
    handle(signal.SIGINT, signal.default_int_handler)  # answer_early() had others
    handle(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    try:
        return main(argv) or 0
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

    def only_read(argv: list[str]) -> None:
        read(argv)
    if os.environ.get("WORLD_SIZE", "1") == "1" and (code := run(only_read)):
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
