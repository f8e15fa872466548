"""The process groups of a model's p-t-d axes, and the collectives of ranks that hold different rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhf_api.spec.parallel_sizes import Axis, ParallelSizes
from rlhf_trainer.training.distributed import (
    collective_timeout,
    device_here,
    largest_over_ranks,
    rows_of_all_ranks,
    sum_over_ranks,
)

REPLICATE, SHARD, PIPELINE, TENSOR = "replicate", "shard", "pipeline", "tensor"
DATA = "data"
"""The name of replicas and shards as one axis."""


class ModelMesh:
    """The process groups of a layout. All ranks of the pool make it together.

    Data-parallel ranks are `replicas` copies of FSDP shards (HSDP); those of an axis of length 1 need no group.
    """

    def __init__(self, layout: ParallelSizes) -> None:
        self.layout = layout
        sizes = {REPLICATE: layout.replicas, SHARD: layout.shards, PIPELINE: layout.pipeline, TENSOR: layout.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        self._mesh = init_device_mesh(device_here().type, tuple(kept.values()), mesh_dim_names=tuple(kept))
        if layout.replicas > 1:
            self._mesh[REPLICATE, SHARD]._flatten(DATA)  # noqa: SLF001 there is no public name
        if (timeout := collective_timeout()) is not None:
            for name in (*kept, *((DATA,) if layout.replicas > 1 else ())):
                distributed_c10d._set_pg_timeout(timeout, self._mesh[name].get_group())  # noqa: SLF001 as above
        self._coordinates = layout.coordinates(dist.get_rank())

    def coordinate(self, axis: Axis) -> int:
        """This rank's index on an axis."""
        return self._coordinates[axis]

    @property
    def data_axes(self) -> DeviceMesh:
        """The axes over which FSDP2 shards, with replicas two: those of copies and of shards (HSDP)."""
        return self._mesh[REPLICATE, SHARD] if self.layout.replicas > 1 else self._mesh[SHARD]

    @property
    def tensor_axis(self) -> DeviceMesh:
        """The axis of this rank's tensor-parallel ranks; KeyError if t is 1."""
        return self._mesh[TENSOR]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline; KeyError if p is 1."""
        return self._mesh[PIPELINE].get_group()

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate("pipeline") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate("pipeline") == self.layout.pipeline - 1

    @property
    def _data_group(self) -> dist.ProcessGroup:
        return self._mesh[DATA if self.layout.replicas > 1 else SHARD].get_group()

    def sum(self, values: Sequence[float | Tensor]) -> list[float]:
        """Each value summed over the ranks that hold different rows."""
        return sum_over_ranks(values, self._data_group)

    def largest(self, value: int) -> int:
        """The largest value of the ranks that hold different rows."""
        return largest_over_ranks(value, self._data_group)

    def rows_of_all(self, values: Tensor, start: int) -> Tensor:
        """The rows of the whole batch, float64 [B]; see `rows_of_all_ranks`."""
        return rows_of_all_ranks(values, start, self._data_group)

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that hold different rows."""
        return dist.get_rank(self._data_group)

    def of_all(self, values: Tensor) -> Tensor:
        """The values [n] of each rank that holds different rows: [ranks, n], on the CPU."""
        given = values.to(device_here())
        every = given.new_empty(self.layout.data * len(given))
        dist.all_gather_into_tensor(every, given, group=self._data_group)
        return every.view(self.layout.data, len(given)).cpu()

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send as many neighbouring rows [B, ...] to each rank that holds different rows, and receive as many of each.

        The result is where `rows` is.
        """
        given = rows.to(device_here())
        arrived = given.new_empty((sum(received), *given.shape[1:]))
        dist.all_to_all_single(arrived, given.contiguous(), received, sent, group=self._data_group)
        return arrived.to(rows.device)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Broadcast the last stage's values to all stages; the others may pass anything of that shape."""
        if self.layout.pipeline == 1:
            return values
        given = (values if self.is_last_stage else torch.zeros_like(values)).to(device_here())
        dist.all_reduce(given, group=self.pipeline_group)
        return given.to(values.device)

    def sum_over_all(self, value: Tensor) -> float:
        """A value summed over all ranks of the model."""
        return sum_over_ranks([value])[0]
