"""Placement of a job's models by the mapper, checked before anything starts."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_api.job import Job
from rlhf_mapper.auto_map import predict
from rlhf_mapper.config_file import made_from
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_mapper.place import place
from rlhf_planning.job_plan import plan_job
from rlhf_planning.machines import UnknownGpuError, slots_of
from rlhf_planning.timeline import interval_text
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.run.preconditions import require_generating, require_possible
from rlhf_trainer.run.shapes import config_file, shapes_of
from rlhf_trainer.run_folder.folder import model_folder


class Placed(NamedTuple):
    """Placement of a job's models on pools, and whether the mapper chose it."""

    mapping: DeviceMapping
    unmapped: str = ""
    """Reason why the mapper did not choose the placement; empty if it did."""

    @property
    def notes(self) -> list[str]:
        """Sentences about the predicted seconds of a step, and about why the mapper was not used; may be empty."""
        prediction, count = self.mapping.prediction, len(self.mapping.pools)
        pools = "1 pool" if count == 1 else f"{count} pools"
        notes = []
        if prediction:
            step = interval_text(prediction.step_seconds, prediction.low, prediction.high)
            notes = [f"mapped: {pools}, predicted {step} a step"]
        return [*notes, f"not mapped: {self.unmapped}"] if self.unmapped else notes


def place_job(job: Job, gpus_per_machine: Sequence[int], jobs: Sequence[Job], output: Path) -> Placed:
    """Return the placement of a job's models; jobs: all of the manifest, as one may make another's model.

    SpecError if the placement is impossible, a model cannot be cut into its stages and shards, or the actor cannot
    generate. EnvironmentProblem if the mapper finds no placement.
    """
    placed = _mapped(job, place(job, gpus_per_machine), jobs, output)
    by_name = {each.name: each for each in jobs}
    origins = {}
    for role in job.models():
        maker, made = made_from(job, role, by_name)  # the origin of a trained model has the same configuration
        model = maker.models()[made]
        origins[role] = model, model_folder(model.uri, output)
    require_possible(job, placed.mapping.sizes, origins)
    if "actor" in origins and not job.spec.algorithm.offline:
        actor, _ = origins["actor"]
        with suppress(TrainerError):  # a model whose files cannot be read; the deep check says so
            require_generating(job, actor, config_file(actor.uri, actor.revision, output))
    return placed


def _mapped(job: Job, together: DeviceMapping, jobs: Sequence[Job], output: Path) -> Placed:
    """Return the mapper's choice for a job on the slots of a placement.

    together: all models in one pool, or pools made by hand. This placement is kept, with the reason, in two cases: the
    mapper does not know a model's shape or the GPU, or pools made by hand do not fit.
    """
    try:
        shapes, cluster = shapes_of(jobs, job, output), slots_of(together, gpus_here)
    except (TrainerError, UnknownGpuError) as error:
        if "rollout" in job.placed_roles() and job.spec.placement.mode == "Auto":
            raise EnvironmentProblem(
                f"{job.name}: {error}; say in spec.placement.pools where the rollout is"
            ) from error
        return Placed(together, str(error))
    if job.spec.placement.mode == "Manual":
        kept = predict(job, together, cluster, shapes)
        return Placed(kept) if isinstance(kept, DeviceMapping) else Placed(together, str(kept))
    best = plan_job(job, cluster, shapes, device=together.device)
    if isinstance(best, Infeasible):
        raise EnvironmentProblem(f"{job.name}: {best}")
    return Placed(best)
