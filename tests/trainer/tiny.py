"""Tiny models made from a seed, for tests."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

EXAMPLE_MODEL = Path(__file__).parents[2] / "examples" / "rlhf_examples" / "helpful" / "model"


def tiny_config(*, tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


FAMILIES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def divisible_config(family: str = "llama", *, tied: bool = True) -> PreTrainedConfig:
    """A model that can be cut into 4 stages and 4 shards: four layers, eight heads, four key-value heads."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    values = {**tiny_config(tied=tied).to_dict(), **heads, "num_hidden_layers": 4, "rope_parameters": None}
    return FAMILIES[family](**{name: value for name, value in values.items() if name not in OF_A_FAMILY})


OF_A_FAMILY = ("model_type", "architectures", "attention_bias", "layer_types")


def save_tiny(
    folder: Path, *, seed: int, tied: bool = True, labels: int | None = None, config: PreTrainedConfig | None = None
) -> str:
    """A language model, or with `labels` a sequence classifier, with tokenizer; returns the folder.

    config: of another model than `tiny_config`'s.
    """
    torch.manual_seed(seed)
    config = config or tiny_config(tied=tied)
    if labels is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        config.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL)).save_pretrained(folder)
    return str(folder)
