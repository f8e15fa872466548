"""Shape of a model: the numbers of its config.json that determine its size and FLOPs."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rlhf_api.contract import Count, Spec
from rlhf_api.expressions import VALUE, Check
from rlhf_api.tables import read_table

_COLUMNS, *_ROWS = read_table(__package__, "known_models.yaml", dict[str, list[Any]]).items()
KNOWN: Mapping[str, Mapping[str, Any]] = {
    name: {size: value for size, value in zip(_COLUMNS[1], sizes, strict=False) if value is not None}
    for name, (_, *sizes) in _ROWS
}
"""Name of a well-known model -> its config.json on the Hugging Face Hub."""
HUB_IDS: Mapping[str, tuple[str, ...]] = read_table(__package__, "hub_ids.yaml", dict[str, tuple[str, ...]])
"""Name of a well-known model -> ids of the models on the Hugging Face Hub that have its shape."""
NO_MODEL = 'is "{value}", expected a known model, such as llama-3-8b; `rlhf size` says close names'
KnownModel = Annotated[str, Field(max_length=64), Check(VALUE.one_of(tuple(KNOWN)), NO_MODEL)]


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
