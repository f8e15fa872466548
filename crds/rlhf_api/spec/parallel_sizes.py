"""Parallel sizes of a model: p-t-d in training, p_g-t_g-d_g in generation (HybridFlow, section 5).

`ParallelSizes` is what the mapper decides, the status shows and the trainer builds. `Parallelism` is the request in a
manifest, which may leave sizes unset.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rlhf_api.contract import Count, Spec

Axis = Literal["data", "context", "pipeline", "tensor", "micro", "generation_pipeline", "generation_tensor"]


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Parallel sizes of one model, all of them set.

    Tensor-parallel ranks are consecutive, then pipeline stages, then context-parallel ranks, then data-parallel
    replicas. For generation each replica becomes d_g = c p t / (p_g t_g) micro data-parallel replicas. Their ranks are
    picked at intervals, so a rank's training shard lies in its generation shard.
    """

    data: int
    context: int = 1
    """Ranks over which the tokens of a packed row are cut (c); they have the same rows and share FSDP shards."""
    pipeline: int = 1
    tensor: int = 1
    replicas: int = 1
    """Copies of the training weights among the data-parallel ranks (HSDP)."""
    expert: int = 1
    """Ranks of a pipeline stage's copy of the weights over which the experts of a layer are cut."""
    generation_pipeline: int = 0
    """Pipeline stages in generation (p_g); 0 stands for those in training (p)."""
    generation_tensor: int = 0
    """Tensor-parallel shards in generation (t_g); 0 stands for those in training (t)."""
    reverses_stages: bool = False
    """Whether the last rank of a pipeline holds the first stage, as a critic's whose updates are fused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "generation_pipeline", self.generation_pipeline or self.pipeline)
        object.__setattr__(self, "generation_tensor", self.generation_tensor or self.tensor)

    def __str__(self) -> str:
        more = {"context": self.context, "expert": self.expert}
        return f"{self.pipeline}-{self.tensor}-{self.data}" + "".join(
            f", {name} {n}" for name, n in more.items() if n > 1
        )

    @property
    def world_size(self) -> int:
        return self.data * self.context * self.pipeline * self.tensor

    @property
    def shards(self) -> int:
        """Shards of a copy of the weights (FSDP), one for each data- and context-parallel rank.

        Raises ValueError if `replicas` does not divide d.
        """
        if self.data % self.replicas:
            raise ValueError(f"the replicas of {self!r} do not divide its data-parallel ranks")
        return self.data // self.replicas * self.context

    @property
    def expert_shards(self) -> int:
        """FSDP shards of a rank's experts, over the ranks of its stage's copy of the weights that hold these experts.

        Experts are not cut by tensor parallelism: its ranks divide the tokens instead. Raises ValueError if `expert`
        does not divide these ranks.
        """
        ranks = self.shards * self.tensor
        if ranks % self.expert:
            raise ValueError(f"the expert size of {self!r} does not divide the {ranks} ranks of a copy of a stage")
        return ranks // self.expert

    @property
    def cuts_experts(self) -> bool:
        """Whether the experts of a mixture are cut in another way than its other weights (`experts_of`)."""
        return self.expert > 1 or self.tensor > 1

    @property
    def micro(self) -> int:
        """Micro data-parallel replicas (d_g) of a data-parallel replica. ValueError if p_g, t_g do not divide p, t."""
        stages, shards = self._micro()
        return self.context * stages * shards

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return axis -> coordinate of a rank; the first 4 together are unique, as is data with the last 3."""
        tensor, stage = rank % self.tensor, rank // self.tensor % self.pipeline
        stage = self.pipeline - 1 - stage if self.reverses_stages else stage
        outer, context = divmod(rank // (self.tensor * self.pipeline), self.context)
        stages, shards = self._micro()
        return {
            "data": outer,
            "context": context,
            "pipeline": stage,
            "tensor": tensor,
            "micro": (context * stages + stage % stages) * shards + tensor % shards,
            "generation_pipeline": stage // stages,
            "generation_tensor": tensor // shards,
        }

    def shard_of(self, rank: int) -> int:
        """Return the index of a rank's FSDP shard among the `shards` of its copy of the weights."""
        return rank // (self.tensor * self.pipeline) % self.shards

    def experts_of(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's part of the experts, below `expert`, and of its shard of `expert_shards`."""
        shard, part = divmod(self.shard_of(rank) * self.tensor + rank % self.tensor, self.expert)
        return part, shard

    def _micro(self) -> tuple[int, int]:
        """Return (p / p_g, t / t_g): training stages in a generation stage, training shards in a generation shard."""
        if self.pipeline % self.generation_pipeline or self.tensor % self.generation_tensor:
            raise ValueError(f"the generation sizes of {self!r} do not divide its training sizes")
        return self.pipeline // self.generation_pipeline, self.tensor // self.generation_tensor


class Parallelism(Spec):
    """Parallel sizes of a model in forward passes and training; p, t and d multiply to the slots of its pool.

    A manifest may leave d unset, and has the sizes of generation elsewhere (`rollout`), unlike `ParallelSizes`.
    """

    pipeline: Count = Field(1, description="Pipeline stages (p).")
    tensor: Count = Field(1, description="Tensor-parallel shards of a layer (t).")
    data: Count | None = Field(None, description="Data-parallel ranks (d); unset: slots / (c * p * t).")
    context: Count = Field(1, description="Ranks that share the tokens of each row (c).")
    replicas: Count = 1
    """Copies of the weights; d / replicas * c ranks share one."""
    expert: Count = Field(1, description="Parts of a layer's experts, on neighbouring ranks of a copy.")

    def over(self, slots: int, *, generation_pipeline: int = 0, generation_tensor: int = 0) -> ParallelSizes:
        """Return the sizes on a pool of `slots` slots; an unset d becomes slots // (c * p * t), at least 1."""
        sizes = {name: getattr(self, name) for name in Parallelism.model_fields}
        sizes["data"] = self.data or max(1, slots // (self.context * self.pipeline * self.tensor))
        return ParallelSizes(**sizes, generation_pipeline=generation_pipeline, generation_tensor=generation_tensor)
