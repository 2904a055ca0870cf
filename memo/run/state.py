"""The state of a run: what was asked (Checked), how it is laid out (Decided), what it trains with (Run); its
folder, which is locked by one run at a time, and the same one for all of its ranks."""

import errno
import fcntl
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from memo.checkpoint.checkpoint import Checkpoint, Saver
from memo.config.config import Config, as_keys
from memo.config.keys import Keys
from memo.config.layout import Layout
from memo.data.batch import Data
from memo.decide.where import Decision
from memo.errors import ConfigError, elsewhere, reason, warn
from memo.estimate.budget import Estimate
from memo.estimate.lengths import Documents
from memo.estimate.regions import Line
from memo.layer.tiles import RowOrder
from memo.parallel.mesh import Mesh
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.files import NEW, check_folder, open_lock, plain_name, read_text
from memo.system.hardware import Machine

LOCK = ".lock"


@dataclass(kw_only=True)
class Checked:
    """Holds the part of a run that each rank knows by itself, before the device is touched."""

    cfg: Config  # with the dataset's vocab_size
    data: Data
    out: Path  # cfg.out_dir
    ckpt: Checkpoint | None  # to resume from
    hf: str | None  # the folder of a model of Hugging Face to start from
    device: torch.device
    dtype: torch.dtype
    speaks: bool  # whether this rank prints, logs and draws: rank 0
    one_host: bool  # whether all ranks are on this host
    force: bool  # whether to start although memory lacks
    kernels: Keys  # keys that name those of the run
    origin: dict[str, object]  # what its numbers come from beside its keys: see origin.code()

    @property
    def documents(self) -> Documents | None:
        return Documents(str(self.data.folder), self.data.packings["train"]) if self.cfg.documents else None


@dataclass(kw_only=True)
class Decided(Checked):
    """Holds a run with a layout, for which there is memory."""

    cfg: Layout
    host_limit_bytes: int  # this rank's share of the host, for swapped activations
    expected: Estimate | None = None
    asked: Keys = field(default_factory=dict)  # keys that cfg has numbers for: they were auto
    owner: str = ""  # the text of out/.lock, the same on all ranks
    lock: IO | None = None  # out/.lock, open on rank 0

    @property
    def machine(self) -> Machine | None:
        return self.expected.machine if self.expected else None


@dataclass(kw_only=True)
class Run(Decided):
    """Holds a run that can train."""

    mesh: Mesh
    order: RowOrder  # of the rows of this rank
    model: Model
    optimizer: Optimizer
    decision: Decision
    lines: list[Line]  # what lives where on this rank
    saver: Saver
    peak: float | None  # FLOP/s of the GPU, where they are known
    first: int  # the step to begin with
    step: int  # the step under way
    done: int  # steps
    whole: bool = True  # whether weights and optimizer are those after `done` steps; False while they change
    loggers: list = field(default_factory=list)
    stage_records: list[dict] = field(default_factory=list)  # report.stage_record() of each of several stages
    own: dict[str, bytes] = field(default_factory=dict)  # that came with the model: huggingface.own_files()
    failed_saves: int = 0  # in a row
    slowest_s: float = 0.0  # of the steps so far
    told: set[str] = field(default_factory=set)  # warnings of attempt(), and pictures: once each

    @property
    def stored(self) -> Keys:
        """Lists the keys of config.json and of checkpoints."""
        wandb_id = self.ckpt and self.ckpt.config.get("wandb_id")  # a run goes on in Weights & Biases as well
        about = dict(tokenizer=self.data.meta.get("tokenizer"), asked=self.asked, origin=self.origin,
                     wandb_id=wandb_id if plain_name(wandb_id) else self.owner[-8:],
                     gradient_accumulation_steps=self.cfg.micro_batches(self.mesh.dp.size))
        return as_keys(self.cfg) | {name: value for name, value in about.items() if value}

    @property
    def has_folder(self) -> bool:
        """Says whether `out` still has this run's lock. A disk that does not answer has not lost it."""
        try:
            return not self.lock or os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.out / LOCK))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def where(self) -> str:
        """Says how far this rank is, for an error."""
        return f", stage {self.cfg.stage}" * (self.cfg.pp > 1) + f", step {self.step}"

    def attempt(self, what: str, work: Callable[..., object], *args: object) -> bool:
        """Calls work(*args), not worth a run -> did it succeed? A failure is a warning, once a reason."""
        try:
            work(*args)
            return True
        except Exception as e:
            line = f"{what} failed ({type(e).__name__}: {reason(e)}); training goes on"
            if line not in self.told:
                self.told.add(line)
                warn(line)
            return False

    def close(self) -> None:
        """Waits for the save under way, and gives back streams, memory and groups."""
        with ExitStack() as stack:  # the last one is closed first; all of them, even if one fails
            if self.lock:
                stack.callback(self.lock.close)
            for part in (self.mesh, self.model.arena, self.model, self.saver):
                stack.callback(part.close)


# --- its folder ---

def lock(out: Path, owner: str) -> IO:
    """Makes and locks `out`, so that two runs never write there at once -> the lock, which says `owner`."""
    check_folder(out, "out_dir")
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open_lock(out / LOCK, 0o666)  # until the process ends
        if os.fstat(file.fileno()).st_nlink > 1:  # another name of a file that is not the run's
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
        with suppress(OSError):
            left.unlink()
    return file


def rescues(out: Path) -> tuple[str, list[Path]]:
    """Finds (how the names begin, the folders, newest first) of what could not be saved in `out`."""
    start, folders = f"memo-saved-{zlib.crc32(os.fsencode(out.absolute())):08x}-", []
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{start}*"):
            status = folder.lstat()
            if status.st_uid == os.getuid() and not (folder / LOCK).exists():
                folders.append((status.st_mtime_ns, folder))
    return start, [folder for _, folder in sorted(folders, reverse=True)]


def check_shared(out: Path, owner: str) -> None:
    """Raises ConfigError where `out` is another folder here than the one that rank 0 locked for `owner`."""
    for _ in range(20):
        with suppress(OSError, ValueError):
            if read_text(out / LOCK) == owner:
                return
        time.sleep(0.5)  # a network file system may show it late
    raise ConfigError(f"out_dir={out} is not the folder that rank 0 writes to; choose one that all hosts "
                      "share")
