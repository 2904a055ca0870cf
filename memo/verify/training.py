"""Checks what three steps of training read, give and leave: by numpy over the dataset's files, and AdamW in
fp64."""

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch

import train
from memo import convert
from memo.config.config import Config
from memo.data.tokens import STARTS, WEIGHTS
from memo.errors import ConfigError
from memo.verify.compare import largest, place_of, relative
from memo.verify.reference import Reference
from memo.verify.steps import Read, Tensors

Batches = dict[tuple[str, int, int], torch.Tensor]  # {(split, step, micro step): (3, B, S)}: see Read


# --- data ---

def put_together(ranks: list[tuple[torch.Tensor, list[Read]]], S: int,
                 copies: int) -> tuple[Batches, list[str]]:
    """Puts the batches together that all ranks have read at their tokens -> (whole ones, faults). `copies`:
    of ranks that read the same tokens."""
    whole, faults, times = Batches(), list[str](), Counter[tuple]()
    for rank, (at, reads) in enumerate(ranks):
        for key, batch in reads:
            there = whole.setdefault(key, torch.full((*batch.shape[:2], S), -2))[:, :, at]
            if ((there > -2) & (there != batch)).any():
                faults.append(f"rank {rank} reads other tokens of step {key[1]} than one that has the same")
            whole[key][:, :, at] = batch
            times.update((*key, position) for position in at.tolist())
    for (split, step, micro), position in product(whole, range(S)):
        n = times[split, step, micro, position] / copies
        if n < 1 or (n > 1 and split == "train"):
            faults.append(f"position {position} of step {step}, micro batch {micro}, is read {n:g} times "
                          "over all ranks, not once")
    return whole, faults


def not_in_file(whole: Batches, folder: Path) -> list[str]:
    """Looks each sequence up in the data's own file, its targets one token later."""
    faults = []
    for (split, step, _), batch in whole.items():
        raw = (folder / f"{split}.bin").read_bytes()
        for tokens, targets, _ in batch.numpy().astype(np.uint16).swapaxes(0, 1):
            at = raw.find(tokens.tobytes())
            following = np.frombuffer(raw[at + 2:at + 2 + targets.nbytes], np.uint16)
            if at < 0:
                faults.append(f"step {step} reads tokens that do not follow each other in {split}.bin")
            elif not np.array_equal(following, targets):
                odd = int((following != targets[:len(following)]).argmax())
                faults.append(f"step {step}: the target at position {odd} is not the next token")
    return faults


def pieces_in_file(folder: Path, split: str, S: int, pack: str) -> Counter[bytes]:
    """Counts the pieces of documents of which an epoch consists: tokens, targets and positions of each."""
    ids, starts, weights = (np.fromfile(folder / name, kind).astype(np.int64) for name, kind in (
        (f"{split}.bin", np.uint16), (STARTS[split], np.int64), (WEIGHTS[split], np.uint8)))
    found: Counter[bytes] = Counter()
    targets: np.ndarray = np.append(np.where(weights, ids, -1)[1:], -1)
    for start, end in pairwise([*starts.tolist(), len(ids)]):
        targets[end - 1] = -1  # nothing is learned behind a document's last token
        first = start - start % S if pack == "in_order" else start
        for a in range(first, end, S):
            of = slice(max(a, start), min(a + S, end))
            found[np.stack((ids[of], targets[of], np.arange(of.stop - of.start))).tobytes()] += 1
    return found


def not_packed(whole: Batches, folder: Path, S: int, pack: str) -> list[str]:
    """Looks for the pieces of all sequences in the data's own files: each comes once before any comes again,
    and what a sequence lacks is padding."""
    every = {split: pieces_in_file(folder, split, S, pack) for split in STARTS}
    left, faults = {split: Counter[bytes]() for split in STARTS}, list[str]()
    for (split, step, _), batch in sorted(whole.items()):
        for sequence in batch.transpose(0, 1).numpy():
            left[split] = left[split] or every[split].copy()
            for piece in np.split(sequence, np.flatnonzero(sequence[2] == 0)[1:], 1):
                content = np.ascontiguousarray(piece).tobytes()
                if left[split][content] > 0:
                    left[split] -= Counter([content])
                elif content in every[split]:
                    faults.append(f"step {step} reads a document of {split}.bin again, before all others")
                elif piece[0].any() or (piece[1] != -1).any():
                    faults.append(f"step {step} reads {piece.shape[1]} tokens that are no document of "
                                  f"{split}.bin, or have other targets or positions there")
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


def mean_loss(model: Reference, batches: list[torch.Tensor]) -> float:
    """Computes the mean loss of all targets of (3, B, S) batches; adds its gradients, if they are wanted."""
    total, learned = 0.0, sum(int((batch[1] >= 0).sum()) for batch in batches)
    for batch in batches:
        loss = model(*batch) * ((batch[1] >= 0).sum() / learned)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total


class Trained:
    """Trains a reference, which has gradients and `loss` of the first step, by torch's AdamW, in fp64."""

    def __init__(self, cfg: Config, model: Reference, loss: float) -> None:
        self.cfg, self.model, self.loss, self.parameters = cfg, model, loss, model.memo_names()
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        groups = [dict(params=[p for p in model.parameters() if (p.dim() > 1) == matrices],
                       weight_decay=cfg.weight_decay * matrices) for matrices in (True, False)]
        self.adamw = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=1e-8)

    def step(self, it: int, batches: list[torch.Tensor]) -> dict[str, float]:
        """Takes a step on (3, B, S) batches -> what a run shows of it."""
        lr = scheduled(self.cfg, it)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if it > 0:
            self.model.zero_grad()
            self.loss = mean_loss(self.model, batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip or math.inf)
        self.adamw.step()
        return dict(loss=self.loss, grad_norm=norm.item(), lr=lr)

    def error(self, what: str, name: str, got: torch.Tensor) -> float:
        """Computes the relative error of a moment, or of how far weights have moved."""
        p, moved = self.parameters[name], what == "params"
        if got[len(p):].any():  # rows of the vocabulary's padding stay 0
            return math.inf
        ours = got[:len(p)].double() - self.start[name] * moved
        return relative(ours, p.detach() - self.start[name] if moved else self.adamw.state[p][what])

    def errors(self, states: Mapping[str, Tensors]) -> Iterator[tuple[str, float, str]]:
        """Yields (what, the largest relative error, where) of states."""
        # without rotary positions biases of k learn noise
        noise = "none" if self.cfg.position == "rope" else "k_b"
        for what, got in states.items():
            yield what, *largest((self.error(what, name, t), place_of(name)) for name, t in got.items()
                                 if not name.endswith(noise))


# --- saved and exported ---

def without_newest(source: Path, to: Path) -> None:
    """Copies a run's folder as it was before its last step."""
    shutil.copytree(source, to)
    shutil.rmtree(max((to / "ckpt").iterdir(), key=lambda folder: int(folder.name)))


def exported_loss(out: Path, folder: Path, tokens: torch.Tensor,
                  targets: torch.Tensor) -> tuple[float | None, str]:
    """Exports a run to Hugging Face's format -> (the loss of that model, or None; why)."""
    try:
        convert.to_hf(out, folder)
        from transformers import AutoModelForCausalLM
    except ConfigError as e:
        return None, f"no model of Hugging Face is like it ({str(e).partition(';')[0]})"
    except ImportError:
        return None, "transformers is not installed"
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        logits = net(tokens).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1).item(), ""
