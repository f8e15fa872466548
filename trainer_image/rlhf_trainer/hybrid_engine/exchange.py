"""Execution of a ReshardPlan over torch.distributed, bucket by bucket; checksums are compared at the end.

pack 1 | pack 2 | deliver 1 | pack 3 | deliver 2 | ...   pack: cast and copy a bucket; deliver: give it to vLLM
       [ 1 is sent ]        [ 2 is sent ] ...            asynchronous all_to_all of all ranks (two with deltas)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.buckets import Part, Step, loads, numel, steps
from rlhf_trainer.hybrid_engine.delta import Arrival, Changes
from rlhf_trainer.hybrid_engine.reshard_plan import ReshardPlan
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.adapters import AdaptedShard
from rlhf_trainer.training.distributed import gather_rows


@dataclass
class ReshardStats:
    """Traffic and memory of one reshard on this rank, in bytes; counted at the calls of collectives."""

    sent: int = 0
    received: int = 0
    collectives: int = 0
    """Number of collective calls, including calls that compare checksums; bytes of the latter are not counted."""
    buffers: int = 0
    """Bytes of the reshard's send and receive buffers; they are freed when the reshard ends."""
    is_whole: bool = True
    """Whether the reshard sent all values of the weights, not only changed values."""


Shard = Tensor | AdaptedShard
"""This rank's shard of a training weight, without gradient."""
Waiting = dist.Work | Arrival
"""A running collective of a reshard."""
Arrived = dict[tuple[str, TensorSlice], Tensor]
"""Parts of weights received from other ranks: (parameter, slice) -> view of a buffer."""


class Exchange:
    """Reshard of the training weights into this rank's generation shard, after each update."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        dtype: torch.dtype,
        bucket_bytes: tuple[int, int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        sends_changes: bool = False,
    ) -> None:
        """Prepare the buckets; a collective of `group` (default: the world), which gathers the traffic of all ranks.

        dtype: of the generator; elements are cast to it before sending. A bucket holds 1 / BUCKETS of the busiest
        rank's traffic, within the bounds `bucket_bytes`. This rank has two buffers of at most a bucket, three if bytes
        cross nodes, and one to cast its own parts. sends_changes: send only elements whose bits have changed (`delta`),
        which needs copies of the last sent and received tensors.
        """
        self._plan, self._dtype, self._device, self._group = plan, dtype, device, group
        self._world = dist.get_world_size(group)
        self._place = {name: place for place, name in enumerate(plan.moves)}
        of_all = gather_rows(loads(plan)[None].to(device), group)
        self._trades, self._forwards = bool(of_all.any()), bool(of_all[..., 0].any())
        self._steps = steps(plan, of_all.cpu(), (bucket_bytes[0] // dtype.itemsize, bucket_bytes[1] // dtype.itemsize))
        self._changes = Changes(group) if sends_changes else None
        self._sent: list[tuple[int, Tensor]] = []
        self._came: list[tuple[int, Tensor]] = []
        self.stats = ReshardStats()
        """Traffic and memory of the last reshard."""

    def pieces(self, weights: Mapping[str, Shard]) -> Iterator[WeightSlice]:
        """Yield this rank's generation shard, piece by piece in the plan's order. Every rank must iterate to the end.

        weights: parameter -> this rank's training shard, on any device; shards are only read. A piece is valid until
        the next iteration; it may be a view of a training weight. Values are read from the device only to send deltas.
        """
        self._sent, self._came = [], []
        *buffers, cast = self._buffers(weights)
        self.stats = ReshardStats(buffers=sum(buffer.nbytes for buffer in buffers) + cast.nbytes)
        arrived: Arrived = {}
        behind: tuple[Step, Waiting | None] | None = None
        for number, step in enumerate(self._steps):
            if self._forwards and behind and behind[1]:
                behind[1].wait()
            buffer = buffers[number % len(buffers)]
            work = self._start(number, buffer, weights, arrived) if step.is_exchanged else None
            if behind:
                yield from self._deliver(*behind, weights, arrived, cast)
            behind = step, work
        if behind:
            yield from self._deliver(*behind, weights, arrived, cast)

    def verify(self, kept: Mapping[str, Tensor]) -> None:
        """Compare the checksums of the last reshard; all ranks raise the same NumericsError for a difference anywhere.

        kept: `bit_sum` of this rank's generation shards in the generator, by parameter. For each parameter the sums of
        sent and received parts must agree between any two ranks, and those of received and kept parts on each rank. One
        value is read from the device.
        """
        rank, sent, arrived = self._plan.rank, self._table(self._sent), self._table(self._came)
        claimed = torch.empty_like(sent)
        if self._trades:
            dist.all_to_all_single(claimed, sent, group=self._group)
            self.stats.collectives += 2
        wrong = claimed != arrived if self._trades else torch.zeros_like(sent, dtype=torch.bool)
        sums = [(self._place[name], kept[name]) for name in self._plan.wanted]
        wrong[rank] = self._table(sums)[0] != arrived.sum(0)
        sources = torch.arange(self._world, device=self._device)[:, None]
        places = torch.arange(len(self._place), device=self._device)
        codes = (places * self._world + sources) * self._world + rank
        none = self._world**2 * len(self._place)
        first = torch.where(wrong, codes, none).min()
        if self._trades:
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        if (code := int(first)) == none:
            return
        place, source, destination = code // self._world**2, code // self._world % self._world, code % self._world
        name = list(self._place)[place]
        if source == destination:
            raise NumericsError(f"{name}: the generator of rank {source} keeps other bits than arrived (checksum)")
        raise NumericsError(f"{name}: what rank {destination} received of it is not what rank {source} sent (checksum)")

    def _buffers(self, weights: Mapping[str, Shard]) -> list[Tensor]:
        """Allocate two or three alternating step buffers, and one to cast local tensors, empty if none needs a cast."""
        moved = max((step.numel for step in self._steps), default=0)
        is_ready = all((weight.dtype, weight.device) == (self._dtype, self._device) for weight in weights.values())
        own = (move.slice.numel for step in self._steps for _, move in step.needed if move.is_own)
        sizes = [moved] * (3 if self._forwards else 2) + [0 if is_ready else max(own, default=0)]
        return [torch.empty(size, dtype=self._dtype, device=self._device) for size in sizes]

    def _start(self, number: int, buffer: Tensor, weights: Mapping[str, Shard], arrived: Arrived) -> Waiting:
        """Pack the slices to send in reshard step `number`, own or to forward; start the step's collective."""
        step = self._steps[number]
        given, got = numel(step.sends), numel(step.receives)
        sent, received = buffer[:given], buffer[given : given + got]
        packed: dict[tuple[str, TensorSlice], tuple[Tensor, Tensor]] = {}
        for (name, move), part in _views(step.sends, sent):
            key = name, move.slice
            if key in packed:
                part.copy_(packed[key][0])
            else:
                part.copy_(arrived[key] if key in arrived else self._local(name, move.slice, weights))
                packed[key] = part, bit_sum(part)
            self._sent.append((self._slot(name, move.destination), packed[key][1]))
        sizes = [[0] * self._world, [0] * self._world]
        for _, move in step.sends:
            sizes[0][move.destination] += move.slice.numel * sent.itemsize
        for _, move in step.receives:
            sizes[1][move.source] += move.slice.numel * sent.itemsize
        work: Waiting
        if self._changes:
            work, moved, self.stats.is_whole = self._changes.exchange(number, sent, received, sizes)
        else:
            # sent as bytes, as gloo supports fewer types than vLLM
            work = dist.all_to_all_single(
                received.view(torch.uint8), sent.view(torch.uint8), sizes[1], sizes[0], group=self._group, async_op=True
            )
            moved = (sent.nbytes, received.nbytes)
        arrived.update(((name, move.slice), part) for (name, move), part in _views(step.receives, received))
        self.stats.collectives += 1
        self.stats.sent += moved[0]
        self.stats.received += moved[1]
        return work

    def _deliver(
        self, step: Step, work: Waiting | None, weights: Mapping[str, Shard], arrived: Arrived, cast: Tensor
    ) -> Iterator[WeightSlice]:
        """Wait for a step's collective; yield its pieces of weights: own ones cast, received ones as they arrived."""
        if work is not None:
            work.wait()
        for name, move in step.needed:
            if not move.is_own:
                piece = arrived.pop((name, move.slice))
            else:
                piece = self._local(name, move.slice, weights)
                if len(cast):
                    piece = cast[: move.slice.numel].view(move.slice.shape).copy_(piece)
            self._came.append((self._slot(name, move.source), bit_sum(piece)))
            yield name, move.slice, piece

    def _slot(self, name: str, rank: int) -> int:
        """Return the index of the pair (rank, parameter) in a flat table of checksums."""
        return rank * len(self._place) + self._place[name]

    def _table(self, sums: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Sum checksums by rank and parameter: int64 [ranks, parameters] on the device."""
        table = torch.zeros(self._world * len(self._place), dtype=torch.int64, device=self._device)
        if sums:
            slots = torch.tensor([slot for slot, _ in sums], device=self._device)
            table.index_add_(0, slots, torch.stack([total for _, total in sums]))
        return table.view(self._world, -1)

    def _local(self, name: str, part: TensorSlice, weights: Mapping[str, Shard]) -> Tensor:
        """Return a part's elements: a view of this rank's training weights or, with an adapter, the merged elements."""
        weight, held = weights[name], self._plan.held[name]
        if isinstance(weight, Tensor) and weight.ndim == 3:  # gates of experts are fused in the model
            weight = weight.view(held.shape)
        assert weight.shape == held.shape, f"{name}: rank {self._plan.rank} holds {tuple(weight.shape)}, not {held}"
        return weight[part.within(held)]


def _views(parts: Sequence[Part], buffer: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Pair each part with its view of a buffer; the views lie one after the other."""
    views = torch.split(buffer, [move.slice.numel for _, move in parts]) if parts else ()
    return ((part, view.view(part[1].slice.shape)) for part, view in zip(parts, views, strict=True))
