"""Log-probabilities and entropies from hidden states, fused with the head: no rank holds the logits of all tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

MAX_CHUNK_LOGITS = 2**26
"""Maximum number of logits in a chunk on a rank: 256 MiB in float32; two copies are alive at a time."""


class Likelihood(NamedTuple):
    """Log-probabilities and entropies of the tokens that a loss reads: float32, nats."""

    log_probs: Tensor
    entropy: Tensor
    """Entropy of the model's distribution at the position of each token; 0 unless requested."""


@dataclass(frozen=True)
class VocabularyPart:
    """Part of the vocabulary whose logits this rank computes."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    """Process group of the ranks that share the vocabulary; None: this rank has the whole vocabulary."""

    def reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce values over the ranks that share the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values


def likelihood(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor, *, entropy: bool, softcap: float | None = None
) -> Likelihood:
    """Log-probability [n] of each token under softmax(hidden @ weight.T / temperature), and the entropy [n] if asked.

    hidden: [n, H], the state before each token; weight: [V, H], the head's, which may be a DTensor split along V (then
    all ranks of its mesh have the same hidden states and call together); tokens: int64 [n]; temperature: float32 [n].
    Logits have the type of hidden and weight, everything after them is float32. softcap: logits are first bounded to
    softcap * tanh(logits / softcap), as by Gemma 2 (arXiv:2408.00118, section 2).

    Forward and backward pass go through the tokens in chunks of at most `MAX_CHUNK_LOGITS` logits, which the backward
    pass computes again. Ranks that share the vocabulary exchange four numbers a token (as Megatron-LM does,
    arXiv:1909.08053, section 3). The gradient of the weight is added up over the chunks in float32.
    """
    part = VocabularyPart()
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        part = VocabularyPart(mesh.get_local_rank() * -(-len(weight) // mesh.size()), mesh.get_group())
        weight = weight.to_local()
    return Likelihood(*_Likelihood.apply(hidden, weight, part, tokens, temperature, entropy, softcap))  # type: ignore[no-untyped-call]


class _Likelihood(torch.autograd.Function):
    """Log-probabilities and entropies. Let x be the logits / temperature, p = softmax(x) and H the entropy of p:

    log p_i = x_i - logsumexp(x);  d log p_i / d x_j = [i = j] - p_j;  d H / d x_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        part: VocabularyPart,
        tokens: Tensor,
        temperature: Tensor,
        entropy: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        largest, total, weighted, own = (temperature.new_zeros(len(tokens)) for _ in range(4))
        for rows in _chunks(len(tokens), len(weight)):
            x = _scaled_logits(hidden[rows], weight, temperature[rows], softcap)
            column, is_here = _columns(tokens[rows], part, len(weight))
            own[rows] = torch.where(is_here, x.gather(1, column)[:, 0], 0.0)
            largest[rows] = x.amax(1)
            x -= largest[rows, None]
            exponentials = x.exp()
            total[rows] = exponentials.sum(1)
            if entropy:
                weighted[rows] = exponentials.mul_(x).sum(1)
        # sums relative to this rank's largest logit become sums relative to the largest of all ranks
        of_all = part.reduce(largest.clone(), dist.ReduceOp.MAX)
        shift = largest - of_all
        sums = torch.stack([total * shift.exp(), (weighted + shift * total) * shift.exp(), own])
        total, weighted, own = part.reduce(sums)
        log_total = of_all + total.log()
        entropies = total.log() - weighted / total if entropy else torch.zeros_like(total)
        ctx.part, ctx.softcap = part, softcap
        ctx.save_for_backward(hidden, weight, tokens, temperature, log_total, entropies)
        ctx.set_materialize_grads(False)
        return own - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, temperature, log_total, entropies = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_log_probs = torch.zeros_like(log_total) if of_log_probs is None else of_log_probs
        for rows in _chunks(len(tokens), len(weight)):
            x = _scaled_logits(hidden[rows], weight, temperature[rows], ctx.softcap)
            # d (softcap * tanh(z / softcap)) / d z = 1 - tanh(z / softcap)^2
            slope = 1.0 - (x * (temperature[rows, None] / ctx.softcap)).square_() if ctx.softcap else None
            x -= log_total[rows, None]
            if of_entropies is None:
                of_x = x.exp_().mul_(-of_log_probs[rows, None])
            else:
                of_x = x.exp()
                of_x *= x.add_(entropies[rows, None]).mul_(-of_entropies[rows, None]).sub_(of_log_probs[rows, None])
            column, is_here = _columns(tokens[rows], ctx.part, len(weight))
            of_x.scatter_add_(1, column, torch.where(is_here, of_log_probs[rows], 0.0)[:, None])
            of_x.div_(temperature[rows, None])
            of_logits = (of_x if slope is None else of_x.mul_(slope)).to(weight.dtype)
            of_hidden[rows] = of_logits @ weight
            if of_weight is not None and of_logits.dtype == of_weight.dtype:
                of_weight.addmm_(of_logits.T, hidden[rows])
            elif of_weight is not None:
                of_weight += of_logits.T @ hidden[rows]
        return ctx.part.reduce(of_hidden), of_weight, None, None, None, None, None


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, MAX_CHUNK_LOGITS // max(1, vocabulary))
    return (slice(start, start + size) for start in range(0, count, size))


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor, softcap: float | None) -> Tensor:
    logits = (hidden @ weight.T).float()
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature[:, None])


def _columns(tokens: Tensor, part: VocabularyPart, width: int) -> tuple[Tensor, Tensor]:
    """Return (column [n, 1] of each token in this rank's logits, or 0; bool [n], True for tokens with a column)."""
    column = tokens - part.first
    is_here = (column >= 0) & (column < width)
    return torch.where(is_here, column, 0)[:, None], is_here
