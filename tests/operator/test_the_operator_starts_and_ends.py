"""The operator's whole life on an API server that is a small one: it starts, leads, and ends in order."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlhf_operator import main
from rlhf_operator.cluster.client import ApiError, NoClusterError
from rlhf_operator.cluster.leader_election import LoopThread, LostLeaseError
from rlhf_operator.main import RestartAttemptError
from rlhf_operator.server import Ports
from rlhf_operator.settings import Settings
from tests.cluster.credentials import kubeconfig
from tests.operator.test_metrics import fetched, free_ports

VERBS = ["list", "watch", "patch"]
KINDS = {
    "/api/v1": [("pods", "Pod"), ("persistentvolumeclaims", "PersistentVolumeClaim"), ("namespaces", "Namespace")],
    "/apis/apiextensions.k8s.io/v1": [("customresourcedefinitions", "CustomResourceDefinition")],
    "/apis/rlhf.hybridflow.io/v1alpha1": [("rlhfjobs", "RLHFJob")],
}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/system/leases"


class Server:
    """Discovery, empty lists, watches that show nothing, and one Lease."""

    def __init__(self) -> None:
        self.kinds = dict(KINDS)
        self.lease: dict[str, Any] | None = None
        self.watches = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(LEASES):
            return await self._lease(request)
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/apis":
            return web.json_response({"groups": [_group(path) for path in self.kinds if path.startswith("/apis/")]})
        if request.path in self.kinds:
            found = [
                {"name": name, "kind": kind, "singularName": "", "namespaced": True, "verbs": VERBS}
                for name, kind in self.kinds[request.path]
            ]
            return web.json_response({"resources": found})
        if not any(request.path == f"{path}/{name}" for path, kinds in self.kinds.items() for name, _ in kinds):
            return web.json_response({"message": "not here"}, status=404)
        if request.query.get("watch") != "true":
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches += 1
        try:
            with contextlib.suppress(ConnectionResetError):
                while True:
                    await response.write(b"\n")
                    await asyncio.sleep(0.05)
        finally:
            self.watches -= 1
        return response

    async def _lease(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            lease = await request.json()
            before = self.lease["metadata"]["resourceVersion"] if self.lease else "0"
            if lease["metadata"].get("resourceVersion", "0") != before:
                return web.json_response({"message": "conflict"}, status=409)
            lease["metadata"]["resourceVersion"] = str(int(before) + 1)
            self.lease = lease
        return web.json_response(self.lease or {}, status=200 if self.lease else 404)

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease else ""


def _group(path: str) -> dict[str, Any]:
    _, _, group, version = path.split("/")
    found = {"version": version, "groupVersion": f"{group}/{version}"}
    return {"name": group, "versions": [found], "preferredVersion": found}


def run(tmp_path: Path, test: Callable[[Server, "asyncio.Task[None]", int], Awaitable[None]]) -> None:
    """`test` gets the server, the operator as a task, and the port of its probes.

    The server has a thread: at its end kopf waits five seconds for all tasks of its loop that it does not know.
    """

    async def started(server: Server) -> web.AppRunner:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def life() -> None:
        server, ports, thread = Server(), free_ports(), LoopThread("server")
        runner = await thread.run(started(server))
        config = tmp_path / "kubeconfig"
        config.write_text(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}", "secret"))
        settings = Settings(lease_namespace="system", read_nodes=False)
        operating = asyncio.create_task(main._operate(settings, config, ports))
        try:
            async with asyncio.timeout(50):
                await test(server, operating, ports.probes)
        finally:
            operating.cancel()
            await asyncio.gather(operating, return_exceptions=True)
            await thread.run(runner.cleanup())
            await thread.close()

    asyncio.run(life())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 the condition is of plain values
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_leads_and_gives_the_lease_back_at_its_end(tmp_path: Path, number: int) -> None:
    async def test(server: Server, operating: "asyncio.Task[None]", port: int) -> None:
        await until(lambda: server.holder and server.watches == 3)
        assert await fetched(port, "/readyz") == (200, "ok\n")
        os.kill(os.getpid(), number)
        await operating
        assert server.lease is not None
        assert (server.holder, server.lease["spec"]["leaseDurationSeconds"]) == ("", 1)
        await until(lambda: not server.watches)

    run(tmp_path, test)


def test_another_leader_makes_it_begin_anew(tmp_path: Path) -> None:
    async def test(server: Server, operating: "asyncio.Task[None]", _: int) -> None:
        await until(lambda: server.holder and server.watches == 3)
        assert server.lease is not None
        metadata = {**server.lease["metadata"], "resourceVersion": "99"}
        server.lease = {**server.lease, "metadata": metadata, "spec": {**server.lease["spec"], "holderIdentity": "x"}}
        with pytest.raises(LostLeaseError, match="now held by x"):
            await operating
        assert server.holder == "x"

    run(tmp_path, test)


def test_a_cluster_that_offers_more_makes_it_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "COMPARE_OFFERS_SECONDS", 0.3)

    async def test(server: Server, operating: "asyncio.Task[None]", _: int) -> None:
        await until(lambda: server.holder and server.watches == 3)
        server.kinds["/apis/ray.io/v1"] = [("rayjobs", "RayJob")]
        with pytest.raises(RestartAttemptError, match="and now kuberay"):
            await operating
        assert server.holder == ""

    run(tmp_path, test)


@pytest.mark.parametrize("trouble", [LostLeaseError("lost"), RestartAttemptError("another offer")])
def test_once_it_has_worked_the_process_does_not_end_by_itself(
    trouble: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pauses = tmp_path / "settings.yaml", list[float]()
    config.write_text("{}")
    ends = iter([trouble, ApiError(403, "not yet"), NoClusterError("no definition"), None])

    async def life(_: Settings, __: Path | None, ___: Ports, pause: float) -> None:
        pauses.append(pause)
        if error := next(ends):
            raise error

    monkeypatch.setattr(main, "_operate", life)
    assert main.run(["--config", str(config)]) == 0
    assert pauses[0] == 0
    assert min(pauses[1:]) > 0
    ends = iter([NoClusterError("no definition")])
    assert main.run(["--config", str(config)]) == 1
