"""New weights straight into vLLM's live parameters: pieces of boxes, no full tensors, none of vLLM's loaders.

On GPU a piece is copied into the parameter that the kernels read. On CPU vLLM packs its linears and keeps no plain
weight: one gets a fresh tensor of the rank's shard, is filled, packed and done, so that one module is the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from rlhf_trainer.boxes import Box
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.generation.places import Place, places_of

Piece = tuple[str, Box, Tensor]
"""(Hugging Face name, box of the parameter, its elements)."""


@torch.no_grad()
def update(model: nn.Module, pieces: Iterable[Piece], holds: Mapping[str, Box]) -> dict[str, int]:
    """Write every element of what this rank holds exactly once; returns the bit sum of each parameter.

    `pieces` come in layer order; `holds` says which box of each parameter this rank shall hold. TrainerError, with the
    parameter's name, for a box that vLLM keeps otherwise and for elements that are missing, doubled or not held.
    """
    places = places_of(model)
    _require_same(holds, {name: place.box for name, place in places.items()})
    filling = _Filling(model, places)
    for name, box, tensor in pieces:
        filling.write(name, box, tensor)
    return filling.finish()


def _require_same(holds: Mapping[str, Box], kept: Mapping[str, Box]) -> None:
    for name in sorted(holds.keys() | kept.keys()):
        if holds.get(name) != kept.get(name):
            raise TrainerError(f"{name}: the layout of generation is {holds.get(name)}, vLLM keeps {kept.get(name)}")


class _Filling:
    """One update, as its pieces come."""

    def __init__(self, model: nn.Module, places: dict[str, Place]) -> None:
        self._model, self._places = model, places
        self._names: dict[nn.Module, list[str]] = {}
        for name, place in places.items():
            self._names.setdefault(place.module, []).append(name)
        self._written: dict[str, list[Box]] = {name: [] for name in places}
        self._open: set[nn.Module] = set()
        self._sums: dict[str, int] = {}

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Copy one piece to its place; the last one of a module makes it ready for use."""
        if name not in self._places:
            raise TrainerError(f"{name}: a piece of it came, and vLLM holds none on this rank")
        place, written = self._places[name], self._written[name]
        if box.intersection(place.box) != box:
            raise TrainerError(f"{name}: the piece {box} does not lie in {place.box}, which this rank holds")
        if any(box.intersection(earlier) for earlier in written):
            raise TrainerError(f"{name}: elements of {box} were written before in the same update")
        if place.module not in self._open:
            self._open.add(place.module)
            _make_room(place.module, {self._places[each].attribute for each in self._names[place.module]})
        place.section()[box.within(place.box)].copy_(tensor)
        written.append(box)
        if not any(map(self._missing, self._names[place.module])):
            self._close(place.module)

    def finish(self) -> dict[str, int]:
        """The bit sum of each parameter, once all have come."""
        for name in self._places:
            if missing := self._missing(name):
                total = self._places[name].box.numel
                raise TrainerError(f"{name}: {missing} of {total} elements did not come with the update")
        for module, names in self._names.items():
            if names[0] not in self._sums:  # this rank's rows of the vocabulary are all padding
                self._close(module)
        return self._sums

    def _missing(self, name: str) -> int:
        return self._places[name].box.numel - sum(box.numel for box in self._written[name])

    def _close(self, module: nn.Module) -> None:
        for name in self._names[module]:
            self._sums[name] = bit_sum(self._places[name].section())
        if isinstance(module, VocabParallelEmbedding):
            (place,) = (self._places[name] for name in self._names[module])
            module.weight.data[place.box.shape[0] :].zero_()
        if current_platform.is_cpu():
            _pack(module, self._model)


def _make_room(module: Any, attributes: Iterable[str]) -> None:
    """Plain tensors where pieces can be written; on CPU they take the place of a linear's packed weight."""
    if not (current_platform.is_cpu() and isinstance(module, LinearBase)):
        return
    module.cpu_linear = None
    rows, columns = module.output_size_per_partition, module.input_size_per_partition
    for attribute in attributes:
        shape = (rows, columns) if attribute == "weight" else (rows,)
        fresh = torch.empty(shape, dtype=module.params_dtype)
        setattr(module, attribute, nn.Parameter(fresh, requires_grad=False))


def _pack(module: Any, model: nn.Module) -> None:
    """What vLLM's CPU kernels read besides the plain tensors: packed copies of linears and of the head."""
    if isinstance(module, LinearBase):
        module.quant_method.process_weights_after_loading(module)
    elif isinstance(module, VocabParallelEmbedding):
        module.cpu_linear = None  # an embedding is looked up; only as a head is it multiplied with
        for head in model.modules():
            if isinstance(head, ParallelLMHead) and head.weight is module.weight:
                head.quant_method.process_weights_after_loading(head)
