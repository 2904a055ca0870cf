"""What the commands of memo have in common: how arguments are read, how a command ends, what is said meanwhile.

Exit codes: 0; 1 a run that failed; 2 bad input; 128 + the number of the signal that ended it.
"""

import argparse
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from memo.errors import ConfigError, reason
from memo.keys import CONTROL, check_value, help_width, option, typed

FIRST_S = 3  # after so long something is said


class Arguments(argparse.ArgumentParser):
    """argparse, whose errors are one line, and whose options are never abbreviated and have bounds."""

    def __init__(self, **kwargs):
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=40, width=help_width())
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)
        self.options = []

    def option(self, name, kind=str, default=None, help="", short=(), required=False, **bounds):
        """An argument, or with -- before its name an option, whose value is read and checked as keys.option() says."""
        f = option(name.removeprefix("--"), kind, default, help, **bounds)
        self.options.append(f)
        told = [*filter(None, [" | ".join(f.metadata["choices"])]), *[f"default {default}"] * (default is not None)]
        more = dict(dest=f.name, default=default, required=required) if name.startswith("--") else {}
        self.add_argument(*short, name, help=f"{help} ({'; '.join(told)})" if told else help, **more)

    def device_options(self):
        """--device and --dtype, as the configuration has them."""
        self.option("--device", default="auto", help="auto takes CUDA where there is one", choices=("auto", "cpu", "cuda"))
        self.option("--dtype", default="auto", help="auto is bfloat16 on CUDA", choices=("auto", "float32", "bfloat16"))

    def parse_known_args(self, args=None, namespace=None):
        found, rest = super().parse_known_args(args, namespace)
        for f in self.options:
            if isinstance(value := getattr(found, f.name), str):
                setattr(found, f.name, value := typed(f, value, "--"))
                check_value(f, value)
        return found, rest

    def error(self, message):
        raise ConfigError(f"{message}; see --help")


def handle(number, handler):
    """signal.signal(), but for a signal that this process shall ignore, as under nohup."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, handler)


def run(main, argv=None):
    """The exit code of a command, main(argv) -> exit code or None for 0. A user's mistake is told in one line."""
    argv = sys.argv[1:] if argv is None else argv
    handle(signal.SIGINT, signal.default_int_handler)  # answer_early() had others
    handle(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    try:
        return main(argv) or 0
    except (ConfigError, OSError) as e:
        told = isinstance(e, ConfigError) or not (e.filename and e.strerror)
        text = str(e) if told else f"{e.filename}: {e.strerror}"
        print(f"error: {'?'.join(CONTROL.split(text))}", file=sys.stderr)  # an argument may hold line breaks
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def answer_early(read):
    """To be called before torch is imported, which takes seconds. read(argv) raises ConfigError after a typo, and
    ends the process (SystemExit) after --help. Ranks of several say nothing here: rank 0 will speak for them.
    A signal during the imports, or a disk without room for what torch writes then, is no traceback either."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and (code := run(lambda argv: read(argv) and None)):
        sys.exit(code)
    for number in (signal.SIGINT, signal.SIGTERM):
        handle(number, lambda number, frame: os._exit(128 + number))
    sys.excepthook = import_failed


def import_failed(kind, e, trace):
    """Ends the process as bad input does where an import met an OSError."""
    if not issubclass(kind, OSError):
        sys.__excepthook__(kind, e, trace)
        return
    print(f"error: torch cannot be imported ({reason(e)}); free some space, or set TMPDIR", file=sys.stderr, flush=True)
    os._exit(2)


def end_with_reader():
    """From here on the process ends quietly, by SIGPIPE, where nobody reads its output any more (`| head`), as other
    commands do; Python ignores that signal. Not for a training run: its sockets may break, and it goes on."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def installed():
    """The entry point of the installed commands: memo-estimate runs memo.estimate as `python -m memo.estimate` does."""
    runpy.run_module(f"memo.{Path(sys.argv[0]).stem.removeprefix('memo-')}", run_name="__main__", alter_sys=True)


@contextmanager
def progress(text):
    """Meanwhile says text(), a line, on stderr: after FIRST_S seconds, then each time that as long again has
    passed, at the latest every minute."""
    over, start = threading.Event(), time.monotonic()

    def tell():
        pause = FIRST_S
        while not over.wait(pause):
            passed = time.monotonic() - start
            with suppress(OSError):  # a console that fails
                print(f"{text()}, {passed:.0f} s so far", file=sys.stderr, flush=True)
            pause = min(60, passed)
    teller = threading.Thread(target=tell, name="memo progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def python():
    """What to type for the running Python: python, where the shell finds the same one, else its path."""
    if Path(shutil.which("python") or "").absolute() == Path(sys.executable):
        return "python"
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
