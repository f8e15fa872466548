"""Log-probabilities and entropies from hidden states, fused with the head: no rank holds the logits of all tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_LOGITS, CPU_CHUNK_LOGITS = 2**28, 2**26
"""Maximum number of logits in a chunk on a rank: 1 GiB in float32 on a GPU, where few large products are faster, and
256 MiB on CPU, where they are not. Two copies are alive at a time; with fused kernels one, in the compute type.
"""
MOST_LOG_PROB = -1e-7
"""Largest log-probability of K tokens together: above it float32 cannot tell the rest from rounding errors."""


class Likelihood(NamedTuple):
    """Log-probabilities and entropies of the tokens that a loss reads: float32, nats."""

    log_probs: Tensor
    entropy: Tensor
    """Entropy of the model's distribution at the position of each token; 0 unless requested."""
    divergence: Tensor | None = None
    """Divergence of the model's distribution from a teacher's at each token's position; None unless requested."""


Compare = Callable[[Tensor, Tensor], Tensor]
"""Divergence [n] of two distributions, from the model's and a teacher's log-probabilities [n, K] of the same tokens."""


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


@dataclass(frozen=True)
class HeadOptions:
    """Options of the output head, which with its tensors determine its values."""

    part: VocabularyPart
    entropy: bool
    softcap: float | None
    kernels: ModuleType | None
    """Module whose `sum_logits` and `differentiate` replace those of this module, and read a chunk's logits once each;
    None: this module."""


def likelihood(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    *,
    entropy: bool,
    softcap: float | None = None,
    kernels: ModuleType | None = None,
) -> Likelihood:
    """Return log-probabilities [n] of tokens under softmax(hidden @ weight.T / temperature); entropies [n] if asked.

    hidden: [n, H], the state before each token; weight: [V, H], the head's, which may be a DTensor split along V (then
    all ranks of its mesh have the same hidden states and call together); tokens: int64 [n]; temperature: float32 [n].
    Logits have the type of hidden and weight, everything after them is float32. softcap: logits are first bounded to
    softcap * tanh(logits / softcap), as by Gemma 2 (arXiv:2408.00118, section 2). kernels: see `HeadOptions`.

    Forward and backward pass go through the tokens in chunks of at most `MAX_CHUNK_LOGITS` logits, which the backward
    pass computes again. Ranks that share the vocabulary exchange four numbers a token (as Megatron-LM does,
    arXiv:1909.08053, section 3). The gradient of the weight is added up over the chunks in float32.
    """
    part = VocabularyPart()
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        part = VocabularyPart(mesh.get_local_rank() * -(-len(weight) // mesh.size()), mesh.get_group())
        weight = weight.to_local()
    options = HeadOptions(part, entropy, softcap, kernels)
    return Likelihood(*_Likelihood.apply(hidden, weight, tokens, temperature, options))  # type: ignore[no-untyped-call]


def likeliest_tokens(
    hidden: Tensor, weight: Tensor, temperature: Tensor, *, count: int, of: int, softcap: float | None
) -> Tensor:
    """Return ids and log-probabilities, float32 [n, 2 count], of the likeliest tokens among the first `of`.

    Arguments as in `likelihood`. float32 has every id below 2^24 exactly.
    """
    every = weight.full_tensor() if isinstance(weight, DTensor) else weight
    found = []
    for rows in _chunks(len(hidden), every):
        log_probs = _logits(hidden[rows], every, temperature[rows], softcap).log_softmax(1)
        values, ids = log_probs[:, :of].topk(count)
        found.append(torch.cat([ids.float(), values], 1))
    return torch.cat(found) if found else hidden.new_zeros(0, 2 * count, dtype=torch.float32)


def divergence_from(
    teacher: Tensor, hidden: Tensor, weight: Tensor, temperature: Tensor, *, compare: Compare, softcap: float | None
) -> Tensor:
    """Return the divergence [n] of the model's distribution from a teacher's, `likeliest_tokens` [n, 2K].

    Other arguments as in `likelihood`. All tokens outside the K count as one more token, unless K is the vocabulary.
    Logits of a chunk are computed again in the backward pass. Ranks that share the vocabulary compute all of it.
    """
    every = weight.full_tensor() if isinstance(weight, DTensor) else weight

    def of_chunk(hidden: Tensor, every: Tensor, temperature: Tensor, teacher: Tensor) -> Tensor:
        ids, of_teacher = teacher.chunk(2, 1)
        own = _logits(hidden, every, temperature, softcap).log_softmax(1).gather(1, ids.long())
        both = own, of_teacher
        return compare(*(both if ids.shape[1] == len(every) else map(_with_rest, both)))

    found = [temperature.new_zeros(0)]
    for rows in _chunks(len(hidden), every):
        given = hidden[rows], every, temperature[rows], teacher[rows]
        found.append(checkpoint(of_chunk, *given, use_reentrant=False))
    return torch.cat(found)


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, softcap: float | None) -> Tensor:
    logits = (hidden @ weight.T).float()
    return (softcap * (logits / softcap).tanh() if softcap else logits) / temperature[:, None]


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together."""
    total = log_probs.logsumexp(1, keepdim=True).clamp(max=MOST_LOG_PROB)
    return torch.cat([log_probs, (-total.expm1()).log()], 1)


class _Likelihood(torch.autograd.Function):
    """Log-probabilities and entropies. Let x be the logits / temperature, p = softmax(x) and H the entropy of p:

    log p_i = x_i - logsumexp(x);  d log p_i / d x_j = [i = j] - p_j;  d H / d x_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        found = temperature.new_zeros(4, len(tokens))
        sum_chunk = options.kernels.sum_logits if options.kernels else sum_logits
        for rows in _chunks(len(tokens), weight):
            sum_chunk(hidden[rows] @ weight.T, tokens[rows], temperature[rows], options, found[:, rows])
        largest = found[0]
        # sums relative to this rank's largest logit become sums relative to the largest of all ranks
        of_all = options.part.reduce(largest.clone(), dist.ReduceOp.MAX)
        shift = largest - of_all
        total, weighted, own = found[1:]
        sums = torch.stack([total * shift.exp(), (weighted + shift * total) * shift.exp(), own])
        total, weighted, own = options.part.reduce(sums)
        log_total = of_all + total.log()
        entropies = total.log() - weighted / total if options.entropy else torch.zeros_like(total)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, tokens, temperature, log_total, entropies)
        ctx.set_materialize_grads(False)
        return own - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, temperature, log_total, entropies = ctx.saved_tensors
        options: HeadOptions = ctx.options
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_log_probs = torch.zeros_like(log_total) if of_log_probs is None else of_log_probs
        given = torch.stack([log_total, of_log_probs, *([] if of_entropies is None else [entropies, of_entropies])])
        differentiate_chunk = options.kernels.differentiate if options.kernels else differentiate
        for rows in _chunks(len(tokens), weight):
            of_logits = differentiate_chunk(
                hidden[rows] @ weight.T, tokens[rows], temperature[rows], options, given[:, rows]
            )
            torch.mm(of_logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight, of_logits.T, hidden[rows])
            del of_logits  # the next chunk needs its memory
        return options.part.reduce(of_hidden), of_weight, None, None, None


def sum_logits(logits: Tensor, tokens: Tensor, temperature: Tensor, options: HeadOptions, found: Tensor) -> None:
    """Write four numbers of each row of logits [n, V] into found [4, n], with x as in `_Likelihood`.

    They are m = max x, sum exp(x - m), sum (x - m) exp(x - m) if `options.entropy`, and x of the row's token.
    """
    x = _scaled_logits(logits, temperature, options.softcap)
    del logits
    column, is_here = _columns(tokens, options.part, x.shape[1])
    found[3] = torch.where(is_here, x.gather(1, column)[:, 0], 0.0)
    found[0] = x.amax(1)
    x -= found[0, :, None]
    exponentials = x.exp()
    found[1] = exponentials.sum(1)
    if options.entropy:
        found[2] = exponentials.mul_(x).sum(1)


def differentiate(logits: Tensor, tokens: Tensor, temperature: Tensor, options: HeadOptions, given: Tensor) -> Tensor:
    """Return the gradient of logits [n, V]; both may use the same memory.

    given: [2, n], logsumexp(x) and the gradients of log-probabilities, or [4, n], with entropies and their gradients.
    """
    log_total, of_log_probs, *of_entropy = given
    x, dtype = _scaled_logits(logits, temperature, options.softcap), logits.dtype
    del logits
    # d (softcap * tanh(z / softcap)) / d z = 1 - tanh(z / softcap)^2
    slope = 1.0 - (x * (temperature[:, None] / options.softcap)).square_() if options.softcap else None
    x -= log_total[:, None]
    if of_entropy:
        entropies, of_entropies = of_entropy
        of_x = x.exp()
        of_x *= x.add_(entropies[:, None]).mul_(-of_entropies[:, None]).sub_(of_log_probs[:, None])
    else:
        of_x = x.exp_().mul_(-of_log_probs[:, None])
    del x
    column, is_here = _columns(tokens, options.part, of_x.shape[1])
    of_x.scatter_add_(1, column, torch.where(is_here, of_log_probs, 0.0)[:, None])
    of_x.div_(temperature[:, None])
    return (of_x if slope is None else of_x.mul_(slope)).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 total; on a GPU the matmul itself adds, which saves four passes over a head."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cpu":  # no kernel adds a product of bfloat16 to float32
        total += left @ right
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _chunks(count: int, weight: Tensor) -> Iterator[slice]:
    limit = CPU_CHUNK_LOGITS if weight.device.type == "cpu" else MAX_CHUNK_LOGITS
    size = max(1, limit // max(1, len(weight)))
    return (slice(start, start + size) for start in range(0, count, size))


def _scaled_logits(logits: Tensor, temperature: Tensor, softcap: float | None) -> Tensor:
    logits = logits.float()
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature[:, None])


def _columns(tokens: Tensor, part: VocabularyPart, width: int) -> tuple[Tensor, Tensor]:
    """Return (column [n, 1] of each token in this rank's logits, or 0; bool [n], True for tokens with a column)."""
    column = tokens - part.first
    is_here = (column >= 0) & (column < width)
    return torch.where(is_here, column, 0)[:, None], is_here
