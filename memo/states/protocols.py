"""What memo/ uses of a GPT, whose module, model.py, only commands import."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from memo.config.layout import Layout
from memo.kernels.ops import Ops
from memo.layer.attend import Attention
from memo.layer.block import Block
from memo.layer.edges import Edges
from memo.layer.metp_block import MetpBlock
from memo.memory.buffers import Swap
from memo.memory.flat import Location
from memo.memory.placement import Placement
from memo.parallel.mesh import ALONE, Mesh
from memo.planner.allocator import Arena, NoArena
from memo.schedule.states import States
from memo.schedule.step import Step
from memo.schedule.streams import Streams
from memo.schedule.waits import Schedule

LayerBlock = Block | MetpBlock  # what computes a layer


class Source(Protocol):
    """Names what brings parameters to the device for each pass."""

    def work_of(self, step: Step) -> tuple: ...
    def bring_weights(self, k: int) -> None: ...


class Model(Protocol):
    """Names the members of a GPT that others use; model.py says what they are."""

    cfg: Layout
    device: torch.device
    dtype: torch.dtype
    mesh: Mesh
    attention: Attention
    ops: Ops
    why_ops: str
    edges: Edges
    blocks: list[LayerBlock]
    layout: dict[str, Location]
    buckets: list[tuple[int, int]]
    micro_batches: int
    coming: range
    params: torch.Tensor
    grads: torch.Tensor
    bucket_params: list[torch.Tensor]
    bucket_grads: list[torch.Tensor]
    loaded: list[torch.Tensor]
    states: States
    complete: bool
    source: Source | None
    arena: Arena | NoArena
    shape: tuple[int, int]
    swap: Swap
    positions: list[torch.Tensor]
    turn: list[torch.Tensor | None]

    def __init__(self, cfg: Layout, device: torch.device, dtype: torch.dtype, *,
                 mesh: Mesh = ALONE) -> None: ...
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def reserve(self, B: int, T: int, placement: Placement | None = None, *, streams: Streams | None = None,
                pin: bool = True) -> None: ...
    def reserve_forward(self, B: int, T: int, n_layer: int | None = None, *, streams: Streams | None = None,
                        pin: bool = True) -> None: ...
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor,
                scale: float | None = None) -> torch.Tensor: ...
    def hidden(self, tokens: torch.Tensor, read: Callable[[int, torch.Tensor], object]) -> list: ...
    def backward(self, last: bool = False) -> None: ...
    def follow(self, steps: Schedule) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...
