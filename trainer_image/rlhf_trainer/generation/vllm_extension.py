"""Methods that run inside vLLM's worker and change its weights and cache in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_trainer.generation.live_weights import update
from rlhf_trainer.generation.sleep import FreedStorages, allocate, bytes_held, drop_packed, free
from rlhf_trainer.generation.vllm_engine import Part
from rlhf_trainer.generation.weight_layout import locations_of
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class WorkerExtension:
    """Methods for vLLM's worker; vLLM mixes this class in (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any

    @cached_property
    def _freed(self) -> dict[Part, FreedStorages]:
        return {}

    def held_shards(self) -> dict[str, TensorSlice]:
        """Slice of each Hugging Face parameter that this rank holds, in the order of the model."""
        return {name: location.shard for name, location in locations_of(self.get_model()).items()}

    def update_live_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Replace all of this rank's weights in place, by `live_weights.update`; returns each parameter's `bit_sum`."""
        return update(self.get_model(), pieces, holds)

    def bytes_held(self) -> int:
        """Count the bytes of this rank's KV cache and weights."""
        return bytes_held(self.get_model(), self.model_runner.kv_caches)

    def free_part(self, part: Part) -> None:
        """Free the weights or the KV cache (on CPU, where vLLM has no sleep mode)."""
        if part == "kv_cache":
            self._freed[part] = free(self.model_runner.kv_caches)
        else:
            self._freed[part] = free(self.get_model().parameters())
            drop_packed(self.get_model())

    def allocate_part(self, part: Part) -> None:
        """Allocate memory for the freed weights or KV cache; the values of weights come with the next update."""
        allocate(self._freed.pop(part))

    def allocate_stage_input(self) -> None:
        """Make the input tensors of a later pipeline stage. vLLM does it in its warm-up, but skips that on CPU."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
