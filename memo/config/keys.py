"""A key of the configuration, or an option of a command: its default, its line of --help, the values that it
may take, and why no others."""

import re
import shutil
import string
import textwrap
from collections.abc import Sequence
from dataclasses import Field, field
from typing import Any

from memo.errors import ConfigError

# of a key: int, float, bool or str, whichever its Field says. check_value() sees to that, mypy cannot see it
Value = Any
Keys = dict[str, Value]  # by name

MOST_VALUE_CHARS = 1000  # of a text, unless it says otherwise
# characters that break a line, or cannot be printed
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MOST_COLUMNS = 110


def key(default: Value, help: str, *, section: str = "", choices: Sequence[str] = (),
        least: float | None = None, below: float | None = None, most: float | None = None,
        why: str = "", auto: bool = False) -> Value:
    """Makes a key. `why`: the reason of `below` or `most`. A text's `least` and `most` count characters. A
    number may be "auto" with `auto`, or by default. `section`: a heading of this and the next keys."""
    return field(default=default, metadata=dict(help=help, section=section, choices=choices, least=least,
                                                below=below, most=most, why=why, auto=auto))


def option(name: str, kind: type, default: Value = None, help: str = "", **bounds: Value) -> Field[Value]:
    """Makes a key outside the configuration, of `kind` int, float, bool or str."""
    f: Field[Value] = key(default, help, **bounds)
    f.name, f.type = name, kind
    return f


def kind_of(f: Field[Value]) -> type:
    """Finds the type of a key: int, float, bool or str."""
    assert isinstance(f.type, type)
    return f.type


def may_be_auto(f: Field[Value]) -> bool:
    return f.type in (int, float) and (f.default == "auto" or f.metadata["auto"])


def type_name(f: Field[Value]) -> str:
    return f"{kind_of(f).__name__} or auto" if may_be_auto(f) else kind_of(f).__name__


def shown(value: object) -> str:
    """Writes repr() of bounded length, for a message."""
    if type(value) is int and value.bit_length() > 300:
        return f"<a number of {value.bit_length()} bits>"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_value(f: Field[Value], value: Value) -> None:
    """Raises ConfigError where key `f` may not take `value`."""
    if value == "auto" and may_be_auto(f):
        return
    m = f.metadata

    def refused(rule: str) -> ConfigError:
        return ConfigError(f"{f.name}={shown(value)} {rule}")
    if type(value) is not f.type:
        raise refused(f"must be of type {type_name(f)}, not {type(value).__name__}")
    if m["choices"] and value not in m["choices"]:
        raise refused(f"must be one of {', '.join(m['choices'])}")
    if f.type is str:
        if len(value) < (m["least"] or 0):
            raise refused("must not be empty; leave it out, or give one")
        most = m["most"] or MOST_VALUE_CHARS
        if len(value) > most or CONTROL.search(value):
            raise refused(f"must be one line of at most {most} characters, all of them printable")
        return
    if f.type is float and value in (float("inf"), float("-inf")):
        raise refused("must be finite")
    if m["least"] is not None and not value >= m["least"]:
        raise refused(f"must be at least {m['least']}")
    reason = f" ({m['why']})" if m["why"] else ""
    if m["below"] is not None and not value < m["below"]:
        raise refused(f"must be below {m['below']}{reason}")
    if m["most"] is not None and not value <= m["most"]:
        raise refused(f"must be at most {m['most']}{reason}")


def number_of(text: str, kind: type = int) -> Value:
    """Reads a number. Errors: ValueError: it has other scripts' digits, underscores or spaces, or is none."""
    if not text.isascii() or set(text) & {"_", *string.whitespace}:
        raise ValueError(f"{text!r:.100} must be a number in the digits 0 to 9")
    return kind(text)


def typed(f: Field[Value], value: Value, where: str) -> Value:
    """Converts `value` to the key's type: texts of a command line are read, ints may stand for floats."""
    kind = kind_of(f)
    if kind is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    if not where.startswith("--") or kind is str or (value == "auto" and may_be_auto(f)):
        return value
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else number_of(value, kind)
    except (ValueError, KeyError):
        wanted = "true or false" if kind is bool else type_name(f)
        raise ConfigError(f"{f.name}={shown(value)} must be {wanted}") from None


def help_width() -> int:
    """Counts the columns of --help: the terminal's, within bounds."""
    return max(60, min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 0)).columns))


def counted(n: int, what: str) -> str:
    """Writes a number of things, as in 1 token or 2,000 tokens."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def columns(rows: list[tuple[str, str | None]]) -> str:
    """Writes [(left, right)] in two aligned columns. Where right is None, left is a heading."""
    width = help_width()
    start = 4 + max(len(left) for left, right in rows if right is not None)
    lines = []
    for left, right in rows:
        if right is None:
            lines += ["", *textwrap.wrap(left, width)]
        else:
            first = f"  {left}"
            lines += textwrap.wrap(right, width, initial_indent=first.ljust(start),
                                   subsequent_indent=" " * start, break_on_hyphens=False) or [first]
    return "\n".join(lines).removeprefix("\n")
