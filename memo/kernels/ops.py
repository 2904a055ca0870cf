"""The operations of a layer that are no matrix products: norms, GELU, SwiGLU, rotary positions, each a pair
x_forward / x_backward; the merge of two parts of attention; and the head's cross entropy.

All write where they are told (`out`). For GELU torch has a kernel that does so. For the others an Ops is the
choice between torch's own kernels (any device), fused ones in Triton (memo/kernels/fused.py; CUDA), and for
norms transformer-engine's (memo/kernels/te.py; CUDA), which `auto` does not take: docs/kernels.md has the
bytes that each reads and writes.

A norm is LayerNorm where a mean is kept, y = (x - mean) rstd w + b, and RMSNorm where there is none, y = x
rstd w. Every row is computed alone, so that a range of rows gets the same bits as all of them.
"""

import importlib.util
from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memo.errors import Unusable
from memo.kernels import te
from memo.kernels.backends import first_that_serves
from memo.kernels.rows import chunks, own_ids
from memo.system.axis import Axis
from memo.system.device import to_device

TINY = torch.finfo(torch.float32).tiny  # torch's cross entropy of one token ends at -log of this, 87
Ops = namedtuple("Ops", "name norm_forward norm_backward rotary merge swiglu_forward swiglu_backward "
                        "cross_entropy")
Ops.__doc__ = """How norms, rotary positions, merges, SwiGLU and cross entropy are computed:

    norm_forward(x, w, b, out, mean, rstd, eps)
        (N, C), (C,), (C,) or None -> out (N, C), mean (N,) and rstd (N,); without `mean` RMSNorm
    norm_backward(residual, dy, x, mean, rstd, w, b, dw, db, out)
        residual (or None) + dx; adds to dw and db; `out` may be any of residual, dy, x
    rotary(x, turn, back)
        in place: the pairs of x (n, tp, heads * D), read as complex numbers, times turn (n, tp, D/2), or with
        `back` times its conjugate
    merge(out, lse, out_, lse_)
        adds the same queries' attention to other keys, out_ (B, T, H, D), lse_ (B, H, T), to fp32 out, lse
    swiglu_forward(gate, up, out, gelu): silu(gate) * up, of any shape, or with `gelu`, in its tanh form, in
        the place of silu
    swiglu_backward(dy, gate, up, gelu): writes the gradients of gate and up over them, and uses dy up
    cross_entropy(tp, logits, target, gradient)
        of this rank's columns (rows, V/tp) of the logits and the ids (rows,): the log-probabilities of these
        (rows,), fp32, over the columns of all tp ranks; and with `gradient` that of minus their sum over
        logits, of the same shape and dtype, else None. Uses the logits up then
"""


# --- with torch's kernels ---

def norm_operands(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Turns tensors of a CPU to fp32: torch's bf16 kernel there sums in bf16, 5% off at 3,000 rows."""
    return [t if t is None or not t.is_cpu else t.float() for t in tensors]


def norm_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor,
                 mean: torch.Tensor | None, rstd: torch.Tensor, eps: float) -> None:
    for x_, out_, mean_, rstd_ in chunks(x, out, mean, rstd, cached=mean is None):
        if mean is None:
            x_ = x_.float()
            torch.rsqrt((x_ * x_).mean(1).add_(eps), out=rstd_)
            torch.mul(torch.mul(x_, rstd_[:, None]), w, out=out_)
        else:
            x_, w, b = norm_operands(x_, w, b)
            y, m, r = torch.native_layer_norm(x_, x_.shape[-1:], w, b, eps)
            out_.copy_(y)
            mean_.copy_(m.view(-1))
            rstd_.copy_(r.view(-1))


def norm_backward(residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                  mean: torch.Tensor | None, rstd: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                  dw: torch.Tensor, db: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    for out_, dy_, x_, mean_, rstd_, residual_ in chunks(out, dy, x, mean, rstd, residual,
                                                         cached=mean is None):
        r = rstd_[:, None]
        if mean is None:  # dx = r (g - xhat mean(g xhat)), g = dy w, xhat = x r; the mean over the row
            dy_ = dy_.float()
            xhat = x_.float() * r
            both = dy_ * xhat
            dw += both.sum(0)
            g = dy_ * w
            along = torch.mul(g, xhat, out=both).mean(1, keepdim=True)
            dx = g.sub_(xhat.mul_(along)).mul_(r)
        else:
            dy_, x_, w, b = norm_operands(dy_, x_, w, b)
            dx, dw_, db_ = torch.ops.aten.native_layer_norm_backward(
                dy_, x_, x_.shape[-1:], mean_[:, None], r, w, b, [True, True, b is not None])
            dw += dw_
            if b is not None:
                db += db_
        out_.copy_(dx) if residual is None else torch.add(residual_, dx, out=out_)
    return out


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, gelu: bool = False) -> None:
    aten, how = torch.ops.aten, dict(approximate="tanh") if gelu else {}
    for gate_, up_, out_ in chunks(gate, up, out, cached=True):
        (aten.gelu if gelu else aten.silu).out(gate_, **how, out=out_)
        out_.mul_(up_)


def swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gelu: bool = False) -> None:
    aten, how = torch.ops.aten, dict(approximate="tanh") if gelu else {}
    for dy_, gate_, up_ in chunks(dy, gate, up, cached=True):
        dup = (aten.gelu if gelu else aten.silu)(gate_, **how).mul_(dy_)
        (aten.gelu_backward if gelu else aten.silu_backward).grad_input(dy_.mul_(up_), gate_, **how,
                                                                        grad_input=gate_)
        up_.copy_(dup)
        del dup  # before the next chunk's


def rotary(x: torch.Tensor, turn: torch.Tensor, back: bool) -> None:
    turn = turn.conj() if back else turn
    for x_, turn_ in chunks(x, turn):
        pairs = x_.unflatten(-1, (-1, turn.shape[-1], 2))
        # in fp32 float() gives the tensor itself, so that mul_ turns x in place
        turned = torch.view_as_complex(pairs.float()).mul_(turn_[..., None, :])
        if x.dtype != torch.float32:
            pairs.copy_(torch.view_as_real(turned))
        del turned  # before the next chunk's


def merge(out: torch.Tensor, lse: torch.Tensor, out_: torch.Tensor, lse_: torch.Tensor) -> None:
    both = torch.logaddexp(lse, lse_)
    part, part_ = (torch.exp(x - both).transpose(1, 2)[..., None] for x in (lse, lse_))  # (B, T, H, 1)
    out.mul_(part).addcmul_(out_, part_)
    lse.copy_(both)


def cross_entropy(tp: Axis, logits: torch.Tensor, target: torch.Tensor,
                  gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    half = logits.is_cuda and logits.dtype != torch.float32  # with dtype= a GPU makes a copy in fp32 first
    p = torch._softmax(logits, 1, True) if half else torch.softmax(logits, 1, dtype=torch.float32)
    if tp.size > 1:  # so far as if there were no other columns
        lse = logits.amax(1).float() - p.amax(1).log()
        p.mul_((lse - tp.gather(lse).logsumexp(0)).exp_()[:, None])
    own, inside = own_ids(tp, target[:, None], p.shape[1])  # (rows, 1): is the target one of ours?
    p_own = p.gather(1, own)
    p_target = tp.sum(p_own * inside)  # one of the ranks has it
    dlogits = p.scatter_(1, own, p_own - inside.float()).to(logits.dtype) if gradient else None
    return p_target.clamp_min(TINY).log_()[:, 0], dlogits


TORCH = Ops("torch", norm_forward, norm_backward, rotary, merge, swiglu_forward, swiglu_backward,
            cross_entropy)


# --- with fused kernels; on "meta" only what they request is done ---

WHOLE_ROW = 8192  # columns: of longer rows a norm's backward would not fit the registers
PROGRAMS = 512  # share the rows of a norm's backward, each with own sums for dw and db: enough for any GPU


def launch(name: str, *args: Any, **more: object) -> None:
    """Launches a kernel of memo/kernels/fused.py, which needs Triton; on "meta" nothing."""
    if not next(t for t in args if t is not None).is_meta:
        from memo.kernels import fused
        getattr(fused, f"launch_{name}")(*args, **more)


def fused_norm_backward(residual: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor,
                        mean: torch.Tensor | None, rstd: torch.Tensor, w: torch.Tensor,
                        b: torch.Tensor | None, dw: torch.Tensor, db: torch.Tensor | None,
                        out: torch.Tensor) -> torch.Tensor:
    sums = dw.new_empty(1 + (b is not None), min(len(x), PROGRAMS), len(w))  # fp32, as dw is
    means = dw.new_empty(2, len(x)) if len(w) > WHOLE_ROW else None
    launch("norm_backward", residual, dy, x, mean, rstd, w, sums, means, out, WHOLE_ROW)
    dw += sums[0].sum(0)
    if b is not None:
        db += sums[1].sum(0)
    return out


def fused_cross_entropy(tp: Axis, logits: torch.Tensor, target: torch.Tensor,
                        gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    lse, of_target = logits.new_empty(2, len(logits), dtype=torch.float32)
    first = tp.rank * logits.shape[1]
    launch("logsumexp", logits, target, first, lse, of_target)
    if tp.size > 1:
        lse = tp.gather(lse).logsumexp(0)
    if gradient:
        launch("logits_backward", logits, target, first, lse)
    return tp.sum(of_target).sub_(lse), logits if gradient else None  # one of the ranks has a target's logit


TRITON = Ops("triton", partial(launch, "norm_forward"), fused_norm_backward, partial(launch, "rotary"),
             partial(launch, "merge"), partial(launch, "swiglu_forward"), partial(launch, "swiglu_backward"),
             fused_cross_entropy)
TE = TRITON._replace(name="te", norm_forward=te.norm_forward, norm_backward=te.norm_backward)


# --- the choice ---

OPS = {ops.name: ops for ops in (TRITON, TORCH, TE)}
AUTO = ("triton", "torch")  # the fastest first


def lacking(name: str, device: torch.device) -> str:
    """Says why the kernels called `name` cannot serve on a device, without touching it; else empty."""
    if name == "torch" or device.type == "meta":  # where a GPU's requests are traced
        return ""
    if device.type != "cuda":
        return "they need a CUDA device"
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    if name == "te":
        try:
            te.installed()
        except Unusable as e:
            return str(e)
    return ""


def failing(name: str, device: torch.device) -> str:
    """Says why the kernels called `name` fail on a CUDA device, in bf16; empty where they do not."""
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)
    ops, x, w, (mean, rstd, lse, dw) = OPS[name], zeros(1, 16), zeros(16), zeros(4, 16, dtype=torch.float32)
    heads = zeros(1, 1, 1, 16)
    try:
        with torch.cuda.device(device):  # the one that Triton launches on
            for mean_ in (mean[:1], None):  # LayerNorm, RMSNorm
                ops.norm_forward(x, w, None, x, mean_, rstd[:1], 1e-5)
                ops.norm_backward(x, x, x, mean_, rstd[:1], w, None, dw, None, x)
            ops.swiglu_forward(x, x, x)
            ops.swiglu_backward(zeros(1, 16), zeros(1, 16), zeros(1, 16))
            ops.rotary(x[:, None], zeros(1, 1, 8, dtype=torch.complex64), back=True)
            ops.merge(heads.float(), lse[None, None, :1], heads, lse[None, None, 1:2])
            ops.cross_entropy(Axis("tp"), zeros(1, 16), zeros(1, dtype=torch.int64), True)
            if name == "te" and torch.cuda.get_device_capability(device) >= (8, 9):  # it has FP8 products
                q = zeros(16, 16, dtype=torch.uint8)
                te.add_fp8_product(zeros(16, 16, dtype=torch.float32), q.view(torch.float8_e5m2),
                                   q.view(torch.float8_e4m3fn), zeros(1, dtype=torch.float32))
        return ""
    except Exception as e:  # no C compiler, a driver that is too old: whatever they say
        return f"{name} fails ({type(e).__name__}: {(str(e).splitlines() or [''])[-1]})"


def resolve_ops(name: str, device: torch.device, launch: bool = True) -> tuple[Ops, str]:
    """Finds (the Ops called `name` or the fastest, why). `launch`: each is tried. Errors: ConfigError."""
    whys = {kernels: lacking(kernels, device) for kernels in (AUTO if name == "auto" else (name,))}
    if launch and device.type == "cuda":
        whys |= {kernels: failing(kernels, device) for kernels, why in whys.items()
                 if not why and kernels != "torch"}
    name, before = first_that_serves("ops", name, whys)
    if name == "te" and device.type == "cuda":
        return OPS[name], te.installed().label
    return OPS[name], "; ".join(whys[kernels] for kernels in before)


# --- GELU: y = x P(Z <= x), or its tanh approximation ---

def gelu_forward(x: torch.Tensor, form: str, out: torch.Tensor) -> None:
    for x_, out_ in chunks(x, out):
        torch.ops.aten.gelu.out(x_, approximate=form, out=out_)


# `out` may be dy or x itself
def gelu_backward(dy: torch.Tensor, x: torch.Tensor, form: str, out: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=form, grad_input=out)


# --- rotary positions: a head's pairs, read as complex numbers, are turned by e^(i t f_j) ---

def rotations(positions: torch.Tensor, D: int, theta: float, multipliers: Sequence[float] = (),
              factor: float = 1.0, pin: bool = False) -> torch.Tensor:
    """Computes factor e^(i t f_j) as (N, D/2) complex64 from positions t (N,), where f_j = theta^(-2j/R)
    multipliers[j] (memo/config/rope.py) of R/2 pairs; pairs beyond the multipliers do not turn: theirs is 1.
    Angles in fp64: exact at millions of tokens. `pin`: to_device()'s"""
    R = 2 * len(multipliers) or D
    frequencies = theta ** (torch.arange(0, R, 2, dtype=torch.float64, device=positions.device) / -R)
    frequencies *= to_device(torch.tensor(multipliers or [1.0], dtype=torch.float64), positions.device, pin)
    table = torch.ones(len(positions), D // 2, dtype=torch.complex64, device=positions.device)
    for rows, t in chunks(table[:, :R // 2], positions):
        angles = t[:, None] * frequencies
        rows.copy_(torch.polar(torch.full_like(angles, factor), angles))
    return table
