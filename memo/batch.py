"""Batches from a dataset folder: random windows whose place depends on the seed and the step only."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from memo.errors import ConfigError
from memo.tokens import DATA, DTYPES

SPLITS = ("train", "val")
FINGERPRINT_IDS = 2**16


class Data:
    """An opened dataset: `tokens` maps train and val to their memory-mapped ids; `vocab_size`, `meta`, `folder`."""

    def __init__(self, folder, meta, tokens):
        self.folder, self.meta, self.tokens, self.vocab_size = folder, meta, tokens, meta["vocab_size"]

    def offsets(self, split, step, micro_step, B, S, seed):
        """Where each of B sequences of S + 1 tokens starts: uniform over all windows of the split. They depend on the
        arguments only, so that resuming is free, and every layout of ranks sees the same."""
        rng = np.random.default_rng((seed, SPLITS.index(split), step, micro_step))
        return rng.integers(len(self.tokens[split]) - S, size=B).tolist()  # len - (S+1) + 1 windows

    def batch(self, split, step, micro_step, B, S, seed, ranges=None):
        """(tokens, targets): int64 (B, T) twice, the targets one token on, of the tokens in `ranges` [(first, end)] of each
        sequence; all S without. No others are read. Errors: a token id beyond the vocabulary.
        """
        ids, offsets = self.tokens[split], self.offsets(split, step, micro_step, B, S, seed)
        windows = []  # (B, end - first + 1)
        for first, end in ranges or [(0, S)]:
            windows.append(torch.from_numpy(np.stack([ids[o + first:o + end + 1] for o in offsets]).astype(np.int64)))
            if windows[-1].max() >= self.vocab_size:
                row, column = (windows[-1] >= self.vocab_size).nonzero()[0].tolist()
                raise ConfigError(f"{self.folder / split}.bin: token {windows[-1][row, column]} at position "
                                  f"{offsets[row] + first + column} must be below meta.json's vocab_size={self.vocab_size}; "
                                  f"{prepare_again(self.folder)}")
        return torch.cat([w[:, :-1] for w in windows], 1), torch.cat([w[:, 1:] for w in windows], 1)

    def fingerprint(self):
        """A hash of the dataset: of meta.json, and of each split's tokens, or of 256 stretches of them where it is large."""
        value = zlib.crc32(json.dumps(self.meta, sort_keys=True).encode())
        for ids in self.tokens.values():
            for start in range(0, len(ids), max(FINGERPRINT_IDS, len(ids) // 256)):
                value = zlib.crc32(ids[start:start + FINGERPRINT_IDS], value)
        return value


def to_device(t, device, pin):
    """`t`, from pageable host memory, on the device. With `pin` the host does not wait for the copy: the pinned memory in
    between is torch's, which keeps it for the next one and hands it out again when the copy's event has come."""
    return t.pin_memory().to(device, non_blocking=True) if pin and device.type == "cuda" else t.to(device)


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
