"""What head pods answer over HTTP, and what the cluster offers."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlhf_operator import main
from rlhf_operator.cluster import heartbeats as module
from rlhf_operator.cluster.heartbeats import Heartbeats
from rlhf_operator.snapshot import ObservedPod
from tests.each import each_case

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
POD = ObservedPod(name="head", uid="p", attempt=2, role="controller", created=NOW, ip="127.0.0.1", phase="Running")
ANSWER = {"attempt": 2, "status": {"phase": "Running"}, "complete": False, "exitCode": None}


class Head:
    """A head pod that answers what a test wants."""

    def __init__(self) -> None:
        self.body = json.dumps(ANSWER).encode()
        self.code = 200
        self.delay = 0.0

    def says(self, **changes: Any) -> None:
        self.body = json.dumps({**ANSWER, **changes}).encode()

    async def answer(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.delay)
        return web.Response(status=self.code, body=self.body, headers={"Location": "/status.json"})


def run(test: Callable[[Head, Heartbeats], Awaitable[None]]) -> None:
    async def loop() -> None:
        head = Head()
        application = web.Application()
        application.router.add_get("/status.json", head.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        heartbeats = Heartbeats(lambda: NOW, port=runner.addresses[0][1])
        try:
            await asyncio.wait_for(test(head, heartbeats), 20)
        finally:
            await heartbeats.close()
            await runner.cleanup()

    asyncio.run(loop())


def test_an_answer_is_kept_and_only_news_is_news() -> None:
    async def test(head: Head, heartbeats: Heartbeats) -> None:
        head.says(jobUid="v")
        assert not await heartbeats.read("u", POD), "the address has gone to a pod of another job"
        head.says(jobUid="u")
        assert await heartbeats.read("u", POD)
        assert not await heartbeats.read("u", POD)
        head.says(jobUid="u", complete=True, exitCode=7)
        assert await heartbeats.read("u", POD)
        found = heartbeats.last("u", 2)
        assert found
        assert (found.exit_code, found.complete, found.status.phase, found.received) == (7, True, "Running", NOW)
        assert heartbeats.last("u", 3) is None
        assert heartbeats.last("v", 2) is None
        heartbeats.forget_all_but({"v"})
        assert heartbeats.last("u", 2) is None

    run(test)


@each_case(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'{"attempt": 1}', b'{"attempt": "2"}', b'{"attempt": true}', b"\xff\xfe"),
        b"[" * 100_000,
        json.dumps({**ANSWER, "filling": "x" * 2 * module.MAX_BYTES}).encode(),
    ],
    ids=lambda body: str(body[:20]),
)
def test_nonsense_is_no_heartbeat(body: bytes) -> None:
    async def test(head: Head, heartbeats: Heartbeats) -> None:
        head.body = body
        assert not await heartbeats.read("u", POD)
        assert heartbeats.last("u", 2) is None

    run(test)


def test_a_strange_status_is_read_as_far_as_it_goes() -> None:
    async def test(head: Head, heartbeats: Heartbeats) -> None:
        head.says(status={"phase": "Running", "progress": 7, "metrics": [{"name": 1}]}, exitCode=-9, complete="yes")
        assert await heartbeats.read("u", POD)
        found = heartbeats.last("u", 2)
        assert found
        assert (found.status.phase, found.status.progress, found.exit_code, found.complete) == (
            "Running",
            None,
            None,
            False,
        )

    run(test)


@pytest.mark.parametrize("code", [302, 404, 500])
def test_any_other_code_is_no_heartbeat(code: int) -> None:
    async def test(head: Head, heartbeats: Heartbeats) -> None:
        head.code = code
        assert not await heartbeats.read("u", POD)

    run(test)


def test_a_head_that_is_gone_or_silent_is_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(head: Head, heartbeats: Heartbeats) -> None:
        assert not await heartbeats.read("u", replace(POD, ip="127.0.0.99"))
        assert not await heartbeats.read("u", replace(POD, ip="no address"))
        head.delay = 3600
        assert not await heartbeats.read("u", POD)

    monkeypatch.setattr(module, "READ_SECONDS", 0.2)
    run(test)


def test_wrong_settings_are_named_with_their_path_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("statusIntervalSeconds: -1\ntrainerImage: 7\n")
    assert main.run(["--config", str(config)]) == 2
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert any("statusIntervalSeconds" in line for line in lines)
    assert any("trainerImage" in line for line in lines)


def test_no_cluster_is_a_sentence_and_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("")
    missing = str(tmp_path / "nothing")
    assert main.run(["--config", str(config), "--kubeconfig", missing, "--log-format", "text"]) == 1
    told = capsys.readouterr().err
    assert "no way to the API server" in told
    assert "Traceback" not in told


def test_an_answer_that_is_deep_does_not_end_the_process() -> None:
    program = """
import sys
from rlhf_operator.cluster.heartbeats import parsed
from rlhf_operator.main import MAX_DEPTH
sys.setrecursionlimit(MAX_DEPTH)
try:
    parsed(b"[" * 99_000 + b"]" * 99_000)
except ValueError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (said.stdout, said.returncode) == ("too many parts\n", 0), said.stderr[-2000:]
