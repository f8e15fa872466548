"""`kubectl rlhf tune`: successive halving whose trials are queued RLHFJobs; their specs say how far each has come."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from rlhf_api import kubectl_yaml
from rlhf_api.checks.resume import changes
from rlhf_api.files import apply, document_of, load, read_text
from rlhf_api.problems import Problem, SpecError
from rlhf_kubectl.jobs import ENDED_PHASES, list_jobs
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_kubectl.submit import submit
from rlhf_kubectl.why import final_failure
from rlhf_operator import names
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.snapshot import ObservedJob
from rlhf_planning.halving import Rung, Search, Trial, halve, is_lowest_best, require_measured, search_of, show
from rlhf_planning.job_table import REFRESH_SECONDS


class ClusterTuning:
    """Search whose trials are the jobs `<job>-t1`, `<job>-t2` and so on, which have a label."""

    def __init__(
        self, kubectl: Kubectl, manifest: Path, varied: Sequence[str], measure: str, budget: int, job: str | None
    ) -> None:
        """Check the options and the manifests of the trials; nothing is created yet. SpecError or KubectlError."""
        self._kubectl, self._folder = kubectl, manifest.parent
        existing = self._jobs()
        finished = {name: each.algorithm for name, each in existing.items()}
        self._search: Search = search_of(load(manifest, finished=finished), varied, measure, budget, job)
        self._documents = [each for each in kubectl_yaml.read(read_text(manifest), f"{manifest}: ") if each]
        self._shared = [each for each in self._documents if each["metadata"]["name"] in self._search.shared]
        trials = [self._document(trial, self._search.rungs[0]) for trial in self._search.trials]
        loaded = {each.name: each for each in load(_text([*self._shared, *trials]), finished=finished)}
        for name, document in ((each["metadata"]["name"], each) for each in trials):
            require_measured(loaded[name], measure)
            self._require_own(document, existing.get(name))

    def run(self) -> None:
        """Submit the shared jobs with the first trials, have the best go on from rung to rung, and print them.

        The same command goes on after an interruption, which leaves the jobs running. KubectlError if the cluster
        refuses, or a shared job or every trial fails.
        """
        search = self._search
        typer.echo(f"{search}; Ctrl-C leaves the jobs running")
        best = halve(search, self._go_on)
        if best is None:
            raise KubectlError(search.failure)
        show(search, best, "kubectl rlhf compare", self._name)

    def _require_own(self, trial: dict[str, Any], job: ObservedJob | None) -> None:
        """Raise SpecError if the cluster's job of a trial's name is no trial of this search."""
        tuned, differing = self._search.chain[-1].name, ["metadata.labels"]
        if job and job.labels.get(names.TUNE) == tuned:
            parsed = map(parse_job, (job, replace(job, spec=trial["spec"])))
            differing = [each.path for each in changes(*map(document_of, parsed))]
        if job and differing:
            message = f"is not that of the cluster's job; `kubectl delete rlhf {job.name}`, or rename {tuned}"
            raise SpecError(Problem(f"{job.name}: {path}", message) for path in differing)

    def _name(self, trial: Trial) -> str:
        return f"{self._search.chain[-1].name}-{trial.name}"

    def _document(self, trial: Trial, rung: Rung) -> dict[str, Any]:
        """Return the RLHFJob of a trial that pauses at a rung. Raises SpecError for a path that cannot exist."""
        tuned, changed = self._search.chain[-1].name, apply(self._search.sets(trial, rung), self._documents)
        job = next(each for each in changed if each["metadata"]["name"] == tuned)
        labels = {**(job["metadata"].get("labels") or {}), names.TUNE: tuned}
        return {**job, "metadata": {**job["metadata"], "name": self._name(trial), "labels": labels}}

    def _go_on(self, trials: Sequence[Trial], rung: Rung) -> None:
        """Have trials train on to a rung, except trials beyond the rung, and wait until all have reached it."""
        while (jobs := self._look()) is None:
            time.sleep(REFRESH_SECONDS)
        waiting, lowest = list(trials), is_lowest_best(self._search.measure)
        for trial in trials:
            job = jobs.get(self._name(trial))
            pause = (job.spec.get("checkpoint") or {}).get("pauseAfterStep") if job else 0
            if int(self._search.chain[-1].spec.training.total_steps or 0 if pause is None else pause) > rung.step:
                waiting.remove(trial)  # one of the best: its status has the measure of a later step
                trial.step, trial.value = rung.step, -math.inf if lowest else math.inf
        ended = {name for name, job in jobs.items() if job.status.phase in ENDED_PHASES}  # refused if they change
        going = [self._document(each, rung) for each in waiting if self._name(each) not in ended]
        if new := [*self._shared * (rung == self._search.rungs[0]), *going]:
            submit(self._kubectl, _text(new), folder=self._folder)
        while waiting:
            time.sleep(REFRESH_SECONDS)
            if (now := self._look()) is None:
                continue
            if failed := [name for name in self._search.shared if name in now and now[name].status.phase == "Failed"]:
                raise KubectlError(f"{failed[0]} has failed, and trials read it; see kubectl rlhf why {failed[0]}")
            waiting = [trial for trial in waiting if not self._has_come(trial, now.get(self._name(trial)), rung)]

    def _jobs(self) -> dict[str, ObservedJob]:
        return {job.name: job for job in list_jobs(self._kubectl)}

    def _look(self) -> dict[str, ObservedJob] | None:
        """Return the jobs by name; None, with a printed sentence, if the cluster cannot be asked at the moment."""
        try:
            return self._jobs()
        except KubectlError as error:
            if error.is_final:
                raise
            typer.echo(f"{self._search.chain[-1].name}: not up to date: {error}")
            return None

    def _has_come(self, trial: Trial, job: ObservedJob | None, rung: Rung) -> bool:
        """Whether a trial has reached a rung or ended; sets its measure, or the reason why it has none."""
        # While its pods end (Suspending), the measures of its last step may be missing.
        is_paused = job and job.is_paused and job.status.phase == "Suspended"
        if job and not (is_paused or job.status.phase in ENDED_PHASES):
            return False
        measured = job.status.measures.get(self._search.measure) if job else None
        done = job.status.progress.step if job and job.status.progress else 0
        failure = final_failure(job.status) if job and job.status.phase == "Failed" else None
        if job is None or failure or done < rung.step or measured is None:
            state = f"is {job.status.phase} after step {done}, without {self._search.measure}" if job else "is gone"
            trial.reason = failure.message if failure else f"its job {state}"
        else:
            trial.step, trial.value = rung.step, measured
        return True


def _text(documents: Iterable[dict[str, Any]]) -> str:
    return "---\n".join(map(kubectl_yaml.write, documents))
