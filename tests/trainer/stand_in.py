"""What stands where vLLM would takes the weights as vLLM does: every element of what its rank holds, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class GeneratorStandIn:
    """Keeps its shard of each weight; a subclass writes responses. It does not sleep."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """The bit sum of each weight."""
        missing = {name: part.numel for name, part in holds.items()}
        for name, part, piece in pieces:
            if name not in self.weights:
                self.weights[name] = piece.new_empty(holds[name].shape)
            self.weights[name][part.within(holds[name])] = piece
            missing[name] -= part.numel
        assert not any(missing.values()), missing
        return {name: bit_sum(weight) for name, weight in self.weights.items()}

    def wake_cache(self) -> None:
        pass

    def sleep(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def cache_peak(self) -> float:
        return 0.0

    def bytes_held(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())
