"""An agent's job on an engine that writes what a script says, for tests."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.run.worker_specs import setting_of
from rlhf_trainer.telemetry import Report, recorder
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.agents import AgentResponder
from rlhf_trainer.workers.episodes import EndedEpisode
from rlhf_trainer.workers.rollout import laid_out, stack_parents
from rlhf_trainer.workers.samples import EPISODES, as_bytes
from tests.trainer.environments.scripted import END, ScriptedEngine
from tests.trainer.jobs import job
from tests.trainer.tiny import EXAMPLE_MODEL

HERE = "tests.trainer.agents.user_agents"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"one": 2}}</tool_call>'
SLOW_SECONDS = 3.0
"""Time in which the engine answers a message that holds `slow`. The first that holds `once` is never answered."""
PROMPT = [10, 11, 12]


class Engine(ScriptedEngine):
    """An answer is up to five tokens drawn from its seed, and the end; some prompts get what tests need."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.version = 3
        self._tokenizer, self._until, self._seen = tokenizer, dict[int, float](), set[str]()
        self.wrote: list[tuple[list[int], Response]] = []
        """(prompt, response) of each call that was answered."""
        self.aborted: list[int] = []

    def begin(  # type: ignore[override]
        self,
        number: int,
        prompt: Sequence[int],
        seed: int,
        *,
        max_tokens: int,
        greedy: bool,  # noqa: ARG002 it draws all the same
        stop: Sequence[str] = (),
    ) -> None:
        text = str(self._tokenizer.decode(list(prompt)))
        drawn = random.Random(seed)
        tokens = [*(drawn.randrange(3, 512) for _ in range(drawn.randrange(3, 6))), END]
        if "[add]" in text and "<tool>" not in text:
            tokens = [*self._ids(CALL), END]
        for each in stop:
            tokens = self._ids(f"so {each}")
        is_first = "once" in text and text not in self._seen
        self._seen.add(text)
        self.asked.append((number, list(prompt), seed, max_tokens))
        self._until[number] = math.inf if is_first else time.monotonic() + SLOW_SECONDS * ("slow" in text)
        self._under_way[number] = (tokens[:max_tokens], 0)

    def step(self) -> list[tuple[int, Response]]:
        found = []
        for number, (tokens, _) in list(self._under_way.items()):
            if time.monotonic() >= self._until[number]:
                del self._under_way[number]
                log_probs = [-random.random() - 0.01 for _ in tokens]
                finished, versions = tokens[-1] == END, [self.version] * len(tokens)
                response = Response(tokens=tokens, log_probs=log_probs, finished=finished, versions=versions)
                self.wrote.append((next(prompt for each, prompt, *_ in self.asked if each == number), response))
                found.append((number, response))
        return found

    def abort(self, number: int) -> None:
        self.aborted.append(number)
        self._under_way.pop(number, None)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def answers_on_branches(episodes: Iterable[EndedEpisode], wrote: Sequence[tuple[Sequence[int], Response]]) -> int:
    """The number of answers in the episodes, each of which must lie on a branch as (prompt, response) of the engine."""
    known = {(*prompt, *response.tokens): response for prompt, response in wrote}
    found = 0
    for played in episodes:
        tokens, response, first = [*played.prompt, *played.response.tokens], played.response, len(played.prompt)
        parents = [*range(-1, first - 1), *response.parents]
        written = [*[False] * first, *response.written]
        goes_on = {parents[each] for each in range(len(tokens)) if written[each]}
        for end in (each for each in range(len(tokens)) if written[each] and each not in goes_on):
            engines = known[tuple(tokens[each] for each in branch_of(parents, end))]
            answer = slice(end + 1 - len(engines.tokens) - first, end + 1 - first)
            assert list(response.log_probs[answer]) == list(engines.log_probs)
            assert list(response.versions[answer]) == list(engines.versions)
            assert all(response.written[answer])
            found += 1
    return found


def branch_of(parents: Sequence[int], place: int) -> list[int]:
    """The indices of a branch's tokens up to a place."""
    found = []
    while place >= 0:
        found.append(place)
        place = parents[place]
    return found[::-1]


class Troupe:
    """An agent's job, played on a scripted engine."""

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float = 120.0,
        sandboxes: Sandboxes | None = None,
        reward: Any = None,
        **agent: Any,
    ) -> None:
        (folder / "template.jinja").write_text(TEMPLATE)
        data = {"uri": "package://rlhf_examples/helpful/train.jsonl"}
        spec = {
            "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
            "models": {
                "actor": {"uri": f"file://{EXAMPLE_MODEL}", "optimizer": {"learningRate": 1.0}},
                "reward": reward,
            },
            "data": {
                "train": data,
                "maxPromptTokens": 40,
                "maxResponseTokens": 250,
                "chatTemplate": f"file://{folder}/template.jinja",
            },
            "rollout": {
                "samplesPerPrompt": 2,
                "agent": agent or {"entrypoint": f"{HERE}:run"},
                "maxTurns": 6,
                "stepTimeoutSeconds": seconds,
            },
            "training": {"totalSteps": 1, "promptBatchSize": 1},
        }
        self.job = job(folder, "talk", spec)
        setting = setting_of(self.job, "actor", {"actor": str(EXAMPLE_MODEL)})
        self.tokenizer = setting.tokenizer()
        self.engine = Engine(self.tokenizer)
        engine: Any = self.engine
        self.responder = AgentResponder(setting, self.tokenizer, engine, environments_of(self.job, sandboxes))
        self.batch = Batch(step=1, start=0, size=0)
        self.report = Report()

    def play(self, *rows: dict[str, Any] | None) -> list[EndedEpisode]:
        """The episodes of rows; None is padding."""
        self.engine.wrote.clear()
        self.engine.asked.clear()
        self.engine.aborted.clear()
        valid = torch.tensor([float(row is not None) for row in rows])
        raw, columns = as_bytes([{"prompt": "as in the file"} for _ in rows]), as_bytes([row or {} for row in rows])
        fields = {"valid": valid, "raw_prompts": raw, "columns": columns}
        batch = Batch(step=1, start=0, size=len(rows), fields=fields)
        ended: list[int] = []
        recorder.drain()
        prompts, responses = self.responder.respond(
            batch, [PROMPT] * len(rows), greedy=False, ended=lambda row, *_: ended.append(row)
        )
        assert sorted(ended) == list(range(len(rows))), "each is told once"
        width = max(len(prompt) + len(each.tokens) for prompt, each in zip(prompts, responses, strict=True)) + 2
        laid = laid_out(prompts, responses, width=width, pad_token=0)
        laid["parents"] = stack_parents(prompts, responses, width=width)
        laid["response_mask"] *= valid[:, None]
        self.batch = batch.with_fields({**laid, **self.responder.turn_fields(laid)})
        assert self.batch[EPISODES].dtype == torch.uint8
        self.report = recorder.drain()
        return self.responder._episodes

    def close(self) -> None:
        self.responder.close()
