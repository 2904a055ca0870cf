"""Pieces of tensors to the files of torch.distributed.checkpoint (DCP), which shards.py reads. DCP takes a
second to import, so checkpoint.py imports this module only when there is a checkpoint to write."""

import io
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.futures import Future

from memo.checkpoint.manifest import SAVE
from memo.memory.parameters import Piece
from memo.system.axis import WRITTEN, come

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is no accident


class Boxes(dcp.DefaultSavePlanner):
    """Saves pieces; all ranks' pieces together must tile every tensor. `read`: see write()."""

    def __init__(self, pieces: list[Piece], read: Callable[[Piece], torch.Tensor] | None) -> None:
        super().__init__()
        self.read = read or (lambda piece: piece.tensor)
        self.pieces = {dcp.metadata.MetadataIndex(p.name, p.offsets): p for p in pieces if p.tensor.numel()}

    def create_local_plan(self) -> dcp.SavePlan:
        items = []
        for index, p in self.pieces.items():
            box = dcp.ChunkStorageMetadata(torch.Size(p.offsets), p.tensor.shape)
            data = dcp.planner.TensorWriteData(box, dcp.metadata.TensorProperties(p.tensor.dtype),
                                               torch.Size(p.shape))
            items.append(dcp.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data))
        return dcp.SavePlan(items)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, t in metadata.state_dict_metadata.items():
            if (numel := sum(prod(c.sizes) for c in t.chunks)) != prod(t.size):
                raise ValueError(f"the pieces of {name} {tuple(t.size)} hold {numel} elements, must be "
                                 f"{prod(t.size)}")
        return plans, metadata

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor:
        return self.read(self.pieces[write_item.index])


class Sealed(io.BufferedWriter):
    """Writes a new file, and notes in `seals` {name: [bytes, crc32]} of what it was given, from memory."""

    def __init__(self, seals: dict[str, list[int]], path: Path, mode: str) -> None:
        super().__init__(io.FileIO(path, mode))
        self.seal = seals[Path(path).name.removesuffix(".tmp")] = [0, 0]

    def write(self, data: Any) -> int:
        self.seal[:] = self.seal[0] + memoryview(data).nbytes, zlib.crc32(data, self.seal[1])
        WRITTEN[0] += 1
        return super().write(data)

    def fileno(self) -> int:
        self.flush()  # torch asks for it to sync .metadata, all of which is in memory
        return super().fileno()


class Writer(dcp.FileSystemWriter):
    """Writes DCP's files, and raises the disk's own error."""

    def storage_meta(self) -> dcp.metadata.StorageMeta:
        return dcp.metadata.StorageMeta()  # the usual one holds the path, which is about to change

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as e:  # of torch.save; its context is the disk's, which other ranks would not get
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None
        come(SAVE, "part")
        return written


def write(folder: Path, pieces: list[Piece], group: dist.ProcessGroup | None,
          read: Callable[[Piece], torch.Tensor] | None = None) -> dict[str, list[int]]:
    """Writes the pieces of all ranks of a gloo `group`, or None, into the folder -> {name of a file of this
    rank: [bytes, crc32]}. `read`: gives the tensor of a piece that has only its shape."""
    # no copying ahead: it is for tensors on a GPU, and would wake up GPU 0 from every rank's thread. torch
    # keeps the tensors of a file until it is complete: what is read late gets a file each
    writer = Writer(folder, per_thread_copy_ahead=0, single_file_per_rank=read is None)
    seals: dict[str, list[int]] = {}
    writer.fs.create_stream = partial(Sealed, seals)
    try:
        dcp.save({}, storage_writer=writer, planner=Boxes(pieces, read), process_group=group,
                 no_dist=group is None)
    except dcp.CheckpointException as e:  # of all ranks, and no Exception
        raise e.failures[min(e.failures)][0] from None
    return seals
