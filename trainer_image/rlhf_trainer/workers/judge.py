"""Looks at finished responses: texts, rewards and the user's evaluation functions, as rows that people can read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from transformers import PreTrainedTokenizerBase

from rlhf_api.spec import EvaluationFunction
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.base import WorkerSetting

Score = Callable[[list[str], list[str], list[bool]], list[float]]
"""An evaluation function: (prompts, responses, whether each ended with end-of-text) -> a number for each."""


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """One response with everything that was measured of it."""

    prompt: str
    response: str
    finished: bool
    scores: dict[str, float]
    """`reward`, `cost` if there is a cost model, and each evaluation function by its name."""


class JudgeWorker:
    """One rank's part of an evaluation."""

    def __init__(self, setting: WorkerSetting, *, functions: list[EvaluationFunction]) -> None:
        self._tokenizer: PreTrainedTokenizerBase = setting.tokenizer()
        self._functions = {function.name: load_function(function) for function in functions}

    @register(
        DP_PROTO,
        reads=("tokens", "attention_mask", "response_mask", "finished", "scores", "valid"),
        reads_if_there=("costs",),
    )
    def judge(self, batch: Batch) -> list[JudgedRow]:
        """The real (not padded) rows of this rank, decoded and scored."""
        real = [row for row, valid in enumerate(batch["valid"].tolist()) if valid]
        prompts, responses = zip(*(self._texts(batch, row) for row in real), strict=True) if real else ((), ())
        finished = [bool(batch["finished"][row]) for row in real]
        measured = {"reward": "scores", **({"cost": "costs"} if "costs" in batch.fields else {})}
        columns = {name: [float(batch[field][row]) for row in real] for name, field in measured.items()}
        for name, function in self._functions.items():
            columns[name] = self._run(name, function, list(prompts), list(responses), finished)
        return [
            JudgedRow(
                prompt=prompts[place],
                response=responses[place],
                finished=finished[place],
                scores={name: column[place] for name, column in columns.items()},
            )
            for place in range(len(real))
        ]

    def _texts(self, batch: Batch, row: int) -> tuple[str, str]:
        """Prompt and response of a row."""
        response = batch["response_mask"][row] > 0
        prompt = (batch["attention_mask"][row] > 0) & ~response
        tokens = batch["tokens"][row]
        return (
            self._tokenizer.decode(tokens[prompt], skip_special_tokens=True),
            self._tokenizer.decode(tokens[response], skip_special_tokens=True),
        )

    def _run(
        self, name: str, function: Score, prompts: list[str], responses: list[str], finished: list[bool]
    ) -> list[float]:
        try:
            values = [float(value) for value in function(prompts, responses, finished)]
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise UserCodeError(f"spec.evaluation.functions: {name} raised {type(error).__name__}: {error}") from error
        if not all(map(math.isfinite, values)):
            raise UserCodeError(f"spec.evaluation.functions: {name} returned a value that is not finite")
        if len(values) != len(prompts):
            raise UserCodeError(
                f"spec.evaluation.functions: {name} returned {len(values)} values for {len(prompts)} responses"
            )
        return values


def load_function(function: EvaluationFunction) -> Score:
    """Import `module:function`; UserCodeError when there is none."""
    module, _, attribute = function.entrypoint.partition(":")
    try:
        found: Score = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the user's module does
        raise UserCodeError(
            f"spec.evaluation.functions: {function.entrypoint} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found
