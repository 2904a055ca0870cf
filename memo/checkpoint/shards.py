"""Pieces of tensors from the files of torch.distributed.checkpoint (DCP), which dcp.py writes.

DCP's .metadata is a pickle, and each piece of a tensor is a zip in a shard, with another pickle. A pickle can
run code, and a few bytes can take all time and memory. So neither pickle.load nor torch.load reads them: of
Python's own reader Unpickler leaves the few opcodes that DCP writes, in time and memory proportional to a
file's bytes.
"""

import io
import os
import pickle
from collections import namedtuple
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import error, unpack, unpack_from
from typing import ClassVar, TypeVar

import torch

from memo.checkpoint.manifest import METADATA
from memo.memory.parameters import Piece
from memo.system.files import open_file

MOST_ZIP_BYTES = 2**16  # of the directory of a zip, and of the pickle in it
MOST_FIELDS = 16        # of an object; dimensions of a tensor
T = TypeVar("T")
META, FILES = (f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem"))
# opcodes that Python's own reader may do: they make numbers, texts, tuples and lists
OWN_OPCODES = """PROTO FRAME STOP MARK BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE NONE NEWTRUE NEWFALSE
    BININT1 BININT2 BININT LONG1 SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST
    APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL BINPERSID BUILD"""

Chunk = namedtuple("Chunk", "offsets sizes file start nbytes")
Chunk.__doc__ = """A stored box of a tensor, and where in which file its zip lies."""
Tensors = dict[str, tuple[tuple[int, ...], list[Chunk]]]  # {name: (shape, the Chunks that tile it)}


@dataclass(eq=False, slots=True)
class Made:
    """Stands for a call of `kind`, (module, name), and the `state` of its result."""

    kind: object
    args: object
    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class Pairs(list):
    """Stands for a dict, without a look at its keys: to hash a tuple of tuples may take for ever."""

    def __setitem__(self, key: object, value: object) -> None:
        self.append((key, value))


class Unpickler(pickle._Unpickler):
    """Reads a pickle without a call of anything: a Made stands for a call, Pairs for a dict."""

    stack: list

    def find_class(self, module: str, name: str) -> tuple[str, str]:
        return module, name

    def persistent_load(self, pid: object) -> Made:
        return Made("stored", pid)

    def put_call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = Made(self.stack[-1], args)

    def put_dict(self) -> None:
        self.stack.append(Pairs())

    dispatch: ClassVar[dict] = {  # {opcode: what does it}
        **{code: pickle._Unpickler.dispatch[code]
           for code in (getattr(pickle, name)[0] for name in OWN_OPCODES.split())},
        pickle.REDUCE[0]: put_call, pickle.NEWOBJ[0]: put_call, pickle.EMPTY_DICT[0]: put_dict}


def parse(data: bytes) -> object:
    """Reads a pickle as an Unpickler does. Errors: UnpicklingError: no checkpoint's."""
    try:
        return Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, error):
        raise pickle.UnpicklingError("it is not a pickle of a checkpoint") from None


# --- what it must hold ---

def as_kind(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(f"a {type(value).__name__} stands where a {kind.__name__} must be")
    return value


def fields(value: object, module: str, name: str) -> dict[str, object]:
    """Takes the fields of an object of the class module.name."""
    instance = as_kind(value, Made)
    state = as_kind(instance.state, list)
    if instance.kind != (module, name) or len(state) > MOST_FIELDS:
        raise pickle.UnpicklingError(f"it must hold a {name} where it holds another object")
    return {as_kind(key, str): inner for key, inner in state}


def count(value: object) -> int:
    if not 0 <= as_kind(value, int) < 2**60:
        raise pickle.UnpicklingError("it must hold whole numbers below 2**60")
    return as_kind(value, int)


def counts(value: object) -> tuple[int, ...]:
    """Takes the numbers of a tuple or a torch.Size."""
    if isinstance(value, Made) and value.kind == ("torch", "Size"):
        value = as_kind(value.args, tuple)[0]
    if len(as_kind(value, tuple)) > MOST_FIELDS:
        raise pickle.UnpicklingError(f"it must hold tensors of at most {MOST_FIELDS} dimensions")
    return tuple(map(count, as_kind(value, tuple)))


def read_places(storage: object, files: dict[str, list[int]]) -> dict[tuple, tuple[str, int, int]]:
    """Finds where each chunk lies: {(tensor's name, chunk's offsets): (file, first byte there, bytes)}."""
    places, left = {}, {name: sizes[0] for name, sizes in files.items()}
    for key, value in as_kind(storage, list):
        index, place = fields(key, META, "MetadataIndex"), fields(value, FILES, "_StorageInfo")
        file = as_kind(place["relative_path"], str)
        start, nbytes = count(place["offset"]), count(place["length"])
        if file not in files:
            raise pickle.UnpicklingError(f"{file!r:.100} is no file of this checkpoint")
        left[file] -= nbytes
        if left[file] < 0 or start + nbytes > files[file][0]:  # chunks that share bytes multiply the work
            raise pickle.UnpicklingError(f"{file!r:.100} is too short for what it must hold")
        places[as_kind(index["fqn"], str), counts(index["offset"])] = file, start, nbytes
    return places


def read_chunks(name: str, tensor: dict[str, object],
                places: dict[tuple, tuple[str, int, int]]) -> list[Chunk]:
    """Takes the chunks of the tensor `name`, which tile it, out of `places`: each place serves once."""
    shape, chunks = counts(tensor["size"]), []
    for value in as_kind(tensor["chunks"], list):
        box = fields(value, META, "ChunkStorageMetadata")
        offsets, sizes = counts(box["offsets"]), counts(box["sizes"])
        inside = all(first + n <= most for first, n, most in zip(offsets, sizes, shape, strict=True))
        place = places.pop((name, offsets), ("", 0, -1))
        if not inside or 4 * prod(sizes) > place[2]:
            raise pickle.UnpicklingError(f"a piece of {name!r:.100} does not fit into its place")
        chunks.append(Chunk(offsets, sizes, *place))
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        raise pickle.UnpicklingError(f"{name!r:.100} has not the pieces that it must have")
    return chunks


# --- reading ---

def read_index(path: Path, files: dict[str, list[int]]) -> Tensors:
    """Reads which Tensors a checkpoint has. `files`: {name: [bytes, ...]}. Errors: any."""
    # a piece takes eight times as much in its shard
    most = min(2**28, 2**21 + sum(size for size, *_ in files.values()) // 8)
    with open(open_file(path / METADATA), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise pickle.UnpicklingError(f"beside its shards it must be at most {most:,} bytes long")
    top = fields(parse(data), META, "Metadata")
    places = read_places(top["storage_data"], files)
    tensors = {as_kind(name, str): fields(value, META, "TensorStorageMetadata")
               for name, value in as_kind(top["state_dict_metadata"], list)}
    return {name: (counts(t["size"]), read_chunks(name, t, places)) for name, t in tensors.items()}


def fill(path: Path, tensors: Tensors, pieces: list[Piece]) -> None:
    """Fills the `pieces` in place. Errors: pickle.UnpicklingError, and any other exception."""
    for piece in pieces:
        missing = piece.tensor.numel()
        for chunk in tensors[piece.name][1] if missing else ():
            ends = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(
                piece.offsets, piece.tensor.shape, chunk.offsets, chunk.sizes, strict=True)]
            if all(first < end for first, end in ends):
                to, of = (tuple(slice(first - at, end - at) for (first, end), at in zip(
                    ends, box.offsets, strict=True)) for box in (piece, chunk))
                part = read_chunk(path, chunk)[of]
                piece.tensor.detach()[to].copy_(part)
                missing -= part.numel()
        if missing:
            raise ValueError(f"{missing} elements of {piece.name} are missing")


def read_chunk(path: Path, chunk: Chunk) -> torch.Tensor:
    """Reads the tensor of a chunk. Errors: pickle.UnpicklingError: there is no fp32 tensor of its sizes."""
    with open(open_file(path / chunk.file), "rb") as file:
        end, places = chunk.start + chunk.nbytes, zip_places(file.fileno(), chunk)
        match parse(os.pread(file.fileno(), MOST_ZIP_BYTES, places.get("data.pkl", end))):
            case Made(kind=("torch._utils", "_rebuild_tensor_v2"), args=(
                    Made(kind="stored", args=("storage", ("torch", "FloatStorage"), key, _, numel)),
                    first, size, strides, *_)) if counts(size) == chunk.sizes:
                numel, first, strides = count(numel), count(first), counts(strides)
                begin = places.get(f"data/{as_kind(key, str)}", end)
            case _:
                raise pickle.UnpicklingError("it is not the tensor that it must be")
        last = first + sum((n - 1) * step for n, step in zip(chunk.sizes, strides, strict=True))
        if last >= numel or begin + 4 * numel > end:
            raise pickle.UnpicklingError("its place is shorter than the tensor")
        values = torch.empty(numel)
        file.seek(begin)
        if file.readinto(memoryview(values.numpy()).cast("B")) != 4 * numel:
            raise OSError("the file was cut short")
    return values.as_strided(chunk.sizes, strides, first)


def zip_places(descriptor: int, chunk: Chunk) -> dict[str, int]:
    """Finds {name: where its bytes begin} in a chunk's zip, as torch writes it: uncompressed, in one folder,
    with 98 bytes at its end. Errors: pickle.UnpicklingError: it is another file."""
    end, *_, nbytes, at = unpack("<4sQHHIIQQQQ", os.pread(descriptor, 56, chunk.start + chunk.nbytes - 98))
    if end != b"PK\6\6" or nbytes > MOST_ZIP_BYTES:
        raise pickle.UnpicklingError("it is no zip of torch")
    directory, places, i = os.pread(descriptor, nbytes, chunk.start + at), {}, 0
    while i < len(directory):
        packed, n, extra, comment, header = unpack_from("<10xH16xHHH8xI", directory, i)
        if packed:
            raise pickle.UnpicklingError("it must not be compressed")
        before = sum(unpack_from("<26xHH", os.pread(descriptor, 30, chunk.start + header)))
        name = directory[i + 46:i + 46 + n].decode()
        places[name.partition("/")[2]] = chunk.start + header + 30 + before
        i += 46 + n + extra + comment
    return places
