"""The 3D-HybridEngine of one actor: after each update its training weights are resharded into the generator."""

from __future__ import annotations

import socket

import torch.distributed as dist

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.lora import with_adapters
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, named_parameters

BUCKET_BYTES = 16 * 2**20, 512 * 2**20
"""The least and the most that the buckets of a small and of a large model hold."""


class HybridEngine:
    """Reshards weights from training to generation. Training shards are only read, so the way back moves nothing."""

    def __init__(self, model: ShardedModel, generator: GenerationEngine, *, trust_remote_code: bool) -> None:
        """All ranks of the pool make it together. Weights are sent in the model's compute type, the generator's."""
        parameters = describe(inner(model.module).config, trust_remote_code=trust_remote_code)
        parties = Parties.replica(model.mesh.layout, _nodes(), dist.get_rank())
        self._model, self._generator = model, generator
        self._plan = plan(parameters, parties, dist.get_rank())
        self._exchange = Exchange(
            self._plan, dtype=model.compute_dtype, bucket_bytes=BUCKET_BYTES, device=device_here()
        )

    def to_generation(self) -> ReshardStats:
        """Give the generator the current weights; returns what that moved. All ranks call it together.

        NumericsError, with the parameter and the ranks, if the bits that arrived are not those that were sent, or the
        bits that a generator keeps not those that arrived.
        """
        adapter = self._model.adapter
        weights = with_adapters(dict(named_parameters(self._model)), adapter.scale if adapter else 0.0)
        self._exchange.verify(self._generator.load_weights(self._exchange.pieces(weights), self._plan.wanted))
        return self._exchange.stats


def _nodes() -> list[int]:
    """rank -> number of its node; a process of a node has its host name."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return list(map(hosts.index, hosts))


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
