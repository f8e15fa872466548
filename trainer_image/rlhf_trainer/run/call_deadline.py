"""Longest time in which no call of a step ends, by the seconds of the job's steps where the user has set none."""

from rlhf_api.job import Job
from rlhf_api.spec.deadlines import CALL_SECONDS, STEPS, deadline_by
from rlhf_api.spec.job_spec import Model
from rlhf_trainer.workers.scoring import limits_of, terms_of


class CallDeadline:
    """Deadline of the calls of steps; other calls (loading, evaluation, checkpoints) have that of `training`."""

    def __init__(self, job: Job, predicted: float | None) -> None:
        """predicted: seconds of a step; None: they are not known, and neither is the deadline of its calls."""
        training = job.spec.training
        self.seconds = float(training.call_deadline)
        """Deadline of the next step's calls."""
        codes = [term.reward for term in terms_of(job).values() if not isinstance(term.reward, Model)]
        self._least = max([float(CALL_SECONDS[0]), *(2 * limits_of(code) for code in codes)])
        self._longest = predicted or 0.0
        self.is_derived = bool(predicted) and training.call_deadline_seconds is None and not job.spec.rollout.has_turns

    def __str__(self) -> str:
        """Return the rule as a sentence for the start of a run."""
        after = f"after the first step that is {self._after(0.0):.0f} s or {STEPS} times the longest step"
        return f"a call may take {self.seconds:.0f} s (training.callDeadlineSeconds is not set); {after}"

    def note_step(self, seconds: float) -> None:
        """Note the seconds of a step; the first one, which may compile and load, had the longest deadline."""
        if self.is_derived:
            self.seconds = self._after(seconds)

    def _after(self, seconds: float) -> float:
        self._longest = max(self._longest, seconds)
        return max(self._least, float(deadline_by(self._longest, CALL_SECONDS)))
