"""The errors that a user can mend: one line each, with name, value, rule and remedy."""

import os
import sys


class ConfigError(ValueError):
    """Bad input: a value that the user can mend."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, read, or used for this model."""


def warn(text):
    """A line on stderr, said by one rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr)


def reason(e):
    """Why, in one line: the part of the exception `e` that a user can act on."""
    return getattr(e, "strerror", None) or (str(e).splitlines() or [type(e).__name__])[0]
