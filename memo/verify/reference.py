"""An independent model of all families in plain torch under autograd: what memo's losses and gradients are
compared with, in fp64 by default, and a rival in bench/.

Of memo it knows a Config and the names of parameters; the arithmetic is its own.

    B, T, C, V    sequences, tokens of each, hidden size, vocabulary without memo's padding
    H, Hkv, D     heads of queries, heads of keys and values, elements of a head
"""

import json
import math
import re
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from memo.config.config import Config
from memo.config.settings import Kind, Rope

Turns = dict[Rope | None, tuple[torch.Tensor, torch.Tensor]]  # cosines and sines for rotate()


# --- positions ---

def rotary_frequencies(cfg: Config, rope: Rope) -> tuple[torch.Tensor, float]:
    """Computes (angle between neighbouring tokens of each pair of elements that rotates, in radians, fp64;
    what multiplies rotated vectors). Source: transformers' modeling_rope_utils; arXiv 2306.15595 (linear),
    2309.00071 (YaRN), 2402.13753 (LongRoPE), 2407.21783 (Llama 3)."""
    D, theta = int(cfg.head_width * cfg.partial_rotary_factor), rope.theta
    pair = torch.arange(D // 2, dtype=torch.float64)
    plain = theta ** (-2 * pair / D)
    given = json.loads(rope.scaling or "{}")
    kind = given.get("rope_type") or given.get("type")

    def number(name: str, default: float = 0.0) -> float:
        return float(given.get(name) or default)
    factor, length = number("factor", 1.0), number("original_max_position_embeddings")
    slowed = plain / factor
    if kind == "linear":
        return slowed, 1.0
    if kind == "llama3":
        wavelength = 2 * math.pi / plain  # tokens
        low, high = number("low_freq_factor"), number("high_freq_factor")
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * slowed + smooth * plain
        return torch.where(wavelength > length / low, slowed,
                           torch.where(wavelength < length / high, plain, between)), 1.0
    if kind == "longrope":
        stretched = given["long_factor" if cfg.block_size > length else "short_factor"]
        return (plain / torch.tensor(stretched, dtype=torch.float64),
                number("attention_factor", math.sqrt(1 + math.log(factor, length))))
    if kind != "yarn":
        return plain, 1.0
    # pair j turns length * theta^(-2j/D) / 2 pi times: solved for j
    first, last = (D * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
                   for turns in (number("beta_fast", 32.0), number("beta_slow", 1.0)))
    if given.get("truncate", True) in (True, None):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    ramp = ((pair - first) / (last - first or 0.001)).clamp(0, 1)

    def magnitude(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(factor)
    both = number("mscale") and number("mscale_all_dim")
    usual = magnitude(number("mscale")) / magnitude(number("mscale_all_dim")) if both else magnitude(1.0)
    return ramp * slowed + (1 - ramp) * plain, number("attention_factor", usual)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (2j, 2j + 1) of x (B, H, T, D) by angles whose `cos` and `sin` (..., T, R/2) are
    given; elements from R on stay."""
    R = 2 * cos.shape[-1]
    even, odd = x[..., 0:R:2].to(cos.dtype), x[..., 1:R:2].to(cos.dtype)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
    return turned if x.shape[-1] == R else torch.cat((turned, x[..., R:]), -1)


# --- attention ---

def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: torch.Tensor | None = None,
           window: int = 0, scalar: float = 0.0) -> torch.Tensor:
    """Attends causally, (B, H, T, D) and (B, Hkv, T, D) twice -> (B, H, T, D), by torch's own kernel. `of`
    (B, T): the document of each token, which sees those of its own alone; None: there is one. `window`: a
    token sees so many of them, itself the last; 0: all. `scalar`: scores are over its root; 0: over D's."""
    T = q.shape[2]
    if of is None:
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window) if window else None
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None,
                                              scale=scalar**-0.5 if scalar else None,
                                              enable_gqa=q.shape != k.shape)

    def in_sequence(b: int, *qkv: torch.Tensor) -> torch.Tensor:
        lengths = of[b].unique_consecutive(return_counts=True)[1].tolist()
        pieces = zip(*(t[b:b + 1].split(lengths, 2) for t in qkv), strict=True)
        return torch.cat([attend(q_, k_, v_, None, window, scalar) for q_, k_, v_ in pieces], 2)
    return torch.cat([in_sequence(b, q, k, v) for b in range(len(of))])


# --- the model ---

def norm_of(cfg: Config, width: int) -> nn.Module:
    return (nn.LayerNorm(width, eps=cfg.norm_eps, bias=cfg.bias) if cfg.norm == "layernorm"
            else nn.RMSNorm(width, eps=cfg.norm_eps))


class ReferenceLayer(nn.Module):
    """Computes a layer, whose modules have memo's names of their parameters."""

    def __init__(self, cfg: Config, kind: Kind) -> None:
        super().__init__()
        C, D, inner = cfg.n_embd, cfg.head_width, cfg.inner_width
        self.cfg, self.kind = cfg, kind
        self.ln1, self.ln2, self.post1, self.post2 = (
            nn.Identity() if cfg.norms == absent else norm_of(cfg, C)
            for absent in ("behind", "behind", "before", "before"))
        self.q, self.k, self.v = (nn.Linear(C, heads * D, bias=cfg.bias or cfg.qkv_bias)
                                  for heads in (cfg.n_head, cfg.kv_heads, cfg.kv_heads))
        self.proj = nn.Linear(cfg.n_head * D, C, bias=cfg.bias)
        if cfg.qk_norm:
            widths = [heads * D if cfg.qk_norm_over == "all" else D for heads in (cfg.n_head, cfg.kv_heads)]
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=cfg.norm_eps) for width in widths)
        if cfg.mlp == "gelu":
            self.fc1, self.fc2 = nn.Linear(C, inner, bias=cfg.bias), nn.Linear(inner, C, bias=cfg.bias)
        else:
            self.gate, self.up = nn.Linear(C, inner, bias=False), nn.Linear(C, inner, bias=False)
            self.down = nn.Linear(inner, C, bias=False)

    def forward(self, x: torch.Tensor, turns: Turns, of: torch.Tensor | None = None) -> torch.Tensor:
        """Computes a layer, (B, T, C) -> (B, T, C)."""
        (B, T, _), normed, D = x.shape, self.ln1(x), self.cfg.head_width
        q, k, v = (linear(normed) for linear in (self.q, self.k, self.v))
        if self.cfg.qk_norm:  # over the last dim
            each = (-1, D) if self.cfg.qk_norm_over == "head" else (-1,)
            q, k = self.q_norm(q.unflatten(2, each)).flatten(2), self.k_norm(k.unflatten(2, each)).flatten(2)
        q, k, v = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k, v))
        if self.kind.rope:
            q, k = (rotate(t, *turns[self.kind.rope]) for t in (q, k))
        out = attend(q, k, v, of, self.kind.window, self.cfg.query_scalar).transpose(1, 2).reshape(B, T, -1)
        x = x + self.post1(self.proj(out))
        return x + self.post2(self.mlp(self.ln2(x)))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the MLP of normed rows, (B, T, C) -> (B, T, C)."""
        if self.cfg.mlp != "gelu":
            act = F.silu if self.cfg.mlp == "swiglu" else partial(F.gelu, approximate="tanh")
            return self.down(act(self.gate(x)) * self.up(x))
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh" if self.cfg.gelu == "tanh" else "none"))


class Reference(nn.Module):
    """Computes a Config's model in `dtype`, whose weights load() sets."""

    def __init__(self, cfg: Config, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd) if cfg.position == "learned" else None
        self.h = nn.ModuleList(ReferenceLayer(cfg, kind) for kind in cfg.kinds)
        self.lnf = norm_of(cfg, cfg.n_embd)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.to(dtype)
        self.wide = torch.promote_types(dtype, torch.float32)  # of rotations and of the loss

    # --- forward ---

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Turns]:
        """Computes (the first layer's input (B, T, C), rotations) of (B, T)."""
        x, turns = self.wte(tokens) * (self.cfg.n_embd**0.5 if self.cfg.scale_embeddings else 1.0), Turns()
        if self.wpe is not None:
            x = x + self.wpe(positions)
        for rope in {kind.rope for kind in self.cfg.kinds if kind.rope}:
            frequencies, factor = rotary_frequencies(self.cfg, rope)
            angles = positions[:, None, :, None].double() * frequencies.to(tokens.device)
            turns[rope] = (angles.cos() * factor).to(self.wide), (angles.sin() * factor).to(self.wide)
        return x, turns

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the last layer's output (B, T, C) of tokens (B, T). `positions` (B, T): those of tokens in
        their documents, each of which begins with 0; None: a sequence is one."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        number = (positions == 0).cumsum(1)
        of = number if number.max() > 1 else None  # a causal mask alone is faster
        x, turns = self.embed(tokens, positions)
        for block in self.h:
            x = block(x, turns, of)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the logits (..., V) of the last layer's outputs (..., C), in fp32 at least."""
        return F.linear(self.lnf(x), (self.wte if self.head is None else self.head).weight).to(self.wide)

    def loss_sum(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sums the losses, in nats, of rows of the last layer's output (n, C) with targets (n,); of a target
        below 0 there is none."""
        return F.cross_entropy(self.logits(x), targets, reduction="sum", ignore_index=-1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor,
                positions: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the mean loss, in nats, of tokens and targets (B, T). `positions`: as in hidden()."""
        rows, ids = self.hidden(tokens, positions).flatten(0, 1), targets.flatten()
        return self.loss_sum(rows, ids) / (ids >= 0).sum().clamp(min=1)

    # --- by memo's names ---

    def memo_names(self) -> dict[str, nn.Parameter]:
        """Finds {memo's name: parameter}."""
        names = {re.sub(r"\.(w|b)\w+$", r"_\1", name): p for name, p in self.named_parameters()}
        return {dict(wte_w="wte", wpe_w="wpe").get(name, name): p for name, p in names.items()}

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> "Reference":
        """Copies memo's (name, tensor) pairs into the parameters, without the vocabulary's padding -> the
        model. Errors: ValueError: they are not this model's, each once."""
        missing = self.memo_names()
        for name, tensor in named_tensors:
            if name not in missing:
                raise ValueError(f"{name} is not a parameter of this model, or comes twice")
            p = missing.pop(name).detach()
            p.copy_(tensor[:len(p)])
        if missing:
            raise ValueError(f"there is no {min(missing)}")
        return self

    def gradients(self) -> dict[str, torch.Tensor]:
        """Sums {memo's name: gradient} over all backwards, shaped as memo's: that of the vocabulary's
        padding is 0. Errors: ValueError: there was no backward."""
        padding, gradients = self.cfg.padded_vocab_size - self.cfg.vocab_size, dict[str, torch.Tensor]()
        for name, p in self.memo_names().items():
            if p.grad is None:
                raise ValueError(f"{name} has no gradient: backward() of a loss comes first")
            gradients[name] = F.pad(p.grad, (0, 0, 0, padding)) if name in ("wte", "head_w") else p.grad
        return gradients
