"""Tiny models made from a seed, for tests."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

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


def save_tiny(folder: Path, *, seed: int, tied: bool = True, labels: int | None = None) -> str:
    """A language model, or with `labels` a sequence classifier, with tokenizer; returns the folder."""
    torch.manual_seed(seed)
    config = tiny_config(tied=tied)
    if labels is None:
        model = LlamaForCausalLM(config)
    else:
        config.num_labels = labels
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL)).save_pretrained(folder)
    return str(folder)
