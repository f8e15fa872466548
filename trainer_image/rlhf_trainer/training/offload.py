"""Models that are not in use leave the device: their shards and moments wait in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_api.spec import Offload
from rlhf_trainer.telemetry import recorder

Away = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""(emptied storage on the device, its copy in host memory)."""


class Residence:
    """Where the shards of a model and the moments of its optimizer are: on the device, or away while nobody uses them.

    A storage is emptied and filled in place, so whatever looks into it, FSDP2 and the optimizer among them, sees the
    same bits when it is back. On CPU the host's copy is another piece of the same memory.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, offload: Offload, role: str
    ) -> None:
        """`offload`: what goes away; role: for the measurement."""
        self._model, self._optimizer, self._role = model, optimizer, role
        self._parameters_leave = offload in ("Parameters", "All")
        self._moments_leave = offload in ("Optimizer", "All")
        self._users = 0
        self._parameters_away: Away = []
        self._moments_away: Away = []
        self._leave()

    @contextmanager
    def in_use(self, *, moments: bool = False) -> Iterator[None]:
        """The parameters, and if asked the moments, are on the device while this block and those around it run."""
        self._users += 1
        bring_back(self._parameters_away)
        if moments:
            bring_back(self._moments_away)
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._leave()

    def _leave(self) -> None:
        if self._parameters_leave:
            self._parameters_away += send_away(self._model.parameters())
        if self._moments_leave:
            self._moments_away += send_away(self._moments())
        recorder.maximum(f"idle_bytes/{self._role}", bytes_held([*self._model.parameters(), *self._moments()]))

    def _moments(self) -> list[Tensor]:
        states = self._optimizer.state.values() if self._optimizer else ()
        return [value for state in states for name, value in state.items() if name != "step"]


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """What this rank holds of the tensors, each storage once; those that are empty or away are left out."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in local)}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's storages of the tensors that are not away."""
    return sum(storage.nbytes() for storage in storages(tensors))


def send_away(tensors: Iterable[Tensor]) -> Away:
    """Copy the tensors' storages to host memory, pinned if they are on a GPU, and empty them."""
    away: Away = []
    for storage in storages(tensors):
        on_gpu = storage.device.type == "cuda"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
        host.copy_(storage, non_blocking=False)
        storage.resize_(0)
        away.append((storage, host))
    return away


def bring_back(away: Away) -> None:
    """Fill the storages again; `away` is empty then."""
    for storage, host in away:
        storage.resize_(host.nbytes())
        storage.copy_(host, non_blocking=False)
    away.clear()
