"""What a test reads of a language model: the log-probability of every token but the first of each row."""

import torch
from torch import Tensor

from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.types import Fields


def all_tokens(micro: Fields) -> list[TokenBatch]:
    """Rows without padding."""
    tokens = micro["tokens"]
    return [
        TokenBatch(tokens=tokens, lengths=torch.full((len(tokens),), tokens.shape[1]), read=torch.ones(tokens.shape))
    ]


def log_probs(found: Likelihood, _: Fields) -> Tensor:
    return found.log_probs
