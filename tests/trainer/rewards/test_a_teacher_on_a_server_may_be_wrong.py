"""A teacher on a real HTTP server: a wrong answer is one sentence, a wrong server is told before a job trains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rlhf_api.spec.judges import TeacherEndpoint
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.run.deep_check import JobCheck
from rlhf_trainer.training.head import likeliest_tokens
from rlhf_trainer.workers import teacher as teachers
from rlhf_trainer.workers.teacher import TeacherClient, TeacherText
from tests.trainer.jobs import job
from tests.trainer.rewards.stub_server import Handler, Server
from tests.trainer.teachers import Teacher
from tests.trainer.tiny import save_tiny

TEXTS = [TeacherText([1, 30, 31, 32, 33, 34], 3), TeacherText([1, 40, 41], 1)]
Change = Callable[[list[Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.fixture
def teacher(folder: str, server: Server) -> Teacher:
    made = Teacher(folder)
    server.behave = made.answer
    return made


def client(server: Server, count: int = 0) -> TeacherClient:
    url = f"http://127.0.0.1:{server.server_port}/v1/completions"
    limits = {"timeoutSeconds": 20.0, "attempts": 2, "concurrency": 2}
    settings = TeacherEndpoint.model_validate({"name": "it", "url": url, "model": "m", **limits})
    path = "job: spec.models.teacherEndpoints.0"
    return TeacherClient(url=url, settings=settings, ranks=1, path=path, count=count, vocabulary=512)


@pytest.mark.usefixtures("teacher")
def test_log_probs_are_those_of_the_model(folder: str, server: Server) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for text, sampled, likeliest in zip(
        TEXTS, client(server).log_probs(TEXTS), client(server, 4).log_probs(TEXTS), strict=True
    ):
        with torch.no_grad():
            hidden = model.model(torch.tensor([text.tokens])).last_hidden_state[0, text.start - 1 : -1]
        options: dict[str, Any] = {"of": 512, "softcap": None}
        head, ones = model.lm_head.weight.detach(), torch.ones(len(hidden))
        assert_close(likeliest, likeliest_tokens(hidden, head, ones, count=4, **options))
        own = (hidden @ head.T).log_softmax(1).gather(1, torch.tensor(text.tokens[text.start :])[:, None])[:, 0]
        assert_close(sampled, own.detach())


@pytest.mark.parametrize(
    ("change", "count", "sentence"),
    [
        (lambda places: None, 0, "answered without the prompt_logprobs of each token"),
        (lambda places: places[:-1], 0, "answered without the prompt_logprobs of each token"),
        (lambda places: [None, *({"7": {"logprob": -1.0}} for _ in places[1:])], 0, "gives no log-probability"),
        (
            lambda places: [None, *({t: {"logprob": math.nan} for t in place} for place in places[1:])],
            0,
            "gives no log",
        ),
        (lambda places: [None, *({"7": {"logprob": -1.0}} for _ in places[1:])], 4, "gives fewer than 4 likeliest"),
    ],
)
def test_an_answer_of_another_form_is_one_sentence(
    teacher: Teacher, server: Server, change: Change, count: int, sentence: str
) -> None:
    def behave(handler: Handler, call: dict[str, Any]) -> None:
        places = change(teacher.prompt_logprobs(call["prompt"], call["prompt_logprobs"]))
        handler.answer(json.dumps({"choices": [{"prompt_logprobs": places}]}).encode())

    server.behave = behave
    with pytest.raises(UserCodeError, match=sentence) as raised:
        client(server, count).log_probs(TEXTS[:1])
    assert str(raised.value).startswith("job: spec.models.teacherEndpoints.0: http://127.0.0.1")


def test_a_model_that_is_not_served_is_one_sentence(server: Server) -> None:
    server.behave = lambda handler, _: handler.answer(b"{}", 404)
    with pytest.raises(UserCodeError, match=r"answered 404 Not Found; the sample is 6 tokens, of which 3 are the resp"):
        client(server).log_probs(TEXTS[:1])


def test_a_refusal_names_the_limits_of_the_server(server: Server) -> None:
    server.behave = lambda handler, _: handler.answer(b"{}", 400)
    with pytest.raises(UserCodeError, match=r"answered 400 Bad Request; it may need --max-logprobs 4 or a larger"):
        client(server, 4).log_probs(TEXTS[:1])


def told(folder: Path, actor: str, server: Server, rows: list[dict[str, str]], **algorithm: Any) -> list[str]:
    """Return the sentences of the deep check about a job with a teacher on the server."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    spec = {
        "algorithm": {"name": "Distillation", **algorithm},
        "models": {
            "actor": {"uri": f"file://{actor}"},
            "teacherEndpoints": [{"name": "sums", "url": url, "model": "m", "attempts": 1}],
        },
        "data": {
            "train": {"uri": f"file://{folder}/rows.jsonl"},
            "onBadRow": "Fail",
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
        },
        "training": {"totalSteps": 1, "promptBatchSize": 2},
        "resources": {"device": "CPU", "slotsPerNode": 1},
    }
    made = job(folder, "distilled", spec)
    return [str(error) for error in JobCheck(made, {made.name: made}, folder).problems()]


ROWS = [{"prompt": "1 + 1", "domain": "sums"}, {"prompt": "2 + 2", "domain": "words"}]


@pytest.mark.usefixtures("teacher")
def test_a_right_teacher_is_taken_before_the_job(folder: str, server: Server, tmp_path: Path) -> None:
    assert told(tmp_path, folder, server, ROWS) == []
    assert len(server.seen) == 1


@pytest.mark.usefixtures("teacher")
def test_a_row_without_a_teacher_is_told_before_the_job(folder: str, server: Server, tmp_path: Path) -> None:
    (problem,) = told(tmp_path, folder, server, ROWS, teacherKey="domain")
    assert "holds 'words' as domain, which no teacher has" in problem


def test_a_teacher_of_other_words_is_told_before_the_job(
    folder: str, server: Server, teacher: Teacher, tmp_path: Path
) -> None:
    def behave(handler: Handler, call: dict[str, Any]) -> None:
        places = teacher.prompt_logprobs(call["prompt"], call["prompt_logprobs"])
        for place in places[10:]:
            for entry in (place or {}).values():
                entry["decoded_token"] = "other"
        handler.answer(json.dumps({"choices": [{"prompt_logprobs": places}]}).encode())

    server.behave = behave
    (problem,) = told(tmp_path, folder, server, ROWS)
    assert "has another tokenizer" in problem
    assert "is 'other' there" in problem


def test_a_large_vocabulary_is_not_compared_as_a_whole(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "MAX_WHOLE_VOCABULARY", 100)
    spec = {
        "algorithm": {"name": "Distillation", "divergence": "Forward"},
        "models": {role: {"uri": f"file://{folder}"} for role in ("actor", "teacher")},
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl"},
            "maxPromptTokens": 16,
            "maxResponseTokens": 8,
        },
        "training": {"totalSteps": 1, "promptBatchSize": 2},
        "resources": {"device": "CPU", "slotsPerNode": 1},
    }
    made = job(tmp_path, "distilled", spec)
    problem, *others = map(str, JobCheck(made, {made.name: made}, tmp_path).problems())
    assert not others
    assert problem.startswith("distilled: spec.algorithm.topK: is missing, and 512 tokens are too many")
