"""Data sets that earlier jobs of a run folder wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_api.chain import SCHEME, data_from_jobs, with_sources
from rlhf_api.job import Job
from rlhf_api.spec.data import DataSource, Rows
from rlhf_trainer.errors import DataError
from rlhf_trainer.run_folder.folder import finished_jobs


def with_written_data(job: Job, output: Path) -> Job:
    """Return the job with file URIs, not job://, for data that earlier jobs wrote. DataError for unfinished data."""
    finished = finished_jobs(output)
    for field, name in data_from_jobs(job).items():
        if name not in finished:
            raise DataError(f"{job.name}: {field}.uri: {SCHEME}{name} has not been written; run its job first")

    def here(source: Rows) -> Rows:
        if not (isinstance(source, DataSource) and source.uri.startswith(SCHEME)):
            return source
        return source.model_copy(update={"uri": _folder(output, source.uri.removeprefix(SCHEME)).resolve().as_uri()})

    return job.model_copy(update={"spec": with_sources(job.spec, here)})


def is_written(job: Job, output: Path, made: Mapping[str, str]) -> bool:
    """Whether every data set that another job writes for this job is whole.

    made: identity of each job by name; a data set of another experiment will be written again.
    """
    written = {name: finished.identity for name, finished in finished_jobs(output).items()}
    return all(name in written and written[name] == made[name] for name in data_from_jobs(job).values())


def _folder(output: Path, name: str) -> Path:
    return output / name / "data"
