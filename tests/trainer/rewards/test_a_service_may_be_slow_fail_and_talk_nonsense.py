"""A reward from a real HTTP server on this machine that does everything a service should not."""

from __future__ import annotations

import gzip
import threading
import time
from typing import Any

import pytest

from rlhf_api.spec.functions import RewardService
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.rewards import endpoint
from rlhf_trainer.rewards.endpoint import ServiceClient
from rlhf_trainer.rewards.sample import Sample, Score
from tests.patience import PATIENCE_SECONDS
from tests.trainer.rewards.stub_server import Handler, Server

TOKEN = "planted000009"


def sample(row: int, response: str = "hello") -> Sample:
    return Sample(step=2, row=row, prompt="q", response=response, finished=True)


def client(server: Server, **changes: Any) -> ServiceClient:
    url = f"http://127.0.0.1:{server.server_port}/score"
    limits = {"timeoutSeconds": 5.0, "attempts": 3, "concurrency": 4}
    settings = RewardService.model_validate({"url": url, **limits, **changes})
    return ServiceClient(url=url, settings=settings, ranks=1, path="job: spec.models.reward")


def test_scores_come_back_in_the_order_of_the_samples(server: Server) -> None:
    given = [sample(row, "x" * (row % 7)) for row in range(30)]
    assert [score.value for score in client(server).scores(given)] == [row % 7 for row in range(30)]
    assert {"prompt": "q", "response": "x", "finished": True} in server.seen
    assert client(server).scores([]) == []


def test_columns_are_sent_where_the_data_names_some(server: Server) -> None:
    client(server).scores([Sample(step=1, row=0, prompt="q", response="x", finished=True, columns={"answer": [4]})])
    assert server.seen == [{"prompt": "q", "response": "x", "finished": True, "columns": {"answer": [4]}}]


def test_no_more_requests_are_under_way_than_allowed(server: Server) -> None:
    def slowly(handler: Handler, call: dict[str, Any]) -> None:
        time.sleep(0.02)
        handler.score(call)

    server.behave = slowly
    client(server, concurrency=3).scores([sample(row) for row in range(12)])
    assert server.most_under_way == 3


def test_a_service_that_recovers_is_forgiven(server: Server) -> None:
    codes = iter([503, 429])

    def recover(handler: Handler, call: dict[str, Any]) -> None:
        code = next(codes, None)
        handler.answer(b"", code) if code else handler.score(call)

    server.behave = recover
    assert client(server).scores([sample(0)]) == [Score(5.0)]
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("behave", "told", "requests"),
    {
        "fails": (
            lambda handler, _: handler.answer(b"", 500),
            "answered 500 Internal Server Error (3 attempts)",
            3,
        ),
        "hangs up": (
            lambda handler, _: handler.connection.close(),
            "cannot be reached: RemoteProtocolError (3 attempts)",
            3,
        ),
        "is slow": (lambda *_: time.sleep(2), "did not answer within 0.3 s (3 attempts)", 3),
        "drips": (lambda handler, _: handler.drip(), "did not answer within 0.3 s (3 attempts)", 3),
    }.values(),
)
def test_a_service_that_stays_away_is_the_environments(server: Server, behave: Any, told: str, requests: int) -> None:
    server.behave = behave
    asked = client(server, timeoutSeconds=0.3)
    with pytest.raises(EnvironmentProblem) as raised:
        asked.scores([sample(7)])
    place = 'the sample is row 7 of step 2, prompt "q", response "hello"'
    assert str(raised.value) == f"job: spec.models.reward: {asked.url} {told}; {place}"
    assert len(server.seen) == requests or "did not answer" in told, "a late request may not be seen"


NONSENSE = 'answered something else than {"score": a finite number (float32)}'


@pytest.mark.parametrize(
    ("body", "code", "told"),
    {
        "text": (b"fine", 200, NONSENSE),
        "no score": (b'{"reward": 1}', 200, NONSENSE),
        "a list": (b"[1.0]", 200, NONSENSE),
        "a number as text": (b'{"score": "1"}', 200, NONSENSE),
        "true": (b'{"score": true}', 200, NONSENSE),
        "not a number": (b'{"score": NaN}', 200, NONSENSE),
        "a number beyond floats": (b'{"score": 1' + b"0" * 400 + b"}", 200, NONSENSE),
        "a number beyond float32": (b'{"score": 1e300}', 200, NONSENSE),
        "packed": (gzip.compress(b'{"score": 1}' + b" " * 70000), 200, NONSENSE),
        "deep": (b"[" * 60000, 200, NONSENSE),
        "binary": (b"\xff\xfe", 200, NONSENSE),
        "too much": (b" " * 70000, 200, "answered more than 65536 bytes"),
        "not found": (b"", 404, "answered 404 Not Found"),
        "not allowed": (TOKEN.encode(), 401, "answered 401 Unauthorized"),
        "elsewhere": (b"", 307, "answered 307 Temporary Redirect"),
        "a code of its own": (b"", 299, "answered 299"),
    }.values(),
)
def test_nonsense_is_told_at_once_and_never_repeated(server: Server, body: bytes, code: int, told: str) -> None:
    server.behave = lambda handler, _: handler.answer(body, code)
    with pytest.raises(UserCodeError) as raised:
        client(server).scores([sample(7)])
    assert f"/score {told}; the sample is row 7 of step 2, " in str(raised.value)
    assert len(server.seen) == 1
    assert "own words" not in str(raised.value)


def test_one_failure_ends_the_other_requests(server: Server) -> None:
    is_over = threading.Event()

    def one_is_bad(handler: Handler, call: dict[str, Any]) -> None:
        if call["response"] == "bad":
            handler.answer(b"", 400)
        else:
            is_over.wait(PATIENCE_SECONDS)

    server.behave = one_is_bad
    given = [sample(0), sample(1, "bad"), *(sample(row) for row in range(2, 40))]
    with pytest.raises(UserCodeError, match="the sample is row 1 of step 2"):
        client(server, concurrency=2, timeoutSeconds=float(PATIENCE_SECONDS)).scores(given)
    is_over.set()
    assert len(server.seen) <= 2


def test_the_token_is_sent_and_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)
    asked = client(server, tokenVariable="SCORER_TOKEN")
    asked.ready()
    asked.scores([sample(0)])
    assert server.tokens == [f"Bearer {TOKEN}"]
    server.behave = lambda handler, _: handler.answer(b'{"error": "' + TOKEN.encode() + b' is wrong"}', 200)
    with pytest.raises(UserCodeError) as raised:
        asked.scores([sample(0)])
    assert TOKEN not in str(raised.value) + repr(asked)


def test_a_missing_token_is_told_before_the_first_request(server: Server) -> None:
    with pytest.raises(EnvironmentProblem) as raised:
        client(server, tokenVariable="NO_SUCH_TOKEN").ready()
    sentence = "job: spec.models.reward.tokenVariable: the environment variable NO_SUCH_TOKEN is not set"
    assert str(raised.value) == sentence
    assert server.seen == []


def test_a_token_from_a_file_loses_its_last_newline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", f"{TOKEN}\n")
    client(server, tokenVariable="SCORER_TOKEN").scores([sample(0)])
    assert server.tokens == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("token", [f"{TOKEN}é", f"{TOKEN} x", f"{TOKEN}\nx", f"{TOKEN}\x7f"])
def test_an_unsendable_token_is_told_before_the_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", token)
    with pytest.raises(EnvironmentProblem) as raised:
        client(server, tokenVariable="SCORER_TOKEN").ready()
    told = "the environment variable SCORER_TOKEN holds characters that a token cannot have"
    assert str(raised.value) == f"job: spec.models.reward.tokenVariable: {told}"
    assert server.seen == []


def test_half_a_surrogate_pair_is_sent_as_a_question_mark(server: Server) -> None:
    client(server).scores([sample(0, "ü\ud800")])
    assert server.seen[0]["response"] == "ü?"


def test_pauses_grow_and_stay_below_the_longest() -> None:
    assert 0.25 <= endpoint.pause(1) <= 0.5
    assert 2.0 <= endpoint.pause(4) <= 4.0
    assert 15.0 <= endpoint.pause(20) <= 30.0


def test_it_works_inside_a_thread(server: Server) -> None:
    """Ray runs the calls of a worker in a thread."""
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.extend(client(server).scores([sample(0)])))
    thread.start()
    thread.join()
    assert scores == [Score(5.0)]
