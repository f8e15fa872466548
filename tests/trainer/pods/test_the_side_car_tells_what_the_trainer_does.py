"""The side-car as a process of its own, against files that a trainer writes and half-writes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from rlhf_trainer.pods.sidecar import POLL_SECONDS, LogFollower, kept_log
from rlhf_trainer.run_folder import attempt as attempts
from rlhf_trainer.run_folder.attempt import EXIT, AttemptId, write_exit
from rlhf_trainer.run_folder.lock import only_run_in, owned
from tests.patience import PATIENCE_SECONDS

IMPATIENT = """
from rlhf_trainer.pods import sidecar
from rlhf_trainer.run_folder import attempt
attempt.SILENCE_SECONDS = 1.0
sidecar.main()
"""
"""A side-car that takes a trainer for dead after 1 s without a beat, instead of 20 s."""


def until(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@dataclass
class SideCar:
    """A running side-car, its folders and what it has shown."""

    output: Path
    logs: Path
    port: int
    process: subprocess.Popen[bytes]
    shown: Path

    @property
    def job(self) -> Path:
        return self.output / "job"

    def answers(self) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.port}/status.json", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def is_up(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=10) as answer:
                return bool(answer.status == 200)
        except URLError:
            return False


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("", 0))
        port: int = door.getsockname()[1]
    return port


@pytest.fixture
def side_car(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SideCar]:
    """Of attempt 2, which this process belongs to, too; its parameter, if any, is the program to start."""
    output, logs, shown, port = tmp_path / "run", tmp_path / "ray" / "logs", tmp_path / "shown", free_port()
    (output / "job").mkdir(parents=True)
    command = [
        sys.executable,
        *getattr(request, "param", ("-m", "rlhf_trainer.pods.sidecar")),
        str(output / "job"),
        f"--port={port}",
        f"--logs={logs}",
    ]
    with pytest.MonkeyPatch.context() as patch, shown.open("wb") as stdout:
        patch.setenv("RLHF_ATTEMPT", "2")
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, env=dict(os.environ))
        found = SideCar(output, logs, port, process, shown)
        try:
            until(found.is_up)
            yield found
        finally:
            process.kill()
            process.wait()


def test_it_needs_nothing_but_the_standard_library() -> None:
    program = "import sys, rlhf_trainer.pods.sidecar; print(*{name.partition('.')[0] for name in sys.modules})"
    clean = [sys.executable, "-S", "-c", program]  # without site-packages, whose .pth files import what they like
    path = {"PYTHONPATH": str(Path(attempts.__file__).parents[2])}
    loaded = subprocess.run(clean, env=path, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name not in sys.stdlib_module_names} == {"__main__", "rlhf_trainer"} & {*loaded}


def test_a_status_is_told_only_if_this_attempt_wrote_it(side_car: SideCar) -> None:
    nothing = {"attempt": 2, "jobUid": "", "status": {}, "complete": False, "exitCode": None}
    assert side_car.answers() == nothing
    status = side_car.job / "status.json"
    for text in ('{"attempt": 1, "phase": "Running"}', '{"attempt": 2, "ph', "[]", '{"phase": "Running"}', "\xff"):
        status.write_text(text, encoding="latin-1")
        assert side_car.answers() == nothing, text
    status.write_text('{"attempt": 2, "phase": "Running"}')
    assert side_car.answers() == {**nothing, "status": {"attempt": 2, "phase": "Running"}}


def test_an_end_is_told_with_its_code_and_its_reason(side_car: SideCar, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ('{"attempt": 1, "exitCode": 0}', '{"attempt": 2, "exitC', "{}"):
        (side_car.output / EXIT).write_text(text)
        assert not side_car.answers()["complete"], text
    write_exit(side_car.output, 3, reason="Data", message="no such file")
    answer = side_car.answers()
    assert (answer["complete"], answer["exitCode"]) == (True, 3)
    failure = {"reason": "Data", "exitCode": 3, "message": "no such file", "attempt": 2}
    assert answer["status"] == {"attempt": 2, "phase": "Failed", "lastFailure": failure}, "it failed before it began"
    told = {"attempt": 2, "phase": "Failed", "lastFailure": {"reason": "Data", "exitCode": 3, "message": "longer"}}
    (side_car.job / "status.json").write_text(json.dumps(told))
    assert side_car.answers()["status"] == told, "the trainer's own words come first"
    write_exit(side_car.output, 0, reason="Ok", message="")
    (side_car.job / "status.json").write_text('{"attempt": 2, "phase": "Succeeded"}')
    answer = side_car.answers()
    assert (answer["complete"], answer["exitCode"], answer["status"]["phase"]) == (True, 0, "Succeeded")
    monkeypatch.setenv("RLHF_ATTEMPT", "1")
    (side_car.output / attempts.MARK).write_text("2")
    write_exit(side_car.output, 4, reason="Environment", message="late")
    assert side_car.answers()["exitCode"] == 0, "an older attempt has nothing to say"


def test_the_driver_log_is_shown_from_its_beginning(side_car: SideCar) -> None:
    side_car.logs.mkdir(parents=True)
    first, second = side_car.logs / "job-driver-a.log", side_car.logs / "job-driver-b.log"
    first.write_bytes(b"one\ntw")
    until(lambda: side_car.shown.read_bytes() == b"one\ntw")
    with first.open("ab") as log:
        log.write(b"o\n\xff\n")
    until(lambda: side_car.shown.read_bytes() == b"one\ntwo\n\xff\n")
    second.write_bytes(b"three\n")
    os.utime(second, (time.time() + 10, time.time() + 10))
    until(lambda: side_car.shown.read_bytes() == b"one\ntwo\n\xff\nthree\n")
    until(lambda: (side_car.output / "driver-a2.log").read_bytes() == side_car.shown.read_bytes())


def test_the_logs_of_the_latest_attempts_are_kept(tmp_path: Path) -> None:
    for number in range(1, 13):
        (tmp_path / f"driver-a{number}.log").write_text("old")
        os.utime(tmp_path / f"driver-a{number}.log", (number, number))
    kept = kept_log(tmp_path, AttemptId(12, "new"))
    assert kept
    with kept:
        kept.write(b"new")
    assert {file.name for file in tmp_path.iterdir()} == {f"driver-a{number}.log" for number in range(3, 13)}
    assert (tmp_path / "driver-a12.log").read_text() == "new"
    assert kept_log(tmp_path / "nowhere", AttemptId(1)) is None


def test_a_log_that_cannot_be_kept_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "job-driver-a.log").write_bytes(b"one\n")
    shown = BytesIO()
    with Path("/dev/full").open("wb", buffering=0) as full:
        LogFollower(tmp_path, shown, full).copy()
    assert shown.getvalue() == b"one\n"


def test_anything_else_is_not_there(side_car: SideCar) -> None:
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{side_car.port}/../run/job/status.json", timeout=10)


def test_a_second_one_on_the_same_port_says_so(side_car: SideCar) -> None:
    command = [sys.executable, "-m", "rlhf_trainer.pods.sidecar", str(side_car.job), f"--port={side_car.port}"]
    environment = {**os.environ, "RLHF_ATTEMPT": "2"}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (
        4,
        f"error: --port {side_car.port}: cannot be had: Address already in use\n",
    )
    assert side_car.is_up()


def test_told_to_end_it_stays_until_the_trainer_has_ended(side_car: SideCar) -> None:
    ends = Event()

    def trainer() -> None:
        with only_run_in(side_car.output):
            ends.wait(PATIENCE_SECONDS)
        write_exit(side_car.output, 143, reason="Stopped", message="stopped by SIGTERM")

    thread = Thread(target=trainer)
    thread.start()
    until((side_car.output / attempts.LIFE).exists)
    side_car.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        side_car.process.wait(timeout=3 * POLL_SECONDS)
    assert not side_car.answers()["complete"], "it goes on serving"
    ends.set()
    thread.join()
    assert side_car.process.wait(timeout=PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("side_car", [("-c", IMPATIENT)], indirect=True, ids=["impatient"])
def test_told_to_end_it_does_not_wait_for_a_trainer_that_is_dead(side_car: SideCar) -> None:
    with owned(side_car.output):
        pass  # and no exit.json: it was killed
    side_car.process.send_signal(signal.SIGTERM)
    assert side_car.process.wait(timeout=PATIENCE_SECONDS) == 0


def test_outside_of_a_pod_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RLHF_ATTEMPT"}
    command = [sys.executable, "-m", "rlhf_trainer.pods.sidecar", "nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: RLHF_ATTEMPT is not set")
