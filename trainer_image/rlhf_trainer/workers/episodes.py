"""Episodes of several turns: the model answers, and an environment returns an observation and a reward.

The tokens of a turn are kept as they are, and never decoded and encoded again. No turn waits for the turn of another
episode: the engine gets each answer of an environment at once, beside all other prompts that it works on.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import MAX_EPISODES, Environments
from rlhf_trainer.environments.of_job import subject_of
from rlhf_trainer.errors import DataError, EnvironmentProblem, UserCodeError
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response, response_seed
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind
from rlhf_trainer.telemetry import ENVIRONMENT, EPISODE, MODEL_CALL, TOOL, Span, recorder
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import from_bytes

MAX_TOKEN_CHARACTERS = 16
"""Mean characters of a token above which an observation cannot have room, so that it is not encoded."""
MAX_TOOLS = 100
"""Most tools of one request that get a span."""
ResponseEnded = Callable[[int, Ids, Response], None]
"""Callback for each response that has ended: it gets the row's index on this rank, its prompt and the response."""


@dataclass
class Episode:
    """Episode of one row of the batch: after a prompt, tokens of the model and of its environment in turn."""

    prompt: Ids
    seed: Callable[[int], int]
    """Function of a turn's number (from 0) that gives the turn's seed for generation."""
    row: Mapping[str, Any] | None
    """Row of the data that `reset` of the environment gets; None: a padding row, which is not played."""
    tokens: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token after the prompt; 0 on the environment's tokens."""
    written: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Policy version of the weights that wrote each token; 0 on the environment's tokens."""
    rewards: list[float] = field(default_factory=list)
    """Environment's reward at each token: that of a turn on the turn's last token, 0 on all other tokens."""
    experts: Tensor | None = None
    """Experts of all tokens but the last, uint8 [tokens, E], each of the pass in which it was first read."""
    turns: int = 0
    is_full: bool = False
    """Whether the token limit leaves no room for another answer of the model."""
    finished: bool = False
    """Whether the environment ended the episode, so that no limit cut it."""
    failure: str = ""
    """Reason why the environment failed in this episode, as the predicate of a sentence; empty if it did not."""
    failure_kind: Kind = "raised"

    def add(
        self, tokens: Sequence[int], log_probs: Sequence[float], versions: Sequence[int], *, is_written: bool
    ) -> None:
        """Append the tokens of an answer of the model (is_written) or of an observation of the environment."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += versions
        self.written += [is_written] * len(tokens)
        self.rewards += [0.0] * len(tokens)

    @property
    def response(self) -> Response:
        """All tokens after the prompt, the model's and the environment's, as one response."""
        return Response(
            tokens=self.tokens,
            log_probs=self.log_probs,
            finished=self.finished,
            versions=self.versions,
            experts=self.experts,
            written=self.written,
        )


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of the length of an episode."""

    prompt_tokens: int
    tokens: int
    """Most tokens of an episode after the first prompt, the model's and the environment's together."""
    turns: int
    episodes: int = MAX_EPISODES
    greedy: bool = False


class Play:
    """Player of many episodes at a time, each of which goes on as soon as its environment has answered."""

    def __init__(
        self,
        engine: GenerationEngine,
        environments: Environments | None,
        encoder: TurnEncoder,
        *,
        limits: EpisodeLimits,
        ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        """environments: None except on the engine's first rank, which passes their answers to the other ranks.

        ended: called with the index of each episode as the episode ends.
        """
        self._engine, self._environments, self._encoder, self._limits = engine, environments, encoder, limits
        self._ended = ended
        self._episodes: Sequence[Episode] = ()
        self._playing: set[int] = set()
        self._times: dict[int, tuple[Span, Span]] = {}
        """Number of a running episode -> (span of the episode, span of its last request); on the first rank only."""

    def play(self, episodes: Sequence[Episode]) -> None:
        """Play all the episodes to their end."""
        self._episodes = episodes
        waiting = deque(number for number, each in enumerate(episodes) if each.row is not None)
        while waiting or self._playing:
            while waiting and len(self._playing) < self._limits.episodes:
                self._begin(waiting.popleft())
            seconds = 0.0 if self._engine.is_busy else 0.05  # an idle engine can look for new weights
            found = self._environments.answers(seconds=seconds) if self._environments else []
            for number, answer in self._engine.agreed(found):
                self._take(number, answer)
            for number, response in self._engine.step():
                self._turn(number, response)

    def _begin(self, number: int) -> None:
        self._playing.add(number)
        if self._environments:
            whole = recorder.begin(EPISODE)
            self._times[number] = whole, whole
            self._environments.begin(number, self._episodes[number].seed(0))
            self._time(number, ENVIRONMENT, "reset")
            self._environments.ask(number, "reset", self._episodes[number].row)

    def _time(self, number: int, phase: str, name: str = "") -> None:
        """Begin the span of an episode's request to its environment or to the model."""
        if self._environments:
            whole, _ = self._times[number]
            self._times[number] = whole, recorder.begin(phase, name, within=whole)

    def _answered(self, number: int, said: Any = None) -> None:
        """End the span of the answered request, and record a span for each tool in the messages `said`.

        A tool's span is as long as the request's: only the time of all tools together is known.
        """
        if not self._environments:
            return
        asked = recorder.end(self._times[number][1])
        for each in said[:MAX_TOOLS] if isinstance(said, list) else ():
            if each.get("role") == "tool":
                called = recorder.begin(TOOL, str(each.get("name") or "no tool"), within=asked, start=asked.start)
                recorder.end(called, asked.end)

    def _turn(self, number: int, response: Response) -> None:
        """Add the model's answer, and pass it to the environment; an answer cut by the limit ends the episode."""
        episode = self._episodes[number]
        self._answered(number)
        episode.add(response.tokens, response.log_probs, response.versions, is_written=True)
        episode.turns += 1
        known, new = episode.experts, response.experts
        episode.experts = new if known is None or new is None else torch.cat([known, new[len(known) :]])
        if not response.finished:
            self._end(number)
        elif self._environments:
            self._time(number, ENVIRONMENT, "step")
            self._environments.ask(number, "step", self._encoder.answer(response.tokens))

    def _take(self, number: int, answer: Any) -> None:
        """Handle the environment's answer to `reset` or `step`: end the episode, or begin the model's next turn."""
        episode = self._episodes[number]
        self._answered(number, answer[0] if episode.turns and isinstance(answer, list) else None)
        try:
            if isinstance(answer, AnswerFailure):
                episode.failure, episode.failure_kind = answer.what, answer.kind
            elif not episode.turns:
                self._reset(episode, answer)
            else:
                self._observe(episode, *answer)
        except DataError as error:
            episode.failure = str(error)
        if episode.failure or episode.finished or episode.is_full or episode.turns == self._limits.turns:
            self._end(number)
        else:
            self._time(number, MODEL_CALL)
            self._engine.begin(
                number,
                [*episode.prompt, *episode.tokens],
                episode.seed(episode.turns),
                max_tokens=self._room(episode),
                greedy=self._limits.greedy,
            )

    def _reset(self, episode: Episode, said: Any) -> None:
        """Replace the prompt by the environment's first observation, if there is one."""
        if said is None:
            return
        if (size := len(json.dumps(said))) > MAX_TOKEN_CHARACTERS * self._limits.prompt_tokens:
            raise DataError(f"reset gave {size} characters, too many for data.maxPromptTokens")
        episode.prompt = self._encoder.prompt(said)
        if not episode.prompt:
            raise DataError("reset gave what has no tokens")
        if len(episode.prompt) > self._limits.prompt_tokens:
            count = len(episode.prompt)
            raise DataError(f"reset gave {count} tokens, more than data.maxPromptTokens ({self._limits.prompt_tokens})")

    def _observe(self, episode: Episode, said: Any, reward: float, is_over: bool) -> None:
        """Reward the last turn; add the observation if the episode goes on and there is room for an answer."""
        episode.rewards[-1] += reward
        episode.finished = is_over
        if is_over or episode.turns == self._limits.turns:
            return
        is_long = len(json.dumps(said)) > MAX_TOKEN_CHARACTERS * self._limits.tokens
        ids = [] if is_long else self._encoder.observation(said)
        episode.is_full = is_long or len(ids) >= self._room(episode)
        if not episode.is_full:
            episode.add(ids, [0.0] * len(ids), [0] * len(ids), is_written=False)

    def _room(self, episode: Episode) -> int:
        """Return how many tokens an episode may still get."""
        return self._limits.tokens - len(episode.tokens)

    def _end(self, number: int) -> None:
        self._playing.remove(number)
        if self._environments:
            self._environments.end(number)
            recorder.end(self._times.pop(number)[0])
        self._ended(number)


class Responder:
    """Base of generators of responses that are episodes."""

    def __init__(
        self,
        setting: WorkerSetting,
        tokenizer: PreTrainedTokenizerBase,
        engine: GenerationEngine,
        environments: Environments,
    ) -> None:
        """environments: started; only those on an engine's first rank are used, and serve all ranks of the engine."""
        self._job, self._tokenizer, self._engine, self._environments = setting.job, tokenizer, engine, environments
        template = "Never" if setting.job.spec.rollout.agent else setting.job.spec.data.chat_template
        self._encoder = TurnEncoder(tokenizer, chat_template=template, ends=setting.end_tokens(tokenizer))
        self._episodes: list[Any] = []
        if engine.is_first:
            environments.ready()
        else:
            environments.close()

    def close(self) -> None:
        """End the environments of this rank."""
        self._environments.close()


class EpisodeResponder(Responder):
    """Generator of responses that are episodes with the job's environment."""

    def turn_fields(self, fields: Fields) -> Fields:
        """Return turn_rewards [B, T] and played [B] of the last episodes; see `GeneratingActor.generate_sequences`."""
        rewards = torch.zeros_like(fields["response_mask"])
        for row, episode in enumerate(self._episodes):
            start = len(episode.prompt)
            rewards[row, start : start + len(episode.rewards)] = torch.tensor(episode.rewards)
        played = torch.tensor([float(not episode.failure) for episode in self._episodes])
        started = [each for each in self._episodes if each.row is not None]
        recorder.add("episodes/failed", float(sum(bool(each.failure) for each in started)))
        recorder.mean("episodes/turns", float(sum(each.turns for each in started)), float(len(started)))
        return {"turn_rewards": rewards, "played": played}

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: ResponseEnded
    ) -> tuple[list[Ids], list[Response]]:
        """Return the prompts of this rank's rows, of which the environment may have changed some, and the episodes."""
        data = self._job.spec.data
        limits = EpisodeLimits(
            prompt_tokens=data.max_prompt_tokens,
            tokens=data.max_response_tokens,
            turns=self._job.spec.rollout.max_turns,
            episodes=self._environments.most,
            greedy=greedy,
        )
        episodes = self._episodes = [self._episode(batch, row, prompt) for row, prompt in enumerate(prompts)]

        def report_end(row: int) -> None:
            ended(row, episodes[row].prompt, episodes[row].response)

        for row, each in enumerate(episodes):
            if each.row is None:
                report_end(row)
        environments = self._environments if self._engine.is_first else None
        Play(self._engine, environments, self._encoder, limits=limits, ended=report_end).play(episodes)
        require_some(self._job, [(each.failure, each.failure_kind) for each in episodes if each.row is not None])
        return [each.prompt for each in episodes], [each.response for each in episodes]

    def _episode(self, batch: Batch, row: int, prompt: Ids) -> Episode:
        seed, place = self._job.spec.training.seed, batch.start + row
        start = None
        if batch["valid"][row] > 0:
            columns = from_bytes(batch["columns"][row]) if "columns" in batch.fields else {}
            start = {"prompt": self._tokenizer.decode(prompt, skip_special_tokens=True), **columns}
        return Episode(prompt, lambda turn: response_seed(seed, batch.step, place, turn), start)


def require_some(job: Job, reasons: Sequence[tuple[str, Kind]]) -> None:
    """Warn of episodes that failed; UserCodeError if all of several episodes of the rank did.

    EnvironmentProblem if all lost their sandbox or found none: another attempt may find some. reasons: for each played
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
