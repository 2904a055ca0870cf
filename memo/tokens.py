"""From documents to a dataset folder: train.bin, val.bin (token ids, nothing else),
tokenizer.json, meta.json.

The one home of writing that format; memo/batch.py reads it. meta.json comes last: a folder without one
is no dataset.
"""

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from memo.command import progress, python
from memo.errors import ConfigError, reason
from memo.files import fingerprint, parse_json, read_text
from memo.keys import check_value, option

DATA = Path(__file__).parents[1] / "data"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# of a document: the first of these that a vocabulary has
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VAL_EVERY = 20          # every 20th document goes to val.bin
PIECE_CHARS = 2**16     # long documents are encoded in pieces of this size to twice it, in parallel
# the time to train a tokenizer grows with the square of a word's length
LONG_WORD = re.compile(r"\S{1024}(?=\S)|\s{1024}(?=\s)")
# of a tokenizer that is trained here
VOCAB_SIZE: dict[str, Any] = dict(least=257, most=2**20,
                                  why="the trainer takes memory for each before it starts")
# read ahead: bounds the memory (about 70 bytes a character while encoding), and is a step of the progress
BATCH_CHARS = min(2**22, 4 * PIECE_CHARS * (os.cpu_count() or 1))
DATASET_FILES = ("train.bin", "val.bin", "tokenizer.json", "meta.json")
WORD_END = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


# --- tokenizers ---

def byte_level(model: models.BPE) -> Tokenizer:
    """A tokenizer like GPT-2's: bytes, cut into words, decoded without loss."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(documents: Iterable, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, <|endoftext|> among them. Errors: ConfigError:
    vocab_size is out of bounds."""
    check_value(option("vocab_size", int, **VOCAB_SIZE), vocab_size)
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[ENDS[0]],
                                  show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for document in documents:
            for piece, _ in document_pieces(document):
                read += len(piece)
                yield from short_words(piece)
    with bar_or_progress(lambda: f"training a tokenizer of {vocab_size:,} tokens on {read:,} characters"):
        tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


@contextmanager
def no_stderr() -> Iterator[None]:
    """Meanwhile there is no stderr: on errors that it did not foresee, the library prints more
    than it raises."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def tokenizer_of(text: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text. Errors: ValueError."""
    model = parse_json(text).get("model")
    # the library aborts on merges without such a prefix
    if isinstance(model, dict) and model.get("continuing_subword_prefix"):
        raise ValueError("continuing_subword_prefix must be empty")
    return Tokenizer.from_str(text)


def short_words(text: str) -> Iterator[str]:
    """The text in parts without the long words that training cannot bear."""
    ends = [0, *(word.end() for word in LONG_WORD.finditer(text)), len(text)]
    return (text[start:end] for start, end in itertools.pairwise(ends))


def bar_or_progress(text: Callable[[], str]) -> AbstractContextManager:
    """progress(text) where stderr is no terminal; a terminal has a moving bar."""
    return nullcontext() if sys.stderr.isatty() else progress(text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a folder with a tokenizer.json or with GPT-2's vocab.json and
    merges.txt; it neither cuts nor pads. Errors: ConfigError: there is none, or it cannot encode."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    vocab, merges = path / "vocab.json", path / "merges.txt"
    try:
        with no_stderr():
            if file.is_file():
                tokenizer = tokenizer_of(read_text(file))
            elif vocab.is_file() and merges.is_file():
                tokenizer = byte_level(models.BPE.from_file(str(vocab), str(merges)))
                tokenizer.add_special_tokens([t for t in ENDS if tokenizer.token_to_id(t) is not None])
            else:
                tokenizer = None
            if tokenizer:
                tokenizer.no_truncation()
                tokenizer.no_padding()
                tokenizer.decode(tokenizer.encode("a b\n").ids)
    except BaseException as e:  # tokenizers raises bare Exceptions, and panics of a class of their own
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":  # a signal, say
            raise
        raise ConfigError(f"tokenizer={path} cannot be read ({reason(e)}); give a tokenizer.json of "
                          "`tokenizers`") from None
    if tokenizer is None:
        raise ConfigError(f"tokenizer={path} must be a tokenizer.json, a folder with one or with vocab.json "
                          "and merges.txt, or train:<vocab>; try train:4096")
    return tokenizer


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the tokenizer's largest id."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocab_size(tokenizer: Tokenizer, where: str | Path, vocab_size: int) -> None:
    """Errors: ConfigError: the tokenizer of `where` has more tokens than its model. Fewer are usual."""
    if (n := tokenizer_vocab_size(tokenizer)) > vocab_size:
        raise ConfigError(f"{where}: the tokenizer has {n} tokens, must have at most the model's "
                          f"vocab_size={vocab_size}; put the model's own tokenizer.json there")


def end_of_document(tokenizer: Tokenizer) -> str:
    """The token that ends every document. Errors: ConfigError: the vocabulary has none of the known ones."""
    for token in ENDS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise ConfigError(f"tokenizer's vocabulary must hold a token that ends a document ({', '.join(ENDS)}); "
                      f"add {ENDS[0]} to it")


# --- documents to ids ---

def document_pieces(document: str | Iterable[str], chars: int = PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Yields (piece, whether it is the document's last), in order. A document is a str, or the strs that it
    consists of; an empty one has no piece. A piece ends behind `chars` characters between two words, since
    byte-level BPEs never merge across words. Where no word ends within as many more, the word is cut: its ids
    may differ from those of the whole."""
    rest = ""
    for part in [document] if isinstance(document, str) else document:
        rest += part
        start = 0
        while len(rest) - start > 2 * chars:
            cut = WORD_END.search(rest, start + chars, start + 2 * chars)
            end = cut.start() if cut else start + 2 * chars
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    while cut := WORD_END.search(rest, chars):
        yield rest[:cut.start()], False
        rest = rest[cut.start():]
    if rest:
        yield rest, True


def encodes_by_word(tokenizer: Tokenizer) -> bool:
    """Whether pieces have the same ids as their document. They do not where a tokenizer puts a space
    before each text."""
    words = ("a", " b.\n", "c", " =", " 1\n\n  'D'", " é\n", "7")
    ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in ("".join(words), *words)]
    return ids[0] == sum(ids[1:], [])


def batches(documents: Iterable, chars: int) -> Iterator[list[tuple[str, bool]]]:
    """Yields lists of pieces, about BATCH_CHARS long in all."""
    batch, size = [], 0
    for document in documents:
        for piece in document_pieces(document, chars):
            batch.append(piece)
            size += len(piece[0])
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    yield batch


def encode(documents: Iterable, tokenizer: Tokenizer,
           total_bytes: int | None) -> Iterator[tuple[list[int], bool]]:
    """Yields (ids, whether they end their document), in order, encoded on all cores. `total_bytes`, for the
    bar, may be None."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # a document that merely mentions <|endoftext|> does not end there
    end: Any = tokenizer.token_to_id(end_of_document(tokenizer))
    chars, done = PIECE_CHARS if encodes_by_word(tokenizer) else sys.maxsize // 4, 0
    of = f" of {total_bytes / 1e6:,.1f}" if total_bytes else ""
    with (tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokens", disable=None) as bar,
          bar_or_progress(lambda: f"encoding: {done / 1e6:,.1f}{of} MB")):
        for batch in batches(documents, chars):
            texts, lasts = zip(*batch, strict=True) if batch else ((), ())
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for text, last, encoding in zip(texts, lasts, encodings, strict=True):
                yield (encoding.ids + [end] if last else encoding.ids), last
                nbytes = len(text.encode(errors="replace"))
                done += nbytes
                bar.update(nbytes)


# --- the folder ---

def write_splits(folder: Path, encoded: Iterable[tuple[list[int], bool]],
                 dtype: np.dtype) -> dict[str, dict[str, int]]:
    """Writes whole documents to train.bin or val.bin: every 20th to val.bin; of fewer than 20 the last one;
    of a single one its last 20th -> {split: {tokens, documents}}. Errors: ConfigError: a split has fewer
    than two tokens."""
    counts = {split: dict(tokens=0, documents=0) for split in ("train", "val")}
    start, done = 0, 0  # where train's last document starts; documents so far
    with open(folder / "train.bin", "w+b") as train, open(folder / "val.bin", "wb") as val:
        for ids, last in encoded:
            split = "val" if done % VAL_EVERY == VAL_EVERY - 1 else "train"
            (val if split == "val" else train).write(np.array(ids, dtype))
            counts[split]["tokens"] += len(ids)
            if last:
                done += 1
                counts[split]["documents"] += 1
                previous, start = start, counts["train"]["tokens"]
        tokens = counts["train"]["tokens"]
        if 0 < done < VAL_EVERY:
            cut = previous if done > 1 else tokens - max(2, tokens // VAL_EVERY)
            if done == 1 and cut < 2:
                raise ConfigError(f"the only document has {tokens} tokens, a dataset needs 4; give a longer "
                                  "one")
            train.seek(cut * dtype.itemsize)
            shutil.copyfileobj(train, val)
            train.truncate(cut * dtype.itemsize)
            counts = dict(train=dict(tokens=cut, documents=max(1, done - 1)),
                          val=dict(tokens=tokens - cut, documents=1))
    return counts


def write_dataset(out_dir: str | Path, documents: Iterable, tokenizer: Tokenizer,
                  total_bytes: int | None = None) -> dict:
    """Writes the folder `out_dir` from documents as document_pieces() takes them, and returns its meta. Empty
    documents are left out.

    Whatever stops the writing, `out_dir` holds the dataset of before, or none. Errors: ConfigError: there are
    no documents, or the tokenizer has no end-of-document token.
    """
    began = time.monotonic()
    out_dir, partial = Path(out_dir), Path(out_dir) / ".partial"
    vocab_size = tokenizer_vocab_size(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    end = end_of_document(tokenizer)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        counts = write_splits(partial, encode(documents, tokenizer, total_bytes), DTYPES[dtype])
        if not counts["train"]["documents"]:
            raise ConfigError("the source holds no text; give one with at least one document that is not "
                              "empty")
        fingerprints = {split: fingerprint(partial / f"{split}.bin", whole=True) for split in counts}
        tokenizer.save(str(partial / "tokenizer.json"))
        sha256 = hashlib.sha256((partial / "tokenizer.json").read_bytes()).hexdigest()
        meta = dict(dtype=dtype, vocab_size=vocab_size, counts=counts, fingerprints=fingerprints,
                    tokenizer=dict(file="tokenizer.json", sha256=sha256, end_of_document=end))
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        (out_dir / "meta.json").unlink(missing_ok=True)
        for name in DATASET_FILES:
            os.replace(partial / name, out_dir / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sizes = ", ".join(f"{s} {c['tokens']:,} tokens of {c['documents']:,} "
                      "documents" for s, c in counts.items())
    print(f"{out_dir}: {sizes}; vocabulary {vocab_size:,} ({dtype}), {time.monotonic() - began:.1f} s")
    return meta


def train_with(out_dir: str | Path, meta: dict, block_size: int, *options: str) -> str:
    """The command that trains on a dataset, with sequences of `block_size` tokens or as many as there are."""
    folder = Path(out_dir).resolve()
    options += (f"--dataset={folder.relative_to(DATA) if folder.is_relative_to(DATA) else out_dir}",)
    if block_size >= (n := min(c["tokens"] for c in meta["counts"].values())):
        options += (f"--block_size={n - 1}",)
    return shlex.join([python(), "train.py", *options])
