"""How the products of a layer's linears are computed: a Matmul is the choice between products in the run's
dtype and FP8 ones (memo/kernels/fp8.py); all else knows no number format. With ops=te FP8 gradients of
weights are transformer-engine's. Rows are those of all tp ranks: x (tp, n, I), y and dy (tp, n, O), w (O, I).
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence

import torch

from memo.errors import ConfigError
from memo.kernels import fp8, te
from memo.system.axis import Axis
from memo.system.device import device_name

Operand = fp8.Operand  # an input, a result's gradient, or a rank's part of a matrix, as products take it
Linear = tuple[Operand, torch.Tensor | None]  # a matrix, and a bias

Matmul = namedtuple("Matmul", "name kept pieces start_gather rows gradients place matrices carried arrived "
                              "forward input_gradient weight_gradient as_one")
Matmul.__doc__ = """How a linear y = x w^T is computed:

    rows(x), gradients(dy): what products take of an input, and of a result's gradient; each row by itself
    kept(x, scale): an input as a layer keeps it, from the skeletal tensor x and its scale, if it has one
    pieces(kept, like): yields (r, where to write rows r of the input, as `like` is), piece by piece
    start_gather(axis, x): Works of what products take of an input (tp, n, I), from that of own rows (n, I)
    place(x, dy): memory for the gradient of x, which nobody reads any more: its own, or new, as dy
    matrices(axis, parts): the rank's parts of matrices that the ranks of `axis` share out, as they travel
    carried(w): the tensor of such a matrix, or of a bias, that messages carry: a row for each of its rows
    arrived(t, like): a matrix, or a bias, of what was carried, as products take it; `like`: the rank's own
    forward(x, w, out, residual)
        out = x w^T + residual: a bias (O,), a tensor like out (it may be out itself), or None
    input_gradient(dy, w, out, add): out = dy w, or with `add` out += dy w
    weight_gradient(dw, dy, x): dw += dy^T x, in fp32, over the rows of all ranks
    as_one(dys, ws): (dy, w), by which input_gradient() gives the sum over several dy (n, O), and matrices()
"""


# --- in the run's dtype ---

# (tp, n, I), (I, O) -> (tp, n, O)
def product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w.expand(len(x), -1, -1), out=out) if len(x) > 1 else torch.mm(x[0], w, out=out[0])


def add_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # y (tp, n, O), or of fewer dims, + x w
    if len(x) > 1:
        return torch.baddbmm(y.expand(out.shape), x, w.expand(len(x), -1, -1), out=out)
    return torch.addmm(y if y.dim() == 1 else y[0], x[0], w, out=out[0])


def accumulate_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a b to dw, which is fp32 whatever a and b are."""
    if a.is_meta:
        return  # requests no memory; torch 2.11 has no meta kernel of what CUDA takes
    if a.dtype == dw.dtype:
        dw.addmm_(a, b)
    elif not a.is_cpu:
        torch.ops.aten.addmm.dtype_out(dw, a, b, torch.float32, out=dw)
    else:
        dw += a @ b


def forward(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor,
            residual: torch.Tensor | None = None) -> torch.Tensor:
    product(x, w.t(), out) if residual is None else add_product(residual, x, w.t(), out)
    return out


def input_gradient(dy: torch.Tensor, w: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    add_product(out, dy, w, out) if add else product(dy, w, out)
    return out


def weight_gradient(dw: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    for dy_, x_ in zip(dy, x, strict=True):
        accumulate_product(dw, dy_.t(), x_)


def itself(x: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    return x


def pieces(kept: torch.Tensor, like: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    yield slice(None), kept


def as_one(dys: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([*dys], 1), torch.cat([*ws])


RUN = Matmul("bf16", itself, pieces, Axis.start_gather, itself, itself, itself, lambda axis, parts: parts,
             itself, itself, forward, input_gradient, weight_gradient, as_one)
FP8 = Matmul("fp8", fp8.kept, fp8.pieces, fp8.start_gather, fp8.rows, fp8.gradients, fp8.place,
             fp8.matrices, fp8.carried, fp8.arrived, fp8.forward, fp8.input_gradient, fp8.weight_gradient,
             fp8.as_one)
MATMULS = {"bf16": RUN, "fp8": FP8}  # by cfg.matmul


# --- with transformer-engine's FP8 product, which adds where it writes ---

def te_fp8_weight_gradient(dw: torch.Tensor, g: fp8.Scaled, x: fp8.Scaled) -> None:
    if dw.is_contiguous():  # te goes by the shape alone
        te.add_fp8_product(dw, *fp8.gradient_operands(g, x))
    else:
        fp8.weight_gradient(dw, g, x)


def check_products(name: str, device: torch.device) -> None:
    """Checks that a device computes the products of cfg.matmul. Errors: ConfigError."""
    if name == "fp8" and device.type == "cuda" and (why := fp8.failing(device)):
        raise ConfigError(f"matmul=fp8 is not available: {device_name(device)} computes no such product "
                          f"({why}); try --matmul=bf16")


def matmul_of(name: str, ops: str) -> Matmul:
    """Finds the Matmul of cfg.matmul, beside the Ops of this name."""
    te_fp8 = FP8._replace(weight_gradient=te_fp8_weight_gradient)
    return te_fp8 if (name, ops) == ("fp8", "te") else MATMULS[name]
