"""`kubectl rlhf ui` copies small files of jobs from head pods and claims; a script plays kubectl here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_kubectl import ui
from rlhf_kubectl.cli import app
from rlhf_kubectl.kubectl import Kubectl
from rlhf_operator import names
from tests.kubectl.played import install_kubectl

PLAYED = """#!{python}
import json, subprocess, sys
from pathlib import Path
folder, words = Path({folder!r}), [word for word in sys.argv[1:] if not word.startswith("--request-timeout")]
answers = json.loads((folder / "answers.json").read_text())
with (folder / "calls").open("a", errors="surrogateescape") as calls:
    print(*words, file=calls)
if words[0] == "exec":
    inside = [answers["places"].get(word, word) for word in words[words.index("--") + 1:]]
    sys.exit(subprocess.run(inside).returncode)
elif words[0] in ("create", "delete"):
    print(json.dumps({{"metadata": {{"name": "done-files-x"}}}}))
elif words[0] == "get" and "done-files-x" in words[-1]:
    print(json.dumps(answers["ready"]))
elif words[0] == "get" and "/pods" in words[-1]:
    if answers["refused"]:
        sys.exit("Error from server (Forbidden): pods is forbidden")
    print(json.dumps({{"items": [answers["head"]] if "uid%3Du-live" in words[-1] or "u-live" in words[-1] else []}}))
elif words[0] == "get":
    print(json.dumps({{"items": answers["jobs"]}}))
else:
    sys.exit("error: not played: " + " ".join(words))
"""
SPEC = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "hf://a/b"}},
    "data": {"train": {"uri": "hf://a/c"}},
    "training": {"totalSteps": 9, "batchSize": 1},
}
READY = {"type": "Ready", "status": "True"}


def job(name: str, phase: str, attempt: int | None = 1) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": f"u-{name}"}
    status = {"phase": phase, "image": "r.example/trainer:1", **({"attempt": attempt} if attempt else {})}
    return {"metadata": metadata, "spec": SPEC, "status": status}


class Played:
    """A namespace with a job that runs, one that has succeeded and one that waits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, {names.OUTPUT_FOLDER: folder / "pod", "/claim": folder / "on-the-claim"}
        for name, place in (("live", folder / "pod"), ("done", folder / "on-the-claim")):
            (place / name / "model").mkdir(parents=True)
            for file in ("job.yaml", "metrics.jsonl", "status.json", "weights", "model/config.json"):
                (place / name / file).write_text(f"{name}\n")
        labels = {names.JOB_UID: "u-live", names.ROLE: names.CONTROLLER, names.ATTEMPT: "1"}
        head = {
            "metadata": {"name": "live-a1-head", "labels": labels},
            "status": {"phase": "Running", "conditions": [READY]},
        }
        self.answers: dict[str, Any] = {
            "places": {inside: str(place) for inside, place in self.places.items()},
            "ready": {"status": {"phase": "Running", "conditions": [READY]}},
            "jobs": [job("done", "Succeeded"), job("live", "Running"), job("waiting", "Queued", None)],
            "head": head,
            "refused": False,
        }
        self.copies = ui.Copies(Kubectl(None, "team"), folder / "team")

    def update(self) -> dict[str, str]:
        """The texts of the copied files after a look, by path."""
        (self.folder / "answers.json").write_text(json.dumps(self.answers))
        self.copies.update()
        files = (file for file in (self.folder / "team").rglob("*") if file.is_file())
        return {str(file.relative_to(self.folder / "team")): file.read_text() for file in files}

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    install_kubectl(PLAYED.format(python=sys.executable, folder=str(tmp_path)), tmp_path, monkeypatch)
    return Played(tmp_path)


def test_each_job_is_a_run_folder_without_its_weights(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    found = played.update()
    assert {path for path in found if not path.endswith((".attempt", "status.json"))} == {
        *("live/live/job.yaml", "live/live/metrics.jsonl", "done/done/job.yaml", "done/done/metrics.jsonl"),
        "waiting/waiting/job.yaml",
    }
    assert found["live/live/metrics.jsonl"] == "live\n"
    phases = [json.loads(found[f"{name}/{name}/status.json"])["phase"] for name in ("live", "done", "waiting")]
    assert phases == ["Running", "Succeeded", "Queued"]
    assert found["live/.attempt"] == "1 u-live"
    assert "pod done-files-x mounts done-output" in capsys.readouterr().err


def test_a_running_job_is_read_again_and_a_claim_once(played: Played) -> None:
    played.update()
    (played.places[names.OUTPUT_FOLDER] / "live" / "metrics.jsonl").write_text("live\nmore\n")
    played.answers["jobs"] = played.answers["jobs"][:2]
    found = played.update()
    assert found["live/live/metrics.jsonl"] == "live\nmore\n"
    assert not any(path.startswith("waiting") for path in found), "a deleted job has no row"
    assert len([call for call in played.calls if call.startswith("create")]) == 1
    assert len([call for call in played.calls if call.startswith("delete")]) == 1


def test_a_large_file_is_left_out_and_named_once(
    played: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ui, "MAX_BYTES", 8)
    (played.places[names.OUTPUT_FOLDER] / "live" / "rollouts.jsonl").write_text("nine bytes")
    for _ in range(2):
        found = played.update()
        assert ("live/live/rollouts.jsonl" in found, "live/live/metrics.jsonl" in found) == (False, True)
    assert capsys.readouterr().err.count("live/rollouts.jsonl of live is not copied: it has more than 8 B") == 1


def test_without_the_right_to_read_pods_the_statuses_are_shown(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    played.answers["refused"] = True
    for _ in range(2):
        assert {path.partition("/")[0] for path in played.update()} == {"live", "done", "waiting"}
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "files of live" in line] == [
        "files of live are not copied: the cluster refuses: pods is forbidden"
    ]


def test_one_job_that_cannot_be_copied_leaves_the_others(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    played.answers["jobs"].append({**job("older", "Succeeded"), "spec": {"algorithm": {"name": "Odd"}}})
    for name in (b"two\nlines.json", b"no utf-8 \xff.json", b"--help.json"):
        (played.places[names.OUTPUT_FOLDER] / os.fsdecode(name)).write_text("{}")
    found = played.update()
    assert found["live/live/metrics.jsonl"] == "live\n"
    assert found["live/--help.json"] == "{}"
    assert "files of older are not copied: spec" in capsys.readouterr().err


def test_the_program_ends_as_its_server_does(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    (played.folder / "answers.json").write_text(json.dumps({**played.answers, "refused": True}))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    done = CliRunner().invoke(app, ["ui", "-n", "team"])
    assert done.exit_code == 1, done.output
