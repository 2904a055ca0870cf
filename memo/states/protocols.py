"""What memo/ uses of a transformer, whose module, model.py, only commands import."""

from typing import Protocol

import torch

from memo.kernels.ops import Ops
from memo.layer.attend import Attention
from memo.layer.block import Block
from memo.layer.edges import Edges
from memo.layer.metp_block import MetpBlock
from memo.schedule.step import Step

LayerBlock = Block | MetpBlock  # what computes a layer


class Source(Protocol):
    """Names what brings parameters to the device for each pass."""

    def work_of(self, step: Step) -> tuple: ...
    def bring_weights(self, k: int) -> None: ...


class Transformer(Protocol):
    """Names what the passes of a model use of its transformer; model.py says what that is."""

    ops: Ops
    why_ops: str
    attention: Attention
    edges: Edges
    blocks: list[LayerBlock]

    @property
    def key_shape(self) -> tuple[int, int]: ...
    def block(self, weights: torch.Tensor, gradients: torch.Tensor) -> LayerBlock: ...
    def rotations_of(self, positions: torch.Tensor) -> torch.Tensor | None: ...
