"""Models in the exact shapes of those that users train."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import AutoConfig, DeepseekV3Config, LlamaConfig, PreTrainedConfig

from rlhf_api.spec.model_shape import KNOWN

GPU_BYTES = 80e9
USABLE = 0.92
"""Share of a GPU's bytes that tensors may take; the rest is for CUDA's context, NCCL, cuBLAS and fragmentation."""


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LONGEST = {
    "Qwen2.5-0.5B": 32768,
    "Qwen2.5-1.5B": 32768,
    "Qwen2.5-7B": 32768,
    "Llama-3-8B": 8192,
    "Llama-2-7B": 4096,
    "Qwen3-8B": 40960,
    "Qwen3-32B": 40960,
    "Llama-3-70B": 8192,
    "Qwen3-30B-A3B": 40960,
    "Qwen3-235B-A22B": 40960,
}
"""Known models (rlhf_api.spec.model_shape), and the most positions of each."""


def _known(name: str) -> PreTrainedConfig:
    return AutoConfig.for_model(**{**KNOWN[name.lower()], **_TOKENS, "max_position_embeddings": _LONGEST[name]})


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
        **_TOKENS,
    ),
    **{name: _known(name) for name in _LONGEST},
    "DeepSeek-V3": DeepseekV3Config(num_mtp_layers=0, **_TOKENS),
}
