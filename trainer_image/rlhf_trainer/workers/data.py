"""The data loader as a worker: every rank reads the whole data set and returns only its rows of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_api.spec.algorithms import Algorithm
from rlhf_api.spec.data import AnyData, DataSets
from rlhf_trainer.data.loaders import LOADERS, CompletionLoader, Loader, PromptLoader
from rlhf_trainer.data.tokens import UNLEARNED_NOTES, Column, Encoder
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.of_job import try_environment
from rlhf_trainer.errors import ConfigError, DataError, UserCodeError
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.expectations import find_faults
from rlhf_trainer.workers.samples import COLUMNS, RAW_PROMPTS, as_bytes, from_bytes

PRETRAIN_FIELDS = ("pretrain_tokens", "pretrain_attention_mask", "pretrain_response_mask")
"""Fields of the actor's pretraining texts (PPO-ptx), a text for each row: int64 and two masks [B, T]."""


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Numbers of rows of a job's data sets, their digests, and facts about them for the user."""

    rows: int
    """Number of training rows, after dropping rows that are too long."""
    total_steps: int
    """Training steps of the whole job on these rows."""
    evaluation_rows: int
    """Number of rows of an evaluation batch: held-out rows times samples a prompt, padded to divide over the ranks."""
    evaluation_sets: Mapping[str, int] = field(default_factory=dict)
    """Number of held-out rows of each named data set, in the sets' order; empty for a single set without a name."""
    facts: tuple[str, ...]
    """Sentences for the user: how many rows were dropped, and why."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digest of each data set's rows, by the data set's field in the manifest."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counts of the training rows for the record of step 1, by name."""
    end_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that end a response: text -> id."""


class DataWorker:
    """One rank of the worker that loads a job's training rows and, if it has an evaluation, held-out rows."""

    def __init__(self, setting: WorkerSetting, *, slots: int) -> None:
        """`setting`: job and model whose tokenizer is used; evaluation batches are padded to a multiple of `slots`."""
        job = self._job = setting.job
        self._tokenizer, self._slots = setting.tokenizer(), slots
        self.ends = setting.end_tokens(self._tokenizer)
        has_tools = job.spec.rollout.tools is not None
        turns = TurnEncoder(self._tokenizer, chat_template="Auto", ends=self.ends)
        try:
            if has_tools:
                turns.observation([{"role": "tool", "name": "tool", "content": "result-of-the-tool"}])
        except DataError as error:
            raise ConfigError(f"{job.name}: spec.rollout.tools: with {setting.model.uri} a result {error}") from error
        self._tools = try_environment(job, {"schemas": None})["schemas"] if has_tools else ()
        loader, order = LOADERS[job.spec.algorithm.data], f"{job.name}: spec.data.order"
        self.train = self._loaded(loader, job.spec.data.train, "spec.data.train", ordered_by=order)
        self.loaders: list[Loader] = [self.train]
        """Loaders of all data that the job reads."""
        self._held_out, self._samples_held_out = None, 1
        if job.spec.evaluation:
            self._held_out = self._loaded(loader, job.spec.evaluation.data, "spec.evaluation.data")
            self._samples_held_out = job.spec.evaluation.samples_per_prompt
            self.loaders.append(self._held_out)
        self._pretrain = None
        if pretrain := job.spec.data.pretrain:
            self._pretrain = self._loaded(CompletionLoader, pretrain, "spec.data.pretrain", endless=True)
            self.loaders.append(self._pretrain)

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Declare that `load_batch` adds `batch_fields`, and `load_evaluation` the fields of the job's loader.

        Both add `columns`, further columns of prompts (`Loader.columns`), if the data names some.
        """
        spec = setting.job.spec
        has_agent, has_pretrain = spec.rollout.agent is not None, spec.data.pretrain is not None
        adds = {
            "load_batch": batch_fields(type(spec.algorithm), has_pretrain=has_pretrain, has_agent=has_agent),
            "load_evaluation": (*LOADERS[spec.algorithm.data].fields, *(RAW_PROMPTS,) * has_agent),
        }
        read = {"load_batch": spec.data.train, "load_evaluation": spec.evaluation and spec.evaluation.data}
        columns = {name: COLUMNS if source and spec.columns(source) else () for name, source in read.items()}
        return {**marks, **{name: replace(marks[name], adds=(*adds[name], *columns[name])) for name in adds}}

    def _loaded(self, kind: type[Loader], source: AnyData, path: str, **options: Any) -> Loader:
        """Read and tokenise a data source; an error names the job."""
        try:
            options |= {"spec": self._job.spec, "tools": self._tools, "ends": self.ends}
            return kind(source, self._tokenizer, path=path, check=partial(find_faults, self._job), **options)
        except (ConfigError, DataError, UserCodeError) as error:
            raise type(error)(f"{self._job.name}: {error}") from error

    @register(ONE_TO_ALL)
    def describe(self) -> DataShape:
        """Return the numbers of training and evaluation rows, and sentences about the data for the user."""
        held_out, sets, evaluation = 0, dict[str, int](), self._job.spec.evaluation
        if evaluation:
            held_out = len(self.held_out) * self._samples_held_out
            if isinstance(evaluation.data, DataSets):
                names = [each.name for each in evaluation.data.sets]
                sets = dict(zip(names, self.held_out.counts, strict=True))
        learned = [each for each in (self.train, self._pretrain) if isinstance(each, CompletionLoader)]
        readers = [reader for loader in learned for reader in loader.readers]
        unlearned = sum(reader.notes.get(why, (0, ""))[0] for reader in readers for why in UNLEARNED_NOTES)
        return DataShape(
            rows=len(self.train),
            total_steps=self._job.total_steps_for(len(self.train)),
            evaluation_rows=-(-held_out // self._slots) * self._slots,
            evaluation_sets=sets,
            facts=(self.ends.sentence(), *(fact for loader in self.loaders for fact in loader.facts())),
            digests={loader.path: loader.digest for loader in self.loaders},
            counts={"data/unlearned_messages": float(unlearned)} if learned else {},
            end_tokens=dict(zip(self.ends.texts, self.ends.ids, strict=True)),
        )

    @register(DP_PROTO, adds=PromptLoader.fields, phase="data")
    def load_batch(self, batch: Batch) -> Fields:
        """Return this rank's training rows of a step, each prompt repeated for its samples."""
        size, times = self._job.rows_per_step, self._job.spec.rollout.samples_per_prompt
        rows = _repeated(batch, times, lambda rows: self.train.batch(batch.step, batch_size=size, rows=rows))
        fields = self._fields_of(self.train, self._job.spec.data.train, rows)
        if self._pretrain:
            chosen = slice(batch.start, batch.start + batch.size)
            texts = self._pretrain.batch(batch.step, batch_size=self._job.sequences_per_step, rows=chosen)
            fields |= {name: texts[name.removeprefix("pretrain_")] for name in PRETRAIN_FIELDS}
        return fields

    @register(DP_PROTO, adds=PromptLoader.fields, phase="data")
    def load_evaluation(self, batch: Batch) -> Fields:
        """Return this rank's held-out rows in the file's order, each repeated for its samples; padding has valid 0."""
        assert self._job.spec.evaluation
        rows = _repeated(batch, self._samples_held_out, self.held_out.ordered)
        return self._fields_of(self.held_out, self._job.spec.evaluation.data, rows)

    def _fields_of(self, loader: Loader, source: AnyData, rows: Fields) -> dict[str, Tensor]:
        """Return the loader's fields of rows; add `columns` and `RAW_PROMPTS`, uint8 [B, C], if the job has them."""
        fields = {name: rows[name] for name in LOADERS[self._job.spec.algorithm.data].fields}
        if self._job.spec.columns(source):
            fields["columns"] = self._columns(loader, rows["example"])
        if self._job.spec.algorithm.makes == "data" or self._job.spec.rollout.agent:
            where = f"{loader.path}: in a prompt or its tools "
            fields[RAW_PROMPTS] = self._json(loader.prompts, rows["example"], where)
        return fields

    def sample(self, loader: Loader, row: int, response: str) -> Sample:
        """Return a row (from 0) of a data set with a made-up response, as reward functions get it."""
        rows, (columns,) = loader.ordered(slice(row, row + 1)), self._columns(loader, torch.tensor([row]))
        prompt = str(self._tokenizer.decode(rows["prompt_ids"][rows["prompt_mask"] > 0], skip_special_tokens=True))
        return Sample(step=None, row=row, prompt=prompt, response=response, finished=True, columns=from_bytes(columns))

    def turn(self, loader: Loader, row: int, answer: str) -> str:
        """Return an answer to a row (from 0) of a data set as the chat template writes the assistant's turn."""
        prompts = Column(field=loader.path, values=[loader.prompts(torch.tensor([row]))[0]["prompt"]])
        encoder = Encoder(prompts, self._tokenizer, chat_template=self._job.spec.data.chat_template, ends=self.ends)
        (ids,) = encoder.responses(Column(field=loader.path, values=[answer]), encoder.prompts())
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def held_out(self) -> Loader:
        """Loader of the held-out rows; the job must have an evaluation."""
        assert self._held_out is not None
        return self._held_out

    def _columns(self, loader: Loader, examples: Tensor) -> Tensor:
        return self._json(loader.columns, examples, f"{loader.path}.columns: ")

    def _json(self, rows_of: Callable[[Tensor], Sequence[Mapping[str, Any]]], examples: Tensor, where: str) -> Tensor:
        """Return `rows_of(examples)` as JSON, uint8 [B, C]; DataError with `where` if JSON cannot hold a value."""
        try:
            return as_bytes(rows_of(examples))
        except ValueError as error:
            raise DataError(f"{self._job.name}: {where}{error}") from error


def batch_fields(algorithm: type[Algorithm], *, has_pretrain: bool = False, has_agent: bool = False) -> tuple[str, ...]:
    """Return the names of a step's batch fields: of the algorithm's rows and, if `has_pretrain`, of pretraining texts.

    A job that makes data or has an agent has `RAW_PROMPTS`: JSON of `Reader.prompt`, the prompt as written in the file.
    """
    pretrain = PRETRAIN_FIELDS if has_pretrain else ()
    return (*LOADERS[algorithm.data].fields, *pretrain, *(RAW_PROMPTS,) * (has_agent or algorithm.makes == "data"))


def _repeated(batch: Batch, times: int, fields_of: Callable[[slice], Fields]) -> Fields:
    """Return this rank's rows of a batch with `times` rows for each prompt; `fields_of` loads a range of prompts."""
    first, last = batch.start // times, -(-(batch.start + batch.size) // times)
    fields, chosen = fields_of(slice(first, last)), batch.rows // times - first
    return {name: field[chosen] for name, field in fields.items()}
