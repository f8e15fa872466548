"""Runs inside vLLM's worker: takes new weights in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class WeightUpdate:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    reload_weights: Any
    get_model: Any

    def load_hf_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by (Hugging Face name, whole tensor) pairs, in layer order."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        self.reload_weights(weights_iterator=weights)
        if not current_platform.is_cpu():
            return
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):  # on CPU a tied head keeps a packed copy of the old embedding
                module.quant_method.process_weights_after_loading(module)
