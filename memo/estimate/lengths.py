"""An estimate by the lengths of documents: those of a dataset, or of a list, packed as a run packs them.

Seconds are modelled of MOST_BATCHES micro batches of an epoch, from the one whose documents have the fewest
pairs of a query and a key that meet to that with the most; those of all others lie between.
"""

import os
import re
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import fsum
from types import ModuleType

import numpy as np

from memo.config.config import Config
from memo.config.formulas import mfu, model_flops, percent, squares_of
from memo.config.keys import counted
from memo.data.packing import Packing, Share, ends_of, pack
from memo.errors import ConfigError
from memo.estimate.arena import ROOT
from memo.estimate.budget import Estimate
from memo.estimate.pipeline_seconds import embedding_s, head_s, step_s
from memo.estimate.roofline import Sample
from memo.estimate.unit_seconds import ModelledRates, modelled_rates
from memo.system.files import JsonObject

MOST_BATCHES = 16
MOST_PIECES = 10**7  # of a list
LENGTH = re.compile("([0-9]{1,15})(?:x([0-9]{1,15}))?")
LIST = re.compile("[-+0-9,]|[^/]*,")  # how what is meant to be one begins


@dataclass(eq=False)
class Documents:
    """Packs documents for any block_size: those of the train split of a dataset, or of a list of lengths, as
    in 300000,500x4000. Errors: ConfigError. `packing`: the last one; `samples`: by block_size, batch_size."""

    text: str
    packing: Packing | None = None
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)

    def packed(self, cfg: Config) -> Packing:
        """Packs them into sequences of a config's block_size."""
        if not self.packing or cfg.block_size != self.packing.S:
            self.packing = read_lengths(self.text, cfg)
        return self.packing

    def __call__(self, cfg: Config) -> Sample:
        """Describes the micro batch that stands for all, by which alpha is chosen."""
        shape = cfg.block_size, cfg.batch_size
        if shape not in self.samples:
            packing = self.packed(cfg)
            self.samples[shape] = sample_of(packing, packing.typical(cfg.batch_size, cfg.seed), cfg)
        return self.samples[shape]


def read_lengths(text: str, cfg: Config) -> Packing:
    """Packs the documents that a text names, or whose lengths it lists. Errors: ConfigError."""
    items = text.split(",")
    if not all(map(LENGTH.fullmatch, items)) and (folder_of(text) or not LIST.match(text)):
        return packed_dataset(text, cfg)
    counts = list[tuple[int, int]]()
    for item in items:
        n, times = (int(k or 1) for k in found.groups()) if (found := LENGTH.fullmatch(item)) else (0, 0)
        if not n * times:
            raise ConfigError(f"--lengths={text:.60}: {item!r:.40} must be a length, a whole number from 1 "
                              "on, alone or with how many documents have it, as in 500x4000: 4,000 documents "
                              "of 500 tokens; mend it, or give a dataset's folder")
        counts.append((n, times))
    pieces = sum(-(-n // cfg.block_size) * times for n, times in counts)
    if pieces > MOST_PIECES:
        raise ConfigError(f"--lengths={text:.60} must be of at most {MOST_PIECES:,} pieces of block_size="
                          f"{cfg.block_size} in all; leave some out")
    if all(n == 1 for n, _ in counts):
        raise ConfigError(f"--lengths={text:.60} has no token that is learned: each document is one token "
                          "long; give longer ones")
    lengths = np.repeat(*(np.array(column) for column in zip(*counts, strict=True)))
    packing = pack(np.cumsum(lengths) - lengths, int(lengths.sum()), cfg.block_size, cfg.pack)
    return replace(packing, window=cfg.windows)


def folder_of(text: str) -> str | None:
    """Finds the folder that a text names, under data/ or as a path."""
    return next(filter(os.path.isdir, (str(ROOT / "data" / text), text)), None)


def packed_dataset(text: str, cfg: Config) -> Packing:
    """Packs the documents of a dataset's train split. Errors: ConfigError."""
    rule = f"--lengths={text:.60} must be a dataset's folder, or lengths as in 300000,500x4000"
    if not folder_of(text):
        raise ConfigError(f"{rule}; it is {'a file' if os.path.exists(text) else 'neither'}")
    batch: ModuleType = import_module("memo.data.batch")  # which needs torch
    try:
        data = batch.open_dataset(text, cfg.block_size, ("train",), packs=cfg.pack, window=cfg.windows)
    except ConfigError as e:
        raise ConfigError(f"{rule}: {e}") from None
    packing: Packing = data.packings["train"]
    return packing


def sample_of(packing: Packing, number: int, cfg: Config) -> Sample:
    """Describes a micro batch of a run by its number."""
    numbers = packing.numbers(number * cfg.batch_size, cfg.batch_size, cfg.seed)
    ends = tuple(ends_of(packing.pieces(k)) for k in numbers)
    return Sample(ends, Share(*packing.shares[numbers].sum(0).tolist()))


def imbalance_of_stages(got: Estimate, layer: ModelledRates) -> float:
    """Divides the seconds of the stage that computes longest by those of the mean."""
    cfg = got.decided
    seconds = [depth * (layer.forward_s + layer.backward_s) for depth in cfg.depths]
    seconds[0] += embedding_s(cfg, got.machine, got.itemsize)
    seconds[-1] += head_s(cfg, got.machine, got.itemsize, layer.learned)
    return max(seconds) * cfg.pp / fsum(seconds)


def by_lengths(got: Estimate, packing: Packing) -> JsonObject:
    """Counts what the steps of an epoch take; {} where no speeds are known. Imbalances: the slowest over the
    mean."""
    cfg, micros, world = got.decided, got.decided.micro_batches(got.dp), got.world
    if not got.seconds:
        return {}
    shares = packing.batches(cfg.batch_size, cfg.seed)
    squares = shares[:, 2]
    order = np.argsort(squares, kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, MOST_BATCHES).round().astype(int))
    beside_s = got.seconds["gradients and parameters"] + got.seconds["optimizer"]
    stages = [replace(stage, totals=None) for stage in got.stages]  # of the typical batch
    passes_s, imbalances = list[float](), list[float]()
    for number in order[chosen].tolist():
        layer = modelled_rates(cfg, got.machine, got.itemsize, partial(sample_of, packing, number))
        assert layer is not None  # speeds are known
        parts = step_s(stages, got.machine, world, got.itemsize, layer)
        passes_s.append((parts["step"] - parts["gradients and parameters"] - parts["optimizer"])
                        * got.dp / micros)
        imbalances.append(layer.imbalance)
    each_s = np.interp(squares, squares[order[chosen]], passes_s)
    steps = max(1, len(each_s) // micros)
    of_replicas = np.resize(each_s, steps * micros).reshape(steps, micros // got.dp, got.dp).sum(1)
    steps_s = of_replicas.max(1) + beside_s
    share = Share(*np.resize(shares, (steps * micros, 3)).sum(0).tolist())
    peak = got.machine.peak_flops_per_s if got.itemsize == 2 else None
    rate = share.tokens / (world * float(steps_s.sum()))
    assert got.layer is not None
    return dict(sequences=len(packing), documents=int(packing.ends.sum()), tokens=int(packing.length.sum()),
                pairs=float(packing.shares[:, 2].mean() / squares_of(cfg, packing.S)), steps=steps,
                mean_step=float(steps_s.mean()), slowest_step=float(steps_s.max()),
                slowest=int(steps_s.argmax()), tgs=rate,
                mfu=mfu(cfg, rate, peak, model_flops(cfg, *share) / share.tokens),
                imbalance=dict(ranks=float(np.mean(imbalances)),
                               replicas=float((of_replicas.max(1) / of_replicas.mean(1)).mean()),
                               stages=imbalance_of_stages(got, got.layer)))


def lines_of(found: JsonObject, S: int) -> list[str]:
    """Writes what by_lengths() found."""
    if not found:
        return []
    room, among = found["sequences"] * S, found["imbalance"]
    tokens, documents, sequences = (counted(found[f"{what}s"], what)
                                    for what in ("token", "document", "sequence"))
    return [f"documents   {tokens} of {documents} in {sequences}, {1 - found['tokens'] / room:.1%} padding: "
            f"{found['pairs']:.1%} of the pairs of one document a sequence",
            f"            step {found['mean_step']:.4g} s in the mean of {found['steps']:,}, the slowest "
            f"{found['slowest_step']:.4g} s (step {found['slowest']:,}); MFU {percent(found['mfu'])}, "
            f"TGS {found['tgs']:,.1f}",
            f"            the slowest over the mean: ranks that share tokens {among['ranks']:.2f}, replicas "
            f"{among['replicas']:.2f}, stages {among['stages']:.2f}"]
