"""The shapes of a job's models, from the config.json that each comes from: no weight is loaded, and no torch needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec import Model
from rlhf_mapper.architecture import Architecture, architecture_of
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.run.folder import HUB, JOB, model_folder

CONFIG = "config.json"
SCORERS: tuple[Role, ...] = ("critic", "reward", "cost", "cost_critic")
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
MOST = 10_000_000
"""No size of a model is larger."""
DECODERS = ("ForCausalLM", "ForSequenceClassification")
"""How the architectures of transformers that the trainer takes are named."""


def shapes_of(jobs: Sequence[Job], job: Job, output: Path) -> dict[Role, Architecture]:
    """The shape of each model of a job; jobs: those of the manifest, which may make its models.

    Nothing but config.json is read. DataError where there is none or it describes no decoder; EnvironmentProblem where
    it is on the hub and huggingface_hub is not installed. Both name the field of the manifest.
    """
    by_name = {each.name: each for each in jobs}
    return {role: _shape(*made_from(job, role, by_name), output, scores=role in SCORERS) for role in job.models()}


def made_from(job: Job, role: Role, jobs: Mapping[str, Job]) -> tuple[Job, Role]:
    """The job and the role whose model a chain of jobs makes this one from; it has the same shape."""
    while maker := jobs.get(_maker(job.models()[role])):
        job, role = maker, maker.spec.algorithm.trained[0]
    return job, role


def _maker(model: Model) -> str:
    """Name of the job that makes a model; empty where none does."""
    return model.uri.removeprefix(JOB) if model.uri.startswith(JOB) else ""


def _shape(job: Job, role: Role, output: Path, *, scores: bool) -> Architecture:
    path = f"{job.name}: spec.models.{job.spec.models.source_field(role)}.uri"
    try:
        file = _config_file(job.models()[role], output)
        config = _config(file)
        return architecture_of(config, scores=scores)
    except KeyError as error:
        raise DataError(f"{path}: {file}: has no {error.args[0]}, which the shape of a model needs") from error
    except (DataError, EnvironmentProblem) as error:
        raise type(error)(f"{path}: {error}") from error


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


def _config(file: Path) -> dict[str, Any]:
    """What config.json says, without what it leaves open (null). DataError where it describes no decoder."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: is no mapping")
    config = {name: value for name, value in config.items() if value is not None}
    names = config.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: architectures is {json.dumps(names)[:100]}, expected a list of names")
    if is_no_decoder(config):
        kind = ", ".join(config.get("architectures", [])) or str(config.get("model_type", "this model"))
        raise DataError(f"{file}: {kind} is no decoder (such as LlamaForCausalLM), and only those are trained here")
    for name in SIZES:
        value = config.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{file}: {name} is {json.dumps(value)[:100]}, expected a positive whole number")
        if value > MOST:
            raise DataError(f"{file}: {name} is beyond {MOST:,}, which no model has")
    if conflict := _conflict(config):
        raise DataError(f"{file}: {conflict}")
    return config


def _conflict(config: Mapping[str, Any]) -> str | None:
    """Which sizes do not go together, each of which may be."""
    heads, hidden = config.get("num_attention_heads", 1), config.get("hidden_size")
    kv_heads, per_token = config.get("num_key_value_heads", heads), config.get("num_experts_per_tok", 1)
    experts = config.get("num_local_experts", config.get("num_experts"))
    if hidden and hidden % heads and "head_dim" not in config:
        return f"num_attention_heads is {heads}, which does not divide hidden_size, {hidden}"
    if heads % kv_heads:
        return f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}"
    if experts and per_token > experts:
        return f"num_experts_per_tok is {per_token}, but there are {experts} experts"
    return None


def is_no_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its model encodes: T5, BERT and their kin, or a model of more than text."""
    names = config.get("architectures", [])
    is_other = bool(names) and not any(str(name).endswith(DECODERS) for name in names)
    return is_other or bool(config.get("is_encoder_decoder")) or "type_vocab_size" in config
