"""The data loader as a worker: every rank reads the whole data set and returns only its rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_trainer.data.loaders import CompletionLoader, Loader, PairLoader, PromptLoader, SafetyPairLoader
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import WorkerSetting


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What was found in the data."""

    rows: int
    """Rows to train on, after dropping those that are too long."""
    evaluation_rows: int
    """Rows of an evaluation batch: the held-out rows, padded to divide over the ranks; 0 without evaluation."""
    facts: tuple[str, ...]
    """Sentences for the user: how many rows were dropped."""


class DataWorker:
    """One rank of the loader of a job: its training rows and, if asked for, its held-out rows."""

    loader_class: type[Loader]

    def __init__(self, setting: WorkerSetting, *, slots: int) -> None:
        """`setting`: the job and the model whose tokenizer is used; evaluation batches divide by `slots`."""
        job = setting.job
        tokenizer = setting.tokenizer()
        self._batch_size = job.rows_per_step
        self._samples_per_prompt = job.spec.rollout.samples_per_prompt
        self._slots = slots
        self._train = self.loader_class(job.spec.data.train, tokenizer, path="spec.data.train", spec=job.spec)
        self._loaders: list[Loader] = [self._train]
        self._held_out = None
        if job.spec.evaluation:
            path = "spec.evaluation.data"
            self._held_out = self.loader_class(job.spec.evaluation.data, tokenizer, path=path, spec=job.spec)
            self._loaders.append(self._held_out)

    @register(ONE_TO_ALL)
    def describe(self) -> DataShape:
        """How much data there is."""
        held_out = len(self._held_out) if self._held_out else 0
        return DataShape(
            rows=len(self._train),
            evaluation_rows=-(-held_out // self._slots) * self._slots,
            facts=tuple(
                f"{loader.path}: {loader.dropped} of {loader.dropped + len(loader)} rows are too long and were dropped"
                for loader in self._loaders
                if loader.dropped
            ),
        )

    def training_rows(self, batch: Batch) -> Fields:
        """This rank's rows of a step, each prompt repeated for its samples."""
        repeat = self._samples_per_prompt
        first, last = batch.start // repeat, -(-(batch.start + batch.size) // repeat)
        fields = self._train.batch(batch.step, batch_size=self._batch_size, rows=slice(first, last))
        chosen = batch.rows // repeat - first
        return {name: fields[name][chosen] for name in self._train.fields}

    def held_out_rows(self, batch: Batch) -> Fields:
        """This rank's held-out rows, in the order of the file; rows beyond the last are padding (valid 0)."""
        assert self._held_out is not None
        fields = self._held_out.ordered(slice(batch.start, batch.start + batch.size))
        return {name: fields[name] for name in self._held_out.fields}


def loads(rows: Callable[[DataWorker, Batch], Fields], loader: type[Loader]) -> Callable[[DataWorker, Batch], Fields]:
    """A worker method that adds the loader's fields: of the training rows or of the held-out rows."""

    @register(DP_PROTO, adds=loader.fields, phase="data")
    def load(worker: DataWorker, batch: Batch) -> Fields:
        return rows(worker, batch)

    return load


class PromptData(DataWorker):
    """Prompts of RL."""

    loader_class = PromptLoader
    load_batch = loads(DataWorker.training_rows, PromptLoader)
    """prompt_ids int64 and prompt_mask [B, P], valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, PromptLoader)


PRETRAIN_FIELDS = ("pretrain_tokens", "pretrain_attention_mask", "pretrain_response_mask")


class PromptAndPretrainData(PromptData):
    """Prompts of RL, each row with a pretraining text for the actor (PPO-ptx)."""

    def __init__(self, setting: WorkerSetting, *, slots: int) -> None:
        super().__init__(setting, slots=slots)
        spec = setting.job.spec
        assert spec.data.pretrain, "this class is for jobs with data.pretrain"
        path = "spec.data.pretrain"
        self._pretrain = CompletionLoader(spec.data.pretrain, setting.tokenizer(), path=path, spec=spec, endless=True)
        self._loaders.append(self._pretrain)
        self._sequences = setting.job.sequences_per_step

    @register(DP_PROTO, adds=(*PromptLoader.fields, *PRETRAIN_FIELDS), phase="data")
    def load_batch(self, batch: Batch) -> Fields:
        """The fields of PromptData, and pretrain_tokens int64 and its two masks [B, T]."""
        rows = slice(batch.start, batch.start + batch.size)
        found = self._pretrain.batch(batch.step, batch_size=self._sequences, rows=rows)
        text = {name: found[name.removeprefix("pretrain_")] for name in PRETRAIN_FIELDS}
        return {**self.training_rows(batch), **text}


class CompletionData(DataWorker):
    """Prompts with their responses."""

    loader_class = CompletionLoader
    load_batch = loads(DataWorker.training_rows, CompletionLoader)
    """tokens int64, attention_mask and response_mask [B, T], valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, CompletionLoader)


class PairData(DataWorker):
    """Pairs of a better and a worse response."""

    loader_class = PairLoader
    load_batch = loads(DataWorker.training_rows, PairLoader)
    """chosen_tokens, rejected_tokens int64 and their masks [B, T], valid [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, PairLoader)


class SafetyPairData(DataWorker):
    """Pairs of a safer and a more harmful response, and whether each is safe."""

    loader_class = SafetyPairLoader
    load_batch = loads(DataWorker.training_rows, SafetyPairLoader)
    """The fields of PairData, and chosen_safe, rejected_safe [B]."""
    load_evaluation = loads(DataWorker.held_out_rows, SafetyPairLoader)
