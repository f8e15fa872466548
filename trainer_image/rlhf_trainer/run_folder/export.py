"""A Hugging Face directory from any checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import CheckpointStore
from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.training.save import CONFIG_FOLDER, atomic_folder, write_weights
from rlhf_trainer.training.stacks import as_stored
from rlhf_trainer.training.state import saved_weights


def export(uri: str, folder: Path) -> None:
    """Write the model that the job of a checkpoint trains, as it was then, to a folder that is not there yet.

    Raises SpecError for an address that is no whole checkpoint, and for a folder that holds something.
    """
    store, slash, name = uri.rstrip("/").rpartition("/")
    found = {checkpoint.name: checkpoint for checkpoint in CheckpointStore(store or slash or ".").all()}
    if name not in found:
        raise SpecError([Problem(uri, "is no checkpoint; `rlhf checkpoints RUN_DIR` lists them")])
    if found[name].problem:
        raise SpecError([Problem(uri, f"is not whole: {found[name].problem}")])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError([Problem(str(folder), "is not an empty folder")])
    role = found[name].state()["model"]
    if role is None:
        raise SpecError([Problem(uri, "is of a job that trains no model")])
    saved = f"{found[name].uri}/{role}"
    weights = saved_weights(saved)
    with atomic_folder(folder.resolve()) as unfinished:
        with storage_errors(uri):
            files, path = open_storage(saved)
            files.get(f"{path}/{CONFIG_FOLDER}/", f"{unfinished}/", recursive=True)
        config = PreTrainedConfig.from_dict(PreTrainedConfig.get_config_dict(unfinished)[0])
        write_weights(as_stored(config.model_type, weights), config.dtype or torch.float32, unfinished)
