"""GPT-2 in Hugging Face's format: its config.json, the names and shapes of its weights. Without torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.errors import ConfigError
from memo.files import load_json

if TYPE_CHECKING:
    from memo.config import Config

CONFIG = "config.json"
LAYER = {  # memo's names: (GPT-2's name, (out, in) in units of C)
    "ln1": ("ln_1", 1, 0), "q k v": ("attn.c_attn", 3, 1), "proj": ("attn.c_proj", 1, 1),
    "ln2": ("ln_2", 1, 0), "fc1": ("mlp.c_fc", 4, 1), "fc2": ("mlp.c_proj", 1, 4)}
# {memo's key: GPT-2's}
SIZES = dict(n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions",
             vocab_size="vocab_size")
DEFAULTS: dict[str, Any] = dict(  # of options that a config.json may leave out
    activation_function="gelu_new", layer_norm_epsilon=1e-5, n_inner=None, scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True, add_cross_attention=False)


def gpt2_model_keys(folder: str | Path) -> dict[str, Any]:
    """The model keys of the GPT-2 in `folder`. Errors: not a GPT-2, or one with options that memo lacks."""
    path = Path(folder) / CONFIG
    hf = load_json(path, "give a local folder of a GPT-2")
    for name in SIZES.values():
        if name not in hf:
            raise ConfigError(f"{path}: {name} is missing; give a local folder of a GPT-2")
        if type(hf[name]) is not int or not 1 <= hf[name] < 2**31:
            raise ConfigError(f"{path}: {name}={hf[name]!r:.100} must be a whole number, at least 1 and "
                              "below 2**31; give a local folder of a GPT-2")
    rules: dict[str, tuple] = dict(
        model_type=("gpt2",), activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        layer_norm_epsilon=(1e-5,), n_inner=(None, 4 * hf["n_embd"]), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,), tie_word_embeddings=(True,), add_cross_attention=(False,))
    for name, allowed in rules.items():
        value = hf.get(name, DEFAULTS.get(name))
        if value not in allowed:
            raise ConfigError(f"{path}: {name}={value!r:.100} must be {' or '.join(map(repr, allowed))}")
    gelu = "exact" if hf.get("activation_function") == "gelu" else "tanh"
    return {key: hf[name] for key, name in SIZES.items()} | dict(bias=True, position="learned", gelu=gelu)


def hf_config(cfg: "Config") -> dict[str, Any]:
    """The config.json of a GPT-2 with the model keys of `cfg`."""
    return dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=cfg.vocab_size,
                n_positions=cfg.block_size, n_embd=cfg.n_embd, n_layer=cfg.n_layer, n_head=cfg.n_head,
                tie_word_embeddings=True, activation_function="gelu" if cfg.gelu == "exact" else "gelu_new",
                layer_norm_epsilon=1e-5, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
                bos_token_id=None, eos_token_id=None)


def gpt2_parameters(cfg: "Config") -> list[tuple[list[str], str, tuple[int, ...]]]:
    """[(memo's names, GPT-2's name, GPT-2's shape)] of a GPT-2 with the dimensions of `cfg`. GPT-2 keeps the
    matrices of q, k and v side by side in one, and a linear as (in, out)."""
    C = cfg.n_embd
    rows: list[tuple[list[str], str, tuple[int, ...]]] = [
        (["wte"], "wte.weight", (cfg.vocab_size, C)), (["wpe"], "wpe.weight", (cfg.block_size, C))]
    for i in range(cfg.n_layer):
        for names, (there, n_out, n_in) in LAYER.items():
            w, b = ([f"h.{i}.{name}_{kind}" for name in names.split()] for kind in "wb")
            rows += [(w, f"h.{i}.{there}.weight", (n_in * C, n_out * C) if n_in else (C,)),
                     (b, f"h.{i}.{there}.bias", (n_out * C,))]
    return [*rows, (["lnf_w"], "ln_f.weight", (C,)), (["lnf_b"], "ln_f.bias", (C,))]
