"""The parts of transformer-engine that memo takes (ops=te): norms, and the FP8 product that adds to an fp32
gradient where it lies. docs/kernels.md says why other functions, which give results in new tensors, are not
taken.

Versions 2.2 to 2.20 have these alike; installed() holds what pybind11 says of their parameters against
SIGNATURES before any is called. Source: TransformerEngine's transformer_engine/pytorch/csrc/extensions/
{pybind,normalization,gemm}.cpp, read up to v2.18; 2.20.2 runs on null CUDA.

Scales of FP8 are memo's (memo/kernels/fp8.py): te has none for single rows. Its product's workspace is memo's
too: a request that the memory plan knows."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from memo.config.layer import CHUNK_ROWS
from memo.errors import Unusable
from memo.kernels.backends import TE_WORKSPACE_BYTES
from memo.kernels.rows import chunks

OLDEST = 2, 2  # 2.0 and 2.1 leak a handle of cuBLASLt with each product
NORM = "eps ln_out quantizer otype sm_margin zero_centered_gamma"
# {function: its parameters, by position}; those that pybind11 was told no names of are arg0, arg1, ...
SIGNATURES = {"layernorm_fwd": f"input weight bias {NORM}", "rmsnorm_fwd": f"input weight {NORM}",
              "layernorm_bwd": "arg0 arg1 arg2 arg3 arg4 arg5 arg6",  # dy x mean rstd w sm_margin ...
              "rmsnorm_bwd": "arg0 arg1 arg2 arg3 arg4 arg5",
              "generic_gemm": "A transA B transB D quantizer output_dtype bias bias_type gelu gelu_in grad "
                              "workspace workspace_size accumulate use_split_accumulator"}
# Sums of dw and db that a norm's backward makes first: one for each block that te launches, as many as the
# GPU holds at once. Assumed: an H100's 132 multiprocessors with two blocks each, as null CUDA says
NORM_PARTS = 2 * 132
CHUNK_ELEMENTS = 2**26  # of rows at a time, where these are narrow


# --- the package ---

def misfit(function: Callable[..., object], wanted: list[str]) -> str:
    """Says how a function of pybind11 differs from one that takes `wanted`, by position; else empty."""
    parts = re.split(r"[(,] ?(?=\w+: )", (function.__doc__ or "").partition("\n")[0])[1:]
    has = [(part.partition(":")[0], " = " not in part) for part in parts]  # (name, whether it must be given)
    for i, name in enumerate(wanted):
        if i >= len(has) or has[i][0] != name:
            return f"takes no {name}" if name not in dict(has) else f"takes {name} elsewhere"
    return next((f"wants {name}" for name, must in has[len(wanted):] if must), "")


def imported(*names: str) -> list[ModuleType]:
    """Imports modules of the package. Errors: Unusable."""
    try:
        return [*map(importlib.import_module, names)]
    except Exception as e:  # built for another torch, say
        if isinstance(e, ModuleNotFoundError) and e.name == "transformer_engine":
            raise Unusable("transformer-engine is not installed (docs/install.md)") from None
        why = next(filter(str.strip, str(e).splitlines()), type(e).__name__)
        raise Unusable(f"transformer-engine cannot be imported ({why}); see docs/install.md") from None


Call = Callable[..., Any]  # of a library without types


class Package(NamedTuple):
    """Holds the package's functions of SIGNATURES; `dtype`: its names of torch's dtypes; `float8(q, scale)`:
    q * scale, q in FP8, scale fp32 (1,); `label`: name and version."""

    layernorm_fwd: Call
    rmsnorm_fwd: Call
    layernorm_bwd: Call
    rmsnorm_bwd: Call
    generic_gemm: Call
    dtype: Mapping[torch.dtype, object]
    float8: Call
    label: str = ""


@cache
def installed() -> Package:
    """Loads the package. Errors: Unusable."""
    [top] = imported("transformer_engine")
    version = getattr(top, "__version__", "")
    label = f"transformer-engine {version or 'of no version'}"
    remedy = "install a version that requirements-gpu.txt names"
    if (*map(int, re.findall(r"\d+", version)[:2]),) < OLDEST:
        raise Unusable(f"{label} is older than {'.'.join(map(str, OLDEST))}; {remedy}")
    _, functions, constants, tensors = imported(
        "transformer_engine.pytorch",  # loads the libraries
        "transformer_engine_torch", "transformer_engine.pytorch.constants",
        "transformer_engine.pytorch.tensor.float8_tensor")
    taken = {}
    for name, wanted in SIGNATURES.items():
        if (function := getattr(functions, name, None)) is None:
            raise Unusable(f"{label} has no {name}; {remedy}")
        if why := misfit(function, wanted.split()):
            raise Unusable(f"{label} has another {name}, which {why}; {remedy}")
        taken[name] = function

    def float8(q: torch.Tensor, scale: torch.Tensor) -> object:
        return tensors.Float8Tensor(shape=q.shape, dtype=torch.bfloat16, data=q.view(torch.uint8),
                                    fp8_scale_inv=scale.view(1), fp8_dtype=constants.TE_DType[q.dtype])
    return Package(**taken, dtype=constants.TE_DType, float8=float8, label=label)


# --- in its place on "meta": what it requests ---

def meta_norm_forward(x: torch.Tensor, *_: object, statistics: int) -> list[torch.Tensor | None]:
    results = [x.new_empty(len(x), dtype=torch.float32) for _ in range(statistics)]
    x.new_empty(1, dtype=torch.uint8)
    return [None] * (3 - statistics) + results


def meta_norm_backward(dy: torch.Tensor, x: torch.Tensor, *statistics_w: torch.Tensor) -> list[torch.Tensor]:
    *statistics, w, _, _ = statistics_w
    gradients = [torch.empty_like(x), *(torch.empty_like(w) for _ in statistics)]
    w.new_empty(len(statistics), NORM_PARTS, len(w), dtype=torch.float32)
    return gradients


META = Package(
    layernorm_fwd=lambda *args: meta_norm_forward(*args, statistics=2),
    rmsnorm_fwd=lambda *args: meta_norm_forward(*args, statistics=1),
    layernorm_bwd=meta_norm_backward, rmsnorm_bwd=meta_norm_backward, generic_gemm=lambda *args: None,
    dtype=dict.fromkeys((torch.float32, torch.bfloat16)), float8=lambda *q_scale: q_scale)


def package(x: torch.Tensor) -> Package:
    """Gives META where x is on the meta device, else installed()."""
    return META if x.is_meta else installed()


# --- norms: see memo.kernels.ops.Ops ---

def pieces(x: torch.Tensor, *others: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Yields chunks() of rows x (N, C) and others: te counts elements in 32 bits, and refuses none at all."""
    if len(x):
        yield from chunks(x, *others, most=max(CHUNK_ROWS, CHUNK_ELEMENTS // x.shape[1]))


def norm_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor,
                 mean: torch.Tensor | None, rstd: torch.Tensor, eps: float) -> None:
    assert x.is_contiguous() and out.is_contiguous()  # te goes by shapes alone
    te = package(x)
    how = None, te.dtype[x.dtype], 0, False
    if mean is None:
        for x_, out_, rstd_ in pieces(x, out, rstd):
            rstd_.copy_(te.rmsnorm_fwd(x_, w, eps, out_, *how)[2])
        return
    b = torch.zeros_like(w) if b is None else b
    for x_, out_, mean_, rstd_ in pieces(x, out, mean, rstd):
        _, m, r = te.layernorm_fwd(x_, w, b, eps, out_, *how)
        mean_.copy_(m)
        rstd_.copy_(r)


def norm_backward(residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                  mean: torch.Tensor | None, rstd: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                  dw: torch.Tensor, db: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    assert dy.is_contiguous() and x.is_contiguous()
    te = package(x)
    backward, statistics = (te.rmsnorm_bwd, (rstd,)) if mean is None else (te.layernorm_bwd, (mean, rstd))
    for out_, dy_, x_, residual_, *statistics_ in pieces(out, dy, x, residual, *statistics):
        dx, *gradients = backward(dy_, x_, *statistics_, w, 0, False)
        dw += gradients[0]  # which te rounds to w's dtype
        if b is not None:
            db += gradients[1]
        out_.copy_(dx) if residual is None else torch.add(residual_, dx, out=out_)
        del dx, gradients  # before the next chunk's
    return out


# the product: (O, I), contiguous, (O, n), (I, n): dw += scale dyq xq^T, FP8 of both formats, in fp32
def add_fp8_product(dw: torch.Tensor, dyq: torch.Tensor, xq: torch.Tensor, scale: torch.Tensor) -> None:
    te = package(dw)
    a, b = te.float8(xq, torch.ones_like(scale)), te.float8(dyq, scale)  # to cuBLAS matrices are column-major
    workspace = dw.new_empty(TE_WORKSPACE_BYTES, dtype=torch.uint8)
    te.generic_gemm(a, True, b, False, dw, None, te.dtype[dw.dtype], None, te.dtype[torch.bfloat16],
                    False, None, False, workspace, len(workspace), True, True)
