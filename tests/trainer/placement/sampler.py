"""Stands where vLLM would: a plain sampler on the model that the actor trains, which takes its weights like vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_api.rollout import Rollout
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from tests.trainer.stand_in import GeneratorStandIn

LONGEST = 6
"""Tokens of a response."""


class PlainSampler(GeneratorStandIn):
    """Draws each response by itself, from a generator of its own seed."""

    def __init__(self, *_: Any, config: PreTrainedConfig, rollout: Rollout, eos_token: int, **__: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self._model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa").eval()
        self._temperature, self._eos_token = rollout.temperature, eos_token

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
        found = [
            self._response(prompt, None if greedy else seed, longest)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for row in sorted(range(len(found)), key=lambda row: len(found[row].tokens)):
            ended(row, found[row])
        return found

    def _response(self, prompt: Sequence[int], seed: int | None, longest: int) -> Response:
        """Drawn from `seed`, or without one the likeliest tokens."""
        drawn = torch.Generator().manual_seed(seed or 0)
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < longest and self._eos_token not in tokens:
            logits = self._model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            spread = torch.log_softmax(logits / self._temperature, -1)
            next_token = spread.argmax() if seed is None else torch.multinomial(spread.exp(), 1, generator=drawn)
            tokens.append(int(next_token))
            log_probs.append(float(spread[tokens[-1]]))
        return Response(tokens=tokens, log_probs=log_probs, finished=tokens[-1] == self._eos_token)
