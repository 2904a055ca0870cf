"""The folder of a run: locked by one run at a time, and the same one for all of its ranks."""

import contextlib
import errno
import fcntl
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import IO

from memo.errors import ConfigError, elsewhere, warn
from memo.system.files import NEW, read_text, regular

LOCK = ".lock"


def lock(out: Path, owner: str) -> IO:
    """Makes and locks `out`, so that two runs never write there at once -> the lock, which says `owner`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(out / LOCK, flags, 0o666), "r+")  # noqa: SIM115  until the process ends
        if regular(os.fstat(file.fileno())).st_nlink > 1:  # another name of a file that is not the run's
            raise OSError(errno.EMLINK, "its .lock has other names too, remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out_dir={out} is in use by another run; wait for it or choose another "
                              "--out_dir") from None
        except OSError as e:  # some network file systems know no locks
            warn(f"out_dir={out} cannot be locked ({e.strerror}); see that no other run uses it")
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), owner.encode())
    except OSError as e:
        raise ConfigError(f"out_dir={out} cannot be written ({e.strerror}); "
                          f"{elsewhere(e, '--out_dir')}") from None
    for left in out.glob(f"{NEW}*"):  # by a run that was killed
        with contextlib.suppress(OSError):
            left.unlink()
    return file


def rescues(out: Path) -> tuple[str, list[Path]]:
    """Finds (how the names begin, the folders, newest first) of what could not be saved in `out`."""
    start, folders = f"memo-saved-{zlib.crc32(os.fsencode(out.absolute())):08x}-", []
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{start}*"):
            status = folder.lstat()
            if status.st_uid == os.getuid() and not (folder / LOCK).exists():
                folders.append((status.st_mtime_ns, folder))
    return start, [folder for _, folder in sorted(folders, reverse=True)]


def is_locked(out: Path, file: IO) -> bool:
    """Says whether `out` still has the lock `file`. A disk that does not answer has not lost it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(out / LOCK))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def check_shared(out: Path, owner: str) -> None:
    """Raises ConfigError where `out` is another folder here than the one that rank 0 locked for `owner`."""
    for _ in range(20):
        with contextlib.suppress(OSError, ValueError):
            if read_text(out / LOCK) == owner:
                return
        time.sleep(0.5)  # a network file system may show it late
    raise ConfigError(f"out_dir={out} is not the folder that rank 0 writes to; choose one that all hosts "
                      "share")
