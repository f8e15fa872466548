"""Publisher of a run: every sentence and every step goes to the terminal, the run folder and the outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.spec.watch import react
from rlhf_trainer.errors import TrainerError, phase_after, reason_of, user_error
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import Listener, ListenersOf
from rlhf_trainer.run.job_run import Reporter
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.folder import METRICS, JobFolder, writing
from rlhf_trainer.run_folder.repeated import by_step
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, latest_rollouts
from rlhf_trainer.telemetry import StepReport
from rlhf_trainer.why.diagnosis import causes_of
from rlhf_trainer.why.seen import Seen

LOOK_STEPS = 5
"""Steps between two searches for causes by the rules of `why`."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Run folder, outputs and stop signals that the jobs of a run share."""

    output: Path
    display: Display
    listeners_of: ListenersOf
    stop: StopSignals


class Publisher(Reporter):
    """Publisher of one job's sentences and steps, to its folder, the terminal and the run's outputs."""

    def __init__(
        self,
        job: Job,
        folder: JobFolder,
        display: Display,
        listeners_of: ListenersOf = lambda _: [],
        *,
        pause: Callable[[str], None] = lambda _: None,
    ) -> None:
        """pause: has the run pause after the step, for the reason in the given sentence."""
        self.folder = folder
        self._pause = pause
        self._causes: dict[str, str] | None = None
        """Causes reported so far, each with `NAME at step N: sentences`; None before the first step of this attempt."""
        self._job, self._display = job, display
        self._listeners: list[Listener] = [display]
        self._listeners_of = listeners_of
        self._total_steps = 0

    def say(self, *messages: str) -> None:
        """Write a line for each message to the terminal and events.log."""
        for message in messages:
            self.folder.event(message)
            self._display.say(f"{self._job.name}: {message}")

    def warn(self, *messages: str) -> None:
        """Write a line for each message to the terminal and events.log, and the message to the job's status."""
        for message in messages:
            self.folder.warn(message)
            self._display.warn(f"{self._job.name} {message}")

    def begin(self, *, first_step: int, total_steps: int) -> None:
        """Tell the listeners that the first step of this run starts now."""
        self._total_steps = total_steps
        self._listeners += self._listeners_of(self._job)
        for listener in self._listeners:
            listener.begin(self._job, first_step=first_step, total_steps=total_steps)

    def step(self, report: StepReport) -> None:
        """Write the record and the warnings of a finished step, and give the report to the listeners."""
        report, new = self._look(report)
        self.warn(*(f"step {report.record['step']:.0f}: {warning}" for warning in report.warnings))
        stage = self._job.spec.algorithm.name
        self.folder.record(report.record, total_steps=self._total_steps, stage=stage, ranks=report.ranks)
        with writing(self.folder.path):
            for listener in self._listeners:
                listener.step(report)
        if new:
            self._react(new)

    def _look(self, report: StepReport) -> tuple[StepReport, Mapping[str, str]]:
        """Return (report with warnings of new causes and a metric `cause/<cause>` for each, new cause -> warning).

        Causes that earlier attempts have reported are not new. `spec.watch.causes: Off` turns the search off.
        """
        if self._job.spec.watch.causes == "Off":
            return report, {}
        step = int(report.record["step"])
        if self._causes is None:
            self._causes = self._told(step - 1)
            self.folder.note(causes=tuple(self._causes.values()))
        found = self._causes_after(step, report) if step % LOOK_STEPS == 0 else {}
        new = {cause: text.partition(": ")[2] for cause, text in found.items() if cause not in self._causes}
        self._causes |= {cause: found[cause] for cause in new}
        record = {**report.record, **{f"cause/{cause}": 1.0 for cause in self._causes}}
        return replace(report, record=record, warnings=[*report.warnings, *new.values()]), new

    def _told(self, last: int) -> dict[str, str]:
        """Return the causes that earlier attempts have reported up to the step `last`, read from metrics.jsonl."""
        steps = sorted(by_step(self.folder.path / METRICS).items(), reverse=True)
        first = {name: at for at, record in steps if at <= last for name in record if name.startswith("cause/")}
        names = [(name.removeprefix("cause/"), at) for name, at in sorted(first.items(), key=lambda each: each[1])]
        return {name: self._causes_after(at).get(name, f"{name} at step {at}") for name, at in names}

    def _causes_after(self, step: int, *latest: StepReport) -> dict[str, str]:
        """Return all causes that the job shows after a step, by its folder's files and the report of that step."""
        path = self.folder.path
        made = by_step(path / METRICS) | {int(each.record["step"]): each.record for each in latest}
        records, rows = [made[at] for at in sorted(made) if at <= step], latest_rollouts(path / ROLLOUTS)
        found = causes_of(self._job.name, Seen(document_of(self._job)["spec"], records, rows))
        return {each.cause: f"{each.cause} at step {step}: {each.warning()}" for each in found}

    def _react(self, new: Mapping[str, str]) -> None:
        """Write the causes to the status, and warn or pause by `spec.watch.causes`; SpecError if that is Fail."""
        self.folder.note(causes=tuple((self._causes or {}).values()))
        reaction = self._job.spec.watch.causes
        react(reaction, f"{self._job.name}: spec.watch.causes", [*new.values()])
        if reaction == "Pause":
            self._pause(f"{self._job.name}: paused by spec.watch.causes ({', '.join(new)})")

    def write_held_out(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.folder.write_held_out(rows)

    @contextmanager
    def recording_the_end(self) -> Iterator[None]:
        """Set the job's status when the block ends: Succeeded, or the reason of its failure."""
        try:
            yield
        except BaseException as error:
            shown, is_interrupt = user_error(error), isinstance(error, KeyboardInterrupt)
            code = ExitCode(getattr(shown, "exit_code", ExitCode.SIGINT if is_interrupt else ExitCode.INTERNAL))
            reason = reason_of(code)
            host = shown.host if isinstance(shown, TrainerError) else ""
            self.folder.fail(reason=reason, exit_code=code, message=str(shown) or type(shown).__name__, host=host)
            phase = phase_after(reason)
            for listener in self._listeners:
                with suppress(Exception):  # a listener's error must not hide why the job ended
                    listener.end(phase)
            raise
        self.folder.succeed()
        for listener in self._listeners:
            listener.end("Succeeded")
