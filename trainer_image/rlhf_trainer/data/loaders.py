"""Loaders: data sets as padded batches of token ids, the same rows for any number of ranks and after any resume.

The classes differ in the responses that they read and in the tensors of their batches. The rows of a step are a pure
function of seed and step. Epochs are seeded permutations, one after the other; step s (from 1) of batch size B takes
positions (s - 1) * B to s * B - 1:

    epoch 0        epoch 1        epoch 2
    2 0 3 1 4      1 4 2 0 3      ...
    |step 1| |step 2| |step 3| ...            with B = 4

Several data sets are mixed in exact shares (`order`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.data import AnyData, DataMix
from rlhf_api.spec.data import Rows as Source
from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.chat import EndTokens
from rlhf_trainer.data.order import MAX_SOURCES, Order
from rlhf_trainer.data.own_data import own_order
from rlhf_trainer.data.ragged import Ragged
from rlhf_trainer.data.reading import CompletionReader, PairReader, Reader, RowCheck


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a batch that one rank turns into tensors."""

    examples: Tensor
    """Index of the example in each row of the rank, int64 [B]."""
    numbers: Tensor
    """Number of each row of the rank in the whole batch, from 0: int64 [B]."""
    valid: Tensor
    """Mask of the rank's rows, float32 [B]: 0 on padding rows, else 1."""
    batch: Tensor
    """Indices of the examples of the whole batch, int64; the longest example sets the width of the tensors."""


class Loader:
    """Tokenised rows in memory. Bad, too long and too short rows are left out; all other rows are the examples.

    `len(loader)` is the number of examples. Examples are numbered from 0 in the order of the files.
    """

    reader: ClassVar[type[Reader]] = Reader
    """Class of the loader's readers; each data set has one reader."""
    fields: ClassVar[tuple[str, ...]]
    """Names of the tensors of a step's batch; the method `batch` also returns `row`."""
    labels: ClassVar[Mapping[str, str]] = {}
    """Name of a tensor of labels, float32 [B], 1 or 0 -> field of a data source (`Rows`) that names their column."""

    def __init__(
        self,
        source: AnyData,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str,
        spec: JobSpec,
        endless: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        ordered_by: str = "",
        ends: EndTokens | None = None,
        check: RowCheck = lambda *_: {},
    ) -> None:
        """Read and tokenise all rows. `path`: field of the source in the manifest, such as "spec.data.train".

        spec: spec of the job; its `data` limits the rows and its `training.seed` orders them. After
        `training.total_epochs` passes over the data, if set, rows are padding, unless the loader is `endless`. A pass
        over a mix has as many rows as its data sets have together. tools: tool definitions for every prompt's chat
        template. ordered_by: job and field of `spec.data.order`, for errors; empty: the seed orders these rows.
        ends, check: see `Reader`. An endless loader ignores the prompt template and system prompt of `spec.data`.
        Raises DataError (see `Reader.read`).
        """
        self.path = path
        """Field of the manifest that names the data, such as `spec.data.train`."""
        limits = spec.data.model_copy(update={"prompt_template": None, "system_prompt": None} if endless else {})
        options: dict[str, Any] = {
            "limits": limits,
            "labels": tuple(self.labels.values()),
            "ends": ends,
            "check": check,
        }
        self.readers = [
            self.reader(each, tokenizer, path=place, **options, **self._further(each, spec, tools))
            for place, each in source.sources(path).items()
        ]
        """Readers, one for each data set, with the numbers of rows that were left out."""
        read = [reader.read() for reader in self.readers]
        self._prompts, *others = (Ragged.joined(list(pieces)) for pieces in zip(*read, strict=True))
        kinds = len(self.reader.responses)
        self._responses, self._labels = others[:kinds], others[kinds:]
        counts = tuple(len(each[0]) for each in read)
        weights = (each.weight for each in source.mix) if isinstance(source, DataMix) else ()
        self._order = self._order_of(spec, counts, tuple(filter(None, weights)) or counts, ordered_by)
        self._total_epochs = None if endless else spec.training.total_epochs
        self._pad_id = next((pad for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id) if pad is not None), 0)

    def _order_of(self, spec: JobSpec, counts: tuple[int, ...], shares: tuple[float, ...], ordered_by: str) -> Order:
        seed = None if spec.algorithm.makes == "data" else spec.training.seed
        if not (ordered_by and spec.data.order):
            return Order(counts, shares, seed)
        tables = [reader.rows() for reader in self.readers]
        own = partial(own_order, spec.data.order, ordered_by, tables, spec.training.seed)
        return Order(counts, shares, seed, lru_cache(maxsize=MAX_SOURCES)(own))

    def _further(self, source: Source, spec: JobSpec, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a reader's options for further columns and tools; empty for readers of responses."""
        if self.reader.responses:
            return {}
        return {"columns": spec.columns(source), "verified": spec.reader_columns(source), "tools": tools}

    def facts(self) -> list[str]:
        """Return sentences on the rows of each data set that were left out."""
        counted = zip(self.readers, self._order.counts, strict=True)
        return [fact for reader, rows in counted for fact in reader.facts(rows)]

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of examples of each data set."""
        return self._order.counts

    @property
    def digest(self) -> str:
        """Hash of all examples (token ids, further columns) in order, and of the first epoch of a user's own order."""
        found = hashlib.blake2b(digest_size=8)
        for rows in (self._prompts, *self._responses, *self._labels):
            found.update(rows.lengths.numpy().data)
            found.update(rows.flat.numpy().data)
        for reader in self.readers:
            reader.add_further_to(found)
        if own := self._order.own:
            for source in range(len(self.readers)):
                found.update(own(source, 0).data)
        return found.hexdigest()

    @property
    def largest(self) -> tuple[int, int]:
        """Highest token id of all rows, and number of tokens of the longest prompt with its longest response."""
        parts = (self._prompts, *self._responses)
        token = max(max(int(each.flat.max()), ~int(each.flat.min())) for each in parts if len(each.flat))
        longest = [self._prompts.lengths, *(self._prompts.lengths + each.lengths for each in self._responses)]
        return token, max(int(each.max()) for each in longest)

    def lengths(self) -> dict[str, Tensor]:
        """Return the token counts of prompts and of responses, int64 [examples] each, by the field of their column."""
        keys = (*self.readers[0].fields()[:1], *self.reader.responses)
        return dict(zip(keys, [rows.lengths for rows in (self._prompts, *self._responses)], strict=True))

    def batch(self, step: int, *, batch_size: int, rows: slice | None = None) -> dict[str, Tensor]:
        """Return the tensors of rows [start, stop) of a step's batch (all by default); steps count from 1.

        The order follows from the seed and the step alone. Rows beyond the last epoch repeat row 0 of the batch with
        `valid` 0; a step without rows is a ValueError. The tensors are the class's `fields`, and `row` int64 [B], the
        numbers start to stop - 1. Their width is that of the whole batch, so the slices of all ranks fit together.
        """
        count = len(self)
        start = (step - 1) * batch_size
        last = None if self._total_epochs is None else count * self._total_epochs
        if step < 1 or (last is not None and start >= last):
            raise ValueError(f"{self.path} has no step {step}: steps go from 1 until all epochs are done")
        places = np.arange(start, start + batch_size)
        valid = np.ones(batch_size, dtype=bool) if last is None else places < last
        examples = self._order.at(np.where(valid, places, start))
        return self._slice(torch.from_numpy(examples), torch.from_numpy(valid), rows)

    def ordered(self, rows: slice | None = None) -> dict[str, Tensor]:
        """Return examples [start, stop) (all by default) in the file's order, for evaluation; tensors as by `batch`.

        Rows beyond the last example repeat example 0 with `valid` 0.
        """
        count = len(self)
        total = max(count, rows.stop if rows else 0)
        valid = torch.arange(total) < count
        return self._slice(torch.arange(total) * valid, valid, rows)

    def columns(self, examples: Tensor) -> list[dict[str, Any]]:
        """Return the values of the columns that `JobSpec.columns` names, for each example by column.

        In a mix, a column that the example's data set does not name is None.
        """
        names = dict.fromkeys(name for reader in self.readers for name in reader.columns)
        return [{**names, **reader.further(row)} for reader, row in self._read(examples)]

    def prompts(self, examples: Tensor) -> list[dict[str, Any]]:
        """Return the prompts of examples as they stand in the file; see `Reader.prompt`."""
        return [reader.prompt(row) for reader, row in self._read(examples)]

    def _read(self, examples: Tensor) -> Iterator[tuple[Reader, int]]:
        """Yield for each example (reader of its data set, index of the example among the reader's rows)."""
        ends = np.cumsum(self._order.counts)
        for example in examples.tolist():
            place = int(np.searchsorted(ends, example, side="right"))
            yield self.readers[place], example - int(ends[place]) + self._order.counts[place]

    def _slice(self, examples: Tensor, valid: Tensor, rows: slice | None) -> dict[str, Tensor]:
        """Return the tensors of some rows of a batch; examples int64 [B] and valid bool [B] cover the whole batch."""
        assert rows is None or 0 <= rows.start <= rows.stop <= len(examples), f"{rows} of {len(examples)} rows"
        numbers = torch.arange(len(examples))[rows or slice(None)]
        chosen = Rows(examples=examples[numbers], numbers=numbers, valid=valid[numbers].float(), batch=examples)
        named = zip(self.labels, self._labels, strict=True)
        labels = {name: label.selected(chosen.examples).flat.float() for name, label in named}
        return {**self._tensors(chosen), **labels, "valid": chosen.valid, "row": numbers}

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        """Return a subclass's tensors of some rows, without labels, `valid` and `row`."""
        raise NotImplementedError

    def _text(self, response: int, rows: Rows, *, shift: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens, attention mask, response mask) [B, T] of prompts with a response; T: longest in the batch.

        response: index of the kind of response; shift: a row gets the response of the row `shift` places later in the
        batch, cyclically. The response mask is 1 on a response with its end token, 0 elsewhere.
        """
        others = rows.batch.roll(-shift)
        if shift and bool((others == rows.batch).all()):  # a single row, padded with copies of itself
            others = (others + shift) % len(self)
        width = max(int((self._prompts.lengths[rows.batch] + each.lengths[others]).max()) for each in self._responses)
        prompts = self._prompts.selected(rows.examples)
        whole = self._responses[response].selected(others[rows.numbers]).after(prompts)
        marked, mask = whole.padded(width, self._pad_id)
        is_learned = (torch.arange(width) >= prompts.lengths[:, None]) * (marked >= 0)
        return torch.where(marked < 0, ~marked, marked), mask, mask * is_learned * rows.valid[:, None]


class PromptLoader(Loader):
    """Loader of prompts alone: `prompt_ids` int64 and `prompt_mask` [B, P], `valid` [B]; also `example` int64 [B]."""

    fields = ("prompt_ids", "prompt_mask", "valid")

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        width = int(self._prompts.lengths[rows.batch].max())
        ids, mask = self._prompts.selected(rows.examples).padded(width, self._pad_id)
        return {"prompt_ids": ids, "prompt_mask": mask, "example": rows.examples}


class CompletionLoader(Loader):
    """Loader of prompts with a response: `tokens` int64, `attention_mask`, `response_mask` [B, T], `valid` [B].

    `response_mask` is 1 on the response with its end token; in a conversation, on each answer that counts in
    the loss. It is 0 on every token of a row that is not valid.
    """

    reader = CompletionReader
    fields: ClassVar[tuple[str, ...]] = ("tokens", "attention_mask", "response_mask", "valid")

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        return dict(zip(self.fields, self._text(0, rows), strict=False))


class LabelledLoader(CompletionLoader):
    """Loader of responses with a label: `desirable` [B], 1 or 0, and a CompletionLoader's tensors.

    Also the tensors `mismatched`, a text made of the row's prompt and the response of the batch's next row.
    """

    mismatched = ("mismatched_tokens", "mismatched_mask", "mismatched_response_mask")
    labels: ClassVar[Mapping[str, str]] = {"desirable": "label_key"}
    fields = (*CompletionLoader.fields, *mismatched, *labels)

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        mismatched = dict(zip(self.mismatched, self._text(0, rows, shift=1), strict=True))
        return {**super()._tensors(rows), **mismatched}

    def facts(self) -> list[str]:
        """Return the base class's sentences, and the number of desirable rows."""
        count = int(self._labels[0].flat.sum())
        has_both = 0 < count < len(self) or self.path != "spec.data.train"
        missing = "" if has_both else "; without rows of both labels the loss only pushes all rows one way"
        return [*super().facts(), f"{self.path}: {count} of {len(self)} rows are desirable{missing}"]


class PairLoader(Loader):
    """Loader of pairs of a better and a worse response: `chosen_tokens`, `rejected_tokens` int64 [B, T], `valid` [B].

    `chosen_mask` and `rejected_mask` [B, T] are the attention masks of the two. `chosen_response_mask` and
    `rejected_response_mask` are as the `response_mask` of a CompletionLoader. All tensors have the same T.
    """

    reader = PairReader
    fields: ClassVar[tuple[str, ...]] = (
        *("chosen_tokens", "chosen_mask", "chosen_response_mask"),
        *("rejected_tokens", "rejected_mask", "rejected_response_mask"),
        "valid",
    )

    def _tensors(self, rows: Rows) -> dict[str, Tensor]:
        return dict(zip(self.fields, (*self._text(0, rows), *self._text(1, rows)), strict=False))


class SafetyPairLoader(PairLoader):
    """Loader of pairs as in PairLoader, with safety labels: `chosen_safe`, `rejected_safe` [B], 1 (safe) or 0."""

    labels: ClassVar[Mapping[str, str]] = {"chosen_safe": "chosen_safe_key", "rejected_safe": "rejected_safe_key"}
    fields = (*PairLoader.fields, *labels)


LOADERS: Mapping[str, type[Loader]] = {
    "prompts": PromptLoader,
    "completions": CompletionLoader,
    "labelled_completions": LabelledLoader,
    "pairs": PairLoader,
    "safety_pairs": SafetyPairLoader,
}
"""Kind of rows, as in `data` of an algorithm -> class that loads rows of this kind."""
