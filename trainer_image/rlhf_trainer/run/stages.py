"""Which step, loader and worker classes make up each algorithm: the table that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec import Model
from rlhf_trainer.algorithms import ppo, reward_model, sft
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.data import CompletionData, DataWorker, PairData, PromptData
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import RewardTrainer, RewardWorker
from rlhf_trainer.workers.scoring import ScoringWorker
from rlhf_trainer.workers.supervised import SupervisedActorWorker


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What an algorithm is made of."""

    step: Callable[..., None]
    data: type[DataWorker]
    workers: dict[str, type]
    """Worker class of each model."""
    saved: Role
    """The model that the job is for."""
    generates: bool = False
    """Whether the actor writes responses, which are then judged."""


STAGES: dict[str, Stage] = {
    "SFT": Stage(step=sft.step, data=CompletionData, workers={"actor": SupervisedActorWorker}, saved="actor"),
    "RewardModel": Stage(step=reward_model.step, data=PairData, workers={"reward": RewardTrainer}, saved="reward"),
    "PPO": Stage(
        step=ppo.step,
        data=PromptData,
        workers={
            "actor": ActorWorker,
            "critic": CriticWorker,
            "reference": ReferenceWorker,
            "reward": RewardWorker,
        },
        saved="actor",
        generates=True,
    ),
}


def stage_of(job: Job) -> Stage:
    """The stage of a job."""
    return STAGES[job.spec.algorithm.name]


def worker_of(job: Job, role: Role) -> type:
    """The worker class of a role; a reward that is more than a model has one for every form."""
    if role == "reward" and not isinstance(job.spec.models.reward, Model):
        return ScoringWorker
    return stage_of(job).workers[role]


def setting_of(job: Job, role: Role, folders: Mapping[Role, str], *, total_steps: int = 0) -> WorkerSetting:
    """What the worker of a role is made from; `total_steps` matters to those that train."""
    return WorkerSetting(job=job, role=role, model=job.models()[role], folder=folders[role], total_steps=total_steps)
