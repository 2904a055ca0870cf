"""A dataset from your own text or from a Hugging Face dataset.

Read are .txt and .md (a document a file), .json, .jsonl and .parquet (a document a row), whatever their case,
and all but .parquet also as .gz and .zst.

    python data/text/prepare.py --source=notes/ --tokenizer=train:4096
    python data/text/prepare.py --source=Salesforce/wikitext --config=wikitext-2-raw-v1 --tokenizer=hf:qwen3/
"""

import codecs
import gzip
import itertools
import json
import logging
import re
import socket
import sys
import zlib
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from urllib.parse import urlparse

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # memo need not be installed

from memo.system.command import Arguments, import_failed, progress, run

if __name__ == "__main__":
    sys.excepthook = import_failed  # a package that is missing is one line

from memo.config.config import KEYS
from memo.config.keys import check_value, option, typed
from memo.data.parquet import MOST_BYTES, parquet_texts
from memo.data.tokenizer import ENDS, check_vocab_size, end_of_document, load_tokenizer
from memo.data.tokens import (
    DATA,
    VOCAB_SIZE,
    check_own,
    train_tokenizer,
    train_with,
    write_dataset,
)
from memo.errors import ConfigError, reason
from memo.huggingface.huggingface import model_keys
from memo.system.files import MOST_JSON_CHARS, NEW

# what a name says of a file: its kind, and how it is packed
KIND = re.compile(r"\.(?:(txt|md|json|jsonl)(\.gz|\.zst)?|(parquet))$", re.IGNORECASE)
SUFFIXES = ".txt, .md, .json, .jsonl (each also with .gz or .zst), .parquet"
NAMED = 3           # of the files that are left out
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # JSON can hold it, UTF-8 cannot
PART_BYTES = 2**20  # of a text file, read at once
MOST_VALUES = 2**21  # of a row or list that is longer than others: each may take 250 bytes of memory
# what a file unpacks to may be so many times as long and so much longer: text is 3 to 10 times as long
MOST_RATIO, FREE_BYTES = 64, 2**21


def read_argv(argv):
    """The arguments, with `vocab_size`: of a tokenizer to train, None where one is given."""
    parser = Arguments(description=__doc__)
    parser.option("--source", required=True,
                  help="a file, a folder of files, or a Hugging Face dataset's name", least=1)
    parser.option("--tokenizer", required=True, least=1,
                  help="a tokenizer.json, a folder with one or with vocab.json and merges.txt, hf:<folder> "
                       "of a model, or train:<vocab>")
    parser.option("--out_dir", help="where to write; by default data/<name of the source>", least=1)
    parser.option("--text_key", default="text",
                  help="the column of the text in .json, .jsonl, .parquet and Hugging Face", least=1)
    parser.option("--config", help="which configuration of the Hugging Face dataset, where it has several",
                  least=1)
    parser.option("--split", default="train", help="which split of the Hugging Face dataset", least=1)
    parser.option("--end_token", help="a special token of the tokenizer, which ends each document; by "
                  "default its eos_token", least=1)
    parser.option("--parse_special", bool, False, "special tokens in a text are special, as where a chat "
                  "template made it; else they are ordinary text")
    args = parser.parse_args(argv)
    kind, _, vocab = args.tokenizer.partition(":")
    args.vocab_size = None
    if kind == "train":
        if not vocab.isdecimal():
            raise ConfigError(f"tokenizer={args.tokenizer} must be train:<vocab>, a whole number; "
                              "try train:4096")
        f = option("vocab_size", int, **VOCAB_SIZE)
        args.vocab_size = typed(f, vocab, "--")
        check_value(f, args.vocab_size)
        if args.end_token not in (None, ENDS[0]):
            raise ConfigError(f"end_token={args.end_token} must be {ENDS[0]} for a tokenizer that is trained "
                              "here; leave it out")
    return args


def source_files(source, kind=KIND, suffixes=SUFFIXES):
    """The files of a file or folder, in order, of a `kind` with these suffixes; says which of a folder are
    left out. Errors: none that can be read."""
    path = Path(source)
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"source={source} is no regular file and no folder; give one")
    if path.is_file():
        if not kind.search(path.name):
            raise ConfigError(f"source={source} must have one of the suffixes {suffixes}, not "
                              f"{path.suffix!r}; convert it")
        return [path]
    found = sorted(p for p in path.rglob("*") if (p.is_symlink() or not p.is_dir())
                   and not any(part.startswith(NEW) for part in p.parts))  # of one that was killed
    files = [p for p in found if p.is_file() and kind.search(p.name)]
    left_out = [str(p.relative_to(path)) for p in found if p not in set(files)]
    if not files:
        raise ConfigError(f"source={source} must hold files of the suffixes {suffixes}, it holds none; "
                          "give another folder")
    if left_out:
        names = ", ".join(left_out[:NAMED]) + ", ..." * (len(left_out) > NAMED)
        print(f"left out of {source}: {len(left_out)} of {len(found)} files, {names}")
    return files


def look_in_the_cache_without_network():
    """Without the hub's address the library retries for half a minute: it is told that it is offline."""
    from huggingface_hub import constants
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True  # read when datasets is imported


def load(source, remedy, *args, **kwargs):
    """The rows of datasets.load_dataset. Errors: whatever stops it, in one line."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        import datasets  # takes seconds: only where it is needed
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        with progress(lambda: f"loading source={source}"):
            return datasets.load_dataset(*args, **kwargs)
    except ModuleNotFoundError:
        raise
    except Exception as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise ConfigError(f"source={source} cannot be loaded ({why}); {remedy}") from None


def json_of(text, where, rule):
    """The value of a JSON text. Errors: it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} must be {rule} ({e}); mend or drop it") from None


def text_of(row, text_key, where):
    """A row's text; null is no text. Errors: no such column, or one that does not hold text."""
    if not isinstance(row, dict) or text_key not in row:
        columns = ", ".join(row) if isinstance(row, dict) else "none"
        raise ConfigError(f"{where}: text_key={text_key} must be one of the columns ({columns}); "
                          "give another --text_key")
    text = row[text_key]
    if not isinstance(text, str | None):
        raise ConfigError(f"{where}: text_key={text_key} must hold text, not {type(text).__name__}; "
                          "give another --text_key")
    if half := HALF_A_PAIR.search(text or ""):
        raise ConfigError(f"{where}: text_key={text_key} must hold text that UTF-8 can write, its character "
                          f"{half.start()} is half a surrogate pair; mend or drop the row")
    return text or ""


def check_ratio(path, nbytes, packed):
    """Errors: ConfigError: `nbytes` are too many for what `packed` bytes of the file were unpacked to."""
    if nbytes > FREE_BYTES + MOST_RATIO * packed:
        raise ConfigError(f"{path} must unpack to at most {MOST_RATIO} times its bytes, so far {packed:,} of "
                          f"them make {nbytes:,}; unpack it yourself, if you trust it")


@contextmanager
def unpacked(path):
    """(the bytes that the file was made of, the file itself), open for reading. Errors: ConfigError: its
    packing is damaged."""
    packing = (KIND.search(path.name)[2] or "").lower()
    with open(path, "rb") as file:
        if not packing:
            yield file, file
            return
        try:
            if packing == ".gz":
                yield gzip.GzipFile(fileobj=file), file
            else:
                from pyarrow import CompressedInputStream  # takes half a second: only where it is needed
                yield BufferedReader(CompressedInputStream(file, "zstd")), file
        except (OSError, EOFError, zlib.error) as e:
            raise ConfigError(f"{path} cannot be unpacked ({reason(e)}); give a whole one, or unpack "
                              "it") from None


def decoded(decode, data, path, end):
    """decode(data), the bytes that end at byte `end` of the file. Errors: they are no UTF-8."""
    try:
        return decode(data)
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} must be UTF-8 text (byte {end - len(e.object) + e.start}: {e.reason}); "
                          "convert it with iconv") from None


def row_text(data, path, where, start, what, remedy):
    """The text of `data`, a row or a list that begins at byte `start` of the file and is read as a whole.
    Errors: ConfigError: it is too long, has too many values, or is no UTF-8."""
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{where} must be at most {MOST_BYTES} bytes long ({what} is read as a whole); "
                          f"{remedy}")
    if len(data) > MOST_JSON_CHARS and sum(map(data.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise ConfigError(f"{where}, longer than {MOST_JSON_CHARS} bytes, must have at most {MOST_VALUES} "
                          f"values; {remedy}")
    return decoded(bytes.decode, data, path, start + len(data))


def text_parts(path):
    """The parts of a text file, in order: no more of it is in memory. A byte order mark is left out, all else
    is as it stands there."""
    decoder, end, data = codecs.getincrementaldecoder("utf-8-sig")(), 0, b" "
    with unpacked(path) as (file, packed):
        while data:
            data = file.read(PART_BYTES)
            end += len(data)
            check_ratio(path, end, packed.tell())
            yield decoded(partial(decoder.decode, final=not data), data, path, end)


def rows_of(path, is_json):
    """Yields (where, row) of a JSON object a line, or where `is_json` of a list of objects, one row in memory
    at a time, or one list."""
    with unpacked(path) as (file, packed):
        mark = len(codecs.BOM_UTF8) * file.peek(3).startswith(codecs.BOM_UTF8)
        end = len(file.read(mark))
        if is_json and file.peek(1).lstrip().startswith(b"["):
            text = row_text(file.read(MOST_BYTES + 1), path, path, end, "a list", "write an object a line")
            check_ratio(path, end + len(text), packed.tell())
            rows = json_of(text, path, "a JSON list of objects, or an object a line")
            yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows, 1))
            return
        for number, line in enumerate(iter(partial(file.readline, MOST_BYTES + 1), b""), 1):
            if line.strip():
                where = f"{path}:{number}"
                text = row_text(line, path, where, end, "a row", "split it, or write it as .txt")
                yield where, json_of(text, where, "one JSON object a line")
            end += len(line)
            check_ratio(path, end, packed.tell())


def file_documents(path, text_key):
    """The documents of one file, one row in memory at a time."""
    kind = KIND.search(path.name).expand(r"\1\3").lower()
    if kind in ("txt", "md"):
        yield text_parts(path)
    elif kind == "parquet":
        done, size = 0, path.stat().st_size
        for data in parquet_texts(path, text_key):
            done += len(data)
            check_ratio(path, done, size)
            yield decoded(bytes.decode, data, path, len(data))
    else:
        for where, row in rows_of(path, kind == "json"):
            yield text_of(row, text_key, where)


def open_source(args):
    """(function that reads the documents from the first, their bytes or None where unknown)."""
    if Path(args.source).exists():
        files = source_files(args.source)
        packed = any(any(KIND.search(p.name).group(2, 3)) for p in files)
        total = None if packed else sum(p.stat().st_size for p in files)
        return lambda: itertools.chain.from_iterable(file_documents(p, args.text_key) for p in files), total
    if KIND.search(args.source) or args.source.count("/") > 1:
        raise ConfigError(f"source={args.source} does not exist; give a file, a folder or "
                          "a Hugging Face dataset's name")
    look_in_the_cache_without_network()
    remedy = "give a file, a folder or a Hugging Face dataset's name; check --config, --split, the network"
    rows = load(args.source, remedy, args.source, args.config, split=args.split)
    if args.text_key in rows.column_names:
        rows = rows.select_columns([args.text_key])
    return lambda: (text_of(row, args.text_key, args.source) for row in rows), rows.data.nbytes


def given_tokenizer(given, *remedy):
    """(the tokenizer of a file or folder, or hf:<folder> of a model that memo has, where it is, that model's
    keys). Errors: ConfigError."""
    folder = given.removeprefix("hf:")
    tokenizer, model = load_tokenizer(folder, *remedy), model_keys(folder) if folder != given else {}
    if model:
        check_vocab_size(tokenizer, folder, model["vocab_size"])
    return tokenizer, folder, model


def out_dir_of(args):
    """Where to write: a dataset that is there already is only replaced if it was named. Errors: ConfigError:
    it cannot be written, or would be read with the source from now on."""
    source = Path(args.source).resolve()
    out_dir = Path(args.out_dir or DATA / Path(KIND.sub("", str(source))).name)
    if source.is_dir() and out_dir.resolve().is_relative_to(source):
        raise ConfigError(f"out_dir={out_dir} must not be source={args.source} or lie in it (the dataset's "
                          "files would be taken for texts); choose another --out_dir")
    check_own(out_dir)
    if not args.out_dir and (out_dir / "meta.json").exists():
        raise ConfigError(f"out_dir={out_dir} holds a dataset already; give --out_dir, "
                          "the same one to replace it")
    return out_dir


def say_next(args, out_dir, meta, model, *options):
    """Prints the command that trains on a dataset, from the `model` whose tokenizer it has, if any."""
    block_size = model.get("block_size", KEYS["block_size"].default)
    options += (f"--init_from={args.tokenizer}",) if model else ()
    print(f"train on it: {train_with(out_dir, meta, block_size, *options)}")


def main(argv):
    args = read_argv(argv)
    out_dir = out_dir_of(args)
    tokenizer, end, model = None, ENDS[0], {}
    if not args.vocab_size:
        tokenizer, folder, model = given_tokenizer(args.tokenizer, "give one, or try train:4096")
        end = end_of_document(tokenizer, folder, args.end_token)
    documents, total_bytes = open_source(args)
    tokenizer = tokenizer or train_tokenizer(documents(), args.vocab_size)
    meta = write_dataset(out_dir, documents(), tokenizer, total_bytes, end, args.parse_special)
    say_next(args, out_dir, meta, model)


if __name__ == "__main__":
    sys.exit(run(main))
