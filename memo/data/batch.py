"""Batches from a dataset folder: random windows whose places depend on the seed and the step only; or with
documents the sequences of a Packing (memo/data/packing.py), in an order that depends on the seed alone."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from memo.config.config import Config
from memo.config.formulas import squares_of
from memo.data.packing import Packing, Share, ends_of, packed_once
from memo.data.tokenizer import load_tokenizer
from memo.data.tokens import DATA, DATASET_FILES, DTYPES, STARTS, WEIGHTS
from memo.errors import ConfigError, DataError, reason
from memo.layer.tiles import UNLEARNED, Batch, Packed, RowOrder
from memo.system.files import STRETCH_BYTES, STRETCHES, Json, fingerprint, load_json, open_file

SPLITS = ("train", "val")


class Data:
    """Holds an open dataset: `tokens` and `fingerprints` map train and val, as "train data", to theirs.
    `packings`: of each split, with documents alone; `weights` too, where not every token is learned."""

    def __init__(self, folder: Path, meta: dict, tokens: "dict[str, Ids]", fingerprints: dict,
                 packings: dict[str, Packing], weights: "dict[str, Ids]") -> None:
        self.folder, self.meta, self.tokens, self.fingerprints = folder, meta, tokens, fingerprints
        self.packings, self.weights = packings, weights
        self.vocab_size = meta["vocab_size"]

    def offsets(self, split: str, step: int, micro_step: int, B: int, S: int, seed: int) -> list[int]:
        """Draws where B sequences of S + 1 tokens start: by the arguments alone, in any layout of ranks."""
        rng = np.random.default_rng((seed, SPLITS.index(split), step, micro_step))
        return rng.integers(len(self.tokens[split]) - S, size=B).tolist()  # len - (S+1) + 1 windows

    def batch(self, split: str, step: int, micro_step: int, B: int, S: int, seed: int,
              order: RowOrder | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads (tokens, targets) of B windows: int64 (B, T) each, the targets one token later. `order`:
        which tokens of each are read, by default all S. Errors: DataError: an id beyond the vocabulary."""
        offsets = self.offsets(split, step, micro_step, B, S, seed)

        def read(first: int, end: int) -> torch.Tensor:
            parts = [self.tokens[split].checked(o + first, o + end + 1, self.vocab_size) for o in offsets]
            windows = torch.from_numpy(np.stack(parts).astype(np.int64))  # (B, end - first + 1)
            return torch.stack((windows[:, :-1], windows[:, 1:]))  # (2, B, end - first)
        tokens, targets = torch.cat((order or RowOrder([(S,)])).deal(read), 2)
        return tokens, targets

    def draw(self, cfg: Config, split: str, step: int, micro_step: int, dp: int, order: RowOrder) -> Batch:
        """Reads a batch of a run on `dp` ranks: of step 0 in an evaluation."""
        B, S, seed = cfg.batch_size, cfg.block_size, cfg.seed
        if not cfg.documents:
            return Batch(*self.batch(split, step, micro_step, B, S, seed, order))
        return self.packed_batch(split, (step * cfg.micro_batches(dp) + micro_step) * B, B, seed, order)

    def first_tokens(self, cfg: Config, step: int, dp: int) -> list[int]:
        """Lists where the sequences of a step begin in the train split."""
        B, micros = cfg.batch_size, cfg.micro_batches(dp)
        if not cfg.documents:
            of = partial(self.offsets, "train", step, B=B, S=cfg.block_size, seed=cfg.seed)
            return [at for micro_step in range(micros) for at in of(micro_step)]
        packing = self.packings["train"]
        return [packing.pieces(k)[0][0] for k in packing.numbers(step * micros * B, micros * B, cfg.seed)]

    def share(self, cfg: Config, split: str, step: int, micro_batches: int) -> Share:
        """Counts what the sequences of a step of so many micro batches hold together."""
        count, S = cfg.batch_size * micro_batches, cfg.block_size
        if not cfg.documents:
            return Share(count * S, count * S, count * squares_of(cfg, S))
        return self.packings[split].share(step * count, count, cfg.seed)

    def packed_batch(self, split: str, first: int, B: int, seed: int, order: RowOrder) -> Batch:
        """Reads the batch of B packed sequences of a run, from number `first` on: positions and targets are
        those within documents. Padding is a document of its own, of token 0. Errors: as batch()."""
        packing = self.packings[split]
        every = [packing.pieces(k) for k in packing.numbers(first, B, seed)]

        def row(pieces: list[tuple[int, int, bool]], begin: int, end: int) -> np.ndarray:
            rows: np.ndarray = np.zeros((3, end - begin), np.int64)  # tokens, targets, positions
            at = 0
            rows[1] = UNLEARNED
            for first, length, ends in pieces:
                low, high = max(begin, at), min(end, at + length)
                if low < high:
                    where, start, to = slice(low - begin, high - begin), first + low - at, first + high - at
                    # the next token too: it is the last target, unless this one ends its document
                    ids = self.tokens[split].checked(start, to + 1, self.vocab_size)
                    rows[0, where], rows[2, where] = ids[:high - low], np.arange(low - at, high - at)
                    targets = rows[1, where][:high - low - (ends and high == at + length)]
                    targets[:] = ids[1:len(targets) + 1]
                    if split in self.weights:  # of tokens as targets
                        targets[self.weights[split][start + 1:start + 1 + len(targets)] == 0] = UNLEARNED
                at += length
            if at < end:  # padding
                rows[2, max(0, at - begin):] = np.arange(max(begin, at) - at, end - at)
            return rows

        def read(begin: int, end: int) -> torch.Tensor:
            return torch.from_numpy(np.stack([row(pieces, begin, end) for pieces in every], 1))  # (3, B, n)
        tokens, targets, positions = torch.cat(order.deal(read), 2)
        return Batch(tokens, targets, Packed(positions, tuple(map(ends_of, every))))


def prepare_again(folder: Path) -> str:
    if folder == DATA / "stdlib":
        return "run python data/stdlib/prepare.py"
    if (folder / WEIGHTS["train"]).exists():
        return ("run python data/chat/prepare.py --source=<your conversations> --tokenizer=hf:<folder> "
                f"--out_dir={folder}")
    source, out_dir = "<your text>", str(folder)
    if folder.is_dir() and not any((folder / name).exists() for name in DATASET_FILES):  # texts, it may be
        source, out_dir = out_dir, "<another folder>"
    return (f"run python data/text/prepare.py --source={source} --tokenizer=<file or train:4096> "
            f"--out_dir={out_dir}")


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
    weights = meta.setdefault("weights", None)
    check("weights", weights, weights in (None, WEIGHTS), f"{WEIGHTS}, or left out")
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


def read_starts(folder: Path, meta: dict, split: str) -> np.ndarray:
    """Reads where the documents of a split start. Errors: ConfigError: it does not say, or they do not
    ascend from 0."""
    names, counts = meta.get("documents"), meta["counts"][split]
    count, tokens = counts.get("documents"), counts["tokens"]
    remedy = f"{prepare_again(folder)}, or leave documents=true out"
    if not isinstance(names, dict) or names.get(split) != STARTS[split] or type(count) is not int:
        raise ConfigError(f"documents=true needs the starts of documents, which dataset={folder} lacks (an "
                          f"older memo wrote none); {remedy}")
    path = folder / STARTS[split]
    try:
        with open(open_file(path), "rb") as file:
            content = file.read(8 * count + 1)
    except OSError as e:
        raise ConfigError(f"{path}: {reason(e)}; {remedy}") from None
    if len(content) != 8 * count or not count:
        raise ConfigError(f"{path} must have 8 bytes for each of the {count} documents that meta.json "
                          f"counts; {remedy}")
    starts = np.frombuffer(content, "<i8").astype(np.int64)
    wrong = np.flatnonzero((np.diff(starts, prepend=-1) <= 0) | (starts >= tokens))
    if len(wrong) or starts[0]:
        at = int(wrong[0]) if len(wrong) else 0
        raise ConfigError(f"{path}: document {at} starts at token {starts[at]}, starts must ascend from 0 "
                          f"and lie below the {tokens} tokens; {remedy}")
    return starts


def check_file(path: Path, meta: dict, name: str, whole: bool) -> str:
    """Checks a file against its fingerprint, which meta.json calls `name` -> that, or where an older memo
    stored none, what it is now. Errors: ConfigError."""
    digest = fingerprint(path, whole)
    stored: str = meta["fingerprints"].get(name, digest)
    if stored[:len(digest)] != digest:
        raise ConfigError(f"{path} is not what was prepared: its fingerprint is {digest}, meta.json "
                          f"has {stored[:len(digest)]!r}; {prepare_again(path.parent)}")
    return stored


def learned_of(packing: Packing, weights: Ids) -> np.ndarray:
    """Counts the learned targets of each piece; no more than a stretch of the weights is in memory. Errors:
    ConfigError: a weight other than 0 and 1."""
    first: np.ndarray = packing.first + 1  # of a piece's targets
    edges = np.concatenate((first, first + packing.length - packing.ends))
    order = np.argsort(edges)
    points, below, total = edges[order], np.empty_like(edges), 0
    for start in range(0, len(weights), STRETCH_BYTES):
        part = weights[start:start + STRETCH_BYTES]
        if part.max() > 1:
            at = int((part > 1).argmax())
            raise ConfigError(f"{weights.path}: weight {part[at]} of token {start + at} must be 0 or 1; "
                              f"{prepare_again(weights.path.parent)}")
        sums = np.cumsum(part, dtype=np.int64)
        low, high = (int(np.searchsorted(points, at, "right")) for at in (start, start + len(part)))
        below[order[low:high]] = total + sums[points[low:high] - start - 1]
        total += int(sums[-1])
    return below[len(first):] - below[:len(first)]


def open_dataset(dataset: str, block_size: int, splits: Sequence[str] = SPLITS, whole: bool = False,
                 packs: str = "", window: tuple[int, float] = (0, 1.0)) -> Data:
    """Opens `dataset`, a folder under data/ or a path. `whole`: checks every byte. `packs`: how documents
    become sequences, see Packing; "": sequences are taken as they come. `window`: of the model. Errors:
    ConfigError."""
    folder = DATA / dataset if (DATA / dataset).is_dir() else Path(dataset)
    if not folder.is_dir():
        raise ConfigError(f"dataset={dataset} must be a folder's name under data/ or a path, there is none; "
                          f"{prepare_again(DATA / dataset)}")
    meta = read_meta(folder, splits)
    dtype = DTYPES[meta["dtype"]]
    tokens = {split: Ids(folder / f"{split}.bin", dtype, meta["counts"][split]["tokens"]) for split in splits}
    shortest = min(splits, key=lambda split: len(tokens[split]))
    if not packs and block_size + 1 > (n := len(tokens[shortest])):
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
        known[f"{split} data"] = check_file(ids.path, meta, split, whole)
        length = STRETCH_BYTES // dtype.itemsize
        for start in range(0, len(ids), length if whole else max(length, len(ids) // STRETCHES)):
            ids.checked(start, start + length, meta["vocab_size"])
    packings, weights = {}, {}
    for split, ids in tokens.items() if packs else ():
        starts, why = read_starts(folder, meta, split), "one token long"
        known[f"{split} documents"] = check_file(folder / STARTS[split], meta, STARTS[split], whole)
        packing = replace(packed_once(starts, len(ids), block_size, packs), window=window)
        if meta["weights"]:
            weights[split] = Ids(folder / WEIGHTS[split], np.dtype("u1"), len(ids))
            known[f"{split} weights"] = check_file(weights[split].path, meta, WEIGHTS[split], whole)
            packing = replace(packing, learned=learned_of(packing, weights[split]))
            why += " or without weights of 1"
        if not packing.learned.any():
            raise ConfigError(f"{folder / split}.bin has no token that is learned: each of its documents is "
                              f"{why}; {prepare_again(folder)}")
        packings[split] = packing
    return Data(folder, meta, tokens, known, packings, weights)
