"""Conversations: what a chat template writes, which of its tokens are learned, and the loss over these."""

import gzip
import json
import re

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

import train
from memo.config.layout import Layout
from memo.data.batch import open_dataset
from memo.data.chat import rendered
from memo.data.tokenizer import load_tokenizer
from memo.data.tokens import WEIGHTS, encode, train_tokenizer, write_dataset
from memo.errors import ConfigError
from memo.layer.edges import UNLEARNED
from memo.layer.tiles import row_order
from memo.parallel.mesh import ALONE
from memo.system.command import run
from tests.helpers import ROOT
from tests.layouts import agree, assembled, layout_keys, on_ranks
from tests.packed import FAMILIES, KEYS, LENGTHS, MODES, of_documents, packed_gradients, write_folder
from tests.texts import TEXTS, script

pytestmark = pytest.mark.slow  # templates run in processes of their own

prepare = script("chat")
TEMPLATES = {path.stem: path.read_text() for path in sorted((ROOT / "tests/chat_templates").glob("*.jinja"))}
MARK = re.compile(r"\{%-? (end)?generation -?%\}")
SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<start_of_turn>",
           "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<｜User｜>", "<｜Assistant｜>",
           "<｜end▁of▁sentence｜>", "[INST]", "[/INST]"]
REWRITES = ("deepseek", "qwen3")

# --- templates ---

def say(*texts, system=None):
    turns = [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts)]
    return [dict(role="system", content=system)] * (system is not None) + turns


def call(name, **arguments):
    return dict(role="assistant", content=None, tool_calls=[
        dict(type="function", function=dict(name=name, arguments=arguments))])


CHATS = [say("Who?", "I."), say("a\n\n", "\n\nb 漢 👩‍🚀é", "  c", "d  d\n"),
         say("x " * 900, "y\n" * 2000, "z", "ü" * 99),
         say("q", "<think>\nwhy\n</think>\n\nso", "r", "<think>hm</think>s")]
SYSTEMS = [say("Who?", "I.", "More?", "No <b> & 'c'.", system="Be\nbrief."), say("Who?", system="No answer.")]
TOOLS = [dict(type="function", function=dict(name="add", description="<a & b>", x=dict(é=[1, None])))]
CALLS = [[*say("1 + 1?"), call("add", a=1, b="<é>"), dict(role="tool", content="2"),
          *say("", "Two.", "So?", "!")[1:]],
         [*say("?", "!", "1 + 1?"), call("add", a=[]), dict(role="tool", content="0"), *say("", "0")[1:]]]


def chats_of(name):
    """(messages, tools) that a template takes."""
    calls = [(messages, tools) for messages in CALLS for tools in (TOOLS, None)]
    return [(messages, None) for messages in CHATS + SYSTEMS * (name != "gemma")] + calls * (
        name in ("qwen25", "tools"))


def byte_level():
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def sentence_piece():
    """A tokenizer like Llama 2's: spaces are signs, bytes stand for what is unknown."""
    texts = [text.replace(" ", "▁") for text in TEXTS]
    signs = sorted({sign for text in texts for sign in text} | {chr(i) for i in range(33, 127)})
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *signs])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return dict(byte=byte_level(), sentence=sentence_piece())


def folder_of(folder, tokenizer, template):
    """A model's folder as published, but for the model."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(bos_token="<s>", eos_token="</s>", chat_template=template,
                  tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def encoded(folder, tokenizer, chats, learn="assistant"):
    """[(ids, weights)] of conversations."""
    rows = [(f"row {i}", prepare.conversation_of(dict(messages=messages, tools=tools), f"row {i}"))
            for i, (messages, tools) in enumerate(chats, 1)]
    made, ids, weights = [], [], []
    for piece in encode(rendered(rows, folder, learn), tokenizer, 0, parse_special=True):
        ids += piece.ids
        weights += piece.weights.tolist()
        if piece.last:
            made.append((ids, weights))
            ids, weights = [], []
    return made


@pytest.mark.parametrize("kind", ["byte", "sentence"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_transformers_marks(tmp_path, tokenizers, name, kind):
    transformers = pytest.importorskip("transformers")
    marked, plain = TEMPLATES[name], MARK.sub("", TEMPLATES[name])
    folder = folder_of(tmp_path / "marked", tokenizers[kind], marked)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    chats, expected = chats_of(name), []
    for messages, tools in chats:
        of = theirs.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True,
                                        return_assistant_tokens_mask=True)
        expected.append((of["input_ids"], of["assistant_masks"]))
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert theirs.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=plain) == text
    assert any(sum(mask) for _, mask in expected)
    assert encoded(folder, tokenizers[kind], chats) == expected
    folder = folder_of(tmp_path / "plain", tokenizers[kind], plain)
    if name not in REWRITES:
        assert encoded(folder, tokenizers[kind], chats) == expected
        return
    with pytest.raises(ConfigError, match=r"^row 1: .*give a template with \{% generation %\} marks"):
        encoded(folder, tokenizers[kind], chats[1:])


@pytest.mark.parametrize("marked", [False, True])
def test_learn_says_which_turns(tmp_path, tokenizers, marked):
    """Also the last turn alone of what rewrites history, if that turn stays as it is."""
    tokenizer, messages = tokenizers["byte"], CALLS[0]
    for name in ("qwen25", "qwen3"):
        template = TEMPLATES[name] if marked else MARK.sub("", TEMPLATES[name])
        folder = folder_of(tmp_path / f"{name}{marked}", tokenizer, template)
        messages = CALLS[0] if name == "qwen25" else CHATS[3]
        tokens = [learned_text(tokenizer, *one) for one in (
            encoded(folder, tokenizer, [(messages, None)], learn)[0] for learn in ("all", "last"))]
        if name == "qwen25":
            assert tokens[0].startswith("<|im_start|>system\nYou are")
            assert tokens[1] == "!<|im_end|>\n"
        else:
            assert tokens[1] == "<think>\nhm\n</think>\n\ns<|im_end|>\n"


def learned_text(tokenizer, ids, weights):
    return tokenizer.decode([i for i, weight in zip(ids, weights, strict=True) if weight],
                            skip_special_tokens=False)


def test_spaces_that_offsets_leave_out_and_long_conversations(tmp_path):
    """GPT-2's post-processor takes spaces out of offsets; long conversations are encoded in pieces."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    folder = folder_of(tmp_path / "m", tokenizer, TEMPLATES["mistral"])
    rng = np.random.default_rng(0)
    words = [" ".join(rng.choice(["line", "of", "text", "\n", "é漢", "42"], 60_000)) for _ in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(messages=say(*texts))) + "\n"
                                              for texts in (words, ("a", "  b "), ("c", "d"))))
    prepare.main([f"--source={tmp_path / 'a.jsonl'}", f"--tokenizer={folder}", f"--out_dir={tmp_path / 'd'}"])
    ids = np.fromfile(tmp_path / "d" / "train.bin", "<u2")
    weights = np.fromfile(tmp_path / "d" / "train.weights", np.uint8)
    text = "<s>[INST] {} [/INST] {}</s>[INST] {} [/INST] {}</s><s>[INST] a [/INST] b</s>".format(
        *(text if i % 2 == 0 else text.strip() for i, text in enumerate(words)))
    assert ids.tolist() == load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert learned_text(tokenizer, ids, weights) == f" {words[1].strip()}</s> {words[3].strip()}</s> b</s>"
    assert load_tokenizer(tmp_path / "d").post_processor is not None
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    assert meta["counts"]["train"]["learned"] == weights.sum()


# --- the command ---

def row(*messages, **more):
    return json.dumps(dict(messages=messages) | more) + "\n"


def test_a_dataset_from_the_command_line(tmp_path, tokenizers, capsys):
    """ShareGPT's form is read like the other one; the learned tokens are the targets of a batch, and a text
    dataset in the same place leaves no weights behind."""
    folder = folder_of(tmp_path / "m", tokenizers["byte"], MARK.sub("", TEMPLATES["qwen25"]))
    turns = [{"from": by, "value": value} for by, value in (
        ("human", "1 + 1?"), ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "2"), ("gpt", "Two."))]
    answer = [*say("1 + 1?"), call("add", a=1), dict(role="tool", content="2"), *say("", "Two.")[1:]]
    rows = json.dumps(dict(conversations=turns, system="Be brief.", tools=json.dumps(TOOLS))) + "\n"
    rows += row(*say(system="Be brief."), *answer, tools=TOOLS)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "in" / "b.json").write_text(f"[{row(*say('a', 'b'))}, {row(*say('c', 'd'))}]")
    argv = [f"--source={tmp_path / 'in'}", f"--tokenizer={folder}", f"--out_dir={tmp_path / 'd'}"]
    prepare.main(argv)
    said = capsys.readouterr().out
    assert "--documents=true" in said and "--block_size" not in said
    data = open_dataset(str(tmp_path / "d"), 1024, packs="in_order")
    assert {*data.meta["weights"].values()} < {path.name for path in (tmp_path / "d").iterdir()}
    ids, starts = data.tokens["train"][:], np.fromfile(tmp_path / "d" / "train.docs", "<i8")
    assert (ids[:starts[1]] == ids[starts[1]:starts[2]]).all()
    cfg = Layout(**KEYS | dict(block_size=1024, batch_size=1, vocab_size=data.vocab_size, pack="in_order"))
    batch = data.draw(cfg, "train", 0, 0, 1, row_order(cfg, 1024, ALONE))
    targets = batch.targets[0][batch.targets[0] != UNLEARNED]
    assert len(targets) == data.share(cfg, "train", 0, 1).learned == data.meta["counts"]["train"]["learned"]
    assert tokenizers["byte"].decode(targets.tolist(), skip_special_tokens=False) == 2 * (
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "Two.<|im_end|>\n") + "b<|im_end|>\n"
    write_dataset(tmp_path / "d", TEXTS, tokenizers["byte"], end="</s>")
    assert not [*(tmp_path / "d").glob("*.weights")]


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = 1 %}{% endfor %}{% endfor %}"
CHATML = MARK.sub("", TEMPLATES["chatml"])


@pytest.mark.parametrize(("template", "rows", "message"), [
    (None, row(*say("a", "b")), "must have a chat template, chat_template.jinja or the chat_template of"),
    ("{% for %}", row(*say("a", "b")), "tokenizer_config.json: a chat template must be one of jinja2 (its"),
    (CHATML, row(*say("a")) * 2, "nothing is learned of the train split, "),
    ("{% generation %}{% endgeneration %}a", row(*say("a", "b")) * 2, "tokenizer_config.json writes none; a"),
    (CHATML, row(*say("a", "b")) + row(*say("a")), "nothing is learned of the val split, "),
    ("{{ messages[0].x.y }}", row(*say("a", "b")), "a.jsonl:1: the chat template fails (UndefinedError: "),
    (TEMPLATES["gemma"], row(*say("a", "b")) * 2 + row(*say("a", system="c")),
     "a.jsonl:3: the chat template fails (TemplateError: System role not supported); mend the row or the"),
    (LOOP, row(*say("a", "b")), "a.jsonl:1: the chat template takes more than 5 s or 1 GiB of memory; give"),
    ("{{ 9**(9**(9**9)) }}", row(*say("a", "b")), "a.jsonl:1: the chat template takes more than 5 s or"),
    ("{{ 'a' * 10**10 }}", row(*say("a", "b")), "a.jsonl:1: the chat template fails (MemoryError: Memo"),
    ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", row(*say("a", "b")),
     "a.jsonl:1: the chat template fails (ValueError: it writes more than 1,0"),
    ("{{ messages.append(1) }}", row(*say("a", "b")), "fails (SecurityError: "),
    ("{{ ''.__class__.__mro__ }}", row(*say("a", "b")), "fails (SecurityError: "),
    ("{% set n = namespace(__html__=1) %}", row(*say("a", "b")), "fails (SecurityError: a namespace must"),
    ("{% include '/etc/passwd' %}", row(*say("a", "b")), "fails (TypeError: no loader for this environment"),
    (CHATML, row(*say("a", "b\ud83d")), "a.jsonl:1: the chat template fails (UnicodeEncodeError: 'utf-8'"),
    (CHATML, row(), "a.jsonl:1 must have messages, a list of objects with role and content, or conv"),
    (CHATML, '{"text": "a"}\n', "a.jsonl:1 must have messages, a list"),
    (CHATML, "3\n", "a.jsonl:1 must have messages, a list"),
    (CHATML, row("a"), "a.jsonl:1 must have messages, a list"),
    (CHATML, "\n" + row(dict(role="bot", content="a")), "a.jsonl:2: role='bot' must be one of system, deve"),
    (CHATML, row(dict(role=["user"], content="a")), "a.jsonl:1: role=['user'] must be one of system"),
    (CHATML, row(dict(role="user")), "a.jsonl:1: a message of role=user must have content, or a list"),
    (CHATML, row(dict(role="user", content=3)), "a.jsonl:1: a message of role=user must have content"),
    (CHATML, row(*say("a"), tools=[3]), "a.jsonl:1: tools must be a list of objects; mend"),
    (CHATML, row(*say("a"), tools="{"), "a.jsonl:1 must be tools, a JSON list (Expecting property"),
    (CHATML, '{"messages": ' + "[" * 99 + "]" * 99 + "}\n", "a.jsonl:1 must be nested at most 32 deep"),
    (MARK.sub("", TEMPLATES["qwen3"]), row(*say("a", "b")) + row(*say("a", "b", "c", "d")),
     "a.jsonl:2: the chat template must write messages 1 to 2 alone as in the whole conversation, or what is "
     "learned is not known; give a template with {% generation %} marks, or --learn=last"),
    (CHATML, "", "the source holds no text; give"),
])
def test_what_is_wrong_is_one_line(tmp_path, tokenizers, capsys, template, rows, message):
    folder = folder_of(tmp_path / "m", tokenizers["byte"], template)
    (tmp_path / "a.jsonl").write_text(rows)
    argv = [f"--source={tmp_path / 'a.jsonl'}", f"--tokenizer={folder}", f"--out_dir={tmp_path / 'd'}"]
    assert run(prepare.main, argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not [*tmp_path.glob("d/*")]


def test_a_template_beside_the_tokenizer_and_one_for_tools(tmp_path, tokenizers):
    folder = folder_of(tmp_path / "m", tokenizers["byte"], [
        dict(name="default", template="d"), dict(name="tool_use", template="t")])
    rows = [("", dict(messages=say("a"), tools=tools)) for tools in (None, TOOLS)]
    assert [text for text, _ in rendered(rows, folder, "all")] == ["d", "t"]
    (folder / "chat_template.jinja").write_text("f")
    assert [text for text, _ in rendered(rows, folder, "all")] == ["f", "t"]


# --- weights in a dataset and in the loss ---

def weigh(folder, weights):
    """The dataset with random weights, of the train split these."""
    meta = json.loads((folder / "meta.json").read_text())
    for split, name in WEIGHTS.items():
        some = np.random.default_rng(2).random(sum(LENGTHS)) < 0.3
        (some if weights is None or split == "val" else weights).astype(np.uint8).tofile(folder / name)
    (folder / "meta.json").write_text(json.dumps(meta | dict(weights=WEIGHTS)))
    return folder


def weighed(folder, which):
    """A dataset of which some tokens are learned; or of the first step only those of the first rank of two;
    or none of these."""
    write_folder(folder, LENGTHS)
    packing = open_dataset(str(folder), KEYS["block_size"], packs="best_fit").packings["train"]
    weights = np.zeros(sum(LENGTHS), np.uint8)
    now, *later = packing.numbers(0, len(packing), Layout(**KEYS).seed)
    for k in later[3:] if which == "none" else [now]:
        first, length, _ = packing.pieces(k)[0]
        weights[first + 1:first + min(length, 20)] = 1  # the first is no target here
    return str(weigh(folder, None if which == "some" else weights))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {which: weighed(tmp_path_factory.mktemp("weights") / "d", which)
            for which in ("some", "one", "none")}


def test_weights_count_as_the_targets_of_all_batches(folders):
    for pack in ("best_fit", "in_order"):
        data = open_dataset(folders["some"], 128, packs=pack)
        packing, cfg = data.packings["train"], Layout(**KEYS | dict(
            batch_size=1, gradient_accumulation_steps=1, pack=pack))
        order = row_order(cfg, 128, ALONE)
        counts = [(data.draw(cfg, "train", i, 0, 1, order).targets != UNLEARNED).sum().item()
                  for i in range(len(packing))]
        assert counts == [packing.share(i, 1, cfg.seed).learned for i in range(len(packing))]
        assert 0.2 * sum(LENGTHS) < sum(counts) < 0.4 * sum(LENGTHS)


def check_step(made, folder, which):
    loss, norm, gradients = made
    if which == "none":
        assert loss == norm == 0
        assert all(not g.any() for g in gradients.values())
    else:
        agree(made, of_documents(Layout(**KEYS | FAMILIES["qwen"]), folder), which)


@pytest.mark.parametrize("cut", [dict(), dict(subsequences=4, unit_order="layer")], ids=["N1", "N4"])
@pytest.mark.parametrize("which", ["some", "one", "none"])
def test_the_loss_is_the_mean_over_what_is_learned(folders, which, cut):
    cfgs = [Layout(**KEYS | FAMILIES["qwen"] | cut | mode) for mode in MODES[1:]]
    first, other = packed_gradients(ALONE.host, cfgs, folders[which])
    mine = assembled([first[2]])
    check_step((*first[:2], mine), folders[which], which)
    assert other[:2] == first[:2]
    assert all(torch.equal(t, mine[name]) for name, t in assembled([other[2]]).items())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("which", ["some", "one", "none"])
@pytest.mark.parametrize("text,kind,more", [("cp2", "ring", {}), ("dp2", "ring", {}), ("tp2", "metp", {}),
                                            ("pp2", "ring", dict(subsequences=4))])
def test_ranks_without_learned_tokens(folders, which, text, kind, more):
    cfgs = [Layout(**KEYS | FAMILIES["qwen"] | layout_keys(text, kind) | more | MODES[2])]
    (made,) = on_ranks(text, cfgs, folders[which], work=packed_gradients)
    check_step(made[:3], folders[which], which)


def test_a_run_on_conversations(tmp_path, folders, capsys):
    """Also with steps of which nothing is learned; without documents=true the weights would be ignored."""
    argv = [f"--dataset={folders['none']}", f"--out_dir={tmp_path}", "--n_layer=1", "--n_head=2",
            "--n_embd=16", "--block_size=128", "--batch_size=1", "--gradient_accumulation_steps=1",
            "--max_iters=4", "--eval_interval=2", "--eval_iters=2", "--device=cpu", "--log_interval=1",
            "--dtype=float32"]
    assert train.main([*argv, "--documents=true"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["target_tokens"] for line in lines][1:] == [0, 0, 0]
    assert [line["loss"] for line in lines][1:] == [0, 0, 0]
    assert lines[0]["val_loss"] > 1
    assert run(train.main, argv) == 2
    assert "documents=false must be true for dataset=" in capsys.readouterr().err


@pytest.mark.parametrize("harm,message", [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]),
     "train.weights has another length: 1205 bytes must be the 1206 of the 1206 tokens that meta.json counts"
     "; run python data/chat/prepare.py"),
    (lambda path: path.unlink(), r"train.weights is missing: 0 bytes must be"),
    (lambda path: path.write_bytes(path.read_bytes()[:700] + b"\2" + path.read_bytes()[701:]),
     r"train.weights: weight 2 of token 700 must be 0 or 1; run python data/chat/prepare.py"),
    (lambda path: path.write_bytes(bytes(1206)), "train.bin has no token that is learned: each of its doc")])
def test_weights_that_are_wrong_are_one_line(tmp_path, monkeypatch, harm, message):
    monkeypatch.setattr("memo.data.batch.STRETCH_BYTES", 256)
    folder = weigh(write_folder(tmp_path / "d", LENGTHS), None)
    open_dataset(str(folder), 128, packs="best_fit")
    harm(folder / "train.weights")
    with pytest.raises(ConfigError, match=message) as e:
        open_dataset(str(folder), 128, packs="best_fit")
    assert "\n" not in str(e.value)


def test_meta_names_no_other_weights(tmp_path):
    folder = weigh(write_folder(tmp_path / "d", LENGTHS), None)
    meta = json.loads((folder / "meta.json").read_text()) | dict(weights="../x")
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"weights='../x' must be .*train.weights.*, or left out"):
        open_dataset(str(folder), 128, packs="best_fit")
