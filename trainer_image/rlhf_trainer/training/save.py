"""Writes a sharded model as a Hugging Face directory that transformers and vLLM load as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.stored_tensors import LocalFile, TensorSource, saved_by_ranks, write_piece, write_tensors
from rlhf_trainer.training.adapter_files import merged_weights, write_adapter
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, pieces_to_save, trained_parameters
from rlhf_trainer.training.stacks import as_stored

FILE_SIZE = "5GB"

CONFIG_FOLDER = "huggingface"
"""Folder of a model's checkpoint in which `save_config_and_tokenizer` writes."""
ADAPTER_FOLDER = "adapter"
"""Beside the folder of a saved model that has one."""


def save_model(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, of the type of the model's source) and tokenizer.

    A model with an adapter is merged with it, and the adapter is written beside the folder, as a PEFT directory.
    Every rank of the first replica writes what it holds, and all ranks put the final files together from these pieces,
    in chunks. So all ranks need to see the folder, which appears complete or not at all. EnvironmentProblem when it
    cannot be written. A collective.
    """
    rank = dist.get_rank()
    with atomic_folder(folder) if rank == 0 else nullcontext(_unfinished(folder)) as unfinished:
        dist.barrier()
        pieces = unfinished / "pieces"
        with disk_errors("the model", folder):
            pieces.mkdir(parents=True, exist_ok=True)
            held = pieces_to_save(model.mesh, trained_parameters(model))
            dtype = torch.float32 if model.adapter else inner(model.module).config.dtype
            write_piece(pieces / f"{rank}.safetensors", held, dtype)
            dist.barrier()
            _put_together(pieces, model, folder, unfinished)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(pieces)
            save_config_and_tokenizer(model, tokenizer, unfinished)
    dist.barrier()


def _put_together(pieces: Path, model: ShardedModel, folder: Path, unfinished: Path) -> None:
    """Write this rank's share of the final files; at the end no piece is open, as NFS deletes no open file."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, adapter = inner(model.module).config, model.adapter
    files = [LocalFile(partial(str, pieces / f"{each}.safetensors")) for each in range(ranks)]
    weights: Mapping[str, TensorSource] = saved_by_ranks(files)
    if adapter:
        if rank == 0:
            with atomic_folder(folder.with_name(ADAPTER_FOLDER)) as alone:
                write_adapter(adapter, weights, alone)
        weights = merged_weights(adapter, weights)
    write_weights(as_stored(config.model_type, weights), config.dtype, unfinished, rank=rank, ranks=ranks)


def write_weights(
    sources: Mapping[str, TensorSource], dtype: torch.dtype, folder: Path, *, rank: int = 0, ranks: int = 1
) -> None:
    """Write the weights of a Hugging Face directory in files of at most `FILE_SIZE`: this rank's share of the files."""
    sizes = {name: torch.empty(source.shape, dtype=dtype, device="meta") for name, source in sources.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_SIZE)
    for number, (file, names) in enumerate(split.filename_to_tensors.items()):
        if number % ranks == rank:
            write_tensors(folder / file, {name: sources[name] for name in names}, dtype, {"format": "pt"})
    if split.is_sharded and rank == 0:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


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
    unfinished = _unfinished(folder)
    try:
        with disk_errors("the model", folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield unfinished
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(folder.name + ".unfinished")


@contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn errors of the disk in the block into an EnvironmentProblem that names `what` and the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(f"{folder}: {what} cannot be written: {error}") from error
