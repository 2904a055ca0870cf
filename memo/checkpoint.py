"""Checkpoints: one safetensors file, whole at any moment, that executes nothing when it is read.

    params.<name>, exp_avg.<name>, exp_avg_sq.<name>   fp32: master weights and AdamW's moments
    steps, rng.cpu, rng.cuda                           steps taken, states of torch's generators
    crc32                                              int64: of all the bytes before it; the end of the file
    metadata                                           format; iter, the iteration to go on with; config (JSON)

Batches depend on the seed and the iteration only, so `iter` is the position in the data too. A checkpoint without
moments (memo.convert makes them) starts a run of its own.
"""

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from memo.config import CHECKPOINT as FILE
from memo.config import MODEL_KEYS, ConfigError
from memo.flat import views

FORMAT = "memo 1"
DTYPES = {torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}  # safetensors' names
CRC_BYTES = 8
READ_BYTES = 2**24


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, read, or used for this model. One line."""


# --- writing ---

def write(path, tensors, metadata, with_crc=True):
    """{name: tensor}, {name: str} -> a safetensors file, which takes the place of `path` once it is on the disk.

    Errors: one that names the cause; then `path` is as it was, and no temporary file is left.
    """
    temporary = path.with_name(path.name + ".tmp")  # what a killed run left under this name is overwritten
    try:
        with open(temporary, "wb") as file:
            write_tensors(file, tensors, metadata, with_crc)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        previous = "; the previous one is whole" if path.exists() else ""
        raise CheckpointError(f"{path} cannot be written ({e.strerror or e}){previous}; "
                              "free some space there or choose another folder") from None
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


def write_tensors(file, tensors, metadata, with_crc):
    """The safetensors format by hand: safetensors.torch.save_file copies a model from the GPU as a whole, does not sync,
    and leaves a file of another random name at every kill. Here the tensors leave the GPU one by one."""
    crc = {"crc32": torch.zeros((), dtype=torch.int64)} if with_crc else {}
    header, end = {"__metadata__": metadata}, 0
    for name, t in (tensors | crc).items():
        header[name] = dict(dtype=DTYPES[t.dtype], shape=list(t.shape), data_offsets=[end, end + t.nbytes])
        end += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    value = 0
    for data in (len(head).to_bytes(8, "little"), head, *tensors.values()):
        if isinstance(data, torch.Tensor):
            data = data.cpu().contiguous().view(-1).numpy()
        file.write(data)
        value = zlib.crc32(data, value)
    if with_crc:
        file.write(value.to_bytes(CRC_BYTES, "little"))


def moments(optimizer):
    return dict(exp_avg=optimizer.exp_avg, exp_avg_sq=optimizer.exp_avg_sq)


def metadata(cfg, iter):
    return dict(format=FORMAT, iter=str(iter), config=json.dumps(asdict(cfg)))


def save(out_dir, model, optimizer, cfg, iter):
    """Writes the checkpoint of a run that has still to do iteration `iter`. A failure leaves the previous one whole."""
    flats = dict(params=optimizer.master, **moments(optimizer))
    tensors = {f"{prefix}.{name}": t for prefix, flat in flats.items() for name, t in views(model.layout, flat).items()}
    tensors |= {"steps": optimizer.steps, "rng.cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(model.device)
    write(Path(out_dir) / FILE, tensors, metadata(cfg, iter))


# --- reading ---

@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint. The tensors stay in the file until they are read."""

    path: Path
    config: dict
    iter: int
    file: safe_open
    names: list

    def shapes(self, prefix):
        """{name: shape} of the tensors under `prefix`."""
        return {n: tuple(self.file.get_slice(n).get_shape()) for n in self.names if n.startswith(f"{prefix}.")}

    def tensors(self, prefix):
        """Yields (name without the prefix, tensor), one after the other from the mapped file."""
        for name in self.shapes(prefix):
            yield name.removeprefix(f"{prefix}."), self.file.get_tensor(name)


def load(out_dir):
    """The Checkpoint in `out_dir`. Errors: none there, one that is truncated or corrupt, or of another format."""
    path = Path(out_dir) / FILE
    try:
        file = safe_open(path, "pt")
        stored = file.metadata() or {}
        if stored.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format={stored.get('format')!r} must be {FORMAT!r}; read it with the memo "
                                  "that wrote it")
        intact = crc_holds(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; train with --init_from=scratch, or see memo.convert") from None
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} cannot be read ({e}); use another copy of it or start from scratch") from None
    if not intact:
        raise CheckpointError(f"{path} is corrupt (its crc32 differs from the one it ends with); "
                              "use another copy of it or start from scratch")
    return Checkpoint(path, json.loads(stored["config"]), int(stored["iter"]), file, file.keys())


def crc_holds(path):
    with open(path, "rb") as file:
        crc, left = 0, os.fstat(file.fileno()).st_size - CRC_BYTES
        while left:
            data = file.read(min(left, READ_BYTES))
            crc, left = zlib.crc32(data, crc), left - len(data)
        return crc == int.from_bytes(file.read(), "little")


def check(ckpt, model, prefixes):
    """Errors: a parameter that the model or the checkpoint lacks, one of another shape, another model of equal shapes."""
    cfg = {k: getattr(model.cfg, k) for k in MODEL_KEYS}
    other = {k for k in MODEL_KEYS if ckpt.config[k] != cfg[k]}
    keys = ", ".join(f"{k}={ckpt.config[k]}, not {cfg[k]}" for k in sorted(other))
    remedy = f"; give the run the checkpoint's {keys}" if other else ""
    for prefix in prefixes:
        stored, wanted = ckpt.shapes(prefix), {f"{prefix}.{name}": p.shape for name, p in model.layout.items()}
        for name in {**wanted, **stored}:
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(f"{ckpt.path}: {name} is {stored.get(name, 'missing')} in the checkpoint and "
                                      f"{wanted.get(name, 'missing')} in the model{remedy}")
    if other - {"block_size", "rope_theta"}:  # rotary positions may change under the weights
        raise CheckpointError(f"{ckpt.path} is of another model{remedy}")


def restore(ckpt, model, optimizer=None):
    """Sets the master weights and parameters, the moments, the steps and the generators; only the model's parameters
    where there is no optimizer. Errors come before anything is overwritten: see check()."""
    resumed = "steps" in ckpt.names
    check(ckpt, model, ["params", "exp_avg", "exp_avg_sq"] if resumed and optimizer else ["params"])
    if optimizer is None:
        model.load(ckpt.tensors("params"))
        return
    optimizer.load(ckpt.tensors("params"))
    for prefix, flat in moments(optimizer).items():
        flat.zero_()
        mine = views(model.layout, flat)
        for name, t in ckpt.tensors(prefix):
            mine[name].copy_(t)
    optimizer.steps.zero_()
    if resumed:
        optimizer.steps.copy_(ckpt.file.get_tensor("steps"))
        torch.set_rng_state(ckpt.file.get_tensor("rng.cpu"))
    if "rng.cuda" in ckpt.names and model.device.type == "cuda":
        torch.cuda.set_rng_state(ckpt.file.get_tensor("rng.cuda"), model.device)
