"""Export of a checkpoint's model as a Hugging Face directory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import Checkpoint, CheckpointStore
from rlhf_trainer.run_folder.folder import JOB_FILE, reading
from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.stored_tensors import TensorSource
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
    weights: Mapping[str, TensorSource] = saved_weights(saved)
    adapter: Adapter | None = None
    with reading(checkpoint.uri):
        source = Job.parse(kubectl_yaml.read(checkpoint.text(JOB_FILE), "")[0]).models()[role]
        if source.lora is not None:
            text = checkpoint.text(f"{role}/{CONFIG_FOLDER}/{ADAPTER_CONFIG}")
            adapter = adapter_of(text, trust_remote_code=source.trust_remote_code)
    if merges and not adapter:
        raise SpecError([Problem(uri, "is of a job without an adapter, so there is nothing to merge")])
    with atomic_folder(folder.resolve()) as unfinished:
        if adapter and merges is False:
            write_adapter(adapter, weights, unfinished)
            return
        with storage_errors(uri):
            files, path = open_storage(saved)
            files.get(f"{path}/{CONFIG_FOLDER}/", f"{unfinished}/", recursive=True)
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
