"""A test's own process as one of an attempt."""

from pathlib import Path

import pytest

from rlhf_trainer.run_folder.attempt import JOB_UID_VARIABLE, VARIABLE
from rlhf_trainer.run_folder.lock import only_run_in


class Become:
    """Makes this process one of an attempt of an RLHFJob."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __call__(self, number: object, job_uid: str = "") -> None:
        self._patch.setenv(VARIABLE, str(number))
        self._patch.setenv(JOB_UID_VARIABLE, job_uid)


def begin(output: Path, attempt: Become, number: object, job_uid: str = "") -> None:
    """The trainer of an attempt begins in a run folder, and ends."""
    attempt(number, job_uid)
    with only_run_in(output):
        pass
