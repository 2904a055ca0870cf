"""The configuration: one frozen dataclass, all rules (memo/rules.py) checked before a device is touched."""

from dataclasses import dataclass, fields

from memo.keys import Keys, check_value
from memo.rules import check_rules
from memo.settings import Settings


@dataclass(frozen=True)
class Config(Settings):
    """Holds keys that obey the rules. Errors: ConfigError: one that does not."""

    def __post_init__(self) -> None:
        for name, f in KEYS.items():
            check_value(f, getattr(self, name))
        check_rules(self)


# that the weights of a checkpoint depend on
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "n_kv_head", "head_dim", "n_inner",
              "norm", "norm_eps", "mlp", "bias", "qkv_bias", "qk_norm", "tie_embeddings", "gelu", "position",
              "rope_theta", "rope_scaling")
# that choose.choose() replaces by numbers and places, and on what of a run's layout these depend
SUBSEQUENCE_KEYS = ("subsequences", "subsequence_cut", "unit_order")
CHOSEN_KEYS = (*SUBSEQUENCE_KEYS, "pp", "states")
LAYOUT_KEYS = ("block_size", "batch_size", "tp", "tensor_parallel", "cp", "context_parallel", "pp")
POSITION_KEYS = ("block_size", "rope_theta", "rope_scaling")  # may change where positions are rotary
KEYS = {f.name: f for f in fields(Config) if f.metadata}


def as_keys(cfg: Config) -> Keys:
    """{key: value}."""
    return {name: getattr(cfg, name) for name in KEYS}
