"""Readers of one data set: its rows as token ids. Bad, over-long and too short rows are counted and left out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic.alias_generators import to_camel
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.data import Data, Rows
from rlhf_trainer.chat import EndTokens
from rlhf_trainer.data.instructions import instructed, prompt_template
from rlhf_trainer.data.ragged import Ragged, swapped
from rlhf_trainer.data.tokens import Column, Encoder, Fault, Ids
from rlhf_trainer.errors import DataError, NoRowLeftError

if TYPE_CHECKING:
    import datasets

    from rlhf_trainer.data.source import OpenedRows

ROWS_AT_ONCE = 8192
"""Rows tokenised in one call: enough to use the tokenizer's threads, few enough for memory."""
RowCheck = Callable[[Rows, Mapping[str, Sequence[Any]]], Mapping[int, str]]
"""Function (data set, columns that the job reads) -> index of each bad row -> the row's fault."""
MAX_NAMED_ROWS = 3
"""Number of a source's bad rows that messages name; further bad rows are only counted."""


class Reader:
    """Reader of prompts, and base of the readers of responses."""

    responses: ClassVar[tuple[str, ...]] = ()
    """Fields of a manifest's data source (`Rows`) that name the columns of responses."""

    def __init__(
        self,
        source: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str,
        limits: Data,
        labels: Sequence[str] = (),
        columns: Sequence[str] = (),
        verified: Mapping[str, str] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        ends: EndTokens | None = None,
        check: RowCheck = lambda *_: {},
    ) -> None:
        """Keep the options. path: field of the source in the manifest, such as "spec.data.train"; limits: `spec.data`.

        labels: fields of the source that name columns of labels, true or false. columns: further columns, which
        `further` returns unchanged. verified: further column -> field of the manifest that reads it; a row without a
        reference answer in it is bad. tools: tool definitions of every row, unless the source has a tools_key. ends:
        tokens that end a response, by default those of the tokenizer and its template alone. check: finds the rows
        whose `verified` columns are of no use.
        """
        self.source, self.path, self.columns, self._verified = source, path, columns, verified
        self.dropped = 0
        """Number of rows left out because their prompt or a response exceeds the limits."""
        self.short = 0
        """Number of rows left out because their prompt or a response is too short, and none exceeds the limits."""
        self.bad = 0
        """Number of rows left out because they cannot be read as a prompt with its responses."""
        self.notes: dict[str, tuple[int, str]] = {}
        """Sentence on how the chat template treats a kept row -> (how often it applies, place of the first row)."""
        self.named: list[str] = []
        """Sentences on the first MAX_NAMED_ROWS bad rows, for error messages."""
        self._tokenizer, self._limits, self._tools, self._ends = tokenizer, limits, tools, ends
        self._labels, self._check = labels, check
        self._instructed = dict.fromkeys(prompt_template(limits.prompt_template)[1], "spec.data.promptTemplate")
        self.numbers = array("q")
        """Row numbers, in the data set as opened, of the rows that are kept."""
        self._prompt_key = "messages_key" if source.messages_key else "prompt_key"

    def read(self) -> list[Ragged]:
        """Read the token ids of the prompts and of each kind of response, and each label, in the order of the file.

        Raises DataError, naming field and row, when the data cannot be read (see `open_rows`) or when no row is left.
        A bad (see `Encoder`) or over-long row is a DataError if `spec.data` asks for that.
        """
        from rlhf_trainer.data.source import open_rows  # imports pandas: seconds

        read = {**self._instructed, **self._verified}
        columns = [*dict.fromkeys([*self.columns, *read])]
        rows = open_rows(self.source, path=self.path, keys=self.fields(), columns=columns, verified=read)
        for line in rows.left_out_before_limit(self.source.limit):
            self._leave_out(f"{self.path}.uri: {line} {line.problem}")
        parts = [self._kept(rows, *part) for part in self._tokenised(rows)]
        found = [Ragged.joined(list(pieces)) for pieces in zip(*parts, strict=True)]
        if len(found[0]) == 0:
            raise NoRowLeftError(f"{self.path}: {self._none_left()}")
        self._further = rows.table.select_columns(list(self.columns))
        tools = [self.source.tools_key] if self.source.tools_key else []
        self._table = rows.table
        self._prompts = rows.table.select_columns([getattr(self.source, self._prompt_key), *tools])
        return found

    def rows(self) -> datasets.Dataset:
        """Return the rows of the data set that were not left out, with all columns."""
        return self._table.select(self.numbers)

    def further(self, row: int) -> dict[str, Any]:
        """Return the values of the further columns of a kept row (from 0), by column."""
        return dict(self._further[self.numbers[row]]) if self.columns else {}

    def prompt(self, row: int) -> dict[str, Any]:
        """Return the `prompt` of a kept row (from 0), a text or messages, and its tools if there are any.

        A final answer among the messages is not part of the prompt.
        """
        found = dict(self._prompts[self.numbers[row]])
        prompt = found.pop(getattr(self.source, self._prompt_key))
        ends_with_answer = isinstance(prompt, list) and prompt[-1]["role"] == "assistant"
        return {"prompt": prompt[:-1] if ends_with_answer else prompt, **found}

    def add_further_to(self, digest: hashlib.blake2b) -> None:
        """Add the further columns of all kept rows to a digest."""
        for row in self.numbers if self.columns else ():
            digest.update(repr(self._further[row]).encode(errors="replace"))

    def facts(self, rows: int) -> Iterator[str]:
        """Yield sentences on the rows that were left out, with their number and why; rows: number of all other rows."""
        total = rows + self.dropped + self.short + self.bad
        for count, why in ((self.dropped, self._longer()), (self.short, self._shorter())):
            if count:
                yield f"{self.path}: {count} of {total} rows are {why} and were dropped"
        if self.bad:
            such = "; ".join(self.named)
            yield f"{self.path}: {self.bad} of {total} rows are bad and were dropped, such as {such}"
        for note, (count, place) in self.notes.items():
            yield f"{self.path}: {note}: {count}, such as in {place}"

    def fields(self) -> tuple[str, ...]:
        """Return the fields of the source that name the columns to read; the prompt's comes first."""
        return (self._prompt_key, *self.responses, *self._labels, *(("tools_key",) if self.source.tools_key else ()))

    def _tokenised(self, rows: OpenedRows) -> Iterator[tuple[int, Encoder, list[list[Ids]]]]:
        """Tokenise ROWS_AT_ONCE rows at a time; yields (index of the first row, encoder, results of `_encoded`)."""
        keys = [getattr(self.source, field) for field in self.fields()]
        columns = list(dict.fromkeys([*keys, *self._verified, *self._instructed]))
        for first in range(0, len(rows.table), ROWS_AT_ONCE):
            table = rows.values(columns, first, ROWS_AT_ONCE, self.path)

            def column(key: str, table: Mapping[str, list[Any]] = table) -> Column:
                return Column(field=f"{self.path}.{to_camel(key)}", values=table[getattr(self.source, key)])

            same = Column(field=self.path, values=[self._tools] * len(table[columns[0]]))
            tools = column("tools_key") if self.source.tools_key else same
            options: dict[str, Any] = {"chat_template": self._limits.chat_template, "tools": tools, "ends": self._ends}
            if self._limits.prompt_template or self._limits.system_prompt:
                options["instruct"] = partial(instructed, self._limits, table)
            encoder = Encoder(column(self._prompt_key), self._tokenizer, **options)
            texts = self._encoded(encoder, column)
            for name in self._verified:
                encoder.require_answers(Column(field=f"{self.path}.columns", values=table[name]), name)
            found = self._check(self.source, table) if self._verified else {}
            faults = {row: Fault(field=f"{self.path}.columns", what=what) for row, what in found.items()}
            encoder.faults = {**faults, **encoder.faults}
            yield first, encoder, texts

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        """Return the token ids of the prompts and of each kind of response, and each kind of label."""
        prompts = encoder.prompts()
        replies = [encoder.responses(column(key), prompts) for key in self.responses]
        return [prompts, *replies, *[encoder.labels(column(key)) for key in self._labels]]

    def _kept(self, opened: OpenedRows, first: int, encoder: Encoder, texts: list[list[Ids]]) -> list[Ragged]:
        """Return the token ids of rows that are good and within the limits; count other rows, or raise a DataError."""
        for row, fault in sorted(encoder.faults.items()):
            self._leave_out(f"{fault.field}: {opened.place(first + row)} {fault.what}")
        good = torch.tensor([row not in encoder.faults for row in range(len(texts[0]))])
        tokens = [Ragged.of(ids) for ids in texts]
        lengths = torch.stack([rows.lengths for rows in tokens[: 1 + len(self.responses)]])
        limits = self._limits
        fits = (lengths <= self._bounds(limits.max_prompt_tokens, limits.max_response_tokens)) | ~good
        long_enough = (lengths >= self._bounds(limits.min_prompt_tokens, limits.min_response_tokens)).all(0)
        not_long = fits.all(0)
        if self._limits.overlong == "Fail" and not not_long.all():
            row = int(not_long.long().argmin())
            column = int(fits[:, row].long().argmin())
            raise self._too_long(opened.place(first + row), column, int(tokens[column].lengths[row]))
        self.dropped += int((~not_long).sum())
        self.short += int((not_long & good & ~long_enough).sum())
        kept = (not_long & good & long_enough).nonzero()[:, 0]
        self.numbers.extend((first + kept).tolist())
        is_kept = set(kept.tolist())
        for row, note in encoder.notes:
            if row in is_kept:
                count, place = self.notes.get(note) or (0, opened.place(first + row))
                self.notes[note] = count + 1, place
        return tokens if len(kept) == len(good) else [rows.selected(kept) for rows in tokens]

    def _leave_out(self, sentence: str) -> None:
        """Count a bad row, or raise the sentence on it as a DataError, as `onBadRow` of the manifest asks."""
        if self._limits.on_bad_row == "Fail":
            raise DataError(sentence)
        self.bad += 1
        if len(self.named) < MAX_NAMED_ROWS:
            self.named.append(sentence)

    def _none_left(self) -> str:
        """Return the part of a sentence that says why no row of the data set is left."""
        reasons = [self._longer()] if self.dropped else []
        reasons += [self._shorter()] if self.short else []
        reasons += [f"bad: {'; '.join(self.named)}"] if self.bad else []
        return f"all {self.dropped + self.short + self.bad} rows of {self.source.address} are {' or '.join(reasons)}"

    def _too_long(self, place: str, column: int, length: int) -> DataError:
        key = (self._prompt_key, *self.responses)[column]
        field = to_camel(key if key in self.fields() else self._prompt_key)
        limit = "maxResponseTokens" if column else "maxPromptTokens"
        most = self._limits.max_response_tokens if column else self._limits.max_prompt_tokens
        return DataError(f"{self.path}.{field}: {place} has {length} tokens, more than the {most} of spec.data.{limit}")

    def _bounds(self, prompt: int, response: int) -> torch.Tensor:
        """Return the limits on the tokens of the prompt and of each response as a tensor, int64 [1 + responses, 1]."""
        return torch.tensor([prompt, *[response] * len(self.responses)])[:, None]

    def _longer(self) -> str:
        response = f" or spec.data.maxResponseTokens {self._limits.max_response_tokens}" if self.responses else ""
        return f"longer than spec.data.maxPromptTokens {self._limits.max_prompt_tokens}{response}"

    def _shorter(self) -> str:
        response = f" or spec.data.minResponseTokens {self._limits.min_response_tokens}" if self.responses else ""
        return f"shorter than spec.data.minPromptTokens {self._limits.min_prompt_tokens}{response}"


class CompletionReader(Reader):
    """Reader of prompts with a response; in a conversation the response is everything from the first answer on."""

    responses = ("response_key",)

    def fields(self) -> tuple[str, ...]:
        return tuple(key for key in super().fields() if not (self.source.messages_key and key == "response_key"))

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        """Encode as the base class does; in a conversation a token outside the loss, as of a user's turn, is ~token."""
        if not self.source.messages_key:
            return super()._encoded(encoder, column)
        return [*encoder.conversations(), *[encoder.labels(column(key)) for key in self._labels]]


class PairReader(Reader):
    """Reader of prompts with a better and a worse response."""

    responses = ("chosen_key", "rejected_key")

    def fields(self) -> tuple[str, ...]:
        return (*super().fields(), *(("better_key",) if self.source.better_key else ()))

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        found = super()._encoded(encoder, column)
        return [*found, encoder.labels(column("better_key"))] if self.source.better_key else found

    def _kept(self, opened: OpenedRows, first: int, encoder: Encoder, texts: list[list[Ids]]) -> list[Ragged]:
        """Return the base class's rows with each pair in order: the better response and its label before the worse."""
        prompts, *pairs = super()._kept(opened, first, encoder, texts)
        if not self.source.better_key:
            return [prompts, *pairs]
        second = pairs.pop().flat > 0
        ordered = [swapped(one, other, second) for one, other in zip(pairs[::2], pairs[1::2], strict=True)]
        return [prompts, *(side for pair in ordered for side in pair)]
