"""Offload of a model's shards and its optimizer's moments to host memory while the model is not in use."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_api.spec.job_spec import Offload
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import local_shard

Offloaded = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""Pairs (emptied storage on the device, copy of the storage in host memory)."""


class Offloader:
    """Mover of a model's shards and its optimizer's moments, which are on the device only while the model is in use.

    Storages are emptied and filled in place, so FSDP2, the optimizer and all other views see the same bits afterwards.
    On CPU host memory is the device's memory: nothing is saved, but the same code runs.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, offload: Offload, role: str
    ) -> None:
        """offload: tensors to move to host memory; role: the model's name in the measurement `idle_bytes/<role>`."""
        self._model, self._optimizer, self._offloads, self._role = model, optimizer, offload, role
        self._users = 0
        self._offloaded_parameters: Offloaded = []
        self._offloaded_moments: Offloaded = []
        self._offload()

    @contextmanager
    def in_use(self, *, moments: bool = False) -> Iterator[None]:
        """Keep the parameters, and the moments if `moments`, on the device during the block; blocks may be nested."""
        self._users += 1
        load_storages(self._offloaded_parameters)
        if moments:
            load_storages(self._offloaded_moments)
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._offload()

    def _offload(self) -> None:
        if self._offloads in ("Parameters", "All"):
            self._offloaded_parameters += offload_storages(self._model.parameters())
        if self._offloads in ("Optimizer", "All"):
            self._offloaded_moments += offload_storages(self._moments())
        is_in_host = self._offloads == "OptimizerInHost"  # FSDP2 brings each layer to the device
        held = [] if is_in_host else [*self._model.parameters(), *self._moments()]
        recorder.maximum(f"idle_bytes/{self._role}", bytes_held(held))

    def _moments(self) -> list[Tensor]:
        states = self._optimizer.state.values() if self._optimizer else ()
        return [value for state in states for name, value in state.items() if name != "step"]


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of this rank's shards of the tensors, each once, without empty and offloaded ones."""
    local = (local_shard(tensor).untyped_storage() for tensor in tensors)
    found = {storage._cdata: storage for storage in local}  # noqa: SLF001 the address of a fake one is 0
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of this rank's shards of the tensors; offloaded shards count 0."""
    return sum(storage.nbytes() for storage in storages(tensors))


def offload_storages(tensors: Iterable[Tensor]) -> Offloaded:
    """Copy the tensors' storages to host memory, pinned if they are on a GPU, and empty them."""
    offloaded: Offloaded = []
    for storage in storages(tensors):
        on_gpu = storage.device.type == "cuda"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
        host.copy_(storage, non_blocking=False)
        storage.resize_(0)
        offloaded.append((storage, host))
    return offloaded


def load_storages(offloaded: Offloaded) -> None:
    """Copy offloaded storages from host memory back to the device, and clear `offloaded`."""
    for storage, host in offloaded:
        storage.resize_(host.nbytes())
        storage.copy_(host, non_blocking=False)
    offloaded.clear()
