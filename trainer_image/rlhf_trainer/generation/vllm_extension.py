"""Methods that run inside vLLM's worker and change its weights and cache in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_trainer.generation.live_weights import update
from rlhf_trainer.generation.sleep import FreedStorages, allocate, bytes_held, drop_packed, free
from rlhf_trainer.generation.weight_layout import locations_of
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class WorkerExtension:
    """vLLM mixes this class into its worker (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any
    _freed_weights: FreedStorages
    _freed_cache: FreedStorages

    def held_shards(self) -> dict[str, TensorSlice]:
        """Which slice of each Hugging Face parameter this rank holds, in the order of the model."""
        return {name: location.shard for name, location in locations_of(self.get_model()).items()}

    def update_live_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, int]:
        """See `live_weights.update`."""
        return update(self.get_model(), pieces, holds)

    def bytes_held(self) -> int:
        """Bytes of this rank's cache and weights."""
        return bytes_held(self.get_model(), self.model_runner.kv_caches)

    def free_memory(self) -> None:
        """Free the cache and the weights (on CPU, where vLLM has no sleep mode)."""
        self._freed_cache = free(self.model_runner.kv_caches)
        self._freed_weights = free(self.get_model().parameters())
        drop_packed(self.get_model())

    def allocate_weights(self) -> None:
        """Give the weights memory again, for the values of the next update."""
        allocate(self._freed_weights)

    def allocate_cache(self) -> None:
        """Give the cache memory again."""
        allocate(self._freed_cache)

    def allocate_stage_input(self) -> None:
        """Make the input tensors of a later pipeline stage, as vLLM does in its warm-up, which it skips on CPU."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
