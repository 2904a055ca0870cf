"""A run of train.py at the cut size, driven step by step, and what its ranks hold, put together by code that
is not the run's own."""

import json
from collections.abc import Callable, Iterable, Sequence
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
from memo.config.rope import parse_scaling, scaled
from memo.data.tokens import STARTS, WEIGHTS
from memo.layer.tiles import Batch
from memo.memory.flat import model_parameters
from memo.memory.parameters import bucket_views
from memo.run.ending import complete
from memo.run.loggers import read_metrics
from memo.run.state import Run
from memo.system.axis import Axis
from memo.system.launch import Launch

LARGE = 8.0  # times as large as at first: attention chooses then, and gradients of q and k are above noise
NO_PICTURE = patch("memo.run.report.draw_picture")  # which would take seconds
Tensors = dict[str, torch.Tensor]
Part = tuple[str, int, int, torch.Tensor]  # name, tp rank, first element of that rank's part, elements


class Read(NamedTuple):
    """Holds a batch that a run has read: (split, step, micro step), (3, B, T) tokens, targets, positions."""

    key: tuple[str, int, int]
    batch: torch.Tensor


def document_lengths(S: int, sequences: int, rng: np.random.Generator) -> list[int]:
    """Draws the lengths of documents that fill so many sequences of S tokens, but for padding: every other
    sequence begins with a long one; all have short ones, some of a token; of many one is longer than S."""
    lengths = [S + S // 4] * (sequences > 3)
    for k in range(sequences):
        left = S - S // 32 - 1
        if k % 2 == 0:
            lengths.append(int(rng.integers(S // 2 + 1, S // 2 + S // 5 + 2)))
            left -= lengths[-1]
        while left > 0:
            lengths += [int(rng.integers(1, min(left, S // 8 + 1) + 1)), 1]
            left -= lengths[-2] + 1
    return lengths


def make_data(folder: Path, cfg: Config, sequences: int) -> None:
    """Writes a dataset of random tokens other than 0, which is padding's. With documents they fill so many
    sequences, and one token in four is not learned."""
    folder.mkdir()
    rng, counts = np.random.default_rng(cfg.seed), {}
    for split in STARTS:
        lengths = [4 * cfg.block_size + 2**14]
        if cfg.documents:
            lengths = document_lengths(cfg.block_size, sequences, rng)
            (np.cumsum(lengths) - lengths).astype("<i8").tofile(folder / STARTS[split])
            (rng.random(sum(lengths)) < 0.75).tofile(folder / WEIGHTS[split])
        ids = rng.integers(1, cfg.vocab_size, size=sum(lengths))
        ids.astype(np.uint16).tofile(folder / f"{split}.bin")
        counts[split] = dict(tokens=len(ids), documents=len(lengths))
    meta = dict(dtype="uint16", vocab_size=cfg.vocab_size, counts=counts)
    meta |= dict(documents=STARTS, weights=WEIGHTS) if cfg.documents else {}
    (folder / "meta.json").write_text(json.dumps(meta))


def weights(cfg: Layout) -> Tensors:
    """Makes weights that tell each parameter's part in the loss: no bias is zero, no gain one. Scores are as
    large whatever rope_scaling multiplies them by: a softmax that is too sharp loses digits of fp32."""
    g, made = torch.Generator().manual_seed(cfg.seed), Tensors()
    _, factor = scaled(cfg.rotary_width, cfg.rope_theta, parse_scaling(cfg.rope_scaling), cfg.block_size)
    large = {"wte": LARGE, "wpe": LARGE, "q_w": LARGE / factor, "k_w": LARGE / factor}
    for name, p in model_parameters(cfg).items():
        w = torch.randn(p.shape, generator=g)
        if len(p.shape) == 1:
            made[name] = 0.2 * w + name.endswith("_w")
        else:
            made[name] = 0.02 * large.get(name.rpartition(".")[2], 1.0) * w
    for name in {"wte", "head_w"} & set(made):
        made[name][cfg.vocab_size:] = 0.0
    return made


def of_stage(values: Tensors, cfg: Layout, *_: object) -> list[tuple[str, torch.Tensor]]:
    return [(name, values[name]) for name in model_parameters(cfg)]


class Opened:
    """Holds a Run of train.set_up(), which starts from `values`, and a record of what it reads. `estimated`:
    with the run's own estimate, which takes seconds."""

    def __init__(self, cfg: Config, out: Path, host: Axis, values: Tensors, estimated: bool) -> None:
        argv = [f"--{name}={value}" for name, value in as_keys(replace(cfg, out_dir=str(out))).items()]
        launch = Launch(host.rank, host.size, host.rank, host.size)
        no_estimate = nullcontext() if estimated else patch("memo.run.prepare.expect", return_value=None)
        with patch("train.initial_weights", partial(of_stage, values)), NO_PICTURE, no_estimate:
            self.run: Run = train.set_up([*argv, "--force"], launch, host)
        self.values, self.reads, draw = values, list[Read](), self.run.data.draw
        self.ends: dict[tuple[str, int, int], Sequence[Sequence[int]]] = {}  # of documents, of each batch

        def drawn(cfg: Config, *asked: Any) -> Batch:
            tokens, targets, packed = batch = draw(cfg, *asked)
            positions = packed.positions if packed else self.tokens().expand_as(tokens)
            self.ends[asked[:3]] = packed.ends if packed else [(cfg.block_size,)] * cfg.batch_size
            self.reads.append(Read(asked[:3], torch.stack((tokens, targets, positions))))
            return batch
        vars(self.run.data)["draw"] = drawn

    def tokens(self) -> torch.Tensor:
        """Finds which tokens of a sequence this rank's rows are."""
        return torch.cat(self.run.order.positions())

    def step(self, it: int = 0) -> tuple[float, float]:
        """Takes a step up to its gradients -> (loss, their norm)."""
        loss, norm = train.forward_backward(self.run, it), self.run.optimizer.clip(0.0)
        self.run.model.swap.streams.offload.synchronize()
        if self.run.optimizer.staging is not None:  # sums over tp ranks follow the others to the host
            self.run.optimizer.bring_scale()
        return loss.item(), norm.item()

    def restart(self) -> None:
        """Ends a step, and goes back to the weights of the start, as if none had been taken."""
        optimizer = self.run.optimizer
        optimizer.step(0.0)
        optimizer.pieces()  # behind the last step
        for state in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps):
            state.zero_()
        optimizer.load(of_stage(self.values, self.run.model.cfg))
        optimizer.publish()

    def train(self) -> list[dict[str, Any]]:
        """Takes the steps of the run and saves -> its metrics."""
        self.reads.clear()
        with NO_PICTURE:
            complete(self.run, train.train)
        return read_metrics(self.run.out / "metrics.jsonl") if self.run.speaks else []

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
        """Finds {(name, which part this rank has): this rank's parameters} that stay here."""
        model, tp = self.run.model, self.run.mesh.weights
        held = bucket_views(model.layout, model.buckets, model.bucket_params)
        return {(name, tp.rank // p.whole.copies(tp.size)): held[name].float().cpu().flatten().clone()
                for name, p in model.layout.items() if p.bucket not in model.coming and self.reads_it(name)}


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
        held = whole[name].view(-1, p.copies(tp), *p.local_shape(tp))
        if not same_bits(held, held[:, :1].expand_as(held).contiguous()):
            raise ValueError(f"{name}, of which several tp ranks hold the same, is not the same on them")
        whole[name] = held[0, 0] if p.split_dim is None else torch.cat([*held[:, 0]], p.split_dim)
    return whole
