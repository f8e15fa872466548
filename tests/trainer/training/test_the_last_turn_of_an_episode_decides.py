"""A small policy learns what only the last turn of an episode rewards, however the rewards are shaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.advantage import AdvantageWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks

PROMPTS, GROUP, STEPS, RATE = 4, 8, 40, 0.5
TURNS = torch.tensor([1, 3, 5])
"""Positions of the turns, of a token each; the prompt and what is observed lie between them."""
SHAPING = {"normalization": "Running", "clip": 2.0}


def episodes(folder: Path, algorithm: dict[str, Any]) -> Any:
    roles = [*ALGORITHMS[algorithm["name"]].trained, *ALGORITHMS[algorithm["name"]].frozen]
    spec = {
        "algorithm": {**algorithm, "kl": {"coefficient": 0.0}},
        "models": {role: {"uri": "hf://x"} for role in roles},
        "data": {"train": {"uri": "hf://x"}, "maxResponseTokens": 5},
        "rollout": {"samplesPerPrompt": GROUP, "environment": {"entrypoint": "x:Y"}, "maxTurns": 3},
        "training": {"totalSteps": STEPS, "promptBatchSize": PROMPTS},
    }
    return job(folder, "episodes", spec)


def learn(folder: str, algorithm: dict[str, Any]) -> list[float]:
    """The probability in each turn of the second of two tokens, of which only the last turn's is rewarded."""
    worker = AdvantageWorker(episodes(Path(folder), algorithm))
    logits, rows = torch.zeros(3, 2, requires_grad=True), PROMPTS * GROUP
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(rows, 6)
    mask[:, TURNS] = 1.0
    for step in range(1, STEPS + 1):
        chosen = torch.multinomial(logits.detach().softmax(1), rows, replacement=True, generator=generator).T
        rewards = torch.zeros(rows, 6)
        rewards[:, TURNS] = torch.tensor([20.0, 40.0, 60.0])
        rewards[:, 5] += 20.0 * chosen[:, 2]
        fields = {
            "scores": rewards.sum(1),
            "turn_rewards": rewards,
            "response_mask": mask,
            "values": torch.zeros(rows, 6),
        }
        fields |= {"finished": torch.ones(rows), "valid": torch.ones(rows)}
        found = worker.compute_advantage(Batch(step=step, start=0, size=rows, fields=fields))["advantages"]
        log_probs = logits.log_softmax(1).expand(rows, 3, 2).gather(2, chosen[:, :, None])[:, :, 0]
        (gradient,) = torch.autograd.grad((found[:, TURNS] * log_probs).mean(), logits)
        logits.data += RATE * 3 * gradient
    return logits.softmax(1)[:, 1].tolist()


@pytest.mark.parametrize(("name", "shaping"), [("GRPO", {}), ("GRPO", SHAPING), ("RLOO", SHAPING), ("PPO", {})])
def test_a_policy_learns_what_the_last_turn_rewards(name: str, shaping: dict[str, Any], tmp_path: Path) -> None:
    (found,) = run_kept_ranks(1, learn, str(tmp_path), {"name": name, "rewards": shaping})
    assert found[2] > 0.9
    assert max(found[:2]) < 0.9


@pytest.mark.parametrize("name", ["PPO", "REINFORCEPP"])
@pytest.mark.parametrize("field", SHAPING)
def test_rewards_of_single_turns_are_not_shaped(name: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="learns from the rewards of single turns"):
        episodes(tmp_path, {"name": name, "rewards": {field: SHAPING[field]}})
