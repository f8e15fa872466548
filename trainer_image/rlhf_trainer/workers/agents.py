"""Episodes of agents: the user's programs call the model through a proxy, which runs on an engine's first rank."""

import itertools
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_trainer.agents.conversation import Call, Conversation
from rlhf_trainer.agents.openai_format import MODEL, REWARD, RefusalError, few_names, read_request, refusing
from rlhf_trainer.agents.proxy import HOST, PendingRequest, Proxy
from rlhf_trainer.chat import name_of
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.rewards.function import number_of
from rlhf_trainer.rewards.supervision import AnswerFailure
from rlhf_trainer.telemetry import EPISODE, MODEL_CALL, TOOL, Span, recorder
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.episodes import EndedEpisode, EpisodeResponder, Runner
from rlhf_trainer.workers.samples import EPISODES, RAW_PROMPTS, as_bytes, from_bytes

REQUESTS = 4
"""Most requests of an episode per turn of rollout.maxTurns, including refused ones."""
COUNTED = ("refused", "dropped", "program_seconds", "waiting_seconds", "model_seconds")
"""Facts summed over an episode: requests that got an error; calls that the program dropped before the answer; seconds
in which no call ran; seconds that answered calls waited for the engine; seconds in which the engine answered them.
"""


@dataclass
class Program:
    """Running program of an episode."""

    row: int
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    under_way: set[int] = field(default_factory=set)
    """Numbers of the calls that wait for the engine's response."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time since which no call of the program is under way; at first the program's begin."""
    span: Span = field(default_factory=lambda: recorder.begin(EPISODE))
    tools: list[Span] = field(default_factory=list)
    """Spans of the tools that the last answer asked for; they end with the program's next request."""

    def end_tools(self) -> None:
        for each in self.tools:
            recorder.end(each)
        self.tools = []

    def end(self, found: Any, prompt: Ids, *, needs_reward: bool) -> EndedEpisode:
        """Return the ended episode; found: the program's result or failure; needs_reward: no reward is a failure."""
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
            rewards={len(response.tokens) - 1: sum(self.rewards)} if response.tokens else {},
            failure=failure,
            failure_kind=found.kind if isinstance(found, AnswerFailure) else "raised",
            facts={**counts, "prompt_tokens": len(talk.prompt), "ignored": sorted(talk.ignored), **self.facts},
        )


class ProgramRunner(Runner):
    """Runner of an engine's programs and of their proxy."""

    def __init__(self, setting: WorkerSetting, encoder: TurnEncoder, environments: Environments) -> None:
        """Start the proxy."""
        super().__init__(setting, encoder, environments)
        self._new_conversation = partial(
            Conversation,
            encoder,
            prompt_tokens=self._data.max_prompt_tokens,
            tokens=self._data.max_response_tokens,
            calls=self._rollout.max_turns,
        )
        sampling = {"temperature": self._rollout.temperature, **self._rollout.sampling_parameters(greedy=False)}
        self._requests: dict[str, Any] = {"model": setting.model.uri, "sampling": sampling}
        self._gives_reward = setting.job.spec.models.reward is None
        self._proxy = Proxy(requests=REQUESTS * self._rollout.max_turns)
        self._numbers = itertools.count()
        self._programs: dict[str, Program] = {}
        """Running programs by the key of their episode."""
        self._calls: dict[int, tuple[PendingRequest, Call, float, Span]] = {}
        """Number of a running call -> (program's request, call, time at which the engine got the call, span)."""

    def close(self) -> None:
        """End the programs and the proxy."""
        super().close()
        self._proxy.close()

    def _receive(self, seconds: float) -> None:
        ended = self._environments.answers(seconds=0)
        for pending, is_gone in self._proxy.received(seconds=0 if ended else seconds):
            self._take(pending, is_gone=is_gone)  # a program sends requests before it ends
        keys = {program.row: key for key, program in self._programs.items()}
        for row, found in ended:
            self._end_program(keys[row], found)

    def answer(self, number: int, response: Response) -> None:
        """Pass the engine's response to the program that made the call."""
        if number not in self._calls:
            return
        pending, call, begun, _ = self._calls[number]
        program = self._programs[pending.key]
        program.facts["waiting_seconds"] += begun - pending.arrived
        program.facts["model_seconds"] += time.monotonic() - begun
        try:
            with refusing():
                answer = program.conversation.end(call, response)
            pending.reply(answer, streams=call.request.streams)
            asked = call.answer.get("tool_calls", ()) if call.answer else ()
            program.tools += [recorder.begin(TOOL, name_of(each), within=program.span) for each in asked]
        except RefusalError as refusal:
            self._refuse(program, pending, refusal)
        self._forget(number)

    def _begin(self, row: int) -> None:
        key = self._proxy.open()
        self._programs[key] = Program(row, self._new_conversation())
        variables = {"OPENAI_BASE_URL": self._proxy.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
        variables |= {name: f"{os.environ.get(name, '')},{HOST}" for name in ("NO_PROXY", "no_proxy")}
        self._environments.begin(row, self._seed(row, 0))
        self._environments.ask(row, "run", {"row": self._rows[row][0], "variables": variables})

    def _take(self, pending: PendingRequest, *, is_gone: bool) -> None:
        if is_gone:
            for number in [number for number, (each, *_) in self._calls.items() if each is pending]:
                self._drop(number)
        elif program := self._programs.get(pending.key):  # the program of an ended episode is killed
            try:
                (self._reward if pending.path == REWARD else self._begin_call)(program, pending)
            except RefusalError as refusal:
                self._refuse(program, pending, refusal)

    def _begin_call(self, program: Program, pending: PendingRequest) -> None:
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

    def _end_program(self, key: str, found: Any) -> None:
        """End an episode with the calls, requests and spans that its program has left open."""
        program = self._programs[key]
        program.facts["refused"] += self._proxy.forget(key)
        for number in list(program.under_way):
            self._drop(number)
        program.facts["program_seconds"] += time.monotonic() - program.since
        program.end_tools()
        recorder.end(program.span)
        del self._programs[key]
        self._end(program.row, program.end(found, self._rows[program.row][1], needs_reward=self._gives_reward))


class AgentResponder(EpisodeResponder):
    """Generator of responses that are episodes of the job's agent."""

    runner = ProgramRunner

    def turn_fields(self, fields: Fields) -> Fields:
        """Return the base class's fields and `EPISODES`; an episode's whole reward is on its last token."""
        started = [each for each in self._episodes if each.facts]
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
        return {**super().turn_fields(fields), EPISODES: as_bytes([each.facts for each in self._episodes])}

    def _row(self, batch: Batch, row: int, _: Ids) -> dict[str, Any]:
        """Return a row of the data for its program: the prompt as written in the file, and the named columns."""
        fields = (name for name in (RAW_PROMPTS, "columns") if name in batch.fields)
        return {key: value for name in fields for key, value in from_bytes(batch[name][row]).items()}
