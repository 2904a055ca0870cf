"""Reading within bounds, writing whole files, and the cache folder.

Every text and every JSON that memo reads comes through read_text() or load_json(). A file may be damaged, or
made by an attacker: a pipe, an endless device and JSON nested without end are refused.
"""

import errno
import hashlib
import json
import os
import stat
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from memo.errors import ConfigError, reason

MOST_TEXT_CHARS = 2**28  # of a text that is read at once: above the largest request log of a step
MOST_JSON_CHARS = 2**26  # values may take thirty times as much memory
MOST_DEPTH = 32          # of lists and objects inside each other
STRETCHES, STRETCH_BYTES = 256, 2**17  # that stand for a large file


# --- reading ---

def regular(found: os.stat_result) -> os.stat_result:
    """`found`, the result of os.stat(). Errors: OSError: it is no regular file, and may have no end."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file")
    return found


def open_file(path: str | Path) -> int:
    """The descriptor of a regular file, open for reading. A pipe in its place does not
    block. Errors: OSError."""
    regular(os.stat(path))  # to open a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_text(path: str | Path, most_chars: int = MOST_TEXT_CHARS) -> str:
    """The text of a file in UTF-8, with or without a byte order mark. Errors: OSError, ValueError."""
    with open(open_file(path), encoding="utf-8-sig") as file:
        text = file.read(most_chars + 1)
    if len(text) > most_chars:
        raise ValueError(f"it must be at most {most_chars:,} characters long")
    return text


def depth(value: Any) -> int:
    """How many lists and objects of a JSON value lie inside each other."""
    level, n = [value], 0
    while level := [v for v in level if isinstance(v, (dict, list))]:
        n += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return n


def parse_json(text: str) -> dict[str, Any]:
    """Parse a JSON text -> its object. Errors: ValueError: it is no JSON, no object, nested deeper than
    MOST_DEPTH, or holds a name twice in one object, or a number that is not finite."""
    def finite(digits: str) -> float:
        if not isfinite(number := float(digits)):
            raise ValueError(f"{digits[:20]} is no finite number")
        return number

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise ValueError(f"{name!r:.100} stands twice in one object")
            made[name] = value
        return made
    try:
        value = json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=once)
        deep = depth(value) > MOST_DEPTH
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it must be nested at most {MOST_DEPTH} deep")
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object, not a {type(value).__name__}")
    return value


def load_json(path: str | Path, remedy: str) -> dict[str, Any]:
    """The value of a JSON file. Errors: ConfigError with the `remedy`."""
    try:
        return parse_json(read_text(path, MOST_JSON_CHARS))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read ({reason(e)}); {remedy}") from None


def plain_name(name: object) -> bool:
    """Whether `name`, read from a file, names a file in its own folder and nothing else."""
    return (isinstance(name, str) and name not in (".", "..") and not set(name) & {"/", "\0"}
            and 0 < len(name.encode(errors="replace")) <= 255)


def fingerprint(path: str | Path, whole: bool) -> str:
    """16 digits of the sha256 of a file's length and of stretches all over it, which are soon read; with
    `whole` 16 more, of all its bytes. Errors: OSError."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for start in range(0, size, max(STRETCH_BYTES, size // STRETCHES)):
            file.seek(start)
            digest.update(file.read(STRETCH_BYTES))
        file.seek(0)
        rest = hashlib.file_digest(file, "sha256").hexdigest()[:16] if whole else ""
    return digest.hexdigest()[:16] + rest


# --- writing ---

def readable_json(value: Any, pad: str = "") -> str:
    """`value` as JSON for people: one item a line, but a list of plain values on one line."""
    if isinstance(value, dict) and value:
        items, ends = [f"{json.dumps(str(k))}: {readable_json(v, pad + ' ')}" for k, v in value.items()], "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple, dict)) for v in value):
        items, ends = [readable_json(v, pad + " ") for v in value], "[]"
    else:
        return json.dumps(value)
    return f"{ends[0]}\n{pad} " + f",\n{pad} ".join(items) + f"\n{pad}{ends[1]}"


def save_bytes(data: bytes, path: str | Path) -> None:
    """Writes `data` under another name first: a kill or a full disk leaves the old file whole."""
    temporary = Path(f"{path}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def save_json(value: Any, path: str | Path) -> None:
    """Writes `value` as JSON, as save_bytes() does."""
    save_bytes(f"{readable_json(value)}\n".encode(), path)


# --- kept from run to run ---

def ours_alone(found: os.stat_result) -> bool:
    """Whether a file belongs to this user, and no other user can write it. `found`: the
    result of os.stat()."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_folder() -> Path | None:
    """The folder of compiled code, plans and calibrations. None where there is no such folder that only this
    user can write: others could plant files there. Nothing is kept then."""
    return cache_place()[0]


def cache_place() -> tuple[Path | None, str | None]:
    """(cache_folder(), None), or (None, the reason and a remedy)."""
    other = "set XDG_CACHE_HOME to a folder of your own"
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        folder = root / "memo"
        if not os.path.lexists(folder):
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        for parent in folder.resolve().parents:  # whoever can write it could put another folder in its place
            mode = parent.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
                return None, f"{parent} can be written by others; chmod go-w {parent}, or {other}"
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return None, f"{folder} is no folder of this user; remove it, or {other}"
        if not ours_alone(found):
            return None, f"{folder} can be written by others; chmod 700 {folder}"
        return folder, None
    except (OSError, RuntimeError, ValueError) as e:  # no home; a disk that cannot be written
        return None, f"no cache folder can be made ({reason(e)}); {other}"


def keep_json(value: Any, folder: Path | None, name: str) -> None:
    """Stores `value` in cache_folder(), where there is one, for the next run. A failure costs only time."""
    if folder is not None:
        with suppress(OSError):
            save_json(value, folder / name)
