"""Watch by the rules of `why`: the job so far is diagnosed every few steps, and each cause is told once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_trainer.run_folder.folder import METRICS
from rlhf_trainer.run_folder.repeated import by_step
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, latest_rollouts
from rlhf_trainer.telemetry import StepReport
from rlhf_trainer.why.diagnosis import causes_of
from rlhf_trainer.why.seen import Seen

LOOK_STEPS = 5
"""Steps between two looks."""


class CauseWatch:
    """Watch of one job by its folder, which `spec.watch.causes` turns off."""

    def __init__(self) -> None:
        self.found: dict[str, str] | None = None
        """Causes so far, each with `NAME at step N: sentences`; None before the first step of this attempt."""

    def look(self, report: StepReport, job: Job, folder: Path) -> tuple[StepReport, Sequence[str]]:
        """Return the report with warnings of new causes and a metric `cause/<cause>` for each; and the warnings.

        Causes that the steps of earlier attempts show already are not new. folder: of the job.
        """
        if job.spec.watch.causes == "Off":
            return report, ()
        step, new = int(report.record["step"]), dict[str, str]()
        if self.found is None:
            self.found = _causes(job, folder, step - 1)
        if step % LOOK_STEPS == 0:
            now = _causes(job, folder, step, report)
            new = {cause: text for cause, text in now.items() if cause not in self.found}
            self.found |= new
        record = {**report.record, **{f"cause/{cause}": 1.0 for cause in self.found}}
        warnings = [text.partition(": ")[2] for text in new.values()]
        return replace(report, record=record, warnings=[*report.warnings, *warnings]), warnings


def _causes(job: Job, folder: Path, step: int, *latest: StepReport) -> dict[str, str]:
    """Return all causes that a job shows after a step, by its folder's files and the report of that step."""
    earlier = [each for number, each in sorted(by_step(folder / METRICS).items()) if number < step]
    records, rows = [*earlier, *(each.record for each in latest)], latest_rollouts(folder / ROLLOUTS)
    found = causes_of(job.name, Seen(document_of(job)["spec"], records, rows))
    return {each.cause: f"{each.cause} at step {step}: {each.warning()}" for each in found}
