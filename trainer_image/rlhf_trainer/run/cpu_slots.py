"""CPU slots of jobs that leave their number open, on this machine: chosen by the mapper, or those of an earlier run."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_mapper.cpu_slots import CpuSlots, choose_slots
from rlhf_planning.machines import host_memory
from rlhf_planning.timeline import seconds_text
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.run.machine import cores, gpu_count, own_threads
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run_folder.attempt import own_attempt
from rlhf_trainer.run_folder.folder import JOB_FILE, JobFolder, reading


def with_cpu_slots(jobs: Sequence[Job], output: Path, *, restart: bool = False) -> tuple[list[Job], str]:
    """Return the jobs with their number of CPU slots, and a sentence on the choice; empty if nothing was chosen.

    All jobs that leave it open get the same number, so that they run in the same processes. If one of them has begun in
    the run folder, it is that one's; restart: what has begun does not count. One slot if a model's shape is not known.
    Nothing is chosen where the user or the operator says how many threads a slot has.
    """
    opened = [] if own_threads() or own_attempt() else [job for job in jobs if _leaves_slots_open(job)]
    if not opened:
        return list(jobs), ""
    begun = [] if restart else [slots for job in opened if (slots := _begun_slots(job, output))]
    count, sentence = 1, ""
    if begun:
        count, sentence = begun[0], f"{_in_words(begun[0])}, as the run in {output} began"
    else:
        try:
            chosen = choose_slots([(job, shapes_of(jobs, job, output)) for job in opened], cores(), host_memory())
            count, sentence = chosen.count, _sentence(chosen)
        except (TrainerError, SpecError):  # the placement says why a shape is not known
            pass
    return [job.with_resources(slots_per_node=count) if job in opened else job for job in jobs], sentence


def _leaves_slots_open(job: Job) -> bool:
    """Whether a job runs on CPU slots of one node here, and neither their number nor its pools are in the manifest."""
    resources = job.spec.resources
    is_on_cpu = resources.device == "CPU" or (resources.device == "Auto" and not gpu_count())
    is_open = resources.slots_per_node is None and resources.nodes == 1 and job.spec.placement.mode == "Auto"
    return is_on_cpu and is_open and not job.generates_apart


def _begun_slots(job: Job, output: Path) -> int | None:
    """Return the slots of a job's earlier run, by its folder or newest checkpoint; None if there is no such run."""
    folder = JobFolder(output, job)
    file = folder.path / JOB_FILE
    newest = None if file.is_file() else folder.checkpoints.newest()
    if not (newest or file.is_file()):
        return None
    with reading(newest.uri if newest else file):
        document = kubectl_yaml.read(folder.saved(JOB_FILE, newest), "")[0]
        return int(document["spec"].get("resources", {}).get("slotsPerNode") or 1)


def _sentence(chosen: CpuSlots) -> str:
    """Return the chosen slots, and how long a step takes with other numbers."""
    one = f"{_in_words(chosen.count)} of {chosen.threads} thread{'s' * (chosen.threads > 1)}"
    here = chosen.step_seconds[chosen.count]
    times = {count: f"{seconds / here:.2f} times" for count, seconds in chosen.step_seconds.items() if seconds != here}
    if not times:
        return f"{one}: the cores, the batches or the memory allow no other number"
    others = ", ".join(f"on {count} {text}" for count, text in times.items())
    saves = f"saves {seconds_text(chosen.saved_seconds)} in all" if chosen.count > 1 else "more slots save too little"
    return f"{one}: a step takes {others} as long (predicted); {saves}"


def _in_words(count: int) -> str:
    return f"{count} CPU slot{'s' * (count > 1)}"
