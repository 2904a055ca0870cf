"""transformer-engine's functions with the parameters of its versions, as pybind11 writes them, computed by
the mathematics on the CPU. Each is strict: what memo does not use must have the value that switches it off.
Source: transformer_engine/pytorch/csrc/extensions/pybind.cpp from v2.0 on."""

import sys
from types import ModuleType

import torch

NORM = "eps: float, ln_out: object, quantizer: handle, otype: transformer_engine::DType, sm_margin: int, "
GEMM = ("A: handle, transA: bool, B: handle, transB: bool, D: object, quantizer: handle, "
        "output_dtype: Optional[transformer_engine::DType], bias: Optional[torch.Tensor], "
        "bias_type: transformer_engine::DType, gelu: bool, gelu_in: Optional[torch.Tensor], grad: bool, "
        "workspace: torch.Tensor, workspace_size: int, accumulate: bool, use_split_accumulator: bool, "
        "comm_overlap: transformer_engine::CommOverlapCore = None, extra_output: object = None")
UNNAMED = "arg0: torch.Tensor, arg1: torch.Tensor, arg2: torch.Tensor, arg3: torch.Tensor, "
TWO = dict(
    layernorm_fwd="input: handle, weight: handle, bias: Optional[torch.Tensor], " + NORM
                  + "zero_centered_gamma: bool",
    rmsnorm_fwd="input: handle, weight: handle, " + NORM + "zero_centered_gamma: bool",
    layernorm_bwd=UNNAMED + "arg4: torch.Tensor, arg5: int, arg6: bool",
    rmsnorm_bwd=UNNAMED + "arg4: int, arg5: bool", generic_gemm=GEMM)
VERSIONS = {"2.1.0": TWO, "2.2.0": TWO,
            "2.20.2": TWO | dict(generic_gemm=GEMM + ", alpha: float = 1.0, beta: Optional[float] = None"),
            "3.0.0": TWO | dict(rmsnorm_bwd=TWO["rmsnorm_bwd"] + ", arg6: bool")}


class Float8Tensor:
    def __init__(self, shape, dtype, *, data, fp8_scale_inv, fp8_dtype):
        assert data.dtype == torch.uint8 and data.is_contiguous() and data.shape == shape
        assert fp8_scale_inv.shape == (1,)
        self.value = data.view(fp8_dtype).float() * fp8_scale_inv


def norm_forward(x, w, b, eps, out, quantizer, otype, sm_margin, zero_centered):
    assert (quantizer, otype, sm_margin, zero_centered) == (None, out.dtype, 0, False)
    assert x.is_contiguous() and out.is_contiguous() and len(x)
    x_ = x.float()
    mean = x_.mean(1) if b is not None else torch.zeros(len(x))
    centred = x_ - mean[:, None]
    rstd = (centred.square().mean(1) + eps).rsqrt()
    out.copy_(centred * rstd[:, None] * w.float() + (0.0 if b is None else b.float()))
    return [out, None if b is None else mean, rstd]


def norm_backward(dy, x, mean, rstd, w, sm_margin, zero_centered):
    assert (sm_margin, zero_centered) == (0, False) and dy.is_contiguous() and x.is_contiguous() and len(x)
    d, r = dy.float(), rstd[:, None]
    xhat = (x.float() - (0.0 if mean is None else mean[:, None])) * r
    g = d * w.float()
    dx = g - xhat * (g * xhat).mean(1, keepdim=True) - (0.0 if mean is None else g.mean(1, keepdim=True))
    return [(dx * r).to(x.dtype), (d * xhat).sum(0).to(w.dtype), d.sum(0).to(w.dtype)]


def gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad, workspace,
         workspace_size, accumulate, use_split_accumulator):
    assert (quantizer, bias, gelu, gelu_in, grad, accumulate) == (None, None, False, None, False, True)
    assert output_dtype == D.dtype == torch.float32 and D.is_contiguous()
    assert workspace.dtype == torch.uint8 and workspace_size == len(workspace)
    D += (B.value.t() if transB else B.value) @ (A.value.t() if transA else A.value)
    return [D, None, None, None]


BODIES = dict(
    layernorm_fwd=norm_forward, layernorm_bwd=lambda *args: norm_backward(*args), generic_gemm=gemm,
    rmsnorm_fwd=lambda x, w, *how: norm_forward(x, w, None, *how),
    rmsnorm_bwd=lambda dy, x, rstd, *how: norm_backward(dy, x, None, rstd, *how)[:2])


def install(monkeypatch, version):
    """Puts this version where it is imported from; None: there is none."""
    for known in [m for m in sys.modules if m.split(".")[0].startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, known)
    if version is None:
        return
    package = "transformer_engine.pytorch"
    modules = {name: ModuleType(name) for name in (
        "transformer_engine", package, f"{package}.constants", f"{package}.tensor",
        f"{package}.tensor.float8_tensor", "transformer_engine_torch")}
    for name, parameters in VERSIONS[version].items():
        def function(*args, body=BODIES[name]):
            return body(*args)
        function.__doc__ = f"{name}({parameters}) -> list\n\nText, of: whatever"
        setattr(modules["transformer_engine_torch"], name, function)
    modules["transformer_engine"].__version__ = version
    modules[f"{package}.constants"].TE_DType = {t: t for t in (
        torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)}
    modules[f"{package}.tensor.float8_tensor"].Float8Tensor = Float8Tensor
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
