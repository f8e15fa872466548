"""torch.distributed: joining a world, a few collectives, and the process groups of a model's p-t-d axes."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import _dist2, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlhf_api.spec.parallel_sizes import Axis, ParallelSizes
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.meeting import LOOPBACK, Meeting

_timeout: timedelta | None = None
"""Time limit of a collective, an argument of each new process group; None before `start`."""
Device = Literal["CPU", "GPU"]
INTERFACE, OUTER_INTERFACE = "GLOO_SOCKET_IFNAME", "RLHF_OUTER_GLOO_SOCKET_IFNAME"
"""Variables with gloo's network interface: for all groups; for groups over machines if the world is on one machine."""
ON_ERROR, PROCESS_ENDS, GROUP_ENDS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "2"
"""Variable and its values: after the loss of a rank NCCL ends the process (torch's default), or only the group."""


def start(device: Device, timeout_seconds: float, meeting: Meeting | None = None) -> int:
    """Join the world of RANK, WORLD_SIZE and LOCAL_RANK by NCCL or gloo; returns the rank.

    meeting: where the ranks meet; None: at torchrun's MASTER_ADDR and MASTER_PORT. Gloo's groups of a world on one
    machine are on its loopback interface.
    """
    if device == "GPU":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    global _timeout  # noqa: PLW0603 one value for the process, like torch's default group
    _timeout = timedelta(seconds=timeout_seconds)
    backend = "nccl" if device == "GPU" else "gloo"
    if meeting is None:
        dist.init_process_group(backend, timeout=_timeout)
        return dist.get_rank()
    if meeting.address == LOOPBACK:
        os.environ |= {OUTER_INTERFACE: os.environ.get(INTERFACE, ""), INTERFACE: "lo"}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(meeting, rank, size, _timeout)
    dist.init_process_group(backend, timeout=_timeout, store=store, rank=rank, world_size=size)
    return rank


def open_store(meeting: Meeting, rank: int, size: int, timeout: timedelta) -> TCPStore:
    """Open the store of a group; rank 0 serves it at the meeting's address if it can, else at all its addresses."""
    listener = meeting.listen() if rank == 0 else None
    if rank:
        meeting.wait_for_listener()
    place = meeting.address, meeting.port, size, rank == 0
    return TCPStore(*place, timeout=timeout, wait_for_workers=False, master_listen_fd=listener)


def group_on_host() -> dist.ProcessGroup:
    """Make a gloo group of all ranks, for collectives on tensors in host memory. All ranks must call it."""
    return dist.new_group(timeout=_timeout, backend="gloo")  # type: ignore[no-any-return]


class AbortSwitch:
    """Switch by which another thread ends a group that has lost a rank, even while this rank is joining the group."""

    is_on = False
    group: dist.ProcessGroup | None = None

    def turn_on(self) -> None:
        """End the group's collectives, which on NCCL would wait for the lost rank."""
        self.is_on = True
        if self.group:
            self.group.abort()


def join_group(
    meeting: Meeting, rank: int, size: int, timeout_seconds: float, switch: AbortSwitch
) -> tuple[dist.ProcessGroup, TCPStore]:
    """Join a process group over the ranks of several torch worlds; returns the group and its store on rank 0's machine.

    Torch's collectives take the group as `group`, but a rank's number in the group is not its number in its world. A
    lost rank ends the group and not the process, also on NCCL. CommunicationError if ranks do not join in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    there = open_store(meeting, rank, size, timeout)
    until = time.monotonic() + timeout_seconds
    arrived = there.add("arrived", 1)
    while arrived < size:  # nothing could end torch's own wait for a lost rank
        if switch.is_on or time.monotonic() > until:
            raise CommunicationError(f"rank {rank} met {arrived} of the {size} ranks of a group with another pool")
        time.sleep(0.05)
        arrived = there.add("arrived", 0)
    if meeting.address != LOOPBACK and OUTER_INTERFACE in os.environ:
        os.environ[INTERFACE] = os.environ[OUTER_INTERFACE]
    make = _dist2._BACKENDS[dist.get_backend()]  # noqa: SLF001 `new_group` would read torchrun's variables
    before = os.environ.get(ON_ERROR, PROCESS_ENDS)
    os.environ[ON_ERROR] = GROUP_ENDS
    try:
        group = switch.group = make(there, rank, size, timeout, device_here())
        return group, there
    finally:
        os.environ[ON_ERROR] = before


def device_here() -> torch.device:
    """Return the device that this rank computes on: its GPU, or the CPU under gloo."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def device_memory() -> int:
    """Return the bytes of this rank's device memory; on CPU the machine's memory divided by the number of all ranks."""
    if device_here().type == "cuda":
        return int(torch.cuda.get_device_properties(device_here()).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, without gradient; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over_ranks(values: Sequence[float | Tensor], group: dist.ProcessGroup | None = None) -> list[float]:
    """Sum each value over all ranks, or over the ranks of a process group (float64, one collective).

    The sum has the same bits whichever rank has which value.
    """
    own = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device_here())
    every = gather_rows(own, group).view(-1, len(own))
    found: list[float] = every.sort(dim=0).values.sum(dim=0).tolist()
    return found


def largest_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the largest of the values that the ranks pass; a collective."""
    largest = torch.tensor(value, device=device_here())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the rows [n, ...] of every rank of a group, each with equally many: [ranks * n, ...]."""
    every = rows.new_empty((dist.get_world_size(group) * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(every, rows.contiguous(), group=group)
    return every


def exchange_rows(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """Send rows [n, ...] to the ranks of a group, and return the received ones; sent, received: counts, None: equal."""
    arrived = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def rows_of_all_ranks(values: Tensor, start: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather a value per row from all ranks, float64 [B]; values: of this rank's rows; start: index of the first."""
    total = int(sum_over_ranks([len(values)], group)[0])
    rows = torch.zeros(total, dtype=torch.float64, device=device_here())
    rows[start : start + len(values)] = values
    dist.all_reduce(rows, group=group)
    return rows.cpu()


REPLICATE, SHARD, PIPELINE, TENSOR = "replicate", "shard", "pipeline", "tensor"
DATA, CONTEXT = "data", "context"
"""Names of axes for process groups only: over ranks with different rows, and over ranks with parts of a row."""
EXPERT, EXPERT_SHARD = "expert", "expert_shard"
"""Names of the axes that cut the experts of a layer: over ranks with different experts, and over FSDP shards."""


def _mesh(ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Make a device mesh of ranks with named axes; its groups have the time limit of `start`. A collective."""
    mesh = DeviceMesh(device_here().type, ranks, mesh_dim_names=names)
    for name in names:
        if _timeout:
            distributed_c10d._set_pg_timeout(_timeout, mesh[name].get_group())  # noqa: SLF001 there is no public name
    return mesh


class ModelMesh:
    """Process groups of a model's layout: of FSDP shards and of each axis longer than 1. A collective of the pool."""

    def __init__(self, layout: ParallelSizes, *, compresses: bool = False) -> None:
        """compresses: FSDP2 reduces no gradients between replicas (HSDP), which exchange steps (`CompressedSteps`)."""
        self.layout, self.compresses = layout, compresses and layout.replicas > 1
        sizes = {REPLICATE: layout.replicas, SHARD: layout.shards, PIPELINE: layout.pipeline, TENSOR: layout.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        self._mesh = _mesh(torch.arange(layout.world_size).view(tuple(kept.values())), tuple(kept))
        self._rows, self._data = self._mesh, SHARD
        if layout.context > 1 or layout.replicas > 1:
            outer = layout.data, layout.context, layout.pipeline * layout.tensor
            self._rows, self._data = _mesh(torch.arange(layout.world_size).view(outer), (DATA, CONTEXT, "inner")), DATA
        self._coordinates = layout.coordinates(dist.get_rank())

    def coordinate(self, axis: Axis) -> int:
        """Return this rank's index on an axis of the layout."""
        return self._coordinates[axis]

    @property
    def replica(self) -> int:
        """Index of the copy of the weights to which this rank belongs."""
        return self.coordinate("data") // (self.layout.data // self.layout.replicas)

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Process group of the ranks with this rank's shards in all replicas; KeyError without replicas."""
        return self._mesh[REPLICATE].get_group()

    @property
    def reduces_replicas(self) -> bool:
        """Whether FSDP2 itself adds up the gradients of several replicas."""
        return self.layout.replicas > 1 and not self.compresses

    @property
    def data_axes(self) -> DeviceMesh:
        """Device mesh for FSDP2: the axis of shards, after the axis of replicas if FSDP2 adds up their gradients."""
        return self._mesh[REPLICATE, SHARD] if self.reduces_replicas else self._mesh[SHARD]

    @cached_property
    def expert_axes(self) -> DeviceMesh:
        """Device mesh of this rank's stage for experts: `EXPERT_SHARD` before `EXPERT`, perhaps replicas before both.

        A collective of the pool when it is first read.
        """
        layout = self.layout
        ranks = torch.arange(layout.world_size).view(layout.replicas, layout.shards, layout.pipeline, layout.tensor)
        ranks = ranks.transpose(1, 2).reshape(layout.replicas, layout.pipeline, layout.expert_shards, layout.expert)
        names = (REPLICATE, PIPELINE, EXPERT_SHARD, EXPERT)
        mesh = _mesh(ranks, names)
        return mesh[REPLICATE, EXPERT_SHARD, EXPERT] if self.reduces_replicas else mesh[EXPERT_SHARD, EXPERT]

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that hold other tokens of this rank's rows; KeyError without such ranks."""
        return self._rows[CONTEXT].get_group()

    @property
    def tensor_axis(self) -> DeviceMesh:
        """Device mesh of this rank's tensor-parallel ranks; KeyError without tensor parallelism."""
        return self._mesh[TENSOR]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Process group of this rank's pipeline, one rank for each stage; KeyError without pipeline parallelism."""
        return self._mesh[PIPELINE].get_group()

    @cached_property
    def pipeline_ways(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Process groups of a fused schedule, for hidden states and for gradients; a collective when it is first read.

        Each model has its own two groups, and a group has one direction, so messages keep their order.
        """
        stages, tensor = self.layout.pipeline, self.layout.tensor
        ranks = torch.arange(self.layout.world_size).view(-1, stages, tensor).transpose(1, 2)
        pipelines: list[list[int]] = ranks.reshape(-1, stages).tolist()
        make = dist.new_subgroups_by_enumeration
        forward, backward = (make(pipelines, _timeout)[0] for _ in range(2))  # type: ignore[no-untyped-call]
        assert forward, "every rank is in a pipeline"
        assert backward, "every rank is in a pipeline"
        self._join_neighbours(forward, 1)
        self._join_neighbours(backward, -1)
        return forward, backward

    def _join_neighbours(self, group: dist.ProcessGroup, step: int) -> None:
        """Send a number from stage to stage, so that NCCL connects neighbours, which blocks each until both take part.

        Else a rank that receives gradients ahead would wait for a stage that waits for hidden states of this rank.
        """
        here, number = self.coordinate("pipeline"), torch.zeros(1, device=device_here())
        for stage, transfer in ((here - step, dist.recv), (here + step, dist.send)):
            if 0 <= stage < self.layout.pipeline:
                transfer(number, self.rank_of_stage(stage), group)

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that holds a stage of this rank's pipeline."""
        ranks = (stage - self.coordinate("pipeline")) * self.layout.tensor
        return dist.get_rank() + (-ranks if self.layout.reverses_stages else ranks)

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate("pipeline") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate("pipeline") == self.layout.pipeline - 1

    @property
    def is_counted(self) -> bool:
        """True on one of the ranks with the same rows: only its measurements of an update count."""
        return self.is_last_stage and self.coordinate("tensor") == self.coordinate("context") == 0

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Process group of this rank's data-parallel ranks, which hold different rows."""
        return self._rows[self._data].get_group()

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Process groups of more than one rank to which this rank belongs, by the name of their axis."""
        found = {DATA: self.data_group} if self.layout.data > 1 else {}
        found |= {CONTEXT: self.context_group} if self.layout.context > 1 else {}
        sizes = {PIPELINE: self.layout.pipeline, TENSOR: self.layout.tensor}
        return found | {name: self._mesh[name].get_group() for name, size in sizes.items() if size > 1}

    def sum(self, values: Sequence[float | Tensor]) -> list[float]:
        """Sum each value over the data-parallel ranks."""
        return sum_over_ranks(values, self.data_group)

    def largest(self, value: int) -> int:
        """Return the largest of the values that the data- and context-parallel ranks pass; a collective."""
        largest = largest_over_ranks(value, self.data_group)
        return largest_over_ranks(largest, self.context_group) if self.layout.context > 1 else largest

    def of_all(self, values: Tensor) -> Tensor:
        """Gather the values [n] of every data-parallel rank: [ranks, n], on the CPU."""
        return gather_rows(values.to(device_here()), self.data_group).view(-1, len(values)).cpu()

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Exchange rows [B, ...] between the data-parallel ranks; sent, received: row counts by rank."""
        return exchange_rows(rows.to(device_here()), self.data_group, sent, received).to(rows.device)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Broadcast the last stage's values to all stages; the other stages pass any tensor of that shape."""
        if self.layout.pipeline == 1:
            return values
        given = (values if self.is_last_stage else torch.zeros_like(values)).to(device_here())
        dist.all_reduce(given, group=self.pipeline_group)
        return given.to(values.device)
