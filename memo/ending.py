"""How a run ends, and what cannot end it: signals, a console that fails, pictures and loggers that fail."""

import atexit
import os
import signal
import sys
import time
from contextlib import contextmanager

from memo.errors import reason

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Slurm can send SIGUSR1 before a job's time is up
SAME_S = 1.0  # signals within so many seconds are one request: a terminal and torchrun both send SIGINT


class Interrupted(BaseException):
    """A signal ends the process while no step is under way."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


class StepGivenUp(BaseException):
    """A second signal: the step under way is not to be finished."""


@contextmanager
def handling(handler):
    """Meanwhile handler(number, frame) is called for SIGNALS, but for those that the process shall ignore (nohup)."""
    before = {s: signal.signal(s, handler) for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield
    finally:
        for s, earlier in before.items():
            signal.signal(s, earlier)


def interrupt(number, frame):
    raise Interrupted(number)


class StopSignal:
    """The handler of signals while a run trains. The first one only takes a note in `number`, so that the step is finished
    and saved. A second one raises StepGivenUp in a with-block of interruptible(): the state before the step is saved. A
    third one ends the process. Where several ranks have to agree the second one is not heard. `quiet`: says nothing."""

    def __init__(self, quiet, alone):
        self.quiet, self.alone, self.may_give_up = quiet, alone, False
        self.number, self.requests, self.last_s = 0, 0, -SAME_S

    @contextmanager
    def interruptible(self):
        """Meanwhile weights and optimizer do not change: the step may be given up."""
        self.may_give_up = True
        try:
            yield
        finally:
            self.may_give_up = False

    def __call__(self, number, frame):
        now = time.monotonic()
        if now - self.last_s < SAME_S:
            return
        self.last_s = now
        self.number, self.requests = self.number or number, self.requests + 1
        if not self.quiet:
            more = ["again to save without this step", "again to stop at once, unsaved"][min(1, self.requests - 1)]
            doing = "finishing this step, then saving" if self.requests == 1 or not self.alone else "saving"
            print(f"\n{signal.Signals(number).name}: {doing}" + f" ({more})" * self.alone, file=sys.stderr)
        if self.alone and self.requests == 2 and self.may_give_up:
            raise StepGivenUp
        if self.requests > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


# --- what is only told ---

class Console:
    """stdout or stderr of a run: a full disk or a reader that is gone loses the text, not the run."""

    def __init__(self, stream):
        self.stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115  closed by the caller
        self.stream.reconfigure(errors="backslashreplace")  # names of files may hold any bytes

    def write(self, text):
        try:
            return self.stream.write(text)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a signal's handler writes while the loop does
            return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except (OSError, ValueError):
            return

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def close(self):
        """Drops what cannot be written, so that Python's own end of the process does not fail on it."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def guard_console():
    """From here on stdout and stderr are Consoles, to the end of the process."""
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    atexit.register(sys.stderr.close)
    atexit.register(sys.stdout.close)


class Beside:
    """Does what is not worth a run: pictures, loggers, plan.json. A failure is a warning, once for each reason."""

    def __init__(self):
        self.told = set()

    def __call__(self, what, work, *args):
        """work(*args) -> whether it succeeded. `what`: its name in the warning."""
        try:
            work(*args)
            return True
        except Exception as e:
            line = f"warning: {what} failed ({type(e).__name__}: {reason(e)}); training goes on"
            if line not in self.told:
                self.told.add(line)
                print(line, file=sys.stderr)
            return False
