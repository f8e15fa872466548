"""Experts of a mixture over ranks: tokens go to the ranks of their experts by all-to-all, and their outputs come back.

A rank holds whole experts, which FSDP2 shards over the ranks that hold the same ones (`ModelMesh.expert_axes`). No
token is dropped. Tensor-parallel ranks hold a part of the tokens each (`sequence`), and each routes its own part.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rlhf_trainer.training.context import moved
from rlhf_trainer.training.distributed import EXPERT, EXPERT_SHARD, REPLICATE, ModelMesh, exchange_rows, local_shard

KERNEL, OVER_RANKS = "grouped_mm", "experts_over_ranks"
"""Names among transformers' expert functions: of the kernel for a rank's own experts, and of `_compute_over_ranks`."""

OPTIONS = ("has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
"""Attributes by which transformers' expert functions know how a module of experts is laid out."""


def sparse_blocks(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that have a router and, as `experts`, transformers' stacked experts."""
    for module in model.modules():
        if hasattr(getattr(module, "experts", None), "is_transposed"):
            yield module


def cut_experts(model: nn.Module, mesh: ModelMesh) -> None:
    """Keep this rank's part of the experts of each layer, in place.

    A collective of the pool. Nothing is done where `ParallelSizes.cuts_experts` is false.
    """
    if not mesh.layout.cuts_experts:
        return
    axis = mesh.expert_axes[EXPERT]
    for block in sparse_blocks(model):
        experts = block.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = parameter.detach().chunk(axis.size())[axis.get_local_rank()].clone()
            held = DTensor.from_local(own, axis, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(held, requires_grad=parameter.requires_grad))
        experts.group = axis.get_group()
        experts.config._experts_implementation = OVER_RANKS  # noqa: SLF001 there is no public name


def shard_experts(model: nn.Module, mesh: ModelMesh, **options: Any) -> None:
    """Shard the experts that `cut_experts` has left on this rank by FSDP2; options: of `fully_shard`."""
    if not mesh.layout.cuts_experts:
        return
    axes, layout = mesh.expert_axes, mesh.layout
    data = axes[REPLICATE, EXPERT_SHARD] if mesh.reduces_replicas else axes[EXPERT_SHARD]
    reduced = layout.shards if mesh.compresses else layout.data * layout.context

    def cut(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(local_shard(parameter).shape, layout.expert_shards))

    for block in sparse_blocks(model):
        module: FSDPModule = fully_shard(block.experts, mesh=data, shard_placement_fn=cut, **options)
        module.set_gradient_divide_factor(reduced)  # as for other layers; by default the ranks of `data`
        # with gloo only a sum takes a factor; a single shard is divided anyway, and would be divided twice
        module.set_force_sum_reduction_for_comms(layout.expert_shards > 1)


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which FSDP cuts the experts of a rank: the first or last if `shards` divides it, else 0."""
    return next((dim for dim in (0, len(shape) - 1) if shape[dim] % shards == 0), 0)


def tokens_by_expert(chosen: Tensor, experts: int) -> Tensor:
    """Count the tokens of each expert, int64 [experts], without a wait for the device; chosen: of any shape."""
    numbers = chosen.flatten()
    return numbers.new_zeros(experts).scatter_add_(0, numbers, torch.ones_like(numbers))


def _on_this_rank(module: nn.Module) -> SimpleNamespace:
    """Return a stand-in for a module of experts with this rank's experts, for transformers' expert functions."""
    held = {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in module.named_parameters(recurse=False)
    }
    options = {name: getattr(module, name) for name in (*OPTIONS, "_apply_gate")}
    return SimpleNamespace(**held, **options, num_experts=len(next(iter(held.values()))))


def _compute_over_ranks(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Apply the experts of this rank's tokens, on the ranks that hold these experts: [n, H] -> [n, H].

    index, weights: [n, k], numbers and weights of the experts of each token. Ranks without tokens take part, too.
    """
    own, compute, ranks = _on_this_rank(module), ALL_EXPERTS_FUNCTIONS[KERNEL], module.group.size()
    if ranks == 1:
        return compute(own, hidden, index, weights)  # type: ignore[no-any-return]
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    counts = tokens_by_expert(chosen, ranks * own.num_experts).view(ranks, own.num_experts)
    arriving = exchange_rows(counts, module.group)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # the only wait for the device
    arrived = _exchanged(hidden[order // index.shape[1]], sent, received, module.group)
    numbers = torch.arange(own.num_experts, device=index.device).repeat(ranks)
    numbers = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received))[:, None]
    computed = compute(own, arrived, numbers, torch.ones_like(numbers, dtype=hidden.dtype))
    back = _exchanged(computed, received, sent, module.group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    weighted: Tensor = back[place].view(*index.shape, -1) * weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(OVER_RANKS, _compute_over_ranks)


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent` rows [n, H] to each rank, and get `received` from each; gradients go back the same way."""
    there = partial(exchange_rows, group=group, sent=sent, received=received)
    return moved(rows, there, partial(exchange_rows, group=group, sent=received, received=sent))


def own_tokens(count: int, rank: int, ranks: int) -> slice:
    """Return the slice of `count` tokens that one of the tensor-parallel ranks routes."""
    size = -(-count // ranks)
    start = min(rank * size, count)
    return slice(start, min(start + size, count))
