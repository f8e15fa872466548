"""Updates of vLLM's live parameters, slice by slice, without whole tensors and vLLM's weight loaders.

On GPU a slice is copied into the parameter that the kernels read. On CPU vLLM packs its linear layers and keeps no
plain weight. There one module at a time gets a plain tensor of the rank's shard, which is filled and packed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from rlhf_trainer.errors import TrainerError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.generation.weight_layout import ParameterLocation, linear_size, locations_of, stacks_in
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


@torch.no_grad()
def update(model: nn.Module, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
    """Replace all weights of this rank; returns the `bit_sum` of the written ones, by parameter.

    On CPU a module is packed after its last piece; until then it needs memory for both copies. holds: expected shard of
    each parameter. TrainerError with the parameter's name if vLLM keeps another shard, if elements are missing or not
    of this rank, or if a piece comes twice.
    """
    locations = locations_of(model)
    kept = {name: location.shard for name, location in locations.items()}
    for name in sorted(holds.keys() | kept.keys()):
        if holds.get(name) != kept.get(name):
            raise TrainerError(f"{name}: the layout of generation is {holds.get(name)}, vLLM keeps {kept.get(name)}")
    weight_update = _WeightUpdate(model, locations)
    for name, part, tensor in pieces:
        weight_update.write(name, part, tensor)
    return weight_update.finish()


class _WeightUpdate:
    """One update of vLLM's weights in progress: the slices that were written, and what is missing."""

    def __init__(self, model: nn.Module, locations: dict[str, ParameterLocation]) -> None:
        self._model, self._locations = model, locations
        self._names: dict[nn.Module, list[str]] = {}
        for name, location in locations.items():
            self._names.setdefault(location.module, []).append(name)
        self._written: set[tuple[str, TensorSlice]] = set()
        self._missing = {name: location.shard.numel for name, location in locations.items()}
        self._open: set[nn.Module] = set()
        self._sums: dict[str, Tensor] = {}

    def write(self, name: str, part: TensorSlice, tensor: Tensor) -> None:
        """Copy one slice of a parameter to its location; the last slice of a module makes the module ready for use."""
        if name not in self._locations:
            raise TrainerError(f"{name}: a piece of it came, and vLLM holds none on this rank")
        location = self._locations[name]
        if part.intersection(location.shard) != part:
            raise TrainerError(f"{name}: the piece {part} does not lie in {location.shard}, which this rank holds")
        if (name, part) in self._written or part.numel > self._missing[name]:
            raise TrainerError(f"{name}: elements of {part} were written before in the same update")
        if location.module not in self._open:
            self._open.add(location.module)
            _make_room(location.module, {self._locations[each].attribute for each in self._names[location.module]})
        location.view()[part.within(location.shard)].copy_(tensor)
        self._written.add((name, part))
        self._missing[name] -= part.numel
        if not any(self._missing[each] for each in self._names[location.module]):
            self._close(location.module)

    def finish(self) -> dict[str, Tensor]:
        """End the update; returns the `bit_sum` of each parameter. TrainerError if elements are missing."""
        for name, missing in self._missing.items():
            if missing:
                total = self._locations[name].shard.numel
                raise TrainerError(f"{name}: {missing} of {total} elements did not come with the update")
        for module, names in self._names.items():
            if names[0] not in self._sums:  # this rank's rows of the vocabulary are all padding
                self._close(module)
        return self._sums

    def _close(self, module: nn.Module) -> None:
        for name in self._names[module]:
            self._sums[name] = bit_sum(self._locations[name].view())
        if isinstance(module, VocabParallelEmbedding):
            (location,) = (self._locations[name] for name in self._names[module])
            module.weight.data[location.shard.shape[0] :].zero_()
        if current_platform.is_cpu():
            _pack(module, self._model)


def _make_room(module: Any, attributes: Iterable[str]) -> None:
    """Make sure that a module has plain tensors to write to; on CPU they replace packed weights."""
    if not current_platform.is_cpu():
        return
    shapes: dict[str, tuple[int, ...]] = stacks_in(module) if isinstance(module, RoutedExperts) else {}
    if isinstance(module, LinearBase):
        module.cpu_linear = None
        rows, columns = linear_size(module)
        shapes = {each: (rows, columns) if each == "weight" else (rows,) for each in attributes}
    for attribute, shape in shapes.items():
        fresh = torch.empty(shape, dtype=module.params_dtype)
        setattr(module, attribute, nn.Parameter(fresh, requires_grad=False))


def _pack(module: Any, model: nn.Module) -> None:
    """Make the packed copies of linear layers, of experts and of the head, which vLLM's CPU kernels read."""
    if isinstance(module, LinearBase):
        module.quant_method.process_weights_after_loading(module)
    elif isinstance(module, RoutedExperts):
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    elif isinstance(module, VocabParallelEmbedding):
        module.cpu_linear = None  # an embedding is looked up; only as a head is it multiplied with
        heads: list[Any] = [each for each in model.modules() if isinstance(each, ParallelLMHead)] or [module]
        for head in heads:  # Gemma 2 multiplies with the embedding itself
            if head.weight is module.weight:
                head.quant_method.process_weights_after_loading(head)
