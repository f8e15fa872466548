"""Runs a job on the connected Ray, in slots that the jobs of a manifest share."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.job_run import run_job
from rlhf_trainer.run.placement import Placed
from rlhf_trainer.run.preconditions import other_vocabularies
from rlhf_trainer.run.publisher import Publisher, RunContext
from rlhf_trainer.run.resume import Start
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.wiring import RayRuntime
from rlhf_trainer.run_folder.folder import JobFolder, add_to_summary
from rlhf_trainer.run_folder.written_data import with_written_data
from rlhf_trainer.workers.retokenized import with_prompts


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
    """Run one job into its folder and add its measures to summary.json."""
    publisher = Publisher(job, JobFolder(context.output, job), context.display, context.listeners)
    folder, checkpoint, mapping = publisher.folder, start.checkpoint, placed.mapping
    with publisher.recording_the_end():
        folder.begin(checkpoint, inputs=start.inputs, mapping=mapping)
        code = folder.keep_code(first_step=1 + (checkpoint.step if checkpoint else 0))
        publisher.open(mapping, unmapped=placed.unmapped, code=code, checkpoint=checkpoint)
        retokenized = other_vocabularies(job, folders)
        running = with_written_data(job, context.output)
        running = with_prompts(running) if retokenized else running
        columns = job.spec.columns(job.spec.data.train)
        runtime = RayRuntime(
            running, mapping, folders, slots=slots, path=folder.path, columns=columns, retokenized=retokenized
        )
        with runtime.running(is_last=is_last) as shape:
            publisher.say(*shape.facts)
            checkpoints = KeptCheckpoints(
                job, folder, runtime.models, data=shape, stop=context.stop, resumed=checkpoint
            )
            made = folder.made.resolve()
            summary = run_job(running, runtime, shape, made=made, publisher=publisher, checkpoints=checkpoints)
        add_to_summary(context.output, job.name, summary)
