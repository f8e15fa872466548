"""Low-rank adapters (Hu et al., arXiv:2106.09685): W + s B A in place of W, of which only A and B are trained.

A is [r, in], B is [out, r], and s = alpha / r. They lie in the module of W, so they are cut as it is, and W keeps its
name; a trained head of a scorer is trained in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn.functional import linear

from rlhf_api.spec.job_spec import Model
from rlhf_api.spec.lora import Lora
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.stored_tensors import TensorSource, read_into
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.distributed import device_here, local_shard
from rlhf_trainer.training.drawing import Drawing
from rlhf_trainer.training.models import Adapter, LanguageModel, Scorer, inner

A, B = "lora_a", "lora_b"
"""The parameters of an adapted module beside its `weight`."""
HEAD = "score"
"""The head of a scorer."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: W x + bias + s B A x."""

    def __init__(self, adapted: nn.Linear, *, rank: int, scale: float) -> None:
        """On the meta device, as the layer is; within a `Drawing` it is remembered how A and B begin."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = adapted.in_features, adapted.out_features
        self.weight, self.bias, self.scale, self.is_on = adapted.weight, adapted.bias, scale, True
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # as PEFT begins
        nn.init.zeros_(self.lora_b)

    def forward(self, given: Tensor) -> Tensor:
        output = super().forward(given)
        return output + linear(linear(given, self.lora_a), self.lora_b) * self.scale if self.is_on else output


def add_adapter(
    model: LanguageModel | Scorer, lora: Lora, source: Model, folder: str, *, seed: int, path: str
) -> Adapter:
    """Freeze a model on the meta device, and add an adapter to each of its matrices that is a target, in place.

    source, folder: what the model was read from; path: of `lora` in the manifest. ConfigError for a target that no
    layer has.
    """
    pretrained = inner(model)
    layers = set(pretrained._no_split_modules or [])  # noqa: SLF001 there is no public name
    found = {
        f"{above}.{name}": each
        for above, layer in pretrained.named_modules()
        if type(layer).__name__ in layers
        for name, each in layer.named_modules()
        if isinstance(each, nn.Linear)
    }
    there = sorted({name.rpartition(".")[2] for name in found})
    if unknown := [name for name in lora.targets if name not in there]:
        raise ConfigError(f"{path}.targets: the model has no {unknown[0]}; there are {', '.join(there)}")
    targets = tuple(name for name in there if not lora.targets or name in lora.targets)
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
        for name, each in found.items():
            if name.rpartition(".")[2] in targets:
                adapted = AdaptedLinear(each, rank=lora.rank, scale=adapter.scale)
                pretrained.set_submodule(name, adapted)
    begun = {name: drawing.of(each) for name, each in pretrained.named_parameters() if name.endswith((A, B))}
    model.weights = {**(model.weights or {}), **begun}
    return adapter


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model is the one that its adapter adds to."""
    layers = [each for each in model.modules() if isinstance(each, AdaptedLinear)]
    for each in layers:
        each.is_on = False
    try:
        yield
    finally:
        for each in layers:
            each.is_on = True


def shard_adapted(module: AdaptedLinear, axis: DeviceMesh, style: ParallelStyle) -> None:
    """Cut a layer with its adapter over tensor-parallel ranks: B as the rows of W, or A as its columns."""
    by_rows = isinstance(style, ColwiseParallel)  # it means the columns of the transposed matrix
    own = {name: module._parameters.pop(name) for name in (A, B)}  # noqa: SLF001 else the style would cut them as W
    parallelize_module(module, axis, style)
    cuts: dict[str, Placement] = {A: Replicate() if by_rows else Shard(1), B: Shard(0) if by_rows else Replicate()}
    for name, parameter in own.items():
        assert parameter is not None, "a layer has both"
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, axis, [cuts[name]])))


class AdaptedShard:
    """This rank's shard of W + s B A, of which parts are made when they are asked for."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """weight and b: of the rank's rows, whole or cut; a: all rows, of the rank's columns."""
        self._weight, self._a, self._b, self._scale = weight, a, b, scale
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, columns = index
        return _sum(self._weight[index], self._a[:, columns], self._b[rows], self._scale).to(self.dtype)


def with_adapters(parameters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor | AdaptedShard]:
    """This rank's shards of what a model computes with, from those of its parameters, by name.

    FSDP2 and tensor parallelism give a rank the same rows of B as of W, and the same columns of A, but not all rows of
    A: these are gathered. A collective of the stage's data-parallel ranks, unless there is no adapter.
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
    """All rows of A, of this rank's columns, on the device."""
    if not isinstance(a, DTensor):
        return a
    is_cut_by_columns = [isinstance(each, Shard) and each.dim == 1 for each in a.placements]
    wanted = [each if cut else Replicate() for each, cut in zip(a.placements, is_cut_by_columns, strict=True)]
    there = a.to_local().to(device_here())
    here = DTensor.from_local(there, a.device_mesh, a.placements, run_check=False, shape=a.shape, stride=a.stride())
    return here.redistribute(placements=wanted).to_local()


@dataclass(frozen=True)
class Merged:
    """W + s B A, made part by part of the stored W, A and B: float32."""

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
            a = _read(self.a, TensorSlice((0, left), (rank, right)))
            b = _read(self.b, TensorSlice((top, 0), (bottom, rank)))
            yield part, _sum(values, a, b, self.scale)


def merged(
    weights: Mapping[str, TensorSource], trained: Mapping[str, TensorSource], scale: float
) -> dict[str, TensorSource]:
    """The tensors of a model by name, from those that an adapter adds to, and from what was trained beside them."""
    found: dict[str, TensorSource] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        a, b = (trained.get(f"{module}.{each}") for each in (A, B))
        found[name] = Merged(weight, a, b, scale) if a and b else weight
    return found | {name: each for name, each in trained.items() if not name.endswith((A, B))}


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A in float32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def _read(source: TensorSource, part: TensorSlice) -> Tensor:
    values = torch.empty(part.shape)
    read_into(values, part, source)
    return values
