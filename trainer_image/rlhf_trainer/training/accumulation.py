"""Accumulation of gradients over the micro-batches of an update: when data-parallel ranks gather and reduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule

from rlhf_trainer.training.distributed import device_here, device_memory, local_shard
from rlhf_trainer.training.sharding import ShardedModel

MEMORY_SHARE = 0.1
"""How much more of the device's memory whole gradients may take than what is there otherwise: shards, or nothing."""


class GradientSync:
    """Chooses when the passes of an update gather and reduce over the data-parallel ranks.

    Gradients are reduced after the last backward pass only, and until then a rank holds the whole float32 gradients of
    its stage and tensor-parallel part, not its shards of them. Where that takes more than a tenth of the device's
    memory on any of the ranks, every backward pass reduce-scatters; then replicas (HSDP) add up their shards after the
    last one.
    """

    def __init__(self, model: ShardedModel) -> None:
        """All data-parallel ranks make it together."""
        assert isinstance(model.module, FSDPModule)
        self._module = model.module
        held = [local_shard(each) for each in model.module.parameters() if each.requires_grad]
        whole = model.mesh.layout.shards * sum(each.nbytes for each in held)
        shards = sum(each.nbytes for each in held if each.device == device_here())  # else gradients wait in host memory
        fits = whole - shards <= MEMORY_SHARE * device_memory()
        self._reduces_once = model.mesh.largest(int(not fits)) == 0

    @contextmanager
    def root_gathered(self) -> Iterator[None]:
        """Within it the root's parameters stay gathered between a forward pass and its backward pass.

        Elsewhere a forward pass frees them, for no backward pass follows that would.
        """
        self._module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._module.set_reshard_after_forward(True, recurse=False)

    def before_backward(self, is_last: bool) -> None:
        """Set what the next backward pass does."""
        if self._reduces_once:
            self._module.set_requires_gradient_sync(is_last)
        else:
            self._module.set_requires_all_reduce(is_last)
