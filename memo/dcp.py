"""Pieces of tensors to and from the files of torch.distributed.checkpoint (DCP). DCP takes a second to
import, so memo/checkpoint.py imports this module only when there is a checkpoint to write or to read."""

import io
import pickle
import pickletools
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from memo.flat import Piece

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is no accident


@contextmanager
def first_failure() -> Iterator[None]:
    """Errors: the exception of the first rank that failed. DCP raises the exceptions of all ranks in one that
    is no Exception."""
    try:
        yield
    except CheckpointException as e:
        raise e.failures[min(e.failures)][0] from None


def box(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


# --- writing ---

class Boxes(SavePlanner):
    """Saves pieces; all ranks' pieces together must tile every tensor. `read`: see write()."""

    def __init__(self, pieces: list[Piece], read: Callable[[Piece], torch.Tensor] | None) -> None:
        self.read = read or (lambda piece: piece.tensor)
        self.pieces = {MetadataIndex(p.name, p.offsets): p for p in pieces if p.tensor.numel()}

    def set_up_planner(self, state_dict: dict, storage_meta: StorageMeta | None = None,
                       is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        def data(p: Piece) -> TensorWriteData:
            return TensorWriteData(box(p), TensorProperties(p.tensor.dtype), torch.Size(p.shape))
        return SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data(p))
                         for index, p in self.pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, t in metadata.state_dict_metadata.items():
            if (found := sum(prod(c.sizes) for c in t.chunks)) != prod(t.size):
                raise ValueError(f"the pieces of {name} {tuple(t.size)} hold {found} elements, must be "
                                 f"{prod(t.size)}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.read(self.pieces[write_item.index])


class Sealed(io.BufferedWriter):
    """A new file, and in `seals` {name: [bytes, crc32]} of what was to be written to it, taken in memory."""

    def __init__(self, seals: dict[str, list[int]], path: Any, mode: str) -> None:
        super().__init__(io.FileIO(path, mode))
        self.seal = seals[Path(path).name.removesuffix(".tmp")] = [0, 0]

    def write(self, data: Any) -> int:
        self.seal[:] = self.seal[0] + memoryview(data).nbytes, zlib.crc32(data, self.seal[1])
        return super().write(data)

    def fileno(self) -> int:
        self.flush()  # torch asks for it to sync .metadata, all of which is in memory
        return super().fileno()


class Writer(dcp.FileSystemWriter):
    """Writes DCP's files, and raises the disk's own error."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the usual one holds the path, which is about to change

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as e:  # of torch.save; its context is the disk's, which other ranks would not get
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None


def write(folder: Path, pieces: list[Piece], group: dist.ProcessGroup | None,
          read: Callable[[Piece], torch.Tensor] | None = None) -> dict[str, list[int]]:
    """Writes the pieces of all ranks of `group`, a gloo process group, into the folder -> {name of a file of
    this rank: [bytes, crc32]}. None: one process. `read`: gives the tensor of a piece that has only its
    shape, when it is to be written."""
    # no copying ahead: it is for tensors on a GPU, and would wake up GPU 0 from every rank's thread. torch
    # keeps the tensors of a file until it is complete: what is read late gets a file each
    writer = Writer(folder, per_thread_copy_ahead=0, single_file_per_rank=read is None)
    seals: dict[str, list[int]] = {}
    writer.fs.create_stream = partial(Sealed, seals)
    with first_failure():
        dcp.save({}, storage_writer=writer, planner=Boxes(pieces, read), process_group=group,
                 no_dist=group is None)
    return seals


# --- reading ---

MOST_METADATA_BYTES = 2**28
ADMITTED = {("torch", "Size"), ("torch", "float32"), ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(("torch.distributed.checkpoint.metadata", name) for name in (
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
                "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"))}


def bounded_pickle(path: Path) -> bytes:
    """The bytes of a pickle. Errors: pickle.UnpicklingError: the pickle is too large, or names a memo entry
    beyond its own size. A few such bytes could ask for all memory there is."""
    with open(path, "rb") as file:
        data = file.read(MOST_METADATA_BYTES + 1)
    if len(data) > MOST_METADATA_BYTES:
        raise pickle.UnpicklingError(f"it must be at most {MOST_METADATA_BYTES} bytes long")
    for operation, argument, _ in pickletools.genops(data):
        if "PUT" in operation.name and (argument or 0) > len(data):
            raise pickle.UnpicklingError(f"its memo has no place {argument}")
    return data


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is not of a checkpoint")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads DCP's files: the metadata once, without executing what it names, the tensors
    with torch.load(weights_only=True)."""

    def __init__(self, path: Path, metadata: str, files: dict[str, list[int]]) -> None:
        """`files`: {name: [bytes, ...]} of the checkpoint's own files. Errors: pickle.UnpicklingError, and
        any other exception."""
        super().__init__(path)
        self.metadata = Unpickler(io.BytesIO(bounded_pickle(path / metadata))).load()
        if not isinstance(self.metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(self.metadata).__name__} is not of a checkpoint")
        if others := {s.relative_path for s in self.metadata.storage_data.values()} - set(files):
            raise pickle.UnpicklingError(f"{min(others)!r} is no file of this checkpoint")
        sizes = {name: tuple(t.size) for name, t in self.metadata.state_dict_metadata.items()}
        for name, size in sizes.items():
            if not isinstance(name, str) or any(type(n) is not int or n < 0 for n in size):
                raise pickle.UnpicklingError(f"{name!r:.100} of size {size!r:.100} is no tensor")
        elements = sum(map(prod, sizes.values()))
        if 4 * elements > sum(size for size, *_ in files.values()):
            raise pickle.UnpicklingError(f"{elements} elements do not fit into its files")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read(self, pieces: list[Piece]) -> None:
        """Fills the `pieces` in place."""
        with first_failure():
            dcp.load({}, storage_reader=self, planner=Targets(pieces), no_dist=True)


class Targets(LoadPlanner):
    """Fills pieces in place."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = {MetadataIndex(p.name, p.offsets): p for p in pieces if p.tensor.numel()}

    def set_up_planner(self, state_dict: dict, metadata: Any = None,
                       is_coordinator: bool = False) -> None:
        self.stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for p in self.pieces.values()
                         for item in create_read_items_for_chunk_list(p.name, self.stored[p.name], [box(p)])])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        begin, sizes = read_item.dest_offsets, read_item.lengths
        part = tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))
        return self.pieces[read_item.dest_index].tensor[part]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
