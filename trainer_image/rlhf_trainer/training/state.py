"""Saves and loads a trainer's weights and moments: sharded, as safetensors, and loadable by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save_file
from torch import Tensor

from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.stored_tensors import StoredTensor, saved_by_ranks, tensor_files, write_piece
from rlhf_trainer.training.save import disk_errors
from rlhf_trainer.training.sharding import ShardedModel, pieces_to_save, read_shard, trained_parameters

WEIGHT, MOMENT = "model.", "optimizer."
READERS = 8
"""Threads of a rank that read a checkpoint, for an object store answers slowly, but many at once."""


class TrainerState:
    """One model with its optimizer: each rank writes its shards and reads those of another layout.

    Files are safetensors, so loading runs no pickle. A save goes on in the background. Tensors have their Hugging Face
    names: `model.<name>` and `optimizer.<moment>.<name>`.
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def begin_save(self, folder: Path, *, then: Callable[[], None], copies: bool) -> None:
        """Begin to save to `folder`; a thread calls `then` when all is written.

        Each rank may have a folder of its own. copies: a thread writes a copy of the state, so that training can go on;
        else the files are written before this returns, chunk by chunk, without memory for a second state.
        """
        random, pieces = random_state(), pieces_to_save(self._model.mesh, self._tensors())

        def write() -> None:
            with disk_errors("the checkpoint", folder):
                save_random_state(random, folder)
                write_piece(folder / f"shard-{dist.get_rank()}.safetensors", pieces, torch.float32)

        def finish() -> None:
            write()
            then()

        if copies:
            pieces = {name: (tensor.to("cpu", copy=True), place) for name, (tensor, place) in pieces.items()}
            self._saving = self._writer.submit(finish)
        else:
            write()
            self._saving = self._writer.submit(then)

    def end_save(self) -> None:
        """Wait until the last save is written; raises its error, if there was one."""
        if self._saving:
            self._saving.result()
            self._saving = None

    def load(self, uri: str) -> None:
        """Replace weights and moments by those below an address, saved by any number of ranks.

        A rank reads what it holds; EnvironmentProblem if that cannot be read.
        """
        tensors = self._tensors()
        with storage_errors(uri):
            files, folder = open_storage(uri)
            stored = saved_by_ranks(tensor_files(files, folder))
            if missing := sorted(tensors.keys() - stored.keys()):
                raise ValueError(f"{missing[0]} is in none of the files")
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(lambda name: read_shard(tensors[name], stored[name]), tensors))
            random = random_file(folder)
            if files.exists(random):  # a checkpoint has none for a rank beyond those that saved it
                set_random_state(load(files.cat_file(random)))

    def _tensors(self) -> dict[str, Any]:
        """Every weight that is trained, and its moments, by name; before the first step moments are made, all zero."""
        tensors: dict[str, Any] = {}
        for name, parameter in trained_parameters(self._model).items():
            moments = self._optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), device=parameter.device)  # fused AdamW wants it beside the moments
                moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            tensors[f"{WEIGHT}{name}"] = parameter.detach()
            tensors.update({f"{MOMENT}{moment}.{name}": value for moment, value in moments.items()})
        return tensors


def saved_weights(uri: str) -> dict[str, StoredTensor]:
    """The weights that a `TrainerState` wrote below an address, by Hugging Face name; EnvironmentProblem if none."""
    with storage_errors(uri):
        stored = saved_by_ranks(tensor_files(*open_storage(uri)))
    return {name.removeprefix(WEIGHT): tensor for name, tensor in stored.items() if name.startswith(WEIGHT)}


def random_state() -> dict[str, Tensor]:
    """State of torch's random generators of this rank."""
    states = {"cpu": torch.random.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def random_file(folder: str) -> str:
    """Where this rank's random state is in a checkpoint."""
    return f"{folder}/random/rank-{dist.get_rank()}.safetensors"


def save_random_state(states: dict[str, Tensor], folder: Path) -> None:
    """Write the random state of this rank."""
    path = Path(random_file(str(folder)))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(states, path)


def set_random_state(states: dict[str, Tensor]) -> None:
    """Put torch's random generators of this rank back."""
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
