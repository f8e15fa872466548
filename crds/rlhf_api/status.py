"""What a job reports about itself: `status.json` on a laptop, the status of the custom resource on a cluster."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_api.contract import TIMESTAMP, Spec
from rlhf_api.exit_codes import ExitCode

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Stopped"]
Timestamp = Annotated[str, Field(pattern=TIMESTAMP)]


class Progress(Spec):
    """How far a job is."""

    step: Annotated[int, Field(ge=0, description="Steps finished.")]
    total_steps: Annotated[int, Field(ge=0, description="Steps of the whole job.")]
    stage: Annotated[str, Field(description="What the job runs, such as SFT or PPO.")]


class Metric(Spec):
    """The latest value of one metric."""

    name: Annotated[str, Field(description="Name as in metrics.jsonl, such as reward/mean.")]
    value: Annotated[str, Field(description="Decimal number as text; API conventions advise against floats.")]


class Output(Spec):
    """What a finished job leaves behind."""

    uri: Annotated[str, Field(description="Where the trained model is.")]


class SavedState(Spec):
    """The newest whole checkpoint."""

    step: Annotated[int, Field(ge=1, description="Steps finished when it was made.")]
    uri: Annotated[str, Field(description="Where it is.")]
    time: Annotated[Timestamp, Field(description="When it became whole (RFC 3339).")]


class Failure(Spec):
    """The most recent failure."""

    reason: Annotated[str, Field(description="One CamelCase word.")]
    exit_code: Annotated[ExitCode, Field(strict=False, description="Exit code of the trainer.")]
    message: Annotated[str, Field(description="A sentence for a person.")]


class Status(Spec):
    """The state of one job."""

    phase: Annotated[Phase, Field(description="Where the job is in its life.")] = "Pending"
    start_time: Annotated[Timestamp | None, Field(description="When the job began (RFC 3339).")] = None
    completion_time: Annotated[Timestamp | None, Field(description="When the job ended (RFC 3339).")] = None
    progress: Annotated[Progress | None, Field(description="How far the job is.")] = None
    metrics: Annotated[tuple[Metric, ...], Field(strict=False, description="Latest values.")] = ()
    checkpoint: Annotated[SavedState | None, Field(description="The newest whole checkpoint.")] = None
    output: Annotated[Output | None, Field(description="Set once the job has succeeded.")] = None
    last_failure: Annotated[Failure | None, Field(description="The most recent failure, if any.")] = None

    def document(self) -> dict[str, Any]:
        """This status as JSON types in camelCase, without the fields that are unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
