"""/metrics over TLS: who gets them, with which certificate, and what is said where there is none."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession
from prometheus_client import CollectorRegistry

from rlhf_api.problems import SpecError
from rlhf_operator import main, server
from rlhf_operator.server import Ports, Server, Tls
from tests.cluster.credentials import make_authority, sign
from tests.operator.test_metrics import fetched, free_ports

NAME = "subjectAltName=DNS:localhost"


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    """A folder with ca.crt, tls.crt and tls.key, as cert-manager makes them, and a client's certificate."""
    folder = tmp_path / "pki"
    folder.mkdir()
    make_authority(folder)
    sign(folder, "tls", "/CN=metrics", NAME)
    sign(folder, "client", "/CN=prometheus", "extendedKeyUsage=clientAuth")
    return folder


def serving(tls: Tls, test: Callable[[Ports], Awaitable[None]]) -> None:
    """Has a server with this TLS while the test runs."""

    async def life() -> None:
        free = free_ports()
        ports = Ports(metrics=free.metrics, probes=free.probes, tls=tls)
        running = Server(CollectorRegistry(), unhealthy=lambda: None, unready=lambda: None)
        await running.start(ports)
        try:
            await test(ports)
        finally:
            await running.stop()

    asyncio.run(life())


async def code(ports: Ports, pki: Path, client: str = "") -> int:
    """HTTP's answer for /metrics to one who trusts the authority, and may have a certificate."""
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    if client:
        context.load_cert_chain(pki / f"{client}.crt", pki / f"{client}.key")
    async with ClientSession() as session, session.get(f"https://localhost:{ports.metrics}/metrics", ssl=context) as it:
        return it.status


def test_metrics_are_served_over_tls_only_and_probes_without(pki: Path) -> None:
    async def test(ports: Ports) -> None:
        assert await code(ports, pki) == 200
        with pytest.raises(ClientError):
            await fetched(ports.metrics, "/metrics")
        assert await fetched(ports.probes, "/readyz") == (200, "ok\n")
        assert (await fetched(ports.probes, "/metrics"))[0] == 404

    serving(Tls(pki), test)


def test_who_shows_no_certificate_gets_no_metrics(pki: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    make_authority(stranger)
    sign(stranger, "client", "/CN=prometheus", "extendedKeyUsage=clientAuth")
    for suffix in ("crt", "key"):
        (pki / f"stranger.{suffix}").write_bytes((stranger / f"client.{suffix}").read_bytes())

    async def test(ports: Ports) -> None:
        for client in ("", "stranger"):
            with pytest.raises((ClientError, OSError)):
                await code(ports, pki, client)
        assert await code(ports, pki, "client") == 200
        assert await fetched(ports.probes, "/healthz") == (200, "ok\n")

    serving(Tls(pki, asks_clients=True), test)


def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(
    pki: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "RENEW_SECONDS", 0.02)

    async def served(ports: Ports) -> str:
        """The certificate as the server shows it."""
        return await asyncio.to_thread(ssl.get_server_certificate, ("localhost", ports.metrics))

    async def test(ports: Ports) -> None:
        first = await served(ports)
        sign(pki, "tls", "/CN=renewed", NAME)
        renewed = (pki / "tls.crt").read_text()
        while await served(ports) == first:  # noqa: ASYNC110 nothing tells when it is read
            await asyncio.sleep(0.02)
        assert await served(ports) == renewed
        (pki / "tls.crt").write_text("half of it")
        while "cannot be read anew" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await served(ports) == renewed
        assert await code(ports, pki) == 200

    serving(Tls(pki), test)


@pytest.mark.parametrize(("flags", "names"), [([], "tls.key for TLS"), (["--require-client-certificate"], "ca.crt")])
def test_a_folder_without_certificate_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], names: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{}\n")
    assert main.run(["--config", str(config), "--tls", str(tmp_path), *flags, "--log-format", "text"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}: has no" in said
    assert names in said
    assert "Traceback" not in said
    with pytest.raises(SpecError):
        Tls(tmp_path)


def test_client_certificates_without_tls_are_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(["--config", str(tmp_path), "--require-client-certificate"])
    assert ended.value.code == 2
    assert "needs --tls" in capsys.readouterr().err
