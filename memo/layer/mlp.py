"""The MLP of a layer: out = mid + last(f(hidden)), where `hidden` is what the linears in front of the
activation f make of x = ln2(mid). GPT-2 has fc1, GELU, fc2; Llama gate and up, silu(gate) * up (Gemma gelu),
down. Block (model.py) and METP (memo/layer/metp_block.py, metp.py), which use it, have rows and matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from memo.config.config import Config
from memo.kernels.matmul import Linear, Operand
from memo.kernels.ops import Ops, gelu_backward, gelu_forward
from memo.layer.activations import Activations


@dataclass(frozen=True)
class Mlp:
    """Says what the MLP of a family consists of.

    front, last: the linears, as their parameters' names begin; <front> makes the skeletal tensor <front>_out
    product: the skeletal tensor that keeps f(hidden); empty: it is made again wherever it is read
    activate(hidden, out): writes f(hidden) into `out`, where each tensor is (..., F), or has any part of F
    activate_backward(d, hidden): writes hidden's gradients over it, from that of f(hidden), which is used up
    """

    front: tuple[str, ...]
    last: str
    product: str
    activate: Callable[[Sequence[torch.Tensor], torch.Tensor], object]
    activate_backward: Callable[[torch.Tensor, Sequence[torch.Tensor]], object]

    @property
    def split_names(self) -> list[str]:
        """Lists the parameters that ranks share out, in the order in which METP sends them."""
        return [*(f"{name}_{kind}" for name in self.front for kind in "wb"), f"{self.last}_w"]

    def linears(self, parameters: Mapping[str, Operand]) -> dict[str, Linear]:
        """Finds {what it makes: (matrix, bias or None)} in front of the activation; or their gradients."""
        return {f"{name}_out": (parameters[f"{name}_w"], parameters.get(f"{name}_b")) for name in self.front}

    def last_linear(self, parameters: Mapping[str, Operand]) -> Linear:
        """Finds (matrix, bias or None) behind the activation; or their gradients."""
        return parameters[f"{self.last}_w"], parameters.get(f"{self.last}_b")

    def hidden(self, s: Activations) -> list[torch.Tensor]:
        """Lists the skeletal tensors that f takes."""
        return [s.tensors[f"{name}_out"] for name in self.front]

    def activated(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes f(hidden), a new tensor."""
        out = torch.empty_like(hidden[0])
        self.activate(hidden, out)
        return out


def mlp_of(cfg: Config, ops: Ops) -> Mlp:
    if cfg.mlp != "gelu":
        gelu = cfg.mlp == "geglu"
        return Mlp(("gate", "up"), "down", "",
                   lambda hidden, out: ops.swiglu_forward(*hidden, out, gelu),
                   lambda d, hidden: ops.swiglu_backward(d, *hidden, gelu))
    form = "tanh" if cfg.gelu == "tanh" else "none"  # torch's names
    return Mlp(("fc1",), "fc2", "gelu_out",
               lambda hidden, out: gelu_forward(hidden[0], form, out=out),
               lambda d, hidden: gelu_backward(d, hidden[0], form, out=hidden[0]))
