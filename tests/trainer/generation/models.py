"""Tiny models of the families that vLLM lays out differently, with prompts that its prefix cache keeps."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.trainer.tiny import EXAMPLE_MODEL

FAMILIES = {
    "llama": ("llama", False),
    "llama tied": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen2 tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
}
COPIED = {"one key head": ("qwen3", False)}
"""Each tensor-parallel rank of the generator holds a copy of the only head of keys and values."""
MIXTURES = {"qwen3 moe": ("qwen3_moe", False), "qwen2 moe": ("qwen2_moe", False), "mixtral": ("mixtral", False)}
"""The experts of the first two are narrower than vLLM packs them. The second has a shared expert as well."""
OF_TRANSFORMERS = {"smollm3 tied": ("smollm3", True), "starcoder2": ("starcoder2", False)}
"""vLLM takes the modules of transformers. They are cut into shards only."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 96}
OF_FAMILY: dict[str, dict[str, int]] = {
    "qwen3 moe": EXPERTS,
    "qwen2 moe": EXPERTS | SHARED,
    "one key head": {"num_key_value_heads": 1},
    "mixtral": {"num_local_experts": 4},
}
"""name: (model type, tied embeddings)"""
VOCABULARY = 450
"""No multiple of 64 times any t_g: vLLM pads it, with t_g = 4 on the last rank only."""


def save_config(folder: Path, family: str) -> str:
    """A model's folder without weights: 4 heads, 2 of keys and values, so that t_g = 4 keeps each twice."""
    kind, tied = (FAMILIES | COPIED | MIXTURES | OF_TRANSFORMERS)[family]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **heads | OF_FAMILY.get(family, {}),
    )
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL)).save_pretrained(folder)
    return str(folder)


def model_of(folder: str, seed: int) -> PreTrainedModel:
    """float32 weights of a seed; norms and biases are random too, so that none is like another."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def weights_of(folder: str, seed: int) -> dict[str, Tensor]:
    """Return the parameters of `model_of` by name; fused gates of experts are [experts, 2, width, hidden]."""
    weights = {name: weight.detach() for name, weight in model_of(folder, seed).named_parameters()}
    return {name: weight.unflatten(1, (2, -1)) if "gate_up" in name else weight for name, weight in weights.items()}


def prompts(engine: int) -> list[list[int]]:
    """An engine's own: short ones, and some that share a beginning longer than a block of vLLM's cache."""
    generator = torch.Generator().manual_seed(engine)
    shared = torch.randint(3, VOCABULARY, (180,), generator=generator).tolist()
    ends = torch.randint(3, VOCABULARY, (12 + engine, 5), generator=generator).tolist()
    return ends[:4] + [shared + end for end in ends[4:]]
