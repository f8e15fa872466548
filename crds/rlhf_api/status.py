"""Status of a job: `status.json` in a run folder, and the status of the custom resource on a cluster.

The trainer writes progress, metrics, checkpoint, output and lastFailure; the operator copies them and adds the rest.
"""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_api.contract import TIMESTAMP, Count, Spec
from rlhf_api.names import PlacedRole, PoolRole
from rlhf_api.spec.custom_algorithm import ReadStep
from rlhf_api.spec.model_shape import Shape
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_api.spec.run_policy import Reason

Phase = Literal[
    "Pending",
    "Mapping",
    "Queued",
    "Provisioning",
    "Initializing",
    "Running",
    "Restarting",
    "Suspending",
    "Suspended",
    "Succeeded",
    "Failed",
    "Stopped",
]
"""Phase of a job. Stopped is for runs without an operator: a signal ended them after a checkpoint."""
ConditionType = Literal[
    "Accepted",
    "InputsReady",
    "Mapped",
    "QuotaReserved",
    "ClusterReady",
    "Training",
    "Stalled",
    "Suspended",
    "Complete",
    "Failed",
]
Timestamp = Annotated[str, Field(pattern=TIMESTAMP)]
Step = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class Condition(Spec):
    """One fact about a job, as Kubernetes writes conditions; docs/jobs.md lists types and reasons."""

    type: Annotated[ConditionType, Field(description="What the fact is about.")]
    status: Annotated[Literal["True", "False", "Unknown"], Field(description="Whether it is so.")]
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]+$", description="Why, in one CamelCase word.")]
    message: Annotated[str, Field(description="A sentence for a person.")] = ""
    last_transition_time: Annotated[Timestamp, Field(description="When status last changed (RFC 3339).")]
    observed_generation: Annotated[int, Field(ge=0, description="Generation of the spec that it is about.")]


class PhaseSeconds(Spec):
    """Seconds of a phase of a step."""

    phase: Annotated[
        Literal["reshard", "generation", "scoring", "update"], Field(description="As time/<phase> in metrics.jsonl.")
    ]
    seconds: Annotated[Seconds, Field(description="As measured.")]


class Pace(Spec):
    """Pace of a job: medians over the latest steps of an attempt, without its first two."""

    step_seconds: Annotated[Seconds, Field(description="Duration of a step.")]
    response_tokens: Annotated[float | None, Field(ge=0, le=1e9, description="Mean length of its responses.")] = None
    phases: Annotated[
        tuple[PhaseSeconds, ...], Field(strict=False, max_length=4, description="Those that are predicted, too.")
    ] = ()


class Progress(Spec):
    """How far a job is."""

    step: Annotated[Step, Field(description="Steps finished.")]
    total_steps: Annotated[Step, Field(description="Steps of the whole job.")]
    stage: Annotated[str, Field(description="What the job runs, such as SFT or PPO.")]
    step_seconds: Annotated[float | None, Field(ge=0, description="Duration of the latest step.")] = None
    tokens_per_second: Annotated[float | None, Field(ge=0, description="Prompt and response tokens of that step.")] = (
        None
    )
    remaining_seconds: Annotated[
        int | None, Field(ge=0, description="Estimated time to the end, at the latest step's pace.")
    ] = None
    last_step_time: Annotated[
        Timestamp | None, Field(description="When the latest step ended, on a cluster when the operator heard of it.")
    ] = None
    pace: Annotated[Pace | None, Field(description="Of the attempt, once it has made a few steps.")] = None


class Metric(Spec):
    """The latest value of one metric."""

    name: Annotated[str, Field(description="Name as in metrics.jsonl, such as reward/mean.")]
    value: Annotated[str, Field(description="Decimal number as text; API conventions advise against floats.")]


class Output(Spec):
    """Result of a finished job."""

    uri: Annotated[str, Field(description="Where the trained model is; pvc://claim/path on a cluster.")]


class SavedState(Spec):
    """The newest whole checkpoint."""

    step: Annotated[int, Field(ge=1, description="Steps finished when it was made.")]
    uri: Annotated[str, Field(description="Where it is.")]
    time: Annotated[Timestamp, Field(description="When it became whole (RFC 3339).")]


class Failure(Spec):
    """The most recent failure."""

    reason: Annotated[
        str, Field(description="One CamelCase word; on a cluster one of those of runPolicy.failureRules.reasons.")
    ]
    exit_code: Annotated[
        int | None, Field(ge=0, le=255, description="Exit code of the trainer; unset where it could not tell.")
    ] = None
    message: Annotated[str, Field(description="A sentence for a person.")]
    attempt: Annotated[int | None, Field(ge=1, description="The attempt that failed.")] = None
    rule: Annotated[str | None, Field(description="The rule of runPolicy.failureRules that matched.")] = None
    pod: Annotated[str | None, Field(description="The pod that failed.")] = None
    node: Annotated[str | None, Field(description="The node it was on.")] = None
    time: Annotated[Timestamp | None, Field(description="When it was noticed (RFC 3339).")] = None


class ReadShape(Spec):
    """Shape read from a model's config.json, once for each URI and revision."""

    uri: Annotated[str, Field(description="Where the model, or the one that a chain of jobs made it from, is.")]
    revision: Annotated[str | None, Field(description="Of an hf:// model.")] = None
    shape: Annotated[Shape | None, Field(description="Its shape; unset where it could not be read.")] = None
    problem: Annotated[str | None, Field(description="Why it could not.")] = None
    weight_bytes: Annotated[
        int | None, Field(ge=1, le=2**53, description="Size of its weights' files, where there is no shape.")
    ] = None


class MappedPool(Spec):
    """Slots that some models share."""

    name: Annotated[str, Field(description="Name of the pool, and of its worker group.")]
    models: Annotated[tuple[PoolRole, ...], Field(strict=False, description="Roles that live here.")]
    nodes: Annotated[int, Field(ge=1, description="Worker pods.")]
    slots_per_node: Annotated[int, Field(ge=1, description="GPUs or CPU slots of each.")]
    gpu: Annotated[str | None, Field(description="Type of GPU, where the nodes say.")] = None
    zones: Annotated[
        tuple[str, ...] | None,
        Field(strict=False, description="Where each node lies, in the order of ranks, where a label says it."),
    ] = None


class MappedSizes(Parallelism):
    """How a model is cut over its pool; all sizes are set, those of generation for the model that generates."""

    role: Annotated[PlacedRole, Field(description="The model.")]
    pipeline: Annotated[Count, Field(description="Pipeline stages (p).")]
    tensor: Annotated[Count, Field(description="Tensor-parallel shards of a layer (t).")]
    data: Annotated[Count, Field(description="Data-parallel ranks (d).")]
    generation_pipeline: Annotated[int | None, Field(ge=1, description="p_g, of an actor's generator.")] = None
    generation_tensor: Annotated[int | None, Field(ge=1, description="t_g, of an actor's generator.")] = None
    offload: Annotated[
        Literal["None", "Parameters", "Optimizer", "All", "OptimizerInHost"] | None,
        Field(description="What waits in host memory while the model is not in use, as mapped; GPUs only."),
    ] = None
    gradient_checkpointing: Annotated[
        bool | None, Field(description="Whether layers are computed again in the backward pass, as mapped; GPUs only.")
    ] = None


class MappedPlacement(Spec):
    """Answer of the mapper for the current attempt; the trainer gets it as a Manual placement."""

    input_hash: Annotated[
        str, Field(description="Digest of what the answer depends on besides the nodes: the spec and its models.")
    ]
    device: Annotated[Literal["CPU", "GPU"], Field(description="What a slot is.")]
    slots: Annotated[int, Field(ge=1, description="GPUs or CPU slots of all pools.")]
    gpus: Annotated[int, Field(ge=0, description="GPUs of all pools; 0 where slots are CPU slots.")] = 0
    pools: Annotated[tuple[MappedPool, ...], Field(strict=False, min_length=1, description="The pools.")]
    sizes: Annotated[tuple[MappedSizes, ...], Field(strict=False, description="How each model is cut.")]
    gpu_memory_utilization: Annotated[float | None, Field(gt=0, lt=1, description="Of generation, as mapped.")] = None
    micro_batch_tokens: Annotated[int | None, Field(ge=1, description="Of one forward pass, as mapped.")] = None
    price_per_hour: Annotated[
        float | None, Field(ge=0, description="Of all GPUs, in the currency of the prices; unset where one has none.")
    ] = None
    predicted_step_seconds: Annotated[float | None, Field(gt=0, description="Unset where shapes are unknown.")] = None
    predicted_tokens_per_second: Annotated[float | None, Field(gt=0, description="The same in tokens.")] = None
    measured_step_seconds: Annotated[
        Seconds | None, Field(description="Median of the latest steps; by phase in attempts[].measured.")
    ] = None


class MeasuredPhase(PhaseSeconds):
    """Measured and predicted seconds of a phase of a step."""

    predicted_seconds: Annotated[
        float, Field(gt=0, le=1e9, description="For responses of the measured length, without any correction.")
    ]


class Measured(Pace):
    """Pace of an attempt with its predictions; it corrects predictions for jobs with the same models."""

    step: Annotated[Step, Field(description="Steps finished then.")]
    models: Annotated[str, Field(description="Digest of the models' shapes and of how the mapper predicts.")] = ""
    gpus: Annotated[tuple[str, ...], Field(strict=False, max_length=8, description="Types of its GPUs.")] = ()
    phases: Annotated[
        tuple[MeasuredPhase, ...],
        Field(strict=False, max_length=4, description="Those that were measured and predicted."),
    ] = ()


class ReservedAmount(Spec):
    """Amount of one resource."""

    resource: Annotated[str, Field(description="cpu, memory, ephemeral-storage, or a device such as nvidia.com/gpu.")]
    amount: Annotated[int, Field(ge=0, description="In thousandths of CPUs, bytes, numbers of devices.")]


class Reserved(Spec):
    """Room on a node that a job holds, whether its pods are there yet or not."""

    node: Annotated[str, Field(description="The node.")]
    requests: Annotated[
        tuple[ReservedAmount, ...], Field(strict=False, max_length=32, description="Of all its pods there.")
    ]

    @property
    def amounts(self) -> Counter[str]:
        """Reserved amounts by resource."""
        return Counter({each.resource: each.amount for each in self.requests})


class Attempt(Spec):
    """One try of a job: one RayJob."""

    attempt: Annotated[int, Field(ge=1, description="Its number.")]
    start_time: Annotated[Timestamp, Field(description="When its RayJob was made (RFC 3339).")]
    end_time: Annotated[Timestamp | None, Field(description="When it ended (RFC 3339).")] = None
    slots: Annotated[int, Field(ge=1, description="GPUs or CPU slots it was given.")]
    outcome: Annotated[
        Literal["Running", "Succeeded", "Failed", "Suspended", "Remapped", "Withdrawn"],
        Field(description="How it ended, if it has; Withdrawn: others took its room before its pods had nodes."),
    ] = "Running"
    counted: Annotated[bool, Field(description="Whether its failure counts against backoffLimit.")] = False
    reason: Annotated[Reason | None, Field(description="Why it failed.")] = None
    message: Annotated[str | None, Field(description="The failure in a sentence.")] = None
    pod: Annotated[str | None, Field(description="The pod that failed.")] = None
    node: Annotated[str | None, Field(description="The node it was on.")] = None
    micro_batch_tokens: Annotated[
        int | None, Field(ge=1, description="Tokens of a micro-batch, where a device had no memory for them.")
    ] = None
    first_step: Annotated[Step | None, Field(description="Steps that were finished when it began to train.")] = None
    last_step: Annotated[Step | None, Field(description="Steps finished when it ended, as far as was heard.")] = None
    measured: Annotated[Measured | None, Field(description="What its steps took, once it had made a few.")] = None


class Status(Spec):
    """The state of one job."""

    phase: Annotated[Phase, Field(description="Where the job is in its life.")] = "Pending"
    reason: Annotated[
        str | None, Field(description="In one word why it is in that phase, such as of its last failure; on a cluster.")
    ] = None
    observed_generation: Annotated[
        int | None, Field(ge=0, description="Generation of the spec that the operator has acted on.")
    ] = None
    conditions: Annotated[
        tuple[Condition, ...], Field(strict=False, max_length=16, description="Facts about the job, one a type.")
    ] = ()
    start_time: Annotated[Timestamp | None, Field(description="When the job began (RFC 3339).")] = None
    completion_time: Annotated[Timestamp | None, Field(description="When the job ended (RFC 3339).")] = None
    active_seconds: Annotated[
        int | None, Field(ge=0, description="Time of the attempts that have ended, from RayJob to end.")
    ] = None
    attempt: Annotated[int | None, Field(ge=1, description="Number of the current attempt.")] = None
    failed_attempts: Annotated[int | None, Field(ge=0, description="Failures counted against backoffLimit.")] = None
    next_attempt_time: Annotated[Timestamp | None, Field(description="No new attempt before this time (RFC 3339).")] = (
        None
    )
    ray_job_name: Annotated[str | None, Field(description="The RayJob of the current attempt.")] = None
    head_pod: Annotated[str | None, Field(description="Its head pod: `kubectl logs POD -c driver-log`.")] = None
    queue: Annotated[str | None, Field(description="Kueue's queue, from the label of the job.")] = None
    shapes: Annotated[
        tuple[ReadShape, ...],
        Field(strict=False, max_length=16, description="Of models whose config.json a pod of the job has read."),
    ] = ()
    step: Annotated[ReadStep | None, Field(description="Of an own algorithm, as a pod of the job has read it.")] = None
    mapping: Annotated[MappedPlacement | None, Field(description="Where the models of this attempt live.")] = None
    reserved: Annotated[
        tuple[Reserved, ...],
        Field(strict=False, max_length=10000, description="The room that it holds; none in Kueue's queues."),
    ] = ()
    progress: Annotated[Progress | None, Field(description="How far the job is.")] = None
    metrics: Annotated[tuple[Metric, ...], Field(strict=False, max_length=100, description="Latest values.")] = ()
    checkpoint: Annotated[SavedState | None, Field(description="The newest whole checkpoint.")] = None
    output: Annotated[Output | None, Field(description="Set once the job has succeeded.")] = None
    last_failure: Annotated[Failure | None, Field(description="The most recent failure, if any.")] = None
    attempts: Annotated[
        tuple[Attempt, ...], Field(strict=False, max_length=10, description="The latest attempts, oldest first.")
    ] = ()

    def document(self) -> dict[str, Any]:
        """Return the status as JSON types in camelCase, without the fields that are unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
