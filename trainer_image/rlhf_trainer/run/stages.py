"""Which step, loader and worker classes make up each algorithm: the table that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_api.spec import Model
from rlhf_trainer.algorithms import (
    cost_model,
    dpo,
    grpo,
    online_dpo,
    ppo,
    reinforce_pp,
    remax,
    reward_model,
    rloo,
    safe_rlhf,
    sft,
)
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.advantage import (
    BatchAdvantage,
    GeneralizedAdvantage,
    GreedyBaselineAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
)
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.constrained import ConstrainedAdvantage
from rlhf_trainer.workers.critic import CostCriticWorker, CriticWorker
from rlhf_trainer.workers.data import (
    CompletionData,
    DataWorker,
    PairData,
    PromptAndPretrainData,
    PromptData,
    SafetyPairData,
)
from rlhf_trainer.workers.preference import OnlinePreferenceActorWorker, PairChooser, PreferenceActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import CostTrainer, CostWorker, RewardTrainer, RewardWorker
from rlhf_trainer.workers.rollout import GeneratingActor
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
    numbers: dict[str, type] = field(default_factory=dict)
    """Workers beside the actor that hold no model, each made from the job."""

    @property
    def generates(self) -> bool:
        """Whether the actor writes responses, which are then judged."""
        return issubclass(self.workers[self.saved], GeneratingActor)


FROZEN: dict[str, type] = {"reference": ReferenceWorker, "reward": RewardWorker}


def policy_gradient(step: Callable[..., None], advantage: type, **models: type) -> Stage:
    """An algorithm whose actor learns from advantages; `models`: those besides actor, reference and reward."""
    workers = {"actor": ActorWorker, **FROZEN, **models}
    return Stage(step=step, data=PromptData, workers=workers, saved="actor", numbers={"advantage": advantage})


STAGES: dict[str, Stage] = {
    "SFT": Stage(step=sft.step, data=CompletionData, workers={"actor": SupervisedActorWorker}, saved="actor"),
    "RewardModel": Stage(step=reward_model.step, data=PairData, workers={"reward": RewardTrainer}, saved="reward"),
    "CostModel": Stage(step=cost_model.step, data=SafetyPairData, workers={"cost": CostTrainer}, saved="cost"),
    "DPO": Stage(
        step=dpo.step,
        data=PairData,
        workers={"actor": PreferenceActorWorker, "reference": ReferenceWorker},
        saved="actor",
    ),
    "OnlineDPO": Stage(
        step=online_dpo.step,
        data=PromptData,
        workers={"actor": OnlinePreferenceActorWorker, **FROZEN},
        saved="actor",
        numbers={"pairs": PairChooser},
    ),
    "PPO": policy_gradient(ppo.step, GeneralizedAdvantage, critic=CriticWorker),
    "ReMax": policy_gradient(remax.step, GreedyBaselineAdvantage),
    "SafeRLHF": policy_gradient(
        safe_rlhf.step, ConstrainedAdvantage, critic=CriticWorker, cost=CostWorker, cost_critic=CostCriticWorker
    ),
    "GRPO": policy_gradient(grpo.step, GroupAdvantage),
    "RLOO": policy_gradient(rloo.step, LeaveOneOutAdvantage),
    "REINFORCEPP": policy_gradient(reinforce_pp.step, BatchAdvantage),
}


def stage_of(job: Job) -> Stage:
    """The stage of a job."""
    stage = STAGES[job.spec.algorithm.name]
    return replace(stage, data=PromptAndPretrainData) if job.spec.data.pretrain else stage


def worker_of(job: Job, role: Role) -> type:
    """The worker class of a role; a reward that is more than a model has one for every form."""
    if role == "reward" and not isinstance(job.spec.models.reward, Model):
        return ScoringWorker
    return stage_of(job).workers[role]


def setting_of(
    job: Job, role: Role, folders: Mapping[Role, str], *, total_steps: int = 0, layout: ParallelSizes | None = None
) -> WorkerSetting:
    """What the worker of a role is made from; `total_steps` matters to those that train."""
    return WorkerSetting(
        job=job,
        role=role,
        model=job.models()[role],
        folder=folders[role],
        total_steps=total_steps,
        layout=layout,
    )
