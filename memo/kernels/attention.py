"""Attention on one device: the kernels, each a pair `forward -> out, lse` and `backward -> dq, dk, dv`.

Shapes: q, out and their gradients (B, T, H, D), k, v and theirs (B, T, Hkv, D), any strides with D innermost;
lse (B, H, T) fp32, natural logarithm, of scores over sqrt(D). Query head h reads head h Hkv // H of keys and
values, which no kernel copies. A causal mask aligns the first query with the first key. A backward takes out
and lse of all keys that its queries see, which may be more than it is given. See memo/kernels/backends.py for
the choice, memo/layer/attend.py for which queries meet which keys."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from types import ModuleType
from typing import NamedTuple, TypeVar

import torch

from memo.errors import Unusable, reason
from memo.kernels import bands
from memo.kernels.backends import (
    FAR,
    PACKAGES,
    Facts,
    by_lengths,
    choose_kernel,
    cudnn_version,
    missing,
    windows_words,
)
from memo.kernels.bands import Band, hidden_keys

aten = torch.ops.aten
Result = tuple[torch.Tensor, torch.Tensor]  # out, lse
Gradients = Sequence[torch.Tensor]  # dq, dk, dv
T = TypeVar("T")
Pair = tuple[Callable[..., Result], Callable[..., Gradients]]  # forward, backward


class Lengths(NamedTuple):
    """Says, in the place of a causal mask, where documents of sequences one behind the other start, each
    causal. `starts`: their first rows, and the end, int32 on the device. `longest`: none has more rows.
    `left`: a query sees so many keys before its own; -1: all."""

    starts: torch.Tensor
    longest: int
    left: int = -1


Sees = bool | Band | Lengths  # whether the mask is causal, or which one is in its place


class Kernel(NamedTuple):
    """Holds the functions of a kernel."""

    name: str
    forward: Callable[..., Result]  # of (q, k, v, causal)
    backward: Callable[..., Gradients]  # of (dout, q, k, v, out, lse, causal)
    takes_out: bool = False  # forward has out=, where it writes
    label: str = ""  # name and version, and why it was chosen
    merge: Callable[..., object] | None = None  # that of an ops.Ops
    # of as many queries as keys: with Band, or with Lengths, in the place of `causal`
    bands: Pair | None = None
    lengths: Pair | None = None


def one_of(plain: Callable[..., T], mask: type, other: Callable[..., T]) -> Callable[..., T]:
    """Calls a Kernel's function, or where its last argument, in the place of a causal one, is such a `mask`,
    the other one."""
    return lambda *args, **out: (other if isinstance(args[-1], mask) else plain)(*args, **out)


def for_any_mask(kernel: Kernel) -> Kernel:
    """Makes forward and backward of a kernel take a Band or Lengths in the place of `causal`, too, as far as
    it has functions of these."""
    for mask, pair in ((Lengths, kernel.lengths), (Band, kernel.bands)):
        if pair:
            kernel = kernel._replace(forward=one_of(kernel.forward, mask, pair[0]),
                                     backward=one_of(kernel.backward, mask, pair[1]))
    return kernel


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Turns (B, T, H, D) into (B, H, T, D), or back, as views."""
    return [t.transpose(1, 2) for t in tensors]


def of_rows(forward: Callable[..., Result], backward: Callable[..., Gradients]) -> Pair:
    """Makes a Kernel's `lengths` of functions of all sequences' rows, (B*T, H, D), and lse (H, B*T)."""
    def rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.flatten(0, 1) for t in tensors]

    def of_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> Result:
        out, lse = forward(*rows(q, k, v), lengths)
        return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)

    def backward_of_lengths(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                            out: torch.Tensor, lse: torch.Tensor, lengths: Lengths) -> Gradients:
        gradients = backward(*rows(dout, q, k, v, out), lse.transpose(0, 1).flatten(1), lengths)
        return [g.unflatten(0, q.shape[:2]) for g in gradients]
    return of_lengths, backward_of_lengths


# --- the plain mathematics, for tests and for what no kernel covers (it holds B*H*T*T scores) ---

def math_scores(q: torch.Tensor, k: torch.Tensor, causal: bool | Band) -> torch.Tensor:
    # the product of a query and a key has a variance of D; the softmax wants 1
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), repeated(k, q).float()) * q.shape[-1]**-0.5
    if isinstance(causal, Band):
        rows, keys = (slice(0, n) for n in scores.shape[-2:])
        scores += hidden_keys(rows, keys, causal, scores)
    elif causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def repeated(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeats heads of k (B, T, Hkv, D): one for each of q."""
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def math_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool | Band) -> Result:
    scores = math_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    return torch.einsum("bhqk,bkhd->bqhd", p, repeated(v, q).float()).to(q.dtype), lse


def math_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                  lse: torch.Tensor, causal: bool | Band) -> Gradients:
    p = math_scores(q, k, causal).sub_(lse[..., None]).exp_()
    dout = dout.float()
    dv = torch.einsum("bhqk,bqhd->bkhd", p, dout)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, repeated(v, q).float())
    delta = (dout * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p.mul_(dp.sub_(delta)).mul_(q.shape[-1]**-0.5)
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, repeated(k, q).float())
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, q.float())
    dk, dv = (g.unflatten(2, (k.shape[2], -1)).sum(3) for g in (dk, dv))  # over the heads that share one
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


# --- torch's own kernels ---

def flash_forward(op: Callable[..., Result], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  causal: bool) -> Result:
    out, lse, *_ = op(*heads_first(q, k, v), 0.0, causal)
    return out.transpose(1, 2), lse


def cpu_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Gradients:
    return heads_first(*aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first(dout, q, k, v, out), lse, 0.0, causal))


def flash_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   lse: torch.Tensor, causal: bool) -> Gradients:
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # philox state: there is no dropout
    return heads_first(*aten._scaled_dot_product_flash_attention_backward(
        *heads_first(dout, q, k, v, out), lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused,
        unused))


def flash_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> Result:
    starts, longest, left = lengths
    return aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False,
                                         window_size_left=left)[:2]


def flash_rows_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        out: torch.Tensor, lse: torch.Tensor, lengths: Lengths) -> Gradients:
    (starts, longest, left), unused = lengths, torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(dout, q, k, v, out, lse, starts, starts, longest, longest, 0.0,
                                          True, unused, unused, window_size_left=left)


def near(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies those whose first and last elements lie backends.FAR or more apart: few heads, many tokens."""
    spans = [sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) for t in tensors]
    return [t if span < FAR else t.contiguous() for t, span in zip(tensors, spans, strict=True)]


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Result:
    q, k, v = heads_first(*near(q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out.transpose(1, 2), lse.squeeze(-1)  # cuDNN's is (B, H, T, 1)


def cudnn_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   lse: torch.Tensor, causal: bool) -> Gradients:
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # philox state: there is no dropout
    return heads_first(*aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first(*near(dout, q, k, v, out)), lse[..., None], unused, unused, None, None, None, q.shape[1],
        k.shape[1], 0.0, causal))


# --- the flash-attn packages, where they are installed ---

# {kernel: (distribution, module, its forward, its backward)}; the last two are of lengths, too or alone. Not
# through torch.nn.attention's activate_flash_attention_impl: in torch 2.13 it fails on flash-attn-4 from beta
# 19 on, whose forward returns four results and not two; it has no out=; and it replaces `flash` everywhere
INTERFACES = {
    "flash_attn_2": ("flash-attn", "flash_attn.flash_attn_interface", "_flash_attn_forward",
                     "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    "flash_attn_3": ("flash_attn_3", "flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    "flash_attn_4": ("flash-attn-4", "flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
}
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
WINDOW = "window_size_left", "window_size_right"
SPELLINGS = {"lse": ("softmax_lse", "lse"), "scale": ("softmax_scale",), "causal": ("causal", "is_causal")}
# what some versions want although nothing of it is used here
UNUSED = dict.fromkeys(
    """alibi_slopes k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k sequed_q
    sequed_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary
    q_descale k_descale v_descale""".split())
UNUSED |= dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, return_softmax=False)


def said(causal: Sees, unbound: int | None = -1) -> dict[str, object]:
    """Says which queries meet which keys, as the packages call it. `unbound`: a side of a window that has no
    end, in flash-attn-4 None."""
    if isinstance(causal, Lengths):
        lengths = [n for n in causal[:2] for _ in range(2)]
        window = {WINDOW[0]: causal.left} if causal.left >= 0 else {}
        return dict(zip(LENGTHS, lengths, strict=True), causal=True) | window
    if isinstance(causal, Band):
        sides = causal.left, unbound if causal.right < 0 else causal.right
        return dict(zip(WINDOW, sides, strict=True), causal=causal.right == 0)
    return dict(causal=causal)


def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Lists {name: inspect.Parameter}, of a torch.library.custom_op too, which takes (*args, **kwargs)."""
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def bound(module: ModuleType, name: str, needed: Sequence[str],
          optional: Sequence[str] = ()) -> Callable[..., Result]:
    """Makes module.<name> a function of the keywords `needed`, and `optional` ones. Errors: Unusable."""
    if not hasattr(module, name):
        raise Unusable(f"it has no {module.__name__}.{name}")
    function = getattr(module, name)
    known = parameters_of(function)
    theirs = {ours: s for ours in needed for s in reversed(SPELLINGS.get(ours, (ours,))) if s in known}
    if lacking := [ours for ours in needed if ours not in theirs]:
        raise Unusable(f"it is of another version: {name} takes no {lacking[0]}")
    required = [n for n, p in known.items() if p.default is p.empty and n not in theirs.values()]
    if unknown := [n for n in required if n not in UNUSED]:
        raise Unusable(f"it is of another version: {name} wants {unknown[0]}")
    fixed = {n: UNUSED[n] for n in required}
    theirs |= {ours: ours for ours in optional if ours in known}
    return lambda **given: function(**fixed | {theirs[ours]: value for ours, value in given.items()})


def installed_kernel(name: str) -> Kernel:
    """Loads a package's Kernel. Errors: Unusable."""
    distribution, module, *names = INTERFACES[name]
    try:
        package = importlib.import_module(module)
    except Exception as e:  # built for another torch, say
        absent = e.name if isinstance(e, ModuleNotFoundError) else None
        if absent and f"{module}.".startswith(f"{absent}."):  # flash-attn-4 alone has a folder flash_attn too
            raise Unusable("it is not installed") from None
        raise Unusable(f"it cannot be imported ({reason(e)})") from None
    lse: dict[str, bool] = dict(return_lse=True) if name == "flash_attn_4" else {}
    unbound = None if name == "flash_attn_4" else -1
    of_keys = "q", "k", "v", "scale", "causal", *lse
    of_gradients = "dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "scale", "causal", "deterministic"

    def calls(forward: str, backward: str, *more: str) -> tuple[Callable[..., Result], Callable[..., Result]]:
        return (bound(package, forward, (*of_keys, *more), ("out", *WINDOW)),
                bound(package, backward, (*of_gradients, *more), WINDOW))
    known = {False: calls(*names[:2])}
    with suppress(Unusable):  # of lengths: not all versions have them
        known[True] = calls(*names[-2:], *LENGTHS)
    # a custom op spells it out_, and may not return it: that does not count
    takes_out = "out" in parameters_of(getattr(package, names[0]))

    def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Sees,
                          **out: torch.Tensor) -> Result:
        call, _ = known[isinstance(causal, Lengths)]
        return call(q=q, k=k, v=v, scale=q.shape[-1]**-0.5, **said(causal, unbound), **lse, **out)[:2]

    def attention_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                           out: torch.Tensor, lse: torch.Tensor, causal: Sees) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _, call = known[isinstance(causal, Lengths)]
        call(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv, scale=q.shape[-1]**-0.5,
             **said(causal, unbound), deterministic=torch.are_deterministic_algorithms_enabled())
        return dq, dk, dv
    label = next((f"{name} {found.version}" for found in distributions(name=distribution)), name)
    # flash-attn-4 has a backward of lengths on a Hopper from beta 5 on, as it has this
    old = name == "flash_attn_4" and "dlse" not in parameters_of(getattr(package, names[1]))
    lengths = None if old or True not in known else of_rows(attention_forward, attention_backward)
    # all that are there
    slides = all({*WINDOW} <= {*parameters_of(getattr(package, n))} for n in names if hasattr(package, n))
    return Kernel(name, attention_forward, attention_backward, takes_out, label,
                  bands=(attention_forward, attention_backward) if slides else None, lengths=lengths)


# --- without a GPU: what the packages' kernels request, for a trace ---

torch.library.define("memo::attention_backward", "(str kernel, Tensor q, Tensor k) -> ()")


@torch.library.impl("memo::attention_backward", "Meta")
def _(kernel: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Stands for a package's kernel: what it takes for itself, memo.profiler adds to a trace."""


def meta_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
                 out: torch.Tensor | None = None) -> Result:
    B, T, H, D = q.shape
    return torch.empty_like(q) if out is None else out, q.new_empty(B, H, T, dtype=torch.float32)


def meta_backward(name: str, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  out: torch.Tensor, lse: torch.Tensor, causal: bool) -> Gradients:
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    torch.ops.memo.attention_backward(name, q, k)
    return gradients


# --- the choice ---

FLASH_LENGTHS = of_rows(flash_rows, flash_rows_backward)
FLASH_BANDS = bands.flash_forward, bands.flash_backward
BACKENDS = {b.name: b for b in (  # those of torch
    Kernel("cudnn", cudnn_forward, cudnn_backward, bands=FLASH_BANDS, lengths=FLASH_LENGTHS),
    Kernel("flash", partial(flash_forward, aten._scaled_dot_product_flash_attention), flash_backward,
           bands=FLASH_BANDS, lengths=FLASH_LENGTHS),
    Kernel("cpu", partial(flash_forward, aten._scaled_dot_product_flash_attention_for_cpu), cpu_backward,
           bands=(bands.cpu_forward, bands.cpu_backward)),
    Kernel("math", math_forward, math_backward, bands=(math_forward, math_backward)))}


def facts_of(device: torch.device, dtype: torch.dtype, head_dim: int, aligned: bool,
             window: bool = False) -> tuple[Facts, dict[str, Kernel]]:
    """Finds (Facts, {name: Kernel} of packages that can be called); imports those alone that could serve."""
    name, found, why = str(dtype).removeprefix("torch."), {}, {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type != "cuda":
        return Facts(device.type, name, head_dim, deterministic), {}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else 0
    facts = Facts("cuda", name, head_dim, deterministic, torch.cuda.get_device_capability(device), cudnn,
                  aligned=aligned)
    for package in PACKAGES:
        if not missing(package, replace(facts, packages={package: ""})):
            try:
                found[package] = installed_kernel(package)
                if window and not found[package].bands:
                    raise Unusable("it is of another version: it has no sliding window")
            except Unusable as e:
                why[package] = str(e)
                found.pop(package, None)
    return replace(facts, packages=why | dict.fromkeys(found, "")), found


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype, head_dim: int,
                      aligned: bool = True, documents: bool = False, window: bool = False) -> Kernel:
    """Finds the Kernel called `name`, for "auto" the fastest; on the meta device any. With `documents` its
    label says what many of them go by, if not by its own lengths; with a `window` what this goes by. Errors:
    ConfigError."""
    if device.type == "meta":
        return BACKENDS.get("cudnn" if name == "auto" else name) or Kernel(
            name, meta_forward, partial(meta_backward, name), takes_out=name == "flash_attn_4")
    facts, found = facts_of(device, dtype, head_dim, aligned, window)
    name, why = choose_kernel(name, facts)
    kernel = found.get(name) or BACKENDS[name]
    label = kernel.label or (f"cudnn {cudnn_version(facts.cudnn)}" if name == "cudnn" else name)
    label += windows_words(name, window)
    if not (taken := by_lengths(name, facts.deterministic)):
        kernel = kernel._replace(lengths=None)
    if documents and (taken != name or not kernel.lengths):
        label += f" (many documents by {taken})" if kernel.lengths else " (documents one by one)"
    return kernel._replace(label=f"{label}: {why}" if why else label)
