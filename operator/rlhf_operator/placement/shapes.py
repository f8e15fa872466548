"""The shapes of a job's models, where the operator can read them: those that come from an installed package."""

from __future__ import annotations

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND, Role
from rlhf_api.packages import PACKAGE, in_package
from rlhf_api.problems import SpecError
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.config_file import ConfigError, made_from, shape_of
from rlhf_operator.snapshot import Snapshot

CONFIG = "config.json"


class UnknownShapeError(Exception):
    """The operator cannot tell the shape of a model; the message says of which and why."""


def origins_of(job: Job, snapshot: Snapshot) -> dict[Role, str]:
    """Where each model comes from at last: the URI from which a chain of jobs makes it."""
    jobs = _inputs(snapshot)
    origins: dict[Role, str] = {}
    for role in job.models():
        maker, made = made_from(job, role, jobs)
        origins[role] = maker.models()[made].uri
    return origins


def shapes_of(job: Job, snapshot: Snapshot) -> dict[Role, Architecture]:
    """The shape of every model of the job. Raises UnknownShapeError."""
    return {role: _shape(job, role, uri) for role, uri in origins_of(job, snapshot).items()}


def _inputs(snapshot: Snapshot) -> dict[str, Job]:
    """The jobs that this one reads, and those that they read, as far as they were seen and are right."""
    found = {}
    for name, seen in snapshot.inputs.items():
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": dict(seen.spec)}
        try:
            found[name] = Job.parse(document)
        except SpecError:
            continue  # nothing is known of what it makes
    return found


def _shape(job: Job, role: Role, uri: str) -> Architecture:
    path = f"spec.models.{job.spec.models.source_field(role)}.uri"
    if not uri.startswith(PACKAGE):
        raise UnknownShapeError(f"{path}: the operator does not read the config.json of {uri}")
    try:
        text = (in_package(uri) / CONFIG).read_text(encoding="utf-8")
        return shape_of(text, role)
    except (OSError, UnicodeDecodeError):
        raise UnknownShapeError(f"{path}: {uri} has no {CONFIG} where the operator runs") from None
    except (ConfigError, LookupError) as error:
        raise UnknownShapeError(f"{path}: {uri}: {error}") from error
