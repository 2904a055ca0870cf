"""Checkpoints: written by all ranks while training goes on, whole at any moment, readable in any layout.

    out_dir/ckpt/<iter>/__<rank>_<n>.distcp, .metadata  torch.distributed.checkpoint's files, fp32:
        params.<name>, exp_avg.<name>, exp_avg_sq.<name>    master weights and AdamW's moments
    out_dir/ckpt/<iter>/checkpoint.json     format, iter to go on with, config, size and crc32 of each file
    out_dir/ckpt/<iter>.<digits>.tmp/       a checkpoint that is not finished, or no longer needed
    out_dir/ckpt/<iter>.damaged/            a damaged checkpoint: a run went on from the one before it

Batches depend on the seed and the iteration only, so `iter` is the position in the data too. A checkpoint
without moments (memo.convert makes them) starts a run of its own. Reading one executes nothing."""

import contextlib
import os
import pickle
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from secrets import token_hex

import torch
import torch.distributed as dist

from memo.checkpoint import manifest
from memo.checkpoint.manifest import CHECKPOINT_JSON, METADATA, Damaged, checkpoints, last_good, latest
from memo.checkpoint.shards import Tensors, fill, read_index
from memo.config.config import KEYS, MODEL_KEYS, POSITION_KEYS
from memo.config.layout import Layout
from memo.errors import FULL, BadState, CheckpointError, DataError, elsewhere, reason, warn
from memo.memory.flat import model_parameters
from memo.memory.parameters import Piece, is_finite, whole
from memo.memory.slab import HostSlab
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis, T, come
from memo.system.command import progress, start_thread
from memo.system.files import JsonObject, own_folder, regular, save_bytes, sync_folder

READ_BYTES = 2**24
ONE_PROCESS = Axis("one process")
STAGED_BYTES = 2**24  # of a block of page-locked memory: enough for a bus's full speed
LESS = "try a lower --learning_rate or more --warmup_iters"


def crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


class Saver:
    """Writes checkpoints in the background; every rank makes the same calls. `ranks`: all of them, over a
    group that nothing else uses. `pin`: copy from a GPU through page-locked memory. `keep`: how many stay,
    beside one that no step has followed yet; on a full disk one. `whole`: the newest whole one's iteration.
    `read`: reads a piece's tensor when it is written; pieces then have shapes only. `copies`: copy pieces,
    which may change soon. `lease`: whether an out_dir is still this run's."""

    def __init__(self, out_dir: str | Path, ranks: Axis = ONE_PROCESS, pin: bool = True, keep: int = 1,
                 whole: int | None = None, read: Callable[[Piece], torch.Tensor] | None = None,
                 copies: bool = True, lease: Callable[[Path], bool] = lambda out: True) -> None:
        self.lease, self.folder = lease, Path(out_dir) / manifest.CHECKPOINT
        self.ranks, self.keep, self.whole = ranks, keep, whole
        self.thread: threading.Thread | None = None
        self.error: CheckpointError | DataError | BadState | None = None
        self.read, self.copies = read, copies and read is None
        self.pieces: list[Piece] | None = None
        self.pin, self.taken = pin, threading.Event()
        self.slab: HostSlab | None = None  # page-locked once

    def save(self, pieces: list[Piece], config: JsonObject, iter: int) -> None:
        """Starts to write the checkpoint for the next iteration `iter`, if it is not there. The fp32 `pieces`
        must not change before copied(). Errors: wait()'s, of the save before; then none starts."""
        self.wait()
        reached = None
        if pieces and pieces[0].tensor.is_cuda:
            reached = torch.cuda.current_stream(pieces[0].tensor.device).record_event()
        self.taken = threading.Event()
        self.thread = threading.Thread(target=self.write, args=(pieces, reached, config, iter),
                                       name="memo checkpoint", daemon=True)
        try:
            start_thread(self.thread)
        except RuntimeError:  # no memory for a thread
            self.thread = None
            self.write(pieces, reached, config, iter)

    def copied(self) -> None:
        """Waits until the pieces of the save under way may change: they are copied, or written."""
        if self.thread is not None:
            self.taken.wait()

    def wait(self) -> None:
        """Waits for the save under way. Errors, once, on every rank: CheckpointError, BadState, DataError."""
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.thread = None

    def close(self) -> None:
        """Waits like join(), and gives the group back. The last call of all."""
        self.join()
        if self.ranks.group is not None:
            dist.destroy_process_group(self.ranks.group)
            self.ranks.group = None

    def copy(self, pieces: list[Piece], reached: torch.cuda.Event | None) -> list[Piece]:
        """Copies the fp32 pieces to host memory. `reached`: a GPU's event behind their last change."""
        if reached is None:
            return [p._replace(tensor=torch.empty(p.tensor.shape).copy_(p.tensor)) for p in pieces]
        # through two small page-locked blocks: a GPU's copies to other memory are slow
        copies, device = [torch.empty(p.tensor.shape) for p in pieces], pieces[0].tensor.device
        n = STAGED_BYTES // 4
        parts = [part for copy, p in zip(copies, pieces, strict=True)
                 for part in zip(*(t.view(-1).split(n) for t in (copy, p.tensor)), strict=True)]
        filled, stream = [torch.cuda.Event() for _ in parts], torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self.slab = self.slab or HostSlab(2 * STAGED_BYTES, device, self.pin)
            blocks = self.slab.bytes.view(torch.float32).split(n)
            stream.wait_event(reached)  # an optimizer step may still be under way
            for i in range(len(parts) + 1):  # one block is filled while the other one is emptied
                if i < len(parts):
                    _, part = parts[i]
                    blocks[i % 2][:len(part)].copy_(part, non_blocking=True)
                    filled[i].record(stream)
                if i > 0:
                    copy, _ = parts[i - 1]
                    filled[i - 1].synchronize()  # of this thread only
                    copy.copy_(blocks[(i - 1) % 2][:len(copy)])
        return [p._replace(tensor=t) for p, t in zip(pieces, copies, strict=True)]

    def take(self, pieces: list[Piece], reached: torch.cuda.Event | None) -> str | None:
        """Copies the pieces, where they are to be -> the name of a piece that is not finite, or None."""
        self.pieces = pieces
        if self.copies:
            self.pieces = self.copy(pieces, reached)
            self.taken.set()
        return next((p.name for p in self.pieces if not self.read and not is_finite(p.tensor)), None)

    def write(self, pieces: list[Piece], reached: torch.cuda.Event | None, config: JsonObject,
              iter: int) -> None:
        path = temporary = self.folder / str(iter)
        try:
            # a run that lost its folder has another on rank 0
            self.folder, name = self.on_first(lambda: (self.folder, f"{iter}.{token_hex(8)}.tmp"))
            path, temporary = self.folder / str(iter), self.folder / name
            if bad := [name for name in self.together(self.take, pieces, reached) if name]:
                good = self.on_first(last_good, self.folder.parent, iter)
                raise BadState(f"{bad[0]} after {iter} steps must be finite, it is not saved; {good}; {LESS}")
            if iter != self.whole or not self.on_first((path / CHECKPOINT_JSON).exists):
                # the newest has proved itself: finite steps have followed it
                self.on_first(self.remove_old, self.keep)
                try:
                    self.write_folder(path, temporary, config, iter)
                except CheckpointError as e:
                    if str(e) not in FULL or self.keep == 1:
                        raise
                    self.on_first(self.remove_old, 1)  # the newest whole one stays
                    self.write_folder(path, temporary, config, iter)
                self.whole = iter
        except (BadState, DataError) as e:
            self.error = e
        except Exception as e:
            whole = ""
            with contextlib.suppress(OSError):  # of a folder that cannot even be listed
                whole = " the previous one is whole;" * bool(latest(self.folder.parent))
            self.error = CheckpointError(f"{path} cannot be written ({reason(e)});{whole} "
                                         f"{elsewhere(e, 'folder')}")
        finally:
            if self.error and self.ranks.rank == 0 and temporary != path:
                shutil.rmtree(temporary, ignore_errors=True)
            self.pieces = None  # as large as the optimizer's states
            self.taken.set()

    def write_folder(self, path: Path, temporary: Path, config: JsonObject, iter: int) -> None:
        """Writes self.pieces of all ranks as the newest checkpoint. Errors: CheckpointError, on all ranks."""
        self.on_first(self.begin, path, temporary)
        parts = self.together(self.write_files, temporary, self.pieces)
        files = {name: sizes for part in parts for name, sizes in part.items()}
        self.on_first(self.commit, path, temporary,
                      dict(format=manifest.FORMAT, iter=iter, config=config, files=files))

    def together(self, work: Callable[..., T], *args: object) -> list[T]:
        """Calls work(*args) on every rank -> all results. An error on one rank is raised on all."""
        result: object
        try:
            result = work(*args)
        except Exception as e:
            result = e if isinstance(e, DataError) else CheckpointError(reason(e))
        come(manifest.SAVE, "part")
        results: list = self.ranks.objects(result)
        for error in (r for r in results if isinstance(r, (CheckpointError, DataError))):
            raise error
        return results

    def on_first(self, work: Callable[..., T], *args: object) -> T:
        """Calls work(*args) on rank 0 -> its result, on every rank. An error is raised on all."""
        results: list = self.together(lambda: None if self.ranks.rank else work(*args))
        return results[0]

    def check_lease(self, out: Path) -> None:
        """Raises CheckpointError where the folder is another run's, or removed."""
        if not self.lease(out):
            raise CheckpointError(f"{out} is not this run's any more")

    def begin(self, path: Path, temporary: Path) -> None:
        """Clears the way to `path`, and makes the folder `temporary`, which nobody has planted."""
        self.check_lease(path.parents[1])
        for leftover in own_folder(path.parent).glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        if os.path.lexists(path):
            pass_over(path)
        temporary.mkdir()

    def write_files(self, folder: Path, pieces: list[Piece]) -> dict[str, list[int]]:
        """Writes this rank's files -> {name: [bytes, crc32]}."""
        from memo.checkpoint import dcp  # takes a second: a run starts without it
        return dcp.write(folder, pieces, self.ranks.group, self.read)

    def commit(self, path: Path, temporary: Path, stored: JsonObject) -> None:
        """Makes the finished folder the newest checkpoint."""
        save_bytes(manifest.manifest_text(stored).encode(), temporary / CHECKPOINT_JSON)
        self.check_lease(path.parents[1])
        temporary.rename(path)
        sync_folder(path.parent)
        sync_folder(path.parents[1])

    def remove_old(self, keep: int) -> None:
        """Removes the run's own checkpoints but for the `keep` newest, and damaged ones but for as many."""
        out = self.folder.parent
        if self.whole is None or not self.lease(out):
            return
        own = [folder for folder in checkpoints(out) if int(folder.name) <= self.whole]
        for old in [*own[keep:], *manifest.damaged(out)[keep:]]:
            with contextlib.suppress(OSError):  # a number is the name of a whole one, at any moment
                shutil.rmtree(old.rename(old.with_suffix(f".{token_hex(8)}.tmp")))


def pass_over(folder: Path) -> None:
    """Renames the folder of a damaged checkpoint, so that no reader takes it for a whole one, and says so."""
    own_folder(folder.parent)
    names = (folder.with_suffix(f".damaged{n or ''}") for n in count())
    new = next(new for new in names if not os.path.lexists(new))
    folder.rename(new)
    warn(f"{folder} is kept as {new.name} while there are few of these (keep_checkpoints)")


@dataclass(frozen=True)
class Checkpoint:
    """Holds an intact checkpoint, whose tensors stay in the files until they are read."""

    path: Path
    config: dict
    iter: int
    stored: Tensors

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Lists {name: shape} of the tensors under `prefix`."""
        return {name: shape for name, (shape, _) in self.stored.items() if name.startswith(f"{prefix}.")}

    def tensor(self, name: str) -> torch.Tensor:
        """Reads a whole tensor, fp32. Errors: as read()."""
        tensor = torch.empty(self.stored[name][0])
        self.read([whole(name, tensor)])
        return tensor

    def tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name without the prefix, fp32 tensor), one after the other."""
        return ((name.removeprefix(f"{prefix}."), self.tensor(name)) for name in self.shapes(prefix))

    def read(self, pieces: list[Piece]) -> None:
        """Fills the `pieces`, in any layout. Errors: CheckpointError: they are not finite; Damaged."""
        try:
            fill(self.path, self.stored, pieces)
        except pickle.UnpicklingError:
            text = f"{self.path} holds something that is no tensor; nothing of it was run"
            raise Damaged(self.path, text) from None
        except Exception as e:
            raise Damaged(self.path, f"{self.path} cannot be read ({reason(e)})") from None
        if bad := [p.name for p in pieces if not is_finite(p.tensor)]:
            raise CheckpointError(f"{self.path}: {bad[0]} must be finite, and is not; "
                                  f"{last_good(self.path.parents[1], self.iter)}")


def load(out_dir: str | Path, rank: int = 0, world: int = 1,
         passed_over: Mapping[Path, str] = {}) -> Checkpoint:
    """Opens the newest checkpoint not `passed_over`; ranks share out its check. Errors: CheckpointError."""
    path, stored = manifest.newest(out_dir, passed_over)
    with progress(lambda: f"checking {path}", rank == 0):
        check_files(path, stored["files"], rank, world)
    try:
        tensors = read_index(path, stored["files"])
    except Exception as e:  # a pickle has many ways to be wrong
        raise Damaged(path, f"{path / METADATA} cannot be read ({reason(e)})") from None
    return Checkpoint(path, stored["config"], stored["iter"], tensors)


def check_files(path: Path, files: dict[str, list[int]], rank: int, world: int) -> None:
    """Reads this rank's part of the `files` of a manifest. Errors: Damaged."""
    for i, (name, (size, crc)) in enumerate(files.items()):
        file = path / name
        try:
            nbytes = regular(os.stat(file)).st_size
            if nbytes != size:
                raise Damaged(path, f"{file} is {nbytes} bytes long, must be {size}")
            if (i % world == rank or name == METADATA) and crc32(file) != crc:
                raise Damaged(path, f"{file} is corrupt (its crc32 is not the one in {CHECKPOINT_JSON})")
        except FileNotFoundError:
            raise Damaged(path, f"{file} is missing") from None
        except OSError as e:
            raise manifest.read_error(path, file, e) from None


def read_newest(out_dir: str | Path, work: Callable[[Checkpoint], T]) -> T:
    """Calls work() on the newest intact Checkpoint in `out_dir`, from which a run may remove some meanwhile;
    passes damaged ones over, with a warning. Errors: CheckpointError: none is intact."""
    passed_over: dict[Path, str] = {}
    while True:
        try:
            return work(load(out_dir, passed_over=passed_over))
        except Damaged as e:
            if os.path.lexists(e.folder):
                passed_over[e.folder] = str(e)
                if {*checkpoints(out_dir)} - passed_over.keys():  # else this is the error
                    warn(f"checkpoint passed over: {e}")


def check_model(ckpt: Checkpoint, model: Model, prefixes: list[str]) -> None:
    """Raises CheckpointError where parameters or their shapes differ, or the model does with equal shapes."""
    theirs = {k: ckpt.config.get(k, KEYS[k].default) for k in MODEL_KEYS}  # keys may be younger than it
    other = {k: value for k, value in theirs.items() if value != getattr(model.cfg, k)}
    keys = ", ".join(f"{k}={other[k]}, not {getattr(model.cfg, k)}" for k in sorted(other))
    remedy = f"; give the run the checkpoint's {keys}" if other else ""
    parameters = model_parameters(Layout.whole(model.cfg))
    for prefix in prefixes:
        stored, wanted = ckpt.shapes(prefix), {f"{prefix}.{name}": p.shape for name, p in parameters.items()}
        for name in {**wanted, **stored}:
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(f"{ckpt.path}: {name} is {stored.get(name, 'missing')} in the "
                                      f"checkpoint and {wanted.get(name, 'missing')} in the model{remedy}")
    if other.keys() - set(POSITION_KEYS):  # rotary positions may change under the weights
        raise CheckpointError(f"{ckpt.path} is of another model{remedy}")


def restore(ckpt: Checkpoint, model: Model, optimizer: Optimizer | None = None) -> None:
    """Sets the optimizer's states, or without one the model's parameters, after check_model()."""
    moments = {**ckpt.shapes("exp_avg"), **ckpt.shapes("exp_avg_sq")}
    check_model(ckpt, model, ["params", "exp_avg", "exp_avg_sq"] if moments and optimizer else ["params"])
    if optimizer is None:
        model.load(ckpt.tensors("params"))
        return
    ckpt.read([p for p in optimizer.pieces() if moments or p.name.startswith("params.")])
    if not moments:
        optimizer.exp_avg.zero_()
        optimizer.exp_avg_sq.zero_()
    optimizer.steps.fill_(ckpt.iter)
