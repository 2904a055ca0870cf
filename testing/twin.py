"""An independent GPT in plain torch under autograd: the reference of gradient tests, a rival in bench/."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from memo.config import Config
from memo.flat import views
from model import GPT


class TwinBlock(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        C = cfg.n_embd
        self.cfg = cfg
        self.ln1, self.ln2 = (nn.LayerNorm(C, bias=cfg.bias) for _ in range(2))
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=cfg.bias), nn.Linear(C, C, bias=cfg.bias)
        self.fc1, self.fc2 = nn.Linear(C, 4 * C, bias=cfg.bias), nn.Linear(4 * C, C, bias=cfg.bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (t.view(B, T, self.cfg.n_head, -1).transpose(1, 2) for t in qkv)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        approximate = "tanh" if self.cfg.gelu == "tanh" else "none"
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate=approximate))


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
        self.lnf = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)

    def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        T = tokens.shape[1]
        positions = torch.arange(T, device=tokens.device)
        x = self.wte(tokens)
        cos = sin = None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            D = self.cfg.n_embd // self.cfg.n_head
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
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))

    def memo_names(self) -> dict[tuple[str, ...], torch.Tensor]:
        """{memo's parameter names: parameter}, where memo's q, k and v are one below the other."""
        names: dict[tuple[str, ...], torch.Tensor] = {("wte",): self.wte.weight, ("lnf_w",): self.lnf.weight,
                                                      ("lnf_b",): self.lnf.bias}
        if self.wpe is not None:
            names["wpe",] = self.wpe.weight
        for i, b in enumerate(self.blocks):
            for part in ("ln1", "qkv", "proj", "ln2", "fc1", "fc2"):
                for kind, p in (("w", getattr(b, part).weight), ("b", getattr(b, part).bias)):
                    names[tuple(f"h.{i}.{memo}_{kind}" for memo in (part if part == "qkv" else [part]))] = p
        return {k: v for k, v in names.items() if v is not None}

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
                    for n, part in zip(names, p.chunk(len(names)), strict=True)}
            for name, tensor in named_tensors:
                mine[name].copy_(tensor[:len(mine[name])])
        return self
