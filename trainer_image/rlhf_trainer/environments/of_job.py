"""Environment of a job: built from the job's manifest, and called once before the run as a test."""

import math
from contextlib import closing
from typing import Any

from rlhf_api.job import Job
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.supervision import AnswerFailure

TOOLS = "rlhf_trainer.environments.tools:Tools"


def subject_of(job: Job) -> str:
    """Return the beginning of a sentence on a job's environment: the field of the manifest and the entry point."""
    environment = job.spec.rollout.environment
    return f"{_path(job)}: {environment.entrypoint}" if environment else f"{_path(job)}:"


def _path(job: Job) -> str:
    return f"{job.name}: spec.rollout.{'environment' if job.spec.rollout.environment else 'tools'}"


def environments_of(job: Job) -> Environments:
    """Return the `Environments` of a job, of its tools or of the user's class; the guarded process starts."""
    rollout = job.spec.rollout
    functions = list(rollout.tools or ())
    entrypoints: list[str] = [TOOLS, *functions]
    arguments: dict[str, Any] = {"functions": functions}
    if rollout.environment:
        entrypoints, arguments = [rollout.environment.entrypoint], rollout.environment.arguments
    return Environments(entrypoints, arguments=arguments, seconds=rollout.step_timeout_seconds, path=_path(job))


def try_environment(job: Job, calls: dict[str, Any]) -> dict[str, Any]:
    """Call a job's environment in an episode; see `play`."""
    with closing(environments_of(job)) as environments:
        return play(job, environments, 0, calls)


def play(job: Job, environments: Environments, number: int, calls: dict[str, Any]) -> dict[str, Any]:
    """Call a job's environment in the new episode `number`; calls: {method: argument}. Returns the answers by method.

    UserCodeError if the environment cannot be imported or fails.
    """
    found = dict[str, Any]()
    environments.ready()
    environments.begin(number, seed=0)
    for method, given in calls.items():
        environments.ask(number, method, given)
        ((_, found[method]),) = environments.answers(seconds=math.inf)
        if isinstance(answer := found[method], AnswerFailure):
            raise UserCodeError(f"{subject_of(job)} {answer.what}")
    environments.end(number)
    return found
