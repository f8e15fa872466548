"""Shapes of a job's models: from the manifest, an installed package, or a pod of the job that has read them."""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND, Role
from rlhf_api.packages import PACKAGE, in_package
from rlhf_api.problems import SpecError
from rlhf_api.spec.custom_algorithm import Custom
from rlhf_api.spec.job_spec import Model
from rlhf_api.status import ReadShape
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.config_file import ModelConfigError, architecture_in, made_from, manifest_architecture, shape_of
from rlhf_operator.snapshot import Snapshot

CONFIG = "config.json"


class Shapes(NamedTuple):
    """Known shapes of a job's models."""

    known: dict[Role, Architecture]
    parameters: dict[Role, float]
    """Lower bound of the number of parameters by model role, also for models of unknown shape."""
    why_unknown: str
    """Reason why the shape of a model is unknown; empty if all shapes are known."""


class Unread(NamedTuple):
    """Model whose config.json only a pod of the job can read."""

    uri: str
    """URI of the model at the beginning of its chain of jobs; all models of the chain have its shape."""
    revision: str | None
    at: str
    """URI of the model in the job's own manifest; job://NAME for a model that an earlier job makes."""


class UnknownShapeError(Exception):
    """The operator cannot tell the shape of a model; the message says why."""


def origins_of(job: Job, snapshot: Snapshot) -> dict[Role, Model]:
    """Return the origin of each model: the model at the beginning of its chain of jobs."""
    return {role: maker.models()[made] for role, maker, made in _makers(job, snapshot)}


def shapes_of(job: Job, snapshot: Snapshot) -> Shapes:
    """Return the known shapes of a job's models, which may not be all. Raises SpecError for an impossible shape."""
    known: dict[Role, Architecture] = {}
    parameters: dict[Role, float] = {}
    reasons = []
    for role, maker, made in _makers(job, snapshot):
        origin = maker.models()[made]
        read = _read(snapshot).get((origin.uri, origin.revision))
        try:
            known[role] = manifest_architecture(job, role, maker, made) or _found(origin, read, role)
            parameters[role] = known[role].parameters
        except UnknownShapeError as error:
            parameters[role] = (read.weight_bytes or 0) / 4 if read else 0.0  # a parameter takes at most 4 bytes
            reasons.append(f"spec.models.{job.spec.models.source_field(role)}.uri: {error}")
    return Shapes(known, parameters, reasons[0] if reasons else "")


def unread(job: Job, snapshot: Snapshot) -> tuple[Unread, ...]:
    """Return the models of a job whose config.json a pod must still read, each once."""
    read, models = _read(snapshot), job.models()
    missing: dict[tuple[str, str | None], Unread] = {}
    for role, origin in origins_of(job, snapshot).items():
        key, own = (origin.uri, origin.revision), models[role]
        is_known = own.shape or origin.shape or origin.uri.startswith(PACKAGE)
        if not is_known and key not in read:
            missing.setdefault(key, Unread(*key, at=own.uri))
    return tuple(missing.values())


def _makers(job: Job, snapshot: Snapshot) -> Iterator[tuple[Role, Job, Role]]:
    """Yield (role of a model, job at the beginning of the model's chain of jobs, role of the model in that job)."""
    inputs = {}
    for name, seen in snapshot.inputs.items():
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": dict(seen.spec)}
        with suppress(SpecError):  # nothing is known of what a job with an invalid spec makes
            parsed = Job.parse(document)
            if type(parsed.spec.algorithm) is not Custom:
                inputs[name] = parsed
    for role in job.models():
        yield role, *made_from(job, role, inputs)


def _read(snapshot: Snapshot) -> dict[tuple[str, str | None], ReadShape]:
    return {(each.uri, each.revision): each for each in snapshot.job.status.shapes}


def _found(origin: Model, read: ReadShape | None, role: Role) -> Architecture:
    """Return a model's shape from an installed package or a pod's answer. Raises UnknownShapeError without one."""
    try:
        if origin.uri.startswith(PACKAGE):
            return shape_of((in_package(origin.uri) / CONFIG).read_text(encoding="utf-8"), role)
        if read is not None and read.shape is not None:
            return architecture_in(read.shape, role)
    except (OSError, UnicodeDecodeError):
        raise UnknownShapeError(f"{origin.uri} has no {CONFIG} where the operator runs") from None
    except (ModelConfigError, LookupError) as error:
        raise UnknownShapeError(f"{origin.uri}: {error}") from error
    why = read.problem if read else f"its {CONFIG} has not been read"
    raise UnknownShapeError(f"{origin.uri}: {why}")
