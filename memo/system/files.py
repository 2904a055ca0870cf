"""Reading within bounds, writing whole files, and the cache folder. Every text and JSON comes through
read_text() or load_json(): a pipe, an endless device and JSON nested without end are refused."""

import errno
import hashlib
import json
import os
import resource
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil, inf, isfinite
from pathlib import Path
from typing import IO, Any, BinaryIO

from memo import HOME
from memo.errors import ConfigError, reason

MOST_TEXT_CHARS = 2**26  # of a text that is read at once: above the largest request log of a step
MOST_LINES, MOST_LINE_CHARS = 2**20, 2**14  # of a log or a table
MOST_JSON_CHARS = 2**24  # values may take thirty times as much memory, and seconds
MOST_VALUES = 2**18      # in it, a second's work: some files are read several times
MOST_DEPTH = 32          # of lists and objects inside each other
NEW = ".memo-new-"       # how names begin of what is not whole yet; random digits follow
DIGEST = 73              # bytes of digest_of()
# of a process that reads what a library would believe: seconds of a processor, and of memory
TRIAL_S, TRIAL_BYTES, BYTES_PER_S = 5, 2**30, 2**20
STRETCHES, STRETCH_BYTES = 256, 2**17  # that stand for a large file

Json = Any  # a value that json.loads() gives
JsonObject = dict[str, Json]


# --- reading ---

def regular(status: os.stat_result, path: str | None = None) -> os.stat_result:
    """Checks os.stat()'s result -> it. Errors: OSError: it is no regular file, and may have no end."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", path)
    return status


def open_file(path: str | Path) -> int:
    """Opens a regular file for reading -> its descriptor. A pipe does not block. Errors: OSError."""
    regular(os.stat(path))  # to open a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_lock(path: str | Path, mode: int) -> IO[str]:
    """Opens a file to be locked, made where there is none; no link is followed, a pipe does not block.
    Errors: OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = open(os.open(path, flags, mode), "r+")  # noqa: SIM115  as long as it is locked
    try:
        regular(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_text(path: str | Path, most_chars: int = MOST_TEXT_CHARS, newline: str | None = None) -> str:
    """Reads a file in UTF-8, without its byte order mark, if any. Errors: OSError, ValueError."""
    with open(open_file(path), encoding="utf-8-sig", newline=newline) as file:
        text = file.read(most_chars + 1)
    if len(text) > most_chars:
        raise ValueError(f"it must be at most {most_chars:,} characters long")
    return text


def read_table(path: str | Path) -> str:
    """Reads a log or a table. Errors: as read_text()."""
    text = read_text(path)
    if text.count("\n") > MOST_LINES:
        raise ValueError(f"it must have at most {MOST_LINES:,} lines")
    if (longest := max(map(len, text.split("\n")))) > MOST_LINE_CHARS:
        raise ValueError(f"a line of {longest:,} characters must have at most {MOST_LINE_CHARS:,}")
    return text


def depth(value: Json) -> int:
    """Counts how many lists and objects of a JSON value lie inside each other."""
    level, n = [value], 0
    while level := [v for v in level if isinstance(v, (dict, list))]:
        n += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return n


def parse_json(text: str, most_values: float = MOST_VALUES) -> JsonObject:
    """Parses a JSON object of bounded size and depth, with finite numbers. Errors: ValueError."""
    if sum(map(text.count, "[{,")) > most_values:  # no value without one of them, but the first
        raise ValueError(f"it must have at most {most_values:,} values")

    def finite(digits: str) -> float:
        if not isfinite(number := float(digits)):
            raise ValueError(f"{digits[:20]} is no finite number")
        return number

    def once(pairs: list[tuple[str, Json]]) -> JsonObject:
        fields: JsonObject = {}
        for name, value in pairs:
            if name in fields:
                raise ValueError(f"{name!r:.100} stands twice in one object")
            fields[name] = value
        return fields
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


@contextmanager
def reading(what: str | Path, remedy: str,
            errors: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Makes one of `errors` meanwhile a ConfigError: `what` cannot be read, and the remedy."""
    try:
        yield
    except errors as e:
        raise ConfigError(f"{what} cannot be read ({reason(e)}); {remedy}") from None


def load_json(path: str | Path, remedy: str) -> JsonObject:
    """Reads a JSON file. Errors: ConfigError with the `remedy`."""
    with reading(path, remedy):
        return parse_json(read_text(path, MOST_JSON_CHARS))


def plain_name(name: object) -> bool:
    """Says whether `name`, read from a file, names a file in its own folder and nothing else."""
    return (isinstance(name, str) and name not in (".", "..") and not set(name) & {"/", "\0"}
            and 0 < len(name.encode(errors="replace")) <= 255)


def fingerprint(path: str | Path, whole: bool) -> str:
    """Hashes a file: 16 digits of its length and stretches; with `whole` 16 more, of all. Errors: OSError."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for start in range(0, size, max(STRETCH_BYTES, size // STRETCHES)):
            digest.update(os.pread(file.fileno(), STRETCH_BYTES, start))
        rest = hashlib.file_digest(file, "sha256").hexdigest()[:16] if whole else ""
    return digest.hexdigest()[:16] + rest


def command_of(module: str, function: str, *args: str) -> list[str]:
    """Writes the command of a process that calls a function of memo's with `args`, and ends."""
    code = f"import sys; sys.path[0] = {HOME!r}; from {module} import {function}; {function}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *args]


def limit_process(nbytes: int) -> None:
    """Ends this process, which reads `nbytes`, beyond TRIAL_BYTES, or TRIAL_S and 1 s a BYTES_PER_S."""
    used, pages = sum(os.times()[:2]), Path("/proc/self/statm").read_text().split()[0]
    limits = {resource.RLIMIT_CPU: ceil(used) + TRIAL_S + nbytes // BYTES_PER_S, resource.RLIMIT_CORE: 0,
              resource.RLIMIT_AS: int(pages) * resource.getpagesize() + TRIAL_BYTES}
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


# --- writing ---

def readable_json(value: Json, pad: str = "") -> str:
    """Writes `value` as JSON for people: one item a line, but a list of plain values on one line."""
    if isinstance(value, dict) and value:
        items, ends = [f"{json.dumps(str(k))}: {readable_json(v, pad + ' ')}" for k, v in value.items()], "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple, dict)) for v in value):
        items, ends = [readable_json(v, pad + " ") for v in value], "[]"
    else:
        return json.dumps(value)
    return f"{ends[0]}\n{pad} " + f",\n{pad} ".join(items) + f"\n{pad}{ends[1]}"


def sync_folder(folder: str | Path) -> None:
    """Waits until the names in a folder are on the disk. Some file systems cannot say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a new file, for writing and reading, which takes the place of the regular file at `path`, or of
    nothing, once it is whole and on the disk; a failure leaves `path` alone. Nobody can plant the new name,
    and a link, a pipe or a device at `path` is an error. Errors: OSError."""
    folder, name = os.path.split(path)
    parent = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = f"{NEW}{secrets.token_hex(8)}"
    try:
        check_target(name, parent, path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, mode, dir_fd=parent), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_target(name, parent, path)
        os.replace(new, name, src_dir_fd=parent, dst_dir_fd=parent)
        with suppress(OSError):  # as sync_folder()
            os.fsync(parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=parent)
        raise
    finally:
        os.close(parent)


def check_folder(path: str | Path, name: str) -> None:
    """Checks that a folder is there, or can be made. Errors: ConfigError."""
    there = next((p for p in (Path(path), *Path(path).parents) if os.path.lexists(p)), Path())
    if not there.is_dir():
        raise ConfigError(f"{name}={path} must be a folder, or nothing yet, and {there} is no folder; choose "
                          f"another {name}")


def own_folder(path: Path) -> Path:
    """Makes the folder `path` -> it. Errors: OSError: no folder, or a link, which may lead anywhere."""
    with suppress(FileExistsError):
        path.mkdir(parents=True, exist_ok=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise OSError(errno.ENOTDIR, f"{path.name} must be a folder, and no link", str(path))
    return path


def check_target(name: str, parent: int, path: str | Path) -> None:
    """Checks that `name` in the open folder `parent` is a regular file or nothing. Errors: OSError."""
    with suppress(FileNotFoundError):
        regular(os.stat(name, dir_fd=parent, follow_symlinks=False), str(path))


def check_other(source: str | Path, target: str | Path) -> None:
    """Checks that a command does not write over what it reads. Errors: ConfigError."""
    with suppress(OSError):  # one of them is not there
        if os.path.samefile(source, target):
            raise ConfigError(f"{target} is what is read; choose another -o")


def save_bytes(data: bytes, path: str | Path) -> None:
    """Writes `data` as replacing() does."""
    with replacing(path) as file:
        file.write(data)


def json_bytes(value: Json) -> bytes:
    return f"{readable_json(value)}\n".encode()


def save_json(value: Json, path: str | Path) -> None:
    """Writes `value` as JSON for people, as replacing() does."""
    save_bytes(json_bytes(value), path)


# --- kept from run to run ---

def ours_alone(status: os.stat_result) -> bool:
    """Says whether a file with this os.stat() is this user's, and no other one can write it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_place() -> tuple[Path | None, str | None]:
    """Finds the cache folder -> (it, None), or, where others could plant files: (None, reason and remedy)."""
    other = "set XDG_CACHE_HOME to a folder of your own"
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        folder = root / "memo"
        if not os.path.lexists(folder):
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        for parent in folder.resolve().parents:  # whoever can write it could put another folder in its place
            mode, owner = parent.stat().st_mode, parent.stat().st_uid
            if owner not in (0, os.getuid()):
                return None, f"{parent} belongs to another user; {other}"
            if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
                return None, f"{parent} can be written by others; chmod go-w {parent}, or {other}"
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return None, f"{folder} is no folder of this user; remove it, or {other}"
        if not ours_alone(status):
            return None, f"{folder} can be written by others; chmod 700 {folder}"
        return folder, None
    except (OSError, RuntimeError, ValueError) as e:  # no home; a disk that cannot be written
        return None, f"no cache folder can be made ({reason(e)}); {other}"


def keep(data: bytes, path: Path) -> None:
    """Stores `data` in a cache, with its digest behind it. Errors: OSError."""
    with replacing(path, 0o600) as file:
        file.write(data + digest_of(data))


def kept(descriptor: int, most_bytes: int = MOST_TEXT_CHARS) -> bytes:
    """Reads what keep() stored, from an open file, which stays open. Errors: OSError, ValueError."""
    with open(descriptor, "rb", closefd=False) as file:
        if not ours_alone(os.fstat(file.fileno())):
            raise ValueError("others can write it")
        data = file.read(most_bytes + 1)
    content, digest = data[:-DIGEST], data[-DIGEST:]
    if len(data) > most_bytes or digest != digest_of(content):
        raise ValueError("it is not what was stored")
    return content


def digest_of(data: bytes) -> bytes:
    """Writes the line that stands behind data in the cache: "sha256 ", 64 digits and a line end."""
    return f"\nsha256 {hashlib.sha256(data).hexdigest()}\n".encode()


def keep_json(value: Json, folder: Path | None, name: str) -> None:
    """Stores `value` as JSON in a cache's folder, if any, for the next run. A failure costs only time."""
    if folder is not None:
        with suppress(OSError):
            keep(readable_json(value).encode(), folder / name)


def kept_json(folder: Path, name: str) -> JsonObject:
    """Reads what keep_json() stored. Errors: as kept()."""
    with open(open_file(folder / name), "rb") as file:
        return parse_json(kept(file.fileno()).decode(), inf)
