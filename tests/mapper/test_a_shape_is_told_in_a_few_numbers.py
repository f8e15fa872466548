"""A manifest tells a shape by its numbers or by a known name, and it is the same as from config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from rlhf_api.names import Role
from rlhf_api.spec.model_shape import KNOWN, Shape
from rlhf_api.tables import read_table
from rlhf_mapper.architecture import CUT, MIXTURES, ONLY_EXPERTS
from rlhf_mapper.config_file import ModelConfigError, architecture_in, shape_in, shape_of
from tests.each import each_case
from tests.mapper.test_a_config_says_how_many_parameters import LLAMA_7B, MIXTRAL, QWEN, QWEN3_30B

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b-2507": 30_532_122_624,
    "qwen3-235b-a22b-2507": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-v3": 671_026_404_352,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "codestral-22b": 22_247_282_688,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "yi-1.5-6b": 6_061_035_520,
    "yi-1.5-9b": 8_829_407_232,
    "yi-1.5-34b": 34_388_917_248,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmoe-1b-7b": 6_919_161_856,
}
"""Parameters, as the model cards have them; biases of Qwen2.5 and norms of Qwen3's heads are in there."""


@each_case("name", KNOWN)
def test_a_known_model_has_its_published_parameters(name: str) -> None:
    model = architecture_in(Shape(name=name), "actor")
    assert model.parameters == pytest.approx(PUBLISHED[name], rel=1e-4)
    assert model.may_be_cut == (KNOWN[name]["model_type"] in {*CUT, *MIXTURES}.difference(ONLY_EXPERTS))


def test_a_row_of_known_models_has_no_value_without_a_column() -> None:
    columns, *rows = read_table("rlhf_api.spec", "known_models.yaml", dict[str, list[Any]]).values()
    assert {row[0] for row in rows} == {"A", "L", "P"}
    assert max(len(row[1:]) for row in rows) <= len(columns)


@each_case("role", get_args(Role))
@each_case("config", [LLAMA_7B, MIXTRAL, QWEN, QWEN3_30B, {**QWEN, "model_type": "gemma"}], ids=str)
def test_the_numbers_of_a_config_give_the_same_model(config: dict[str, Any], role: Role) -> None:
    text = json.dumps(config)
    assert architecture_in(shape_in(text), role) == shape_of(text, role)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_shared_experts_are_told_by_a_known_name(name: str) -> None:
    text = json.dumps({**KNOWN[name], "num_hidden_layers": 6})
    shape = shape_in(text)
    assert (shape.name, shape.num_hidden_layers) == (name, 6)
    assert architecture_in(shape, "actor") == shape_of(text, "actor")


def test_numbers_beside_a_name_replace_its_own() -> None:
    wide = architecture_in(Shape(name="llama-3-8b", vocab_size=128_264), "actor")
    assert (wide.vocabulary, wide.layers) == (128_264, 32)


@each_case("config", ["{", "[]", '{"hidden_size": 8}', '{"architectures": ["BertForMaskedLM"]}'])
def test_a_config_without_a_shape_gives_none(config: str) -> None:
    with pytest.raises(ModelConfigError):
        shape_in(config)


@each_case(
    ("numbers", "sentence"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads is 3, which does not divide hidden_size, 4096"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide num_attention_heads, 32"),
        ({"num_hidden_layers": 20_000_000}, "num_hidden_layers is beyond 10,000,000, which no model has"),
        ({"model_type": "t5"}, "t5 is no decoder"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelConfigError, match=sentence):
        architecture_in(Shape.model_validate({"name": "llama-2-7b", **numbers}, by_name=True), "actor")


def test_gpt2_is_read_by_its_own_names() -> None:
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024, "vocab_size": 50257}
    text = json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes})
    shape = shape_of(text, "actor")
    assert (shape.layers, shape.hidden, shape.heads, shape.tied, shape.may_be_cut) == (12, 768, 12, True, False)
    assert shape.parameters == pytest.approx(124.4e6, rel=0.01)
    assert shape.positions == 1024
    assert architecture_in(shape_in(text), "actor") == replace(shape, positions=0)
