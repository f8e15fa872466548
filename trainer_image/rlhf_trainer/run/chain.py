"""Runs the jobs of a manifest in dependency order, on one Ray, into one run folder."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.collector import collector_off
from rlhf_trainer.errors import reason_of, together
from rlhf_trainer.outputs.display import Display, display_for
from rlhf_trainer.outputs.opening import RUN_FOLDER_ONLY, OutputOptions, open_listeners
from rlhf_trainer.run.machine import gpu_count
from rlhf_trainer.run.placement import Placed, place_job, with_cpu_slots
from rlhf_trainer.run.preconditions import require_no_cluster, require_other_folders, require_packages
from rlhf_trainer.run.publisher import RunContext
from rlhf_trainer.run.resume import Start, from_the_start, unfinished
from rlhf_trainer.run.session import gpus_per_machine, ray_session
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.attempt import own_attempt
from rlhf_trainer.run_folder.folder import (
    SAVE_REQUEST,
    SUMMARY,
    JobFolder,
    load_with_finished,
    model_folders,
    read_summary,
    writing,
)
from rlhf_trainer.run_folder.lock import only_run_in


def run_file(
    manifest: Path | str,
    *,
    output: Path,
    overrides: Sequence[str],
    restart: bool = False,
    address: str | None = None,
    options: OutputOptions = RUN_FOLDER_ONLY,
    starts: Mapping[str, Start] = MappingProxyType({}),
    only: Collection[str] = (),
    shared: Slots | None = None,
) -> None:
    """Run the jobs of a manifest (a file, or its text) from their newest checkpoints; finished jobs are skipped.

    starts: where each job begins, by name; empty: as the run folder says. only: names of the jobs; empty: all. shared:
    slots that further runs use, too, on the Ray that this process has joined; None: Ray and slots of this run alone.
    Raises SpecError, TrainerError or Stopped; the folder of the failed job says why.
    """
    require_packages()
    jobs = [job for job in load_with_finished(output, manifest, overrides) if job.name in only or not only]
    require_no_cluster(jobs)
    require_other_folders(jobs, output)
    address = address or os.environ.get("RAY_ADDRESS")
    jobs, chosen = (jobs, "") if address else with_cpu_slots(jobs, output, restart=restart)
    folders = {job.name: model_folders(job, output) for job in jobs}
    here = (gpu_count(),)
    own = {job.name: place_job(job, here, jobs, output) for job in jobs} if not address else {}
    cpu_slots = max((sum(pool.size for pool in placed.mapping.pools) for placed in own.values()), default=0)
    display = display_for(jobs)
    stop = StopSignals(display.say)
    with only_run_in(output), open_listeners(options, output, display.warn) as listeners_of:
        starts = starts_of(jobs, output, display, restart=restart, given=starts)
        pending = [job for job in jobs if job.name in starts]
        if pending and chosen:
            display.say(chosen)
        with (
            stop.handled(),
            ray_session(address, cpu_slots=cpu_slots) if pending and not shared else nullcontext(),
            display.showing(pending),
        ):
            if pending:
                context = RunContext(output=output, display=display, listeners_of=listeners_of, stop=stop)
                run_pending(pending, jobs, own, folders, starts, context, shared)
        display.table(read_summary(output))
        write_report_or_warn(output, display)
    display.say(f"run folder: {output}")


def starts_of(
    jobs: Sequence[Job], output: Path, display: Display, *, restart: bool, given: Mapping[str, Start]
) -> Mapping[str, Start]:
    """Return the start of each job that is still to run, by name, and prepare the run folder.

    given: starts to use unchanged. restart: delete the files that earlier runs of the jobs left. A test write to each
    disk and object store makes a run fail now rather than after hours. In the operator's pods this attempt takes over
    the status of a job that succeeded in an earlier attempt.
    """
    if restart:
        if links := [output / job.name for job in jobs if (output / job.name).is_symlink()]:
            where = f"is a link to {links[0].readlink()}, which --restart would clear; use another --output"
            raise SpecError([Problem(str(links[0]), where)])
        with writing(output):
            (output / SUMMARY).unlink(missing_ok=True)
        for job in jobs:
            JobFolder(output, job).clear()
    starts = given or (from_the_start(jobs, output) if restart else unfinished(jobs, output))
    for job in jobs:
        if job.name not in starts:
            display.say(f"{job.name}: already finished in {output / job.name}; --restart runs it again")
            if own_attempt():
                JobFolder(output, job).adopt()
    if starts:
        with writing(output):
            (output / SAVE_REQUEST).unlink(missing_ok=True)
    for job in jobs:
        if job.name in starts:
            JobFolder(output, job).checkpoints.try_writing()
    return starts


def run_pending(
    pending: Sequence[Job],
    jobs: Sequence[Job],
    own: Mapping[str, Placed],
    folders: Mapping[str, Mapping[Role, str]],
    starts: Mapping[str, Start],
    context: RunContext,
    shared: Slots | None = None,
) -> None:
    """Check the pending jobs, run them one after the other, and release slots of this run; jobs: all of the manifest.

    own: placement on this machine by job name; empty for a Ray at a given address. folders: job name -> role -> model's
    folder. shared: as in `run_file`.
    """
    context.stop.install()  # once more, for Ray installs signal handlers of its own when it starts
    placed = own or {job.name: place_job(job, gpus_per_machine(), jobs, context.output) for job in pending}
    slots, first = shared or Slots(), pending[0]
    try:
        if own and not shared:  # the first job's processes start before the imports
            deadline = float(first.spec.training.call_deadline)
            slots.prepare(placed[first.name].mapping, home=first.saved, deadline=deadline)
        with collector_off():
            from rlhf_trainer.run.on_ray import run_on_ray  # torch and transformers: seconds
        require_ready(pending, jobs, context.output)
        for job in pending:
            run_on_ray(
                job,
                placed[job.name],
                folders[job.name],
                start=starts[job.name],
                slots=slots,
                is_last=job is pending[-1] and not shared,
                context=context,
            )
    finally:
        if not shared:
            slots.release()


def require_ready(pending: Sequence[Job], jobs: Sequence[Job], output: Path) -> None:
    """Raise a TrainerError with all errors that would end the jobs later; write each job's own errors to its status."""
    from rlhf_trainer.run.deep_check import problems  # torch and transformers: seconds

    found = list(problems(pending, jobs, output))
    for job in pending:
        if own := [error for failing, error in found if failing is job]:
            folder, error = JobFolder(output, job), together(own)
            folder.path.mkdir(parents=True, exist_ok=True)
            message = "; ".join(str(error).splitlines())
            folder.fail(reason=reason_of(error.exit_code), exit_code=error.exit_code, message=message)
    if found:
        raise together([error for _, error in found])


def write_report_or_warn(output: Path, display: Display) -> None:
    """Write the run's report; an error in it is only a warning, as the run has finished."""
    from rlhf_trainer.report.page import write_report  # matplotlib: a second that only a finished run needs

    try:
        write_report(output)
    except Exception as error:  # noqa: BLE001 whatever it is, the run has finished
        display.warn(f"no report: {type(error).__name__}: {error}")
