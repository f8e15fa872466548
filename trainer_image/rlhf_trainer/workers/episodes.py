"""Episodes: the model answers in turn with an environment, or in the calls of an agent's program (`agents`).

The tokens of a turn are kept as they are, and never decoded and encoded again. No turn waits for the turn of another
episode: the engine gets each answer of an environment at once, beside all other prompts that it works on. The first
rank of an engine plays its episodes, and sends new prompts and ended episodes to the other ranks.
"""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_trainer.agents.conversation import Tree
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.environments.of_job import subject_of
from rlhf_trainer.errors import DataError, EnvironmentProblem, UserCodeError
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response, response_seed
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind
from rlhf_trainer.telemetry import ENVIRONMENT, EPISODE, MODEL_CALL, TOOL, Span, recorder
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import from_bytes

MAX_TOKEN_CHARACTERS = 16
"""Most characters that a token is assumed to have; an observation too long by this count is not encoded."""
MAX_TOOLS = 100
"""Most tools of one request that get a span."""
IDLE_SECONDS = 0.01
"""Seconds that an idle engine waits for an environment or a program before its next step."""
ResponseEnded = Callable[[int, Ids, Response], None]
"""Callback for each response that has ended: it gets the row's index on this rank, its prompt and the response."""
EMPTY_RESPONSE = Response(tokens=(), log_probs=(), finished=False, versions=())
Row = tuple[Mapping[str, Any], Ids]
"""Row of the data for an environment or a program, and the token ids of its prompt."""


@dataclass(frozen=True, kw_only=True)
class EndedEpisode:
    """Episode that has ended, or a padding row, which is not played."""

    prompt: Ids
    """Token ids before the model's first answer; without an answer, those of the prompt."""
    response: Response = EMPTY_RESPONSE
    """All tokens after the prompt."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Index of a token in the response -> its reward; other tokens have none."""
    failure: str = ""
    """Reason why nothing is learned from the episode, as the predicate of a sentence; empty if it did not fail."""
    failure_kind: Kind = "raised"
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Number of `calls` of the model, and for a program further counts and seconds; empty for a padding row."""


@dataclass
class EngineCommands:
    """Commands of an engine's first rank, which all its ranks carry out before the next token."""

    begun: list[tuple[int, Ids, int, dict[str, Any]]] = field(default_factory=list)
    """Number, prompt, seed and options of each call that begins, as `GenerationEngine.begin` takes them."""
    aborted: list[int] = field(default_factory=list)
    ended: list[tuple[int, EndedEpisode]] = field(default_factory=list)
    """Row and result of each episode that has ended."""


class Runner(ABC):
    """Runner of an engine's episodes on the engine's first rank."""

    def __init__(self, setting: WorkerSetting, encoder: TurnEncoder, environments: Environments) -> None:
        self._data, self._rollout = setting.job.spec.data, setting.job.spec.rollout
        self._encoder, self._environments = encoder, environments
        self._rows: Mapping[int, Row] = {}
        self._seed: Callable[[int, int], int] = lambda *_: 0
        self._waiting, self._commands = deque[int](), EngineCommands()
        self._playing = set[int]()
        """Rows of the running episodes."""

    def play(self, rows: Mapping[int, Row], seed: Callable[[int, int], int]) -> None:
        """Set the rows to play, by number; `commands` starts their episodes. seed: function of (row, call's number)."""
        self._rows, self._seed, self._waiting = rows, seed, deque(rows)

    def commands(self, *, is_idle: bool) -> EngineCommands:
        """Handle received answers and requests; return the commands for all ranks. is_idle: wait up to IDLE_SECONDS."""
        while self._waiting and len(self._playing) < self._environments.most:
            self._playing.add(row := self._waiting.popleft())
            self._begin(row)
        self._receive(IDLE_SECONDS if is_idle and not self._commands.ended else 0.0)
        commands, self._commands = self._commands, EngineCommands()
        return commands

    def _end(self, row: int, episode: EndedEpisode) -> None:
        self._playing.remove(row)
        self._environments.end(row)
        self._commands.ended.append((row, episode))

    @abstractmethod
    def answer(self, number: int, response: Response) -> None:
        """Handle the engine's response to a call."""

    @abstractmethod
    def _begin(self, row: int) -> None:
        """Begin the episode of a row."""

    @abstractmethod
    def _receive(self, seconds: float) -> None:
        """Handle the messages of environments or programs; seconds: longest wait for the first message."""

    def close(self) -> None:
        """End the environments."""
        self._environments.close()


@dataclass
class Episode:
    """Running episode of one row: after a prompt, tokens of the model and of its environment in turn."""

    prompt: Ids
    tree: Tree = field(default_factory=Tree)
    """Tokens after the prompt."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Index of a turn's last token after the prompt -> the environment's reward for the turn."""
    experts: Tensor | None = None
    """Experts of all tokens but the last, uint8 [tokens, E], from the forward pass that first read the token."""
    turns: int = 0
    is_full: bool = False
    """Whether the token limit leaves no room for another answer of the model."""
    finished: bool = False
    """Whether the environment ended the episode, so that no limit cut it."""
    failure: AnswerFailure | None = None
    span: Span = field(default_factory=lambda: recorder.begin(EPISODE))
    request: Span | None = None
    """Span of the last request to the environment or to the model."""

    def begin_request(self, phase: str, name: str = "") -> None:
        self.request = recorder.begin(phase, name, within=self.span)

    def add(self, tokens: Sequence[int], answer: Response | None = None) -> None:
        """Append the tokens of an answer of the model or, without `answer`, of an observation of the environment."""
        self.tree.grow(len(self.tree.tokens) - 1, tokens, answer)

    def end(self) -> EndedEpisode:
        recorder.end(self.span)
        tree, failure = self.tree, self.failure
        response = Response(
            tokens=tree.tokens,
            log_probs=tree.log_probs,
            finished=self.finished,
            versions=tree.versions,
            experts=self.experts,
            written=tree.written,
        )
        return EndedEpisode(
            prompt=self.prompt,
            response=response,
            rewards=self.rewards,
            failure=failure.what if failure else "",
            failure_kind=failure.kind if failure else "raised",
            facts={"calls": self.turns},
        )


class EpisodeRunner(Runner):
    """Runner of episodes with the job's environment; an episode goes on as soon as its environment has answered."""

    def __init__(self, setting: WorkerSetting, encoder: TurnEncoder, environments: Environments) -> None:
        super().__init__(setting, encoder, environments)
        self._episodes: dict[int, Episode] = {}
        """Running episodes by row, which is also the number of their calls of the model."""

    def _begin(self, row: int) -> None:
        given, prompt = self._rows[row]
        self._episodes[row] = episode = Episode(prompt)
        self._environments.begin(row, self._seed(row, 0))
        episode.begin_request(ENVIRONMENT, "reset")
        self._environments.ask(row, "reset", given)

    def _receive(self, seconds: float) -> None:
        for row, answer in self._environments.answers(seconds=seconds):
            self._take(row, answer)

    def answer(self, number: int, response: Response) -> None:
        """Add the model's answer, and pass it to the environment; an answer cut by the limit ends the episode."""
        episode = self._episodes[number]
        self._end_request(episode)
        episode.add(response.tokens, response)
        episode.turns += 1
        known, new = episode.experts, response.experts
        episode.experts = new if known is None or new is None else torch.cat([known, new[len(known) :]])
        if response.finished:
            episode.begin_request(ENVIRONMENT, "step")
            self._environments.ask(number, "step", self._encoder.answer(response.tokens))
        else:
            self._end(number, self._episodes.pop(number).end())

    def _end_request(self, episode: Episode, said: Any = None) -> None:
        """End the span of the answered request, and record a span for each tool in the messages `said`.

        A tool's span is as long as the request's: only the time of all tools together is known.
        """
        assert episode.request, "a request was begun"
        asked = recorder.end(episode.request)
        for each in said[:MAX_TOOLS] if isinstance(said, list) else ():
            if each.get("role") == "tool":
                called = recorder.begin(TOOL, str(each.get("name") or "no tool"), within=asked, start=asked.start)
                recorder.end(called, asked.end)

    def _take(self, row: int, answer: Any) -> None:
        """Handle the environment's answer to `reset` or `step`: end the episode, or begin the model's next turn."""
        episode = self._episodes[row]
        self._end_request(episode, answer[0] if episode.turns and isinstance(answer, list) else None)
        try:
            if isinstance(answer, AnswerFailure):
                episode.failure = answer
            elif not episode.turns:
                self._reset(episode, answer)
            else:
                self._observe(episode, *answer)
        except DataError as error:
            episode.failure = AnswerFailure(str(error))
        if episode.failure or episode.finished or episode.is_full or episode.turns == self._rollout.max_turns:
            self._end(row, self._episodes.pop(row).end())
        else:
            episode.begin_request(MODEL_CALL)
            prompt, options = [*episode.prompt, *episode.tree.tokens], {"max_tokens": self._room(episode)}
            self._commands.begun.append((row, prompt, self._seed(row, episode.turns), options))

    def _reset(self, episode: Episode, said: Any) -> None:
        """Replace the prompt by the environment's first observation, if there is one."""
        if said is None:
            return
        most = self._data.max_prompt_tokens
        if (size := len(json.dumps(said))) > MAX_TOKEN_CHARACTERS * most:
            raise DataError(f"reset gave {size} characters, too many for data.maxPromptTokens")
        episode.prompt = self._encoder.prompt(said)
        if not episode.prompt:
            raise DataError("reset gave what has no tokens")
        if (count := len(episode.prompt)) > most:
            raise DataError(f"reset gave {count} tokens, more than data.maxPromptTokens ({most})")

    def _observe(self, episode: Episode, said: Any, reward: float, is_over: bool) -> None:
        """Reward the last turn; add the observation if the episode goes on and there is room for an answer."""
        episode.rewards[len(episode.tree.tokens) - 1] = reward
        episode.finished = is_over
        if is_over or episode.turns == self._rollout.max_turns:
            return
        is_long = len(json.dumps(said)) > MAX_TOKEN_CHARACTERS * self._data.max_response_tokens
        ids = [] if is_long else self._encoder.observation(said)
        episode.is_full = is_long or len(ids) >= self._room(episode)
        if not episode.is_full:
            episode.add(ids)

    def _room(self, episode: Episode) -> int:
        """Return how many tokens an episode may still get."""
        return self._data.max_response_tokens - len(episode.tree.tokens)


class EpisodeResponder:
    """Generator of responses that are episodes; this class plays them with the job's environment."""

    runner: ClassVar[type[Runner]] = EpisodeRunner

    def __init__(
        self,
        setting: WorkerSetting,
        tokenizer: PreTrainedTokenizerBase,
        engine: GenerationEngine,
        environments: Environments,
    ) -> None:
        """environments: already started; only those of an engine's first rank are used, for all ranks of the engine."""
        self._job, self._tokenizer, self._engine = setting.job, tokenizer, engine
        template = "Never" if setting.job.spec.rollout.agent else setting.job.spec.data.chat_template
        encoder = TurnEncoder(tokenizer, chat_template=template, ends=setting.end_tokens(tokenizer))
        self._episodes: list[EndedEpisode] = []
        self._runner: Runner | None = None
        if engine.is_first:
            environments.ready()
            self._runner = self.runner(setting, encoder, environments)
        else:
            environments.close()

    def close(self) -> None:
        """End the processes of the episodes; without effect on ranks other than the engine's first."""
        if self._runner:
            self._runner.close()

    def turn_fields(self, fields: Fields) -> Fields:
        """Return turn_rewards [B, T] and played [B] of the last episodes; see `GeneratingActor.generate_sequences`."""
        rewards = torch.zeros_like(fields["response_mask"])
        for row, each in enumerate(self._episodes):
            for place, reward in each.rewards.items():
                rewards[row, len(each.prompt) + place] = reward
        started = [each for each in self._episodes if each.facts]
        recorder.add("episodes/failed", float(sum(bool(each.failure) for each in started)))
        recorder.mean("episodes/turns", sum(each.facts["calls"] for each in started), len(started))
        played = torch.tensor([float(not each.failure) for each in self._episodes])
        return {"turn_rewards": rewards, "played": played}

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: ResponseEnded
    ) -> tuple[list[Ids], list[Response]]:
        """Return prompts and episodes of this rank's rows; ended: called as each episode ends.

        An environment or a program may begin an episode with another prompt than the row's.
        """
        engine, runner, seed = self._engine, self._runner, self._job.spec.training.seed
        self._episodes = [EndedEpisode(prompt=prompt) for prompt in prompts]
        rows = dict[int, Row]()
        for row, prompt in enumerate(prompts):
            if batch["valid"][row] > 0:
                rows[row] = self._row(batch, row, prompt), prompt
            else:
                ended(row, prompt, EMPTY_RESPONSE)
        if runner:
            runner.play(rows, lambda row, number: response_seed(seed, batch.step, batch.start + row, number))
        left = len(rows)
        while left:
            commands = engine.agreed(runner.commands(is_idle=not engine.is_busy) if runner else None)
            for number, prompt, its_seed, options in commands.begun:
                engine.begin(number, prompt, its_seed, greedy=greedy, **options)
            for number in commands.aborted:
                engine.abort(number)
            for row, played in commands.ended:
                self._episodes[row] = played
                ended(row, played.prompt, played.response)
            left -= len(commands.ended)
            for number, response in engine.step():
                if runner:
                    runner.answer(number, response)
        require_some(self._job, [(each.failure, each.failure_kind) for each in self._episodes if each.facts])
        return [each.prompt for each in self._episodes], [each.response for each in self._episodes]

    def _row(self, batch: Batch, row: int, prompt: Ids) -> dict[str, Any]:
        """Return a row of the data for its episode: the prompt as text, and the named columns."""
        columns = from_bytes(batch["columns"][row]) if "columns" in batch.fields else {}
        return {"prompt": self._tokenizer.decode(prompt, skip_special_tokens=True), **columns}


def require_some(job: Job, reasons: Sequence[tuple[str, Kind]]) -> None:
    """Warn of failed episodes; UserCodeError if the rank had several episodes and all failed.

    EnvironmentProblem if each lost its sandbox or found none: another attempt may succeed. reasons: for each played
    episode the predicate of a sentence, empty if the episode did not fail, and the kind of failure.
    """
    failures = [each for each, _ in reasons if each]
    if not failures:
        return
    subject, total = subject_of(job), len(reasons)
    if total == len(failures) > 1:
        error = EnvironmentProblem if all(kind in ("lost", "no sandbox") for _, kind in reasons) else UserCodeError
        raise error(f"{subject} failed in all {total} episodes of a rank; the first: {failures[0]}")
    some = f"{len(failures)} of {total} episodes"
    recorder.warn("episodes/failed", f"{subject} failed in {some}; the first: {failures[0]}")
