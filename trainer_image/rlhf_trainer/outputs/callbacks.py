"""Callbacks: classes of a user that receive the steps of a job as trackers do."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_api.spec.functions import EntryPoint
from rlhf_api.status import Phase
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.own_code import own_code
from rlhf_trainer.run_folder.folder import read_summary

METHODS = ("step", "close")


class Callback:
    """Tracking service that calls a user's object: step(record) for each line of metrics.jsonl, then close(summary)."""

    def __init__(self, field: str, entry: EntryPoint, folder: Path) -> None:
        self.field, self._entry, self._folder = field, entry, folder
        self.target: Mapping[str, Any] = entry.model_dump(mode="json")
        self._object: Any = None
        self._last_step = 0.0

    def check(self) -> None:
        """Raise UserCodeError if the class is missing, lacks a method or refuses the arguments; no object is made."""
        with own_code(self._entry.entrypoint, self.field) as found:
            if lacking := [name for name in METHODS if not callable(getattr(found, name, None))]:
                raise UserCodeError(f"{self.field}: {self._entry.entrypoint} has no method {lacking[0]}")
            signature = inspect.signature(found)
        try:
            signature.bind(**self._entry.arguments)
        except TypeError as error:
            raise UserCodeError(f"{self.field}.arguments: {self._entry.entrypoint}: {error}") from error

    def create(self, job: Job) -> str:
        return job.name

    def go_on(self, job: Job, run: str) -> None:  # noqa: ARG002 callback objects get neither job nor run
        with own_code(self._entry.entrypoint, self.field) as found:
            self._object = found(**self._entry.arguments)

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        """Call the user's `step` once for each record, also if a failed batch of records is sent again."""
        with own_code(self._entry.entrypoint, self.field):
            for record in (each for each in records if each["step"] > self._last_step):
                self._object.step(dict(record))
                self._last_step = record["step"]

    def close(self, phase: Phase) -> None:
        """Call the user's `close` with the job's phase and, if the job succeeded, the job's entry in summary.json."""
        measured = read_summary(self._folder.parent).get(self._folder.name, {}) if phase == "Succeeded" else {}
        with own_code(self._entry.entrypoint, self.field):
            self._object.close({**measured, "phase": phase})
