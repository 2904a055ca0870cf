"""Checks what three steps of training read, give and leave: by numpy over train.bin, and AdamW in fp64."""

import importlib.util
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

import train
from memo import convert
from memo.config.config import Config
from memo.errors import ConfigError
from memo.verify.compare import place_of, relative
from memo.verify.reference import Reference
from memo.verify.steps import Read, Tensors

Batches = dict[tuple[str, int, int], torch.Tensor]  # {(split, step, micro step): (2, B, S)}


# --- data ---

def put_together(ranks: list[tuple[torch.Tensor, list[Read]]], S: int,
                 copies: int) -> tuple[Batches, list[str]]:
    """Puts the batches together that all ranks have read at their positions -> (whole ones, faults).
    `copies`: of ranks that read the same tokens."""
    whole, count, faults = Batches(), Batches(), list[str]()
    for rank, (at, reads) in enumerate(ranks):
        for key, batch in reads:
            whole.setdefault(key, torch.full((2, batch.shape[1], S), -1))
            there = whole[key][:, :, at]
            if ((there >= 0) & (there != batch)).any():
                faults.append(f"rank {rank} reads other tokens of step {key[1]} than one that has the same")
            whole[key][:, :, at] = batch
            count.setdefault(key, torch.zeros(S, dtype=torch.int64)).index_add_(0, at, torch.ones_like(at))
    for (split, step, micro), times in count.items():
        odd = (times != copies if split == "train" else times < copies).nonzero()
        if len(odd):
            place = odd[0].item()
            faults.append(f"position {place} of step {step}, micro batch {micro}, is read "
                          f"{times[place].item() / copies:g} times over all ranks, not once")
    return whole, faults


def not_in_file(whole: Batches, folder: Path) -> list[str]:
    """Looks each sequence up in the data's own file, its targets one token later."""
    faults = []
    for (split, step, _), batch in whole.items():
        raw = (folder / f"{split}.bin").read_bytes()
        for tokens, targets in zip(*batch.numpy().astype(np.uint16), strict=True):
            at = raw.find(tokens.tobytes())
            following = np.frombuffer(raw[at + 2:at + 2 + targets.nbytes], np.uint16)
            if at < 0:
                faults.append(f"step {step} reads tokens that do not follow each other in {split}.bin")
            elif not np.array_equal(following, targets):
                odd = int((following != targets[:len(following)]).argmax())
                faults.append(f"step {step}: the target at position {odd} is not the next token")
    return faults


# --- the optimizer ---

def scheduled(cfg: Config, it: int) -> float:
    """Computes the learning rate of a step: linear warmup, then a cosine."""
    end = cfg.lr_decay_iters or cfg.max_iters
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    turn = min(1.0, (it - cfg.warmup_iters) / max(1, end - cfg.warmup_iters)) * math.pi
    return cfg.min_lr + (cfg.learning_rate - cfg.min_lr) * (1 + math.cos(turn)) / 2


def odd_rates(cfg: Config) -> list[str]:
    """Compares the run's own schedule with scheduled()."""
    w, end = cfg.warmup_iters, cfg.lr_decay_iters or cfg.max_iters
    return [f"the learning rate of step {it} is {got:g}, not {want:g}"
            for it in sorted({0, max(0, w - 1), w, (w + end) // 2, end - 1, end, 2 * end})
            if abs((got := train.learning_rate(cfg, it)) - (want := scheduled(cfg, it))) > 1e-9 * want]


class AdamW:
    """Trains in fp64 by the gradients of a reference in fp32."""

    def __init__(self, cfg: Config, model: Reference) -> None:
        self.cfg, self.model, self.parameters = cfg, model, model.memo_names()
        self.weights = {name: p.detach().double() for name, p in self.parameters.items()}
        self.exp_avg, self.exp_avg_sq = ({name: torch.zeros_like(w) for name, w in self.weights.items()}
                                         for _ in range(2))

    def step(self, it: int, batches: list[torch.Tensor]) -> dict[str, float]:
        """Takes a step on the mean of (2, B, S) batches -> what a run shows of it."""
        cfg, lr = self.cfg, scheduled(self.cfg, it)
        self.model.zero_grad()
        loss = backward(self.model, batches)
        gradients = {name: g.double()[:len(self.weights[name])] for name, g in self.model.gradients().items()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        factor = min(1.0, cfg.grad_clip / (norm + 1e-6)) if cfg.grad_clip else 1.0
        for name, w in self.weights.items():
            g, m, v = gradients[name] * factor, self.exp_avg[name], self.exp_avg_sq[name]
            m += (1 - cfg.beta1) * (g - m)
            v += (1 - cfg.beta2) * (g * g - v)
            w *= 1 - lr * cfg.weight_decay * (w.dim() > 1)  # of matrices alone
            w -= lr * m / (1 - cfg.beta1**(it + 1)) / ((v / (1 - cfg.beta2**(it + 1))).sqrt() + 1e-8)
            self.parameters[name].detach().copy_(w)
        return dict(loss=loss, grad_norm=norm, lr=lr)

    def errors(self, states: Mapping[str, Tensors], start: Tensors) -> dict[str, tuple[float, str]]:
        """Finds {what: (the largest relative error, where)} of moments, and of how far weights have moved."""
        moved = {name: w - start[name][:len(w)].double() for name, w in self.weights.items()}
        wanted = dict(params=moved, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq)
        worst = {}
        for what, want in wanted.items():
            got = {name: t.double() - start[name] * (what == "params") for name, t in states[what].items()}
            # rows of the vocabulary's padding stay 0; without rotary positions biases of k learn noise
            noise = "none" if self.cfg.position == "rope" else "k_b"
            errors = [(math.inf if got[name][len(w):].any() else relative(got[name][:len(w)], w),
                       place_of(name)) for name, w in want.items() if not name.endswith(noise)]
            worst[what] = max(errors, key=lambda e: (math.isnan(e[0]), e[0]))
        return worst


def backward(model: Reference, batches: list[torch.Tensor]) -> float:
    """Computes the mean loss of (2, B, S) batches, and adds its gradients."""
    total = 0.0
    for batch in batches:
        loss = model(*batch) / len(batches)
        loss.backward()
        total += loss.item()
    return total


# --- saved and exported ---

def without_newest(source: Path, to: Path) -> None:
    """Copies a run's folder as it was before its last step."""
    shutil.copytree(source, to)
    shutil.rmtree(max((to / "ckpt").iterdir(), key=lambda folder: int(folder.name)))


def exported_loss(out: Path, folder: Path, batch: torch.Tensor) -> tuple[float | None, str]:
    """Exports a run to Hugging Face's format -> (the loss of that model, or None; why)."""
    try:
        convert.to_hf(out, folder)
    except ConfigError as e:
        return None, f"no model of Hugging Face is like it ({str(e).partition(';')[0]})"
    if importlib.util.find_spec("transformers") is None:
        return None, "transformers is not installed"
    from transformers import AutoModelForCausalLM
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        logits = net(batch[0]).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch[1].flatten()).item(), ""
