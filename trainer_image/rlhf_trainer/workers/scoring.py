"""A reward that is not a model alone: a function, a service, or a weighted sum of these and at most one model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.functions import Function, RewardService
from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_api.spec import Model, RewardSum, RewardTerm
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.rewards.service import ServiceClient
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.reward import RewardWorker
from rlhf_trainer.workers.samples import SAMPLE_FIELDS, real_rows, samples_of

SCORED_ONCE = replace(
    THREE_D_PROTO,
    holders=lambda layout: frozenset(rank for ranks in THREE_D_PROTO.collect(layout) for rank in ranks),
)
"""Of the ranks with the same rows only the one whose output is collected calls the user's code: the others fetch it."""


class UserCode(Protocol):
    """Code of the user's that scores responses."""

    def ready(self) -> None: ...
    def scores(self, samples: list[Sample]) -> list[float]: ...


class ScoringWorker:
    """One rank of such a reward; a function's process, and so its imported module, lives as long as the worker."""

    def __init__(self, setting: WorkerSetting) -> None:
        """`setting`: of the reward's model if there is one, else of any whose tokenizer the actor shares."""
        self._tokenizer = setting.tokenizer()
        reward, path = setting.job.spec.models.reward, f"{setting.job.name}: spec.models.reward"
        assert reward is not None
        if isinstance(reward, RewardSum):
            self._terms = {f"{path}.sum.{index}.reward": term for index, term in enumerate(reward.sum)}
        else:
            self._terms = {path: RewardTerm(name="all", reward=reward)}
        deadline = setting.job.spec.training.call_deadline_seconds
        self._code = {  # at once, so that functions import their modules while the model is loaded
            field: code_of(term.reward, deadline=deadline, path=field)
            for field, term in self._terms.items()
            if not isinstance(term.reward, Model)
        }
        self._model = RewardWorker(setting) if len(self._code) < len(self._terms) else None
        layout = setting.layout or ParallelSizes(data=dist.get_world_size())
        self._scores_here = dist.get_rank() in SCORED_ONCE.holders(layout)
        for code in self._code.values():
            code.ready()

    @register(SCORED_ONCE, reads=(*SAMPLE_FIELDS, "sampled"), adds=("scores",), phase="scoring")
    def compute_reward(self, batch: Batch) -> Fields:
        """scores float32 [B]: the weighted sum of the parts; 0 on padding."""
        samples, valid = samples_of(batch, self._tokenizer), batch["valid"]
        total = torch.zeros(batch.size)
        for path, term in self._terms.items():
            scores = self._part(path, batch, samples) * valid
            total = total + term.weight * scores
            if len(self._terms) > 1:
                counts = batch["sampled"] * valid  # greedy responses are left out of the measurement
                recorder.mean(f"reward_part/{term.name}", (scores * counts).sum(), counts.sum())
        return {"scores": total}

    def _part(self, path: str, batch: Batch, samples: list[Sample]) -> Tensor:
        """Scores [B] of one part."""
        if path not in self._code:
            assert self._model is not None
            return self._model.compute_reward(batch)["scores"].cpu()
        scores = torch.zeros(batch.size)
        if self._scores_here:
            scores[real_rows(batch)] = torch.tensor(self._code[path].scores(samples))
        return scores


def code_of(reward: Function | RewardService, *, deadline: float, path: str) -> UserCode:
    """The code that a field of the manifest (`path`) names; a function's process is started at once."""
    if isinstance(reward, RewardService):
        return ServiceClient(
            url=reward.url,
            seconds=reward.timeout_seconds,
            attempts=reward.attempts,
            concurrency=max(1, reward.concurrency // dist.get_world_size()),
            token_variable=reward.token_variable,
            path=path,
        )
    return UserFunction(
        reward.entrypoint, arguments=reward.arguments, seconds=reward.timeout_seconds, deadline=deadline, path=path
    )
