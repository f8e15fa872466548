"""A tiny model of each family of docs/models.md: what every part of the trainer is held to."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1}
SIZES: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
WIDE: dict[str, Any] = {**{name: size for name, size in SIZES.items() if name != "head_dim"}, "hidden_size": 128}
"""Of families whose heads are as large as the hidden states are wide."""
GEMMA: dict[str, Any] = {**SIZES, "query_pre_attn_scalar": 32, "sliding_window": 6}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "Llama, tied, with biases": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Llama, heads of 80": LlamaConfig(**SIZES | {"head_dim": 80}, tie_word_embeddings=False),
    "SmolLM": LlamaConfig(**WIDE | {"hidden_size": 192, "num_attention_heads": 6}, tie_word_embeddings=True),
    "Mistral": MistralConfig(**SIZES, sliding_window=6),
    "Qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SIZES | {"head_dim": 64}, tie_word_embeddings=True),
    "Gemma 2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "Gemma 3 (text)": Gemma3TextConfig(**GEMMA),
    "Phi-3, Phi-4": Phi3Config(**WIDE, tie_word_embeddings=False),
    "OLMo 2": Olmo2Config(**WIDE, tie_word_embeddings=False),
    "Granite": GraniteConfig(
        **WIDE,
        tie_word_embeddings=True,
        embedding_multiplier=2.0,
        logits_scaling=1.5,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
    "Qwen2-MoE": Qwen2MoeConfig(**WIDE, **EXPERTS, shared_expert_intermediate_size=96, mlp_only_layers=[1]),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=True),
    "OLMoE": OlmoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
    "GPT-2": GPT2Config(**SPECIAL, vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=512),
}
NOT_SCORING = ("Granite", "OLMoE")
"""transformers has no sequence classifier of them."""
NOT_GENERATING = ("OLMo 2", "Mixtral")
"""vLLM generates with them by another path, or under other names: their weights are not updated."""
PIPELINE = ("Llama", "Llama, tied, with biases", "Llama, heads of 80", "SmolLM", "Mistral", "Qwen2", "Qwen3")
"""Layers may be on several ranks."""
TENSOR = (*PIPELINE, "Gemma 2", "Gemma 3 (text)", "Granite")
"""Layers may be cut over ranks."""
