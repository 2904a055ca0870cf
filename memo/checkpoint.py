"""Checkpoints: written by all ranks at once while training goes on, whole at any moment, readable in any layout.

    out_dir/ckpt/<iter>/__<rank>_0.distcp, .metadata    torch.distributed.checkpoint's files, fp32:
        params.<name>, exp_avg.<name>, exp_avg_sq.<name>    master weights and AdamW's moments
    out_dir/ckpt/<iter>/checkpoint.json                 format, iter to go on with, config, and every file's size and crc32
    out_dir/ckpt/<iter>.tmp/                            one that is not finished, or no longer needed

Batches depend on the seed and the iteration only, so `iter` is the position in the data too. A checkpoint without
moments (memo.convert makes them) starts a run of its own. Reading one executes nothing.
"""

import contextlib
import os
import shutil
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from memo.config import CHECKPOINT, CHECKPOINT_JSON, FORMAT, MODEL_KEYS, REMEDY, read_checkpoint, sealed
from memo.config import latest_checkpoint as latest
from memo.errors import CheckpointError, reason
from memo.flat import whole
from memo.snapshot import Copier

METADATA = ".metadata"  # DCP's name, see memo/dcp.py
READ_BYTES = 2**24


def crc32(path):
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def sync(folder):
    """Waits until the folder's entries are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
        os.fsync(fd)
    os.close(fd)


# --- writing ---

class Saver:
    """Writes a run's checkpoints in the background.

    `group`: a gloo process group of all ranks that nothing else uses; every rank makes the same calls. None:
    one process. `pin`: whether a GPU's states come through page-locked memory.
    """

    def __init__(self, out_dir, group=None, pin=True):
        self.folder, self.group = Path(out_dir) / CHECKPOINT, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.thread = self.error = self.pieces = None
        self.copier, self.taken = Copier(pin), threading.Event()

    def save(self, pieces, cfg, iter):
        """Starts to write the checkpoint of a run that has still to do iteration `iter`, of fp32 `pieces`,
        which must not change before copied() returns. Where there is one of this `iter` already it stays: a
        run that goes on from it is in the same state. Errors: those of the save before, as in wait(); then
        nothing is started."""
        self.wait()
        reached = None
        if pieces and pieces[0].tensor.is_cuda:
            reached = torch.cuda.Event()
            reached.record(torch.cuda.current_stream(pieces[0].tensor.device))
        self.taken = threading.Event()
        self.thread = threading.Thread(target=self.write, args=(pieces, reached, asdict(cfg), iter),
                                       name="memo checkpoint", daemon=True)
        self.thread.start()

    def copied(self):
        """Returns when the pieces of the save under way, if any, are copied: from now on they may change."""
        if self.thread is not None:
            self.taken.wait()

    def done(self):
        """Whether wait() would return, or raise, at once."""
        return self.thread is None or not self.thread.is_alive()

    def wait(self):
        """Returns when the save under way, if any, is on the disk. Errors: it failed, on this rank or another; the
        previous checkpoint is whole. Each failure is raised once, on every rank."""
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def join(self):
        if self.thread is not None:
            self.thread.join()
        self.thread = None

    def close(self):
        """As wait(), but silent, and the last of all; the group goes too."""
        self.join()
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None

    def take(self, pieces, reached):
        try:
            self.pieces = self.copier.copy(pieces, reached)
        finally:
            self.taken.set()

    def write(self, pieces, reached, config, iter):
        path = self.folder / str(iter)
        temporary = path.with_name(f"{iter}.tmp")
        try:
            self.together(self.take, pieces, reached)
            if any(self.together(self.begin, path)):
                files = self.together(self.write_files, temporary, self.pieces)
                self.together(self.commit, path, temporary, dict(format=FORMAT, iter=iter, config=config), files)
        except Exception as e:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            previous = "; the previous one is whole" if latest(self.folder.parent) else ""
            self.error = CheckpointError(f"{path} cannot be written ({reason(e)}){previous}; "
                                         "free some space there or choose another folder")
        finally:
            self.pieces = None  # as large as the optimizer's states

    def together(self, work, *args):
        """work(*args) on every rank -> the results of all. Errors: where it fails on one rank, it fails on all."""
        try:
            results = [work(*args)]
        except Exception as e:
            results = [CheckpointError(reason(e))]
        if self.group is not None:
            [mine], results = results, [None] * dist.get_world_size(self.group)
            dist.all_gather_object(results, mine, self.group)
        for result in results:
            if isinstance(result, CheckpointError):
                raise result
        return results

    def begin(self, path):
        """Rank 0 clears the way -> whether `path` is still to be written."""
        if self.rank or path.exists():
            return False
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # what stays is overwritten
        return True

    def write_files(self, folder, pieces):
        """-> {name of a file that this rank wrote: [bytes, crc32]}."""
        from memo import dcp  # takes a second: a run starts without it
        dcp.write(folder, pieces, self.group)
        mine = sorted(folder.glob(f"__{self.rank}_*")) + [folder / METADATA] * (self.rank == 0)
        return {file.name: [file.stat().st_size, crc32(file)] for file in mine}

    def commit(self, path, temporary, stored, files):
        """Rank 0 makes the finished folder the latest checkpoint; what was there before it goes."""
        if self.rank:
            return
        stored["files"] = {name: sizes for part in files for name, sizes in part.items()}
        with open(temporary / CHECKPOINT_JSON, "w") as file:
            file.write(sealed(stored))
            file.flush()
            os.fsync(file.fileno())
        sync(temporary)
        temporary.rename(path)
        sync(self.folder)
        sync(self.folder.parent)
        for old in list(self.folder.iterdir()):
            if old.name.isdecimal() and int(old.name) < stored["iter"]:
                with contextlib.suppress(OSError):  # a number is the name of a whole one, at any moment
                    shutil.rmtree(old.rename(old.with_suffix(".tmp")))


# --- reading ---

@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint. The tensors stay in the files until they are read."""

    path: Path
    config: dict
    iter: int
    reader: object  # a memo.dcp.Reader

    def shapes(self, prefix):
        """{name: shape} of the tensors under `prefix`."""
        stored = self.reader.metadata.state_dict_metadata
        return {name: tuple(t.size) for name, t in stored.items() if name.startswith(f"{prefix}.")}

    def tensors(self, prefix):
        """Yields (name without the prefix, fp32 tensor), one after the other."""
        for name, shape in self.shapes(prefix).items():
            tensor = torch.empty(shape)
            self.read([whole(name, tensor)])
            yield name.removeprefix(f"{prefix}."), tensor

    def read(self, pieces):
        """Fills the `pieces` in place, on any device, whatever the layout they were saved in; each rank for itself. Their
        names and shapes must be those of the checkpoint."""
        try:
            self.reader.read(pieces)
        except Exception as e:
            raise CheckpointError(f"{self.path} cannot be read ({reason(e)}); {REMEDY}") from None


def load(out_dir, rank=0, world=1):
    """The latest Checkpoint in `out_dir`. Each of `world` ranks reads its part of the files to see whether they are
    intact. Errors: none there, a file of it that is missing, truncated or corrupt, another format."""
    from memo import dcp  # takes a second: a run starts without it
    path, stored = read_checkpoint(out_dir)
    for i, (name, (size, crc)) in enumerate(stored["files"].items()):
        file = path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise CheckpointError(f"{file} is {found} bytes long, must be {size}; {REMEDY}")
            if (i % world == rank or name == METADATA) and crc32(file) != crc:
                raise CheckpointError(f"{file} is corrupt (its crc32 is not the one in {CHECKPOINT_JSON}); {REMEDY}")
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing; {REMEDY}") from None
        except OSError as e:
            raise CheckpointError(f"{file} cannot be read ({e.strerror}); {REMEDY}") from None
    try:
        reader = dcp.Reader(path, METADATA)
    except Exception as e:  # a pickle has many ways to be wrong
        raise CheckpointError(f"{path / METADATA} cannot be read ({reason(e)}); {REMEDY}") from None
    return Checkpoint(path, stored["config"], stored["iter"], reader)


def check(ckpt, model, prefixes):
    """Errors: a parameter that the model or the checkpoint lacks, one of another shape, another model of equal shapes."""
    cfg = {k: getattr(model.cfg, k) for k in MODEL_KEYS}
    other = {k for k in MODEL_KEYS if ckpt.config[k] != cfg[k]}
    keys = ", ".join(f"{k}={ckpt.config[k]}, not {cfg[k]}" for k in sorted(other))
    remedy = f"; give the run the checkpoint's {keys}" if other else ""
    for prefix in prefixes:
        stored, wanted = ckpt.shapes(prefix), {f"{prefix}.{name}": shape for name, shape in model.full_shapes.items()}
        for name in {**wanted, **stored}:
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(f"{ckpt.path}: {name} is {stored.get(name, 'missing')} in the checkpoint and "
                                      f"{wanted.get(name, 'missing')} in the model{remedy}")
    if other - {"block_size", "rope_theta"}:  # rotary positions may change under the weights
        raise CheckpointError(f"{ckpt.path} is of another model{remedy}")


def restore(ckpt, model, optimizer=None):
    """Sets the master weights, the moments and the steps; the model's parameters only where there is no optimizer, otherwise
    optimizer.publish() does. Talks to no other rank. Errors come before anything is overwritten: see check()."""
    moments = {**ckpt.shapes("exp_avg"), **ckpt.shapes("exp_avg_sq")}
    check(ckpt, model, ["params", "exp_avg", "exp_avg_sq"] if moments and optimizer else ["params"])
    if optimizer is None:
        model.load(ckpt.tensors("params"))
        return
    pieces = optimizer.pieces()
    ckpt.read([p for p in pieces if moments or p.name.startswith("params.")])
    if not moments:
        for p in pieces:
            if not p.name.startswith("params."):
                p.tensor.zero_()
    optimizer.steps.fill_(ckpt.iter)
