"""Tokenizers of every form: read, compared, cut, ended, and the one rule for special tokens."""

import importlib
import json
import os
import random
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

import train
from memo import convert, sample
from memo.data import tokenizer, tokens
from memo.data.tokenizer import (
    ENDS,
    OtherForm,
    encode_text,
    end_of_document,
    find_tokenizer,
    growth,
    load_tokenizer,
    what_decides,
)
from memo.data.tokens import train_tokenizer, write_dataset
from memo.errors import ConfigError
from memo.system.command import run
from tests.texts import TEXTS, gpt2, rows, save, text

WORDS = ("the of don't we'll x1 foo_bar naïve e\u0301a 漢字 안녕 ﬁne ½ ² 3.14 1234567 http://a.b/c //next "
         "};// ...?!! « 。 你好。世界 \U0001f600 </s> <think> \u200b \xa0 % CamelCase").split(" ")
SPACES = [*" " * 12, "\n", "\n\n", "\t", "  ", "    ", "\r\n", "\r", "", "\n    ", " \n", "\u3000"]
RUNS = " \n\t7a漢=-\U0001f600\r。²/"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(*patterns):
    return pre.Sequence([*(pre.Split(Regex(p), "isolated") for p in patterns),
                         pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def some_text(rng, n):
    """Words and spaces, runs of one character up to longer than a window; now and then nothing else."""
    def part():
        if rng.random() < 0.99:
            return rng.choice(WORDS) + rng.choice(SPACES)
        return rng.choice(RUNS) * rng.choice((2, 3, 31, 33, 255, 257, 700))
    kind = rng.random()
    few = [rng.choice(RUNS) * n] if kind < 0.1 else [part() for _ in range(3)] if kind < 0.3 else []
    made = ""
    while len(made) < n:
        made += rng.choice(few) if few else part()
    return made


PREFIX = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
KINDS = {  # pre-tokenizer, normalizers, model
    "gpt2": (pre.ByteLevel(add_prefix_space=False), [], models.BPE),
    "gpt2 with a space": (pre.ByteLevel(add_prefix_space=True), [], models.BPE),
    "tekken": (split(TEKKEN), [], models.BPE), "llama3": (split(LLAMA3), [], models.BPE),
    "qwen": (split(LLAMA3.replace("{1,3}", "")), [normalizers.NFC()], models.BPE),
    "deepseek": (split(*DEEPSEEK), [], models.BPE), "bytes": (split(), [], models.BPE),
    "mistral": (pre.Metaspace(prepend_scheme="first", split=False), [], models.BPE),
    "llama2": (None, PREFIX, models.BPE), "t5": (pre.Metaspace(), [normalizers.NFKC()], models.Unigram),
    "whole unigram": (pre.Metaspace(split=False), [], models.Unigram),
    "bert": (pre.BertPreTokenizer(), [normalizers.BertNormalizer()], models.WordPiece)}


def made(kind, rng):
    cutter, cleaners, model = KINDS[kind]
    unk = {} if isinstance(cutter, (pre.ByteLevel, pre.Sequence)) else dict(unk_token="<unk>")
    tokenizer = Tokenizer(model(**unk) if model is not models.Unigram else model())
    if cutter:
        tokenizer.pre_tokenizer = cutter
    tokenizer.normalizer = normalizers.Sequence(cleaners)
    trainer = dict(BPE=trainers.BpeTrainer, Unigram=trainers.UnigramTrainer,
                   WordPiece=trainers.WordPieceTrainer)[model.__name__]
    more = dict(unk_token="<unk>") if model is models.Unigram else {}
    texts = ["".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(2000)), *(r * 300 for r in RUNS)]
    if kind == "llama2":
        texts = texts[0].split()  # its tokens end with words
    tokenizer.train_from_iterator(texts, trainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=[] if unk or model is not models.BPE else pre.ByteLevel.alphabet(), **more))
    tokenizer.add_tokens(["<think>", "    ", AddedToken("//next", single_word=True)])
    return Tokenizer.from_str(tokenizer.to_str())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE_CHARS", 600)
    rng, met = random.Random(kind), Counter()
    tokenizer, pieces = made(kind, rng), 0
    for n in (3000, 9000) * 4:
        document = some_text(rng, n)
        for special in (False, True):
            found = list(tokens.encode([document, "", "b"], tokenizer, 9999, special, None, met))
            pieces += len(found) - 2
            want = [[*encode_text(tokenizer, d, special), 9999] for d in (document, "b")]
            assert sum((ids for ids, *_ in found), []) == sum(want, [])
            assert [last for _, last, _ in found] == [False] * (len(found) - 2) + [True, True]
    assert pieces > 9 or kind == "whole unigram"
    assert met[True] and met[False]


# --- reading ---

BPE = ["hello there general", "some text"] * 9


def gpt2_folder(folder):
    """vocab.json and merges.txt alone, and the tokenizer that they are of."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_tokenizer(BPE, 300)
    tokenizer.model.save(str(folder))
    return tokenizer


@pytest.mark.parametrize("form", ["added_tokens_decoder", "added_tokens.json"])
def test_gpt2_files_are_read_as_transformers_reads_them(tmp_path, form):
    n = gpt2_folder(tmp_path).get_vocab_size()
    config = dict(tokenizer_class="GPT2Tokenizer", pad_token="<pad>")
    if form == "added_tokens_decoder":
        config[form] = {str(n + i): dict(content=t, special=t == "<pad>")
                        for i, t in enumerate(("<think>", "<pad>"))}
    else:
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": n, "<pad>": n + 1}))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    theirs = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    for t in ("a <|endoftext|> b<pad><think> hello", " there  general\n", "é漢"):
        assert encode_text(mine, t, True) == theirs(t, add_special_tokens=False)["input_ids"]
    assert encode_text(mine, "<think>") == [n] and len(encode_text(mine, "<pad><|endoftext|>")) > 2
    path.write_text(json.dumps(dict(add_prefix_space=True)))
    assert encode_text(load_tokenizer(tmp_path), "there") == encode_text(mine, " there")
    path.write_text(json.dumps(dict(added_tokens_decoder={str(n + 5): dict(content="<x>")})))
    with pytest.raises(ConfigError, match="the files beside it give '<x>' the id"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("files", "what"), [
    (["tokenizer.model"], "tokenizer.model"), (["tekken.json", "params.json"], "tekken.json"),
    (["vocab.txt"], "vocab.txt"), (["spiece.model"], "spiece.model"), (["vocab.json"], "vocab.json"),
    (["qwen.tiktoken"], "qwen.tiktoken"), (["config.json"], "vocab.json and merges.txt of 'qwen2'"),
    (["tokenizer_config.json"], "vocab.json and merges.txt of 'Qwen2Tokenizer'"), ([], None)])
def test_other_forms_are_refused_by_name(tmp_path, files, what):
    """Also GPT-2's files where another class would cut the text."""
    if what and "merges" in what:
        gpt2_folder(tmp_path)
    for name in files:
        (tmp_path / name).write_text(json.dumps(dict(model_type="qwen2", tokenizer_class="Qwen2Tokenizer")))
    if what is None:
        assert find_tokenizer(tmp_path) is None
        with pytest.raises(ConfigError, match="must be a tokenizer.json, or a folder with one"):
            load_tokenizer(tmp_path)
        return
    with pytest.raises(OtherForm, match=rf"={tmp_path} holds {what}, a form that memo does not read; "):
        load_tokenizer(tmp_path)


def test_what_decides_on_ids_is_the_same_in_every_form(tmp_path):
    """Not the bytes of files, and not what changes no id: template, decoder, truncation."""
    tokenizer = gpt2_folder(tmp_path / "a")
    mine = what_decides(load_tokenizer(tmp_path / "a"))
    whole = json.loads(tokenizer.to_str())
    whole["model"] |= dict(continuing_subword_prefix="", end_of_word_suffix="")
    whole["added_tokens"][0]["normalized"] = True
    (tmp_path / "t.json").write_text(json.dumps(whole, indent=3))
    other = load_tokenizer(tmp_path / "t.json")
    other.post_processor = TemplateProcessing(single="<|endoftext|> $A",
                                              special_tokens=[("<|endoftext|>", 0)])
    other.enable_truncation(3)
    assert what_decides(other) == mine
    for change in (lambda t: t.add_tokens(["<x>"]), lambda t: setattr(t, "normalizer", normalizers.NFC()),
                   lambda t: setattr(t, "pre_tokenizer", pre.ByteLevel(add_prefix_space=True)),
                   lambda t: setattr(t, "model", train_tokenizer(BPE, 270).model)):
        changed = Tokenizer.from_str(tokenizer.to_str())
        change(changed)
        assert what_decides(changed) != mine


# --- the end of a document ---

def with_specials(*special):
    """A tokenizer with these special tokens, from id 3 on. Its words are also </s> and <|endoftext|>."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "</s>": 1, "<|endoftext|>": 2}, unk_token="x"))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


TURN = "{% for m in messages %}<|im_start|>{{ m }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(("special", "files", "given", "end"), [
    (["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"], {}, None, "<｜end▁of▁sentence｜>"),
    (["<|EOT|>", "<pad>"], {"tokenizer_config.json": dict(eos_token="<|EOT|>")}, None, "<|EOT|>"),
    (["<|EOT|>"], {"special_tokens_map.json": dict(eos_token=dict(content="<|EOT|>"))}, None, "<|EOT|>"),
    (["<a>", "</s>"], {"config.json": dict(eos_token_id=3)}, None, "<a>"),
    (["<a>", "</s>"], {"generation_config.json": dict(eos_token_id=[3])}, None, "<a>"),
    (["<a>", "</s>"], {"tokenizer_config.json": dict(eos_token=None)}, None, "</s>"),
    (["<a>", "</s>"], {"tokenizer_config.json": dict(eos_token="<a>")}, "</s>", "</s>"),
    (["<a>"], {"meta.json": dict(tokenizer=dict(end_of_document="<a>"))}, None, "<a>"),
    (["<a>"], {"config.json": dict(tokenizer=dict(end_of_document="<a>"))}, None, "<a>"),
    *((["<|endoftext|>", "<|im_end|>"], {"tokenizer_config.json": dict(eos_token=eos, chat_template=TURN)},
       given, given or eos) for eos, given in (("<|endoftext|>", None), ("<|im_end|>", "<|im_end|>")))])
def test_the_end_of_a_document(tmp_path, special, files, given, end):
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    assert end_of_document(with_specials(*special), tmp_path, given) == end


BOTH = r"; give --end_token='<\|im_end\|>' or --end_token='<\|endoftext\|>'$"


@pytest.mark.parametrize(("special", "files", "given", "message"), [
    ([], {}, None, r"no special tokens may end a document; add <\|endoftext\|>"),
    (["<a>"], {}, None, "no special tokens may end a document; give --end_token='<a>'$"),
    (["</s>", "<|endoftext|>"], {}, None, "2 special tokens may end a document; give"),
    (["<a>", "<b>"], {"config.json": dict(eos_token_id=[3, 4])}, None,
     "2 special tokens may end .* give --end_token='<a>' or --end_token='<b>'$"),
    (["<a>"], {"config.json": dict(eos_token_id=0)}, None,
     "end_token=x is none of its special tokens; give --end_token='<a>'$"),
    (["<a>"], {}, "x", "end_token=x is none of its special tokens; give --end_token='<a>'$"),
    *((["<|endoftext|>", "<|im_end|>"],
       files | {"special_tokens_map.json": dict(eos_token="<|im_end|>")}, None,
       r"its end token <\|im_end\|> ends the turns of its chat template, .* otherwise" + BOTH)
      for files in ({"tokenizer_config.json": dict(chat_template=TURN)}, {"chat_template.jinja": TURN},
                    {"chat_template.json": dict(chat_template=TURN)},
                    {"tokenizer_config.json": dict(chat_template=[dict(name="default", template=TURN)])},
                    {"chat_template.jinja": "{{ message + eos_token }}"}))])
def test_an_end_that_is_not_clear_is_refused_with_the_candidates(tmp_path, special, files, given, message):
    for name, said in files.items():
        (tmp_path / name).write_text(said if name.endswith("jinja") else json.dumps(said))
    tokenizer = with_specials(*special)
    assert tokenizer.token_to_id("</s>") is not None and tokenizer.token_to_id(ENDS[0]) is not None  # words
    with pytest.raises(ConfigError, match=message):
        end_of_document(tokenizer, tmp_path, given)


# --- the one rule ---

CHAT = "<|im_start|>user\nhello<|im_end|>\n<think>\nworld</think>\n"


@pytest.fixture
def chat(tmp_path):
    tokenizer = train_tokenizer([CHAT.replace("<|", "<")] * 5, 320)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return save(tokenizer, tmp_path / "t.json")


@pytest.mark.slow
@pytest.mark.parametrize("special", [False, True])
def test_prepare_and_sample_read_special_tokens_by_one_rule(tmp_path, chat, capsys, special):
    (tmp_path / "a.jsonl").write_bytes(rows([CHAT] * 60))
    data, out = tmp_path / "data", tmp_path / "out"
    text.main([f"--source={tmp_path / 'a.jsonl'}", f"--tokenizer={chat}", f"--out_dir={data}",
               f"--parse_special={special}"])
    said = capsys.readouterr().out
    read_as = "which they are" if special else r"read as ordinary text \(--parse_special\)"
    assert re.search(r"^each document ends with the token <\|endoftext\|>, id 0$", said, re.MULTILINE)
    assert re.search(rf"^special tokens met in the text: 120, {read_as}; 120 other added tokens, which stay "
                     "whole$", said, re.MULTILINE)
    tokenizer = load_tokenizer(chat)
    tokenizer.encode_special_tokens = not special
    want = tokenizer.encode(CHAT, add_special_tokens=False).ids
    assert np.fromfile(data / "train.bin", "<u2")[:len(want) + 1].tolist() == [*want, 0]
    assert json.loads((data / "meta.json").read_text())["tokenizer"]["parse_special"] is special
    train.main([f"--dataset={data}", f"--out_dir={out}", "--block_size=64", "--n_layer=1", "--n_head=1",
                "--n_embd=8", "--max_iters=1", "--eval_interval=0", "--device=cpu"])
    asked = []
    (tmp_path / "prompt.txt").write_bytes(CHAT.replace("\n", "\r\n").encode())
    for prompt, key, rule in ((CHAT, [], special), (CHAT, ["--parse_special=true"], True),
                              (CHAT, ["--parse_special=false"], False),
                              (f"@{tmp_path / 'prompt.txt'}", [], special)):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(sample, "generate", lambda model, ids, *a: iter(asked.append(list(ids)) or [5, 0]))
            capsys.readouterr()
            assert run(sample.main, [str(out), f"--prompt={prompt}", "--device=cpu", *key]) == 0
        told = CHAT if prompt == CHAT else CHAT.replace("\n", "\r\n")
        assert asked[-1] == encode_text(tokenizer, told, rule)
        assert capsys.readouterr().out == told + tokenizer.decode([5, 0], skip_special_tokens=False) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("through", ["hf", "from-hf"])
def test_the_models_tokenizer_in_any_form_is_compared_with_the_datas(tmp_path, capsys, through):
    gpt2(vocab_size=310).save_pretrained(tmp_path / "hf")
    gpt2_folder(tmp_path / "hf")
    init = [f"--init_from=hf:{tmp_path / 'hf'}"]
    if through == "from-hf":
        assert run(convert.main, ["from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
        init = ["--init_from=resume"]
    write_dataset(tmp_path / "same", TEXTS, load_tokenizer(tmp_path / "hf"))
    write_dataset(tmp_path / "other", TEXTS, train_tokenizer(TEXTS, 300))

    def train_on(data):
        return run(train.main, [*init, f"--dataset={tmp_path / data}", f"--out_dir={tmp_path / 'out'}",
                                "--max_iters=1", "--eval_interval=0", "--device=cpu"])
    assert train_on("other") == 2
    assert re.search(r"^error: dataset=\S+other was made with another tokenizer than the weights of "
                     r"init_from=\S+; prepare it again with data/text/prepare.py --tokenizer=\S+$",
                     capsys.readouterr().err, re.MULTILINE)
    own = tmp_path / {"hf": "hf", "from-hf": "out/hf_files"}[through]
    for name in ("vocab.json", "merges.txt"):
        (own / name).unlink()
    for name, why in (("tokenizer.model", r"tokenizer=\S+ holds tokenizer.model, a form that memo"),
                      ("README.md", r"\S+ holds none$")):
        (own / "tokenizer.model").unlink(missing_ok=True)
        (own / name).write_bytes(b"something")
        (tmp_path / "out" / "tokenizer.json").unlink(missing_ok=True)  # the data's
        if through == "hf":
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert train_on("same") == 0
        assert re.search(r"^warning: whether dataset=\S+same was made with the tokenizer of the weights of "
                         rf"init_from=\S+ is not known: {why}", capsys.readouterr().err, re.MULTILINE)


REPLACE = [dict(type="Replace", pattern=dict(String="q"), content="qq")]
TWICE = [dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "message"), [
    (dict(normalizer=dict(type="Sequence", normalizers=REPLACE * 40)), "may make a text more than 256"),
    (dict(decoder=dict(type="Sequence", decoders=REPLACE * 40)), "may make a text more than 256 times as"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=TWICE * 30)), "may make a text more than"),
    (dict(normalizer=dict(type="Prepend", prepend="x" * 257)), "may make a text more than 256 times as long"),
    (dict(post_processor=dict(type="TemplateProcessing", pair=[], special_tokens={}, single=[
        {"Sequence": {"id": "A", "type_id": 0}}] * 300)), "it makes a text more than 256 times as long"),
    ({"x" * 2**26: 1}, "it must be at most 67,108,864 characters long"),
    ('{"model": [' + "{}," * 20_000_000 + "1]}", "to encode a short text takes more than 5 s or 1 GiB"),
], ids=["normalizers", "decoders", "words", "one text", "template", "bytes", "memory"])
def test_a_tokenizer_takes_bounded_work(tmp_path, changes, message):
    whole = json.loads(train_tokenizer(TEXTS, 300).to_str())
    file = tmp_path / "tokenizer.json"
    file.write_text(changes if isinstance(changes, str) else json.dumps(whole | changes))
    with pytest.raises(ConfigError, match=rf"^tokenizer={file} cannot be read \(.*{message}.*; give a"):
        load_tokenizer(file)


def test_an_expression_is_tried_on_runs_and_its_failure_is_one_line(tmp_path, monkeypatch):
    whole = json.loads(train_tokenizer(TEXTS, 300).to_str())
    slow = dict(type="Split", pattern=dict(Regex="(a+a+)+b"), behavior="Isolated", invert=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | dict(pre_tokenizer=slow)))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read \(Onig: Regex search error"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer, "RUNS", "")  # what no trial meets
    slow_one = tokenizer.read_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot encode 'aaaa.*'\.\.\. \(Onig"):
        tokenizer.encode_text(slow_one, "a" * 1000)
    with pytest.raises(ConfigError, match=r"cannot encode the source \(Onig"):
        [*tokens.encode(["a" * 1000], slow_one, 0)]


@pytest.mark.slow
def test_a_long_prompt_is_encoded_piece_by_piece_and_no_further_than_it_may_be():
    own, prompt = train_tokenizer(TEXTS, 300), "\n".join(TEXTS) * 400
    ids = tokenizer.encode_text(own, prompt)
    assert len(prompt) > 2 * tokens.PIECE_CHARS and sample.prompt_ids(own, prompt, False, len(ids)) == ids
    assert sample.prompt_ids(own, prompt, False, len(ids) - 1) == ids
    assert sample.prompt_ids(own, prompt, False, 99) == ids[:100]


def test_templates_are_bounded_together(tmp_path):
    save(train_tokenizer(TEXTS, 300), tmp_path / "tokenizer.json")
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**23)
    with pytest.raises(ConfigError, match=r".\.jinja cannot be read \(it must be at most 8,388,\d+ char"):
        end_of_document(load_tokenizer(tmp_path), tmp_path)


def test_usual_parts_of_tokenizers_are_no_growth(tmp_path):
    """Those of Llama 2 and of T5."""
    whole = json.loads(train_tokenizer(TEXTS, 300).to_str())
    llama = [dict(type="Prepend", prepend="▁"), dict(type="Replace", pattern=dict(String=" "), content="▁")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(
        whole | dict(normalizer=dict(type="Sequence", normalizers=llama))))
    load_tokenizer(tmp_path)
    spaces = dict(type="Replace", pattern=dict(Regex=" {2,}"), content="▁")
    assert growth([[dict(type="Precompiled"), spaces], dict(type="Metaspace"), llama]) == 64
