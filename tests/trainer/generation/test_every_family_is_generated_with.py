"""vLLM writes and scores what the trained weights of each family say, after an update in place; so with each RoPE."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.rope import fix_rope
from rlhf_trainer.training.sharding import shard
from tests.foreign.models.folders import add_code, keep_modules
from tests.trainer.families import FAMILIES, NOT_GENERATING, ROPES
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import MAX_TOKENS, NEW_TOKENS, build
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

PROMPTS = torch.randint(3, 512, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
LONG = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
"""A prompt with more tokens than a model with scaled RoPE reads without its factor."""


def generate(first: str, second: str, trust_remote_code: bool = False) -> tuple[list[Any], list[Any]]:
    """Greedy and sampled responses of an engine made for one model, with the weights of another."""
    if trust_remote_code:
        keep_modules(pytest.MonkeyPatch(), Path(first).parent / "modules")
    engine = build(first, [[0]], trust_remote_code=trust_remote_code)
    model = load_language_model(second, seed=0, trust_remote_code=trust_remote_code, revision=None)
    sharded = shard(model, compute_dtype=torch.float32, recompute_activations=False)
    holds = engine.held_shards()
    weights = full_weights(sharded)
    engine.load_weights(((name, part, weights[name].view(part.shape)) for name, part in holds.items()), holds)
    engine.wake_cache()
    prompts, seeds = [*PROMPTS, LONG], list(range(len(PROMPTS) + 1))
    return (
        engine.generate(prompts, seeds, max_tokens=NEW_TOKENS, greedy=True),
        engine.generate(prompts, seeds, max_tokens=NEW_TOKENS),
    )


GENERATING = [family for family in (*FAMILIES, *ROPES) if family not in NOT_GENERATING]
SLOW = (
    *(
        "Llama, tied, with biases",
        "Llama, heads of 80",
        "SmolLM",
        "Granite",
        "Qwen2-MoE",
        "Mixtral",
        "OLMoE",
        "Gemma",
        "OLMo 2",
    ),
    *("Mistral", "Starcoder2", "Hunyuan (dense)", "Qwen2"),
    *("SmolLM3", "Seed-OSS", "Ministral", "Arcee", "GLM-4", "EXAONE 4", "ERNIE 4.5"),
    *("linear", "llama3", "yarn", "dynamic", "longrope, short"),
)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family in SLOW)) for family in GENERATING]
)
def test_responses_are_those_of_the_weights(family: str, tmp_path: Path, vllm_ranks: RunRanks) -> None:
    first, second = (save_tiny(tmp_path / str(seed), seed=seed, config=made(family)) for seed in (1, 2))
    ((greedy, sampled),) = vllm_ranks(1, generate, first, second)
    require_responses_of(second, greedy, sampled)


@pytest.mark.parametrize("prefix", ["model", "transformer"])
def test_a_models_own_code_writes_the_responses(
    prefix: str, tmp_path: Path, vllm_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code names no `AutoModel`, which vLLM asks for, and may give its base model a name of its own."""
    folders = [Path(save_tiny(tmp_path / str(seed), seed=seed, config=made("Llama"))) for seed in (1, 2)]
    for folder in folders:
        add_code(folder, prefix)
    ((greedy, sampled),) = vllm_ranks(1, generate, *map(str, folders), True)
    keep_modules(monkeypatch, tmp_path / "modules")
    require_responses_of(str(folders[1]), greedy, sampled)


def require_responses_of(folder: str, greedy: list[Any], sampled: list[Any]) -> None:
    """Hold the responses to what transformers makes of the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True
    ).eval()
    fix_rope(model, MAX_TOKENS)
    for responses in (greedy, sampled):
        for prompt, response in zip([*PROMPTS, LONG], responses, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.tensor(response.tokens)[:, None]
            expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            torch.testing.assert_close(torch.tensor(response.log_probs), expected, rtol=0, atol=1e-4)
            if responses is greedy:  # up to two that are as good
                assert float((logits.amax(-1) - logits.gather(1, chosen)[:, 0]).max()) < 1e-4


def made(family: str) -> Any:
    return copy.deepcopy((FAMILIES | ROPES)[family])


def run_beside_an_engine(folder: str) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether transformers' class stays as it was; logits of a model made before the engine, and of one made after."""
    config, tokens = AutoConfig.from_pretrained(folder), torch.tensor(PROMPTS)
    first = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    kind = type(first.base_model)
    before = (kind.__init__, kind.__call__, kind.__bases__)
    engine = build(folder, [[0]])
    with torch.no_grad():
        logits = first(tokens).logits
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        other.load_state_dict(first.state_dict())
        again = other(tokens).logits
    engine.close()
    return before == (kind.__init__, kind.__call__, kind.__bases__), logits, again


def test_an_engine_leaves_transformers_classes_alone(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    """vLLM compiles the class of a model that it takes from transformers; models of it could no longer be made."""
    folder = save_tiny(tmp_path, seed=1, config=made("OLMo 3"))
    ((is_same, logits, again),) = vllm_ranks(1, run_beside_an_engine, folder)
    assert is_same
    torch.testing.assert_close(logits, again)
