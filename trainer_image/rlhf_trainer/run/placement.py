"""Placement of a job's models by the mapper, checked before anything starts; and the CPU slots of a file's jobs."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.names import slots_text
from rlhf_api.problems import SpecError
from rlhf_mapper.auto_map import predict
from rlhf_mapper.config_file import made_from
from rlhf_mapper.cpu_slots import ERROR, choose_slots, least_slots
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_mapper.place import place
from rlhf_planning.job_plan import plan_job
from rlhf_planning.machines import UnknownGpuError, host_memory, slots_of
from rlhf_planning.timeline import interval_text
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.run.machine import cores, gpu_count
from rlhf_trainer.run.preconditions import require_generating, require_possible
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run_folder.folder import JOB_FILE, JobFolder, model_folder, reading


class Placed(NamedTuple):
    """Placement of a job's models on pools, and whether the mapper chose it."""

    mapping: DeviceMapping
    unmapped: str = ""
    """Reason why the mapper did not choose the placement; empty if it did."""

    @property
    def notes(self) -> list[str]:
        """Sentences about the predicted seconds of a step, and about why the mapper was not used; may be empty."""
        notes, count = [f"not mapped: {self.unmapped}"] * bool(self.unmapped), len(self.mapping.pools)
        if found := self.mapping.prediction:
            step = interval_text(found.step_seconds, found.low, found.high)
            notes.insert(0, f"mapped: {count} pool{'s' * (count > 1)}, predicted {step} a step")
        return notes


def place_job(job: Job, gpus_per_machine: Sequence[int], jobs: Sequence[Job], output: Path) -> Placed:
    """Return the placement of a job's models; jobs: all of the manifest, as an earlier one may make a model.

    SpecError if the placement is impossible, a model cannot be cut into its stages and shards, or the actor cannot
    generate. EnvironmentProblem if the mapper finds no placement.
    """
    together = place(job, gpus_per_machine)
    placed = _mapped(job, together, jobs, output) if job.spec.algorithm.data != "layers" else Placed(together)
    by_name = {each.name: each for each in jobs}
    origins = {}
    for role in job.models():
        maker, made = made_from(job, role, by_name)  # the origin of a trained model has the same configuration
        model = maker.models()[made]
        origins[role] = model, model_folder(model.uri, output)
    require_possible(job, placed.mapping.sizes, origins)
    require_generating(jobs, job, output)
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
            sentence = f"{job.name}: {error}; say in spec.placement.pools where the rollout is"
            raise EnvironmentProblem(sentence) from error
        return Placed(together, str(error))
    if job.spec.placement.mode == "Manual":
        kept = predict(job, together, cluster, shapes)
        return Placed(kept) if isinstance(kept, DeviceMapping) else Placed(together, str(kept))
    best = plan_job(job, cluster, shapes, device=together.device)
    if isinstance(best, Infeasible):
        raise EnvironmentProblem(f"{job.name}: {best}")
    return Placed(best)


def with_cpu_slots(jobs: Sequence[Job], output: Path, *, restart: bool = False) -> tuple[list[Job], str]:
    """Return the jobs with their CPU slots, and a sentence on the choice; empty if nothing was chosen.

    All jobs with open slots get the same number, so that the next job can take over the processes. It is the number of
    a job that has begun in the run folder, if enough for all jobs and without `restart`, else the mapper's choice. Jobs
    stay as they are if OMP_NUM_THREADS is set (the operator sets it), or if the shape of a model is unknown.
    """
    opened = [job for job in jobs if _leaves_slots_open(job)]
    if opened and (own := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return list(jobs), f"1 CPU slot: OMP_NUM_THREADS={own} gives its threads; without that the slots are chosen"
    slots, why = 0, f"as the run in {output} began"
    with suppress(TrainerError, SpecError):  # the run reads these files again, and reports the error
        least = max(map(least_slots, opened), default=1)
        slots = next((each for job in opened if not restart and (each := _begun_slots(job, output)) >= least), 0)
        if opened and not slots:
            known = [(job, shapes_of(jobs, job, output)) for job in opened]
            slots, seconds = choose_slots(known, cores(), host_memory())
            why = _other_numbers(slots, seconds)
    if not slots:
        return list(jobs), ""
    sized = [job.changed(resources={"slots_per_node": slots}) if job in opened else job for job in jobs]
    threads = max(cores() // slots, 1)
    return sized, f"{slots_text(slots, 'CPU')} of {threads} thread{'s' * (threads > 1)}: {why}"


def _other_numbers(slots: int, seconds: Mapping[int, float]) -> str:
    """Return a clause on how long the steps take on other numbers of slots; seconds: predicted, by number."""
    if not seconds[min(seconds)]:
        return "the number of steps is not known yet"
    ratios = [(slots_text(count, "CPU"), each / seconds[slots]) for count, each in seconds.items() if count != slots]
    words = ", ".join(f"{ratio:.2f} times as long on {number}" for number, ratio in ratios)
    close = f"; a gain of less than {ERROR:.0%} does not count" * (min(seconds.values()) < seconds[slots])
    alone = "no other number divides cores and batches and has a slot for each pool"
    return f"the steps of all jobs together are predicted to take {words}{close}" if words else alone


def _leaves_slots_open(job: Job) -> bool:
    """Whether a job runs on CPU slots of one node here, and neither their number nor its pools are in the manifest."""
    resources = job.spec.resources
    is_on_cpu = resources.device == "CPU" or (resources.device == "Auto" and not gpu_count())
    return is_on_cpu and resources.slots_per_node is None and resources.nodes == 1 and job.spec.placement.mode == "Auto"


def _begun_slots(job: Job, output: Path) -> int:
    """Return the slots of a job's earlier run, by its folder or newest checkpoint; 0 if there is no such run."""
    folder = JobFolder(output, job)
    newest = folder.newest_checkpoint()
    if not newest and not (folder.path / JOB_FILE).is_file():
        return 0
    with reading(newest.uri if newest else folder.path):
        document = kubectl_yaml.read(folder.saved(JOB_FILE, newest), "")[0]
        return int(document["spec"].get("resources", {}).get("slotsPerNode") or 1)
