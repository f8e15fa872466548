"""Models in the exact shapes of those that users train."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

GPU_BYTES = 80e9
USABLE = 0.92
"""Share of a GPU's bytes that tensors may take; the rest is for CUDA's context, NCCL, cuBLAS and fragmentation."""


def _tokens() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


SHAPES: Mapping[str, PreTrainedConfig] = {
    "Llama-1M": LlamaConfig(  # nobody's: for a rehearsal of what real shapes are for
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
        **_tokens(),
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **_tokens(),
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **_tokens(),
    ),
    "Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        **_tokens(),
    ),
    "Llama-3-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **_tokens(),
    ),
    "Llama-2-7B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **_tokens(),
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        **_tokens(),
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        **_tokens(),
    ),
    "Llama-3-70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **_tokens(),
    ),
}
