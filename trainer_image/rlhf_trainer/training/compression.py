"""Training over slow links (FusionLLM, arXiv:2410.12707): replicas send each other a few values of their steps.

FSDP2 reduces gradients over the shards of a replica only (HSDP). Each replica takes AdamW's step on its own gradients,
and sends the largest values of that step, in 8 bits. The rest is added to the replica's next step (error feedback). All
replicas add the same bytes in the same order, so their weights have the same bits. Compressed gradients would be worse:
AdamW divides by the root of their mean square, which is too large for values that are sent seldom.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import device_here, gather_rows, local_shard
from rlhf_trainer.training.sharding import ShardedModel, trained_parameters

BLOCK, KEPT = 256, 16
"""Number of values in a block, so that an index fits into a byte, and number of the values that are sent."""
SCALE_BYTES, LARGEST = 4, 127
"""Bytes of a block's float32 scale, and the largest 8-bit value that the scale multiplies."""
LEFT = "left"
"""Name of the unsent rest of a replica's steps, in the optimizer's state beside AdamW's moments."""


class CompressedSteps:
    """Optimizer steps of replicas that send each other compressed steps; plain steps where nothing is compressed."""

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._mesh = optimizer, model.mesh
        self._parameters = list(trained_parameters(model).values()) if model.mesh.compresses else []

    @torch.no_grad()
    def take(self) -> None:
        """Take an optimizer step; if compressed, the mean of all replicas' steps as sent. A collective of replicas."""
        moved = [(each, local_shard(each).clone()) for each in self._parameters if each.grad is not None]
        self._optimizer.step()
        if not moved:
            return
        parts = [self._encoded_step(parameter, before) for parameter, before in moved]
        group, joined = self._mesh.replica_group, torch.cat(parts)
        every = gather_rows(joined.to(device_here()), group).to(joined.device).chunk(group.size())
        arrived = [torch.split(each, [len(part) for part in parts]) for each in every]
        for place, (parameter, before) in enumerate(moved):
            total = torch.zeros(len(parts[place]), BLOCK, device=before.device)
            for steps in arrived:
                add_decoded(steps[place], total)
            mean = (total / len(arrived)).flatten()[: before.numel()].view_as(before)
            local_shard(parameter).copy_(before + mean)
        others, whole = len(arrived) - 1, sum(before.nbytes for _, before in moved)
        sent, ring = others * sum(part.nbytes for part in parts), 2 * others / len(arrived) * whole
        recorder.mean("gradients/sent_share", sent, ring)

    def _encoded_step(self, parameter: Tensor, before: Tensor) -> Tensor:
        """Encode a parameter's step plus the unsent rest of earlier steps; keep the rest that is not encoded."""
        size, left = before.numel(), local_shard(left_of(self._optimizer, parameter))
        rows = before.new_zeros(-(-size // BLOCK), BLOCK)
        rows.view(-1)[:size] = (local_shard(parameter) - before + left).flatten()
        sent = encoded(rows)
        add_decoded(sent, rows, factor=-1.0)
        left.copy_(rows.view(-1)[:size].view_as(left))
        return sent


def encoded(rows: Tensor) -> Tensor:
    """Encode the KEPT largest values of each block [blocks, BLOCK]: uint8 [blocks, SCALE_BYTES + 2 * KEPT]."""
    places = rows.abs().topk(KEPT, dim=1, sorted=False).indices
    values = rows.gather(1, places)
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    small = (values / scale.where(scale != 0, 1.0)).round().to(torch.int8)
    return torch.cat([scale.view(torch.uint8), places.to(torch.uint8), small.view(torch.uint8)], dim=1)


def add_decoded(sent: Tensor, rows: Tensor, *, factor: float = 1.0) -> None:
    """Add encoded values, times `factor`, to the blocks [blocks, BLOCK] in place."""
    scale, places, small = torch.split(sent, [SCALE_BYTES, KEPT, KEPT], dim=1)
    values = small.contiguous().view(torch.int8) * scale.contiguous().view(torch.float32)
    rows.scatter_add_(1, places.long(), values * factor)


def left_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the unsent rest of a parameter's steps, at first zeros; AdamW's moments must exist already."""
    state = optimizer.state[parameter]
    if LEFT not in state:
        state[LEFT] = torch.zeros_like(parameter)
    left: Tensor = state[LEFT]
    return left


def in_words(job: Job, sizes: Mapping[Role, ParallelSizes]) -> Iterator[str]:
    """Yield a sentence on what replicas send, per trained model with several; none if gradientCompression is None."""
    chosen, field = job.spec.training.gradient_compression, "spec.training.gradientCompression"
    whole = f"whole gradients: {field} is Auto, and no slow link between them is known"
    part = f"{KEPT} of {BLOCK} values of their steps, in 8 bits, and the rest with later ones ({field})"
    for role in job.trained():
        if sizes[role].replicas > 1 and chosen != "None":
            yield f"{role}: {sizes[role].replicas} replicas send each other {part if chosen == 'TopK' else whole}"
