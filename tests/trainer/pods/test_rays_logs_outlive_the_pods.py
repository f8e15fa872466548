"""What Ray and its workers wrote in a pod is kept in the run folder, as much as there is room for."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_trainer.pods import ray_logs
from rlhf_trainer.run_folder.attempt import AttemptId


def written(folder: Path, name: str, content: bytes, at: int = 0) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, (at, at))


def found(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_files_of_a_pod_are_copied_into_a_folder_of_its_own(tmp_path: Path) -> None:
    logs, output = tmp_path / "logs", tmp_path / "run"
    output.mkdir()
    written(logs, "raylet.err", b"why")
    written(logs, "events/event.log", b"what")
    command = [sys.executable, "-m", "rlhf_trainer.pods.ray_logs", str(output), f"--logs={logs}"]
    subprocess.run(command, env={**os.environ, "RLHF_ATTEMPT": "2"}, check=True)
    assert found(output / "ray-logs/a2" / socket.gethostname()) == {"raylet.err": b"why", "events/event.log": b"what"}


def test_the_ends_of_the_newest_are_kept_where_there_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_logs, "MAX_FILE_BYTES", 4)
    monkeypatch.setattr(ray_logs, "MAX_POD_BYTES", 7)
    for at, name in enumerate(("oldest", "older", "newest")):
        written(tmp_path / "logs", name, f"begin {name} end".encode(), at)
    ray_logs.keep(tmp_path / "logs", tmp_path, AttemptId(1), "pod")
    assert found(tmp_path / "ray-logs/a1/pod") == {"newest": b" end", "older": b"end"}


def test_a_tenth_of_the_disk_is_left_to_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "logs", "raylet.out", b"begin end")
    for free, kept in ((13, {"raylet.out": b"end"}), (9, {})):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(total=100, free=free))
        ray_logs.keep(tmp_path / "logs", tmp_path / str(free), AttemptId(1), "pod")
        assert found(tmp_path / str(free)) == {f"ray-logs/a1/pod/{name}": end for name, end in kept.items()}


def test_the_last_attempts_are_kept(tmp_path: Path) -> None:
    written(tmp_path / "logs", "raylet.out", b"x")
    for number in range(1, 6):
        for pod in ("a", "b"):
            ray_logs.keep(tmp_path / "logs", tmp_path, AttemptId(number), pod)
        os.utime(tmp_path / f"ray-logs/a{number}", (number, number))
    assert sorted(each.name for each in (tmp_path / "ray-logs").iterdir()) == ["a3", "a4", "a5"]
    assert sorted(each.name for each in (tmp_path / "ray-logs/a5").iterdir()) == ["a", "b"]


def test_a_full_disk_or_a_session_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    written(tmp_path / "logs", "raylet.out", b"x")
    (tmp_path / "ray-logs").write_text("in the way")
    ray_logs.keep(tmp_path / "logs", tmp_path, AttemptId(1), "pod")
    ray_logs.keep(tmp_path / "nothing", tmp_path, AttemptId(1), "pod")
