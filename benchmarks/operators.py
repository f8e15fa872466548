"""Our operator and one in kopf's usual style, on a real API server.

    python benchmarks/operators.py [--json PATH] [--jobs N]

Each operator has its own control plane (tests/cluster, level api), one after the other. KubeRay and Kubernetes'
controllers are off, so only the operator's part in a new RLHFJob is measured: its delay and its cost. A job counts as
reconciled when a watch sees its RayJob and the attempt in its status. The delay begins with the API server's answer to
the creation of the job. Writes are counted by the API server. The other operator (benchmarks/handlers_operator.py) does
the same work by handlers and a timer. The API server runs on the same machine; its CPU time per job bounds the jobs a
second. Exit code 1: a target was missed, or the other operator was better in most figures.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests.cluster is not installed

from rlhf_api import kubectl_yaml  # noqa: E402
from tests.cluster.client import Cluster  # noqa: E402
from tests.cluster.launch import cluster  # noqa: E402
from tests.cluster.processes import die_with_parent  # noqa: E402
from tests.cluster.settings import free_ports  # noqa: E402

CONSOLE = Console(width=120)
DEFINITION = ROOT / "crds/rlhfjobs.yaml"
EXAMPLE = kubectl_yaml.read((ROOT / "examples/01-helpful-ppo.yaml").read_text(), "")[0]
"""The job that is made over and over, under other names."""
SETTLE_SECONDS = 20.0
"""After the last job: longer than the period of a timer, in which late writes come."""
PATIENCE_SECONDS = 180.0
DELETE_SECONDS = 5.0
CREATORS = 4
NAMESPACE = "bench"
GROUP_PATH = "/apis/rlhf.hybridflow.io/v1alpha1"
JOBS = f"{GROUP_PATH}/namespaces/{NAMESPACE}/rlhfjobs"
RAYJOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
REQUEST = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
WRITES = ("PATCH", "PUT", "APPLY")
FIGURES = {
    "lag_p50_seconds": "created -> reconciled, median, s",
    "lag_p99_seconds": "created -> reconciled, p99, s",
    "status_writes_per_job": "writes of the status per job",
    "metadata_writes_per_job": "writes of the object itself per job",
    "cpu_seconds_per_job": "CPU time of the operator per job, s",
    "server_cpu_seconds_per_job": "CPU time of the API server per job, s",
    "peak_megabytes": "peak memory (RSS), MB",
    "idle_cpu_percent": "CPU when nothing happens, % of a core",
    "restart_seconds": "killed -> a new job is reconciled again, s",
    "deletion_needs_operator": "kubectl delete waits for the operator (1: yes)",
}
"""Figures of an operator, and their meanings; smaller is better."""
TARGETS = {
    "lag_p99_seconds": 3.0,
    "status_writes_per_job": 2.0,
    "metadata_writes_per_job": 0.0,
    "peak_megabytes": 200.0,
}
"""Bounds that our operator has to keep."""
Figures = dict[str, float]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_server(folder: Path) -> int:
    """Process number of the API server of a cluster."""
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_text().split("\0")
        if words[0].endswith("kube-apiserver") and any(str(folder) in word for word in words):
            return int(process.name)
    raise SystemExit("the API server does not run")


class Process:
    """An operator as a process of its own."""

    def __init__(self, command: list[str], server: Cluster, log: Path) -> None:
        self._command, self._server, self._log = command, server, log
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**os.environ, **self._server.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 the child does nothing else before it is replaced
            )

    @property
    def pid(self) -> int:
        assert self._popen, "it was not started"
        if self._popen.poll() is not None:
            raise SystemExit(f"{' '.join(self._command)} ended\n{self._log.read_text()[-4000:]}")
        return self._popen.pid

    def kill(self) -> None:
        """Kill the operator as a machine that loses power would."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._popen
        self._popen.wait()

    def peak_megabytes(self) -> float:
        """Peak memory of the process (VmHWM)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) * 1024 / 1e6


class Watched:
    """Times at which jobs were first seen as reconciled, by watches in threads of this process."""

    def __init__(self, server: Cluster) -> None:
        self._server = server
        self._ends = threading.Event()
        self.with_status: dict[str, float] = {}
        self.with_rayjob: dict[str, float] = {}
        self.trouble = ""
        self._threads = [
            threading.Thread(target=self._keep, args=args, daemon=True)
            for args in ((JOBS, "application/json", self._job), (RAYJOBS, METADATA_ONLY, self._rayjob))
        ]

    def reconciled(self) -> dict[str, float]:
        """Name of a job -> when its RayJob existed and its status had the attempt."""
        return {
            job: max(at, self.with_rayjob[job]) for job, at in list(self.with_status.items()) if job in self.with_rayjob
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch inside the block."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()

    def _job(self, document: Mapping[str, Any]) -> None:
        if document.get("status", {}).get("attempt"):
            self.with_status.setdefault(document["metadata"]["name"], time.monotonic())

    def _rayjob(self, document: Mapping[str, Any]) -> None:
        owners = document["metadata"].get("ownerReferences") or [{"name": ""}]
        self.with_rayjob.setdefault(owners[0]["name"], time.monotonic())

    def _keep(self, path: str, accept: str, see: Callable[[Mapping[str, Any]], None]) -> None:
        while not self._ends.is_set():
            try:
                self._watch(path, accept, see)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.trouble = f"watch of {path}: {error!r}"
                time.sleep(0.2)

    def _watch(self, path: str, accept: str, see: Callable[[Mapping[str, Any]], None]) -> None:
        settings = self._server.settings
        trust = ssl.create_default_context(cafile=str(self._server.folder / "pki/ca.crt"))
        connection = http.client.HTTPSConnection(settings.ip, settings.ports["server"], timeout=600, context=trust)
        headers = {"Authorization": f"Bearer {settings.tokens['admin']}", "Accept": accept}
        # Without a resourceVersion a watch begins with all objects that there are.
        connection.request("GET", f"{path}?watch=1", headers=headers)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"{answer.status} {answer.read()[:500]!r}")
        for line in answer:
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                see(event["object"])
            if self._ends.is_set():
                break
        connection.close()


def writes_of_jobs(server: Cluster) -> tuple[float, float]:
    """Return the API server's own counts so far of RLHFJob writes: of the status, and of the object itself."""
    status = metadata = 0.0
    for labels_text, count in REQUEST.findall(str(server.expect("GET", "/metrics"))):
        labels = dict(LABEL.findall(labels_text))
        if labels["resource"] != "rlhfjobs" or labels["verb"] not in WRITES or labels["code"] == "409":
            continue
        if labels["subresource"] == "status":
            status += float(count)
        else:
            metadata += float(count)
    return status, metadata


class Bench:
    """One operator on a control plane of its own."""

    def __init__(self, server: Cluster, process: Process, jobs: int, rate: float) -> None:
        self.server, self.process, self.jobs, self.rate = server, process, jobs, rate
        self.watched = Watched(server)
        self.created: dict[str, float] = {}

    def figures(self, idle_seconds: float) -> Figures:
        """Start the operator, create the jobs, and restart it at the end; return its figures."""
        self.process.start()
        with self.watched.running():
            self._create("warm-up")
            self._wait_for(["warm-up"])
            time.sleep(2.0)  # its second status is not counted as another job's
            server = api_server(self.server.folder)
            before, cpu, server_cpu = writes_of_jobs(self.server), cpu_seconds(self.process.pid), cpu_seconds(server)
            self._create_all()
            names = [f"job-{number:04d}" for number in range(self.jobs)]
            self._wait_for(names)
            time.sleep(SETTLE_SECONDS)
            spent, server_spent = cpu_seconds(self.process.pid) - cpu, cpu_seconds(server) - server_cpu
            status, metadata = (now - earlier for now, earlier in zip(writes_of_jobs(self.server), before, strict=True))
            idle = self._idle(idle_seconds)
            peak = self.process.peak_megabytes()
            restart = self._restart()
        done = self.watched.reconciled()
        lags = sorted(max(0.0, done[name] - self.created[name]) for name in names)
        return {
            "lag_p50_seconds": lags[len(lags) // 2],
            "lag_p99_seconds": lags[math.ceil(0.99 * len(lags)) - 1],
            "status_writes_per_job": status / self.jobs,
            "metadata_writes_per_job": metadata / self.jobs,
            "cpu_seconds_per_job": spent / self.jobs,
            "server_cpu_seconds_per_job": server_spent / self.jobs,
            "peak_megabytes": max(peak, self.process.peak_megabytes()),
            "idle_cpu_percent": idle,
            **restart,
        }

    def _create(self, name: str) -> None:
        self.server.expect("POST", JOBS, {**EXAMPLE, "metadata": {"name": name}})
        self.created[name] = time.monotonic()

    def _create_all(self) -> None:
        """Create the jobs at the rate, however long the API server takes for one."""
        begin = time.monotonic()
        with ThreadPoolExecutor(CREATORS) as pool:
            made = []
            for number in range(self.jobs):
                time.sleep(max(0.0, begin + number / self.rate - time.monotonic()))
                made.append(pool.submit(self._create, f"job-{number:04d}"))
            for each in made:
                each.result()
        taken = time.monotonic() - begin
        CONSOLE.print(f"  {self.jobs} jobs made in {taken:.1f} s ({self.jobs / taken:.0f}/s)")

    def _wait_for(self, names: list[str]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while missing := set(names) - self.watched.reconciled().keys():
            assert self.process.pid, "it runs"
            if time.monotonic() > end:
                message = f"{len(missing)} jobs were not reconciled, such as {min(missing)}"
                raise SystemExit(f"{message}; {self.watched.trouble}")
            time.sleep(0.05)

    def _idle(self, seconds: float) -> float:
        before = cpu_seconds(self.process.pid)
        time.sleep(seconds)
        return 100 * (cpu_seconds(self.process.pid) - before) / seconds

    def _restart(self) -> Figures:
        """Kill the operator, delete a job meanwhile, and start the operator again over all other jobs."""
        self.process.kill()
        self.server.expect("DELETE", f"{JOBS}/warm-up")
        time.sleep(DELETE_SECONDS)
        is_there = self.server.request("GET", f"{JOBS}/warm-up")[0] == 200
        begin = time.monotonic()
        self.process.start()
        self._create("after")
        self._wait_for(["after"])
        return {"restart_seconds": time.monotonic() - begin, "deletion_needs_operator": int(is_there)}


def commands(folder: Path) -> dict[str, list[str]]:
    """Write the settings into a file of the folder, and return the command line of each operator."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"namespaces": [NAMESPACE]}))
    port, probes_port = map(str, free_ports(2))
    return {
        "ours": [
            str(Path(sys.executable).with_name("rlhf-operator")),
            "--config",
            str(config),
            "--port",
            port,
            "--probes-port",
            probes_port,
            "--log-format",
            "text",
        ],
        "handlers": [sys.executable, str(ROOT / "benchmarks/handlers_operator.py"), str(config)],
    }


def measured(name: str, jobs: int, rate: float, idle_seconds: float) -> Figures:
    """One operator, on a fresh control plane."""
    with cluster("api") as server:
        server.stop_kuberay()
        server.kubectl("apply", "--server-side", "-f", DEFINITION)
        server.until(lambda: server.request("GET", f"{GROUP_PATH}/rlhfjobs")[0] == 200, 30, "RLHFJobs are known")
        server.make_namespace(NAMESPACE)
        server.add_node("large", {"cpu": "1M", "memory": "1Pi", "nvidia.com/gpu": str(2 * jobs)})  # none is to wait
        server.order("stop", "kube-controller-manager")
        process = Process(commands(server.folder)[name], server, server.folder / f"{name}.log")
        try:
            return Bench(server, process, jobs, rate).figures(idle_seconds)
        finally:
            CONSOLE.print(f"  last lines of its log:\n{(server.folder / f'{name}.log').read_text()[-600:]}")


def missed(ours: Figures, other: Figures) -> list[str]:
    """Return a sentence for each missed target."""
    found = [
        f"{FIGURES[name]}: {ours[name]:.2f}, at most {most:g} wanted"
        for name, most in TARGETS.items()
        if ours[name] > most
    ]
    better, worse = sum(ours[name] < other[name] for name in ours), sum(ours[name] > other[name] for name in ours)
    return [*found, *([f"better in {better} figures, worse in {worse}"] if better <= worse else [])]


def show(results: Mapping[str, Figures], jobs: int, rate: float) -> None:
    """The table."""
    title = f"{jobs} RLHFJobs at {rate:g}/s, KubeRay and controllers off, both operators in this run"
    printed = Table("", *results, "target", title=title, title_justify="left")
    for name, meaning in FIGURES.items():
        target = f"<= {TARGETS[name]:g}" if name in TARGETS else ""
        printed.add_row(meaning, *(f"{figures[name]:.3g}" for figures in results.values()), target)
    CONSOLE.print(printed)


def main() -> int:
    """Run both; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0, help="jobs a second")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--only", choices=["ours", "handlers"], help="one of them, and no comparison")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in [options.only] if options.only else ["ours", "handlers"]:
        CONSOLE.print(f"{name}:")
        results[name] = measured(name, options.jobs, options.rate, options.idle_seconds)
    show(results, options.jobs, options.rate)
    for name, figures in results.items():
        most = (os.cpu_count() or 1) / (figures["server_cpu_seconds_per_job"] + figures["cpu_seconds_per_job"])
        CONSOLE.print(f"{name}: with its API server this machine can serve {most:.0f} jobs a second at most")
    if options.json:
        document = {"jobs": options.jobs, "rate": options.rate, **results}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    problems = missed(results["ours"], results["handlers"]) if len(results) == 2 else []
    for problem in problems:
        CONSOLE.print(f"missed: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
