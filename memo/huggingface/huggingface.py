"""Families of models in Hugging Face's format: config.json <-> memo's keys, and their weights' names. A
field of a config.json is translated, or has a value that memo has, or leaves the model as it is; any other is
an error. A missing one is as transformers 5.23 has it. Without torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memo.config.config import Config
from memo.config.rope import SCALINGS, checked_scaling, parse_scaling
from memo.errors import ConfigError, warn
from memo.huggingface.families import FAMILIES, GPT2, LOCAL, PATTERN, Family, without
from memo.huggingface.layers import (
    BY_LAYER,
    FIELDS,
    FULL,
    GIVE_FOLDER,
    GIVE_OTHER,
    SLIDING,
    check_kinds,
    kind_fields,
    kind_keys,
    window_of,
    wrong,
)
from memo.system.files import MOST_TEXT_CHARS, Json, JsonObject, load_json, open_file, own_folder, save_bytes

CONFIG = "config.json"
OWN = "hf_files"  # of out_dir: the files that came with a model, as they came
# leave the model as it is: dropout is a way to train, pretraining_tp an order of sums, summary another head,
# auto_map names code that transformers runs where it is told to, in place of its own
HARMLESS = set("""model_type architectures dtype torch_dtype transformers_version use_cache bos_token_id
    eos_token_id pad_token_id initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop
    pretraining_tp n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout task_specific_params gradient_checkpointing output_past
    output_attentions output_hidden_states return_dict tokenizer_class problem_type id2label label2id
    _num_labels _name_or_path _attn_implementation attn_implementation _attn_implementation_autoset
    is_llama_config unsloth_fixed unsloth_version n_special predict_special_tokens transformers.js_config
    auto_map sep_token_id decoder_start_token_id _from_model_config use_bfloat16 torchscript
    tf_legacy_loss finetuning_task prefix is_decoder is_encoder_decoder chunk_size_feed_forward
    tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens cache_implementation
    _sliding_window_pattern""".split())
WEIGHTS_END = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot",
               ".tflite", ".mlmodel", ".pdparams", ".npz", ".npy", ".zip", ".gz", ".tar", ".index.json")
OF_PICTURES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
               "image_token_index")
BESIDE = dict(rope_theta=10000.0, partial_rotary_factor=1.0)  # {field and key beside a scaling: default}
ORIGINAL = "original_max_position_embeddings"
ROPE = (*BESIDE, "rope_scaling", "rope_parameters", ORIGINAL)


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
    known |= {*family.defaults, *family.more}
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
        what = "is missing or null" if value is None else f"is {value!r:.100}"
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
    """Finds the keys of positions in rope_parameters (transformers 5) or rope_scaling (4), or beside them."""
    if family.local_theta:
        hf = dict(hf, rope_parameters=ropes_of(path, hf).get(FULL))
    ropes = [rope_of(path, name, hf, S) for name in ("rope_scaling", "rope_parameters") if hf.get(name)]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise ConfigError(f"{path}: rope_scaling={hf['rope_scaling']!r:.100} differs from "
                          f"rope_parameters={hf['rope_parameters']!r:.100}; take the wrong one out")
    keys, scaling = ropes[0] if ropes else (beside(hf), {})
    for name, usual in (BESIDE | dict(rope_theta=family.theta)).items():
        if hf.get(name) not in (None, keys[name]):
            raise ConfigError(f"{path}: {name}={hf[name]!r:.100} differs from {keys[name]!r:.100} in "
                              "rope_parameters or rope_scaling; take the wrong one out")
        keys[name] = float_field(path, name, usual if keys[name] is None else keys[name])
        only = family.keys.get(name)
        if only not in (None, keys[name]):
            raise wrong(path, name, keys[name], f"{only}, memo has nothing else", GIVE_OTHER)
    return keys | dict(rope_scaling=json.dumps(scaling) if scaling else "")


def beside(fields: Mapping[str, Json]) -> JsonObject:
    """Finds what may stand in rope_parameters, rope_scaling or beside them."""
    return {name: fields.get(name) for name in BESIDE}


def ropes_of(path: Path, hf: Mapping[str, Json]) -> JsonObject:
    """Reads {kind of layers: its rope_parameters}. Errors: ConfigError."""
    ropes = hf.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or ropes.keys() - {FULL, SLIDING}:
        raise wrong(path, "rope_parameters", ropes, f"an object of {FULL} and {SLIDING}")
    return ropes


def local_rope(path: Path, hf: Mapping[str, Json], S: int, family: Family, keys: JsonObject) -> JsonObject:
    """Finds rope_local_theta, beside `keys` of the other layers: 0 where sliding layers are as these."""
    given = ropes_of(path, hf).get(SLIDING) or {}
    if not isinstance(given, dict):
        raise wrong(path, f"rope_parameters of {SLIDING}", given, "an object")
    own = {"rope_theta": hf.get(LOCAL)} | given
    local, scaling = rope_of(path, SLIDING, {SLIDING: own, "model_type": hf["model_type"]}, S)
    theta = local["rope_theta"]
    theta = float_field(path, LOCAL, family.local_theta if theta is None else theta)
    if theta < 1:
        raise wrong(path, LOCAL, theta, "at least 1")
    scaling_ = json.dumps(scaling) if scaling else ""
    if not keys["sliding_window"] or (theta, scaling_) == (keys["rope_theta"], keys["rope_scaling"]):
        return dict(rope_local_theta=0.0)
    if scaling:
        raise wrong(path, f"rope_parameters of {SLIDING}", scaling, "as usual, or that of the other layers")
    return dict(rope_local_theta=theta)


def rope_of(path: Path, name: str, hf: Mapping[str, Json], S: int) -> tuple[JsonObject, JsonObject]:
    """Reads (what may stand beside it; scaling without what is as usual) from one of the two fields."""
    if not isinstance(hf[name], dict):
        raise wrong(path, name, hf[name], "an object")
    family = FAMILIES[str(hf["model_type"])]
    scaling = {k: v for k, v in hf[name].items() if v is not None}
    keys = {k: scaling.pop(k, v) for k, v in beside(hf).items()}
    kind = scaling.setdefault("rope_type", scaling.pop("type", None) or "default")
    if kind not in [*family.ropes]:
        raise ConfigError(f"{path}: {name}: rope_type={kind!r:.100} must be one of {', '.join(family.ropes)}")
    kind = scaling["rope_type"] = family.ropes[kind]
    if ORIGINAL in SCALINGS.get(kind, {}):  # transformers looks for the length of before in three places
        usual = family.defaults.get(ORIGINAL)
        outside = usual if hf.get(ORIGINAL) is None else hf[ORIGINAL]
        original = scaling.setdefault(ORIGINAL, S if outside is None else outside)
        if outside not in (None, original):
            remedy = "take the wrong one out" if hf.get(ORIGINAL) else "write it outside, too"
            raise ConfigError(f"{path}: {ORIGINAL}={outside!r:.100} differs from {original!r:.100} in "
                              f"{name}; {remedy}")
        if kind == "longrope":
            scaling.setdefault("factor", max(1.0, S / size_field(path, ORIGINAL, original)))
    filled = checked_scaling(scaling, f"{path}: {name}")
    return keys, {k: v for k, v in filled.items() if k == "rope_type" or v != SCALINGS[kind][k]}


# --- memo's keys -> config.json ---

def family_of(cfg: Config, own: Path | None = None) -> str:
    """Finds the model_type of a model with memo's keys `cfg`: that of `own`, the folder that it came in, if
    there is one; else by the keys. Errors: ConfigError: transformers has none."""
    came = fields_of(own / CONFIG) if own and (own / CONFIG).exists() else {}
    D, kind = cfg.n_embd // cfg.n_head, str(came.get("model_type"))
    if kind not in FAMILIES:
        # whatever head_dim is, LlamaConfig wants C % H == 0; MistralConfig does not
        kind = ("gpt2" if cfg.mlp == "gelu" else "gemma3_text" if cfg.norms == "both" else
                ("olmo3" if cfg.sliding_window else "olmo2") if cfg.norms == "behind" else
                "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "smollm3" if cfg.layer_types
                else "phi3" if cfg.partial_rotary_factor != 1
                else "llama" if cfg.n_embd % cfg.n_head == 0 and not cfg.sliding_window else "mistral")
    like, wanted = FAMILIES[kind].architecture, FAMILIES[kind].keys
    rope = parse_scaling(cfg.rope_scaling).get("rope_type", "default")
    if kind == "gpt2":
        like, wanted = "GPT-2", dict(position="learned", norm="layernorm", norms="before", qk_norm=False,
                                     scale_embeddings=False, kv_heads=cfg.n_head, head_width=D)
    elif kind == "phi3" and rope == "longrope":  # Phi3Config counts the factors of heads as wide as this
        wanted = wanted | dict(head_width=D)
    if rope not in FAMILIES[kind].ropes.values():
        raise ConfigError(f"rope_type={rope} must be longrope for to-hf ({like} of transformers has nothing "
                          "else); train without --rope_scaling")
    for name, value in wanted.items():
        if getattr(cfg, name) != value:
            key = dict(kv_heads="n_kv_head", head_width="head_dim").get(name, name)
            raise ConfigError(f"{key}={getattr(cfg, name)} must be {value} for to-hf ({like} of transformers "
                              f"has nothing else); train with --{key}={value}")
    if kind == "gemma3_text" and cfg.n_embd % cfg.n_head:
        raise ConfigError(f"n_embd={cfg.n_embd} % n_head={cfg.n_head} must be 0 for to-hf ({like} of "
                          "transformers has nothing else); train with other heads")
    check_kinds(cfg, kind, like)
    return kind


def hf_config(cfg: Config, dtype: str, token_ids: Mapping[str, Json], own: Path | None = None) -> JsonObject:
    """Makes the config.json of `cfg` with weights of `dtype`. `token_ids`: {"bos_token_id": ...}. `own`: as
    in family_of()."""
    kind = family_of(cfg, own)
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
    near = {name: getattr(cfg, name) for name in BESIDE}
    near = {name: value for name, value in near.items() if name == "rope_theta" or value != BESIDE[name]}
    near |= {ORIGINAL: scaling[ORIGINAL]} if scaling and ORIGINAL in family.defaults else {}
    rope = dict(rope_type="default") | near | scaling
    config |= near | dict(intermediate_size=cfg.inner_width, num_key_value_heads=cfg.kv_heads,
                            head_dim=cfg.head_width, attention_dropout=0.0, rope_scaling=scaling or None,
                            rope_parameters=rope)
    config |= {name: allowed[0] for name, allowed in family.only.items() if name.startswith("hidden_act")}
    if family.local_theta:
        local = dict(rope_theta=cfg.rope_local_theta, rope_type="default") if cfg.rope_local_theta else rope
        config["rope_parameters"] = {FULL: rope, SLIDING: local}
    if kind == "gemma3_text":
        config |= dict(query_pre_attn_scalar=cfg.query_scalar or cfg.head_width,
                       **{LOCAL: cfg.rope_local_theta or cfg.rope_theta})
    if kind not in ("mistral", "qwen2", "phi3"):
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
    config, before = (hf_config(keys, dtype, {}, own) for keys in (cfg, type(cfg)(**own_keys)))
    named = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    changed = {k: v for k, v in named.items() if v != before.get(k)}
    if keys_of(path, hf | changed) != keys_of(path, config):  # a scaling that counts from a length not in it
        ropes = *ROPE, LOCAL
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
