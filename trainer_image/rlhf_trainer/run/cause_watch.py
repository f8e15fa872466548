"""Watch by the rules of `why`: the job so far is diagnosed every few steps, and each cause is told once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_api import kubectl_yaml
from rlhf_trainer.run_folder.folder import JOB_FILE, METRICS
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, parse_row
from rlhf_trainer.telemetry import StepReport
from rlhf_trainer.why.diagnosis import SIGNALS, causes_of
from rlhf_trainer.why.seen import Row, Seen

LOOK_STEPS = 5
MAX_ROWS = 2000
"""Most kept responses, the latest, that a look reads."""


class FoundCause(NamedTuple):
    """Cause, and the step at which it was found."""

    cause: str
    step: int
    message: str

    def __str__(self) -> str:
        return f"{self.cause} at step {self.step}: {self.message}"


class CauseWatch:
    """Watch of one job, which `spec.watch.causes` turns off."""

    def __init__(self) -> None:
        self._spec: Mapping[str, Any] | None = None
        self._records: list[Mapping[str, float]] = []
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._read_bytes = 0
        self.found: list[FoundCause] = []

    def look(self, report: StepReport, folder: Path) -> tuple[StepReport, Sequence[FoundCause]]:
        """Return the report with a warning for each new cause and with the metric `cause/<cause>`; and the new causes.

        folder: of the job, with job.yaml and, where there are some, metrics.jsonl and rollouts.jsonl. Causes that the
        steps before a resume show already are known, not new.
        """
        step = int(report.record["step"])
        if self._spec is None:
            self._spec = _spec_in(folder)
            self._records = _earlier_records(folder, step)
            self.found = self._causes(step - 1, folder)
        if (self._spec.get("watch") or {}).get("causes", "Off") == "Off":
            return report, ()
        self._records.append(_kept(report.record))
        known = {each.cause for each in self.found}
        new = [each for each in self._causes(step, folder) if each.cause not in known] if step % LOOK_STEPS == 0 else []
        self.found += new
        record = {**report.record, **{f"cause/{each.cause}": 1.0 for each in self.found}}
        return replace(report, record=record, warnings=[*report.warnings, *(each.message for each in new)]), new

    def _causes(self, step: int, folder: Path) -> list[FoundCause]:
        """Return all causes that the job shows at this step."""
        self._read_rows(folder / ROLLOUTS)
        found = causes_of(folder.name, Seen(self._spec or {}, self._records, [*self._rows]))
        return [FoundCause(cause=each.cause, step=step, message=each.sentence()) for each in found]

    def _read_rows(self, file: Path) -> None:
        """Read the whole lines that rollouts.jsonl has gained."""
        if not file.is_file():
            return
        with file.open("rb") as lines:
            lines.seek(self._read_bytes)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                if row := parse_row(line):
                    self._rows.append(row)


def _spec_in(folder: Path) -> Mapping[str, Any]:
    file = folder / JOB_FILE
    documents = kubectl_yaml.read(file.read_text(encoding="utf-8"), "") if file.is_file() else [{}]
    spec: Mapping[str, Any] = documents[0].get("spec", {})
    return spec


def _earlier_records(folder: Path, step: int) -> list[Mapping[str, float]]:
    file = folder / METRICS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [_kept(record) for record in map(json.loads, lines) if record["step"] < step]


def _kept(record: Mapping[str, float]) -> Mapping[str, float]:
    """Return what the rules read of a step's record."""
    return {
        name: value
        for name, value in record.items()
        if name == "step" or name in SIGNALS or name.startswith("evaluation/")
    }
