"""Status of a job: `status.json` in a run folder, and the status of the custom resource on a cluster.

The trainer writes progress, metrics, warnings, inputs, checkpoint, output and lastFailure; the operator adds the rest.
"""

from collections import Counter
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from rlhf_api.contract import TIMESTAMP, Count, Listed, Spec, Text
from rlhf_api.names import PlacedRole, PoolRole
from rlhf_api.spec.custom_algorithm import AlgorithmFacts
from rlhf_api.spec.model_shape import Shape
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_api.spec.run_policy import Reason

DIGEST: Final = "^sha256:[0-9a-f]{64}$"
MAX_LOSSES: Final = 100
"""Most dropped fields of a spec that are told."""
StartPhase = Literal["Pending", "Mapping", "Queued", "WaitingForNodes", "Provisioning", "Initializing"]
EndPhase = Literal["Succeeded", "Failed", "Stopped"]
Phase = Literal[StartPhase, "Running", "Restarting", "Suspending", "Suspended", EndPhase]
"""Phase of a job. Stopped is for runs without an operator: a signal ended them after a checkpoint."""
StartCondition = Literal["Accepted", "InputsReady", "Mapped", "QuotaReserved", "ClusterReady"]
Readiness = Literal["Ready", "Reconciling", "Stalled"]
"""Conditions by which other tools tell a job's state: kstatus, which Flux uses, and Argo CD's health script."""
ConditionType = Literal[
    StartCondition, "Training", "Slow", "Healthy", "SandboxesReady", "Suspended", "Complete", "Failed", Readiness
]
AttemptEnd = Literal["Succeeded", "Failed", "Suspended", "Remapped", "Withdrawn", "Yielded", "Resized"]
Outcome = Literal["Starting", "Running", AttemptEnd]
Timestamp = Annotated[str, Field(pattern=TIMESTAMP)]
Step = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class Condition(Spec):
    """One fact about a job, as Kubernetes writes conditions; docs/status.md lists types and reasons."""

    type: ConditionType = Field(description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(pattern=r"^[A-Za-z]+$", description="Reason of the status, one CamelCase word.")
    message: str = Field("", description="Explanation of the status, a sentence.")
    last_transition_time: Timestamp = Field(description="Time of the last change of status (RFC 3339).")
    observed_generation: int = Field(ge=0, description="Generation of the spec that the condition is about.")


class PhaseSeconds(Spec):
    """Measured duration of one phase of a step."""

    phase: Literal["reshard", "generation", "scoring", "update"]
    """Name of the phase, as in time/<phase> of metrics.jsonl."""
    seconds: Seconds = Field(description="Seconds of the phase: median over the latest steps.")


class Pace(Spec):
    """Pace of a job: medians over the latest steps of an attempt, without its first two."""

    step_seconds: Seconds = Field(description="Median duration of a step.")
    response_tokens: float | None = Field(None, ge=0, le=1e9, description="Mean length of a response, in tokens.")
    phases: Listed[PhaseSeconds] = Field((), max_length=4)
    """Durations of the phases that predictions have, too."""


class Progress(Spec):
    """Progress of a job: steps, speed and remaining time."""

    step: Step = Field(description="Number of finished steps.")
    total_steps: Step = Field(description="Number of steps of the whole job.")
    stage: str = Field(description="Name of the job's algorithm, such as SFT or PPO.")
    step_seconds: float | None = Field(None, ge=0, description="Duration of the latest step.")
    tokens_per_second: float | None = Field(None, ge=0)
    """Prompt and response tokens per second in the latest step."""
    remaining_seconds: int | None = Field(None, ge=0)
    """Estimated time to the end, at the latest step's pace."""
    last_step_time: Timestamp | None = None
    """Time at which the latest step ended; on a cluster, at which the operator heard of it."""
    pace: Pace | None = Field(None, description="Pace of the attempt; unset in its first few steps.")


class Metric(Spec):
    """The latest value of one metric."""

    name: str = Field(description="Name of the metric in metrics.jsonl, such as reward/mean.")
    value: str = Field(description="Value as a decimal number in text, since API conventions advise against floats.")


class ReadInput(Spec):
    """Model or data set that a job reads."""

    name: str = Field(description="Field of the spec that names it, such as models.actor or data.train.")
    uri: str = Field(description="Its URI; of a job's output on a cluster pvc://claim/path.")
    job: str | None = Field(None, description="Name of the job that made it; unset for all else.")
    revision: Text | None = None
    """Commit of what the hub gave, if known, else the revision asked for."""
    digest: str | None = Field(None, pattern=DIGEST)
    """SHA-256 of its file, or of the lines that sha256sum prints for its files; known when the job has ended."""


class Output(Spec):
    """Result of a finished job."""

    uri: str = Field(description="URI of the trained model or the written data; pvc://claim/path on a cluster.")
    digest: str | None = Field(None, pattern=DIGEST, description="SHA-256 of its files, as of those that a job reads.")


class SavedState(Spec):
    """The newest whole checkpoint."""

    step: int = Field(ge=1, description="Number of finished steps in the checkpoint.")
    uri: str = Field(description="URI of the checkpoint.")
    time: Timestamp = Field(description="Time at which the checkpoint became whole (RFC 3339).")


class Failure(Spec):
    """The most recent failure."""

    reason: str = Field(description="Reason, one CamelCase word; on a cluster one of runPolicy.failureRules.reasons.")
    exit_code: int | None = Field(None, ge=0, le=255)
    """Exit code of the trainer; unset where it is unknown."""
    message: str = Field(description="Explanation of the failure, a sentence.")
    attempt: int | None = Field(None, ge=1, description="Number of the attempt that failed.")
    rule: str | None = Field(None, description="Name of the rule of runPolicy.failureRules that matched.")
    pod: str | None = Field(None, description="Name of the pod that failed.")
    node: str | None = Field(None, description="Name of the node of the failed pod.")
    time: Timestamp | None = Field(None, description="Time at which the failure was noticed (RFC 3339).")


class ReadShape(Spec):
    """Shape read from a model's config.json, once for each URI and revision."""

    uri: str = Field(description="URI of the model or, if jobs trained it, of the model that they began with.")
    revision: str | None = Field(None, description="Revision of an hf:// model.")
    shape: Shape | None = Field(None, description="Shape of the model; unset if it could not be read.")
    problem: str | None = Field(None, description="Reason why the shape could not be read.")
    weight_bytes: int | None = Field(None, ge=1, le=2**53)
    """Bytes of the model's weight files, where its shape could not be read."""


class MappedPool(Spec):
    """Slots that some models share."""

    name: str = Field(description="Name of the pool, and of its worker group.")
    models: Listed[PoolRole] = Field(description="Roles of the models in the pool.")
    nodes: int = Field(ge=1, description="Number of worker pods; the fewest of an elastic pool.")
    max_nodes: int | None = Field(None, ge=1, description="Most worker pods; set for an elastic pool only.")
    desired_nodes: int | None = Field(None, ge=1, description="Number of worker pods asked for now; unset: nodes.")
    leaving_pods: Listed[str] = Field((), max_length=1000, description="Names of pods that are to end.")
    steady_until_step: Step | None = None
    """Step up to which idle times of trainer and pool do not change the size."""
    resizing_since: Timestamp | None = None
    """Time since which the trainer has used another number of nodes than is asked for."""
    slots_per_node: int = Field(ge=1, description="Number of GPUs or CPU slots of each worker pod.")
    gpu: str | None = Field(None, description="Type of the pool's GPUs, if node labels name it.")
    zones: Listed[str] | None = None
    """Zone of each node, in the order of ranks, where a label gives it."""

    @property
    def node_count(self) -> int:
        """Number of worker pods that the operator asks for now."""
        return self.desired_nodes or self.nodes


class MappedSizes(Parallelism):
    """Parallel sizes of a model in its pool, all of them set; sizes of generation only for the model that generates."""

    role: PlacedRole = Field(description="Role of the model.")
    pipeline: Count = Field(description="Number of pipeline stages (p).")
    tensor: Count = Field(description="Number of tensor-parallel shards of a layer (t).")
    data: Count = Field(description="Number of data-parallel ranks (d).")
    generation_pipeline: int | None = Field(None, ge=1, description="Pipeline stages in generation (p_g).")
    generation_tensor: int | None = Field(None, ge=1, description="Tensor-parallel shards in generation (t_g).")
    offload: Literal["None", "Parameters", "Optimizer", "All", "OptimizerInHost"] | None = None
    """State that waits in host memory while the model is idle, as mapped; GPUs only."""
    gradient_checkpointing: bool | None = None
    """Whether layers are computed again in the backward pass, as mapped; GPUs only."""


class MappedPlacement(Spec):
    """Placement that the mapper chose for the current attempt; the trainer gets it as a Manual placement."""

    input_hash: str
    """Digest of the mapper's inputs besides the nodes: the spec and its models."""
    device: Literal["CPU", "GPU"] = Field(description="Whether slots are GPUs or CPU slots.")
    slots: int = Field(ge=1, description="Number of GPUs or CPU slots of all pools.")
    gpus: int = Field(0, ge=0, description="Number of GPUs of all pools; 0 where slots are CPU slots.")
    pools: Listed[MappedPool] = Field(min_length=1, description="Pools of slots with their models.")
    sizes: Listed[MappedSizes] = Field(description="Parallel sizes of each model.")
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for generation, as mapped."""
    micro_batch_tokens: int | None = Field(None, ge=1, description="Most tokens of one forward pass, as mapped.")
    gradient_compression: Literal["TopK"] | None = None
    """TopK if spec.training.gradientCompression is Auto, and the link between replicas is thin."""
    price_per_hour: float | None = Field(None, ge=0)
    """Price of all GPUs for an hour, in the currency of the chart's prices; unset if a GPU type has no price."""
    predicted_step_seconds: float | None = Field(None, gt=0)
    """Predicted duration of a step; unset if shapes are unknown."""
    predicted_step_seconds_low: float | None = Field(None, gt=0)
    """Lower end of the interval of predictedStepSeconds."""
    predicted_step_seconds_high: float | None = Field(None, gt=0)
    """Upper end of the interval of predictedStepSeconds."""
    measured_step_seconds: Seconds | None = None
    """Median duration of the latest steps; attempts[].measured has it by phase."""

    @property
    def elastic_pool(self) -> MappedPool | None:
        """The pool that may grow and shrink; only the rollout's pool may be one."""
        return next((pool for pool in self.pools if pool.max_nodes), None)

    def resized(self, **changes: Any) -> Self:
        """Return the placement with these fields of the elastic pool changed."""
        pools = tuple(each.model_copy(update=changes) if each.max_nodes else each for each in self.pools)
        return self.model_copy(update={"pools": pools})

    def at_start(self) -> Self:
        """Return the placement with which an attempt begins: an elastic pool has its fewest nodes."""
        return self.resized(desired_nodes=None, leaving_pods=(), steady_until_step=None, resizing_since=None)

    @property
    def nodes(self) -> int:
        """Number of worker pods of all pools."""
        return sum(pool.nodes for pool in self.pools)


class MeasuredPhase(PhaseSeconds):
    """Measured and predicted seconds of a phase of a step."""

    predicted_seconds: float = Field(gt=0, le=1e9)
    """Predicted seconds of the phase in a step with responses of the measured length, without any correction."""


class Measured(Pace):
    """Pace of an attempt beside its predictions; it corrects later predictions for jobs with the same models."""

    step: Step = Field(description="Number of steps finished at the measurement.")
    models: str = Field("", description="Digest of the models' shapes and of how the mapper predicts.")
    gpus: Listed[str] = Field((), max_length=8, description="Types of the attempt's GPUs.")
    phases: Listed[MeasuredPhase] = Field((), max_length=4, description="Phases that were both measured and predicted.")


class ReservedAmount(Spec):
    """Amount of one resource."""

    resource: str = Field(description="Resource: cpu, memory, ephemeral-storage or a device such as nvidia.com/gpu.")
    amount: int = Field(ge=0, description="Amount: thousandths of CPUs, bytes, or number of devices.")


class Reserved(Spec):
    """Room on a node that a job holds, whether its pods are there yet or not."""

    node: str = Field(description="Name of the node; GROUP/NUMBER for one that its group is to add.")
    requests: Listed[ReservedAmount] = Field(max_length=32, description="Requests of the job's pods on the node.")
    extra: bool = Field(False, description="Whether pods of an elastic pool beyond its fewest nodes hold it.")

    @property
    def amounts(self) -> Counter[str]:
        """Reserved amounts by resource."""
        return Counter({each.resource: each.amount for each in self.requests})


class Attempt(Spec):
    """One try of a job: one RayJob."""

    attempt: int = Field(ge=1, description="Number of the attempt, from 1.")
    start_time: Timestamp = Field(description="Time at which the attempt's RayJob was created (RFC 3339).")
    end_time: Timestamp | None = Field(None, description="Time at which the attempt ended (RFC 3339).")
    slots: int = Field(ge=1, description="Number of GPUs or CPU slots of the attempt.")
    outcome: Outcome = "Running"
    """How the attempt ended, if it has. Starting: its RayJob is not made yet. Withdrawn: its pods found no nodes, or no
    quota. Yielded: it gave its room to a job before it in line. Resized: the next one has more or fewer nodes.
    """
    backfilled: bool = Field(False, description="Whether the attempt began before the turn of its job in line.")
    counted: bool = Field(False, description="Whether the attempt's failure counts against backoffLimit.")
    reason: Reason | None = Field(None, description="Reason of the attempt's failure.")
    message: str | None = Field(None, description="Explanation of the failure, a sentence.")
    pod: str | None = Field(None, description="Name of the pod that failed.")
    node: str | None = None
    """Name of the node of the failed pod, or of the node that a group did not add (GROUP/NUMBER)."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens of a micro-batch that was too large for a device's memory; unset if this was not the failure."""
    first_step: Step | None = Field(None, description="Number of finished steps when the attempt began to train.")
    last_step: Step | None = Field(None, description="Number of finished steps at the attempt's end, as last reported.")
    measured: Measured | None = Field(None, description="Pace of the attempt's steps; unset in its first few steps.")


class Status(Spec):
    """Status of a job: content of status.json, and `status` of the RLHFJob on a cluster."""

    phase: Phase = Field("Pending", description="Phase of the job.")
    reason: str | None = None
    """Reason of the phase in one word, such as that of the last failure; set on a cluster only."""
    observed_generation: int | None = Field(None, ge=-1)
    """Generation of the spec that the operator has acted on; -1 before its first pass."""
    accepted_losses: Listed[str] = Field((), max_length=MAX_LOSSES)
    """Paths of fields that an upgrade has dropped from the spec, and without which its editor lets the job go on."""
    conditions: Listed[Condition] = Field((), max_length=16, description="Conditions of the job, one of each type.")
    start_time: Timestamp | None = Field(None, description="Time at which the job began (RFC 3339).")
    completion_time: Timestamp | None = Field(None, description="Time at which the job ended (RFC 3339).")
    active_seconds: int | None = Field(None, ge=0)
    """Seconds for which the ended attempts have had their slots; time in a queue does not count."""
    attempt: int | None = Field(None, ge=1, description="Number of the current attempt.")
    failed_attempts: int | None = Field(None, ge=0, description="Number of failures counted against backoffLimit.")
    next_attempt_time: Timestamp | None = Field(None, description="Earliest time of the next attempt (RFC 3339).")
    ray_job_name: str | None = Field(None, description="Name of the current attempt's RayJob.")
    head_pod: str | None = None
    """Head pod of the current attempt; `kubectl logs POD -c driver-log` shows its log."""
    image: str | None = Field(None, description="Image of the current attempt's pods.")
    image_pull_secrets: Listed[str] = Field((), max_length=16, description="Names of the Secrets for that image.")
    queue: str | None = Field(None, description="Kueue's queue of the job, from the job's label.")
    shapes: Listed[ReadShape] = Field((), max_length=16)
    """Shapes of the models whose config.json a pod of the job has read."""
    step: AlgorithmFacts | None = None
    """Properties of a user's own algorithm, as a pod of the job has read them."""
    mapping: MappedPlacement | None = Field(None, description="Placement of the models in the current attempt.")
    reserved: Listed[Reserved] = Field((), max_length=10000)
    """Room on nodes that the job holds; none for a job in one of Kueue's queues."""
    progress: Progress | None = Field(None, description="Progress of the job.")
    metrics: Listed[Metric] = Field((), max_length=100, description="Latest values of metrics.")
    links: Listed[Metric] = Field((), max_length=64)
    """Seconds of each trained model's slowest rank before the first step: a product, an all-reduce and a gather."""
    warnings: Listed[str] = Field((), max_length=8, description="Latest warnings of the steps, oldest first.")
    inputs: Listed[ReadInput] = Field((), max_length=100)
    """Models and data sets that the job reads, as they were when its attempt began."""
    causes: Listed[str] = Field((), max_length=16, description="Causes found, as `NAME at step N: sentences`.")
    paused_generation: int | None = Field(None, ge=0, description="Generation that the trainer paused.")
    checkpoint: SavedState | None = Field(None, description="The newest whole checkpoint.")
    output: Output | None = Field(None, description="Result of the job; set once it has succeeded.")
    last_failure: Failure | None = Field(None, description="The most recent failure, if any.")
    attempts: Listed[Attempt] = Field((), max_length=10, description="The latest attempts, oldest first.")

    @property
    def measures(self) -> dict[str, float]:
        """Values of `metrics` by name; a text that is no number is left out, as other programs may write a status."""
        found = dict[str, float]()
        for each in self.metrics:
            with suppress(ValueError):
                found[each.name] = float(each.value)
        return found

    def document(self) -> dict[str, Any]:
        """Return the status as JSON types in camelCase, without the fields that are unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
