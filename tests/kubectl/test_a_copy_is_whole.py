"""`kubectl rlhf fetch` leaves a whole folder or none, and no pod, whatever happens; a script plays kubectl here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_kubectl.cli import app
from rlhf_kubectl.kubectl import Kubectl, KubectlError, require_success
from tests.each import each_case
from tests.kubectl.played import install_kubectl

PLAYED = """#!{python}
import json, subprocess, sys, time
from pathlib import Path
folder, words = Path({folder!r}), [word for word in sys.argv[1:] if not word.startswith("--request-timeout")]
answers = json.loads((folder / "answers.json").read_text())
with (folder / "calls").open("a") as calls:
    print(*words, file=calls)
if words[0] == "exec":
    inside = [answers["claim"] if word == "/claim/ppo/model" else word for word in words[words.index("--") + 1:]]
    out = subprocess.run(inside, stdout=subprocess.PIPE).stdout
    if inside[0] == "tar" and answers["bytes"] < 0:
        time.sleep(60)
    sys.stdout.buffer.write(out[: answers["bytes"]] if inside[0] == "tar" else out)
elif words[0] in ("create", "delete"):
    if words[0] == "create":
        (folder / "created.json").write_text(sys.stdin.read())
    print(json.dumps({{"metadata": {{"name": "ppo-files-x"}}}}))
elif words[0] == "get":
    found = answers["pod"] if "/pods/" in words[-1] else answers["job"]
    print(json.dumps(found))
else:
    sys.exit("error: not played: " + " ".join(words))
"""
READY = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
WHOLE, HANGS = 10**9, -1
"""Bytes that a stream has at most; the second never ends."""


class Played:
    """A kubectl whose cluster has one job that has succeeded, with a model of two files on its claim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        claim = folder / "on-the-claim"
        (claim / "sub").mkdir(parents=True)
        (claim / "weights").write_bytes(bytes(range(256)) * 400)
        (claim / "sub" / "name with spaces").write_text("{}")
        status = {"phase": "Succeeded", "output": {"uri": "pvc://ppo-output/ppo/model"}}
        spec = {
            "algorithm": {"name": "SFT"},
            "models": {"actor": {"uri": "hf://a/b"}},
            "data": {"train": {"uri": "hf://a/c"}},
            "training": {"totalSteps": 1, "batchSize": 1},
        }
        job = {"metadata": {"name": "ppo", "namespace": "team", "uid": "u"}, "spec": spec, "status": status}
        self.answers: dict[str, Any] = {"claim": str(claim), "bytes": WHOLE, "pod": READY, "job": job}

    def fetch(self, to: str = "model", image: str = "busybox") -> tuple[int, str]:
        """(exit code, what was said) of the command."""
        (self.folder / "answers.json").write_text(json.dumps(self.answers))
        words = ["fetch", "ppo", str(self.folder / to), *(["--image", image] if image else []), "-n", "team"]
        done = CliRunner().invoke(app, words)
        return done.exit_code, done.output

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    install_kubectl(PLAYED.format(python=sys.executable, folder=str(tmp_path)), tmp_path, monkeypatch)
    return Played(tmp_path)


def test_a_copy_is_the_same_and_the_pod_is_gone(played: Played) -> None:
    code, said = played.fetch()
    assert code == 0, said
    claim, here = Path(played.answers["claim"]), played.folder / "model"
    for name in ("weights", "sub/name with spaces"):
        assert (here / name).read_bytes() == (claim / name).read_bytes()
    assert "2 files, 102 kB" in said
    assert played.calls[-1].startswith("delete --raw /api/v1/namespaces/team/pods/ppo-files-x")


def test_the_pod_has_the_image_of_the_jobs_pods_and_its_secrets(played: Played) -> None:
    """The status has both: a user of the job may have no right to read the operator's settings."""
    played.answers["job"]["status"] |= {"image": "r.example/rlhf-trainer:1", "imagePullSecrets": ["registry"]}
    assert played.fetch(image="")[0] == 0
    pod = json.loads((played.folder / "created.json").read_text())["spec"]
    assert pod["containers"][0]["image"] == "r.example/rlhf-trainer:1"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_without_an_image_in_the_status_it_is_asked_for(played: Played) -> None:
    code, said = played.fetch(image="")
    assert code == 4
    assert "no attempt of ppo has its image in the status (status.image): name an image" in said.replace("\n", " ")
    assert not any(call.startswith("create") for call in played.calls)


@pytest.mark.parametrize("sent", [0, 700, 60_000])
def test_a_stream_that_breaks_off_leaves_no_folder_and_no_pod(played: Played, sent: int) -> None:
    played.answers["bytes"] = sent
    code, said = played.fetch()
    assert code == 4
    assert "error: the copy broke off" in said
    assert not (played.folder / "model").exists()
    assert played.calls[-1].startswith("delete --raw")
    played.answers["bytes"] = WHOLE
    assert played.fetch()[0] == 0


def test_ctrl_c_takes_the_pod_away(played: Played) -> None:
    played.answers["bytes"] = HANGS
    (played.folder / "answers.json").write_text(json.dumps(played.answers))
    (played.folder / "calls").touch()
    command = [sys.executable, "-m", "rlhf_kubectl.cli", "fetch", "ppo", str(played.folder / "model"), "--image", "b"]
    with subprocess.Popen([*command, "-n", "team"], stderr=subprocess.PIPE, start_new_session=True) as copying:
        while not any("tar" in call for call in played.calls):
            assert copying.poll() is None
            time.sleep(0.05)
        os.killpg(copying.pid, signal.SIGINT)  # as a terminal does
        assert copying.wait(30) == 130
    assert played.calls[-1].startswith("delete --raw")
    assert not (played.folder / "model").exists()


def test_a_pod_that_cannot_start_says_why(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_kubectl.files.START_SECONDS", 0.0)
    waiting = {"name": "files", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    played.answers["pod"] = {"metadata": {"name": "x"}, "status": {"phase": "Pending", "containerStatuses": [waiting]}}
    code, said = played.fetch()
    assert code == 4
    assert "its container files waits, ImagePullBackOff: no such image" in said
    assert played.calls[-1].startswith("delete --raw")


def test_a_folder_that_holds_something_is_not_touched(played: Played) -> None:
    (played.folder / "model").mkdir()
    (played.folder / "model" / "mine").touch()
    code, said = played.fetch()
    assert code == 2
    assert "is there already and not empty" in said
    assert not any(call.startswith("create") for call in played.calls)


def test_a_folder_that_cannot_be_written_is_one_sentence(played: Played) -> None:
    (played.folder / "file").touch()
    code, said = played.fetch(to="file/model")
    assert code == 4
    assert "file/model.unfinished: cannot be written: Not a directory" in said.replace("\n", "")
    assert played.calls[-1].startswith("delete --raw")


@each_case(
    ("said", "sentence", "reason"),
    [
        (b"Error from server (Forbidden): pods is forbidden\n", "the cluster refuses: pods is forbidden", "Forbidden"),
        (b"E1 memcache\nUnable to connect: no such host\n", "kubectl: Unable to connect: no such host", ""),
        (b"error: no save\ncommand terminated with exit code 4\n", "kubectl: no save", ""),
        (b"", "kubectl: it ended with 1", ""),
    ],
    ids=["refused", "away", "in a pod", "silent"],
)
def test_what_kubectl_complains_of_is_one_sentence(said: bytes, sentence: str, reason: str) -> None:
    with pytest.raises(KubectlError) as raised:
        require_success(1, said)
    assert (str(raised.value), raised.value.reason) == (sentence, reason)


def test_without_kubectl_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KubectlError, match="kubectl cannot be started: No such file or directory"):
        Kubectl().get("/api")
