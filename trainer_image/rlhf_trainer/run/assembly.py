"""Which worker class runs each parameter of a step, by the parameter's protocol: here concrete classes are named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args, get_origin, get_type_hints

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import choice
from rlhf_api.spec.algorithms import Algorithm, PolicyGradient
from rlhf_api.spec.job_spec import Model
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.algorithms import models
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.workers.actor import ActorWorker, GeneratorActorWorker, SingleUpdateActorWorker
from rlhf_trainer.workers.advantage import advantage_worker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import (
    CostCriticWorker,
    CriticWorker,
    SingleUpdateCostCriticWorker,
    SingleUpdateCriticWorker,
)
from rlhf_trainer.workers.data import (
    CompletionData,
    DataWorker,
    PairData,
    PromptAndPretrainData,
    PromptData,
    PromptsAsWritten,
    SafetyPairData,
)
from rlhf_trainer.workers.endpoints import EndpointsWorker
from rlhf_trainer.workers.episodes import playing
from rlhf_trainer.workers.partial import PartialRolloutWorker
from rlhf_trainer.workers.preference import OnlinePreferenceActorWorker, PairChooser, PreferenceActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.responses import ResponseWriter
from rlhf_trainer.workers.reward import (
    CostTrainer,
    CostWorker,
    RetokenizingCostWorker,
    RetokenizingRewardWorker,
    RewardTrainer,
    RewardWorker,
)
from rlhf_trainer.workers.rollout import GeneratorWorker, RolloutWorker
from rlhf_trainer.workers.scoring import NotingScoringWorker, ScoringWorker
from rlhf_trainer.workers.supervised import SupervisedActorWorker

DATA: Mapping[str, type[DataWorker]] = {
    "prompts": PromptData,
    "completions": CompletionData,
    "pairs": PairData,
    "safety_pairs": SafetyPairData,
}
WORKERS: Mapping[Any, type] = {
    models.Actor: ActorWorker,
    models.SupervisedActor: SupervisedActorWorker,
    models.PreferenceActor: PreferenceActorWorker,
    models.Generator: GeneratorWorker,
    models.OnlinePreferenceActor: OnlinePreferenceActorWorker,
    models.Critic: CriticWorker,
    models.CostCritic: CostCriticWorker,
    models.Reference: ReferenceWorker,
    models.PairReference: ReferenceWorker,
    models.Reward: RewardWorker,
    models.RewardInTraining: RewardTrainer,
    models.Cost: CostWorker,
    models.CostInTraining: CostTrainer,
    models.Pairs: PairChooser,
    models.Responses: ResponseWriter,
}

RETOKENIZING: Mapping[type, type] = {RewardWorker: RetokenizingRewardWorker, CostWorker: RetokenizingCostWorker}
"""The workers of models whose tokenizer is not the actor's; the other rewards read what they need anyway."""
SINGLE_UPDATE: Mapping[type, type] = {
    CriticWorker: SingleUpdateCriticWorker,
    CostCriticWorker: SingleUpdateCostCriticWorker,
}
"""The workers of critics whose only update of a step finds the values."""


def workers_of(algorithm: type[Algorithm]) -> dict[str, type]:
    """The worker class of each parameter of the algorithm's step but the data."""
    found: dict[str, type] = {}
    hints = get_type_hints(algorithm.step)
    for name in algorithm.models:
        hint = hints.get(name)
        hint = next(filter(get_origin, get_args(hint)), hint)  # of Critic[B] | None
        protocol = get_origin(hint) or hint
        if name in algorithm.workers:
            found[name] = algorithm.workers[name]
        elif protocol in (models.Advantage, models.CriticsAdvantage) and issubclass(algorithm, PolicyGradient):
            found[name] = advantage_worker(algorithm)
        elif protocol in WORKERS:
            found[name] = WORKERS[protocol]
        else:
            known = choice(each.__name__ for each in (*WORKERS, models.Advantage, models.CriticsAdvantage))
            raise TypeError(f"the step's {name} has no worker and no protocol, such as Actor[B]; there are {known}")
    return found


def data_of(job: Job) -> type[DataWorker]:
    """What loads the batches of a job."""
    if job.spec.algorithm.makes == "data":
        return PromptsAsWritten
    return PromptAndPretrainData if job.spec.data.pretrain else DATA[job.spec.algorithm.data]


def worker_of(job: Job, role: Role, pool: Collection[str] = ()) -> type:
    """The worker class of a role; a reward that is more than a model has one for every form.

    Actors differ in where the old log-probabilities come from, critics in where the values do; pool: the models that
    live where this one does.
    """
    if role == "reward" and (job.spec.rollout.has_turns or not isinstance(job.spec.models.reward, Model)):
        return NotingScoringWorker if job.spec.rollout.keep or job.spec.algorithm.makes == "data" else ScoringWorker
    if role == "rollout" and job.generates_elsewhere:
        return EndpointsWorker
    if role == "rollout":
        worker: type = PartialRolloutWorker if job.spec.rollout.partial else RolloutWorker
    else:
        worker = _single_turn_worker_of(job, role, pool)
    generates = role == ("rollout" if job.generates_apart else "actor")
    return playing(worker) if generates and job.spec.rollout.has_turns else worker


def _single_turn_worker_of(job: Job, role: Role, pool: Collection[str]) -> type:
    worker = workers_of(type(job.spec.algorithm))[role]
    if worker in SINGLE_UPDATE and job.values_by_update and "actor" in pool:
        return SINGLE_UPDATE[worker]
    if worker is not ActorWorker or job.recomputes_log_probs:
        return worker
    return SingleUpdateActorWorker if job.old_log_probs_by_update else GeneratorActorWorker


def training_batch(job: Job, data: Any, blank: Any) -> Any:
    """The batch of a step as the data gives it, with the further columns that the job reads."""
    batch = data.load_batch(blank)
    return data.load_columns(batch) if job.spec.columns(job.spec.data.train) else batch


MAY_BE_LEFT_OUT = ("reference", "reward")


class LeftOut:
    """Stands in a step for a model that the job does without: its calls add nothing."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda batch, **_: batch


class ActorAsReference:
    """Stands in a step for a reference that is the actor without its adapter."""

    def __init__(self, actor: Any) -> None:
        self.compute_log_prob = actor.compute_ref_log_prob
        self.compute_pair_log_prob = actor.compute_ref_pair_log_prob


class RolloutPool:
    """The processes of the generators that are in a pool of their own. Here the loss of one ends the attempt."""

    def calls(self) -> AbstractContextManager[None]:
        """The calls of the block are made on these processes, or wait for them."""
        return nullcontext()

    def settle(self, step: int | None = None) -> None:
        """Wait for such calls, all or up to the last of a step; CommunicationError if a rank is lost."""

    def gather(self) -> None:
        """Have all that is to get the actor's weights in one group with the actor's ranks."""

    def replace(self, error: CommunicationError) -> None:
        """Have new processes instead, in which nothing has been called; raises the error if there can be none."""
        raise error


class ActorApart:
    """Stands in a step for an actor whose responses are generated in another pool.

    What generators do has no effect on the actor, so what they were to do when one is lost is asked for again.
    """

    def __init__(self, actor: Any, rollout: Any, pool: RolloutPool, *, interrupts: bool = False) -> None:
        """interrupts: whether generators get new weights in the middle of a batch, too."""
        self._actor, self._rollout, self._pool, self._interrupts = actor, rollout, pool, interrupts
        self._asked: dict[int, tuple[Any, Mapping[str, Any]]] = {}
        """Step -> the prompts whose responses nobody has taken yet, and the options of their generation."""
        self._responses: dict[int, Any] = {}
        """Those of the same steps that are under way, or there."""
        self._there: set[int] = set()
        """The steps of those that are there, whatever becomes of the generators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def generate_ahead(self, batch: Any, **options: Any) -> None:
        """Ask for the responses of a step before it begins, by the weights that there are now."""
        self._asked[batch.step] = batch, options
        self._insist()

    def generate_sequences(self, batch: Any, **options: Any) -> Any:
        """The responses that were asked for, or else those of the newest weights."""
        if batch.step not in self._asked:
            self.generate_ahead(batch, **options)
        self._insist(batch.step)
        del self._asked[batch.step]
        return self._responses.pop(batch.step)

    def _insist(self, step: int | None = None) -> None:
        """Ask for all, and wait for the responses of a step, if it is named; again if a generator is lost meanwhile."""
        while True:
            try:
                self._ask()
                if step is not None:
                    self._pool.settle(step)
                return
            except CommunicationError as error:
                self._responses = {step: each for step, each in self._responses.items() if step in self._there}
                self._pool.replace(error)

    def _ask(self) -> None:
        """Have the generators get the newest weights, and then ask them for what they have not been asked for."""
        if not (steps := [step for step in self._asked if step not in self._responses]):
            return
        if not self._interrupts:
            self._pool.settle()
            self._there = set(self._responses)
        self._pool.gather()
        with self._pool.calls():
            self._actor.send_weights()
            self._rollout.receive_weights()
        with self._pool.calls():
            for step in steps:
                batch, options = self._asked[step]
                self._responses[step] = self._rollout.generate_sequences(batch, **options)


class KeepingActor:
    """The actor in a step, whose responses are kept before it learns from them."""

    def __init__(self, actor: Any, rollouts: Any) -> None:
        self._actor, self._rollouts = actor, rollouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update_actor(self, batch: Any) -> Any:
        self._rollouts.keep(batch)
        return self._actor.update_actor(batch)


def stand_ins(job: Job, models: Mapping[str, Any], pool: RolloutPool | None = None) -> dict[str, Any]:
    """The reference of a job whose actor is its own, and the actor of one that generates in another pool."""
    found: dict[str, Any] = {"reference": ActorAsReference(models["actor"])} if job.reference_is_actor else {}
    if job.generates_apart:
        interrupts = job.spec.rollout.partial is not None
        found["actor"] = ActorApart(models["actor"], models["rollout"], pool or RolloutPool(), interrupts=interrupts)
    return found


def inputs_of(job: Job, models: Mapping[str, Any]) -> dict[str, Any]:
    """What the algorithm's step takes besides the data, of the models that there are."""
    names = job.spec.algorithm.models
    inputs: dict[str, Any] = {name: LeftOut() for name in MAY_BE_LEFT_OUT if name in names}
    inputs |= {name: models[name] for name in names if name in models}
    if "rollouts" in models:
        inputs["actor"] = KeepingActor(inputs["actor"], models["rollouts"])
    return inputs


def helpers_of(job: Job) -> dict[str, type]:
    """Workers beside the actor that hold no model, each made from the job."""
    workers = workers_of(type(job.spec.algorithm))
    return {name: each for name, each in workers.items() if name not in get_args(Role)}


def setting_of(
    job: Job, role: Role, folders: Mapping[Role, str], *, total_steps: int = 0, layout: ParallelSizes | None = None
) -> WorkerSetting:
    """What the worker of a role is made from; `total_steps` matters to those that train.

    `rollout` is made from the actor.
    """
    model: Role = "actor" if role == "rollout" else role
    return WorkerSetting(
        job=job,
        role=model,
        model=job.models()[model],
        folder=folders[model],
        total_steps=total_steps,
        layout=layout,
    )
