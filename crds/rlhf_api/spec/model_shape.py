"""Shape of a model: the numbers of its config.json that determine its size and FLOPs."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rlhf_api.contract import Count, Spec
from rlhf_api.expressions import VALUE, Check
from rlhf_api.problems import choice


def _known(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, **more: Any
) -> Mapping[str, Any]:
    """Return a model's sizes by their names in config.json; more: head_dim and tie_word_embeddings."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_WIDE = {"head_dim": 128}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _known("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _known("llama", 5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": _known("llama", 8192, 80, 64, 8, 28672, 32000),
    "llama-3.2-1b": _known("llama", 2048, 16, 32, 8, 8192, 128256, **_TIED),
    "llama-3.2-3b": _known("llama", 3072, 28, 24, 8, 8192, 128256, **_TIED),
    "llama-3-8b": _known("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": _known("llama", 8192, 80, 64, 8, 28672, 128256),
    "qwen2.5-0.5b": _known("qwen2", 896, 24, 14, 2, 4864, 151936, **_TIED),
    "qwen2.5-1.5b": _known("qwen2", 1536, 28, 12, 2, 8960, 151936, **_TIED),
    "qwen2.5-3b": _known("qwen2", 2048, 36, 16, 2, 11008, 151936, **_TIED),
    "qwen2.5-7b": _known("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-14b": _known("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "qwen2.5-32b": _known("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "qwen2.5-72b": _known("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "qwen3-0.6b": _known("qwen3", 1024, 28, 16, 8, 3072, 151936, **_TIED, **_WIDE),
    "qwen3-1.7b": _known("qwen3", 2048, 28, 16, 8, 6144, 151936, **_TIED, **_WIDE),
    "qwen3-4b": _known("qwen3", 2560, 36, 32, 8, 9728, 151936, **_TIED, **_WIDE),
    "qwen3-8b": _known("qwen3", 4096, 36, 32, 8, 12288, 151936, **_WIDE),
    "qwen3-14b": _known("qwen3", 5120, 40, 40, 8, 17408, 151936, **_WIDE),
    "qwen3-32b": _known("qwen3", 5120, 64, 64, 8, 25600, 151936, **_WIDE),
}
"""Name of a well-known model -> its config.json on the Hugging Face Hub; Llama 3.1 and 3.3 are as Llama 3."""


KnownModel = Annotated[
    str, Field(max_length=64), Check(VALUE.one_of(tuple(KNOWN)), f'is "{{value}}", expected {choice(KNOWN)}')
]


class Shape(Spec):
    """Shape of a model: numbers of its config.json, in camelCase; they override those of the known model `name`."""

    name: KnownModel | None = Field(None, description="Name of a known model with this shape, such as llama-3-8b.")
    model_type: str | None = Field(None, min_length=1, max_length=64)
    """Family, such as llama; unset is llama."""
    hidden_size: Count | None = Field(None, description="Size of hidden states.")
    num_hidden_layers: Count | None = Field(None, description="Number of layers.")
    num_attention_heads: Count | None = Field(None, description="Number of query heads.")
    num_key_value_heads: Count | None = Field(None, description="Number of key-value heads; unset: as for query heads.")
    head_dim: Count | None = Field(None, description="Size of a head; unset: hiddenSize / numAttentionHeads.")
    intermediate_size: Count | None = Field(None, description="Width of the feed-forward layer.")
    vocab_size: Count | None = Field(None, description="Number of tokens in the vocabulary.")
    tie_word_embeddings: bool | None = None
    """Whether the output head shares the embedding's weights; unset is false."""
    num_experts: Count | None = Field(None, description="Number of experts in a layer.")
    num_experts_per_tok: Count | None = Field(None, description="Number of experts that process a token.")
    moe_intermediate_size: Count | None = Field(None, description="Width of an expert's feed-forward layer.")
