"""Prompts, ends and positions are those of vLLM's own functions, for the shapes of real tokenizers and models.

A family costs no engine here; the engines of tiny models are compared in the tests beside this one.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_trainer.generation.families import why_not_generated
from rlhf_trainer.training.rope import fix_rope
from tests.foreign.models.shapes import POSITIONS, SHAPES, Shape, query_of
from tests.foreign.turns.encoding import encoder_of, ends_of
from tests.foreign.turns.families import FAMILIES, TALK, tokenizer_of
from tests.trainer.generation.conftest import RunRanks


def prompt_of(name: str) -> list[int]:
    """Token ids that vLLM's chat endpoint reads for a conversation."""
    from vllm.renderers.hf import safe_apply_chat_template

    tokenizer, asked = tokenizer_of(FAMILIES[name]), cast(Any, TALK[:3])
    template, model = str(tokenizer.chat_template), cast(Any, None)  # so the model's template is not looked for
    found = safe_apply_chat_template(model, tokenizer, asked, chat_template=template, add_generation_prompt=True)
    return list(map(int, found))


def stops_of(name: str) -> set[int]:
    """Tokens at which vLLM ends a response by itself: the tokenizer's, and those of generation_config.json."""
    from vllm import SamplingParams

    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    sampling = SamplingParams()
    listed = [tokenizer.convert_tokens_to_ids(each) for each in family.listed]
    sampling.update_from_generation_config({"eos_token_id": listed} if listed else {}, tokenizer.eos_token_id)
    return set(sampling.all_stop_token_ids)


def turned_by_vllm(shape: Shape) -> Tensor:
    """Queries turned by their positions, [positions, head size]."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

    engine = VllmConfig()
    engine.model_config = cast(Any, SimpleNamespace(max_model_len=shape.tokens))
    config, queries = shape.config, query_of(shape)
    rope = {**config.rope_parameters.get(shape.layer, config.rope_parameters)}
    with set_current_vllm_config(engine), patch.dict(_ROPE_DICT, clear=True):  # as after an engine's end
        turning = get_rope(shape.head_size, max_position=config.max_position_embeddings, rope_parameters=rope)
        turn = getattr(turning, "forward_native", turning.forward)
        turned, _ = turn(torch.tensor(POSITIONS), queries.clone(), queries.clone())
    return cast(Tensor, turned)


def answers() -> tuple[dict[str, list[int]], dict[str, set[int]], dict[str, Tensor]]:
    """Answers of vLLM's functions: prompt and ends of each family, and positions in each shape."""
    turned = {name: turned_by_vllm(shape) for name, shape in SHAPES.items()}
    return {name: prompt_of(name) for name in FAMILIES}, {name: stops_of(name) for name in FAMILIES}, turned


@pytest.fixture(scope="module")
def vllm(vllm_ranks: RunRanks) -> tuple[dict[str, list[int]], dict[str, set[int]], dict[str, Tensor]]:
    (found,) = vllm_ranks(1, answers)
    return cast(tuple[dict[str, list[int]], dict[str, set[int]], dict[str, Tensor]], found)


def test_a_prompt_has_the_ids_that_vllm_reads(vllm: tuple[dict[str, list[int]], Any, Any]) -> None:
    for name, family in FAMILIES.items():
        (prompt,) = encoder_of(family, tokenizer_of(family), TALK[:3]).prompts()
        assert prompt == vllm[0][name], name


def test_a_response_ends_where_vllm_ends_it(vllm: tuple[Any, dict[str, set[int]], Any]) -> None:
    """vLLM knows the tokenizer's end and those of the model's files; the trainer adds that of the template."""
    for name, family in FAMILIES.items():
        ids = ends_of(family, tokenizer_of(family)).ids
        assert {*ids} == vllm[1][name] | {ids[0]}, name


@pytest.mark.parametrize("name", SHAPES)
def test_positions_turn_queries_as_in_vllm(name: str, vllm: tuple[Any, Any, dict[str, Tensor]]) -> None:
    shape = SHAPES[name]
    assert not why_not_generated(shape.config, on_cpu=False)
    model: Any = AutoModelForCausalLM.from_config(shape.config)
    fix_rope(model, shape.tokens)
    layer = (shape.layer,) if shape.layer else ()
    turns = model.base_model.rotary_emb(torch.zeros(1), torch.tensor([POSITIONS]), *layer)
    queries = query_of(shape)[None, None]
    turned, _ = sys.modules[type(model).__module__].apply_rotary_pos_emb(queries, queries, *turns)
    torch.testing.assert_close(turned[0, 0], vllm[2][name], rtol=0, atol=2e-3)
