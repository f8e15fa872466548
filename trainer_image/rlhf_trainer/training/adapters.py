"""Low-rank adapters (Hu et al., arXiv:2106.09685), W + s B A in place of W, and their files in PEFT's format.

Only A and B are trained. A is [r, in], B is [out, r], and s = alpha / r. A and B are parameters of the module of W, so
sharding cuts them with W, and W keeps its name. The new head of a scorer is trained in full.
A PEFT directory has adapter_config.json and adapter_model.safetensors.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import cached_file

from rlhf_api.spec.job_spec import Model
from rlhf_api.spec.lora import Lora
from rlhf_api.tables import read_table
from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.expert_rows import expert_count
from rlhf_trainer.stored_tensors import LocalFile, Piece, StoredTensor, TensorSource, read_into, write_tensors
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.distributed import device_here, local_shard
from rlhf_trainer.training.drawing import Drawing
from rlhf_trainer.training.loading import stored_model
from rlhf_trainer.training.models import Adapter, LanguageModel, Scorer, inner

A, B = "lora_a", "lora_b"
"""Names of the parameters that an adapter adds to a linear module, next to the module's `weight`."""
HEAD = "score"
"""Module name of a scorer's head, the layer that turns hidden states into scores."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: W x + bias + s B A x."""

    def __init__(self, adapted: nn.Linear, *, rank: int, scale: float) -> None:
        """Take over weight and bias of `adapted`, on the meta device; a `Drawing` records initial values of A and B."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = adapted.in_features, adapted.out_features
        self.weight, self.bias, self.scale, self.is_on = adapted.weight, adapted.bias, scale, True
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # the initial values of PEFT
        nn.init.zeros_(self.lora_b)

    def forward(self, given: Tensor) -> Tensor:
        output = super().forward(given)
        return output + linear(linear(given, self.lora_a), self.lora_b) * self.scale if self.is_on else output


def add_adapter(
    model: LanguageModel | Scorer, lora: Lora, source: Model, folder: str, *, seed: int, path: str
) -> Adapter:
    """Freeze a model on the meta device, and add an adapter to each targeted matrix of its layers, in place.

    source, folder: of the base model; path: field `lora` in the manifest. ConfigError for a target that no layer has.
    """
    pretrained = inner(model)
    matrices = _matrices_in_layers(pretrained)
    names = sorted({name.rpartition(".")[2] for name in matrices})
    for name in lora.targets:
        if name not in names:
            experts = "; experts have no adapters" if expert_count(pretrained.config) else ""
            raise ConfigError(f"{path}.targets: the model has no {name}; there are {', '.join(names)}{experts}")
    targets = tuple(sorted(set(lora.targets or names)))
    if not targets:
        raise ConfigError(f"{path}: no layer of {type(pretrained).__name__} has a linear matrix to adapt")
    model.adapter = adapter = Adapter(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=targets,
        base=folder,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        scores=isinstance(model, Scorer),
    )
    pretrained.requires_grad_(False)
    if isinstance(model, Scorer):
        getattr(pretrained, HEAD).requires_grad_(True)
    torch.manual_seed(seed)
    with Drawing() as drawing:
        for name, each in matrices.items():
            if name.rpartition(".")[2] in targets:
                pretrained.set_submodule(name, AdaptedLinear(each, rank=lora.rank, scale=adapter.scale))
    initial = {name: drawing.of(each) for name, each in pretrained.named_parameters() if name.endswith((A, B))}
    model.weights = {**(model.weights or {}), **initial}
    return adapter


def _matrices_in_layers(pretrained: PreTrainedModel) -> dict[str, nn.Linear]:
    layers = set(pretrained._no_split_modules or [])  # noqa: SLF001 there is no public name
    return {
        f"{above}.{name}": each
        for above, layer in pretrained.named_modules()
        if type(layer).__name__ in layers
        for name, each in layer.named_modules()
        if isinstance(each, nn.Linear)
    }


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off while the block runs, so that the model is the frozen base model."""
    layers = [each for each in model.modules() if isinstance(each, AdaptedLinear)]
    for each in layers:
        each.is_on = False
    try:
        yield
    finally:
        for each in layers:
            each.is_on = True


def shard_adapted(module: AdaptedLinear, axis: DeviceMesh, style: ParallelStyle) -> None:
    """Cut a layer with its adapter over tensor-parallel ranks: B like the rows of W, or A like its columns."""
    by_rows = isinstance(style, ColwiseParallel)  # "columns" are those of the transposed matrix
    own = {name: module._parameters.pop(name) for name in (A, B)}  # noqa: SLF001 else the style would cut them like W
    parallelize_module(module, axis, style)
    cuts: dict[str, Placement] = {A: Replicate() if by_rows else Shard(1), B: Shard(0) if by_rows else Replicate()}
    for name, parameter in own.items():
        assert parameter is not None, "a layer has both"
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, axis, [cuts[name]])))


class AdaptedShard:
    """This rank's shard of an adapted weight, W + s B A; indexing computes only the requested part."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """weight, b: this rank's rows of W and of B; a: all rows of A, at the columns of W that this rank holds."""
        self._weight, self._a, self._b, self._scale = weight, a, b, scale
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, columns = index
        return _sum(self._weight[index], self._a[:, columns], self._b[rows], self._scale).to(self.dtype)


def with_adapters(parameters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor | AdaptedShard]:
    """Return this rank's shards of the effective weights (W + s B A where there is an adapter), by name.

    FSDP2 and tensor parallelism give a rank the same rows of B as of W, and the same columns of A, but not all rows of
    A. The rows of A are gathered: a collective of the stage's data-parallel ranks, if there is an adapter.
    """
    found: dict[str, Tensor | AdaptedShard] = {}
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        if kind in (A, B):
            continue
        shard = local_shard(parameter.detach())
        a, b = (parameters.get(f"{module}.{each}") for each in (A, B))
        if kind == "weight" and a is not None and b is not None:
            found[name] = AdaptedShard(shard, _all_rows(a.detach()).to(shard.device), local_shard(b.detach()), scale)
        else:
            found[name] = shard
    return found


def _all_rows(a: Tensor) -> Tensor:
    """Gather all rows of A at this rank's columns, on the device; a plain tensor is whole already."""
    if not isinstance(a, DTensor):
        return a
    is_cut_by_columns = [isinstance(each, Shard) and each.dim == 1 for each in a.placements]
    placements = [each if cut else Replicate() for each, cut in zip(a.placements, is_cut_by_columns, strict=True)]
    there = a.to_local().to(device_here())
    here = DTensor.from_local(there, a.device_mesh, a.placements, run_check=False, shape=a.shape, stride=a.stride())
    return here.redistribute(placements=placements).to_local()


@dataclass(frozen=True)
class Merged:
    """Tensor source of a merged weight: W + s B A in float32, computed part by part from the stored W, A and B."""

    weight: TensorSource
    a: TensorSource
    b: TensorSource
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        for part, values in self.weight.parts(wanted):
            (top, left), (bottom, right) = part.starts, part.stops
            rank = self.a.shape[0]
            a, b = torch.empty(rank, right - left), torch.empty(bottom - top, rank)
            read_into(a, TensorSlice((0, left), (rank, right)), self.a)
            read_into(b, TensorSlice((top, 0), (bottom, rank)), self.b)
            yield part, _sum(values, a, b, self.scale)


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the name of a model's parameter."""
PLAIN = read_table(__package__, "adapter_config.yaml", dict[str, Any])
"""Fields of adapter_config.json and the only supported value of each; an adapter to read may have any dropout."""


def peft_name(name: str) -> str:
    """Return the name that PEFT's files give to a trained parameter of the model."""
    for own, theirs in ((A, "lora_A.weight"), (B, "lora_B.weight")):
        if name.endswith(f".{own}"):
            return f"{PREFIX}{name.removesuffix(own)}{theirs}"
    return f"{PREFIX}{name}"


def write_adapter_config(adapter: Adapter, folder: Path) -> None:
    """Write adapter_config.json, the settings of an adapter in PEFT's format."""
    document = {
        **PLAIN,
        "task_type": "SEQ_CLS" if adapter.scores else "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "modules_to_save": [HEAD] if adapter.scores else None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def adapter_of(text: str, *, trust_remote_code: bool) -> Adapter:
    """Read an adapter's settings from the text of an adapter_config.json that `write_adapter_config` wrote."""
    found = json.loads(text)
    return Adapter(
        rank=found["r"],
        alpha=found["lora_alpha"],
        targets=tuple(found["target_modules"]),
        base=found["base_model_name_or_path"],
        revision=found["revision"],
        trust_remote_code=trust_remote_code,
        scores=found["task_type"] == "SEQ_CLS",
    )


def write_adapter(adapter: Adapter, trained: Mapping[str, TensorSource], folder: Path) -> None:
    """Write a PEFT directory; trained: the tensors of the adapter and of a new head, by their names in the model."""
    write_adapter_config(adapter, folder)
    named = {peft_name(name): each for name, each in trained.items()}
    write_tensors(folder / WEIGHTS, named, torch.float32, {"format": "pt"})


def merged_weights(adapter: Adapter, trained: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors of base model plus adapter, by name; DataError if the base model's files are gone."""
    if Path(adapter.base).is_absolute() and not Path(adapter.base).is_dir():
        raise DataError(f"{adapter.base}: the model that the adapter adds to is not there any more")
    code, revision = adapter.trust_remote_code, adapter.revision
    found: dict[str, TensorSource] = {}
    stored = stored_model(adapter.base, scores=adapter.scores, trust_remote_code=code, revision=revision)
    for name, weight in stored.items():
        module = name.removesuffix(".weight")
        a, b = (trained.get(f"{module}.{each}") for each in (A, B))
        found[name] = Merged(weight, a, b, adapter.scale) if a and b else weight
    return found | {name: each for name, each in trained.items() if not name.endswith((A, B))}


def initial_weights(
    adapter: Adapter, folder: str, shapes: Mapping[str, tuple[int, ...]], *, path: str
) -> dict[str, StoredTensor]:
    """Return an adapter's parameters in a PEFT directory (local or hub); DataError if it does not fit the model."""
    where = f"{path}: {folder}"
    config, weights = _found(folder, CONFIG, where), _found(folder, WEIGHTS, where)
    found = json.loads(Path(config).read_text())
    plain = {name: each for name, each in PLAIN.items() if name in found and name != "lora_dropout"}
    expected = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": sorted(adapter.targets), **plain}
    if isinstance(found.get("target_modules"), list):
        found["target_modules"] = sorted(found["target_modules"])
    for name, value in expected.items():
        if found.get(name) != value:
            raise DataError(f"{where}: {name} of the adapter is {found.get(name)}, expected {value}")
    file = LocalFile(partial(str, weights))
    there = set(file.names())
    for name, shape in shapes.items():
        if peft_name(name) not in there:
            raise DataError(f"{where}: the adapter lacks {peft_name(name)}")
        if (stored := file.shape(peft_name(name))) != shape:
            raise DataError(f"{where}: {peft_name(name)} is {list(stored)}, and {list(shape)} in the model")
    if more := sorted(there - set(map(peft_name, shapes))):
        raise DataError(f"{where}: the adapter has {more[0]}, which the model has not")
    return {name: StoredTensor([Piece(file, peft_name(name))]) for name in shapes}


def _found(folder: str, name: str, where: str) -> str:
    try:
        return str(cached_file(folder, name))
    except OSError as error:
        raise DataError(f"{where}: is no PEFT directory: it has no {name}") from error
