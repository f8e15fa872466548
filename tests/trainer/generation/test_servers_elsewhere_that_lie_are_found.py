"""What is told of a server of `rollout.endpoints` that is not as the job needs it, and who does its part."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_api.job import Job
from rlhf_trainer.errors import CommunicationError, EnvironmentProblem, TrainerError
from rlhf_trainer.generation import endpoints
from rlhf_trainer.generation.endpoints import Endpoints, Needs
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.run import deep_check
from rlhf_trainer.training.loading import load_config
from tests.trainer.chain.mistakes import OF_A_SERVER
from tests.trainer.jobs import job
from tests.trainer.tiny import save_tiny

SHAPES = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
LENGTHS = {"maxPromptTokens": 32, "maxResponseTokens": 8}
NEEDS = Needs(shapes=SHAPES, dtype="float32", tokens=40)
EOS, TOKENS, LOG_PROBS = 2, [7, 2], [-0.5, -1.25]
FACTS = {
    "start": "first",
    "host": "there",
    "stages": 1,
    "dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 40,
    "shapes": SHAPES,
}
Answer = tuple[int, Any]


def facts(**changes: Any) -> Callable[[str, dict[str, Any]], Answer | None]:
    """A server that says other things of itself."""
    answer = 200, {"results": [{**FACTS, **changes}]}
    return lambda path, call: answer if call.get("method") == "served_facts" else None


def response(**changes: Any) -> Callable[[str, dict[str, Any]], Answer | None]:
    """A server whose responses are others."""
    content = [{"token_id": token, "logprob": each} for token, each in zip(TOKENS, LOG_PROBS, strict=True)]
    choice = {"token_ids": TOKENS, "logprobs": {"content": content}, "finish_reason": "stop", **changes}
    return lambda path, call: (200, {"choices": [choice]}) if path == endpoints.GENERATE else None


def code(status: int, where: str) -> Callable[[str, dict[str, Any]], Answer | None]:
    """A server that answers so where it is asked for `where`."""
    return lambda path, call: (status, {}) if path == where else None


class Stub(ThreadingHTTPServer):
    """Answers as a vLLM server does that a job can use, but for what `lies` says."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lies: Callable[[str, dict[str, Any]], Answer | None] = lambda path, call: None
        self.seen: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no concern of the tests'."""


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(call)
        lie = self.server.lies(self.path, call)
        status, value = lie or facts()(self.path, call) or response()(self.path, call) or (200, {"results": [None]})
        if status == 0:  # it dies
            self.connection.close()
            return
        body = json.dumps(value).encode() if not isinstance(value, bytes) else value
        self.send_response(status, "the server's own words")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def serving() -> Iterator[Stub]:
    server = Stub()
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stub]]:
    """Two servers."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as first, serving() as second:
        yield [first, second]


@pytest.fixture
def servers(stubs: list[Stub], tmp_path: Path) -> Endpoints:
    return endpoints_of(tmp_path, *(stub.url for stub in stubs))


def endpoints_of(folder: Path, *urls: str) -> Endpoints:
    return Endpoints(job_of(folder, *urls), NEEDS, ends=[EOS])


def job_of(folder: Path, *urls: str, **changes: Any) -> Job:
    """changes: of the spec."""
    spec: dict[str, Any] = {
        "algorithm": {"name": "RLOO"},
        "models": {"actor": {"uri": "hf://a"}, "reward": {"uri": "hf://b"}},
        "data": {"train": {"uri": "hf://x"}, **LENGTHS},
        "rollout": {"samplesPerPrompt": 2, "endpoints": list(urls), "minResponseTokens": 3, "temperature": 0.5},
        "training": {"totalSteps": 1, "promptBatchSize": 4},
    }
    return job(folder, "far", spec | changes)


EXTENSION = f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {endpoints.EXTENSION}"
OTHER_VOCABULARY = {**SHAPES, "model.embed_tokens.weight": (1024, 64)}
LIES: Mapping[str, tuple[Callable[[str, dict[str, Any]], Answer | None], ExitCode, str]] = {
    "another vocabulary": (
        facts(shapes=OTHER_VOCABULARY),
        ExitCode.SPEC,
        "serves another model: model.embed_tokens.weight is 1024 x 64 there, and 512 x 64 in the actor",
    ),
    "another architecture": (
        facts(shapes={**SHAPES, "model.norm.bias": (64,)}),
        ExitCode.SPEC,
        "serves another model: model.norm.bias is 64 there, and missing in the actor",
    ),
    "another type": (
        facts(dtype="bfloat16"),
        ExitCode.SPEC,
        "computes with dtype bfloat16; start it with --dtype float32",
    ),
    "log-probabilities of other distributions": (
        facts(logprobs_mode="raw_logprobs"),
        ExitCode.SPEC,
        "computes with logprobs_mode raw_logprobs; start it with --logprobs-mode processed_logprobs",
    ),
    "a short context": (
        facts(max_model_len=39),
        ExitCode.SPEC,
        "reads 39 tokens at most, and a prompt with its response has 40; start it with --max-model-len 40",
    ),
    "stages": (
        facts(stages=2),
        ExitCode.SPEC,
        "has pipeline stages or data-parallel engines; of these only tensor parallelism is supported",
    ),
    "no token ids": (response(token_ids=None), ExitCode.SPEC, "answers without the token ids of a response"),
    "no log-probabilities": (
        response(logprobs=None),
        ExitCode.SPEC,
        "answers without the log-probability of each token",
    ),
    "one log-probability too few": (
        response(logprobs={"content": [{"logprob": -1.0}]}),
        ExitCode.SPEC,
        "answers without the log-probability of each token",
    ),
    "not a server of vLLM": (
        code(404, endpoints.CALL),
        ExitCode.SPEC,
        f"answered 404 Not Found to POST /collective_rpc; start it with {EXTENSION}",
    ),
    "no worker of this package": (
        code(500, endpoints.CALL),
        ExitCode.ENVIRONMENT,
        f"answered 500 Internal Server Error to POST /collective_rpc; start it with {EXTENSION}",
    ),
    "no generation by token ids": (
        code(403, endpoints.GENERATE),
        ExitCode.SPEC,
        "answered 403 Forbidden to POST /inference/v1/generate; start it with --enable-scale-out",
    ),
    "nonsense": (
        lambda path, call: (200, {"results": [{"start": 3}]}),
        ExitCode.SPEC,
        f"answers POST /collective_rpc in another way; start it with {EXTENSION}",
    ),
    "no JSON": (
        lambda path, call: (200, b"<html>"),
        ExitCode.SPEC,
        "answered 200 OK to POST /collective_rpc, and not in JSON",
    ),
    "an end": (lambda path, call: (0, None), ExitCode.ENVIRONMENT, "cannot be reached: RemoteProtocolError"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_one_sentence_with_its_path(lie: str, servers: Endpoints, stubs: list[Stub]) -> None:
    stubs[1].lies, exit_code, sentence = LIES[lie]
    (problem,) = servers.problems()
    assert str(problem) == f"far: spec.rollout.endpoints[1]: {stubs[1].url} {sentence}"
    assert problem.exit_code == exit_code


ON_THE_PAGE = {
    "a server of `rollout.endpoints` that cannot be reached": "an end",
    "a server that serves another model": "another vocabulary",
    "a server that computes in another type": "another type",
    "a server with log-probabilities of other distributions": "log-probabilities of other distributions",
    "a server without an option that it needs": "not a server of vLLM",
}


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_of_mistakes_tells_it(name: str) -> None:
    _, exit_code, sentence = LIES[ON_THE_PAGE[name]]
    assert OF_A_SERVER[name].matches(f"far: spec.rollout.endpoints[1]: http://127.0.0.1:80 {sentence}")
    assert OF_A_SERVER[name].code == exit_code


@pytest.mark.parametrize(
    ("device", "precision", "wanted"),
    [("Auto", "Auto", ""), ("CPU", "Auto", "float32"), ("Auto", "FP32", "float32"), ("GPU", "Auto", "")],
)
def test_a_type_is_asked_for_where_it_is_known(
    device: str, precision: str, wanted: str, stubs: list[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may be looked at on a machine without GPUs, and its servers are started as docs/rollouts.md says."""
    monkeypatch.setattr(deep_check, "gpu_count", lambda: 0)
    model, reward = save_tiny(tmp_path / "model", seed=3), save_tiny(tmp_path / "reward", seed=3, labels=1)
    config = load_config(model, trust_remote_code=False, revision=None)
    shapes = {each.name: each.shape for each in describe(config, trust_remote_code=False)}
    stubs[0].lies = facts(dtype="bfloat16", shapes=shapes)
    changes = {
        "models": {"actor": {"uri": f"file://{model}"}, "reward": {"uri": f"file://{reward}"}},
        "data": {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}, **LENGTHS},
        "resources": {"device": device, "slotsPerNode": 1},
        "training": {"totalSteps": 1, "promptBatchSize": 4, "precision": precision},
    }
    far = job_of(tmp_path, stubs[0].url, **changes)
    told = [str(error) for error in deep_check.JobCheck(far, {"far": far}, tmp_path).problems()]
    asked = f"{stubs[0].url} computes with dtype bfloat16; start it with --dtype {wanted}"
    assert told == ([f"far: spec.rollout.endpoints[0]: {asked}"] if wanted else [])
    assert stubs[0].seen, "it was looked at"


def test_a_server_that_never_answers_is_found(
    servers: Endpoints, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 0.5)
    ended = threading.Event()
    stubs[0].lies = lambda path, call: (0, None) if ended.wait(60) else None
    (problem,) = servers.problems()
    ended.set()
    assert str(problem) == f"far: spec.rollout.endpoints[0]: {stubs[0].url} did not answer within 0.5 s"
    assert problem.exit_code == ExitCode.ENVIRONMENT


def test_servers_have_as_many_ranks_as_each_other(servers: Endpoints, stubs: list[Stub]) -> None:
    stubs[1].lies = lambda path, call: (200, {"results": [FACTS, FACTS]}) if path == endpoints.CALL else None
    (problem,) = servers.problems()
    assert str(problem).endswith("has 2 ranks, and another one has 1; expected as many in each")


def test_most_servers_say_how_many_ranks_each_has(stubs: list[Stub], tmp_path: Path) -> None:
    stubs[0].lies = lambda path, call: (200, {"results": [FACTS, FACTS]}) if path == endpoints.CALL else None
    with serving() as third:
        (problem,) = endpoints_of(tmp_path, *(stub.url for stub in [*stubs, third])).problems()
    assert str(problem).endswith(f"[0]: {stubs[0].url} has 2 ranks, and another one has 1; expected as many in each")


def test_honest_servers_are_asked_as_our_own_engine_is(servers: Endpoints, stubs: list[Stub]) -> None:
    assert servers.problems() == []
    assert servers.found() == [("there", 1), ("there", 1)]
    assert servers.found() == [], "they are the ones that have joined"
    for stub in stubs:
        stub.seen.clear()
    ended: dict[int, Any] = {}
    made = servers.generate([[5], [6, 7]], [11, 12], max_tokens=8, ended=ended.__setitem__)
    assert ended == dict(enumerate(made)), "each is told with its number"
    assert [(list(each.tokens), list(each.log_probs), each.finished) for each in made] == [
        (TOKENS, LOG_PROBS, True)
    ] * 2
    (first,), (second,) = stubs[0].seen, stubs[1].seen
    assert [first["token_ids"], second["token_ids"]] == [[5], [6, 7]]
    assert first["sampling_params"] == {
        "max_tokens": 8,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": 11,
        "logprobs": 0,
        "stop_token_ids": [EOS],
        "ignore_eos": True,
        "detokenize": False,
    }


@pytest.mark.parametrize(
    "end", [code(0, endpoints.GENERATE), code(500, endpoints.GENERATE), response(finish_reason="abort")]
)
def test_prompts_of_a_server_that_is_lost_go_to_the_others_once(
    end: Callable[[str, dict[str, Any]], Answer | None], servers: Endpoints, stubs: list[Stub]
) -> None:
    servers.found()
    stubs[1].seen.clear()
    stubs[0].lies = end
    prompts, seeds = [[number] for number in range(20)], list(range(20))
    made = servers.generate(prompts, seeds, max_tokens=8)
    assert len(made) == 20
    asked = [(call["token_ids"][0], call["sampling_params"]["seed"]) for call in stubs[1].seen if "token_ids" in call]
    assert sorted(asked) == [(number, number) for number in range(20)]
    assert list(servers.news()) == ["far: spec.rollout.endpoints[0]"]
    made = servers.generate(prompts, seeds, max_tokens=8)
    assert len(made) == 20
    assert not servers.news(), "it is told once"


def test_a_server_that_comes_back_joins_anew(servers: Endpoints, stubs: list[Stub]) -> None:
    servers.found()
    stubs[0].lies = code(0, endpoints.CALL)
    assert servers.found() == [("there", 1)]
    assert servers.found() == []
    stubs[0].lies = facts(start="second")
    assert servers.found() == [("there", 1), ("there", 1)]
    stubs[0].lies = facts(start="third")
    assert servers.found() == [("there", 1), ("there", 1)], "it was started again between two steps"
    stubs[0].lies = facts(start="fourth", shapes=OTHER_VOCABULARY)
    assert servers.found() == [("there", 1)], "another model is served there now"


def test_without_servers_the_run_ends(servers: Endpoints, stubs: list[Stub]) -> None:
    servers.found()
    for stub in stubs:
        stub.lies = lambda path, call: (0, None)
    with pytest.raises(
        EnvironmentProblem, match=r"^far: spec.rollout.endpoints: no server is left that generates \(far"
    ) as raised:
        servers.generate([[5]], [1], max_tokens=8)
    assert OF_A_SERVER["no server is left"].matches(str(raised.value))
    assert OF_A_SERVER["no server is left"].code == raised.value.exit_code
    with pytest.raises(EnvironmentProblem, match=r"no server is left that generates"):
        servers.found()


def test_a_server_that_fails_in_an_exchange_ends_the_attempt(servers: Endpoints, stubs: list[Stub]) -> None:
    servers.found()
    stubs[1].lies = lambda path, call: (0, None)
    with pytest.raises(
        CommunicationError, match=r"endpoints\[1\]: .* cannot be reached: .*, and the actor waits for it"
    ):
        servers.call("take_weights")


def test_a_lie_in_the_middle_of_a_run_ends_it(servers: Endpoints, stubs: list[Stub]) -> None:
    servers.found()
    stubs[0].lies = stubs[1].lies = response(logprobs=None)
    with pytest.raises(TrainerError, match=r"answers without the log-probability of each token"):
        servers.generate([[5]], [1], max_tokens=8)
