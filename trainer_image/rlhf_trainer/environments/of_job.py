"""Environment of a job: built from the job's manifest, and called once before the run as a test."""

import math
from contextlib import closing
from typing import Any

from rlhf_api.job import Job
from rlhf_trainer.environments.environments import MAX_EPISODES, Environments
from rlhf_trainer.environments.sandboxed import SandboxedEpisodes
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.rewards.supervision import AnswerFailure

TOOLS, AGENT = "rlhf_trainer.environments.tools:Tools", "rlhf_trainer.agents.programs:Agent"


def subject_of(job: Job) -> str:
    """Return the beginning of a sentence on a job's episodes: the field of the manifest and the user's code."""
    rollout, code = job.spec.rollout, ""
    if rollout.environment:
        code = rollout.environment.entrypoint
    elif rollout.agent:
        code = rollout.agent.entrypoint or " ".join(rollout.agent.command or ())
    return f"{_path(job)}: {code}".rstrip()


def _path(job: Job) -> str:
    given = [field for field in ("environment", "agent") if getattr(job.spec.rollout, field)]
    return f"{job.name}: spec.rollout.{(*given, 'tools')[0]}"


def environments_of(job: Job, sandboxes: Sandboxes | None = None) -> Environments:
    """Return the `Environments` of a job: the user's class, tools, or the program of an agent; its process starts.

    sandboxes: for the episodes, in place of processes of this machine.
    """
    rollout = job.spec.rollout
    functions = list(rollout.tools or ())
    entrypoints: list[str] = [TOOLS, *functions]
    arguments: dict[str, Any] = {"functions": functions}
    if rollout.environment:
        entrypoints, arguments = [rollout.environment.entrypoint], rollout.environment.arguments
    if rollout.agent:
        entrypoints = [AGENT, *filter(None, [rollout.agent.entrypoint])]
        arguments = rollout.agent.model_dump(mode="json")
    given: dict[str, Any] = {"arguments": arguments, "seconds": rollout.step_timeout_seconds, "path": _path(job)}
    given["has_rewards"] = entrypoints[0] != TOOLS
    if sandboxes:
        patience = job.spec.training.call_deadline / 2
        episodes = SandboxedEpisodes(sandboxes, entrypoints, arguments=arguments, patience=patience)
        given |= {"open_sandbox": episodes.open, "most": min(MAX_EPISODES, sandboxes.warm)}
    return Environments(entrypoints, **given)


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
