"""A job that generates with two vLLM servers, started as docs/rollouts.md says, of which one is killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_api.exit_codes import ExitCode
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, records, rlhf
from tests.trainer.tiny import save_tiny

pytestmark = pytest.mark.slow
START_SECONDS = PATIENCE_SECONDS
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ON_CPU = ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=33554432"]
FEW_AT_A_TIME = "--max-num-seqs=4"
"""So that there is time to kill a server while it generates."""
STEPS, ROWS = 6, 32
MANIFEST = """
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {{name: grpo}}
spec:
  algorithm: {{name: GRPO}}
  models:
    actor: {{uri: "file://{model}", optimizer: {{learningRate: 1e-3}}}}
    reward: {{entrypoint: "tests.trainer.chain.test_generation_elsewhere:by_length"}}
  data:
    train: {{uri: package://rlhf_examples/helpful/train.jsonl}}
    maxPromptTokens: 16
    maxResponseTokens: 112
  rollout: {{samplesPerPrompt: 4, keep: 1.0}}
  training: {{totalSteps: {steps}, promptBatchSize: 8}}
  evaluation:
    data: {{uri: package://rlhf_examples/helpful/heldout.jsonl, limit: 6}}
    greedy: true
  resources: {{device: CPU, slotsPerNode: 1}}
"""
MEASURED = ("loss/policy", "reward/mean", "entropy", "response_length/mean", "kl/rollout", "staleness")


def by_length(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:  # noqa: ARG001 all are given
    """A reward: the length of the response."""
    return [float(len(response)) for response in responses]


class Server:
    """A process of its own, whose children end with it."""

    def __init__(self, folder: Path, model: str, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        said = (ROOT / "docs" / "rollouts.md").read_text()
        (command,) = re.findall(r"```bash\n(VLLM_SERVER_DEV_MODE.*?)```", said, re.DOTALL)
        words = shlex.split(command.replace("\\\n", " ").replace("MODEL", model))
        assert words[:2] == ["VLLM_SERVER_DEV_MODE=1", "python"]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
        arguments = [sys.executable, *words[2:], f"--port={port}", "--max-model-len=128", *ON_CPU, *options]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                arguments, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not self.says("/health"):
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)

    def says(self, path: str) -> str:
        """What it answers; nothing if it does not."""
        try:
            answer = httpx.get(f"{self.url}{path}", trust_env=False)
        except httpx.HTTPError:
            return ""
        return answer.text or "ok" if answer.is_success else ""

    def is_generating(self) -> bool:
        return bool(re.search(r"^vllm:num_requests_running{.*} [1-9]", self.says("/metrics"), re.MULTILINE))

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    file = folder / "job.yaml"
    file.write_text(MANIFEST.format(model=save_tiny(folder / "model", seed=3), steps=STEPS))
    return file


@pytest.fixture(scope="module")
def servers(manifest: Path) -> Iterator[list[Server]]:
    """Two servers, which start while the first run generates in place."""
    made = [Server(manifest.parent, str(manifest.parent / "model"), FEW_AT_A_TIME) for _ in range(2)]
    yield made
    for server in made:
        server.kill()


def rows(output: Path) -> list[Mapping[str, Any]]:
    """What was generated for every row."""
    lines = map(json.loads, (output / "grpo" / "rollouts.jsonl").read_text().splitlines())
    return sorted(lines, key=lambda row: (row["step"], row["row"]))


def samples(output: Path) -> list[Any]:
    """The likeliest response to each held-out prompt, before and after."""
    lines = map(json.loads, (output / "grpo" / "samples.jsonl").read_text().splitlines())
    return [(line["prompt"], line["response_before"], line["response_after"]) for line in lines]


def when(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    while not condition():
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)


def test_one_of_two_servers_is_killed_and_no_row_differs(manifest: Path, servers: list[Server]) -> None:
    in_place, elsewhere = manifest.parent / "in-place", manifest.parent / "elsewhere"
    done = rlhf("run", manifest, f"--output={in_place}")
    assert done.returncode == 0, done.stderr
    for server in servers:
        server.wait()
    urls = f"--set=rollout.endpoints=[{', '.join(server.url for server in servers)}]"
    arguments = [sys.executable, "-m", "rlhf_trainer", "run", str(manifest), f"--output={elsewhere}", urls]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    running = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**environment, "NO_PROXY": "127.0.0.1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = elsewhere / "grpo" / "metrics.jsonl"
    when(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 1, running)
    when(servers[1].is_generating, running)
    servers[1].kill()
    _, errors = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 0, errors
    events = (elsewhere / "grpo" / "events.log").read_text()
    assert events.count("spec.rollout.endpoints[1]: ") == 1, events
    assert [(row["step"], row["row"]) for row in rows(elsewhere)] == [
        (step, row) for step in range(1, STEPS + 1) for row in range(ROWS)
    ]
    assert [(row["prompt"], row["response"]) for row in rows(elsewhere)] == [
        (row["prompt"], row["response"]) for row in rows(in_place)
    ]
    assert samples(elsewhere) == samples(in_place)
    for mine, theirs in zip(records(elsewhere / "grpo"), records(in_place / "grpo"), strict=True):
        assert {name: mine[name] for name in MEASURED} == pytest.approx(
            {name: theirs[name] for name in MEASURED}, abs=1e-6
        )
        assert mine["policy_version"] == mine["step"] - 1

    refused = rlhf("validate", manifest, "--deep", urls)
    assert refused.returncode == ExitCode.ENVIRONMENT
    problem = f"grpo: spec.rollout.endpoints[1]: {servers[1].url} cannot be reached: ConnectError"
    assert refused.stderr.strip() == f"error: {problem}"


def test_a_server_that_keeps_other_bits_never_generates(manifest: Path) -> None:
    worker = "--worker-extension-cls=tests.trainer.chain.corrupting.CorruptingWorker"
    server = Server(manifest.parent, str(manifest.parent / "model"), worker)
    try:
        server.wait()
        done = rlhf("run", manifest, f"--output={manifest.parent / 'wrong'}", f"--set=rollout.endpoints=[{server.url}]")
        generated = re.findall(r"^vllm:generation_tokens_total{.*} (.*)$", server.says("/metrics"), re.MULTILINE)
    finally:
        server.kill()
    assert done.returncode == ExitCode.NUMERICS, done.stderr
    assert "model.norm.weight: the generator of rank 1 keeps other bits than arrived (checksum)" in done.stderr
    assert 0 < float(generated[0]) <= 4, "two tokens at most each time that it is looked at"
