"""A run of train.py at the cut size, driven step by step, and what its ranks hold, put together by code that
is not the run's own."""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

import train
from memo.config.config import Config, as_keys
from memo.config.layout import Layout
from memo.memory.flat import model_parameters
from memo.run.ending import train_and_save
from memo.run.state import Run
from memo.system.axis import Axis
from memo.system.command import StopSignal
from memo.system.launch import Launch

LARGE = 8.0  # times as large as at first: attention chooses then, and gradients of q and k are above noise
Tensors = dict[str, torch.Tensor]
Part = tuple[str, int, int, torch.Tensor]  # name, tp rank, first element of that rank's part, elements


class Read(NamedTuple):
    """Holds a batch that a run has read: (split, step, micro step), (2, B, T) tokens and targets."""

    key: tuple[str, int, int]
    batch: torch.Tensor


def make_data(folder: Path, vocab_size: int, tokens: int, seed: int) -> None:
    """Writes a dataset of random tokens."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        rng.integers(vocab_size, size=tokens).astype(np.uint16).tofile(folder / f"{split}.bin")
    counts = {split: dict(tokens=tokens) for split in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps(dict(dtype="uint16", vocab_size=vocab_size, counts=counts)))


def weights(cfg: Layout) -> Tensors:
    """Makes weights that tell each parameter's part in the loss: no bias is zero, no gain one."""
    g, made = torch.Generator().manual_seed(cfg.seed), Tensors()
    for name, p in model_parameters(cfg).items():
        w = torch.randn(p.shape, generator=g)
        if len(p.shape) == 1:
            made[name] = 0.2 * w + name.endswith("_w")
        else:
            made[name] = 0.02 * (LARGE if name.endswith(("wte", "wpe", "q_w", "k_w")) else 1.0) * w
    for name in {"wte", "head_w"} & set(made):
        made[name][cfg.vocab_size:] = 0.0
    return made


def of_stage(values: Tensors, cfg: Layout, *_: object) -> list[tuple[str, torch.Tensor]]:
    return [(name, values[name]) for name in model_parameters(cfg)]


class Opened:
    """Holds a Run of train.set_up(), which starts from `values` or, without, from its own weights, and a
    record of what it reads."""

    def __init__(self, cfg: Config, out: Path, host: Axis, values: Tensors | None) -> None:
        argv = [f"--{name}={value}" for name, value in as_keys(replace(cfg, out_dir=str(out))).items()]
        launch = Launch(host.rank, host.size, host.rank, host.size)
        starts = patch("train.initial_weights", partial(of_stage, values)) if values else nullcontext()
        with starts, patch("memo.run.report.draw_picture"):  # which would take seconds
            self.run: Run = train.set_up([*argv, "--force"], launch, host)
        self.values, self.reads, read = values, list[Read](), self.run.data.batch

        def batch(*asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
            pair = read(*asked)
            self.reads.append(Read(asked[:3], torch.stack(pair)))
            return pair
        vars(self.run.data)["batch"] = batch

    def step(self, it: int = 0) -> tuple[float, float]:
        """Takes a step up to its gradients -> (loss, their norm)."""
        loss, norm = train.forward_backward(self.run, it), self.run.optimizer.clip(0.0)
        self.run.model.swap.streams.offload.synchronize()
        if self.run.optimizer.staging is not None:  # sums over tp ranks follow the others to the host
            self.run.optimizer.bring_scale()
        return loss.item(), norm.item()

    def update(self, lr: float) -> None:
        """Takes the optimizer's step, to its end where that is not beside the next forward."""
        self.run.optimizer.step(lr)

    def restart(self) -> None:
        """Goes back to the weights of the start, as if no step had been taken."""
        optimizer = self.run.optimizer
        optimizer.pieces()  # behind the last step
        for state in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps):
            state.zero_()
        optimizer.load(of_stage(self.values or {}, self.run.model.cfg))
        optimizer.publish()

    def train(self) -> list[dict[str, Any]]:
        """Takes the steps of the run and saves -> its metrics."""
        self.reads.clear()
        with patch("memo.run.report.draw_picture"):
            train_and_save(self.run, train.train, StopSignal(quiet=True, alone=self.run.mesh.host.size == 1))
        for logger in self.run.loggers:
            logger.close()
        path = self.run.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if self.run.speaks else []

    def parts(self, of: Callable[[int], torch.Tensor]) -> list[Part]:
        """Lists this rank's Parts of a state, where of(bucket) is flat, what the rank owns of a bucket."""
        found, rank = list[Part](), self.run.mesh.weights.rank
        for name, p in self.run.model.layout.items():
            own = self.run.optimizer.own[p.bucket]
            first, end = max(p.offset, own.start), min(p.end, own.end)
            if first < end and self.reads_it(name):
                flat = of(p.bucket)[first - own.start:end - own.start]
                found.append((name, rank, first - p.offset, flat.float().cpu().clone()))
        return found

    def reads_it(self, name: str) -> bool:
        """Says whether this stage uses a parameter that it holds: the last one has positions for nothing."""
        return name != "wpe" or self.run.model.cfg.has_embedding

    def gradients(self) -> list[Part]:
        return self.parts(self.run.optimizer.sums.__getitem__)

    def states(self) -> dict[str, list[Part]]:
        optimizer = self.run.optimizer
        optimizer.pieces()  # behind the last step
        return {what: self.parts(lambda k, flat=flat: flat[optimizer.own[k].shard])  # type: ignore[misc]
                for what, flat in optimizer.states().items()}

    def copies(self) -> dict[tuple[str, int], torch.Tensor]:
        """Finds {(name, tp rank, or 0 where all have the same): this rank's parameters} that stay here."""
        model, held = self.run.model, {}
        for name, p in model.layout.items():
            if p.bucket not in model.coming and self.reads_it(name):
                begin, rank = model.buckets[p.bucket][0], model.mesh.weights.rank
                part = model.bucket_params[p.bucket][p.offset - begin:p.end - begin]
                held[name, 0 if p.whole.split_dim is None else rank] = part.float().cpu().clone()
        return held

    def positions(self) -> torch.Tensor:
        """Finds the positions by which the rows of one sequence are rotated or embedded."""
        return torch.cat([t[:len(t) // self.run.cfg.batch_size].cpu() for t in self.run.model.positions])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares fp32 tensors, of which NaN equals itself."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def together(cfg: Layout, tp: int, ranks: Iterable[list[Part]]) -> Tensors:
    """Puts whole tensors together of all ranks' Parts. Errors: ValueError: a part lacks, or ranks that hold
    the same differ."""
    whole, seen, described = Tensors(), Tensors(), model_parameters(cfg)
    for name, p in described.items():
        whole[name], seen[name] = (torch.zeros(tp, prod(p.local_shape(tp))) for _ in range(2))
    for rank, parts in enumerate(ranks):
        for name, tp_rank, first, values in parts:
            place, known = (of[name][tp_rank, first:first + len(values)] for of in (whole, seen))
            if not same_bits(place[known > 0], values[known > 0]):
                raise ValueError(f"{name} is not the same on rank {rank} as on another that holds it")
            place.copy_(values)
            known.fill_(1)
    for name, p in described.items():
        if not seen[name].all():
            raise ValueError(f"{name} is not on any rank, or not all of it")
        if p.split_dim is None and not same_bits(whole[name], whole[name][:1].expand(tp, -1)):
            raise ValueError(f"{name}, which all tp ranks hold, is not the same on them")
        parts_ = [part.view(p.local_shape(tp)) for part in whole[name]]
        whole[name] = parts_[0] if p.split_dim is None else torch.cat(parts_, p.split_dim)
    return whole
