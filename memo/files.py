"""Files: read within bounds, whoever made them, and written whole; the folder where things are kept from run to run.

Every text and every JSON that memo reads comes through read_text() or load_json(). A file may be damaged, or
made by somebody who means harm: a pipe, a device without end, JSON nested without end are refused.
"""

import json
import os
import re
import stat
from pathlib import Path

from memo.errors import ConfigError, reason

MOST_BYTES = 2**28  # of a text that is read at once: above the largest request log of a step
MOST_DEPTH = 32     # of lists and objects inside each other


# --- reading ---

def regular(path):
    """os.stat() of a regular file. Errors: OSError: nothing is there, or something that may have no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(None, "is no regular file")
    return found


def read_text(path, most_bytes=MOST_BYTES):
    """The text of a file in UTF-8, with or without a byte order mark. Errors: OSError, ValueError."""
    if (size := regular(path).st_size) > most_bytes:
        raise ValueError(f"{size:,} bytes must be at most {most_bytes:,}")
    return Path(path).read_text("utf-8-sig")


def depth(value):
    """How many lists and objects of a JSON value lie inside each other."""
    level, n = [value], 0
    while level := [v for v in level if isinstance(v, (dict, list))]:
        n += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return n


def parse_json(text, kind=dict):
    """The value of a JSON text. Errors: ValueError: no JSON, no `kind`, nested deeper than MOST_DEPTH, NaN or Infinity."""
    def refuse(constant):
        raise ValueError(f"{constant} is no number")
    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError:
        value = None
    if value is None or depth(value) > MOST_DEPTH:
        raise ValueError(f"it must be nested at most {MOST_DEPTH} deep")
    if not isinstance(value, kind):
        raise ValueError(f"it must be {'an object' if kind is dict else 'a list'}, not a {type(value).__name__}")
    return value


def load_json(path, remedy, kind=dict):
    """The value of a JSON file. Errors: ConfigError with the `remedy`."""
    try:
        return parse_json(read_text(path), kind)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read ({reason(e)}); {remedy}") from None


def plain_name(name):
    """Whether `name`, read from a file, names a file in its own folder and nothing else."""
    return isinstance(name, str) and re.fullmatch(r"[\w.\-]{1,255}", name, re.ASCII) is not None and name not in (".", "..")


# --- writing ---

def readable_json(value, pad=""):
    """`value` as JSON for people: an item a line, but a list of plain values on one."""
    if isinstance(value, dict) and value:
        items, ends = [f"{json.dumps(str(k))}: {readable_json(v, pad + ' ')}" for k, v in value.items()], "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple, dict)) for v in value):
        items, ends = [readable_json(v, pad + " ") for v in value], "[]"
    else:
        return json.dumps(value)
    return f"{ends[0]}\n{pad} " + f",\n{pad} ".join(items) + f"\n{pad}{ends[1]}"


def save_json(value, path):
    """Writes `value` as JSON under another name first: a full disk leaves the old file whole."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(readable_json(value) + "\n")
    os.replace(temporary, path)


# --- kept from run to run ---

def ours_alone(found):
    """Whether what os.stat() `found` belongs to this user, and nobody else can write it."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_folder():
    """The folder of compiled code, plans and calibrations. None where no such folder is ours alone: others could
    plant files there. Nothing is kept then."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        folder = root / "memo"
        if not os.path.lexists(folder):
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        above = [os.stat(parent).st_mode for parent in folder.resolve().parents]
        if any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above):
            return None  # others could put another folder in its place
        return folder if ours_alone(folder.lstat()) and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # no home; a disk that cannot be written
        return None
