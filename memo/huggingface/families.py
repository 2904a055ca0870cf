"""Families of models in Hugging Face's format: names, sizes, and what all models of one have. Without
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memo.config.rope import SCALINGS
from memo.system.files import Json, JsonObject

PATTERN, LOCAL = "sliding_window_pattern", "rope_local_base_freq"  # of Gemma 3


@dataclass(frozen=True)
class Family:
    """Describes a family of models."""

    architecture: str
    prefix: str  # of all names of weights but the head's
    layers: str  # in front of a layer's number
    names: dict[str, str]  # {memo's without _w or _b: transformers'}, the same where one matrix has them all
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
    more: tuple[str, ...] = ()  # fields that are read beside those of all families
    ropes: Mapping[str, str] = field(default_factory=lambda: {kind: kind for kind in ("default", *SCALINGS)})


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
              rope_interleaved=(False,), use_mrope=(False,)),
    keys=dict(norm="rmsnorm", norms="before", mlp="swiglu", bias=False, position="rope", qkv_bias=False,
              qk_norm=False, qk_norm_over="head", query_scalar=0, scale_embeddings=False,
              rope_local_theta=0.0, partial_rotary_factor=1.0),
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
                       defaults=dict(num_key_value_heads=4),
                       more=("no_rope_layers", "no_rope_layer_interval")),
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
                      max_position_embeddings=131072, query_pre_attn_scalar=256, sliding_window=4096),
        more=(PATTERN, LOCAL)),
    "phi3": replace(LLAMA, architecture="Phi3ForCausalLM", norm_eps=("rms_norm_eps", 1e-5),
                    names=LLAMA.names | dict.fromkeys("qkv", "self_attn.qkv_proj")
                    | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
                    only=LLAMA.only | dict(lm_head_bias=(False,), full_attn_mod=(1,),
                                           interpolate_factor=(1,)),
                    keys=without(LLAMA.keys, "partial_rotary_factor"),
                    ropes=dict(default="default", longrope="longrope", su="longrope", yarn="longrope"),
                    defaults=dict(original_max_position_embeddings=4096))}
