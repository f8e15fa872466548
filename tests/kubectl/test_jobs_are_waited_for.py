"""`rlhf submit --wait --logs` tells what a job does until it ends, and exits as the trainer did."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import typer

from rlhf_api.exit_codes import ExitCode
from rlhf_api.status import Failure, Status
from rlhf_kubectl import follow
from rlhf_kubectl.follow import ClusterJob, exit_code_of, wait_for
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_operator import names
from rlhf_operator.snapshot import ObservedPod
from tests.each import each_case
from tests.kubectl.test_why_a_job_waits import BEFORE, condition, job, pod, status

RUNS = status(attempt=1)
WAITS = status(condition("ClusterReady", "False", "PodsPending", "1 of 2 pods are ready"))
DONE = status(condition("Complete", "True", "JobComplete"), attempt=2, completion_time=BEFORE)
HEAD = pod("head", role=names.CONTROLLER, phase="Running")


def failed(reason: str, code: int | None = None, *, last: str | None = None) -> Status:
    """Status of a failed job; last: reason of the last failed attempt, if it differs from the job's."""
    failure = Failure(reason=last or reason, exit_code=code, message="said", attempt=1, time=BEFORE)
    return status(condition("Failed", "True", reason), last_failure=failure, attempt=1, completion_time=BEFORE)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Queue of what kubectl finds, look by look: a status or an error; its streams are printed."""
    looks: list[Any] = []

    def find(_: Kubectl, name: str) -> Any:
        found = looks.pop(0)
        if isinstance(found, BaseException):
            raise found
        return replace(job(found), name=name)

    def pods(_: Kubectl, job: Any) -> Sequence[ObservedPod]:
        return [replace(HEAD, attempt=job.status.attempt or 0)]

    monkeypatch.setattr(follow, "find_job", find)
    monkeypatch.setattr(follow, "pods_of", pods)
    monkeypatch.setattr(follow, "seen_of", lambda *_: ([], None, []))
    monkeypatch.setattr(follow, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(Kubectl, "stream", lambda _, *words: typer.echo(" ".join(("LOG", *words))))
    return looks


def test_each_change_is_told_once(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    seen += [WAITS, WAITS, KubectlError("no route"), RUNS, RUNS, DONE]
    assert ClusterJob("ppo").wait() == ExitCode.OK
    told = capsys.readouterr().out
    assert told.count("ppo is Provisioning: 1 of 2 pods are ready") == 1
    assert told.count("ppo is Running") == 1
    assert "ppo: not up to date: no route" in told
    assert "ppo succeeded" in told
    assert "LOG" not in told


def test_the_log_of_each_attempt_is_printed(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    seen += [RUNS, RUNS, RUNS.model_copy(update={"attempt": 3}), DONE.model_copy(update={"attempt": 3})]
    assert ClusterJob("ppo").wait(logs=True) == ExitCode.OK
    told = capsys.readouterr().out
    assert told.count("LOG logs head --namespace=team --container=driver-log --follow") == 2
    assert "The log of attempt 2 was not shown: `kubectl rlhf logs ppo --attempt 2`" in told
    assert "attempt 1" not in told


def test_jobs_are_watched_at_the_same_time(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    gone = KubectlError("there is no RLHFJob b", ExitCode.SPEC, "NotFound")
    seen += [RUNS, RUNS, RUNS, failed("Data", 3), DONE.model_copy(update={"attempt": 1}), gone]
    assert wait_for(Kubectl(), ["a", "b"], logs=True) == 3
    told = capsys.readouterr().out
    assert told.count("LOG logs head --namespace=team --container=driver-log --follow --prefix") == 2
    assert "was not shown" not in told


def test_a_long_log_holds_no_other_job_up(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    b_ended, waited = Event(), []

    def look(_: Kubectl, found: Any) -> Any:
        if found.name == "b":
            b_ended.set()
        return [], None, []

    monkeypatch.setattr(Kubectl, "stream", lambda *_: waited.append(b_ended.wait(9)))
    monkeypatch.setattr(follow, "seen_of", look)
    seen += [RUNS, DONE, DONE]
    assert wait_for(Kubectl(), ["a", "b"], logs=True) == ExitCode.OK
    assert waited == [True]


def test_ctrl_c_leaves_the_jobs_running(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    seen += [DONE, KeyboardInterrupt()]
    assert wait_for(Kubectl(), ["sft", "ppo"], logs=False) == ExitCode.SIGINT
    assert "sft, ppo: not stopped; `kubectl rlhf why ppo`" in capsys.readouterr().out


def test_the_first_failure_decides(seen: list[Any]) -> None:
    seen += [DONE, failed("UserCode", 7), failed("InputFailed")]
    assert wait_for(Kubectl(), ["a", "b", "c"], logs=False) == 7


def test_a_job_that_is_gone_ends_it(seen: list[Any]) -> None:
    seen += [RUNS, KubectlError("there is no RLHFJob ppo", ExitCode.SPEC, "NotFound")]
    with pytest.raises(KubectlError, match="there is no RLHFJob ppo"):
        ClusterJob("ppo").wait()


@each_case(
    ("ended", "code"),
    [
        (DONE, 0),
        (failed("Data", 3), 3),
        (failed("BackoffLimitExceeded", 137, last="OutOfMemory"), 137),
        (failed("BackoffLimitExceeded", last="OutOfMemory"), 5),
        (failed("PodsRefused"), 4),
        (failed("InvalidInput", 7, last="UserCode"), 2),
        (failed("DeadlineExceeded", 1, last="Internal"), 4),
    ],
)
def test_the_exit_code_is_that_of_the_end(ended: Status, code: int) -> None:
    assert exit_code_of(ended) == code
