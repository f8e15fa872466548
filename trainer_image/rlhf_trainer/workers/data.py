"""The data loader as a worker: every rank reads the whole data set and returns only its rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_api.spec.data import AnyData, DataSets
from rlhf_trainer.data.loaders import CompletionLoader, Loader, PairLoader, PromptLoader, SafetyPairLoader
from rlhf_trainer.environments.of_job import try_environment
from rlhf_trainer.errors import ConfigError, DataError, UserCodeError
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import as_bytes, from_bytes


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Numbers of rows of a job's data sets, their digests, and facts about them for the user."""

    rows: int
    """Number of training rows, after dropping rows that are too long."""
    evaluation_rows: int
    """Number of rows of an evaluation batch: held-out rows times samples a prompt, padded to divide over the ranks."""
    evaluation_sets: Mapping[str, int] = field(default_factory=dict)
    """Number of held-out rows of each named data set, in the sets' order; empty for a single set without a name."""
    facts: tuple[str, ...]
    """Sentences for the user: how many rows were dropped, and why."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digest of each data set's rows, by the data set's field in the manifest."""


class DataWorker:
    """One rank of the worker that loads a job's training rows and, if it has an evaluation, held-out rows."""

    loader_class: type[Loader]

    def __init__(self, setting: WorkerSetting, *, slots: int) -> None:
        """`setting`: the job and the model whose tokenizer is used; evaluation batches are padded for `slots`."""
        job = self._job = setting.job
        self._tokenizer = setting.tokenizer()
        self._batch_size = job.rows_per_step
        self._samples_per_prompt = job.spec.rollout.samples_per_prompt
        self._slots = slots
        has_tools = job.spec.rollout.tools is not None
        if has_tools and not self._tokenizer.chat_template:
            told = "has no chat template, which tells the model of its tools and of what they return"
            raise ConfigError(f"{job.name}: spec.rollout.tools: the tokenizer of {setting.model.uri} {told}")
        self._tools = try_environment(job, {"schemas": None})["schemas"] if has_tools else ()
        order = f"{job.name}: spec.data.order"
        self.train = self._loaded(self.loader_class, job.spec.data.train, "spec.data.train", ordered_by=order)
        self.loaders: list[Loader] = [self.train]
        """Loaders of all data that the job reads."""
        self._held_out, self._samples_held_out = None, 1
        if job.spec.evaluation:
            self._held_out = self._loaded(self.loader_class, job.spec.evaluation.data, "spec.evaluation.data")
            self._samples_held_out = job.spec.evaluation.samples_per_prompt
            self.loaders.append(self._held_out)

    def _loaded(self, kind: type[Loader], source: AnyData, path: str, **options: Any) -> Loader:
        """Read and tokenise a data source; an error names the job."""
        try:
            return kind(source, self._tokenizer, path=path, spec=self._job.spec, tools=self._tools, **options)
        except (DataError, UserCodeError) as error:
            raise type(error)(f"{self._job.name}: {error}") from error

    @register(ONE_TO_ALL)
    def describe(self) -> DataShape:
        """Return the numbers of training and evaluation rows, and sentences about the data for the user."""
        held_out = len(self._held_out) * self._samples_held_out if self._held_out else 0
        return DataShape(
            rows=len(self.train),
            evaluation_rows=-(-held_out // self._slots) * self._slots,
            evaluation_sets=self._sets(),
            facts=tuple(fact for loader in self.loaders for fact in loader.facts()),
            digests={loader.path: loader.digest for loader in self.loaders},
        )

    def _sets(self) -> dict[str, int]:
        evaluation = self._job.spec.evaluation
        if not (evaluation and isinstance(evaluation.data, DataSets)):
            return {}
        names = [each.name for each in evaluation.data.sets]
        return dict(zip(names, self.held_out.counts, strict=True))

    def training_rows(self, batch: Batch) -> Fields:
        """Return this rank's rows of a step, each prompt repeated for its samples."""
        return _repeated(
            batch,
            self._samples_per_prompt,
            lambda rows: self.train.batch(batch.step, batch_size=self._batch_size, rows=rows),
        )

    def held_out_rows(self, batch: Batch) -> Fields:
        """Return this rank's held-out rows, in the order of the file, each prompt repeated for its samples.

        Rows beyond the last are padding (valid 0).
        """
        return _repeated(batch, self._samples_held_out, self.held_out.ordered)

    @property
    def held_out(self) -> Loader:
        """Loader of the held-out rows; the job must have an evaluation."""
        assert self._held_out is not None
        return self._held_out


def _repeated(batch: Batch, times: int, fields_of: Callable[[slice], Fields]) -> Fields:
    """Return this rank's rows of a batch with `times` rows for each prompt; `fields_of` loads a range of prompts."""
    first, last = batch.start // times, -(-(batch.start + batch.size) // times)
    fields, chosen = fields_of(slice(first, last)), batch.rows // times - first
    return {name: field[chosen] for name, field in fields.items()}


def loads(rows: Callable[[DataWorker, Batch], Fields], loader: type[Loader]) -> Callable[[DataWorker, Batch], Fields]:
    """Return a worker method that adds the loader's fields; `rows` gives the training or the held-out rows."""

    @register(DP_PROTO, adds=loader.fields, phase="data")
    def load(worker: DataWorker, batch: Batch) -> Fields:
        found = rows(worker, batch)
        return {name: found[name] for name in loader.fields}

    return load


class PromptData(DataWorker):
    """Loader of prompts for RL."""

    loader_class = PromptLoader
    load_batch = loads(DataWorker.training_rows, PromptLoader)
    """Method that adds prompt_ids int64 and prompt_mask [B, P], and valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, PromptLoader)

    @register(DP_PROTO, adds=("columns",), phase="data")
    def load_columns(self, batch: Batch) -> Fields:
        """Return the training rows' further columns (`Loader.columns`) as the field `columns`: JSON, uint8 [B, C]."""
        return self._columns(self.train, self.training_rows(batch)["example"])

    @register(DP_PROTO, adds=("columns",), phase="data")
    def load_evaluation_columns(self, batch: Batch) -> Fields:
        """Return the held-out rows' further columns (`Loader.columns`) as the field `columns`: JSON, uint8 [B, C]."""
        return self._columns(self.held_out, self.held_out_rows(batch)["example"])

    def first_row(self, loader: Loader) -> tuple[str, dict[str, Any]]:
        """Return the prompt and the further columns of a data set's first row, as reward functions get them."""
        (ids,) = loader.ordered(slice(0, 1))["prompt_ids"]
        (columns,) = self._columns(loader, torch.tensor([0]))["columns"]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)), from_bytes(columns)

    def _columns(self, loader: Loader, examples: Tensor) -> Fields:
        try:
            return {"columns": as_bytes(loader.columns(examples))}
        except ValueError as error:
            raise DataError(f"{self._job.name}: {loader.path}.columns: {error}") from error


class PromptsAsWritten(PromptData):
    """Loader of prompts that also gives each prompt as written in the file, for the data set that a job makes."""

    @register(DP_PROTO, adds=(*PromptLoader.fields, "raw_prompts"), phase="data")
    def load_batch(self, batch: Batch) -> Fields:
        """Return the fields of PromptData, and raw_prompts uint8 [B, C]: JSON of `Reader.prompt`."""
        rows = self.training_rows(batch)
        found = {name: rows[name] for name in PromptLoader.fields}
        try:
            return {**found, "raw_prompts": as_bytes(self.train.prompts(rows["example"]))}
        except ValueError as error:
            raise DataError(f"{self._job.name}: {self.train.path}: in a prompt or its tools {error}") from error


PRETRAIN_FIELDS = ("pretrain_tokens", "pretrain_attention_mask", "pretrain_response_mask")


class PromptAndPretrainData(PromptData):
    """Loader of prompts for RL, each row with a pretraining text for the actor (PPO-ptx)."""

    def __init__(self, setting: WorkerSetting, *, slots: int) -> None:
        super().__init__(setting, slots=slots)
        spec = setting.job.spec
        assert spec.data.pretrain, "this class is for jobs with data.pretrain"
        self._pretrain = self._loaded(CompletionLoader, spec.data.pretrain, "spec.data.pretrain", endless=True)
        self.loaders.append(self._pretrain)
        self._sequences = setting.job.sequences_per_step

    @register(DP_PROTO, adds=(*PromptLoader.fields, *PRETRAIN_FIELDS), phase="data")
    def load_batch(self, batch: Batch) -> Fields:
        """Return the fields of PromptData, and pretrain_tokens int64 with its two masks [B, T]."""
        rows = slice(batch.start, batch.start + batch.size)
        found = self._pretrain.batch(batch.step, batch_size=self._sequences, rows=rows)
        text = {name: found[name.removeprefix("pretrain_")] for name in PRETRAIN_FIELDS}
        prompts = self.training_rows(batch)
        return {**{name: prompts[name] for name in PromptLoader.fields}, **text}


class CompletionData(DataWorker):
    """Loader of prompts with written responses."""

    loader_class = CompletionLoader
    load_batch = loads(DataWorker.training_rows, CompletionLoader)
    """Method that adds tokens int64, attention_mask and response_mask [B, T], and valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, CompletionLoader)


class PairData(DataWorker):
    """Loader of pairs of a better and a worse response."""

    loader_class = PairLoader
    load_batch = loads(DataWorker.training_rows, PairLoader)
    """Method that adds chosen_tokens, rejected_tokens int64 and their masks [B, T], and valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, PairLoader)


class SafetyPairData(DataWorker):
    """Loader of pairs of a safer and a more harmful response, and of whether each response is safe."""

    loader_class = SafetyPairLoader
    load_batch = loads(DataWorker.training_rows, SafetyPairLoader)
    """Method that adds the fields of PairData, and chosen_safe, rejected_safe [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, SafetyPairLoader)
