"""Parallel sizes of a model: p-t-d in training, p_g-t_g-d_g in generation (HybridFlow, section 5).

`ParallelSizes` is what the mapper decides, the status shows and the trainer builds. `Parallelism` is the request in a
manifest, which may leave sizes unset.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rlhf_api.contract import Count, Spec

Axis = Literal["data", "pipeline", "tensor", "micro", "generation_pipeline", "generation_tensor"]


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Parallel sizes of one model, all of them set.

    Tensor-parallel ranks are consecutive, then pipeline stages, then data-parallel replicas. For generation each
    replica becomes d_g = p t / (p_g t_g) micro data-parallel replicas. Their ranks are picked at intervals, so a rank's
    training shard lies in its generation shard.
    """

    data: int
    pipeline: int = 1
    tensor: int = 1
    replicas: int = 1
    """Copies of the training weights among the data-parallel ranks (HSDP)."""
    generation_pipeline: int = 0
    """Pipeline stages in generation (p_g); 0 stands for those in training (p)."""
    generation_tensor: int = 0
    """Tensor-parallel shards in generation (t_g); 0 stands for those in training (t)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "generation_pipeline", self.generation_pipeline or self.pipeline)
        object.__setattr__(self, "generation_tensor", self.generation_tensor or self.tensor)

    def __str__(self) -> str:
        return f"{self.pipeline}-{self.tensor}-{self.data}"

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def shards(self) -> int:
        """Shards of a copy of the weights (FSDP), one for each data-parallel rank: rank i has shard i mod their number.

        Raises ValueError if `replicas` does not divide d.
        """
        if self.data % self.replicas:
            raise ValueError(f"the replicas of {self!r} do not divide its data-parallel ranks")
        return self.data // self.replicas

    @property
    def micro(self) -> int:
        """Micro data-parallel replicas (d_g) of a data-parallel replica. ValueError if p_g, t_g do not divide p, t."""
        stages, shards = self._micro()
        return stages * shards

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return axis -> coordinate of a rank; (data, pipeline, tensor) is unique, as is data with the other 3 axes."""
        tensor, stage = rank % self.tensor, rank // self.tensor % self.pipeline
        stages, shards = self._micro()
        return {
            "data": rank // (self.tensor * self.pipeline),
            "pipeline": stage,
            "tensor": tensor,
            "micro": stage % stages * shards + tensor % shards,
            "generation_pipeline": stage // stages,
            "generation_tensor": tensor // shards,
        }

    def _micro(self) -> tuple[int, int]:
        """Return (p / p_g, t / t_g); their product d_g is the number of generation replicas in a training replica."""
        if self.pipeline % self.generation_pipeline or self.tensor % self.generation_tensor:
            raise ValueError(f"the generation sizes of {self!r} do not divide its training sizes")
        return self.pipeline // self.generation_pipeline, self.tensor // self.generation_tensor


class Parallelism(Spec):
    """Parallel sizes of a model in forward passes and training; their product is the number of slots of its pool.

    A manifest may leave d unset, and has the sizes of generation elsewhere (`rollout`), unlike `ParallelSizes`.
    """

    pipeline: Count = Field(1, description="Number of pipeline stages (p).")
    tensor: Count = Field(1, description="Number of tensor-parallel shards of a layer (t).")
    data: Count | None = Field(None, description="Data-parallel ranks (d); unset: the pool's slots / (p * t).")
    replicas: Count = 1
    """Copies of the weights among the data-parallel ranks; each copy is sharded over d / replicas ranks."""

    def over(self, slots: int, *, generation_pipeline: int = 0, generation_tensor: int = 0) -> ParallelSizes:
        """Return the sizes on a pool of `slots` slots; an unset d becomes slots // (p * t), at least 1."""
        return ParallelSizes(
            data=self.data or max(1, slots // (self.pipeline * self.tensor)),
            pipeline=self.pipeline,
            tensor=self.tensor,
            replicas=self.replicas,
            generation_pipeline=generation_pipeline,
            generation_tensor=generation_tensor,
        )
