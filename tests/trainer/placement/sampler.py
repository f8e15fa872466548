"""Stands where vLLM would: a plain sampler on the model that the actor trains, which takes its weights like vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from tests.trainer.stand_in import GeneratorStandIn

LONGEST = 6
"""Tokens of a response."""


class PlainSampler(GeneratorStandIn):
    """Draws each response by itself, from a generator of its own seed."""

    def __init__(self, *_: Any, config: PreTrainedConfig, rollout: Rollout, ends: Sequence[int], **__: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self._model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa").eval()
        self._temperature, self._ends = rollout.temperature, ends
        self._restarts = rollout.partial == "Restart"
        self._rows: list[Row] = []

    @torch.no_grad()
    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Replace the weights of the model, which this rank holds whole."""
        sums = super().load_weights(pieces, holds)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(self.weights[name])
        return sums

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        greedy: bool = False,
        ended: Callable[[int, Response], None] = lambda *_: None,
    ) -> list[Response]:
        """One response a prompt, in order; the shortest end first."""
        longest = min(max_tokens, LONGEST)
        self._rows = [
            Row(prompt, None if greedy else seed, longest, self._ends)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        while under_way := [number for number, row in enumerate(self._rows) if not row.has_ended]:
            self.before_token()
            for number in under_way:
                self._write_token(self._rows[number])
                if self._rows[number].has_ended:
                    ended(number, self._rows[number].response)
        return [row.response for row in self._rows]

    def weights_replaced(self, _: int) -> int:
        """As vLLM does."""
        under_way = [row for row in self._rows if not row.has_ended]
        if self._restarts:
            for row in under_way:
                row.begin()
        return len(under_way)

    def _write_token(self, row: Row) -> None:
        logits = self._model(input_ids=torch.tensor([[*row.prompt, *row.tokens]])).logits[0, -1]
        row.add(torch.log_softmax(logits / self._temperature, -1), self.version)


class Row:
    """A response that is written."""

    def __init__(self, prompt: Sequence[int], seed: int | None, longest: int, ends: Sequence[int]) -> None:
        """Drawn from `seed`, or without one the likeliest tokens."""
        self.prompt, self._seed, self._longest, self._ends = prompt, seed, longest, ends
        self.begin()

    def begin(self) -> None:
        """From the first token."""
        self._drawn = torch.Generator().manual_seed(self._seed or 0)
        self.tokens: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []

    def add(self, spread: Tensor, version: int) -> None:
        """Draw a token from these log-probabilities."""
        likeliest = self._seed is None
        token = spread.argmax() if likeliest else torch.multinomial(spread.exp(), 1, generator=self._drawn)
        self.tokens.append(int(token))
        self._log_probs.append(float(spread[self.tokens[-1]]))
        self._versions.append(version)

    @property
    def has_ended(self) -> bool:
        return len(self.tokens) == self._longest or any(end in self.tokens for end in self._ends)

    @property
    def response(self) -> Response:
        finished = self.tokens[-1] in self._ends
        return Response(tokens=self.tokens, log_probs=self._log_probs, finished=finished, versions=self._versions)
