"""Writes a sharded model as a Hugging Face directory that transformers and vLLM load as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import full_weights


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, gathered on rank 0) and tokenizer; the folder appears whole or not at all.

    EnvironmentProblem when the disk refuses.
    """
    is_writer = dist.get_rank() == 0
    weights: dict[str, torch.Tensor] = {}
    for name, weight in full_weights(model):
        if is_writer:
            weights[name] = weight.cpu().clone()  # a gathered weight may be a view into a longer, padded storage
    if is_writer:
        unfinished = folder.with_name(folder.name + ".unfinished")
        try:
            _write(inner(model), weights, tokenizer, unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise EnvironmentProblem(f"{folder}: the model cannot be written: {error}") from error
    dist.barrier()


def _write(
    pretrained: PreTrainedModel, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pretrained.config.architectures = [type(pretrained).__name__]
    if pretrained.config.pad_token_id is None:
        pretrained.config.pad_token_id = tokenizer.pad_token_id  # transformers needs it to score more than one row
    pretrained.config.save_pretrained(folder)
    if pretrained.can_generate() and pretrained.generation_config is not None:
        pretrained.generation_config.save_pretrained(folder)
    save_torch_state_dict(weights, folder)
    tokenizer.save_pretrained(folder)
