"""Responders: they answer the prompts of a batch, each by one text (`SingleTurn`) or by an episode (`episodes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.generation.vllm_engine import Response, response_seed
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting

ResponseEnded = Callable[[int, Ids, Response], None]
"""Callback for each response that has ended: it gets the row's number on this rank, its prompt and the response."""


class TextGenerator(Protocol):
    """Engine or servers that write texts: `GenerationEngine` or `Endpoints`."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        greedy: bool = False,
        ended: Callable[[int, Response], None],
    ) -> list[Response]: ...


class SingleTurn:
    """Responder that generates one text for each prompt, without an environment."""

    def __init__(self, setting: WorkerSetting, generator: TextGenerator) -> None:
        self._spec, self._generator = setting.job.spec, generator

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: ResponseEnded
    ) -> tuple[list[Ids], list[Response]]:
        """Return the prompts as they are, and one generated response to each."""
        seed = self._spec.training.seed
        return prompts, self._generator.generate(
            prompts,
            [response_seed(seed, batch.step, row) for row in batch.rows.tolist()],
            max_tokens=self._spec.data.max_response_tokens,
            greedy=greedy,
            ended=lambda row, response: ended(row, prompts[row], response),
        )

    def turn_fields(self, _: Fields) -> Fields:
        """Return no field, as only episodes have fields of turns."""
        return {}

    def close(self) -> None:
        """Do nothing, as this responder has no process of its own."""
