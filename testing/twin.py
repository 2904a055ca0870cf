"""An independent GPT in plain torch under autograd: the reference of gradient tests, a rival in bench/."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memo.config import Config
from memo.views import views
from model import GPT


def normed(cfg: Config, width: int) -> nn.Module:
    return (nn.LayerNorm(width, eps=cfg.norm_eps, bias=cfg.bias) if cfg.norm == "layernorm"
            else nn.RMSNorm(width, eps=cfg.norm_eps))


class TwinBlock(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        C, D, F_ = cfg.n_embd, cfg.head_width, cfg.inner_width
        self.cfg, self.widths = cfg, [cfg.n_head * D, cfg.kv_heads * D, cfg.kv_heads * D]
        self.ln1, self.ln2 = normed(cfg, C), normed(cfg, C)
        self.qkv = nn.Linear(C, sum(self.widths), bias=cfg.bias or cfg.qkv_bias)
        self.proj = nn.Linear(cfg.n_head * D, C, bias=cfg.bias)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=cfg.norm_eps) for _ in range(2))
        if cfg.mlp == "gelu":
            self.fc1, self.fc2 = nn.Linear(C, F_, bias=cfg.bias), nn.Linear(F_, C, bias=cfg.bias)
        else:
            self.gate, self.up = nn.Linear(C, F_, bias=False), nn.Linear(C, F_, bias=False)
            self.down = nn.Linear(F_, C, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(self.ln1(x)).split(self.widths, -1)
        q, k, v = (t.view(B, T, -1, self.cfg.head_width).transpose(1, 2) for t in qkv)
        if self.cfg.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape != k.shape)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, -1))
        return x + self.mlp(self.ln2(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.cfg.mlp == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh" if self.cfg.gelu == "tanh" else "none"))


def rotate(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    # (B, H, T, D): pairs (2j, 2j+1) turned by an angle
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Twin(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd) if cfg.position == "learned" else None
        self.blocks = nn.ModuleList(TwinBlock(cfg) for _ in range(cfg.n_layer))
        self.lnf = normed(cfg, cfg.n_embd)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)

    def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        T = tokens.shape[1]
        positions = torch.arange(T, device=tokens.device)
        x = self.wte(tokens)
        cos = sin = None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            D = self.cfg.head_width
            frequencies = self.cfg.rope_theta ** (-torch.arange(0, D, 2, device=x.device).double() / D)
            angles = torch.outer(positions.double(), frequencies)
            cos, sin = angles.cos().float(), angles.sin().float()
        return x, cos, sin

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, cos, sin = self.embed(tokens)
        self.x = x
        if x.requires_grad:
            x.retain_grad()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.lnf(x), (self.head or self.wte).weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))

    def memo_names(self) -> dict[tuple[str, ...], torch.Tensor]:
        """{memo's parameter names: parameter}, where memo's q, k and v are one below the other."""
        names: dict[tuple[str, ...], Any] = {("wte",): self.wte.weight, ("lnf_w",): self.lnf.weight}
        names["lnf_b",] = getattr(self.lnf, "bias", None)
        if self.wpe is not None:
            names["wpe",] = self.wpe.weight
        if self.head is not None:
            names["head_w",] = self.head.weight
        for i, b in enumerate(self.blocks):
            for part, module in b.named_children():
                for kind in ("weight", "bias"):
                    mine = "qkv" if part == "qkv" else [part]
                    names[tuple(f"h.{i}.{n}_{kind[0]}" for n in mine)] = getattr(module, kind, None)
        return {k: v for k, v in names.items() if v is not None}

    def parts(self, names: tuple[str, ...], p: torch.Tensor) -> list:
        """`p`, cut as memo's parameters `names` are."""
        return list(p.split(self.blocks[0].widths)) if len(names) > 1 else [p]

    def worst_gradient(self, model: GPT) -> tuple[float, str]:
        """(largest relative error of a gradient of memo's `model` against the twin's, its names)."""
        grads = views(model.layout, model.grads)
        mine = ((torch.cat([grads[n] for n in names])[:len(p)], p.grad, ", ".join(names))
                for names, p in self.memo_names().items())
        return max((((got - want).norm() / want.norm()).item(), names) for got, want, names in mine)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> "Twin":
        """Copies memo's (name, tensor) pairs; memo's vocabulary padding is cut off."""
        with torch.no_grad():
            mine = {n: part for names, p in self.memo_names().items()
                    for n, part in zip(names, self.parts(names, p), strict=True)}
            for name, tensor in named_tensors:
                mine[name].copy_(tensor[:len(mine[name])])
        return self
