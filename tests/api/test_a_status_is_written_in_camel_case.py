"""A status is the document that the custom resource and `status.json` hold."""

import pytest
from pydantic import ValidationError

from rlhf_api.exit_codes import ExitCode
from rlhf_api.status import Failure, Metric, Output, Progress, Status

STATUS = Status(
    phase="Failed",
    start_time="2026-01-31T12:00:00Z",
    progress=Progress(step=3, total_steps=10, stage="generation"),
    metrics=(Metric(name="reward/mean", value="0.5"),),
    output=Output(uri="file:///runs/model"),
    last_failure=Failure(reason="OutOfMemory", exit_code=ExitCode.OUT_OF_MEMORY, message="The actor did not fit."),
)
DOCUMENT = {
    "phase": "Failed",
    "startTime": "2026-01-31T12:00:00Z",
    "progress": {"step": 3, "totalSteps": 10, "stage": "generation"},
    "conditions": [],
    "attempts": [],
    "shapes": [],
    "reserved": [],
    "imagePullSecrets": [],
    "acceptedLosses": [],
    "warnings": [],
    "causes": [],
    "inputs": [],
    "links": [],
    "metrics": [{"name": "reward/mean", "value": "0.5"}],
    "output": {"uri": "file:///runs/model"},
    "lastFailure": {"reason": "OutOfMemory", "exitCode": 5, "message": "The actor did not fit."},
}


def test_a_status_is_written_in_camel_case_without_what_is_unset() -> None:
    assert STATUS.document() == DOCUMENT
    empty = (
        "links",
        "metrics",
        "warnings",
        "causes",
        "inputs",
        "conditions",
        "attempts",
        "shapes",
        "reserved",
        "imagePullSecrets",
        "acceptedLosses",
    )
    assert Status().document() == {"phase": "Pending", **{name: [] for name in empty}}


def test_a_status_is_read_back() -> None:
    assert Status.model_validate(DOCUMENT) == STATUS


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError):
        Status(start_time="2026-01-31T12:00:00")


def test_the_exit_codes_are_those_of_the_interface() -> None:
    assert [code.value for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 130, 143]
