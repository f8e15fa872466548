"""AdamW on the shards that this rank holds, as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.training.distributed import local_shard


class ShardedAdamW(torch.optim.AdamW):
    """AdamW whose step is one fused kernel over all local shards, however many parameters there are.

    AdamW computes each element by itself, so a shard needs nothing of the others. Its state is torch's: DTensors by
    parameter. The kernel runs where the shards are, on the host if they are there.
    """

    def __init__(self, parameters: Any, settings: Optimizer) -> None:
        super().__init__(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists that torch's step passes to its kernel: parameters, gradients, moments and step counts."""
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return is_complex
