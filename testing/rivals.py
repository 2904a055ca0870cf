"""Models of transformers in a shape of memo's, which benches and research/ compare memo with."""

from typing import Any

from memo.config.config import Config
from memo.config.settings import Settings


def gpt2_of_transformers(cfg: Settings) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=cfg.vocab_size, n_positions=cfg.block_size, n_embd=cfg.n_embd, n_layer=cfg.n_layer,
        n_head=cfg.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh"))  # torch's fused kernel; gelu_new is slower still


def gemma3_of_transformers(cfg: Config) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from memo.huggingface.huggingface import hf_config
    return Gemma3ForCausalLM(Gemma3TextConfig(**hf_config(cfg, "float32", dict(pad_token_id=None)),
                                              use_cache=False, attn_implementation="sdpa"))


def llama_of_transformers(cfg: Settings) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.inner_width,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.kv_heads,
        max_position_embeddings=cfg.block_size, use_cache=False, attn_implementation="sdpa"))
