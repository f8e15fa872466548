"""The 3D-HybridEngine of one actor: its training weights, and the generator that gets each new version of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.engine import GenerationEngine
from rlhf_trainer.hybrid_engine.exchange import Exchange, Traffic
from rlhf_trainer.hybrid_engine.groups import generation_groups
from rlhf_trainer.hybrid_engine.layout import describe, generation_boxes, training_boxes
from rlhf_trainer.hybrid_engine.plan import addresses, plan
from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import collective_timeout, device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, named_parameters

BUFFER_BYTES = 256 * 2**20
"""What the buffers of a rank may take while weights travel."""


class HybridEngine:
    """Moves weights one way only: the training shards are read and stay what they are, so the way back is 0 bytes."""

    def __init__(self, model: ShardedModel, generator: GenerationEngine, *, trust_remote_code: bool) -> None:
        """All ranks of the pool make it together. Weights travel in the model's compute type, the generator's."""
        layout = model.mesh.layout
        parameters = describe(inner(model.module).config, trust_remote_code=trust_remote_code)
        held = generation_boxes(parameters, layout)
        route = plan(
            dict(enumerate(training_boxes(parameters, layout, shards=layout.shards))),
            dict(enumerate(held)),
            addresses(layout, shards=layout.shards),
        )
        self._model, self._generator = model, generator
        self._held = held[dist.get_rank()]
        self._exchange = Exchange(
            route,
            parameters,
            dtype=model.compute_dtype,
            buffer_bytes=BUFFER_BYTES,
            device=device_here(),
            timeout=collective_timeout(),
        )

    def to_generation(self) -> Traffic:
        """Give the generator the weights of this moment; returns what that took. All ranks call it together.

        NumericsError names the parameter and the rank if what the generator keeps is not what the trainer sent.
        """
        weights = {name: _local(parameter) for name, parameter in named_parameters(self._model)}
        written = self._generator.load_weights(self._exchange.pieces(weights), self._held)
        for name, total in self._exchange.checksums.items():
            if written.get(name) != total:
                rank = dist.get_rank()
                raise NumericsError(f"{name}: the generator of rank {rank} keeps other bits than arrived (checksum)")
        return self._exchange.traffic


def engine_groups(layout: ParallelSizes) -> list[list[int]]:
    """The tensor-parallel ranks of each generation engine's stages, the p_g stages of an engine one after the other."""
    where = {tuple(ranks): layout.coordinates(ranks[0]) for ranks in generation_groups(layout).tensor}
    order = sorted(
        where, key=lambda ranks: tuple(where[ranks][axis] for axis in ("data", "micro", "generation_pipeline"))
    )
    return [list(ranks) for ranks in order]


def stage_layers(layout: ParallelSizes, layers: int) -> list[int]:
    """The decoder layers of each of the p_g generation stages: those of p / p_g training stages."""
    width = layout.pipeline // layout.generation_pipeline
    sizes = [len(stage) for stage in blocks(layers, layout.pipeline)]
    return [sum(sizes[start : start + width]) for start in range(0, layout.pipeline, width)]


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard."""
    weight = parameter.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
