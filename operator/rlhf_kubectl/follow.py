"""Jobs of a cluster by their names: status, log and output of each, and waiting until they end."""

import time
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import Final

import typer

from rlhf_api.exit_codes import ExitCode
from rlhf_api.status import Status
from rlhf_kubectl import files
from rlhf_kubectl.jobs import ENDED_PHASES, find_job, head_of, pods_of, seen_of
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_kubectl.why import explaining_condition, final_failure, why
from rlhf_operator import names
from rlhf_operator.conditions import found
from rlhf_operator.snapshot import ObservedJob
from rlhf_planning.job_table import REFRESH_SECONDS

CODES: Final = {each.name.title().replace("_", ""): each for each in ExitCode} | {"InvalidInput": ExitCode.SPEC}
"""Reason of a failure -> exit code for the same cause. All other reasons lie in the cluster (ENVIRONMENT)."""
LOG: Final = f"--container={names.LOG_CONTAINER}"


class ClusterJob:
    """Handle of an RLHFJob, which asks the cluster by kubectl; KubectlError, with an `exit_code`, if that fails."""

    def __init__(self, name: str, *, namespace: str | None = None, context: str | None = None) -> None:
        """Make a handle by the job's name; by default in kubectl's current context, and in its namespace."""
        self.name, self._kubectl = name, Kubectl(context, namespace)

    def status(self) -> Status:
        """Return the status as the operator has written it: phase, progress, metrics, conditions."""
        return find_job(self._kubectl, self.name).status

    def wait(self, *, logs: bool = False) -> int:
        """Print what the job does until it ends, with its log if `logs`; return its exit code, 0 for success."""
        return wait_for(self._kubectl, [self.name], logs=logs)

    def fetch(self, folder: str | PathLike[str], image: str | None = None) -> tuple[int, int]:
        """Copy the job's model, or its data set, into a new folder; return the numbers of files and of bytes."""
        return files.fetch(self._kubectl, find_job(self._kubectl, self.name), Path(folder), image)

    def logs(self, attempt: int | None = None, *, follow: bool = False, image: str | None = None) -> None:
        """Print the trainer's log of an attempt, by default the latest, from its head pod or from the job's claim.

        image: image of the pod that reads the claim; default: the job's image.
        """
        job = find_job(self._kubectl, self.name)
        latest = job.status.attempt
        if latest is None or (attempt or 0) > latest:
            had = f"has had {latest or 'no'} attempt{'s' * (latest != 1)}"
            message = f"{job.name} {had}; kubectl rlhf why {job.name} says what it waits for"
            raise KubectlError(message, ExitCode.SPEC)
        head, number = head_of(job, pods_of(self._kubectl, job)), attempt or latest
        log, where = f"driver-a{number}.log", (f"--namespace={job.namespace}", LOG)
        if head and number == latest:
            self._kubectl.stream("logs", head.name, *where, *(["--follow"] if follow else []))
        elif head:
            self._kubectl.stream("exec", head.name, *where, "--", "cat", f"{names.OUTPUT_FOLDER}/{log}")
        else:
            files.show(self._kubectl, job, log, image)


def wait_for(kubectl: Kubectl, jobs: Sequence[str], *, logs: bool) -> int:
    """Print what jobs do until all have ended; return the exit code of the first of `jobs` that failed.

    logs: print the log of each attempt, too. Ctrl-C leaves the jobs running, and returns SIGINT. KubectlError if a job
    is gone, or if the user may not read it.
    """
    codes, options = dict[str, int](), ["--follow", *["--prefix"] * (len(jobs) > 1)]
    try:
        for _ in zip_longest(*(_wait(kubectl, name, codes, options if logs else ()) for name in jobs)):
            time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        typer.echo(f"{', '.join(jobs)}: not stopped; `kubectl rlhf why {jobs[-1]}` says how far it is")
        return ExitCode.SIGINT
    return next((codes[name] for name in jobs if codes[name]), ExitCode.OK)


def _wait(kubectl: Kubectl, name: str, codes: dict[str, int], options: Sequence[str]) -> Iterator[None]:
    """Print a job's state, and with `options` its logs; yield after each poll; at the end set its code in `codes`."""
    printed, logs = "", dict[int, Thread]()
    while True:
        sentence, job = _look_at(kubectl, name)
        if sentence != printed:
            typer.echo(printed := sentence)
        if job and job.status.phase in ENDED_PHASES:
            for log in logs.values():
                log.join()
            _print_end(kubectl, job, logs if options else None)
            codes[name] = exit_code_of(job.status)
            return
        attempt = job.status.attempt if job and job.status.phase in ("Initializing", "Running") else None
        if job and attempt and options and attempt not in logs:
            logs[attempt] = Thread(target=_print_log, args=(kubectl, job, options), daemon=True)
            logs[attempt].start()
        yield


def _print_end(kubectl: Kubectl, job: ObservedJob, logged: Collection[int] | None) -> None:
    """Print why a job ended, and attempts whose logs are missing from `logged`; None: no logs were requested."""
    missing = [] if logged is None else [each for each in range(1, (job.status.attempt or 0) + 1) if each not in logged]
    for attempt in missing:
        typer.echo(f"The log of attempt {attempt} was not shown: `kubectl rlhf logs {job.name} --attempt {attempt}`")
    print_why(kubectl, job)


def print_why(kubectl: Kubectl, job: ObservedJob) -> None:
    """Print the sentences of `why` about a job, and which of its pods and events the user may not list."""
    pods, warning, refused = seen_of(kubectl, job)
    for sentence in (*why(job, pods, warning, datetime.now(UTC)), *refused):
        typer.echo(sentence)


def _look_at(kubectl: Kubectl, name: str) -> tuple[str, ObservedJob | None]:
    """Return (sentence on a job's state, the job); no job if the cluster cannot be asked at the moment."""
    try:
        job = find_job(kubectl, name)
    except KubectlError as error:
        if error.is_final:
            raise
        return f"{name}: not up to date: {error}", None
    condition = explaining_condition(job.status)
    return f"{name} is {job.status.phase}{f': {condition.message}' if condition else ''}", job


def _print_log(kubectl: Kubectl, job: ObservedJob, options: Sequence[str]) -> None:
    """Print the log of the current attempt's head pod until it ends."""
    try:
        if head := head_of(job, pods_of(kubectl, job)):
            kubectl.stream("logs", head.name, f"--namespace={job.namespace}", LOG, *options)
    except KubectlError as error:
        typer.echo(f"the log broke off: {error}; `kubectl rlhf logs {job.name}` shows all of it")


def exit_code_of(status: Status) -> int:
    """Return the exit code of a job that has ended: the trainer's or, without it, the code of the failure's reason."""
    failed, failure = found(status.conditions, "Failed"), final_failure(status)
    if status.phase == "Succeeded":
        return ExitCode.OK
    if failure and failure.exit_code:
        return failure.exit_code
    return CODES.get(failure.reason if failure else failed.reason if failed else "", ExitCode.ENVIRONMENT)
