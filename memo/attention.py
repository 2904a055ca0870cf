"""Attention on one device: `attention_forward -> out, lse` and `attention_backward -> dq, dk, dv`.

Shapes: q, k, v, out and their gradients (B, T, H, D), any strides with D innermost; lse (B, H, T) fp32, natural
logarithm, scale included. A causal mask aligns the first query with the first key. The backend is resolved once.
Heads know nothing of each other: attend() and attend_backward() go group by group of them, so that little exists at once.
"""

import importlib.util
from collections import namedtuple

import torch

from memo.activations import heads_at_once
from memo.config import ConfigError

# what the blocks are handed; it takes multiples of so many `heads`
Attention = namedtuple("Attention", "name forward backward heads", defaults=(1,))
aten = torch.ops.aten


def heads_first(*tensors):
    """(B, T, H, D) <-> (B, H, T, D), as views."""
    return [t.transpose(1, 2) for t in tensors]


# --- group by group of heads ---

def head_groups(attention, q):
    """Slices of the heads of q (B, T, H, D), as many at a time as activations.heads_at_once says."""
    B, T, H, D = q.shape
    heads = heads_at_once(B * T, D, H, attention.heads)
    return [slice(i, i + heads) for i in range(0, H, heads)]


def attend(attention, q, k, v, causal, scale, out, lse):
    """Writes attention.forward into out (B, T, H, D) and lse (B, H, T)."""
    for h in head_groups(attention, q):
        out[:, :, h], lse[:, h] = attention.forward(*(t[:, :, h] for t in (q, k, v)), causal, scale)


def attend_backward(attention, dout, q, k, v, out, lse, causal, scale):
    """-> dq, dk, dv; of several groups they are written over q, k, v themselves, and are never there twice."""
    groups = head_groups(attention, q)
    for h in groups:
        dout_, *qkv, out_ = (t[:, :, h] for t in (dout, q, k, v, out))
        gradients = attention.backward(dout_, *qkv, out_, lse[:, h].contiguous(), causal, scale)
        if len(groups) == 1:
            return gradients
        for t, g in zip(qkv, gradients, strict=True):
            t.copy_(g)
        del gradients, g  # before the next group's
    return q, k, v


# --- the plain mathematics, for tests and for what no kernel covers (it holds B*H*T*T scores) ---

def math_scores(q, k, causal, scale):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return scores


def math_forward(q, k, v, causal, scale):
    scores = math_scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.sub_(lse[..., None]).exp_(), v.float()).to(q.dtype), lse


def math_backward(dout, q, k, v, out, lse, causal, scale):
    p = math_scores(q, k, causal, scale).sub_(lse[..., None]).exp_()  # the given lse: a ring's is over more keys than these
    dout = dout.float()
    dv = torch.einsum("bhqk,bqhd->bkhd", p, dout)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v.float())
    delta = (dout * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p.mul_(dp.sub_(delta)).mul_(scale)
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.float())
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, q.float())
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


# --- torch's own kernels ---

def cpu_forward(q, k, v, causal, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first(q, k, v), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


def cpu_backward(dout, q, k, v, out, lse, causal, scale):
    return heads_first(*aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=scale))


def flash_forward(q, k, v, causal, scale):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*heads_first(q, k, v), 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse


def flash_backward(dout, q, k, v, out, lse, causal, scale):
    T, unused = q.shape[1], torch.zeros(2, dtype=torch.uint64, device=q.device)  # philox state: there is no dropout
    return heads_first(*aten._scaled_dot_product_flash_attention_backward(
        *heads_first(dout, q, k, v, out), lse, None, None, T, k.shape[1], 0.0, causal, unused, unused, scale=scale))


def cudnn_forward(q, k, v, causal, scale):
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads_first(q, k, v), None, True, 0.0, causal, False,
                                                            scale=scale)
    return out.transpose(1, 2), lse.squeeze(-1)  # cuDNN's is (B, H, T, 1)


def cudnn_backward(dout, q, k, v, out, lse, causal, scale):
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # philox state: there is no dropout
    return heads_first(*aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first(dout, q, k, v, out), lse[..., None], unused, unused, None, None, None, q.shape[1], k.shape[1],
        0.0, causal, scale=scale))


# --- the flash-attn package, where it is installed ---

def flash_attn_2_forward(q, k, v, causal, scale):
    from flash_attn.flash_attn_interface import _flash_attn_forward
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out, lse


def flash_attn_2_backward(dout, q, k, v, out, lse, causal, scale):
    from flash_attn.flash_attn_interface import _flash_attn_backward
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None,
                         torch.are_deterministic_algorithms_enabled())
    return dq, dk, dv


def flash_attn_3_forward(q, k, v, causal, scale):
    from flash_attn_interface import _flash_attn_forward
    return _flash_attn_forward(q, k, v, softmax_scale=scale, causal=causal)[:2]


def flash_attn_3_backward(dout, q, k, v, out, lse, causal, scale):
    from flash_attn_interface import _flash_attn_backward
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=causal,
                         deterministic=torch.are_deterministic_algorithms_enabled())
    return dq, dk, dv


BACKENDS = {b.name: b for b in (  # fastest first: `auto` takes the first that is there
    Attention("flash_attn_3", flash_attn_3_forward, flash_attn_3_backward),
    Attention("flash_attn_2", flash_attn_2_forward, flash_attn_2_backward),
    Attention("cudnn", cudnn_forward, cudnn_backward),
    Attention("flash", flash_forward, flash_backward),
    Attention("cpu", cpu_forward, cpu_backward),
    Attention("math", math_forward, math_backward),
)}


def missing(name, device, dtype, head_dim):
    """Why backend `name` cannot serve here; empty where it can."""
    if name == "math":
        return ""
    if device.type == "meta":  # where nothing is computed, in the shapes of torch's own kernels
        return "" if name in ("cudnn", "flash", "cpu") else "it has no meta kernel"
    if name == "cpu":
        return "" if device.type == "cpu" else "it runs on the CPU only"
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype != torch.bfloat16:
        return "it needs dtype=bfloat16"
    if head_dim % 8 or head_dim > 256:
        return f"it needs n_embd/n_head={head_dim} to be a multiple of 8 up to 256"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if name == "flash_attn_3":
        installed = importlib.util.find_spec("flash_attn_interface") is not None
        return "" if installed and capability[0] == 9 else "it needs a Hopper GPU and the flash_attn_interface package"
    if name == "flash_attn_2":
        return "" if importlib.util.find_spec("flash_attn") else "the flash-attn package is not installed"
    if name == "cudnn":
        if head_dim > 128 or torch.are_deterministic_algorithms_enabled():
            return "it needs n_embd/n_head <= 128 and deterministic=False"
        return "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    return ""


def resolve_attention(name, device, dtype, head_dim):
    """The backend called `name`, or for "auto" the fastest one there is. Errors: a named one that is absent."""
    if name == "auto":
        name = next(n for n in BACKENDS if not missing(n, device, dtype, head_dim))
    elif why := missing(name, device, dtype, head_dim):
        raise ConfigError(f"attention={name} is not available: {why}; try attention=auto")
    return BACKENDS[name]
