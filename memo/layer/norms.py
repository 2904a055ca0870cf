"""The norms of a layer: LayerNorm where there is a mean, else RMSNorm, of rows (n, C). Those in front of
attention and the MLP keep their statistics. Those behind, of what a half adds to the stream, make them again
in the backward: their input is kept, and is read once more."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memo.config.config import Config
from memo.kernels.ops import Ops
from memo.layer.activations import Activations, Weights

Statistics = Sequence[torch.Tensor]  # mean, which RMSNorm has not, and rstd: (n,), fp32


def kept_statistics(s: Activations, name: str) -> Statistics:
    return [s.tensors[kept] for kind in ("mean", "rstd") if (kept := f"{name}_{kind}") in s.tensors]


@dataclass(frozen=True)
class Norms:
    """Computes norms by name. `w`, `dw`: a layer's parameters and gradients."""

    cfg: Config
    ops: Ops
    w: Weights
    dw: Weights

    @property
    def behind(self) -> bool:
        """Says whether a norm stands behind attention, and behind the MLP."""
        return self.cfg.norms != "before"

    def statistics(self, x: torch.Tensor) -> Statistics:
        """Takes memory for those of x (n, C)."""
        return [torch.empty(len(x), dtype=torch.float32, device=x.device)
                for _ in range(1 + (self.cfg.norm == "layernorm"))]

    def forward(self, name: str, x: torch.Tensor, out: torch.Tensor, of: Statistics | None = None) -> None:
        """Writes the norm of x over `out`, and its statistics into `of`."""
        w, b = (self.w.get(f"{name}_{kind}") for kind in "wb")
        *mean, rstd = of or self.statistics(x)
        self.ops.norm_forward(x, w, b, out, mean[0] if mean else None, rstd, self.cfg.norm_eps)

    def backward(self, name: str, residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                 of: Statistics, out: torch.Tensor) -> torch.Tensor:
        """Writes residual + the gradient of x over `out`, which may be any of the three. Without such a norm
        that gradient is dy."""
        if f"{name}_w" not in self.w:
            assert residual is not None
            return torch.add(residual, dy, out=out)
        (w, b), (dw, db) = ([held.get(f"{name}_{kind}") for kind in "wb"] for held in (self.w, self.dw))
        *mean, rstd = of
        self.ops.norm_backward(residual, dy, x, mean[0] if mean else None, rstd, w, b, dw, db, out=out)
        return out

    def add(self, name: str, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes residual + the norm of x over `out`, which is neither."""
        self.forward(name, x, out)
        return out.add_(residual)

    def add_backward(self, name: str, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Writes the gradient of add()'s x over x."""
        self.forward(name, x, torch.empty_like(x), of := self.statistics(x))
        return self.backward(name, None, dy, x, of, out=x)
