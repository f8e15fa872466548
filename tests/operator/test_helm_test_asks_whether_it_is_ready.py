"""What the pod of `helm test` runs, against an operator and a small API server."""

import asyncio
from pathlib import Path

import pytest

from rlhf_operator import ready
from tests.operator.test_metrics import fetched, free_ports
from tests.operator.test_the_operator_starts_and_ends import Server, run, until


def test_it_says_whether_the_operator_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(server: Server, _: "asyncio.Task[None]", port: int) -> None:
        url = f"http://localhost:{port}/readyz"
        await until(lambda: server.holder)
        assert await fetched(port, "/readyz") == (200, "ok\n")
        assert await asyncio.to_thread(ready.main, url) is None
        assert capsys.readouterr().out == f"{url}: ok\n"
        assert await asyncio.to_thread(ready.main, f"{url}x") == f"{url}x: 404: 404: Not Found"

    run(tmp_path, test)


def test_an_operator_that_is_not_there_is_one_sentence() -> None:
    url = f"http://localhost:{free_ports().probes}/readyz"
    assert str(ready.main(url)).startswith(f"{url}: [Errno 111]")
