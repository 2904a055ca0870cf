"""Fields of config.json of published models, shrunk, which bench/published.py trains."""

from typing import Any

PAD = 319  # in no document, as padding is; its row gets no gradient from transformers

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    initializer_range=0.02,
    use_cache=True,
    torch_dtype="bfloat16",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    vocab_size=320,
)
LLAMA3 = LLAMA | dict(
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=0,
    mlp_bias=False,
    num_key_value_heads=2,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
ROPE3 = dict(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_type="llama3",
)
QWEN2 = LLAMA | dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    attention_dropout=0.0,
    bos_token_id=0,
    eos_token_id=0,
    max_window_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=128,
    use_sliding_window=False,
    tie_word_embeddings=True,
    use_mrope=False,
)
QWEN3 = QWEN2 | dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    attention_bias=False,
    head_dim=32,
    rope_scaling=None,
    sliding_window=None,
    eos_token_id=2,
)
MISTRAL = {k: v for k, v in LLAMA.items() if k != "use_cache"} | dict(
    architectures=["MistralForCausalLM"],
    model_type="mistral",
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    sliding_window=None,
    tie_word_embeddings=False,
)
GPT2 = dict(
    activation_function="gelu_new",
    architectures=["GPT2LMHeadModel"],
    attn_pdrop=0.1,
    bos_token_id=0,
    embd_pdrop=0.1,
    eos_token_id=0,
    initializer_range=0.02,
    layer_norm_epsilon=1e-5,
    model_type="gpt2",
    n_ctx=128,
    n_embd=64,
    n_head=4,
    n_layer=2,
    n_positions=128,
    resid_pdrop=0.1,
    summary_activation=None,
    summary_first_dropout=0.1,
    summary_proj_to_labels=True,
    summary_type="cls_index",
    summary_use_proj=True,
    vocab_size=320,
)
CODE = dict(AutoConfig="configuration_phi3.Phi3Config", AutoModelForCausalLM="modeling_phi3.Phi3ForCausalLM")
PHI3 = MISTRAL | dict(
    architectures=["Phi3ForCausalLM"],
    model_type="phi3",
    attention_bias=False,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    num_key_value_heads=4,
    original_max_position_embeddings=128,
    pad_token_id=PAD,
    rope_scaling=None,
    rope_theta=10000.0,
    use_cache=True,
)
LONG = dict(
    long_factor=[1.08, 1.11, 1.59, 3.23, 28.57, 50.34, 62.6, 64.8],
    short_factor=[1.0, 1.02, 1.05, 1.1, 1.17, 1.82, 2.03, 2.84],
    type="longrope",
)
PHI4 = dict(
    full_attn_mod=1,
    interpolate_factor=1,
    lm_head_bias=False,
    mlp_bias=False,
    num_key_value_heads=2,
    partial_rotary_factor=0.75,
    rope_scaling=dict(
        long_factor=[1, 1.118320672, 2.735880826, 32.03, 33.5, 47.77],
        short_factor=[1.0] * 6,
        type="longrope",
    ),
    tie_word_embeddings=True,
)
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": LLAMA
    | dict(
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        num_key_value_heads=4,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="float16",
    ),
    "Meta-Llama-3-8B": LLAMA3 | dict(eos_token_id=1, rope_scaling=None),
    "Llama-3.1-8B-Instruct": LLAMA3 | dict(eos_token_id=[1, 3, 2], rope_scaling=ROPE3),
    "Llama-3.2-1B": LLAMA3
    | dict(eos_token_id=1, head_dim=16, tie_word_embeddings=True, rope_scaling=ROPE3 | dict(factor=32.0)),
    "Llama-3.3-70B-Instruct": LLAMA3 | dict(eos_token_id=[1, 3, 2], head_dim=16, rope_scaling=ROPE3),
    "Qwen2.5-0.5B": QWEN2,
    "Qwen2.5-7B-Instruct": QWEN2 | dict(tie_word_embeddings=False, eos_token_id=2),
    "Qwen2.5-14B-Instruct, yarn": QWEN2
    | dict(
        tie_word_embeddings=False,
        rope_scaling=dict(factor=4.0, original_max_position_embeddings=32, type="yarn"),
    ),
    "Qwen3-0.6B": QWEN3,
    "Qwen3-8B": QWEN3 | dict(tie_word_embeddings=False, head_dim=16),
    "Mistral-7B-v0.1": MISTRAL | dict(rope_theta=10000.0, sliding_window=64, use_cache=True),
    "Mistral-7B-Instruct-v0.3": MISTRAL | dict(use_cache=True),
    "Mistral-Nemo-Base-2407": MISTRAL | dict(head_dim=16, hidden_size=80, use_cache=True),
    "Phi-3-mini-4k-instruct": PHI3 | dict(auto_map=CODE, sliding_window=20),
    "Phi-3.5-mini-instruct": PHI3
    | dict(auto_map=CODE, original_max_position_embeddings=32, rope_scaling=LONG, sliding_window=262144),
    "Phi-4-mini-instruct": PHI3
    | PHI4
    | dict(
        auto_map=CODE | dict(AutoTokenizer="Xenova/gpt-4o"),
        original_max_position_embeddings=32,
        sliding_window=262144,
    ),
    "phi-4": PHI3 | dict(num_key_value_heads=2, rope_theta=250000),
    "Yi-6B": LLAMA
    | dict(
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
        num_key_value_heads=2,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_theta=5000000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "SmolLM2-135M": LLAMA
    | dict(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        is_llama_config=True,
        mlp_bias=False,
        num_key_value_heads=2,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B-Instruct": LLAMA
    | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
    | dict(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
        mlp_bias=False,
        num_key_value_heads=4,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=130000,
        tie_word_embeddings=True,
    ),
    "TinyLlama-1.1B-Chat-v1.0": LLAMA
    | dict(
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        num_key_value_heads=2,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "deepseek-coder-1.3b-base": LLAMA
    | dict(
        bos_token_id=0,
        eos_token_id=1,
        num_key_value_heads=4,
        pretraining_tp=1,
        rms_norm_eps=1e-6,
        rope_scaling=dict(factor=4.0, type="linear"),
        rope_theta=100000,
        tie_word_embeddings=False,
    ),
    "gpt2": GPT2 | dict(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}),
    "gpt2-medium": GPT2 | dict(n_special=0, predict_special_tokens=True),
    "distilgpt2": GPT2
    | dict(_num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, task_specific_params=None),
    "DialoGPT-small": GPT2 | dict(task_specific_params={"conversational": {"max_length": 1000}}),
}
