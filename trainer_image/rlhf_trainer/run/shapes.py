"""The shapes of a job's models, from the manifest or config.json: no weight is loaded, and no torch needed."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import one_line
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.config_file import ModelConfigError, made_from, manifest_architecture, shape_of
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.hub import HUB
from rlhf_trainer.run_folder.folder import model_folder

CONFIG, CLAIM = "config.json", "pvc://"


def shapes_of(jobs: Sequence[Job], job: Job, output: Path) -> dict[Role, Architecture]:
    """Return the architecture of each model of a job; jobs: all of the manifest, as an earlier one may make a model.

    Only config.json is read, and only if the manifest does not give the model's shape. DataError if config.json is
    missing or describes no decoder; EnvironmentProblem if it is on the hub and huggingface_hub is not installed;
    SpecError for an impossible shape. The errors name the field of the manifest.
    """
    by_name = {each.name: each for each in jobs}
    return {role: _shape(job, role, *made_from(job, role, by_name), output) for role in job.models()}


def _shape(job: Job, role: Role, maker: Job, made: Role, output: Path) -> Architecture:
    if told := manifest_architecture(job, role, maker, made):
        return told
    model = maker.models()[made]
    try:
        return _read(config_file(model.uri, model.revision, output), role)
    except (DataError, EnvironmentProblem) as error:
        path = f"{maker.name}: spec.models.{maker.spec.models.source_field(made)}.uri"
        raise type(error)(f"{path}: {error}") from error


def _read(file: Path, role: Role) -> Architecture:
    try:
        return shape_of(file.read_text(encoding="utf-8"), role)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    except ModelConfigError as error:
        raise DataError(f"{file}: {error}") from error


def config_file(uri: str, revision: str | None, output: Path) -> Path:
    """Return the path of a model's config.json, fetched if the model is on the hub; raises as `shapes_of` does."""
    if uri.startswith(CLAIM):
        raise DataError(f"{uri}: is on a claim of a cluster; a plan takes the numbers of models.<role>.shape instead")
    folder = model_folder(uri, output)
    if uri.startswith(HUB):
        return _from_hub(folder, revision)
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise DataError(f"{folder}: the folder has no {CONFIG}" if Path(folder).is_dir() else f"{folder}: is not there")
    return file


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise EnvironmentProblem(f"{HUB}{name}: reading its {CONFIG} needs the package huggingface_hub") from error
    try:
        return Path(hf_hub_download(name, CONFIG, revision=revision))
    except Exception as error:  # a proxy's error is of the HTTP client's own kind
        raise DataError(f"{HUB}{name}: its {CONFIG} cannot be fetched: {one_line(str(error), 300)}") from error
