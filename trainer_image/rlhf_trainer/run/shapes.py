"""The shapes of a job's models, from the config.json that each comes from: no weight is loaded, and no torch needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec import Model
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.config_file import ConfigError, made_from, shape_of
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.run_folder.folder import HUB, model_folder

CONFIG = "config.json"


def shapes_of(jobs: Sequence[Job], job: Job, output: Path) -> dict[Role, Architecture]:
    """The shape of each model of a job; jobs: those of the manifest, which may make its models.

    Nothing but config.json is read. DataError where there is none or it describes no decoder; EnvironmentProblem where
    it is on the hub and huggingface_hub is not installed. Both name the field of the manifest.
    """
    by_name, shapes = {each.name: each for each in jobs}, {}
    for role in job.models():
        maker, made = made_from(job, role, by_name)
        try:
            shapes[role] = _read(_config_file(maker.models()[made], output), role)
        except (DataError, EnvironmentProblem) as error:
            path = f"{maker.name}: spec.models.{maker.spec.models.source_field(made)}.uri"
            raise type(error)(f"{path}: {error}") from error
    return shapes


def _read(file: Path, role: Role) -> Architecture:
    try:
        return shape_of(file.read_text(encoding="utf-8"), role)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    except ConfigError as error:
        raise DataError(f"{file}: {error}") from error


def _config_file(model: Model, output: Path) -> Path:
    folder = model_folder(model.uri, output)
    if model.uri.startswith(HUB):
        return _from_hub(folder, model.revision)
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise DataError(f"{folder}: the folder has no {CONFIG}" if Path(folder).is_dir() else f"{folder}: is not there")
    return file


def _from_hub(name: str, revision: str | None) -> Path:
    """config.json of a model on the Hugging Face Hub; no other file is fetched."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise EnvironmentProblem(f"{HUB}{name}: reading its {CONFIG} needs the package huggingface_hub") from error
    try:
        return Path(hf_hub_download(name, CONFIG, revision=revision))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{HUB}{name}: its {CONFIG} cannot be fetched: {reason}") from error
