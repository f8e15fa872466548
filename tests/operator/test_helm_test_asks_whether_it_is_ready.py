"""What the pod of `helm test` runs, against an operator and a small API server."""

import asyncio
from pathlib import Path

import pytest

from rlhf_operator import ready
from tests.operator.test_metrics import fetched, free_ports
from tests.operator.test_the_operator_starts_and_ends import Server, run, until


def test_it_says_what_there_is_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("readNodes: false\n")
    asking = ["--config", str(config), "--kubeconfig", str(tmp_path / "kubeconfig")]

    async def test(server: Server, _: "asyncio.Task[None]", port: int) -> None:
        url = f"http://localhost:{port}/readyz"
        await until(lambda: server.holder)
        assert await fetched(port, "/readyz") == (200, "ok\n")
        assert await asyncio.to_thread(ready.main, [*asking, url]) is None
        said = f"{url}: ok\nthe API server knows RLHFJobs; besides them the cluster offers: nothing\n"
        assert capsys.readouterr().out == said
        assert await asyncio.to_thread(ready.main, [*asking, f"{url}x"]) == f"{url}x: 404: 404: Not Found"
        del server.kinds["/apis/rlhf.hybridflow.io/v1alpha1"]
        assert "the API server has no rlhfjobs" in str(await asyncio.to_thread(ready.main, [*asking, url]))

    run(tmp_path, test)


def test_an_operator_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    config, url = tmp_path / "config.yaml", f"http://localhost:{free_ports().probes}/readyz"
    config.write_text("{}\n")
    said = ready.main(["--config", str(config), url])
    assert said is not None
    assert said.startswith(f"{url}: [Errno 111]")
    config.write_text("wrong: 1\n")
    assert f"{config}: wrong" in str(ready.main(["--config", str(config), url]))
