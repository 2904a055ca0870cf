"""What memo/ uses of a transformer; its module, model.py, is imported by commands alone."""

from collections.abc import Sequence
from typing import Protocol

import torch

from memo.config.layout import Layout
from memo.config.settings import Rope
from memo.kernels.ops import Ops
from memo.layer.activations import Activations
from memo.layer.attend import Attention
from memo.layer.edges import Edges
from memo.schedule.step import Step


class LayerBlock(Protocol):
    """Names what computes a layer: model.Block, or by METP MetpBlock (memo/layer/metp_block.py)."""

    def forward(self, s: Activations, out: torch.Tensor) -> torch.Tensor: ...
    def recompute(self, s: Activations, rows: dict[str, slice]) -> None: ...
    def sweep(self, s: Activations, x: torch.Tensor) -> None: ...
    def backward(self, dy: torch.Tensor, s: Activations) -> torch.Tensor: ...


class OptimizerSteps(Protocol):
    """Names what does a step that moves parameters or gradients: an optimizer."""

    def work_of(self, step: Step) -> tuple: ...


class Transformer(Protocol):
    """Names what the passes of a model use of its transformer; model.py says what that is."""

    cfg: Layout
    ops: Ops
    why_ops: str
    attention: Attention
    edges: Edges

    @property
    def blocks(self) -> Sequence[LayerBlock]: ...
    @property
    def key_shape(self) -> tuple[int, int]: ...
    def block(self, weights: torch.Tensor, gradients: torch.Tensor) -> LayerBlock: ...
    def rotations_of(self, positions: torch.Tensor, rope: Rope | None) -> torch.Tensor | None: ...
