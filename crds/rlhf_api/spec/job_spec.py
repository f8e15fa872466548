"""Schema of one job's spec; `rlhf_api.checks.rules` has the rules that span several fields."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from rlhf_api.contract import (
    OBJECTIVE,
    SCHEDULE,
    WHOLE,
    Count,
    Identifier,
    Listed,
    Name,
    NodeCount,
    SlotCount,
    Spec,
    StorageUri,
    Text,
    Uri,
    Whole,
    form_of,
    null_is_unset,
)
from rlhf_api.expressions import VALUE, Check
from rlhf_api.names import PlacedRole, PoolRole, Role
from rlhf_api.spec.algorithm_table import AnyAlgorithm
from rlhf_api.spec.algorithms import Distilling
from rlhf_api.spec.data import AnyData, Data, SourceChange
from rlhf_api.spec.deadlines import CALL_SECONDS
from rlhf_api.spec.evaluation import Evaluation
from rlhf_api.spec.functions import RewardFunction, RewardService
from rlhf_api.spec.judges import Judge, RewardJudge, TeacherEndpoint
from rlhf_api.spec.lora import Lora
from rlhf_api.spec.model_shape import Shape
from rlhf_api.spec.outputs import Outputs
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_api.spec.rollout import Rollout
from rlhf_api.spec.run_policy import RunPolicy, Storage
from rlhf_api.spec.runtime import Runtime, Sandbox
from rlhf_api.spec.verifiers import RewardVerifier, Verifier
from rlhf_api.spec.watch import Watch

MICRO_BATCH_TOKENS = 16384
"""Default number of tokens of a forward pass; on CPU, models with hidden states of more than 64 values get fewer."""
CPU_HIDDEN_VALUES, CPU_MIN_TOKENS = 2**20, 2048
"""Default number of tokens of a forward pass on CPU: the first number // hidden size, at least the second number."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Spec):
    """Settings of the optimizer AdamW and of the schedule of its learning rate."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak of the learning rate, reached after the warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Coefficient of AdamW's decoupled weight decay.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), strict=False)
    """Decay of the first and the second moment."""
    epsilon: float = Field(1e-8, gt=0, description="Constant that AdamW adds to the denominator.")
    warmup_steps: Whole = Field(0, description="Number of first steps, over which the learning rate rises to its peak.")
    schedule: str = Field("Constant", pattern=SCHEDULE, max_length=256)
    """After the warm-up: Constant, Cosine, which ends at a tenth of the peak, or a function of your own,
    module.path:function, that returns a step's factor of the learning rate.
    """
    max_grad_norm: float = Field(1.0, gt=0, description="Largest norm of the gradient; a larger one is scaled down.")


Attention = Literal["Auto", "SDPA", "Flash"]
Kernels = Literal["Auto", "Plain", "Fused"]
Offload = Literal["None", "Parameters", "Optimizer", "All", "OptimizerInHost"]


class Model(Spec):
    """One model: where it comes from and, if it is trained, how."""

    form: ClassVar = "a model"

    uri: Uri
    """URI of the model: hf://, job:// (output of another job), package://, file:// or pvc://claim/."""
    revision: Text | None = Field(None, description="Branch, tag or commit of an hf:// model.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    shape: Shape | None = Field(None, description="Shape, for the mapper; unset: read from the model's config.json.")
    gradient_checkpointing: bool | None = None
    """Recompute layers in backward passes, to save memory. Unset: the mapper decides on GPUs."""
    offload: Offload = "None"
    """State that waits in host memory while the model is idle. Then colocated models have room. Optimizer (its
    moments), All and OptimizerInHost for trained models only. OptimizerInHost: FP32 weights, gradients and moments
    are always in host memory, the CPU updates them, and a device holds a few layers.
    """
    parallelism: Parallelism | None = None
    """How the model is cut over its pool's slots; unset means data parallelism only."""
    optimizer: Optimizer | None = Field(None, description="Optimizer of a trained model; unset means its defaults.")
    lora: Lora | None = Field(None, description="Low-rank adapter of a trained model; only the adapter is trained.")


class ScoringModel(Model):
    """A reward or cost model."""

    label: Whole | None = Field(None, description="Index, from 0, of the score among the outputs if there are several.")


CODE: Mapping[str, type[RewardFunction | RewardVerifier | RewardService | RewardJudge]] = {
    "entrypoint": RewardFunction,
    "verifier": RewardVerifier,
    "url": RewardService,
    "judge": RewardJudge,
}
"""Key that only one form of reward has -> class of that form, for rewards other than models and sums."""


def _form(reward: object) -> str:
    """Return the form of a reward by the key that only this form has; other rewards are models."""
    return form_of(reward, {key: each.form for key, each in {"sum": RewardSum, **CODE}.items()}, Model.form)


def _no_sum(reward: object) -> object:
    if _form(reward) == RewardSum.form:
        raise ValueError("is a sum; a sum holds models, functions, verifiers, services and judges, and no sum")
    return reward


def _no_other_form(model: object) -> object:
    if (form := _form(model)) != Model.form:
        raise ValueError(f"is {form}, expected a model, which has a uri")
    return model


OnlyModel = Annotated[Model, BeforeValidator(_no_other_form)]
OnlyScoringModel = Annotated[ScoringModel, BeforeValidator(_no_other_form)]
SingleForms = (
    Annotated[ScoringModel, Tag(Model.form)]
    | Annotated[RewardFunction, Tag(RewardFunction.form)]
    | Annotated[RewardVerifier, Tag(RewardVerifier.form)]
    | Annotated[RewardService, Tag(RewardService.form)]
    | Annotated[RewardJudge, Tag(RewardJudge.form)]
)
SingleReward = Annotated[
    SingleForms, Discriminator(_form), BeforeValidator(_no_sum), null_is_unset(ScoringModel, *CODE.values())
]


class RewardTerm(Spec):
    """One part of a reward."""

    name: Identifier = Field(description="Name of the part; its metric is reward_part/<name>.")
    weight: Annotated[float, Check(VALUE != 0.0, "is 0, expected another number")] = 1.0
    """Factor of the part in the sum."""
    normalization: Literal["None", "Running"] = "None"
    """Running: subtract the mean and divide by the standard deviation of all scores of this part so far."""
    reward: SingleReward
    """Scorer of the part: a model (uri), function (entrypoint), verifier, service (url) or judge."""


class RewardSum(Spec):
    """Weighted sum of rewards, at most one of them a model."""

    form: ClassVar = "a sum"

    sum: Listed[RewardTerm] = Field(min_length=1, max_length=16, description="Parts of the sum.")


Reward = Annotated[
    SingleForms | Annotated[RewardSum, Tag(RewardSum.form)],
    Discriminator(_form),
    null_is_unset(ScoringModel, *CODE.values(), RewardSum),
]


class Models(Spec):
    """The models of a job; the algorithm determines their roles."""

    actor: OnlyModel | None = Field(None, description="Model that writes responses; SFT, DPO and RL train it.")
    critic: OnlyModel | None = Field(None, description="Model that estimates the value of each token of a response.")
    reference: OnlyModel | None = None
    """Reference model; unset means the actor before training or, without a KL penalty, no reference."""
    reward: Reward | None = Field(None, description="Scorer: a model (uri), function, verifier, service, judge or sum.")
    cost: OnlyScoringModel | None = Field(None, description="Model that scores a response's harm; above 0 is unsafe.")
    teacher: OnlyModel | None = Field(None, description="Model of any size whose probabilities the actor learns.")
    teacher_endpoints: Listed[TeacherEndpoint] = Field((), max_length=16)
    """Teachers on servers; `teacher` then teaches the rows of none of them."""

    def by_role(self) -> dict[Role, Model]:
        """Return role -> model for the models that the spec names; a reward that is no model is left out."""
        given: dict[Role, Model | None] = {role: getattr(self, role) for role in get_args(PlacedRole)}
        given["reward"] = next((part for part in self.rewards().values() if isinstance(part, Model)), None)
        return {role: model for role, model in given.items() if model}

    def field(self, role: Role) -> str:
        """Return the name of the field of `models` with the settings of a role's model."""
        if role != "reward":
            return "critic" if role == "cost_critic" else role
        return next((field for field, part in self.rewards().items() if isinstance(part, Model)), role)

    def source_field(self, role: Role) -> str:
        """Return the name of the field of `models` with the URI of a role's weights."""
        if role == "cost_critic":
            return "cost"
        return "actor" if role == "reference" and self.reference is None else self.field(role)

    def rewards(self) -> dict[str, Model | RewardFunction | RewardVerifier | RewardService | RewardJudge | None]:
        """Return field below `models` -> part of the reward; a reward that is no sum is one part."""
        if not isinstance(self.reward, RewardSum):
            return {"reward": self.reward}
        return {f"reward.sum.{place}.reward": term.reward for place, term in enumerate(self.reward.sum)}


class Training(Spec):
    """How long, in what batches and how reproducibly a job trains."""

    total_steps: Count | None = Field(None, description="Number of training steps; give this or totalEpochs.")
    total_epochs: Count | None = Field(None, description="Passes over the training data; give this or totalSteps.")
    prompt_batch_size: Count | None = Field(None, description="Number of prompts in a training step; RL only.")
    batch_size: Count | None = None
    """Rows of the data in a training step, a pair counts as one row; not in RL."""
    mini_batch_size: Count | None = None
    """Sequences of an optimizer step, RL only; unset means the whole batch."""
    update_epochs: Count = Field(1, description="Number of passes of the updates over a step's batch; RL only.")
    old_log_probs: Literal["Auto", "Recompute", "Generator"] = "Auto"
    """Source of the responses' log-probabilities before a step's updates; RL only. Recompute: a forward pass of the
    trainer. Generator: the generator's values. Auto: Recompute, except for steps of one update without a KL penalty in
    the reward, where that update's own forward pass gives them.
    """
    seed: Annotated[int, Field(ge=0, lt=2**32, description="Seed of all random choices of the job."), WHOLE] = 0
    precision: Literal["Auto", "FP32", "BF16"] = "Auto"
    """Precision of training: Auto is FP32 on CPU, and BF16 with FP32 master weights on GPU."""
    micro_batch_tokens: Count | None = Field(
        None,
        description="Largest number of tokens of one forward pass; rows are packed without padding. Default: "
        f"{MICRO_BATCH_TOKENS:,} on GPUs. On CPU, whose caches are small, {CPU_MIN_TOKENS:,} or, for hidden states of "
        f"less than 512 values, 2^20 divided by their size, at most {MICRO_BATCH_TOKENS:,}.",
    )
    attention: Attention = "Auto"
    """Kernels of attention within packed rows. SDPA: text by text. Flash: one call, for BF16 on GPUs from Ampere on.
    Auto takes Flash where it runs.
    """
    kernels: Kernels = "Auto"
    """Kernels of norms, rotary embeddings, gated MLPs and the head. Plain: one for each operation of torch. Fused:
    by Triton on GPUs. Auto takes Fused where it runs.
    """
    gradient_compression: Literal["Auto", "None", "TopK"] = "Auto"
    """Compression between replicas of a trained model. None: whole gradients. TopK: of 256 values of AdamW's step the
    16 largest, in 8 bits; the rest goes with later steps. Auto: TopK if the mapper puts each replica into one zone, and
    the link between zones is known and below 1 Gb/s.
    """
    compile: bool = False
    """Compile the models' layers, but for attention, by torch.compile. It needs models without tensor parallelism and,
    on CPU, a job that generates nothing.
    """
    share_prompts: bool = True
    """Compute a prefix that texts of a micro-batch have in common once, in scoring and training."""
    fuse_updates: Literal["Auto", "Never"] = "Auto"
    """Run the updates of actor and critic as one, where both have the same pipeline stages in one pool: while a rank
    would wait for one model, it computes micro-batches of the other. Auto: in steps of several updates, if the memory
    suffices.
    """
    max_skipped_updates: Whole = 3
    """Largest number of consecutive updates of a model that may be skipped because a value is not finite."""
    router_aux_loss: float | None = Field(None, ge=0)
    """Factor of the auxiliary loss that balances the experts of trained models. Unset: for SFT the model's
    router_aux_loss_coef, else 0.
    """
    call_deadline_seconds: Count | None = None
    """Longest time in which no worker finishes a call; after it the run is stopped as hung. Unset is 1,800 s. Where
    steps are predicted, a call of a later step then has ten times the seconds of the longest step, at least 300 s. It
    has at least twice the time limit of a reward's code. Jobs with turns keep the 1,800 s.
    """

    @property
    def call_deadline(self) -> int:
        """Deadline in seconds of a call that is not of a step, or of a step whose seconds are not known."""
        return self.call_deadline_seconds or CALL_SECONDS[1]


class Resources(Spec):
    """The slots a job may use; a slot is a GPU or a CPU worker."""

    device: Literal["Auto", "CPU", "GPU"] = "Auto"
    """Kind of slots. Auto: GPUs where there are any, else CPU slots, on a cluster for up to 100 million parameters."""
    nodes: NodeCount = Field(1, description="Number of the job's nodes.")
    max_nodes: NodeCount | None = None
    """Largest number of nodes onto which a job is mapped on a cluster. The job gets fewer where fewer exist, but at
    least `nodes`. With placement Auto only. Unset means `nodes`.
    """
    slots_per_node: SlotCount | None = None
    """Slots of a node; unset means all its GPUs, or the CPU slots that `rlhf run` chooses, on a cluster 1."""


class Checkpoint(Spec):
    """Checkpoints of a job: when one is saved, how many are kept, and where.

    The last step is always saved, and so is the step after which a stop signal ends the run.
    """

    every_steps: Count | None = Field(None, description="Steps between checkpoints; unset: only everyMinutes counts.")
    every_minutes: float = Field(10.0, gt=0, description="Age of the last checkpoint at which the next one is saved.")
    keep_last: Count = Field(2, description="Number of newest checkpoints to keep; older ones are deleted.")
    keep_best: Text | None = None
    """A measure of evaluation, such as reward or loss. The checkpoint with its best value is kept, too: the highest
    value, or for loss the lowest. Needs evaluation.everySteps.
    """
    pause_after_step: Count | None = Field(None, description="Step after which the job saves a checkpoint and pauses.")
    storage: StorageUri | None = None
    """Storage of checkpoints. Schemes: s3, gs, pvc://claim or, not on a cluster, file; unset means the run folder."""
    upload_m_bps: float | None = Field(None, gt=0)
    """Megabytes per second that a node uploads to s3 or gs beside steps; unset: a twentieth of its slowest measured
    link to another node of the pool, or all if there is none.
    """

    @property
    def kept(self) -> int:
        """Most checkpoints of the job that are kept at a time."""
        return self.keep_last + (self.keep_best is not None)


class Pool(Spec):
    """Slots that some models share."""

    name: Name = Field(description="Name of the pool.")
    models: Listed[PoolRole] = Field(min_length=1, max_length=5)
    """Roles of the models in the pool. `rollout` has a pool of its own and generates in place of the actor."""
    nodes: NodeCount = Field(1, description="Number of the pool's nodes; the fewest if maxNodes is set.")
    max_nodes: NodeCount | None = None
    """Most nodes of an elastic pool, which only generates: it gets nodes while others leave them idle."""
    slots_per_node: SlotCount = Field(description="Number of slots of each node: GPUs or CPU workers.")


class Placement(Spec):
    """Placement of models on pools of slots."""

    mode: Literal["Auto", "Manual"] = Field("Auto", description="Auto: the mapper decides. Manual: `pools` decides.")
    pools: Listed[Pool] = Field((), max_length=8, description="Pools of slots and their models; with Manual only.")
    objective: str = Field("throughput", pattern=OBJECTIVE, max_length=32)
    """Objective of the mapper: throughput (shortest step), fewest-gpus=SECONDS (longest step) or lowest-cost."""
    remap: Literal["Never", "AtCheckpoint"] = "Never"
    """Time at which a running job takes a placement that measured steps show to be better; on a cluster."""


class JobSpec(Spec):
    """Spec of one job."""

    algorithm: AnyAlgorithm = Field(description="Algorithm of the job, and its options.")
    models: Models = Field(Models(), description="Models that the algorithm trains or uses.")
    data: Data = Field(Data(), description="Data sets of the job, and limits of their rows.")
    rollout: Rollout = Field(Rollout(), description="Sampling of responses; RL only.")
    training: Training = Field(Training(), description="Length, batches and precision of the training.")
    evaluation: Evaluation | None = Field(None, description="Measurements on held-out data.")
    watch: Watch = Field(Watch(), description="Reactions to problems of the run that raise no error.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="Saving of checkpoints: when, how many and where.")
    outputs: Outputs = Field(Outputs(), description="Destinations of the metrics besides the run folder.")
    storage: Storage = Field(Storage(), description="Retention of the volume claim of a deleted job; on a cluster.")
    resources: Resources = Field(Resources(), description="Slots (GPUs or CPU workers) that the job may use.")
    placement: Placement = Field(Placement(), description="Placement of the models on pools of slots.")
    suspend: bool = Field(False, description="Save a checkpoint, then free all slots; false lets the job go on.")
    run_policy: RunPolicy = Field(RunPolicy(), description="Policy for failures, deadlines and deletion; on a cluster.")
    runtime: Runtime = Field(Runtime(), description="Image, environment and sizes of the pods; on a cluster.")
    sandbox: Sandbox | None = None
    """Pods that run code of the model on a cluster: for the verifier Code, an environment, tools and an agent. Unset,
    and on a laptop: guarded processes beside the trainer.
    """

    def with_sources(self, change: SourceChange) -> Self:
        """Return a copy of the spec in which the function `change` has replaced each data set."""
        data, evaluation = self.data, self.evaluation
        sources = {"train": data.train.map_sources(change), "pretrain": data.pretrain and change(data.pretrain)}
        measured = evaluation and evaluation.model_copy(update={"data": evaluation.data.map_sources(change)})
        return self.model_copy(update={"data": data.model_copy(update=sources), "evaluation": measured})

    def columns(self, data: AnyData) -> tuple[str, ...]:
        """Return the data columns read besides the prompt: named by data sets, or read by `column_readers`."""
        named = [column for source in data.sources("").values() for column in source.columns]
        read = (name for _, reader in self.column_readers(data) for name in reader.columns)
        return tuple(dict.fromkeys([*named, *read]))

    def reader_columns(self, data: AnyData) -> dict[str, str]:
        """Return the columns that `column_readers` read, also before the run: column -> field that names it.

        Verifiers of the evaluation count only if `data` is the evaluation's, or one of its data sets.
        """
        readers = [(field, each, getattr(each, "solution_key", None)) for field, each in self.column_readers(data)]
        return {column: field for field, each, solution in readers for column in (*each.columns, solution) if column}

    def column_readers(self, data: AnyData) -> list[tuple[str, Verifier | Judge | Distilling]]:
        """Return the readers of columns of `data`, each with its field: verifiers, judges, choice of the teacher."""
        parts = [(f"spec.models.{field}", part) for field, part in self.models.rewards().items()]
        measured = self.evaluation.data if self.evaluation else None
        if self.evaluation and measured and any(data is each for each in (measured, *measured.sources("").values())):
            parts += [("spec.evaluation.verifiers", each) for each in self.evaluation.verifiers]
        found = [(field, getattr(part, "verifier", None) or getattr(part, "judge", None)) for field, part in parts]
        train = (self.data.train, *self.data.train.sources("").values())
        if isinstance(self.algorithm, Distilling) and any(data is each for each in train):
            found.append(("spec.algorithm.teacherKey", self.algorithm))
        return [(field, reader) for field, reader in found if reader]
