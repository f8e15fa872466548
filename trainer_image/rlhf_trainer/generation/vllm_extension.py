"""Methods that run inside vLLM's worker and change its weights and cache in place.

On CPU, where vLLM has no sleep mode, cache and weights are freed by hand while the actor trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase

from rlhf_trainer.generation.live_weights import update
from rlhf_trainer.generation.vllm_engine import Part
from rlhf_trainer.generation.weight_layout import linear_size, locations_of
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class WorkerExtension:
    """Methods for vLLM's worker; vLLM mixes this class in (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any

    @cached_property
    def _freed(self) -> dict[Part, list[tuple[torch.UntypedStorage, int]]]:
        """Freed storages of tensors, each with the number of bytes that it had."""
        return {}

    def held_shards(self) -> dict[str, TensorSlice]:
        """Slice of each Hugging Face parameter that this rank holds, in the order of the model."""
        return {name: location.shard for name, location in locations_of(self.get_model()).items()}

    def update_live_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Replace all of this rank's weights in place, by `live_weights.update`; returns each parameter's `bit_sum`."""
        return update(self.get_model(), pieces, holds)

    def bytes_held(self) -> int:
        """Count the bytes of this rank's KV cache and weights, with packed copies of linear layers and of the head.

        Experts have no copy: packed, they stand in the place of the plain parameters.
        """
        plain = _storages([*self.get_model().parameters(), *self.model_runner.kv_caches])
        return sum(storage.nbytes() for storage in plain) + sum(map(_packed_bytes, self.get_model().modules()))

    def free_part(self, part: Part) -> None:
        """Free the weights or the KV cache; the tensors and their views stay usable after `allocate_part`."""
        tensors = self.model_runner.kv_caches if part == "kv_cache" else self.get_model().parameters()
        self._freed[part] = [(storage, storage.nbytes()) for storage in _storages(tensors)]
        for storage, _ in self._freed[part]:
            storage.resize_(0)
        for module in self.get_model().modules() if part == "weights" else ():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # the next update packs anew

    def allocate_part(self, part: Part) -> None:
        """Give the freed weights or KV cache memory, all zero: a masked position of the cache must not be a NaN."""
        for storage, size in self._freed.pop(part):
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def allocate_stage_input(self) -> None:
        """Make the input tensors of a later pipeline stage. vLLM does it in its warm-up, but skips that on CPU."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty storages."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _packed_bytes(module: Any) -> int:
    if getattr(module, "cpu_linear", None) is None:
        return 0
    if not isinstance(module, LinearBase):  # a head, whose plain weight is there too
        return int(module.weight.nbytes)
    if module.weight.numel():  # vLLM could not pack it
        return 0
    return prod(linear_size(module)) * int(module.params_dtype.itemsize)
