"""Signals: which of them end a run, and how a run that trains hears them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# that the kernel sends again and again once a limit or a timer is up
TIMED = (signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
# that end a run; batch systems can send SIGUSR1, SIGUSR2 or SIGXCPU before a job's time is up
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
           *TIMED)
HEAR_S = 3
SAME_S = 1.0  # signals within so many seconds are one request: a terminal and torchrun both send SIGINT

# as signal.signal() takes it, SIG_DFL is an int; None: C code's
Handler = Callable[[int, FrameType | None], object] | int | None


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
