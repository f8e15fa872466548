"""Random words in the status of children, and a status of our own that was damaged by hand: a pass always ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_api.spec.run_policy import Reason
from rlhf_api.status import (
    Attempt,
    Condition,
    ConditionType,
    Failure,
    Metric,
    Output,
    Phase,
    Progress,
    SavedState,
    Status,
)
from rlhf_operator import names
from rlhf_operator.actions import Create, ReadLive
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import (
    Heartbeat,
    ObservedContainer,
    ObservedJob,
    ObservedPod,
    ObservedQuota,
    ObservedRayJob,
    Snapshot,
)
from tests.operator.fake_trainer import START
from tests.operator.simulated import SFT, UID

WORDS = st.sampled_from(
    [
        *("", "Running", "Failed", "SUCCEEDED", "FAILED", "STOPPED", "Complete", "Suspended", "Preempted", "Evicted"),
        *("NodeLost", "OOMKilled", "ImagePullBackOff", "CreateContainerConfigError", "EvictionByEvictionAPI"),
        *("exit code 99999999", "exit code -9", 'persistentvolumeclaim "x" not found', "Pod-Is.Odd", "x" * 5000),
        "Ünïcode \x00 ' \" {",
    ]
)
TIMES = st.sampled_from(
    [
        *("2026-01-31T12:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00", "2026-13-77T99:99:99Z"),
        *("9999-12-31T23:59:59-12:00", "2026-01-31T11:00:00.123456+00:00", "0000-00-00T00:00:00Z"),
    ]
)
MOMENTS = st.integers(-(10**7), 10**7).map(lambda seconds: START + timedelta(seconds=seconds))
SMALL, HUGE = st.integers(0, 4), st.sampled_from([0, 1, 2, 3, 10**9, 10**30])
MAYBE = st.none()
ON_HUB = {**SFT, "models": {"actor": {"uri": "hf://a/b"}}}
ASKED = sha256(b'0 [["hf://a/b", null]]').hexdigest()[:8]
READER = f"job-shapes-{ASKED}-x"
T = TypeVar("T")


def made(kind: Callable[..., T], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Values of a type from a strategy a field."""
    return st.fixed_dictionaries(fields).map(lambda given: kind(**given))


def containers() -> st.SearchStrategy[ObservedContainer]:
    return made(
        ObservedContainer,
        name=st.sampled_from([names.HEAD_CONTAINER, names.WORKER_CONTAINER, names.LOG_CONTAINER]),
        waiting_reason=WORDS,
        waiting_message=WORDS,
        exit_code=MAYBE | st.integers(-200, 10**10),
        ended_reason=WORDS,
        last_words=WORDS,
    )


def pods() -> st.SearchStrategy[ObservedPod]:
    return made(
        ObservedPod,
        name=st.sampled_from(["p0", "p1", "p2"]),
        uid=st.just("u"),
        attempt=SMALL,
        role=st.sampled_from([names.CONTROLLER, names.WORKER, names.READER, "other"]),
        phase=WORDS,
        ready=st.booleans(),
        node=st.sampled_from(["", "n0"]),
        reason=WORDS,
        message=WORDS,
        disruption=WORDS,
        unschedulable=WORDS,
        created=MOMENTS,
        not_ready_since=MAYBE | MOMENTS,
        deleting_since=MAYBE | MOMENTS,
        grace_seconds=HUGE,
        containers=st.lists(containers(), max_size=2).map(tuple),
    )


def rayjobs() -> st.SearchStrategy[ObservedRayJob]:
    return made(
        ObservedRayJob,
        name=st.sampled_from(
            ["job-a0", "job-a1", "job-a2", "job-a3", "job-a01", "job-a²", "other", "job-a99999999999"]
        ),
        uid=st.just("r"),
        attempt=SMALL,
        owned=st.booleans(),
        created=MOMENTS,
        deleting=st.booleans(),
        suspended=st.booleans(),
        deployment_status=WORDS,
        job_status=WORDS,
        message=WORDS,
    )


def statuses() -> st.SearchStrategy[Status]:
    attempts = made(
        Attempt,
        attempt=st.sampled_from([1, 2, 3, 10**30]),
        start_time=TIMES,
        end_time=MAYBE | TIMES,
        slots=st.just(1),
        outcome=st.sampled_from(["Running", "Failed", "Succeeded", "Suspended"]),
        reason=MAYBE | st.sampled_from(get_args(Reason)),
        first_step=MAYBE | HUGE,
    )
    conditions = made(
        Condition,
        type=st.sampled_from([each for each in get_args(ConditionType) if each not in ("Complete", "Failed")]),
        status=st.sampled_from(["True", "False", "Unknown"]),
        reason=st.sampled_from(["Restarting", "Suspending", "Whatever"]),
        last_transition_time=TIMES,
        observed_generation=SMALL,
    )
    phases = st.sampled_from([each for each in get_args(Phase) if each not in ("Succeeded", "Failed")])
    return made(
        Status,
        phase=phases,
        conditions=st.lists(conditions, max_size=16).map(tuple),
        start_time=MAYBE | TIMES,
        active_seconds=MAYBE | HUGE,
        attempt=MAYBE | st.sampled_from([1, 2, 3, 10**30]),
        failed_attempts=MAYBE | HUGE,
        next_attempt_time=MAYBE | TIMES,
        ray_job_name=MAYBE | WORDS,
        head_pod=MAYBE | st.sampled_from(["p0", "elsewhere"]),
        progress=MAYBE | progresses(),
        attempts=st.lists(attempts, max_size=10).map(tuple),
    )


def progresses() -> st.SearchStrategy[Progress]:
    return made(Progress, step=HUGE, total_steps=HUGE, stage=WORDS, last_step_time=MAYBE | TIMES)


def heartbeats() -> st.SearchStrategy[Heartbeat]:
    told = made(
        Status,
        phase=st.sampled_from(get_args(Phase)),
        progress=MAYBE | progresses(),
        metrics=st.just((Metric(name="x", value="1"),)),
        checkpoint=MAYBE | made(SavedState, step=st.sampled_from([1, 10**30]), uri=WORDS, time=TIMES),
        last_failure=MAYBE | made(Failure, reason=WORDS, exit_code=MAYBE | st.integers(0, 255), message=WORDS),
    )
    return made(
        Heartbeat,
        attempt=SMALL,
        received=MOMENTS,
        status=told,
        exit_code=MAYBE | st.integers(-(10**6), 10**6),
        complete=st.booleans(),
    )


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    status=statuses(),
    seen_rayjobs=st.lists(rayjobs(), max_size=3, unique_by=lambda each: each.name),
    seen_pods=st.lists(pods(), max_size=3, unique_by=lambda each: each.name),
    seen_readers=st.lists(pods(), max_size=2).map(lambda found: [replace(each, name=READER) for each in found]),
    beat=MAYBE | heartbeats(),
    spec=st.sampled_from(
        [
            *(SFT, ON_HUB, {}, {"suspend": "yes"}, {**SFT, "suspend": True}),
            *({"runPolicy": {"backoffLimit": -1}}, {"models": [[]]}),
        ]
    ),
    quota=MAYBE | made(ObservedQuota, reserved=st.booleans(), evicted=WORDS, message=WORDS),
    of_input=made(Status, phase=st.sampled_from(get_args(Phase)), output=MAYBE | made(Output, uri=WORDS)),
    now=MOMENTS,
)
def test_a_pass_over_anything_ends_with_a_plan(
    status: Status,
    seen_rayjobs: list[ObservedRayJob],
    seen_pods: list[ObservedPod],
    seen_readers: list[ObservedPod],
    beat: Heartbeat | None,
    spec: dict[str, Any],
    quota: ObservedQuota | None,
    of_input: Status,
    now: Any,
) -> None:
    job = ObservedJob(
        namespace="team",
        name="job",
        uid=UID,
        generation=1,
        resource_version="1",
        created=START,
        deleting=False,
        labels={},
        spec=spec,
        status=status,
    )
    seen = Snapshot(
        job=job,
        rayjobs=tuple(seen_rayjobs),
        pods=tuple(seen_pods),
        readers=tuple(seen_readers),
        heartbeat=beat,
        quota=quota,
        inputs={"x": replace(job, name="x", spec={}, status=of_input)},
        watching_since=START,
        fresh=True,
    )
    plan = decide(seen, now, Settings())
    assert Status.model_validate(plan.status.document(), by_alias=True, by_name=False) == plan.status
    assert not any(isinstance(each, ReadLive) for each in plan.actions)
    assert plan == decide(seen, now, Settings())
    makes = any(isinstance(each, Create) for each in plan.actions)
    assert not (makes and (seen_pods or any(each.owned for each in seen_rayjobs)))


def test_json_as_deep_as_the_api_server_takes_it_stops_nothing() -> None:
    program = f"""
import json, sys
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.main import MAX_DEPTH
sys.setrecursionlimit(MAX_DEPTH)
deep = '{{"a":' * 9990 + "1" + "}}" * 9990
text = json.dumps({SFT!r})[:-1] + ', "models": {{"reward": {{"arguments": ' + deep + "}}}}}}"
metadata = '{{"namespace": "n", "name": "deep", "uid": "u", "resourceVersion": "7"}}'
cache = Cache()
print(cache.put("jobs", json.loads('{{"metadata": ' + metadata + ', "spec": ' + text + "}}")))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (said.stdout, said.returncode) == ("{('n', 'deep')}\n", 0), said.stderr[-2000:]
