"""Batches from a dataset folder: random windows whose places depend on the seed and the step only."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from memo.data.tokenizer import load_tokenizer
from memo.data.tokens import DATA, DTYPES
from memo.errors import ConfigError, DataError, reason
from memo.layer.tiles import RowOrder
from memo.system.files import STRETCH_BYTES, STRETCHES, Json, fingerprint, load_json, open_file

SPLITS = ("train", "val")


class Data:
    """Holds an open dataset: `tokens` and `fingerprints` map train and val, as "train data", to theirs."""

    def __init__(self, folder: Path, meta: dict, tokens: "dict[str, Ids]", fingerprints: dict) -> None:
        self.folder, self.meta, self.tokens, self.fingerprints = folder, meta, tokens, fingerprints
        self.vocab_size = meta["vocab_size"]

    def offsets(self, split: str, step: int, micro_step: int, B: int, S: int, seed: int) -> list[int]:
        """Draws where B sequences of S + 1 tokens start: by the arguments alone, in any layout of ranks."""
        rng = np.random.default_rng((seed, SPLITS.index(split), step, micro_step))
        return rng.integers(len(self.tokens[split]) - S, size=B).tolist()  # len - (S+1) + 1 windows

    def batch(self, split: str, step: int, micro_step: int, B: int, S: int, seed: int,
              order: RowOrder | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads (tokens, targets): int64 (B, T) each, the targets one token later. `order`: which tokens of
        each sequence are read, by default all S. Errors: DataError: an id beyond the vocabulary."""
        offsets = self.offsets(split, step, micro_step, B, S, seed)

        def read(first: int, end: int) -> torch.Tensor:
            parts = [self.tokens[split].checked(o + first, o + end + 1, self.vocab_size) for o in offsets]
            windows = torch.from_numpy(np.stack(parts).astype(np.int64))  # (B, end - first + 1)
            return torch.stack((windows[:, :-1], windows[:, 1:]))  # (2, B, end - first)
        tokens, targets = torch.cat((order or RowOrder([(S,)])).deal(read), 2)
        return tokens, targets


def to_device(t: torch.Tensor, device: torch.device, pin: bool) -> torch.Tensor:
    """Copies `t` to the device. With `pin` the host does not wait: torch has pinned memory of its own."""
    return t.pin_memory().to(device, non_blocking=True) if pin and device.type == "cuda" else t.to(device)


def prepare_again(folder: Path) -> str:
    if folder == DATA / "stdlib":
        return "run python data/stdlib/prepare.py"
    return ("run python data/text/prepare.py --source=<your text> --tokenizer=<file or train:4096> "
            f"--out_dir={folder}")


def read_meta(folder: Path, splits: Sequence[str] = SPLITS) -> dict:
    """Reads the meta.json of a folder with `splits`. Errors: ConfigError: it is not as it must be."""
    path, remedy = folder / "meta.json", prepare_again(folder)
    if not path.is_file():
        raise ConfigError(f"dataset={folder} has no meta.json, so it is no dataset; {remedy}")
    meta = load_json(path, remedy)

    def check(name: str, value: object, right: bool, rule: str) -> None:
        if not right:
            raise ConfigError(f"{path}: {name}={value!r:.100} must be {rule}; {remedy}")
    counts: Json = meta.get("counts")
    dtype, vocab_size = meta.get("dtype"), meta.get("vocab_size")
    check("dtype", dtype, isinstance(dtype, str) and dtype in DTYPES, " or ".join(DTYPES))
    check("vocab_size", vocab_size, type(vocab_size) is int and 1 <= vocab_size <= 2**32,
          "a whole number, 1 to 2**32")
    both = isinstance(counts, dict) and all(isinstance(counts.get(split), dict) for split in splits)
    check("counts", counts, both, "those of " + " and ".join(splits))
    for split in splits:
        tokens = counts[split].get("tokens")
        check(f"counts.{split}.tokens", tokens, type(tokens) is int and 0 <= tokens < 2**60, "a whole number")
    known = meta.setdefault("fingerprints", {})  # an older memo stored none
    check("fingerprints", known, isinstance(known, dict) and {*map(type, known.values())} <= {str}, "texts")
    tokenizer = meta.get("tokenizer", {})
    check("tokenizer", tokenizer, isinstance(tokenizer, dict), "an object")
    return meta


class Ids:
    """Reads the token ids of a .bin by slices: a mapped file, cut short, would kill the process."""

    def __init__(self, path: Path, dtype: np.dtype, count: int) -> None:
        self.path, self.dtype, self.count = path, dtype, count
        try:
            self.file = open(open_file(path), "rb", buffering=0)  # noqa: SIM115  as long as the Ids
        except OSError as e:
            raise self.error("is missing" if isinstance(e, FileNotFoundError) else reason(e), 0) from None
        size = os.fstat(self.file.fileno()).st_size
        if not size or size != count * dtype.itemsize:
            raise self.error("has another length" if size else "is empty", size)

    def error(self, what: str, nbytes: int) -> ConfigError:
        return ConfigError(f"{self.path} {what}: {nbytes} bytes must be the "
                           f"{self.count * self.dtype.itemsize} of the {self.count} tokens that meta.json "
                           f"counts; {prepare_again(self.path.parent)}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, end, _ = part.indices(self.count)
        at, nbytes, data = start * self.dtype.itemsize, max(0, end - start) * self.dtype.itemsize, b""
        while len(data) < nbytes:  # a read gives 2 GiB at most
            if not (more := os.pread(self.file.fileno(), nbytes - len(data), at + len(data))):
                raise self.error("was cut short", os.fstat(self.file.fileno()).st_size)
            data += more
        return np.frombuffer(data, self.dtype)

    def checked(self, start: int, end: int, vocab_size: int) -> np.ndarray:
        """Reads the ids from `start` to `end`. Errors: DataError: one is not below `vocab_size`."""
        ids = self[start:end]
        if len(ids) and ids.max() >= vocab_size:
            at = int((ids >= vocab_size).argmax())
            raise DataError(f"{self.path}: token {ids[at]} at position {start + at} must be below "
                            f"meta.json's vocab_size={vocab_size}; {prepare_again(self.path.parent)}")
        return ids


def open_dataset(dataset: str, block_size: int, splits: Sequence[str] = SPLITS, whole: bool = False) -> Data:
    """Opens `dataset`, a folder under data/ or a path. `whole`: checks every byte. Errors: ConfigError."""
    folder = DATA / dataset if (DATA / dataset).is_dir() else Path(dataset)
    if not folder.is_dir():
        raise ConfigError(f"dataset={dataset} must be a folder's name under data/ or a path, there is none; "
                          f"{prepare_again(DATA / dataset)}")
    meta = read_meta(folder, splits)
    dtype = DTYPES[meta["dtype"]]
    tokens = {split: Ids(folder / f"{split}.bin", dtype, meta["counts"][split]["tokens"]) for split in splits}
    shortest = min(splits, key=lambda split: len(tokens[split]))
    if block_size + 1 > (n := len(tokens[shortest])):
        raise ConfigError(f"block_size={block_size} + 1 must be <= {n}, the tokens of "
                          f"{folder / shortest}.bin; try --block_size={n - 1} or a dataset with more text")
    path, sha256 = folder / "tokenizer.json", meta.get("tokenizer", {}).get("sha256")
    if path.exists():
        load_tokenizer(path)
    if sha256 and not (path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256):
        raise ConfigError(f"{path} is not the tokenizer that made this dataset, which meta.json names by its "
                          f"sha256; put that one there, or {prepare_again(folder)}")
    known: dict[str, str] = {}
    for split, ids in tokens.items():
        digest = fingerprint(ids.path, whole)
        stored = known[f"{split} data"] = meta["fingerprints"].get(split, digest)
        if stored[:len(digest)] != digest:
            raise ConfigError(f"{ids.path} is not what was prepared: its fingerprint is {digest}, meta.json "
                              f"has {stored[:len(digest)]!r}; {prepare_again(folder)}")
        length = STRETCH_BYTES // dtype.itemsize
        for start in range(0, len(ids), length if whole else max(length, len(ids) // STRETCHES)):
            ids.checked(start, start + length, meta["vocab_size"])
    return Data(folder, meta, tokens, known)
