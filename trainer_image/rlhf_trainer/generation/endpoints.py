"""External engines (`rollout.endpoints`): token ids go to vLLM's HTTP servers, and token ids come back.

A server that cannot be reached is lost until it is found again; its requests go to the other servers.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from rlhf_api.job import Job
from rlhf_trainer.errors import CommunicationError, ConfigError, EnvironmentProblem, TrainerError
from rlhf_trainer.generation.vllm_arguments import sampling_arguments
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.http_client import NoAnswerError, gather, named, post

GENERATE, CALL, FORGET = "/inference/v1/generate", "/collective_rpc", "/reset_prefix_cache"
EXTENSION = "rlhf_trainer.workers.served.ServedWorker"
STARTED_WITH = {
    GENERATE: "--enable-scale-out",
    CALL: f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}",
    FORGET: "VLLM_SERVER_DEV_MODE=1",
}
"""Path of a server's HTTP API -> options with which vLLM must be started to serve this path."""
ANSWER_SECONDS = 30.0
"""Time limit in seconds of an answer by an idle server."""
MAX_REQUESTS = 512
"""Largest number of pending generation requests to all servers together."""
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""Socket options that detect a dead machine, however long a response may take."""


class LostError(Exception):
    """Failure of an external server to give a usable answer; the error's text names the server and the failure."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a rank of an external vLLM server reports about itself."""

    start: str
    """Random id of this server process; it differs after a restart."""
    host: str
    stages: int
    """Number of the server's pipeline stages times its data-parallel engines."""
    dtype: str
    logprobs_mode: str
    max_model_len: int
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the served model's parameters before sharding, by Hugging Face's names."""


FACTS = TypeAdapter(list[Facts])


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a job on every external vLLM server."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes that the served model's parameters must have: the actor's before sharding, by Hugging Face's names."""
    dtype: str | None
    """Type that the server's weights must have; None: any type."""
    tokens: int
    """Length in tokens that a server must allow: the job's longest prompt with its longest response."""

    def unmet_by(self, facts: Facts) -> str:
        """Return the first unmet requirement of a server's facts, as words to follow its URL; empty if all are met."""
        for name in [*self.shapes, *facts.shapes]:
            there, here = facts.shapes.get(name), self.shapes.get(name)
            if there != here:
                return f"serves another model: {name} is {_shape(there)} there, and {_shape(here)} in the actor"
        if facts.stages > 1:
            return "has pipeline stages or data-parallel engines; of these only tensor parallelism is supported"
        for name, value in {"dtype": self.dtype, "logprobs_mode": "processed_logprobs"}.items():
            if value and getattr(facts, name) != value:
                return f"computes with {name} {getattr(facts, name)}; start it with --{name.replace('_', '-')} {value}"
        if facts.max_model_len < self.tokens:
            longest = f"reads {facts.max_model_len} tokens at most, and a prompt with its response has {self.tokens}"
            return f"{longest}; start it with --max-model-len {self.tokens}"
        return ""


def _shape(shape: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "missing"


@dataclass(kw_only=True, eq=False)
class Server:
    """State of the external vLLM server at one URL."""

    url: str
    path: str
    """Field of the manifest that holds the URL, for error messages."""
    joined: str = ""
    """Random id of the server process in the process group for the actor's weights; empty: no process has joined."""
    is_lost: bool = False
    requests: int = 0

    def says(self, what: str) -> str:
        return f"{self.path}: {self.url} {what}"


class Endpoints:
    """All external vLLM servers of a job: checks, transfer of weights, and generation."""

    def __init__(self, job: Job, needs: Needs, *, ends: list[int]) -> None:
        """Prepare the job's servers without contacting them; ends: ids of the tokens that end a response."""
        self._path, self._needs, self._ends = f"{job.name}: spec.rollout.endpoints", needs, ends
        self._sampling = partial(sampling_arguments, job.spec.rollout, ends=self._ends)
        self.version = -1
        """Policy version of the servers' weights, set by the caller that loads them."""
        self._news: dict[str, str] = {}
        self._servers = [
            Server(url=url.rstrip("/"), path=f"{self._path}[{number}]")
            for number, url in enumerate(job.spec.rollout.endpoints or ())
        ]

    def news(self) -> dict[str, str]:
        """Return the servers lost since the last call: field of the manifest -> sentence on the loss."""
        news, self._news = self._news, {}
        return news

    def problems(self) -> list[TrainerError]:
        """Return the problems of servers: unreachable, another model, or answers in another form than vLLM's."""
        return [error for error in asyncio.run(self._examined()) if isinstance(error, TrainerError)]

    def found(self) -> list[tuple[str, int]]:
        """Return (machine, number of ranks) of each server that answers; empty if exactly these servers have joined.

        Servers that do not meet the job's needs are left out. EnvironmentProblem if none remains.
        """
        results = asyncio.run(self._examined())
        for server, result in zip(self._servers, results, strict=True):
            if isinstance(result, TrainerError):
                self._lose(server, str(result))
        there = {each: facts for each, facts in zip(self._servers, results, strict=True) if isinstance(facts, list)}
        if not there:
            raise self._none_left("; ".join(map(str, results)))
        starts = {server: facts[0].start for server, facts in there.items()}
        is_same = starts == {server: server.joined for server in self._servers if server.joined}
        for server in self._servers:
            server.joined, server.is_lost = starts.get(server, ""), server not in starts
        return [] if is_same else [(facts[0].host, len(facts)) for facts in there.values()]

    def call(self, method: str, arguments: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
        """Call a method on all ranks of joined servers; arguments: a mapping per server. Raises CommunicationError."""
        try:
            return asyncio.run(self._call_all(method, arguments))
        except LostError as error:
            raise CommunicationError(f"{error}, and the actor waits for it") from None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        greedy: bool = False,
        ended: Callable[[int, Response], None] = lambda *_: None,
    ) -> list[Response]:
        """Generate responses as `GenerationEngine.generate` does; EnvironmentProblem once no server is left."""

        async def respond(client: httpx.AsyncClient, number: int) -> Response:
            sampling = self._sampling(seed=seeds[number], max_tokens=max_tokens, greedy=greedy)
            response = await self._respond(client, prompts[number], sampling)
            ended(number, response)
            return response

        async def respond_to_all() -> list[Response]:
            async with _client() as client:
                calls = [partial(respond, client, number) for number in range(len(prompts))]
                return await gather(calls, concurrency=MAX_REQUESTS)

        return asyncio.run(respond_to_all())

    async def _examined(self) -> list[list[Facts] | TrainerError]:
        async with _client() as client:
            results = await asyncio.gather(*(self._examine(client, each) for each in self._servers))
        counts = Counter(len(each) for each in results if isinstance(each, list))
        ranks = max(counts, key=counts.__getitem__, default=0)
        return [
            ConfigError(server.says(f"has {len(each)} ranks, and another one has {ranks}; expected as many in each"))
            if isinstance(each, list) and len(each) != ranks
            else each
            for server, each in zip(self._servers, results, strict=True)
        ]

    async def _examine(self, client: httpx.AsyncClient, server: Server) -> list[Facts] | TrainerError:
        """Ask a server for the facts of each rank, and for two tokens as a test; returns the facts, or the problem."""
        try:
            body = await _post(client, server, CALL, {"method": "served_facts"}, seconds=ANSWER_SECONDS)
            facts = FACTS.validate_python(body["results"])
            if unmet := self._needs.unmet_by(facts[0]):
                return ConfigError(server.says(unmet))
            sampling = self._sampling(seed=0, max_tokens=2, greedy=True)
            await self._ask(client, server, [self._ends[0]], sampling, seconds=ANSWER_SECONDS)
        except LostError as error:
            return EnvironmentProblem(str(error))
        except TrainerError as error:
            return error
        except (ValidationError, LookupError, TypeError):
            return ConfigError(server.says(f"answers POST {CALL} in another way; start it with {STARTED_WITH[CALL]}"))
        return facts

    async def _call_all(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        joined = [server for server in self._servers if server.joined]
        calls = [{"method": method, "kwargs": each} for each in arguments or [{}] * len(joined)]
        async with _client() as client:
            requests = (_post(client, server, CALL, call) for server, call in zip(joined, calls, strict=True))
            answers = await asyncio.gather(*requests)
            await asyncio.gather(*(_post(client, server, FORGET, None) for server in joined))
        return [result for answer in answers for result in answer["results"]]

    async def _respond(self, client: httpx.AsyncClient, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Response:
        """Get a response from the server with the fewest requests; if it is lost, ask the next with the same seed."""
        why = ""
        while ready := [each for each in self._servers if each.joined and not each.is_lost]:
            server = min(ready, key=lambda each: each.requests)
            server.requests += 1
            try:
                return await self._ask(client, server, prompt, sampling)
            except LostError as error:
                why = str(error)
                self._lose(server, why)
            finally:
                server.requests -= 1
        raise self._none_left(why)

    async def _ask(
        self,
        client: httpx.AsyncClient,
        server: Server,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        seconds: float | None = None,
    ) -> Response:
        request = {"token_ids": list(prompt), "sampling_params": sampling}
        answer = await _post(client, server, GENERATE, request, seconds=seconds)
        try:
            choice = answer["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                raise LostError(server.says("has given up a response"))
            tokens = list(map(int, choice["token_ids"]))
            is_finished = tokens[-1] in self._ends
        except (LookupError, TypeError, ValueError):
            raise ConfigError(server.says("answers without the token ids of a response")) from None
        try:
            log_probs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
        except (LookupError, TypeError, ValueError):
            log_probs = []
        if len(log_probs) != len(tokens):
            raise ConfigError(server.says("answers without the log-probability of each token"))
        return Response(tokens=tokens, log_probs=log_probs, finished=is_finished, versions=[self.version] * len(tokens))

    def _lose(self, server: Server, why: str) -> None:
        if not server.is_lost:
            server.is_lost = True
            self._news[server.path] = f"{why}; the other servers do its part"

    def _none_left(self, why: str) -> EnvironmentProblem:
        return EnvironmentProblem(f"{self._path}: no server is left that generates ({why})")


def _client() -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None), socket_options=KEEPALIVE)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=ANSWER_SECONDS), transport=transport)


async def _post(
    client: httpx.AsyncClient, server: Server, route: str, content: Any, *, seconds: float | None = None
) -> Any:
    """Post a request; returns the JSON answer. LostError without an answer, ConfigError if the server refuses."""
    try:
        answer = await post(client, f"{server.url}{route}", content, seconds=seconds)
    except NoAnswerError as error:
        raise LostError(server.says(str(error))) from None
    what = server.says(f"answered {named(answer.code)} to POST {route}")
    hint = f"; start it with {STARTED_WITH[route]}" if httpx.codes.is_client_error(answer.code) or route == CALL else ""
    if httpx.codes.is_server_error(answer.code):
        raise LostError(f"{what}{hint}")
    if not httpx.codes.is_success(answer.code):
        raise ConfigError(f"{what}{hint}")
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ConfigError(f"{what}, and not in JSON") from None
