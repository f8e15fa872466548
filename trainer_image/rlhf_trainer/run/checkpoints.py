"""Checkpoints of a job: when they are written, by which workers, and how a job is restored."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_planning.halving import is_lowest_best
from rlhf_trainer.checkpoint import STATE
from rlhf_trainer.errors import DataError, EnvironmentProblem, NumericsError
from rlhf_trainer.run.job_run import Checkpoints, State
from rlhf_trainer.run.resume import Start
from rlhf_trainer.run.step_models import Handle
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.upload_pace import SHARE
from rlhf_trainer.workers.data import DataShape


class KeptCheckpoints(Checkpoints):
    """The checkpoints of a job on Ray, written by its workers in the background."""

    def __init__(
        self,
        job: Job,
        folder: JobFolder,
        models: Mapping[str, Handle],
        trained: Sequence[Role],
        *,
        data: DataShape,
        stop: StopSignals,
        start: Start,
    ) -> None:
        """models: all models of the job; of those with a method `counters`, a checkpoint saves the counters.

        trained: models whose state it saves. `restore` raises DataError if the data differs from the checkpoint's.
        """
        self._name, self._settings, self._folder = job.name, job.spec.checkpoint, folder
        self._store, self._data, self._stop, self._resumed = folder.checkpoints, data, stop, start.checkpoint
        self._last_step = start.last_step
        self._roles, self._trained = trained, [models[role] for role in trained]
        self._counting = {role: model for role, model in models.items() if hasattr(model, "counters")}
        self._under_way: tuple[str, State] | None = None
        self._begun_step = 0
        self._best: tuple[int, float] | None = None
        """(step, value) of the best evaluation so far, by the measure `checkpoint.keepBest`."""
        self._begun_at = time.monotonic()
        self._bytes_per_second = 0.0

    def set_pace(self, network: float) -> None:
        """Limit uploads beside steps; network: bytes per second of the slowest link between machines, or inf."""
        given = self._settings.upload_m_bps
        pace = given * 1e6 if given else network * SHARE
        if self._store.is_local or math.isinf(pace):
            return
        self._bytes_per_second = pace
        why = "checkpoint.uploadMBps" if given else "a twentieth of its slowest link to another"
        self._folder.event(f"a node uploads checkpoints with {pace / 1e6:.3g} MB/s beside steps: {why}")

    def restore(self) -> State | None:
        if not self._resumed:
            return None
        state, uri = self._resumed.state(), self._resumed.uri
        for path, digest in state.get("digests", {}).items():
            if self._data.digests.get(path) != digest:
                raise DataError(
                    f"{self._name}: {path}: its rows, or their order, are not those with which the job began; "
                    "use another --output, or --restart"
                )
        if (best := state.get("best")) and best[2:] == [self._settings.keep_best]:
            self._best = best[0], best[1]
        calls = [model.restore(uri=uri) for model in self._trained]
        counters = state.get("counters", {})
        calls += [self._counting[role].set_counters(counters=counts) for role, counts in counters.items()]
        try:
            for call in calls:
                call.result()
        except NumericsError as error:
            then = "a run goes on from the checkpoint before it, or from the start"
            try:
                if self._last_step is None:  # else the checkpoint is another run's
                    self._resumed.condemn(str(error))
            except EnvironmentProblem as refused:
                then = f"nor could that be noted there ({refused}): delete it"
            raise NumericsError(f"{error}; {then}") from error
        return state

    def end_step(self, step: int, state: Callable[[], State]) -> None:
        every = self._settings.every_steps
        is_old = time.monotonic() - self._begun_at > 60 * self._settings.every_minutes
        is_due = is_old or (every is not None and step % every == 0)
        self._finish(waits=is_due or not self._bytes_per_second)
        if is_due:
            self._begin(step, state, copies=True)

    def after_record(
        self, step: int, state: Callable[[], State], *, is_last: bool, measured: Mapping[str, float] | None = None
    ) -> None:
        if step == self._last_step:
            self._stop.ask_to_pause(f"{self._name}: all steps to repeat are made")
        if step == self._settings.pause_after_step and not is_last:
            self._stop.ask_to_pause(f"{self._name}: spec.checkpoint.pauseAfterStep: step {step} is done")
        is_asked, is_best = self._folder.save_request.exists(), self._becomes_best(step, measured or {})
        if not (is_asked or is_last or is_best or self._stop.requested or self._stop.pause):
            return
        if self._begun_step != step:
            self._begin(step, state, copies=False)
        self._finish()
        if is_asked:
            self._folder.save_request.unlink(missing_ok=True)
        self._stop.end(f"the checkpoint of step {step} is saved")

    def best_step(self, last: int, summary: Mapping[str, float]) -> dict[str, int]:
        wanted = self._settings.keep_best
        if wanted is None:
            return {}
        at_end = summary.get(f"{wanted}_after", summary.get(wanted))
        if at_end is not None and self._is_better(at_end):
            return {"best_step": last}
        return {"best_step": self._best[0]} if self._best else {}

    def _becomes_best(self, step: int, measured: Mapping[str, float]) -> bool:
        """Return whether the step is the best so far by `checkpoint.keepBest`; note its value if so."""
        value = measured.get(f"evaluation/{self._settings.keep_best}")
        if value is None or not self._is_better(value):
            return False
        self._best = step, value
        return True

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        is_lowest = is_lowest_best(str(self._settings.keep_best))
        return value < self._best[1] if is_lowest else value > self._best[1]

    def before_model(self) -> None:
        self._folder.require_ours()

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        with self._stop.finishing_the_step():
            yield
        self._stop.end("the checkpoint of the last step is saved")  # a signal may have come when it had been saved

    def _begin(self, step: int, state: Callable[[], State], *, copies: bool) -> None:
        """Have the workers begin a checkpoint; copies: they write copies of their state while the next step trains."""
        self._finish()
        self._folder.require_ours()
        self._begun_at, self._begun_step = time.monotonic(), step
        uri = self._store.begin(step)
        options = {"copies": copies, "bytes_per_second": self._bytes_per_second if copies else 0.0}
        calls = [model.begin_checkpoint(uri=uri, **options) for model in self._trained]
        counters = {role: model.counters() for role, model in self._counting.items()}
        for call in calls:
            call.result()
        counted = {role: values.result()[0] for role, values in counters.items()}
        data = {"rows": self._data.rows, "digests": self._data.digests}
        self._under_way = uri, {"step": step, **data, **state(), "counters": counted}

    def _finish(self, *, waits: bool = True) -> None:
        """Complete the checkpoint under way; if ranks still upload it, wait for them or (`waits` False) do nothing."""
        if not self._under_way:
            return
        uri, state = self._under_way
        ended = [call.result() for call in [model.end_checkpoint(waits=waits) for model in self._trained]]
        if not (waits or all(map(all, ended))):
            return
        ranks = {role: enumerate(sums) for role, sums in zip(self._roles, ended, strict=True)}
        sums = {f"{role}/{rank}": each for role, found in ranks.items() for rank, each in found}
        self._folder.require_ours()
        texts = {
            STATE: json.dumps({**state, "best": self._best and [*self._best, self._settings.keep_best]}) + "\n",
            **self._folder.texts_for_checkpoint(up_to=state["step"]),
        }
        self._folder.record_checkpoint(self._store.complete(uri, texts), sums)
        self._store.prune(self._settings.keep_last, best=self._best[0] if self._best else None)
        self._under_way = None
