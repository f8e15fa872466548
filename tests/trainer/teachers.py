"""Teachers on real HTTP servers of this process, which answer as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.rewards.stub_server import Handler, served


class Teacher:
    """Answers POST /completions with `prompt_logprobs` of a folder's model, and keeps what it was asked."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked: list[list[int]] = []

    def answer(self, handler: Handler, call: dict[str, Any]) -> None:
        self.asked.append(call["prompt"])
        places = self.prompt_logprobs(call["prompt"], call["prompt_logprobs"])
        handler.answer(json.dumps({"choices": [{"index": 0, "text": "x", "prompt_logprobs": places}]}).encode())

    def prompt_logprobs(self, tokens: list[int], count: int) -> list[dict[str, Any] | None]:
        with torch.no_grad():
            log_probs = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        places: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(tokens[1:]):
            ids = {token, *(log_probs[place].topk(count).indices.tolist() if count else [])}
            words = {each: self.tokenizer.decode([each]) for each in ids}
            given = {each: {"logprob": float(log_probs[place, each]), "decoded_token": words[each]} for each in ids}
            places.append({str(each): values for each, values in given.items()})
        return places


@contextmanager
def teaching(folder: str) -> Iterator[tuple[Teacher, str]]:
    """The teacher of a folder, and its base URL while the block runs."""
    teacher = Teacher(folder)
    with served(teacher.answer) as url:
        yield teacher, url
