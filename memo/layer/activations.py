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
    """Holds the skeletal tensors of a unit, views of its buffer: s.q is s.tensors["q"], or None where the
    family keeps none.

    `pieces`: with several subsequences (k, v) of those up to the unit's, the unit's own the last; its own `k`
    and `v` are then made when it computes. `sums`: of their gradients, fp32. `meetings`: which tokens meet,
    for each slice of its own subsequence. `turn`: rotations of its rows; None where positions are learned.
    """

    tensors: dict[str, torch.Tensor]
    pieces: Pieces = ()
    sums: Pieces = ()
    meetings: Sequence[Meeting] = ()
    turn: torch.Tensor | None = None

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") or "tensors" not in vars(self):  # copy and pickle ask for theirs
            raise AttributeError(name)
        return self.tensors.get(name)


class Weights(dict[str, torch.Tensor]):
    """Holds a rank's parts of parameters, or of their gradients, by name: w["q_b"] or w.q_b, which is None
    where there is none."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        if name.startswith("_"):  # copy and pickle ask for theirs
            raise AttributeError(name)
        return self.get(name)
