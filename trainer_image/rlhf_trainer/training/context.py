"""Context parallelism: exchange of keys, values and results between ranks that hold parts of the same rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_trainer.training.distributed import exchange_rows, gather_rows

Move = Callable[[Tensor], Tensor]


def sum_of_parts(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum values over a group in which each rank has zeros for other ranks' values; the gradient is passed unchanged.

    So every rank computes the same loss of whole rows, and a weight's gradient is the sum of the ranks' gradients.
    """
    if group is None:
        return values
    return moved(values, partial(_added, group=group), lambda gradient: gradient)


def heads_for_tokens(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange heads for tokens: [1, heads, own tokens, size] -> [1, heads / ranks, N, size]."""
    _, heads, tokens, size = given.shape
    ranks = group.size()
    arrived = _exchanged(given.view(ranks, heads // ranks, tokens, size), group)
    return arrived.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, size)


def tokens_for_heads(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads: [1, N, heads / ranks, size] -> [1, own tokens, heads, size]."""
    _, tokens, heads, size = given.shape
    ranks = group.size()
    arrived = _exchanged(given.view(ranks, tokens // ranks, heads, size), group)
    return arrived.transpose(0, 1).reshape(1, tokens // ranks, ranks * heads, size)


def of_all_tokens(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather keys or values of all tokens: [1, heads, own tokens, size] -> [1, heads, N, size]."""
    by_token = given[0].transpose(0, 1)
    whole = moved(by_token, partial(gather_rows, group=group), partial(_own_share, group=group))
    return whole.transpose(0, 1)[None]


def _exchanged(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchange = partial(exchange_rows, group=group)
    return moved(given, exchange, exchange)


def moved(given: Tensor, move: Move, back: Move) -> Tensor:
    """Return `given` after the collective `move`; the gradient goes through the collective `back`."""
    return _Moved.apply(given, move, back)  # type: ignore[no-any-return, no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, move: Move, back: Move) -> Tensor:
        ctx.back = back
        return move(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _own_share(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = given.new_empty((len(given) // group.size(), *given.shape[1:]))
    dist.reduce_scatter_tensor(share, given.contiguous(), group=group)
    return share


def _added(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = given.clone()
    dist.all_reduce(total, group=group)
    return total
