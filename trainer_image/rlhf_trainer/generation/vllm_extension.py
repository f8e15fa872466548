"""Methods that run inside vLLM's worker and change its weights and cache in place, slice by slice.

Neither whole tensors nor vLLM's weight loaders are needed. On GPU a slice is copied into the parameter that the kernels
read. On CPU vLLM packs its linear layers and keeps no plain weight. There one module at a time gets a plain tensor of
the rank's shard, which is filled and packed again. vLLM has no sleep mode on CPU, so its memory is freed by hand.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from rlhf_trainer.errors import TrainerError
from rlhf_trainer.expert_rows import ExpertRows
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.generation.quantized_layers import (
    empty_weight,
    free_packed,
    is_quantized,
    linear_size,
    packed_bytes,
    require_quantized,
    write_quantized,
)
from rlhf_trainer.generation.routed_experts import SlotExperts
from rlhf_trainer.generation.vllm_engine import Part
from rlhf_trainer.generation.weight_layout import ParameterLocation, locations_of, stacks_in
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class WorkerExtension:
    """Methods for vLLM's worker; vLLM mixes this class in (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any

    def keep_experts(self, rows: ExpertRows) -> SlotExperts:
        """Keep the experts of the tokens in the KV cache from now on, as a part of the cache."""
        slots = SlotExperts(self.model_runner, rows)
        self.model_runner.kv_caches.append(slots.buffer)
        return slots

    @cached_property
    def _freed(self) -> dict[Part, list[tuple[torch.UntypedStorage, int]]]:
        """Freed storages of tensors by part (weights or KV cache), each with its number of bytes before."""
        return {}

    @cached_property
    def _draft(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors of the draft model, each with its copy in host memory."""
        model = self.model_runner.drafter.model
        return [(each.data, each.data.cpu().clone()) for each in [*model.parameters(), *model.buffers()]]

    def keep_draft(self) -> int:
        """Copy the draft model to host memory at the first call: on a GPU vLLM's sleep discards the model."""
        return len(self._draft)

    def restore_draft(self) -> None:
        """Restore the draft model from its copy in host memory."""
        for live, kept in self._draft:
            live.copy_(kept)

    def draft_row_by_row(self) -> None:
        """Draft for each row by its own length; unpatched vLLM drafts for no row while one is near the maximum length.

        Drafts beyond that length are cut row by row.
        """
        self.model_runner.effective_drafter_max_model_len = sys.maxsize

    def require_quantized(self, quantization: Literal["Int8", "FP8"] | None) -> None:
        """Raise EnvironmentProblem if linear layers lack a requested quantization; None: nothing was requested."""
        if quantization:
            require_quantized(self.get_model(), quantization)

    def held_shards(self) -> dict[str, TensorSlice]:
        """Return the slice that this rank holds of each Hugging Face parameter, in the order of the model."""
        return {name: location.shard for name, location in locations_of(self.get_model()).items()}

    @torch.no_grad()
    def update_live_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Replace all weights of this rank in place; returns the `bit_sum` of the written ones, by parameter.

        Sums of a quantised layer are those of its weights before they are rounded.
        On CPU a module is packed after its last piece, which needs memory for both forms at once. holds: expected
        shard of each parameter. TrainerError with the parameter's name if vLLM keeps another shard, if elements are
        missing or not of this rank, or if a piece comes twice.
        """
        weight_update = _WeightUpdate(self.get_model())
        kept = self.held_shards()
        for name in sorted(holds.keys() | kept.keys()):
            if holds.get(name) != kept.get(name):
                differ = f"the layout of generation is {holds.get(name)}, vLLM keeps {kept.get(name)}"
                raise TrainerError(f"{name}: {differ}")
        for name, part, tensor in pieces:
            weight_update.write(name, part, tensor)
        return weight_update.finish()

    def bytes_held(self) -> int:
        """Count bytes of cache and weights, with packed copies of linear layers and head; experts have no copies."""
        drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)  # other drafters have no model
        models = [self.get_model(), *([drafter] if isinstance(drafter, nn.Module) else [])]
        plain = _storages([each for model in models for each in model.parameters()] + self.model_runner.kv_caches)
        packed = sum(_packed_bytes(module) for model in models for module in model.modules())
        return sum(storage.nbytes() for storage in plain) + packed

    def free_part(self, part: Part) -> None:
        """Free the weights or the KV cache; the tensors and their views stay usable after `allocate_part`."""
        tensors = self.model_runner.kv_caches if part == "kv_cache" else self.get_model().parameters()
        self._freed[part] = [(storage, storage.nbytes()) for storage in _storages(tensors)]
        for storage, _ in self._freed[part]:
            storage.resize_(0)
        for module in self.get_model().modules() if part == "weights" else ():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # the next update packs anew
            elif is_quantized(module):
                free_packed(module)

    def allocate_part(self, part: Part) -> None:
        """Allocate the freed weights or KV cache again, as zeros: masked positions of the cache must not be NaN."""
        for storage, size in self._freed.pop(part):
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def allocate_stage_input(self) -> None:
        """Make the input tensors of a later pipeline stage. vLLM's warm-up makes them, but is skipped on CPU."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class _WeightUpdate:
    """One update of vLLM's weights in progress: the slices that were written, and the missing elements."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._locations = model, locations_of(model)
        self._names: dict[nn.Module, list[str]] = {}
        for name, location in self._locations.items():
            self._names.setdefault(location.module, []).append(name)
        self._written: set[tuple[str, TensorSlice]] = set()
        self._missing = {name: location.shard.numel for name, location in self._locations.items()}
        self._open: set[nn.Module] = set()
        self._unrounded: dict[nn.Module, Tensor] = {}
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
            if is_quantized(location.module):
                self._unrounded[location.module] = empty_weight(location.module)
            else:
                _make_room(location.module, {self._locations[each].attribute for each in self._names[location.module]})
        self._view(location)[part.within(location.shard)].copy_(tensor)
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

    def _view(self, location: ParameterLocation) -> Tensor:
        return location.view(self._unrounded.get(location.module) if location.attribute == "weight" else None)

    def _close(self, module: nn.Module) -> None:
        for name in self._names[module]:
            self._sums[name] = bit_sum(self._view(self._locations[name]))
        if module in self._unrounded:
            write_quantized(module, self._unrounded.pop(module))
            return
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
        module.cpu_linear = None  # only heads need packed weights; embeddings are looked up
        heads: list[Any] = [each for each in model.modules() if isinstance(each, ParallelLMHead)] or [module]
        for head in heads:  # Gemma 2 multiplies with the embedding itself
            if head.weight is module.weight:
                head.quant_method.process_weights_after_loading(head)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty storages."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _packed_bytes(module: Any) -> int:
    if is_quantized(module):
        return packed_bytes(module)
    if getattr(module, "cpu_linear", None) is None:
        return 0
    if not isinstance(module, LinearBase):  # a head, whose plain weight is there too
        return int(module.weight.nbytes)
    if module.weight.numel():  # vLLM could not pack it
        return 0
    return prod(linear_size(module)) * int(module.params_dtype.itemsize)
