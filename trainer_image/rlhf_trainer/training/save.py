"""Writes a sharded model as a Hugging Face directory that transformers and vLLM load as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, weights_on_first_rank

CONFIG_FOLDER = "huggingface"
"""Folder of a model's checkpoint in which `save_config_and_tokenizer` writes."""


def save_model(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, gathered on rank 0) and tokenizer; the folder appears complete or not at all.

    EnvironmentProblem when it cannot be written. A collective.
    """
    weights = weights_on_first_rank(model)
    if dist.get_rank() == 0:
        with atomic_folder(folder) as unfinished:
            save_config_and_tokenizer(model, tokenizer, unfinished)
            save_torch_state_dict(weights, unfinished)
    dist.barrier()


def save_config_and_tokenizer(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write everything of a Hugging Face directory but the weights: config, generation config and tokenizer."""
    pretrained = inner(model.module)
    pretrained.config.architectures = [type(pretrained).__name__]
    if pretrained.config.pad_token_id is None:
        pretrained.config.pad_token_id = tokenizer.pad_token_id  # transformers needs it to score more than one row
    pretrained.config.save_pretrained(folder)
    if pretrained.can_generate() and pretrained.generation_config is not None:
        pretrained.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill in the block; it replaces `folder` when the block ends without an error.

    EnvironmentProblem when it cannot be written.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        with disk_errors("the model", folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield unfinished
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn errors of the disk in the block into an EnvironmentProblem that names `what` and the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(f"{folder}: {what} cannot be written: {error}") from error
