"""Batches from a dataset folder: random windows whose place depends on the seed and the step only."""

import json
from pathlib import Path

import numpy as np
import torch

from memo.config import ConfigError
from memo.tokens import DATA, DTYPES

SPLITS = ("train", "val")


class Data:
    """An opened dataset: `tokens` maps train and val to their memory-mapped ids; `vocab_size`, `meta`, `folder`."""

    def __init__(self, folder, meta, tokens):
        self.folder, self.meta, self.tokens, self.vocab_size = folder, meta, tokens, meta["vocab_size"]

    def batch(self, split, step, micro_step, B, S, seed):
        """(tokens, targets, offsets): int64 (B, S) twice, the targets one token on, and where each sequence starts.

        Offsets are uniform over all windows of the split and depend on the arguments only, so that resuming is free.
        Errors: a token id beyond the vocabulary.
        """
        ids = self.tokens[split]
        rng = np.random.default_rng((seed, SPLITS.index(split), step, micro_step))
        offsets = rng.integers(len(ids) - S, size=B).tolist()  # len - (S+1) + 1 windows
        windows = torch.from_numpy(np.stack([ids[o:o + S + 1] for o in offsets]).astype(np.int64))  # (B, S+1)
        if windows.max() >= self.vocab_size:
            row, column = (windows >= self.vocab_size).nonzero()[0].tolist()
            raise ConfigError(f"{self.folder / split}.bin: token {windows[row, column]} at position {offsets[row] + column} "
                              f"must be below meta.json's vocab_size={self.vocab_size}; {prepare_again(self.folder)}")
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), offsets


def prepare_again(folder):
    if folder == DATA / "stdlib":
        return "run python data/stdlib/prepare.py"
    return f"run python data/text/prepare.py --source=<your text> --tokenizer=<file or train:4096> --out_dir={folder}"


def read_meta(folder):
    """meta.json, checked. Errors: not there, or not what memo/tokens.py writes."""
    path = folder / "meta.json"
    if not path.is_file():
        raise ConfigError(f"dataset={folder} has no meta.json, so it is no dataset; {prepare_again(folder)}")
    try:
        meta = json.loads(path.read_text())
        counts = {split: meta["counts"][split]["tokens"] for split in SPLITS}
        dtype, vocab_size = meta["dtype"], meta["vocab_size"]
        if not all(type(n) is int for n in (vocab_size, *counts.values())):
            raise TypeError("vocab_size and the counts of tokens must be integers")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read ({type(e).__name__}: {e}); {prepare_again(folder)}") from None
    if dtype not in DTYPES:
        raise ConfigError(f"{path}: dtype={dtype!r} must be {' or '.join(DTYPES)}; {prepare_again(folder)}")
    return meta


def open_split(path, dtype, count):
    """The ids of one .bin, memory-mapped. Errors: not there, empty, or not `count` ids long."""
    size, expected = path.stat().st_size if path.is_file() else None, count * dtype.itemsize
    if not size or size != expected:
        found = "is missing" if size is None else "is empty" if size == 0 else "has another length"
        raise ConfigError(f"{path} {found}: {size or 0} bytes must be the {expected} of the {count} tokens that meta.json "
                          f"counts; {prepare_again(path.parent)}")
    return np.memmap(path, dtype=dtype, mode="r")


def open_dataset(dataset, block_size):
    """Opens `dataset`, a folder's name under data/ or a path, for sequences of `block_size` tokens -> Data.

    Errors: no dataset there, files that do not fit its meta.json, a split without one window of block_size + 1 tokens.
    """
    folder = DATA / dataset if (DATA / dataset).is_dir() else Path(dataset)
    if not folder.is_dir():
        command = prepare_again(DATA / dataset)
        raise ConfigError(f"dataset={dataset} must be a folder's name under data/ or a path, there is none; {command}")
    meta = read_meta(folder)
    dtype = DTYPES[meta["dtype"]]
    tokens = {split: open_split(folder / f"{split}.bin", dtype, meta["counts"][split]["tokens"]) for split in SPLITS}
    shortest = min(SPLITS, key=lambda split: len(tokens[split]))
    if block_size + 1 > (n := len(tokens[shortest])):
        raise ConfigError(f"block_size={block_size} + 1 must be <= {n}, the tokens of {folder / shortest}.bin; "
                          f"try --block_size={n - 1} or a dataset with more text")
    return Data(folder, meta, tokens)
