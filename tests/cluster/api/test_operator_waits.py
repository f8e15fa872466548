"""What a job waits for: its inputs, names that are taken, quotas; and that a job that is deleted leaves nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import JOBS, RAYJOBS, SECONDS, Document, example
from tests.cluster.stage import Lives, small_job, stage

MAPS = "/api/v1/namespaces/{}/configmaps"
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
QUOTAS = "/api/v1/namespaces/{}/resourcequotas"


@pytest.fixture(scope="module")
def lives(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """One namespace and one operator for all tests of this file."""
    for namespace in fresh_namespace(rlhf_server):
        with stage(rlhf_server, namespace, tmp_path_factory.mktemp("operator")) as (lives, process):
            yield lives
            assert "Traceback" not in process.log()


def wait_for_condition(lives: Lives, job: str, kind: str, reason: str) -> Document:
    """A condition, as soon as it is False for a reason."""
    return lives.jobs.server.until(
        lambda: found if (found := lives.jobs.condition(job, kind)).get("reason") == reason else {},
        SECONDS,
        f"{kind} of {job} has the reason {reason}",
    )


def test_a_chain_that_is_created_at_once_is_run_in_order(lives: Lives) -> None:
    chain = example(1, lives.jobs.namespace)
    for each in chain:
        each["spec"]["resources"]["device"] = "CPU"
    names = [each["metadata"]["name"] for each in chain]
    lives.apply(*reversed(chain))
    for place, name in enumerate(names):
        for later in names[place + 1 :]:
            assert wait_for_condition(lives, later, "InputsReady", "InputNotReady")["message"]
            assert not lives.jobs.rayjobs(later)
        lives.through(name)
    assert [lives.jobs.phase(name) for name in names] == ["Succeeded"] * 3


def test_a_failed_input_fails_a_job_and_a_missing_one_waits(lives: Lives) -> None:
    sft, rm, _ = example(1, lives.jobs.namespace)
    for each, name in ((sft, "broken"), (rm, "reader")):
        each["metadata"]["name"] = name
        each["spec"]["resources"]["device"] = "CPU"
    sft["spec"]["runPolicy"] = {"backoffLimit": 0}
    rm["spec"]["models"]["reward"]["uri"] = "job://broken"
    lives.apply(rm)
    message = wait_for_condition(lives, "reader", "InputsReady", "InputMissing")["message"]
    assert "broken" in message
    lives.apply(sft)
    wait_for_condition(lives, "reader", "InputsReady", "InputNotReady")
    lives.train("broken")
    lives.fail("broken")
    lives.jobs.wait_for("reader", "Failed")
    failed = lives.jobs.condition("reader", "Failed")
    assert failed["reason"] == "InputFailed"
    assert "broken" in failed["message"]
    assert not lives.jobs.rayjobs("reader")


def test_a_quotas_refusal_is_told_until_it_may_go_on(lives: Lives) -> None:
    quotas = QUOTAS.format(lives.jobs.namespace)
    claims = len(lives.jobs.server.items(CLAIMS.format(lives.jobs.namespace)))
    quota = {"metadata": {"name": "no-more"}, "spec": {"hard": {"persistentvolumeclaims": str(claims)}}}
    lives.jobs.server.expect("POST", quotas, quota)
    lives.jobs.server.until(
        lambda: lives.jobs.server.expect("GET", f"{quotas}/no-more").get("status", {}).get("used"), SECONDS, "the quota"
    )
    lives.apply(small_job("refused", lives.jobs.namespace))
    condition = wait_for_condition(lives, "refused", "Accepted", "CreateRefused")
    assert "exceeded quota: no-more" in condition["message"]
    assert (condition["status"], lives.jobs.phase("refused")) == ("False", "Pending")
    assert not lives.jobs.rayjobs("refused")
    assert "Provisioning" not in {each["reason"] for each in lives.jobs.events("refused")}
    lives.jobs.server.expect("DELETE", f"{quotas}/no-more")
    final = lives.through("refused")
    assert (final["attempt"], lives.jobs.condition("refused", "Accepted")["status"]) == (1, "True")


def test_a_template_with_an_unknown_field_is_told(lives: Lives) -> None:
    job = small_job("unknown-field", lives.jobs.namespace)
    job["spec"]["runtime"] = {"worker": {"template": {"spec": {"nodeSelectr": {"zone": "a"}}}}}
    lives.apply(job)
    message = wait_for_condition(lives, "unknown-field", "Accepted", "CreateRefused")["message"]
    assert 'unknown field "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.nodeSelectr"' in message


def test_a_template_with_the_operators_own_is_told_by_path(lives: Lives) -> None:
    job = small_job("owned-field", lives.jobs.namespace)
    job["spec"]["runtime"] = {"worker": {"template": {"spec": {"restartPolicy": "Always"}}}}
    lives.apply(job)
    message = wait_for_condition(lives, "owned-field", "Accepted", "InvalidSpec")["message"]
    assert "spec.runtime.worker.template.spec.restartPolicy: is the operator's" in message


def foreign_map(name: str) -> Document:
    return {"metadata": {"name": name}, "data": {"somebody": "else's"}}


def foreign_rayjob(name: str) -> Document:
    template = {"spec": {"containers": [{"name": "ray-head", "image": "x"}]}}
    cluster = {"headGroupSpec": {"rayStartParams": {}, "template": template}}
    spec = {"entrypoint": "true", "suspend": True, "rayClusterSpec": cluster}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}


def map_of(lives: Lives, job: str) -> str:
    """The ConfigMap of a job, which all attempts with the same mapping share; it is gone now."""
    path = MAPS.format(lives.jobs.namespace)
    (name,) = (
        each["metadata"]["name"]
        for each in lives.jobs.server.items(path)
        if any(owner["name"] == job for owner in each["metadata"].get("ownerReferences", []))
    )
    lives.jobs.server.expect("DELETE", f"{path}/{name}")
    return str(name)


def next_rayjob(_: Lives, job: str) -> str:
    return f"{job}-a2"


@pytest.mark.parametrize(
    ("path", "foreign", "taken"),
    [(MAPS, foreign_map, map_of), (RAYJOBS, foreign_rayjob, next_rayjob)],
    ids=["map", "rayjob"],
)
def test_a_taken_name_is_told_left_alone_and_waited_for(
    lives: Lives,
    path: str,
    foreign: Callable[[str], Document],
    taken: Callable[[Lives, str], str],
    request: pytest.FixtureRequest,
) -> None:
    job, server = f"taken-{request.node.callspec.id}", lives.jobs.server
    lives.apply(small_job(job, lives.jobs.namespace))
    lives.train(job)
    name = taken(lives, job)
    there = f"{path.format(lives.jobs.namespace)}/{name}"
    before = server.expect("POST", path.format(lives.jobs.namespace), foreign(name))
    lives.fail(job)
    message = wait_for_condition(lives, job, "Accepted", "NameConflict")["message"]
    assert name in message
    assert "delete it" in message
    now = server.expect("GET", there)
    assert (now["metadata"]["uid"], now.get("data")) == (before["metadata"]["uid"], before.get("data"))
    server.expect("DELETE", there)
    lives.train(job, 2)
    assert lives.jobs.condition(job, "Accepted")["status"] == "True"
    final = lives.succeed(job, 2)
    assert [each["outcome"] for each in final["attempts"]] == ["Failed", "Succeeded"]


def is_pending(lives: Lives, job: str) -> None:
    wait_for_condition(lives, job, "Accepted", "ClaimMissing")


def is_mapping(lives: Lives, job: str) -> None:
    lives.jobs.wait_for(job, "Mapping")


def is_provisioning(lives: Lives, job: str) -> None:
    lives.jobs.wait_for(job, "Provisioning")


def is_running(lives: Lives, job: str) -> None:
    lives.train(job)


def is_restarting(lives: Lives, job: str) -> None:
    lives.train(job)
    lives.fail(job)
    lives.jobs.wait_for(job, "Restarting")


def is_suspended(lives: Lives, job: str) -> None:
    lives.train(job)
    lives.jobs.patch(job, {"spec": {"suspend": True}})
    lives.jobs.wait_for(job, "Suspended")


def has_succeeded(lives: Lives, job: str) -> None:
    lives.train(job)
    lives.jobs.succeed(job, lives.kubelets.trainer(job))


def has_succeeded_and_owns_its_claim(lives: Lives, job: str) -> None:
    has_succeeded(lives, job)
    claim = f"{CLAIMS.format(lives.jobs.namespace)}/{job}-output"
    lives.jobs.server.until(
        lambda: lives.jobs.server.expect("GET", claim)["metadata"].get("ownerReferences"), SECONDS, f"{job} owns it"
    )


def has_failed(lives: Lives, job: str) -> None:
    lives.train(job)
    lives.fail(job)
    lives.jobs.wait_for(job, "Failed")


NO_SCHEDULER = {"template": {"spec": {"schedulerName": "nobody"}}}
NEVER, ON_FAILURE = {"storage": {"retain": "Never"}}, {"storage": {"retain": "OnFailure"}}
PHASES: dict[str, tuple[Callable[[Lives, str], None], dict[str, Any]]] = {
    "pending": (is_pending, {"checkpoint": {"storage": "pvc://missing"}}),
    "mapping": (is_mapping, {"resources": {"device": "GPU", "nodes": 40, "slotsPerNode": 8}}),
    "provisioning": (is_provisioning, {"runtime": {"controller": NO_SCHEDULER}, **NEVER}),
    "running": (is_running, NEVER),
    "restarting": (is_restarting, {"runPolicy": {"restartBackoffSeconds": 300}, **NEVER}),
    "suspended": (is_suspended, ON_FAILURE),
    "succeeded": (has_succeeded, {}),
    "succeeded-in-vain": (has_succeeded_and_owns_its_claim, ON_FAILURE),
    "failed": (has_failed, {"runPolicy": {"backoffLimit": 0}, **ON_FAILURE}),
}
KEPT = ("suspended", "succeeded", "failed")
"""Phases in which a job leaves its claim."""


def leftovers(lives: Lives, job: str) -> list[str]:
    """Everything in the namespace that bears the job's label."""
    selector = f"?labelSelector=rlhf.hybridflow.io/job-name={job}"
    namespace, server = lives.jobs.namespace, lives.jobs.server
    budgets = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"
    pods, clusters = "/api/v1/namespaces/{}/pods", "/apis/ray.io/v1/namespaces/{}/rayclusters"
    paths = (RAYJOBS, MAPS, CLAIMS, budgets, pods, clusters)
    found = [each["metadata"]["name"] for path in paths for each in server.items(path.format(namespace) + selector)]
    return found + [job] * (server.request("GET", f"{JOBS.format(namespace)}/{job}")[0] == 200)


def test_a_job_deleted_in_any_phase_leaves_its_claim_or_nothing(lives: Lives) -> None:
    def delete_in(phase: str) -> int:
        reach, spec = PHASES[phase]
        job = small_job(f"deleted-{phase}", lives.jobs.namespace)
        job["spec"].update(spec)
        lives.apply(job)
        name = job["metadata"]["name"]
        reach(lives, name)
        there, left = len(leftovers(lives, name)), [f"{name}-output"] if phase in KEPT else []
        lives.jobs.delete(name)
        lives.jobs.server.until(
            lambda: leftovers(lives, name) == left, SECONDS, f"{left or 'nothing'} is left of {name}"
        )
        return there

    with ThreadPoolExecutor(len(PHASES)) as threads:
        there = dict(zip(PHASES, threads.map(delete_in, PHASES), strict=True))
    assert there["running"] >= 6


def test_an_earlier_namesakes_claim_is_not_deleted(lives: Lives) -> None:
    name, server = "again", lives.jobs.server
    claim = f"{CLAIMS.format(lives.jobs.namespace)}/{name}-output"
    for retain in ("Always", "Never"):
        job = small_job(name, lives.jobs.namespace)
        lives.apply({**job, "spec": {**job["spec"], "storage": {"retain": retain}}})
        lives.train(name)
        assert not server.expect("GET", claim)["metadata"].get("ownerReferences")
        lives.jobs.delete(name)
        server.until(lambda: leftovers(lives, name) == [f"{name}-output"], SECONDS, "the claim alone is left")
