"""Runs inside vLLM's worker: its weights and its cache, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_trainer.boxes import Box
from rlhf_trainer.generation.live_weights import Piece, update
from rlhf_trainer.generation.places import places_of


class Resharding:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    get_model: Any
    model_runner: Any

    def boxes_held(self) -> dict[str, Box]:
        """Which box of each Hugging Face parameter this rank holds, in the order of the model."""
        return {name: place.box for name, place in places_of(self.get_model()).items()}

    def update_live_weights(self, pieces: Iterable[Piece], holds: Mapping[str, Box]) -> dict[str, int]:
        """See `live_weights.update`."""
        return update(self.get_model(), pieces, holds)

    def make_room_between_stages(self) -> None:
        """What a later pipeline stage is handed is copied here; vLLM makes it in a warm-up, which CPU has none of."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.intermediate_tensors or self.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
