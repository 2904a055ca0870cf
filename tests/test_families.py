"""Llama, Mistral, Qwen 2 and Qwen 3 there and back: the same logits and the same training as in transformers,
and one line for all that memo does not have."""

import json
import re
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from memo import convert
from memo.checkpoint import checkpoint
from memo.config.layout import Layout
from memo.data.tokens import train_tokenizer
from memo.errors import ConfigError
from memo.huggingface import weights
from memo.huggingface.families import FAMILIES, GPT2, LLAMA
from memo.huggingface.huggingface import (
    check_reach,
    hf_config,
    keys_of,
    model_keys,
    overlaid,
)
from memo.huggingface.weights import HfWeights, check_folder
from memo.layer.tiles import UNLEARNED, Batch, Packed
from memo.memory.flat import model_parameters
from memo.memory.parameters import bucket_views
from memo.run.load_config import load_config
from memo.sample import load_model
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT
from tests.helpers import (
    VOCAB,
    argv,
    batches,
    fails,
    memo_logits,
    perturbed_weights,
    save_states,
    trained_beside,
)
from train import main

pytestmark = pytest.mark.usefixtures("one_thread")
V, S = 300, 64
SMALL = dict(vocab_size=V, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=S, bos_token_id=1, eos_token_id=0)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.3], partial_rotary_factor=0.5,
                long_factor=[1, 2.5, 7])
MODELS = {
    "llama, one kv head, tied, llama3": (LlamaConfig, dict(
        num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama, all kv heads, head_dim, linear": (LlamaConfig, dict(
        num_key_value_heads=4, head_dim=20,
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "mistral, C % H != 0, attention_factor, window": (MistralConfig, dict(
        num_attention_heads=5, num_key_value_heads=1, head_dim=16, sliding_window=9,
        rope_parameters=YARN | dict(attention_factor=1.3))),
    "qwen2, biases, tied, yarn": (Qwen2Config, dict(
        num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=YARN)),
    "olmo2, norms behind": (Olmo2Config, dict(
        num_key_value_heads=2, pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "olmo3, yarn in some layers": (Olmo3Config, dict(
        num_key_value_heads=2, pad_token_id=None, sliding_window=11,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=5e5)))),
    "gemma3, frequencies of both kinds": (Gemma3TextConfig, dict(
        num_key_value_heads=2, head_dim=20, sliding_window=9, query_pre_attn_scalar=28, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4)))),
    "qwen3, norms of heads, mscale, window": (Qwen3Config, dict(
        num_key_value_heads=2, head_dim=32, use_sliding_window=True, sliding_window=20, max_window_layers=1,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7))),
    "smollm3, a layer without positions slides": (SmolLM3Config, dict(
        num_key_value_heads=2, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=12,
        pad_token_id=None, rope_parameters=YARN)),
    "phi3, in parts, longrope, tied": (Phi3Config, dict(
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=None, rope_parameters=LONGROPE,
        original_max_position_embeddings=16)),
    "phi3, window": (Phi3Config, dict(num_key_value_heads=4, pad_token_id=None, sliding_window=9))}


def hf_model(kind, **more):
    """A model of transformers with random weights in which no bias is zero and no gain is one."""
    torch.manual_seed(5)
    net = AutoModelForCausalLM.from_config(kind(**SMALL | more), attn_implementation="eager")
    for p in net.parameters():
        p.data += torch.randn_like(p) * 0.1
    return net.eval()


def saved(folder, kind, **more):
    """A model in `folder`, in three files, with a tokenizer."""
    net = hf_model(kind, **more)
    nbytes = sum(p.numel() * 4 for p in net.parameters())
    net.save_pretrained(folder, max_shard_size=int(nbytes * 0.45))
    train_tokenizer(["some text"], V).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>", model_max_length=8)))
    return net


def reloaded(folder):
    """The model in `folder`, read by transformers without a complaint."""
    net, complaints = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager",
                                                           output_loading_info=True)
    assert not any(complaints.values())
    return net.eval()


def logits(net, tokens):
    with torch.no_grad():
        return net(tokens).logits.float()


def all_tensors(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.fixture
def hf(tmp_path):
    saved(tmp_path / "hf", Qwen2Config, num_key_value_heads=2)
    return tmp_path / "hf"


# --- the same model ---

@pytest.mark.parametrize("name", [
    name if name.startswith(("qwen3", "olmo2", "gemma3")) else pytest.param(name, marks=pytest.mark.slow)
    for name in MODELS])
def test_in_and_out_again(tmp_path, name):
    kind, more = MODELS[name]
    there, out, back = (tmp_path / folder for folder in ("hf", "out", "back"))
    net = saved(there, kind, **more)
    assert len(list(there.glob("*.safetensors"))) == 3
    convert.from_hf(there, out)
    model = load_model(out, "cpu", "float32")
    [tokens] = batches(1, V, S - 1)  # four times as long as the original length
    mine = memo_logits(model, tokens)
    assert (mine - logits(net, tokens)).abs().max() < 1e-4
    convert.to_hf(out, back)
    assert (mine - logits(reloaded(back), tokens)).abs().max() < 1e-5
    a, b = all_tensors(there), all_tensors(back)
    assert a.keys() == b.keys()
    rounding = 1e-6 if name.startswith("gemma3") else 0.0  # of 1 + w
    assert all((a[n] - b[n]).abs().max() <= rounding for n in a)
    assert model_keys(back) == model_keys(there)
    assert AutoTokenizer.from_pretrained(back).eos_token == "<|endoftext|>"
    assert [json.loads((back / "config.json").read_text())[f"{x}_token_id"] for x in ("bos", "eos")] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_train_as_transformers_do(tmp_path, name):
    kind, more = MODELS[name]
    net = saved(tmp_path / "hf", kind, **more)
    cfg = Layout(**model_keys(tmp_path / "hf"), device="cpu")
    model, optimizer = trained_beside(net, tmp_path / "hf", cfg, batches(2, V, S) * 10)
    [tokens] = batches(1, V, S - 1)
    save_states(tmp_path, optimizer, cfg, 20)
    convert.to_hf(tmp_path, tmp_path / "back")
    assert (memo_logits(model, tokens) - logits(reloaded(tmp_path / "back"), tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", [*MODELS][:1] + [*MODELS][-1:])
def test_a_pack_is_transformers_with_a_block_diagonal_mask(tmp_path, name, N):
    """Loss, each gradient's size and the embedding's, with the same positions; the last is padding."""
    kind, more = MODELS[name]
    net = saved(tmp_path / "hf", kind, **more)
    cfg = Layout(**model_keys(tmp_path / "hf") | dict(
        documents=True, batch_size=2, block_size=S, device="cpu", subsequences=N))
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(HfWeights(tmp_path / "hf", cfg))
    ends, [rows] = ((20, 21, 50), (7, 64)), batches(1, V, S)
    tokens, targets = rows[:2, :-1].clone(), rows[:2, 1:].clone()
    positions, sees = torch.zeros(2, S, dtype=torch.long), torch.eye(S, dtype=torch.bool).repeat(2, 1, 1)
    for b, of in enumerate(ends):
        targets[b, of[-1]:] = UNLEARNED
        for first, end in pairwise((0, *of)):
            targets[b, end - 1] = UNLEARNED
            positions[b, first:end] = torch.arange(end - first)
            sees[b, first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
    full, slides = (torch.zeros(2, 1, S, S).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
                    for seen in (sees, sees.triu(1 - (cfg.window or S))))
    by_layer = dict(full_attention=full, sliding_attention=slides)
    mask = by_layer if getattr(net.config, "layer_types", None) else slides
    theirs = net(tokens, attention_mask=mask, position_ids=positions).logits.flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(theirs, targets.flatten(), ignore_index=UNLEARNED)
    wanted.backward()
    learned = int((targets != UNLEARNED).sum())
    batch = model.on_device(Batch(tokens, targets, Packed(positions, ends)))
    loss = model.forward(*batch, scale=1.0, learned=learned)
    model.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    square = sum(p.grad.double().square().sum() for p in net.parameters())
    assert optimizer.clip(0.0).item() == pytest.approx(square.sqrt().item(), rel=1e-5)
    place = model.layout["wte"]
    mine = bucket_views(model.layout, model.buckets, model.bucket_grads)["wte"][:V]
    grad = net.get_input_embeddings().weight.grad
    assert place.shape[1] == grad.shape[1] and (mine - grad).norm() <= 1e-5 * grad.norm()


def test_bf16_goes_there_and_back(tmp_path, monkeypatch, hf):
    for file in hf.glob("*.safetensors"):
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, {"format": "pt"})
    convert.from_hf(hf, tmp_path / "out")
    monkeypatch.setattr(weights, "SHARD_BYTES", 10**4)  # an embedding is more
    convert.main(["to-hf", str(tmp_path / "out"), str(tmp_path / "back"), "--dtype=bfloat16"])
    a, b = all_tensors(hf), all_tensors(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-0*-of-0*.safetensors"))) > 5
    assert a.keys() == b.keys()
    assert all(t.dtype == torch.bfloat16 and torch.equal(a[n], t) for n, t in b.items())
    assert reloaded(tmp_path / "back").dtype == torch.bfloat16


# --- a longer context ---

@pytest.mark.slow
def test_a_longer_context_is_trained_and_goes_out(tmp_path, dataset):
    net = hf_model(LlamaConfig, vocab_size=VOCAB + 9, num_key_value_heads=2, max_position_embeddings=16)
    net.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    keys = {k: v for k, v in (arg[2:].split("=", 1) for arg in argv(dataset, tmp_path / "out", max_iters=2))
            if not k.startswith("n_")}
    given = [f"--{k}={v}" for k, v in keys.items()]
    assert main([*given, f"--init_from=hf:{tmp_path / 'hf'}", f"--rope_scaling={json.dumps(scaling)}",
                 "--rope_theta=20000", "--block_size=64"]) == 0
    convert.to_hf(tmp_path / "out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64 and config["rope_theta"] == 20000.0
    assert config["vocab_size"] == VOCAB + 9
    assert config["rope_scaling"].items() >= scaling.items()
    assert config["rope_parameters"] == config["rope_scaling"] | dict(rope_theta=20000.0)
    assert (tmp_path / "back" / "chat_template.jinja").exists()
    model = load_model(tmp_path / "out", "cpu", "float32")
    [tokens] = batches(1, VOCAB, 63)
    mine = memo_logits(model, tokens)
    for field in ("rope_scaling", "rope_parameters"):  # transformers 4 reads the first, 5 either
        left = {k: v for k, v in config.items() if k != field}
        (tmp_path / "back" / "config.json").write_text(json.dumps(left))
        assert (mine - logits(reloaded(tmp_path / "back"), tokens)).abs().max() < 1e-5
    longer = load_config(["--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--block_size=128",
                          "--rope_scaling="])
    ckpt = checkpoint.load(tmp_path / "out")
    checkpoint.restore(ckpt, Model(GPT, Layout.of(longer), "cpu", torch.float32))  # and again another context


def test_only_positions_may_change(hf):
    assert load_config([f"--init_from=hf:{hf}", "--block_size=16"]).block_size == 16
    with pytest.raises(ConfigError, match="n_kv_head=4 differs from 2"):
        load_config([f"--init_from=hf:{hf}", "--n_kv_head=4"])


def test_yarn_of_another_factor_is_told(tmp_path, capsys, hf):
    cfg = Layout(**model_keys(hf) | dict(rope_scaling=json.dumps(YARN | dict(factor=2.0)).replace(
        '"rope_theta": 1000000.0, ', "")))
    optimizer = Optimizer(model := Model(GPT, cfg, "cpu", torch.float32), cfg)
    optimizer.load(perturbed_weights(model.cfg, "cpu"))
    save_states(tmp_path, optimizer, cfg, 0)
    convert.to_hf(tmp_path, tmp_path / "back")
    assert "factor=2.0 is not block_size=64 / 16" in capsys.readouterr().err


# --- tensor by tensor ---

# of one head of keys a rank has a copy, or by METP half
@pytest.mark.parametrize("family,use", [("gpt2", "megatron"), ("qwen3", "megatron"), ("phi3", "megatron"),
                                        ("phi3", "metp")])
def test_each_rank_reads_its_part_only(tmp_path, monkeypatch, family, use):
    own = dict(gpt2={}, qwen3=dict(n_kv_head=2, tie_embeddings=False),
               phi3=dict(n_kv_head=1, tie_embeddings=False, partial_rotary_factor=0.5))
    keys = FAMILIES[family].keys | own[family]
    cfg = Layout(n_layer=2, n_head=4, n_embd=32, vocab_size=200, block_size=S, tensor_parallel=use, **keys)
    made = dict(perturbed_weights(cfg, "cpu"))
    optimizer = Optimizer(Model(GPT, cfg, "cpu", torch.float32), cfg)
    optimizer.load(made.items())
    save_states(tmp_path, optimizer, cfg, 0)
    convert.to_hf(tmp_path, tmp_path / "hf")
    read, whole = [], dict(HfWeights(tmp_path / "hf", cfg))
    get = weights.Stored.__getitem__
    monkeypatch.setattr(weights.Stored, "__getitem__",
                        lambda *args: (got := get(*args), read.append(got.numel()))[0])
    parts = [dict(HfWeights(tmp_path / "hf", cfg, rank, 2)) for rank in range(2)]
    described = model_parameters(cfg)
    for name, p in described.items():
        both = [part[name] for part in parts]
        assert torch.equal(torch.cat(both, p.split_dim) if p.copies(2) == 1 else both[0], whole[name])
        assert torch.equal(both[0], both[1]) == (p.copies(2) == 2) and torch.equal(made[name], whole[name])
    split = sum(t.numel() for n, t in whole.items() if described[n].copies(2) == 1)
    padding = 56 * 32 * (1 if family == "gpt2" else 2)
    halves = sum(t.numel() for n, t in whole.items() if n.endswith("k_w")) * (use == "metp")
    assert sum(read) == split - padding + halves + 2 * (sum(t.numel() for t in whole.values()) - split)


def test_few_tensors_are_in_memory_at_once(tmp_path, monkeypatch, hf):
    alive, most = set(), [0]

    def counted(read):
        def reading(*args):
            tensor = read(*args)
            alive.add(weakref.ref(tensor.untyped_storage(), alive.discard))
            most[0] = max(most[0], len(alive))
            return tensor
        return reading
    monkeypatch.setattr(weights.HfWeights, "read", counted(weights.HfWeights.read))
    convert.from_hf(hf, tmp_path / "out")
    assert 1 <= most[0] <= 3


# --- fields of config.json ---

def test_defaults_are_those_of_transformers(tmp_path):
    for kind, theirs in (("llama", LlamaConfig()), ("mistral", MistralConfig()), ("qwen2", Qwen2Config()),
                         ("qwen3", Qwen3Config()), ("smollm3", SmolLM3Config()), ("olmo2", Olmo2Config()),
                         ("olmo3", Olmo3Config()), ("gemma3_text", Gemma3TextConfig())):
        needed = {name: getattr(theirs, name) for name in LLAMA.sizes.values()} | dict(hidden_size=512)
        (tmp_path / "config.json").write_text(json.dumps(dict(model_type=kind, sliding_window=None) | needed))
        keys, H = model_keys(tmp_path), theirs.num_attention_heads
        Hkv = theirs.num_key_value_heads if FAMILIES[kind].defaults.get("num_key_value_heads") else H
        assert keys["n_kv_head"] == Hkv and keys["norm_eps"] == theirs.rms_norm_eps
        assert keys["tie_embeddings"] is theirs.tie_word_embeddings
        assert keys["head_dim"] == (theirs.head_dim if "head_dim" in FAMILIES[kind].defaults else 512 // H)
        ropes = theirs.rope_parameters
        assert keys["rope_theta"] == ropes.get("full_attention", ropes)["rope_theta"]
        only = FAMILIES[kind].only.items()
        assert all(getattr(theirs, name, allowed[0]) in allowed for name, allowed in only)
        if kind not in ("olmo3", "gemma3_text"):
            continue
        long = needed | dict(model_type=kind, max_position_embeddings=2**17)
        (tmp_path / "config.json").write_text(json.dumps(long))
        kinds = Layout(**model_keys(tmp_path)).kinds
        assert [of.window > 0 for of in kinds] == [t == "sliding_attention" for t in theirs.layer_types]
        assert kinds[0].window == theirs.sliding_window
        assert kinds[0].rope.theta == ropes["sliding_attention"]["rope_theta"]
        assert keys["query_scalar"] == getattr(theirs, "query_pre_attn_scalar", 0)
    assert FAMILIES["mistral"].defaults["sliding_window"] == MistralConfig().sliding_window


REAL = [  # fields as in the files of public models
    dict(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
         bos_token_id=128000, eos_token_id=[128001, 128008], hidden_act="silu", initializer_range=0.02,
         mlp_bias=False, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0,
         tie_word_embeddings=False,
         rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                           original_max_position_embeddings=8192),
         torch_dtype="bfloat16", transformers_version="4.43.0", use_cache=True),
    dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, hidden_act="silu",
         initializer_range=0.02, max_window_layers=70, num_key_value_heads=8, rms_norm_eps=1e-06,
         rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True, use_mrope=False,
         use_sliding_window=False, use_cache=True),
    dict(model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", num_key_value_heads=8,
         max_window_layers=36, rope_scaling=None, rope_theta=1000000, sliding_window=None,
         use_sliding_window=False),
    dict(model_type="olmo2", architectures=["Olmo2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
         eos_token_id=100257, hidden_act="silu", initializer_range=0.02, num_key_value_heads=8,
         pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000,
         tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.47.0", use_cache=False),
    dict(model_type="mistral", hidden_act="silu", num_key_value_heads=8, rms_norm_eps=1e-05,
         rope_theta=1000000.0, sliding_window=None, head_dim=128)]
SIZES = dict(num_hidden_layers=4, num_attention_heads=32, hidden_size=4096, intermediate_size=14336,
             max_position_embeddings=131072, vocab_size=128256)


@pytest.mark.parametrize("config", REAL, ids=lambda config: config["model_type"])
def test_fields_of_public_models_are_known(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    cfg = Layout(**model_keys(tmp_path))
    assert (cfg.kv_heads, cfg.head_width, cfg.qkv_bias) == (8, 128, config["model_type"] == "qwen2")
    assert bool(cfg.rope_scaling) is (config["model_type"] == "llama")


GEMMA = dict(model_type="gemma3_text", hidden_act=None, rope_parameters=None, layer_types=None,
             use_sliding_window=None, max_window_layers=None)


@pytest.mark.parametrize(("change", "message"), [
    (dict(model_type="mixtral"), f"model_type='mixtral' must be one of {', '.join(FAMILIES)};"),
    (dict(model_type=None), "model_type=None must be one of"),
    (dict(num_local_experts=8), "memo does not know num_local_experts=8, which may change the model"),
    (dict(num_experts=64), "memo does not know num_experts=64"),
    (dict(quantization_config=dict(quant_method="fp8")),
     r"memo does not know quantization_config=\{'quant_method'"),
    (dict(attn_logit_softcapping=50.0), "memo does not know attn_logit_softcapping=50.0"),
    (dict(embedding_multiplier=12.0), "memo does not know embedding_multiplier=12.0"),
    (dict(num_key_value_heads=3), "num_attention_heads=4 % num_key_value_heads=3 != 0"),
    (dict(num_key_value_heads=[]), r"num_key_value_heads is \[\], must be a whole number"),
    (dict(hidden_act="gelu"), "hidden_act='gelu' must be 'silu' or 'swish'"),
    (dict(attention_bias=True), "attention_bias=True must be False, memo has nothing else"),
    (dict(mlp_bias=True), "mlp_bias=True must be False"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 must be 1.0"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes' must be true or false"),
    (dict(use_sliding_window=True, sliding_window=0, max_window_layers=1, layer_types=None),
     "sliding_window=0 must be null, or at least 1"),
    (dict(use_sliding_window=True, sliding_window=9, max_window_layers="x", layer_types=None),
     "max_window_layers='x' must be a whole number, at least 0"),
    (dict(num_hidden_layers=10**7), "the number of layers=10000000 must be at most 2000"),
    (dict(layer_types=["full_attention"]),
     "layer_types=.* must be full_attention or sliding_attention for each of 2 layers"),
    (dict(model_type="mistral", sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
     "layer_types=.* must be absent: sliding_window=5 is that of every layer"),
    (dict(model_type="smollm3", no_rope_layers=[1]), "no_rope_layers=.* must be a list of 0 or 1 for"),
    (dict(no_rope_layers=[1, 0]), "memo does not know no_rope_layers"),
    (dict(layer_types=["chunked_attention"] * 2), "layer_types=.* must be full_attention or"),
    (dict(layer_types=5), "layer_types=5 must be full_attention"), (dict(layer_types=[[]]), "layer_types="),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
     "rope_type='dynamic' must be one of default, linear, llama3, yarn, longrope"),
    (dict(rope_parameters=dict(rope_type="yarn")), "rope_parameters: rope_type=yarn needs factor"),
    (dict(rope_parameters=dict(partial_rotary_factor=0.25)), "partial_rotary_factor=0.25 must be 1.0"),
    (dict(rope_parameters=YARN, original_max_position_embeddings=8), "=8 differs from 16 in rope_parameters"),
    (dict(model_type="phi3", rope_parameters=LLAMA3),
     "rope_parameters: rope_type='llama3' must be one of default, longrope, su, yarn"),
    (dict(model_type="phi3", rope_parameters=dict(rope_type="su", short_factor=[1], long_factor=[1])),
     "rope_scaling's short_factor has 1 numbers, must have 6"),
    (dict(model_type="phi3", rope_parameters=dict(rope_type="su", short_factor=[1], long_factor=[0])),
     "long_factor=.0. must be a list of numbers, above 0 and"),
    (dict(model_type="phi3", partial_rotary_factor=0.25), "partial_rotary_factor=0.25 of head_dim=12"),
    (dict(model_type="phi3", rope_parameters=dict(partial_rotary_factor=0.5), partial_rotary_factor=0.75),
     "partial_rotary_factor=0.75 differs from 0.5"),
    (dict(rope_parameters=YARN | dict(beta_slow=0)), "beta_slow=0 must be a number, above 0"),
    (dict(rope_parameters=YARN, rope_scaling=LLAMA3), "rope_scaling=.* differs from rope_parameters"),
    (dict(rope_parameters=[1]), r"rope_parameters=\[1\] must be an object"),
    (dict(model_type="olmo3", rope_parameters=YARN), "must be an object of full_attention and sliding_att"),
    (dict(model_type="olmo3", sliding_window=9, layer_types=None, rope_parameters=dict(
        sliding_attention=YARN)), "rope_parameters of sliding_attention=.* must be as usual, or that of the"),
    (GEMMA | dict(hidden_act="silu"), "memo does not know hidden_act='silu'"),
    (GEMMA | dict(final_logit_softcapping=30.0), "memo does not know final_logit_softcapping=30.0"),
    (GEMMA | dict(use_bidirectional_attention=True), "use_bidirectional_attention=True must be False"),
    (GEMMA | dict(sliding_window_pattern=0), "sliding_window_pattern is 0, must be a whole number"),
    (dict(rope_parameters=dict(rope_theta="x")), "rope_theta='x' must be a number"),
    (dict(rms_norm_eps="x"), "rms_norm_eps='x' must be a number"),
    (dict(max_position_embeddings=None), "max_position_embeddings is missing"),
])
def test_what_memo_does_not_have_is_refused(tmp_path, hf, capsys, change, message):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | change))
    fails(capsys, message, "from-hf", hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sliding_window_that_reaches_all_is_none(hf):
    config = json.loads((hf / "config.json").read_text())
    for change, window in (
            (dict(model_type="mistral", sliding_window=S, layer_types=None), S),
            (dict(sliding_window=8, use_sliding_window=False), 0),
            (dict(sliding_window=8, use_sliding_window=True, max_window_layers=2, layer_types=None), 0),
            (dict(sliding_window=8, use_sliding_window=True, max_window_layers=0, layer_types=None), 8),
            (dict(sliding_window=8, use_sliding_window=True, layer_types=["sliding_attention"] * 2), 8),
            (dict(sliding_window=S, use_sliding_window=True, max_window_layers=1, layer_types=None), S)):
        (hf / "config.json").write_text(json.dumps(config | change))
        check_reach(hf, S, window)
        assert model_keys(hf)["sliding_window"] == window
    assert Layout(sliding_window=S, block_size=S, n_embd=64).window == 0


# --- folders that do not fit ---

def rewritten(change):
    """A folder of which the file with the final norm goes through `change`."""
    def work(hf):
        for file in hf.glob("*.safetensors"):
            tensors = load_file(file)
            if "model.norm.weight" in tensors:
                change(tensors)
                save_file(tensors, file, {"format": "pt"})
    return work


def cut_vocabulary(hf):
    """Of a folder's model, not of its tokenizer."""
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | dict(vocab_size=257)))
    for file in hf.glob("*.safetensors"):
        cut = {k: t[:257] if t.shape[:1] == (V,) else t for k, t in load_file(file).items()}
        save_file(cut, file, {"format": "pt"})


@pytest.mark.parametrize(("change", "message"), [
    (lambda hf: (hf / "config.json").unlink(),
     "config.json cannot be read .No such file.*; give a local folder"),
    (lambda hf: sorted(hf.glob("model-*"))[1].unlink(),
     r"model-00002-of-00003.safetensors cannot be read .No such file"),
    (rewritten(lambda t: t.pop("model.norm.weight")), "has no tensor model.norm.weight, which"),
    (rewritten(lambda t: t.update({"model.norm.weight": torch.zeros(47)})),
     r"norm.weight is \(47,\) F32, must be \(48,\)"),
    (rewritten(lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.float8_e4m3fn)})),
     r"norm.weight is \(48,\) F8_E4M3, must be \(48,\) in F32, F16, BF16"),
    (rewritten(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)})),
     "layers.0.self_attn.o_proj.bias is not a tensor of a qwen2 model with n_layer=2"),
    (cut_vocabulary, "the tokenizer has [0-9]+ tokens, must have at most the model's vocab_size=257"),
])
def test_folders_that_do_not_fit(tmp_path, hf, capsys, change, message):
    change(hf)
    fails(capsys, message, "from-hf", hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=message):
        check_folder(hf, load_config([f"--init_from=hf:{hf}"]))


# --- what transformers does not have ---

@pytest.mark.parametrize(("keys", "message"), [
    (dict(qkv_bias=True, qk_norm=True), "qkv_bias=True must be False for to-hf .Qwen3ForCausalLM"),
    (dict(norm="layernorm"), "norm=layernorm must be rmsnorm for to-hf"),
    (dict(norms="behind", qk_norm=True), "qk_norm_over=head must be all for to-hf .Olmo2ForCausalLM"),
    (dict(partial_rotary_factor=0.5, qk_norm=True), "partial_rotary_factor=0.5 must be 1.0 for to-hf .Qwen3"),
    (dict(partial_rotary_factor=0.5, rope_scaling='{"rope_type": "linear", "factor": 2}'),
     "rope_type=linear must be longrope for to-hf .Phi3ForCausalLM"),
    (dict(position="learned"), "position=learned must be rope for to-hf"),
    (dict(mlp="gelu"), "position=rope must be learned for to-hf .GPT-2"),
    (dict(mlp="gelu", norm="layernorm", position="learned", n_kv_head=1), "n_kv_head=1 must be 2 for to-hf"),
    (dict(mlp="gelu", norm="layernorm", position="learned", head_dim=8), "head_dim=8 must be 16 for to-hf"),
])
def test_models_of_no_family_stay(keys, message):
    base = dict(n_layer=1, n_head=2, n_embd=32, block_size=S, vocab_size=V, norm="rmsnorm", mlp="swiglu")
    cfg = Layout(**base | keys)
    with pytest.raises(ConfigError, match=message):
        hf_config(cfg, "float32", {})


def test_untied_gpt2_and_another_mlp(tmp_path):
    cfg = Layout(**GPT2.keys, n_layer=1, n_head=2, n_embd=32, n_inner=40, block_size=S, vocab_size=V,
                 norm_eps=1e-3, tie_embeddings=False, gelu="tanh")
    optimizer = Optimizer(model := Model(GPT, cfg, "cpu", torch.float32), cfg)
    optimizer.load(perturbed_weights(cfg, "cpu"))
    save_states(tmp_path, optimizer, cfg, 0)
    convert.to_hf(tmp_path, tmp_path / "hf")
    [tokens] = batches(1, V, S - 1)
    assert (memo_logits(model, tokens) - logits(reloaded(tmp_path / "hf"), tokens)).abs().max() < 1e-5
    assert replace(cfg, **model_keys(tmp_path / "hf")) == cfg


@pytest.mark.slow
def test_a_dataset_may_have_a_smaller_vocabulary(tmp_path, dataset, capsys):
    net = hf_model(Phi3Config, vocab_size=VOCAB + 30, num_key_value_heads=1, pad_token_id=None,
                   rope_parameters=LONGROPE, original_max_position_embeddings=16)
    net.save_pretrained(tmp_path / "hf")
    given = argv(dataset, tmp_path / "out", max_iters=2, eval_interval=0)
    keys = dict(arg[2:].split("=", 1) for arg in given)
    assert main([f"--{k}={v}" for k, v in keys.items() if not k.startswith("n_")]
                + [f"--init_from=hf:{tmp_path / 'hf'}"]) == 0
    assert load_model(tmp_path / "out").cfg.vocab_size == VOCAB + 30
    assert re.search("longrope's long_factor: block_size=[0-9]+ beside .*=16\n", capsys.readouterr().out)


# --- the files that came with a model ---

COMMON = {k: v for k, v in SMALL.items() if "token_id" not in k} | dict(num_key_value_heads=2)
CODE = dict(AutoConfig="configuration_phi3.Phi3Config", AutoModelForCausalLM="modeling_phi3.Phi3ForCausalLM")
MINI = dict(attention_bias=False, attention_dropout=0.0, bos_token_id=1, embd_pdrop=0.0, eos_token_id=2,
            hidden_act="silu", initializer_range=0.02, pad_token_id=2, resid_pdrop=0.0, rms_norm_eps=1e-5,
            rope_theta=10000.0, torch_dtype="float32", transformers_version="4.45.0", use_cache=True)
CAME = {  # fields in forms in which they are published
    "llama": COMMON | dict(
        bos_token_id=0, eos_token_id=[1, 3, 2], pad_token_id=4, rope_theta=5e5, torch_dtype="float32",
        rope_scaling={k: v for k, v in LLAMA3.items() if k != "rope_theta"}, transformers_version="4.43.0"),
    "mistral": COMMON | dict(sliding_window=S, rms_norm_eps=1e-5, rope_theta=1e6, dtype="float32"),
    "qwen3": COMMON | dict(  # the length of before is max_position_embeddings
        head_dim=32, attention_bias=False, max_window_layers=2, sliding_window=None, rope_theta=1e6,
        rope_scaling=dict(rope_type="yarn", factor=4.0), torch_dtype="float32"),
    "olmo2": COMMON | dict(
        attention_bias=False, attention_dropout=0.0, eos_token_id=7, hidden_act="silu",
        initializer_range=0.02, pad_token_id=8, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000,
        tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.47.0", use_cache=False),
    "olmo3": COMMON | dict(
        architectures=["Olmo3ForCausalLM"], attention_bias=False, attention_dropout=0.0, eos_token_id=7,
        hidden_act="silu", initializer_range=0.02, layer_types=["sliding_attention", "full_attention"],
        pad_token_id=8, rms_norm_eps=1e-06, rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=4.0,
            original_max_position_embeddings=16, rope_type="yarn"), rope_theta=500000, sliding_window=11,
        tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.57.0", use_cache=False),
    "gemma3_text": COMMON | dict(
        architectures=["Gemma3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        attn_logit_softcapping=None, bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 106],
        final_logit_softcapping=None, head_dim=32, hidden_activation="gelu_pytorch_tanh",
        initializer_range=0.02, num_hidden_layers=6, num_key_value_heads=1, pad_token_id=0,
        query_pre_attn_scalar=32, rms_norm_eps=1e-06, rope_local_base_freq=10000, rope_scaling=None,
        rope_theta=1000000, sliding_window=11, sliding_window_pattern=6, torch_dtype="float32",
        transformers_version="4.50.0.dev0", use_cache=True),
    "phi3": COMMON | MINI | dict(  # Phi-4-mini-instruct
        auto_map=dict(CODE, AutoTokenizer="Xenova/gpt-4o"), full_attn_mod=1, interpolate_factor=1,
        lm_head_bias=False, mlp_bias=False, partial_rotary_factor=0.75, original_max_position_embeddings=16,
        rope_scaling=dict(long_factor=[1, 1.118320672, 1.250641126, 32.03, 44.16, 47.77],
                          short_factor=[1.0] * 6, type="longrope"),
        hidden_size=64, sliding_window=262144, tie_word_embeddings=True),
    "phi3, window": COMMON | MINI | dict(  # Phi-3-mini-4k-instruct
        auto_map=CODE, original_max_position_embeddings=S, rope_scaling=None, sliding_window=20,
        tie_word_embeddings=False),
    "gpt2": dict(vocab_size=V, n_embd=48, n_head=4, n_layer=2, n_positions=S, n_ctx=S, n_special=0,
                 activation_function="gelu_new", predict_special_tokens=True, torch_dtype="float32")}
FILES = {"generation_config.json": b'{"temperature": 0.6}', "tokenizer.model.v3": b"\0\1",
         "additional_chat_templates/tools.jinja": b"{{ tools }}", "tokenizer_config.json": b'{"a":  1}'}


def came(folder, kind):
    """A model in `folder` whose config.json has just the fields of CAME, with files beside it."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    config = folder / "config.json"
    CAME[kind]["model_type"] = kind.split(",")[0]
    config.write_text(json.dumps(CAME[kind]))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    config.write_text(json.dumps(CAME[kind]))
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "pytorch_model.bin").write_bytes(b"weights in another form")


def fields(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAME)
def test_a_models_own_files_and_fields_come_back(tmp_path, kind):
    there, out, back = (tmp_path / folder for folder in ("hf", "out", "back"))
    came(there, kind)
    convert.from_hf(there, out)
    convert.to_hf(out, back)
    assert fields(back) == fields(there)
    assert {name: (back / name).read_bytes() for name in FILES} == FILES
    assert not (back / "pytorch_model.bin").exists()
    assert all(torch.equal(t, all_tensors(there)[n]) for n, t in all_tensors(back).items())
    [tokens] = batches(1, V, S - 1)
    mine = memo_logits(load_model(out, "cpu", "float32"), tokens)
    assert (mine - logits(reloaded(there), tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo3", "gemma3_text", "gpt2", "phi3", "phi3, window"])
def test_what_training_changed_is_written_over_the_fields_that_came(tmp_path, kind):
    came(tmp_path, kind)
    keys = model_keys(tmp_path)
    lengths = ("max_position_embeddings", "n_positions", "n_ctx")
    length = {name: S // 2 for name in CAME[kind] if name in lengths}
    made = overlaid(tmp_path, Layout(**keys | dict(block_size=S // 2)), "bfloat16")
    rope = {} if kind not in ("qwen3", "phi3") else {
        name: made[name] for name in ("rope_scaling", "rope_parameters")}
    # where the length of before, or the factor, was not written, it is now; nothing else beside the length
    assert {k: v for k, v in made.items() if v != CAME[kind].get(k)} == length | rope | dict(
        torch_dtype="bfloat16")
    assert keys_of(tmp_path, made) == keys | dict(block_size=S // 2)


def test_a_longer_context_has_the_models_window(tmp_path):
    """Where all layers have it, and where some have."""
    came(tmp_path / "hf", "mistral")
    given = load_config([f"--init_from=hf:{tmp_path / 'hf'}", f"--block_size={2 * S}"])
    assert given.window == S and load_config([f"--init_from=hf:{tmp_path / 'hf'}"]).window == 0
    came(tmp_path / "some", "qwen3")
    path = tmp_path / "some" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(
        use_sliding_window=True, sliding_window=S, max_window_layers=1, layer_types=None)))
    given = load_config([f"--init_from=hf:{tmp_path / 'some'}", f"--block_size={2 * S}"])
    assert [kind.window for kind in given.kinds] == [0, S]


def test_keys_from_before_there_was_a_window_go_on_without_losing_it(tmp_path):
    """As long as a run is no longer than it; and what is exported has it still."""
    came(tmp_path / "hf", "mistral")
    cfg = Layout(**model_keys(tmp_path / "hf") | dict(sliding_window=0))
    check_reach(tmp_path / "hf", S, 0)
    with pytest.raises(ConfigError, match=f"sliding_window={S} must be null, or at least {2 * S}"):
        check_reach(tmp_path / "hf", 2 * S, 0)
    assert overlaid(tmp_path / "hf", cfg, "float32")["sliding_window"] == S


def test_no_token_is_invented(tmp_path):
    """bos is what the tokenizer's own template puts before a text, or none."""
    tokenizer = train_tokenizer(["some text"], V)
    assert convert.begin_of_text(tokenizer) is None
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[
        ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))])
    assert convert.begin_of_text(tokenizer) == "<|endoftext|>"


# --- an index, and where tensors lie ---

def test_a_tensor_twice_names_both(tmp_path, hf, capsys):
    first, last = sorted(hf.glob("model-*"))[::2]
    tensors = load_file(last)
    name = sorted(load_file(first))[0]
    save_file(tensors | {name: load_file(first)[name] + 1}, last, {"format": "pt"})
    fails(capsys, f"as {name} in {first.name} and as {name} in {last.name}", "from-hf", hf, tmp_path / "out")


def test_the_index_says_where_a_tensor_lies(tmp_path, hf, capsys):
    index = hf / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    names = sorted(set(stored["weight_map"].values()))
    odd = {name: f"part {i} (é).safetensors" for i, name in enumerate(names)}  # any name in the folder is one
    for name, new in odd.items():
        (hf / name).rename(hf / new)
    place = {tensor: odd[file] for tensor, file in stored["weight_map"].items()}
    index.write_text(json.dumps(dict(stored, weight_map=place)))
    assert check_folder(hf, load_config([f"--init_from=hf:{hf}"]))
    other = next(file for file in odd.values() if file != place["model.norm.weight"])
    wrong = place | {"model.norm.weight": other}
    index.write_text(json.dumps(dict(stored, weight_map=wrong)))
    fails(capsys, "has no tensor model.norm.weight, which model.safetensors.index.json finds there",
          "from-hf", hf, tmp_path / "out")
    twice = json.dumps(dict(stored, weight_map=place)).replace("{", '{"metadata": 1, ', 1)
    index.write_text(twice)
    fails(capsys, "'metadata' stands twice in one object", "from-hf", hf, tmp_path / "out")


def test_a_tied_model_may_be_stored_under_the_heads_name(tmp_path):
    saved(tmp_path, LlamaConfig, num_key_value_heads=2, tie_word_embeddings=True)
    cfg = Layout.of(load_config([f"--init_from=hf:{tmp_path}"]))
    wanted = dict(HfWeights(tmp_path, cfg))
    tensors = all_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    got = dict(HfWeights(tmp_path, cfg))
    assert got.keys() == wanted.keys() and all(torch.equal(wanted[n], t) for n, t in got.items())


@pytest.mark.slow
def test_the_text_part_of_a_gemma_that_sees_pictures(tmp_path):
    """With the few fields that its text part has, under both names of its weights; out as a text model."""
    torch.manual_seed(5)
    text = dict(hidden_size=32, intermediate_size=48, model_type="gemma3_text", num_hidden_layers=2,
                rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=11)
    small = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=V,
                 max_position_embeddings=S, query_pre_attn_scalar=16)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                  image_size=28, patch_size=14)
    net = AutoModelForImageTextToText.from_config(Gemma3Config(
        text_config=text | small, vision_config=vision))
    net.eval().save_pretrained(tmp_path / "new")
    config = dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"],
                  text_config=text | small, vision_config=vision, mm_tokens_per_image=1,
                  boi_token_index=255999, eos_token_id=[1, 106],
                  image_token_index=262144, initializer_range=0.02, torch_dtype="float32")
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    [tokens] = batches(1, V, S - 1)
    convert.from_hf(tmp_path / "new", tmp_path / "out")
    mine = memo_logits(load_model(tmp_path / "out", "cpu", "float32"), tokens)
    assert (mine - logits(net, tokens)).abs().max() < 1e-5
    convert.to_hf(tmp_path / "out", tmp_path / "back")
    assert (mine - logits(reloaded(tmp_path / "back"), tokens)).abs().max() < 1e-5
    assert fields(tmp_path / "back") == text | small | dict(
        architectures=["Gemma3ForCausalLM"], eos_token_id=[1, 106], initializer_range=0.02,
        torch_dtype="float32")
    old = {n.replace("model.language_model.", "language_model.model."): t
           for n, t in all_tensors(tmp_path / "new").items()}
    (tmp_path / "new" / "model.safetensors").unlink()
    save_file(old, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    convert.from_hf(tmp_path / "new", tmp_path / "again")
    assert torch.equal(mine, memo_logits(load_model(tmp_path / "again", "cpu", "float32"), tokens))
    (tmp_path / "new" / "config.json").write_text(json.dumps(config | dict(text_config=text)))
    keys = model_keys(tmp_path / "new")
    assert all(keys[memo] == getattr(Gemma3TextConfig(), field) for memo, field in dict(
        n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_dim="head_dim",
        vocab_size="vocab_size", block_size="max_position_embeddings",
        query_scalar="query_pre_attn_scalar").items())
    (tmp_path / "new" / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(bits=4))))
    with pytest.raises(ConfigError, match="memo does not know quantization_config"):
        model_keys(tmp_path / "new")
    config["text_config"] = 3
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="text_config=3 must be an object"):
        model_keys(tmp_path / "new")
