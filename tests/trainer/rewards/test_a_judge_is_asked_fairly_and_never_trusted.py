"""A judge behind a real HTTP server on this machine: what it is asked, how its verdicts count, and how it may fail."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rlhf_api.spec.judges import Judge
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from tests.trainer.rewards.stub_server import Handler, Server

TOKEN = "planted000011"
RATE = "Rate {response} to {prompt}; the answer is {answer}. Write {} and [[a number]]."
PAIR = "{prompt}: A {response_a} or B {response_b}?"


def sample(row: int, response: str, prompt: str = "q", **columns: Any) -> Sample:
    return Sample(step=2, row=row, prompt=prompt, response=response, finished=True, columns=columns or {"answer": 4})


def client(server: Server, prompt: str = RATE, **changes: Any) -> JudgeClient:
    limits = {"timeoutSeconds": 5.0, "attempts": 3, "concurrency": 4}
    url, path = f"http://127.0.0.1:{server.server_port}/v1", "job: spec.models.reward.judge"
    judge = Judge.model_validate({"url": url, "model": "m", "prompt": prompt, **limits, **changes})
    return JudgeClient(url=f"{url}/chat/completions", settings=judge, ranks=1, path=path)


def says(server: Server, text: str | None) -> None:
    server.behave = lambda handler, _: handler.say(text)


def scores(asked: JudgeClient, *samples: Sample) -> list[float | None]:
    return [score.value for score in asked.scores(samples)]


def question(call: dict[str, Any]) -> str:
    return str(call["messages"][0]["content"])


def longer(handler: Handler, call: dict[str, Any]) -> None:
    """Prefer the longer of two responses."""
    _, rest = question(call).split(": A ")
    one, two = rest.removesuffix("?").split(" or B ")
    verdict = "C" if len(one) == len(two) else "A" if len(one) > len(two) else "B"
    handler.say(f"I think, so I am sure. [[{verdict}]]")


def test_the_question_holds_texts_and_columns_as_they_stand(server: Server) -> None:
    says(server, "[[10]]")
    assert scores(client(server), sample(0, "{answer} {prompt}", answer=[1, "ü"])) == [1.0]
    (call,) = server.seen
    asked = 'Rate {answer} {prompt} to q; the answer is [1, "ü"]. Write {} and [[a number]].'
    assert call == {
        "model": "m",
        "messages": [{"role": "user", "content": asked}],
        "temperature": 0,
        "max_tokens": 1024,
    }


def test_arguments_replace_those_that_are_sent_otherwise(server: Server) -> None:
    says(server, "[[10]]")
    scores(client(server, arguments={"max_completion_tokens": 5}), sample(0, "x"))
    assert server.seen[0].keys() == {"model", "messages", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("said", "score"),
    {
        "brackets": ("It is good: [[7]]", 0.75),
        "the last of several": ("[[1]] would be harsh, so [[ 9 ]]", 1.0),
        "a bare number": (" 5\n", 0.5),
        "a fraction": ("[[3.5]]", 0.3125),
        "beyond the range": ("[[10]]", None),
        "below the range": ("[[-1]]", None),
        "a number in a sentence": ("8 out of 9", None),
        "words": ("[[very good]]", None),
        "not a number": ("[[nan]]", None),
        "infinite": ("[[1e999]]", None),
        "nothing": ("", None),
        "no content": (None, None),
    }.values(),
)
def test_a_number_in_brackets_is_a_share_of_the_range(server: Server, said: str, score: float | None) -> None:
    says(server, said)
    assert scores(client(server, minimum=1, maximum=9, maxUnreadShare=1), sample(0, "x")) == [score]


def test_a_group_is_compared_in_both_orders(server: Server) -> None:
    server.behave = longer
    group = [sample(row, "x" * length) for row, length in enumerate((1, 2, 3))]
    asked = client(server, PAIR)
    assert scores(asked, *group, sample(3, "x", prompt="alone")) == [0.0, 0.5, 1.0, None]
    assert len(server.seen) == asked.questions == 6


def test_a_judge_that_prefers_a_place_prefers_nobody(server: Server) -> None:
    says(server, "[[A]]")
    assert scores(client(server, PAIR), sample(0, "x"), sample(1, "yy")) == [0.5, 0.5]


def test_the_same_responses_tie_without_a_question(server: Server) -> None:
    assert scores(client(server, PAIR), sample(0, "x"), sample(1, "x")) == [0.5, 0.5]
    assert server.seen == []


def test_responses_of_other_ranks_are_compared_too(server: Server) -> None:
    server.behave = longer
    mine, theirs = sample(0, "xx"), sample(1, "x")
    assert [score.value for score in client(server, PAIR).scores([mine], among=[mine, theirs])] == [1.0]


def test_a_reference_is_a_column_or_the_last_of_its_messages(server: Server) -> None:
    server.behave = longer
    asked = client(server, PAIR, referenceKey="chosen")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "xx"}]
    given = [sample(0, "xxx", chosen="xx"), sample(1, "x", chosen=chat), sample(2, "yy", chosen=chat)]
    assert scores(asked, *given) == [1.0, 0.0, 0.5]
    assert len(server.seen) == 6


def test_a_pair_counts_only_with_a_verdict_in_each_order(server: Server) -> None:
    def half(handler: Handler, call: dict[str, Any]) -> None:
        handler.say("[[A]]" if "A long" in question(call) else "no idea")

    server.behave = half
    asked = client(server, PAIR)
    assert scores(asked, sample(0, "long"), sample(1, "s")) == [None, None]
    assert (asked.questions, asked.unread) == (2, 1)


def test_no_question_with_a_verdict_is_asked_twice(server: Server) -> None:
    asked = client(server)
    says(server, "[[1]]")
    assert scores(asked, sample(0, "x"), sample(1, "x"), sample(2, "y")) == [0.0] * 3
    says(server, "hm")
    assert scores(asked, sample(3, "x"), sample(4, "z")) == [0.0, None]
    says(server, "[[10]]")
    assert scores(asked, sample(5, "x"), sample(6, "z")) == [0.0, 1.0]
    assert sorted(question(call).split()[1] for call in server.seen) == ["x", "y", "z", "z"], "in any order"


def test_it_recovers_and_waits_as_long_as_it_is_told_to(server: Server) -> None:
    codes = iter([500, 429])

    def recover(handler: Handler, _: dict[str, Any]) -> None:
        code = next(codes, None)
        handler.answer(b"", code, Retry_After="1") if code else handler.say("[[10]]")

    server.behave = recover
    start = time.monotonic()
    assert scores(client(server), sample(0, "x")) == [1.0]
    assert time.monotonic() - start >= 2.0


@pytest.mark.parametrize("header", ["-5", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_wait_that_is_no_number_of_seconds_is_not_waited(server: Server, header: str) -> None:
    server.behave = lambda handler, _: handler.answer(b"", 429, Retry_After=header)
    with pytest.raises(EnvironmentProblem, match=r"answered 429 Too Many Requests \(3 attempts\)"):
        scores(client(server), sample(0, "x"))


@pytest.mark.parametrize(
    ("behave", "told"),
    {
        "fails": (lambda handler, _: handler.answer(b"", 500), "answered 500 Internal Server Error"),
        "hangs": (lambda *_: time.sleep(2), "did not answer within 0.3 s"),
        "drips": (lambda handler, _: handler.drip(), "did not answer within 0.3 s"),
        "hangs up": (lambda handler, _: handler.connection.close(), "cannot be reached: RemoteProtocolError"),
    }.values(),
)
def test_a_judge_that_stays_away_is_a_problem_of_the_environment(server: Server, behave: Any, told: str) -> None:
    server.behave = behave
    with pytest.raises(EnvironmentProblem) as raised:
        scores(client(server, timeoutSeconds=0.3), sample(7, "x"))
    start = (
        f"job: spec.models.reward.judge: http://127.0.0.1:{server.server_port}/v1/chat/completions {told} (3 attempts)"
    )
    assert str(raised.value) == f'{start}; the sample is row 7 of step 2, prompt "q", response "x"'


UNREAD = {
    "text": (b"fine", 200),
    "no choices": (b'{"choices": []}', 200),
    "an error": (b'{"error": {"message": "x"}}', 200),
    "a list": (b"[1]", 200),
    "content in parts": (b'{"choices": [{"message": {"content": [{"text": "[[5]]"}]}}]}', 200),
    "binary": (b"\xff\xfe", 200),
    "deep": (b"[" * 60000, 200),
    "too long": (b" " * (2**20 + 1), 200),
    "a question that is too long": (b'{"error": "context"}', 400),
    "a question that it refuses": (b"", 422),
}


@pytest.mark.parametrize(("body", "code"), UNREAD.values(), ids=UNREAD)
def test_what_cannot_be_read_leaves_its_response_out(server: Server, body: bytes, code: int) -> None:
    def one_is_bad(handler: Handler, call: dict[str, Any]) -> None:
        if "bad" in question(call):
            handler.answer(body, code)
        else:
            handler.say("[[10]]")

    server.behave = one_is_bad
    asked = client(server)
    assert scores(asked, sample(0, "good"), sample(1, "bad"), sample(2, "better")) == [1.0, None, 1.0]
    assert (asked.questions, asked.unread) == (3, 1)


def test_too_many_unread_answers_end_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    says(server, f"I cannot. {TOKEN}")
    with pytest.raises(UserCodeError) as raised:
        scores(client(server, tokenVariable="JUDGE_TOKEN"), sample(0, "x"), sample(1, "y"))
    told = "gave no verdict, [[a number from 1 to 10]], on 2 of 2 questions; the sample is row 0 of step 2, "
    assert told in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert server.tokens == [f"Bearer {TOKEN}"] * 2
    with pytest.raises(UserCodeError, match=r"no verdict, \[\[A\]\], \[\[B\]\] or \[\[C\]\], on 2 of 2 questions"):
        scores(client(server, PAIR), sample(0, "x"), sample(1, "y"))


@pytest.mark.parametrize(
    ("code", "told"), [(401, "401 Unauthorized"), (404, "404 Not Found"), (307, "307 Temporary Redirect")]
)
def test_an_answer_to_any_question_ends_the_run_at_once(server: Server, code: int, told: str) -> None:
    server.behave = lambda handler, _: handler.answer(TOKEN.encode(), code)
    with pytest.raises(UserCodeError) as raised:
        scores(client(server, maxUnreadShare=1), sample(0, "x"))
    assert f"/v1/chat/completions answered {told}; the sample is row 0 of step 2" in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_no_more_questions_are_under_way_than_allowed(server: Server) -> None:
    def slowly(handler: Handler, _: dict[str, Any]) -> None:
        time.sleep(0.02)
        handler.say("[[1]]")

    server.behave = slowly
    scores(client(server, concurrency=3), *(sample(row, str(row)) for row in range(12)))
    assert server.most_under_way == 3


def test_a_question_is_json_whatever_the_response_holds(server: Server) -> None:
    says(server, "[[1]]")
    assert scores(client(server), sample(0, 'ü\ud800"\\')) == [0.0]
    assert json.dumps(server.seen[0]).count("?") == 1
