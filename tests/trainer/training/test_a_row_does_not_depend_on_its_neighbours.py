"""A row has the same log-probabilities alone and in any micro-batch, with every family and every type of RoPE."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_trainer.generation.families import why_not_generated
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel
from rlhf_trainer.training.rope import fix_rope
from tests.each import each_case
from tests.trainer.families import FAMILIES, LONGROPE, ROPES

MODELS = FAMILIES | ROPES
LENGTHS = (40, 3, 9, 25, 17, 5)
"""The texts of 40, 25 and 17 tokens are longer than the model of the long factors was trained on."""
TOKENS = torch.randint(3, 512, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
JOB_TOKENS = 256
ROWS = st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=6)


@cache
def model_of(name: str) -> LanguageModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).float().eval()
    fix_rope(model, JOB_TOKENS)
    use_attention(model, "SDPA", device=torch.device("cpu"), dtype=torch.float32)
    return LanguageModel(model)


@torch.no_grad()
def log_probs(name: str, rows: list[int], *, at_least: int = 1) -> list[Tensor]:
    lengths = torch.tensor([LENGTHS[row] for row in rows])
    text = TokenBatch(tokens=TOKENS[rows], lengths=lengths, read=torch.ones(len(rows), TOKENS.shape[1]))
    packed = ModelInput.of([text], at_least=at_least)
    found = model_of(name)(packed.tokens, packed).log_probs
    return [row[:length] for row, length in zip(found, lengths.tolist(), strict=True)]


@cache
def alone(name: str, row: int) -> Tensor:
    return log_probs(name, [row])[0]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(rows=ROWS, padding=st.integers(0, 600))
def test_a_row_alone_is_the_row_in_any_micro_batch(name: str, rows: list[int], padding: int) -> None:
    """padding: of a filler text, which may be longer than any text that the model can read."""
    at_least = min(padding, MODELS[name].max_position_embeddings)
    for row, found in zip(rows, log_probs(name, rows, at_least=at_least), strict=True):
        torch.testing.assert_close(found, alone(name, row), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tokens", "factors"), [(16, "short_factor"), (17, "long_factor")])
def test_factors_follow_the_longest_text_of_the_job(tokens: int, factors: str) -> None:
    """The frequencies are those that LongRoPE defines: 1 / (factor * theta ** (2 i / 32))."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(ROPES["longrope, long"]))
    fix_rope(model, tokens)
    model(torch.zeros(1, 40, dtype=torch.int64))  # a long text changes nothing
    expected = 1 / (torch.tensor(LONGROPE[factors]) * 10_000.0 ** (torch.arange(16) / 16))
    torch.testing.assert_close(model.base_model.rotary_emb.inv_freq, expected)


@each_case(("tokens", "stretch"), [(512, 1.0), (1024, 5.0)])
@each_case("layer", ["", "full_attention"])
def test_dynamic_factors_follow_the_longest_text_of_the_job(tokens: int, stretch: float, layer: str) -> None:
    """The base is NTK scaling's, with factor 4 and 512 trained tokens: theta * (4 * tokens / 512 - 3) ** (32 / 30)."""
    rope: dict[str, object] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config = copy.deepcopy(ROPES["dynamic"])
    if layer:
        config = copy.deepcopy(FAMILIES["OLMo 3"])
        config.rope_parameters[layer] = rope
    model = AutoModelForCausalLM.from_config(config)
    fix_rope(model, tokens)
    model(torch.zeros(1, 40, dtype=torch.int64))  # a short text changes nothing
    found = getattr(model.base_model.rotary_emb, f"{layer}_inv_freq" if layer else "inv_freq")
    expected = 1 / (10_000.0 * stretch ** (32 / 30)) ** (torch.arange(16) / 16)
    torch.testing.assert_close(found, expected)


REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "a scale of its own": ("Phi-3, Phi-4", {**LONGROPE, "attention_factor": 1.3}),
    "another stretch": ("Phi-3, Phi-4", {**LONGROPE, "factor": 2.0}),
    "by the backend": ("Arcee", {**LONGROPE, "original_max_position_embeddings": 64}),
    "alpha": ("Llama", {"rope_type": "dynamic", "factor": 2.0, "alpha": 8.0}),
}


@each_case("case", REFUSED)
def test_what_vllm_computes_otherwise_is_refused(case: str) -> None:
    family, rope = REFUSED[case]
    sentence = why_not_generated(with_rope(FAMILIES[family], rope), on_cpu=True)
    assert sentence.startswith(f"has RoPE of type {rope['rope_type']} with ")
    assert sentence.endswith(", which vLLM computes in another way")


def test_each_type_of_rope_here_may_generate() -> None:
    assert not any(why_not_generated(config, on_cpu=True) for config in ROPES.values())


def with_rope(config: PreTrainedConfig, rope: dict[str, object]) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    changed.rope_parameters = {"original_max_position_embeddings": 16, "rope_theta": 10_000.0, **rope}
    return changed


def test_servers_of_any_length_get_no_longrope() -> None:
    may = [why_not_generated(ROPES[name], on_cpu=True, elsewhere=True) for name in ("yarn", "longrope, short")]
    assert may == ["", "generates only in the job's own engines, and spec.rollout.endpoints names servers"]
