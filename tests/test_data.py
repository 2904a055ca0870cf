import collections
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import train
from memo.data import batch, tokens
from memo.data.batch import SPLITS, open_dataset
from memo.data.tokenizer import load_tokenizer
from memo.data.tokens import DTYPES, train_tokenizer, write_dataset
from memo.errors import ConfigError, DataError
from memo.system import command, files
from memo.system.command import run
from memo.system.device import to_device
from testing.ranks import TIMEOUT_S
from tests.helpers import ROOT, told
from tests.texts import TEXTS, rows, save, stdlib, text

HF = dict(model_type="gpt2", n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=512)  # a config.json


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def documents(folder, split):
    """The documents of a split, decoded with the folder's tokenizer and cut at its end-of-document token."""
    meta = json.loads((folder / "meta.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.fromfile(folder / f"{split}.bin", DTYPES[meta["dtype"]])
    assert len(ids) == meta["counts"][split]["tokens"]
    assert ids.max() < meta["vocab_size"]
    end = tokenizer.token_to_id(meta["tokenizer"]["end_of_document"])
    cuts = [-1, *np.flatnonzero(ids == end).tolist()]
    assert cuts[-1] == len(ids) - 1
    assert len(cuts) - 1 == meta["counts"][split]["documents"]
    return [tokenizer.decode(ids[a + 1:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


def fake_dataset(folder, counts=(100, 50), vocab_size=256, dtype="uint16", ids=None):
    folder.mkdir()
    for split, n in zip(SPLITS, counts, strict=True):
        (np.arange(n) if ids is None else ids).astype(DTYPES[dtype]).tofile(folder / f"{split}.bin")
    meta = dict(dtype=dtype, vocab_size=vocab_size,
                counts={s: dict(tokens=n) for s, n in zip(SPLITS, counts, strict=True)})
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


# --- writing ---

def test_documents_come_back_whole(tmp_path, tokenizer):
    meta = write_dataset(tmp_path, ["", *TEXTS], tokenizer)
    assert documents(tmp_path, "val") == [TEXTS[19], TEXTS[39]]
    assert documents(tmp_path, "train") == [t for i, t in enumerate(TEXTS) if i not in (19, 39)]
    assert meta["dtype"] == "uint16"
    assert meta["vocab_size"] == 300
    sha256 = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert meta["tokenizer"] == dict(file="tokenizer.json", sha256=sha256, end_of_document="<|endoftext|>",
                                     parse_special=False)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["meta.json", "tokenizer.json", "train.bin", "train.docs", "val.bin", "val.docs"]


@pytest.mark.parametrize("n", [2, 19, 20])
def test_few_documents_leave_one_for_val(tmp_path, tokenizer, n):
    write_dataset(tmp_path, TEXTS[:n], tokenizer)
    assert (documents(tmp_path, "train"), documents(tmp_path, "val")) == (TEXTS[:n - 1], TEXTS[n - 1:n])


def test_a_single_document_gives_its_end_to_val(tmp_path, tokenizer):
    document = "".join(TEXTS)
    counts = write_dataset(tmp_path, [document], tokenizer)["counts"]
    ids = np.concatenate([np.fromfile(tmp_path / f"{s}.bin", "<u2") for s in SPLITS])
    assert tokenizer.decode(ids[:-1]) == document
    assert ids[-1] == tokenizer.token_to_id("<|endoftext|>")
    assert counts["val"]["tokens"] == len(ids) // 20
    assert sum(c["tokens"] for c in counts.values()) == len(ids)


@pytest.mark.slow
def test_vocabularies_beyond_uint16_take_uint32(tmp_path):
    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    meta = write_dataset(tmp_path, ["w65535 w65536 w69999", "w1 w2"], tokenizer)
    assert meta["dtype"] == "uint32"
    assert meta["vocab_size"] == 70_001
    assert np.fromfile(tmp_path / "train.bin", "<u4").tolist() == [65535, 65536, 69999, 70_000]
    assert open_dataset(str(tmp_path), 2).batch("train", 0, 0, 1, 2, 0)[0].dtype == torch.int64


@pytest.mark.parametrize("document", ["word " * 4000, "\n" * 50 + "  a\n    b\n" * 1900, "a", "",
                                      "x " + "ab" * 5000 + ". z " * 9000])
def test_pieces_are_as_short_as_they_may_be(document):
    """Whatever parts the document is read in. One without a word's end stays whole."""
    def may_cut(left, between, right):
        return len(left) == len(right) == tokens.WINDOW and not between
    for chars in (600, 1000):
        whole = list(tokens.document_pieces(document, may_cut, chars))
        assert "".join(piece for piece, _ in whole) == document
        assert all(0 < len(piece) <= 2 * chars or "b" * 2 in piece or "ab" * 9 in piece for piece, _ in whole)
        assert [last for _, last in whole] == [False] * (len(whole) - 1) + [True] * bool(document)
        assert len(whole) >= len(document) // 21000
        for size in (1, 63, 999):
            parts = (document[i:i + size] for i in range(0, len(document), size))
            assert list(tokens.document_pieces(parts, may_cut, chars)) == whole
    for document in (" " * 9000, "\U0001f600" * 9000, "7" * 9000):
        assert list(tokens.document_pieces(document, may_cut, 600)) == [(document, True)]


def test_training_sees_no_long_word():
    long = "ab" * 5000 + " c " + " \t" * 3000
    parts = list(tokens.short_words(long))
    assert "".join(parts) == long
    assert max(len(word) for part in parts for word in re.findall(r"\S+|\s+", part)) <= 1024
    usual = "\n".join(TEXTS) + "x" * 1024
    assert list(tokens.short_words(usual)) == [usual]


def test_text_is_read_in_parts(tmp_path, monkeypatch):
    """A byte order mark at the beginning is left out, and nothing else."""
    monkeypatch.setattr(text, "PART_BYTES", 10)
    document = "".join(TEXTS) + "\ufeff\r\n10%\r20%\r\x00\x85\u2028\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + document.encode())
    parts = list(next(text.file_documents(tmp_path / "a.txt", "text")))
    assert "".join(parts) == document and max(map(len, parts)) == 10


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("at", [0, 9, 10, 11, 25])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.json.gz"])
def test_a_byte_that_is_no_text_is_named(tmp_path, monkeypatch, name, at, mark):
    monkeypatch.setattr(text, "PART_BYTES", 10)
    begin = mark if name == "a.txt" else mark + (b'{"text": "' if "l" in name else b'["')
    data = begin + b"\xc3\xa9\n"[:2] * 20
    at = len(begin) + at // 2 * 2
    data = data[:at] + b"\xff" + data[at:]
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(ConfigError, match=rf"{name} must be UTF-8 text \(byte {at}: invalid start byte\)"):
        "".join(itertools.chain.from_iterable(text.file_documents(path, "text")))


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "smile \\ud83d\\ude00, half \\ud83d"}\n')
    documents = text.file_documents(tmp_path / "a.jsonl", "text")
    assert next(documents) == "a"
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .* its character 14 is half a surrogate pair"):
        next(documents)


@pytest.mark.slow
def test_what_takes_long_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "FIRST_S", 0.001)
    documents = ["".join(TEXTS)] * 200
    write_dataset(tmp_path, documents, train_tokenizer(documents, 300), 10**7)
    err = capsys.readouterr().err
    assert re.search(r"^training a tokenizer of 300 tokens on [\d,]+ characters, \d+ s so far$", err,
                     re.MULTILINE)
    assert re.search(r"^encoding: \d+\.\d of 10\.0 MB, \d+ s so far$", err, re.MULTILINE)
    assert 4 * tokens.PIECE_CHARS * os.cpu_count() >= tokens.BATCH_CHARS  # a step of the line


@pytest.mark.parametrize(("size", "options"), [(9000, ""), (1000, " --block_size=")])
def test_prepare_says_the_next_command(tmp_path, tokenizer, capsys, size, options):
    """It fits the dataset, and the model whose tokenizer it has."""
    texts = ["ab " * size] * 2
    (tmp_path / "a b.jsonl").write_bytes(rows(texts))
    save(tokenizer, tmp_path / "tokenizer.json")
    argv = [f"--source={tmp_path / 'a b.jsonl'}", f"--out_dir={tmp_path / 'a b'}"]
    text.main([*argv, f"--tokenizer={tmp_path}"])
    said = capsys.readouterr().out
    n = json.loads((tmp_path / "a b" / "meta.json").read_text())["counts"]["val"]["tokens"]
    options = options and f"{options}{n - 1}"
    assert re.search(rf"^train on it: \S+ train\.py '--dataset={tmp_path}/a b'{options}$", said, re.MULTILINE)
    open_dataset(str(tmp_path / "a b"), n - 1 if options else 4096)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    text.main([*argv, f"--tokenizer=hf:{tmp_path}"])
    said = capsys.readouterr().out
    assert f" train.py --init_from=hf:{tmp_path} '--dataset={tmp_path}/a b'\n" in said


def test_text_cannot_forge_a_boundary(tmp_path, tokenizer):
    forged = ["before <|endoftext|> after", "second"]
    write_dataset(tmp_path, forged, tokenizer)
    assert documents(tmp_path, "train") + documents(tmp_path, "val") == forged


def test_the_same_text_gives_the_same_bytes(tmp_path):
    for name in "ab":
        write_dataset(tmp_path / name, TEXTS, train_tokenizer(TEXTS, 400))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, ConfigError, OSError])
def test_an_interrupted_prepare_changes_nothing(tmp_path, tokenizer, stop, existing):
    out = tmp_path / "out"
    if existing:
        write_dataset(out, TEXTS, tokenizer)
        before = {p.name: p.read_bytes() for p in out.iterdir()}

    def interrupted():
        yield from TEXTS[:30]
        raise stop

    with pytest.raises(stop):
        write_dataset(out, interrupted(), tokenizer)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == (before if existing else {})


def test_a_kill_between_the_renames_leaves_no_dataset(tmp_path, tokenizer, monkeypatch):
    write_dataset(tmp_path, TEXTS, tokenizer)

    def killed(source, target):
        os.rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, TEXTS[:25], tokenizer)
    with pytest.raises(ConfigError, match="bytes must be the [0-9]* of .* that meta.json counts"):
        open_dataset(str(tmp_path), 8)
    monkeypatch.undo()
    write_dataset(tmp_path, TEXTS[:25], tokenizer)
    assert open_dataset(str(tmp_path), 8)


def test_what_a_killed_one_has_left_is_no_source(tmp_path):
    left = tmp_path / f"{files.NEW}0123"
    left.mkdir()
    (left / "meta.json").write_text("[1]")
    (tmp_path / "a.txt").write_text("text")
    assert text.source_files(str(tmp_path)) == [tmp_path / "a.txt"]


@pytest.mark.parametrize(("out_dir", "says"), [
    ("in", "must not be source="), ("in/made", "must not be source="), ("file", "file is no folder; choose"),
    ("file/made", "file is no folder; choose another out_dir")])
def test_a_place_that_cannot_be_is_refused_before_anything_is_read(tmp_path, capsys, out_dir, says):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text("this is read by nobody")
    (tmp_path / "file").write_text("")
    argv = [f"--source={tmp_path / 'in'}", "--tokenizer=train:300", f"--out_dir={tmp_path / out_dir}"]
    assert run(text.main, argv) == 2
    assert says in (err := capsys.readouterr().err) and str(tmp_path / out_dir) in err
    assert len([*tmp_path.rglob("*")]) == 3


@pytest.mark.parametrize("plant", [
    lambda path: path.write_text("{}"), lambda path: path.symlink_to("/dev/null"), lambda path: path.mkdir(),
    lambda path: path.symlink_to("elsewhere")])
@pytest.mark.parametrize("name", tokens.DATASET_FILES)
def test_a_folder_that_is_no_dataset_is_not_written(tmp_path, tokenizer, name, plant):
    """A model's, say, with a tokenizer.json of its own."""
    plant(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is not of a dataset that memo has written"):
        write_dataset(tmp_path, TEXTS[:25], tokenizer)
    assert os.listdir(tmp_path) == [name]


# --- the sources and tokenizers of data/text/prepare.py ---

def write_source(folder, kind):
    folder.mkdir(exist_ok=True)
    if kind == "txt":
        for i, t in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_text(t)
    elif kind == "jsonl":
        rows = [dict(text=t) for t in TEXTS] + [dict(text=None, late=1), dict(text="2020-01-01")]
        (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    else:
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table(dict(n=range(45), text=TEXTS)), folder / "b [1].parquet")
    return folder


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_sources(tmp_path, tokenizer, kind):
    source, out = write_source(tmp_path / "in", kind), tmp_path / "out"
    if kind != "txt":
        source = next(source.iterdir())
    text.main([f"--source={source}", f"--tokenizer={save(tokenizer, tmp_path / 't.json')}",
               f"--out_dir={out}"])
    expected = TEXTS + ["2020-01-01"] * (kind == "jsonl")
    assert documents(out, "train") == [t for i, t in enumerate(expected) if i % 20 != 19]
    assert documents(out, "val") == expected[19::20]


@pytest.mark.slow
def test_a_folder_may_mix_and_nest(tmp_path):
    for folder, kind in (("in", "jsonl"), ("in/p", "parquet"), ("in/z", "txt")):
        write_source(tmp_path / folder, kind)
    text.main([f"--source={tmp_path / 'in'}", "--tokenizer=train:280", f"--out_dir={tmp_path / 'made'}"])
    expected = [*TEXTS, "2020-01-01", *TEXTS, *TEXTS]
    assert documents(tmp_path / "made", "train") == [t for i, t in enumerate(expected) if i % 20 != 19]


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


def test_files_are_read_whatever_their_case_and_packing(tmp_path, capsys):
    """And what is left out is said."""
    files = {"A.TXT": b"1\r\n", "b.Md": b"# 2\r", "c.JSONL": rows("34"), "d.json": rows("56"),
             "e.Json": b'\xef\xbb\xbf \n[{"text": "7"},\n {"text": "8"}]',
             "f.jsonl.gz": gzip.compress(rows("9a")), "g.txt.GZ": gzip.compress(b"b") + gzip.compress(b"b2"),
             "h.json.zst": zstd(b'[{"text": "f"}]'), "i.JSONL.ZST": zstd(rows("c")) + zstd(rows("d")),
             "j.md.zst": zstd(b"e")}
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    for name in ("x.pdf", "y.tar.gz", "z", "zz.zst"):
        (source / name).write_bytes(b"no text")
    (source / "endless.txt").symlink_to("/dev/zero")
    (source / "folder").symlink_to(tmp_path)
    text.main([f"--source={source}", "--tokenizer=train:280", f"--out_dir={out}"])
    expected = ["1\r\n", "# 2\r", *"3456789a", "bb2", "f", "c", "d", "e"]
    assert documents(out, "train") + documents(out, "val") == expected
    assert (f"left out of {source}: 6 of 16 files, endless.txt, folder, x.pdf, ...\n"
            in capsys.readouterr().out)
    text.main([f"--source={source / 'i.JSONL.ZST'}", "--tokenizer=train:257", f"--out_dir={out}"])
    assert documents(out, "train") + documents(out, "val") == ["c", "d"]


def test_hugging_face_datasets(tmp_path, monkeypatch):
    import datasets
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict(dict(id=list(range(45)), body=TEXTS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    argv = ["--source=someone/words", "--tokenizer=train:300", f"--out_dir={tmp_path}", "--config=en",
            "--split=test"]
    text.main([*argv, "--text_key=body"])
    assert asked == [(("someone/words", "en"), dict(split="test"))]
    assert documents(tmp_path, "val") == TEXTS[19::20]
    with pytest.raises(ConfigError, match=r"text_key=text must be one of the columns \(id, body\)"):
        text.main(argv)


@pytest.mark.parametrize("kind", ["file", "folder", "hf", "gpt2", "train"])
def test_tokenizers(tmp_path, tokenizer, kind):
    if kind == "gpt2":
        tokenizer.model.save(str(tmp_path))
        assert {"vocab.json", "merges.txt"} <= {p.name for p in tmp_path.iterdir()}
    file = save(tokenizer, tmp_path / "tokenizer.json") if kind in ("file", "folder", "hf") else None
    if kind == "hf":
        (tmp_path / "config.json").write_text(json.dumps(HF))
    given = dict(file=file, folder=tmp_path, hf=f"hf:{tmp_path}", gpt2=tmp_path, train="train:300")[kind]
    source, out = write_source(tmp_path / "in", "jsonl"), tmp_path / "out"
    text.main([f"--source={source}", f"--tokenizer={given}", f"--out_dir={out}"])
    assert documents(out, "val") == TEXTS[19::20]
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == 300


def test_the_tokenizer_of_a_model_has_no_more_tokens_than_the_model(tmp_path, tokenizer):
    save(tokenizer, tmp_path / "tokenizer.json")
    argv = [f"--source={write_source(tmp_path / 'in', 'jsonl')}", f"--tokenizer=hf:{tmp_path}"]
    for change, message in (
            ({}, "config.json cannot be read"),
            (HF | dict(vocab_size=299), "300 tokens, must have at most the model's vocab_size=299"),
            (HF | dict(model_type="mixtral"), "model_type='mixtral' must be one of gpt2, llama")):
        if change:
            (tmp_path / "config.json").write_text(json.dumps(change))
        with pytest.raises(ConfigError, match=message):
            text.main(argv)


def test_truncation_and_padding_of_a_tokenizer_are_left_out(tmp_path, tokenizer):
    cropped = load_tokenizer(save(tokenizer, tmp_path / "t.json"))
    cropped.enable_truncation(4)
    cropped.enable_padding(length=4)
    write_dataset(tmp_path, TEXTS, load_tokenizer(save(cropped, tmp_path / "t.json")))
    assert documents(tmp_path, "val") == TEXTS[19::20]


BAD_FILES = {"empty.txt": b"", "one.txt": b"a", "latin.txt": b"caf\xe9 " * 9, "list.jsonl": b"[1]\n",
             "half.jsonl": b'{"text": "a\n', "key.jsonl": b'{"body": "a"}\n',
             "number.jsonl": b'{"text": 3}\n', "deep.jsonl": b'{"text":' + b"[" * 99999 + b"\n",
             "bad.parquet": b"nothing " * 9, "a.pdf": b"# a",
             "bad.jsonl.gz": b"x", "half.txt.gz": gzip.compress(b"some text")[:-9], "bad.txt.zst": b"x",
             "list.json": b"[1]", "half.json": b'[{"text": "a"},',
             "digits.jsonl": b'{"text": ' + b"9" * 9999 + b"}\n",
             "long.jsonl": b'{"text": "' + b"a" * 500 + b'"}\n'}


@pytest.mark.parametrize(("argv", "message"), [
    ("--source=nowhere.txt", "source=nowhere.txt does not exist; give a file, a folder"),
    ("--source=a/b/c", "source=a/b/c does not exist; give"),
    ("--source=in/empty",
     "source=in/empty must hold files of the suffixes .txt, .md, .json, .jsonl (each also with .gz or .zst), "
     ".parquet, it holds none; give"),
    ("--source=in/a.pdf", "source=in/a.pdf must have one of the suffixes .txt, .md, .json, .jsonl (each"),
    ("--source=in/a.pdf", ".parquet, not '.pdf'; convert"),
    ("--source=in/bad.jsonl.gz", "in/bad.jsonl.gz cannot be unpacked (Not a gzipped file"),
    ("--source=in/half.txt.gz", "in/half.txt.gz cannot be unpacked (Compressed file ended before"),
    ("--source=in/bad.txt.zst", "in/bad.txt.zst cannot be unpacked (ZSTD decompress failed"),
    ("--source=in/list.json", "in/list.json, row 1: text_key=text must be one of the columns (none); give"),
    ("--source=in/half.json", "in/half.json must be a JSON list of objects, or an object a line (Expecting"),
    ("--source=in/empty.txt", "the source holds no text; give"),
    ("--source=in/one.txt", "the only document has 2 tokens, a dataset needs 4; give"),
    ("--source=in/latin.txt", "in/latin.txt must be UTF-8 text (byte 3: invalid continuation byte); convert"),
    ("--source=in/list.jsonl", "in/list.jsonl:1: text_key=text must be one of the columns (none); give"),
    ("--source=in/half.jsonl", "in/half.jsonl:1 must be one JSON object a line (Invalid control character"),
    ("--source=in/key.jsonl", "in/key.jsonl:1: text_key=text must be one of the columns (body); give"),
    ("--source=in/number.jsonl", "in/number.jsonl:1: text_key=text must hold text, not int; give"),
    ("--source=in/bad.parquet", "source=in/bad.parquet cannot be loaded (ArrowInvalid: Parquet magic bytes"),
    ("--source=in/key.jsonl --tokenizer=train:256 --text_key=body", "vocab_size=256 must be at least 257"),
    ("--source=in --tokenizer=train:many", "tokenizer=train:many must be train:<vocab>, a whole number; try"),
    ("--source=in --tokenizer=nowhere.json",
     "tokenizer=nowhere.json must be a tokenizer.json, or a folder with one"),
    ("--source=in --tokenizer=in/one.txt", "tokenizer=in/one.txt cannot be read ("),
    ("--source=in/key.jsonl --text_key=body --tokenizer=no_end.json",
     "tokenizer=no_end.json: no special tokens may end a document; add <|endoftext|> to its special tokens"),
    ("--source=in --end_token=</s>", "end_token=</s> must be <|endoftext|> for a tokenizer that is trained"),
    ("--source=in --parse_special=2", "parse_special='2' must be true or false"),
    ("--source=in --tokenizer=train:1" + "0" * 30,
     "must be at most 1048576 (the trainer takes memory for each before"),
    ("--source=in --tokenizer=train:1" + "0" * 5000, "tokenizer='train:10000"),
    ("--source=in --out_dir=", "out_dir='' must not be empty"),
    ("--source=", "source='' must not be empty"),
    ("--source=in/deep.jsonl", "in/deep.jsonl:1 must be one JSON object a line (maximum recursion depth"),
    ("--source=in/endless.txt", "source=in/endless.txt is no regular file and no folder; give one"),
    ("--source=in/digits.jsonl", "in/digits.jsonl:1 must be one JSON object a line (Exceeds the limit"),
    ("--source=in/long.jsonl",
     "in/long.jsonl:1 must be at most 400 bytes long (a row is read as a whole); split"),
    ("--source=in --out=x", "unrecognized arguments: --out=x; see --help"),
    ("--text_key=x", "the following arguments are required: --source"),
    ("--source=in/key.jsonl --text_key=body --out_dir=in/a.pdf", "in/a.pdf is no folder"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    if "long" in argv:
        monkeypatch.setattr(text, "MOST_BYTES", 400)
    (tmp_path / "in" / "empty").mkdir(parents=True)
    for name, content in BAD_FILES.items():
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "endless.txt").symlink_to("/dev/zero")
    save(Tokenizer(models.BPE({"a": 0}, [])), tmp_path / "no_end.json")
    assert run(text.main, ["--tokenizer=train:300", "--out_dir=out", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


BOMBS = {
    "line.jsonl.gz": (gzip.compress(b"\n" * 2**22), r"must unpack to at most 64 times its bytes, so far"),
    "a.txt.zst": (pyarrow.compress(b"a b " * 2**20, "zstd", asbytes=True), "must unpack to at most 64 times"),
    "list.json.gz": (gzip.compress(b"[" + b'{"text":"a"},' * 2**19), "must unpack to at most 64 times its"),
    "zeros.jsonl.gz": (gzip.compress(bytes(2**20)) * 65, "zeros.jsonl.gz:1 must be at most 67108864 bytes"),
    "a.jsonl": (b'{"text":[' + b"[]," * 2**20 * 6 + b"0]}", "a.jsonl:1, longer than 16777216 bytes, must"),
    "values.json": (b'[{"text":[' + b"[]," * 2**20 * 6 + b"0]}]", "values.json, longer than 16777216 bytes,"),
    "run.txt": (b"a" * 2**23, "a document goes on with 'aaaaa"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_source_takes_bounded_work(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(BOMBS[name][0])
    argv = [f"--source={tmp_path / name}", "--tokenizer=train:300", f"--out_dir={tmp_path / 'out'}"]
    assert run(text.main, argv) == 2
    err = capsys.readouterr().err
    assert re.search(BOMBS[name][1], err) and err.count("\n") == 1


@pytest.mark.slow
def test_a_parquet_file_takes_bounded_work(tmp_path):
    """One text that stands there many times; a row that is too long; a reader that dies."""
    def read(column):
        import pyarrow.parquet
        file = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table(dict(text=column)), file, compression="zstd")
        return list(text.file_documents(file, "text"))
    assert read(["a", None, "", "é"]) == ["a", "é"]
    with pytest.raises(ConfigError, match="a.parquet must unpack to at most 64 times its bytes"):
        read(pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), ["a" * 2**16]))
    with pytest.raises(ConfigError, match="a.parquet: a row must have at most 67108864 bytes; split it"):
        read(["a" * (2**26 + 1)])
    with pytest.raises(ConfigError, match=r"cannot be loaded \((to read it takes more|ArrowMemory)"):
        read(["a" * 2**29] * 3)
    with pytest.raises(ConfigError, match="text_key=text must hold text, not int"):
        read([1])


def test_added_tokens_are_counted_however_many_there_are():
    """A search for each of them in turn would take minutes."""
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_tokens([f"{'a' * (i % 97)}{i}" for i in range(20_000)])
    tokenizer.add_special_tokens(["<x>", "<x><y>"])
    met, began = collections.Counter(), time.process_time()
    ids = [*tokens.encode(["a" * 50_000 + " 97 <x><y> <x> 97"], tokenizer, 0, met=met)]
    assert met == {False: 2, True: 2} and len(ids) == 1
    assert time.process_time() - began < 10


def offline(tmp_path, *command):
    env = os.environ | dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True,
                          timeout=TIMEOUT_S)


@pytest.mark.slow
def test_an_unreachable_hub_is_one_line_and_status_2(tmp_path):
    done = offline(tmp_path, "data/text/prepare.py", "--source=nobody/nothing", "--tokenizer=train:300",
                   f"--out_dir={tmp_path}")
    assert done.returncode == 2
    assert told(done.stderr).count("\n") == 1
    assert "source=nobody/nothing cannot be loaded (" in done.stderr
    assert "--split, the network" in done.stderr


@pytest.mark.slow
def test_the_scripts_run_from_the_repository_and_leave_no_cache(tmp_path):
    write_source(tmp_path / "in", "parquet")
    done = offline(tmp_path, "data/text/prepare.py", f"--source={tmp_path / 'in'}", "--tokenizer=train:300",
                   f"--out_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "out", "val") == TEXTS[19::20]
    assert not [p for p in (tmp_path / "hf").rglob("*") if p.is_file()]
    assert "--vocab_size" in offline(tmp_path, "data/stdlib/prepare.py", "--help").stdout


def test_stdlib_sources(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "site-packages/x.py", "test/y.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 3)
    (library / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    (library / "bad.py").write_bytes(b"# \xff\n")
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: dict(stdlib=str(library)))
    stdlib.main([f"--out_dir={tmp_path / 'out'}", "--vocab_size=300"])
    assert documents(tmp_path / "out", "train") == ["# a/c.py\n" * 3, "# b.py\n" * 3]
    assert documents(tmp_path / "out", "val") == ["# coding: latin-1\n# é\n"]


# --- reading ---

def test_batches_depend_on_seed_and_step_only(tmp_path):
    data = open_dataset(str(fake_dataset(tmp_path / "d")), 8)
    tokens, targets = data.batch("train", 3, 1, 4, 8, seed=7)
    offsets = data.offsets("train", 3, 1, 4, 8, seed=7)
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert tokens[:, 0].tolist() == offsets
    assert torch.equal(targets, tokens + 1)
    data.batch("val", 0, 0, 2, 8, seed=7)
    again = open_dataset(str(tmp_path / "d"), 8).batch("train", 3, 1, 4, 8, seed=7)
    assert torch.equal(again[0], tokens)
    others = [data.offsets(*key, 4, 8, seed=s) for *key, s in
              (("train", 4, 1, 7), ("train", 3, 0, 7), ("train", 1, 3, 7), ("train", 3, 1, 8),
               ("val", 3, 1, 7))]
    assert len({tuple(o) for o in [*others, offsets]}) == 6


def test_windows_cover_the_split_to_both_ends(tmp_path):
    data = open_dataset(str(fake_dataset(tmp_path / "d", counts=(12, 9))), 8)
    for split, windows in (("train", 4), ("val", 1)):  # val is exactly S + 1 tokens: one window
        seen = [o for step in range(100) for o in data.offsets(split, step, 0, 2, 8, seed=0)]
        assert sorted(set(seen)) == list(range(windows))
    assert data.batch("val", 5, 0, 1, 8, seed=0)[1].tolist() == [list(range(1, 9))]


def test_ids_beyond_the_vocabulary(tmp_path):
    folder = fake_dataset(tmp_path / "d", counts=(9, 9), vocab_size=30,
                          ids=np.array([0, 1, 2, 3, 4, 30, 6, 99, 8]))
    with pytest.raises(DataError,
                       match=r"train\.bin: token 30 at position 5 must be below meta.json's vocab_size=30"):
        open_dataset(str(folder), 8)


def test_ids_beyond_the_vocabulary_are_found_at_once_or_in_a_step(tmp_path, monkeypatch, capsys):
    """Small stretches, so that one lies between them: the run reads it, or check_data; the user's mistake."""
    ids = np.zeros(4000, np.uint16)
    ids[1001] = 40
    folder = fake_dataset(tmp_path / "d", counts=(4000, 9), vocab_size=30, ids=ids)
    monkeypatch.setattr(batch, "STRETCH_BYTES", 2)
    keys = [f"--dataset={folder}", f"--out_dir={tmp_path / 'out'}", "--block_size=8", "--n_layer=1",
            "--n_head=1", "--n_embd=8", "--device=cpu", "--max_iters=50", "--batch_size=64",
            "--eval_interval=0"]
    for more in ([], ["--check_data=true"]):
        assert run(train.main, [*keys, *more]) == 2
        assert re.search(r"^error: \S+train\.bin: token 40 at position 1001 must be below meta.json's "
                         "vocab_size=30; run .*$", capsys.readouterr().err, re.MULTILINE)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def change(**changes):
    def edit(folder):
        path = folder / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return edit


@pytest.mark.parametrize(("harm", "message"), [
    (lambda d: (d / "meta.json").unlink(),
     "has no meta.json, so it is no dataset; run python data/text/prepare.py"),
    (lambda d: (d / "meta.json").write_text("{"), "meta.json cannot be read (Expecting property name"),
    (lambda d: (d / "meta.json").write_text("[]"),
     "meta.json cannot be read (it must be an object, not a list)"),
    (lambda d: (d / "meta.json").write_text("null"),
     "meta.json cannot be read (it must be an object, not a NoneType)"),
    (lambda d: (d / "meta.json").write_text("[" * 99999), "(it must be nested at most 32 deep)"),
    (lambda d: (d / "meta.json").write_text('{"a":' * 40 + "1" + "}" * 40),
     "(it must be nested at most 32 deep)"),
    (lambda d: (d / "meta.json").write_text('{"vocab_size": 1e999}'),
     "cannot be read (1e999 is no finite number)"),
    (change(counts={}), "meta.json: counts={} must be those of train and val; run"),
    (change(counts=dict(train=dict(tokens=100), val=[])), "must be those of train and val; run"),
    (change(counts=dict(train=dict(tokens=100), val=dict(tokens=-1))),
     "counts.val.tokens=-1 must be a whole number; run"),
    (change(counts=dict(train=dict(tokens=True), val=dict(tokens=1))),
     "counts.train.tokens=True must be a whole number"),
    *((change(vocab_size=n), f"vocab_size={n!r} must be a whole number, 1 to 2**32; run")
      for n in ("many", 0, -1, 1e30, 2**33, True, None, [])),
    (change(dtype=[]), "meta.json: dtype=[] must be uint16 or uint32; run"),
    (change(tokenizer=[]), "meta.json: tokenizer=[] must be an object; run"),
    (change(tokenizer=dict(sha256="0" * 64)),
     "tokenizer.json is not the tokenizer that made this dataset, which meta.json"),
    (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read ("),
    (lambda d: ((d / "train.bin").unlink(), (d / "train.bin").mkdir()),
     "train.bin is no regular file: 0 bytes must be"),
    (lambda d: ((d / "train.bin").unlink(), os.mkfifo(d / "train.bin")),
     "train.bin is no regular file: 0 bytes must be"),
    (lambda d: ((d / "val.bin").unlink(), (d / "val.bin").symlink_to("/dev/zero")),
     "val.bin is no regular file: 0 bytes"),
    (change(dtype="int8"), "meta.json: dtype='int8' must be uint16 or uint32; run"),
    (lambda d: (d / "val.bin").unlink(), "val.bin is missing: 0 bytes must be the 100 of the 50 tokens"),
    (lambda d: (d / "train.bin").write_bytes(b""), "train.bin is empty: 0 bytes must be the 200 of"),
    (lambda d: (d / "train.bin").write_bytes(b"x" * 199),
     "train.bin has another length: 199 bytes must be the 200 of"),
    (lambda d: (d / "train.bin").write_bytes(b"x" * 198),
     "train.bin has another length: 198 bytes must be the 200 of"),
])
def test_damaged_datasets(tmp_path, harm, message):
    folder = fake_dataset(tmp_path / "d")
    harm(folder)
    with pytest.raises(ConfigError) as e:
        open_dataset(str(folder), 8)
    assert message in str(e.value)
    assert f"--out_dir={folder}" in str(e.value) or "tokenizer.json cannot be read" in message
    assert "\n" not in str(e.value)


def test_a_split_that_is_cut_short_while_it_is_open(tmp_path):
    """A mapped file would end the process with SIGBUS."""
    folder = fake_dataset(tmp_path / "d")
    data = open_dataset(str(folder), 8)
    os.truncate(folder / "train.bin", 20)
    with pytest.raises(ConfigError,
                       match=r"train\.bin was cut short: 20 bytes must be the 200 of the 100 tokens .*; run"):
        data.batch("train", 0, 0, 9, 8, seed=0)


def test_slices_of_ids_are_those_of_the_file(tmp_path):
    ids = open_dataset(str(fake_dataset(tmp_path / "d")), 8).tokens["train"]
    mapped = np.memmap(tmp_path / "d" / "train.bin", "<u2", mode="r")
    for part in (slice(0, 9), slice(3, 3), slice(90, 200), slice(99, 100), slice(None), slice(200, 300),
                 slice(-5, None)):
        assert ids[part].tolist() == mapped[part].tolist() and ids[part].dtype == mapped.dtype


def test_another_tokenizer_than_the_datasets_own_is_refused(tmp_path, tokenizer):
    write_dataset(tmp_path, TEXTS, tokenizer)
    open_dataset(str(tmp_path), 8)
    save(train_tokenizer(TEXTS, 290), tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer.json is not the tokenizer that made this dataset"):
        open_dataset(str(tmp_path), 8)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer.json is not the tokenizer that made this dataset"):
        open_dataset(str(tmp_path), 8)


def model_of(tokenizer, **changes):
    whole = json.loads(tokenizer.to_str())
    return json.dumps(whole | dict(model=whole["model"] | changes))


@pytest.mark.slow
@pytest.mark.parametrize("junk", [
    lambda t: "", lambda t: "[]", lambda t: "{", lambda t: "[" * 99999, lambda t: "\0",
    lambda t: '{"model": 3}', lambda t: model_of(t, vocab=[]),
    lambda t: model_of(t, merges=[["a", "nothing"]]), lambda t: model_of(t, type="none"),
    lambda t: model_of(t, continuing_subword_prefix="x"),  # the library would abort
    lambda t: json.dumps(json.loads(t.to_str()) | dict(  # and here panic
        normalizer=dict(type="Replace", pattern=dict(String=""), content="a"))),
    lambda t: json.dumps(json.loads(t.to_str())
                         | dict(model=dict(type="WordLevel", vocab={}, unk_token="u")))])
def test_junk_is_no_tokenizer(tmp_path, tokenizer, capfd, junk):
    path = tmp_path / "tokenizer.json"
    path.write_text(junk(tokenizer))
    with pytest.raises(ConfigError,
                       match=rf"^tokenizer={path} cannot be read \([^\n]+\); give a tokenizer.json of"):
        load_tokenizer(path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("counts", "split"), [((100, 50), "val"), ((50, 100), "train")])
def test_a_split_without_one_window(tmp_path, counts, split):
    folder = fake_dataset(tmp_path / "d", counts)
    open_dataset(str(folder), 49)
    with pytest.raises(ConfigError,
                       match=rf"block_size=50 \+ 1 must be <= 50, .*{split}.bin; try --block_size=49"):
        open_dataset(str(folder), 50)


def test_datasets_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("memo.data.batch.DATA", tmp_path)
    with pytest.raises(ConfigError,
                       match="dataset=stdlib must be .* there is none; run python data/stdlib/prepare.py$"):
        open_dataset("stdlib", 8)
    fake_dataset(tmp_path / "mine")
    assert open_dataset("mine", 8).folder == tmp_path / "mine"


def test_a_batch_goes_to_a_gpu_through_pinned_memory_and_nobody_waits():
    """On a GPU itself: make test-cuda counts the copies. Here, what is asked of torch."""
    class Host:
        def __init__(self, pinned=False):
            self.pinned = pinned

        def pin_memory(self):
            return Host(True)

        def to(self, device, non_blocking=False):
            return self.pinned, device, non_blocking
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert to_device(Host(), gpu, pin=True) == (True, gpu, True)
    # from pageable memory a copy must be waited for
    assert to_device(Host(), gpu, pin=False) == (False, gpu, False)
    assert to_device(Host(), cpu, pin=True) == (False, cpu, False)


def test_a_dataset_without_validation_trains_where_none_is_asked_for(tmp_path):
    folder = fake_dataset(tmp_path / "d")
    (folder / "val.bin").unlink()
    meta = json.loads((folder / "meta.json").read_text())
    del meta["counts"]["val"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert list(open_dataset(str(folder), 8, ["train"]).tokens) == ["train"]
    with pytest.raises(ConfigError, match="counts=.* must be those of train and val"):
        open_dataset(str(folder), 8)
