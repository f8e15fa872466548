"""Episodes of agents: the user's programs call the model through a proxy, which runs on an engine's first rank.

The first rank sends new calls and ended episodes to the other ranks of the engine.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.agents.conversation import Call, Conversation
from rlhf_trainer.agents.openai_format import MODEL, REWARD, RefusalError, few_names, object_of, read_request, refusing
from rlhf_trainer.agents.proxy import HOST, PendingRequest, Proxy
from rlhf_trainer.chat import name_of
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response, response_seed
from rlhf_trainer.rewards.function import number_of
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind
from rlhf_trainer.telemetry import EPISODE, MODEL_CALL, TOOL, Span, recorder
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.episodes import Responder, ResponseEnded, require_some
from rlhf_trainer.workers.samples import EPISODES, RAW_PROMPTS, as_bytes, from_bytes

REQUESTS = 4
"""Most requests of an episode per turn of rollout.maxTurns, including refused ones."""
IDLE_SECONDS = 0.01
"""Seconds that an idle engine waits for a call before it looks for ended programs and new weights."""
COUNTED = ("refused", "dropped", "program_seconds", "waiting_seconds", "model_seconds")
"""Sums of an episode: requests that got an error; calls whose program did not wait for the answer; seconds without a
call under way; seconds of the answered calls before the engine had the call, and after it.
"""
EMPTY_RESPONSE = Response(tokens=(), log_probs=(), finished=False, versions=())
Row = tuple[Mapping[str, Any], Ids]
"""Row of the data for a program, and the token ids of its prompt."""


@dataclass(frozen=True, kw_only=True)
class EndedEpisode:
    """Episode that has ended, or a padding row, which is not played."""

    prompt: Ids
    """Token ids of the first call's prompt, or of the row's if there was no call."""
    response: Response = EMPTY_RESPONSE
    reward: float = 0.0
    failure: str = ""
    """Reason why nothing is learned from the episode, as the predicate of a sentence; empty if it did not fail."""
    failure_kind: Kind = "raised"
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts and seconds of the episode; empty for a padding row."""


@dataclass
class EngineCommands:
    """Changes that an engine's first rank has all ranks make before the next token."""

    begun: list[tuple[int, Ids, int, dict[str, Any]]] = field(default_factory=list)
    """Number, prompt, seed and options of each call that begins, as `GenerationEngine.begin` takes them."""
    aborted: list[int] = field(default_factory=list)
    ended: list[tuple[int, EndedEpisode]] = field(default_factory=list)
    """Row and result of each episode that has ended."""


@dataclass
class Program:
    """Running program of an episode."""

    row: int
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    under_way: set[int] = field(default_factory=set)
    """Numbers of the calls that the engine answers."""
    since: float = field(default_factory=time.monotonic)
    """Time from which no call was under way."""
    span: Span = field(default_factory=lambda: recorder.begin(EPISODE))
    tools: list[Span] = field(default_factory=list)
    """Spans of the tools that the last answer asked for; they end with the program's next request."""

    def end_tools(self) -> None:
        for each in self.tools:
            recorder.end(each)
        self.tools = []

    def end(self, found: Any, prompt: Ids, *, needs_reward: bool) -> EndedEpisode:
        """Return the ended episode; found: the program's result or failure; needs_reward: nobody else gives one."""
        talk, failure = self.conversation, self.failure
        response = talk.finish(finished=not talk.limit)
        if isinstance(found, AnswerFailure):
            is_excused = bool(talk.limit) and found.kind == "raised"  # most likely a refused request raised it
            failure = failure or ("" if is_excused else found.what)
        else:
            self.rewards += [] if found is None else [found]
            failure = failure or "gave no reward" * (needs_reward and not self.rewards)
        if len(self.rewards) > 1:
            failure = "gave two rewards"
        if not response.tokens and failure in ("", "gave no reward"):
            failure = f"ended without an answer of the model{': ' * bool(talk.limit)}{talk.limit}"
        counts = {"calls": talk.answered, "branches": talk.tree.branches, "encoded_again": talk.encoded_again}
        return EndedEpisode(
            prompt=talk.prompt or prompt,
            response=response,
            reward=sum(self.rewards) if response.tokens else 0.0,
            failure=failure,
            failure_kind=found.kind if isinstance(found, AnswerFailure) else "raised",
            facts={**counts, "prompt_tokens": len(talk.prompt), "ignored": sorted(talk.ignored), **self.facts},
        )


class ProgramRunner:
    """Runner of an engine's programs and of their proxy, on the engine's first rank."""

    def __init__(self, setting: WorkerSetting, encoder: TurnEncoder, environments: Environments) -> None:
        """Start the proxy."""
        data, rollout = setting.job.spec.data, setting.job.spec.rollout
        self._new_conversation = partial(
            Conversation,
            encoder,
            prompt_tokens=data.max_prompt_tokens,
            tokens=data.max_response_tokens,
            calls=rollout.max_turns,
        )
        sampling = {"temperature": rollout.temperature, **rollout.sampling_parameters(greedy=False)}
        self._requests: dict[str, Any] = {"model": setting.model.uri, "sampling": sampling}
        self._gives_reward = setting.job.spec.models.reward is None
        self._environments, self.proxy = environments, Proxy(requests=REQUESTS * rollout.max_turns)
        self._numbers = itertools.count()
        self._programs: dict[str, Program] = {}
        """Running programs by the key of their episode."""
        self._calls: dict[int, tuple[PendingRequest, Call, float, Span]] = {}
        """Number -> call under way, the time at which the engine got it, and its span."""
        self._rows: Mapping[int, Row] = {}
        self._waiting, self._commands = deque[int](), EngineCommands()
        self._seed: Callable[[int, int], int] = lambda *_: 0

    def play(self, rows: Mapping[int, Row], seed: Callable[[int, int], int]) -> None:
        """Set the rows to play, by number; `commands` starts their programs. seed: function of (row, call's number)."""
        self._rows, self._seed, self._waiting = rows, seed, deque(rows)

    def commands(self, *, is_idle: bool) -> EngineCommands:
        """Handle the programs' requests, return the commands for all ranks; is_idle: wait a little for a request."""
        while self._waiting and len(self._programs) < self._environments.most:
            self._start(self._waiting.popleft())
        ended = self._environments.answers(seconds=0)
        for pending, is_gone in self.proxy.received(seconds=IDLE_SECONDS if is_idle and not ended else 0):
            self._take(pending, is_gone=is_gone)  # a program sends requests before it ends
        keys = {program.row: key for key, program in self._programs.items()}
        for row, found in ended:
            self._end(keys[row], found)
        commands, self._commands = self._commands, EngineCommands()
        return commands

    def answer(self, number: int, response: Response) -> None:
        """Send a program the engine's response to its call."""
        if number not in self._calls:
            return
        pending, call, begun, _ = self._calls[number]
        program = self._programs[pending.key]
        program.facts["waiting_seconds"] += begun - pending.arrived
        program.facts["model_seconds"] += time.monotonic() - begun
        try:
            with refusing():
                answer = object_of(call.request, program.conversation.end(call, response))
            pending.reply(answer, streams=call.request.streams)
            asked = call.answer.get("tool_calls", ()) if call.answer else ()
            program.tools += [recorder.begin(TOOL, name_of(each), within=program.span) for each in asked]
        except RefusalError as refusal:
            self._refuse(program, pending, refusal)
        self._forget(number)

    def _start(self, row: int) -> None:
        key = self.proxy.open()
        self._programs[key] = Program(row, self._new_conversation())
        variables = {"OPENAI_BASE_URL": self.proxy.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
        variables |= {name: f"{os.environ.get(name, '')},{HOST}" for name in ("NO_PROXY", "no_proxy")}
        self._environments.begin(row, self._seed(row, 0))
        self._environments.ask(row, "run", {"row": self._rows[row][0], "variables": variables})

    def _take(self, pending: PendingRequest, *, is_gone: bool) -> None:
        if is_gone:
            for number in [number for number, (each, *_) in self._calls.items() if each is pending]:
                self._drop(number)
        elif program := self._programs.get(pending.key):  # the program of an ended episode is killed
            try:
                (self._reward if pending.path == REWARD else self._begin)(program, pending)
            except RefusalError as refusal:
                self._refuse(program, pending, refusal)

    def _begin(self, program: Program, pending: PendingRequest) -> None:
        request = read_request(pending.path, pending.body, **self._requests)
        call, number, now = program.conversation.begin(request), next(self._numbers), time.monotonic()
        if not program.under_way:
            self._environments.pause(program.row)
            program.facts["program_seconds"] += now - program.since
        program.under_way.add(number)
        program.end_tools()
        self._calls[number] = pending, call, now, recorder.begin(MODEL_CALL, within=program.span)
        options = {"max_tokens": call.max_tokens, "stop": request.stop}
        self._commands.begun.append((number, call.prompt, self._seed(program.row, call.number), options))

    def _reward(self, program: Program, pending: PendingRequest) -> None:
        if not self._gives_reward:  # else code that the model wrote could add to the reward, as it may know the key
            raise RefusalError(403, "models.reward gives the reward")
        try:
            reward = number_of(pending.body.get("reward"))
        except ValueError as error:
            program.failure = f"posted as reward {error}"
            raise RefusalError(400, f"the program {program.failure}") from error
        program.rewards += [] if reward is None else [reward]
        pending.reply({"reward": reward})

    def _refuse(self, program: Program, pending: PendingRequest, refusal: RefusalError) -> None:
        program.facts["refused"] += 1
        pending.reply(refusal.body, status=refusal.status)

    def _forget(self, number: int) -> None:
        """Remove an unfinished call; if the program has no other call, its own time starts again."""
        pending, _, _, span = self._calls.pop(number)
        recorder.end(span)
        program = self._programs[pending.key]
        program.under_way.discard(number)
        if not program.under_way:
            program.since = time.monotonic()
            self._environments.resume(program.row)

    def _drop(self, number: int) -> None:
        """Abort a call whose program no longer waits for the answer."""
        self._programs[self._calls[number][0].key].facts["dropped"] += 1
        self._forget(number)
        self._commands.aborted.append(number)

    def _end(self, key: str, found: Any) -> None:
        """End an episode with the calls, requests and spans that its program has left open."""
        program = self._programs[key]
        program.facts["refused"] += self.proxy.forget(key)
        for number in list(program.under_way):
            self._drop(number)
        program.facts["program_seconds"] += time.monotonic() - program.since
        self._environments.end(program.row)
        program.end_tools()
        recorder.end(program.span)
        del self._programs[key]
        episode = program.end(found, self._rows[program.row][1], needs_reward=self._gives_reward)
        self._commands.ended.append((program.row, episode))


class AgentResponder(Responder):
    """Generator of responses that are episodes of the job's agent."""

    def __init__(
        self,
        setting: WorkerSetting,
        tokenizer: PreTrainedTokenizerBase,
        engine: GenerationEngine,
        environments: Environments,
    ) -> None:
        super().__init__(setting, tokenizer, engine, environments)
        self._runner = ProgramRunner(setting, self._encoder, environments) if engine.is_first else None

    def close(self) -> None:
        """End the programs and the proxy of this rank."""
        super().close()
        if self._runner:
            self._runner.proxy.close()

    def turn_fields(self, fields: Fields) -> Fields:
        """Return turn_rewards [B, T], played [B] and `EPISODES` of the last episodes; a reward is on the last token."""
        rewards = torch.zeros_like(fields["response_mask"])
        for row, each in enumerate(self._episodes):
            rewards[row, len(each.prompt) + len(each.response.tokens) - 1] = each.reward
        self._measure([each for each in self._episodes if each.facts])
        played = torch.tensor([float(not each.failure) for each in self._episodes])
        return {"turn_rewards": rewards, "played": played, EPISODES: as_bytes([each.facts for each in self._episodes])}

    def _measure(self, started: Sequence[EndedEpisode]) -> None:
        recorder.add("episodes/failed", float(sum(bool(each.failure) for each in started)))
        recorder.mean("episodes/turns", sum(each.facts["calls"] for each in started), len(started))
        recorder.mean("episodes/branches", sum(each.facts["branches"] for each in started), len(started))
        masked = sum(each.response.written.count(False) for each in started)
        recorder.mean("episodes/masked_tokens", masked, len(started))
        recorder.add("episodes/refused", float(sum(each.facts["refused"] for each in started)))
        recorder.add("episodes/dropped", float(sum(each.facts["dropped"] for each in started)))
        recorder.add("episodes/encoded_again", float(sum(each.facts["encoded_again"] for each in started)))
        ignored = [each.facts["ignored"] for each in started if each.facts["ignored"]]
        recorder.add("episodes/ignored", len(ignored))
        if ignored:
            path, names = f"{self._job.name}: spec.rollout.agent", ", ".join(few_names(itertools.chain(*ignored)))
            words = f"{path}: calls asked for {names}, but the job's sampling and template hold"
            recorder.warn("episodes/ignored", words)

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: ResponseEnded
    ) -> tuple[list[Ids], list[Response]]:
        """Return the first calls' prompts and the episodes of this rank's rows; ended: called as each episode ends."""
        engine, runner, seed = self._engine, self._runner, self._job.spec.training.seed
        self._episodes = [EndedEpisode(prompt=prompt) for prompt in prompts]
        rows = {row: (_row_of(batch, row), prompts[row]) for row in range(len(prompts)) if batch["valid"][row] > 0}
        for row in range(len(prompts)):
            if row not in rows:
                ended(row, prompts[row], EMPTY_RESPONSE)
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


def _row_of(batch: Batch, row: int) -> dict[str, Any]:
    """Return a row of the data for its program: the prompt as written in the file, and the named columns."""
    fields = (name for name in (RAW_PROMPTS, "columns") if name in batch.fields)
    return {key: value for name in fields for key, value in from_bytes(batch[name][row]).items()}
