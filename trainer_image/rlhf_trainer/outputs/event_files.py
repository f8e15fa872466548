"""TensorBoard event files: a folder a job, with every metric of metrics.jsonl as a scalar."""

import shutil
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.telemetry import StepReport


class EventFiles:
    """Listener of a run's steps that writes `FOLDER/<job>/events.out.tfevents.*`, in a thread of TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 a scalar has no end
        """Delete the files of a job that starts anew; a resumed job adds to its files and purges repeated steps."""
        folder = self._folder / job.name
        if first_step == 1:
            shutil.rmtree(folder, ignore_errors=True)
        resumed_at = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder), purge_step=resumed_at, flush_secs=10)

    def step(self, report: StepReport) -> None:
        assert self._writer, "begin comes first"
        for name, value in report.record.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(report.record["step"]))

    def end(self, phase: Phase) -> None:  # noqa: ARG002 the curves show it
        if self._writer:
            self._writer.close()
        self._writer = None
