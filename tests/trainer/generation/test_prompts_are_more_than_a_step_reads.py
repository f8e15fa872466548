"""Prompts of more tokens than vLLM reads in a step on CPU: none is cut, as its random generator cannot be set back."""

from pathlib import Path

import pytest

from rlhf_trainer.generation.vllm_arguments import CPU_STEP_TOKENS
from tests.trainer.generation.conftest import RunRanks, vllm_ranks
from tests.trainer.generation.engines import build, cut
from tests.trainer.generation.models import VOCABULARY, model_of, save_config

pytestmark = pytest.mark.slow

__all__ = ["vllm_ranks"]

ROWS, LENGTH, TOKENS = 40, 150, 4


def write(folder: str) -> list[list[int]]:
    weights = {name: weight.detach() for name, weight in model_of(folder, 1).named_parameters()}
    engine = build(folder, [[0]], max_sequences=ROWS)
    engine.load_weights(cut(weights, holds := engine.held_shards()), holds)
    engine.wake_cache()
    prompts = [[3 + (7 * row + place) % (VOCABULARY - 3) for place in range(LENGTH)] for row in range(ROWS)]
    together = engine.generate(prompts, list(range(ROWS)), max_tokens=TOKENS)
    alone = [engine.generate([prompts[row]], [row], max_tokens=TOKENS)[0] for row in (0, ROWS // 2, ROWS - 1)]
    engine.close()
    assert [together[row].tokens for row in (0, ROWS // 2, ROWS - 1)] == [each.tokens for each in alone]
    return [list(each.tokens) for each in together]


def test_each_gets_its_response(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    assert ROWS * LENGTH > CPU_STEP_TOKENS
    (found,) = vllm_ranks(1, write, save_config(tmp_path / "model", "llama"))
    assert len(found) == ROWS
    assert all(found)
