"""Sandboxes of a job: pods that may do little and reach nobody, come and go with an attempt, and count as room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_operator import names
from rlhf_operator.actions import Create
from rlhf_operator.reconcile.attempt_status import SLOW_START_SECONDS
from rlhf_operator.reconcile.room import groups_of, held_by, place, with_sandboxes
from rlhf_operator.resources import sandboxes
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedContainer, ObservedPod, ObservedRayJob, Refusal
from tests.operator.fake_trainer import START
from tests.operator.rendered import changed, groups, head, made, mapped, nodes, pod_of, snapshot, variables
from tests.operator.running_jobs import NODES
from tests.operator.simulated import SFT, World
from tests.operator.test_a_job_lives_its_life import message, reason
from tests.operator.test_who_may_connect_to_a_job import SETTINGS as CLOSED

NAME = "calculator-grpo"
RAYJOB = ObservedRayJob(name=f"{NAME}-a1", uid="of-the-rayjob", attempt=1, owned=True, created=START, deleting=False)
SANDBOX = "job-a1-sandbox"
PULLS = ObservedContainer(name=names.SANDBOX, waiting_reason="ImagePullBackOff")


def job(**sandbox: Any) -> Job:
    return changed(NAME, {"sandbox": {"warm": 3, "cpu": "500m", "memory": "1Gi", **sandbox}})


def objects(asked: Job, settings: Settings | None = None) -> dict[str, Any]:
    """The manifests by kind."""
    seen = snapshot(asked, nodes(1)).job
    found = sandboxes.manifests(seen, RAYJOB, asked, settings or Settings(), range(7, 8))
    return {each["kind"]: each for each in found}


def pod(asked: Job, settings: Settings | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = objects(asked, settings)["Pod"]["spec"]
    return spec


def test_all_objects_go_with_the_attempt() -> None:
    found = objects(job())
    assert list(found) == ["ConfigMap", "NetworkPolicy", "Service", "Pod"]
    for each in found.values():
        number = "-7" if each["kind"] == "Pod" else ""
        assert each["metadata"]["name"] == f"{NAME}-a1-sandbox{number}"
        assert [(owner["kind"], owner["uid"]) for owner in each["metadata"]["ownerReferences"]] == [
            ("RayJob", RAYJOB.uid)
        ]


def test_a_pod_may_do_as_little_as_kubernetes_can_allow() -> None:
    spec = pod(job())
    (container,) = spec["containers"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 65532, "no process of the trainer has this user"
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    size = {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "64Mi"}
    assert container["resources"] == {"requests": size, "limits": size}
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}
    assert spec["activeDeadlineSeconds"] > 3600 + 600
    assert spec["restartPolicy"] == "Never", "it serves once"
    assert "env" not in container, "no Secret and no variable of the job"


def test_it_has_the_jobs_pull_secrets_and_no_account() -> None:
    settings = Settings(service_account_name="with-a-role", image_pull_secrets=("registry",))
    spec = pod(job(image="own:1"), settings)
    assert "serviceAccountName" not in spec
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["image"] == "own:1"
    assert pod(job(), settings)["containers"][0]["image"] == settings.trainer_image


def test_it_goes_where_the_head_may() -> None:
    own = {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "rl", "operator": "Exists"}], "hostNetwork": True}
    asked = changed(NAME, {"sandbox": {}, "runtime.controller.template": {"spec": own}})
    spec = pod(asked)
    assert (spec["nodeSelector"], spec["tolerations"]) == (own["nodeSelector"], own["tolerations"])
    assert "hostNetwork" not in spec


def test_only_workers_of_the_job_come_in_and_nothing_goes_out() -> None:
    policy = objects(job())["NetworkPolicy"]["spec"]
    uid = f"uid-of-{NAME}"
    assert policy["podSelector"] == {"matchLabels": {names.JOB_UID: uid, names.ROLE: names.SANDBOX}}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {names.JOB_UID: uid, names.ROLE: names.WORKER}}}]
    assert rule["ports"] == [{"port": names.SANDBOX_PORT, "protocol": "TCP"}]


def test_egress_leaves_out_private_networks_and_metadata() -> None:
    (public,) = objects(job(network="Egress"))["NetworkPolicy"]["spec"]["egress"]
    blocks = [each["ipBlock"] for each in public["to"]]
    assert [each["cidr"] for each in blocks] == ["0.0.0.0/0", "::/0"]
    assert {"10.0.0.0/8", "169.254.0.0/16", "168.63.129.16/32"} <= set(blocks[0]["except"])


def test_the_installation_says_who_their_dns_is() -> None:
    peer = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    _, dns = objects(job(network="Egress"), Settings(sandbox_dns=(peer,)))["NetworkPolicy"]["spec"]["egress"]
    assert dns["to"] == [peer]
    assert {each["port"] for each in dns["ports"]} == {53, 5353}


def test_sandboxes_are_no_pods_that_the_job_trusts() -> None:
    policy = made(job(), nodes(1), CLOSED)["NetworkPolicy"]["spec"]
    apart = [{"key": names.ROLE, "operator": "NotIn", "values": [names.SANDBOX]}]
    assert policy["podSelector"]["matchExpressions"] == apart
    assert policy["ingress"][0]["from"] == [{"podSelector": policy["podSelector"]}]
    labels = objects(job())["Pod"]["metadata"]["labels"]
    assert names.ATTEMPT not in labels, "neither a budget for evictions nor a failure of the attempt is about them"


def test_the_trainer_is_told_where_they_are() -> None:
    rayjob = made(job(), nodes(1))["RayJob"]
    (group,) = groups(rayjob).values()
    for each in (head(rayjob), group):
        address = variables(pod_of(each)["containers"][0])["RLHF_SANDBOXES"]
        assert address == f"{objects(job())['Service']['metadata']['name']}.default.svc:{names.SANDBOX_PORT}"
    plain = made(changed(NAME, {}), nodes(1))["RayJob"]
    assert "RLHF_SANDBOXES" not in variables(pod_of(head(plain))["containers"][0])


def test_a_job_begins_only_with_room_for_its_sandboxes() -> None:
    asked, there = job(cpu="30"), nodes(1)
    seen = snapshot(asked, there)
    mapping = mapped(asked, there)
    found = place(groups_of(seen, asked, mapping, Settings()), seen)
    assert "1 of 3 sandboxes (30 CPUs, 1Gi each)" in found.lacks
    assert not place(groups_of(seen, job(), mapping, Settings()), seen).lacks


def test_their_room_stays_reserved_while_they_come_and_go() -> None:
    asked, seen = job(), snapshot(job(), nodes(1))
    trainer = ObservedPod(
        name="w", uid="1", attempt=1, role=names.WORKER, created=START, node="n0", requests={"cpu": 8000}
    )
    plain, both = held_by([trainer]), with_sandboxes(held_by([trainer]), asked, seen, Settings())
    assert [each.node for each in both] == ["n0"]
    assert both[0].amounts["cpu"] == 8000 + 3 * 500
    assert with_sandboxes(plain, changed(NAME, {}), seen, Settings()) == plain


# Their life, on a simulated cluster


def world() -> World:
    """A job that asks for three sandboxes, and whose pods run."""
    grpo = changed(NAME, {}).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    resources = {"device": "CPU", "nodes": 1, "slotsPerNode": 1}
    actor = {**SFT["models"]["actor"]}
    spec = {**grpo, "models": {**grpo["models"], "actor": actor}, "resources": resources, "sandbox": {"warm": 3}}
    found = World(spec=spec, nodes=NODES)
    found.settle()
    assert not found.sandboxes, "no pod of the attempt runs yet"
    found.make_pods()
    found.start_pods()
    found.settle()
    return found


def change(found: World, **fields: Any) -> ObservedPod:
    """Something happens to the first sandbox that waits or works."""
    pod = next(each for each in found.sandboxes.values() if each.phase in ("Pending", "Running"))
    found.sandboxes[pod.name] = replace(pod, **fields)
    return found.sandboxes[pod.name]


def test_they_are_made_with_the_attempt_and_deleted_with_it() -> None:
    found = world()
    assert len(found.sandboxes) == 3
    assert reason(found, "SandboxesReady") == "Starting"
    change(found, phase="Running", ready=True)
    found.settle()
    assert reason(found, "SandboxesReady") == "SandboxesRun"
    found.edit(suspend=True)
    found.settle()
    found.collect()
    found.settle()
    assert (found.phase, found.sandboxes) == ("Suspended", {})
    assert reason(found, "SandboxesReady") == "Ended"


def serve(found: World, count: int, **fields: Any) -> None:
    """So many sandboxes start, are ready for a minute, and end."""
    for pod in [each for each in found.sandboxes.values() if each.phase == "Pending"][:count]:
        found.sandboxes[pod.name] = replace(pod, phase="Running", ready=True)
    found.operate()
    found.wait(60)
    for pod in [each for each in found.sandboxes.values() if each.phase == "Running"]:
        ended = {"phase": "Succeeded", "not_ready_since": found.now, **fields}
        found.sandboxes[pod.name] = replace(pod, ready=False, **ended)
    found.operate()


def fail(found: World) -> None:
    """All sandboxes that wait are killed for their memory as soon as they have begun."""
    killed = ObservedContainer(name=names.SANDBOX, exit_code=137, ended_reason="OOMKilled")
    for pod in [each for each in found.sandboxes.values() if each.phase == "Pending"]:
        failed = replace(pod, phase="Failed", containers=(killed,), created=found.now)
        found.sandboxes[pod.name] = replace(failed, not_ready_since=found.now)


def living(found: World) -> list[str]:
    return sorted(pod.name for pod in found.sandboxes.values() if pod.phase in ("Pending", "Running"))


def test_pods_that_are_kept_for_debugging_keep_none() -> None:
    found = world()
    found.edit(runPolicy={"keepPodsOnFailure": True, "backoffLimit": 0})
    found.train(3)
    found.end(1, "a mistake")
    found.ray_tells()
    found.settle()
    found.wait(60)
    found.settle()
    assert (found.phase, reason(found, "ClusterReady")) == ("Failed", "Kept")
    assert found.pods
    assert not found.sandboxes


def test_each_serves_once_and_is_replaced_at_once() -> None:
    found = world()
    for count in range(1, 4):
        serve(found, 1, **({"phase": "Failed", "reason": "DeadlineExceeded"} if count == 2 else {}))
        assert living(found) == [f"{SANDBOX}-{number + count}" for number in range(1, 4)]
        assert len(found.sandboxes) == 3, "those that have served are deleted"


def test_the_policy_is_there_before_a_pod() -> None:
    found = world()
    found.sandboxes.clear()
    plan = found.operate()
    assert plan
    kinds = [each.manifest["kind"] for each in plan.actions if isinstance(each, Create)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "Service", *["Pod"] * 3]


def test_those_that_fail_at_once_are_replaced_soon_and_told() -> None:
    found = world()
    made = 0
    for _ in range(10):
        fail(found)
        while not living(found):
            found.operate()
            assert reason(found, "SandboxesReady") == "SandboxesFail"
            found.wait(1)
        made += 3
        assert (found.now - START).total_seconds() <= made / 3 * 11, "one fails as soon as another"
    assert made / ((found.now - START).total_seconds() / 60) <= 7 * 3, "the API server is spared"
    assert "OOMKilled, exit code 137" in message(found, "SandboxesReady")
    assert [each.kind for each in found.events if each.reason == "SandboxesFail"] == ["Warning"]
    assert len(found.sandboxes) <= 6
    serve(found, 1)
    assert reason(found, "SandboxesReady") == "Starting"


def test_one_that_is_ready_for_a_moment_is_no_sign_of_health() -> None:
    found = world()
    change(found, phase="Running", ready=True)
    found.settle()
    assert reason(found, "SandboxesReady") == "SandboxesRun"
    serve(found, 1)
    fail(found)
    found.operate()
    found.wait(11)
    found.operate()
    assert reason(found, "SandboxesReady") == "SandboxesFail"
    change(found, phase="Running", ready=True, created=found.now)
    found.operate()
    assert reason(found, "SandboxesReady") == "SandboxesFail"
    found.wait(11)
    found.operate()
    assert reason(found, "SandboxesReady") == "SandboxesRun"


def test_a_failed_sandbox_fails_no_attempt() -> None:
    found = world()
    found.train(3)
    for _ in range(3):
        change(found, phase="Failed", reason="Evicted", disruption="EvictionByEvictionAPI")
        found.settle()
        found.wait(11)
    found.settle()
    assert (found.phase, found.made) == ("Running", ["job-a1"])
    assert len(living(found)) == 3


def test_they_are_made_again_if_somebody_deletes_them() -> None:
    found = world()
    found.sandboxes.clear()
    found.settle()
    assert len(found.sandboxes) == 3


def test_an_operator_that_died_makes_them_later() -> None:
    found = world()
    found.sandboxes.clear()
    found.operate(dies_after=0)
    found.restart_operator()
    found.settle()
    assert len(found.sandboxes) == 3


@pytest.mark.parametrize("lack", ["an image", "room"])
def test_it_is_told_why_they_do_not_start(lack: str) -> None:
    found = world()
    why = "0/3 nodes are available: 3 Insufficient cpu." if lack == "room" else "image own:1 is not there"
    if lack == "room":
        change(found, unschedulable=why, node="")
    else:
        change(found, containers=(replace(PULLS, waiting_message=why),))
    found.settle()
    if lack == "room":
        assert reason(found, "SandboxesReady") == "Starting", "another one may be about to go"
        found.wait(SLOW_START_SECONDS + 1)
        found.settle()
    assert reason(found, "SandboxesReady") == "SandboxesWait"
    assert why in message(found, "SandboxesReady")
    assert [each.kind for each in found.events if each.reason == "SandboxesWait"] == ["Warning"]
    assert found.phase == "Initializing", "training does not wait for them"


def test_a_refused_pod_is_told() -> None:
    found = world()
    why = f"Pod {SANDBOX}-1 was refused: exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3"
    found.sandboxes.clear()
    found.refused = Refusal(reason="CreateRefused", message=why)
    found.operate()
    assert (reason(found, "SandboxesReady"), message(found, "SandboxesReady")) == ("SandboxesWait", why)
    found.refused = None
    found.settle()
    assert len(living(found)) == 3
