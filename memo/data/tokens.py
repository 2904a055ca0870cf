"""From documents to a dataset folder: train.bin, val.bin (token ids only), where documents start, of
conversations which tokens are learned, tokenizer.json, and at last meta.json: a folder without one is no
dataset. memo/data/batch.py reads that format."""

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm

from memo.config.keys import check_value, counted, option
from memo.data.tokenizer import ENDS, byte_level, encode_text, end_of_document, refusing, tokenizer_vocab_size
from memo.errors import ConfigError
from memo.system.command import progress, python
from memo.system.files import NEW, JsonObject, check_folder, fingerprint, load_json, sync_folder

DATA = Path(__file__).parents[2] / "data"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
VAL_EVERY = 20          # every 20th document goes to val.bin
MOST_PIECE = 2**21      # characters: encoding takes 70 to 500 bytes for each
PIECE_CHARS = 2**16     # long documents are encoded in pieces of this size to twice it, in parallel
# the time to train a tokenizer grows with the square of a word's length
LONG_WORD = re.compile(r"\S{1024}(?=\S)|\s{1024}(?=\s)")
VOCAB_SIZE: JsonObject = dict(least=257, most=2**20, why="the trainer takes memory for each before it starts")
# read ahead: bounds the memory (70 to 500 bytes a character while encoding), and is a step of the progress
BATCH_CHARS = min(MOST_PIECE, 4 * PIECE_CHARS * (os.cpu_count() or 1))
STARTS = {split: f"{split}.docs" for split in ("train", "val")}  # the first token of each document, int64
WEIGHTS = {split: f"{split}.weights" for split in STARTS}  # a byte a token, 1 where it is learned as a target
DATASET_FILES = ("train.bin", "val.bin", *STARTS.values(), *WEIGHTS.values(), "tokenizer.json", "meta.json")
# where a document may be cut, the likeliest first; a space goes where the tokenizer puts one before each text
CUTS = tuple(map(re.compile, (
    r"(?<=\w)(?= \w)", r"(?<=\S\n)(?=\S)", r"(?<=\S)(?=\s)", r"(?<=\S) (?=\S)",
    r"(?<=\w)(?=[^\w\s])", r"(?<=[^\w\s])(?=\w)", r"(?<=[a-zA-Z])(?=\d)")))
WINDOW = 256            # characters before and behind a cut that are looked at
LONG_RUN = re.compile(r"\d{32}|\s{32}|(.)\1{31}", re.DOTALL)
MayCut = Callable[[str, str, str], bool]


class Conversation(NamedTuple):
    """Holds a rendered conversation, a document, and which of its characters are learned: [start, end) each,
    ascending."""

    text: str
    spans: list[tuple[int, int]]


class Piece(NamedTuple):
    """Holds a part of a document that is encoded at once; of a conversation also where it starts, and what is
    learned of the whole."""

    text: str
    last: bool
    start: int = 0
    spans: list[tuple[int, int]] | None = None


class Encoded(NamedTuple):
    """Holds the tokens of a piece, whether they end their document, and in a conversation their weights."""

    ids: list[int]
    last: bool
    weights: np.ndarray | None


# --- a tokenizer of one's own ---

def train_tokenizer(documents: Iterable, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens, with <|endoftext|>. Errors: ConfigError."""
    check_value(option("vocab_size", int, **VOCAB_SIZE), vocab_size)
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[ENDS[0]],
                                  show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for document in documents:
            for piece, _ in document_pieces(document, lambda *around: True):
                read += len(piece)
                yield from short_words(piece)
    with progress(lambda: f"training a tokenizer of {vocab_size:,} tokens on {read:,} characters",
                  speaks=not sys.stderr.isatty()):  # a terminal has a moving bar
        tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def short_words(text: str) -> Iterator[str]:
    """Cuts the text so that no part has a long word, which training cannot bear."""
    ends = [0, *(word.end() for word in LONG_WORD.finditer(text)), len(text)]
    return (text[start:end] for start, end in itertools.pairwise(ends))


# --- documents to ids ---

def find_cut(text: str, first: int, end: int, may_cut: MayCut) -> re.Match | None:
    """Finds the first place between `first` and `end`, of some that are tried, where `may_cut` holds."""
    for kind in CUTS:
        for start in range(first, end, (end - first) // 4 + 1):
            if not (cut := kind.search(text, start, end)):
                break
            if may_cut(text[cut.start() - WINDOW:cut.start()], cut[0], text[cut.end():cut.end() + WINDOW]):
                return cut
    return None


def document_pieces(document: str | Iterable[str], may_cut: MayCut,
                    chars: int = PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Yields (piece, is it the document's last?), in order. A document is a str, or several; an empty one has
    no piece. A piece ends where may_cut(WINDOW characters before it, a space that is left out or nothing,
    WINDOW characters behind it), after `chars` or a few times as many. Errors: ConfigError: too many."""
    rest, least = "", chars
    for part in [document] if isinstance(document, str) else document:
        rest += part
        start = 0
        while len(rest) - start > 2 * least:
            if cut := find_cut(rest, start + least, start + 2 * least - WINDOW, may_cut):
                yield rest[start:cut.start()], False
                start, least = cut.end(), chars
            else:
                least *= 2
                if 2 * least > MOST_PIECE:
                    raise ConfigError(f"a document goes on with {rest[start:start + 30]!r}, it must have a "
                                      f"place to be cut, as between two words, in {MOST_PIECE:,} characters; "
                                      "put spaces or line ends into it")
        rest = rest[start:]
    if rest:
        yield rest, True


def batches(documents: Iterable, may_cut: MayCut) -> Iterator[list[Piece]]:
    """Yields lists of pieces, about BATCH_CHARS long in all."""
    batch: list[Piece] = []
    size = 0
    for document in documents:
        text, spans = document if isinstance(document, Conversation) else (document, None)
        start = 0
        for piece, last in document_pieces(text, may_cut, PIECE_CHARS):
            if spans is not None:  # a space in front may be left out
                start += not text.startswith(piece, start)
            batch.append(Piece(piece, last, start, spans))
            start += len(piece)
            size += len(piece)
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    yield batch


def pretokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """Cuts a text into the words that the tokenizer's model sees."""
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    cutter = tokenizer.pre_tokenizer
    return [word for word, _ in cutter.pre_tokenize_str(text)] if cutter else [text]


def encode_pieces(tokenizer: Tokenizer, pieces: list[Piece]) -> list[Encoding]:
    """Encodes pieces; those of conversations with the places of the tokens' characters."""
    texts = [piece.text for piece in pieces]
    if all(piece.spans is None for piece in pieces):
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    template, tokenizer.post_processor = tokenizer.post_processor, None  # it may take spaces out
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=False)
    finally:
        tokenizer.post_processor = template


def weights_of(encoding: Encoding, piece: Piece) -> np.ndarray | None:
    """Weighs the tokens of a piece: 1 where one has a character of a learned span; as in `transformers`, of
    several tokens of its last character the first alone."""
    if piece.spans is None:
        return None
    starts, ends = np.array([*piece.spans, (2**62, 2**62)]).T
    first, end = np.array(encoding.offsets).reshape(-1, 2).T + piece.start
    span = np.searchsorted(ends, first, "right")  # the first one that is not over
    begun = starts[span] < np.maximum(end, first + 1)
    return (begun & (np.append(-1, end[:-1]) < ends[span])).astype(np.uint8)


def encode(documents: Iterable, tokenizer: Tokenizer, end: int, parse_special: bool = False,
           total_bytes: int | None = None, met: Counter | None = None) -> Iterator[Encoded]:
    """Yields the tokens of documents in order, encoded on all cores, with the token `end` behind each text.
    `total_bytes`: for the bar. Counts in `met` the added tokens in the text: {are they special?: number}."""
    met = Counter() if met is None else met
    tokenizer.encode_special_tokens = not parse_special  # a document cannot forge the end of another
    added = tokenizer.get_added_tokens_decoder().values()
    finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # however many there are, it takes no longer
    finder.add_tokens([AddedToken(token.content, normalized=False) for token in added])
    special = {finder.token_to_id(token.content) for token in added if token.special}

    def may_cut(left: str, between: str, right: str) -> bool:
        """Says whether the ids of both sides are those of the whole, also beyond the window."""
        if LONG_RUN.search(left) or LONG_RUN.search(right):
            return False
        texts = left + between + right, left, right
        whole, *sides = (encode_text(tokenizer, text, parse_special) for text in texts)
        if whole == sides[0] + sides[1] and isinstance(tokenizer.model, models.Unigram):
            words, left_words, right_words = (pretokens(tokenizer, text) for text in texts)
            return words == left_words + right_words  # its sums round over a word
        return whole == sides[0] + sides[1]
    done, of = 0, f" of {total_bytes / 1e6:,.1f}" if total_bytes else ""
    with (tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokens", disable=None) as bar,
          progress(lambda: f"encoding: {done / 1e6:,.1f}{of} MB", speaks=not sys.stderr.isatty())):
        for batch in batches(documents, may_cut):
            with refusing("the tokenizer cannot encode the source"):
                encodings = encode_pieces(tokenizer, batch)
                added_ids = finder.encode_batch_fast([piece.text for piece in batch])
            for piece, encoding, its in zip(batch, encodings, added_ids, strict=True):
                ended = piece.last and piece.spans is None  # a conversation ends as its template says
                yield Encoded(encoding.ids + [end] * ended, piece.last, weights_of(encoding, piece))
                met.update(i in special for i in its.ids if i)
                nbytes = len(piece.text.encode())
                done += nbytes
                bar.update(nbytes)


# --- the folder ---

def write_splits(folder: Path, encoded: Iterable[Encoded], dtype: np.dtype,
                 weighted: bool) -> dict[str, dict[str, int]]:
    """Writes documents, every 20th to val.bin, of fewer than 20 the last, of one its last 20th -> {split:
    counts}, the starts of both, and with `weighted` the weights. Errors: ConfigError: too short."""
    sizes = {"bin": dtype.itemsize} | ({"weights": 1} if weighted else {})
    counts = {split: dict(tokens=0, documents=0) for split in STARTS}
    starts = {split: array("q", [0]) for split in STARTS}  # of the next document too
    done = 0  # documents so far
    with ExitStack() as stack:
        files = {(split, kind): stack.enter_context(open(folder / f"{split}.{kind}", "w+b"))
                 for split in STARTS for kind in sizes}
        for ids, last, weights in encoded:
            split = "val" if done % VAL_EVERY == VAL_EVERY - 1 else "train"
            files[split, "bin"].write(np.array(ids, dtype))
            if weights is not None:
                files[split, "weights"].write(weights.tobytes())
            counts[split]["tokens"] += len(ids)
            if last:
                done += 1
                counts[split]["documents"] += 1
                starts[split].append(counts[split]["tokens"])
        tokens = counts["train"]["tokens"]
        if 0 < done < VAL_EVERY:
            cut = starts["train"][-2] if done > 1 else tokens - max(2, tokens // VAL_EVERY)
            if done == 1 and cut < 2:
                raise ConfigError(f"the only document has {tokens} tokens, a dataset needs 4; give a longer "
                                  "one")
            for kind, size in sizes.items():
                files["train", kind].seek(cut * size)
                shutil.copyfileobj(files["train", kind], files["val", kind])
                files["train", kind].truncate(cut * size)
            counts = dict(train=dict(tokens=cut, documents=max(1, done - 1)),
                          val=dict(tokens=tokens - cut, documents=1))
    for split, of in counts.items():
        np.array(starts[split][:of["documents"]], "<i8").tofile(folder / STARTS[split])
    return counts


def check_own(out_dir: Path) -> None:
    """Raises ConfigError where `out_dir` is no folder, or has files with a dataset's names that are not a
    dataset's."""
    check_folder(out_dir, "out_dir")
    is_dataset = False
    with suppress(ConfigError):
        is_dataset = {"dtype", "vocab_size", "counts"} <= load_json(out_dir / "meta.json", "").keys()
    for path in (out_dir / name for name in DATASET_FILES):
        if os.path.lexists(path) and (not is_dataset or path.is_symlink() or not path.is_file()):
            raise ConfigError(f"{path} is not of a dataset that memo has written, and would be replaced; "
                              "choose another --out_dir, or remove it")


def move_files(folder: Path, out_dir: Path) -> None:
    """Puts a dataset's files into the place of those in `out_dir`, once they are on the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    check_own(out_dir)
    for name in DATASET_FILES:
        if (folder / name).exists():
            os.replace(folder / name, out_dir / name)
        else:  # of what was there before
            (out_dir / name).unlink(missing_ok=True)
    sync_folder(out_dir)


def write_dataset(out_dir: str | Path, documents: Iterable, tokenizer: Tokenizer,
                  total_bytes: int | None = None, end: str | None = None,
                  parse_special: bool = False, weighted: str = "") -> dict:
    """Writes the folder `out_dir` from non-empty documents as document_pieces() takes them -> its meta.
    `end`: the token that ends each. `weighted`: they are Conversations, and end as their template says; the
    words of an error on why nothing of a split is learned, and the remedy.
    Whatever stops it, `out_dir` holds the old dataset or none; after a kill between two names files that
    open_dataset() refuses, and the next call replaces. Errors: ConfigError."""
    began = time.monotonic()
    out_dir = Path(out_dir)
    check_own(out_dir)
    partial = out_dir / f"{NEW}{token_hex(8)}"
    vocab_size = tokenizer_vocab_size(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    end = end or end_of_document(tokenizer)
    end_id, met = tokenizer.get_vocab()[end], Counter[bool]()
    if not weighted:
        print(f"each document ends with the token {end}, id {end_id}", flush=True)
    partial.mkdir(parents=True)
    try:
        encoded = encode(documents, tokenizer, end_id, parse_special, total_bytes, met)
        counts = write_splits(partial, encoded, DTYPES[dtype], bool(weighted))
        if not counts["train"]["documents"]:
            raise ConfigError("the source holds no text; give one with at least one document that is not "
                              "empty")
        with progress(lambda: f"reading {out_dir} again"):
            fingerprints = {split: fingerprint(partial / f"{split}.bin", whole=True) for split in counts}
            beside = [*STARTS.values(), *(WEIGHTS.values() if weighted else ())]
            fingerprints |= {name: fingerprint(partial / name, whole=True) for name in beside}
            if weighted:
                count_learned(partial, counts, weighted)
        tokenizer.save(str(partial / "tokenizer.json"))
        sha256 = hashlib.sha256((partial / "tokenizer.json").read_bytes()).hexdigest()
        meta = dict(dtype=dtype, vocab_size=vocab_size, counts=counts, documents=STARTS,
                    fingerprints=fingerprints,
                    tokenizer=dict(file="tokenizer.json", sha256=sha256, end_of_document=end,
                                   parse_special=parse_special))
        meta |= dict(weights=WEIGHTS) if weighted else {}
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        move_files(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    read_as = "which they are" if parse_special else "read as ordinary text (--parse_special)"
    others = f"; {met[False]:,} other added tokens, which stay whole" if met[False] else ""
    print(f"special tokens met in the text: {met[True]:,}, {read_as}{others}")
    sizes = ", ".join(f"{split} {counted(n['tokens'], 'token')} of {counted(n['documents'], 'document')}"
                      + (f", {n['learned']:,} of them learned" if weighted else "")
                      for split, n in counts.items())
    print(f"{out_dir}: {sizes}; vocabulary {vocab_size:,} ({dtype}), {time.monotonic() - began:.1f} s")
    return meta


def count_learned(folder: Path, counts: dict, why: str) -> None:
    """Adds to the counts of each split its learned tokens. Errors: ConfigError: there are none, and `why`."""
    for split, n in counts.items():
        n["learned"] = int(np.memmap(folder / WEIGHTS[split], np.uint8, "r").sum())
        if not n["learned"]:
            raise ConfigError(f"nothing is learned of the {split} split, {counted(n['tokens'], 'token')}: "
                              f"{why}")


def train_with(out_dir: str | Path, meta: dict, block_size: int, *options: str) -> str:
    """Says how to train on a dataset, with sequences of `block_size` tokens or as many as a window finds."""
    folder = Path(out_dir).resolve()
    options += (f"--dataset={folder.relative_to(DATA) if folder.is_relative_to(DATA) else out_dir}",)
    n = min(c["tokens"] for c in meta["counts"].values())
    if block_size >= n and "--documents=true" not in options:
        options += (f"--block_size={n - 1}",)
    return shlex.join([python(), "train.py", *options])
