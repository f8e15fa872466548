"""A tiny model of each family of docs/models.md: what every part of the trainer is held to.

`python -m tests.trainer.families` writes the table of that page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    ArceeConfig,
    Cohere2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from rlhf_trainer.expert_rows import REPLAYED

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
MIXED_LAYERS: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
THETA = {"rope_theta": 10_000.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **THETA}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "Llama, tied, with biases": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Llama, heads of 80": LlamaConfig(**SIZES | {"head_dim": 80}, tie_word_embeddings=False),
    "SmolLM": LlamaConfig(**WIDE | {"hidden_size": 192, "num_attention_heads": 6}, tie_word_embeddings=True),
    "Mistral": MistralConfig(**SIZES, sliding_window=6),
    "Qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SIZES | {"head_dim": 64}, tie_word_embeddings=True),
    "Gemma": GemmaConfig(**SIZES),
    "Gemma 2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "Gemma 3 (text)": Gemma3TextConfig(**GEMMA),
    "Phi-3, Phi-4": Phi3Config(**WIDE, tie_word_embeddings=False),
    "OLMo 2": Olmo2Config(**WIDE, tie_word_embeddings=False),
    "OLMo 3": Olmo3Config(
        **WIDE,
        **MIXED_LAYERS,
        tie_word_embeddings=False,
        rope_parameters={"sliding_attention": {"rope_type": "default", **THETA}, "full_attention": dict(YARN)},
    ),
    "SmolLM3": SmolLM3Config(**WIDE, no_rope_layer_interval=2, tie_word_embeddings=True),
    "Seed-OSS": SeedOssConfig(**SIZES, tie_word_embeddings=False),
    "Hunyuan (dense)": HunYuanDenseV1Config(
        **SIZES, rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, **THETA}
    ),
    "Ministral": MinistralConfig(**SIZES, **MIXED_LAYERS, tie_word_embeddings=False),
    "Arcee": ArceeConfig(**SIZES, tie_word_embeddings=False),
    "Starcoder2": Starcoder2Config(**WIDE, sliding_window=6, tie_word_embeddings=True),
    "GLM-4": Glm4Config(**SIZES, tie_word_embeddings=False),
    "Cohere 2": Cohere2Config(**WIDE, **MIXED_LAYERS, logit_scale=0.5),
    "EXAONE 4": Exaone4Config(**WIDE, **MIXED_LAYERS, tie_word_embeddings=False),
    "ERNIE 4.5": Ernie4_5Config(**SIZES, tie_word_embeddings=True),
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
    "DeepSeek-V3": DeepseekV3Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        tie_word_embeddings=False,
    ),
    "GPT-2": GPT2Config(**SPECIAL, vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=512),
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * each for each in range(16)],
    "long_factor": [1.5 + 0.5 * each for each in range(16)],
    **THETA,
}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, PreTrainedConfig] = {
    "linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, **THETA}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SIZES | {"max_position_embeddings": 64}, rope_parameters=dict(YARN)),
    "dynamic": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 4.0, **THETA}),
    "longrope, long": Phi3Config(**WIDE, original_max_position_embeddings=16, rope_parameters=dict(LONGROPE)),
    "longrope, short": Phi3Config(**WIDE, original_max_position_embeddings=300, rope_parameters=dict(LONGROPE)),
}
"""A model with each type of RoPE but the default. A job of 256 tokens takes the long or the short factors."""
NOT_SCORING = ("Granite", "OLMoE", "Cohere 2", "ERNIE 4.5")
"""transformers has no sequence classifier of them."""
NOT_GENERATING = ("DeepSeek-V3",)
"""The trainer does not know their weights in vLLM."""
MIXTURES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "DeepSeek-V3", "OLMoE")
"""Experts may be on several ranks."""
DENSE = ("Llama", "Llama, tied, with biases", "Llama, heads of 80", "SmolLM", "Mistral", "Qwen2", "Qwen3")
PIPELINE = (*DENSE, *MIXTURES)
"""Layers may be on several ranks."""
TENSOR = (
    *(*DENSE, *MIXTURES[:4], "Gemma", "Gemma 2", "Gemma 3 (text)", "SmolLM3", "Seed-OSS", "Ministral", "Arcee"),
    "Starcoder2",
    *("Cohere 2", "EXAONE 4", "ERNIE 4.5", "Granite"),
)
"""Layers may be cut over ranks."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = (
    "| models | SFT, DPO, context | reward model, critic | RL (vLLM) | tensor | pipeline | expert, replay |\n"
    "|---|---|---|---|---|---|---|\n"
)


def table() -> str:
    """The table of docs/models.md, by what the tests of the families show; a row of each combination of answers."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        rows.setdefault(_answers(family), []).append(family)
    return HEAD + "".join(f"| {'; '.join(each)} | {' | '.join(answers)} |\n" for answers, each in rows.items())


def _answers(family: str) -> tuple[str, ...]:
    works = [family not in NOT_SCORING, family not in NOT_GENERATING, family in TENSOR, family in PIPELINE]
    replays = "yes, yes" if FAMILIES[family].model_type in REPLAYED else "yes, no"
    return ("yes", *("yes" if each else "no" for each in works), replays if family in MIXTURES else "")


def written(page: str) -> str:
    """The page with the table of this file in place of its own."""
    before, _, rest = page.partition("| models |")
    return before + table() + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
