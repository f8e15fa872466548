"""A worker of `vllm serve` that does not keep the bits that arrive."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.workers.served import ServedWorker


class CorruptingWorker(ServedWorker):
    """The bits that it keeps of one parameter add up to one more than they should."""

    def update_live_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        sums = super().update_live_weights(pieces, holds)
        return {**sums, "model.norm.weight": sums["model.norm.weight"] + 1}
