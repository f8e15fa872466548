"""The 3D-HybridEngine of one actor: after each update its training weights are resharded into the generator."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats
from rlhf_trainer.hybrid_engine.layout import describe, generation_shards, training_shards
from rlhf_trainer.hybrid_engine.reshard_plan import addresses, plan
from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import collective_timeout, device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, named_parameters

BUFFER_BYTES = 256 * 2**20
"""The most that the exchange's buffers take on a rank."""


class HybridEngine:
    """Reshards weights from training to generation. Training shards are only read, so the way back moves nothing."""

    def __init__(self, model: ShardedModel, generator: GenerationEngine, *, trust_remote_code: bool) -> None:
        """All ranks of the pool make it together. Weights are sent in the model's compute type, the generator's."""
        layout = model.mesh.layout
        parameters = describe(inner(model.module).config, trust_remote_code=trust_remote_code)
        held = generation_shards(parameters, layout)
        reshard_plan = plan(
            dict(enumerate(training_shards(parameters, layout, shards=layout.shards))),
            dict(enumerate(held)),
            addresses(layout, shards=layout.shards),
        )
        self._model, self._generator = model, generator
        self._held = held[dist.get_rank()]
        self._exchange = Exchange(
            reshard_plan,
            parameters,
            dtype=model.compute_dtype,
            buffer_bytes=BUFFER_BYTES,
            device=device_here(),
            timeout=collective_timeout(),
        )

    def to_generation(self) -> ReshardStats:
        """Give the generator the current weights; returns what that moved. All ranks call it together.

        NumericsError, with the parameter and the rank, if the bits that the generator keeps are not those that arrived.
        """
        weights = {name: _local(parameter) for name, parameter in named_parameters(self._model)}
        written = self._generator.load_weights(self._exchange.pieces(weights), self._held)
        for name, total in self._exchange.checksums.items():
            if written.get(name) != total:
                rank = dist.get_rank()
                raise NumericsError(f"{name}: the generator of rank {rank} keeps other bits than arrived (checksum)")
        return self._exchange.stats


def engine_groups(layout: ParallelSizes) -> list[list[int]]:
    """The tensor-parallel ranks of each generation engine's stages, the p_g stages of an engine one after the other."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault((at["data"], at["micro"], at["generation_pipeline"]), []).append(rank)
    return [groups[key] for key in sorted(groups)]


def stage_layers(layout: ParallelSizes, layers: int) -> list[int]:
    """The number of decoder layers of each of the p_g generation stages: those of p / p_g training stages."""
    width = layout.pipeline // layout.generation_pipeline
    sizes = [len(stage) for stage in blocks(layers, layout.pipeline)]
    return [sum(sizes[start : start + width]) for start in range(0, layout.pipeline, width)]


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard."""
    weight = parameter.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
