"""Frozen teacher: the actor learns its probabilities of tokens (on-policy distillation, arXiv:2306.13649)."""

from dataclasses import replace

from torch import Tensor

from rlhf_api.spec.algorithms import Distilling
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, text_of

TEACHER_TOKENS = "teacher_tokens"


class TeacherWorker:
    """One rank of the teacher, a model of any size with the actor's vocabulary."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._temperature = setting.job.spec.rollout.temperature
        self._model = setting.frozen(setting.language_model())
        self._likeliest: tuple[int, int] | None = None
        """(K, M): the K likeliest among the M tokens of the tokenizer; None: the sampled tokens are enough."""
        algorithm = setting.job.spec.algorithm
        if compares_tokens(setting):
            assert isinstance(algorithm, Distilling)
            tokens = len(setting.actors_tokenizer())
            self._likeliest = min(algorithm.top_k or tokens, tokens), tokens

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting) -> Marks:
        """Declare that `compute_log_prob` adds teacher_tokens, if the divergence is over the vocabulary."""
        adds = TEACHER_TOKENS if compares_tokens(setting) else "teacher_log_probs"
        return {"compute_log_prob": replace(marks["compute_log_prob"], adds=(adds,))}

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=(), phase="scoring", row_by_row=True)
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Return teacher_log_probs float32 [B, T] of the response tokens, at the temperature of the rollout.

        For a divergence over the vocabulary return teacher_tokens float32 [B, T, 2K] instead: ids and log-probabilities
        of the K likeliest tokens at each place of the response.
        """
        if self._likeliest is None:
            return {"teacher_log_probs": log_probs_by(self._model, batch, temperature=self._temperature)}

        def texts(micro: Fields) -> list[TokenBatch]:
            return [replace(text_of(micro, temperature=self._temperature), likeliest=self._likeliest)]

        def tokens(found: Tensor, _: Fields) -> Tensor:
            return found

        fields = {name: batch[name] for name in TEXT_FIELDS}
        return {TEACHER_TOKENS: self._model.infer(fields, texts, tokens, of_token=(2 * self._likeliest[0],))}


def compares_tokens(setting: WorkerSetting) -> bool:
    """Whether the divergence from the teacher is over the vocabulary, not of the sampled tokens."""
    algorithm = setting.job.spec.algorithm
    return isinstance(algorithm, Distilling) and algorithm.divergence != "Sampled"
