"""Episodes on a real vLLM: each answer, with its log-probabilities, is the model's after all that came before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.expert_rows import ExpertRows
from tests.trainer.environments.scripted import play_episodes
from tests.trainer.generation.conftest import RunRanks, vllm_ranks
from tests.trainer.generation.engines import END, build, cut
from tests.trainer.generation.models import model_of, prompts, save_config

__all__ = ["vllm_ranks"]

HERE = "tests.trainer.environments.user_environments"
LIMITS = (200, 40, 3)
"""Most tokens of a prompt and of an episode, and most turns."""
EPISODES = 6
VOCAB_SIZE = 512
"""Of the tokenizer, which encodes what the environment says."""


def play(folder: str, groups: list[list[int]]) -> list[dict[str, Any]]:
    """The episodes that this rank of an engine has; the model often ends, so that there are several turns."""
    model = model_of(folder, 1)
    with torch.no_grad():
        model.lm_head.weight[END] *= 4
    fused = {name: weight.detach() for name, weight in model.named_parameters()}
    weights = {name: weight.unflatten(1, (2, -1)) if "gate_up" in name else weight for name, weight in fused.items()}
    chosen: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for router in routers:
        router.register_forward_hook(lambda *given: chosen.append(given[2][2].sort(1).values))
    engine = build(folder, groups, routing="Replay" if routers else None)
    engine.load_weights(cut(weights, holds := engine.held_shards()), holds)
    engine.wake_cache()
    path, judging = "job: spec.rollout.environment", [f"{HERE}:Judging"]
    environments = Environments(judging, arguments={}, seconds=60, path=path)
    tokenizer, given = AutoTokenizer.from_pretrained(folder), prompts(0)[:EPISODES]
    episodes = play_episodes(tokenizer, engine, environments, given, limits=LIMITS, folder=Path(folder))
    environments.close()
    found = [vars(each.response) | vars(each) for each in episodes]
    for each in found:
        del each["response"]
        tokens = torch.tensor([[*each["prompt"], *each["tokens"]]])
        chosen.clear()
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(1)
        if (experts := each.pop("experts")) is not None:
            rows = ExpertRows.of(model.config)
            each["experts"] = [rows.decode(experts, number).sort(1).values.tolist() for number in range(rows.layers)]
        each["of its routers"] = [every.tolist() for every in chosen]
        start, length = len(each["prompt"]), len(each["tokens"])
        each["of the model"] = log_probs[range(start - 1, start + length - 1), tokens[0, start:]].tolist()
    engine.close()
    return found


def played(kind: str, ranks: int, folder: Path, vllm_ranks: RunRanks) -> list[dict[str, Any]]:
    """The episodes of an engine on `ranks` ranks, which all must have."""
    save_config(folder, kind)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = VOCAB_SIZE
    config.save_pretrained(folder)
    found: list[list[dict[str, Any]]] = vllm_ranks(ranks, play, str(folder), [list(range(ranks))])
    one, *others = found
    assert all(other == one for other in others)
    assert any(each["facts"]["calls"] == 2 for each in one)
    return one


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_of_an_episode_comes_with_its_experts(ranks: int, tmp_path: Path, vllm_ranks: RunRanks) -> None:
    """The first of two ranks sends the episodes, with their experts, to the other."""
    for each in played("qwen3 moe", ranks, tmp_path / "model", vllm_ranks):
        read = len(each["prompt"]) + len(each["tokens"]) - 1
        assert each["experts"] == [chosen[:read] for chosen in each["of its routers"]]


@pytest.mark.parametrize("ranks", [pytest.param(1, id="1-1-1", marks=pytest.mark.slow), pytest.param(2, id="1-2-1")])
def test_an_answer_goes_on_after_all_that_came_before(ranks: int, tmp_path: Path, vllm_ranks: RunRanks) -> None:
    """The first of two ranks has the environments, and tells the other which calls begin."""
    one = played("llama", ranks, tmp_path / "model", vllm_ranks)
    for each in one:
        assert not each["failure"]
        assert len(each["tokens"]) <= LIMITS[1]
        for log_prob, expected, written in zip(each["log_probs"], each["of the model"], each["written"], strict=True):
            assert log_prob == pytest.approx(expected if written else 0.0, abs=1e-4)
        if each["facts"]["calls"] == 2:
            assert each["finished"] == (each["tokens"][-1] == END)
