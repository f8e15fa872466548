"""The responses of a batch as texts, for reward functions, services and evaluation functions."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.types import Batch

SAMPLE_FIELDS = ("tokens", "attention_mask", "response_mask", "finished", "valid")


def real_rows(batch: Batch) -> Tensor:
    """Indices of this rank's rows that are not padding: int64 [real]."""
    return batch["valid"].nonzero()[:, 0]


def samples_of(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """This rank's rows that are not padding, decoded."""
    return [_sample(batch, row, tokenizer) for row in real_rows(batch).tolist()]


def _sample(batch: Batch, row: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    response = batch["response_mask"][row] > 0
    prompt = (batch["attention_mask"][row] > 0) & ~response
    tokens = batch["tokens"][row]
    return Sample(
        step=batch.step,
        row=batch.start + row,
        prompt=tokenizer.decode(tokens[prompt], skip_special_tokens=True),
        response=tokenizer.decode(tokens[response], skip_special_tokens=True),
        finished=bool(batch["finished"][row]),
    )
