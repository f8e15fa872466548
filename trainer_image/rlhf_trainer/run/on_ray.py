"""Runs the jobs of a manifest on the connected Ray, one after the other, in slots that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.numbers import duration
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.context import RunContext
from rlhf_trainer.run.job_run import run_job
from rlhf_trainer.run.placement import Placed
from rlhf_trainer.run.preconditions import other_vocabularies
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.resume import Start
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.wiring import RayRuntime
from rlhf_trainer.run_folder.folder import JobFolder, add_to_summary
from rlhf_trainer.run_folder.written_data import with_written_data


def run_jobs(
    jobs: Sequence[Job],
    placed: Mapping[str, Placed],
    folders: Mapping[str, Mapping[Role, str]],
    starts: Mapping[str, Start],
    slots: Slots,
    context: RunContext,
) -> None:
    """Run the jobs in their order; placed, folders (of the models by role) and starts: by the name of the job."""
    for job in jobs:
        run_on_ray(
            job,
            placed[job.name],
            folders[job.name],
            start=starts[job.name],
            slots=slots,
            is_last=job is jobs[-1],
            context=context,
        )


def run_on_ray(
    job: Job,
    placed: Placed,
    folders: Mapping[Role, str],
    *,
    start: Start,
    slots: Slots,
    is_last: bool,
    context: RunContext,
) -> None:
    """Run one job into its folder and add what it measured to summary.json."""
    folder = JobFolder(context.output, job)
    publisher = Publisher(job, folder, context.display, context.listeners)
    mapping = placed.mapping
    with publisher.recording_the_end():
        folder.begin(start.checkpoint, inputs=start.inputs)
        publisher.say(f"{job.spec.algorithm.name} on {' | '.join(map(mapping.described, mapping.pools))}")
        report_mapping(mapping, publisher)
        if placed.unmapped:
            publisher.say(f"not mapped: {placed.unmapped}")
        if changed := folder.keep_code(first_step=1 + (start.checkpoint.step if start.checkpoint else 0)):
            publisher.say(changed)
        if start.checkpoint:
            publisher.say(f"goes on after step {start.checkpoint.step}, from {start.checkpoint.uri}")
        strangers = other_vocabularies(job, folders)
        running = with_written_data(job, context.output)
        stacks = folder.path / "stacks.txt"
        runtime = RayRuntime(running, mapping, folders, slots=slots, stacks=stacks, strangers=strangers)
        with runtime.running(is_last=is_last) as shape:
            for fact in shape.facts:
                publisher.say(fact)
            summary = run_job(
                runtime.job,
                runtime,
                shape,
                made=folder.made.resolve(),
                publisher=publisher,
                checkpoints=KeptCheckpoints(
                    job, folder, runtime.models, data=shape, stop=context.stop, resumed=start.checkpoint
                ),
            )
        add_to_summary(context.output, job.name, summary)


def report_mapping(placed: DeviceMapping, publisher: Publisher) -> None:
    """Leave the mapping in the job's folder, and say what a step is predicted to take."""
    publisher.folder.write_mapping(placed)
    if prediction := placed.prediction:
        pools = "1 pool" if len(placed.pools) == 1 else f"{len(placed.pools)} pools"
        publisher.say(f"mapped: {pools}, predicted {duration(prediction.step_seconds)} a step")
