"""`kubectl rlhf why` names what is so, since when and what to do, for every phase and reason of docs/status.md."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest

from rlhf_api.spec.run_policy import Reason
from rlhf_api.status import Attempt, Condition, ConditionType, Failure, Output, Phase, Progress, SavedState, Status
from rlhf_kubectl.jobs import JobWarning, last_warning
from rlhf_kubectl.kubectl import Kubectl
from rlhf_kubectl.why import CONDITIONS, FAILURES, why
from rlhf_operator import names
from rlhf_operator.conditions import phase_of
from rlhf_operator.snapshot import ObservedContainer, ObservedJob, ObservedPod
from rlhf_operator.times import timestamp
from tests.each import each_case
from tests.operator.test_docs import reasons_of_conditions
from tests.repo.tree import ROOT

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
BEFORE = timestamp(NOW - timedelta(seconds=185))
GOOD: dict[ConditionType, str] = {
    "Accepted": "Accepted",
    "InputsReady": "InputsReady",
    "Mapped": "Mapped",
    "QuotaReserved": "NotQueued",
    "ClusterReady": "AllPodsReady",
    "Training": "Training",
}
DOCUMENTED = reasons_of_conditions()
NOTHING_TO_DO = {
    *("Accepted", "InputsReady", "Mapped", "ManualPlacement", "NotQueued", "QuotaReserved", "AllPodsReady"),
    *(
        "Training",
        "JobComplete",
        "Ended",
        "Suspended",
        "Finished",
        "Progressing",
        "Resumed",
        "FailureRule",
        "NoCauseFound",
    ),
    *("Current", "InProgress", "Failed", "SandboxesRun"),
}
TO_DO = [row for row in DOCUMENTED if row[2] not in NOTHING_TO_DO]
FAILURE = Failure(
    reason="Hang", exit_code=8, message="rank 3 of pool all hangs", attempt=2, pod="p-1", node="n-7", time=BEFORE
)


def condition(kind: str, status: str, reason: str, message: str = "The message of it") -> Condition:
    document = {"type": kind, "status": status, "reason": reason, "message": message}
    return Condition.model_validate({**document, "last_transition_time": BEFORE, "observed_generation": 1})


def status(*other: Condition, **fields: Any) -> Status:
    """That of a running job but for these conditions, in the phase that follows from them."""
    conditions = {kind: condition(kind, "True", reason) for kind, reason in GOOD.items()}
    conditions |= {each.type: each for each in other}
    every = tuple(conditions.values())
    return Status(phase=phase_of(every), conditions=every, observed_generation=1, **fields)


def job(of: Status, **fields: Any) -> ObservedJob:
    made = ObservedJob(
        namespace="team",
        name="ppo",
        uid="u",
        generation=1,
        resource_version="1",
        created=NOW - timedelta(hours=1),
        deleting=False,
        labels={},
        spec={},
        status=of,
    )
    return replace(made, **fields)


def pod(name: str = "ppo-a1-head", **fields: Any) -> ObservedPod:
    return ObservedPod(
        **{
            "name": name,
            "uid": name,
            "attempt": 1,
            "role": names.WORKER,
            "created": NOW - timedelta(seconds=90),
            **fields,
        }
    )


def said(of: Status, *pods: ObservedPod, warning: JobWarning | None = None, **fields: Any) -> str:
    sentences = why(job(of, **fields), pods, warning, NOW)
    assert all(each.endswith((".", "`")) for each in sentences), sentences
    return " ".join(sentences)


@each_case(("kind", "truth", "reason"), TO_DO, ids=" ".join)
def test_every_reason_with_a_remedy_says_it(kind: str, truth: str, reason: str) -> None:
    remedy = CONDITIONS[kind, reason].format(job="ppo", start="from the start, as no checkpoint is there")
    told = said(status(condition(kind, truth, reason)))
    assert remedy in told
    assert "The message of it." in told


@each_case("reason", FAILURES)
def test_every_failure_says_what_failed_where_and_what_to_do(reason: Any) -> None:
    failure = FAILURE.model_copy(update={"reason": reason})
    failed = status(condition("Failed", "True", reason), last_failure=failure, completion_time=BEFORE)
    told = said(failed)
    for part in (f"Attempt 2 failed 3 min 05 s ago: {reason}, exit code 8 (communication)", "pod p-1 on node n-7"):
        assert part in told
    assert "It said: rank 3 of pool all hangs." in told
    assert FAILURES[reason] in told
    assert "kubectl rlhf logs ppo --attempt 2" in told


def test_every_failure_has_a_remedy() -> None:
    assert all(FAILURES[reason] for reason in get_args(Reason))


def test_a_job_that_waits_says_since_when() -> None:
    told = said(status(condition("QuotaReserved", "False", "WaitingForRoom", "it is the second of 5 in line")))
    assert told.startswith("ppo is Queued and has been waiting for 3 min 05 s (QuotaReserved: WaitingForRoom).")
    assert "it is the second of 5 in line." in told


def test_the_example_of_the_guide_is_what_why_prints() -> None:
    message = (
        'container ray-head of pod ppo-a1-head: secret "hub" not found; the attempt waits until 2026-05-04T12:30:00Z'
    )
    missing = status(condition("ClusterReady", "False", "SecretMissing", message))
    assert textwrap.indent("\n".join(why(job(missing), [], None, NOW)), "    ") in (ROOT / "docs/jobs.md").read_text()


def test_a_wait_begins_at_a_suspensions_end_or_a_pods() -> None:
    resumed = condition("Suspended", "False", "Resumed").model_copy(
        update={"last_transition_time": timestamp(NOW - timedelta(seconds=7))}
    )
    assert "has been waiting for 7 s (ClusterReady: PodsPending)" in "\n".join(
        why(job(status(condition("ClusterReady", "False", "PodsPending"), resumed)), [], None, NOW)
    )
    ending = [pod(deleting_since=NOW - timedelta(seconds=4))]
    assert "has been waiting for 4 s (Suspended: Suspending)" in "\n".join(
        why(job(status(condition("Suspended", "False", "Suspending"))), ending, None, NOW)
    )


def test_pods_that_hinder_are_named() -> None:
    pods = (
        pod("w-1", unschedulable="0/3 nodes are available"),
        pod(
            "w-2", containers=(ObservedContainer(name="ray", waiting_reason="ImagePullBackOff", waiting_message="x:1"),)
        ),
        pod("w-3", containers=(ObservedContainer(name="ray", waiting_reason="ContainerCreating"),), node="n"),
        pod("w-4", deleting_since=NOW - timedelta(seconds=20)),
        pod("w-5", phase="Running", ready=True, node="n"),
    )
    told = said(status(condition("ClusterReady", "False", "PodsPending", "2 of 5 pods are ready")), *pods)
    assert "Worker pod w-1 has no node: 0/3 nodes are available." in told
    assert "Worker pod w-2: its container ray waits, ImagePullBackOff: x:1." in told
    assert "Worker pod w-3 starts on node n since 1 min 30 s." in told
    assert "Worker pod w-4 was told to end 20 s ago and is still there." in told
    assert "w-5" not in told


def test_a_suspended_job_says_where_it_goes_on() -> None:
    suspended = condition("Suspended", "True", "SuspendedByUser")
    assert "has it go on from the start, as no checkpoint is there." in said(status(suspended))
    saved = SavedState(step=40, uri="pvc://c/p", time=BEFORE)
    assert "kubectl rlhf resume ppo has it go on after step 40." in said(status(suspended, checkpoint=saved))


def test_the_latest_warning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = status(condition("ClusterReady", "False", "PodsPending"))
    about = {"uid": job(seen).uid, "name": "w-1"}
    events = [
        {"type": kind, "note": f"{kind} {number}", "eventTime": BEFORE, "regarding": about}
        for number, kind in enumerate(("Warning", "Warning", "Normal"))
    ]
    monkeypatch.setattr(Kubectl, "get", lambda *_: {"items": events})
    told = said(seen, warning=last_warning(Kubectl(), job(seen), []))
    assert "The latest warning, 3 min 05 s ago, about w-1: Warning 1." in told
    assert "Warning 0" not in told
    assert "Normal" not in told


def test_a_running_job_waits_for_nothing() -> None:
    progress = Progress(step=3, total_steps=10, stage="PPO", remaining_seconds=420, last_step_time=BEFORE)
    saved = SavedState(step=2, uri="pvc://c/p", time=BEFORE)
    told = said(status(progress=progress, checkpoint=saved))
    assert "step 3 of 10, the last one 3 min 05 s ago; about 7 min 00 s are left." in told
    assert "Step 2 was saved 3 min 05 s ago." in told


def test_a_job_between_attempts_says_what_failed() -> None:
    waits = status(condition("Training", "False", "Restarting"), last_failure=FAILURE).model_copy(
        update={"next_attempt_time": timestamp(NOW + timedelta(seconds=30))}
    )
    told = said(waits)
    assert "is Restarting" in told
    assert "rank 3 of pool all hangs" in told
    assert "No attempt begins in the next 30 s." in told


def test_a_failed_job_lists_its_attempts_and_how_it_goes_on() -> None:
    reasons: tuple[Reason, ...] = ("Hang", "OutOfMemory")
    attempts = tuple(
        Attempt(attempt=number, start_time=BEFORE, slots=2, outcome="Failed", reason=reason)
        for number, reason in enumerate(reasons, start=1)
    )
    failed = status(
        condition("Failed", "True", "BackoffLimitExceeded", "2 attempts failed"),
        last_failure=FAILURE,
        attempts=attempts,
        completion_time=BEFORE,
        checkpoint=SavedState(step=40, uri="pvc://c/p", time=BEFORE),
    )
    told = said(failed)
    assert "failed 3 min 05 s ago (BackoffLimitExceeded)" in told
    assert "Its attempts: 1 Hang, 2 OutOfMemory." in told
    assert "it goes on from step 40" in told


def test_a_job_that_succeeded_says_where_its_model_is() -> None:
    done = status(
        condition("Complete", "True", "JobComplete"), output=Output(uri="pvc://c/p/model"), completion_time=BEFORE
    )
    assert "what it made is pvc://c/p/model. `kubectl rlhf fetch ppo DIR` copies it." in said(done)


def test_a_job_that_nobody_has_looked_at_names_the_operator() -> None:
    told = said(Status())
    assert "No operator has looked at ppo in the 1 h 00 min since it was created." in told
    assert "kubectl get deployments" in told


def test_a_change_that_was_not_acted_on_is_told() -> None:
    assert "latest change of the spec" in said(status(), generation=2)
    assert "latest change of the spec" not in said(status())


def test_a_job_that_is_deleted_says_so() -> None:
    assert "ppo is being deleted" in said(status(), deleting=True)


@each_case("phase", get_args(Phase))
def test_every_phase_is_told(phase: Phase) -> None:
    told = said(status().model_copy(update={"phase": phase, "completion_time": BEFORE}))
    assert {"Succeeded": "succeeded", "Failed": "failed", "Running": "trains"}.get(phase, phase) in told
