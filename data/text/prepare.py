"""A dataset from your own text (.txt: one document a file, .jsonl, .parquet) or from a Hugging Face dataset.

    python data/text/prepare.py --source=notes/ --tokenizer=train:4096
    python data/text/prepare.py --source=Salesforce/wikitext --config=wikitext-2-raw-v1
                                --tokenizer=gpt2/tokenizer.json
"""

import glob
import itertools
import json
import logging
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

from memo.command import Arguments, progress, run
from memo.errors import ConfigError
from memo.keys import check_value, option, typed
from memo.tokens import DATA, VOCAB_SIZE, load_tokenizer, train_tokenizer, write_dataset

SUFFIXES = (".txt", ".jsonl", ".parquet")
PART_CHARS = 2**20  # of a text file, read at once
MOST_CHARS = 2**28  # of a row of .jsonl


def read_argv(argv):
    """The arguments, with `vocab_size`: of a tokenizer to train, None where one is given."""
    parser = Arguments(description=__doc__)
    parser.option("--source", required=True,
                  help="a file, a folder of files, or a Hugging Face dataset's name", least=1)
    parser.option("--tokenizer", required=True, least=1,
                  help="a tokenizer.json, a folder with one or with vocab.json and merges.txt, "
                       "or train:<vocab>")
    parser.option("--out_dir", help="where to write; by default data/<name of the source>", least=1)
    parser.option("--text_key", default="text",
                  help="the column of the text in .jsonl, .parquet and Hugging Face", least=1)
    parser.option("--config", help="which configuration of the Hugging Face dataset, where it has several",
                  least=1)
    parser.option("--split", default="train", help="which split of the Hugging Face dataset", least=1)
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
    return args


def source_files(source):
    """The files of a file or folder, in order. Errors: none that can be read."""
    path, suffixes = Path(source), ", ".join(SUFFIXES)
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"source={source} is no regular file and no folder; give one")
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ConfigError(f"source={source} must have one of the suffixes {suffixes}, not {path.suffix!r}; "
                          "convert it")
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise ConfigError(f"source={source} must hold files of the suffixes {suffixes}, it holds none; "
                          "give another folder")
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
    except Exception as e:
        raise unreadable(source, e, remedy) from None


def unreadable(source, e, remedy):
    """The ConfigError of a source on which the library raised `e`, in one line."""
    why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
    return ConfigError(f"source={source} cannot be loaded ({why}); {remedy}")


def row_of(line, where):
    """The JSON of a line. Errors: it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} must be one JSON object a line ({e}); mend or drop the line") from None


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
    return (text or "").encode(errors="replace").decode()  # JSON can hold half a surrogate pair, UTF-8 cannot


def text_parts(path):
    """The parts of a text file, in order: no more of it is in memory."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield from iter(partial(file.read, PART_CHARS), "")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} must be UTF-8 text ({e.reason}); convert it with iconv") from None


def file_documents(path, text_key):
    """The documents of one file, one row in memory at a time."""
    try:
        if path.suffix == ".txt":
            yield text_parts(path)
        elif path.suffix == ".jsonl":
            with open(path, encoding="utf-8-sig") as lines:
                for number, line in enumerate(iter(partial(lines.readline, MOST_CHARS + 1), ""), 1):
                    if len(line) > MOST_CHARS:
                        raise ConfigError(f"{path}:{number} must be at most {MOST_CHARS} characters long "
                                          "(a row is read as a whole); split it into several rows")
                    if line.strip():
                        yield text_of(row_of(line, f"{path}:{number}"), text_key, f"{path}:{number}")
        else:
            with tempfile.TemporaryDirectory() as cache:  # streamed: it holds a lock and no data
                for row in parquet_rows(path, cache):
                    yield text_of(row, text_key, path)
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} must be UTF-8 text ({e.reason}); convert it with iconv") from None


def parquet_rows(path, cache):
    """The rows of a Parquet file. Errors: ConfigError, also where the library fails in its midst."""
    remedy = "give a whole Parquet file, with at least one row"
    rows = load(path, remedy, "parquet", data_files=glob.escape(str(path)), split="train", streaming=True,
                cache_dir=cache)
    try:
        yield from rows
    except Exception as e:
        raise unreadable(path, e, remedy) from None


def open_source(args):
    """(function that reads the documents from the first, their bytes or None where unknown)."""
    if Path(args.source).exists():
        files = source_files(args.source)
        total = None if any(p.suffix == ".parquet" for p in files) else sum(p.stat().st_size for p in files)
        return lambda: itertools.chain.from_iterable(file_documents(p, args.text_key) for p in files), total
    if Path(args.source).suffix in SUFFIXES or args.source.count("/") > 1:
        raise ConfigError(f"source={args.source} does not exist; give a file, a folder or "
                          "a Hugging Face dataset's name")
    look_in_the_cache_without_network()
    remedy = "give a file, a folder or a Hugging Face dataset's name; check --config, --split, the network"
    rows = load(args.source, remedy, args.source, args.config, split=args.split)
    if args.text_key in rows.column_names:
        rows = rows.select_columns([args.text_key])
    return lambda: (text_of(row, args.text_key, args.source) for row in rows), rows.data.nbytes


def main(argv):
    args = read_argv(argv)
    out_dir = args.out_dir or DATA / Path(args.source).resolve().stem
    if not args.out_dir and (out_dir / "meta.json").exists():
        raise ConfigError(f"out_dir={out_dir} holds a dataset already; give --out_dir, "
                          "the same one to replace it")
    tokenizer = None if args.vocab_size else load_tokenizer(args.tokenizer)
    documents, total_bytes = open_source(args)
    tokenizer = tokenizer or train_tokenizer(documents(), args.vocab_size)
    write_dataset(out_dir, documents(), tokenizer, total_bytes)


if __name__ == "__main__":
    sys.exit(run(main))
