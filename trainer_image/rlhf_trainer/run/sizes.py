"""Whether models can be cut as the mapping says: known from their configurations before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec import Model
from rlhf_mapper.mapping import Inventory
from rlhf_mapper.mapping import Mapping as PlacedModels
from rlhf_mapper.place import place
from rlhf_trainer.run.folder import JOB, model_folder
from rlhf_trainer.run.stages import stage_of
from rlhf_trainer.training.models import load_config
from rlhf_trainer.training.tensor_parallel import impossible_sizes


def possible_place(job: Job, inventory: Inventory, jobs: Sequence[Job], output: Path) -> PlacedModels:
    """Where the models of a job live; jobs: those of the manifest, which may make its models.

    SpecError if that cannot be, or a model cannot be cut into its stages and shards.
    """
    placed = place(job, inventory)
    by_name = {each.name: each for each in jobs}
    problems = [
        Problem(f"{job.name}: spec.models.{job.spec.models.field(role)}.parallelism.{reason.split()[0]}", sentence)
        for role, model in job.models().items()
        if (reason := _reason(placed, role, _origin(model, by_name, output)))
        for sentence in [reason.partition(" ")[2]]
    ]
    if problems:
        raise SpecError(problems)
    return placed


def _reason(placed: PlacedModels, role: Role, origin: tuple[Model, str]) -> str:
    """Why a model cannot be cut; it begins with the size that is to blame."""
    sizes, (model, folder) = placed.sizes[role], origin
    if sizes.pipeline == sizes.tensor == 1:
        return ""
    config = load_config(folder, trust_remote_code=model.trust_remote_code, revision=model.revision)
    return impossible_sizes(config, pipeline=sizes.pipeline, tensor=sizes.tensor)


def _origin(model: Model, by_name: Mapping[str, Job], output: Path) -> tuple[Model, str]:
    """The model from which a chain of jobs makes this one, which has the same configuration; and its folder."""
    while model.uri.startswith(JOB) and (maker := by_name.get(model.uri.removeprefix(JOB))):
        model = maker.models()[stage_of(maker).saved]
    return model, model_folder(model.uri, output)
