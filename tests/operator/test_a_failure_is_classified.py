"""Each way an attempt can fail, on a simulated cluster: the reason, who is blamed, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rlhf_api.status import Pace
from rlhf_operator import failure, names
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.snapshot import ObservedContainer
from tests.each import each_case
from tests.operator.running_jobs import NODES, failed, running
from tests.operator.simulated import SFT, World


@each_case(
    ("code", "reason", "phase"),
    [
        (1, "Internal", "Restarting"),
        (2, "Spec", "Failed"),
        (3, "Data", "Failed"),
        (4, "Environment", "Restarting"),
        (5, "OutOfMemory", "Restarting"),
        (6, "Numerics", "Restarting"),
        (7, "UserCode", "Failed"),
        (8, "Communication", "Restarting"),
        (127, "Environment", "Restarting"),
        (137, "Unknown", "Restarting"),
        (-9, "Unknown", "Restarting"),
        (143, "Unknown", "Restarting"),
    ],
)
def test_an_exit_code_has_its_reason(code: int, reason: str, phase: str) -> None:
    world = running()
    world.end(code, "what it said")
    world.ray_tells()
    world.settle()
    world.wait(61)
    world.settle()
    assert (failed(world).reason, world.phase) == (reason, phase)
    assert failed(world).exit_code == (code if code > 0 else 128 - code)
    assert world.live is None
    if 0 < code <= 8:
        assert failed(world).message == "what it said"
    record = world.status.attempts[-1]
    assert (record.outcome, record.reason, record.first_step, record.last_step) == ("Failed", reason, 0, 12)


@pytest.mark.parametrize("code", [2, 7, 8])
def test_rays_word_is_enough_where_the_head_pod_is_silent(code: int) -> None:
    world = running()
    world.is_reachable, world.beat = False, None
    world.end(code)
    world.ray_tells()
    world.settle()
    world.wait(61)
    world.settle()
    assert failed(world).exit_code == code


def gone(world: World, pod: str) -> None:
    del world.pods[pod]


def disrupted(why: str) -> Callable[[World, str], None]:
    return lambda world, pod: world.change(pod, deleting_since=world.now, disruption=why, ready=False)


def out_of_memory(world: World, pod: str) -> None:
    own = names.HEAD_CONTAINER if world.pods[pod].role == names.CONTROLLER else names.WORKER_CONTAINER
    ended = ObservedContainer(name=own, exit_code=137, ended_reason="OOMKilled")
    world.change(pod, phase="Failed", ready=False, containers=(ended,))


def ended(world: World, pod: str) -> None:
    world.change(pod, phase="Failed", ready=False, reason="Error")


def evicted(world: World, pod: str) -> None:
    world.change(pod, phase="Failed", ready=False, reason="Evicted", message="low on ephemeral-storage")


def evicted_by_kubelet(says: str) -> Callable[[World, str], None]:
    """The kubelet's words are those of Kubernetes 1.33."""
    fields = {"phase": "Failed", "ready": False, "reason": "Evicted", "disruption": "TerminationByKubelet"}
    return lambda world, pod: world.change(pod, message=says, **fields)


LOW = "The node was low on resource: {0}. Container x was using 9Gi, request is 4Gi, has larger consumption of {0}. "
OVER_STORAGE = (
    'Usage of EmptyDir volume "ray" exceeds the limit "1Gi". ',
    'Container ray-worker exceeded its local ephemeral storage limit "1Gi". ',
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    LOW.format("ephemeral-storage"),
)


def unknown(world: World, pod: str) -> None:
    world.change(pod, phase="Unknown", ready=False)


LOSSES = [
    (gone, "HeadLost", "WorkerLost"),
    (ended, "HeadLost", "WorkerLost"),
    (out_of_memory, "OutOfMemory", "OutOfMemory"),
    (evicted, "Evicted", "Evicted"),
    *((evicted_by_kubelet(says), "OutOfStorage", "OutOfStorage") for says in OVER_STORAGE),
    (evicted_by_kubelet(LOW.format("memory")), "OutOfMemory", "OutOfMemory"),
    (evicted_by_kubelet("The node was low on resource: memory. "), "Evicted", "Evicted"),
    (unknown, "NodeLost", "NodeLost"),
    (disrupted("PreemptionByScheduler"), "Preempted", "Preempted"),
    (disrupted("DeletionByTaintManager"), "NodeLost", "NodeLost"),
    (disrupted("EvictionByEvictionAPI"), "Evicted", "Evicted"),
    (disrupted("TerminationByKubelet"), "Evicted", "Evicted"),
    (disrupted(""), "HeadLost", "WorkerLost"),
]


@each_case(("lose", "of_head", "of_worker"), LOSSES)
@each_case("is_head", [True, False])
def test_a_lost_pod_ends_the_attempt(
    lose: Callable[[World, str], None], of_head: str, of_worker: str, is_head: bool
) -> None:
    world = running()
    pod = (world.head() if is_head else world.worker()).name
    lose(world, pod)
    world.settle()
    assert failed(world).reason == (of_head if is_head else of_worker)
    assert (world.phase, world.live) == ("Restarting", None)
    if lose is not gone:
        assert (failed(world).pod, failed(world).node) == (pod, "node-0")
        assert world.status.attempts[-1].node == "node-0"
    counted = failed(world).reason not in ("Preempted", "NodeLost", "Evicted")
    assert world.status.failed_attempts == int(counted)


@each_case(("lose", "reason"), [(lose, of_worker) for lose, _, of_worker in LOSSES])
def test_evidence_wins_over_communication(lose: Callable[[World, str], None], reason: str) -> None:
    world = running()
    world.end(8, "NCCL error")
    world.ray_tells()
    world.settle()
    assert world.phase == "Running", "it waits for evidence"
    lose(world, world.worker().name)
    world.settle()
    assert (failed(world).reason, failed(world).exit_code) == (reason, 8)


@each_case("code", [2, 3, 6, 7])
def test_a_mistake_that_the_trainer_names_wins_over_evidence(code: int) -> None:
    world = running()
    world.end(code)
    out_of_memory(world, world.worker().name)
    world.settle()
    assert failed(world).reason == {2: "Spec", 3: "Data", 6: "Numerics", 7: "UserCode"}[code]


def test_a_worker_that_kuberay_replaced_is_a_lost_worker() -> None:
    world = running()
    old = world.worker()
    del world.pods[old.name]
    world.wait(5)
    world.pods["new"] = replace(old, name="new", uid="new", created=world.now)
    world.settle()
    assert failed(world).reason == "WorkerLost"


def test_a_lost_head_is_noticed_though_kuberay_says_running() -> None:
    world = running()
    del world.pods[world.head().name]
    assert world.live is not None
    assert world.live.deployment_status == "Running"
    world.settle()
    assert failed(world).reason == "HeadLost"


def test_a_node_that_is_gone_or_silent_is_lost() -> None:
    world = running(nodes=NODES)
    node = world.head().node
    for pod in [each.name for each in world.pods.values() if each.node == node]:
        world.change(pod, ready=False, not_ready_since=world.now)
    silent = tuple(replace(each, ready=each.name != node) for each in NODES)
    world.nodes = silent
    world.settle()
    assert world.phase == "Running"
    world.wait(61)
    world.settle()
    assert (failed(world).reason, failed(world).node) == ("NodeLost", node)
    assert world.status.mapping is None, "it is mapped anew"
    assert world.status.failed_attempts == 0


def test_a_node_that_was_removed_is_lost_at_once() -> None:
    world = running(nodes=NODES)
    node = world.worker().node
    world.nodes = tuple(each for each in NODES if each.name != node)
    world.settle()
    assert (failed(world).reason, failed(world).node) == ("NodeLost", node)


@pytest.mark.parametrize(
    ("container", "seconds", "reason"),
    [
        (
            ObservedContainer(name="ray-head", waiting_reason="ImagePullBackOff", waiting_message="no such image"),
            300,
            "ImagePull",
        ),
        (ObservedContainer(name="ray-head", waiting_reason="ErrImagePull"), 300, "ImagePull"),
        (
            ObservedContainer(name="ray-head", waiting_reason="CreateContainerError", waiting_message="no such device"),
            300,
            "ContainerRefused",
        ),
    ],
)
def test_a_container_that_cannot_start_has_some_time(container: ObservedContainer, seconds: int, reason: str) -> None:
    world = World()
    world.settle()
    world.make_pods()
    world.change(world.head().name, containers=(container,))
    world.wait(seconds - 1)
    world.settle()
    assert world.phase == "Provisioning"
    world.restart_operator()
    world.wait(2)
    world.settle()
    assert world.phase == "Provisioning", "an operator that was not there has seen nothing"
    world.wait(seconds)
    world.settle()
    assert failed(world).reason == reason


def test_a_claim_that_is_missing_for_a_pod_is_named() -> None:
    world = World()
    world.settle()
    world.make_pods()
    world.change(world.head().name, unschedulable='persistentvolumeclaim "models" not found')
    world.settle()
    world.wait(1800)
    world.settle()
    assert failed(world).reason == "ClaimMissing"
    assert "models" in failed(world).message


def test_the_deadline_runs_from_when_all_pods_have_nodes() -> None:
    world = World(spec={**SFT, "runPolicy": {"startupDeadlineSeconds": 600}})
    world.settle()
    world.make_pods()
    world.change(world.worker().name, unschedulable="0/3 nodes are available: insufficient cpu")
    world.wait(100_000)
    world.settle()
    (ready,) = (each for each in world.status.conditions if each.type == "ClusterReady")
    assert (world.phase, ready.reason) == ("Provisioning", "Unschedulable")
    world.change(world.worker().name, unschedulable="", scheduled=world.now)
    world.settle()
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.requeue_after == pytest.approx(600)
    world.wait(601)
    world.settle()
    assert failed(world).reason == "StartupTimeout"


def test_an_unbound_claim_ends_in_a_timeout_with_its_reason() -> None:
    world = World(spec={**SFT, "runPolicy": {"startupDeadlineSeconds": 600}})
    world.settle()
    world.make_pods()
    world.change(world.worker().name, unschedulable="pod has unbound immediate PersistentVolumeClaims")
    world.settle()
    world.wait(601)
    world.settle()
    assert failed(world).reason == "StartupTimeout"
    assert "PersistentVolumeClaims" in failed(world).message


def test_silence_between_two_steps_is_a_hang() -> None:
    world = running(spec={**SFT, "runPolicy": {"progressDeadlineSeconds": 600}})
    world.wait(301)
    world.settle()
    assert world.phase == "Running"
    assert any(each.type == "Slow" and each.status == "True" for each in world.status.conditions)
    world.train(1)
    world.settle()
    assert any(each.type == "Slow" and each.status == "False" for each in world.status.conditions)
    world.wait(599)
    world.settle()
    assert world.phase == "Running"
    world.wait(2)
    world.settle()
    assert failed(world).reason == "Hang"
    assert world.phase == "Restarting"


EVALUATED = {**SFT, "evaluation": {"data": SFT["data"]["train"], "everySteps": 5}}
SERVICE = {"url": "http://host/score", "timeoutSeconds": 250, "attempts": 2}
JUDGED = {
    **SFT,
    "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
    "models": {**SFT["models"], "reward": SERVICE},
    "data": {**SFT["data"], "maxPromptTokens": 8, "maxResponseTokens": 8},
    "rollout": {"samplesPerPrompt": 2},
    "training": {"totalSteps": SFT["training"]["totalSteps"], "promptBatchSize": 4},
}


@pytest.mark.parametrize(
    ("spec", "step", "seconds", "limit"),
    [
        pytest.param(SFT, 12, 2.0, 300 + 1800, id="short steps"),
        pytest.param(SFT, 12, 100.0, 1000 + 1800, id="long steps"),
        pytest.param(SFT, 12, 1000.0, 3600, id="very long steps"),
        pytest.param(SFT, 1, 2.0, 3600, id="the first steps"),
        pytest.param(JUDGED, 12, 2.0, 1000 + 1800, id="a slow service"),
        pytest.param(EVALUATED, 12, 2.0, 3600, id="evaluations between steps"),
    ],
)
def test_an_unset_deadline_follows_the_steps(spec: dict[str, Any], step: int, seconds: float, limit: int) -> None:
    world = World(spec=spec, pace=Pace(step_seconds=seconds))
    world.run_to(step)
    world.wait(limit - 1)
    world.settle()
    assert world.phase == "Running"
    world.wait(2)
    world.settle()
    assert failed(world).reason == "Hang"
    assert f"for {limit} s, spec.runPolicy.progressDeadlineSeconds (not set)" in failed(world).message


@pytest.mark.parametrize("hours", [-10, 10])
def test_a_wrong_clock_in_the_pod_makes_or_hides_no_hang(hours: int) -> None:
    world = running(spec={**SFT, "runPolicy": {"progressDeadlineSeconds": 600}})
    assert world.trainer
    for _ in range(3):
        world.wait(500)
        world.train(1)
        world.trainer.stepped = world.now + timedelta(hours=hours)
        world.settle()
        world.wait(10)
        world.settle()
        assert world.phase == "Running"
    world.wait(600)
    world.settle()
    assert failed(world).reason == "Hang"


@pytest.mark.parametrize("steps", [0, 3])
def test_a_head_pod_heard_now_and_then_puts_no_hang_off(steps: int) -> None:
    policy = {"startupDeadlineSeconds": 300, "progressDeadlineSeconds": 600}
    world = World(spec={**SFT, "runPolicy": policy})
    world.run_to(0)
    world.train(steps)
    world.settle()
    assert world.phase == "Running"
    seen = []
    for _ in range(5):
        for world.is_reachable in (False, True):
            world.wait(100)
            world.settle()
            seen += [(world.phase, each.status) for each in world.status.conditions if each.type == "Training"]
    assert seen[:4] == [("Running", "Unknown"), ("Running", "True")] * 2
    assert failed(world).reason == "Hang"


def test_a_restarted_operator_gives_a_silent_job_its_time_again() -> None:
    world = running(spec={**SFT, "runPolicy": {"progressDeadlineSeconds": 600}})
    world.wait(10_000)
    world.restart_operator()
    world.settle()
    assert world.phase == "Running"
    world.wait(601)
    world.settle()
    assert failed(world).reason == "Hang"


def test_a_step_that_came_late_is_no_hang() -> None:
    world = running(spec={**SFT, "runPolicy": {"progressDeadlineSeconds": 600}})
    assert world.trainer
    world.trainer.step += 1  # its clock stands still
    world.wait(10_000)
    world.operate()
    assert world.phase == "Running"


def test_a_silent_head_pod_makes_training_unknown_and_no_more() -> None:
    world = running()
    world.is_reachable = False
    world.wait(100)
    world.settle()
    training = next(each for each in world.status.conditions if each.type == "Training")
    assert (training.status, training.reason, world.phase) == ("Unknown", "HeartbeatMissing", "Running")


def test_a_restarted_operator_waits_before_it_says_silent() -> None:
    world = running()
    world.is_reachable = False
    world.restart_operator()
    world.settle()
    training = next(each for each in world.status.conditions if each.type == "Training")
    assert training.status == "True"
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.requeue_after == pytest.approx(60)
    world.wait(60)
    world.settle()
    training = next(each for each in world.status.conditions if each.type == "Training")
    assert (training.status, training.reason) == ("Unknown", "HeartbeatMissing")


def test_a_deleted_rayjob_is_made_again_as_another_attempt() -> None:
    world = running()
    assert world.live
    del world.rayjobs[world.live.name]
    world.settle()
    assert (failed(world).reason, world.phase) == ("HeadLost", "Restarting")
    for pod in list(world.pods):
        del world.pods[pod]
    world.start_again()
    assert world.made == ["job-a1", "job-a2"]


def test_a_rayjob_that_kuberay_refuses_is_our_mistake() -> None:
    world = World()
    world.settle()
    world.rayjobs["job-a1"] = replace(world.rayjobs["job-a1"], deployment_status="ValidationFailed", message="bad name")
    world.settle()
    assert failed(world).reason == "Internal"
    assert "bad name" in failed(world).message


def test_a_pod_that_kuberay_has_taken_away_still_tells_why() -> None:
    world = running()
    worker = world.worker().name
    out_of_memory(world, worker)
    fallen = world.pods[worker]
    del world.pods[worker]
    seen = replace(world.observe(fresh=True), lost_pods=(fallen,))
    told = failure.classify(seen, world.now, ready_since=world.now)
    assert told is not None
    assert (told.reason, told.pod) == ("OutOfMemory", worker)
    healthy = replace(running().observe(fresh=True), lost_pods=(fallen,))
    assert failure.classify(healthy, world.now, ready_since=None) is None
