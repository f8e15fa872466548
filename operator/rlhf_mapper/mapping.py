"""What the mapper is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_api.names import Role

Device = Literal["CPU", "GPU"]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The machines there are."""

    gpus_per_machine: tuple[int, ...]
    """GPUs of each machine; 0 on a machine without."""


@dataclass(frozen=True, kw_only=True)
class MappedPool:
    """Slots that some models share; models of one pool run in turn, those of different pools at the same time."""

    name: str
    models: tuple[Role, ...]
    slots_per_machine: tuple[int, ...]

    @property
    def size(self) -> int:
        """Slots of all machines."""
        return sum(self.slots_per_machine)


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """The answer: every model of the job is in exactly one pool."""

    device: Device
    pools: tuple[MappedPool, ...]
