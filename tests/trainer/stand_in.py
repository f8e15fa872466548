"""What stands where vLLM would takes the weights as vLLM does: every element of what its rank holds, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice


class GeneratorStandIn:
    """Keeps its shard of each weight; a subclass writes responses. It does not sleep."""

    is_first = True
    generate: Callable[..., list[Response]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = -1
        self.before_token: Callable[[], None] = lambda: None
        self._asked: list[tuple[int, Sequence[int], int, dict[str, Any]]] = []

    def begin(self, number: int, prompt: Sequence[int], seed: int, **options: Any) -> None:
        self._asked.append((number, prompt, seed, options))

    def step(self) -> list[tuple[int, Response]]:
        asked, self._asked = self._asked, []
        return [(number, self.generate([prompt], [seed], **options)[0]) for number, prompt, seed, options in asked]

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    def agreed(self, value: Any) -> Any:
        return value

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
