"""A console that cannot fail, and attempts that may: neither a full disk nor a picture ends a run."""

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from memo.errors import reason

Stream = Any  # stdout or stderr, or None


class Console:
    """stdout or stderr of a run: where a disk is full or the reader is gone, text is lost, not the run."""

    def __init__(self, stream: Stream) -> None:
        # the caller closes it
        self.stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115
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
    """From here on stdout and stderr are Consoles, to the end of the process."""
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    atexit.register(sys.stderr.close)
    atexit.register(sys.stdout.close)


class Attempts:
    """Does work that is not worth a run, as pictures are. A failure is a warning, once a reason."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def __call__(self, what: str, work: Callable[..., object], *args: object) -> bool:
        """Calls work(*args) -> whether it succeeded. `what`: its name in the warning."""
        try:
            work(*args)
            return True
        except Exception as e:
            line = f"warning: {what} failed ({type(e).__name__}: {reason(e)}); training goes on"
            if line not in self.told:
                self.told.add(line)
                print(line, file=sys.stderr)
            return False
