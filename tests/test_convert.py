"""GPT-2 there and back: the same weights, the same logits, the same training as in transformers."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel

import model as memo_model
from memo import convert
from memo.checkpoint import checkpoint
from memo.config.config import Config
from memo.config.layout import Layout
from memo.data.tokenizer import load_tokenizer
from memo.data.tokens import train_tokenizer
from memo.errors import ConfigError
from memo.huggingface import weights
from memo.huggingface.huggingface import model_keys
from memo.huggingface.weights import HfWeights
from memo.memory.flat import model_parameters
from memo.run.load_config import load_config
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.command import run
from model import GPT
from tests.helpers import batches, fails, memo_logits, save_states, trained_beside
from tests.texts import C, L, S, V, gpt2

pytestmark = pytest.mark.usefixtures("one_thread")
GELUS = {"gelu_new": "tanh", "gelu": "exact"}


@pytest.fixture
def hf(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")
    train_tokenizer(["some text"], 300).save(str(tmp_path / "hf" / "tokenizer.json"))
    return tmp_path / "hf"


def config(folder):
    return Layout(**model_keys(folder), weight_decay=0.1, device="cpu")


def memo_gpt(out_dir):
    ckpt = checkpoint.load(out_dir)
    model = Model(GPT, Layout.of(Config(**ckpt.config)), "cpu", torch.float32)
    checkpoint.restore(ckpt, model)
    return model


def transformers_gpt2(folder):
    """The model in `folder`, read by transformers without a complaint."""
    net, complaints = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(complaints.values())
    return net.eval()


def rewrite(folder, change):
    """The weights of `folder` through `change`, which works on {name: tensor} in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


# --- the same model ---

@pytest.mark.slow
@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize("vocab_size", [V, 256])
def test_logits_are_those_of_transformers(tmp_path, activation, vocab_size):
    net = gpt2(activation, vocab_size)
    net.save_pretrained(tmp_path / "hf")
    assert run(convert.main, ["from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    model = memo_gpt(tmp_path / "out")
    assert model.cfg.gelu == GELUS[activation]
    [tokens] = batches(1, vocab_size, S - 1)
    with torch.no_grad():
        wanted = net(tokens).logits
    assert (memo_logits(model, tokens) - wanted).abs().max() < 1e-4
    assert model.gpt.edges.w.wte.shape == (-(-vocab_size // 128) * 128, C)
    assert model.gpt.edges.w.wte[vocab_size:].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("activation", GELUS)
def test_twenty_steps_train_as_transformers_do(tmp_path, activation):
    net = gpt2(activation)
    net.save_pretrained(tmp_path)
    trained_beside(net, tmp_path, config(tmp_path), batches(2, V, S) * 10 + batches(1, V, S))


# --- there and back ---

def test_round_trip_is_bitwise(tmp_path, hf):
    back = tmp_path / "back"
    convert.from_hf(hf, tmp_path / "out")
    convert.to_hf(tmp_path / "out", back)
    theirs = {n: t for n, t in load_file(hf / "model.safetensors").items() if n != "lm_head.weight"}
    assert_same_tensors(load_file(back / "model.safetensors"), theirs)
    assert (back / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    [tokens] = batches(1, V, S - 1)
    with torch.no_grad():
        assert torch.equal(transformers_gpt2(back)(tokens).logits, transformers_gpt2(hf)(tokens).logits)
    assert model_keys(back) == model_keys(hf)


@pytest.mark.slow
def test_transformers_loads_the_tokenizer(tmp_path, hf):
    convert.from_hf(hf, tmp_path / "out")
    convert.to_hf(tmp_path / "out", tmp_path / "back")
    theirs, mine = AutoTokenizer.from_pretrained(tmp_path / "back"), load_tokenizer(tmp_path / "back")
    for text in ("some text", "def f(x):\n    return 'é漢' ,x <|endoftext|>\n"):
        assert (theirs(text)["input_ids"] == mine.encode(text).ids
                and theirs.decode(theirs(text)["input_ids"]) == text)
    assert theirs.eos_token == "<|endoftext|>"


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_a_trained_model_goes_to_transformers(tmp_path, bias):
    cfg = Layout(n_layer=2, n_head=2, n_embd=C, block_size=S, vocab_size=V, position="learned", bias=bias)
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(memo_model.initial_weights(cfg, 1, "cpu"))
    save_states(tmp_path, optimizer, cfg, 7)
    convert.to_hf(tmp_path, tmp_path / "hf")
    net = transformers_gpt2(tmp_path / "hf")
    [tokens] = batches(1, V, S - 1)
    with torch.no_grad():
        assert (net(tokens).logits - memo_logits(model, tokens)).abs().max() < 1e-4
    assert (net.transformer.h[0].attn.c_attn.bias == 0).all()


def test_a_converted_model_is_resumed(tmp_path, hf):
    convert.from_hf(hf, tmp_path)
    cfg = Layout.of(load_config([f"--out_dir={tmp_path}", "--init_from=resume"]))
    assert (cfg.n_layer, cfg.vocab_size, cfg.position, cfg.bias) == (L, V, "learned", True)
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    for flat in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps):
        flat.fill_(3.0)
    ckpt = checkpoint.load(tmp_path)
    checkpoint.restore(ckpt, model, optimizer)
    optimizer.publish()
    assert ckpt.iter == 0
    assert not any(p.tensor.count_nonzero() for p in optimizer.pieces() if not p.name.startswith("params."))
    assert optimizer.steps == 0


# --- the forms in which such folders come ---

def test_positions_are_cropped(hf):
    cfg = replace(config(hf), block_size=S - 6)
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(HfWeights(hf, cfg))
    [tokens] = batches(1, V, S - 7)
    with torch.no_grad():
        assert (memo_logits(model, tokens) - gpt2()(tokens).logits).abs().max() < 1e-4


def test_shards_give_the_same(tmp_path, hf):
    gpt2().save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    cfg = config(hf)
    assert_same_tensors(dict(HfWeights(tmp_path / "shards", cfg)), dict(HfWeights(hf, cfg)))


def test_old_names_give_the_same(hf):
    cfg = config(hf)
    wanted = dict(HfWeights(hf, cfg))

    def old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(L):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, S, S).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    rewrite(hf, old)
    assert_same_tensors(dict(HfWeights(hf, cfg)), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_become_fp32(hf, dtype):
    cfg = config(hf)
    wanted = {n: w.to(dtype).float() for n, w in HfWeights(hf, cfg)}
    rewrite(hf, lambda tensors: tensors.update({n: w.to(dtype) for n, w in tensors.items()}))
    assert_same_tensors(dict(HfWeights(hf, cfg)), wanted)


def test_names_and_padding_are_the_models(hf):
    cfg = config(hf)
    shapes = {n: p.shape for n, p in model_parameters(cfg).items()}
    assert {n: tuple(w.shape) for n, w in HfWeights(hf, cfg)} == shapes


# --- the user's mistakes ---

def lose(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(("change", "message"), [
    (lose("transformer.h.1.ln_2.bias"), r"h\.1\.ln_2\.bias is missing, must be \(64,\)"),
    (lose("transformer.wte.weight"), r"wte\.weight is missing"),
    (put("transformer.wte.weight", torch.zeros(V + 1, C)),
     r"wte\.weight is \(301, 64\).*must be \(300, 64\)"),
    (put("transformer.wpe.weight", torch.zeros(S - 1, C)), r"wpe\.weight is \(30, 64\).*must be \(31, 64\)"),
    (put("transformer.h.0.mlp.c_fc.weight", torch.zeros(4 * C, C)),
     r"h\.0\.mlp\.c_fc\.weight is \(256, 64\)"),
    (put("transformer.ln_f.bias", torch.zeros(C, dtype=torch.int8)), r"ln_f\.bias is \(64,\) I8.*F16"),
    (put("lm_head.weight", torch.zeros(V, C)), r"lm_head\.weight differs from transformer\.wte\.weight"),
    (put("transformer.h.3.ln_1.bias", torch.zeros(C)),
     r"h\.3\.ln_1\.bias is not a tensor of a gpt2 model with n_layer=3"),
])
def test_weights_that_do_not_fit(tmp_path, hf, capsys, change, message):
    rewrite(hf, change)
    fails(capsys, message, "from-hf", hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_that_do_not_fit(tmp_path, hf, capsys):
    file, out = hf / "model.safetensors", tmp_path / "out"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    fails(capsys, "cannot be read", "from-hf", hf, out)
    file.unlink()
    fails(capsys, r"holds no model\.safetensors; give a local folder", "from-hf", hf, out)
    (hf / "pytorch_model.bin").touch()
    fails(capsys, r"pytorch_model\.bin could run code.*save_pretrained", "from-hf", hf, out)
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"wte.weight": "model-1.safetensors"}}))
    fails(capsys, r"model-1\.safetensors cannot be read", "from-hf", hf, out)
    (hf / "model.safetensors.index.json").write_text("{")
    fails(capsys, "cannot be read", "from-hf", hf, out)
    fails(capsys, "nowhere", "from-hf", tmp_path / "nowhere", out)
    fails(capsys, "nowhere/ckpt holds no checkpoint", "to-hf", tmp_path / "nowhere", out)
    assert not out.exists()


HF = dict(model_type="gpt2", n_layer=3, n_head=2, n_embd=64, n_positions=128, vocab_size=500)


@pytest.mark.parametrize("text", [
    "[]", "null", "", "[" * 99999, '{"a":' * 99 + "1" + "}" * 99, json.dumps(HF).replace("64", "1e999"),
    json.dumps(HF | dict(n_head=3)),
    *(json.dumps(HF | {name: value}) for name in ("n_layer", "n_embd", "n_positions", "vocab_size")
      for value in (0, -1, 10**30, 1.5, True, None, "3", [3])),
    *(json.dumps(HF | {name: []})
      for name in ("model_type", "activation_function", "layer_norm_epsilon", "n_inner",
                   "scale_attn_weights", "tie_word_embeddings"))])
def test_configs_that_cannot_be(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    fails(capsys, "config.json|n_embd=64 % n_head=3", "from-hf", tmp_path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("index", "message"), [
    ([], "must be an object, not a list"), (None, "must be an object, not a NoneType"),
    ("[" * 99999, "nested at most 32"),
    *((dict(weight_map=names), "weight_map must give each tensor the name of a file in its folder; download")
      for names in (None, [], {}, "x", 3, {"a": None}, {"a": 3}, {"a": ["x"]}, {"a": ""}, {"a": ".."},
                    {"a": "/etc/passwd"}, {"a": "../../outside.safetensors"}, {"a": "x/y"}, {"a": "x\0"})),
    (dict(weight_map={"a": "pipe"}), "hf/pipe cannot be read .is no regular file.; download"),
    (dict(weight_map={"a": "zero"}), "hf/zero cannot be read .is no regular file.; download"),
    (dict(weight_map={"a": "config.json"}), "hf/config.json cannot be read .*; download")])
def test_an_index_names_files_of_its_folder_only(tmp_path, hf, capsys, index, message):
    (hf / "model.safetensors").rename(tmp_path / "outside.safetensors")
    os.mkfifo(hf / "pipe")
    (hf / "zero").symlink_to("/dev/zero")
    (hf / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    fails(capsys, message, "from-hf", hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_header_is_bounded_and_parsed_once(tmp_path, hf, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(weights, "safe_open", lambda path, kind: opened.append(path) or safe_open(path, kind))
    cfg = Layout(**convert.model_keys(hf))
    assert len(dict(HfWeights(hf, cfg))) > 20 and len(opened) == 1
    file = hf / "model.safetensors"
    file.write_bytes((2**24 + 8).to_bytes(8, "little") + b"{}".ljust(2**24 + 8))
    fails(capsys, "cannot be read .its header of 16,777,224 bytes must have at most 16,777,216.; download",
          "from-hf", hf, tmp_path / "out")


def test_files_that_go_along_are_bounded_together(tmp_path, hf, capsys):
    for name in ("a.txt", "b.txt", "c.txt"):
        (hf / name).touch()
        os.truncate(hf / name, 2**25)
    convert.from_hf(hf, tmp_path / "out")
    assert {"a.txt", "config.json"} <= {path.name for path in (tmp_path / "out/hf_files").iterdir()}
    assert not (tmp_path / "out/hf_files/c.txt").exists()
    assert "c.txt does not go along with the model" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, hf, capsys):
    (hf / "tokenizer.json").write_text('{"some": "tokenizer"}')
    fails(capsys, r"tokenizer=\S+tokenizer\.json cannot be read", "from-hf", hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_told(tmp_path, hf, capsys, bad):
    def spoil(tensors):
        tensors["transformer.h.1.mlp.c_fc.weight"][3, 4:6].fill_(bad)
        tensors["transformer.wte.weight"][0].fill_(bad)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    rewrite(hf, spoil)
    fails(capsys, "there are NaN or infinities in wte.weight, a model with them cannot train; download the",
          "from-hf", hf, tmp_path / "out")
    assert not checkpoint.latest(tmp_path / "out") and not (tmp_path / "out" / "config.json").exists()


def test_nothing_is_overwritten(tmp_path, hf, capsys):
    convert.from_hf(hf, tmp_path / "out")
    capsys.readouterr()
    fails(capsys, "holds a checkpoint or a config.json already", "from-hf", hf, tmp_path / "out")
    fails(capsys, "holds weights or a config.json already", "to-hf", tmp_path / "out", hf)


def test_a_full_disk_is_one_line_and_leaves_no_weights(tmp_path, hf, capsys, monkeypatch):
    convert.from_hf(hf, tmp_path / "out")
    capsys.readouterr()

    def full(file, *args):
        file.write(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "write_header", full)
    fails(capsys, r"model\.safetensors cannot be written \(No space left.*; free some space there or choose",
          "to-hf", tmp_path / "out", tmp_path / "hf2")
    assert not list((tmp_path / "hf2").iterdir())


def test_rotary_positions_stay(tmp_path, capsys):
    cfg = Layout(n_layer=1, n_head=2, n_embd=C, block_size=S, vocab_size=V, position="rope")
    model = Model(GPT, cfg, "cpu", torch.float32)
    save_states(tmp_path, Optimizer(model, cfg), cfg, 0)
    fails(capsys, "position=rope must be learned for to-hf.*--position=learned",
          "to-hf", tmp_path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("command", [["--help"], ["from-hf", "--help"], ["to-hf", "--help"]])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        convert.main(command)
    assert stop.value.code == 0
    assert "hf" in capsys.readouterr().out


def test_weights_raise_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        list(HfWeights(tmp_path, Layout()))
