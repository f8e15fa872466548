"""A real MLflow server on this machine, and a reader of W&B's offline files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_SECONDS
from tests.repo.tree import ROOT

PYTHON = ROOT / ".venv-mlflow" / "bin" / "python"
BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
"""Bytes of LevelDB's log format, in which W&B keeps its records."""
WHOLE, LAST = 1, 4


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """The URL of a server whose data is in `folder`; it is killed with the block."""
    if not PYTHON.exists():
        pytest.skip("MLflow's server is not installed: make mlflow-server")
    command = [str(PYTHON), "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    with (folder / "server.log").open("a") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/health", server, folder / "server.log")
            yield url
        finally:
            os.killpg(server.pid, 9)
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    pytest.fail(f"MLflow's server does not start: {log.read_text()[-2000:]}")


class Stored:
    """What a server has of the runs of an experiment, by its REST API."""

    def __init__(self, url: str, experiment: str) -> None:
        self._api = f"{url}/api/2.0/mlflow"
        found = self._get("experiments/get-by-name", experiment_name=experiment)
        search = {"experiment_ids": [found["experiment"]["experiment_id"]]}
        answer = httpx.post(f"{self._api}/runs/search", json=search, timeout=30).raise_for_status()
        self.runs: list[dict[str, Any]] = answer.json().get("runs", [])

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every value that the only run has under this name."""
        (run,) = self.runs
        found = self._get("metrics/get-history", run_id=run["info"]["run_id"], metric_key=name)
        return sorted((int(each.get("step", 0)), each["value"]) for each in found.get("metrics", []))

    def parameters(self) -> dict[str, str]:
        (run,) = self.runs
        return {each["key"]: each["value"] for each in run["data"]["params"]}

    def _get(self, path: str, **arguments: str) -> dict[str, Any]:
        answer = httpx.get(f"{self._api}/{path}", params=arguments, timeout=30).raise_for_status()
        return dict(answer.json())


class OfflineRun:
    """The records of a `run-*.wandb` file, by W&B's own messages."""

    def __init__(self, file: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self.id, self.name, self.project = "", "", ""
        self.config: dict[str, Any] = {}
        self.steps: dict[int, dict[str, float]] = {}
        self.has_ended = False
        for text in _logged(file.read_bytes()):
            record = Record.FromString(text)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.name, self.project = record.run.run_id, record.run.display_name, record.run.project
                self.config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            elif kind == "history":
                values = {"/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
                self.steps[record.history.step.num] = {k: v for k, v in values.items() if not k.startswith("_")}
            self.has_ended |= kind == "exit"


def offline_runs(job_folder: Path) -> list[OfflineRun]:
    """The runs that W&B keeps in a job's folder, oldest first."""
    return [OfflineRun(file) for file in sorted(job_folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _logged(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after W&B's header."""
    assert data[:4] == b":W&B"
    place, parts = FILE_HEADER, b""
    while place + HEADER <= len(data):
        if (left := BLOCK - place % BLOCK) < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
