"""Parameters from config.json against the published counts and against models of transformers."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.config_file import shape_of
from tests.each import each_case
from tests.trainer.families import FAMILIES


def config(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int = 32000, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **more,
    }


LLAMA_7B = config(32, 4096, 32, 11008)
MIXTRAL = config(32, 4096, 32, 14336, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
QWEN3_30B = config(
    48, 2048, 32, 6144, 151936, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8
) | {"moe_intermediate_size": 768}
EXACT = {
    "Llama-2 7B": (LLAMA_7B, 6_738_415_616),
    "Llama-2 13B": (config(40, 5120, 40, 13824), 13_015_864_320),
    "Llama-2 70B": (config(80, 8192, 64, 28672, num_key_value_heads=8), 68_976_648_192),
    "CodeLlama 34B": (config(48, 8192, 64, 22016, num_key_value_heads=8), 33_743_970_304),
    "Mixtral 8x7B": (MIXTRAL, 46_702_792_704),
}
QWEN = config(24, 896, 14, 4864, 151936, num_key_value_heads=2, tie_word_embeddings=True)


@each_case("name", EXACT)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    fields, published = EXACT[name]
    assert architecture_of(fields).parameters == published


def test_a_tied_embedding_counts_once() -> None:
    biases = 24 * (896 + 2 * 2 * 64)  # of q, k and v, which count as nothing
    assert architecture_of(QWEN).parameters == 494_032_768 - biases
    untied = architecture_of({**QWEN, "tie_word_embeddings": False})
    assert untied.parameters - architecture_of(QWEN).parameters == 151936 * 896


def test_of_a_mixture_of_experts_a_token_meets_a_part() -> None:
    model = architecture_of(MIXTRAL)
    active = model.layers * model.active_layer_parameters + 2 * 32000 * 4096
    assert active == pytest.approx(12.9e9, rel=0.005)
    qwen = architecture_of(QWEN3_30B)
    assert qwen.parameters == pytest.approx(30.5e9, rel=0.005)
    assert qwen.layers * qwen.active_layer_parameters + 2 * 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)


def test_a_scorer_has_one_output_instead_of_the_vocabulary() -> None:
    both = [architecture_of(LLAMA_7B, scores=scores) for scores in (False, True)]
    assert both[0].parameters - both[1].parameters == 4096 * (32000 - 1)
    tied = [architecture_of(QWEN, scores=scores) for scores in (False, True)]
    assert tied[1].parameters - tied[0].parameters == 896, "its head is not the embedding"


def test_an_mlp_without_gate_has_two_matrices() -> None:
    gated = architecture_of(LLAMA_7B).layer_parameters
    assert gated == architecture_of({**LLAMA_7B, "model_type": "glm4"}).layer_parameters
    for name in ("apertus", "arcee", "gpt2", "jais2", "nanochat", "nemotron", "phi", "starcoder2"):
        plain = architecture_of({**LLAMA_7B, "model_type": name}).layer_parameters
        assert gated == plain + 4096 * 11008, name


FEW = (".wpe.", ".shared_expert_gate.")
"""Parts of the names of matrices that do not count: GPT-2's learned positions, and a gate of one column."""


@each_case("family", FAMILIES)
def test_matrices_are_those_of_the_model(family: str) -> None:
    """Vectors count only as norms of layers: biases and other norms are few."""
    config = FAMILIES[family]
    shape = shape_of(config.to_json_string(use_diff=False), "actor")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    every = [(name, each.numel()) for name, each in model.named_parameters() if each.ndim > 1]
    matrices = sum(count for name, count in every if not any(few in name for few in FEW))
    assert shape.parameters - (2 * shape.layers + 1) * shape.hidden == matrices


def test_gpt2_has_its_published_size() -> None:
    """124,439,808 parameters, of which 786,432 are of positions, and 102,144 biases and norms are not counted."""
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "model_type": "gpt2", "n_inner": None}
    counted = shape_of(json.dumps(sizes), "actor").parameters
    assert counted + 1024 * 768 + 12 * (9 + 2) * 768 + 768 == 124_439_808
    narrow = shape_of(json.dumps({**sizes, "n_inner": 1024}), "actor").parameters
    assert counted - narrow == 12 * 2 * 768 * (3072 - 1024)


def test_heads_are_as_wide_as_the_config_says() -> None:
    assert architecture_of(LLAMA_7B).head_size == 128
    wide = architecture_of({**LLAMA_7B, "head_dim": 256})
    assert wide.layer_parameters - architecture_of(LLAMA_7B).layer_parameters == 4 * 4096 * 4096


@each_case("field", LLAMA_7B)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(KeyError, match=field):
        architecture_of({name: value for name, value in LLAMA_7B.items() if name != field})
