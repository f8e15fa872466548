"""A job, checked as a whole: its fields, and the rules that span several of them."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_api.checks.pod_template import problems_of_templates
from rlhf_api.checks.rules import reads_reference, reference_is_actor, rule_problems, used_roles
from rlhf_api.contract import DNS_LABEL, JOB_NAME, LabelKey, LabelValue, Spec
from rlhf_api.measures import measure_of, pass_sizes
from rlhf_api.names import Role
from rlhf_api.own_code import add_search_path
from rlhf_api.problems import SpecError
from rlhf_api.pydantic_errors import validated
from rlhf_api.spec import job_spec
from rlhf_api.spec.algorithms import ActorCritic, PolicyGradient
from rlhf_api.spec.custom_algorithm import AlgorithmFacts
from rlhf_api.spec.data import DataSets
from rlhf_api.spec.deadlines import CALL_SECONDS
from rlhf_api.spec.job_spec import JobSpec, Model, Optimizer, Placement, Pool
from rlhf_api.spec.judges import RewardJudge
from rlhf_api.spec.merging import Merging
from rlhf_api.spec.verifiers import RewardVerifier
from rlhf_api.status import MappedPool

MAX_NAME_LENGTH = 40
"""Longest name of a job; names that the operator derives from it have to fit into 63 characters."""


class Metadata(Spec):
    """The part of Kubernetes' object metadata that a manifest may set."""

    name: str = Field(pattern=JOB_NAME, max_length=MAX_NAME_LENGTH, description="Name of the job.")
    namespace: str = Field("default", pattern=DNS_LABEL, max_length=63, description="Namespace of the job.")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, description="Labels; the operator reads them.")
    annotations: dict[LabelKey, str] = Field(default_factory=dict, description="Annotations; nothing reads them.")


class Job(Spec):
    """An RLHFJob that obeys every rule."""

    api_version: Literal["rlhf.hybridflow.io/v1alpha1"] = Field(description="Group and version of the API.")
    kind: Literal["RLHFJob"] = Field(description="Kind of the object.")
    metadata: Metadata = Field(description="Name and namespace of the job.")
    spec: JobSpec = Field(description="Spec of the job.")

    @classmethod
    def parse(cls, document: object, folder: Path | None = None, *, step: AlgorithmFacts | None = None) -> Self:
        """Return the job of a manifest, given as JSON types; file:// URIs relative to `folder` become absolute.

        The class of a user's own algorithm is imported if there is a folder. Without a folder the argument `step` tells
        the class's properties, as a pod has read them. Raises SpecError with every mistake, or OwnCodeError for a wrong
        class.
        """
        context: dict[str, Any] = {"step": step}
        if folder is not None:
            context = {"folder": folder}
            add_search_path(folder)
        job = validated(cls, document, **context)
        if not isinstance(job.spec.algorithm, Merging):
            return job
        # What the manifest of a merge leaves out: one CPU slot, and a layer a step.
        length, pool = {"total_epochs": 1, "batch_size": 1}, Pool(name="all", models=("actor",), slots_per_node=1)
        placed = dict(Placement(mode="Manual", pools=job.spec.placement.pools or (pool,)))
        return job.changed(training=length, placement=placed, resources={"device": "CPU"})

    @model_validator(mode="after")
    def _obeys_the_rules(self) -> Self:
        runtime = self.spec.runtime
        wrong = problems_of_templates({"controller": runtime.controller.template, "worker": runtime.worker.template})
        if problems := [*rule_problems(self.spec), *(each.within("spec.runtime.") for each in wrong)]:
            raise SpecError(problems)
        return self

    @property
    def name(self) -> str:
        return self.metadata.name

    def models(self) -> dict[Role, Model]:
        """Return role -> model that the algorithm uses; an unset optimizer or reference model has its default."""
        spec, models = self._models
        # model_copy keeps this cache, so it counts only for the spec that it was made from.
        return dict(models) if spec is self.spec else _used_models(self.spec)

    @cached_property
    def _models(self) -> tuple[JobSpec, dict[Role, Model]]:
        return self.spec, _used_models(self.spec)

    @property
    def has_reward(self) -> bool:
        """Whether the responses of an RL job get a score from a reward, an environment or an agent."""
        return self.spec.models.reward is not None or self.spec.rollout.gives_reward

    @property
    def measures(self) -> list[str]:
        """Names of the evaluation's measures, without parts that functions name only when they are called."""
        asked = self.spec.evaluation
        if asked is None:
            return []
        if self.spec.algorithm.offline:
            return ["loss" if "completions" in self.spec.algorithm.data else "pair_accuracy"]
        scores = [*["reward"] * self.has_reward, *["cost"] * ("cost" in self.models())]
        scores += [*(function.name for function in asked.functions), *(verifier.name for verifier in asked.verifiers)]
        passes = [f"{each}_pass_at_{k}" for each in self.pass_measures for k in pass_sizes(asked.samples_per_prompt)]
        sets = ["", *(of_set.name for of_set in asked.data.sets)] if isinstance(asked.data, DataSets) else [""]
        names = [*scores, "response_tokens", "response_finished", *passes, "win_rate"]
        return [measure_of(name, measure) for name in sets for measure in names]

    @property
    def pass_measures(self) -> list[str]:
        """Names of the evaluation's pass-or-fail measures (verifiers), which also give a pass@k."""
        names = [verifier.name for verifier in self.spec.evaluation.verifiers] if self.spec.evaluation else []
        return [*names, "reward"] if isinstance(self.spec.models.reward, RewardVerifier) else names

    def is_measured(self, name: str) -> bool:
        """Whether the evaluation has a measure of this name, or may have it as a part of a function's score."""
        functions = {each.name for each in self.spec.evaluation.functions} if self.spec.evaluation else set[str]()
        parts = tuple(f"{each}_" for each in self.measures if each.rpartition("/")[2] in functions)
        return name in self.measures or (name.startswith(parts) and name not in parts)

    def trained(self) -> tuple[Role, ...]:
        """Return the roles of the trained models, which have an optimizer."""
        return tuple(role for role, model in self.models().items() if model.optimizer)

    def changed(self, **parts: Mapping[str, Any]) -> Self:
        """Return the job with other values in parts of its spec; parts: part of the spec -> field -> its value."""
        changes = {name: getattr(self.spec, name).model_copy(update=fields) for name, fields in parts.items()}
        return self.model_copy(update={"spec": self.spec.model_copy(update=changes)})

    def placed_roles(self) -> tuple[Role, ...]:
        """Return the roles that are placed in pools: the models, and `rollout` if it has a pool of its own."""
        has_pool = self.generates_apart and not self.generates_elsewhere
        return (*self.models(), "rollout") if has_pool else tuple(self.models())

    @property
    def generates_apart(self) -> bool:
        """Whether responses are generated outside the actor's pool: in a rollout pool, or by servers outside the job.

        Placement mode Auto chooses a rollout pool if maxStaleness is above 0: an actor that trains cannot generate.
        """
        placement, stale = self.spec.placement, self.spec.rollout.max_staleness > 0
        by_hand = any("rollout" in pool.models for pool in placement.pools)
        return by_hand or (placement.mode == "Auto" and stale) or self.generates_elsewhere

    @property
    def max_staleness(self) -> int:
        """Most updates of the policy between the generation of a response and a step that learns from it."""
        return self.spec.rollout.max_staleness + int(self.spec.algorithm.replayed_steps)

    @property
    def generates_elsewhere(self) -> bool:
        """Whether servers that are not part of the job generate its responses."""
        return self.spec.rollout.endpoints is not None

    @property
    def may_replay_routing(self) -> bool:
        """Whether the actor's passes over responses may use the generator's experts, if the actor has experts."""
        rollout, is_read = self.spec.rollout, isinstance(self.spec.algorithm, PolicyGradient)
        return is_read and not self.generates_elsewhere and not rollout.agent and rollout.routing != "Recompute"

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor without its adapter, and so no model of its own."""
        return reads_reference(self.spec) and reference_is_actor(self.spec)

    @property
    def saved(self) -> Role:
        """Role of the model that the job saves: the first trained one, or else the first that is only read."""
        return (*self.spec.algorithm.trained, *self.spec.algorithm.frozen)[0]

    @property
    def sequences_per_step(self) -> int:
        """Number of responses sampled in a step (RL), or of rows that the step reads (offline; a pair is one row)."""
        return self.rows_per_step * self.spec.rollout.samples_per_prompt

    def allowed_node_counts(self, pool: Pool | MappedPool) -> list[int]:
        """Return the numbers of nodes with which a pool's slots are whole engines with equal batches."""
        engine = (self.spec.rollout.tensor_parallel or 1) * (self.spec.rollout.pipeline_parallel or 1)
        slots = {nodes: nodes * pool.slots_per_node for nodes in range(pool.nodes, (pool.max_nodes or pool.nodes) + 1)}
        fitting = [each for each, size in slots.items() if not (self.sequences_per_step % size or size % engine)]
        return fitting if pool.max_nodes else [pool.nodes]

    @property
    def updates_per_step(self) -> int:
        """Most optimizer steps in one training step of an algorithm that learns from advantages."""
        training = self.spec.training
        learned = self.sequences_per_step // self.spec.algorithm.prompts_drawn
        return training.update_epochs * -(-learned // (training.mini_batch_size or learned))

    def micro_batch_tokens(self, device: Literal["CPU", "GPU"], *, hidden: int) -> int:
        """Return the most tokens of one forward pass of a model with hidden states of size `hidden`."""
        most = job_spec.MICRO_BATCH_TOKENS
        fastest = max(job_spec.CPU_HIDDEN_VALUES // hidden, job_spec.CPU_MIN_TOKENS) if device == "CPU" else most
        return self.spec.training.micro_batch_tokens or min(fastest, most)

    @property
    def old_log_probs_by_update(self) -> bool:
        """Whether the old log-probabilities come from the forward pass of the step's only update.

        Nothing before the update reads them: the measurement `kl/reference` waits for that pass.
        """
        algorithm = self.spec.algorithm
        return (
            isinstance(algorithm, PolicyGradient)
            and self.spec.training.old_log_probs == "Auto"
            and self.updates_per_step == 1
            and not algorithm.rewards_read_log_probs
            and algorithm.kl.controller != "LearningRate"
            and "actor" not in algorithm.workers
            and not (algorithm.rollout_correction and algorithm.rollout_correction.normalize)
            and not (self.spec.watch.mismatch and self.spec.watch.mismatch.stops_update)
        )

    @property
    def derives_call_deadline(self) -> bool:
        """Whether the deadline of a step's calls follows from the seconds of steps: turns may take any time."""
        return self.spec.training.call_deadline_seconds is None and not self.spec.rollout.has_turns

    @property
    def least_call_deadline(self) -> int:
        """Lower bound in seconds of a deadline derived from steps: twice the time limit of the slowest reward code.

        Teachers on servers count as code. The time limit includes all attempts of a request. The bound itself stays
        within CALL_SECONDS.
        """
        rewards = (*self.spec.models.rewards().values(), *self.spec.models.teacher_endpoints)
        parts = [part.judge if isinstance(part, RewardJudge) else part for part in rewards]
        code = [each for each in parts if each and not isinstance(each, Model)]
        seconds = max((each.timeout_seconds * getattr(each, "attempts", 1) for each in code), default=0.0)
        return int(min(max(2 * seconds, CALL_SECONDS[0]), CALL_SECONDS[1]))

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the trainer makes a forward pass only for the old log-probabilities of the responses."""
        return self.spec.training.old_log_probs != "Generator" and not self.old_log_probs_by_update

    @property
    def values_by_update(self) -> bool:
        """Whether a critic in the actor's pool takes its values from the forward pass of the step's only update.

        A critic in another pool makes a separate forward pass, which does not delay the actor.
        """
        algorithm = self.spec.algorithm
        has_own = "critic" in algorithm.workers
        return isinstance(algorithm, ActorCritic) and self.updates_per_step == 1 and not has_own

    @property
    def may_fuse_updates(self) -> bool:
        """Whether the updates of actor and critic may run as one, if both have the same stages of a pipeline.

        They may not in steps of one update: the actor then waits for values that the critic's update computes.
        """
        models, algorithm = self.models(), self.spec.algorithm
        can_wait = isinstance(algorithm, ActorCritic) and not algorithm.is_own and not self.values_by_update
        is_asked = can_wait and self.spec.training.fuse_updates == "Auto"
        return is_asked and models["actor"].offload == models["critic"].offload == "None"

    def total_steps_for(self, rows: int) -> int:
        """Return the job's number of steps for `rows` data rows; a batch may span epochs, the last one may be short."""
        training = self.spec.training
        return training.total_steps or -(-(training.total_epochs or 0) * rows // self.rows_per_step)

    @property
    def rows_per_step(self) -> int:
        """Number of rows of the data that a training step reads."""
        rows = self.spec.training.prompt_batch_size or self.spec.training.batch_size
        assert rows, "a rule requires one of the two"
        return rows * self.spec.algorithm.prompts_drawn


def _used_models(spec: JobSpec) -> dict[Role, Model]:
    models = spec.models.by_role()
    if isinstance(spec.algorithm, Merging):
        models["actor"] = Model(uri=spec.algorithm.models[0].uri)
    if "actor" in models:
        models.setdefault("reference", _untrained(models["actor"]))  # only used if `used_roles` says so
    for role in spec.algorithm.trained:
        models[role] = models[role].model_copy(update={"optimizer": models[role].optimizer or Optimizer()})
    used = {role: models[role] for role in used_roles(spec)}
    if spec.algorithm.has_cost_critic:
        weights = {name: getattr(models["cost"], name) for name in ("uri", "revision", "trust_remote_code", "shape")}
        used["cost_critic"] = models["critic"].model_copy(update=weights)
    return used


def _untrained(model: Model) -> Model:
    offload = "Parameters" if model.offload in ("Parameters", "All", "OptimizerInHost") else "None"
    unset = dict.fromkeys(("optimizer", "gradient_checkpointing", "lora"))
    return model.model_copy(update={**unset, "offload": offload})
