"""`rlhf submit` on a real API server, with the operator; pods and trainers are played."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from rlhf_api import kubectl_yaml
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.stage import Lives, small_job, stage
from tests.patience import PATIENCE_SECONDS

MAPS = "/api/v1/namespaces/{}/configmaps"
SCHEDULE = '"""A schedule."""\n\n\ndef flat(step: int, total: int) -> float:\n    return 1.0\n'


@pytest.fixture(scope="module")
def lives(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    for namespace in fresh_namespace(rlhf_server):
        with stage(rlhf_server, namespace, tmp_path_factory.mktemp("operator")) as (lives, _):
            lives.jobs.server.offer_volumes(2)
            yield lives


def manifest(folder: Path, name: str, **changes: Any) -> Path:
    """A file with a small job whose learning rate follows a schedule of the file beside it."""
    job = small_job(name, "unused", backoffLimit=0)
    del job["metadata"]["namespace"]
    job["spec"]["models"]["actor"]["optimizer"]["schedule"] = "own_schedule:flat"
    job["spec"] |= changes
    (folder / "own_schedule.py").write_text(SCHEDULE)
    (folder / "job.yaml").write_text(kubectl_yaml.write(job))
    return folder / "job.yaml"


def begin(lives: Lives, *words: object, **variables: str) -> subprocess.Popen[str]:
    """`rlhf submit WORDS`, without the trial of models and data, which needs seconds."""
    server = lives.jobs.server
    path = f"{server.programs}:/usr/bin:/bin"
    environment = {**os.environ, **server.environment(), "PATH": path, **variables}
    program = "import sys; sys.modules['torch'] = None; from rlhf_trainer.commands.cli import main; main()"
    command = [sys.executable, "-c", program, "submit", *map(str, words), "-n", lives.jobs.namespace]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def submit(lives: Lives, *words: object, **variables: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    process = begin(lives, *words, **variables)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def code_of(lives: Lives, name: str) -> list[dict[str, Any]]:
    """The ConfigMaps of a job's own code."""
    maps = lives.jobs.server.items(MAPS.format(lives.jobs.namespace))
    return [each for each in maps if each["metadata"]["name"].startswith(f"{name}-code-")]


def test_a_job_is_followed_to_its_end(lives: Lives, tmp_path: Path) -> None:
    file = manifest(tmp_path, "flat")
    waiting = begin(lives, file, "--wait")
    lives.jobs.server.until(lambda: code_of(lives, "flat"), PATIENCE_SECONDS, "the code is there")
    (code,) = code_of(lives, "flat")
    assert code["data"] == {"own_schedule.py": SCHEDULE}
    made = lives.jobs.get("flat")
    assert [each["uid"] for each in code["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]
    status, again, _ = submit(lives, file)
    assert (status, lives.jobs.get("flat")["metadata"]["generation"]) == (0, 1)
    assert "unchanged" in again
    lives.train("flat")
    pods = lives.jobs.pods("flat", 1)
    volumes = [
        each["configMap"]["name"] for pod in pods for each in pod["spec"]["volumes"] if each["name"] == "own-code"
    ]
    assert volumes == [code["metadata"]["name"]] * 2
    assert waiting.stdout is not None
    told = list(takewhile(lambda line: not line.startswith("flat is Running"), waiting.stdout))
    lives.succeed("flat")
    out = "".join([*told, *waiting.stdout])
    assert waiting.wait(PATIENCE_SECONDS) == 0, out
    assert "note: models, data and code are not tried here: torch is not installed" in out
    assert "flat succeeded" in out
    status, _, refused = submit(lives, manifest(tmp_path, "flat", suspend=True))
    assert (status, refused.count("\n")) == (2, 1)
    assert "it has ended, and is not run again" in refused


def test_a_failed_job_gives_its_exit_code(lives: Lives, tmp_path: Path) -> None:
    file = manifest(tmp_path, "broken")
    assert submit(lives, file)[0] == 0
    other = {"actor": {"uri": "package://rlhf_examples/helpful/other", "optimizer": {"learningRate": 1e-3}}}
    refused = submit(lives, manifest(tmp_path, "broken", models=other))
    assert (refused[0], refused[2].count("\n")) == (2, 1), refused
    assert "error: broken is there already" in refused[2]
    assert "give this job another name" in refused[2]
    lives.train("broken")
    lives.fail("broken")
    lives.jobs.wait_for("broken", "Failed")
    status, out, _ = submit(lives, manifest(tmp_path, "broken"), "--wait")
    assert (status, "Internal, exit code 1 (internal)" in out) == (1, True), out
    lives.jobs.delete("broken")
    lives.jobs.server.until(lambda: not code_of(lives, "broken"), PATIENCE_SECONDS, "the code goes with the job")


def test_who_may_not_is_told_so(lives: Lives, tmp_path: Path) -> None:
    config = str(lives.jobs.server.kubeconfig("dev"))
    status, _, refused = submit(lives, manifest(tmp_path, "mine"), KUBECONFIG=config)
    assert (status, refused.count("\n")) == (4, 1)
    assert "cannot list resource" in refused


def test_no_context_is_one_sentence(lives: Lives, tmp_path: Path) -> None:
    status, _, refused = submit(lives, manifest(tmp_path, "mine"), KUBECONFIG=str(tmp_path / "none"))
    assert (status, refused.count("\n")) == (4, 1)
    assert "kubectl config use-context" in refused
