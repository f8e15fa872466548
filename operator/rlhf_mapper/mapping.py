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
class Sizes:
    """How a model is cut over the slots of its pool: p-t-d, and p_g-t_g in generation (HybridFlow section 5)."""

    pipeline: int
    tensor: int
    data: int
    replicas: int
    """Copies of the weights among the data-parallel slots (HSDP)."""
    generation_pipeline: int
    generation_tensor: int

    def __str__(self) -> str:
        return f"{self.pipeline}-{self.tensor}-{self.data}"


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """The answer: every model of the job is in exactly one pool."""

    device: Device
    pools: tuple[MappedPool, ...]
    sizes: dict[Role, Sizes]
    """Of every model of the job."""

    def described(self, pool: MappedPool) -> str:
        """A pool in a few words: `2 CPU slots (actor 1-2-1, critic)`, with p-t-d of what is not cut by data alone."""
        return f"{pool.size} {self.device} slots ({', '.join(map(self._named, pool.models))})"

    def _named(self, role: Role) -> str:
        sizes = self.sizes[role]
        return role if sizes.pipeline == sizes.tensor == 1 else f"{role} {sizes}"
