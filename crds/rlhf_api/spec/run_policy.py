"""Policy for failures, deadlines and deletion of a job; only the operator reads it."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import WHOLE, Count, Listed, Name, Spec, Text, Whole
from rlhf_api.spec.deadlines import STEP_SECONDS

ExitReason = Literal["UserCode", "Data", "Spec", "Environment", "OutOfMemory", "Numerics", "Communication"]
PodReason = Literal["NodeLost", "Preempted", "Evicted", "OutOfStorage", "ImagePull", "HeadLost", "WorkerLost"]
StartReason = Literal["SecretMissing", "ClaimMissing", "ContainerRefused", "PodsRefused", "QuotaTooSmall"]
Reason = Literal[ExitReason, PodReason, "Hang", "StartupTimeout", StartReason, "Internal", "Unknown"]
"""Reason of an attempt's failure; docs/status.md says of each what it means and what to do."""

Action = Literal["Restart", "Remap", "Ignore", "Fail"]
"""Action after a failure; docs/status.md says what follows each."""


class FailureRule(Spec):
    """Action for the failures that meet all conditions of a rule."""

    name: Name = Field(description="Name of the rule, shown in status.lastFailure.rule.")
    action: Action
    """Restart: a new attempt, counted by backoffLimit, mapped as before as long as the nodes have room. Remap: the same
    with a new mapping. Ignore: as Restart, not counted. Fail: the job has failed.
    """
    reasons: Listed[Reason] = Field((), max_length=32, description="Reasons of failure that match; empty means any.")
    exit_codes: Listed[Annotated[int, Field(ge=1, le=255), WHOLE]] = Field((), max_length=64)
    """Exit codes of the trainer; none means any."""
    message_contains: Text | None = Field(None, description="Text that the failure's message must contain.")


class RunPolicy(Spec):
    """How often, how long and for which failures a job is tried; for jobs on a cluster."""

    backoff_limit: Whole = Field(3, description="Number of failures that lead to new attempts; one more fails the job.")
    restart_backoff_seconds: Whole = 10
    """Pause before a second attempt; it doubles with each failure, up to five minutes."""
    active_deadline_seconds: Count | None = None
    """Longest time of all attempts together, pauses and queueing not counted."""
    queue_deadline_seconds: Count | None = None
    """Longest time that the job waits for room; unset waits as long as it takes."""
    startup_deadline_seconds: Count = 1800
    """Longest time from the moment when all pods of an attempt have nodes to the first sign of training."""
    progress_deadline_seconds: Count | None = None
    """Longest time between two steps of a running attempt; it is then stopped as hung. Unset is 3,600 s. If steps are
    predicted and nothing is evaluated between them, unset means less from the second step on: ten times the seconds of
    a step (at least 300), plus the deadline of a call.
    """
    ttl_seconds_after_finished: Whole | None = None
    """Time after which an ended job is deleted; unset keeps the job."""
    keep_pods_on_failure: bool = False
    """Leave the pods of the attempt with which the job fails, for debugging. They hold their slots until this is false
    or the job is deleted.
    """
    failure_rules: Listed[FailureRule] = Field((), max_length=32)
    """Rules for failures: the first that matches decides; if none matches, the failure's reason decides."""

    @property
    def progress_deadline(self) -> int:
        """Deadline in seconds between two steps if their time is not known, or evaluation may come between."""
        return self.progress_deadline_seconds or STEP_SECONDS[1]


class Storage(Spec):
    """Retention of the PersistentVolumeClaim that the operator made for a job."""

    retain: Literal["Always", "OnFailure", "Never"] = "Always"
    """Whether the claim stays, with model and checkpoints, when the job is deleted. OnFailure: unless the job has
    succeeded. A claim that checkpoint.storage names always stays.
    """
