"""An engine that writes what a script says, one token of each response in a step, and episodes on any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.run.worker_specs import setting_of
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.episodes import EndedEpisode, EpisodeResponder, ResponseEnded
from rlhf_trainer.workers.samples import as_bytes
from tests.api.cases import made
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import EXAMPLE_MODEL

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


def play_episodes(
    tokenizer: PreTrainedTokenizerBase,
    engine: Any,
    environments: Any,
    prompts: Sequence[list[int]],
    *,
    limits: tuple[int, int, int],
    folder: Path = EXAMPLE_MODEL,
    played: Sequence[bool] = (),
    ended: ResponseEnded = lambda *_: None,
) -> list[EndedEpisode]:
    """The episodes of a job with tools. limits: tokens of a prompt, of an episode, turns; played: not padding."""
    prompt_tokens, tokens, turns = limits
    sizes = (f"data.maxPromptTokens={prompt_tokens}", f"data.maxResponseTokens={tokens}", f"rollout.maxTurns={turns}")
    asked = Job.parse(made("GRPO", ("rollout.tools=['os:getcwd']", *sizes)))
    setting = setting_of(asked, "actor", {"actor": str(folder)})
    responder = EpisodeResponder(setting, tokenizer, engine, environments)
    valid = torch.tensor([float(each) for each in played or [True] * len(prompts)])
    fields = {"valid": valid, "columns": as_bytes([{"number": number} for number in range(len(prompts))])}
    batch = Batch(step=1, start=0, size=len(prompts), fields=fields)
    found, responses = responder.respond(batch, list(prompts), greedy=False, ended=ended)
    assert found == [each.prompt for each in responder._episodes]
    assert responses == [each.response for each in responder._episodes]
    return responder._episodes
