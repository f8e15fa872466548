"""An engine that writes what a script says, one token of each response in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_trainer.generation.vllm_engine import Response
from tests.trainer.stand_in import GeneratorStandIn

END = 2
LOG_PROB = -0.5
Script = Callable[[Sequence[int], int], Sequence[int]]
"""(prompt, seed) -> the tokens of the response, the end-of-text token among them if it is reached."""


class ScriptedEngine(GeneratorStandIn):
    """Stands where vLLM would."""

    script: Script = staticmethod(lambda prompt, seed: [5, END])

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[int, list[int], int, int]] = []
        """(number, prompt, seed, most tokens) of each request, in their order."""
        self._under_way: dict[int, tuple[list[int], int]] = {}

    def begin(  # type: ignore[override]
        self, number: int, prompt: Sequence[int], seed: int, *, max_tokens: int, greedy: bool
    ) -> None:
        assert number not in self._under_way
        self.asked.append((number, list(prompt), seed, max_tokens))
        self._under_way[number] = (list(type(self).script(prompt, 0 if greedy else seed))[:max_tokens], 0)

    def step(self) -> list[tuple[int, Response]]:
        found = []
        for number, (tokens, written) in list(self._under_way.items()):
            self._under_way[number] = (tokens, written + 1)
            if written + 1 == len(tokens):
                del self._under_way[number]
                finished = tokens[-1] == END
                log_probs, versions = [LOG_PROB] * len(tokens), [self.version] * len(tokens)
                response = Response(tokens=tokens, log_probs=log_probs, finished=finished, versions=versions)
                found.append((number, response))
        return found

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)
