"""Tiny configurations of every model family, with sizes that do not divide evenly where that matters."""

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def config(family: str = "llama", *, tied: bool = True, vocabulary: int = 256, **changed: Any) -> PreTrainedConfig:
    """A configuration of a family."""
    return CLASSES[family](vocab_size=vocabulary, tie_word_embeddings=tied, **{**SIZES, **changed})
