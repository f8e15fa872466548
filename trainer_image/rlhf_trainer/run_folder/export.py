"""Export of a checkpoint's model as a Hugging Face directory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.job_spec import Model
from rlhf_trainer.checkpoint import Checkpoint, CheckpointStore
from rlhf_trainer.hybrid_engine.weight_store import WeightReader
from rlhf_trainer.run_folder.folder import JOB_FILE, reading
from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.stored_tensors import HeldTensor, TensorSource
from rlhf_trainer.training.adapters import CONFIG as ADAPTER_CONFIG
from rlhf_trainer.training.adapters import adapter_of, merged_weights, write_adapter
from rlhf_trainer.training.loading import as_stored
from rlhf_trainer.training.models import Adapter
from rlhf_trainer.training.saving import CONFIG_FOLDER, atomic_folder, saved_weights, write_weights


def export(uri: str, folder: Path, *, merges: bool | None) -> None:
    """Write the trained model of a checkpoint to a new folder.

    An adapter becomes a PEFT directory or, unless `merges` is False, one model together with its base weights. Raises
    SpecError for an address that is no whole checkpoint, for `merges` True without an adapter, and for a folder that
    is not empty.
    """
    checkpoint = _whole_checkpoint(uri)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError([Problem(str(folder), "is not an empty folder")])
    role = checkpoint.state()["model"]
    if role is None:
        raise SpecError([Problem(uri, "is of a job that trains no model")])
    saved = f"{checkpoint.uri}/{role}"
    with reading(checkpoint.uri):
        model = Job.parse(kubectl_yaml.read(checkpoint.text(JOB_FILE), "")[0]).models()[role]
    if merges and not model.lora:
        raise SpecError([Problem(uri, "is of a job without an adapter, so there is nothing to merge")])
    write_model(saved, model, saved_weights(saved), folder, merges=merges)


def write_held(reader: WeightReader, folder: Path) -> None:
    """Replace `folder` by a Hugging Face directory with the weights that a reader of a weight store holds."""
    weights = {name: HeldTensor(tensor) for name, tensor in reader.weights.items()}
    write_model(reader.full, reader.job.models()["actor"], weights, folder, merges=None)


def write_model(
    uri: str, model: Model, weights: Mapping[str, TensorSource], folder: Path, *, merges: bool | None
) -> None:
    """Write a trained model, whose config is below `uri`, as a Hugging Face directory; merges: as for `export`."""
    adapter: Adapter | None = None
    with storage_errors(uri):
        files, path = open_storage(f"{uri}/{CONFIG_FOLDER}")
        text = files.cat_file(f"{path}/{ADAPTER_CONFIG}") if model.lora else b""
    if model.lora:
        adapter = adapter_of(text.decode(), trust_remote_code=model.trust_remote_code)
    with atomic_folder(folder.resolve()) as unfinished:
        if adapter and merges is False:
            write_adapter(adapter, weights, unfinished)
            return
        with storage_errors(uri):
            files.get(f"{path}/", f"{unfinished}/", recursive=True)
        (unfinished / ADAPTER_CONFIG).unlink(missing_ok=True)
        config = PreTrainedConfig.from_dict(PreTrainedConfig.get_config_dict(unfinished)[0])
        weights = merged_weights(adapter, weights) if adapter else weights
        write_weights(as_stored(config.model_type, weights), config.dtype or torch.float32, unfinished)


def _whole_checkpoint(uri: str) -> Checkpoint:
    """Return the checkpoint at an address. SpecError if there is none, or it is not whole."""
    store, slash, name = uri.rstrip("/").rpartition("/")
    checkpoint = next((each for each in CheckpointStore(store or slash or ".").all() if each.name == name), None)
    if checkpoint is None:
        raise SpecError([Problem(uri, "is no checkpoint; `rlhf checkpoints RUN_DIR` lists them")])
    if checkpoint.problem:
        raise SpecError([Problem(uri, f"is not whole: {checkpoint.problem}")])
    return checkpoint
