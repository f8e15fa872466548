"""Runs inside vLLM's worker: its weights and its cache, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_trainer.boxes import Box
from rlhf_trainer.generation.live_weights import Piece, update
from rlhf_trainer.generation.places import places_of
from rlhf_trainer.generation.sleep import Emptied, bytes_held, drop_packed, empty, fill


class Resharding:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any
    _weights_away: Emptied
    _cache_away: Emptied

    def boxes_held(self) -> dict[str, Box]:
        """Which box of each Hugging Face parameter this rank holds, in the order of the model."""
        return {name: place.box for name, place in places_of(self.get_model()).items()}

    def update_live_weights(self, pieces: Iterable[Piece], holds: Mapping[str, Box]) -> dict[str, int]:
        """See `live_weights.update`."""
        return update(self.get_model(), pieces, holds)

    def bytes_held(self) -> int:
        """Bytes of this rank's cache and weights."""
        return bytes_held(self.get_model(), self.model_runner.kv_caches)

    def free_memory(self) -> None:
        """Free the cache and the weights; on CPU."""
        self._cache_away = empty(self.model_runner.kv_caches)
        self._weights_away = empty(self.get_model().parameters())
        drop_packed(self.get_model())

    def bring_back_weights(self) -> None:
        """Memory for new weights."""
        fill(self._weights_away)

    def bring_back_cache(self) -> None:
        """Memory for the cache."""
        fill(self._cache_away)

    def make_room_between_stages(self) -> None:
        """What a later pipeline stage is handed is copied here; vLLM makes it in a warm-up, which CPU has none of."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
