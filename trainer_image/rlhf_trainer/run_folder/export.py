"""A Hugging Face directory from any checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import CheckpointStore, downloaded, storage_errors
from rlhf_trainer.training.save import CONFIG_FOLDER, atomic_folder
from rlhf_trainer.training.state import whole_weights


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
    with downloaded(f"{found[name].uri}/{role}") as saved:
        with storage_errors(uri):
            weights = whole_weights(saved)
        with atomic_folder(folder.resolve()) as unfinished:
            shutil.copytree(saved / CONFIG_FOLDER, unfinished, dirs_exist_ok=True)
            save_torch_state_dict(weights, unfinished)
