"""Policy for failures, deadlines and deletion of a job; only the operator reads it."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import WHOLE, Count, Name, Spec, Text, Whole

Reason = Literal[
    "UserCode",
    "Data",
    "Spec",
    "Environment",
    "OutOfMemory",
    "Numerics",
    "Communication",
    "NodeLost",
    "Preempted",
    "Evicted",
    "ImagePull",
    "HeadLost",
    "WorkerLost",
    "Hang",
    "StartupTimeout",
    "SecretMissing",
    "ClaimMissing",
    "PodsRefused",
    "Internal",
    "Unknown",
]
"""Reason of an attempt's failure; docs/jobs.md says of each what it means and what to do."""

Action = Literal["Restart", "Remap", "Ignore", "Fail"]
"""Action after a failure. Restart: a new attempt that counts against backoffLimit, mapped as before if there is
room. Remap: the same with a new mapping, on the nodes of that time. Ignore: as Restart, not counted. Fail: no more."""


class FailureRule(Spec):
    """Action for the failures that meet all conditions of a rule."""

    name: Annotated[Name, Field(description="Name of the rule, shown in status.lastFailure.rule.")]
    action: Annotated[
        Action,
        Field(
            description="Restart: a new attempt, counted by backoffLimit, mapped as before as long as the nodes have "
            "room. Remap: the same with a new mapping. Ignore: as Restart, not counted. Fail: the job has failed."
        ),
    ]
    reasons: Annotated[
        tuple[Reason, ...], Field(strict=False, max_length=32, description="Reasons of the failure; none means any.")
    ] = ()
    exit_codes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=255), WHOLE], ...],
        Field(strict=False, max_length=64, description="Exit codes of the trainer; none means any."),
    ] = ()
    message_contains: Annotated[Text | None, Field(description="Text that the failure's message contains.")] = None


class RunPolicy(Spec):
    """How often, how long and for which failures a job is tried; for jobs on a cluster."""

    backoff_limit: Annotated[Whole, Field(description="Failures that lead to another attempt.")] = 3
    restart_backoff_seconds: Annotated[
        Whole, Field(description="Pause before a second attempt; it doubles with each failure, up to five minutes.")
    ] = 10
    active_deadline_seconds: Annotated[
        Count | None, Field(description="Longest time of all attempts together, pauses and queueing not counted.")
    ] = None
    queue_deadline_seconds: Annotated[
        Count | None, Field(description="Longest time that the job waits for room; unset waits as long as it takes.")
    ] = None
    startup_deadline_seconds: Annotated[
        Count, Field(description="Longest time from all pods of an attempt having nodes to the first sign of life.")
    ] = 1800
    progress_deadline_seconds: Annotated[
        Count, Field(description="Longest time between two steps of a running attempt; it is then stopped as hung.")
    ] = 3600
    ttl_seconds_after_finished: Annotated[
        Whole | None, Field(description="The job is deleted so long after it has ended; unset keeps it.")
    ] = None
    keep_pods_on_failure: Annotated[
        bool,
        Field(
            description="Leave the pods of the attempt with which the job fails, for debugging; they hold their slots "
            "until this is false or the job is deleted."
        ),
    ] = False
    failure_rules: Annotated[
        tuple[FailureRule, ...],
        Field(
            strict=False,
            max_length=32,
            description="The first rule that matches a failure decides; without one, its reason does.",
        ),
    ] = ()


class Storage(Spec):
    """Retention of the claim that was made for a job."""

    retain: Annotated[
        Literal["Always", "OnFailure", "Never"],
        Field(
            description="Whether the claim stays, with model and checkpoints, when the job is deleted. OnFailure: "
            "unless the job has succeeded. A claim that checkpoint.storage names always stays."
        ),
    ] = "Always"
