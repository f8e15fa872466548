"""Layout of the field `routed_experts`: the experts that the generator's routers chose for each token, as bytes."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

ROUTED = "routed_experts"
"""Name of the batch field: uint8 [B, T, E], aligned to tokens; 0 at tokens that were no input of the generator."""

REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Model types in which the trainer can have the routers take given experts."""
REMEDY = "spec.rollout.routing: Recompute does without"
"""End of a sentence on experts that cannot be replayed."""


def expert_count(config: Any) -> int:
    """Return the number of experts of a layer by a model's config; 0 for a dense model."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


@dataclass(frozen=True)
class ExpertRows:
    """Layout of a token's E bytes: `chosen` experts of each layer, also of dense ones.

    A number is that of the expert plus one; 0 means that the generator has chosen none.
    """

    layers: int
    chosen: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the layout of a mixture of experts; its numbers take a byte each up to 255 experts, else two."""
        dtype = torch.uint8 if expert_count(config) < 256 else torch.int16
        return cls(config.num_hidden_layers, config.num_experts_per_tok, dtype)

    @property
    def width(self) -> int:
        """Number of bytes of a token (E)."""
        return self.layers * self.chosen * self.dtype.itemsize

    def encode(self, experts: Tensor) -> Tensor:
        """Encode experts [tokens, layers, chosen] of any integer type as uint8 [tokens, E]."""
        return (experts.to(torch.int32) + 1).to(self.dtype).flatten(1).contiguous().view(torch.uint8)

    def decode(self, rows: Tensor, layer: int) -> Tensor:
        """Return the experts of a layer, int64 [tokens, chosen], from uint8 [tokens, E]; -1 for none."""
        return rows.view(self.dtype)[:, layer * self.chosen : (layer + 1) * self.chosen].long() - 1
