"""The operator as a process beside a cluster, to be ended in every way."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.client import Cluster
from tests.cluster.processes import die_with_parent
from tests.cluster.settings import ROOT, free_ports
from tests.patience import PATIENCE_SECONDS

SECONDS_TO_START = PATIENCE_SECONDS
SECONDS_TO_END = 30
PROGRAM = (
    "import faulthandler, signal; from rlhf_operator.main import main; faulthandler.register(signal.SIGUSR1); main()"
)
"""`rlhf-operator`, which prints where its threads are when it gets SIGUSR1."""


class OperatorProcess:
    """`rlhf-operator` for one namespace, with a status interval of half a second."""

    def __init__(
        self, server: Cluster, namespace: str, folder: Path, user: str | Path = "admin", **settings: Any
    ) -> None:
        """`user` as Cluster.kubeconfig knows it, or a kubeconfig; `settings` in the operator's words, over ours."""
        self.port, self.probes_port = free_ports(2)
        self.log_file = folder / f"operator-{self.port}.log"
        config = folder / f"operator-{self.port}.yaml"
        own = {"namespaces": [namespace], "leaseNamespace": namespace, "statusIntervalSeconds": 0.5}
        own["storage"] = {"size": "1Gi"}
        config.write_text(yaml.safe_dump({**own, **settings}))
        self._command = [sys.executable, "-c", PROGRAM, "--config", str(config)]
        kubeconfig = user if isinstance(user, Path) else server.kubeconfig(user)
        self._command += ["--kubeconfig", str(kubeconfig), "--port", str(self.port)]
        self._command += ["--probes-port", str(self.probes_port)]
        # As in a pod whose container starts again: the Lease is still its own.
        self._environment = {**os.environ, "POD_NAME": f"operator-{self.port}"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--log-format", "text"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 the child does nothing else before it is replaced
            )

    def wait_until_ready(self) -> None:
        """Until /readyz says so."""
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end:
            assert self.running, f"the operator has ended\n{self.log()}"
            if self.get("/readyz") is not None:
                return
            time.sleep(0.1)
        raise AssertionError(f"the operator does not get ready\n{self.log()}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """The exit code, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        """Any signal, such as SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"the operator does not end\n{self.log()}") from None

    def get(self, path: str) -> str | None:
        """What it answers; None for an error or no answer."""
        port = self.port if path == "/metrics" else self.probes_port
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def metric(self, name: str) -> float:
        """The sum of a metric's series; `name` may have labels: x_total{result="done"}."""
        lines = (self.get("/metrics") or "").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{", name)))

    def state(self) -> str:
        """Whether it runs and is healthy, where its threads are, and the end of what it has printed."""
        healthy = self.get("/healthz") is not None
        if self.running:
            self.send(signal.SIGUSR1)
            time.sleep(1)
        return f"operator: running {self.running}, healthy {healthy}\n{self.log()[-8000:]}"

    def log(self) -> str:
        """What it has printed since its first start."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""


@contextmanager
def operator(
    server: Cluster, namespace: str, folder: Path, user: str | Path = "admin", **settings: Any
) -> Iterator[OperatorProcess]:
    """A ready operator; whatever a test did with it, it ends with the test."""
    process = OperatorProcess(server, namespace, folder, user, **settings)
    process.start()
    server.states.append(process.state)
    try:
        process.wait_until_ready()
        yield process
    finally:
        server.states.remove(process.state)
        if process.running:
            process.send(signal.SIGCONT)
            process.kill()
        sys.stdout.write(process.log())
