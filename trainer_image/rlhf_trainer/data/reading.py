"""Reads one data set: its rows as token ids, without those that are bad, too long or too short, which are counted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic.alias_generators import to_camel
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.data import Data, Rows
from rlhf_trainer.data.ragged import Ragged, swapped
from rlhf_trainer.data.tokens import Column, Encoder, Ids
from rlhf_trainer.errors import DataError, NoRowLeftError

if TYPE_CHECKING:
    import datasets

    from rlhf_trainer.data.source import OpenedRows

ROWS_AT_ONCE = 8192
"""Rows tokenised in one call: enough to use the tokenizer's threads, few enough for memory."""
NAMED = 3
"""Bad rows of a source that are named; the others are counted."""


class Reader:
    """Prompts: the base of those that read responses too."""

    responses: ClassVar[tuple[str, ...]] = ()
    """The fields of Rows that name its responses' columns."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Those that name columns of true and false."""

    def __init__(
        self,
        source: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str,
        limits: Data,
        columns: Sequence[str] = (),
        verified: Mapping[str, str] = MappingProxyType({}),
        keeps_rows: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`path`: the source's place in the manifest, such as "spec.data.train"; limits: of its rows.

        columns: further ones, which go with the rows as they stand in the file; verified: those of them without which
        a row is bad, and the field of the manifest that reads each; keeps_rows: for `prompt` and `rows`;
        tools: of every row, where the source names no column of them.
        """
        self.source, self.path, self.columns, self._verified = source, path, columns, verified
        self.dropped = 0
        """Rows left out because their prompt or a response is longer than the limits."""
        self.short = 0
        """Rows left out because their prompt or a response is shorter than the limits, and none is longer."""
        self.bad = 0
        """Rows left out because something is wrong with them."""
        self.named: list[str] = []
        """What is wrong with the first of these."""
        self._tokenizer, self._limits, self._tools = tokenizer, limits, tools
        self._keeps_rows = bool(columns) or keeps_rows
        self._rows: list[int] = []
        """Those that are kept, by their numbers in the file."""
        self._prompt_key = "messages_key" if source.messages_key else "prompt_key"

    def read(self) -> list[Ragged]:
        """Token ids of the prompts and of each kind of response, and each label, in the order of the file.

        Raises DataError, naming field and row, when the data cannot be read (see `open_rows`), when a row is bad (see
        `Encoder`) or over-long and the limits say that it fails then, or when no row is left.
        """
        from rlhf_trainer.data.source import open_rows  # pandas: seconds that a process without data does not need

        rows = open_rows(self.source, path=self.path, keys=self.fields(), columns=self.columns, verified=self._verified)
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
        """Those that were read, with all their columns."""
        return self._table.select(self._rows)

    def further(self, row: int) -> dict[str, Any]:
        """The further columns of a row of those that were read (from 0)."""
        return dict(self._further[self._rows[row]]) if self.columns else {}

    def prompt(self, row: int) -> dict[str, Any]:
        """The `prompt` of a row of those that were read (from 0), a text or messages, and its tools if it has some.

        Of messages that end with an answer it is what is before that.
        """
        found = dict(self._prompts[self._rows[row]])
        prompt = found.pop(getattr(self.source, self._prompt_key))
        ends_with_answer = isinstance(prompt, list) and prompt[-1]["role"] == "assistant"
        return {"prompt": prompt[:-1] if ends_with_answer else prompt, **found}

    def add_further_to(self, digest: hashlib.blake2b) -> None:
        """Add the further columns of all rows to a digest."""
        for row in self._rows if self.columns else ():
            digest.update(repr(self._further[row]).encode(errors="replace"))

    def facts(self, rows: int) -> Iterator[str]:
        """Sentences on what was left out beside so many rows."""
        total = rows + self.dropped + self.short + self.bad
        for count, why in ((self.dropped, self._longer()), (self.short, self._shorter())):
            if count:
                yield f"{self.path}: {count} of {total} rows are {why} and were dropped"
        if self.bad:
            such = "; ".join(self.named)
            yield f"{self.path}: {self.bad} of {total} rows are bad and were dropped, such as {such}"

    def fields(self) -> tuple[str, ...]:
        """The fields of the source that name the columns that are read; the prompt's comes first."""
        return (self._prompt_key, *self.responses, *self.labels, *(("tools_key",) if self.source.tools_key else ()))

    def _tokenised(self, rows: OpenedRows) -> Iterator[tuple[int, Encoder, list[list[Ids]]]]:
        """Some rows at a time: (the first, what has encoded them, the ids of each of their texts and labels)."""
        columns = list(dict.fromkeys([*(getattr(self.source, field) for field in self.fields()), *self._verified]))
        for first in range(0, len(rows.table), ROWS_AT_ONCE):
            table = rows.values(columns, first, ROWS_AT_ONCE, self.path)

            def column(key: str, table: Mapping[str, list[Any]] = table) -> Column:
                return Column(field=f"{self.path}.{to_camel(key)}", values=table[getattr(self.source, key)])

            same = Column(field=self.path, values=[self._tools] * len(table[columns[0]]))
            tools = column("tools_key") if self.source.tools_key else same
            template = self._limits.chat_template
            encoder = Encoder(column(self._prompt_key), self._tokenizer, chat_template=template, tools=tools)
            texts = self._encoded(encoder, column)
            for name in self._verified:
                encoder.require_answers(Column(field=f"{self.path}.columns", values=table[name]), name)
            yield first, encoder, texts

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        """The ids of the prompts, of each kind of response, and each label."""
        prompts = encoder.prompts()
        replies = [encoder.responses(column(key), prompts) for key in self.responses]
        return [prompts, *replies, *[encoder.labels(column(key)) for key in self.labels]]

    def _kept(self, opened: OpenedRows, first: int, encoder: Encoder, texts: list[list[Ids]]) -> list[Ragged]:
        """The rows without faults and within the limits; the others are counted, or a DataError."""
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
        self._rows += (first + kept).tolist() if self._keeps_rows else []
        return tokens if len(kept) == len(good) else [rows.selected(kept) for rows in tokens]

    def _leave_out(self, sentence: str) -> None:
        """Count a row that is bad in the way that the sentence says, or end with it."""
        if self._limits.on_bad_row == "Fail":
            raise DataError(sentence)
        self.bad += 1
        if len(self.named) < NAMED:
            self.named.append(sentence)

    def _none_left(self) -> str:
        """Why no row is left."""
        whys = [self._longer()] if self.dropped else []
        whys += [self._shorter()] if self.short else []
        whys += [f"bad: {'; '.join(self.named)}"] if self.bad else []
        return f"all {self.dropped + self.short + self.bad} rows of {self.source.address} are {' or '.join(whys)}"

    def _too_long(self, place: str, column: int, length: int) -> DataError:
        key = (self._prompt_key, *self.responses)[column]
        field = to_camel(key if key in self.fields() else self._prompt_key)
        limit = "maxResponseTokens" if column else "maxPromptTokens"
        most = self._limits.max_response_tokens if column else self._limits.max_prompt_tokens
        return DataError(f"{self.path}.{field}: {place} has {length} tokens, more than the {most} of spec.data.{limit}")

    def _bounds(self, prompt: int, response: int) -> torch.Tensor:
        """Tokens of the prompt and of each response, int64 [1 + responses, 1]."""
        return torch.tensor([prompt, *[response] * len(self.responses)])[:, None]

    def _longer(self) -> str:
        response = f" or spec.data.maxResponseTokens {self._limits.max_response_tokens}" if self.responses else ""
        return f"longer than spec.data.maxPromptTokens {self._limits.max_prompt_tokens}{response}"

    def _shorter(self) -> str:
        response = f" or spec.data.minResponseTokens {self._limits.min_response_tokens}" if self.responses else ""
        return f"shorter than spec.data.minPromptTokens {self._limits.min_prompt_tokens}{response}"


class CompletionReader(Reader):
    """Prompts with a response; of a conversation all from its first answer on is one."""

    responses = ("response_key",)

    def fields(self) -> tuple[str, ...]:
        return tuple(key for key in super().fields() if not (self.source.messages_key and key == "response_key"))

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        """A token of a response that is not learned, such as of a question within, is there as ~token."""
        if not self.source.messages_key:
            return super()._encoded(encoder, column)
        found = encoder.conversations()
        marked = [zip(talk.rest, talk.learned, strict=True) for talk in found]
        return [
            [talk.prompt for talk in found],
            [[token if is_learned else ~token for token, is_learned in row] for row in marked],
        ]


class PairReader(Reader):
    """Prompts with a better and a worse response."""

    responses = ("chosen_key", "rejected_key")

    def fields(self) -> tuple[str, ...]:
        return (*super().fields(), *(("better_key",) if self.source.better_key else ()))

    def _encoded(self, encoder: Encoder, column: Callable[[str], Column]) -> list[list[Ids]]:
        found = super()._encoded(encoder, column)
        return [*found, encoder.labels(column("better_key"))] if self.source.better_key else found

    def _kept(self, opened: OpenedRows, first: int, encoder: Encoder, texts: list[list[Ids]]) -> list[Ragged]:
        """With the better response, and whether it is safe, before the worse one."""
        prompts, *pairs = super()._kept(opened, first, encoder, texts)
        if not self.source.better_key:
            return [prompts, *pairs]
        second = pairs.pop().flat > 0
        ordered = [swapped(one, other, second) for one, other in zip(pairs[::2], pairs[1::2], strict=True)]
        return [prompts, *(side for pair in ordered for side in pair)]


class SafetyPairReader(PairReader):
    """Pairs, and whether each response is safe."""

    labels = ("chosen_safe_key", "rejected_safe_key")
