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

DESCRIPTION = "huggingface"
"""Folder beside the shards of a model in a checkpoint: what `save_description` writes."""


def save_model(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, gathered on rank 0) and tokenizer; the folder appears whole or not at all.

    EnvironmentProblem when the disk refuses.
    """
    weights = weights_on_first_rank(model)
    if dist.get_rank() == 0:
        with appearing_whole(folder) as unfinished:
            save_description(model, tokenizer, unfinished)
            save_torch_state_dict(weights, unfinished)
    dist.barrier()


def save_description(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
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
def appearing_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to fill in the block; it takes the place of `folder` when the block ends well.

    EnvironmentProblem when the disk refuses.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        with writing("the model", folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield unfinished
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """A disk that refuses in the block is an EnvironmentProblem that names `what` and the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(f"{folder}: {what} cannot be written: {error}") from error
