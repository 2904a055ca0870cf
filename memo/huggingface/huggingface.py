"""Families of models in Hugging Face's format: config.json <-> memo's keys, and their weights' names. A
field of a config.json is translated, or has a value that memo has, or leaves the model as it is; any other is
an error. A missing one is as transformers 5.23 has it. Without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from memo.config.config import Config
from memo.config.keys import shown
from memo.config.rope import SCALINGS, checked_scaling, parse_scaling
from memo.errors import ConfigError, warn
from memo.huggingface.layers import (
    BY_LAYER,
    FIELDS,
    FULL,
    GIVE_FOLDER,
    GIVE_OTHER,
    NOPE,
    NOPE_FIELDS,
    SLIDING,
    kind_fields,
    kind_keys,
    window_of,
    wrong,
)
from memo.system.files import MOST_TEXT_CHARS, Json, JsonObject, load_json, open_file, own_folder, save_bytes

CONFIG = "config.json"
OWN = "hf_files"  # of out_dir: the files that came with a model, as they came
# leave the model as it is: dropout is a way to train, pretraining_tp an order of sums, summary another head's
HARMLESS = set("""model_type architectures dtype torch_dtype transformers_version use_cache bos_token_id
    eos_token_id pad_token_id initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop
    pretraining_tp n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout task_specific_params gradient_checkpointing output_past
    output_attentions output_hidden_states return_dict tokenizer_class problem_type id2label label2id
    _num_labels _name_or_path _attn_implementation attn_implementation _attn_implementation_autoset
    is_llama_config unsloth_fixed unsloth_version n_special predict_special_tokens transformers.js_config
    sep_token_id decoder_start_token_id _from_model_config use_bfloat16 torchscript
    tf_legacy_loss finetuning_task prefix is_decoder is_encoder_decoder chunk_size_feed_forward
    tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens cache_implementation
    _sliding_window_pattern""".split())
WEIGHTS_END = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot",
               ".tflite", ".mlmodel", ".pdparams", ".npz", ".npy", ".zip", ".gz", ".tar", ".index.json")
PATTERN = "sliding_window_pattern"
OF_PICTURES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
               "image_token_index")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


@dataclass(frozen=True)
class Family:
    """Describes a family of models."""

    architecture: str
    prefix: str  # of all names of weights but the head's
    layers: str  # in front of a layer's number
    names: dict[str, str]  # {memo's without _w or _b: transformers'}
    sizes: dict[str, str]  # {memo's key: field}
    only: dict[str, tuple]  # {field: values that memo has, first the default}
    keys: JsonObject  # memo's, the same in all models
    norm_eps: tuple[str, float]  # field, default
    tied: bool = False  # if absent, as `defaults`
    pattern: int = 0  # if absent, of so many layers the last one is full, and the others slide
    theta: float = 10000.0  # if absent
    local_theta: float = 0.0  # of sliding layers, if absent; 0: they have none of their own
    gain: float = 0.0  # what the gain of a norm is more than its weight
    defaults: JsonObject = field(default_factory=dict)


GPT2 = Family(
    "GPT2LMHeadModel", "transformer.", "h",
    names=dict(wte="wte", wpe="wpe", head="lm_head", lnf="ln_f", ln1="ln_1", q="attn.c_attn", k="attn.c_attn",
               v="attn.c_attn", proj="attn.c_proj", ln2="ln_2", fc1="mlp.c_fc", fc2="mlp.c_proj"),
    sizes=dict(n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions",
               vocab_size="vocab_size"),
    only=dict(activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"), scale_attn_weights=(True,),
              scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    keys=dict(norm="layernorm", mlp="gelu", bias=True, position="learned"),
    norm_eps=("layer_norm_epsilon", 1e-5), tied=True)

LLAMA = Family(
    "LlamaForCausalLM", "model.", "layers",
    names=dict(wte="embed_tokens", head="lm_head", lnf="norm", ln1="input_layernorm", q="self_attn.q_proj",
               k="self_attn.k_proj", v="self_attn.v_proj", proj="self_attn.o_proj", q_norm="self_attn.q_norm",
               k_norm="self_attn.k_norm", ln2="post_attention_layernorm", gate="mlp.gate_proj",
               up="mlp.up_proj", down="mlp.down_proj"),
    sizes=dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embd="hidden_size",
               n_inner="intermediate_size", block_size="max_position_embeddings", vocab_size="vocab_size"),
    only=dict(hidden_act=("silu", "swish"), attention_bias=(False,), mlp_bias=(False,),
              partial_rotary_factor=(1.0,), rope_interleaved=(False,), use_mrope=(False,)),
    keys=dict(norm="rmsnorm", norms="before", mlp="swiglu", bias=False, position="rope", qkv_bias=False,
              qk_norm=False, qk_norm_over="head", query_scalar=0, scale_embeddings=False,
              rope_local_theta=0.0),
    norm_eps=("rms_norm_eps", 1e-6))

OLMO2 = replace(LLAMA, architecture="Olmo2ForCausalLM", norm_eps=("rms_norm_eps", 1e-5),
                names=LLAMA.names | dict(post1="post_attention_layernorm",
                                         post2="post_feedforward_layernorm"),
                keys=LLAMA.keys | dict(norms="behind", qk_norm=True, qk_norm_over="all"))


def without(of: Mapping[str, Json], *names: str) -> JsonObject:
    return {name: value for name, value in of.items() if name not in names}


FAMILIES = {
    "gpt2": GPT2, "llama": LLAMA,
    "mistral": replace(LLAMA, architecture="MistralForCausalLM",
                       defaults=dict(num_key_value_heads=8, sliding_window=4096)),
    "qwen2": replace(LLAMA, architecture="Qwen2ForCausalLM", keys=LLAMA.keys | dict(qkv_bias=True),
                     defaults=dict(num_key_value_heads=32, sliding_window=4096)),
    "qwen3": replace(LLAMA, architecture="Qwen3ForCausalLM", keys=LLAMA.keys | dict(qk_norm=True),
                     defaults=dict(num_key_value_heads=32, head_dim=128, sliding_window=4096)),
    "smollm3": replace(LLAMA, architecture="SmolLM3ForCausalLM", tied=True, theta=2e6,
                       defaults=dict(num_key_value_heads=4)),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, architecture="Olmo3ForCausalLM", keys=without(OLMO2.keys, "rope_local_theta"),
                     pattern=4, theta=5e5, local_theta=5e5, defaults=dict(sliding_window=4096)),
    "gemma3_text": replace(
        LLAMA, architecture="Gemma3ForCausalLM", tied=True, pattern=6, theta=1e6, local_theta=1e4, gain=1.0,
        names=OLMO2.names | dict(ln2="pre_feedforward_layernorm"),
        sizes=LLAMA.sizes | dict(query_scalar="query_pre_attn_scalar"),
        only=without(LLAMA.only, "hidden_act") | dict(hidden_activation=("gelu_pytorch_tanh",),
                                                      use_bidirectional_attention=(False,)),
        keys=without(LLAMA.keys, "query_scalar", "rope_local_theta") | dict(
            mlp="geglu", norms="both", qk_norm=True, scale_embeddings=True),
        defaults=dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208,
                      max_position_embeddings=131072, query_pre_attn_scalar=256, sliding_window=4096,
                      rope_local_base_freq=1e4) | {PATTERN: 6})}


# --- config.json -> memo's keys ---

def fields_of(path: Path) -> JsonObject:
    """Reads a config.json; of a Gemma 3 that sees pictures the text part. Errors: ConfigError."""
    hf = load_json(path, GIVE_FOLDER)
    if hf.get("model_type") != "gemma3":
        return hf
    if not isinstance(text := hf.get("text_config"), dict):
        raise wrong(path, "text_config", text, "an object")
    kind = dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"])
    return without(hf, "text_config", *OF_PICTURES) | text | kind


def model_keys(folder: Path | str) -> JsonObject:
    """Reads memo's keys of the model in `folder`. Errors: ConfigError: a model that memo does not have."""
    path = Path(folder) / CONFIG
    return keys_of(path, fields_of(path))


def keys_of(path: Path, hf: Mapping[str, Json]) -> JsonObject:
    """Translates `hf`, the fields of the config.json at `path`, into memo's keys. Errors: ConfigError."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise wrong(path, "model_type", kind, f"one of {', '.join(FAMILIES)}", GIVE_OTHER)
    family = FAMILIES[kind]
    check_fields(path, hf, family)
    name, eps = family.norm_eps
    keys = {key: size_field(path, name, hf.get(name, family.defaults.get(name)))
            for key, name in family.sizes.items()}
    keys |= family.keys | dict(norm_eps=float_field(path, name, hf.get(name, eps)))
    keys["tie_embeddings"] = tied = hf.get("tie_word_embeddings", family.tied)
    if type(tied) is not bool:
        raise wrong(path, "tie_word_embeddings", tied, "true or false")
    if family is GPT2:
        F, C = hf.get("n_inner"), keys["n_embd"]
        return keys | dict(gelu="exact" if hf.get("activation_function") == "gelu" else "tanh",
                           n_inner=0 if F in (None, 4 * C) else size_field(path, "n_inner", F))
    H, S = keys["n_head"], keys["block_size"]
    Hkv, D = (hf.get(name, family.defaults.get(name)) for name in ("num_key_value_heads", "head_dim"))
    Hkv = size_field(path, "num_key_value_heads", H if Hkv is None else Hkv)
    if H % Hkv:
        raise ConfigError(f"{path}: num_attention_heads={H} % num_key_value_heads={Hkv} != 0 (each head of "
                          f"keys and values serves equally many of queries); {GIVE_FOLDER}")
    D = size_field(path, "head_dim", keys["n_embd"] // H if D is None else D)
    pattern = hf.get(PATTERN, family.pattern)
    keys |= kind_keys(path, hf, keys["n_layer"], family.defaults.get("sliding_window"),
                      size_field(path, PATTERN, pattern) if family.pattern else 0)
    keys |= dict(n_kv_head=Hkv, head_dim=D) | rope_keys(path, hf, S, family)
    return keys | (local_rope(path, hf, S, family, keys) if family.local_theta else {})


def check_fields(path: Path, hf: Mapping[str, Json], family: Family) -> None:
    """Raises ConfigError where memo does not know a field, or has not its value."""
    known = HARMLESS | {*family.sizes.values(), *family.only, family.norm_eps[0], "tie_word_embeddings"}
    known |= {"n_inner"} if family is GPT2 else {"num_key_value_heads", "head_dim", *ROPE, *FIELDS}
    known |= {*family.defaults}
    known |= {*NOPE_FIELDS} if hf["model_type"] == "smollm3" else set()
    for name, value in hf.items():
        if name not in known and value not in (None, {}, []):  # an empty one says nothing
            raise ConfigError(f"{path}: memo does not know {name}={value!r:.100}, which may change the "
                              "model; give another folder, or take the field out where it changes nothing")
    for name, allowed in family.only.items():
        value = hf.get(name)
        if value is not None and value not in allowed:
            rule = " or ".join(map(repr, allowed))
            raise wrong(path, name, value, f"{rule}, memo has nothing else", GIVE_OTHER)


def size_field(path: Path, name: str, value: Json) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        what = "is missing" if value is None else f"is {value!r:.100}"
        raise ConfigError(f"{path}: {name} {what}, must be a whole number, at least 1 and below 2**31; "
                          f"{GIVE_FOLDER}")
    return value


def float_field(path: Path, name: str, value: Json) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise wrong(path, name, value, "a number, at least 0")
    return float(value)


def check_reach(folder: Path | str, S: int, W: int = 0, option: str = "--block_size") -> None:
    """Raises ConfigError where a layer of the model in `folder` attends to less than S = `option` tokens, and
    `W`, the window of memo's keys, is another."""
    path = Path(folder) / CONFIG
    if not path.exists():
        return
    hf = fields_of(path)
    keys, kind = keys_of(path, hf), hf["model_type"]
    window = keys["sliding_window"] if kind in BY_LAYER else window_of(
        path, hf, FAMILIES[kind].defaults.get("sliding_window"))
    if window != W and 0 < window < S:  # the family has none; or the keys are from before there were any
        raise wrong(path, "sliding_window", window, f"null, or at least {S}, the length of the run",
                    f"to train it without one, set it to null there, or give a smaller {option}")


def rope_keys(path: Path, hf: Mapping[str, Json], S: int, family: Family) -> JsonObject:
    """Finds rope_theta and rope_scaling in rope_parameters (transformers 5) or rope_scaling (4)."""
    if family.local_theta:
        hf = dict(hf, rope_parameters=ropes_of(path, hf).get(FULL))
    ropes = [rope_of(path, name, hf, S) for name in ("rope_scaling", "rope_parameters") if hf.get(name)]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise ConfigError(f"{path}: rope_scaling={hf['rope_scaling']!r:.100} differs from "
                          f"rope_parameters={hf['rope_parameters']!r:.100}; take the wrong one out")
    theta, scaling = ropes[0] if ropes else (hf.get("rope_theta"), {})
    if hf.get("rope_theta") not in (None, theta):
        raise ConfigError(f"{path}: rope_theta={hf['rope_theta']!r:.100} differs from {theta!r:.100} in "
                          "rope_parameters or rope_scaling; take the wrong one out")
    theta = float_field(path, "rope_theta", family.theta if theta is None else theta)
    return dict(rope_theta=theta, rope_scaling=json.dumps(scaling) if scaling else "")


def ropes_of(path: Path, hf: Mapping[str, Json]) -> JsonObject:
    """Reads {kind of layers: its rope_parameters}. Errors: ConfigError."""
    ropes = hf.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or ropes.keys() - {FULL, SLIDING}:
        raise wrong(path, "rope_parameters", ropes, f"an object of {FULL} and {SLIDING}")
    return ropes


def local_rope(path: Path, hf: Mapping[str, Json], S: int, family: Family, keys: JsonObject) -> JsonObject:
    """Finds rope_local_theta, beside `keys` of the other layers: 0 where sliding layers are as these."""
    own = {"rope_theta": hf.get("rope_local_base_freq")} | (ropes_of(path, hf).get(SLIDING) or {})
    theta, scaling = rope_of(path, SLIDING, {SLIDING: own}, S)
    theta = float_field(path, "rope_theta", family.local_theta if theta is None else theta)
    scaling_ = json.dumps(scaling) if scaling else ""
    if not keys["sliding_window"] or (theta, scaling_) == (keys["rope_theta"], keys["rope_scaling"]):
        return dict(rope_local_theta=0.0)
    if scaling:
        raise wrong(path, f"rope_parameters of {SLIDING}", scaling, "as usual, or that of the other layers")
    return dict(rope_local_theta=theta)


def rope_of(path: Path, name: str, hf: Mapping[str, Json], S: int) -> tuple[Json, JsonObject]:
    """Reads (rope_theta, scaling without what is as usual) from one of the two fields."""
    if not isinstance(hf[name], dict):
        raise wrong(path, name, hf[name], "an object")
    scaling = {k: v for k, v in hf[name].items() if v is not None}
    theta = scaling.pop("rope_theta", hf.get("rope_theta"))
    part = scaling.pop("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor={part!r:.100} must be 1.0, memo has nothing else")
    kind = scaling.setdefault("rope_type", scaling.pop("type", None) or "default")
    if kind in ("llama3", "yarn"):  # transformers looks for the length of before in three places
        outside = hf.get("original_max_position_embeddings")
        original = scaling.setdefault("original_max_position_embeddings", outside or S)
        if outside not in (None, original):
            raise ConfigError(f"{path}: original_max_position_embeddings={outside!r:.100} differs from "
                              f"{original!r:.100} in {name}; take the wrong one out")
    filled = checked_scaling(scaling, f"{path}: {name}")
    return theta, {k: v for k, v in filled.items() if k == "rope_type" or v != SCALINGS[kind][k]}


# --- memo's keys -> config.json ---

def family_of(cfg: Config) -> str:
    """Finds the model_type of a model with memo's keys `cfg`. Errors: ConfigError: transformers has none."""
    if cfg.mlp == "gelu":
        kind, like = "gpt2", "GPT-2"
        wanted = dict(position="learned", norm="layernorm", norms="before", qk_norm=False,
                      kv_heads=cfg.n_head, head_width=cfg.n_embd // cfg.n_head, window=0)
    else:
        # whatever head_dim is, LlamaConfig wants C % H == 0; MistralConfig does not
        kind = ("gemma3_text" if cfg.norms == "both" else
                ("olmo3" if cfg.sliding_window else "olmo2") if cfg.norms == "behind" else
                "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "smollm3" if cfg.layer_types
                else "llama" if cfg.n_embd % cfg.n_head == 0 and not cfg.sliding_window else "mistral")
        like, wanted = FAMILIES[kind].architecture, FAMILIES[kind].keys
    for name, value in wanted.items():
        if getattr(cfg, name) != value:
            key = dict(kv_heads="n_kv_head", head_width="head_dim", window="sliding_window").get(name, name)
            raise ConfigError(f"{key}={getattr(cfg, name)} must be {value} for to-hf ({like} of transformers "
                              f"has nothing else); train with --{key}={value}")
    if NOPE in cfg.layer_types and kind != "smollm3":
        raise ConfigError(f"layer_types={shown(cfg.layer_types)} must rotate positions in everywhere for "
                          f"to-hf ({like} of transformers has nothing else); leave {NOPE} out")
    return kind


def hf_config(cfg: Config, dtype: str, token_ids: Mapping[str, Json]) -> JsonObject:
    """Makes the config.json of `cfg` with weights of `dtype`. `token_ids`: {"bos_token_id": ...}."""
    kind = family_of(cfg)
    family = FAMILIES[kind]
    config = dict(architectures=[family.architecture], model_type=kind, torch_dtype=dtype,
                  tie_word_embeddings=cfg.tie_embeddings) | {family.norm_eps[0]: cfg.norm_eps}
    config |= {**token_ids, **{name: getattr(cfg, key) for key, name in family.sizes.items()}}
    if family is GPT2:
        return config | dict(activation_function="gelu" if cfg.gelu == "exact" else "gelu_new",
                             n_ctx=cfg.block_size, n_inner=cfg.inner_width, attn_pdrop=0.0, embd_pdrop=0.0,
                             resid_pdrop=0.0)
    # transformers 4 reads rope_scaling and rope_theta, transformers 5 rope_parameters
    scaling = {k: v for k, v in parse_scaling(cfg.rope_scaling).items()
               if v or k not in ("attention_factor", "mscale", "mscale_all_dim")}
    rope = dict(rope_theta=cfg.rope_theta, rope_type="default") | scaling
    config |= dict(intermediate_size=cfg.inner_width, num_key_value_heads=cfg.kv_heads,
                   head_dim=cfg.head_width, attention_dropout=0.0, rope_theta=cfg.rope_theta,
                   rope_scaling=scaling or None, rope_parameters=rope)
    config |= {name: allowed[0] for name, allowed in family.only.items() if name.startswith("hidden_act")}
    if family.local_theta:
        local = dict(rope_theta=cfg.rope_local_theta, rope_type="default") if cfg.rope_local_theta else rope
        config["rope_parameters"] = {FULL: rope, SLIDING: local}
    if kind == "gemma3_text":
        config |= dict(query_pre_attn_scalar=cfg.query_scalar or cfg.head_width,
                       rope_local_base_freq=cfg.rope_local_theta or cfg.rope_theta)
    if kind not in ("mistral", "qwen2"):
        config["attention_bias"] = False
    config |= dict(mlp_bias=False) if kind in ("llama", "smollm3") else {}
    return config | kind_fields(cfg, kind)


def overlaid(own: Path, cfg: Config, dtype: str) -> JsonObject:
    """Makes the folder `own`'s config.json with what training as `cfg` has changed. Errors: ConfigError."""
    path = own / CONFIG
    hf = fields_of(path)
    own_keys = keys_of(path, hf)
    # the keys may be from before there was one
    if not cfg.sliding_window and own_keys.get("sliding_window", 0) >= cfg.block_size:
        cfg = replace(cfg, **{name: own_keys[name] for name in ("sliding_window", "layer_types")})
    config, before = hf_config(cfg, dtype, {}), hf_config(type(cfg)(**own_keys), dtype, {})
    named = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    changed = {k: v for k, v in named.items() if v != before.get(k)}
    if keys_of(path, hf | changed) != keys_of(path, config):  # a scaling that counts from a length not in it
        ropes = *ROPE, "rope_local_base_freq"
        hf = without(hf, *ropes)
        changed |= {k: v for k, v in named.items() if k in ropes}
    return hf | changed | {"dtype" if "dtype" in hf and "torch_dtype" not in hf else "torch_dtype": dtype}


# --- the files that came with a model ---

def own_files(folder: Path) -> dict[str, bytes]:
    """Reads {name: content} of a model's files beside the weights, as far as MOST_TEXT_CHARS go."""
    contents, room = {}, MOST_TEXT_CHARS
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    files = [p for p in (*folder.iterdir(), *templates) if p.is_file()] if folder.is_dir() else []
    for size, path in sorted((p.stat().st_size, p) for p in files):  # a large one costs no small one
        if path.name.startswith(".") or path.name.endswith(WEIGHTS_END):
            continue
        if size > room:
            warn(f"{path} does not go along with the model, whose files beside the weights would be larger "
                 f"than {MOST_TEXT_CHARS:,} bytes")
            continue
        with open(open_file(path), "rb") as file:
            contents[str(path.relative_to(folder))] = data = file.read(room)
        room -= len(data)
    return contents


def save_own_files(files: Mapping[str, bytes], folder: Path, within: str = "") -> None:
    """Writes what own_files() has read into `folder` or its folder `within`. Errors: OSError."""
    for name, data in files.items():
        path = Path(within, name)
        for part in reversed(path.parents[:-1]):
            own_folder(folder / part)
        save_bytes(data, folder / path)
