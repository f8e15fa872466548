"""Limits that the shape of a model sets to a manifest: its parallel sizes, and the length of its sequences."""

from collections.abc import Iterator, Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import Architecture


def wrong_sizes(job: Job, role: Role, model: Architecture) -> Iterator[Problem]:
    """Yield a problem for the manifest's parallel sizes that the model's layers, heads or vocabulary do not allow.

    Of `parallelism` only the first wrong size is reported.
    """
    fixed = fixed_sizes(job, role)
    wrong = model.cannot_be_cut(pipeline=fixed.pipeline, tensor=fixed.tensor, expert=fixed.expert) if fixed else None
    shards = job.spec.rollout.tensor_parallel or 1
    if role == "actor" and model.vocabulary % shards:
        message = f"is {shards}, which does not divide the model's vocabulary of {model.vocabulary}"
        yield Problem(f"{job.name}: spec.rollout.tensorParallel", message)
    if wrong:
        yield Problem(f"{job.name}: spec.models.{job.spec.models.field(role)}.parallelism.{wrong[0]}", wrong[1])


def too_long(job: Job, shapes: Mapping[Role, Architecture]) -> Iterator[Problem]:
    """Yield a problem if a model does not read sequences as long as a job that generates may make them."""
    longest, offline = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens, job.spec.algorithm.offline
    for role, model in () if offline else shapes.items():
        if 0 < model.positions < longest:
            uri = job.models()["actor" if role == "rollout" else role].uri
            limit = f"{role}, {uri}, reads {model.positions} tokens at most (max_position_embeddings, with scaled RoPE)"
            yield Problem(f"{job.name}: spec.data", f"maxPromptTokens + maxResponseTokens is {longest}, but {limit}")
            return


def fixed_sizes(job: Job, role: Role) -> Parallelism | None:
    """Return a model's parallel sizes in the manifest; None if unset, for a rollout, or for a reference not in it."""
    if role == "rollout" or (role == "reference" and job.spec.models.reference is None):
        return None
    return job.models()[role].parallelism
