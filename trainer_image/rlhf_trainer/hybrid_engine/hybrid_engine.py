"""The 3D-HybridEngine of one actor: it reshards training weights into a generator, in the same pool or another."""

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from transformers import PreTrainedConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats, Shard
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.adapters import with_adapters
from rlhf_trainer.training.distributed import AbortSwitch, device_here, join_group
from rlhf_trainer.training.sharding import ShardedModel, named_parameters

BUCKET_BYTES = 16 * 2**20, 512 * 2**20
"""Bounds of the bytes of a bucket: the lower one applies to small models, the upper one to large models."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Description of a process group that spans two pools: first the training ranks, then the generating ranks."""

    meeting: Meeting
    """Address at which the ranks of the group meet, on the machine of the first one."""
    hosts: Sequence[str]
    """Host of each rank of the group; ranks with the same host are on one node."""
    training: ParallelSizes
    generation: ParallelSizes
    timeout_seconds: float
    """Time limit of a collective of the group."""
    before: int = 0
    """Number of generating ranks in the torch worlds before this rank's, if the generating pool has several worlds."""

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


class HybridEngine:
    """Resharding of weights from training to generation. Training shards are only read, so none moves back."""

    def __init__(
        self,
        model: ShardedModel | None,
        generator: GenerationEngine | None,
        *,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        trust_remote_code: bool,
        span: Span | None = None,
        sends_changes: bool = False,
        switch: AbortSwitch | None = None,
    ) -> None:
        """Plan the reshard; if generation has its own pool, join the process group of both pools' ranks.

        A collective of the pool or, with `span`, of both pools. model: None if this rank only generates; generator:
        None if it only trains; dtype: the compute type of the model, of sent weights and of the generator; span: the
        group of both pools, None if one pool trains and generates; sends_changes: send changed elements only.
        """
        self._model, self._generator, self.group = model, generator, None
        self.notices: PrefixStore | None = None
        """Store for small messages between ranks of both pools; None if one pool trains and generates."""
        parameters = describe(config, trust_remote_code=trust_remote_code)
        if span is None:
            assert model is not None
            rank = dist.get_rank()
            parties = Parties.replica(model.mesh.layout, _nodes(), rank)
        else:
            rank = dist.get_rank() + (0 if model else span.training.world_size + span.before)
            parties = span.parties
            switch = switch or AbortSwitch()
            self.group, store = join_group(span.meeting, rank, len(span.hosts), span.timeout_seconds, switch)
            self.notices = PrefixStore("notices", store)  # torch keeps the group's own keys in `store`
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
        """Reshard the current training weights into the generator, a collective; returns the traffic.

        NumericsError, with the parameter and the ranks, if received bits differ from sent bits, or the generator's bits
        from received ones.
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
    """Return for each rank the lowest rank on its node (the ranks with its host name). A collective."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return _numbered(hosts)


def _numbered(hosts: Sequence[str]) -> list[int]:
    return [hosts.index(host) for host in hosts]


def engine_groups(layout: ParallelSizes) -> list[list[int]]:
    """List the tensor-parallel ranks of each generation stage; the p_g stages of an engine are adjacent in the list."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault((at["data"], at["micro"], at["generation_pipeline"]), []).append(rank)
    return [groups[key] for key in sorted(groups)]


def stage_layers(layout: ParallelSizes, layers: int) -> list[int]:
    """Count the decoder layers of each of the p_g generation stages; each merges p / p_g adjacent training stages."""
    width = layout.pipeline // layout.generation_pipeline
    sizes = [len(stage) for stage in blocks(layers, layout.pipeline)]
    return [sum(sizes[start : start + width]) for start in range(0, layout.pipeline, width)]
