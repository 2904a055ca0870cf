"""What memo takes of transformer-engine (ops=te): norms, and products that add to an fp32 gradient where it
lies. All 2.x versions have these functions of transformer_engine_torch alike; installed() holds what pybind11
says of their parameters against SIGNATURES before any is called. Source: TransformerEngine's
transformer_engine/pytorch/csrc/extensions/{pybind,normalization,activation,apply_rope,gemm}.cpp, versions 2.0
to 2.20.

te's functions give results in new tensors, a norm's forward and products but for. In bytes as in memo/ops.py:

    norm forward     2, as Triton's
    norm backward    6, Triton's 4: dx is new, and torch adds it to the residual. rmsnorm_bwd_add adds inside,
                     but its sum is new, too, and would be copied: as many bytes
    rotary           not taken: 4 with the copy back, Triton's 2; angles have no place for YaRN's factor, and
                     offsets are 32-bit, which ends at 2^31 elements
    SwiGLU           not taken: gate and up have to lie side by side in each row. Two products cannot write
                     so where FP8 products want rows one behind the other (compute capability 8.9), and a
                     copy takes 4 more, forward and backward
    GELU             not taken: torch's kernel writes where it is told, 2; te's and a copy take 4, and it is
                     the tanh form only

FP8: te's quantizers give a tensor one scale (Float8CurrentScalingQuantizer), or so many neighbours of a row
one: 128 (Float8BlockQuantizer; Hopper, elsewhere emulated) or 32 (MXFP8; Blackwell). Rows that are made again
in other pieces need the bits that they had, so a scale may not be a whole piece's. One of a row's block is
that row's, but the gradient of a weight sums over rows, and wants both operands quantised once more, along
the columns, from bf16 that nobody keeps. So scales are memo's (memo/fp8.py), and te gets the product that its
interface has room for: the gradient of a weight, whose operands have one scale each. torch._scaled_mm has no
sum in place: it makes the product in fp32, 4 bytes a weight, which is added then. y and dx have scales of
rows, which te's product does not take.

Of te's random numbers, which serve dropout, nothing is used. The workspace of its products is memo's: a
request like others, which the memory plan knows.
"""

import importlib
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from memo.backends import TE_WORKSPACE_BYTES
from memo.errors import Unusable
from memo.parallel.tp import chunks

NORM = "eps ln_out quantizer otype sm_margin zero_centered_gamma"
# {function: its parameters, by position}; those that pybind11 was told no names of are arg0, arg1, ...
SIGNATURES = {"layernorm_fwd": f"input weight bias {NORM}", "rmsnorm_fwd": f"input weight {NORM}",
              "layernorm_bwd": "arg0 arg1 arg2 arg3 arg4 arg5 arg6",  # dy x mean rstd w sm_margin ...
              "rmsnorm_bwd": "arg0 arg1 arg2 arg3 arg4 arg5",
              "generic_gemm": "A transA B transB D quantizer output_dtype bias bias_type gelu gelu_in grad "
                              "workspace workspace_size accumulate use_split_accumulator"}
NORM_PARTS = 2 * 132  # sums of dw and db that a norm's backward makes first: two for each multiprocessor


# --- the package ---

def parameters_of(function: Callable) -> list[tuple[str, bool]]:
    """[(name, whether it must be given)], from what pybind11 writes into the docstring."""
    line = (function.__doc__ or "").partition("\n")[0]
    parts = re.split(r"[(,] ?(?=\w+: )", line)[1:]
    return [(part.partition(":")[0], " = " not in part) for part in parts]


def misfit(function: Callable, wanted: list[str]) -> str:
    """What is different about a function that shall take `wanted`, by position; empty where nothing is."""
    has = parameters_of(function)
    for i, name in enumerate(wanted):
        if i >= len(has) or has[i][0] != name:
            return f"takes no {name}" if name not in dict(has) else f"takes {name} elsewhere"
    return next((f"wants {name}" for name, must in has[len(wanted):] if must), "")


@cache
def installed() -> SimpleNamespace:
    """The package's functions by the names of SIGNATURES; `dtype`: its names of torch's dtypes; `float8(q,
    scale)`: q * scale, q in FP8, scale fp32 (1,); `label`. Errors: Unusable."""
    try:
        importlib.import_module("transformer_engine.pytorch")  # loads its libraries
        functions, constants, tensors = (importlib.import_module(name) for name in (
            "transformer_engine_torch", "transformer_engine.pytorch.constants",
            "transformer_engine.pytorch.tensor.float8_tensor"))
    except Exception as e:  # built for another torch, say
        if isinstance(e, ModuleNotFoundError) and e.name == "transformer_engine":
            raise Unusable("transformer-engine is not installed (docs/install.md)") from None
        why = (str(e).splitlines() or [type(e).__name__])[0]
        raise Unusable(f"transformer-engine cannot be imported ({why}); see docs/install.md") from None
    label = f"transformer-engine {getattr(importlib.import_module('transformer_engine'), '__version__', '')}"
    found = {}
    for name, wanted in SIGNATURES.items():
        if (function := getattr(functions, name, None)) is None:
            raise Unusable(f"{label} has no {name}; install 2.0 or newer (docs/install.md)")
        if why := misfit(function, wanted.split()):
            raise Unusable(f"{label} has another {name}, which {why}; install a version that "
                           "requirements-gpu.txt names")
        found[name] = function

    def float8(q: torch.Tensor, scale: torch.Tensor) -> Any:
        return tensors.Float8Tensor(shape=q.shape, dtype=torch.bfloat16, data=q.view(torch.uint8),
                                    fp8_scale_inv=scale.view(1), fp8_dtype=constants.TE_DType[q.dtype])
    return SimpleNamespace(**found, dtype=constants.TE_DType, float8=float8, label=label.strip())


def lacking() -> str:
    """Why the package cannot be called; empty where it can."""
    try:
        installed()
    except Unusable as e:
        return str(e)
    return ""


# --- in its place on "meta": what it requests ---

def meta_norm_forward(x: torch.Tensor, *_: Any, statistics: int) -> list:
    kept = [x.new_empty(len(x), dtype=torch.float32) for _ in range(statistics)]
    x.new_empty(1, dtype=torch.uint8)
    return [None, *([None] * (2 - statistics)), *kept]


def meta_norm_backward(dy: torch.Tensor, x: torch.Tensor, *statistics_w: Any) -> list:
    *statistics, w, _, _ = statistics_w
    made = [torch.empty_like(x), *(torch.empty_like(w) for _ in statistics)]
    w.new_empty(len(statistics), NORM_PARTS, len(w), dtype=torch.float32)
    return made


META = SimpleNamespace(
    layernorm_fwd=lambda *args: meta_norm_forward(*args, statistics=2),
    rmsnorm_fwd=lambda *args: meta_norm_forward(*args, statistics=1),
    layernorm_bwd=meta_norm_backward, rmsnorm_bwd=meta_norm_backward, generic_gemm=lambda *args: None,
    dtype=dict.fromkeys((torch.float32, torch.bfloat16)), float8=lambda *q_scale: q_scale)


def package(x: torch.Tensor) -> SimpleNamespace:
    """installed(), or what stands for it where x is."""
    return META if x.is_meta else installed()


# --- norms: see memo.ops.Ops ---

def norm_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor,
                 mean: torch.Tensor | None, rstd: torch.Tensor, eps: float) -> None:
    assert x.is_contiguous() and out.is_contiguous()  # te goes by shapes alone
    if not len(x):  # te refuses tensors without elements
        return
    te = package(x)
    how = eps, out, None, te.dtype[x.dtype], 0, False
    if mean is None:
        rstd.copy_(te.rmsnorm_fwd(x, w, *how)[2])
        return
    _, mean_, rstd_ = te.layernorm_fwd(x, w, torch.zeros_like(w) if b is None else b, *how)
    mean.copy_(mean_)
    rstd.copy_(rstd_)


def norm_backward(residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                  mean: torch.Tensor | None, rstd: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                  dw: torch.Tensor, db: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    assert dy.is_contiguous() and x.is_contiguous()
    te = package(x)
    backward, kept = (te.rmsnorm_bwd, (rstd,)) if mean is None else (te.layernorm_bwd, (mean, rstd))
    rows = (out, dy, x, *kept) if residual is None else (out, dy, x, *kept, residual)
    for out_, dy_, x_, *more in chunks(*rows):
        dx, *gradients = backward(dy_, x_, *more[:len(kept)], w, 0, False)
        dw += gradients[0]
        if b is not None:
            db += gradients[1]
        out_.copy_(dx) if residual is None else torch.add(more[-1], dx, out=out_)
        del dx, gradients  # before the next chunk's
    return out


# --- products, added in fp32 ---

def takes(dw: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether te's product is one of these in bf16: it goes by shapes alone, and rounds fp32 to TF32."""
    return dw.is_contiguous() and all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in operands)


# (O, I), (n, O), (n, I): dw += dy^T x
def add_product(dw: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    gemm(package(dw), x, False, dy, True, dw)


# (O, I), (O, n), (I, n): dw += scale dyq xq^T, FP8 of both formats
def add_fp8_product(dw: torch.Tensor, dyq: torch.Tensor, xq: torch.Tensor, scale: torch.Tensor) -> None:
    te = package(dw)
    gemm(te, te.float8(xq, torch.ones_like(scale)), True, te.float8(dyq, scale), False, dw)


def gemm(te: SimpleNamespace, a: Any, turn_a: bool, b: Any, turn_b: bool, out: torch.Tensor) -> None:
    """out (O, I) fp32 += what cuBLAS, whose matrices are column-major, makes of a and b."""
    workspace = out.new_empty(TE_WORKSPACE_BYTES, dtype=torch.uint8)
    te.generic_gemm(a, turn_a, b, turn_b, out, None, te.dtype[out.dtype], None, te.dtype[torch.bfloat16],
                    False, None, False, workspace, len(workspace), True, True)
