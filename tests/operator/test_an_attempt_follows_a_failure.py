"""What follows a failure, on a simulated cluster: rules, limits, pauses, deadlines and pods that do not go."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import get_args

import pytest

from rlhf_api.spec.run_policy import FailureRule, Reason, RunPolicy
from rlhf_api.status import Attempt, Failure
from rlhf_operator import evidence, failure, names
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.snapshot import ObservedContainer, ObservedNode
from tests.each import each_case
from tests.operator.fake_trainer import START
from tests.operator.rendered import A100, nodes
from tests.operator.running_jobs import NODES, failed, running
from tests.operator.simulated import SFT, World


def out_of_memory(world: World, pod: str) -> None:
    own = names.HEAD_CONTAINER if world.pods[pod].role == names.CONTROLLER else names.WORKER_CONTAINER
    ended = ObservedContainer(name=own, exit_code=137, ended_reason="OOMKilled")
    world.change(pod, phase="Failed", ready=False, containers=(ended,))


def test_every_reason_has_an_action_and_every_disruption_a_rank() -> None:
    assert set(evidence.CLASSES) == set(get_args(Reason))
    assert set(evidence.DISRUPTIONS.values()) <= set(evidence.STRENGTH)


@each_case(
    ("rule", "matches"),
    [
        (FailureRule(name="any", action="Ignore"), True),
        (FailureRule(name="reason", action="Ignore", reasons=("Data", "UserCode")), True),
        (FailureRule(name="reason", action="Ignore", reasons=("Data",)), False),
        (FailureRule(name="code", action="Ignore", exit_codes=(7,)), True),
        (FailureRule(name="code", action="Ignore", exit_codes=(8,)), False),
        (FailureRule(name="text", action="Ignore", message_contains="division"), True),
        (FailureRule(name="text", action="Ignore", message_contains="overflow"), False),
        (FailureRule(name="all", action="Ignore", reasons=("UserCode",), exit_codes=(8,)), False),
    ],
)
def test_a_rule_matches_where_all_that_it_names_does(rule: FailureRule, matches: bool) -> None:
    seen = Failure(reason="UserCode", exit_code=7, message="division by zero")
    last = FailureRule(name="last", action="Remap")
    policy = RunPolicy(failure_rules=(rule, last))
    assert failure.action_on(seen, policy) == (("Ignore", rule.name) if matches else ("Remap", "last"))


def test_a_rule_is_shown_and_obeyed() -> None:
    rules = [{"name": "flaky", "reasons": ["UserCode"], "action": "Ignore"}]
    world = running(spec={**SFT, "runPolicy": {"failureRules": rules, "backoffLimit": 0}})
    world.end(7)
    world.settle()
    assert (world.phase, failed(world).rule, world.status.failed_attempts) == ("Restarting", "flaky", 0)


def test_a_rule_can_end_the_job() -> None:
    rules = [{"name": "never", "exitCodes": [5], "action": "Fail"}]
    world = running(spec={**SFT, "runPolicy": {"failureRules": rules}})
    world.end(5)
    world.settle()
    assert world.phase == "Failed"
    assert next(each.reason for each in world.status.conditions if each.type == "Failed") == "FailureRule"


def test_the_back_off_limit_ends_the_job() -> None:
    world = World(spec={**SFT, "runPolicy": {"backoffLimit": 2}})
    for number in (1, 2, 3):
        world.run_to(5)
        assert (world.status.attempt, world.phase) == (number, "Running")
        world.end(5)
        world.ray_tells()
        world.settle()
        world.start_again()
    assert (world.phase, world.status.failed_attempts, len(world.made)) == ("Failed", 3, 3)
    assert next(each.reason for each in world.status.conditions if each.type == "Failed") == "BackoffLimitExceeded"


def test_pods_of_a_failed_job_are_kept_as_long_as_asked() -> None:
    policy = {"backoffLimit": 1, "keepPodsOnFailure": True}
    world = World(spec={**SFT, "runPolicy": policy})
    for _ in range(2):
        world.run_to(5)
        world.end(5)
        world.ray_tells()
        world.settle()
        world.start_again()
    assert (world.phase, world.made) == ("Failed", ["job-a1", "job-a2"])
    assert {pod.attempt for pod in world.pods.values()} == {2}, "those of the first have made room"
    assert next(each.reason for each in world.status.conditions if each.type == "ClusterReady") == "Kept"
    world.edit(runPolicy={**policy, "keepPodsOnFailure": False})
    world.settle()
    world.collect()
    world.collect()
    assert not world.pods


def test_kept_pods_go_with_the_job_when_its_time_is_over() -> None:
    policy = {"backoffLimit": 0, "keepPodsOnFailure": True, "ttlSecondsAfterFinished": 100}
    world = World(spec={**SFT, "runPolicy": policy})
    world.run_to(5)
    world.end(5)
    world.settle()
    assert (world.phase, world.is_deleted) == ("Failed", False)
    world.wait(100)
    world.settle()
    assert world.is_deleted


def test_pods_are_not_kept_of_a_job_that_succeeds() -> None:
    world = World(spec={**SFT, "runPolicy": {"keepPodsOnFailure": True}})
    world.run_to(50)
    world.end(0)
    world.ray_tells()
    world.settle()
    world.collect()
    assert (world.phase, world.rayjobs) == ("Succeeded", {})


def test_pods_that_train_are_not_kept_when_the_jobs_time_is_over() -> None:
    world = World(spec={**SFT, "runPolicy": {"keepPodsOnFailure": True, "activeDeadlineSeconds": 1000}})
    world.run_to(5)
    world.wait(1001)
    world.settle()
    world.collect()
    assert (world.phase, world.rayjobs) == ("Failed", {})


@pytest.mark.parametrize("action", ["Restart", "Remap"])
def test_no_memory_on_a_device_halves_the_micro_batch(action: str) -> None:
    policy = {"failureRules": [{"name": "all", "action": action}], "backoffLimit": 9}
    resources = {"device": "GPU", "nodes": 1, "slotsPerNode": 1}
    world = World(spec={**SFT, "resources": resources, "runPolicy": policy}, nodes=nodes(2, 1, A100))
    seen, told = [], []
    for code in (5, 8, 5, 5, 5):
        world.run_to(5)
        assert world.status.mapping is not None
        seen.append(world.status.mapping.micro_batch_tokens)
        told += [each.message for each in world.status.conditions if each.reason == "SmallerMicroBatches"]
        world.end(code)
        world.ray_tells()
        world.settle()
        world.wait(60)
        world.settle()
        world.start_again()
    assert seen == [8192, 4096, 4096, 2048, 2048]
    assert "no memory for micro-batches of 8192 tokens; they have 4096 now" in told[0]
    assert "no memory for micro-batches of 4096 tokens; they have 2048 now" in told[2]


def test_memory_saved_otherwise_says_no_micro_batches() -> None:
    resources = {"device": "GPU", "nodes": 1, "slotsPerNode": 1}
    world = World(spec={**SFT, "resources": resources}, nodes=nodes(1, 1, A100))
    world.run_to(5)
    world.end(5, message="actor.generate_sequences has not enough memory; lower spec.rollout.gpuMemoryUtilization")
    world.ray_tells()
    world.settle()
    world.wait(60)
    world.settle()
    world.start_again()
    assert failed(world).reason == "OutOfMemory"
    assert world.status.mapping is not None
    assert world.status.mapping.micro_batch_tokens == 8192


def test_a_pod_beyond_its_limit_says_nothing_of_micro_batches() -> None:
    world = running(spec={**SFT, "training": {**SFT["training"], "microBatchTokens": 4096}}, nodes=NODES)
    out_of_memory(world, world.worker().name)
    world.settle()
    world.start_again()
    assert failed(world).reason == "OutOfMemory"
    assert world.status.attempt == 2
    assert world.status.mapping is not None
    assert world.status.mapping.micro_batch_tokens is None, "as the manifest says"


def test_a_new_attempt_waits_for_the_last_pod_and_the_pause() -> None:
    world = running()
    world.end(5)
    world.settle()
    world.wait(1000)
    world.settle()
    assert (world.made, world.phase) == (["job-a1"], "Restarting"), "pods are left"
    world.collect()
    world.collect()
    world.settle()
    assert world.made == ["job-a1", "job-a2"]
    world.run_to(15)
    assert [each.first_step for each in world.status.attempts] == [0, 10]


def test_a_new_attempt_waits_for_its_pause_where_nothing_is_left() -> None:
    world = running()
    world.end(5)
    world.settle()
    world.collect()
    world.collect()
    world.settle()
    assert (world.made, world.phase) == (["job-a1"], "Restarting")
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.requeue_after is not None
    world.wait(plan.requeue_after)
    world.settle()
    assert world.made == ["job-a1", "job-a2"]


def test_pauses_double_up_to_five_minutes_and_differ_by_job() -> None:
    def pause(failures: int, uid: str) -> float:
        world = running()
        ended = [
            Attempt(attempt=number, start_time="2026-01-31T12:00:00Z", slots=2, outcome="Failed", counted=False)
            for number in range(1, failures)
        ]
        now = replace_attempt(world, failures)
        world.status = world.status.model_copy(update={"attempts": (*ended, now), "attempt": failures})
        rayjob = world.rayjobs.pop("job-a1")
        name = names.rayjob_name("job", failures)
        world.rayjobs[name] = replace(rayjob, name=name, attempt=failures)
        for pod in list(world.pods):
            world.change(pod, attempt=failures)
        world.status = world.status.model_copy(update={"ray_job_name": name})
        out_of_memory(world, world.worker().name)
        seen = world.observe(fresh=True)
        plan = decide(replace(seen, job=replace(seen.job, uid=uid)), world.now, world.settings)
        assert plan.requeue_after is not None
        assert plan.status.phase == "Restarting"
        return plan.requeue_after

    pauses = [pause(failures, "a") for failures in (1, 2, 3, 4, 9)]
    assert all(base <= real <= base * 1.2 for base, real in zip((10, 20, 40, 80), pauses, strict=False))
    assert pauses[-1] == 300
    assert pause(1, "a") == pauses[0]
    assert pause(1, "b") != pauses[0]


def replace_attempt(world: World, number: int) -> Attempt:
    return world.status.attempts[-1].model_copy(update={"attempt": number})


def test_all_attempts_share_a_deadline_without_the_queue() -> None:
    spec = {**SFT, "runPolicy": {"activeDeadlineSeconds": 1000, "restartBackoffSeconds": 0}}
    world = World(spec=spec, labels={names.QUEUE: "team"})
    world.settle()
    world.wait(5000)
    world.settle()
    world.admit()
    world.run_to(3)
    world.wait(600)
    world.end(5)
    world.ray_tells()
    world.settle()
    assert (world.status.active_seconds, world.phase) == (600, "Restarting")
    world.start_again()
    world.wait(5000)
    world.admit()
    world.run_to(15)
    assert world.phase == "Running"
    world.wait(401)
    world.settle()
    assert world.phase == "Failed"
    assert next(each.reason for each in world.status.conditions if each.type == "Failed") == "DeadlineExceeded"
    assert world.live is None


@each_case(
    ("node", "seconds", "is_forced"),
    [
        (None, 0, True),
        (ObservedNode(name="node-0", ready=False, not_ready_since=START, schedulable=True, labels={}), 119, False),
        (ObservedNode(name="node-0", ready=False, not_ready_since=START, schedulable=True, labels={}), 121, True),
        (ObservedNode(name="node-0", ready=True, schedulable=True, labels={}), 10_000, False),
        (
            ObservedNode(
                name="node-0",
                ready=False,
                schedulable=True,
                labels={},
                taints=(("node.kubernetes.io/out-of-service", "", "NoExecute"),),
            ),
            0,
            True,
        ),
    ],
)
def test_a_pod_is_forced_only_when_no_kubelet_will_end_it(
    node: ObservedNode | None, seconds: int, is_forced: bool
) -> None:
    world = running(nodes=(replace(NODES[0], name="node-0"), *NODES[1:]))
    doomed = next(pod for pod in world.pods.values() if pod.node == "node-0")
    world.end(5)
    world.settle()
    world.nodes = (*((node,) if node else ()), *NODES[1:])
    world.rayjobs.clear()
    world.pods = {doomed.name: replace(doomed, deleting_since=world.now, ready=False)}
    world.wait(seconds)
    world.settle()
    assert (doomed.name not in world.pods) == is_forced


@pytest.mark.parametrize("nodes_are_readable", [True, False])
def test_two_minutes_after_a_lost_node_it_goes_on_elsewhere(nodes_are_readable: bool) -> None:
    world = running(nodes=NODES if nodes_are_readable else None)
    lost, begun = world.head().node, world.now
    silent = replace(NODES[0], name=lost, ready=False, not_ready_since=begun)
    if nodes_are_readable:
        world.nodes = (silent, *(each for each in NODES if each.name != lost))
    for pod in [each.name for each in world.pods.values() if each.node == lost]:
        world.change(pod, ready=False, not_ready_since=begun, silent_since=begun)
    world.wait(60)
    world.settle()
    world.collect()
    world.settle()
    assert failed(world).reason == "NodeLost"
    training = next(each for each in world.status.conditions if each.type == "Training")
    assert training.message.endswith(f"is gone or given up, 120 s after {lost} ceased to be ready.")
    plan = world.operate()
    assert plan is not None
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 60
    world.wait(59)
    world.settle()
    assert {pod.node for pod in world.pods.values()} == {lost}
    world.wait(1)
    world.settle()
    assert {each.kind for each in world.events if each.reason == "PodGivenUp"} == {"Warning"}
    world.run_to(15)
    assert (world.phase, world.made) == ("Running", ["job-a1", "job-a2"])
    assert lost not in {pod.node for pod in world.pods.values()} or not nodes_are_readable
    assert (world.now - begun).total_seconds() == 120


def test_failures_of_the_cluster_are_told_with_their_rate() -> None:
    world = running(spec={**SFT, "runPolicy": {"backoffLimit": 0}})
    for number in range(1, 5):
        world.change(world.worker().name, phase="Failed", ready=False, disruption="EvictionByEvictionAPI")
        world.settle()
        told = f"; {number} of the last {number} attempts failed within an hour, uncounted"
        assert failed(world).message.endswith(told) == (number > 1)
        assert world.events[-1].message.endswith(failed(world).message)
        world.start_again()
        world.run_to(1)
    assert (world.phase, world.status.failed_attempts) == ("Running", 0)


def refuse_container(world: World) -> None:
    """The kubelet cannot make a container of the next attempt, in which nothing has run."""
    world.make_pods()
    waiting = ObservedContainer(name=names.HEAD_CONTAINER, waiting_reason="CreateContainerError")
    world.change(world.head().name, containers=(waiting,))
    world.wait(evidence.START_SECONDS["ImagePull"])
    world.settle()


def test_where_nothing_ran_only_a_second_time_in_a_row_counts() -> None:
    world = World(spec={**SFT, "runPolicy": {"backoffLimit": 1}})
    world.settle()
    counts = []
    for _ in range(2):
        refuse_container(world)
        counts.append(world.status.failed_attempts)
        world.start_again()
    world.run_to(5)
    out_of_memory(world, world.worker().name)
    world.settle()
    assert (failed(world).reason, world.phase) == ("OutOfMemory", "Failed")
    assert [*counts, world.status.failed_attempts] == [0, 1, 2]


def test_a_clock_that_is_set_back_does_not_stop_a_job() -> None:
    world = running()
    world.end(5)
    world.ray_tells()
    world.settle()
    world.wait(-86_400)
    world.collect()
    world.settle()
    assert world.made == ["job-a1", "job-a2"]
    assert world.now < START - timedelta(hours=1)
