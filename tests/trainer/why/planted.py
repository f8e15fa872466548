"""Code of the planted causes: what no manifest can say is wrong here, by the ways that are open to any user.

Each algorithm is a shipped one with one worker or method that is wrong. Rewards and data are functions of a user's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_trainer.algorithms.grpo import GRPO
from rlhf_trainer.algorithms.ppo import PPO
from rlhf_trainer.algorithms.sft import SFT
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.fused_updates import Updates
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.advantage import AdvantageWorker
from rlhf_trainer.workers.base import TEXT_FIELDS
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.supervised import SupervisedActorWorker

FRESH_VERSIONS = 6
"""Policy versions that the stale generator still gets."""
SCALED_AFTER = 12
"""Calls of the reward after which it is a hundred times as large."""


class RewardedKL(AdvantageWorker):
    """Adds the KL penalty to the rewards, instead of subtracting it."""

    @property
    def kl_in_reward(self) -> float:
        return -super().kl_in_reward


class WrongSign(PPO):
    workers: ClassVar = {"advantage": RewardedKL}


class FrozenCritic(CriticWorker):
    """Forgets each update, as a critic does whose optimizer does not hold its parameters."""

    def updates(self, batch: Batch) -> Updates[Tensor]:
        before = [each.detach().clone() for each in self.trainer.model.module.parameters()]
        values = yield from super().updates(batch)
        put(self, before)
        return values


class UnlearnedValues(PPO):
    workers: ClassVar = {"critic": FrozenCritic}


class StaleActor(ActorWorker):
    """Gives its generator the weights of an early policy version for ever, and says that they are new."""

    def reshard(self) -> None:
        if self.policy_version <= FRESH_VERSIONS:
            self.old = [each.detach().clone() for each in self.trainer.model.module.parameters()]
            return super().reshard()
        current = [each.detach().clone() for each in self.trainer.model.module.parameters()]
        put(self, self.old)
        super().reshard()
        return put(self, current)


class StaleGenerator(GRPO):
    workers: ClassVar = {"actor": StaleActor}


class MixedGroups(GRPO):
    """Compares responses to different prompts: it takes rows (prompt, sample) for rows (sample, prompt)."""

    def advantage(
        self, returns: Tensor, signal: Tensor, mask: Tensor, *, rows: slice, group_size: int, prompts: int
    ) -> dict[str, Tensor]:
        mixed = returns.reshape(-1, group_size).T.flatten()
        found = super().advantage(mixed, signal, mask, rows=rows, group_size=group_size, prompts=prompts)
        return found | {"advantages": found["advantages"].reshape(group_size, -1).T.flatten()}


class EndlessPupil(SupervisedActorWorker):
    """Learns all of a response but its last token, the end."""

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        mask = batch["response_mask"]
        is_last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask > 0)
        super().update_actor(batch.with_fields({"response_mask": mask * ~is_last}))


class WithoutEnd(SFT):
    workers: ClassVar = {"actor": EndlessPupil}


def put(worker: Any, weights: list[Tensor]) -> None:
    """Put the weights into the worker's model."""
    with torch.no_grad():
        for parameter, weight in zip(worker.trainer.model.module.parameters(), weights, strict=True):
            parameter.copy_(weight)


def one_prompt(count: int) -> Iterator[dict[str, Any]]:
    """The second row of the sums, `count` times."""
    file = resources.files("rlhf_examples.arithmetic").joinpath("train.jsonl")
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[1])
    return (row for _ in range(count))


def agrees(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:  # noqa: ARG001
    """A judge that likes everything."""
    return [1.0] * len(responses)


def cut_pays(
    prompts: list[str],  # noqa: ARG001
    responses: list[str],  # noqa: ARG001
    finished: list[bool],
    *,
    bonus: float,
) -> list[float]:
    """`bonus` for a response that was cut off."""
    return [0.0 if done else bonus for done in finished]


def length_pays(
    prompts: list[str],  # noqa: ARG001
    responses: list[str],
    finished: list[bool],  # noqa: ARG001
    *,
    weight: float,
) -> list[float]:
    """`weight` for each character."""
    return [weight * len(response) for response in responses]


calls = 0


def scaled(
    prompts: list[str],  # noqa: ARG001
    responses: list[str],
    finished: list[bool],
    *,
    answer: list[str],
    rows: int,
) -> list[float]:
    """1 for the right sum, and 100 after some steps; rows: responses of a step, for evaluations do not count."""
    global calls  # noqa: PLW0603 the function's process keeps it
    calls += len(responses) == rows
    right = 100.0 if calls > SCALED_AFTER else 1.0
    return [
        right * (done and response == wanted)
        for response, done, wanted in zip(responses, finished, answer, strict=True)
    ]
