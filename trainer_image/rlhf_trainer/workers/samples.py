"""The responses of a batch as texts, for code that reads no tensors."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.types import Batch

SAMPLE_FIELDS = ("tokens", "attention_mask", "response_mask", "finished", "valid")


def real_rows(batch: Batch) -> Tensor:
    """Places of the rows of this rank that are no padding: int64 [real]."""
    return batch["valid"].nonzero()[:, 0]


def samples_of(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The real rows of this rank, decoded."""
    return [_sample(batch, place, tokenizer) for place in real_rows(batch).tolist()]


def _sample(batch: Batch, place: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    response = batch["response_mask"][place] > 0
    prompt = (batch["attention_mask"][place] > 0) & ~response
    tokens = batch["tokens"][place]
    return Sample(
        step=batch.step,
        row=batch.start + place,
        prompt=tokenizer.decode(tokens[prompt], skip_special_tokens=True),
        response=tokenizer.decode(tokens[response], skip_special_tokens=True),
        finished=bool(batch["finished"][place]),
    )
