"""The tensors of one layer, by name: what a unit keeps (Activations), and parameters or gradients (Weights).
memo/config/layer.py has the names, and says who has which, and their shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memo.layer.tiles import Meeting

EVERY_ROW, NO_ROWS = slice(None), slice(0)

Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]  # keys and values of earlier rows, or their gradients


@dataclass(eq=False)
class Activations:
    """Holds the skeletal tensors of a unit, views of its buffer; None: the family keeps none.

    `pieces`: with several subsequences (k, v) of those up to the unit's, the unit's own the last; its own `k`
    and `v` are then made when it computes. `sums`: of their gradients, fp32. `meetings`: which tokens meet,
    for each slice of its own subsequence. `turn`: rotations of its rows; None where positions are learned.
    """

    x: torch.Tensor
    attn_out: torch.Tensor
    lse: torch.Tensor
    mid: torch.Tensor
    ln1_out: torch.Tensor | None = None
    ln1_mean: torch.Tensor | None = None
    ln1_rstd: torch.Tensor | None = None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    ln2_out: torch.Tensor | None = None
    ln2_mean: torch.Tensor | None = None
    ln2_rstd: torch.Tensor | None = None
    fc1_out: torch.Tensor | None = None
    gelu_out: torch.Tensor | None = None
    gate_out: torch.Tensor | None = None
    up_out: torch.Tensor | None = None
    ln1_out_scale: torch.Tensor | None = None
    ln2_out_scale: torch.Tensor | None = None
    gelu_out_scale: torch.Tensor | None = None
    pieces: Pieces = ()
    sums: Pieces = ()
    meetings: Sequence[Meeting] = ()
    turn: torch.Tensor | None = None


class Weights(dict[str, torch.Tensor]):
    """Holds a rank's parts of parameters, or of their gradients, by name: w["q_b"] or w.q_b, which is None
    where there is none."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self.get(name)
