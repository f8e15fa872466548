"""A judge and a teacher on vLLM's own OpenAI-compatible server: a tiny model, held to the form of a verdict."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from rlhf_api.spec.judges import Judge, TeacherEndpoint
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.workers.teacher import TeacherClient, TeacherText
from tests.patience import PATIENCE_SECONDS
from tests.trainer.teachers import Teacher
from tests.trainer.tiny import save_tiny

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
pytestmark = pytest.mark.slow
START_SECONDS = PATIENCE_SECONDS
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server with a random model."""
    folder = tmp_path_factory.mktemp("judge")
    model, template = save_tiny(folder / "model", seed=1), folder / "template.jinja"
    template.write_text(TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    options = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=judge", "--dtype=float32", "--enforce-eager"]
    options += ["--max-model-len=256", "--kv-cache-memory-bytes=67108864", f"--chat-template={template}"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *options]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(f"{base}/health"):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)
        yield f"{base}/v1"
    finally:
        server.terminate()
        server.wait(60)


def answers(address: str) -> bool:
    try:
        return httpx.get(address, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def judge(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> JudgeClient:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked = Judge.model_validate({"url": url, "model": "judge", **options})
    path = "job: spec.models.reward.judge"
    return JudgeClient(url=f"{url}/chat/completions", settings=asked, ranks=1, path=path)


def samples(*responses: str) -> list[Sample]:
    return [Sample(step=1, row=row, prompt="q", response=text, finished=True) for row, text in enumerate(responses)]


def held_to(*verdicts: str) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": list(verdicts)}}


def test_a_number_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge(url, monkeypatch, prompt="Rate {response}", arguments=held_to("[[1]]", "[[10]]"))
    given = samples("First, wipe the lamp.", "No.", "No.")
    found = [score.value for score in asked.scores(given)]
    assert set(found) <= {0.0, 1.0}
    assert asked.questions == 2
    assert [score.value for score in asked.scores(given)] == found
    assert asked.questions == 0


def test_pairs_are_compared(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge(url, monkeypatch, prompt="{response_a} or {response_b}?", arguments=held_to("[[A]]", "[[B]]"))
    one, two = (score.value for score in asked.scores(samples("Yes.", "No.")))
    assert one is not None
    assert two == 1.0 - one


def test_a_model_that_gives_no_verdict_ends_the_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge(url, monkeypatch, prompt="Rate {response}", arguments={"temperature": 0, "max_tokens": 4})
    with pytest.raises(UserCodeError, match=r"gave no verdict, .* on 2 of 2 questions"):
        asked.scores(samples("Yes.", "No."))


def test_a_question_too_long_leaves_its_response_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge(url, monkeypatch, prompt="Rate {response}", arguments=held_to("[[1]]", "[[10]]"))
    first, second = asked.scores(samples("Yes.", "No. " * 300))
    assert first.value is not None
    assert second.value is None


def test_a_model_that_is_not_served_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserCodeError, match=r"/chat/completions answered 404 Not Found"):
        judge(url, monkeypatch, prompt="Rate {response}", model="other").scores(samples("Yes."))


def test_a_teacher_gives_the_log_probs_of_its_model(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_tiny(tmp_path / "model", seed=1)
    local, words = Teacher(folder), AutoTokenizer.from_pretrained(folder)
    texts = [
        TeacherText(words(text).input_ids, start) for text, start in (("First, wipe the lamp.", 3), ("How? No.", 1))
    ]
    settings = TeacherEndpoint.model_validate({"name": "it", "url": url, "model": "judge"})
    options: dict[str, Any] = {"url": f"{url}/completions", "settings": settings, "ranks": 1, "path": "job: it"}
    sampled = TeacherClient(**options, count=0, vocabulary=len(words))
    likeliest = TeacherClient(**options, count=8, vocabulary=len(words))
    for client in (sampled, likeliest):
        client.require_words({token: words.decode([token]) for token in range(0, 500, 9)})
    for text, own, some in zip(texts, sampled.log_probs(texts), likeliest.log_probs(texts), strict=True):
        with torch.no_grad():
            log_probs = local.model(torch.tensor([text.tokens])).logits[0, text.start - 1 : -1].log_softmax(-1)
        assert_close(
            own, log_probs.gather(1, torch.tensor(text.tokens[text.start :])[:, None])[:, 0], atol=1e-4, rtol=0
        )
        expected = log_probs.topk(8)
        assert_close(some[:, 8:], expected.values, atol=1e-4, rtol=0)
        assert_close(log_probs.gather(1, some[:, :8].long()), expected.values, atol=1e-4, rtol=0)
