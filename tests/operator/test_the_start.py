"""The start of the operator's program: what its port answers meanwhile, and how it ends."""

import asyncio
import json
import logging
import os
import signal
import socket
from pathlib import Path

import pytest

from rlhf_api.problems import SpecError
from rlhf_operator import main
from rlhf_operator.settings import Settings
from tests.cluster.credentials import kubeconfig
from tests.operator.test_metrics import fetched, free_ports


def test_probes_and_sigterm_work_while_the_api_server_is_away(tmp_path: Path) -> None:
    ports = free_ports()

    async def start() -> None:
        with socket.socket() as deaf:  # it takes connections and says nothing
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            way_in = tmp_path / "kubeconfig"
            way_in.write_text(kubeconfig(f"http://127.0.0.1:{deaf.getsockname()[1]}", "secret"))
            operating = asyncio.create_task(main._operate(Settings(), way_in, ports))
            try:
                async with asyncio.timeout(10):
                    while not await answers(ports.metrics):  # noqa: ASYNC110 nothing tells when a port opens
                        await asyncio.sleep(0.02)
                assert await fetched(ports.probes, "/healthz") == (200, "ok\n")
                status, why = await fetched(ports.probes, "/readyz")
                assert (status, why) == (503, "what is in the cluster has not been listed yet\n")
                assert not operating.done()
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(10):
                    await operating
            finally:
                operating.cancel()
                await asyncio.gather(operating, return_exceptions=True)

    asyncio.run(start())


async def answers(port: int) -> bool:
    try:
        return (await fetched(port, "/metrics"))[0] == 200
    except OSError:
        return False


def test_without_a_way_to_the_server_the_program_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{}\n")
    arguments = ["--config", str(config), "--kubeconfig", str(tmp_path / "none"), "--log-format", "text"]
    assert main.run(arguments) == 1
    said = capsys.readouterr().err
    assert "no way to the API server" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("worker: {cpu: '0', memory: 1Gi}", 'worker.cpu: is "0", expected more than 0'),
        ("worker: {cpu: '1', memory: '64'}", 'worker.memory: is "64", expected at least 1Mi; a number without a unit'),
        ("sharedMemory: 100m", 'sharedMemory: is "100m", expected at least 1Mi'),
        ("storage: {size: '50'}", 'storage.size: is "50", expected at least 1Mi'),
    ],
)
def test_a_size_that_no_pod_can_have_is_refused_with_its_path(tmp_path: Path, written: str, told: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"{written}\n")
    with pytest.raises(SpecError) as refused:
        Settings.read(config)
    assert f"{config}: {told}" in str(refused.value)


def test_settings_that_are_no_utf8_are_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_bytes("trainerImage: ä".encode("utf-16"))
    with pytest.raises(SpecError, match=r"config\.yaml: cannot be read: it is not UTF-8 text"):
        Settings.read(config)


@pytest.mark.parametrize(("level", "told"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_log_begins_at_its_level_and_a_line_of_it_is_json(
    level: str, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main._log("json", level)
    for each in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("rlhf_operator.any"), each)("said %s", each)
    logging.getLogger("kopf.objects").info("of every event")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == [f"said {each}" for each in ("debug", "info", "warning", "error")][
        -told:
    ]
    assert {"time", "level", "logger"} <= lines[0].keys()
    main._log("text", "info")
    logging.getLogger("rlhf_operator.any").info("said")
    assert "INFO    rlhf_operator.any: said" in capsys.readouterr().err
