"""What answers the model in the episodes of a job."""

from __future__ import annotations

from typing import Any

from rlhf_api.job import Job
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.function import Failure

TOOLS = "rlhf_trainer.environments.tools:Tools"


def path_of(job: Job) -> str:
    """The field of the manifest that says what plays, and what that is, for messages."""
    rollout = job.spec.rollout
    if rollout.environment:
        return f"{job.name}: spec.rollout.environment: {rollout.environment.entrypoint}"
    return f"{job.name}: spec.rollout.tools"


def environments_of(job: Job) -> Environments:
    """What answers the model in a job's episodes; its process is started."""
    rollout = job.spec.rollout
    path, seconds = path_of(job), rollout.step_timeout_seconds
    if rollout.environment:
        entrypoint, arguments = rollout.environment.entrypoint, rollout.environment.arguments
        return Environments([entrypoint], arguments=arguments, seconds=seconds, path=path)
    functions = list(rollout.tools or ())
    return Environments([TOOLS, *functions], arguments={"functions": functions}, seconds=seconds, path=path)


def tried(job: Job, calls: dict[str, Any]) -> dict[str, Any]:
    """What a job's environment answers to these calls, {method: argument}, in an episode of its own.

    UserCodeError if it cannot be imported or fails.
    """
    environments, found = environments_of(job), {}
    try:
        environments.ready()
        environments.begin(0)
        for method, given in calls.items():
            environments.ask(0, method, given)
            ((_, found[method]),) = environments.answers(wait=True)
            if isinstance(answer := found[method], Failure):
                raise UserCodeError(f"{path_of(job)} {answer.what}")
        return found
    finally:
        environments.close()
