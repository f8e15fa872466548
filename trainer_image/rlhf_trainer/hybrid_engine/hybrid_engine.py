"""The 3D-HybridEngine of one actor: after each update its training weights are resharded into the generator."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats, Shard
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.hybrid_engine.notices import Notices
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from rlhf_trainer.protocols import blocks
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.adapters import with_adapters
from rlhf_trainer.training.distributed import device_here, join_group
from rlhf_trainer.training.sharding import ShardedModel, named_parameters

BUCKET_BYTES = 16 * 2**20, 512 * 2**20
"""The least and the most that the buckets of a small and of a large model hold."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A group of two pools: the ranks that train, then those that generate."""

    address: str
    """The machine of its first rank."""
    port: int
    """A free one there."""
    hosts: Sequence[str]
    """Of each rank."""
    training: ParallelSizes
    generation: ParallelSizes
    timeout_seconds: float
    """The longest that a collective of the group may take."""
    before: int = 0
    """Ranks that generate before those of the world of this one, where they are in several worlds."""

    @property
    def parties(self) -> Parties:
        trainers = self.training.world_size
        return Parties(
            training=self.training,
            sources=range(trainers),
            generation=self.generation,
            destinations=range(trainers, len(self.hosts)),
            nodes=_numbered(self.hosts),
        )


class TakesWeights(Protocol):
    """What generates on a rank."""

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Replace its weights; see `GenerationEngine.load_weights`."""
        ...


class HybridEngine:
    """Reshards weights from training to generation. Training shards are only read, so the way back moves nothing."""

    def __init__(
        self,
        model: ShardedModel | None,
        generator: TakesWeights | None,
        *,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        trust_remote_code: bool,
        span: Span | None = None,
        sends_changes: bool = False,
    ) -> None:
        """All ranks of the pool or, with a span, of both pools make it together.

        model: what this rank trains, if it does; generator: where it generates; dtype: the model's compute type, in
        which weights are sent, and the generator's; sends_changes: send what has changed only.
        """
        self._model, self._generator, self.group = model, generator, None
        self.notices: Notices | None = None
        """Of the ranks of both pools."""
        parameters = describe(config, trust_remote_code=trust_remote_code)
        if span is None:
            assert model is not None
            rank = dist.get_rank()
            parties = Parties.replica(model.mesh.layout, _nodes(), rank)
        else:
            rank = dist.get_rank() + (0 if model else span.training.world_size + span.before)
            parties = span.parties
            self.group, store = join_group(span.address, span.port, rank, len(span.hosts), span.timeout_seconds)
            self.notices = Notices(store, rank, parties.destinations)
        self._plan = plan(parameters, parties, rank)
        self._exchange = Exchange(
            self._plan,
            dtype=dtype,
            bucket_bytes=BUCKET_BYTES,
            device=device_here(),
            group=self.group,
            sends_changes=sends_changes,
        )

    def to_generation(self) -> ReshardStats:
        """Give the generator the current weights; returns what that moved. All ranks call it together.

        NumericsError, with the parameter and the ranks, if the bits that arrived are not those that were sent, or the
        bits that a generator keeps not those that arrived.
        """
        weights: Mapping[str, Shard] = {}
        if self._model:
            adapter = self._model.adapter
            weights = with_adapters(dict(named_parameters(self._model)), adapter.scale if adapter else 0.0)
        pieces = self._exchange.pieces(weights)
        if self._generator:
            kept = self._generator.load_weights(pieces, self._plan.wanted)
        else:
            kept, _ = {}, deque(pieces, maxlen=0)
        self._exchange.verify(kept)
        return self._exchange.stats


def _nodes() -> list[int]:
    """rank -> number of its node; a process of a node has its host name."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return _numbered(hosts)


def _numbered(hosts: Sequence[str]) -> list[int]:
    return [hosts.index(host) for host in hosts]


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
