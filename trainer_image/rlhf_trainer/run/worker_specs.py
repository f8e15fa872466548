"""Worker class and arguments of every role of a job, for all pools. Nothing is started here.

WORKERS gives the worker class by the protocol of a step's parameter; `workers` of the algorithm overrides it. The
arguments hold all other choices of a job, and determine the fields that methods read and add (`WorkerSpec.transfers`).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import choice
from rlhf_api.spec.algorithms import Algorithm, PolicyGradient, RewardShaping
from rlhf_api.spec.job_spec import Model
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.job_plan import gpu_memory_utilization, micro_batch_tokens
from rlhf_trainer.algorithms import models
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import DataError
from rlhf_trainer.expert_rows import REPLAYED
from rlhf_trainer.run_folder.rollouts import ROLLOUTS
from rlhf_trainer.telemetry import ENDPOINTS
from rlhf_trainer.workers import preference
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.advantage import AdvantageWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.data import DataShape, DataWorker
from rlhf_trainer.workers.generating_actor import GeneratorWorker
from rlhf_trainer.workers.merge import LayerWorker, MergeWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.responses import ResponseWriter, RolloutKeeper
from rlhf_trainer.workers.reward import CostTrainer, CostWorker, RewardTrainer, RewardWorker
from rlhf_trainer.workers.rollout import RolloutWorker
from rlhf_trainer.workers.scoring import JudgeWorker, ScoringWorker
from rlhf_trainer.workers.supervised import SupervisedActorWorker
from rlhf_trainer.workers.teacher import TeacherWorker

WORKERS: Mapping[object, type] = {
    models.Actor: ActorWorker,
    models.SupervisedActor: SupervisedActorWorker,
    models.PreferenceActor: preference.PreferenceActorWorker,
    models.LabelledActor: preference.LabelledActorWorker,
    models.Generator: GeneratorWorker,
    models.OnlinePreferenceActor: preference.OnlinePreferenceActorWorker,
    models.Critic: CriticWorker,
    models.CostCritic: CriticWorker,
    models.Reference: ReferenceWorker,
    models.PairReference: ReferenceWorker,
    models.Teacher: TeacherWorker,
    models.Reward: RewardWorker,
    models.RewardInTraining: RewardTrainer,
    models.Cost: CostWorker,
    models.CostInTraining: CostTrainer,
    models.Pairs: preference.PairChooser,
    models.Responses: ResponseWriter,
    models.Merger: MergeWorker,
}
ADVANTAGES = (models.Advantage, models.CriticsAdvantage)


def workers_of(algorithm: type[Algorithm]) -> dict[str, type]:
    """Return the worker class of each model that the algorithm's step takes, by parameter."""
    found: dict[str, type] = {}
    hints = get_type_hints(algorithm.step)
    for name in algorithm.parameters:
        hint = hints.get(name)
        hint = next(filter(get_origin, get_args(hint)), hint)  # Critic[B] of Critic[B] | None
        protocol = get_origin(hint) or hint
        if name in algorithm.workers:
            found[name] = algorithm.workers[name]
        elif protocol in ADVANTAGES and issubclass(algorithm, PolicyGradient):
            found[name] = AdvantageWorker
        elif protocol in WORKERS:
            found[name] = WORKERS[protocol]
        else:
            known = choice(each.__name__ for each in (*WORKERS, *ADVANTAGES) if isinstance(each, type))
            raise TypeError(f"the step's {name} has no worker and no protocol, such as Actor[B]; there are {known}")
    return found


def home_of(job: Job, placed: DeviceMapping) -> str:
    """Return the name of the pool of the job's saved model: workers without a model of their own live there, too."""
    return next(pool.name for pool in placed.pools if job.saved in pool.models)


def setting_of(
    job: Job, role: Role, folders: Mapping[Role, str], *, total_steps: int = 0, layout: ParallelSizes | None = None
) -> WorkerSetting:
    """Return the setting of a role's worker; the role `rollout` gets the actor's model and folder.

    total_steps: training steps of the job, which only workers that train read.
    """
    held: Role = "actor" if role == "rollout" else role
    model, folder = job.models()[held], folders[held]
    return WorkerSetting(job=job, role=held, model=model, folder=folder, total_steps=total_steps, layout=layout)


def with_routing(job: Job, folders: Mapping[Role, str], placed: DeviceMapping, say: Callable[[str], None]) -> Job:
    """Return the job with `rollout.routing` set; if the manifest leaves it open, the actor's config.json decides.

    say: called with a sentence if the routing of a mixture cannot be replayed.
    """
    if not job.may_replay_routing:
        return job
    setting, generator = setting_of(job, "actor", folders), placed.sizes["rollout" if job.generates_apart else "actor"]
    replays, is_cut = setting.must_replay_routing(), generator.generation_pipeline > 1
    if replays and job.spec.rollout.routing is None and (is_cut or setting.config().model_type not in REPLAYED):
        replays = False
        say(f"routing is recomputed: {'stages of a generator' if is_cut else 'models of this type'} return no experts")
    return job.changed(rollout={"routing": "Replay" if replays else "Recompute"})


def data_spec(job: Job, placed: DeviceMapping, folders: Mapping[Role, str]) -> WorkerSpec:
    """Return the spec of the worker `data`, which is built first and counts the rows for the other workers."""
    sizes = (pool.slots_per_machine[0] * count for pool in placed.pools for count in pool.allowed_machine_counts)
    slots = math.lcm(*(pool.size for pool in placed.pools), *sizes)
    if job.spec.algorithm.data == "layers":
        return WorkerSpec(LayerWorker, {"setting": setting_of(job, job.saved, folders)})
    return WorkerSpec(DataWorker, {"setting": setting_of(job, job.saved, folders), "slots": slots})


def agreed(job: Job, shapes: Sequence[DataShape]) -> DataShape:
    """Return the data shape, on which all ranks must agree; DataError if ranks have read different rows or orders."""
    for path in shapes[0].digests:
        if len({shape.digests[path] for shape in shapes}) > 1:
            problem = "has not the same rows, in the same order, for every rank"
            raise DataError(f"{job.name}: {path}: {problem}; a function must not draw without its seed")
    return shapes[0]


def worker_specs(
    job: Job,
    placed: DeviceMapping,
    folders: Mapping[Role, str],
    shape: DataShape,
    *,
    path: Path,
    columns: Collection[str] = (),
    retokenized: Collection[Role] = (),
) -> dict[str, dict[str, WorkerSpec]]:
    """Return the specs of a job's workers as pool -> role -> spec, in the order in which a pool builds its workers.

    folders: the local folders or hub names of the job's models, by role; path: the job's folder; columns: names of
    columns that a written data set gets; retokenized: models whose tokenizer is not the actor's.
    """
    home = home_of(job, placed)
    sequences = max(job.sequences_per_step, shape.evaluation_rows)
    specs: dict[str, dict[str, WorkerSpec]] = {pool.name: {} for pool in placed.pools}
    specs[home]["data"] = data_spec(job, placed, folders)
    for pool in placed.pools:
        for role in pool.models:
            setting = setting_of(job, role, folders, total_steps=shape.total_steps, layout=placed.sizes[role])
            if role in ("actor", "critic") and placed.fuses_updates(job):
                layout = setting.layout and replace(setting.layout, reverses_stages=role == "critic")
                setting = replace(setting, fuses_updates=True, layout=layout)
            if role in retokenized:
                actor = setting_of(job, "actor", folders)
                setting = replace(setting, actor=(actor.model, actor.folder))
            specs[pool.name][role] = model_spec(setting, role, beside=pool.models, sequences=sequences)
    specs[home] |= helper_specs(setting_of(job, job.saved, folders), path=path, columns=columns)
    if job.generates_elsewhere:
        elsewhere = {"setting": setting_of(job, "rollout", folders), "on_gpu": placed.device == "GPU"}
        specs[ENDPOINTS] = {"rollout": WorkerSpec(RolloutWorker, elsewhere)}
    return {pool: {role: with_mapped_fields(spec, placed) for role, spec in of.items()} for pool, of in specs.items()}


def model_spec(setting: WorkerSetting, role: Role, *, beside: Collection[str] = (), sequences: int = 1) -> WorkerSpec:
    """Return the spec of a worker that holds a model, or of a reward of any form.

    beside: the models of its pool; sequences: the most responses of a batch.
    """
    job, layout = setting.job, setting.layout
    arguments: dict[str, Any] = {"setting": setting}
    worker = _class_of(job, role)
    if role == "rollout" or (role == "actor" and not job.spec.algorithm.offline):
        generators = layout.data * layout.micro if layout else 1
        arguments["max_sequences"] = -(-sequences // generators)
    if worker is ActorWorker and not job.recomputes_log_probs:
        arguments["old_log_probs"] = "Update" if job.old_log_probs_by_update else "Generator"
    if worker is CriticWorker and job.values_by_update and "actor" in beside:
        arguments["values_by_update"] = True
    return WorkerSpec(worker, arguments, layout)


def _class_of(job: Job, role: Role) -> type:
    if role == "rollout":
        return RolloutWorker
    shaping = getattr(job.spec.algorithm, "rewards", RewardShaping())
    is_score = isinstance(job.spec.models.reward, Model) and shaping.truncated == "Keep"
    if role == "reward" and (job.spec.rollout.has_turns or not is_score):
        return ScoringWorker  # the reward is more than the score of a model
    return workers_of(type(job.spec.algorithm))[role]


def helper_specs(setting: WorkerSetting, *, path: Path, columns: Collection[str] = ()) -> dict[str, WorkerSpec]:
    """Return the specs of the workers without a placed model, which run in the pool of the job's saved model.

    They compute advantages, choose pairs, write data sets, merge models, score evaluations or call reward functions.
    setting: the `WorkerSetting` of the saved model.
    """
    job, folder = setting.job, path.resolve()
    specs: dict[str, WorkerSpec] = {}
    for name, worker in workers_of(type(job.spec.algorithm)).items():
        if name in get_args(Role) and worker is not MergeWorker:
            continue
        columns_read = {"columns": columns} if worker is ResponseWriter else {}
        writes = {"setting": setting, "folder": str(folder / job.spec.algorithm.makes), **columns_read}
        specs[name] = WorkerSpec(worker, writes if worker in (ResponseWriter, MergeWorker) else {"job": job})
    if job.spec.algorithm.offline:
        return specs
    specs["judge"] = WorkerSpec(JudgeWorker, {"setting": setting})
    if job.spec.rollout.keep:
        specs["rollouts"] = WorkerSpec(RolloutKeeper, {"setting": setting, "file": str(folder / ROLLOUTS)})
    no_models: dict[Role, bool] = {"reward": job.has_reward, "teacher": bool(job.spec.models.teacher_endpoints)}
    for role, is_used in no_models.items():
        if is_used and role not in job.placed_roles():  # the role has no slot of its own
            specs[role] = model_spec(setting, role)
    return specs


def with_mapped_fields(spec: WorkerSpec, placed: DeviceMapping) -> WorkerSpec:
    """Return the spec with the mapper's choice for a model on GPUs: micro-batch, offload, recomputation, KV cache.

    Fields that the manifest sets stay; micro-batches only become smaller, so that they fit.
    """
    prediction = placed.prediction
    if placed.device == "CPU" or prediction is None or spec.layout is None:
        return spec
    setting: WorkerSetting = spec.arguments["setting"]
    job, model, mapped = setting.job, setting.model, prediction.models[setting.role]
    tokens = {"micro_batch_tokens": micro_batch_tokens(job, [mapped])}
    share = {"gpu_memory_utilization": gpu_memory_utilization(job, prediction)}
    in_manifest = model.gradient_checkpointing
    chosen = {
        "offload": mapped.offload if model.offload == "None" else model.offload,
        "gradient_checkpointing": mapped.recomputes if in_manifest is None else in_manifest,
    }
    changed = job.changed(training=tokens, rollout=share)
    setting = replace(setting, job=changed, model=model.model_copy(update=chosen))
    return replace(spec, arguments={**spec.arguments, "setting": setting})
