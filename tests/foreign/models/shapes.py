"""Rotary embeddings of real models that RL takes: the numbers of their config.json, with one narrow layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

POSITIONS = (0, 1, 7, 100, 1000, 4095)
SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + each / 24 for each in range(48)],
    "long_factor": [1.0 + each * 1.3 for each in range(48)],
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's config, and the job that reads it."""

    config: PreTrainedConfig
    head_size: int
    tokens: int = 8192
    """Length of the job's longest text."""
    layer: str = ""
    """Type of a layer with a rotary embedding of its own; empty: all layers share one."""


def shape(kind: type[PreTrainedConfig], size: int, most: int, rope: dict[str, Any], **more: Any) -> Shape:
    """A shape with heads of `size` that reads `most` tokens; more: fields of Shape."""
    fields = {"hidden_size": size, "head_dim": size, "max_position_embeddings": most, "rope_parameters": dict(rope)}
    fields |= {"layer_types": [more["layer"]]} if "layer" in more else {}
    return Shape(config=kind(**SMALL, **fields), head_size=size, **more)


def plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


GEMMA3 = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": plain(1e4)}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
SHAPES = {
    "Llama 2": shape(LlamaConfig, 128, 4096, plain(1e4)),
    "Llama 3.1": shape(LlamaConfig, 128, 131072, LLAMA3),
    "Mistral 7B": shape(MistralConfig, 128, 32768, plain(1e6)),
    "Qwen2.5": shape(Qwen2Config, 128, 32768, plain(1e6)),
    "Qwen2.5, long": shape(Qwen2Config, 128, 131072, YARN),
    "Qwen3": shape(Qwen3Config, 128, 40960, plain(1e6)),
    "Gemma 2": shape(Gemma2Config, 256, 8192, plain(1e4)),
    "Gemma 3, sliding": shape(Gemma3TextConfig, 256, 131072, GEMMA3, layer="sliding_attention"),
    "Gemma 3, full": shape(Gemma3TextConfig, 256, 131072, GEMMA3, layer="full_attention"),
    "Phi-3-mini-4k": shape(Phi3Config, 96, 4096, plain(1e4)),
    "Phi-3-mini-128k, short": shape(Phi3Config, 96, 131072, LONGROPE, tokens=4096),
    "Phi-3-mini-128k, long": shape(Phi3Config, 96, 131072, LONGROPE),
    "Phi-4-mini": shape(Phi3Config, 128, 131072, {**LONGROPE, "partial_rotary_factor": 0.75}),
    "EXAONE 4": shape(Exaone4Config, 128, 131072, {**LLAMA3, "rope_theta": 1e6, "factor": 16.0}),
    "Granite 3": shape(GraniteConfig, 64, 131072, plain(1e7)),
}


def query_of(shape: Shape) -> Tensor:
    """A query for each of POSITIONS, float32 [positions, head size]."""
    return torch.randn(len(POSITIONS), shape.head_size, generator=torch.Generator().manual_seed(0))
