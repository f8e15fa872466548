"""From a model's output at position t - 1 to what belongs to token t: log-probability, entropy, value."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad


def token_log_probs(
    logits: Float[Tensor, "B T V"], tokens: Int[Tensor, "B T"], *, temperature: float = 1.0
) -> Float[Tensor, "B T"]:
    """Log-probability of every token given the tokens before it, under softmax(logits / temperature); float32.

    Position t is computed from the logits of t - 1; position 0, which nothing predicts, is 0.
    Written as x[token] - logsumexp(x), so that no [B, T, V] log-softmax is kept for the backward pass: it reads float32
    logits at temperature 1 in place, and of others the one scaled float32 copy.
    """
    scaled = _predicting(logits, temperature=temperature)
    chosen = scaled.gather(2, tokens[:, 1:, None].long()).squeeze(2)
    return pad(chosen - scaled.logsumexp(dim=2), (1, 0))


def token_entropy(logits: Float[Tensor, "B T V"], *, temperature: float) -> Float[Tensor, "B T"]:
    """Entropy in nats of the distribution softmax(logits / temperature) that token t was drawn from; float32.

    Position t is computed from the logits of t - 1; position 0 is 0. A logit of -inf (a token that cannot be drawn)
    adds 0.
    """
    log_probs = _predicting(logits, temperature=temperature).log_softmax(dim=2)
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    return pad(-(log_probs.exp() * finite).sum(dim=2), (1, 0))


def shift_values(x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The value head's output at position t - 1, moved to t: the value of the state before token t; position 0 is 0."""
    return pad(x[:, :-1], (1, 0))


def _predicting(logits: Float[Tensor, "B T V"], *, temperature: float) -> Float[Tensor, "B T-1 V"]:
    """The logits that predict tokens 1 to T - 1, in float32."""
    scaled = logits[:, :-1].float()
    return scaled if temperature == 1.0 else scaled / temperature
