"""The errors that a user can mend, and those that end a run: one line, with name, value, rule and remedy."""

import errno
import os
import sys

OWN = {"memo", "model", "train", "__main__"}  # modules
FULL = {os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)}  # what a full disk says


class ConfigError(ValueError):
    """Bad input: a value that the user can mend."""


class OutOfHostMemory(ConfigError):
    """OOHM: the host cannot hold what is to be swapped."""


class DataError(ConfigError):
    """Data that contradicts its own description: the user's to mend, also where a step finds it."""


class Unusable(Exception):
    """Says what is not there, or of another interface: a package, a compiler, memory to plan. One line."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, read, or used for this model."""


class RunFailed(RuntimeError):
    """An error of this rank while it trains. One line."""


class TrainingError(RunFailed):
    """A run that cannot go on, on all ranks alike."""


class BadState(TrainingError):
    """A state that is not finite, or not the same where it must be. It must not be saved."""


def warn(text: str) -> None:
    """Prints a line on stderr, on one rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr)


def reason(e: BaseException) -> str:
    """Says why, in one line: the part of the exception `e` that a user can act on."""
    return getattr(e, "strerror", None) or (str(e).splitlines() or [type(e).__name__])[0]


def elsewhere(e: BaseException, what: str) -> str:
    """Says what mends the exception `e` of writing something: room, or another `what`."""
    return "free some space there or " * (reason(e) in FULL) + f"choose another {what}"


def last_line(e: BaseException) -> str | None:
    """Says what ended a command; None where the whole traceback should be shown."""
    if isinstance(e, ModuleNotFoundError) and e.name and e.name.split(".")[0] not in OWN:
        return f"{e.name} is not installed, which this needs; try pip install -r requirements.txt"
    if isinstance(e, (ConfigError, RunFailed, OSError)):
        return str(e)
    if isinstance(e, RuntimeError):
        text = reason(e)
        if any(word in text for word in ("gloo", "Gloo", "NCCL", "TCPStore")):
            return f"lost another rank ({text}); what is saved is whole; the other ranks' errors say why"
    return None
