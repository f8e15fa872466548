"""Episodes on a real vLLM: each answer, with its log-probabilities, is the model's after all that came before."""

from __future__ import annotations

import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.workers.episodes import Episode, EpisodeLimits, Play
from tests.trainer.generation.conftest import RunRanks, vllm_ranks
from tests.trainer.generation.engines import END, build, cut
from tests.trainer.generation.models import model_of, prompts, save_config

__all__ = ["vllm_ranks"]

HERE = "tests.trainer.environments.user_environments"
LIMITS = EpisodeLimits(prompt_tokens=200, tokens=40, turns=3)
EPISODES = 6
VOCAB_SIZE = 512
"""Of the tokenizer, which encodes what the environment says."""


def play(folder: str, groups: list[list[int]]) -> list[dict[str, Any]]:
    """The episodes that this rank of an engine has; the model often ends, so that there are several turns."""
    model = model_of(folder, 1)
    with torch.no_grad():
        model.lm_head.weight[END] *= 4
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    engine = build(folder, groups)
    engine.load_weights(cut(weights, holds := engine.held_shards()), holds)
    engine.wake_cache()
    path, judging = "job: spec.rollout.environment", [f"{HERE}:Judging"]
    environments = Environments(judging, arguments={}, seconds=60, path=path) if engine.is_first else None
    encoder = TurnEncoder(AutoTokenizer.from_pretrained(folder), chat_template="Auto")
    episodes = [
        Episode(prompt, partial(operator.add, 100 * row), {"prompt": ""})
        for row, prompt in enumerate(prompts(0)[:EPISODES])
    ]
    Play(engine, environments, encoder, limits=LIMITS).play(episodes)
    if environments:
        environments.close()
    found = [{name: value for name, value in vars(each).items() if name != "seed"} for each in episodes]
    for each in found:
        tokens = torch.tensor([[*each["prompt"], *each["tokens"]]])
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(1)
        start, length = len(each["prompt"]), len(each["tokens"])
        each["of the model"] = log_probs[range(start - 1, start + length - 1), tokens[0, start:]].tolist()
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2], ids=["1-1-1", "1-2-1"])
def test_an_answer_goes_on_after_all_that_came_before(ranks: int, tmp_path: Path, vllm_ranks: RunRanks) -> None:
    """On two ranks the first one has the environments and tells the other, so that both ask for the same tokens."""
    folder = save_config(tmp_path / "model", "llama")
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = VOCAB_SIZE
    config.save_pretrained(folder)
    one, *others = vllm_ranks(ranks, play, folder, [list(range(ranks))])
    assert all(other == one for other in others)
    assert any(each["turns"] == 2 for each in one)
    for each in one:
        assert not each["failure"]
        assert len(each["tokens"]) <= LIMITS.tokens
        for log_prob, expected, written in zip(each["log_probs"], each["of the model"], each["written"], strict=True):
            assert log_prob == pytest.approx(expected if written else 0.0, abs=1e-4)
        if each["turns"] == 2:
            assert each["finished"] == (each["tokens"][-1] == END)
