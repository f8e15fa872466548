"""vLLM stops at each of the end tokens, and nowhere else before the limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.sharding import shard
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import END, NEW_TOKENS, build
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

PROMPT = [5, 6, 7, 8]


def greedy(folder: str, engine: GenerationEngine) -> Response:
    """The likeliest response to the prompt under the folder's weights."""
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    sharded = shard(model, compute_dtype=torch.float32, recompute_activations=False)
    holds = engine.held_shards()
    engine.load_weights(((name, holds[name], weight) for name, weight in full_weights(sharded).items()), holds)
    engine.wake_cache()
    return engine.generate([PROMPT], [0], max_tokens=NEW_TOKENS, greedy=True)[0]


def generate_twice(folder: str) -> tuple[Response, Response, int]:
    """Generate with one end token, then with a second one. Return both responses and the second end token."""
    engine = build(folder, [[0]])
    whole = greedy(folder, engine)
    engine.close()
    token = whole.tokens[len(whole.tokens) // 2]
    return whole, greedy(folder, build(folder, [[0]], ends=(END, token))), token


@pytest.mark.slow
def test_a_second_end_token_ends_a_response(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    ((whole, ended, token),) = vllm_ranks(1, generate_twice, save_tiny(tmp_path / "model", seed=1))
    length = list(whole.tokens).index(token) + 1
    assert list(ended.tokens) == list(whole.tokens)[:length]
    assert ended.finished
