"""`rlhf tune`: successive halving; the trials of a job share earlier jobs, one Ray and its processes."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rlhf_api.problems import Problem, SpecError
from rlhf_planning.halving import PREFIX, Rung, Search, Trial, halve, require_measured
from rlhf_trainer.errors import ConfigError, EnvironmentProblem, Paused, together, user_error
from rlhf_trainer.run.chain import run_file
from rlhf_trainer.run.machine import gpu_count
from rlhf_trainer.run.placement import place_job
from rlhf_trainer.run.preconditions import require_no_cluster
from rlhf_trainer.run.resume import unfinished
from rlhf_trainer.run.session import how_ray_ended, ray_session
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder import folder as files
from rlhf_trainer.run_folder.attempt import replace
from rlhf_trainer.run_folder.lock import only_run_in
from rlhf_trainer.run_folder.repeated import by_step


class Tuning:
    """Search of `rlhf tune`; the run folder `output` holds the shared jobs and a run folder for each trial."""

    def __init__(
        self, search: Search, manifest: Path, output: Path, sets: Sequence[str], say: Callable[[str], None]
    ) -> None:
        """Check the trials. Raises SpecError for a value or measure, or trials in the folder, that do not fit."""
        self._search, self._manifest, self._output, self._sets, self._say = search, manifest, output, sets, say
        self._job, self._slots, self._address = search.chain[-1], Slots(), os.environ.get("RAY_ADDRESS")
        self._names, rung = [job.name for job in search.chain], search.rungs[0]
        all_sets = [[*sets, *search.sets(each, rung)] for each in search.trials]
        loaded = [{job.name: job for job in files.load_with_finished(output, manifest, each)} for each in all_sets]
        self._chains = [[jobs[name] for name in self._names] for jobs in loaded]
        for trial, chain in zip(search.trials, self._chains, strict=True):
            try:
                require_no_cluster(chain)
                require_measured(chain[-1], search.measure)
                is_begun = (output / trial.name / self._job.name).is_dir()
                start = unfinished(chain, output / trial.name).get(self._job.name) if is_begun else None
                if start and not start.checkpoint and self._measured(output / trial.name, rung):
                    raise SpecError([Problem(self._job.name, "began with other inputs; use another --output")])
            except SpecError as error:
                found = [(f"{output / trial.name}: {each.path}", each.message) for each in error.problems]
                raise SpecError(Problem(path, text.removesuffix(", or --restart")) for path, text in found) from None

    def run(self) -> Trial:
        """Run the shared jobs and then the trials; return the best trial. Trials do not repeat rungs that they reached.

        Raises TrainerError if a shared job or every trial fails.
        """
        from rlhf_trainer.run.deep_check import problems  # torch and transformers: seconds

        for chain in self._chains:
            if found := [error for _, error in problems(chain, chain, self._output)]:
                raise together(found)
        chains = () if self._address else self._chains
        own = [place_job(jobs[-1], (gpu_count(),), jobs, self._output) for jobs in chains]
        self._say(str(self._search))
        if self._search.shared:
            self._run(self._output, self._sets, self._search.shared)
        room = max((sum(pool.size for pool in placed.mapping.pools) for placed in own), default=0)
        with only_run_in(self._output), StopSignals(self._say).handled(), ray_session(self._address, cpu_slots=room):
            try:
                best = halve(self._search, self._go_on)
            finally:
                self._slots.release()
        if best is None:
            raise ConfigError(self._search.failure)
        return best

    def _go_on(self, trials: Sequence[Trial], rung: Rung) -> None:
        """Train the trials that have no measure at a rung yet up to this rung, one after the other."""
        for trial in trials:
            output, reason = self._output / trial.name, ""
            if self._measured(output, rung) is None:
                self._say(f"{trial.name} to step {rung.step}: {' '.join(trial.sets)}")
                self._link_shared(output)
                try:
                    self._run(output, [*self._sets, *self._search.sets(trial, rung)], self._names, self._slots)
                except Paused:
                    pass  # the trial has reached the rung
                except Exception as error:  # noqa: BLE001 a trial that fails is a row of the table
                    reason = str(user_error(error)).splitlines()[0]
            trial.step, trial.value = self._measured(output, rung) or (rung.step, None)
            none = f"it has no {self._search.measure} at step {rung.step}"
            trial.reason = (reason or none) if trial.value is None else ""
            with files.writing(self._output):
                found = {"search": str(self._search), "trials": [*map(asdict, self._search.trials)]}
                replace(self._output / "tune.json", json.dumps(found, indent=2) + "\n")
            if ended := how_ray_ended():
                raise EnvironmentProblem(f"{ended}; the same command goes on")

    def _run(self, output: Path, sets: Sequence[str], only: Sequence[str], shared: Slots | None = None) -> None:
        run_file(self._manifest, output=output, overrides=sets, address=self._address, only=only, shared=shared)

    def _measured(self, output: Path, rung: Rung) -> tuple[int, float] | None:
        """Return (step, value) of a trial's first measure at or after a rung; None if there is none with a checkpoint.

        An earlier search with another budget has other rungs, so it may have trained the trial past this one.
        """
        folder, measure, total = files.JobFolder(output, self._job), self._search.measure, self._search.rungs[-1].step
        with files.reading(folder.path):
            newest = folder.newest_checkpoint()
            found = by_step(folder.path / files.METRICS) if newest and newest.step >= rung.step < total else {}
            for step, record in found.items():
                if step >= rung.step and measure in record:
                    return step, record[measure]
            summary = files.read_summary(output).get(self._job.name, {}) if folder.finished() else {}
            value = summary.get(f"{measure.removeprefix(PREFIX)}_after", summary.get(measure.removeprefix(PREFIX)))
            return None if value is None else (total, value)

    def _link_shared(self, output: Path) -> None:
        """Link the finished shared jobs into a trial's run folder."""
        with files.writing(output):
            output.mkdir(exist_ok=True)
            there = {self._job.name, *(each.name for each in output.iterdir())}
            for name in files.finished_jobs(self._output).keys() - there:
                (output / name).symlink_to(Path("..") / name)
