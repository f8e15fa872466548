"""Saving a sharded model as a Hugging Face directory, and a trainer's state as a checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from rlhf_trainer.chat import end_tokens
from rlhf_trainer.errors import DataError, EnvironmentProblem, TrainerError
from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.stored_tensors import (
    LocalFile,
    StoredTensor,
    TensorSource,
    saved_by_ranks,
    tensor_files,
    write_piece,
    write_tensors,
    written_type,
)
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.adapters import merged_weights, write_adapter
from rlhf_trainer.training.compression import LEFT, left_of
from rlhf_trainer.training.distributed import local_shard
from rlhf_trainer.training.loading import as_stored, load_tokenizer, try_config
from rlhf_trainer.training.models import LanguageModel, Scorer, inner, kept_buffers
from rlhf_trainer.training.sharding import ShardedModel, named_as_stored, pieces_to_save, read_shard, trained_parameters

FILE_SIZE = "5GB"
CONFIG_FOLDER = "huggingface"
"""Name of the folder in a model's checkpoint that holds config and tokenizer (`save_config_and_tokenizer`)."""


def save_model(model: ShardedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, weights (safetensors, of the type of the model's source) and tokenizer.

    An adapter is merged into the weights, and also written beside the folder, as a PEFT directory. All ranks put the
    final files together from the first replica's shards, in chunks, so all must see the folder. It appears complete
    or not at all. EnvironmentProblem if the folder cannot be written. A collective.
    """
    rank = dist.get_rank()
    with atomic_folder(folder) if rank == 0 else nullcontext(_unfinished(folder)) as unfinished:
        dist.barrier()
        pieces = unfinished / "pieces"
        with disk_errors("the model", folder):
            pieces.mkdir(parents=True, exist_ok=True)
            held = pieces_to_save(model.mesh, saved_tensors(model))
            dtype = torch.float32 if model.adapter else inner(model.module).config.dtype
            write_piece(pieces / f"{rank}.safetensors", held, dtype)
            dist.barrier()
            _put_together(pieces, model, folder, unfinished)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(pieces)
            save_config_and_tokenizer(inner(model.module), tokenizer, unfinished)
    dist.barrier()


def saved_tensors(model: ShardedModel) -> dict[str, Tensor]:
    """Return the tensors of a trained model by name: parameters with kept buffers, or those of an adapter alone."""
    kept = {} if model.adapter else kept_buffers(inner(model.module))
    return {**trained_parameters(model), **named_as_stored(kept)}


def _put_together(pieces: Path, model: ShardedModel, folder: Path, unfinished: Path) -> None:
    """Write this rank's share of the final files. All pieces are closed at the end, as NFS deletes no open file."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, adapter = inner(model.module).config, model.adapter
    files = [LocalFile(partial(str, pieces / f"{each}.safetensors")) for each in range(ranks)]
    weights: Mapping[str, TensorSource] = saved_by_ranks(files)
    if adapter:
        if rank == 0:
            with atomic_folder(folder.with_name("adapter")) as alone:
                write_adapter(adapter, weights, alone)
        weights = merged_weights(adapter, weights)
    write_weights(as_stored(config.model_type, weights), config.dtype, unfinished, rank=rank, ranks=ranks)


def write_weights(
    sources: Mapping[str, TensorSource], dtype: torch.dtype, folder: Path, *, rank: int = 0, ranks: int = 1
) -> None:
    """Write the weights of a Hugging Face directory in files of at most `FILE_SIZE`: this rank's share of the files."""
    sizes = {
        name: torch.empty(source.shape, dtype=written_type(name, dtype), device="meta")
        for name, source in sources.items()
    }
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_SIZE)
    for number, (file, names) in enumerate(split.filename_to_tensors.items()):
        if number % ranks == rank:
            write_tensors(folder / file, {name: sources[name] for name in names}, dtype, {"format": "pt"})
    if split.is_sharded and rank == 0:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def try_saving(model: LanguageModel | Scorer, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> None:
    """Save all of a model but its weights into a temporary folder, and load it again; DataError if that fails."""
    pretrained, options = inner(model), dict[str, Any](trust_remote_code=trust_remote_code, revision=None)
    with TemporaryDirectory() as folder:
        try:
            save_config_and_tokenizer(pretrained, tokenizer, Path(folder))
            load_tokenizer(folder, **options)
            try_config(folder, scores=isinstance(model, Scorer), **options)
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError, TrainerError) as error:
            told = " ".join(str(error).split())[:300]
            raise DataError(f"{pretrained.name_or_path}: cannot be saved and loaded again: {told}") from error


def save_config_and_tokenizer(pretrained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face directory without its weights: config, generation config, tokenizer and the model's code."""
    folder.mkdir(parents=True, exist_ok=True)
    pretrained.config.architectures = [type(pretrained).__name__]
    if pretrained.config.pad_token_id is None:
        pretrained.config.pad_token_id = tokenizer.pad_token_id  # transformers needs the id to score more than one row
    if pretrained._auto_class:  # noqa: SLF001 the class is the model folder's own
        custom_object_save(pretrained, folder, config=pretrained.config)
    pretrained.config.save_pretrained(folder)
    if pretrained.can_generate() and pretrained.generation_config is not None:
        given = pretrained.generation_config.eos_token_id
        ends = end_tokens(tokenizer, given if isinstance(given, list) else [given]).ids
        pretrained.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        # save_pretrained refuses settings without effect, such as Vicuna's temperature beside `do_sample: false`
        pretrained.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that the block fills, then put it in the place of `folder`; EnvironmentProblem for disk errors."""
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


WEIGHT, MOMENT, REPLICA, OWN = "model.", "optimizer.", "replica-", "own/tensors.safetensors"
READERS = 8
"""Number of threads in which a rank reads a checkpoint; an object store answers slowly, but many requests at once."""


class TrainerState:
    """Saved state of a model and its optimizer: each rank writes its shards, and can read the shards of another layout.

    Files are safetensors, so loading runs no pickle. Tensors are `model.<name>` and `optimizer.<moment>.<name>`.
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.own_tensors: dict[str, Tensor] = {}
        """Further tensors, the same on every rank; the first rank writes them."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._sum = ""

    def begin_save(self, folder: Path, *, then: Callable[[], None], copies: bool) -> None:
        """Begin to save to `folder`; a thread calls `then` once all files are written.

        Each rank may have a folder of its own. copies: a thread writes a copy of the state, so that training can go on.
        Otherwise the files are written before the return, chunk by chunk, without memory for a second state.
        """
        random = {"cpu": torch.random.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        pieces = pieces_to_save(self._model.mesh, self._tensors(), self._of_replica())
        own = {name: each.clone() for name, each in self.own_tensors.items()} if dist.get_rank() == 0 else {}

        def write() -> None:
            with disk_errors("the checkpoint", folder):
                path = Path(_random_file(str(folder)))
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(random, path)
                if own:
                    (folder / OWN).parent.mkdir(exist_ok=True)
                    save_file(own, folder / OWN)
                self._sum = write_piece(folder / f"shard-{dist.get_rank()}.safetensors", pieces, torch.float32)

        def finish() -> None:
            if copies:
                write()
                pieces.clear()  # before the upload, which may take many steps
            then()

        if copies:
            pieces = {name: (tensor.to("cpu", copy=True), place) for name, (tensor, place) in pieces.items()}
        else:
            write()
        self._saving = self._writer.submit(finish)

    def end_save(self, *, waits: bool = True) -> str:
        """Return the checksum of this rank's last save, empty while the save runs; raise the error of a failed save.

        waits: whether to wait until the save has ended.
        """
        if self._saving and (waits or self._saving.done()):
            self._saving.result()
            self._saving = None
        return "" if self._saving else self._sum

    def load(self, uri: str) -> None:
        """Read this rank's shards from below an address; EnvironmentProblem if they cannot be read."""
        with storage_errors(uri):
            files, folder = open_storage(uri)
            stored = saved_by_ranks(tensor_files(files, folder))
            tensors = self._to_read(stored, uri)
            if missing := sorted(tensors.keys() - stored.keys()):
                raise ValueError(f"{missing[0]} is in none of the files")
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(lambda name: read_shard(tensors[name], stored[name]), tensors))
            if files.exists(_random_file(folder)):  # a checkpoint of fewer ranks has no state for this one
                states = load(files.cat_file(_random_file(folder)))
                torch.random.set_rng_state(states["cpu"])
                if "cuda" in states and torch.cuda.is_available():
                    torch.cuda.set_rng_state(states["cuda"])
            if files.exists(f"{folder}/{OWN}"):
                self.own_tensors.update(load(files.cat_file(f"{folder}/{OWN}")))

    def _tensors(self) -> dict[str, Any]:
        """Return all trained weights and Adam's moments by name; before the first step, moments of zeros are made."""
        tensors: dict[str, Any] = {}
        for name, parameter in trained_parameters(self._model).items():
            moments = self._optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), device=parameter.device)  # fused AdamW needs it on that device
                moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            tensors[f"{WEIGHT}{name}"] = parameter.detach()
            kept = {moment: value for moment, value in moments.items() if moment != LEFT}
            tensors.update({f"{MOMENT}{moment}.{name}": value for moment, value in kept.items()})
        return tensors

    def _of_replica(self) -> dict[str, Any]:
        """Return the tensors that differ between replicas that compress, by name: moments, and unsent rests of steps.

        The first replica's moments are among those of `_tensors`, which must have been called before.
        """
        mesh, own = self._model.mesh, dict[str, Any]()
        for name, parameter in trained_parameters(self._model).items() if mesh.compresses else ():
            left, moments = left_of(self._optimizer, parameter), self._optimizer.state[parameter]
            differing = {moment: moments[moment] for moment in ("exp_avg", "exp_avg_sq") if mesh.replica}
            place = f"{REPLICA}{mesh.replica + 1}-of-{mesh.layout.replicas}"
            own |= {f"{place}.{moment}.{name}": value for moment, value in {**differing, LEFT: left}.items()}
        return own

    def _to_read(self, stored: Mapping[str, StoredTensor], uri: str) -> dict[str, Any]:
        """Return the tensors to read, by stored name; warn if tensors of other replicas are dropped."""
        tensors, own = self._tensors(), self._of_replica()
        if own and own.keys() <= stored.keys():
            read = {id(value) for value in own.values()}
            return {name: value for name, value in tensors.items() if id(value) not in read} | own
        for name, value in own.items():
            if f".{LEFT}." in name:
                local_shard(value).zero_()
        if any(name.startswith(REPLICA) for name in stored):
            dropped = "so moments of all but the first, and what was not yet sent of steps, are dropped"
            recorder.warn(REPLICA, f"{uri}: saved with other replicas or gradientCompression, {dropped}")
        return tensors


def saved_weights(uri: str) -> dict[str, StoredTensor]:
    """Return the weights that a `TrainerState` wrote below an address, by name; EnvironmentProblem without files."""
    with storage_errors(uri):
        stored = saved_by_ranks(tensor_files(*open_storage(uri)))
    return {name.removeprefix(WEIGHT): tensor for name, tensor in stored.items() if name.startswith(WEIGHT)}


def _random_file(folder: str) -> str:
    return f"{folder}/random/rank-{dist.get_rank()}.safetensors"
