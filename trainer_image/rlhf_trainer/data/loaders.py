"""Loaders: a data set as padded batches of token ids, the same rows for any number of ranks and after any resume.

Each reads a prompt and the responses that it needs; they differ in the tensors of their batches. Which rows a step
takes is a pure function of seed and step. Epochs are seeded permutations, one after the other; step s (from 1) of batch
size B takes positions (s - 1) * B to s * B - 1:

    epoch 0        epoch 1        epoch 2
    2 0 3 1 4      1 4 2 0 3      ...
    |step 1| |step 2| |step 3| ...            with B = 4
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic.alias_generators import to_camel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec import DataSource, JobSpec
from rlhf_trainer.data.ragged import Ragged
from rlhf_trainer.data.tokens import Column, Ids, encode_labels, encode_prompts, encode_responses
from rlhf_trainer.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Examples = npt.NDArray[np.int64]
logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 8192
"""Rows tokenised in one call: enough to use the tokenizer's threads, few enough for memory."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch that one rank makes tensors of."""

    examples: Tensor
    """int64 [B]"""
    valid: Tensor
    """float32 [B], 0 on padding"""
    batch: Tensor
    """int64: the examples of the whole batch; the longest of them gives the width of the tensors."""


class Loader:
    """A data set in memory, tokenised; `len(loader)` examples are left after dropping those that are over-long.

    An example is a row that is kept; examples are numbered from 0 in the order of the file.
    """

    responses: ClassVar[tuple[str, ...]] = ()
    """The fields of a DataSource that name its responses' columns."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Those that name columns of true and false."""
    fields: ClassVar[tuple[str, ...]]
    """The fields of a step's batch; `batch` also returns `row`."""

    def __init__(
        self, source: DataSource, tokenizer: PreTrainedTokenizerBase, *, path: str, spec: JobSpec, endless: bool = False
    ) -> None:
        """Read and tokenise everything. `path`: the source's place in the manifest, such as "spec.data.train".

        spec: the job's, whose `data` limits the rows and whose seed orders them. After `training.total_epochs` passes
        over the data, if it is set, batches are padding, unless the loader is `endless`.
        Raises DataError, naming field and row, when the data cannot be read (see `open_rows`, `encode_prompts` and
        `encode_responses`), when a row is over-long and `spec.data.overlong` is "Fail", or when no row is left.
        """
        from rlhf_trainer.data.source import open_rows  # pandas: seconds that a process without data does not need

        self.path = path
        """The source's place in the manifest."""
        self.dropped = 0
        """Rows left out because their prompt or a response is longer than the limits."""
        self._tokenizer = tokenizer
        self._limits, self._seed = spec.data, spec.training.seed
        self._total_epochs = None if endless else spec.training.total_epochs
        self._pad_id = next((pad for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id) if pad is not None), 0)
        keys = ("prompt_key", *self.responses, *self.labels)
        columns = [getattr(source, key) for key in keys]
        rows = open_rows(source, path=path, keys=keys).select_columns(list(dict.fromkeys(columns)))
        parts = [self._kept(*part) for part in self._tokenised(rows, columns)]
        self._prompts, *others = (Ragged.joined(list(pieces)) for pieces in zip(*parts, strict=True))
        self._responses, self._labels = others[: len(self.responses)], others[len(self.responses) :]
        if len(self) == 0:
            raise DataError(f"{path}: all {self.dropped} rows of {source.uri} are longer than {self._allowed()}")
        if self.dropped:
            logger.warning("%s: dropped %d rows longer than %s", path, self.dropped, self._allowed())

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, step: int, *, batch_size: int, rows: slice | None = None) -> dict[str, Tensor]:
        """The rows [start, stop) of a step's batch (all by default); steps count from 1.

        The order follows from the seed and the step alone. Rows beyond the last epoch repeat row 0 of the batch with
        `valid` 0; a step that has no row is a ValueError. The tensors are those of the class, and `row` int64 [B]:
        start .. stop - 1. Their width is that of the whole batch, so the slices of all ranks fit together.
        """
        count = len(self)
        start = (step - 1) * batch_size
        last = None if self._total_epochs is None else count * self._total_epochs
        if step < 1 or (last is not None and start >= last):
            raise ValueError(f"{self.path} has no step {step}: steps go from 1 until all epochs are done")
        places = np.arange(start, start + batch_size)
        valid = np.ones(batch_size, dtype=bool) if last is None else places < last
        examples = examples_at(np.where(valid, places, start), num_examples=count, seed=self._seed)
        return self._slice(torch.from_numpy(examples), torch.from_numpy(valid), rows)

    def ordered(self, rows: slice | None = None) -> dict[str, Tensor]:
        """The examples [start, stop) (all by default) in the order of the file, for evaluation; tensors as by `batch`.

        Those beyond the last example repeat example 0 with `valid` 0.
        """
        count = len(self)
        total = max(count, rows.stop if rows else 0)
        valid = torch.arange(total) < count
        return self._slice(torch.arange(total) * valid, valid, rows)

    def _slice(self, examples: Tensor, valid: Tensor, rows: slice | None) -> dict[str, Tensor]:
        """The tensors of some rows of a batch: `examples` int64 [B], `valid` bool [B]."""
        assert rows is None or 0 <= rows.start <= rows.stop <= len(examples), f"{rows} of {len(examples)} rows"
        asked = torch.arange(len(examples))[rows or slice(None)]
        chosen = Rows(examples=examples[asked], valid=valid[asked].float(), batch=examples)
        return {**self._tensors(chosen), "valid": chosen.valid, "row": asked}

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        """The tensors of these rows, but `valid` and `row`."""
        raise NotImplementedError

    def _whole(self, response: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """(ids, attention mask) [B, T] of prompt and response; T is the longest with any response of the batch."""
        width = max(int((self._prompts.lengths + each.lengths)[rows.batch].max()) for each in self._responses)
        whole = self._responses[response].selected(rows.examples).after(self._prompts.selected(rows.examples))
        return whole.padded(width, self._pad_id)

    def _response_mask(self, attention_mask: Tensor, rows: Rows) -> Tensor:
        """1 on the response and its end-of-text token, and 0 on every token of a row that is not valid."""
        is_response = torch.arange(attention_mask.shape[1]) >= self._prompts.lengths[rows.examples][:, None]
        return attention_mask * is_response * rows.valid[:, None]

    def _tokenised(self, rows: Dataset, columns: list[str]) -> Iterator[tuple[int, list[list[Ids]]]]:
        """(first row, [ids of the prompts, of each kind of response, each label]), some thousands of rows at a time."""
        fields = [f"{self.path}.{to_camel(key)}" for key in ("prompt_key", *self.responses, *self.labels)]
        template = self._limits.chat_template
        for first in range(0, len(rows), ROWS_AT_ONCE):
            try:
                table = rows[first : first + ROWS_AT_ONCE]
            except ValueError as error:  # of a Parquet file nobody has looked at the texts before
                raise DataError(f"{self.path}.uri: rows {first} and later cannot be read: {error}") from error
            prompts, *others = (
                Column(field=field, values=list(table[column]), first_row=first)
                for field, column in zip(fields, columns, strict=True)
            )
            ids = encode_prompts(prompts, self._tokenizer, chat_template=template)
            replies = [
                encode_responses(prompts, ids, response, self._tokenizer, chat_template=template)
                for response in others[: len(self.responses)]
            ]
            yield first, [ids, *replies, *map(encode_labels, others[len(self.responses) :])]

    def _kept(self, first: int, texts: list[list[Ids]]) -> list[Ragged]:
        """The rows within the limits; the others are counted, or a DataError."""
        tokens = [Ragged.of(ids) for ids in texts]
        most = [self._limits.max_prompt_tokens, *[self._limits.max_response_tokens] * len(self.responses)]
        most += [1] * len(self.labels)
        fits = torch.stack([rows.lengths <= limit for rows, limit in zip(tokens, most, strict=True)])
        kept = fits.all(0)
        if kept.all():
            return tokens
        if self._limits.overlong == "Fail":
            row = int(kept.long().argmin())
            column = int(fits[:, row].long().argmin())
            raise self._too_long(first + row, column, int(tokens[column].lengths[row]))
        self.dropped += int((~kept).sum())
        return [rows.selected(kept.nonzero()[:, 0]) for rows in tokens]

    def _too_long(self, row: int, column: int, length: int) -> DataError:
        key = to_camel(("prompt_key", *self.responses)[column])
        limit = "maxResponseTokens" if column else "maxPromptTokens"
        most = self._limits.max_response_tokens if column else self._limits.max_prompt_tokens
        return DataError(
            f"{self.path}.{key}: row {row} (counted from 0) has {length} tokens, "
            f"more than the {most} of spec.data.{limit}"
        )

    def _allowed(self) -> str:
        response = f" or spec.data.maxResponseTokens {self._limits.max_response_tokens}" if self.responses else ""
        return f"spec.data.maxPromptTokens {self._limits.max_prompt_tokens}{response}"


class PromptLoader(Loader):
    """Prompts to respond to: `prompt_ids` int64 and `prompt_mask` [B, P], `valid` [B]; also `example` int64 [B]."""

    fields = ("prompt_ids", "prompt_mask", "valid")

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        width = int(self._prompts.lengths[rows.batch].max())
        ids, mask = self._prompts.selected(rows.examples).padded(width, self._pad_id)
        return {"prompt_ids": ids, "prompt_mask": mask, "example": rows.examples}


class CompletionLoader(Loader):
    """Prompts with a response: `tokens` int64, `attention_mask`, `response_mask` [B, T], `valid` [B].

    `response_mask` is 1 on the response and its end-of-text token, and 0 on every token of a row that is not valid.
    """

    responses = ("response_key",)
    fields = ("tokens", "attention_mask", "response_mask", "valid")

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        tokens, attention_mask = self._whole(0, rows)
        mask = self._response_mask(attention_mask, rows)
        return {"tokens": tokens, "attention_mask": attention_mask, "response_mask": mask}


class PairLoader(Loader):
    """Pairs of a better and a worse response: `chosen_tokens`, `rejected_tokens` int64 [B, T], `valid` [B].

    `chosen_mask` and `rejected_mask` [B, T] are their attention masks, `chosen_response_mask` and
    `rejected_response_mask` those of a CompletionLoader; T is the same for both.
    """

    responses = ("chosen_key", "rejected_key")
    fields: ClassVar[tuple[str, ...]] = (
        *("chosen_tokens", "chosen_mask", "chosen_response_mask"),
        *("rejected_tokens", "rejected_mask", "rejected_response_mask"),
        "valid",
    )

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for response, side in enumerate(("chosen", "rejected")):
            tokens, mask = self._whole(response, rows)
            found |= {f"{side}_tokens": tokens, f"{side}_mask": mask}
            found[f"{side}_response_mask"] = self._response_mask(mask, rows)
        return found


class SafetyPairLoader(PairLoader):
    """Pairs, and whether each response is safe: also `chosen_safe` and `rejected_safe` [B], 1 or 0."""

    labels = ("chosen_safe_key", "rejected_safe_key")
    fields = (*PairLoader.fields, "chosen_safe", "rejected_safe")

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        chosen_safe, rejected_safe = (label.selected(rows.examples).flat.float() for label in self._labels)
        return {**super()._tensors(rows), "chosen_safe": chosen_safe, "rejected_safe": rejected_safe}


@lru_cache(maxsize=8)
def permutation(num_examples: int, *, seed: int, epoch: int) -> Examples:
    """The order of an epoch (from 0): every example once, int64 [num_examples]. Not to be written to."""
    order = np.random.default_rng([seed, epoch]).permutation(num_examples).astype(np.int64)
    order.setflags(write=False)
    return order


def examples_at(positions: Examples, *, num_examples: int, seed: int) -> Examples:
    """The examples at these positions of the concatenated epochs: int64 [B] -> int64 [B]."""
    epochs, within = np.divmod(positions, num_examples)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = permutation(num_examples, seed=seed, epoch=epoch)[within[here]]
    return found
